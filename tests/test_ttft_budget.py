"""`ttft_budget_ms`: as many chunks as the cost model says there is time for."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from agreement import prompt_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specprefill_jax import SamplingParams, SpecPrefill, SpecPrefillConfig, costs, predictor
from specprefill_jax.costs import Prediction
from specprefill_jax.planning import Reason, budget, plan
from specprefill_jax.predictor import Predictor
from specprefill_jax.selection import Selection

OPEN = {"min_prompt_tokens": 0, "min_predicted_gain": 0.0, "tail_tokens": 1, "chunk_size": 4}


def clock(fixed: float = 0.25, token: float = 0.125, dense: float = 50.0):
    """What a prompt takes: seconds that binary fractions say exactly."""
    return lambda kept: Prediction(dense, fixed, fixed, 2 * fixed, kept * token)


@settings(max_examples=200, deadline=None)
@given(
    chunks=st.integers(3, 60),
    rate=st.sampled_from([0.1, 0.3, 0.5, 0.9, "auto"]),
    floor=st.sampled_from([0.01, 0.2, 0.5]),
    limit=st.integers(500, 40_000),
)
def test_the_most_chunks_that_fit(chunks, rate, floor, limit):
    """Against a search through all of them."""
    config = SpecPrefillConfig(rate, **OPEN, min_keep_rate=floor, max_keep_rate=0.8, ttft_budget_ms=limit)
    free = plan(4 * chunks, replace(config, ttft_budget_ms=None), prediction=clock())
    assume(free.reason != "nothing_to_drop")
    capped = plan(4 * chunks, config, prediction=clock())
    assert (free.predicted_ttft_ms, free.over_budget) == (None, False)
    assert capped.reason == free.reason
    if not free.engaged:
        assert (capped.kept_chunks, capped.predicted_ttft_ms, capped.over_budget) == (chunks, 50_000, True)
        return
    least = min(max(budget(chunks, floor), 3), free.kept_chunks)  # two are forced, and one is ranked
    fitting = [n for n in range(least, free.kept_chunks + 1) if 1000 + 500 * n <= limit]
    assert capped.kept_chunks == (max(fitting) if fitting else least)
    assert capped.over_budget == (not fitting)
    assert capped.predicted_ttft_ms == 1000 + 500 * capped.kept_chunks
    assert capped.num_kept_tokens == capped.max_kept_tokens == 4 * capped.kept_chunks
    assert capped.least_chunks == free.least_chunks == (least if rate == "auto" else None)


def test_a_budget_that_is_large_changes_nothing_else():
    config = SpecPrefillConfig(0.4, **OPEN)
    want = replace(plan(400, config), predicted_ttft_ms=1000 + 125 * 160)
    assert plan(400, replace(config, ttft_budget_ms=1e9), prediction=clock()) == want


def test_without_a_budget_nothing_is_predicted():
    def unasked(kept):
        raise AssertionError(kept)

    for rate in (0.3, "auto", 1.0):
        plan(400, SpecPrefillConfig(rate, **OPEN), prediction=unasked)
    paper = SpecPrefillConfig(0.3, mode="paper", ttft_budget_ms=1.0)
    assert plan(400, paper, prediction=unasked) == plan(400, SpecPrefillConfig.paper(0.3))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"enabled": False}, "disabled"),
        ({"min_prompt_tokens": 500}, "short_prompt"),
        ({"keep_rate": 0.01}, "forced_cover_budget"),
        ({"min_predicted_gain": 3.0}, "low_predicted_gain"),
    ],
)
@pytest.mark.parametrize(("limit", "over"), [(50_000, False), (49_999, True)])
def test_what_is_read_whole_for_another_reason_says_whether_it_fits(changes, reason, limit, over):
    config = SpecPrefillConfig(**{"keep_rate": 0.3, **OPEN, **changes, "ttft_budget_ms": limit})
    decision = plan(400, config, predicted_gain=2.0, prediction=clock())
    assert (decision.reason, decision.predicted_ttft_ms, decision.over_budget) == (reason, 50_000, over)


def test_all_of_a_prompt_is_read_if_there_is_time_for_it():
    """Keep rate 1: the speculator is asked only where a whole read would take too long."""
    config = SpecPrefillConfig(1.0, **OPEN)
    whole = plan(400, replace(config, ttft_budget_ms=50_000), prediction=clock())
    assert (whole.reason, whole.over_budget) == ("nothing_to_drop", False)
    part = plan(400, replace(config, ttft_budget_ms=49_999), prediction=clock())
    assert (part.engaged, part.kept_chunks, part.predicted_ttft_ms) == (True, 97, 49_500)


def test_a_dense_prompt_is_read_whole_only_if_there_is_time():
    """Speculation has been paid by then: a whole read comes on top."""
    scores, ids = np.ones(100, np.float32), np.arange(400, dtype=np.int32)
    config = SpecPrefillConfig("auto", **OPEN, ttft_budget_ms=51_000)
    for limit, reason, milliseconds in ((51_000, "information_dense", 51_000), (50_999, "engaged", 1000 + 500 * 50)):
        config = replace(config, ttft_budget_ms=limit)
        decision = plan(400, config, prediction=clock())
        assert (decision.kept_chunks, decision.least_chunks) == (50, 5)
        choice = Selection.of_chunks(ids, range(50), chunk_size=4).choice
        moved = dict.fromkeys(decision.rungs, 1.0)
        selection = Selection(decision, choice=choice, chunk_scores=scores, divergences=moved, prompt=ids)
        adapted = selection.adapt(config, prediction=clock())
        assert (adapted.reason, adapted.plan.predicted_ttft_ms) == (reason, milliseconds)
        assert not adapted.plan.over_budget
        assert adapted.to_dict()["predicted_ttft_ms"] == milliseconds


# --- with models ------------------------------------------------------------------------------------------------------

MACHINE = costs.Machine(1e9, 1e8)
GREEDY = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def timed(tiny):
    """The tiny pair on a machine of known rates."""
    return SpecPrefill(tiny.main, tiny.speculator.model, tiny.tokenizer, machine=MACHINE)


def test_a_pair_reads_what_there_is_time_for(timed):
    ids, main, draft = prompt_of(300), timed.main.config, timed.speculator.model.config
    seconds = partial(
        costs.predict, main, draft, 300, look_ahead=8, machine=MACHINE, main_bytes=4, speculator_bytes=4, chunk=1024
    )
    limit = 1000 * seconds(kept_tokens=100).total
    for rate, kept, checks in ((0.9, 100, 0), (0.2, 60, 0), ("auto", 76, 5)):
        config = SpecPrefillConfig(rate, **OPEN, ttft_budget_ms=limit, max_divergence=0.0)
        output = timed.generate(ids, GREEDY, config)
        told = output.selection.to_dict()
        assert told["num_kept"] == kept
        assert told["predicted_ttft_ms"] == 1000 * seconds(kept_tokens=kept, checks=checks).total <= limit
        assert rate == 0.2 or 1000 * seconds(kept_tokens=kept + 4, checks=checks).total > limit
        assert (told["over_budget"], told["reason"]) == (False, "engaged")
    least = timed.select(ids, SpecPrefillConfig(0.9, **OPEN, ttft_budget_ms=1e-6, min_keep_rate=0.1))
    assert (least.num_kept, least.plan.over_budget) == (32, True)  # 8 of 75 chunks


def test_rates_are_measured_once_and_only_for_a_budget(tiny, monkeypatch):
    asked = []

    def measure(repeats, dtype):
        asked.append(dtype)
        return MACHINE

    monkeypatch.setattr(predictor, "measure", measure)
    pair = SpecPrefill(tiny.main, tiny.speculator.model, tiny.tokenizer)
    pair.select(prompt_of(300), SpecPrefillConfig(0.3, **OPEN))
    assert asked == []
    for _ in range(2):
        selection = pair.select(prompt_of(300), SpecPrefillConfig(0.3, **OPEN, ttft_budget_ms=1e9))
        assert selection.reason == Reason.ENGAGED
    assert asked == [np.float32]
    assert pair.predictor.rates == MACHINE
    given = Predictor(tiny.main, tiny.speculator.model, MACHINE, 16)
    assert given.rates is MACHINE
    weights = costs.weight_bytes(tiny.main.config, 4) / MACHINE.bytes_per_s
    assert given.phases(300, 8, 16).sparse == weights  # one pass of 16 tokens, which are too few to hide the weights
    assert given.phases(300, 8, 17).sparse == 2 * weights
    assert asked == [np.float32]
