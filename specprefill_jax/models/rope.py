"""Rotary position embedding: default, linear, llama3 and yarn, as transformers defines them.

Frequencies are computed once on the host; positions are explicit arguments of every rotation, never state.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

from specprefill_jax.errors import ArgumentError, argument_error
from specprefill_jax.models.config import ROPE_TYPES, RopeConfig

Rotation = tuple[jax.Array, jax.Array]


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies and the factor that cosines and sines are scaled by.

    Args:
        rope: the model's RoPE parameters.
        head_dim: size H of a head, even.

    Returns:
        float32 [H/2] in radians a position, and the attention scaling (1.0 but for yarn).

    Raises:
        ArgumentError: an unknown type, an odd head size, or a parameter that the type needs is not set.
    """
    if head_dim < 2 or head_dim % 2:
        raise argument_error("head_dim", head_dim, "an even integer of at least 2")
    if rope.rope_type not in ROPE_TYPES:
        raise argument_error("rope_type", rope.rope_type, f"one of {', '.join(ROPE_TYPES)}")
    inverse = np.float32(1.0) / _periods(rope.theta, head_dim)
    if rope.rope_type == "linear":
        return inverse / np.float32(rope.factor), 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, inverse), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim), _yarn_attention_factor(rope)
    return inverse, 1.0


def rotation(positions: jax.Array, inv_freq: jax.Array | np.ndarray, scaling: float = 1.0) -> Rotation:
    """Cosines and sines of the angles at integer positions [..., T], each float32 [..., T, 1, H/2]."""
    angles = (positions.astype(jnp.float32)[..., None] * jnp.asarray(inv_freq, jnp.float32))[..., None, :]
    return jnp.cos(angles) * scaling, jnp.sin(angles) * scaling


def rotate(x: jax.Array, by: Rotation) -> jax.Array:
    """Rotate heads x [..., T, n, H] in float32; the pair of feature i is feature i + H/2 (the Hugging Face layout)."""
    cos, sin = by
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def apply_rope(x: jax.Array, positions: jax.Array, inv_freq: jax.Array | np.ndarray, scaling: float = 1.0) -> jax.Array:
    """Rotate heads x [..., T, n, H] to their integer positions [..., T]; same shape and dtype as x.

    `inv_freq` (float32 [H/2]) and `scaling` are what `frequencies` returns.
    """
    return rotate(x, rotation(positions, inv_freq, scaling))


def _periods(theta: float, head_dim: int) -> np.ndarray:
    """theta to the power of 2 i / H, float32 [H/2].

    Rounded where transformers rounds it, not more exactly: at position 100,000 an error of one float32 step in a
    frequency is 0.01 radians. The power is exact before it is rounded; numpy's own in float32 depends on the CPU.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def _need(rope: RopeConfig, name: str) -> float:
    value: float | None = getattr(rope, name)
    if value is None:
        raise ArgumentError(f"{name}=None is not allowed: {name} must be set where rope_type={rope.rope_type!r}")
    return value


def _llama3(rope: RopeConfig, inverse: np.ndarray) -> np.ndarray:
    """Llama 3.1: keep short wavelengths, divide long ones by the factor, blend in between."""
    low, high = _need(rope, "low_freq_factor"), _need(rope, "high_freq_factor")
    context = _need(rope, "original_max_position_embeddings")
    wavelength = np.float32(2 * math.pi) / inverse
    scaled = np.where(wavelength > context / low, inverse / np.float32(rope.factor), inverse)
    blend = (np.float32(context) / wavelength - np.float32(low)) / np.float32(high - low)
    blended = (1 - blend) * scaled / np.float32(rope.factor) + blend * scaled
    between = (wavelength >= context / high) & (wavelength <= context / low)
    return np.where(between, blended, scaled).astype(np.float32)


def _yarn(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """YaRN (arXiv 2309.00071): interpolate features that turn slowly, leave fast ones, ramp in between."""
    context = _need(rope, "original_max_position_embeddings")

    def feature(rotations: float) -> float:
        """The feature index that makes so many rotations within the original context."""
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = feature(rope.beta_fast or 32.0), feature(rope.beta_slow or 1.0)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = (high - low) or 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(width), 0, 1)
    keep = 1 - ramp
    periods = _periods(rope.theta, head_dim)
    slow = np.float32(1.0) / (np.float32(rope.factor) * periods)
    return (slow * (1 - keep) + np.float32(1.0) / periods * keep).astype(np.float32)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return float(rope.attention_factor)

    def scale(mscale: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * mscale * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
