"""Whether a prompt is read in part at all, and how many chunks are kept.

Decided on the host, before the speculator runs, so that every later shape is known. Under keep rate "auto" the plan is
of the most that may be kept.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction

import numpy as np

from specprefill_jax.config import SpecPrefillConfig, check_flag, check_integer, check_real, check_spans
from specprefill_jax.costs import Prediction
from specprefill_jax.errors import argument_error


class Reason(StrEnum):
    """Why a prompt was read in part or whole. When several hold, the first in this order is given."""

    ENGAGED = "engaged"
    """Read in part."""
    DISABLED = "disabled"
    """`SpecPrefillConfig.enabled` is False."""
    PROMPT_LOGPROBS = "prompt_logprobs"
    """Log-probabilities of the prompt were asked for, which need every token of it."""
    SHORT_PROMPT = "short_prompt"
    """Fewer tokens than `min_prompt_tokens`."""
    NOTHING_TO_DROP = "nothing_to_drop"
    """The budget covers every chunk: the keep rate is 1, or the chunks are few."""
    FORCED_COVER_BUDGET = "forced_cover_budget"
    """The first chunk, the tail and the forced spans alone reach the budget: nothing would be left to rank."""
    LOW_PREDICTED_GAIN = "low_predicted_gain"
    """The cost model predicts a speed-up below `min_predicted_gain`."""
    INFORMATION_DENSE = "information_dense"
    """With keep rate "auto": the scores are so even that no part of the prompt can be left out; known only after the
    speculator has read it."""
    SPECULATOR_FAILED = "speculator_failed"
    """The speculator or the scoring failed; `Selection.detail` says how."""


def num_chunks(num_tokens: int, chunk_size: int) -> int:
    """Chunks of a prompt: ceil(num_tokens / chunk_size); a short last chunk counts as one."""
    return -(-num_tokens // chunk_size)


def budget(chunks: int, rate: float) -> int:
    """Chunks to keep of `chunks`: ceil(chunks * rate) for the rate as it is written, so 50 at 0.3 is 15; at least 1."""
    exact = Fraction(str(rate)) * chunks
    return min(max(math.ceil(exact), 1), chunks)


def most_checks(config: SpecPrefillConfig, look_ahead: int) -> int:
    """Most parts of a long prompt that the speculator may try under keep rate "auto" (`Plan.rungs`); 0 without."""
    if config.keep_rate != "auto" or config.query_window or look_ahead < 2:
        return 0
    return len(doubling(config.min_keep_rate, config.max_keep_rate))


def doubling[T: (int, float)](least: T, most: T) -> tuple[T, ...]:
    """`least`, twice that, four times, ... and `most`."""
    found = [least]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return tuple(found)


@dataclass(frozen=True)
class Plan:
    """What the host knows before the speculator runs; hashable, and all the shapes that follow."""

    engaged: bool
    reason: Reason
    num_tokens: int
    chunk_size: int
    num_chunks: int
    kept_chunks: int
    """Chunks the main model reads: the budget when engaged, else all."""
    forced_chunks: tuple[int, ...]
    """Ids of the chunks that are kept whatever their score, ascending; they count towards `kept_chunks`."""
    max_kept_tokens: int
    """Upper bound of the kept tokens: the size of every compacted array."""
    num_kept_tokens: int | None
    """Kept tokens exactly, or None where it depends on whether a short last chunk is kept (paper mode only)."""
    predicted_gain: float | None = None
    """Predicted speed-up of the first token, where it was asked for."""
    least_chunks: int | None = None
    """Fewest chunks that the scores may ask for, while `kept_chunks` is the most; None where the number is fixed."""
    predicted_ttft_ms: float | None = None
    """Predicted milliseconds until the first token, where there is a `ttft_budget_ms`."""
    over_budget: bool = False
    """Whether these are more than that: even the fewest chunks take longer, or the prompt is read whole."""

    @property
    def rungs(self) -> tuple[int, ...]:
        """Numbers of chunks to try under keep rate "auto": from the fewest up to the most, doubling; none otherwise."""
        if self.least_chunks is None:
            return ()
        return doubling(self.least_chunks, self.kept_chunks)

    def forced_mask(self, size: int | None = None) -> np.ndarray:
        """The forced chunks as bool [size] (default: num_chunks), False in the padding."""
        mask = np.zeros(self.num_chunks if size is None else size, np.bool_)
        mask[list(self.forced_chunks)] = True
        return mask

    def keep(self, chunks: int) -> "Plan":
        """This plan, but with exactly so many chunks kept, at least one more than are forced."""
        size, last = self.chunk_size, self.num_tokens - (self.num_chunks - 1) * self.chunk_size
        exact: int | None = None
        if chunks == self.num_chunks:
            exact = self.num_tokens
        elif self.num_chunks - 1 in self.forced_chunks:
            exact = (chunks - 1) * size + last
        elif last == size:
            exact = chunks * size
        most = chunks * size if exact is None else exact
        return replace(self, kept_chunks=chunks, max_kept_tokens=most, num_kept_tokens=exact)

    def read_whole(self, reason: Reason) -> "Plan":
        """This plan, but with the whole prompt read for `reason`."""
        return replace(
            self,
            engaged=False,
            reason=reason,
            kept_chunks=self.num_chunks,
            max_kept_tokens=self.num_tokens,
            num_kept_tokens=self.num_tokens,
            least_chunks=None,
            predicted_ttft_ms=None,
            over_budget=False,
        )

    def timed(self, seconds: float, budget_ms: float) -> "Plan":
        """This plan, with what it is predicted to take beside what it may take."""
        milliseconds = 1000 * seconds
        return replace(self, predicted_ttft_ms=milliseconds, over_budget=milliseconds > budget_ms)


def plan(
    num_tokens: int,
    config: SpecPrefillConfig,
    *,
    forced_spans: Iterable[tuple[int, int]] = (),
    generation_tail: int = 0,
    needs_prompt_logprobs: bool = False,
    predicted_gain: float | Callable[[int], float] | None = None,
    prediction: Callable[[int], Prediction] | None = None,
) -> Plan:
    """Decide how a prompt of `num_tokens` tokens is read.

    Args:
        num_tokens: length of the prompt.
        config: the caller's settings.
        forced_spans: spans [start, end) of token offsets to keep, beside those of the config. Product mode only.
        generation_tail: tokens of the chat template's generation header at the prompt's end; kept like `tail_tokens`.
        needs_prompt_logprobs: whether log-probabilities of the prompt are wanted. Product mode only.
        predicted_gain: the cost model's speed-up of the first token, or a function that gives it for a number of kept
            tokens (called only if nothing else decides first). None leaves that gate open. Under keep rate "auto" it is
            that of the most tokens that may be kept.
        prediction: what the prompt takes on this machine for a number of kept tokens; asked only where there is a
            `ttft_budget_ms`. None leaves that open, too.

    Raises:
        ArgumentError: an empty prompt, a span that is empty or ends past the prompt, or something forced in paper mode.
    """
    tokens = check_integer("num_tokens", num_tokens, 1)
    tail = check_integer("generation_tail", generation_tail, 0, tokens)
    logprobs = check_flag("needs_prompt_logprobs", needs_prompt_logprobs)
    spans = check_spans("forced_spans", forced_spans, tokens)
    spans += check_spans("config.forced_spans", config.forced_spans, tokens)
    product = config.mode == "product"
    if not product and spans:
        raise argument_error("forced_spans", spans, "empty in paper mode, which forces nothing")
    if not product and logprobs:
        allowed = "False in paper mode, which reads no prompt whole: log-probabilities need every token"
        raise argument_error("needs_prompt_logprobs", logprobs, allowed)

    size = config.chunk_size
    chunks = num_chunks(tokens, size)
    kept = budget(chunks, config.max_keep_rate if config.keep_rate == "auto" else config.keep_rate)
    forced = np.zeros(chunks, np.bool_)
    if product:
        forced[0] = True
        forced[max(tokens - max(config.tail_tokens, tail), 0) // size :] = True
        for start, end in spans:
            forced[start // size : (end - 1) // size + 1] = True

    always = tuple(np.flatnonzero(forced).tolist())
    sparse = Plan(True, Reason.ENGAGED, tokens, size, chunks, chunks, always, tokens, tokens).keep(kept)
    least = min(max(budget(chunks, config.min_keep_rate), len(always) + 1), kept)
    limit = config.ttft_budget_ms if product and prediction is not None else None

    def whole(reason: Reason) -> Plan:
        decided = sparse.read_whole(reason)
        return decided if limit is None or prediction is None else decided.timed(prediction(tokens).dense, limit)

    if not config.enabled:
        return whole(Reason.DISABLED)
    if not product:
        return sparse
    if logprobs:
        return whole(Reason.PROMPT_LOGPROBS)
    if tokens < config.min_prompt_tokens:
        return whole(Reason.SHORT_PROMPT)
    if len(always) >= kept:
        return whole(Reason.NOTHING_TO_DROP if kept == chunks else Reason.FORCED_COVER_BUDGET)
    if limit is not None and prediction is not None and (kept < chunks or 1000 * prediction(tokens).dense > limit):
        sparse = _capped(sparse, least, limit, prediction)
    if sparse.kept_chunks == chunks:
        return whole(Reason.NOTHING_TO_DROP)
    if config.keep_rate == "auto":
        sparse = replace(sparse, least_chunks=least)
    if predicted_gain is None:
        return sparse
    gain = predicted_gain(sparse.max_kept_tokens) if callable(predicted_gain) else predicted_gain
    gain = check_real("predicted_gain", gain, "a finite number above 0, or None", lambda x: x > 0)
    sparse = replace(sparse, predicted_gain=gain)
    return sparse if gain >= config.min_predicted_gain else whole(Reason.LOW_PREDICTED_GAIN)


def _capped(sparse: Plan, least: int, budget_ms: float, prediction: Callable[[int], Prediction]) -> Plan:
    """The plan of as many chunks as fit the budget, from `least` to its own number; of `least` if none do."""

    def seconds(chunks: int) -> float:
        return prediction(sparse.keep(chunks).max_kept_tokens).total

    counts = range(least, sparse.kept_chunks + 1)
    fitting = bisect_right(counts, budget_ms, key=lambda chunks: 1000 * seconds(chunks))
    kept = counts[max(fitting - 1, 0)]
    return sparse.keep(kept).timed(seconds(kept), budget_ms)
