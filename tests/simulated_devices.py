"""Devices that remember what was written where: an engine around the scheduler, without any model.

Each slot of a page holds the whole history behind its token, as one number: what the token was, where it stood, and
what its predecessors were. So a request that reads a slot can say whether it holds what a run alone would have put
there, and the token that follows a history is a function of it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from specprefill_jax.engine.blocks import NOBODY, BlockManager
from specprefill_jax.engine.scheduler import (
    MAX_LOOK_AHEAD_ROWS,
    LookAhead,
    Phase,
    Prefill,
    Round,
    Scheduler,
    Sequence,
    Speculate,
)
from specprefill_jax.models.paged import PAGE

Memory = dict[tuple[int, int], int]
READING = (Phase.PREFILL, Phase.DECODE)
SPECULATING = (Phase.SPECULATE, Phase.LOOK_AHEAD, Phase.CHOOSING)


def history(tokens: Iterable[int], positions: Iterable[int], last: int = 0) -> list[int]:
    """What the slots of these tokens hold, after a slot that holds `last`."""
    out = []
    for token, position in zip(tokens, positions, strict=True):
        last = hash((last, int(token), int(position)))
        out.append(last)
    return out


def following(last: int) -> int:
    """The token after a history."""
    return last % 509


@dataclass(eq=False)
class Job:
    """A request, what a run alone would give, and what has arrived."""

    sequence: Sequence
    kept: np.ndarray
    slots: list[int] = field(default_factory=list)
    """What its slots must hold, answer included."""
    answer: list[int] = field(default_factory=list)
    filled: int = 0
    """Slots of the main model's cache that were written or found since it last got its pages."""
    first_token: int | None = None
    """The round in which its first token arrived."""
    proposed: int = 0
    accepted: int = 0


