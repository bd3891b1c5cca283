"""What importance aggregation computes, in plain JAX; see the package's docstring."""

import math

import jax
import jax.numpy as jnp
from jax import lax


def pooled_maxima(
    keys: jax.Array,
    queries: jax.Array,
    num_tokens: jax.Array,
    visible: jax.Array | None = None,
    *,
    size: int,
    pool_width: int,
) -> jax.Array:
    """As `kernels.importance.pooled_maxima`: one head's scores at a time, so O(Q*S) memory and never [L*N, Q, S]."""
    layers, batch, kv_heads, _, width = keys.shape
    count, heads = queries.shape[2:4]
    group = heads // kv_heads
    scale = 1.0 / math.sqrt(width)

    def row(b: jax.Array) -> jax.Array:
        real = jnp.arange(size) < num_tokens[b]
        # [size], or [Q, size]
        attended = real if visible is None else jnp.arange(size) < visible[b][:, None]

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
            s = jnp.where(attended, shown(s) * scale, -jnp.inf)
            p = jnp.exp(s - s.max(axis=1, keepdims=True))
            p = p / p.sum(axis=1, keepdims=True)
            return jnp.maximum(most, average_pool(p, pool_width))

        most = lax.fori_loop(0, layers * heads, head, jnp.zeros((count, size), jnp.float32))
        return jnp.where(real, most, 0)

    return lax.map(row, jnp.arange(batch))


def shown(s: jax.Array) -> jax.Array:
    """Scores in which minus infinity, which a softmax would hide, is NaN."""
    return jnp.where(s > -jnp.inf, s, jnp.nan)


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
