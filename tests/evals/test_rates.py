"""What records say: percentiles, goodput and the search by hand-worked numbers; the ceiling beside the cost model."""

from dataclasses import replace

import pytest

from specprefill_jax import costs
from specprefill_jax.errors import ArgumentError
from specprefill_jax.evals import rates
from specprefill_jax.evals.load import Record, constant
from specprefill_jax.models.published import LLAMAS

MAIN, SPECULATOR = LLAMAS["Llama-3.1-8B"], LLAMAS["Llama-3.2-1B"]


def record(index=0, due=0.0, sent=None, tokens=(), end=1.0, outcome="ok", prompt=100, kept=10, **said) -> Record:
    usage = {"prompt_tokens": prompt, "completion_tokens": len(tokens)}
    read = {"reason": "engaged", "kept_tokens": kept}
    sent = due if sent is None else sent
    return Record(index, "x", due, sent, list(tokens), end, outcome, usage=usage, specprefill=read, **said)


def test_percentiles():
    found = rates.spread([5.0, 1.0, 4.0, 2.0, 3.0])
    assert found == pytest.approx({"mean": 3.0, "p50": 3.0, "p90": 4.6, "p95": 4.8, "p99": 4.96, "max": 5.0})
    assert rates.spread([7.0]) == {"mean": 7.0, "p50": 7.0, "p90": 7.0, "p95": 7.0, "p99": 7.0, "max": 7.0}
    assert rates.spread([]) is None


def test_times_of_a_record():
    one = record(due=2.0, sent=2.5, tokens=(3.0, 3.25, 4.0), end=4.5)
    assert (one.late, one.ttft, one.e2e) == (0.5, 0.5, 2.0)
    assert one.itl == [0.25, 0.75]
    assert one.tpot == 0.5
    one.usage["completion_tokens"] = 5  # the server put two tokens into a chunk, twice
    assert one.tpot == 0.25
    assert replace(one, outcome="timeout").e2e is None
    assert replace(one, tokens=[3.0]).tpot is None
    assert (replace(one, sent=None).late, replace(one, sent=None).ttft) == (None, None)
    assert replace(one, usage={"completion_tokens": True}).generated == 3


def test_goodput_objectives():
    assert rates.parse_objectives(["ttft=2", "tpot=0.1", "e2e=10"]) == {"ttft": 2.0, "tpot": 0.1, "e2e": 10.0}
    for wrong in ("ttft", "ttft=", "ttft=0", "ttft=nan", "ttft=inf", "itl=1", "=1"):
        with pytest.raises(ArgumentError, match="goodput must be ttft=SECONDS"):
            rates.parse_objectives([wrong])
    with pytest.raises(ArgumentError, match="goodput='ttft=3' is not allowed"):
        rates.parse_objectives(["ttft=2", "ttft=3"])


def test_good_requests():
    one = record(tokens=(1.0, 1.2, 1.4), end=2.0)
    assert rates.is_good(one, {"ttft": 1.0, "e2e": 2.0})
    assert not rates.is_good(one, {"ttft": 0.99})
    assert not rates.is_good(one, {"tpot": 0.19})
    assert rates.is_good(one, {"tpot": 0.21})
    assert not rates.is_good(one, {"e2e": 1.99})
    assert not rates.is_good(replace(one, outcome="malformed"), {})
    assert rates.is_good(record(tokens=(1.0,)), {"tpot": 0.1})
    assert not rates.is_good(record(), {"ttft": 9.0})


