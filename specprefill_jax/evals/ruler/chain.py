"""Variable tracking: a number is copied from box to box through noise; all boxes that hold it are asked for."""

from itertools import pairwise

from specprefill_jax.evals.ruler import wording
from specprefill_jax.evals.ruler.making import SHORT, Maker, Sample
from specprefill_jax.evals.ruler.needles import insert
from specprefill_jax.evals.ruler.sources import Sources
from specprefill_jax.evals.ruler.stream import Stream

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def chain(length: int, _: Sources, *, hops: int = 4) -> Maker:
    """Samples of one chain of `hops` copies, behind a solved one among a few lines; a size counts lines of noise."""
    step = 5 if length < SHORT else 10

    def make(draw: Stream, index: int, size: int) -> Sample:
        taken: set[str] = set()
        solved, prefix, names, _ = _one(draw, step, hops, taken)
        example = f"{solved}\n{prefix} {wording.listing(names)}."
        question, prefix, names, depths = _one(draw, size, hops, taken)
        made_from = {"haystack": "noise", "size": size, "needles": hops + 1, "depths": depths}
        return Sample(f"{example}\n\n{question}", prefix, tuple(names), made_from)

    return Maker(make, least=hops, increment=step)


def _one(draw: Stream, size: int, hops: int, taken: set[str]) -> tuple[str, str, list[str], list[int]]:
    """(input, answer prefix, the names in the order of the chain, their depths in percent)."""
    names = draw.distinct(_name, hops + 1, taken)
    [value] = draw.distinct(lambda draw: str(10_000 + draw.below(90_000)), 1, taken)
    links = [wording.assignment(names[0], value)]
    links += [wording.copy(name, other) for other, name in pairwise(names)]
    gaps = sorted(draw.sample(range(size + 1), hops + 1))
    text = "\n".join(insert([wording.NOISE] * size, gaps, links))
    return *wording.chain_question(text, value, hops + 1), names, [round(gap * 100 / size) for gap in gaps]


def _name(draw: Stream) -> str:
    return "".join(draw.choice(_LETTERS) for _ in range(5))
