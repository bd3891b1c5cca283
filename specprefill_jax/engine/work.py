"""A request on its way through the engine."""

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from specprefill_jax.decode import TokenLogprobs
from specprefill_jax.engine.request import OnEvent, Request
from specprefill_jax.engine.scheduler import Sequence
from specprefill_jax.models.loaded import Step
from specprefill_jax.selection import Plan, Selection
from specprefill_jax.tokens import StreamDecoder


@dataclass(eq=False)
class Work:
    """A request, and what is known of it beside what the scheduler knows."""

    request: Request
    on_event: OnEvent
    plan: Plan
    sequence: Sequence
    text: StreamDecoder | None
    ends: frozenset[int]
    seed: int
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
