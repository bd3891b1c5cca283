"""`scoring_heads`: some of the speculator's heads score, as if it had no others; against the oracle's slow version."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import oracle
import pytest
from agreement import assert_greedy, load_tiny, prompt_of
from hypothesis import given
from hypothesis import strategies as st

from specprefill_jax import SamplingParams, SpecPrefillConfig
from specprefill_jax.errors import ArgumentError
from specprefill_jax.importance import only, token_importance

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)
CONFIG = SpecPrefillConfig(
    0.5, chunk_size=8, tail_tokens=1, min_prompt_tokens=0, min_predicted_gain=0.0, eos_token_ids=()
)
SHAPE = (3, 4)  # layers and query heads of the tiny speculator
ALL = tuple((layer, head) for layer in range(SHAPE[0]) for head in range(SHAPE[1]))
SOME = [
    ((0, 0),),
    ((2, 3),),
    ((0, 1), (0, 2)),
    ((1, 0), (1, 1), (2, 2)),  # two share a key head, one stands alone
    ((0, 3), (1, 0), (1, 1), (1, 2), (2, 1)),
]


@pytest.mark.parametrize("heads", SOME)
@pytest.mark.parametrize("ahead", [{"query_window": 16}, {"look_ahead": 4}], ids=["window", "look-ahead"])
def test_scores_equal_the_slow_version(tiny, reference, heads, ahead):
    ids = prompt_of(130)
    selection = tiny.select(ids, replace(CONFIG, scoring_heads=heads, **ahead))
    if "query_window" in ahead:
        run = reference.speculator(ids, range(len(ids)))
        importance = oracle.window_importance(*oracle.of_heads(run.queries, run.keys, heads), 13, 16)
    else:
        look = reference.look(ids, 4)
        importance = oracle.importance(*oracle.of_heads(look.queries, look.keys, heads), 13)
    np.testing.assert_allclose(selection.importance, importance, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(selection.chunk_scores, oracle.chunk_scores(importance, 8), rtol=1e-3, atol=1e-5)
    kept = np.flatnonzero(selection.kept_chunk_mask).tolist()
    assert kept == oracle.kept_chunks(selection.chunk_scores, "0.5", (0, 16))


def test_all_heads_named_are_all_heads(tiny):
    ids = prompt_of(130)
    named, unnamed = (tiny.select(ids, replace(CONFIG, scoring_heads=heads)) for heads in (ALL, ()))
    np.testing.assert_allclose(named.importance, unnamed.importance, rtol=1e-6)
    np.testing.assert_array_equal(named.kept_indices, unnamed.kept_indices)


@given(st.sets(st.sampled_from(ALL), min_size=1).map(lambda heads: tuple(sorted(heads))))
def test_what_is_taken_is_each_head_with_its_key_head(heads):
    """Ids in place of numbers: nothing else is there, nothing is missing, and each meets its own key head."""
    layers, count = SHAPE
    keys = np.arange(layers * 2).reshape(layers, 1, 2, 1, 1)
    queries = np.arange(layers * count).reshape(layers, 1, 1, count, 1)
    some_keys, some_queries = map(np.asarray, only(keys, queries, heads))
    assert some_keys.shape[1:] == (1, 1, 1, 1)
    assert len(some_keys) == len({(layer, head // 2) for layer, head in heads})
    met = {
        (int(query), int(key))
        for key, row in zip(some_keys.ravel(), some_queries, strict=True)
        for query in row.ravel()
    }
    assert met == {(layer * count + head, layer * 2 + head // 2) for layer, head in heads}


@pytest.mark.parametrize("backend", ["reference", "triton_interpret", "mosaic_tpu_interpret"])
def test_every_kernel(backend):
    draw = np.random.default_rng(0)
    keys, queries = (draw.normal(size=shape).astype(np.float32) for shape in ((3, 1, 2, 128, 64), (3, 1, 3, 4, 64)))
    heads, tokens = SOME[3], np.array([100], np.int32)
    few = jax.jit(partial(token_importance, size=128, pool_width=5, heads=heads, backend=backend))(
        keys, queries, tokens, np.array([3], np.int32)
    )
    # The oracle's order: tokens first; queries [Q, L, N, H], keys [M, L, K, H].
    rows = queries[:, 0, :3].transpose(1, 0, 2, 3), keys[:, 0, :, :100].transpose(2, 0, 1, 3)
    want = oracle.importance(*oracle.of_heads(*(row.astype(float) for row in rows), heads), 5)
    np.testing.assert_allclose(few[0, :100], want, rtol=2e-3, atol=1e-6)


def test_an_answer(tiny, reference):
    ids, config = prompt_of(130), replace(CONFIG, scoring_heads=SOME[3], query_window=16)
    output = tiny.generate(ids, GREEDY, config)
    assert output.selection.engaged
    assert_greedy(output.token_ids, reference.logits_of(ids, output.selection.kept_indices, output.token_ids))


def test_a_speculator_of_a_few_layers_scores_as_the_whole_one(tiny):
    """What later layers would compute does not matter: the same heads see the same."""
    ids, config = prompt_of(130), replace(CONFIG, scoring_heads=SOME[2], query_window=16)
    few = load_tiny(speculator_layers=1)
    np.testing.assert_allclose(
        few.select(ids, config).importance, tiny.select(ids, config).importance, rtol=1e-5, atol=1e-8
    )


def test_normalised():
    config = replace(CONFIG, scoring_heads=[[2, 1], (np.int64(0), 3), (2, 1)])
    assert config.scoring_heads == ((0, 3), (2, 1))
    assert config == replace(CONFIG, scoring_heads=((2, 1), (0, 3)))


@pytest.mark.parametrize("wrong", ["heads", 3, [1, 2], [(1,)], [(0, -1)], [(0, 1, 2)], [("a", 0)], [(0.5, 1)], ["ab"]])
def test_what_is_no_heads(wrong):
    with pytest.raises(ArgumentError, match=r"scoring_heads=.* is not allowed: scoring_heads must be pairs"):
        SpecPrefillConfig(scoring_heads=wrong)


def test_refusals(tiny):
    with pytest.raises(ArgumentError, match=r"scoring_heads must be empty in paper mode"):
        SpecPrefillConfig(mode="paper", scoring_heads=[(0, 0)])
    for head in ((3, 0), (0, 4)):
        with pytest.raises(ArgumentError, match=r"a layer below the speculator's 3 and a head below its 4"):
            tiny.select(prompt_of(130), replace(CONFIG, scoring_heads=[(0, 0), head]))
