"""Keep rate "auto": how many chunks the scores ask for, against slow versions in exact arithmetic."""

import math
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from agreement import assert_greedy, prompt_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_isolation import Compilations

from specprefill_jax import SamplingParams, SpecPrefillConfig, selecting
from specprefill_jax.adaptive import chunk_masses, chunks_for_share, normalised_entropy
from specprefill_jax.errors import ArgumentError, SpecPrefillError
from specprefill_jax.planning import Reason, budget, plan
from specprefill_jax.selection import Selection

property_test = partial(settings, deadline=None)
OPEN = {"min_prompt_tokens": 0, "min_predicted_gain": 0.0, "tail_tokens": 1}
NO_GATE = {**OPEN, "max_entropy": 1.0}
SIXTEENTHS = st.integers(1, 16).map(lambda n: n / 16)  # sums and products of these and of small integers are exact


def auto(**changes) -> SpecPrefillConfig:
    return SpecPrefillConfig("auto", **{**NO_GATE, **changes})


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


@pytest.mark.parametrize(
    ("masses", "entropy"),
    [
        ([1.0, 1.0, 2.0], (math.log(4) / 2 + math.log(2) / 2) / math.log(3)),
        ([0.0, 7.0, 0.0, 0.0], 0.0),
        ([3.0, 3.0, 0.0, 0.0], 0.5),
        ([1e-30] * 7, 1.0),
        ([0.0, 0.0], 1.0),
        ([5.0], 1.0),
    ],
)
def test_entropy(masses, entropy):
    assert normalised_entropy(np.array(masses)) == pytest.approx(entropy, abs=1e-12)


@property_test(max_examples=60)
@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_entropy_is_a_share_and_knows_no_order(masses):
    entropy = normalised_entropy(np.array(masses))
    assert 0.0 <= entropy <= 1.0
    assert normalised_entropy(np.array(masses[::-1])) == pytest.approx(entropy, abs=1e-9)


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
    ("scores", "gate", "dense"),
    [(FLAT, 0.95, True), (np.zeros(20), 0.95, True), (FLAT, 1.0, False), (ONE_HOT, 0.0, False), (ONE_HOT, 0.95, False)],
)
def test_flat_scores_have_the_prompt_read_whole(scores, gate, dense):
    config = auto(chunk_size=4, max_entropy=gate)
    selection = scored(scores, 78, config).adapt(config, predicted_gain=lambda kept: kept / 100)
    assert selection.engaged != dense
    assert selection.reason == (Reason.INFORMATION_DENSE if dense else Reason.ENGAGED)
    assert selection.chunk_scores.tolist() == list(scores)
    assert selection.plan.predicted_gain == selection.num_kept / 100
    if dense:
        assert selection.kept_indices.tolist() == list(range(78))
        assert (selection.keep_rate, selection.kept_chunks, selection.num_kept) == (1.0, 20, 78)
        assert selection.detail == "entropy of the scores 1.000, above 0.95"
        # Where it cannot be read whole, as much as may be is read.
        part = scored(scores, 78, config).adapt(config, whole_fits=False)
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
    config = SpecPrefillConfig(0.3, **NO_GATE, chunk_size=4)
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


def tiny_auto(**changes) -> SpecPrefillConfig:
    return SpecPrefillConfig("auto", **{**PRODUCT, "max_entropy": 1.0, **changes})


@pytest.mark.parametrize("share", [0.1, 0.3, 0.45])
def test_a_pair_keeps_what_its_scores_ask_for(tiny, reference, share):
    ids, config = prompt_of(130), tiny_auto(importance_share=share)
    selection = tiny.select(ids, config)
    scores = reference.choose(ids, chunk=8, rate="0.5").chunk_scores
    np.testing.assert_allclose(selection.chunk_scores, scores, rtol=1e-3, atol=1e-5)
    forced = set(selection.forced_chunks)
    assert forced == {0, 15, 16}
    kept = slow_kept(selection.chunk_scores, 130, 8, forced, share, 4, 9)
    assert np.flatnonzero(selection.kept_chunk_mask).tolist() == kept
    assert selection.plan.predicted_gain == tiny.predictor.gain(130, 8, selection.num_kept)
    output = tiny.generate(ids, GREEDY, config)
    assert output.selection.to_dict() == selection.to_dict()
    assert output.timings.tokens["main_prefill"] == selection.num_kept
    assert_greedy(output.token_ids, reference.logits_of(ids, selection.kept_indices.tolist(), output.token_ids))


def test_a_dense_prompt_is_read_whole_by_a_pair(tiny, reference):
    ids, config = prompt_of(130), tiny_auto(max_entropy=0.0)
    output = tiny.generate(ids, GREEDY, config)
    assert (output.selection.engaged, output.selection.reason) == (False, "information_dense")
    assert (output.selection.num_kept, output.selection.num_queries) == (130, 8)
    assert output.timings.tokens["speculate"] == output.timings.tokens["main_prefill"] == 130
    assert output.selection.plan.predicted_gain == tiny.predictor.gain(130, 8, 130) < 1
    assert_greedy(output.token_ids, reference.logits_of(ids, range(130), output.token_ids))


def test_rates_and_auto_from_one_speculation_equal_select(tiny):
    ids, dense = prompt_of(130), tiny_auto(max_entropy=0.0)
    for config, rates in ((tiny_auto(), ("auto", 0.5, "auto")), (tiny_auto(), (0.4, "auto")), (dense, ("auto", 0.4))):
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
    configs = [tiny_auto(importance_share=share, max_keep_rate=0.4) for share in (0.05, 0.15, 0.9)]
    tiny.warm_up(130, configs[0], GREEDY)
    with Compilations() as compiled:
        outputs = [tiny.generate(prompt_of(130), GREEDY, config) for config in configs]
    assert compiled.count == 0
    assert len({output.selection.num_kept for output in outputs}) == 3
