"""Filters against transformers' numbers, draws against their distribution, and log-probabilities."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specprefill_jax.errors import ArgumentError
from specprefill_jax.sampling import (
    SamplingArrays,
    filter_logits,
    mark_seen,
    sample,
    sampling_arrays,
    seen_tokens,
    token_logprobs,
)

GOLDEN = np.load(Path(__file__).parent / "data/goldens/sampling.npz")
CASES = sorted({name.split("/")[0] for name in GOLDEN.files})

_filter = jax.jit(filter_logits)
_sample = jax.jit(sample)
_logprobs = jax.jit(token_logprobs, static_argnames="top_n")


def golden(case: str) -> tuple[dict[str, float], np.ndarray, np.ndarray, np.ndarray]:
    parameters = json.loads(str(GOLDEN[f"{case}/parameters"]))
    return parameters, GOLDEN[f"{case}/logits"], GOLDEN[f"{case}/previous"], GOLDEN[f"{case}/probabilities"]


def widened(logits: np.ndarray) -> np.ndarray:
    """One row with tokens that cannot be drawn up to the widest case's 500, so that all cases share a program."""
    return np.pad(logits, (0, 500 - len(logits)), constant_values=-np.inf)[None]


def probabilities(logits: np.ndarray, arrays: SamplingArrays, previous: np.ndarray | None = None) -> np.ndarray:
    seen = None
    if previous is not None:
        lengths = jnp.full(len(previous), previous.shape[1])
        seen = seen_tokens(jnp.asarray(previous, jnp.int32), lengths, logits.shape[1])
    return np.asarray(jax.nn.softmax(_filter(jnp.asarray(logits), arrays, seen), axis=-1))


class TestFilter:
    def test_there_are_24_cases(self) -> None:
        assert len(CASES) == 24

    @pytest.mark.parametrize("case", CASES)
    def test_golden(self, case: str) -> None:
        parameters, logits, previous, expected = golden(case)
        arrays = sampling_arrays(**{name: [value] for name, value in parameters.items()})
        got = probabilities(widened(logits), arrays, previous[None])[0, : len(expected)]
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
        assert ((got > 0) == (expected > 0)).all()

    def test_golden_cases_as_one_batch(self) -> None:
        """Rows with different settings do not touch each other."""
        rows = [golden(case) for case in CASES]
        arrays = sampling_arrays(**{name: [row[0][name] for row in rows] for name in rows[0][0]})
        logits = np.concatenate([widened(row[1]) for row in rows])
        got = probabilities(logits, arrays, np.stack([row[2] for row in rows]))
        for row, (_, _, _, expected) in zip(got, rows, strict=True):
            np.testing.assert_allclose(row[: len(expected)], expected, rtol=0, atol=1e-6)
            assert not row[len(expected) :].any()

    def test_off_changes_nothing(self) -> None:
        logits = jnp.asarray([[0.5, -1.0, 3.0, -0.0]])
        arrays = sampling_arrays([1.0])
        np.testing.assert_array_equal(_filter(logits, arrays, jnp.ones((1, 4), bool)), logits)
        np.testing.assert_array_equal(_filter(logits, sampling_arrays([0.0]), None), logits)

    def test_order_of_stages(self) -> None:
        """A penalty changes what top-k sees, and top-p counts the probability that top-k left."""
        logits = np.log(np.asarray([[0.4, 0.3, 0.2, 0.1]], np.float32)) + 3.0
        arrays = sampling_arrays([1.0], top_k=[2], repetition_penalty=[10.0])
        assert (probabilities(logits, arrays, np.asarray([[0]]))[0] > 0).tolist() == [False, True, True, False]
        arrays = sampling_arrays([1.0], top_k=[2], top_p=[0.5])  # 0.4 / 0.7 is above a half, 0.4 is not
        assert (probabilities(logits, arrays)[0] > 0).tolist() == [True, False, False, False]
        arrays = sampling_arrays([1.0], top_p=[0.5])
        assert (probabilities(logits, arrays)[0] > 0).tolist() == [True, True, False, False]
        arrays = sampling_arrays([2.0], min_p=[0.6])  # sqrt(0.2 / 0.4) = 0.71 after the temperature
        assert (probabilities(logits, arrays)[0] > 0).tolist() == [True, True, True, False]

    def test_limits(self) -> None:
        logits = np.asarray([[1.0, 4.0, 2.0, 3.0]], np.float32)
        for top_k in (4, 5, 1 << 40):
            assert (probabilities(logits, sampling_arrays([1.0], top_k=[top_k]))[0] > 0).all()
        assert (probabilities(logits, sampling_arrays([1.0], top_p=[1e-30]))[0] > 0).tolist() == [
            False,
            True,
            False,
            False,
        ]
        assert (probabilities(logits, sampling_arrays([1.0], min_p=[0.99]))[0] > 0).sum() == 1

    def test_equal_logits_stay_together(self) -> None:
        logits = np.asarray([[2.0, 1.0, 2.0, -0.0, 0.0, -5.0]], np.float32)
        kept = probabilities(logits, sampling_arrays([1.0], top_k=[4]))[0] > 0
        assert kept.tolist() == [True, True, True, True, True, False]
        kept = probabilities(logits, sampling_arrays([1.0], top_p=[0.1]))[0] > 0
        assert kept.tolist() == [True, False, True, False, False, False]

    def test_tokens_already_ruled_out(self) -> None:
        logits = np.asarray([[-np.inf, 1.0, -np.inf, 0.0]], np.float32)
        arrays = sampling_arrays([1.0], top_k=[3], top_p=[0.99], min_p=[0.01], repetition_penalty=[1.5])
        got = probabilities(logits, arrays, np.asarray([[0, 1]]))[0]
        assert np.isfinite(got).all()
        assert (got > 0).tolist() == [False, True, False, True]

    # Devices take subnormal numbers for 0: logits that differ by them alone are equal.
    @given(
        st.lists(st.floats(-30, 30, width=32, allow_subnormal=False), min_size=1, max_size=40),
        st.integers(1, 45),
        st.floats(0.01, 0.99),
    )
    @settings(max_examples=60, deadline=None)
    def test_against_sorting(self, values: list[float], top_k: int, top_p: float) -> None:
        logits = widened(np.asarray(values, np.float32))
        kept = np.asarray(_filter(logits, sampling_arrays([1.0], top_k=[top_k])))[0, : len(values)] > -np.inf
        smallest = sorted(values, reverse=True)[min(top_k, len(values)) - 1]
        assert kept.tolist() == [value >= smallest for value in values]
        kept = np.asarray(_filter(logits, sampling_arrays([1.0], top_p=[top_p])))[0, : len(values)] > -np.inf
        weights = np.exp(np.float64(values) - max(values))
        for value, is_kept in zip(values, kept, strict=True):
            above = weights[np.asarray(values) > value].sum() / weights.sum()
            assert is_kept == (above < top_p) or abs(above - top_p) < 1e-5


