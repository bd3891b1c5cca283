"""Rows of a task at a length: the size is searched for once, then each sample is made to fit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from specprefill_jax.config import check_integer
from specprefill_jax.errors import argument_error
from specprefill_jax.evals.ruler.making import Maker
from specprefill_jax.evals.ruler.sources import Sources
from specprefill_jax.evals.ruler.stream import Stream
from specprefill_jax.evals.ruler.tasks import TASKS
from specprefill_jax.evals.ruler.wording import OWN

if TYPE_CHECKING:
    from specprefill_jax.tokens import Tokenizer


def plain(text: str) -> str:
    """An input as it stands, for models without a chat template."""
    return f"{text}\n"


@dataclass(frozen=True)
class Row:
    """One sample of a task."""

    task: str
    index: int
    seed: int
    max_length: int
    """The length that was asked for, in tokens."""
    length: int
    """Tokens of the whole prompt and the longest answer: at most `max_length`."""
    input: str
    answer_prefix: str
    """The start of the answer, which is given."""
    outputs: tuple[str, ...]
    """The texts that a right answer holds: all, or for qa any of them."""
    made_from: Mapping[str, Any]
    """`haystack` and its `size`, the texts it is from, and where in it the needles are: `depths` holds for each of
    `outputs` how deep it lies, in percent, and `gold` the numbers of the documents with the answer."""
    wording: str = OWN

    @property
    def question(self) -> str:
        """What is asked: the input's last paragraph, in all wording."""
        return self.input.rsplit("\n\n", 1)[-1]

    def prompt(self, wrap: Callable[[str], str] = plain) -> str:
        """The whole prompt: the chat around the input, then the start of the answer."""
        return wrap(self.input) + self.answer_prefix


class Prompting(NamedTuple):
    """How prompts are measured and wrapped for a model; arguments of `generate`."""

    count_tokens: Callable[[str], int]
    """The tokens of a whole prompt."""
    wrap: Callable[[str], str] = plain
    """The chat around an input, up to where the answer begins."""


def prompting(tokenizer: "Tokenizer") -> Prompting:
    """A model's own: its chat template where it has one, else the plain text, with BOS where the tokenizer adds it."""
    if not tokenizer.has_chat_template:
        return Prompting(lambda text: len(tokenizer.encode(text)))
    return Prompting(
        lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
        lambda text: tokenizer.render_chat([{"role": "user", "content": text}]),
    )


def generate(
    task: str,
    *,
    length: int,
    samples: int,
    seed: int = 42,
    count_tokens: Callable[[str], int],
    wrap: Callable[[str], str] = plain,
    sources: Sources | None = None,
) -> Iterator[Row]:
    """Rows of a task, each as long as it may be; the same for the same arguments, in any process and Python version.

    Arguments are looked at, and the size of the haystack is found, before this returns. The size is the largest at
    which the first sample is at most `length` tokens; a sample that is longer loses one increment until it fits. A
    question is passed over where not even the documents with its answer fit.

    Args:
        task: a key of `TASKS`.
        length: most tokens of a row, the chat around it and its longest answer included.
        samples: how many rows.
        seed: rows of the same seed and index hide the same needles, whatever the length.
        count_tokens: the tokens of a whole prompt; see `prompting`.
        wrap: the chat around an input, up to where the answer begins.
        sources: where texts are read from; by default essays are fetched, and the qa tasks have none.

    Raises:
        ArgumentError: an argument is not allowed; for a length that is too small the least one is told.
        CheckpointError: the essays cannot be fetched.
    """
    if task not in TASKS:
        raise argument_error("task", task, f"one of {', '.join(TASKS)}")
    check_integer("length", length, 1)
    check_integer("samples", samples, 1)
    check_integer("seed", seed, 0)
    making = _Making(task, length, seed, count_tokens, wrap, sources or Sources())
    available = making.maker.choices
    if available is not None and available < samples:
        raise argument_error("samples", samples, f"at most {available}, for so many questions does task {task} have")
    pool = range(samples if available is None else available)
    fitting = list(islice((index for index in pool if making.row(index, making.maker.least).length <= length), samples))
    if len(fitting) < samples:
        raise argument_error("length", length, f"at least {_least_length(making, samples)} for so many rows of {task}")
    return making.rows(fitting, making.largest_size(fitting[0]))


def _least_length(making: "_Making", samples: int) -> int:
    """The shortest length at which as many samples of the smallest size fit."""
    while True:
        maker = making.maker
        pool = range(samples if maker.choices is None else maker.choices)
        needed = sorted(making.row(index, maker.least).length for index in pool)[samples - 1]
        if needed <= making.length:
            return making.length
        making = replace(making, length=needed)  # a longer one may be made by other rules


@dataclass(frozen=True)
class _Making:
    """All that the rows of one call have in common."""

    task: str
    length: int
    seed: int
    count_tokens: Callable[[str], int]
    wrap: Callable[[str], str]
    sources: Sources

    @cached_property
    def maker(self) -> Maker:
        return TASKS[self.task].maker(self.length, self.sources)

    def row(self, index: int, size: int) -> Row:
        """Sample `index` at a size, however long that is."""
        sample = self.maker.make(Stream(self.seed, self.task, index), index, size)
        row = Row(
            task=self.task,
            index=index,
            seed=self.seed,
            max_length=self.length,
            length=0,
            input=sample.input,
            answer_prefix=sample.answer_prefix,
            outputs=sample.outputs,
            made_from=sample.made_from,
        )
        return replace(row, length=self.count_tokens(row.prompt(self.wrap)) + TASKS[self.task].answer_tokens)

    def largest_size(self, index: int) -> int:
        """The largest size at which sample `index`, which fits at the least one, fits.

        Bounds are found by doubling: where they begin makes no difference to the end of a binary search.
        """
        fits = self.maker.least
        too_long = fits + self.maker.increment
        while self.row(index, too_long).length <= self.length:
            if too_long > 8 * self.length:
                raise argument_error("count_tokens", self.count_tokens, "a count that grows with the text")
            fits, too_long = too_long, 2 * too_long
        while too_long - fits > 1:
            middle = (fits + too_long) // 2
            if self.row(index, middle).length <= self.length:
                fits = middle
            else:
                too_long = middle
        return fits

    def rows(self, indices: Sequence[int], size: int) -> Iterator[Row]:
        """The samples, each of that size or of the next smaller one at which it fits."""
        for index in indices:
            smaller = size
            while (row := self.row(index, smaller)).length > self.length:
                smaller = max(self.maker.least, smaller - self.maker.increment)
            yield row
