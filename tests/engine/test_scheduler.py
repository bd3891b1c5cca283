"""Every round that the scheduler decides, run on simulated devices that notice a wrong slot, page or token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_devices import Simulation, dense

from specprefill_jax.engine.scheduler import (
    MAX_LOOK_AHEAD_ROWS,
    MAX_OVERTAKEN,
    LookAhead,
    Phase,
    Prefill,
    Speculate,
)
from specprefill_jax.models.paged import PAGE

CHUNK = 2 * PAGE
FAMILIES = [np.random.default_rng(seed).integers(0, 512, 512).astype(np.int32) for seed in range(3)]


def prompt(length: int, family: int = 0) -> np.ndarray:
    """Prompts of a family have the same beginning."""
    return FAMILIES[family][:length] if length <= 512 else np.resize(FAMILIES[family], length)


def kept_of(length: int, chunks: set[int]) -> np.ndarray:
    """The first chunk, the last, and `chunks`."""
    last = (length - 1) // PAGE
    wanted = {0, last} | {chunk for chunk in chunks if chunk < last}
    return np.concatenate([np.arange(c * PAGE, min((c + 1) * PAGE, length)) for c in sorted(wanted)])


def pieces_of(simulation: Simulation, name: str, start: int = 0, stop: int | None = None) -> list:
    """The pieces of a request's prompt in these rounds, look-ahead included."""
    found = []
    for plan in simulation.rounds[start:stop]:
        piece = plan.piece
        if isinstance(piece, LookAhead):
            found += [piece for s in piece.sequences if s.request_id == name]
        elif piece is not None and piece.sequence.request_id == name:
            found.append(piece)
    return found


REQUESTS = st.tuples(
    st.just("submit"),
    st.fixed_dictionaries(
        {
            "length": st.integers(1, 260),
            "family": st.integers(0, 2),
            "max_tokens": st.integers(1, 40),
            "look_ahead": st.sampled_from([0, 0, 1, 8]),
            "chunks": st.sets(st.integers(0, 8), max_size=4),
            "share": st.sampled_from([True, True, True, False]),
            "draft_tokens": st.sampled_from([0, 1, 3, 8, 16]),
        }
    ),
)
ACTIONS = st.one_of(
    REQUESTS,
    REQUESTS,
    st.tuples(st.just("rounds"), st.integers(1, 12)),
    st.tuples(st.just("cancel"), st.integers(0, 99)),
    st.tuples(st.just("lose"), st.none()),
    st.tuples(st.just("speculator fails"), st.integers(0, 99)),
    st.tuples(st.just("decode fails"), st.none()),
)


@settings(max_examples=200, deadline=None)
@given(
    actions=st.lists(ACTIONS, min_size=1, max_size=24),
    pages=st.integers(6, 40),
    draft_pages=st.integers(9, 30),
    max_running=st.integers(1, 5),
    chunk=st.sampled_from([PAGE, CHUNK, 4 * PAGE]),
    late=st.booleans(),
    cheap_tokens=st.sampled_from([6, 1000]),
)
def test_whatever_comes_each_gets_what_it_would_get_alone(
    actions, pages, draft_pages, max_running, chunk, late, cheap_tokens
):
    simulation = Simulation(pages, draft_pages, max_running, chunk, late=late, cheap_tokens=cheap_tokens)
    submitted, cancelled = 0, 0
    for action, value in actions:
        jobs = list(simulation.jobs.values())
        if action == "submit":
            length, ahead = value["length"], value["look_ahead"]
            kept = kept_of(length, value["chunks"]) if ahead else np.arange(length)
            if simulation.fits(length, value["max_tokens"], length, ahead):
                name = f"r{submitted}"
                submitted += 1
                beginning = prompt(length, value["family"])
                options = {name: value[name] for name in ("max_tokens", "share", "draft_tokens")}
                simulation.submit(name, beginning, look_ahead=ahead, kept=kept, **options)
        elif action == "rounds":
            for _ in range(value):
                if simulation.jobs:
                    simulation.round()
        elif not jobs:
            continue
        elif action == "cancel":
            simulation.cancel(jobs[value % len(jobs)].sequence.request_id)
            cancelled += 1
        elif action == "lose":
            simulation.round(lose=True)
        elif action == "speculator fails":
            sequence = jobs[value % len(jobs)].sequence
            if sequence.phase in (Phase.SPECULATE, Phase.LOOK_AHEAD, Phase.CHOOSING):
                simulation.read_whole(sequence.request_id)
        elif action == "decode fails" and not simulation.pending:
            simulation.fail_decoding()
    simulation.run()
    assert len(simulation.finished) == submitted - cancelled
    for job in simulation.finished.values():
        assert job.sequence.generated == job.answer


