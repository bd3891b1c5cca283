"""Many requests at once, cancelled, failing and short of memory: each gets what it would get alone, to the token."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
import pytest
from agreement import prompt_of
from engine.bench import DENSE, LIMITS, PATIENCE, SPARSE, Bench, Tap, fail, greedy, lose, once
from small_tokenizers import byte_level

from specprefill_jax import SamplingParams, SpecPrefillConfig
from specprefill_jax.engine import scheduler as scheduler_module
from specprefill_jax.engine.request import (
    Finished,
    QueueFullError,
    Request,
    UnavailableError,
)
from specprefill_jax.planning import Reason
from specprefill_jax.sharding.mesh import make_mesh
from specprefill_jax.timing import PhaseClock
from specprefill_jax.tokens import Tokenizer


@pytest.fixture(scope="module")
def scanned(fewer_programs):
    """Whole passes are programs, and results are read a round late: as on accelerators."""
    bench = Bench(make_mesh(1), LIMITS)
    yield bench
    bench.engine.close()
    assert bench.engine.state == "closed"


@pytest.fixture
def bench(scanned):
    """The engine with nothing in its caches, and whole after each test."""
    scanned.forget()
    yield scanned
    scanned.check_clean()


def test_warm_up_reports_every_program(bench):
    total = bench.reports[-1][1]
    assert bench.reports == [(done, total) for done in range(total + 1)]


def mixed(bench) -> list[Request]:
    """Sparse, dense, short and long; greedy, drawn, filtered, penalised, stopped; with log-probabilities or not."""
    drawn = {"temperature": 0.8, "seed": 7}
    cases = [
        (300, greedy(12), SPARSE),
        (5, greedy(30), SPARSE),
        (300, greedy(9, **drawn), replace(SPARSE, tail_tokens=3)),
        (257, greedy(20, **drawn, top_k=20, logprobs=2), DENSE),
        (64, greedy(33, **drawn, top_p=0.7), SPARSE),
        (300, greedy(1), SPARSE),
        (300, greedy(14, repetition_penalty=1.3), replace(SPARSE, look_ahead=1)),
        (33, greedy(25, repetition_penalty=0.8, temperature=1.0, seed=2**32 - 1, logprobs=2), SPARSE),
        (300, greedy(16, temperature=1.5, min_p=0.05, seed=0), SpecPrefillConfig.paper(0.4)),
        (31, greedy(40, logprobs=2), DENSE),
        (480, greedy(100), DENSE),  # up to the longest the engine takes
        (300, greedy(40, stop_token_ids=tuple(range(5, 512, 12)), **drawn), SPARSE),
        (120, SamplingParams(max_tokens=30, temperature=1.0, seed=3), DENSE),
    ]
    return [bench.request(prompt_of(length, i), *settings) for i, (length, *settings) in enumerate(cases)]


def test_a_mixed_load_equals_each_alone(bench):
    """Complaints 7 and 12 among others: at any keep rate, beside whatever else runs."""
    requests = mixed(bench)
    cancelled = [bench.request(prompt_of(300, 100 + i), greedy(50), SPARSE if i % 2 else DENSE) for i in range(4)]
    listeners = [bench.submit(request) for request in requests[:7]]
    gone = [
        bench.submit(request, lambda count, i=i, r=request: count == 1 + i and bench.engine.cancel(r.request_id))
        for i, request in enumerate(cancelled)
    ]
    listeners += [bench.submit(request) for request in requests[7:]]
    bench.engine.cancel("nobody")
    for listener in gone:
        assert listener.wait().finish_reason == "abort"
    for i, listener in enumerate(gone):
        assert 1 + i <= len(listener.tokens) <= 3 + i
        assert (
            listener.tokens == bench.alone(replace(listener.request, sampling=greedy(len(listener.tokens)))).token_ids
        )
    for listener in listeners:
        if listener.request.prompt.size == 480:  # alone, it would go on to the model's own context
            listener.request = replace(listener.request, sampling=greedy(512 - 480))
        bench.check(listener)
    reasons = {listener.finished.selection.reason for listener in listeners}
    assert reasons == {Reason.ENGAGED, Reason.SHORT_PROMPT, Reason.FORCED_COVER_BUDGET, Reason.DISABLED}
    assert {listener.finished.finish_reason for listener in listeners} == {"length", "stop"}
    stats = bench.engine.stats()
    assert stats.prompt_tokens >= sum(len(request.prompt) for request in requests)
    assert stats.generation_tokens >= sum(len(listener.tokens) for listener in listeners)


def test_the_same_seed_gives_the_same_whatever_runs_beside(bench):
    prompt = prompt_of(50, 4)
    sampling = greedy(20, temperature=1.0, seed=11)
    [alone] = bench.ask(bench.request(prompt, sampling))
    others = [bench.request(prompt_of(20 + i, i), greedy(30, temperature=1.0, seed=i)) for i in range(5)]
    among = bench.ask(*others[:2], bench.request(prompt, sampling), *others[2:])[2]
    assert among.tokens == alone.tokens
    free = [bench.ask(bench.request(prompt, greedy(20, temperature=1.0)))[0].tokens for _ in range(2)]
    assert free[0] != free[1]


@pytest.mark.parametrize("length", [1, 2, 64, 65, 150])
def test_log_probabilities_of_the_prompt(bench, reference, length):
    prompt = prompt_of(length, 5)
    [listener] = bench.ask(bench.request(prompt, greedy(2, logprobs=2), prompt_logprobs=3))
    finished = listener.finished
    assert finished.selection.reason == Reason.PROMPT_LOGPROBS
    assert finished.prompt_logprobs[0] is None
    assert len(finished.prompt_logprobs) == length
    tokens = [*prompt[1:], *listener.tokens]
    logits = reference.logits_of(prompt[:1], [0], tokens).astype(np.float64)
    logits -= np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True)) + logits.max(1, keepdims=True)
    entries = [*finished.prompt_logprobs[1:], *listener.logprobs]
    for row, token, entry in zip(logits, tokens, entries, strict=True):
        assert entry.token == pytest.approx(row[token], abs=2e-3)
        top = sorted(row, reverse=True)[: len(entry.top)]
        assert list(entry.top.values()) == pytest.approx(top, abs=2e-3)
    assert len(finished.prompt_logprobs[-1].top if length > 1 else listener.logprobs[0].top) == (3 if length > 1 else 2)


def test_phases_add_up_to_the_clock(bench):
    """Complaint 20: what is reported is what a client waits, and dense requests speculate nothing."""
    for config in (SPARSE, DENSE):
        readings: list[float] = []

        def now(readings=readings) -> float:
            readings.append(time.perf_counter())
            return readings[-1]

        begin = time.perf_counter()
        request = bench.request(prompt_of(300, 6), greedy(6), config, clock=PhaseClock(now=now))
        busy = bench.request(prompt_of(300, 106), greedy(6), DENSE)
        _, listener = bench.ask(busy, request)
        timings = listener.finished.timings
        assert timings.total == pytest.approx(readings[-1] - readings[0], rel=1e-9)
        assert timings.total <= listener.times[-1] - begin
        assert listener.times[0] - readings[0] <= timings.ttft <= listener.times[1] - readings[0]
        assert timings.queue > 0
        assert (timings.speculate > 0) == (timings.score > 0) == config.enabled
        read = listener.finished.selection.num_kept - listener.finished.cached_tokens
        speculated = {"speculate": 300} if config.enabled else {}
        assert dict(timings.tokens) == {**speculated, "main_prefill": read, "first_token": 1, "decode": 5}


# caches


def test_the_same_prompt_is_not_speculated_twice(bench, monkeypatch):
    """Complaint 17: neither a retry nor one that comes while the first is under way costs the speculator anything."""
    taps = [Tap(monkeypatch, bench.runner, name) for name in ("speculate", "look_ahead", "score")]
    before = bench.engine.stats().memoised_selections
    prompt = prompt_of(300, 7)
    together = bench.ask(*(bench.request(prompt, greedy(3 + i)) for i in range(3)))
    calls = [len(tap.calls) for tap in taps]
    assert calls == [5, 1, 1]  # 300 tokens are five pieces of 64
    [again] = bench.ask(bench.request(prompt, greedy(9)))
    assert [len(tap.calls) for tap in taps] == calls
    assert bench.engine.stats().memoised_selections == before + 3
    assert again.finished.timings.speculate == 0
    for listener in (*together, again):
        bench.check(listener)
    [other] = bench.ask(bench.request(prompt, greedy(3), replace(SPARSE, tail_tokens=7)))
    assert len(taps[1].calls) == 2
    bench.check(other)


def test_each_prompt_keeps_what_its_scores_ask_for(bench, monkeypatch):
    """Keep rate "auto": more of one prompt than of another, whole where all parts matter alike, and remembered."""
    adaptive = replace(SPARSE, keep_rate="auto", max_keep_rate=0.9)
    dense = replace(adaptive, max_divergence=0.0)
    shares = [replace(adaptive, look_ahead=1, importance_share=share) for share in (0.05, 0.5, 0.8)]
    found = bench.alone(bench.request(prompt_of(300), greedy(4), dense)).selection.divergences
    assert list(found) == [3, 6, 9]
    some = replace(adaptive, max_divergence=max(found[6], found[9]) + 1e-4)  # the engine's are not the same to the bit
    assert found[3] > some.max_divergence + 1e-3
    configs = (*shares, some, dense, dense)
    listeners = bench.ask(*(bench.request(prompt_of(300), greedy(4), config) for config in configs))
    for listener in listeners:
        bench.check(listener)
    kept = [listener.finished.selection.num_kept for listener in listeners]
    assert kept[0] < kept[1] < kept[2] < kept[4] == kept[5] == 300
    selections = [listener.finished.selection for listener in listeners]
    assert [selection.reason for selection in selections] == [*[Reason.ENGAGED] * 4, *[Reason.INFORMATION_DENSE] * 2]
    assert selections[3].kept_chunks == 6
    for selection in selections[3:]:
        assert selection.divergences == pytest.approx(found, abs=5e-5)
    assert [listener.finished.timings.tokens.get("speculate") for listener in listeners] == [300] * 6
    # Where the cache could not hold it whole, as much is read as may be.
    bench.forget()
    monkeypatch.setattr(bench.runner, "num_pages", 10)
    [part] = bench.ask(bench.request(prompt_of(300, 1), greedy(4), replace(dense, max_keep_rate=0.7)))
    assert (part.finished.selection.reason, part.finished.selection.kept_chunks) == (Reason.ENGAGED, 7)


def test_prompts_that_are_scored_by_their_own_last_tokens(scanned):
    """The window lies in up to four pieces, or begins in pages that another prompt left; nobody looks ahead.

    Some heads alone score: what one request may not ask for differently from another.
    """
    config = replace(SPARSE, keep_rate=0.8, query_window=140, scoring_heads=((0, 1), (2, 0), (2, 3)))
    before = scanned.compiled
    limits = replace(LIMITS, max_running=1, max_model_len=256, cache_tokens=512, draft_tokens=1)
    bench = Bench(make_mesh(1), limits, config)
    try:
        shared = prompt_of(250, 50)
        listeners = bench.ask(*(bench.request(shared[:count], greedy(3), config) for count in (130, 197, 64)))
        listeners += bench.ask(bench.request(shared, greedy(3), config))
        for listener, queries in zip(listeners, (130, 140, 0, 140), strict=True):
            bench.check(listener)
            selection = listener.finished.selection
            assert selection.engaged == (queries > 0)
            assert (selection.num_queries, selection.look_ahead_tokens) == (queries, [])
        with pytest.raises(ValueError, match=r"query_window=0 .* 140, which this engine was started with"):
            bench.submit(bench.request(shared, config=SPARSE))
        with pytest.raises(ValueError, match=r"scoring_heads=\(\) .* which this engine was started with"):
            bench.submit(bench.request(shared, config=replace(config, scoring_heads=())))
        bench.check_clean()
    finally:
        bench.engine.close()
        scanned.elsewhere += scanned.compiled - before


@pytest.mark.parametrize("what", ["cancelled", "failed"])
def test_followers_of_a_selection_outlive_its_leader(bench, monkeypatch, what):
    prompt = prompt_of(300, 8 + (what == "failed"))
    requests = [bench.request(prompt, greedy(3)) for _ in range(3)]
    do = fail if what == "failed" else lambda: bench.engine.cancel(requests[0].request_id)
    Tap(monkeypatch, bench.runner, "speculate", at=4, do=do)
    leader, *followers = bench.ask(*requests)
    if what == "cancelled":
        assert leader.finished.finish_reason == "abort"
    else:
        assert leader.finished.selection.reason == Reason.SPECULATOR_FAILED
    for listener in followers:
        bench.check(listener)
        assert listener.finished.selection.engaged


def test_a_follower_is_cancelled(bench, monkeypatch):
    prompt = prompt_of(300, 10)
    first, second = (bench.request(prompt, greedy(3)) for _ in range(2))
    Tap(monkeypatch, bench.runner, "speculate", at=2, do=lambda: bench.engine.cancel(second.request_id))
    one, two = bench.ask(first, second)
    assert (two.finished.finish_reason, two.finished.selection, two.tokens) == ("abort", None, [])
    bench.check(one)


def test_a_dense_beginning_is_shared(bench, monkeypatch):
    """Complaint 2: what was found in the cache counts as read, and its words are heard as if it had been."""
    system = prompt_of(128, 11)
    bench.ask(bench.request([*system, *prompt_of(20, 12)], greedy(2), DENSE))
    tap = Tap(monkeypatch, bench.runner, "prefill")
    [second] = bench.ask(bench.request([*system, *prompt_of(90, 13)], greedy(8), DENSE))
    assert second.finished.cached_tokens == 128
    assert sum(len(args[0]) for args in tap.calls) == 90
    bench.check(second)
    # A turn later, the answer is found, too.
    turn = [*second.request.prompt, *second.tokens, *prompt_of(40, 14)]
    [third] = bench.ask(bench.request(turn, greedy(8), DENSE))
    assert third.finished.cached_tokens == 224  # of 225 that were written, whole pages
    bench.check(third)
    stats = bench.engine.stats()
    assert stats.cached_tokens >= 128 + 224


def test_a_sparse_prompt_shares_its_dense_beginning_and_leaves_nothing_false(bench):
    """Complaints 2 and 3: sparse after dense, dense after sparse, each as if the cache were empty."""
    prompt = prompt_of(300, 15)
    forced = replace(SPARSE, forced_spans=((0, 64),))
    for config in (forced, DENSE, forced, replace(forced, tail_tokens=7), DENSE):
        [listener] = bench.ask(bench.request(prompt, greedy(6), config))
        bench.check(listener)
    assert listener.finished.cached_tokens == 288


def test_a_cancelled_speculation_is_not_read_again(bench, monkeypatch):
    """Complaint 16: cancelled half way and resent, the speculator reads only the rest."""
    prompt = prompt_of(300, 16)
    first, again = (bench.request(prompt, greedy(4)) for _ in range(2))
    tap = Tap(
        monkeypatch, bench.runner, "speculate", at=3, do=lambda: bench.engine.cancel(first.request_id), after=True
    )
    [gone] = bench.ask(first)
    assert gone.finished.finish_reason == "abort"
    read = len(tap.calls)
    assert read in (3, 4)
    [listener] = bench.ask(again)
    assert [args[1] for args in tap.calls[read:]] == list(range(64 * read, 300, 64))
    bench.check(listener)


@pytest.mark.parametrize("name", ["speculate", "look_ahead", "score", "prefill", "choose", "decode"])
def test_cancelled_in_any_phase_it_leaves_nothing(bench, monkeypatch, name):
    """Complaint 14: whatever a request was doing when its client went, the next one, dense, is as if it were first."""
    prompt = prompt_of(300, 20)
    first = bench.request(prompt, greedy(100))
    Tap(monkeypatch, bench.runner, name, at=1, do=lambda: bench.engine.cancel(first.request_id))
    [gone] = bench.ask(first)
    assert gone.finished.finish_reason == "abort"
    assert len(gone.tokens) <= 4
    [dense] = bench.ask(bench.request(prompt, greedy(5), DENSE))
    bench.check(dense)


# memory


def test_preemption_is_not_noticed(either):
    """With a cache of ten pages, four answers do not fit side by side; the youngest is computed again."""
    bench = either
    engine = bench.engine
    held = engine._pages.take(engine._pages.available - 10)
    before = engine.stats().preemptions
    listeners = bench.ask(
        bench.request(prompt_of(40, 30), greedy(100)),
        bench.request(prompt_of(50, 31), greedy(90, temperature=0.9, seed=5, repetition_penalty=1.2)),
        bench.request(prompt_of(300, 32), greedy(80, logprobs=2), SPARSE),
        bench.request(prompt_of(60, 33), greedy(70, temperature=0.9, seed=6), DENSE),
        bench.request(prompt_of(45, 34), greedy(5), prompt_logprobs=1),
    )
    engine._pages.release(held)
    assert engine.stats().preemptions > before
    assert sum(listener.finished.preemptions for listener in listeners) == engine.stats().preemptions - before
    assert listeners[0].finished.preemptions == 0
    for listener in listeners[:-1]:
        bench.check(listener)
    assert len(listeners[-1].finished.prompt_logprobs) == 45


def test_what_can_never_fit_is_refused_with_the_numbers(bench, monkeypatch):
    """Complaint 29: a prompt past the context is refused even if what would be kept of it fits."""
    with pytest.raises(ValueError, match=r"prompt of 512 tokens .* 512"):
        bench.submit(bench.request(prompt_of(512), config=replace(SPARSE, keep_rate=0.2)))
    monkeypatch.setattr(bench.runner, "num_pages", 9)
    with pytest.raises(ValueError, match=r"250 tokens to read and up to 30 to generate .* 9 pages of 32 .* has 8"):
        bench.submit(bench.request(prompt_of(250), greedy(30), DENSE))
    [listener] = bench.ask(bench.request(prompt_of(250), greedy(6), DENSE))
    assert listener.finished.finish_reason == "length"


def test_a_prompt_for_which_the_speculator_has_no_room_is_read_whole(bench, monkeypatch):
    monkeypatch.setattr(bench.runner, "num_draft_pages", 7)
    [listener] = bench.ask(bench.request(prompt_of(186, 35)))
    assert listener.finished.selection.reason == Reason.SPECULATOR_FAILED
    assert "room for 185 tokens, not for 186" in listener.finished.selection.detail
    [listener] = bench.ask(bench.request(prompt_of(185, 35)))
    assert listener.finished.selection.engaged
    with pytest.raises(ValueError, match="prompt of 186 tokens"):
        bench.submit(bench.request(prompt_of(186, 35), config=SpecPrefillConfig.paper(0.4)))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"config": replace(SPARSE, pool_width=5)}, "pool_width"),
        ({"config": replace(SPARSE, chunk_size=16)}, "chunk_size"),
        ({"config": replace(SPARSE, look_ahead=4)}, "look_ahead=4 .* 1 or 8"),
        ({"config": replace(SPARSE, query_window=16)}, "query_window=16 .* 0, which this engine was started with"),
        ({"sampling": greedy(3, stop="x")}, "stop"),
        ({"prompt": [1, 512]}, r"prompt\[1\]"),
        ({"prompt": []}, "prompt"),
    ],
)
def test_what_this_engine_does_not_serve_is_refused(bench, changes, match):
    with pytest.raises(ValueError, match=match):
        bench.submit(bench.request(**{"prompt": prompt_of(100), **changes}))


def test_an_id_is_one_unfinished_request_s(bench, monkeypatch):
    go = threading.Event()
    Tap(monkeypatch, bench.runner, "prefill", at=1, do=lambda: go.wait(PATIENCE))
    request = bench.request(prompt_of(20))
    listener = bench.submit(request)
    with pytest.raises(ValueError, match="request_id"):
        bench.submit(request)
    go.set()
    listener.wait()
    bench.ask(request)


def test_a_full_queue_refuses(bench, monkeypatch):
    go, begun = threading.Event(), threading.Event()

    def hold():
        begun.set()
        assert go.wait(PATIENCE)

    monkeypatch.setattr(bench.engine, "config", replace(LIMITS, max_queued_requests=3, max_queued_tokens=300))
    Tap(monkeypatch, bench.runner, "prefill", at=1, do=hold)
    listeners = [bench.submit(bench.request(prompt_of(20, 40)))]
    assert begun.wait(PATIENCE)
    listeners.append(bench.submit(bench.request(prompt_of(400, 40))))  # more than all may be, but it waits alone
    with pytest.raises(QueueFullError, match=r"1 requests with 400 .* 3 and 300.*; this one has 30") as refused:
        bench.submit(bench.request(prompt_of(30, 40)))
    assert 1 <= refused.value.retry_after <= 60
    bench.engine.cancel(listeners[-1].request.request_id)
    monkeypatch.setattr(bench.engine, "config", replace(LIMITS, max_queued_requests=3))
    listeners += [bench.submit(bench.request(prompt_of(30 + i, 40))) for i in range(2)]
    with pytest.raises(QueueFullError, match="3 requests"):
        bench.submit(bench.request(prompt_of(30, 40)))
    assert bench.engine.stats().waiting == 3
    go.set()
    assert [listener.wait().finish_reason for listener in listeners] == ["length", "abort", "length", "length"]


# faults


@pytest.mark.parametrize(("name", "at"), [("speculate", 1), ("speculate", 3), ("look_ahead", 1), ("score", 1)])
def test_a_speculator_that_fails_leaves_a_clean_dense_read(bench, monkeypatch, name, at):
    """Complaint 3: as a cold dense run, with the reason; and nothing false is found by the next."""
    prompt = prompt_of(300, 50 + at + len(name))
    request = bench.request(prompt, greedy(6, logprobs=2))
    other = bench.request(prompt_of(30, 51), greedy(20))
    Tap(monkeypatch, bench.runner, name, at=at, do=fail)
    listener, beside = bench.ask(request, other)
    want = bench.alone(replace(request, config=DENSE))
    assert listener.tokens == want.token_ids
    selection = listener.finished.selection
    assert (selection.reason, selection.num_kept) == (Reason.SPECULATOR_FAILED, 300)
    assert selection.detail == "RuntimeError: injected"
    bench.check(beside)
    [again] = bench.ask(bench.request(prompt, greedy(6)))
    assert again.finished.selection.engaged
    bench.check(again)
    paper = bench.request(prompt, greedy(6), SpecPrefillConfig.paper(0.4))
    Tap(monkeypatch, bench.runner, name, at=1, do=fail)
    [failed] = bench.ask(paper)
    assert failed.finished.finish_reason == "error"
    assert failed.finished.error == "the speculator failed: RuntimeError: injected"
    assert failed.finished.selection is None


def test_scores_that_are_not_finite(bench, monkeypatch):
    real = bench.runner.score

    def overflowed(*args):
        importance, scores, choice, *others = real(*args)
        return importance, np.full(np.shape(scores), np.nan), choice._replace(ok=np.False_), *others

    request = bench.request(prompt_of(300, 55), greedy(6))
    with monkeypatch.context() as patch:
        patch.setattr(bench.runner, "score", overflowed)
        [listener] = bench.ask(request)
    assert listener.finished.selection.reason == Reason.SPECULATOR_FAILED
    assert "must be finite" in listener.finished.selection.detail
    assert listener.tokens == bench.alone(replace(request, config=DENSE)).token_ids


@pytest.mark.parametrize("at", [1, 3])
def test_a_prefill_that_fails_is_its_own_request_s_failure(bench, monkeypatch, at):
    """And what was said to be in its pages is not believed by the next."""
    prompt = prompt_of(300, 57 + at)
    started = threading.Event()
    beside = bench.submit(bench.request(prompt_of(20, 56), greedy(60)), lambda count: count == 1 and started.set())
    request = bench.request(prompt, greedy(6), DENSE)
    assert started.wait(PATIENCE)
    with monkeypatch.context() as patch:
        Tap(patch, bench.runner, "prefill", at=at, do=fail)
        [failed] = bench.ask(request)
    assert failed.finished.finish_reason == "error"
    assert failed.finished.error == "the request failed: RuntimeError: injected"
    assert failed.tokens == []
    [again] = bench.ask(bench.request(prompt, greedy(6), DENSE))
    bench.check(again)
    bench.check(beside)


def test_a_decode_step_that_fails_once_costs_nobody_anything(either, monkeypatch):
    bench = either
    Tap(
        monkeypatch,
        bench.runner,
        "decode",
        at=lambda tap, args: len(args[1]) >= 2 and len(tap.calls) > 9,
        do=once(fail),
    )
    for listener in bench.ask(*batch(bench)):
        bench.check(listener)


def test_a_request_that_breaks_every_step_is_found_out(either, monkeypatch):
    """The others go on and finish right."""
    bench = either
    culprit = bench.request(prompt_of(30, 63), greedy(60, temperature=0.125, seed=1))
    # From its fourth token on, whoever else is in the batch.
    Tap(
        monkeypatch,
        bench.runner,
        "decode",
        at=lambda _, args: ((args[0].settings.temperature == 0.125) & (np.asarray(args[0].index) > 3)).any(),
        do=fail,
    )
    first, failed, *others = bench.ask(batch(bench)[0], culprit, *batch(bench)[1:])
    assert failed.finished.finish_reason == "error"
    assert failed.finished.error == "the request failed: RuntimeError: injected"
    assert 3 <= len(failed.tokens) <= 8
    assert failed.tokens == bench.alone(culprit).token_ids[: len(failed.tokens)]
    for listener in (first, *others):
        bench.check(listener)


def test_a_result_that_cannot_be_read_is_computed_again(bench, monkeypatch):
    """The step after it is on its way already: its tokens must not be taken for those that are missing."""
    real, failures = jax.device_get, []

    def flaky(tree):
        if isinstance(tree, tuple) and getattr(tree[0], "shape", None) == (4,) and len(failures) == 0:
            failures.append(tree)
            raise RuntimeError("injected")
        return real(tree)

    monkeypatch.setattr(jax, "device_get", flaky)
    listeners = bench.ask(*batch(bench, 4))
    assert failures
    monkeypatch.undo()
    for listener in listeners:
        bench.check(listener)


def batch(bench, count: int = 3) -> list[Request]:
    """Requests that decode side by side for a while."""
    return [
        bench.request(prompt_of(20 + i, 60 + i), greedy(30 - i, temperature=0.5 * (i % 2), seed=i))
        for i in range(count)
    ]


@pytest.mark.parametrize("name", ["speculate", "look_ahead", "score", "prefill", "decode"])
def test_a_lost_device_is_begun_again(bench, monkeypatch, name):
    """All but the one that was being read when it happened are computed again, and nobody's answer changes."""
    requests = [
        *batch(bench, 2),
        bench.request(prompt_of(300, 70), greedy(20), SPARSE),
        bench.request(prompt_of(290, 71), greedy(10), DENSE),
    ]

    def while_another_is_read(tap, args) -> bool:
        reading = (scheduler_module.Phase.SPECULATE, scheduler_module.Phase.PREFILL)
        return len(args[1]) >= 2 and any(bench.engine._scheduler.in_phase(*reading))

    at = {"decode": while_another_is_read, "prefill": 4}.get(name, 1)
    Tap(monkeypatch, bench.runner, name, at=at, do=once(lose(bench.runner)))
    listeners = bench.ask(*requests)
    failed = [listener for listener in listeners if listener.finished.finish_reason == "error"]
    assert len(failed) == (1 if name == "prefill" else 0), [listener.finished.error for listener in failed]
    for listener in listeners:
        if listener in failed:
            assert "the device is lost" in listener.finished.error
        elif listener.finished.selection.reason == Reason.SPECULATOR_FAILED:
            assert name in ("speculate", "look_ahead", "score")
            assert listener.tokens == bench.alone(replace(listener.request, config=DENSE)).token_ids
        else:
            bench.check(listener)


