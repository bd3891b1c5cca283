"""Keep rate "auto": how many chunks suffice, or the scores ask for, against slow versions."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from agreement import assert_greedy, prompt_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_isolation import Compilations

from specprefill_jax import SamplingParams, SpecPrefillConfig, selecting
from specprefill_jax.adaptive import chunk_masses, chunks_for_share
from specprefill_jax.cache import KVCache
from specprefill_jax.errors import ArgumentError, SpecPrefillError
from specprefill_jax.planning import budget, most_checks, plan
from specprefill_jax.selection import Selection

property_test = partial(settings, deadline=None)
OPEN = {"min_prompt_tokens": 0, "min_predicted_gain": 0.0, "tail_tokens": 1}
SIXTEENTHS = st.integers(1, 16).map(lambda n: n / 16)  # sums and products of these and of small integers are exact


def auto(**changes) -> SpecPrefillConfig:
    return SpecPrefillConfig("auto", **{**OPEN, **changes})


def scored(scores, tokens: int, config: SpecPrefillConfig, spans=()) -> Selection:
    """A selection as the device leaves it: of the most chunks that the plan allows, and nothing adapted yet."""
    decision = plan(tokens, config, forced_spans=spans)
    assert decision.engaged, decision.reason
    ids, last = np.arange(tokens, dtype=np.int32), decision.num_chunks - 1
    most = Selection.of_chunks(ids, [*range(decision.kept_chunks - 1), last], chunk_size=config.chunk_size)
    values = np.asarray(scores, np.float32)
    return Selection(decision, choice=most.choice, chunk_scores=values, importance=np.zeros(tokens), prompt=ids)


def slow_kept(scores, tokens: int, size: int, forced: set[int], share: float, least: int, most: int) -> list[int]:
    """Chunks one by one in the order of score, ties to the lower, until they hold enough; within the bounds."""
    free = [chunk for chunk in range(len(scores)) if chunk not in forced]
    mass = {chunk: Fraction(float(scores[chunk])) * min(size, tokens - chunk * size) for chunk in free}
    total, held, kept = sum(mass.values()), Fraction(0), set(forced)
    for chunk in sorted(free, key=lambda chunk: (-scores[chunk], chunk)):
        enough = held >= Fraction(share) * total and len(kept) > len(forced)
        if (enough and len(kept) >= least) or len(kept) >= most:
            break
        kept.add(chunk)
        held += mass[chunk]
    return sorted(kept)


@st.composite
def cases(draw):
    size = draw(st.sampled_from([1, 3, 8]))
    chunks = draw(st.integers(4, 40))
    tokens = chunks * size - draw(st.integers(0, size - 1))
    scores = draw(st.lists(st.integers(0, 50), min_size=chunks, max_size=chunks))
    low, high = sorted(draw(st.tuples(st.integers(1, 90), st.integers(60, 99))))
    config = auto(chunk_size=size, importance_share=draw(SIXTEENTHS), min_keep_rate=low / 100, max_keep_rate=high / 100)
    start = draw(st.integers(0, tokens - 1))
    spans = draw(st.sampled_from([(), ((start, min(start + 2, tokens)),)]))
    decision = plan(tokens, config, forced_spans=spans)
    if not decision.engaged:
        spans = ()
    return np.array(scores, np.float32), tokens, config, spans


@property_test(max_examples=150)
@given(cases())
def test_kept_chunks_equal_the_slow_version(case):
    scores, tokens, config, spans = case
    if not plan(tokens, config, forced_spans=spans).engaged:
        return
    before = scored(scores, tokens, config, spans)
    after = before.adapt(config)
    forced, size, chunks = set(before.forced_chunks), config.chunk_size, len(scores)
    least = min(max(budget(chunks, config.min_keep_rate), len(forced) + 1), before.kept_chunks)
    most = budget(chunks, config.max_keep_rate)
    assert (before.plan.least_chunks, before.kept_chunks) == (least, most)
    kept = np.flatnonzero(after.kept_chunk_mask).tolist()
    assert kept == slow_kept(scores, tokens, size, forced, config.importance_share, least, most)
    assert (after.engaged, after.reason, after.kept_chunks) == (True, "engaged", len(kept))
    expected = [token for chunk in kept for token in range(chunk * size, min(chunk * size + size, tokens))]
    assert after.kept_indices.tolist() == expected
    assert after.num_kept == len(expected) == after.plan.max_kept_tokens


@property_test(max_examples=150)
@given(cases())
def test_what_is_kept_holds_the_share_and_one_chunk_less_would_not(case):
    scores, tokens, config, spans = case
    if not plan(tokens, config, forced_spans=spans).engaged:
        return
    selection = scored(scores, tokens, config, spans)
    least, most = selection.plan.least_chunks, selection.kept_chunks
    after = selection.adapt(config)
    kept, forced = set(np.flatnonzero(after.kept_chunk_mask).tolist()), set(selection.forced_chunks)
    assert forced < kept
    assert least <= len(kept) <= most
    mass = [int(score) * min(config.chunk_size, tokens - i * config.chunk_size) for i, score in enumerate(scores)]
    wanted = Fraction(config.importance_share) * sum(m for i, m in enumerate(mass) if i not in forced)
    ranked = sorted(kept - forced, key=lambda chunk: (-scores[chunk], chunk))
    held = [mass[chunk] for chunk in ranked]
    assert sum(held) >= wanted or len(kept) == most
    assert len(ranked) == 1 or sum(held[:-1]) < wanted or len(kept) == least


@property_test(max_examples=80)
@given(cases(), st.data())
def test_a_larger_share_keeps_all_that_a_smaller_one_does(case, data):
    scores, tokens, config, spans = case
    if not plan(tokens, config, forced_spans=spans).engaged:
        return
    less, more = sorted(data.draw(st.tuples(SIXTEENTHS, SIXTEENTHS)))
    masks = [
        scored(scores, tokens, config, spans).adapt(replace(config, importance_share=share)).kept_chunk_mask
        for share in (less, more)
    ]
    assert (masks[1] >= masks[0]).all()


def test_masses_count_the_tokens_of_a_short_last_chunk():
    assert chunk_masses(np.array([2.0, 1.0, 4.0], np.float32), 9, 4).tolist() == [8.0, 4.0, 4.0]
    assert [chunks_for_share(np.array([4.0, 3.0, 2.0, 1.0]), share) for share in (0.4, 0.41, 0.7, 0.9, 0.91, 1.0)] == [
        1, 2, 2, 3, 4, 4,
    ]  # fmt: skip
    assert chunks_for_share(np.zeros(3), 0.5) == 1


FLAT = [9.0, *[2.0] * 18, 9.0]
ONE_HOT = [9.0, *[0.0] * 7, 3.0, *[0.0] * 10, 9.0]


@pytest.mark.parametrize(
    ("scores", "changes", "kept"),
    [
        (ONE_HOT, {}, [0, 8, 19]),  # the floor, 1 of 20, is less than what is forced and one more
        (ONE_HOT, {"importance_share": 1.0}, [0, 8, 19]),
        (ONE_HOT, {"min_keep_rate": 0.25}, [0, 1, 2, 8, 19]),
        (FLAT, {}, [*range(9), 19]),  # half of eighteen, but the ceiling is ten in all
        (FLAT, {"importance_share": 0.25}, [*range(6), 19]),
        (FLAT, {"max_keep_rate": 0.2}, [0, 1, 2, 19]),
        (np.zeros(20), {}, [0, 1, 19]),
    ],
)
def test_all_equal_and_one_hot_scores(scores, changes, kept):
    config = auto(chunk_size=4, **changes)
    selection = scored(scores, 78, config).adapt(config)
    assert np.flatnonzero(selection.kept_chunk_mask).tolist() == kept
    assert selection.reason == "engaged"


@pytest.mark.parametrize(
    ("least", "most", "rungs"),
    [
        (1, 1, (1,)),
        (1, 2, (1, 2)),
        (3, 3, (3,)),
        (3, 5, (3, 5)),
        (3, 6, (3, 6)),
        (3, 7, (3, 6, 7)),
        (1, 9, (1, 2, 4, 8, 9)),
    ],
)
def test_rungs_double(least, most, rungs):
    decision = replace(plan(78, auto(chunk_size=4)), least_chunks=least).keep(most)
    assert decision.rungs == rungs
    assert replace(decision, least_chunks=None).rungs == ()


def tried(moved: list[float], config: SpecPrefillConfig) -> Selection:
    """A selection of 20 chunks whose rungs, 3, 6 and 10 chunks, were tried."""
    before = scored(np.arange(20.0), 78, config)
    assert before.plan.rungs == (3, 6, 10)
    found = dict(zip(before.plan.rungs, map(np.float32, moved), strict=True))
    return Selection(
        before.plan, choice=before.choice, chunk_scores=before.chunk_scores, divergences=found, prompt=np.arange(78)
    )


@pytest.mark.parametrize(
    ("moved", "kept"),
    [
        ([0.25, 0.1, 0.0], 3),
        ([0.2501, 0.1, 0.0], 6),
        ([1.0, 0.5, 0.25], 10),
        ([1.0, 0.1, 0.5], 6),  # more read is not always more alike
        ([1.0, 0.5, 0.2501], None),
        ([math.nan, math.nan, math.nan], None),
        ([math.nan, 0.1, math.inf], 6),
    ],
)
def test_the_fewest_that_leave_the_predictions_alone(moved, kept):
    config = auto(chunk_size=4, max_divergence=0.25)
    selection = tried(moved, config).adapt(config, predicted_gain=lambda kept: kept / 100)
    assert selection.plan.predicted_gain == selection.num_kept / 100
    np.testing.assert_array_equal(list(selection.divergences.values()), np.float32(moved))
    if kept is not None:
        assert (selection.reason, selection.kept_chunks) == ("engaged", kept)
        # the forced first and last, and those of highest score
        assert np.flatnonzero(selection.kept_chunk_mask).tolist() == [0, *range(21 - kept, 20)]
        return
    assert (selection.reason, selection.keep_rate, selection.num_kept) == ("information_dense", 1.0, 78)
    assert selection.detail == f"predictions move by {moved[-1]:.3f} nats with 10 of 20 chunks, above 0.25"
    # Where it cannot be read whole, as much as may be is read.
    part = tried(moved, config).adapt(config, whole_fits=False)
    assert (part.reason, part.kept_chunks) == ("engaged", 10)


@pytest.mark.parametrize("tokens", [1, 31, 32, 33, 64, 65, 96])
def test_prompts_of_few_chunks_leave_nothing_to_choose(tokens):
    decision = plan(tokens, auto())
    chunks = -(-tokens // 32)
    assert decision.reason == ("nothing_to_drop" if chunks == 1 else "forced_cover_budget")
    assert decision.least_chunks is None
    assert decision.max_kept_tokens == tokens


def test_the_plan_is_of_the_most_that_may_be_kept():
    asked = []

    def gain(kept):
        asked.append(kept)
        return 1.2

    decision = plan(2000, SpecPrefillConfig("auto", max_keep_rate=0.4), predicted_gain=gain)
    assert (decision.kept_chunks, decision.least_chunks) == (26, 5)  # four are forced
    assert asked == [decision.max_kept_tokens] == [25 * 32 + 16]
    assert decision.predicted_gain == 1.2
    config = SpecPrefillConfig("auto", max_keep_rate=0.4, min_predicted_gain=1.3)
    low = plan(2000, config, predicted_gain=gain)
    assert (low.reason, low.least_chunks) == ("low_predicted_gain", None)
    assert plan(2000, SpecPrefillConfig("auto", max_keep_rate=1.0)).reason == "nothing_to_drop"
    assert plan(2000, SpecPrefillConfig("auto", max_keep_rate=0.05)).reason == "forced_cover_budget"


def test_a_fixed_rate_is_left_alone():
    config = SpecPrefillConfig(0.3, **OPEN, chunk_size=4)
    selection = scored(ONE_HOT, 78, config)
    assert selection.adapt(config) is selection
    assert selection.plan.least_chunks is None


def test_refusals():
    config = auto(chunk_size=4)
    for value in (math.nan, math.inf):
        bad = scored([*ONE_HOT[:5], value, *ONE_HOT[6:]], 78, config)
        bad.choice = bad.choice._replace(ok=np.bool_(False))
        with pytest.raises(SpecPrefillError, match=r"^chunk_scores\[5\]="):
            bad.adapt(config)
    unscored = Selection(plan(78, config), choice=bad.choice._replace(ok=np.bool_(True)))
    with pytest.raises(ArgumentError, match="one that a speculator scored"):
        unscored.adapt(config)


# --- with models ------------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(max_tokens=5, ignore_eos=True)
PRODUCT = {**OPEN, "chunk_size": 8, "tail_tokens": 9, "eos_token_ids": ()}


ANY, NONE = 1e9, 0.0
"""Limits that every rung, and none, is within."""


def tiny_auto(**changes) -> SpecPrefillConfig:
    return SpecPrefillConfig("auto", **{**PRODUCT, **changes})


def divergence(pair, ids, kept, tokens) -> float:
    """The slow way: the kept slots of the speculator's cache one by one, then its look-ahead token by token."""
    model, logits = pair.speculator.model, []
    for slots in (range(len(ids)), kept):
        cache = pair.speculator.read(ids, 1, ()).cache
        k, v = np.zeros(cache.k.shape, np.float32), np.zeros(cache.v.shape, np.float32)
        for to, slot in enumerate(slots):
            k[:, 0, :, to], v[:, 0, :, to] = cache.k[:, 0, :, slot], cache.v[:, 0, :, slot]
        cache = KVCache(jnp.asarray(k), jnp.asarray(v), cache.positions)
        own = []
        for i, token in enumerate([ids[-1], *tokens[:-1]]):
            at, start, row = (np.array([x], np.int32) for x in (len(ids) - 1 + i, len(slots) - 1 + i, 0))
            step = model.step(np.array([[token]], np.int32), at[None], cache, start, row)
            cache = step.cache
            own.append(np.asarray(model.logits(model.weights, step.hidden)[0], np.float64))
        logits.append(own)
    whole, part = (own - np.log(np.exp(own).sum(1, keepdims=True)) for own in map(np.array, logits))
    return float((np.exp(whole) * (whole - part)).sum(1).mean())