class Simulation:
    """Rounds of a scheduler, each checked."""

    def __init__(
        self,
        pages: int = 65,
        draft_pages: int = 65,
        max_running: int = 4,
        chunk: int = 2 * PAGE,
        draft_cost: float = 0.1,
        late: bool = True,
        cheap_tokens: int = 1000,
    ):
        self.pages, self.draft_pages = BlockManager(pages), BlockManager(draft_pages)
        self.scheduler = Scheduler(
            self.pages,
            self.draft_pages,
            max_running=max_running,
            chunk=chunk,
            draft_cost=draft_cost,
            cheap_tokens=cheap_tokens,
        )
        self.max_running, self.chunk, self.late = max_running, chunk, late
        self.main: Memory = {}
        self.draft: Memory = {}
        self.rows: dict[int, int] = {}
        """The token that each row of the decode state got last."""
        self.jobs: dict[str, Job] = {}
        self.finished: dict[str, Job] = {}
        self.rounds: list[Round] = []
        self.pending: list[tuple] = []
        self.preemptions: list[str] = []

    def fits(self, kept: int, max_tokens: int, tokens: int, look_ahead: int) -> bool:
        """What the engine asks before it takes a request."""
        if look_ahead and -(-(tokens + look_ahead - 1) // PAGE) >= self.draft_pages.num_pages:
            return False
        return -(-(kept + max_tokens) // PAGE) < self.pages.num_pages

    def submit(
        self,
        name: str,
        prompt: np.ndarray,
        max_tokens: int = 4,
        look_ahead: int = 0,
        kept: np.ndarray | None = None,
        share: bool = True,
        draft_tokens: int = 0,
    ) -> Job:
        """A request whose speculation, where there is one, will choose the tokens `kept`; None keeps all."""
        kept = np.arange(len(prompt)) if kept is None else kept
        sequence = Sequence(name, np.asarray(prompt, np.int32), max_tokens, look_ahead, len(kept), share)
        sequence.draft_tokens = draft_tokens
        job = self.jobs[name] = Job(sequence, kept)
        self._expect(job)
        if not look_ahead:
            sequence.kept, sequence.dense = len(kept), dense(kept)
        self.scheduler.add(sequence)
        return job

    def _expect(self, job: Job) -> None:
        prompt = job.sequence.prompt
        job.slots = history(prompt[job.kept], job.kept)
        job.answer = []
        for index in range(job.sequence.max_tokens):
            job.answer.append(following(job.slots[-1]))
            job.slots += history(job.answer[-1:], [len(prompt) + index], job.slots[-1])

    def read_whole(self, name: str) -> None:
        """Speculation failed: the prompt is read whole, as the engine falls back to."""
        job = self.jobs[name]
        job.kept = np.arange(job.sequence.num_tokens)
        self._expect(job)
        self.scheduler.chosen(job.sequence, len(job.kept), len(job.kept))

    def fail_decoding(self) -> None:
        """A decode step failed before it wrote anything: its requests begin again, in other pages."""
        victims = [job for job in self.jobs.values() if job.sequence.phase is Phase.DECODE]
        for job in victims:
            job.sequence.suspect = True
            job.filled = 0
        self.scheduler.start_over([job.sequence for job in victims])

    def cancel(self, name: str) -> None:
        self.scheduler.finish(self.jobs.pop(name).sequence)

    def run(self, limit: int = 3000) -> None:
        """Until all are finished."""
        while self.jobs:
            self.round()
            assert len(self.rounds) < limit, "no end in sight"
        assert self.pages.usage == self.draft_pages.usage == 0
        assert self.scheduler.sequences == {}
        self.check_pages()

    def round(self, lose: bool = False) -> Round:
        """One round; `lose`: enqueuing it fails and takes the caches with it."""
        sequences = self.scheduler.sequences
        streams = [s for s in self.scheduler.in_phase(Phase.DECODE) if s.issued < s.max_tokens]
        holders = list(self.scheduler.in_phase(*READING))
        plan = self.scheduler.schedule()
        self.rounds.append(plan)
        self.preemptions += [s.request_id for s in plan.preempted]
        # Nobody who has a first token waits for more than this round's one piece, but for want of memory.
        suspects = [s for s in streams if s.suspect]
        expected = suspects[:1] or streams
        assert list(plan.decode) == [s for s in expected if s not in plan.preempted]
        left = [s for s in holders if s not in plan.preempted]
        for victim in plan.preempted:
            assert all(other.order < victim.order for other in left), "an older one lost its pages"
            assert (victim.phase, victim.pages, victim.row, victim.done) == (Phase.READY, [], None, 0)
        for job in self.jobs.values():
            if job.sequence.row is None:
                job.filled = 0

        before, self.pending = self.pending, []
        if lose:
            self.main.clear()
            self.draft.clear()
            self.scheduler.start_over(list(sequences.values()))
            for job in self.jobs.values():
                job.filled = 0
        else:
            self._decode(plan)
            self._piece(plan)
        if not self.late:
            before, self.pending = before + self.pending, []
        idle = not plan.decode and plan.piece is None and not before and not self.pending
        assert not (idle and self.jobs), "nothing moves"
        counted = [result for result in self.pending if result[0] == "tokens"]
        self.pending = [result for result in self.pending if result[0] != "tokens"]
        for result in before + counted:  # how many proposals are right is known before the next round is decided
            self._receive(*result)
        self.check_pages()
        return plan

    # the devices

    def _decode(self, plan: Round) -> None:
        for sequence in plan.decode:
            job = self.jobs[sequence.request_id]
            index, slot = sequence.issued - 1, sequence.done - 1
            assert 0 < index < sequence.max_tokens
            assert slot == len(job.kept) + index - 1
            assert self.rows[sequence.row] == job.answer[index - 1]
            proposals = self._propose(job, index) if sequence.proposals else []
            right = 0
            while right < len(proposals) and proposals[right] == job.answer[index + right]:
                right += 1
            tokens = [job.answer[index - 1], *proposals]
            positions = sequence.num_tokens + index - 1 + np.arange(len(tokens))
            for part, owner in ((slice(0, right + 1), job), (slice(right + 1, None), None)):
                self._write(owner, self.main, sequence.pages, slot + part.start, tokens[part], positions[part])
            self.rows[sequence.row] = following(self._held(self.main, sequence.pages, slot + right))
            if proposals:
                self.pending.append(("tokens", job, right))
            else:
                self.pending.append(("token", job, self.rows[sequence.row]))

    def _propose(self, job: Job, index: int) -> list[int]:
        """As many as were reserved for, two of three of them right; the speculator's cache is as after its own run."""
        sequence, count = job.sequence, job.sequence.proposals
        assert not sequence.suspect
        assert index + count < sequence.max_tokens
        tokens = sequence.num_tokens
        right = [job.answer[index + i] for i in range(count)]
        proposals = [token + (token % 3 == 0) for token in right]
        first = max(index - 2, 0)
        said = [*sequence.prompt, *job.answer[:first]]
        held = [self._held(self.draft, sequence.draft_pages, slot) for slot in range(len(said))]
        assert held == history(said, range(len(said)))
        fed = [*job.answer[first:index], *proposals[:-1]]
        at = tokens + first + np.arange(len(fed))
        self._write(None, self.draft, sequence.draft_pages, tokens + first, fed, at)
        return proposals

    def _piece(self, plan: Round) -> None:
        piece = plan.piece
        if isinstance(piece, Speculate):
            sequence = piece.sequence
            assert piece.start % PAGE == 0
            assert 0 < piece.count <= self.chunk
            at = np.arange(piece.start, piece.start + piece.count)
            if sequence.phase is Phase.DECODE:
                assert sequence.draft_tokens
                assert not any(self.scheduler.in_phase(Phase.WAITING)), "others waited for these pages"
            else:
                assert at[-1] < sequence.num_tokens
            known = np.asarray([*sequence.prompt, *sequence.generated], np.int32)
            self._write(None, self.draft, sequence.draft_pages, piece.start, known[at], at)
        elif isinstance(piece, LookAhead):
            self._look_ahead(piece)
        elif isinstance(piece, Prefill):
            self._prefill(piece)

    def _look_ahead(self, piece: LookAhead) -> None:
        assert 1 <= len(piece.sequences) <= MAX_LOOK_AHEAD_ROWS
        assert len({s.look_ahead for s in piece.sequences}) == 1
        assert len(set(piece.sequences)) == len(piece.sequences)
        for sequence in piece.sequences:
            assert sequence.phase is Phase.CHOOSING
            tokens = sequence.num_tokens
            expected = history(sequence.prompt, range(tokens))
            assert [self._held(self.draft, sequence.draft_pages, slot) for slot in range(tokens)] == expected
            extra = np.zeros(sequence.look_ahead - 1, np.int32)
            self._write(None, self.draft, sequence.draft_pages, tokens, extra, tokens + np.arange(len(extra)))
            self.pending.append(("choice", self.jobs[sequence.request_id], None))

    def _prefill(self, piece: Prefill) -> None:
        sequence = piece.sequence
        job = self.jobs[sequence.request_id]
        assert piece.start % PAGE == 0
        assert 0 < piece.count <= self.chunk
        assert piece.is_last or piece.count == self.chunk
        if job.filled == 0:  # what was found in the cache: others' pages, whole and of the very same tokens
            job.filled = piece.start
            found = [self._held(self.main, sequence.pages, slot) for slot in range(piece.start)]
            assert found == job.slots[: piece.start]
            assert sequence.share or not found
        known = len(job.kept) + len(sequence.generated)
        assert sequence.generated == job.answer[: len(sequence.generated)]
        assert piece.start + piece.count <= known
        tokens = [*sequence.prompt[job.kept], *sequence.generated]
        positions = [*job.kept, *range(sequence.num_tokens, sequence.num_tokens + len(sequence.generated))]
        part = slice(piece.start, piece.start + piece.count)
        self._write(job, self.main, sequence.pages, piece.start, tokens[part], positions[part])
        assert piece.is_last == (part.stop == known)
        if piece.is_last:
            token = following(self._held(self.main, sequence.pages, known - 1))
            self.rows[sequence.row] = token
            self.pending.append(("token", job, token))

    def _held(self, memory: Memory, pages: list[int], slot: int) -> int:
        return memory[pages[slot // PAGE], slot % PAGE]

    def _write(
        self, job: Job | None, memory: Memory, pages: list[int], start: int, tokens: Iterable, positions: Iterable
    ) -> None:
        """Attend to the slots before and fill the next ones, once each, in order, in pages that are nobody else's."""
        last = self._held(memory, pages, start - 1) if start else 0
        written = history(tokens, positions, last)
        for slot, value in enumerate(written, start):
            memory[pages[slot // PAGE], slot % PAGE] = value
        touched = set(pages[start // PAGE : -(-(start + len(written)) // PAGE)])
        draft = memory is self.draft
        for other in self.jobs.values():
            theirs = other.sequence.draft_pages if draft else other.sequence.pages
            assert theirs is pages or not touched & set(theirs), "wrote into a page that another holds"
        if job is not None:
            assert job.filled == start, "a slot is left out or written twice"
            job.filled += len(written)
            if start:
                assert last == job.slots[start - 1]
            assert written == job.slots[start : start + len(written)]

    # the host

    def _receive(self, kind: str, job: Job, token: int) -> None:
        """A choice, a token, or how many proposals were right."""
        sequence = job.sequence
        if sequence.phase is Phase.DONE:
            return
        if kind == "choice":
            if sequence.phase is Phase.CHOOSING:
                self.scheduler.chosen(sequence, len(job.kept), dense(job.kept))
            return
        if kind == "tokens":
            assert sequence.issued == len(sequence.generated) + 1
            job.proposed += sequence.proposals
            job.accepted += token
            tokens = job.answer[len(sequence.generated) :][: token + 1]
            if tokens[-1] % 17 == 0:  # they pay no more
                sequence.draft_tokens = 0
            self.scheduler.accepted(sequence, token)
        else:
            tokens = [token]
        assert tokens == job.answer[len(sequence.generated) :][: len(tokens)]
        sequence.generated += tokens
        sequence.suspect = False
        if job.first_token is None:
            job.first_token = len(self.rounds)
        if len(sequence.generated) == sequence.max_tokens:
            self.scheduler.finish(sequence)
            self.finished[sequence.request_id] = self.jobs.pop(sequence.request_id)

    def check_pages(self) -> None:
        """Pages and rows are where the requests say, and those that several hold hold the same tokens for all."""
        sequences = list(self.scheduler.sequences.values())
        for manager, of in ((self.pages, lambda s: s.pages), (self.draft_pages, lambda s: s.draft_pages)):
            manager.check()
            held: dict[int, list] = {}
            for sequence in sequences:
                pages = of(sequence)
                assert len(set(pages)) == len(pages)
                assert NOBODY not in pages
                for index, page in enumerate(pages):
                    held.setdefault(page, []).append((index, sequence))
            assert manager.available == manager.num_pages - 1 - len(held)
            for holders in held.values():
                index = holders[0][0]
                assert {i for i, _ in holders} == {index}
                if len(holders) == 1:
                    continue
                assert len({self._beginning(s, index) for _, s in holders}) == 1
                if manager is self.pages:  # nothing is missing before the end of a shared page
                    assert all(s.share for _, s in holders)
                    for _, s in holders:
                        kept = self.jobs[s.request_id].kept
                        whole = len(kept) == s.num_tokens
                        assert whole or (index + 1) * PAGE <= dense(kept), "a sparse page is shared"
        rows = [s.row for s in sequences if s.row is not None]
        assert len(set(rows)) == len(rows) <= self.max_running
        assert all((s.row is not None) == bool(s.pages) == (s.phase in READING) for s in sequences)
        assert all(s.draft_tokens or not s.draft_pages or s.phase in SPECULATING for s in sequences)
        assert not any(s.proposals for s in sequences)

    def _beginning(self, sequence: Sequence, page: int) -> bytes:
        known = [*sequence.prompt, *self.jobs[sequence.request_id].answer]
        return np.asarray(known[: (page + 1) * PAGE], np.int32).tobytes()


def dense(kept: np.ndarray) -> int:
    """So many of the kept tokens are the prompt's first."""
    gaps = np.flatnonzero(kept != np.arange(len(kept)))
    return int(gaps[0]) if gaps.size else len(kept)