def test_a_program_that_fails_on_the_device_takes_the_caches_with_it(bench, monkeypatch):
    """Its outputs exist, and whoever reads them gets its error: so would everybody from then on."""

    def broken(x):
        raise RuntimeError("injected")

    runner = bench.runner
    poison = jax.jit(lambda x: x + jax.pure_callback(broken, jax.ShapeDtypeStruct((), x.dtype), x[0, 0, 0, 0, 0]))
    before = bench.engine.stats().compiles_after_warm_up
    poison = poison.lower(runner.cache.k).compile()
    bench.elsewhere += bench.engine.stats().compiles_after_warm_up - before

    def do():
        runner.cache = replace(runner.cache, k=poison(runner.cache.k))

    request = bench.request(prompt_of(150, 75), greedy(20), DENSE)
    with monkeypatch.context() as patch:
        Tap(patch, runner, "prefill", at=4, do=once(do), after=True)
        *others, failed = bench.ask(*batch(bench), request)
    assert sum(listener.finished.error is not None for listener in (*others, failed)) <= 1
    assert jax.block_until_ready(runner.cache.k) is runner.cache.k
    for listener in (*others, failed):
        if listener.finished.error is None:
            bench.check(listener)
    bench.check(bench.ask(bench.request(prompt_of(40, 76), greedy(5)))[0])


