"""Selections of one prompt that share a speculation, or that someone else chose."""

from dataclasses import replace

import numpy as np
import pytest
from agreement import prompt_of

from specprefill_jax import SamplingParams, SpecPrefillConfig
from specprefill_jax.errors import ArgumentError
from specprefill_jax.planning import Reason, plan
from specprefill_jax.selection import Selection

PAPER = SpecPrefillConfig.paper(0.3, look_ahead=8, chunk_size=8)
PRODUCT = SpecPrefillConfig(
    0.3, look_ahead=8, chunk_size=8, tail_tokens=9, min_prompt_tokens=0, min_predicted_gain=0.0, eos_token_ids=()
)
FOUR = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize("config", [PAPER, PRODUCT], ids=["paper", "product"])
def test_rates_from_one_speculation_equal_select(tiny, config):
    ids, rates = prompt_of(130), (0.1, 0.5, 0.3, 1.0)
    calls, read = [], tiny.speculator.read

    def counted(*arguments, **named):
        calls.append(1)
        return read(*arguments, **named)

    tiny.speculator.read = counted
    try:
        many = tiny.select_rates(ids, rates, config)
        speculated = len(calls)
    finally:
        del tiny.speculator.read
    assert speculated == 1
    for rate, selection in zip(rates, many, strict=True):
        alone = tiny.select(ids, replace(config, keep_rate=rate))
        assert selection.plan == alone.plan
        assert selection.kept_indices.tolist() == alone.kept_indices.tolist()
        assert selection.kept_chunk_mask.tolist() == alone.kept_chunk_mask.tolist()
        assert selection.to_dict() == alone.to_dict()
    assert many[-1].engaged == (config is PAPER)
    assert many[1].look_ahead_tokens == many[2].look_ahead_tokens != []


def test_generation_from_a_selection_equals_that_which_selects(tiny):
    ids = prompt_of(130)
    [first, second] = tiny.select_rates(ids, (0.1, 0.5), PAPER)
    for selection, rate in ((first, 0.1), (second, 0.5)):
        alone = tiny.generate(ids, FOUR, replace(PAPER, keep_rate=rate))
        given = tiny.generate(ids, FOUR, selection=selection)
        assert given.token_ids == alone.token_ids
        assert given.selection is selection
        assert (given.timings.speculate, given.timings.score) == (0.0, 0.0)
    assert np.array_equal(tiny.prefill(ids, second), tiny.prefill(ids, tiny.select(ids, replace(PAPER, keep_rate=0.5))))


def test_given_chunks(tiny):
    ids = np.asarray(prompt_of(100), np.int32)
    selection = Selection.of_chunks(ids, [12, 0, 5], chunk_size=8)
    assert (selection.engaged, selection.reason, selection.num_kept) == (True, Reason.ENGAGED, 20)
    assert selection.kept_indices.tolist() == [*range(8), *range(40, 48), *range(96, 100)]
    assert selection.kept_indices.dtype == np.int32
    assert (selection.num_chunks, selection.kept_chunks, selection.chunk_scores) == (13, 3, None)
    same = Selection.of_chunks(ids, selection.kept_indices, chunk_size=1)
    assert np.array_equal(tiny.prefill(ids, same), tiny.prefill(ids, selection))
    assert tiny.generate(ids, FOUR, selection=same).token_ids == tiny.generate(ids, FOUR, selection=selection).token_ids


def test_every_token_given_reads_as_a_dense_prefill(tiny):
    ids = np.asarray(prompt_of(100), np.int32)
    every = Selection.of_chunks(ids, range(13), chunk_size=8)
    assert np.array_equal(tiny.prefill(ids, every), tiny.prefill(ids, Selection.whole(100, Reason.DISABLED)))


def test_ties_go_to_the_lower_chunk():
    ids = np.arange(18, dtype=np.int32)
    scored = Selection(
        plan(18, SpecPrefillConfig.paper(0.2, chunk_size=4)),
        choice=Selection.of_chunks(ids, [1], chunk_size=4).choice,
        chunk_scores=np.array([0.0, 2.0, -0.0, 2.0, 0.0, np.nan], np.float32),
        importance=np.zeros(20, np.float32),
        prompt=ids,
    )
    kept = [
        np.flatnonzero(scored.replan(plan(18, SpecPrefillConfig.paper(rate, chunk_size=4))).kept_chunk_mask).tolist()
        for rate in (0.2, 0.4, 0.6, 0.8)
    ]
    assert kept == [[1], [1, 3], [0, 1, 3], [0, 1, 2, 3]]


def test_refusals(tiny):
    ids = np.arange(5, 25, dtype=np.int32)
    for chunks, message in (
        ([], r"^chunks=\[\] is not allowed: chunks must be at least one chunk"),
        ([1, 1], r"^chunks=\[1, 1\] "),
        ([5], r"^chunks=5 is not allowed: chunks must be an integer from 0 to 4$"),
        ([-1], r"^chunks=-1 "),
    ):
        with pytest.raises(ArgumentError, match=message):
            Selection.of_chunks(ids, chunks, chunk_size=4)
    with pytest.raises(ArgumentError, match=r"^num_tokens=0 "):
        Selection.of_chunks(ids[:0], [0])
    given = Selection.of_chunks(ids, [0], chunk_size=4)
    with pytest.raises(ArgumentError, match="one that a speculator scored"):
        given.replan(plan(20, SpecPrefillConfig.paper(0.5, chunk_size=4)))
    with pytest.raises(ArgumentError, match="a selection of this prompt, of 10 tokens"):
        tiny.generate(ids[:10], selection=given)
    with pytest.raises(ArgumentError, match="a selection of this prompt, not of another as long"):
        tiny.stream(ids + 1, selection=given)
    scored = tiny.select(ids, SpecPrefillConfig.paper(0.5, look_ahead=1, chunk_size=4))
    with pytest.raises(ArgumentError, match="of 20 tokens in chunks of 4"):
        scored.replan(plan(20, SpecPrefillConfig.paper(0.5, chunk_size=8)))
