"""RULER's two scores: references looked for in an output as they stand, whatever their case."""

import re
from collections.abc import Callable, Sequence

from specprefill_jax.errors import argument_error

_CONTROL = re.compile(r"[\x00-\x1f]")


def match_all(output: str, references: Sequence[str]) -> float:
    """The share of the references that the output holds, from 0 to 1."""
    found = _found(output, references)
    return sum(found) / len(found)


def match_part(output: str, references: Sequence[str]) -> float:
    """1 if the output holds any of the references, else 0."""
    return float(any(_found(output, references)))


def string_match_all(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The mean of `match_all` over the samples, times 100, to two decimals."""
    return _mean(match_all, outputs, references)


def string_match_part(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """The mean of `match_part` over the samples, times 100, to two decimals."""
    return _mean(match_part, outputs, references)


def _found(output: str, references: Sequence[str]) -> list[bool]:
    """Which references the output holds, after every control character in it became a line break."""
    if isinstance(references, str) or not references:
        raise argument_error("references", references, "a list of at least one text")
    text = _CONTROL.sub("\n", output.strip()).strip().lower()
    return [reference.lower() in text for reference in references]


def _mean(
    score: Callable[[str, Sequence[str]], float], outputs: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
    if not outputs or len(outputs) != len(references):
        raise argument_error("outputs", len(outputs), f"as many as there are references, {len(references)}, and not 0")
    scores = [score(output, wanted) for output, wanted in zip(outputs, references, strict=True)]
    return round(sum(scores) / len(scores) * 100, 2)
