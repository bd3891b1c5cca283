"""What the devices do next, decided in plain Python.

Every round is one decode step of all requests that have their first token, and at most one piece of somebody's prompt:
a running stream never waits longer than one piece takes. The request with the least left to read goes first, but for
each piece that the one which came first is passed over, it is owed one: so a short prompt overtakes a long one, and a
long one gets half of the pieces.

A request goes through the phases of `Phase`. It holds pages of the speculator's cache while that reads, and pages of
the main model's from its first piece there to its end. When decoding finds no free page, the youngest request that
holds some gives up all of them and is computed again later, from the tokens that are known by then.

A request that decodes with the speculator's proposals keeps its pages of the speculator's cache. A prompt that the
speculator is to read takes them where no others are free; such a request then decodes plainly, until there are pages,
and rounds in which no prompt wants a piece, for the speculator to read prompt and answer again.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from specprefill_jax.engine.blocks import BlockManager, page_hashes
from specprefill_jax.models.paged import PAGE

MAX_LOOK_AHEAD_ROWS = 8
"""Prompts that look ahead together."""

MAX_OVERTAKEN = 8
"""How often requests that came later may start while one waits for pages."""


class Phase(StrEnum):
    """Where a request is."""

    WAITING = "waiting"
    """Nothing has been read; the speculator is to read it first."""
    SPECULATE = "speculate"
    """The speculator reads the prompt."""
    LOOK_AHEAD = "look_ahead"
    """The speculator has read it, and is to decode a few tokens."""
    CHOOSING = "choosing"
    """The choice has been enqueued; the host does not know it yet."""
    READY = "ready"
    """What to read is known, and nothing of it has been read by the main model."""
    PREFILL = "prefill"
    """The main model reads."""
    DECODE = "decode"
    """It has its first token, or will have it when the round's results are there."""
    DONE = "done"


@dataclass(eq=False)
class Sequence:
    """One request as the scheduler sees it."""

    request_id: str
    prompt: np.ndarray
    """int32 [M]."""
    max_tokens: int
    look_ahead: int
    """Queries that score the prompt; 0 where it is read whole."""
    expected_kept: int
    """Tokens of the prompt that the main model will read, at most."""
    share: bool = True
    """Whether pages computed for others may serve; not where log-probabilities of the prompt are wanted."""

    order: int = 0
    phase: Phase = Phase.WAITING
    draft_pages: list[int] = field(default_factory=list)
    draft_done: int = 0
    """Prompt tokens in the speculator's cache, or enqueued to be."""
    waited: bool = False
    """Whether its look-ahead has been put off once, for others to join."""
    kept: int = 0
    """Tokens of the prompt that the main model reads; known from READY on."""
    dense: int = 0
    """Of these, so many are the prompt's first, with none left out in between."""
    pages: list[int] = field(default_factory=list)
    done: int = 0
    """Slots of the main model's cache that are filled, or enqueued to be."""
    cached: int = 0
    """Of the prompt's, so many were found in the cache when the request first got its pages."""
    row: int | None = None
    """Its place in the decode state, while it has pages of the main model's cache."""
    generated: list[int] = field(default_factory=list)
    """Tokens that are known."""
    issued: int = 0
    """Tokens that are known or on their way."""
    overtaken: int = 0
    preemptions: int = 0
    suspect: bool = False
    """Whether it was in a round that failed: it then decodes alone until a token of it arrives."""
    draft_tokens: int = 0
    """Proposals that it is to have in a round of decoding; 0: it decodes plainly, and needs no draft pages for it."""
    proposals: int = 0
    """Of the decode step decided last, so many proposals count."""
    _hashes: list[bytes] | None = None

    @property
    def num_tokens(self) -> int:
        """M."""
        return len(self.prompt)

    @property
    def target(self) -> int:
        """Slots that are filled before decoding goes on: what is kept, and what was generated before a preemption."""
        return self.kept + len(self.generated)

    @property
    def hashes(self) -> list[bytes]:
        """Of the prompt's whole pages."""
        if self._hashes is None:
            self._hashes = page_hashes(self.prompt)
        return self._hashes

    @property
    def can_draft(self) -> bool:
        """Whether the speculator's cache holds all but the last two tokens, or all of the prompt: it reads the rest."""
        return bool(self.draft_pages) and self.draft_done >= self.num_tokens + max(self.issued - 2, 0)

    @property
    def is_whole(self) -> bool:
        """Whether the main model reads the whole prompt."""
        return self.kept == self.num_tokens


