"""`query_window`: the prompt's own last tokens score it, without a look-ahead; against the oracle's slow version."""

import numpy as np
import oracle
import pytest
from agreement import assert_greedy, prompt_of

from specprefill_jax import SamplingParams, SpecPrefillConfig, costs
from specprefill_jax.prefill import pieces

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


def windowed(window: int, **changes) -> SpecPrefillConfig:
    settings = {"keep_rate": 0.5, "chunk_size": 8, "tail_tokens": 1, "min_prompt_tokens": 0, "min_predicted_gain": 0.0}
    return SpecPrefillConfig(query_window=window, **{**settings, **changes})


def slow_scores(reference, ids, window: int, width: int, chunk: int):
    """The oracle's importance and chunk scores."""
    run = reference.speculator(ids, range(len(ids)))
    values = oracle.window_importance(run.queries, run.keys, width, window)
    return values, oracle.chunk_scores(values, chunk)


def test_the_slow_version_by_hand():
    """One head that attends evenly: token i sees i + 1 tokens, and weighs 1, 2 or 3."""
    queries, keys = np.zeros((4, 1, 1, 2)), np.zeros((4, 1, 1, 2))
    rows = np.array([[1 / 2, 1 / 2, 0, 0], [1 / 3, 1 / 3, 1 / 3, 0], [1 / 4, 1 / 4, 1 / 4, 1 / 4]])
    want = (rows * np.array([[1], [2], [3]])).sum(axis=0) / 6
    np.testing.assert_allclose(oracle.window_importance(queries, keys, 0, 3), want, rtol=1e-12)
    # Of a prompt that is shorter than the window all tokens count.
    whole = oracle.window_importance(queries, keys, 0, 9)
    np.testing.assert_allclose(whole, oracle.window_importance(queries, keys, 0, 4), rtol=1e-12)
    np.testing.assert_allclose(oracle.window_importance(queries, keys, 3, 1), [1 / 6, 1 / 4, 1 / 4, 1 / 6], rtol=1e-12)


@pytest.mark.parametrize("window", [1, 7, 16, 33])
@pytest.mark.parametrize("width", [0, 13])
def test_scores_equal_the_slow_version(tiny, reference, window, width):
    ids = prompt_of(130)
    selection = tiny.select(ids, windowed(window, pool_width=width))
    importance, scores = slow_scores(reference, ids, window, width, 8)
    np.testing.assert_allclose(selection.importance, importance, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(selection.chunk_scores, scores, rtol=1e-3, atol=1e-5)
    assert (selection.num_queries, selection.look_ahead_tokens) == (window, [])
    kept = np.flatnonzero(selection.kept_chunk_mask).tolist()
    assert kept == oracle.kept_chunks(selection.chunk_scores, "0.5", (0, 16))


def test_a_window_of_one_is_no_look_ahead(tiny):
    one, alone = (tiny.select(prompt_of(130), config) for config in (windowed(1), windowed(0, look_ahead=1)))
    np.testing.assert_array_equal(one.importance, alone.importance)
    np.testing.assert_array_equal(one.kept_indices, alone.kept_indices)


@pytest.mark.parametrize("length", [96, 97, 101, 111, 112, 113])
def test_a_window_may_begin_in_an_earlier_piece(tiny, tiny_chunked, length):
    """Pieces of 16: a window of 33 tokens lies in up to four of them (complaint 26)."""
    config, ids = windowed(33), prompt_of(length)
    assert len(pieces(length, 16)) > 5
    want, got = tiny.select(ids, config), tiny_chunked(16).select(ids, config)
    np.testing.assert_allclose(got.importance, want.importance, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("length", [26, 32, 33, 40])
def test_prompts_shorter_than_the_window(tiny, reference, length):
    ids = prompt_of(length)
    selection = tiny.select(ids, windowed(48, keep_rate=0.6))
    importance, _ = slow_scores(reference, ids, 48, 13, 8)
    np.testing.assert_allclose(selection.importance, importance, rtol=1e-3, atol=1e-5)
    assert selection.num_queries == length


def test_an_answer_after_a_window(tiny, reference, monkeypatch):
    """Nothing is decoded by the speculator, unless it drafts."""
    ids, config = prompt_of(130), windowed(16)

    def unasked(*_):
        raise AssertionError("the speculator looked ahead")

    monkeypatch.setattr(tiny.speculator, "look_ahead", unasked)
    output = tiny.generate(ids, GREEDY, config)
    kept = output.selection.kept_indices.tolist()
    assert output.selection.engaged
    assert_greedy(output.token_ids, reference.logits_of(ids, kept, output.token_ids))
    monkeypatch.undo()
    assert tiny.generate(ids, GREEDY, config, draft_tokens=1).token_ids == output.token_ids


def test_the_cost_model_counts_no_decode_steps(tiny):
    models, machine = (tiny.main.config, tiny.speculator.model.config), costs.CPU
    ahead, window = (costs.predict(*models, 1000, 300, 8, machine, query_window=w) for w in (0, 32))
    none = costs.predict(*models, 1000, 300, 1, machine)
    assert (window.look_ahead, window.speculate, window.sparse) == (0, none.speculate, ahead.sparse)
    assert window.score == costs.predict(*models, 1000, 300, 32, machine).score > ahead.score
    assert tiny.predictor.gain(1000, 8, 300, query_window=32) > tiny.predictor.gain(1000, 8, 300)


def test_refusals():
    for changes, message in (
        ({"query_window": -1}, r"^query_window=-1 .* an integer of at least 0$"),
        ({"query_window": 2.0}, r"^query_window=2.0 "),
        ({"query_window": 4, "mode": "paper"}, r"^query_window=4 .* 0 in paper mode, which looks ahead$"),
        ({"query_window": 4, "look_ahead": 8}, r"^look_ahead=8 .* None beside a query_window, which takes its place$"),
    ):
        with pytest.raises(ValueError, match=message):
            SpecPrefillConfig(**changes)
