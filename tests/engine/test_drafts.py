"""The engine with proposals: answers are plain decoding's to the token, whatever is proposed and whatever runs beside.

The main model speculates for itself here: of a prompt that is read whole, all greedy proposals are right. Where those
of others shall be, too, `oracle` makes them.
"""

import logging
from dataclasses import replace

import jax
import numpy as np
import pytest
from agreement import MAIN, prompt_of
from engine.bench import DENSE, LIMITS, SPARSE, Bench, Tap, fail, greedy, lose, once

from specprefill_jax import SpecPrefillConfig
from specprefill_jax.engine import loop
from specprefill_jax.engine import scheduler as scheduler_module
from specprefill_jax.sharding.mesh import make_mesh
from specprefill_jax.speculative import Acceptance

DRAFTING = replace(LIMITS, draft_tokens=8)


@pytest.fixture(scope="module")
def scanned(fewer_programs):
    bench = Bench(make_mesh(1), DRAFTING, speculator=str(MAIN))
    yield bench
    bench.engine.close()


@pytest.fixture
def bench(scanned, monkeypatch):
    """The engine with nothing in its caches, and whole after each test; proposals never stop paying."""
    monkeypatch.setattr(Acceptance, "next_count", lambda self: self.most)
    # What is read whole is worth the speculator's reading, however short the answer.
    monkeypatch.setattr(scanned.engine._scheduler, "draft_cost", 0.01)
    monkeypatch.setattr(scanned.engine._scheduler, "cheap_tokens", 1000)
    scanned.forget()
    yield scanned
    scanned.check_clean()


