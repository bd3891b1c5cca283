"""What a generation gives back."""

from collections.abc import Collection
from dataclasses import dataclass

from specprefill_jax.config import SamplingParams
from specprefill_jax.decode import Decoded, TokenLogprobs
from specprefill_jax.selection import Selection
from specprefill_jax.timing import Timings
from specprefill_jax.tokens import StreamDecoder, Tokenizer


@dataclass(frozen=True)
class Output:
    """A finished generation."""

    text: str
    """The answer; without stop strings and special tokens. Empty for a model without a tokenizer."""
    token_ids: list[int]
    """Every generated token, the one that ended the answer included."""
    finish_reason: str
    """"stop": an end of sequence, stop id or stop string; "length": max_tokens or the context limit."""
    selection: Selection
    timings: Timings
    logprobs: list[TokenLogprobs] | None
    """One entry a token, where they were asked for."""
    proposed_tokens: int = 0
    """Tokens that the speculator proposed for the answer."""
    accepted_tokens: int = 0
    """Of these, so many were right."""


@dataclass(frozen=True)
class Piece:
    """A step of a stream: the text that became certain with one token."""

    text: str
    token_id: int | None
    """None in the closing piece."""
    output: Output | None
    """The whole result, in the closing piece only."""


class Answer:
    """An answer as its tokens come: its text, and whether it has ended."""

    def __init__(self, tokenizer: Tokenizer | None, sampling: SamplingParams, eos_token_ids: Collection[int]) -> None:
        """Start with no tokens; `eos_token_ids` end it unless `sampling` says to go on."""
        self.token_ids: list[int] = []
        self.stopped = False
        """Whether it has ended by an end of sequence, a stop id or a stop string."""
        self._ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
        self._decoder = StreamDecoder(tokenizer, sampling.stop) if tokenizer else None
        self._parts: list[str] = []
        self._logprobs: list[TokenLogprobs] | None = None if sampling.logprobs is None else []

    def push(self, token: Decoded) -> str:
        """Add a token; the text that becomes certain with it."""
        self.token_ids.append(token.token_id)
        if self._logprobs is not None and token.logprobs is not None:
            self._logprobs.append(token.logprobs)
        piece = self._decoder.push(token.token_id) if self._decoder else ""
        self._parts.append(piece)
        self.stopped = token.token_id in self._ends or (self._decoder is not None and self._decoder.stopped)
        return piece

    def close(self) -> str:
        """End it; the text that was held back."""
        closing = self._decoder.flush() if self._decoder else ""
        self._parts.append(closing)
        return closing

    def output(self, selection: Selection, timings: Timings, proposed: int = 0, accepted: int = 0) -> Output:
        """The whole of it, once it is closed; see `Output`."""
        reason = "stop" if self.stopped else "length"
        text = "".join(self._parts)
        return Output(text, self.token_ids, reason, selection, timings, self._logprobs, proposed, accepted)