@pytest.mark.parametrize("at", [1, 5])
def test_a_listener_that_raises_ends_its_own_request(bench, caplog, at):
    def raises(count):
        if count >= at:
            raise RuntimeError("deaf")

    other = bench.submit(bench.request(prompt_of(25, 80), greedy(20)))
    deaf = bench.submit(bench.request(prompt_of(26, 80), greedy(20)), raises)
    finished = deaf.wait()
    assert (finished.finish_reason, finished.error) == ("error", "the request failed: RuntimeError: deaf")
    assert len(deaf.tokens) == at
    bench.check(other)


def test_a_listener_that_raises_at_the_end_harms_nobody(bench):
    heard = []

    def raises(event):
        heard.append(event)
        if isinstance(event, Finished):
            raise RuntimeError("deaf")

    bench.engine.submit(bench.request(prompt_of(25, 81), greedy(2)), raises)
    bench.check(bench.ask(bench.request(prompt_of(26, 81), greedy(5)))[0])
    assert isinstance(heard[-1], Finished)


def test_a_step_that_does_not_end_is_told_and_forgiven(bench, monkeypatch):
    """The watchdog: stuck, refusing; ready again when it moves."""
    go = threading.Event()
    monkeypatch.setattr(bench.engine, "config", replace(LIMITS, stuck_after=0.05))
    Tap(monkeypatch, bench.runner, "prefill", at=1, do=lambda: go.wait(PATIENCE))
    listener = bench.submit(bench.request(prompt_of(25, 82)))
    wait_for(lambda: bench.engine.state == "stuck")
    with pytest.raises(UnavailableError, match="stuck"):
        bench.submit(bench.request(prompt_of(25, 82)))
    monkeypatch.setattr(bench.engine, "config", LIMITS)
    assert bench.engine.state == "ready"
    go.set()
    assert listener.wait().finish_reason == "length"


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# one way of decoding


