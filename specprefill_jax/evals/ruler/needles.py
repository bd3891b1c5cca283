"""Needles in a haystack: sentences that tell secret values, hidden in noise, in essays, or among others like them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from specprefill_jax.evals.ruler import wording
from specprefill_jax.evals.ruler.making import SHORT, Maker, Sample
from specprefill_jax.evals.ruler.sources import Sources
from specprefill_jax.evals.ruler.stream import Stream

DEPTHS = tuple(round(step * 100 / 39) for step in range(40))
"""How deep in an essay, in percent of its sentences, a needle may lie: forty steps from 0 to 100."""

Kind = Literal["word", "number", "uuid"]


def needles(
    length: int,
    sources: Sources,
    *,
    haystack: Literal["noise", "essay", "needles"],
    key: Kind = "word",
    value: Kind = "number",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
) -> Maker:
    """Samples with `keys` keys of `values` values each, of which `queries` keys are asked for.

    A size counts lines of noise, words of essays, or further needles; the keys are as many as are asked for at least.
    """
    keys = max(keys, queries)
    essays = sources.essays if haystack == "essay" else None
    draw_key, draw_value = _drawer(key, sources), _drawer(value, sources)
    tell = partial(wording.needle, value)

    def make(draw: Stream, _: int, size: int) -> Sample:
        taken: set[str] = set()
        names = draw.distinct(draw_key, keys, taken)
        secrets = draw.distinct(draw_value, keys * values, taken)
        told = [(names[at // values], secret) for at, secret in enumerate(secrets)]
        asked = draw.sample(range(keys), queries)
        outputs = tuple(secret for at in asked for secret in secrets[at * values : (at + 1) * values])
        hidden = draw.shuffled(told)
        if essays:
            depths = sorted(draw.sample(DEPTHS, len(hidden)))
            lines = essays.first(size)
            gaps = [len(lines) * depth // 100 for depth in depths]
        else:
            gaps = sorted(draw.sample(range(size + 1), len(hidden)))
            depths = [round(gap * 100 / size) for gap in gaps]
            lines = [wording.NOISE] * size
            if haystack == "needles":
                others = draw.distinct(draw_key, size, taken), draw.distinct(draw_value, size, taken)
                lines = [tell(*other) for other in zip(*others, strict=True)]
        text = (" " if essays else "\n").join(insert(lines, gaps, [tell(*pair) for pair in hidden]))
        question, prefix = wording.needle_question(value, text, [names[at] for at in asked], len(outputs))
        depth_of = {secret: depth for (_, secret), depth in zip(hidden, depths, strict=True)}
        made_from: dict[str, Any] = {"haystack": haystack, "size": size, "needles": len(hidden)}
        made_from["depths"] = [depth_of[secret] for secret in outputs]
        if essays:
            made_from |= {"essays": essays.made_from, "sentences": essays.splitter}
        if key == "word":
            made_from |= {"words": sources.words.made_from}
        return Sample(question, prefix, outputs, made_from)

    increment = (50 if length < SHORT else 500) if essays else (5 if length < SHORT else 25)
    return Maker(make, least=keys * values, increment=increment)


def insert(lines: Sequence[str], gaps: Sequence[int], new: Sequence[str]) -> list[str]:
    """The lines with `new[i]` in front of line `gaps[i]`; gaps ascend, and the last may lie behind the last line."""
    found, at = [], 0
    for gap, line in zip(gaps, new, strict=True):
        found += [*lines[at:gap], line]
        at = gap
    return [*found, *lines[at:]]


def _drawer(kind: Kind, sources: Sources) -> Callable[[Stream], str]:
    if kind == "number":
        return lambda draw: str(1_000_000 + draw.below(9_000_000))
    if kind == "uuid":
        return _uuid
    words = sources.words
    return lambda draw: f"{draw.choice(words.adjectives)}-{draw.choice(words.nouns)}"


def _uuid(draw: Stream) -> str:
    """A UUID of version 4, which leaves 122 of its bits to chance."""
    digits = "".join(f"{draw.below(1 << 32):08x}" for _ in range(4))
    digits = f"{digits[:12]}4{digits[13:16]}{8 + draw.below(4):x}{digits[17:]}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