class TestSeen:
    def test_counts_real_tokens_only(self) -> None:
        seen = seen_tokens(jnp.asarray([[3, 1, 0], [2, 2, 4]]), jnp.asarray([2, 3]), 5)
        assert seen.tolist() == [[False, True, False, True, False], [False, False, True, False, True]]
        seen = mark_seen(seen, jnp.asarray([4, 0]))
        assert seen.tolist() == [[False, True, False, True, True], [True, False, True, False, True]]

    def test_empty_prompt(self) -> None:
        assert not seen_tokens(jnp.zeros((1, 4), jnp.int32), jnp.asarray([0]), 3).any()


class TestSample:
    def test_greedy_takes_the_lowest_of_equals(self) -> None:
        logits = jnp.asarray([[1.0, 5.0, 5.0], [7.0, 7.0, 7.0], [-1.0, -3.0, -0.5]])
        tokens = _sample(logits, sampling_arrays([0.0, 0.0, 0.0]), 0)
        assert tokens.dtype == jnp.int32
        assert tokens.tolist() == [1, 0, 2]

    def test_greedy_obeys_the_repetition_penalty(self) -> None:
        seen = jnp.asarray([[False, True, False]])
        logits = jnp.asarray([[1.0, 1.5, -2.0]])
        assert _sample(logits, sampling_arrays([0.0], repetition_penalty=[2.0]), 0, seen).tolist() == [0]
        assert _sample(logits, sampling_arrays([0.0]), 0, seen).tolist() == [1]

    def test_greedy_path_neither_sorts_nor_draws(self) -> None:
        program = jax.make_jaxpr(sample)(jnp.zeros((2, 9)), sampling_arrays([0.0, 0.0]), 0).jaxpr
        (choice,) = [step for step in program.eqns if step.primitive.name == "cond"]
        assert not choice.params["branches"][0].jaxpr.eqns  # no row draws: hand the largest on
        always = "\n".join(str(step) for step in program.eqns if step is not choice)
        assert "argmax" in always
        assert not any(name in always for name in ("sort", "top_k", "exp", "random", "while"))

    def test_draws_follow_the_filtered_distribution(self) -> None:
        logits = np.asarray([2.0, 1.0, 0.0, -1.0, -9.0], np.float32)
        rows = 20_000
        arrays = sampling_arrays([0.7] * rows, top_k=[4] * rows, seed=list(range(rows)))
        tokens = np.asarray(_sample(jnp.broadcast_to(logits, (rows, 5)), arrays, 0))
        expected = np.exp(logits[:4] / 0.7) / np.exp(logits[:4] / 0.7).sum()
        got = np.bincount(tokens, minlength=5) / rows
        assert got[4] == 0
        np.testing.assert_allclose(got[:4], expected, atol=5 * np.sqrt(0.25 / rows))

    def test_steps_of_one_seed_are_independent_draws(self) -> None:
        rows = 20_000
        arrays = sampling_arrays([1.0] * rows, seed=[3] * rows)
        logits = jnp.asarray([0.0, 0.0, 0.0, 0.0, -1e9])
        tokens = np.asarray(_sample(jnp.broadcast_to(logits, (rows, 5)), arrays, jnp.arange(rows)))
        pairs = np.bincount(tokens[:-1] * 4 + tokens[1:], minlength=16)
        np.testing.assert_allclose(pairs / rows, 1 / 16, atol=5 * np.sqrt(1 / 16 / rows))

    def test_a_seed_gives_the_same_tokens_whatever_else_runs(self) -> None:
        logits = jnp.asarray(np.random.default_rng(0).normal(size=(5, 300)).astype(np.float32))
        one = sampling_arrays([0.9], top_p=[0.95], seed=[42])
        alone = [int(_sample(logits[2:3], one, jnp.asarray([step]))[0]) for step in range(8)]
        arrays = sampling_arrays([0.0, 1.5, 0.9, 0.1, 1.0], top_p=[1, 0.2, 0.95, 1, 1], seed=[1, None, 42, 9, 42])
        steps = [jnp.asarray([99, 7, step, 0, 3]) for step in range(8)]
        assert [int(_sample(logits, arrays, step)[2]) for step in steps] == alone
        assert len(set(alone)) > 3

    def test_seeds(self) -> None:
        logits = jnp.zeros((1, 100_000))
        drawn = [int(_sample(logits, sampling_arrays([1.0], seed=[seed]), 0)[0]) for seed in (0, 1, 1 << 32, -1, None)]
        assert len(set(drawn)) == 5  # the upper half of a seed counts too
        assert drawn[0] == int(_sample(logits, sampling_arrays([1.0], seed=[0]), 0)[0])
        np.testing.assert_array_equal(sampling_arrays([1.0], seed=[7 << 32 | 5]).key, np.asarray([[7, 5]], np.uint32))

    def test_bfloat16_logits_are_read_as_float32(self) -> None:
        logits = jnp.asarray(np.random.default_rng(1).normal(size=(5, 300)), jnp.bfloat16)
        arrays = sampling_arrays([0.0] + [0.8] * 4, top_p=[0.9] * 5, seed=[5, 5, 6, 7, 8])
        steps = jnp.arange(5)
        expected = _sample(logits.astype(jnp.float32), arrays, steps)
        np.testing.assert_array_equal(_sample(logits, arrays, steps), expected)

    def test_settings_do_not_compile_again(self) -> None:
        fresh = jax.jit(lambda *arguments: sample(*arguments))  # a cache of its own
        logits = jnp.ones((2, 11))
        fresh(logits, sampling_arrays([0.0, 0.0]), jnp.int32(0))
        fresh(logits, sampling_arrays([1.0, 0.0], [5, None], [0.5, 1], [0.1, 0], [1.2, 1], [3, None]), jnp.int32(4))
        assert fresh._cache_size() == 1

    def test_lists_of_different_length(self) -> None:
        with pytest.raises(ArgumentError, match="top_p=.*must be a list of 2 values"):
            sampling_arrays([1.0, 1.0], top_p=[0.9])