@dataclass(frozen=True)
class Speculate:
    """The speculator reads tokens start .. start+count-1 of the prompt, or of prompt and answer where one decodes."""

    sequence: Sequence
    start: int
    count: int


@dataclass(frozen=True)
class LookAhead:
    """The speculator decodes for these requests, which ask for equally many queries, and their tokens are chosen."""

    sequences: tuple[Sequence, ...]


@dataclass(frozen=True)
class Prefill:
    """The main model reads into slots start .. start+count-1; the last piece also gives the next token."""

    sequence: Sequence
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        """Whether decoding follows."""
        return self.start + self.count == self.sequence.target


Piece = Speculate | LookAhead | Prefill


@dataclass(frozen=True)
class Round:
    """What the devices do next: the piece, then the decode step."""

    decode: tuple[Sequence, ...]
    """Each writes into slot `done - 1` and is to get its token number `issued - 1`; with proposals (`proposals`), which
    are written behind it, perhaps more: `accepted` must be told of these before the next round is decided."""
    piece: Piece | None
    preempted: tuple[Sequence, ...] = ()


class Scheduler:
    """Decides rounds; holds all requests that are not finished."""

    def __init__(
        self,
        pages: BlockManager,
        draft_pages: BlockManager,
        *,
        max_running: int,
        chunk: int,
        draft_cost: float,
        cheap_tokens: int,
        window: int = 0,
    ):
        """Schedule over two caches.

        Args:
            pages: the main model's.
            draft_pages: the speculator's.
            max_running: requests that may hold pages of the main model's cache at the same time.
            chunk: prompt tokens of a piece at most, a multiple of PAGE.
            draft_cost: what a token costs in the speculator, relative to the main model.
            cheap_tokens: tokens, proposals included, that one pass of the main model reads at the cost of a few.
            window: a prompt's last tokens whose queries are wanted; 0: the last one's.
        """
        self.pages, self.draft_pages = pages, draft_pages
        self.chunk = chunk
        self.draft_cost = draft_cost
        self.cheap_tokens = cheap_tokens
        self.read_anew = max(window, 1)
        """Tokens at a prompt's end that the speculator reads whatever its cache holds: their queries are wanted."""
        self.sequences: dict[str, Sequence] = {}
        """By request id, in the order of arrival."""
        self._rows = list(range(max_running - 1, -1, -1))
        self._arrivals = 0
        self._owed = 0
        """Pieces for which the request that came first was passed over, and has not been given since; -1 to 1."""

    def add(self, sequence: Sequence) -> None:
        """Take a request on; one that is not speculated must know what is kept."""
        self._arrivals += 1
        sequence.order = self._arrivals
        sequence.phase = Phase.WAITING if sequence.look_ahead else Phase.READY
        self.sequences[sequence.request_id] = sequence

    def in_phase(self, *phases: Phase) -> Iterator[Sequence]:
        """The requests in these phases, in the order of arrival."""
        return (sequence for sequence in self.sequences.values() if sequence.phase in phases)

    def schedule(self) -> Round:
        """The next round. What it says is taken as done: the caller enqueues it, or reports the failure."""
        preempted: list[Sequence] = []
        decode = self._decode(preempted)
        return Round(tuple(decode), self._piece(preempted), tuple(preempted))

    def chosen(self, sequence: Sequence, kept: int, dense: int) -> None:
        """The tokens to keep are known, or the prompt is to be read whole after all (`kept` = M)."""
        sequence.waited = False
        if not sequence.draft_tokens:
            self._drop_draft(sequence)
        sequence.kept, sequence.dense = kept, dense
        sequence.phase = Phase.READY

    def accepted(self, sequence: Sequence, count: int) -> None:
        """So many proposals of the step decided last were right: as many more slots are filled, and tokens known.

        The caller may change `draft_tokens` before; at 0 the draft pages are given up for good.
        """
        sequence.done += count
        sequence.issued += count
        sequence.proposals = 0
        if not sequence.draft_tokens:
            self._drop_draft(sequence)
        elif sequence.draft_pages:
            sequence.draft_done = sequence.num_tokens + sequence.issued - 2

    def decode_plainly(self, sequence: Sequence) -> None:
        """A request that decodes shall have no more proposals: its draft pages are others'."""
        sequence.draft_tokens = 0
        self._drop_draft(sequence)

    def finish(self, sequence: Sequence, *, publish: bool = True) -> None:
        """A request is over, whatever it was doing: its pages are others' from now on, or shared if they may be."""
        self._drop_draft(sequence)
        self._drop_pages(sequence, publish)
        sequence.phase = Phase.DONE
        self.sequences.pop(sequence.request_id, None)

    def start_over(self, sequences: Iterable[Sequence]) -> None:
        """What the caches hold is lost: nothing is shared any more, and these begin again with what is known."""
        for manager in (self.pages, self.draft_pages):
            manager.forget()
        for sequence in sequences:
            self._drop_draft(sequence)
            self._drop_pages(sequence, publish=False)
            if sequence.phase not in (Phase.WAITING, Phase.READY, Phase.DONE):
                sequence.phase = Phase.READY if sequence.kept else Phase.WAITING

    # decoding

    def _decode(self, preempted: list[Sequence]) -> list[Sequence]:
        running = [s for s in self.in_phase(Phase.DECODE) if s.issued < s.max_tokens]
        suspects = [s for s in running if s.suspect]
        if suspects:
            running = suspects[:1]
        # The oldest first: it is the last to lose its pages. What is preempted meanwhile is younger.
        ready = [s for s in running if s.phase is Phase.DECODE and self._find_slot(s, preempted)]
        drafting = [s for s in ready if s.draft_tokens and s.can_draft and not s.suspect]
        # All are checked in one pass, which costs as much as the longest: each has what the most hopeful is to have.
        most = max((s.draft_tokens for s in drafting), default=0)
        for sequence in drafting:
            sequence.proposals = self._room_for_proposals(sequence, min(most, self._cheap_proposals(len(ready))))
        for sequence in ready:
            sequence.done += 1
            sequence.issued += 1
        return ready

    def _find_slot(self, sequence: Sequence, preempted: list[Sequence]) -> bool:
        """Make room for one more token, at the cost of younger requests if need be, or of itself."""
        while sequence.done // PAGE >= len(sequence.pages):
            page = self.pages.take(1)
            if page is not None:
                sequence.pages += page
                continue
            youngest = max(self.in_phase(Phase.PREFILL, Phase.DECODE), key=lambda s: s.order)
            self._preempt(youngest)
            preempted.append(youngest)
            if youngest is sequence:
                return False
        return True

    def _cheap_proposals(self, rows: int) -> int:
        """Proposals a row that still cost little when so many rows decode: 0, 1, 2, 4, ..."""
        count = self.cheap_tokens // rows - 1
        return 1 << count.bit_length() - 1 if count > 0 else 0

    def _room_for_proposals(self, sequence: Sequence, most: int) -> int:
        """How many proposals both caches have slots for, at nobody's cost; 0 where the answer lacks one token alone."""
        count = min(most, sequence.max_tokens - sequence.issued - 1)
        if count <= 0:
            return 0
        # The last proposal is not read by the speculator.
        used = sequence.num_tokens + sequence.issued - 1
        if not self._grow(self.draft_pages, sequence.draft_pages, used + count):
            count = min(count, len(sequence.draft_pages) * PAGE - used)
            if count <= 0:
                self._drop_draft(sequence)
                return 0
        if not self._grow(self.pages, sequence.pages, sequence.done + 1 + count):
            count = len(sequence.pages) * PAGE - sequence.done - 1
        return count

    @staticmethod
    def _grow(manager: BlockManager, pages: list[int], slots: int) -> bool:
        """Have these pages hold so many slots, if there are free ones."""
        more = manager.take(max(-(-slots // PAGE) - len(pages), 0))
        pages += more or ()
        return more is not None

    def _preempt(self, sequence: Sequence) -> None:
        self._drop_draft(sequence)
        self._drop_pages(sequence, publish=True)
        sequence.phase = Phase.READY
        sequence.preemptions += 1

    # reading prompts

    def _piece(self, preempted: list[Sequence]) -> Piece | None:
        ahead = list(self.in_phase(Phase.LOOK_AHEAD))
        if ahead:
            return self._look_ahead(ahead)
        phases = (Phase.WAITING, Phase.SPECULATE, Phase.READY, Phase.PREFILL)
        candidates = [s for s in self.in_phase(*phases) if s not in preempted]
        for sequence in sorted(candidates, key=self._work_left) if self._owed < 1 else candidates:
            piece = self._next(sequence, candidates)
            if piece is not None:
                passed_over = sequence is not candidates[0]
                self._owed = min(self._owed + 1, 1) if passed_over else max(self._owed - 1, -1)
                return piece
        return None if any(s.phase is Phase.WAITING for s in candidates) else self._read_again()

    def _read_again(self) -> Piece | None:
        """A piece of prompt and answer for the first request that is to have proposals and has no cache for them.

        Not where the answer that is left is worth less than the reading.
        """
        decoding = list(self.in_phase(Phase.DECODE))
        if not decoding or not self._cheap_proposals(len(decoding)):
            return None
        for sequence in decoding:
            left = sequence.max_tokens - sequence.issued
            wanted = sequence.draft_tokens and not (sequence.proposals or sequence.suspect or sequence.can_draft)
            if not wanted or left < 2:
                continue
            known = sequence.num_tokens + len(sequence.generated)
            if not sequence.draft_pages:
                found = PAGE * self.draft_pages.count_published(sequence.hashes)
                if self.draft_cost * (known - found) > left:
                    continue
                sequence.draft_pages = self.draft_pages.match(sequence.hashes)
                sequence.draft_done = len(sequence.draft_pages) * PAGE
            if not self._grow(self.draft_pages, sequence.draft_pages, known + PAGE):
                self._drop_draft(sequence)
                continue
            start = sequence.draft_done // PAGE * PAGE
            count = min(self.chunk, known - start)
            if count > 0:
                sequence.draft_done = start + count
                self._publish_draft(sequence)
                return Speculate(sequence, start, count)
        return None

    def _look_ahead(self, ahead: list[Sequence]) -> Piece:
        """All that ask for as much as the first; or a piece that lets one more join, if nobody has waited for one."""
        if not any(s.waited for s in ahead) and len(ahead) < MAX_LOOK_AHEAD_ROWS:
            for sequence in self.in_phase(Phase.SPECULATE, Phase.WAITING):
                short = sequence.num_tokens - sequence.draft_done <= self.chunk
                if short and sequence.look_ahead == ahead[0].look_ahead:
                    piece = self._next(sequence, [sequence])
                    if piece is not None:
                        for other in ahead:
                            other.waited = True
                        return piece
        group = [s for s in ahead if s.look_ahead == ahead[0].look_ahead][:MAX_LOOK_AHEAD_ROWS]
        for sequence in group:
            sequence.phase = Phase.CHOOSING
        return LookAhead(tuple(group))

    def _work_left(self, sequence: Sequence) -> tuple[float, int]:
        if sequence.phase in (Phase.WAITING, Phase.SPECULATE):
            left = self.draft_cost * (sequence.num_tokens - sequence.draft_done) + sequence.expected_kept
        else:
            left = float(sequence.target - sequence.done)
        return left, sequence.order

    def _next(self, sequence: Sequence, candidates: list[Sequence]) -> Piece | None:
        """The next piece of a prompt; None if it cannot have one for want of pages or of a row."""
        starts = sequence.phase in (Phase.WAITING, Phase.READY)
        if starts:
            waiting = [s for s in candidates if s.order < sequence.order and s.overtaken >= MAX_OVERTAKEN]
            begun = not waiting and (
                self._start_draft(sequence) if sequence.phase is Phase.WAITING else self._start_main(sequence)
            )
            if not begun:
                return None
            for other in candidates:
                if other.order < sequence.order and other.phase in (Phase.WAITING, Phase.READY):
                    other.overtaken += 1
            sequence.overtaken = 0
        if sequence.phase is Phase.SPECULATE:
            start = sequence.draft_done
            count = min(self.chunk, sequence.num_tokens - start)
            sequence.draft_done += count
            self._publish_draft(sequence)
            if sequence.draft_done == sequence.num_tokens:
                sequence.phase = Phase.LOOK_AHEAD
            return Speculate(sequence, start, count)
        start = sequence.done
        count = min(self.chunk, sequence.target - start)
        piece = Prefill(sequence, start, count)
        sequence.done += count
        if piece.is_last:
            sequence.phase = Phase.DECODE
            sequence.issued = len(sequence.generated) + 1
        self._publish(sequence)
        return piece

    def _start_draft(self, sequence: Sequence) -> bool:
        """Take the speculator's pages for the prompt and the look-ahead."""
        need = -(-(sequence.num_tokens + sequence.look_ahead - 1) // PAGE)
        found = self.draft_pages.match(sequence.hashes[: max(sequence.num_tokens - self.read_anew, 0) // PAGE])
        rest = self._take_draft(need - len(found))
        if rest is None:
            self.draft_pages.release(found)
            return False
        sequence.draft_pages = found + rest
        sequence.draft_done = len(found) * PAGE
        sequence.phase = Phase.SPECULATE
        return True

    def _take_draft(self, count: int) -> list[int] | None:
        """Pages of the speculator's cache, of requests that kept them for proposals if need be: the youngest first."""
        kept = [s for s in self.in_phase(Phase.READY, Phase.PREFILL, Phase.DECODE) if s.draft_pages]
        if self.draft_pages.available + sum(len(s.draft_pages) for s in kept) < count:
            return None
        while (pages := self.draft_pages.take(count)) is None and kept:
            self._drop_draft(kept.pop())
        return pages

    def _start_main(self, sequence: Sequence) -> bool:
        """Take the main model's pages for everything that is known, and a row."""
        if not self._rows:
            return False
        found = self.pages.match(self._shared_hashes(sequence)[: (sequence.target - 1) // PAGE])
        need = -(-sequence.target // PAGE) - len(found)
        # Each that decodes will want a page before long: without room for these, somebody would be preempted soon.
        decoding = sum(1 for _ in self.in_phase(Phase.DECODE))
        rest = self.pages.take(need) if need + decoding <= self.pages.available or not decoding else None
        if rest is None:
            self.pages.release(found)
            return False
        sequence.pages = found + rest
        sequence.done = len(found) * PAGE
        if not sequence.preemptions:
            sequence.cached = min(sequence.done, sequence.kept)
        sequence.row = self._rows.pop()
        sequence.phase = Phase.PREFILL
        return True

    # pages

    def _shared_hashes(self, sequence: Sequence) -> list[bytes]:
        """Of the pages, among those of everything that is known, that others may share."""
        if not sequence.share:
            return []
        if sequence.is_whole and sequence.generated:
            return page_hashes(np.concatenate([sequence.prompt, np.asarray(sequence.generated, np.int32)]))
        return sequence.hashes[: sequence.dense // PAGE]

    def _publish(self, sequence: Sequence) -> None:
        known = min(sequence.done, sequence.target)
        self.pages.publish(sequence.pages[: known // PAGE], self._shared_hashes(sequence))

    def _publish_draft(self, sequence: Sequence) -> None:
        self.draft_pages.publish(sequence.draft_pages[: sequence.draft_done // PAGE], sequence.hashes)

    def _drop_pages(self, sequence: Sequence, publish: bool) -> None:
        if publish and sequence.pages:
            self._publish(sequence)
        self.pages.release(sequence.pages)
        if sequence.row is not None:
            self._rows.append(sequence.row)
        sequence.pages, sequence.row, sequence.done = [], None, 0

    def _drop_draft(self, sequence: Sequence) -> None:
        self.draft_pages.release(sequence.draft_pages)
        sequence.draft_pages, sequence.draft_done, sequence.waited = [], 0, False
        sequence.proposals = 0