@pytest.mark.parametrize("length", [97, 128, 130])
@pytest.mark.parametrize("ends", [(), "third"])
def test_divergences_equal_the_slow_version(tiny, length, ends):
    ids = prompt_of(length)
    if ends:
        ends = (tiny.select(ids, tiny_auto()).look_ahead_tokens[2],)
    config = tiny_auto(eos_token_ids=ends, max_keep_rate=0.8)
    selection = tiny.select(ids, config)
    tokens = selection.look_ahead_tokens
    assert len(tokens) == (8 if not ends else tokens.index(ends[0]) + 1)
    assert len(selection.divergences) == 3
    for chunks, found in selection.divergences.items():
        kept = tiny.select(ids, replace(config, keep_rate=chunks / selection.num_chunks - 1e-6)).kept_indices
        assert len(kept) < chunks * 8 <= len(kept) + 8 or length == 128
        assert found == pytest.approx(divergence(tiny, ids, kept.tolist(), tokens), rel=2e-3, abs=1e-5)


def test_a_pair_keeps_the_fewest_that_suffice(tiny, reference):
    ids = prompt_of(130)
    found = tiny.select(ids, tiny_auto()).divergences
    assert list(found) == [4, 8, 9]
    for limit in (found[4], found[8], found[9], min(found.values()) / 2):
        config = tiny_auto(max_divergence=limit)
        wanted = next((chunks for chunks, moved in found.items() if moved <= limit), 17)
        output = tiny.generate(ids, GREEDY, config)
        assert output.selection.kept_chunks == wanted
        assert output.selection.reason == ("engaged" if wanted < 17 else "information_dense")
        assert output.timings.tokens["main_prefill"] == output.selection.num_kept
        kept = output.selection.kept_indices.tolist()
        assert_greedy(output.token_ids, reference.logits_of(ids, kept, output.token_ids))


