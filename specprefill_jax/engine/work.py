"""A request on its way through the engine."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import jax
import numpy as np

from specprefill_jax.decode import TokenLogprobs
from specprefill_jax.engine.request import Finished, FinishReason, OnEvent, Request
from specprefill_jax.engine.runner import Batch, Runner
from specprefill_jax.engine.scheduler import Sequence as Scheduled
from specprefill_jax.models.loaded import Step
from specprefill_jax.planning import Plan
from specprefill_jax.sampling import SamplingArrays
from specprefill_jax.selection import Selection
from specprefill_jax.speculative import Acceptance
from specprefill_jax.tokens import StreamDecoder


@dataclass(eq=False)
class Work:
    """A request, and what is known of it beside what the scheduler knows."""

    request: Request
    on_event: OnEvent
    plan: Plan
    sequence: Scheduled
    text: StreamDecoder | None
    ends: frozenset[int]
    seed: int
    acceptance: Acceptance
    """How the speculator's proposals fared."""
    selection: Selection | None = None
    kept: np.ndarray | None = None
    """int32 indices of the prompt tokens that the main model reads; None until they are known."""
    step: Step | None = None
    """What the last piece of speculation left."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    has_prompt_logprobs: bool = False
    begun: bool = False
    restarts: int = 0
    """How often a failed step had it begin again: results that were on their way by then are of no use."""
    followers: list["Work"] = field(default_factory=list)
    """Requests that wait for this one's selection, which will be theirs, too."""

    @cached_property
    def key(self) -> tuple:
        """What a selection depends on."""
        digest = hashlib.blake2b(self.sequence.prompt.tobytes(), digest_size=16).digest()
        return digest, self.request.config, self.request.generation_tail

    @property
    def known(self) -> np.ndarray:
        """int32 tokens of the prompt and of the answer so far."""
        return np.concatenate([self.sequence.prompt, np.asarray(self.sequence.generated, np.int32)])

    @property
    def free_proposals(self) -> list[int]:
        """What the look-ahead expected behind the first token; [] where it expected another first one, or is past."""
        sequence = self.sequence
        tokens = self.selection.look_ahead_tokens if self.selection is not None and self.selection.engaged else []
        if sequence.issued > 2 or not tokens:
            return []
        first, *others = tokens
        return others if not sequence.generated or sequence.generated[0] == first else []

    def select(self, selection: Selection) -> None:
        """Take a selection whose device results have been fetched: which tokens the main model reads."""
        self.selection, self.plan = selection, selection.plan
        self.kept = kept = selection.kept_indices
        gaps = np.flatnonzero(kept != np.arange(len(kept)))
        self.sequence.kept, self.sequence.dense = len(kept), int(gaps[0]) if gaps.size else len(kept)

    def read_whole(self, plan: Plan, detail: str | None = None) -> None:
        """Have the main model read every token, as this plan says, which is not engaged."""
        self.plan, self.selection = plan, Selection(plan, detail=detail)
        tokens = self.sequence.num_tokens
        self.kept = np.arange(tokens, dtype=np.int32)
        self.sequence.kept = self.sequence.dense = tokens
        self.sequence.look_ahead = 0

    def finished(self, reason: FinishReason, error: str | None) -> Finished:
        """The last event; the clock stops."""
        sequence = self.sequence
        return Finished(
            reason,
            sequence.num_tokens,
            len(sequence.generated),
            self.selection if sequence.generated else None,
            self.request.clock.stop(),
            sequence.cached,
            tuple(self.prompt_logprobs) if self.has_prompt_logprobs and self.prompt_logprobs else None,
            sequence.preemptions,
            error,
            self.acceptance.proposed,
            self.acceptance.accepted,
        )


def propose(runner: Runner, works: Sequence[Work], size: int) -> jax.Array | None:
    """The speculator's proposals [size, k] for a step of these requests; None where none of them is to have any.

    Where all look-aheads have said what comes behind the first token, the speculator has nothing to do.
    """
    drafting = [(i, work.sequence, work.free_proposals) for i, work in enumerate(works) if work.sequence.proposals]
    if not drafting:
        return None
    are_free = all(free for _, _, free in drafting)
    if are_free:
        for _, sequence, free in drafting:
            sequence.proposals = min(sequence.proposals, len(free))
    count = next(k for k in runner.proposals if k >= max(sequence.proposals for _, sequence, _ in drafting))
    if are_free:
        tokens = np.zeros((size, count), np.int32)
        for i, _, free in drafting:
            tokens[i, : len(free)] = free[:count]
        return runner.main.put(tokens)
    rows, before, starts = np.array([[runner.max_running], [-1], [0]], np.int32).repeat(size, axis=1)
    pages: list[list[int]] = [[]] * size
    for i, sequence, _ in drafting:
        assert sequence.row is not None
        known = sequence.issued - 1
        rows[i], pages[i], starts[i] = sequence.row, sequence.draft_pages, sequence.num_tokens
        if known > 1:  # else the token before the last is the prompt's
            starts[i] += known - 2
            before[i] = sequence.generated[known - 2]
    return runner.propose(rows, before, starts, pages, count)


def batch_of(works: Sequence[Work], size: int, nobody: int) -> Batch:
    """The next step of these requests, filled up to `size` rows with the decode state's row `nobody`."""
    rows = [_row(work) for work in works]
    rows += [(nobody, 0.0, 0, 1.0, 0.0, 1.0, 0, 0, -1)] * (size - len(works))
    row, temperature, top_k, top_p, min_p, penalty, seed, index, top_n = zip(*rows, strict=True)
    key = np.array([(s >> 32 & 0xFFFFFFFF, s & 0xFFFFFFFF) for s in seed], np.uint32)
    ints, floats = partial(np.asarray, dtype=np.int32), partial(np.asarray, dtype=np.float32)
    settings = SamplingArrays._make(
        (floats(temperature), ints(top_k), floats(top_p), floats(min_p), floats(penalty), key)
    )
    return Batch(ints(row), settings, ints(index), ints(top_n))


def _row(work: Work) -> tuple:
    sampling, sequence = work.request.sampling, work.sequence
    return (
        sequence.row,
        sampling.temperature,
        min(sampling.top_k, 0x7FFFFFFF),
        sampling.top_p,
        sampling.min_p,
        sampling.repetition_penalty,
        work.seed,
        sequence.issued - 1,
        -1 if sampling.logprobs is None else sampling.logprobs,
    )