def test_sparse_and_dense_requests_decode_by_the_same_programs(bench, monkeypatch):
    """Complaint 7: no loop of its own for what was read in part; one program a batch size, whatever is in it."""
    tap = Tap(monkeypatch, bench.runner, "decode")
    sizes = bench.runner._decode._cache_size()
    assert sizes == len(bench.runner.rows)
    seen = []
    for config in (DENSE, SPARSE):
        tap.calls.clear()
        bench.check(bench.ask(bench.request(prompt_of(300, 85), greedy(5), config))[0])
        seen.append([jax.tree.map(lambda x: (np.shape(x), np.asarray(x).dtype.name), args[:3]) for args in tap.calls])
    assert seen[0] == seen[1]
    bench.ask(*batch(bench, 4))
    assert bench.runner._decode._cache_size() == sizes


# text


@pytest.fixture
def with_text(bench, monkeypatch):
    """The engine with a tokenizer of 512 tokens."""
    backend = byte_level()
    backend.add_tokens([f" w{i}" for i in range(512 - backend.get_vocab_size())])
    tokenizer = Tokenizer(backend)
    assert tokenizer.vocab_size == 512
    monkeypatch.setattr(bench.engine, "tokenizer", tokenizer)
    monkeypatch.setattr(bench.pair, "tokenizer", tokenizer)
    return bench


