"""Chat prompts: their token ids, and which spans of them must be read whatever their scores.

What may be dropped lies inside the long contents of user, assistant and tool messages. All else is forced: system
prompt, tool schemas, headers, tool calls, marks of turns. So where a template does something with a content that
cannot be followed, more is forced and never less.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from specprefill_jax.errors import TokenizerError
from specprefill_jax.tokens import Tokenizer

QUESTION_TOKENS = 256
"""The last user message, or a text part of it, is forced whole up to this length: it is the question."""

HEAD_TOKENS = 32
TAIL_TOKENS = 64
"""Of a longer last user message so many tokens at its ends are forced: a question comes before or after a document."""

DROPPABLE_ROLES = frozenset({"user", "assistant", "tool", "function", "ipython"})
"""Whose contents may be dropped; the latter two are other names of tool results. All other roles instruct."""

_INSET = 64  # characters; longer than any tag that a template looks for at the ends of a content
_MARKS = re.compile("([\U000f0000-\U0010ffff])")

Messages = Sequence[Mapping[str, Any]]
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class ChatPrompt:
    """A chat as token ids, and what of it must be read."""

    ids: list[int]

    forced_spans: Spans
    """Spans [start, end) of token offsets, ascending, none empty, no two touching."""

    generation_tail: int
    """Tokens behind the last content that was found, so the header of the answer and the mark that ends the last turn;
    0 where no header was asked for."""


class _Content(NamedTuple):
    """Characters [start, end) of the render that stand for (the inner part of) one text of a message."""

    start: int
    end: int
    message: int


def encode_chat(
    tokenizer: Tokenizer,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    variables: Mapping[str, object] | None = None,
) -> ChatPrompt:
    """Token ids of a chat, those of `Tokenizer.encode_chat`, with the spans of them that must be read.

    Forced is all that the template wrote around the contents, the contents of system messages (and of roles that are
    not known), and of the last user message the whole or both ends (`QUESTION_TOKENS`, `HEAD_TOKENS`, `TAIL_TOKENS`).
    A token that lies partly in something forced is forced.

    The contents are found by rendering again with marks around them, which is believed only if it gives the same text
    but for the marks; if it does not, with marks further inside; if that does not either, by looking for the contents
    in the text, where each must be there, in order, and in one place only. What is not found is forced.

    Raises what `Tokenizer.render_chat` and `Tokenizer.encode` raise.
    """
    render = partial(
        tokenizer.render_chat, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
    )
    text = render(messages)
    ids, offsets = tokenizer.encode_with_offsets(text)
    starts, ends = _covers(offsets)
    contents = _contents(render, messages, text)
    spans, at = [], 0
    for start, end in _droppable(contents, messages, starts, ends):
        if at < start:
            spans.append((at, start))
        at = end
    if at < len(ids):
        spans.append((at, len(ids)))
    tail = 0
    if add_generation_prompt:
        last = max((content.end for content in contents), default=0)
        tail = len(ids) - int(np.searchsorted(ends, last, "right"))
    return ChatPrompt(ids, tuple(spans), tail)


def _covers(offsets: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """First and past-the-last character of each token, int64 [M] each, both ascending.

    A character that no token claims (tokenizers may leave out the space before a word) counts to both its neighbours.
    """
    pairs = np.asarray(offsets, np.int64).reshape(-1, 2)
    first = np.minimum.accumulate(pairs[::-1, 0])[::-1]
    past = np.maximum.accumulate(pairs[:, 1])
    starts, ends = first.copy(), past.copy()
    starts[1:] = np.minimum(first[1:], past[:-1])
    ends[:-1] = np.maximum(past[:-1], first[1:])
    return starts, ends


def _droppable(
    contents: Sequence[_Content], messages: Messages, starts: np.ndarray, ends: np.ndarray
) -> Iterator[tuple[int, int]]:
    """The token spans that need not be read, ascending."""
    lows = np.searchsorted(starts, [content.start for content in contents], "left").tolist()
    highs = np.searchsorted(ends, [content.end for content in contents], "right").tolist()
    last = max((number for number, message in enumerate(messages) if message["role"] == "user"), default=-1)
    question = [number for number, content in enumerate(contents) if content.message == last]
    for content, low, high in zip(contents, lows, highs, strict=True):
        if messages[content.message]["role"] not in DROPPABLE_ROLES:
            continue
        if content.message == last:
            if high - low <= QUESTION_TOKENS:
                continue
            low = max(low, lows[question[0]] + HEAD_TOKENS)
            high = min(high, highs[question[-1]] - TAIL_TOKENS)
        if low < high:
            yield low, high


def _contents(render: Callable[[Messages], str], messages: Messages, text: str) -> list[_Content]:
    """Where the contents lie in their render `text`, ascending and apart; those not found are left out."""
    texts = [(number, part) for number, message in enumerate(messages) for part in _texts(message)]
    taken = set(text).union(*(part for _, part in texts))
    free = (chr(code) for code in range(0xF0000, 0x10FFFE) if code & 0xFFFF < 0xFFFE and chr(code) not in taken)
    marks = list(islice(free, 2 * len(texts)))
    if len(marks) == 2 * len(texts):
        for inset in (0, _INSET):
            marked = _marked([part for _, part in texts], marks, inset)
            try:
                rendered = render([_with_texts(message, marked) for message in messages])
            except TokenizerError:  # a template that does not take such a content
                continue
            plain, found = _read_marks(rendered, marks)
            if plain == text:
                return [_Content(start, end, texts[number][0]) for start, end, number in found]
    return _search(text, texts)


def _texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [part["text"] for part in content if _is_text(part)] if isinstance(content, list) else []


def _with_texts(message: Mapping[str, Any], texts: Iterator[str]) -> dict[str, Any]:
    """The message with the next of `texts` in place of each that `_texts` gives."""
    content = message.get("content")
    if isinstance(content, str):
        content = next(texts)
    elif isinstance(content, list):
        content = [{**part, "text": next(texts)} if _is_text(part) else part for part in content]
    return {**message, "content": content}


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _marked(texts: Sequence[str], marks: Sequence[str], inset: int) -> Iterator[str]:
    """Each text with its two marks `inset` characters within its outer white space, which templates may trim."""
    for number, text in enumerate(texts):
        start = len(text) - len(text.lstrip()) + inset
        end = len(text.rstrip()) - inset
        if start < end:
            text = text[:start] + marks[2 * number] + text[start:end] + marks[2 * number + 1] + text[end:]
        yield text


def _read_marks(rendered: str, marks: Sequence[str]) -> tuple[str, list[tuple[int, int, int]]]:
    """The text without marks; where (start, end) in it each text (number) lies whose marks follow each other."""
    numbers = {mark: number for number, mark in enumerate(marks)}
    plain, found = [], []
    at, opened, since = 0, -1, 0
    for piece in _MARKS.split(rendered):
        number = numbers.get(piece)
        if number is None:
            plain.append(piece)
            at += len(piece)
            continue
        if number % 2 and opened == number - 1:
            found.append((since, at, number // 2))
        opened, since = number, at
    return "".join(plain), found


def _search(text: str, texts: Sequence[tuple[int, str]]) -> list[_Content]:
    """Contents by their words: those whose first and last possible places, all being there in order, are the same."""
    kept = [(number, core) for number, part in texts if (core := part.strip())]
    cores = [core for _, core in kept]
    first = _places(text, cores)
    # Backwards by reversal, since str.rfind can take quadratic time where str.find does not.
    last = _places(text[::-1], [core[::-1] for core in reversed(cores)])
    if first is None or last is None:
        return []
    return [
        _Content(start, start + len(core), number)
        for (number, core), start, mirrored in zip(kept, first, reversed(last), strict=True)
        if start == len(text) - mirrored - len(core)
    ]


def _places(text: str, words: Sequence[str]) -> list[int] | None:
    """The first place of each word behind the one before, or None if one is missing."""
    places, at = [], 0
    for word in words:
        if (place := text.find(word, at)) < 0:
            return None
        places.append(place)
        at = place + len(word)
    return places
