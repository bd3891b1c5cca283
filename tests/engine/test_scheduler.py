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
)
def test_whatever_comes_each_gets_what_it_would_get_alone(actions, pages, draft_pages, max_running, chunk, late):
    simulation = Simulation(pages, draft_pages, max_running, chunk, late=late)
    submitted, cancelled = 0, 0
    for action, value in actions:
        jobs = list(simulation.jobs.values())
        if action == "submit":
            length, ahead = value["length"], value["look_ahead"]
            kept = kept_of(length, value["chunks"]) if ahead else np.arange(length)
            if simulation.fits(length, value["max_tokens"], length, ahead):
                name = f"r{submitted}"
                submitted += 1
                simulation.submit(
                    name, prompt(length, value["family"]), value["max_tokens"], ahead, kept, value["share"]
                )
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
