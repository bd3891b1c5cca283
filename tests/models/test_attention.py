"""Attention over a contiguous cache, beside a plain sum over each query's own slots."""

import jax.numpy as jnp
import numpy as np
import pytest

from specprefill_jax.cache import KVCache
from specprefill_jax.models import attention

HEADS, KEY_HEADS, SIZE = 4, 2, 8


def by_hand(q: np.ndarray, k: np.ndarray, v: np.ndarray, start: int) -> np.ndarray:
    """q [T, N, H]; k and v [K, S, H]; the query in slot s sees slots 0 .. s."""
    out = np.zeros_like(q)
    for t, head in np.ndindex(q.shape[:2]):
        key_head, seen = head // (HEADS // KEY_HEADS), start + t + 1
        scores = k[key_head, :seen] @ q[t, head] / np.sqrt(SIZE)
        weights = np.exp(scores - scores.max())
        out[t, head] = weights / weights.sum() @ v[key_head, :seen]
    return out


@pytest.mark.parametrize("tokens", [1, 3, 40])
@pytest.mark.parametrize("capacity", [97, 1024, 1280, 1300, 2300])
def test_any_capacity_and_any_start(capacity, tokens):
    """Also where a cache is no multiple of the blocks in which it is read."""
    draw = np.random.default_rng(capacity + tokens)
    k, v = draw.normal(size=(2, KEY_HEADS, capacity, SIZE)).astype(np.float32)
    q = draw.normal(size=(tokens, HEADS, SIZE)).astype(np.float32)
    cache = KVCache(jnp.asarray(k)[None, None], jnp.asarray(v)[None, None], jnp.zeros((1, capacity), jnp.int32))
    for start in (0, 1, capacity // 2 - 1, capacity // 2, capacity - tokens - 1, capacity - tokens):
        out = attention.attend(jnp.asarray(q)[None], cache, jnp.int32(0), jnp.array([start], jnp.int32))
        np.testing.assert_allclose(out[0], by_hand(q, k, v, start), atol=3e-6)
