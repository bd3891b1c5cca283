"""Phases follow each other without a gap and add up to the wall clock."""

import json
import time

import pytest

from specprefill_jax.errors import ArgumentError
from specprefill_jax.timing import LABELS, PHASES, PhaseClock, Timings


class Ticks:
    """A clock that says what it is told to."""

    def __init__(self, *readings: float) -> None:
        self.readings = list(readings)

    def __call__(self) -> float:
        return self.readings.pop(0)


def test_phases_are_the_documented_ones_in_order() -> None:
    assert PHASES == ("tokenise", "queue", "speculate", "score", "main_prefill", "first_token", "decode")
    assert tuple(LABELS) == PHASES


def test_a_lap_starts_where_the_last_ended() -> None:
    clock = PhaseClock(now=Ticks(100.0, 100.5, 102.5, 102.75, 106.75, 107.0, 117.0))
    clock.phase("speculate", tokens=2048)
    clock.phase("score")
    clock.phase("main_prefill", tokens=205)
    clock.phase("first_token", tokens=1)
    clock.phase("decode")
    clock.count("decode", 9)
    timings = clock.stop()
    assert [lap.seconds for lap in timings.laps()] == [0.5, 0.0, 2.0, 0.25, 4.0, 0.25, 10.0]
    assert timings.ttft == 7.0
    assert timings.total == 17.0
    assert timings.tokens == {"speculate": 2048, "main_prefill": 205, "first_token": 1, "decode": 9}


def test_a_phase_entered_twice_adds_up() -> None:
    clock = PhaseClock("decode", now=Ticks(0.0, 1.0, 3.0, 6.0))
    clock.phase("score", tokens=3)
    clock.phase("decode", tokens=4)
    timings = clock.stop()
    assert (timings.decode, timings.score) == (4.0, 2.0)
    clock = PhaseClock(now=Ticks(0.0, 1.0, 2.0))
    clock.phase("decode", tokens=1)
    clock.phase("decode", tokens=1)
    assert clock.timings().tokens["decode"] == 2


def test_a_stopped_clock_stands_still_until_the_next_phase() -> None:
    clock = PhaseClock(now=Ticks(0.0, 1.0, 50.0, 52.0))
    assert clock.stop().total == 1.0
    clock.phase("decode")
    assert clock.stop().as_dict()["total"] == 3.0


def test_timings_leave_the_clock_running() -> None:
    clock = PhaseClock(now=Ticks(0.0, 2.0, 5.0))
    clock.phase("decode")
    before = clock.timings()
    assert (before.tokenise, before.decode) == (2.0, 0.0)
    assert clock.stop().decode == 3.0
    assert before.decode == 0.0, "timings handed out do not change afterwards"


def test_phases_add_up_to_the_real_clock() -> None:
    start = time.perf_counter()
    clock = PhaseClock()
    for name in PHASES[1:]:
        time.sleep(0.002)
        clock.phase(name)
    timings = clock.stop()
    wall = time.perf_counter() - start
    assert 0.01 <= timings.total <= wall
    assert wall - timings.total < 0.002, "only the calls before the first and after the last reading are outside"


def test_as_dict_is_json_with_phases_first() -> None:
    timings = Timings(tokenise=0.25, main_prefill=2.0, decode=1.0, tokens={"decode": 4})
    plain = json.loads(json.dumps(timings.as_dict()))
    assert list(plain) == [*PHASES, "ttft", "total", "tokens"]
    assert (plain["ttft"], plain["total"], plain["tokens"]) == (2.25, 3.25, {"decode": 4})


def test_laps_know_their_rate_and_label() -> None:
    laps = {lap.name: lap for lap in Timings(speculate=2.0, score=1.0, tokens={"speculate": 64, "decode": 4}).laps()}
    assert laps["speculate"].tokens_per_second == 32.0
    assert laps["score"].tokens_per_second is None
    assert laps["decode"].tokens_per_second is None, "tokens without time have no rate"
    assert laps["score"].label == "score and choose"


def test_timings_cannot_be_changed() -> None:
    timings = Timings(tokens={"decode": 1})
    with pytest.raises(TypeError):
        timings.tokens["decode"] = 2
    with pytest.raises(AttributeError):
        timings.decode = 1.0


@pytest.mark.parametrize("seconds", [-0.1, float("nan"), float("inf")])
def test_seconds_out_of_range_are_refused(seconds: float) -> None:
    with pytest.raises(ArgumentError, match="score=.*seconds"):
        Timings(score=seconds)


def test_unknown_phases_and_negative_counts_are_refused() -> None:
    with pytest.raises(ArgumentError, match="phase='warm' .*tokenise, queue, speculate"):
        PhaseClock("warm")
    clock = PhaseClock()
    with pytest.raises(ArgumentError, match="phase='prefill'"):
        clock.phase("prefill")
    with pytest.raises(ArgumentError, match="phase='prefill'"):
        clock.count("prefill", 1)
    with pytest.raises(ArgumentError, match="tokens=-1"):
        clock.count("decode", -1)
    with pytest.raises(ArgumentError, match="tokens='prefill'"):
        Timings(tokens={"prefill": 1})
