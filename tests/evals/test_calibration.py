"""Calibration: planted heads are found, measured as by hand, and what the pipeline then does is what was measured."""

import dataclasses

import numpy as np
import pytest
from agreement import load_tiny, prompt_of
from small_tokenizers import byte_level

from specprefill_jax import SpecPrefillConfig
from specprefill_jax.evals.calibration import (
    Example,
    Found,
    by_look_ahead,
    by_window,
    choose_heads,
    examples,
    fewest,
    fit,
    found,
)
from specprefill_jax.evals.samples import Sample
from specprefill_jax.tokens import Tokenizer

LAYERS, HEADS, WINDOW, CHUNKS = 4, 3, 5, 20


def planted(seed: int, heads=((1, 2), (3, 0)), task: str = "t") -> Example:
    """A prompt of which two chunks matter: each of `heads` sees one of them, all others see what does not."""
    draw = np.random.default_rng(seed)
    window = draw.random((LAYERS, HEADS, WINDOW, CHUNKS)).astype(np.float32)
    matter = draw.choice(np.arange(1, CHUNKS - 2), 2, replace=False)
    oracle = 0.1 * draw.random(CHUNKS).astype(np.float32)
    oracle[matter] = 1.0
    for (layer, head), chunk in zip(heads, matter, strict=True):
        window[layer, head] = np.where(oracle < 1, oracle, 0)
        window[layer, head, :, chunk] = 2.0
    evidence = np.zeros((2, CHUNKS), bool)
    evidence[[0, 1], matter] = True
    forced = np.zeros(CHUNKS, bool)
    forced[[0, -2, -1]] = True
    window[:, :, :, forced] = 5.0  # sinks
    return Example(task, window, window[:, :, :2], oracle, evidence, forced)


GIVEN = [planted(seed) for seed in range(8)]


def test_planted_heads_weigh_most_and_are_chosen():
    weights = fit(GIVEN, LAYERS)
    assert weights.shape == (LAYERS, HEADS)
    assert weights.min() >= 0
    heaviest = {divmod(int(index), HEADS) for index in np.argsort(-weights.ravel())[:2]}
    assert heaviest == {(1, 2), (3, 0)}
    assert (weights < 0.1 * weights.max()).sum() >= LAYERS * HEADS - 4  # sparse
    chosen = choose_heads(GIVEN, weights)
    assert chosen == ((1, 2), (3, 0))
    new = [planted(seed) for seed in range(100, 108)]
    assert found(new, by_window(chosen)) == Found(1.0, 1.0)
    assert found(new, by_window()).value < 0.9


def test_only_the_first_layers_are_fitted():
    weights = fit(GIVEN, 2)
    assert weights.shape == (2, HEADS)
    chosen = choose_heads(GIVEN, weights)
    assert (1, 2) in chosen
    assert max(layer for layer, _ in chosen) < 2


def test_found_by_hand():
    """Six chunks, the first and the last kept anyway; two of the other four may be, of budgets 2, 3 and 5."""
    forced = np.array([1, 0, 0, 0, 0, 1], bool)
    oracle = np.array([9, 4, 3, 2, 1, 9], np.float32)
    seen = np.array([0, 1, 4, 3, 2, 0], np.float32).reshape(1, 1, 1, 6)
    evidence = np.array([[0, 1, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]], bool)
    example = Example("t", seen, seen, oracle, evidence, forced)
    # Budget 2: chunks 2 and 3 of 1 and 2; budget 3: chunks 2, 3, 4 of 1, 2, 3. Four are ranked: 5 asks nothing.
    result = found([example], by_window())
    assert result.recall == pytest.approx((1 / 2 + 2 / 3) / 2)
    assert result.evidence == pytest.approx(2 / 3)  # the third reference is always kept, the first never
    assert result.value == pytest.approx((result.recall + result.evidence) / 2)
    none = dataclasses.replace(example, evidence=evidence[:0])
    assert found([none], by_window()) == Found(result.recall, None)
    # Tasks weigh the same, however many prompts they have.
    other = dataclasses.replace(example, task="u", window=seen[..., ::-1])
    both = found([example, example, example, other], by_window())
    assert both.recall == pytest.approx((result.recall + found([other], by_window()).recall) / 2)