def test_a_lone_stream_whose_step_failed_begins_again_at_once():
    simulation = Simulation(pages=6, max_running=1, late=False)
    job = simulation.submit("one", prompt(1), max_tokens=2)
    simulation.round()
    simulation.fail_decoding()
    simulation.run()
    assert job.sequence.generated == job.answer


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("wait", range(6))
@pytest.mark.parametrize("speculated", [False, True])
def test_a_short_prompt_overtakes_a_long_one(late, wait, speculated):
    """Between its arrival and its first token there are at most two pieces of the long one."""
    simulation = Simulation(pages=200, draft_pages=200, late=late)
    simulation.submit("long", prompt(40 * CHUNK, 1), look_ahead=8 * speculated)
    for _ in range(wait):
        simulation.round()
    arrived = len(simulation.rounds)
    short = simulation.submit("short", prompt(40, 2))
    simulation.run()
    [piece] = pieces_of(simulation, "short")
    place = next(i for i, plan in enumerate(simulation.rounds) if plan.piece is piece)
    assert len(pieces_of(simulation, "long", arrived, place)) <= 1
    assert len(pieces_of(simulation, "long", arrived, short.first_token)) <= 2


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("wait", range(4))
def test_a_short_prompt_that_is_speculated_overtakes_a_long_one(late, wait):
    """The long one is read on while the choice, and the token, of the short one are on their way."""
    simulation = Simulation(pages=200, draft_pages=200, late=late)
    simulation.submit("long", prompt(40 * CHUNK, 1))
    for _ in range(wait):
        simulation.round()
    arrived = len(simulation.rounds)
    short = simulation.submit("short", prompt(CHUNK, 2), look_ahead=8, kept=kept_of(CHUNK, set()))
    simulation.run()
    assert len(pieces_of(simulation, "short")) == 3
    assert len(pieces_of(simulation, "long", arrived, short.first_token)) <= 2


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("look_aheads", [(0, 0), (8, 8), (1, 8), (0, 8)])
def test_a_long_prompt_is_read_on_however_many_short_ones_come(late, look_aheads):
    """No starvation: at least every fourth piece is the long one's."""
    simulation = Simulation(pages=400, draft_pages=400, max_running=8, late=late)
    simulation.submit("long", prompt(20 * CHUNK, 0), max_tokens=1)
    rounds = 0
    while "long" in simulation.jobs:
        if len(simulation.jobs) < 6:
            simulation.submit(f"short {rounds}", prompt(60, rounds % 3)[::-1], 2, look_aheads[rounds % 2])
        simulation.round()
        rounds += 1
        assert rounds <= 4 * 20 + 8
    simulation.run()


@pytest.mark.parametrize("late", [False, True])
def test_one_that_waits_for_pages_is_overtaken_so_often_and_no_more(late):
    """A prompt that needs nearly the whole cache, and short ones that always find room."""
    simulation = Simulation(pages=13, max_running=8, late=late)
    for i in range(3):
        simulation.submit(f"first {i}", prompt(40 + i), max_tokens=20)
    for _ in range(6):
        simulation.round()
    large = simulation.submit("large", prompt(11 * PAGE), max_tokens=4)
    started, count = 0, 0
    while large.sequence.phase is Phase.READY:
        if len(simulation.jobs) < 5:
            simulation.submit(f"short {count}", prompt(20 + count % 7, 1), max_tokens=30)
            count += 1
        plan = simulation.round()
        piece = plan.piece
        started += isinstance(piece, Prefill) and piece.sequence.request_id.startswith("short")
        assert started <= MAX_OVERTAKEN + 1
        assert len(simulation.rounds) < 500
    assert started == MAX_OVERTAKEN
    simulation.run()


def test_every_stream_goes_on_in_every_round_while_a_long_prompt_is_read():
    simulation = Simulation(pages=100)
    streams = [simulation.submit(f"stream {i}", prompt(10 + i, i), max_tokens=40) for i in range(3)]
    for _ in range(5):
        simulation.round()
    simulation.submit("long", prompt(15 * CHUNK))
    for _ in range(15):
        plan = simulation.round()
        assert [s.request_id for s in plan.decode] == [job.sequence.request_id for job in streams]
        assert isinstance(plan.piece, Prefill)
        assert plan.piece.count <= CHUNK
    simulation.run()