class TestLogprobs:
    def test_values(self) -> None:
        logits = np.asarray([[1.0, 3.0, 2.0, 3.0], [0.0, -1.0, 1000.0, 999.0]])
        chosen, ids, values = _logprobs(jnp.asarray(logits), jnp.asarray([2, 1]), top_n=3)
        exact = logits - np.log(np.exp(logits - logits.max(1, keepdims=True)).sum(1, keepdims=True))
        exact -= logits.max(1, keepdims=True)
        np.testing.assert_allclose(chosen, [exact[0, 2], exact[1, 1]], rtol=1e-6)
        assert ids.tolist() == [[1, 3, 2], [2, 3, 0]]  # lowest id first among equals
        assert (ids.dtype, values.dtype, chosen.dtype) == (jnp.int32, jnp.float32, jnp.float32)
        np.testing.assert_allclose(values, np.take_along_axis(exact, np.asarray(ids), 1), rtol=1e-6)

    @pytest.mark.parametrize("top_n", [1, 5, 20])
    def test_chosen_value_is_the_listed_one_to_the_bit(self, top_n: int) -> None:
        logits = jnp.asarray(np.random.default_rng(top_n).normal(size=(64, 1000)).astype(np.float32) * 7)
        _, ids, values = _logprobs(logits, jnp.zeros(64, jnp.int32), top_n=top_n)
        for place in range(top_n):
            chosen, _, _ = _logprobs(logits, ids[:, place], top_n=top_n)
            np.testing.assert_array_equal(chosen, values[:, place])

    def test_none_and_more_than_there_are(self) -> None:
        chosen, ids, values = _logprobs(jnp.zeros((2, 4)), jnp.asarray([0, 3]), top_n=0)
        np.testing.assert_allclose(chosen, np.log(0.25), rtol=1e-6)
        assert (ids.shape, values.shape) == ((2, 0), (2, 0))
        assert _logprobs(jnp.zeros((2, 4)), jnp.asarray([0, 3]), top_n=9)[1].shape == (2, 4)