def test_nothing_is_tried_without_a_look_ahead(tiny):
    for changes in ({"look_ahead": 1}, {"query_window": 8}, {"keep_rate": 0.3}):
        config = replace(tiny_auto(max_divergence=NONE), **changes)
        selection = tiny.select(prompt_of(130), config)
        assert (selection.reason, selection.divergences) == ("engaged", {})


@pytest.mark.parametrize("share", [0.1, 0.3, 0.45])
def test_a_pair_keeps_what_its_scores_ask_for(tiny, reference, share):
    ids, config = prompt_of(130), tiny_auto(importance_share=share, look_ahead=1)
    selection = tiny.select(ids, config)
    scores = reference.choose(ids, look_ahead=1, chunk=8, rate="0.5").chunk_scores
    np.testing.assert_allclose(selection.chunk_scores, scores, rtol=1e-3, atol=1e-5)
    forced = set(selection.forced_chunks)
    assert forced == {0, 15, 16}
    kept = slow_kept(selection.chunk_scores, 130, 8, forced, share, 4, 9)
    assert np.flatnonzero(selection.kept_chunk_mask).tolist() == kept
    assert selection.plan.predicted_gain == tiny.predictor.gain(130, 1, selection.num_kept)
    output = tiny.generate(ids, GREEDY, config)
    assert output.selection.to_dict() == selection.to_dict()
    assert output.timings.tokens["main_prefill"] == selection.num_kept
    assert_greedy(output.token_ids, reference.logits_of(ids, selection.kept_indices.tolist(), output.token_ids))


