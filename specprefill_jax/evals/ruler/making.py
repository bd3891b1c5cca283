"""What every kind of task gives: one sample of any size."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specprefill_jax.evals.ruler.stream import Stream

SHORT = 4096
"""Below so many tokens some tasks are made in smaller steps, and cwe repeats its words less."""


@dataclass(frozen=True)
class Sample:
    """One text with a question, not yet measured."""

    input: str
    answer_prefix: str
    outputs: tuple[str, ...]
    made_from: Mapping[str, Any]


@dataclass(frozen=True)
class Maker:
    """How samples of one task and length are made."""

    make: Callable[[Stream, int, int], Sample]
    """From a stream of draws, the number of the sample and a size; the same draws hide the same needles in any size."""
    least: int
    """The smallest size there is."""
    increment: int
    """By how much a sample that is too long is made smaller."""
    choices: int | None = None
    """How many different samples there are; None for any number."""
