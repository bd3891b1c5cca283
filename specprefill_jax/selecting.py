"""What the main model reads of a prompt: planned on the host; speculated, scored and chosen on the device."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from specprefill_jax.cards import PairCard
from specprefill_jax.chat_prompt import Spans
from specprefill_jax.config import SpecPrefillConfig
from specprefill_jax.costs import Prediction
from specprefill_jax.errors import ArgumentError, SpecPrefillError, argument_error
from specprefill_jax.importance import Heads
from specprefill_jax.planning import Plan, Reason, most_checks, num_chunks
from specprefill_jax.planning import plan as make_plan
from specprefill_jax.predictor import Predictor
from specprefill_jax.prefill import bucket, padded
from specprefill_jax.prompt import padded_ids
from specprefill_jax.scoring import score_and_choose
from specprefill_jax.selection import Selection
from specprefill_jax.self_check import SelfCheck
from specprefill_jax.speculative import Drafts
from specprefill_jax.speculator import MAX_EOS_IDS, LookAhead, Speculator
from specprefill_jax.timing import Marks


class Selector:
    """Chooses by one speculator. Prompts are checked token ids, configs settled (`settle`), unless said otherwise."""

    def __init__(
        self,
        speculator: Speculator,
        predictor: Predictor,
        *,
        kernels: str,
        prefill_chunk: int,
        default_look_ahead: int,
        card: PairCard | None,
    ):
        """Make one; the arguments are those of `SpecPrefill`."""
        self.speculator = speculator
        self._predictor = predictor
        self._kernels = kernels
        self._prefill_chunk = prefill_chunk
        self._default_look_ahead = default_look_ahead
        self._card = card
        self.self_check = SelfCheck(speculator.model, kernels)
        self.check_heads(self.settle(None))  # the card's may lie behind the layers that were loaded

    def settle(self, config: SpecPrefillConfig | None) -> SpecPrefillConfig:
        """A config, None for the defaults, with what the card says; ArgumentError where they do not go together."""
        config = config or SpecPrefillConfig()
        return config if self._card is None else self._card.settle(config)

    def select(
        self,
        ids: np.ndarray,
        spans: Spans,
        config: SpecPrefillConfig,
        read: Callable[[SpecPrefillConfig], LookAhead] | None = None,
    ) -> Selection:
        """See `SpecPrefill.select`: the scores were waited for and are finite. `read`: where the look-ahead is from."""
        selection = self.enqueue(ids, spans, config, None, read=read)
        try:
            selection.check()
        except SpecPrefillError as error:
            if config.mode == "paper":
                raise
            return self.failed(ids, config, error)
        return selection

    def select_many(self, ids: np.ndarray, spans: Spans, configs: Sequence[SpecPrefillConfig]) -> list[Selection]:
        """See `SpecPrefill.select_many`."""
        look_ahead = max((config.look_ahead or self._default_look_ahead for config in configs), default=1)
        aheads: dict[tuple[tuple[int, ...], int], LookAhead] = {}

        def read(config: SpecPrefillConfig) -> LookAhead:
            ends, window = self.ends(config), config.query_window
            if (ends, window) not in aheads:
                aheads[ends, window] = self.speculator.read(ids, look_ahead, ends, window=window)
            return aheads[ends, window]

        scored: dict[SpecPrefillConfig, Selection] = {}
        selections: list[Selection] = []
        for config in configs:
            alike = replace(config, keep_rate=1.0)
            if alike in scored and config.keep_rate != "auto":  # which may have to try what was not tried before
                selection = scored[alike].replan(self.plan(ids, spans, config))
            else:
                selection = self.select(ids, spans, config, read)
                if selection.chunk_scores is not None:
                    scored[alike] = selection
            selections.append(selection)
        return selections

    def enqueue(
        self,
        ids: np.ndarray,
        spans: Spans,
        config: SpecPrefillConfig,
        marks: Marks | None,
        drafts: Drafts | None = None,
        read: Callable[[SpecPrefillConfig], LookAhead] | None = None,
    ) -> Selection:
        """Plan on the host, then enqueue speculation (unless `read` has it), scoring and choice on the device.

        Waits for nothing but, under keep rate "auto", the scores.
        """
        planned = self.plan(ids, spans, config)
        if not planned.engaged:
            if marks is not None:
                marks.clock.phase("main_prefill")
            return Selection(planned)
        ends, heads = self.ends(config), self.check_heads(config)  # refused before anything is read
        try:
            return self._score(ids, planned, config, ends, heads, marks, drafts, read)
        except Exception as error:
            if config.mode == "paper":
                raise SpecPrefillError(f"the speculator failed: {error}") from error
            if marks is not None:
                marks.clock.phase("main_prefill")
            return self.failed(ids, config, error)

    def plan(self, ids: np.ndarray, spans: Spans, config: SpecPrefillConfig) -> Plan:
        """What the host decides of a prompt."""
        gain, prediction = self._predicted(len(ids), config)
        forced = spans if config.mode == "product" else ()
        return make_plan(len(ids), config, forced_spans=forced, predicted_gain=gain, prediction=prediction)

    def _predicted(
        self, num_tokens: int, config: SpecPrefillConfig
    ) -> tuple[Callable[[int], float], Callable[[int], Prediction]]:
        """What is foreseen of a prompt for a number of kept tokens: how much faster it gets, and what it takes."""
        look_ahead = config.look_ahead or self._default_look_ahead
        more = {"query_window": config.query_window, "checks": most_checks(config, look_ahead)}
        return (
            partial(self._predictor.gain, num_tokens, look_ahead, **more),
            partial(self._predictor.phases, num_tokens, look_ahead, **more),
        )

    def _score(
        self,
        ids: np.ndarray,
        planned: Plan,
        config: SpecPrefillConfig,
        ends: tuple[int, ...],
        heads: Heads,
        marks: Marks | None,
        drafts: Drafts | None,
        read: Callable[[SpecPrefillConfig], LookAhead] | None,
    ) -> Selection:
        if marks is not None:
            marks.clock.phase("speculate", tokens=len(ids))
        if len(ids) > self.speculator.model.config.max_position_embeddings:
            limit = self.speculator.model.config.max_position_embeddings
            raise ArgumentError(
                f"prompt of {len(ids)} tokens is not allowed: it must fit the speculator's context of {limit} tokens"
            )
        look_ahead, window = config.look_ahead or self._default_look_ahead, config.query_window
        if read is not None:
            ahead = read(config) if window else read(config).first(look_ahead)
        else:
            room = drafts.room if drafts is not None else 0
            ahead = self.speculator.read(ids, look_ahead, ends, room=room, window=window)
        if drafts is not None:
            drafts.cache = ahead.cache
        if marks is not None:
            marks.reach(ahead.num_queries, "score")
        size = bucket(len(ids))
        chunk_size = min(config.chunk_size, size)  # a chunk longer than the prompt is the prompt
        prompt, length = padded_ids(ids), np.full((1,), len(ids), np.int32)
        forced = planned.forced_mask(num_chunks(size, chunk_size))[None]
        chunks = np.full((1,), planned.num_chunks, np.int32)
        kept_size = padded(planned.max_kept_tokens, self._prefill_chunk)
        importance, scores, choice, num_queries, tokens = score_and_choose(
            ahead,
            prompt,
            length,
            forced,
            chunks,
            np.full((1,), planned.kept_chunks, np.int32),
            size=size,
            pool_width=config.pool_width or 0,
            chunk_size=chunk_size,
            kept_size=kept_size,
            window=window > 0,
            heads=heads,
            backend=self._kernels,
            mesh=self.speculator.model.mesh,
        )
        divergences = self.self_check.divergences(
            ahead, scores, prompt, length, forced, chunks, planned.rungs, chunk_size=chunk_size, size=kept_size
        )
        selection = Selection(
            planned,
            choice=choice,
            chunk_scores=scores,
            importance=importance,
            num_queries=num_queries,
            look_ahead_tokens=tokens,
            divergences=divergences,
            prompt=ids,
        )
        if planned.least_chunks is None:
            if marks is not None:
                marks.reach(choice.kept_count, "main_prefill")
            return selection
        # The scores say how much the main model reads: the host must wait for them.
        if marks is not None:
            marks.settle()
        selection = self.adapt(selection, config)
        if marks is not None:
            marks.clock.phase("main_prefill")
        return selection

    def adapt(self, selection: Selection, config: SpecPrefillConfig, whole_fits: bool = True) -> Selection:
        """What the scores of a selection ask for under keep rate "auto" (`Selection.adapt`); others as they are."""
        gain, prediction = self._predicted(selection.num_tokens, config)
        return selection.adapt(config, predicted_gain=gain, prediction=prediction, whole_fits=whole_fits)

    def failed(self, ids: np.ndarray, config: SpecPrefillConfig, error: Exception) -> Selection:
        """The selection of a prompt whose speculator failed: all of it."""
        detail = f"{type(error).__name__}: {error}"
        return Selection.whole(len(ids), Reason.SPECULATOR_FAILED, chunk_size=config.chunk_size, detail=detail)

    def check_heads(self, config: SpecPrefillConfig) -> Heads:
        """The heads that score, as the speculator's cache has them; ArgumentError for one that it does not have."""
        model = self.speculator.model
        copies = model.layout.num_heads // model.config.num_heads
        layers, heads = model.config.num_layers, model.config.num_heads
        for layer, head in config.scoring_heads:
            if layer >= layers or head >= heads:
                allowed = f"pairs of a layer below the speculator's {layers} and a head below its {heads}"
                raise argument_error("scoring_heads", (layer, head), allowed)
        return tuple((layer, head * copies) for layer, head in config.scoring_heads)

    def ends(self, config: SpecPrefillConfig) -> tuple[int, ...]:
        """Ids that end the look-ahead. They say nothing of where the answer ends: that is the main model's own."""
        given = config.eos_token_ids
        ids = self.speculator.model.config.eos_token_ids if given is None else given
        if len(ids) > MAX_EOS_IDS:
            raise argument_error("eos_token_ids", ids, f"at most {MAX_EOS_IDS} ids")
        return ids