@pytest.mark.parametrize("least", [0.01, 0.05, 0.1, 0.3])
@pytest.mark.parametrize("most", [0.3, 0.5, 0.9])
def test_so_many_checks_at_most(least, most):
    config = SpecPrefillConfig("auto", min_keep_rate=least, max_keep_rate=most, min_prompt_tokens=0, tail_tokens=1)
    counts = {len(plan(tokens, config).rungs) for tokens in (100, 1000, 4001, 100_000)}
    assert max(counts) == most_checks(config, 8)
    assert most_checks(config, 1) == most_checks(replace(config, query_window=32), 8) == 0
    assert most_checks(replace(config, keep_rate=0.3), 8) == 0


def test_a_dense_prompt_is_read_whole_by_a_pair(tiny, reference):
    ids, config = prompt_of(130), tiny_auto(max_divergence=NONE)
    output = tiny.generate(ids, GREEDY, config)
    assert (output.selection.engaged, output.selection.reason) == (False, "information_dense")
    assert (output.selection.num_kept, output.selection.num_queries) == (130, 8)
    assert output.timings.tokens["speculate"] == output.timings.tokens["main_prefill"] == 130
    assert output.selection.plan.predicted_gain == tiny.predictor.gain(130, 8, 130, checks=5) < 1
    assert_greedy(output.token_ids, reference.logits_of(ids, range(130), output.token_ids))


