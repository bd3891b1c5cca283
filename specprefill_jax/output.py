"""What a generation gives back."""

from dataclasses import dataclass

from specprefill_jax.decode import TokenLogprobs
from specprefill_jax.selection import Selection
from specprefill_jax.timing import Timings


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
