"""Questions to documents: those that hold the answer among others that do not."""

from typing import Literal

from specprefill_jax.evals.ruler import wording
from specprefill_jax.evals.ruler.making import SHORT, Maker, Sample
from specprefill_jax.evals.ruler.sources import Sources
from specprefill_jax.evals.ruler.stream import Stream


def questions(length: int, sources: Sources, *, dataset: Literal["squad", "hotpotqa"]) -> Maker:
    """Samples of the questions in the order of the file; a size counts documents.

    Documents on the same matter are the first distractors, then any; where the file has too few, they come again.
    Those that hold the answer are always there, and once.
    """
    data = sources.squad if dataset == "squad" else sources.hotpotqa

    def make(draw: Stream, index: int, size: int) -> Sample:
        asked = data.questions[index]
        count = max(size, len(asked.gold)) - len(asked.gold)
        order = draw.shuffled(asked.near)
        if count > len(order):
            apart = {*asked.gold, *asked.near}
            others = [number for number in range(len(data.documents)) if number not in apart]
            order += draw.sample(others, min(count - len(order), len(others)))
        rounds = -(-count // len(order)) if order else 0
        numbers = draw.shuffled([*asked.gold, *(order * rounds)[:count]])
        text, prefix = wording.document_question([data.documents[number] for number in numbers], asked.text)
        gold = [numbers.index(number) + 1 for number in asked.gold]
        made_from = {"haystack": dataset, "size": len(numbers), "question": index, "gold": gold}
        return Sample(text, prefix, asked.answers, {**made_from, "documents": data.made_from})

    return Maker(make, least=1, increment=1 if length < SHORT else 10, choices=len(data.questions))