@pytest.mark.parametrize("late", [False, True])
def test_the_youngest_loses_its_pages_and_nobody_notices(late):
    simulation = Simulation(pages=9, max_running=4, late=late)
    jobs = [simulation.submit(f"r{i}", prompt(40, i), max_tokens=100) for i in range(3)]
    simulation.run()
    assert simulation.preemptions
    assert "r0" not in simulation.preemptions, "the oldest"
    assert jobs[2].sequence.preemptions >= jobs[1].sequence.preemptions
    assert simulation.preemptions[0] == "r2"
    assert [len(job.sequence.generated) for job in jobs] == [100] * 3


def test_what_was_preempted_is_found_again_where_nobody_took_it():
    """A dense request's own pages, answer included, are published when it loses them."""
    simulation = Simulation(pages=8, max_running=2, late=False)
    simulation.submit("old", prompt(40, 0), max_tokens=90)
    young = simulation.submit("young", prompt(70, 1), max_tokens=60)
    while not simulation.preemptions:
        simulation.round()
    assert young.sequence.generated
    simulation.run()
    pieces = pieces_of(simulation, "young")
    assert pieces[0].start == 0
    assert any(piece.start > 0 and piece.sequence.preemptions for piece in pieces[2:])


@pytest.mark.parametrize("late", [False, True])
def test_a_second_prompt_with_the_same_beginning_reads_only_what_is_new(late):
    simulation = Simulation(late=late)
    first = simulation.submit("first", prompt(200))
    simulation.run()
    second = simulation.submit("second", np.concatenate([prompt(130), prompt(70, 1)]))
    simulation.run()
    assert (first.sequence.cached, second.sequence.cached) == (0, 128)
    assert [piece.start for piece in pieces_of(simulation, "second")] == [128, 192]
    third = simulation.submit("third", prompt(192))  # all of it is there, but one page is read for its last token
    simulation.run()
    assert third.sequence.cached == 160


def test_answers_are_shared_as_the_beginning_of_the_next_turn():
    simulation = Simulation()
    first = simulation.submit("first", prompt(50), max_tokens=60)
    simulation.run()
    turn = simulation.submit("turn", np.concatenate([prompt(50), first.answer, prompt(30, 2)]))
    simulation.run()
    assert turn.sequence.cached == 96  # of 109 slots that were filled, whole pages


def test_sparse_pages_are_shared_with_nobody_but_for_the_dense_beginning():
    """Complaint 2: what follows a gap is computed without it, and must never serve a prompt that has it."""
    simulation = Simulation(late=False)
    kept = kept_of(320, {1, 5, 6})
    assert dense(kept) == 64
    for name in ("sparse", "again"):
        job = simulation.submit(name, prompt(320), look_ahead=8, kept=kept)
        simulation.run()
    assert job.sequence.cached == 64
    whole = simulation.submit("whole", prompt(320))
    simulation.run()
    assert whole.sequence.cached == 64
    last = simulation.submit("last", prompt(320), look_ahead=8, kept=kept)
    simulation.run()
    assert last.sequence.cached == 64


def test_prompts_whose_logprobs_are_wanted_share_nothing():
    simulation = Simulation()
    for name, share in (("first", False), ("second", True), ("third", False)):
        job = simulation.submit(name, prompt(100), share=share)
        simulation.run()
        assert job.sequence.cached == 0


def test_a_cancelled_speculation_is_gone_on_with():
    """Complaint 16: cancelled half way and sent again, the speculator reads on from there."""
    simulation = Simulation()
    for name, rounds in (("first", 3), ("again", None)):
        simulation.submit(name, prompt(6 * CHUNK), look_ahead=8)
        if rounds:
            for _ in range(rounds):
                simulation.round()
            simulation.cancel(name)
            assert simulation.draft_pages.usage == 0
    simulation.run()
    read = [piece for piece in pieces_of(simulation, "again") if isinstance(piece, Speculate)]
    assert [piece.start for piece in read] == [3 * CHUNK, 4 * CHUNK, 5 * CHUNK]


@pytest.mark.parametrize(
    "phase", [Phase.WAITING, Phase.SPECULATE, Phase.CHOOSING, Phase.READY, Phase.PREFILL, Phase.DECODE]
)
def test_cancelled_in_any_phase_it_leaves_nothing(phase):
    simulation = Simulation()
    # Somebody else, so that a request may wait ready for its turn.
    simulation.submit("other", prompt(8 * CHUNK, 1), max_tokens=3)
    job = simulation.submit("job", prompt(3 * CHUNK), look_ahead=8)
    while job.sequence.phase is not phase:
        assert job.sequence.phase is not Phase.DONE
        simulation.round()
    simulation.cancel("job")
    assert (job.sequence.phase, job.sequence.pages, job.sequence.draft_pages) == (Phase.DONE, [], [])
    simulation.run()


