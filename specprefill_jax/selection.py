"""Chunk scores -> which tokens the main model reads, and why.

The plan (`planning`) says how many chunks are kept. The chunk top-k kernel picks them on the device, with no word to
the host; under keep rate "auto" `Selection.adapt` finds the number in what the device tells. `Selection` is what a
caller sees: it fetches from the device when it is first asked.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Self, cast

import jax
import numpy as np

from specprefill_jax.adaptive import chunk_masses, chunks_for_share
from specprefill_jax.config import SpecPrefillConfig, check_integer
from specprefill_jax.costs import Prediction
from specprefill_jax.errors import SpecPrefillError, argument_error
from specprefill_jax.kernels.chunk_topk import Choice
from specprefill_jax.planning import Plan, Reason, num_chunks


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
        divergences: Mapping[int, jax.Array | float] = MappingProxyType({}),
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
            divergences: float32 scalars by the plan's `rungs`, from `SelfCheck`; empty: not checked.
            detail: words for people beside the reason, such as the error that made a speculator fail.
            prompt: int [M], the token ids that `choice` is of.
        """
        if plan.engaged != (choice is not None):
            raise argument_error("choice", choice, "given exactly when the plan is engaged")
        self.plan = plan
        self.choice = choice
        self.detail = detail
        self.prompt = prompt
        self._device = (chunk_scores, importance, num_queries, look_ahead_tokens, dict(divergences))

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
        return self._best(plan, {})

    def _best(self, plan: Plan, divergences: Mapping[int, Any]) -> Self:
        assert self.chunk_scores is not None
        assert self.prompt is not None
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
            divergences=divergences,
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
        """As many chunks as it takes, under a plan of keep rate "auto"; this one under any other plan.

        Waits for the device, since what the main model reads depends on it. Of the numbers that were tried it is the
        lowest that left the speculator's predictions within `config.max_divergence`; where none did, the prompt is
        read whole, as `information_dense`. Where the speculator did not look ahead, so that nothing was tried, the
        forced chunks are kept and, in the order of the scores, as many others as hold `config.importance_share` of the
        others' importance, within the plan's bounds.

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
        if self.chunk_scores is None or self.prompt is None:
            raise argument_error("selection", self, "one that a speculator scored")
        limit = config.ttft_budget_ms
        if limit is not None and prediction is not None:
            whole_fits = whole_fits and 1000 * prediction(self.num_tokens).total <= limit
        tried = self.divergences
        if tried:
            enough = [chunks for chunks, moved in tried.items() if moved <= config.max_divergence]
            dense = not enough and whole_fits
            asked = min(enough, default=planned.kept_chunks)
        else:
            dense, asked = False, self._holding(config.importance_share)
        kept = planned.keep(min(max(asked, planned.least_chunks), planned.kept_chunks))
        adapted = planned.read_whole(Reason.INFORMATION_DENSE) if dense else kept
        adapted = replace(adapted, least_chunks=None)
        if predicted_gain is not None:
            adapted = replace(adapted, predicted_gain=predicted_gain(adapted.max_kept_tokens))
        if limit is not None and prediction is not None:
            adapted = adapted.timed(prediction(adapted.max_kept_tokens).total, limit)
        if adapted.engaged:
            return self._best(adapted, self._host[5])
        return type(self)(
            adapted,
            chunk_scores=self._host[1],
            importance=self._host[2],
            num_queries=self._host[3],
            look_ahead_tokens=self._host[4],
            divergences=self._host[5],
            detail=f"predictions move by {tried[planned.kept_chunks]:.3f} nats with {planned.kept_chunks} of "
            f"{planned.num_chunks} chunks, above {config.max_divergence:g}",
            prompt=self.prompt,
        )

    def _holding(self, share: float) -> int:
        """How many chunks are kept with the best ones that hold this share of what the forced ones do not."""
        assert self.chunk_scores is not None
        ranked = ~self.plan.forced_mask()
        masses = chunk_masses(self.chunk_scores, self.num_tokens, self.chunk_size)[ranked]
        order = np.argsort(-self.chunk_scores[ranked], kind="stable")
        return len(self.plan.forced_chunks) + chunks_for_share(masses[order], share)

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

    @cached_property
    def divergences(self) -> dict[int, float]:
        """How far the speculator's predictions move, by the number of chunks it attends to (`SelfCheck`, in nats).

        Empty where that was not asked: only under keep rate "auto", and if the speculator looks ahead.
        """
        return {chunks: float(value) for chunks, value in self._host[5].items()}

    def check(self) -> None:
        """Wait for the device and raise `SpecPrefillError` if the choice cannot be trusted."""
        _ = self._host

    @cached_property
    def _host(self) -> Any:
        """The choice and what `_device` has, on the host: one wait, one check."""
        scores, importance, num_queries, tokens, divergences = self._device
        tokens = tokens if isinstance(tokens, jax.Array) else list(tokens)
        host = jax.device_get((self.choice, scores, importance, num_queries, tokens, divergences))
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
            "divergences": {str(chunks): value for chunks, value in self.divergences.items()},
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