def test_summary():
    """Four requests, one a second: two are answered, one is refused and one is out of time."""
    records = [
        record(0, 0.0, tokens=(1.0, 2.0), end=2.0),
        record(1, 1.0, sent=1.125, tokens=(3.125, 3.625, 4.125), end=4.125, prompt=300, kept=30),
        record(2, 2.0, end=2.5, outcome="refused", error="full"),
        record(3, 3.0, end=8.0, outcome="timeout", error="no whole answer within 5 s"),
    ]
    found = rates.summary(records, {"ttft": 1.5})
    assert found["outcomes"] == {"ok": 2, "refused": 1, "timeout": 1}
    assert found["errors"] == {"full": 1, "no whole answer within 5 s": 1}
    assert (found["requests"], found["sent"], found["duration"], found["offered_rate"]) == (4, 4, 8.0, 1.0)
    assert (found["completed_rate"], found["prompt_tokens_per_s"], found["output_tokens_per_s"]) == (0.25, 50.0, 0.625)
    assert (found["ttft"]["mean"], found["ttft"]["p50"], found["ttft"]["p90"]) == (1.5, 1.5, 1.9)
    assert found["tpot"]["mean"] == pytest.approx(0.75)
    assert found["itl"]["mean"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert (found["e2e"]["mean"], found["e2e"]["max"]) == (2.5, 3.0)
    assert (found["prompt_tokens"]["mean"], found["kept_tokens"]["mean"]) == (200, 20)
    assert (found["reasons"], found["cached_share"]) == ({"engaged": 2}, 0.0)
    records[1].usage["prompt_tokens_details"] = {"cached_tokens": 32}
    assert rates.summary(records)["cached_share"] == 32 / 400
    assert found["goodput"] == {"objectives": {"ttft": 1.5}, "good": 1, "share": 0.25, "rate": 0.125}
    assert found["lateness"]["max"] == 0.125
    assert found["client_late"]


def test_summary_of_nothing():
    unsent = replace(record(outcome="cancelled", end=None), sent=None, due=4.0)
    found = rates.summary([unsent])
    assert (found["sent"], found["outcomes"], found["duration"]) == (0, {"cancelled": 1}, 0.0)
    assert (found["ttft"], found["lateness"], found["client_late"], found["goodput"]) == (None, None, False, None)
    assert found["completed_rate"] == 0.0


def test_a_client_that_keeps_up_is_not_late():
    """One in a hundred may be late; the percentile is that of all."""
    records = [record(i, float(i), sent=i + (0.2 if i == 7 else 0.001)) for i in range(200)]
    assert not rates.summary(records)["client_late"]
    late = [record(i, float(i), sent=i + (0.2 if i % 50 == 7 else 0.001)) for i in range(200)]
    assert rates.summary(late)["client_late"]


@pytest.mark.parametrize("capacity", [0.013, 0.9, 1.0, 3.7, 60.0])
def test_search_finds_the_capacity(capacity):
    asked = []

    def holds(rate: float) -> bool:
        asked.append(rate)
        return rate <= capacity

    found = rates.search_rate(1.0 if capacity > 0.1 else 0.1, holds, precision=0.05)
    assert found.best <= capacity < found.failed <= found.best * 1.05
    assert found.trials == tuple((rate, rate <= capacity) for rate in asked)
    assert len(set(asked)) == len(asked) <= 12


def test_search_never_tries_above_a_failure():
    """Even where the server is moody: what failed once is not asked for again."""
    verdicts = iter([True, True, False, False, True, True, True, True])
    found = rates.search_rate(1.0, lambda rate: next(verdicts), precision=0.1)
    failed = [rate for rate, ok in found.trials if not ok]
    assert [rate for rate, _ in found.trials[:3]] == [1.0, 2.0, 4.0]
    assert found.failed == min(failed)
    assert all(rate < 2 * 2**0.5 for rate, _ in found.trials[4:])


def test_search_that_finds_nothing():
    found = rates.search_rate(1.0, lambda rate: False)
    assert (found.best, found.failed) == (None, 1 / 16)
    assert [rate for rate, _ in found.trials] == [1.0, 0.5, 0.25, 0.125, 0.0625]


def test_search_without_a_limit():
    found = rates.search_rate(1.0, lambda rate: True, most_trials=4)
    assert (found.best, found.failed) == (8.0, None)


def test_search_up_to_a_limit():
    found = rates.search_rate(1.0, lambda rate: True, most=3.0)
    assert found == rates.Search(3.0, None, ((1.0, True), (2.0, True), (3.0, True)))
    found = rates.search_rate(1.0, lambda rate: rate < 2.5, most=3.0, precision=0.1)
    assert [rate for rate, _ in found.trials[:3]] == [1.0, 2.0, 3.0]
    assert 2.2 < found.best < 2.5 <= found.failed
    assert rates.search_rate(1.0, lambda rate: True, most=1.0).trials == ((1.0, True),)


@pytest.mark.parametrize(
    "wrong", [{"start": 0.0}, {"precision": 0.0}, {"factor": 1.0}, {"most_trials": 0}, {"most": 0.5}]
)
def test_bad_searches(wrong):
    with pytest.raises(ArgumentError, match=f"{next(iter(wrong))}=.* is not allowed"):
        rates.search_rate(**{"start": 1.0, "holds": lambda rate: True, **wrong})


def test_given_rates_stop_at_the_first_that_fails():
    found = rates.try_rates([3.0, 0.5, 1.0, 2.0], lambda rate: rate <= 1.5)
    assert found == rates.Search(1.0, 2.0, ((0.5, True), (1.0, True), (2.0, False)))
    assert rates.try_rates([1.0], lambda rate: False) == rates.Search(None, 1.0, ((1.0, False),))
    assert rates.try_rates([1.0, 2.0], lambda rate: True).failed is None


def queue(rate: float, count: int, service: float, timeout: float) -> list[Record]:
    """What a server that takes `service` seconds for one request after the other makes of constant arrivals."""
    free, records = 0.0, []
    for index, due in enumerate(constant(rate, count)):
        free = max(free, due) + service
        late = free - due > timeout
        records.append(record(index, due, end=due + timeout if late else free, outcome="timeout" if late else "ok"))
    return records


@pytest.mark.parametrize(("service", "timeout"), [(0.5, 10.0), (0.1, 0.3), (2.0, 5.0)])
def test_paper_protocol_on_a_simulated_queue(service, timeout):
    """Request i waits i * (service - 1 / rate) too long: the fifth from the end decides, 123 of 0 to 127."""
    capacity = 1 / (service - (timeout - service) / 123)

    def holds(rate: float) -> bool:
        return sum(map(rates.is_missed, queue(rate, 128, service, timeout))) <= 4

    assert holds(capacity * 0.9999)
    assert not holds(capacity * 1.0001)
    found = rates.search_rate(1 / service, holds, precision=0.01)
    assert found.best <= capacity < found.failed <= found.best * 1.01


@pytest.mark.parametrize(
    ("outcome", "missed"),
    [("ok", False), ("pending", False), ("cancelled", False)]
    + [(name, True) for name in ("timeout", "refused", "error", "malformed", "lost")],
)
def test_what_counts_against_a_rate(outcome, missed):
    assert rates.is_missed(record(outcome=outcome)) is missed


def test_ceiling_of_first_tokens_is_the_cost_models():
    """One generated token is the prefill's: what is left are `costs.flop_ceiling`'s terms."""
    assert rates.mix_ceiling(MAIN, SPECULATOR, [(4096, 416, 1)]) == costs.flop_ceiling(MAIN, SPECULATOR, 4096, 416)
    assert rates.mix_ceiling(MAIN, SPECULATOR, [(4096, 416, 1)] * 3) == pytest.approx(
        costs.flop_ceiling(MAIN, SPECULATOR, 4096, 416)
    )


def test_ceiling_of_a_mix():
    """A long sparse prompt with three tokens, and a short one that is read whole with two."""
    prefill, decode = costs.prefill_flops, costs.decode_flops
    short = prefill(MAIN, 300) + decode(MAIN, 301)
    dense = prefill(MAIN, 4096) + decode(MAIN, 4097) + decode(MAIN, 4098) + short
    sparse = prefill(SPECULATOR, 4096) + prefill(MAIN, 416) + decode(MAIN, 417) + decode(MAIN, 418) + short
    found = rates.mix_ceiling(MAIN, SPECULATOR, [(4096, 416, 3), (300, 300, 2)])
    assert found == dense / sparse
    assert 1 < found < costs.flop_ceiling(MAIN, SPECULATOR, 4096, 416)


def test_ceiling_of_nothing_and_of_nonsense():
    assert rates.mix_ceiling(MAIN, SPECULATOR, []) is None
    with pytest.raises(ArgumentError, match="kept=5 is not allowed: kept must be an integer from 1 to 4"):
        rates.mix_ceiling(MAIN, SPECULATOR, [(4, 5, 1)])


def test_mix_of_records():
    records = [record(tokens=(1.0, 2.0)), record(outcome="timeout"), record(tokens=(1.0,), prompt=64, kept=64)]
    assert rates.mix_of(records) == [(100, 10, 2), (64, 64, 1)]
    assert rates.mix_of(records[1:2]) is None
    assert rates.mix_of([replace(records[0], specprefill=None)]) is None