def test_fewest_by_hand():
    """The best chunk stands third: one and two chunks miss the reference in it, three find it and all of the oracle's
    three; with one chunk of the oracle's two, two are enough."""
    forced = np.array([1, 0, 0, 0, 0, 1], bool)
    oracle = np.array([9, 4, 3, 2, 1, 9], np.float32)
    seen = np.array([0, 2, 4, 3, 1, 0], np.float32).reshape(1, 1, 1, 6)
    example = Example("t", seen, seen, oracle, np.array([[0, 1, 0, 0, 0, 0]], bool), forced)
    assert fewest([example], by_window(), Found(0.5, 1.0)) == 3
    assert fewest([example], by_window(), Found(0.5, 0.0)) == 2
    assert fewest([example], by_window(), Found(1.1, 0.0)) is None
    assert fewest([], by_window(), Found(0.0, None)) is None


def test_queries_of_a_window_weigh_more_the_later_they_are():
    seen = np.zeros((1, 2, 3, 2), np.float32)
    seen[0, 0, :, 0], seen[0, 1, :, 1] = (6, 0, 0), (0, 0, 6)
    example = Example("t", seen, seen, seen[0, 0, 0], np.zeros((0, 2), bool), np.zeros(2, bool))
    np.testing.assert_allclose(by_window()(example), [1, 3])
    np.testing.assert_allclose(by_window(window=1)(example), [0, 6])
    np.testing.assert_allclose(by_window(((0, 1),))(example), [0, 3])
    np.testing.assert_allclose(by_look_ahead()(example), [2, 2])
    np.testing.assert_allclose(by_look_ahead(count=1)(example), [6, 0])


def test_nothing_to_fit():
    flat = dataclasses.replace(GIVEN[0], oracle=np.ones(CHUNKS, np.float32))
    assert not fit([flat], LAYERS).any()


@pytest.fixture(scope="module")
def pair():
    model = load_tiny()
    model.tokenizer = Tokenizer(byte_level())
    return model


def made(text: str, *references: str) -> Sample:
    return Sample("made", "t", "0", text, references, lambda answer: 0.0, 8, chat=False)


@pytest.fixture(scope="module")
def example(pair):
    text = "".join(chr(97 + number % 26) for number in prompt_of(400)) + "NEEDLE" + "xyz" * 50
    [example] = examples(pair, [made(text, "needle", "nowhere")], window=16, look_ahead=4, answer_tokens=8)
    return text, example


def test_an_example_is_what_the_pipeline_sees(pair, example):
    """With one head, means over chunks and the maximum can change places: scores are those of a selection."""
    text, seen = example
    tokens = len(pair.encode(text))
    chunks = -(-tokens // 32)
    assert seen.window.shape == (3, 4, 16, chunks)
    assert seen.look_ahead.shape[:2] == (3, 4)
    for head in ((0, 1), (2, 3)):
        config = SpecPrefillConfig(0.9, scoring_heads=(head,), min_prompt_tokens=0, min_predicted_gain=0.0)
        for scorer, changes in (
            (by_window((head,)), {"query_window": 16}),
            (by_look_ahead((head,)), {"look_ahead": 4}),
            (by_window((head,), window=5), {"query_window": 5}),
        ):
            scores = pair.select(text, dataclasses.replace(config, **changes)).chunk_scores
            np.testing.assert_allclose(scorer(seen), scores, rtol=1e-3, atol=1e-6)
    assert np.flatnonzero(seen.forced).tolist() == [0, *range((tokens - 64) // 32, chunks)]


def test_evidence_is_where_the_words_stand(pair, example):
    """In either case of letters, in one chunk or across two; what stands nowhere is left out."""
    text, seen = example
    places = {len(pair.encode(text[:end])) for end in (text.index("NEEDLE") + 1, text.index("NEEDLE") + 6)}
    assert seen.evidence.shape == (1, len(seen.oracle))
    assert set(np.flatnonzero(seen.evidence[0])) == {(place - 1) // 32 for place in places}
