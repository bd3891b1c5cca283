"""Chunk scores -> which tokens the main model reads, and why.

`plan` decides on the host, before the speculator runs, whether a prompt is read in part at all and how many chunks are
kept, so every later shape is known. The chunk top-k kernel picks the chunks on the device, with no word to the host.
Under keep rate "auto" the plan is of the most that may be kept, and `Selection.adapt` asks the scores for the number.
`Selection` is what a caller sees: it fetches from the device when it is first asked.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from functools import cached_property
from typing import Any, Self, cast

import jax
import numpy as np

from specprefill_jax.adaptive import chunk_masses, chunks_for_share, normalised_entropy
from specprefill_jax.config import SpecPrefillConfig, check_flag, check_integer, check_real, check_spans
from specprefill_jax.costs import Prediction
from specprefill_jax.errors import SpecPrefillError, argument_error
from specprefill_jax.kernels.chunk_topk import Choice


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


class Selection:
    """Which tokens of one prompt the main model reads, and why.

    The plan's fields answer at once. The others (`kept_indices`, `chunk_scores`, ...) wait for the device when they are
    first asked, once for all of them, and are numpy arrays and Python numbers from then on; they raise
    `SpecPrefillError` if the scores were not finite. `choice` stays on the device for the main prefill.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        choice: Choice | None = None,
        chunk_scores: jax.Array | None = None,
        importance: jax.Array | None = None,
        num_queries: jax.Array | int = 0,
        look_ahead_tokens: jax.Array | Iterable[int] = (),
        detail: str | None = None,
        prompt: np.ndarray | None = None,
    ) -> None:
        """Wrap a plan and, if it is engaged, the device's results.

        Args:
            plan: the host's decision; one that is not engaged needs nothing else.
            choice: from the chunk top-k kernel, of this prompt alone (no B). Required if the plan is engaged, not
                allowed otherwise.
            chunk_scores: float32 [>= C].
            importance: float32 [>= M].
            num_queries: int32 scalar, queries that counted.
            look_ahead_tokens: int32 [>= num_queries], tokens the speculator generated.
            detail: words for people beside the reason, such as the error that made a speculator fail.
            prompt: int [M], the token ids that `choice` is of.
        """
        if plan.engaged != (choice is not None):
            raise argument_error("choice", choice, "given exactly when the plan is engaged")
        self.plan = plan
        self.choice = choice
        self.detail = detail
        self.prompt = prompt
        self._device = (chunk_scores, importance, num_queries, look_ahead_tokens)

    @classmethod
    def whole(cls, num_tokens: int, reason: Reason, *, chunk_size: int = 32, detail: str | None = None) -> Self:
        """The selection of a prompt that is read whole for `reason`."""
        tokens = check_integer("num_tokens", num_tokens, 1)
        size = check_integer("chunk_size", chunk_size, 1)
        allowed = [str(known) for known in Reason if known is not Reason.ENGAGED]
        if reason not in allowed:
            raise argument_error("reason", reason, "one of " + ", ".join(map(repr, allowed)))
        chunks = num_chunks(tokens, size)
        return cls(Plan(False, Reason(reason), tokens, size, chunks, chunks, (), tokens, tokens), detail=detail)

    @classmethod
    def of_chunks(cls, prompt: np.ndarray, chunks: Iterable[int], *, chunk_size: int = 32) -> Self:
        """The selection of given chunks of a prompt, whoever chose them.

        Args:
            prompt: int [M] token ids.
            chunks: ids of the chunks to read, in any order, each once.
            chunk_size: tokens a chunk; 1 for a choice of single tokens.

        Raises:
            ArgumentError: no tokens, no chunks, or a chunk that is not of the prompt or is named twice.
        """
        size = check_integer("chunk_size", chunk_size, 1)
        tokens = check_integer("num_tokens", len(prompt), 1)
        count = num_chunks(tokens, size)
        ids = [check_integer("chunks", chunk, 0, count - 1) for chunk in chunks]
        if not ids or len(set(ids)) != len(ids):
            raise argument_error("chunks", ids, "at least one chunk, and each once")
        mask = np.zeros(count, np.bool_)
        mask[ids] = True
        choice = _choice_of(mask, prompt, size)
        kept = int(choice.kept_count)
        plan = Plan(True, Reason.ENGAGED, tokens, size, count, len(ids), (), kept, kept)
        return cls(plan, choice=choice, prompt=prompt)

    def replan(self, plan: Plan) -> Self:
        """What the same scores choose under another plan for this prompt, such as one of another keep rate.

        Chosen on the host by the kernel's rule: the forced chunks, then the highest scores, ties to the lower chunk.

        Raises:
            ArgumentError: this selection has no scores, or the plan is of another prompt or chunk size.
            SpecPrefillError: the scores are not finite.
        """
        if not plan.engaged:
            return type(self)(plan)
        if self.chunk_scores is None or self.prompt is None:
            raise argument_error("selection", self, "one that a speculator scored")
        if (plan.num_tokens, plan.chunk_size) != (self.num_tokens, self.chunk_size):
            raise argument_error("plan", plan, f"of {self.num_tokens} tokens in chunks of {self.chunk_size}")
        ranks = np.argsort(-np.where(plan.forced_mask(), np.inf, self.chunk_scores), kind="stable")
        mask = np.zeros(plan.num_chunks, np.bool_)
        mask[ranks[: plan.kept_chunks]] = True
        return type(self)(
            plan,
            choice=_choice_of(mask, self.prompt, plan.chunk_size),
            chunk_scores=self._host[1],
            importance=self._host[2],
            num_queries=self._host[3],
            look_ahead_tokens=self._host[4],
            prompt=self.prompt,
        )

    def adapt(
        self,
        config: SpecPrefillConfig,
        *,
        predicted_gain: Callable[[int], float] | None = None,
        prediction: Callable[[int], Prediction] | None = None,
        whole_fits: bool = True,
    ) -> Self:
        """As many chunks as the scores ask for, under a plan of keep rate "auto"; this one under any other plan.

        Waits for the scores, since what the main model reads depends on them. The forced chunks are kept and, in the
        order of the scores, as many others as hold `config.importance_share` of the others' importance, within the
        plan's bounds. Scores more even than `config.max_entropy` have the prompt read whole, as `information_dense`.

        Args:
            config: the settings that the plan was made with.
            predicted_gain, prediction: as of `plan`: told anew for what is kept.
            whole_fits: whether the prompt may be read whole; if not, or if it would take longer than
                `config.ttft_budget_ms`, as much is as the plan allows.

        Raises:
            SpecPrefillError: the scores are not finite.
        """
        planned = self.plan
        if planned.least_chunks is None:
            return self
        if self.chunk_scores is None:
            raise argument_error("selection", self, "one that a speculator scored")
        ranked = ~planned.forced_mask()
        masses = chunk_masses(self.chunk_scores, self.num_tokens, self.chunk_size)[ranked]
        entropy = normalised_entropy(masses)
        limit = config.ttft_budget_ms
        if limit is not None and prediction is not None:
            whole_fits = whole_fits and 1000 * prediction(self.num_tokens).total <= limit
        if entropy > config.max_entropy:
            most = planned.keep(planned.kept_chunks)
            adapted = planned.read_whole(Reason.INFORMATION_DENSE) if whole_fits else most
        else:
            order = np.argsort(-self.chunk_scores[ranked], kind="stable")
            asked = len(planned.forced_chunks) + chunks_for_share(masses[order], config.importance_share)
            adapted = planned.keep(min(max(asked, planned.least_chunks), planned.kept_chunks))
        adapted = replace(adapted, least_chunks=None)
        if predicted_gain is not None:
            adapted = replace(adapted, predicted_gain=predicted_gain(adapted.max_kept_tokens))
        if limit is not None and prediction is not None:
            adapted = adapted.timed(prediction(adapted.max_kept_tokens).total, limit)
        if adapted.engaged:
            return self.replan(adapted)
        return type(self)(
            adapted,
            chunk_scores=self._host[1],
            importance=self._host[2],
            num_queries=self._host[3],
            look_ahead_tokens=self._host[4],
            detail=f"entropy of the scores {entropy:.3f}, above {config.max_entropy:g}",
            prompt=self.prompt,
        )

    @property
    def host_indices(self) -> np.ndarray | None:
        """`kept_indices` where the host knows them without the device, else None."""
        if self.choice is None:
            return self.kept_indices
        indices = cast(Any, self.choice.kept_indices)
        return indices if isinstance(indices, np.ndarray) else None

    @property
    def engaged(self) -> bool:
        """Whether part of the prompt is left out."""
        return self.plan.engaged

    @property
    def reason(self) -> Reason:
        """Why the prompt is read in part or whole, one of a closed set of strings."""
        return self.plan.reason

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt, M."""
        return self.plan.num_tokens

    @property
    def chunk_size(self) -> int:
        """Tokens a chunk."""
        return self.plan.chunk_size

    @property
    def num_chunks(self) -> int:
        """Chunks of the prompt, C."""
        return self.plan.num_chunks

    @property
    def kept_chunks(self) -> int:
        """Chunks that are read."""
        return self.plan.kept_chunks

    @property
    def forced_chunks(self) -> tuple[int, ...]:
        """Ids of the chunks that were kept whatever their score."""
        return self.plan.forced_chunks

    @property
    def num_kept(self) -> int:
        """Tokens that are read. Waits for the device only where the plan cannot know (paper mode, short last chunk)."""
        known = self.plan.num_kept_tokens
        return int(self._host[0].kept_count) if known is None else known

    @property
    def keep_rate(self) -> float:
        """The effective rate: tokens that are read over tokens of the prompt."""
        return self.num_kept / self.num_tokens

    @cached_property
    def kept_indices(self) -> np.ndarray:
        """int32 [num_kept]: indices of the tokens that are read, ascending."""
        if self.choice is None:
            return np.arange(self.num_tokens, dtype=np.int32)
        return np.asarray(self._host[0].kept_indices[: self.num_kept], np.int32)

    @cached_property
    def kept_chunk_mask(self) -> np.ndarray:
        """bool [C]: the chunks that are read."""
        if self.choice is None:
            return np.ones(self.num_chunks, np.bool_)
        return np.asarray(self._host[0].kept_chunk_mask[: self.num_chunks], np.bool_)

    @cached_property
    def chunk_scores(self) -> np.ndarray | None:
        """float32 [C], or None if the prompt was read whole without scoring."""
        scores = self._host[1]
        return None if scores is None else np.asarray(scores[: self.num_chunks], np.float32)

    @cached_property
    def importance(self) -> np.ndarray | None:
        """float32 [M], or None if the prompt was read whole without scoring."""
        importance = self._host[2]
        return None if importance is None else np.asarray(importance[: self.num_tokens], np.float32)

    @cached_property
    def num_queries(self) -> int:
        """Queries that counted: fewer than the look-ahead asked for where the speculator met its end of sequence."""
        return int(self._host[3])

    @cached_property
    def look_ahead_tokens(self) -> list[int]:
        """Tokens the speculator generated, one a query that counted; an end of sequence is the last of them."""
        return [int(token) for token in self._host[4][: self.num_queries]]

    def check(self) -> None:
        """Wait for the device and raise `SpecPrefillError` if the choice cannot be trusted."""
        _ = self._host

    @cached_property
    def _host(self) -> Any:
        """(choice, chunk_scores, importance, num_queries, look_ahead_tokens) on the host: one wait, one check."""
        scores, importance, num_queries, tokens = self._device
        tokens = tokens if isinstance(tokens, jax.Array) else list(tokens)
        host = jax.device_get((self.choice, scores, importance, num_queries, tokens))
        choice, scores = host[:2]
        if choice is None:
            return host
        if not choice.ok:
            bad = np.array([], int) if scores is None else np.flatnonzero(~np.isfinite(scores[: self.num_chunks]))
            if bad.size:
                raise SpecPrefillError(
                    f"chunk_scores[{bad[0]}]={scores[bad[0]]} is not allowed: chunk_scores must be finite "
                    f"({bad.size} of {self.num_chunks} chunks are not; the speculator's weights or dtype overflow)"
                )
            raise SpecPrefillError(
                f"choice.ok=False is not allowed: chunk_topk must be given finite scores and the numbers of {self.plan}"
            )
        known = self.plan.num_kept_tokens
        if known is not None and known != int(choice.kept_count):
            raise SpecPrefillError(f"kept_count={int(choice.kept_count)} is not allowed: it must be the plan's {known}")
        return host

    def to_dict(self) -> dict[str, Any]:
        """The decision and its figures as JSON-ready values; without the arrays of token or chunk length."""
        return {
            "engaged": self.engaged,
            "reason": str(self.reason),
            "detail": self.detail,
            "num_tokens": self.num_tokens,
            "num_kept": self.num_kept,
            "keep_rate": self.keep_rate,
            "chunk_size": self.chunk_size,
            "num_chunks": self.num_chunks,
            "kept_chunks": self.kept_chunks,
            "forced_chunks": len(self.forced_chunks),
            "num_queries": self.num_queries,
            "predicted_gain": self.plan.predicted_gain,
            "predicted_ttft_ms": self.plan.predicted_ttft_ms,
            "over_budget": self.plan.over_budget,
        }

    def __repr__(self) -> str:
        """Only what needs no wait for the device."""
        kept = f"{self.kept_chunks} of {self.num_chunks} chunks of {self.chunk_size}"
        return f"Selection({self.reason}, {self.num_tokens} tokens, {kept})"


def _choice_of(mask: np.ndarray, prompt: np.ndarray, chunk_size: int) -> Choice:
    """The choice that keeps the chunks of `mask`, bool [C], in numpy and without padding."""
    chunks = np.flatnonzero(mask).astype(np.int32)
    indices = (chunks[:, None] * chunk_size + np.arange(chunk_size, dtype=np.int32)).reshape(-1)
    indices = indices[indices < len(prompt)]
    tokens = np.asarray(prompt, np.int32)[indices]
    return Choice(*cast(Any, (chunks, mask, indices, tokens, np.int32(len(indices)), np.bool_(True))))