def test_prompts_look_ahead_together_when_they_ask_for_as_much():
    simulation = Simulation(pages=200, draft_pages=200)
    for i in range(4):
        simulation.submit(f"eight {i}", prompt(50 + i, i % 3), look_ahead=8)
    simulation.submit("one", prompt(40), look_ahead=1)
    simulation.run()
    groups = [
        {s.request_id for s in plan.piece.sequences} for plan in simulation.rounds if isinstance(plan.piece, LookAhead)
    ]
    assert sum(map(len, groups)) == 5
    assert {"one"} in groups
    assert max(map(len, groups)) >= 2


def test_a_look_ahead_is_put_off_once_at_most():
    """However many could join, a prompt that has been read by the speculator waits for one of them."""
    simulation = Simulation(pages=400, draft_pages=400)
    for i in range(12):
        simulation.submit(f"r{i}", prompt(CHUNK - i, i % 3), look_ahead=8)
    simulation.run()
    last: dict[str, int] = {}
    for number, plan in enumerate(simulation.rounds):
        if isinstance(plan.piece, Speculate):
            last[plan.piece.sequence.request_id] = number
        if isinstance(plan.piece, LookAhead):
            assert len(plan.piece.sequences) <= MAX_LOOK_AHEAD_ROWS
            assert all(number - last[s.request_id] <= 2 for s in plan.piece.sequences)


def test_no_more_run_than_there_are_rows():
    simulation = Simulation(pages=200, max_running=2)
    for i in range(5):
        simulation.submit(f"r{i}", prompt(20 + i, i % 3), max_tokens=10)
    most = 0
    while simulation.jobs:
        most = max(most, len(simulation.round().decode))
    assert most == 2


def test_after_a_loss_nothing_of_before_is_shared():
    simulation = Simulation(late=False)
    simulation.submit("before", prompt(200))
    simulation.run()
    simulation.submit("running", prompt(200, 1), max_tokens=30)
    for _ in range(6):
        simulation.round()
    simulation.round(lose=True)
    again = simulation.submit("again", prompt(200))
    simulation.run()
    assert again.sequence.cached == 0
    assert len(simulation.finished["running"].sequence.generated) == 30


def test_a_suspect_decodes_alone_and_the_others_go_on_when_it_is_cleared():
    simulation = Simulation(late=False)
    jobs = [simulation.submit(f"r{i}", prompt(20, i), max_tokens=20) for i in range(3)]
    for _ in range(6):
        simulation.round()
    jobs[1].sequence.suspect = True
    assert [s.request_id for s in simulation.round().decode] == ["r1"]
    assert [s.request_id for s in simulation.round().decode] == ["r0", "r1", "r2"]
    simulation.run()


# proposals


def drafted(simulation: Simulation, name: str) -> list[int]:
    """How many proposals each decode step of a request had; as the rounds go by."""
    counts: list[int] = []
    real = simulation.scheduler.schedule

    def schedule():
        plan = real()
        counts.extend(s.proposals for s in plan.decode if s.request_id == name)
        return plan

    simulation.scheduler.schedule = schedule
    return counts


@pytest.mark.parametrize("late", [False, True])
def test_a_request_keeps_the_speculator_s_cache_for_its_answer(late):
    """From its first step on; several tokens a step, and the answer is the same."""
    simulation = Simulation(late=late)
    job = simulation.submit("one", prompt(150), max_tokens=60, look_ahead=8, kept=kept_of(150, {2}), draft_tokens=4)
    counts = drafted(simulation, "one")
    simulation.run()
    assert job.sequence.generated == job.answer
    assert counts[0] == 4
    assert set(counts[:-1]) == {4} or job.sequence.draft_tokens == 0
    assert 0 < job.accepted < job.proposed
    assert len(counts) == 59 - job.accepted
    assert not any(isinstance(p, Speculate) and p.sequence.phase is Phase.DECODE for p in pieces_of(simulation, "one"))


