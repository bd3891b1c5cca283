"""One question to a model, of whatever benchmark: what the runner asks, and how the answer is scored."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from specprefill_jax.errors import argument_error
from specprefill_jax.tokens import Tokenizer


def parsed_row(line: str, where: str) -> dict[str, Any]:
    """One line of a benchmark's file; ArgumentError, which names `where`, for what is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        row = None
    if not isinstance(row, dict):
        raise argument_error(where, line, "a JSON object")
    return row


class Graded(NamedTuple):
    """A score, 0 to 1, and what else is known of how an answer was scored."""

    score: float
    notes: Mapping[str, Any]
    """Further fields of the row; JSON-ready, and the same for the same answer."""


@dataclass(frozen=True)
class Sample:
    """One question; frozen, so that a runner may keep it."""

    benchmark: str
    """Such as "longbench"."""
    task: str
    key: str
    """Names the sample within its task, bucket and benchmark."""
    input: str | tuple[int, ...]
    """The prompt without a chat template, or the token ids of the whole prompt as they are to be read."""
    outputs: tuple[str, ...]
    """References."""
    score: Callable[[str], float | Graded]
    """What an answer is worth, 0 to 1."""
    max_tokens: int
    """Most tokens of an answer."""
    category: str = ""
    """What tables average over, beside the task."""
    bucket: str = ""
    """The length as tables show it, such as "4096" or "4-8k"."""
    length: int | None = None
    """The length as the benchmark gives it."""
    chat: bool = True
    """Whether the input goes through the chat template, as one message of the user."""
    answer_prefix: str = ""
    """The beginning of the answer, given: stands after the template's generation header."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""
    question: str = ""
    """What is asked about the text, for ways of choosing that look for it; "" where it cannot be told apart."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the row, such as whose wording the prompt has; JSON-ready."""

    @property
    def name(self) -> str:
        """Benchmark, task, bucket and key: no other sample of a results folder has the same."""
        return "/".join((self.benchmark, self.task, self.bucket, self.key))

    def grade(self, answer: str) -> Graded:
        """What an answer is worth, with whatever `score` said beside."""
        found = self.score(answer)
        return found if isinstance(found, Graded) else Graded(float(found), {})


def prompt_ids(sample: Sample, tokenizer: Tokenizer | None) -> np.ndarray:
    """The token ids of a sample's whole prompt, int32 [M].

    Raises:
        ArgumentError: a text, and no tokenizer.
        TokenizerError: a chat, and no template.
    """
    if not isinstance(sample.input, str):
        return np.asarray(sample.input, np.int32)
    if tokenizer is None:
        raise argument_error("input", sample.input, "token ids, as the main model has no tokenizer")
    text, special = _prompt_text(sample.input, sample, tokenizer)
    return np.asarray(tokenizer.encode(text, add_special_tokens=special), np.int32)


def _prompt_text(text: str, sample: Sample, tokenizer: Tokenizer) -> tuple[str, bool]:
    """The whole prompt of an input, and whether the tokenizer is to add its BOS."""
    if sample.chat:
        return tokenizer.render_chat([{"role": "user", "content": text}]) + sample.answer_prefix, False
    return text + sample.answer_prefix, True


def true_answer(sample: Sample) -> str:
    """An answer that is right: the first reference, or all of them where the score wants all."""
    first, every = sample.outputs[0], ", ".join(sample.outputs)
    return first if sample.grade(first).score >= sample.grade(every).score else every


def true_answer_ids(sample: Sample, tokenizer: Tokenizer | None) -> list[int]:
    """The tokens of `true_answer` as they would follow the prompt, after a space where the prompt ends in a word.

    Raises:
        ArgumentError: no tokenizer.
        TokenizerError: a chat, and no template.
    """
    if tokenizer is None:
        raise argument_error("tokenizer", None, "the main model's, for answers are texts")
    answer = true_answer(sample)
    alone = tokenizer.encode(answer, add_special_tokens=False)
    if not isinstance(sample.input, str):
        return alone
    text, special = _prompt_text(sample.input, sample, tokenizer)
    gap = " " if answer and text and text[-1].isascii() and not text[-1].isspace() else ""
    ids = tokenizer.encode(text, add_special_tokens=special)
    whole = tokenizer.encode(text + gap + answer, add_special_tokens=special)
    # Where the end of the prompt and the answer became one token, the prompt would not be the one that is read.
    return whole[len(ids) :] if whole[: len(ids)] == ids else alone