def test_text_is_the_text_of_the_tokens(with_text):
    bench = with_text
    requests = [bench.request(prompt_of(40, 90 + i), greedy(40, temperature=1.0, seed=i)) for i in range(4)]
    for listener in bench.ask(*requests):
        bench.check(listener)
        assert listener.text == bench.alone(listener.request).text
        assert listener.text == bench.engine.tokenizer.decode(listener.tokens)
        assert all(len(delta.token_ids) <= 1 for delta in listener.deltas)


def test_a_stop_string_over_several_tokens_ends_the_answer(with_text):
    bench = with_text
    prompt, sampling = prompt_of(40, 95), greedy(30, temperature=1.0, seed=1)
    text = bench.alone(bench.request(prompt, sampling)).text
    place = len(text) // 2
    stop = text[place : place + 9]
    assert len(stop) == 9
    requests = [
        bench.request(prompt, replace(sampling, stop=stop)),
        bench.request(prompt, replace(sampling, stop=("never", stop), repetition_penalty=1.0001)),
        bench.request(prompt, sampling),
    ]
    stopped, _, whole = bench.ask(*requests)
    assert stopped.finished.finish_reason == "stop"
    assert stopped.text == text[: text.index(stop)]
    assert whole.text == text
    for listener in (stopped, whole):
        bench.check(listener)
        assert listener.text == bench.alone(listener.request).text


