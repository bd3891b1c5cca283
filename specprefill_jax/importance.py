"""Look-ahead queries and prompt keys -> token importance and chunk scores (arXiv 2502.02789, section 3).

The order of operations matters and is the paper's: softmax over the prompt -> average pooling -> maximum over layers
and heads -> mean over the queries that count -> mean over each chunk. A running maximum over layers and heads needs
O(Q*S) memory: one head's scores at a time, never [L*N, Q, S].

Letters: L layers, B batch, K key heads, N query heads, Q look-ahead queries, S prompt slots, H head size, C chunks.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


@partial(jax.jit, static_argnames=("size", "pool_width"))
def token_importance(
    keys: jax.Array,
    queries: jax.Array,
    num_tokens: jax.Array,
    num_queries: jax.Array,
    *,
    size: int,
    pool_width: int,
) -> jax.Array:
    """Importance of every prompt token; all arithmetic in float32.

    Args:
        keys: [L, B, K, S, H] post-RoPE keys, prompt token i in slot i: the speculator's cache as it lies. Slots from
            num_tokens[b] on (padding, generated tokens) are ignored, whatever they hold.
        queries: [L, B, Q, N, H] post-RoPE queries of the last prompt token and of the generated tokens.
        num_tokens: [B] int32, M of each prompt, at least 1.
        num_queries: [B] int32, queries that count, at least 1.
        size: prompt slots to look at, at least every M (static).
        pool_width: odd, or 0 for no pooling (static).

    Returns:
        float32 [B, size]; zero from M on.
    """
    layers, batch, kv_heads, _, width = keys.shape
    count, heads = queries.shape[2:4]
    group = heads // kv_heads
    scale = 1.0 / math.sqrt(width)

    def row(b: jax.Array) -> jax.Array:
        real = jnp.arange(size) < num_tokens[b]

        def head(i: jax.Array, most: jax.Array) -> jax.Array:
            layer, n = i // heads, i % heads
            q = lax.dynamic_slice(queries, (layer, b, 0, n, 0), (1, 1, count, 1, width)).reshape(count, width)
            k = lax.dynamic_slice(keys, (layer, b, n // group, 0, 0), (1, 1, 1, size, width)).reshape(size, width)
            # [Q, size]
            s = lax.dot_general(
                q.astype(jnp.float32),
                k.astype(jnp.float32),
                (((1,), (1,)), ((), ())),
                precision=lax.Precision.HIGHEST,
            )
            s = jnp.where(real, s * scale, -jnp.inf)
            p = jnp.exp(s - s.max(axis=1, keepdims=True))
            p = p / p.sum(axis=1, keepdims=True)
            return jnp.maximum(most, average_pool(p, pool_width))

        most = lax.fori_loop(0, layers * heads, head, jnp.zeros((count, size), jnp.float32))
        counted = (jnp.arange(count) < num_queries[b])[:, None]
        mean = jnp.where(counted, most, 0).sum(axis=0) / num_queries[b]
        return jnp.where(real, mean, 0)

    return lax.map(row, jnp.arange(batch))


def average_pool(x: jax.Array, width: int) -> jax.Array:
    """Average of the `width` (odd) entries around each one along the last axis: zero padded, always over `width`.

    Window sums by doubling: log2(width) additions, exact where a difference of running sums would cancel.
    """
    if width <= 1:
        return x
    length = x.shape[-1]
    sums = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(width // 2, width // 2)])
    total, offset, power = jnp.zeros_like(x), 0, 1
    while True:
        # Here sums[i] is the sum of `power` padded entries from i on.
        if width & power:
            total = total + sums[..., offset : offset + length]
            offset += power
        if power * 2 > width:
            return total / width
        sums = sums[..., :-power] + sums[..., power:]
        power *= 2


@partial(jax.jit, static_argnames="chunk_size")
def chunk_scores(importance: jax.Array, num_tokens: jax.Array, *, chunk_size: int) -> jax.Array:
    """Mean importance of each chunk's real tokens.

    Args:
        importance: float32 [B, S], zero from num_tokens[b] on.
        num_tokens: [B] int32.
        chunk_size: tokens a chunk, counted from token 0 (static).

    Returns:
        float32 [B, ceil(S / chunk_size)]; a short last chunk is averaged over its real length; zero past the last.
    """
    batch, size = importance.shape
    chunks = -(-size // chunk_size)
    sums = jnp.pad(importance, ((0, 0), (0, chunks * chunk_size - size))).reshape(batch, chunks, chunk_size).sum(-1)
    tokens = jnp.clip(num_tokens[:, None] - jnp.arange(chunks) * chunk_size, 1, chunk_size)
    return sums / tokens
