"""The engine's rounds: what its one thread does with the models.

A round is enqueued before the results of the one before it are read, so that devices never wait for Python; but how
many proposals were right is read at once, since the next round hangs on it. Where enqueuing takes as long as running
(layerwise models, on CPUs), all results are read at once.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from specprefill_jax.config import SpecPrefillConfig
from specprefill_jax.decode import TokenLogprobs
from specprefill_jax.engine.request import Delta, FinishReason, Request
from specprefill_jax.engine.runner import Chosen, Runner
from specprefill_jax.engine.scheduler import LookAhead, Phase, Piece, Prefill, Scheduler, Speculate
from specprefill_jax.engine.scheduler import Sequence as Scheduled
from specprefill_jax.engine.work import Work, batch_of, propose
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.models.paged import PAGE
from specprefill_jax.planning import Plan, Reason
from specprefill_jax.selection import Selection

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Pending:
    """Results on their way to the host, whose they are, and what is done with them there."""

    works: Sequence[Work]
    receive: Callable[[], None]
    decoding: bool = False
    counted: bool = False
    """Whether it says how many proposals were right, without which no round can be decided."""


class Loop:
    """All requests that are not finished, and what is done for them; one thread's own."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        plan: Callable[[Request, int, int, int], Plan],
        adapt: Callable[[Selection, SpecPrefillConfig, bool], Selection],
        *,
        memoised_selections: int,
        begun: Callable[[str], None],
        ended: Callable[[str], None],
    ):
        """Work with a runner as a scheduler says.

        Args:
            runner: the models.
            scheduler: of its caches.
            plan: from a request, its prompt's tokens, its look-ahead and the tokens that are in the cache to a plan.
            adapt: from a selection, its settings and whether the prompt may be read whole to what its scores ask for.
            memoised_selections: selections to remember.
            begun: told of a request's id when the first of it is read.
            ended: told of it when it is over.
        """
        self._runner, self._scheduler, self._plan = runner, scheduler, plan
        self._adapt = adapt
        self._memoised = memoised_selections
        self._begun, self._ended = begun, ended
        self.works: dict[str, Work] = {}
        """By request id."""
        self.busy_since: float | None = None
        """Since when, by `time.monotonic`, a round has been going on."""
        counters = "prompt_tokens kept_tokens cached_tokens generation_tokens preemptions memoised_selections"
        counters += " drafts proposed_tokens accepted_tokens"
        self.counters = dict.fromkeys(counters.split(), 0)
        """See `request.Stats`."""
        self.rate = 0.0
        """Prompt tokens a second, lately, of a request that is being read; 0: not known yet."""
        self._selections: OrderedDict[tuple, Selection] = OrderedDict()
        self._selecting: dict[tuple, Work] = {}
        self._pending: list[_Pending] = []
        self._losses = 0
        """How often the caches were lost: what a round had planned for their pages is then void."""

    def end_all(self, reason: FinishReason, error: str | None = None) -> None:
        """End every request."""
        self._pending.clear()
        for work in list(self.works.values()):
            self.finish(work, reason, error)

    def admit(self, work: Work) -> None:
        """Take a checked request on."""
        sequence = work.sequence
        self.works[sequence.request_id] = work
        work.request.clock.phase("queue")
        if sequence.look_ahead:
            cached = self._scheduler.pages.count_published(sequence.hashes) * PAGE
            if cached and work.request.config.mode == "product":
                # What a dense read would find in the cache counts against speculation.
                planned = self._plan(work.request, sequence.num_tokens, sequence.look_ahead, cached)
                if not planned.engaged and self._fits_whole(sequence):
                    work.read_whole(planned)
        if not sequence.look_ahead:
            self._scheduler.add(sequence)
            return
        found = self._selections.get(work.key)
        if found is not None:
            self._selections.move_to_end(work.key)
            self.counters["memoised_selections"] += 1
            sequence.look_ahead = 0
            work.select(found)
            self._scheduler.add(sequence)
            return
        leader = self._selecting.setdefault(work.key, work)
        if leader is not work:
            leader.followers.append(work)
            return
        self._scheduler.add(sequence)

    def _fits_whole(self, sequence: Scheduled) -> bool:
        return -(-(sequence.num_tokens + sequence.max_tokens) // PAGE) < self._runner.num_pages

    # rounds

    def round(self) -> bool:
        """Enqueue what the scheduler says, then receive the results of the round before; whether there was any work."""
        planned = self._scheduler.schedule()
        self.counters["preemptions"] += len(planned.preempted)
        self.busy_since = time.monotonic()
        before, self._pending = self._pending, []
        losses = self._losses
        if planned.decode:
            self._attempt([self.works[s.request_id] for s in planned.decode], self._decode, decoding=True)
        if planned.piece is not None and self._losses == losses:
            self._piece(planned.piece)
        for pending in before:
            self._receive(pending)
        for pending in [pending for pending in self._pending if pending.counted]:
            self._pending.remove(pending)
            self._receive(pending)
        self.busy_since = None
        return bool(before or planned.decode or planned.piece or self._pending)

    def _piece(self, piece: Piece) -> None:
        if isinstance(piece, LookAhead):
            self._attempt([self.works[s.request_id] for s in piece.sequences], self._look_ahead)
            return
        if isinstance(piece, Speculate) and not piece.sequence.draft_pages:
            return  # it was to be read again, and its step of this round has ended it, or failed
        work = self.works[piece.sequence.request_id]
        if not work.begun:
            work.begun = True
            work.request.clock.phase("speculate" if isinstance(piece, Speculate) else "main_prefill")
            self._begun(work.request.request_id)
        if isinstance(piece, Speculate) and piece.sequence.phase is Phase.DECODE:
            self._read_again(work, piece)
        elif isinstance(piece, Speculate):
            self._attempt([work], lambda works: self._speculate(works[0], piece))
        else:
            self._attempt([work], lambda works: self._prefill(works[0], piece))

    def _attempt(
        self, works: list[Work], enqueue: Callable[[list[Work]], _Pending | None], decoding: bool = False
    ) -> None:
        try:
            pending = enqueue(works)
        except Exception as error:
            self._failed(works, error, decoding)
            return
        if pending is None:
            return
        pending = replace(pending, decoding=decoding)
        if self._runner.eager:
            self._receive(pending)
        else:
            self._pending.append(pending)

    def _receive(self, pending: _Pending) -> None:
        try:
            pending.receive()
        except Exception as error:
            self._failed(pending.works, error, pending.decoding)

    def _failed(self, works: Sequence[Work], error: Exception, decoding: bool) -> None:
        """A step for these requests failed: they alone, or one by one until the culprit is found, pay for it."""
        works = [work for work in works if work.sequence.phase is not Phase.DONE]
        log.error("a step for %s failed", [work.request.request_id for work in works], exc_info=error)
        lost = self._reset_if_lost()
        # What failed may have been the speculator, and proposals are not worth a second try.
        proposed = any(work.sequence.proposals for work in works)
        victims = []
        for work in works:
            detail = f"{type(error).__name__}: {error}"
            speculating = work.sequence.phase in (Phase.SPECULATE, Phase.LOOK_AHEAD, Phase.CHOOSING)
            if speculating and work.request.config.mode == "product" and self._fits_whole(work.sequence):
                self._fall_back(work, detail)
            elif decoding and (len(works) > 1 or proposed):
                if proposed:
                    self._scheduler.decode_plainly(work.sequence)
                work.sequence.suspect = True
                victims.append(work)
            else:
                what = "the speculator failed" if speculating else "the request failed"
                self.finish(work, "error", f"{what}: {detail}", publish=False)
        # Even where nobody begins again: pages were published as soon as it was planned to fill them.
        self._begin_again(list(self.works.values()) if lost else victims)

    def _reset_if_lost(self) -> bool:
        """Whether the caches were lost with a step that failed; they are new then, and empty."""
        if self._runner.intact:
            return False
        self._losses += 1
        self._pending.clear()  # of programs that took the lost cache
        self._runner.reset()
        return True

    def _begin_again(self, works: Sequence[Work]) -> None:
        for work in works:
            work.restarts += 1
            work.step = None
        self._scheduler.start_over([work.sequence for work in works])

    def _propose_no_more(self, works: Sequence[Work], error: Exception) -> None:
        """The speculator failed while these decode, which they go on with plainly."""
        ids = [work.request.request_id for work in works]
        log.warning("the speculator failed, %s go on without its proposals", ids, exc_info=error)
        for work in works:
            self._scheduler.decode_plainly(work.sequence)
        if self._reset_if_lost():
            self._begin_again(list(self.works.values()))

    def _fall_back(self, work: Work, detail: str) -> None:
        """Read a prompt whole, from a clean state, since its speculation failed."""
        self._settle(work, None)
        self._scheduler.decode_plainly(work.sequence)
        work.read_whole(work.plan.read_whole(Reason.SPECULATOR_FAILED), detail)
        work.step = None
        self._scheduler.chosen(work.sequence, work.sequence.kept, work.sequence.dense)
        work.request.clock.phase("main_prefill")

    # the steps

    def _speculate(self, work: Work, piece: Speculate) -> None:
        sequence = piece.sequence
        tokens = work.known[piece.start : piece.start + piece.count]
        runner = self._runner
        step = runner.speculate(tokens, piece.start, sequence.draft_pages, sequence.num_tokens, work.step)
        if sequence.phase is Phase.LOOK_AHEAD or (runner.window and sequence.phase is Phase.SPECULATE):
            work.step = step
        if self._runner.eager:
            jax.block_until_ready(step.hidden)

    def _read_again(self, work: Work, piece: Speculate) -> None:
        """The speculator reads what is known of prompt and answer, for its proposals."""
        try:
            self._speculate(work, piece)
        except Exception as error:
            self._propose_no_more([work], error)

    def _look_ahead(self, works: list[Work]) -> _Pending:
        sequences = [work.sequence for work in works]
        ahead = self._runner.look_ahead(
            [work.step for work in works if work.step is not None],
            [sequence.num_tokens for sequence in sequences],
            [sequence.draft_pages for sequence in sequences],
            [work.request.config.eos_token_ids or () for work in works],
            sequences[0].look_ahead,
        )
        outputs = [
            self._runner.score(
                ahead,
                row,
                work.sequence.prompt,
                work.sequence.draft_pages,
                work.plan,
                work.request.config.pool_width or 0,
            )
            for row, work in enumerate(works)
        ]
        for work in works:
            work.step = None

        def receive() -> None:
            jax.block_until_ready(ahead.num_queries)
            for work in works:
                work.request.clock.phase("score")
            for work, output in zip(works, outputs, strict=True):
                if work.sequence.phase is Phase.CHOOSING:
                    self._choice(work, output)

        return _Pending(works, receive)

    def _choice(self, work: Work, output: tuple) -> None:
        """The device has chosen; what the host is told of it is remembered, but for the importance of every token."""
        _, scores, choice, num_queries, tokens, divergences = jax.device_get(output)
        count = int(num_queries)
        selection = Selection(
            work.plan,
            choice=choice,
            chunk_scores=scores,
            num_queries=count,
            look_ahead_tokens=[int(token) for token in tokens[:count]],
            divergences=divergences,
            prompt=work.sequence.prompt,
        )
        try:
            selection.check()
            selection = self._adapt(selection, work.request.config, self._fits_whole(work.sequence))
        except SpecPrefillError as error:
            self._failed([work], error, decoding=False)
            return
        key = work.key
        self._selections[key] = selection
        if len(self._selections) > self._memoised:
            self._selections.popitem(last=False)
        work.select(selection)
        self._scheduler.chosen(work.sequence, work.sequence.kept, work.sequence.dense)
        work.request.clock.phase("main_prefill")
        self._settle(work, selection)

    def _settle(self, work: Work, selection: Selection | None) -> None:
        """Those who waited for this one's selection take it, or, where there is none, try for themselves."""
        if self._selecting.get(work.key) is work:
            del self._selecting[work.key]
        followers, work.followers = work.followers, []
        for follower in followers:
            if selection is not None:
                follower.sequence.look_ahead = 0
                self.counters["memoised_selections"] += 1
                follower.select(selection)
            else:
                leader = self._selecting.setdefault(follower.key, follower)
                if leader is not follower:
                    leader.followers.append(follower)
                    continue
            self._scheduler.add(follower.sequence)

    def _prefill(self, work: Work, piece: Prefill) -> _Pending | None:
        sequence, runner, kept = work.sequence, self._runner, work.kept
        assert kept is not None
        end = piece.start + piece.count
        tokens, positions = sequence.prompt[kept], kept
        if sequence.generated:  # it was preempted
            more = np.asarray(sequence.generated, np.int32)
            tokens = np.concatenate([tokens, more])
            positions = np.concatenate([positions, sequence.num_tokens + np.arange(len(more), dtype=np.int32)])
        tokens, positions = tokens[piece.start : end], positions[piece.start : end]
        logprobs = None
        if work.request.prompt_logprobs is not None and not work.has_prompt_logprobs:
            following = sequence.prompt[piece.start + 1 : end + 1]
            hidden, logprobs = runner.prefill_with_logprobs(tokens, following, piece.start, sequence.pages)
        else:
            hidden = runner.prefill(tokens, positions, piece.start, sequence.pages)
        chosen, restarts = None, [work.restarts]
        if piece.is_last:
            if work.request.sampling.repetition_penalty != 1.0:
                assert sequence.row is not None
                runner.fill_seen(sequence.row, work.known)
            chosen = runner.choose(hidden, batch_of([work], 1, runner.max_running))
        elif runner.eager:
            jax.block_until_ready(hidden)
        if chosen is None and logprobs is None:
            return None

        def receive() -> None:
            if logprobs is not None:
                self._receive_prompt_logprobs(work, piece, logprobs)
            if chosen is not None:
                jax.block_until_ready(hidden)
                if not sequence.generated:
                    work.request.clock.phase("first_token")
                self._receive_tokens([work], restarts, chosen)

        return _Pending([work], receive)

    def _decode(self, works: list[Work]) -> _Pending | None:
        sequences, runner = [work.sequence for work in works], self._runner
        size = next(rows for rows in runner.rows if rows >= len(works))
        losses, proposals = self._losses, None
        try:
            proposals = propose(runner, works, size)
        except Exception as error:
            self._propose_no_more([work for work in works if work.sequence.proposals], error)
        if self._losses != losses:  # all begin again
            return None
        extra = size - len(works)
        positions = np.array([s.num_tokens + s.issued - 2 for s in sequences] + [0] * extra, np.int32)
        slots = np.array([s.done - 1 for s in sequences] + [0] * extra, np.int32)
        pages = [s.pages for s in sequences] + [[]] * extra
        batch = batch_of(works, size, runner.max_running)
        if proposals is None:
            chosen = runner.decode(batch, positions, slots, pages)
        else:
            limits = np.array([s.proposals for s in sequences] + [0] * extra, np.int32)
            chosen = runner.verify(batch, positions, slots, pages, proposals, limits)
        restarts = [work.restarts for work in works]

        def receive() -> None:
            self._receive_tokens(works, restarts, chosen)
            for work, count in zip(works, restarts, strict=True):
                if work.restarts == count:  # else it is yet to decode alone
                    work.sequence.suspect = False

        return _Pending(works, receive, counted=proposals is not None)

    # results

    def _receive_tokens(self, works: Sequence[Work], restarts: Sequence[int], chosen: Chosen) -> None:
        """Each request's next tokens, but for those that have ended or begun again since it was enqueued."""
        wanted = any(work.request.sampling.logprobs is not None for work in works)
        tokens, accepted, logprobs = jax.device_get(
            (chosen.tokens, chosen.accepted, chosen.logprobs if wanted else None)
        )
        for row, work in enumerate(works):
            if work.sequence.phase is Phase.DONE or work.restarts != restarts[row]:
                continue
            extra = 0
            if accepted is not None:
                extra = int(accepted[row])
                self._learn(work, extra)
            count = work.request.sampling.logprobs
            try:
                for place in range(extra + 1):
                    if work.request.request_id not in self.works:  # it ended with an earlier one
                        break
                    at = (row,) if accepted is None else (row, place)
                    self._token(work, int(tokens[at]), None if count is None else _logprobs(logprobs, at, count))
            except Exception as error:  # of its text or its listener: no other's business, nor the caches'
                log.exception("a token of %s could not be handed on", work.request.request_id)
                self.finish(work, "error", f"the request failed: {type(error).__name__}: {error}")

    def _learn(self, work: Work, accepted: int) -> None:
        """So many of a request's proposals were right."""
        sequence, acceptance = work.sequence, work.acceptance
        if sequence.proposals:
            acceptance.add(sequence.proposals, accepted)
            sequence.draft_tokens = acceptance.next_count()
            self.counters["drafts"] += 1
            self.counters["proposed_tokens"] += sequence.proposals
            self.counters["accepted_tokens"] += accepted
            self._scheduler.accepted(sequence, accepted)

    def _token(self, work: Work, token: int, logprobs: TokenLogprobs | None) -> None:
        sequence = work.sequence
        sequence.generated.append(token)
        self.counters["generation_tokens"] += 1
        clock = work.request.clock
        if len(sequence.generated) == 1:
            self._first_token(work)
            clock.count("first_token", 1)
        text = work.text.push(token) if work.text is not None else ""
        work.on_event(Delta(text, (token,), None if logprobs is None else (logprobs,)))
        clock.phase("decode", tokens=1 if len(sequence.generated) > 1 else 0)
        if token in work.ends or (work.text is not None and work.text.stopped):
            self.finish(work, "stop")
        elif len(sequence.generated) == sequence.max_tokens:
            self.finish(work, "length")

    def _first_token(self, work: Work) -> None:
        sequence, clock = work.sequence, work.request.clock
        for name, count in (
            ("prompt_tokens", sequence.num_tokens),
            ("kept_tokens", sequence.kept),
            ("cached_tokens", sequence.cached),
        ):
            self.counters[name] += count
        if work.selection is not None and work.selection.chunk_scores is not None:
            clock.count("speculate", sequence.num_tokens)
        clock.count("main_prefill", sequence.kept - sequence.cached)
        timings = clock.timings()
        busy = timings.speculate + timings.score + timings.main_prefill
        if busy > 0:
            rate = sequence.num_tokens / busy
            self.rate = rate if not self.rate else 0.8 * self.rate + 0.2 * rate

    def _receive_prompt_logprobs(self, work: Work, piece: Prefill, logprobs: Any) -> None:
        found, count = work.prompt_logprobs, work.request.prompt_logprobs
        assert count is not None
        if piece.start == 0 or found is None:
            found = work.prompt_logprobs = [None]
        host = jax.device_get(logprobs)
        missing = work.sequence.num_tokens - len(found)
        found += [_logprobs(host, (row,), count) for row in range(min(piece.count, missing))]
        work.has_prompt_logprobs = len(found) == work.sequence.num_tokens

    def finish(self, work: Work, reason: FinishReason, error: str | None = None, *, publish: bool = True) -> None:
        """End a request, whatever it is doing, and say so to its listener."""
        if work.sequence.phase is Phase.DONE:
            return
        self._settle(work, None)
        leader = self._selecting.get(work.key)
        if leader is not None and work in leader.followers:
            leader.followers.remove(work)
        self._scheduler.finish(work.sequence, publish=publish)
        del self.works[work.request.request_id]
        self._ended(work.request.request_id)
        try:
            if work.text is not None and reason in ("stop", "length"):
                rest = work.text.flush()
                if rest:
                    work.on_event(Delta(rest, (), None))
            work.on_event(work.finished(reason, error))
        except Exception:
            log.exception("a listener failed at the end of %s", work.request.request_id)


def _logprobs(arrays: Any, at: tuple[int, ...], count: int) -> TokenLogprobs:
    chosen, ids, values = arrays
    top = {int(i): float(value) for i, value in zip(ids[at][:count], values[at][:count], strict=True)}
    return TokenLogprobs(float(chosen[at]), top)
