"""RoPE against transformers' numbers (rope.npz), and against the rotation written out."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from specprefill_jax.errors import ArgumentError
from specprefill_jax.models.config import LlamaConfig, RopeConfig
from specprefill_jax.models.rope import apply_rope, frequencies

GOLDENS = Path(__file__).parents[1] / "data" / "goldens" / "rope.npz"
CASES = ["default_1e4", "default_5e5", "linear_4", "llama3_32", "llama3_8", "yarn_16", "yarn_betas"]


def rope_of(case, goldens):
    data = json.loads(str(goldens[f"{case}/config"]))
    sizes = {"vocab_size": 8, "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    config = LlamaConfig.from_json({"model_type": "llama", "num_attention_heads": 1, **sizes, **data}, case)
    return config.rope, config.head_dim


def test_cases_are_all_of_the_goldens():
    with np.load(GOLDENS) as goldens:
        assert sorted({key.split("/")[0] for key in goldens.files if "/" in key}) == CASES


@pytest.mark.parametrize("case", CASES)
def test_goldens(case):
    with np.load(GOLDENS) as goldens:
        inv_freq, scaling = frequencies(*rope_of(case, goldens))
        assert inv_freq.dtype == np.float32
        np.testing.assert_array_equal(inv_freq, goldens[f"{case}/inv_freq"])  # a step of float32 would show at 131071
        assert scaling == pytest.approx(float(goldens[f"{case}/attention_scaling"]), rel=1e-6)
        positions = jnp.asarray(goldens["positions"])
        assert positions.max() == 131071
        for name in ("q", "k"):
            x = jnp.asarray(goldens[f"{case}/{name}"]).transpose(1, 0, 2)  # [T, n, H]
            rotated = apply_rope(x, positions, inv_freq, scaling)
            expected = goldens[f"{case}/{name}_rotated"].transpose(1, 0, 2)
            np.testing.assert_allclose(np.asarray(rotated), expected, rtol=0, atol=2e-6 if scaling < 1.2 else 4e-6)


def test_scattered_positions_are_the_rows_of_the_whole():
    rng = np.random.default_rng(0)
    inv_freq, scaling = frequencies(RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 64), 16)
    x = jnp.asarray(rng.standard_normal((100, 3, 16), np.float32))
    whole = apply_rope(x, jnp.arange(100), inv_freq, scaling)
    kept = np.sort(rng.permutation(100)[:30])
    np.testing.assert_array_equal(apply_rope(x[kept], jnp.asarray(kept), inv_freq, scaling), whole[kept])
    # and compacted positions are something else
    assert np.abs(apply_rope(x[kept], jnp.arange(30), inv_freq, scaling) - whole[kept]).max() > 0.1


def test_rotation_written_out():
    inv_freq = np.array([1.0, 0.1], np.float32)
    x = np.array([[[1.0, 2.0, 3.0, 4.0]]], np.float32)  # pairs: (1, 3), (2, 4)
    out = np.asarray(apply_rope(jnp.asarray(x), jnp.array([2]), inv_freq, 1.5))[0, 0]
    expected = []
    for i in range(2):
        angle = 2 * float(inv_freq[i])
        z = complex(x[0, 0, i], x[0, 0, i + 2]) * complex(np.cos(angle), np.sin(angle)) * 1.5
        expected.append(z)
    np.testing.assert_allclose(out, [expected[0].real, expected[1].real, expected[0].imag, expected[1].imag], rtol=1e-6)


def test_leading_axes_and_dtype():
    rng = np.random.default_rng(1)
    inv_freq, scaling = frequencies(RopeConfig(), 8)
    x = jnp.asarray(rng.standard_normal((2, 5, 3, 8)), jnp.bfloat16)
    positions = jnp.asarray(rng.integers(0, 1000, (2, 5)))
    out = apply_rope(x, positions, inv_freq, scaling)
    assert (out.shape, out.dtype) == (x.shape, jnp.bfloat16)
    for b in range(2):
        np.testing.assert_array_equal(out[b], apply_rope(x[b], positions[b], inv_freq, scaling))
    # computed in float32, rounded once
    exact = apply_rope(x.astype(jnp.float32), positions, inv_freq, scaling).astype(jnp.bfloat16)
    np.testing.assert_array_equal(out, exact)


def test_position_zero_is_only_scaled():
    x = jnp.arange(8.0).reshape(1, 1, 8)
    inv_freq, _ = frequencies(RopeConfig(), 8)
    np.testing.assert_array_equal(apply_rope(x, jnp.array([0]), inv_freq, 2.0), 2 * x)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ({}, 0.1 * np.log(4.0) + 1),
        ({"attention_factor": 1.25}, 1.25),
        ({"mscale": 0.7, "mscale_all_dim": 0.3}, (0.07 * np.log(4.0) + 1) / (0.03 * np.log(4.0) + 1)),
        ({"mscale": 0.7}, 0.1 * np.log(4.0) + 1),  # one of the pair counts for nothing
    ],
)
def test_yarn_attention_factor(extra, expected):
    rope = RopeConfig("yarn", 1e4, 4.0, original_max_position_embeddings=4096, **extra)
    assert frequencies(rope, 64)[1] == pytest.approx(expected, rel=1e-12)


def test_yarn_factor_one_is_default():
    rope = RopeConfig("yarn", 1e4, 1.0, original_max_position_embeddings=4096)
    inv_freq, scaling = frequencies(rope, 64)
    np.testing.assert_allclose(inv_freq, frequencies(RopeConfig(), 64)[0], rtol=1e-6)
    assert scaling == 1.0


def test_yarn_ramp_ends():
    """Fast features keep their frequency, slow ones are divided by the factor; without rounding the ramp is shorter."""
    plain = frequencies(RopeConfig(), 64)[0]
    rope = {"theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 4096}
    ratios = {}
    for truncate in (True, False):
        inv_freq, _ = frequencies(RopeConfig("yarn", **rope, truncate=truncate), 64)
        ratios[truncate] = plain / inv_freq
        assert ratios[truncate][0] == 1
        assert ratios[truncate][-1] == pytest.approx(8, rel=1e-6)
        assert np.all(np.diff(ratios[truncate]) >= -1e-5)
    assert np.sum(np.abs(ratios[True] - ratios[False]) > 1e-3) > 3


@pytest.mark.parametrize("head_dim", [0, -2, 7])
def test_odd_head_dim(head_dim):
    with pytest.raises(ArgumentError, match=f"head_dim={head_dim} is not allowed"):
        frequencies(RopeConfig(), head_dim)


def test_unknown_type():
    with pytest.raises(ArgumentError, match=r"rope_type='longrope' is not allowed.*llama3, yarn"):
        frequencies(RopeConfig("longrope"), 8)


@pytest.mark.parametrize(
    ("rope", "name"),
    [
        (RopeConfig("llama3", factor=8.0, high_freq_factor=4.0), "low_freq_factor"),
        (RopeConfig("llama3", factor=8.0, low_freq_factor=1.0), "high_freq_factor"),
        (RopeConfig("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0), "original_max_position_embed"),
        (RopeConfig("yarn", factor=8.0), "original_max_position_embeddings"),
    ],
)
def test_parameter_that_the_type_needs(rope, name):
    with pytest.raises(ArgumentError, match=name):
        frequencies(rope, 8)