@pytest.fixture
def oracle(bench, monkeypatch):
    """A function that has the proposals for these requests be right, but for every so-many-th token of the answer."""

    def use(requests, wrong: int = 3):
        answers = {request.request_id: bench.alone(request).token_ids for request in requests}
        real = loop.propose

        def propose(runner, works, size):
            proposals = real(runner, works, size)  # the speculator's cache is filled all the same
            if proposals is None:
                return None
            tokens = np.array(proposals)
            for row, work in zip(tokens, works, strict=False):
                known = work.sequence.issued - 1
                right = answers[work.request.request_id][known : known + len(row)]
                row[: len(right)] = [(t + (known + i) % wrong // (wrong - 1)) % 512 for i, t in enumerate(right)]
            return runner.main.put(tokens)

        monkeypatch.setattr(loop, "propose", propose)
        return requests

    return use


def accepted(listeners) -> int:
    return sum(listener.finished.accepted_tokens for listener in listeners)


DRAWN = {"temperature": 0.8, "seed": 7}
MIXED = [
    # Sparse and dense, short and long; greedy, drawn, filtered, penalised; with log-probabilities or not.
    (300, greedy(12), SPARSE),
    (5, greedy(30), SPARSE),
    (300, greedy(9, **DRAWN), replace(SPARSE, tail_tokens=3)),
    (257, greedy(20, **DRAWN, top_k=20, logprobs=2), DENSE),
    (64, greedy(33, **DRAWN, top_p=0.7), SPARSE),
    (300, greedy(14, repetition_penalty=1.3), replace(SPARSE, look_ahead=1)),
    (33, greedy(25, repetition_penalty=0.8, temperature=1.0, seed=2**32 - 1, logprobs=2), SPARSE),
    (300, greedy(16, temperature=1.5, min_p=0.05, seed=0), SpecPrefillConfig.paper(0.4)),
    (31, greedy(40, logprobs=2), DENSE),
    (480, greedy(32), DENSE),  # up to the longest the engine takes
    (300, greedy(40, stop_token_ids=tuple(range(5, 512, 12)), **DRAWN), SPARSE),
]


def mixed(bench, seed: int = 0, **options) -> list:
    return [
        bench.request(prompt_of(length, seed + i), sampling, config, **options)
        for i, (length, sampling, config) in enumerate(MIXED)
    ]


def test_a_mixed_load_equals_each_alone(either, oracle):
    before = either.engine.stats()
    listeners = either.ask(*oracle(mixed(either)))
    for listener in listeners:
        either.check(listener)
    assert {listener.finished.finish_reason for listener in listeners} == {"length", "stop"}
    assert accepted(listeners) > 20  # in a mixed load few that are read whole have theirs read by the speculator
    stats = either.engine.stats()
    proposed = sum(listener.finished.proposed_tokens for listener in listeners)
    assert (stats.accepted_tokens - before.accepted_tokens, stats.proposed_tokens - before.proposed_tokens) == (
        accepted(listeners),
        proposed,
    )
    assert accepted(listeners) < proposed
    assert stats.drafts - before.drafts >= proposed / 8


@pytest.mark.parametrize("most", range(9))
def test_any_number_of_proposals_in_a_mixed_batch(bench, oracle, most):
    """Alone they may be fewer than what is compiled; together all have what the most hopeful may have."""
    requests = [
        bench.request(prompt_of(length, 100 * most + length), sampling, config, draft_tokens=most)
        for length, sampling, config in (
            (70, greedy(12), DENSE),
            (130, greedy(12, **DRAWN, logprobs=1), SPARSE),
            (300, greedy(12), SPARSE),
            (9, greedy(12, repetition_penalty=1.2), DENSE),
        )
    ]
    listeners = bench.ask(*oracle(requests, wrong=5))
    for listener in listeners:
        bench.check(listener)
    assert (accepted(listeners) > 0) == (most > 0)


@pytest.mark.parametrize("most", range(1, 9))
def test_any_number_of_proposals_of_the_speculator_s_own(bench, most):
    requests = [bench.request(prompt_of(65 + i, most), greedy(24), DENSE, draft_tokens=most) for i in range(2)]
    alone, *together = [*bench.ask(requests[0]), *bench.ask(requests[1], bench.request(prompt_of(40, most), greedy(9)))]
    for listener in (alone, *together):
        bench.check(listener)
    finished = alone.finished
    assert finished.accepted_tokens == finished.proposed_tokens
    assert finished.proposed_tokens >= 20 * most // (most + 1)


def test_what_the_look_ahead_said_is_checked_first_for_nothing(bench, monkeypatch):
    """The main model expects other tokens behind a sparse prompt, and the rest of the answer is drafted."""
    tap = Tap(monkeypatch, bench.runner, "propose")
    checked = Tap(monkeypatch, bench.runner, "verify")
    [listener] = bench.ask(bench.request(prompt_of(300, 3), greedy(9)))
    bench.check(listener)
    first = checked.calls[0]
    free = listener.finished.selection.look_ahead_tokens[1:]
    assert np.asarray(first[4])[0].tolist() == [*free, 0]
    assert first[5][0] == 7
    assert len(tap.calls) == len(checked.calls) - 1


def test_a_stop_token_within_the_proposals(bench, oracle):
    """Nothing is heard of what was accepted behind it, and the next is right."""
    prompt = prompt_of(64, 4)
    answer = bench.alone(bench.request(prompt, greedy(30), DENSE)).token_ids
    place = next(i for i in range(14, 30) if answer[i] not in answer[:i])
    requests = [
        bench.request(prompt, greedy(30, stop_token_ids=(answer[place],)), DENSE),
        *(bench.request(prompt, greedy(place + i), DENSE) for i in range(4)),
    ]
    stopped, *limited = listeners = bench.ask(*oracle(requests, wrong=1000))
    for listener in listeners:
        bench.check(listener)
    assert (stopped.tokens, stopped.finished.finish_reason) == (answer[: place + 1], "stop")
    assert [len(listener.tokens) for listener in limited] == [place + i for i in range(4)]
    assert accepted(listeners) > 40
    [turn] = bench.ask(bench.request([*prompt, *answer[: place + 1], 7], greedy(9), DENSE))
    bench.check(turn)
    assert turn.finished.cached_tokens >= 64


def test_proposals_stop_where_they_do_not_pay(bench, monkeypatch):
    """And the speculator's pages are free at once."""
    monkeypatch.setattr(Acceptance, "next_count", lambda self: self.most if self.accepted == self.proposed else 0)
    tap = Tap(monkeypatch, bench.runner, "propose")
    held = []
    plain = Tap(monkeypatch, bench.runner, "decode", at=lambda *_: True, do=lambda: held.append(bench.usage))
    [listener] = bench.ask(bench.request(prompt_of(300, 5), greedy(20)))
    bench.check(listener)
    assert len(tap.calls) <= 2
    assert len(plain.calls) >= 16
    assert held == [0.0] * len(plain.calls)


@pytest.mark.parametrize("at", range(1, 4))
@pytest.mark.parametrize("name", ["propose", "verify"])
def test_cancelled_in_any_step_it_leaves_nothing(bench, monkeypatch, name, at):
    first = bench.request(prompt_of(300, 20), greedy(100))
    other = bench.request(prompt_of(40, 21), greedy(40, **DRAWN))
    Tap(monkeypatch, bench.runner, name, at=at, do=lambda: bench.engine.cancel(first.request_id))
    gone, beside = bench.ask(first, other)
    assert gone.finished.finish_reason == "abort"
    assert len(gone.tokens) < 100
    bench.check(beside)


def test_preemption_is_not_noticed(either, oracle):
    """With a cache of seven pages, four answers do not fit side by side; the youngest is computed again."""
    engine = either.engine
    held = engine._pages.take(engine._pages.available - 7)
    requests = [
        either.request(prompt_of(40, 30), greedy(50)),
        either.request(prompt_of(50, 31), greedy(45, temperature=0.9, seed=5, repetition_penalty=1.2)),
        either.request(prompt_of(300, 32), greedy(40, logprobs=2), SPARSE),
        either.request(prompt_of(60, 33), greedy(40, temperature=0.9, seed=6), DENSE),
    ]
    listeners = either.ask(*oracle(requests, wrong=6))
    engine._pages.release(held)
    assert sum(listener.finished.preemptions for listener in listeners) > 0
    for listener in listeners:
        either.check(listener)
    assert accepted(listeners) > 20


def test_a_prompt_takes_the_pages_and_they_are_read_again(either, oracle, monkeypatch):
    """The speculator's cache has room for one prompt and a bit; the stream goes on plainly meanwhile."""
    engine, runner = either.engine, either.runner
    held = engine._draft_pages.take(engine._draft_pages.available - 12)
    speculated = Tap(monkeypatch, runner, "speculate")
    requests = [
        either.request(prompt_of(200, 40), greedy(60, **DRAWN), replace(SPARSE, keep_rate=0.7)),
        *(either.request(prompt_of(300, 41 + i), greedy(2)) for i in range(2)),
    ]
    oracle(requests, wrong=20)
    others = []

    def ask_others(count):
        if count == 10:
            others.extend(either.submit(request) for request in requests[1:])

    first = either.submit(requests[0], ask_others)
    first.wait()
    for listener in (first, *others):
        either.check(listener)
    engine._draft_pages.release(held)
    assert engine.stats().speculator_cache_usage == 0
    again = [args for args in speculated.calls if args[1] + len(args[0]) > 200 and len(args[0]) < 64]
    assert any(args[0][-1] in first.tokens and args[1] >= 192 for args in again), "prompt and answer are read again"
    assert first.finished.accepted_tokens > 20


@pytest.mark.parametrize("place", [1, 2, 3])
def test_an_answer_that_ends_while_it_is_to_be_read(either, place):
    """Its last token and the speculator's reading for it were decided in the same round."""
    prompt = prompt_of(150, 45)
    answer = either.alone(either.request(prompt, greedy(9), DENSE)).token_ids
    [listener] = either.ask(either.request(prompt, greedy(9, stop_token_ids=(answer[place],)), DENSE))
    either.check(listener)
    assert len(listener.tokens) == place + 1


# faults


@pytest.mark.parametrize("name", ["propose", "speculate"])
@pytest.mark.parametrize("how", ["fails", "takes the caches"])
def test_a_speculator_that_fails_while_they_decode(either, monkeypatch, caplog, name, how):
    """In a step, or while it reads what it lacks: the answers go on without it."""
    do = fail if how == "fails" else lose(either.runner)

    def while_decoding(tap, args) -> bool:
        return not any(either.engine._scheduler.in_phase(*READING_PROMPTS))

    tap = Tap(monkeypatch, either.runner, name, at=while_decoding, do=once(do))
    with caplog.at_level(logging.WARNING):
        listeners = either.ask(
            either.request(prompt_of(70, 50), greedy(30), DENSE),
            either.request(prompt_of(300, 51), greedy(30, **DRAWN, logprobs=1), SPARSE),
        )
    assert tap.calls
    assert "go on without its proposals" in caplog.text
    for listener in listeners:
        either.check(listener)


READING_PROMPTS = [
    getattr(scheduler_module.Phase, name) for name in ["WAITING", "SPECULATE", "LOOK_AHEAD", "CHOOSING", "PREFILL"]
]


@pytest.mark.parametrize("count", [1, 3])
def test_a_check_that_fails_is_done_without_proposals(bench, monkeypatch, count):
    """Of a lone request, too: it might be the speculator's fault."""
    Tap(monkeypatch, bench.runner, "verify", at=2, do=fail)
    requests = [bench.request(prompt_of(300 - i, 52 + i), greedy(20, **DRAWN)) for i in range(count)]
    for listener in bench.ask(*requests):
        bench.check(listener)


def test_a_result_that_cannot_be_read_is_computed_again(bench, monkeypatch):
    real, failures = jax.device_get, []

    def flaky(tree):
        if isinstance(tree, tuple) and getattr(tree[0], "ndim", 0) == 2 and not failures:
            failures.append(tree)
            raise RuntimeError("injected")
        return real(tree)

    monkeypatch.setattr(jax, "device_get", flaky)
    [listener] = bench.ask(bench.request(prompt_of(300, 55), greedy(20, **DRAWN)))
    assert failures
    monkeypatch.undo()
    bench.check(listener)


def test_requests_may_ask_for_fewer_and_no_more(bench):
    """Nothing else is compiled."""
    few, none, many = bench.ask(
        *(bench.request(prompt_of(60, 56 + i), greedy(30), DENSE, draft_tokens=i) for i in (2, 0, 1000))
    )
    assert none.finished.proposed_tokens == 0
    assert few.finished.proposed_tokens > 0
    assert many.finished.proposed_tokens > 0
    for listener in (few, none, many):
        bench.check(listener)
    with pytest.raises(ValueError, match="draft_tokens=-1 is not allowed"):
        bench.submit(bench.request(prompt_of(60), draft_tokens=-1))


@pytest.mark.parametrize("bad", [-1, 17, 1.5, True])
def test_bad_counts(bad):
    with pytest.raises(ValueError, match="draft_tokens=.*is not allowed: .*an integer from 0 to 16"):
        replace(LIMITS, draft_tokens=bad)
