"""Selections of one prompt that share a speculation, or that someone else chose."""

from dataclasses import replace

import numpy as np
import pytest
from agreement import prompt_of

from specprefill_jax import SamplingParams, SpecPrefillConfig
from specprefill_jax.errors import ArgumentError, SpecPrefillError
from specprefill_jax.planning import Reason, plan
from specprefill_jax.selection import Selection

PAPER = SpecPrefillConfig.paper(0.3, look_ahead=8, chunk_size=8)
PRODUCT = SpecPrefillConfig(
    0.3, look_ahead=8, chunk_size=8, tail_tokens=9, min_prompt_tokens=0, min_predicted_gain=0.0, eos_token_ids=()
)
FOUR = SamplingParams(max_tokens=4, ignore_eos=True)


def speculations(model, monkeypatch) -> list[int]:
    """Gets the look-ahead of each speculation, from now on."""
    calls, read = [], model.speculator.read

    def counted(ids, look_ahead, *arguments, **named):
        calls.append(look_ahead)
        return read(ids, look_ahead, *arguments, **named)

    monkeypatch.setattr(model.speculator, "read", counted)
    return calls


def check_alone(model, ids, configs, many):
    """Each selection is that which its config makes alone."""
    for config, selection in zip(configs, many, strict=True):
        alone = model.select(ids, config)
        assert selection.plan == alone.plan
        assert selection.kept_indices.tolist() == alone.kept_indices.tolist()
        assert selection.kept_chunk_mask.tolist() == alone.kept_chunk_mask.tolist()
        assert selection.to_dict() == alone.to_dict()
        assert selection.look_ahead_tokens == alone.look_ahead_tokens
        if alone.importance is not None:
            np.testing.assert_allclose(selection.importance, alone.importance, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("config", [PAPER, PRODUCT], ids=["paper", "product"])
def test_rates_from_one_speculation_equal_select(tiny, config, monkeypatch):
    ids, configs = prompt_of(130), [replace(config, keep_rate=rate) for rate in (0.1, 0.5, 0.3, 1.0)]
    with monkeypatch.context() as patch:
        calls = speculations(tiny, patch)
        many = tiny.select_many(ids, configs)
    assert calls == [8]
    check_alone(tiny, ids, configs, many)
    assert many[-1].engaged == (config is PAPER)
    assert many[1].look_ahead_tokens != []


def test_look_aheads_pools_and_chunks_from_one_speculation_equal_select(tiny, monkeypatch):
    """Of a shorter look-ahead a longer one begins alike, an end of sequence in it included."""
    ids = prompt_of(130)
    third = tiny.select(ids, PAPER).look_ahead_tokens[2]
    changes = [
        {},
        {"look_ahead": 1},
        {"look_ahead": 3},
        {"look_ahead": None, "chunk_size": 5},
        {"look_ahead": 2, "keep_rate": 0.1},
        {"pool_width": 3, "look_ahead": 1},
    ]
    configs = [replace(PAPER, **change) for change in changes]
    configs.append(replace(PRODUCT, query_window=8, look_ahead=None))
    configs += [replace(config, eos_token_ids=(third,)) for config in configs[:3]]
    with monkeypatch.context() as patch:
        calls = speculations(tiny, patch)
        many = tiny.select_many(ids, configs)
    assert len(calls) == 3  # with either end of sequence, and the window's
    assert [selection.num_queries for selection in many] == [8, 1, 3, 8, 2, 1, 8, 3, 1, 3]
    check_alone(tiny, ids, configs, many)
    assert tiny.select_many(ids, []) == []


def test_one_of_many_that_fails_fails_by_its_own_mode(tiny, monkeypatch):
    def broken(*arguments, **named):
        raise RuntimeError("on purpose")

    monkeypatch.setattr(tiny.speculator, "read", broken)
    ids = prompt_of(130)
    [failed, whole] = tiny.select_many(ids, [PRODUCT, replace(PRODUCT, enabled=False)])
    assert (failed.reason, whole.reason) == (Reason.SPECULATOR_FAILED, Reason.DISABLED)
    with pytest.raises(SpecPrefillError, match="the speculator failed: on purpose"):
        tiny.select_many(ids, [PRODUCT, PAPER])


def test_generation_from_a_selection_equals_that_which_selects(tiny):
    ids, configs = prompt_of(130), [replace(PAPER, keep_rate=rate) for rate in (0.1, 0.5)]
    [first, second] = tiny.select_many(ids, configs)
    for selection, config in ((first, configs[0]), (second, configs[1])):
        alone = tiny.generate(ids, FOUR, config)
        given = tiny.generate(ids, FOUR, selection=selection)
        assert given.token_ids == alone.token_ids
        assert given.selection is selection
        assert (given.timings.speculate, given.timings.score) == (0.0, 0.0)
    assert np.array_equal(tiny.prefill(ids, second), tiny.prefill(ids, tiny.select(ids, configs[1])))


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
