"""What goes into the engine and what comes out of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from specprefill_jax.config import SamplingParams, SpecPrefillConfig, check_integer, check_real
from specprefill_jax.decode import TokenLogprobs
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.models.paged import PAGE
from specprefill_jax.selection import Selection
from specprefill_jax.timing import PhaseClock, Timings

MAX_DRAFT_TOKENS = 16
"""With the last token fewer than a page holds, or the cache would write them as whole pages."""

FinishReason = Literal["stop", "length", "abort", "error"]


class QueueFullError(SpecPrefillError):
    """The engine takes no more requests for now; `retry_after` is a guess in seconds of when it may again."""

    def __init__(self, message: str, retry_after: float):
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(SpecPrefillError):
    """The engine takes no requests at all: it is loading, draining or broken."""


@dataclass(frozen=True)
class EngineConfig:
    """The engine's limits. A value that is not allowed raises `errors.ArgumentError`."""

    max_running: int = 16
    """Requests that decode at the same time."""

    prefill_chunk: int = 512
    """Prompt tokens that are read between two decode steps, at most: a multiple of 32. Running streams never wait
    longer than one such chunk takes."""

    max_model_len: int | None = None
    """Tokens of prompt and answer together; None: the main model's context."""

    cache_tokens: int | None = None
    """Tokens that the main model's KV cache holds; None: by the memory that is free."""

    speculator_cache_tokens: int | None = None
    """Tokens that the speculator's KV cache holds; None: by the memory that is free."""

    max_queued_requests: int = 256
    """Requests that may wait to be read; more are refused."""

    max_queued_tokens: int = 1_000_000
    """Prompt tokens that may wait to be read; a request that would pass it is refused unless it would wait alone."""

    memoised_selections: int = 256
    """Selections that are remembered by prompt and settings, so that the same prompt is not speculated twice."""

    draft_tokens: int = 0
    """Tokens that the speculator proposes in a step of decoding, at most, for the main model to check in one pass;
    fewer, or none, where few are right. Answers are those of plain decoding. 0: plain decoding."""

    stuck_after: float = 120.0
    """Seconds after which a device step that has not ended makes the engine unhealthy."""

    def __post_init__(self) -> None:
        for name in ("max_running", "max_queued_requests", "max_queued_tokens", "memoised_selections"):
            object.__setattr__(self, name, check_integer(name, getattr(self, name), 1))
        allowed = f"a multiple of {PAGE}, at least {PAGE}"
        chunk = check_integer("prefill_chunk", self.prefill_chunk, PAGE, allowed=allowed)
        object.__setattr__(
            self, "prefill_chunk", check_integer("prefill_chunk", chunk // PAGE * PAGE, chunk, chunk, allowed)
        )
        check_integer("draft_tokens", self.draft_tokens, 0, MAX_DRAFT_TOKENS)
        for name in ("max_model_len", "cache_tokens", "speculator_cache_tokens"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_integer(name, getattr(self, name), PAGE))
        seconds = check_real("stuck_after", self.stuck_after, "a finite number above 0", lambda x: x > 0)
        object.__setattr__(self, "stuck_after", seconds)


@dataclass(frozen=True)
class Request:
    """One prompt and what is wanted of it. Its fields check themselves; `Engine.submit` checks that it fits."""

    request_id: str
    """Unique among the requests that are not finished."""

    prompt: np.ndarray
    """int32 [M] token ids."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    config: SpecPrefillConfig = field(default_factory=SpecPrefillConfig)
    """How the prompt is read; `forced_spans` holds what the chat template says must stay."""

    generation_tail: int = 0
    """Tokens of the chat template's generation header at the prompt's end; always kept."""

    prompt_logprobs: int | None = None
    """Log-probabilities of the prompt's own tokens and of so many of the likeliest at each place; None for none.
    Such a prompt is read whole."""

    draft_tokens: int | None = None
    """Proposals of the speculator in a step of decoding, at most; None: as many as the engine makes, which no request
    can raise. 0: plain decoding."""

    clock: PhaseClock = field(default_factory=PhaseClock)
    """Started when the request arrived, before it was tokenised; the engine goes on with it."""


@dataclass(frozen=True)
class Delta:
    """What became certain with one token (or with the end: then `token_ids` is empty)."""

    text: str
    """May be "" while a character or a possible stop string is held back; "" always for a model without tokenizer."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    """One a token, where they were asked for."""


@dataclass(frozen=True)
class Finished:
    """The last event of a request, whatever became of it."""

    finish_reason: FinishReason
    """"stop": an end of sequence, stop id or stop string; "length": max_tokens or the context; "abort": cancelled, or
    the engine was closed; "error": `error` says what."""

    num_prompt_tokens: int
    num_generated: int
    """Tokens generated, the one that ended the answer included."""

    selection: Selection | None
    """How the prompt was read; None where it was not read to its end. Its device results have been fetched."""

    timings: Timings
    """Wall-clock phases of this request, waiting for others included; up to `first_token` they add up to TTFT."""

    cached_tokens: int = 0
    """Tokens that the main model did not have to read, being in its cache already."""

    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """One a prompt token, None for the first, where they were asked for."""

    preemptions: int = 0
    """How often it lost its pages to others and was computed again."""

    error: str | None = None

    proposed_tokens: int = 0
    """Tokens that the speculator proposed while it decoded."""

    accepted_tokens: int = 0
    """Of these, those that were right."""


Event = Delta | Finished
OnEvent = Callable[[Event], None]
"""Called from the engine's thread, in order, `Finished` once and last; it must not block and must not raise."""


@dataclass(frozen=True)
class Stats:
    """The engine's state at one moment; counters only grow."""

    running: int
    """Requests that decode."""
    prefilling: int
    """Requests whose prompt is being read by either model."""
    waiting: int
    """Requests of which nothing has been read."""
    waiting_tokens: int
    """Their prompt tokens."""
    cache_usage: float
    """Share of the main model's pages that requests hold, 0 to 1."""
    speculator_cache_usage: float
    prompt_tokens: int
    """Counter: prompt tokens of requests that reached their first token."""
    kept_tokens: int
    """Counter: of these, read by the main model or found in its cache."""
    cached_tokens: int
    """Counter: of these, found in its cache."""
    generation_tokens: int
    """Counter."""
    preemptions: int
    """Counter."""
    memoised_selections: int
    """Counter: prompts whose selection was remembered."""
    compiles_after_warm_up: int
    """Counter: programs compiled after warm-up; anything but 0 is a fault of the warm-up."""
    drafts: int = 0
    """Counter: steps of a request that checked proposals."""
    proposed_tokens: int = 0
    """Counter: tokens that the speculator proposed in them."""
    accepted_tokens: int = 0
    """Counter: of these, those that were right."""