# the end


@pytest.fixture
def restarted(bench):
    """An engine that a test may close: it is started anew."""
    yield bench
    bench.engine.close()
    bench.engine.start()


def test_draining_lets_what_runs_finish(restarted):
    bench = restarted
    started = threading.Event()
    running = bench.submit(bench.request(prompt_of(25, 96), greedy(100)), lambda count: count == 1 and started.set())
    waiting = bench.submit(bench.request(prompt_of(300, 96), greedy(5)))
    assert started.wait(PATIENCE)
    assert bench.engine.drain(PATIENCE) is True
    assert bench.engine.state == "draining"
    with pytest.raises(UnavailableError, match="draining"):
        bench.submit(bench.request(prompt_of(25)))
    assert {running.wait().finish_reason, waiting.wait().finish_reason} == {"length"}


def test_draining_cancels_what_is_late(restarted, monkeypatch):
    bench = restarted
    go = threading.Event()
    Tap(monkeypatch, bench.runner, "prefill", at=1, do=lambda: go.wait(PATIENCE))
    listener = bench.submit(bench.request(prompt_of(25, 97), greedy(400)))
    threading.Timer(0.1, go.set).start()
    assert bench.engine.drain(0.0) is False
    assert listener.wait().finish_reason == "abort"


def test_closing_ends_everything(restarted, monkeypatch):
    bench = restarted
    go, begun = threading.Event(), threading.Event()

    def hold():
        begun.set()
        assert go.wait(PATIENCE)

    Tap(monkeypatch, bench.runner, "decode", at=3, do=hold)
    sampling = greedy(300)
    prompts = [prompt_of(25, 98), prompt_of(300, 98), prompt_of(300, 98), prompt_of(300, 98)]
    listeners = [bench.submit(bench.request(prompt, sampling)) for prompt in prompts]
    assert begun.wait(PATIENCE)
    listeners.append(bench.submit(bench.request(prompt_of(10), sampling)))  # the engine has not even heard of it
    threading.Timer(0.1, go.set).start()
    bench.engine.close()
    for listener in listeners:
        finished = listener.wait()
        assert (finished.finish_reason, finished.error) == ("abort", None)
    with pytest.raises(UnavailableError, match="closed"):
        bench.submit(bench.request(prompt_of(25)))


def test_a_broken_loop_leaves_nobody_waiting(restarted, monkeypatch):
    bench = restarted
    real = bench.engine._scheduler.schedule
    rounds = []

    def broken():
        rounds.append(None)
        if len(rounds) > 5:
            raise MemoryError("no more")
        return real()

    with monkeypatch.context() as patch:
        patch.setattr(bench.engine._scheduler, "schedule", broken)
        listeners = bench.ask(bench.request(prompt_of(25), greedy(300)), bench.request(prompt_of(300), greedy(300)))
    for listener in listeners:
        assert (listener.finished.finish_reason, listener.finished.error) == (
            "error",
            "the engine failed: MemoryError: no more",
        )
    assert bench.engine.state == "failed"
    with pytest.raises(UnavailableError, match="failed"):
        bench.submit(bench.request(prompt_of(25)))
