"""Token indices and chunk scores as spans of text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from specprefill_jax.errors import argument_error
from specprefill_jax.selection import Selection

_REPLACEMENT = "\ufffd"
_LONGEST_PART = 3  # tokens of a character that is not complete: it has four bytes at most


@dataclass(frozen=True)
class Span:
    """A run of tokens of one chunk that were all kept or all dropped.

    Attributes:
        chunk: index of the chunk the tokens belong to.
        start: index of the first token.
        end: index past the last token.
        text: their text; the texts of all spans, joined, are the text of the prompt.
        kept: whether the main model read them.
        forced: whether they were kept whatever their score.
        score: the chunk's score, or None where nothing was scored.
        rank: 1 for the highest score; equal scores rank in the order of the text. None where nothing was scored.
        shade: where the score stands, on a logarithmic scale, between the lowest (0) and the highest (1) of the chunks
            that were not forced; 0 where nothing was scored.
    """

    chunk: int
    start: int
    end: int
    text: str
    kept: bool
    forced: bool = False
    score: float | None = None
    rank: int | None = None
    shade: float = 0.0


@dataclass(frozen=True)
class PromptMap:
    """A prompt cut into spans, in order.

    Attributes:
        spans: every token of the prompt is in exactly one of them.
        chunk_size: tokens in a chunk.
    """

    spans: tuple[Span, ...]
    chunk_size: int

    @cached_property
    def total_tokens(self) -> int:
        """Tokens of the prompt."""
        return self.spans[-1].end if self.spans else 0

    @cached_property
    def kept_tokens(self) -> int:
        """Tokens the main model read."""
        return sum(span.end - span.start for span in self.spans if span.kept)

    @cached_property
    def num_chunks(self) -> int:
        """Chunks of the prompt."""
        return self.spans[-1].chunk + 1 if self.spans else 0

    @cached_property
    def scored(self) -> bool:
        """Whether the chunks have scores: False when the prompt was read whole without asking the speculator."""
        return any(span.score is not None for span in self.spans)

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(span.text for span in self.spans)


def map_prompt(ids: Sequence[int], selection: Selection, decode: Callable[[Sequence[int]], str]) -> PromptMap:
    """Cut a prompt into spans of text that were kept or dropped together.

    Args:
        ids: token ids of the prompt [M].
        selection: what was chosen for exactly this prompt.
        decode: token ids to text, special tokens shown.

    Returns:
        The map; its text is exactly `decode(ids)`. A character whose bytes lie in two spans is in the later one.
    """
    if len(ids) != selection.num_tokens:
        raise argument_error("ids", f"{len(ids)} tokens", f"the {selection.num_tokens} tokens that were selected from")
    kept = np.zeros(len(ids), bool)
    kept[selection.kept_indices] = True
    forced = set(selection.forced_chunks) if selection.engaged else set()
    scores, size = selection.chunk_scores, selection.chunk_size
    ranks = shades = None
    if scores is not None:
        ranks, shades = _ranks(scores), _shades(scores, forced)

    starts = [0, *(index for index in range(1, len(ids)) if index % size == 0 or kept[index] != kept[index - 1])]
    ends = [*starts[1:], len(ids)]
    spans = []
    for start, end, text in zip(starts, ends, split_text(ids, ends, decode), strict=True):
        chunk = start // size
        span = Span(chunk, start, end, text, bool(kept[start]), chunk in forced)
        if scores is not None and ranks is not None and shades is not None:
            span = replace(span, score=float(scores[chunk]), rank=int(ranks[chunk]), shade=float(shades[chunk]))
        spans.append(span)
    return PromptMap(tuple(spans), size)


def split_text(ids: Sequence[int], ends: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Text of the tokens up to each of the ascending `ends`; the texts, joined, are exactly `decode(ids)`.

    A tokenizer decodes a token by what stands before it (leading spaces, bytes of one character), so a piece is what a
    window of tokens says more than the same window without them. An end inside a character steps back to its start.
    """
    full = decode(ids)
    cuts: list[int] = []
    start = read = base = 0  # the window [start:read] is context, and the text before token `read` is full[:base]
    context = ""
    for end in ends:
        clean, text = end, decode(ids[start:end])
        for clean in range(end, max(read, end - _LONGEST_PART) - 1, -1):
            before = decode(ids[start:clean])
            if not before.endswith(_REPLACEMENT):
                text = before
                break
        else:  # no character's part is that long: the bytes are no text
            clean = end
        base += max(0, len(text) - len(context))
        cuts.append(base)
        if clean > read:
            start, read = read, clean
            context = decode(ids[start:read])
    # Bytes that are no text may decode differently in a window: whatever they are, cuts stay in order and in the text.
    cuts = [int(cut) for cut in np.minimum(np.maximum.accumulate(cuts), len(full))]
    cuts[-1] = len(full)
    return [full[start:end] for start, end in zip([0, *cuts[:-1]], cuts, strict=True)]


def visible(text: str) -> str:
    """`text` with what acts on a terminal or a page (escape codes, text direction, surrogates) made visible and inert.

    Line feeds and tabs stay; carriage returns that end a line go.
    """
    return text.replace("\r\n", "\n").translate(_INERT)


def _ranks(scores: np.ndarray) -> np.ndarray:
    """Rank of each score [C], 1 the highest, ties to the lower index, as the selection breaks them."""
    ranks = np.empty(len(scores), np.int64)
    ranks[np.argsort(-scores, kind="stable")] = np.arange(1, len(scores) + 1)
    return ranks


def _shades(scores: np.ndarray, forced: set[int]) -> np.ndarray:
    """Shade of each score [C], 0 to 1; the attention sink and the tail, forced, would leave all else in one shade."""
    ranked = np.array([score for chunk, score in enumerate(scores) if chunk not in forced and score > 0])
    if not ranked.size or ranked.min() == ranked.max():
        return (scores > 0).astype(np.float64)
    low, high = np.log(ranked.min()), np.log(ranked.max())
    return np.clip((np.log(np.maximum(scores, ranked.min())) - low) / (high - low), 0, 1)


_INERT: dict[int, str] = (
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"}
    | {0x7F: "\u2421"}
    | {code: f"<U+{code:04X}>" for code in (*range(0x80, 0xA0), 0x061C, 0x200E, 0x200F, 0x2028, 0x2029)}
    | {code: f"<U+{code:04X}>" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFFFE, 0xFFFF)}
    | dict.fromkeys(range(0xD800, 0xE000), _REPLACEMENT)
)