def test_rates_and_auto_from_one_speculation_equal_select(tiny):
    ids, dense = prompt_of(130), tiny_auto(max_divergence=NONE)
    any_number, scores = tiny_auto(max_divergence=ANY), tiny_auto(look_ahead=1)
    for config, rates in (
        (any_number, ("auto", 0.5, "auto")), (any_number, (0.4, "auto")), (dense, ("auto", 0.4)),
        (scores, ("auto", 0.5, "auto")), (scores, (0.4, "auto")),
    ):  # fmt: skip
        configs = [replace(config, keep_rate=rate) for rate in rates]
        for alike, selection in zip(configs, tiny.select_many(ids, configs), strict=True):
            alone = tiny.select(ids, alike)
            assert selection.to_dict() == alone.to_dict()
            assert selection.kept_indices.tolist() == alone.kept_indices.tolist()


def test_scores_that_are_not_finite_are_a_speculator_that_failed(tiny, monkeypatch):
    score = selecting.score_and_choose

    def overflowed(*arguments, **named):
        importance, scores, choice, *rest = score(*arguments, **named)
        return importance, scores.at[3].set(np.nan), choice._replace(ok=np.bool_(False)), *rest

    monkeypatch.setattr(selecting, "score_and_choose", overflowed)
    output = tiny.generate(prompt_of(130), GREEDY, tiny_auto())
    assert output.selection.reason == "speculator_failed"
    assert output.selection.detail.startswith("SpecPrefillError: chunk_scores[3]=nan ")
    assert output.selection.num_kept == 130


def test_nothing_is_compiled_after_a_warm_up_whatever_is_kept(tiny):
    configs = [tiny_auto(max_divergence=limit, max_keep_rate=0.4) for limit in (NONE, ANY)]
    configs += [tiny_auto(importance_share=share, look_ahead=1, max_keep_rate=0.4) for share in (0.05, 0.15, 0.9)]
    tiny.warm_up(130, configs[0], GREEDY)
    tiny.warm_up(130, configs[2], GREEDY)
    with Compilations() as compiled:
        outputs = [tiny.generate(prompt_of(130), GREEDY, config) for config in configs]
    assert compiled.count == 0
    assert len({output.selection.num_kept for output in outputs}) == 4