@pytest.mark.parametrize("late", [False, True])
def test_a_prompt_takes_the_pages_that_are_kept_for_proposals_and_they_are_read_again(late):
    simulation = Simulation(draft_pages=12, late=late)
    first = simulation.submit("first", prompt(200), 120, look_ahead=8, kept=kept_of(200, {2}), draft_tokens=2)
    counts = drafted(simulation, "first")
    while len(counts) < 3:
        simulation.round()
    assert counts[:3] == [2, 2, 2]
    assert len(first.sequence.draft_pages) == 7
    simulation.submit("second", prompt(300, 1), max_tokens=3, look_ahead=8, kept=kept_of(300, {3}))
    simulation.round()
    assert first.sequence.draft_pages == []
    while simulation.jobs.get("second"):
        simulation.round()
    plain = counts[3:].count(0)
    assert plain >= 5  # the second's pieces, at least
    before = len(counts)
    first.sequence.draft_tokens = 2
    simulation.run()
    assert 2 in counts[before:]
    again = [p for p in pieces_of(simulation, "first") if isinstance(p, Speculate) and p.start + p.count > 200]
    assert again, "prompt and answer are read again"
    assert first.sequence.generated == first.answer


def test_two_that_propose_share_a_small_cache_with_whoever_comes():
    """The youngest's pages go first; nobody waits for them."""
    simulation = Simulation(draft_pages=16, pages=100, late=False)
    for i in range(2):
        simulation.submit(f"r{i}", prompt(150, i), 200, look_ahead=8, kept=kept_of(150, {2}), draft_tokens=1)
    while not all(job.sequence.proposals or job.sequence.draft_pages for job in simulation.jobs.values()) or any(
        job.sequence.phase is not Phase.DECODE for job in simulation.jobs.values()
    ):
        simulation.round()
    simulation.submit("new", prompt(180, 2), 1, look_ahead=8, kept=kept_of(180, {1}))
    simulation.round()
    assert simulation.jobs["r0"].sequence.draft_pages
    assert simulation.jobs["r1"].sequence.draft_pages == []
    simulation.run()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 130])
def test_one_that_is_read_whole_has_the_speculator_read_it_while_it_decodes(late, length):
    simulation = Simulation(late=late)
    job = simulation.submit("one", prompt(length), max_tokens=50, draft_tokens=8)
    counts = drafted(simulation, "one")
    simulation.run()
    assert counts[0] == 0
    assert max(counts[:5]) == 8
    assert job.sequence.generated == job.answer
    assert job.accepted > 0


def test_what_is_left_of_an_answer_must_be_worth_the_reading():
    simulation = Simulation(draft_cost=1.0)
    job = simulation.submit("one", prompt(130), max_tokens=100, draft_tokens=8)
    simulation.run()
    assert (job.proposed, len(pieces_of(simulation, "one"))) == (0, 3)


def test_a_cache_without_a_free_page_gives_as_many_proposals_as_there_is_room_for():
    """In the main model's: nobody is preempted for them. In the speculator's: the request goes on plainly."""
    simulation = Simulation(pages=4, late=False)
    job = simulation.submit("one", prompt(60), max_tokens=36, look_ahead=8, kept=np.arange(60), draft_tokens=16)
    counts = drafted(simulation, "one")
    simulation.run()
    assert simulation.preemptions == []
    assert counts[0] == 16
    small = Simulation(draft_pages=4, late=False)  # three pages: 96 tokens
    job = small.submit("one", prompt(88), max_tokens=60, look_ahead=8, kept=np.arange(88), draft_tokens=4)
    counts = drafted(small, "one")
    small.run()
    assert counts[0] == 4
    assert counts[-10:] == [0] * 10
    assert 1 <= job.proposed <= 4 * counts.count(4) + 3


@pytest.mark.parametrize("late", [False, True])
def test_the_more_decode_the_fewer_proposals_each_has(late):
    """Six tokens are cheap: so one row may have four proposals (of 1, 2, 4, ...), two rows two, three rows one."""
    simulation = Simulation(late=late, cheap_tokens=6)
    counts: dict[int, int] = {}
    real = simulation.scheduler.schedule

    def schedule():
        plan = real()
        most = max((s.proposals for s in plan.decode), default=0)
        counts[len(plan.decode)] = max(most, counts.get(len(plan.decode), 0))
        return plan

    simulation.scheduler.schedule = schedule
    for i in range(4):
        length = 40 + i
        simulation.submit(
            f"r{i}", prompt(length, i % 3), 80 - 20 * i, look_ahead=8, kept=np.arange(length), draft_tokens=8
        )
    simulation.run()
    assert counts == {0: 0, 1: 4, 2: 2, 3: 1, 4: 0}
