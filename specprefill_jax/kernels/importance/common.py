"""What the Pallas kernels of importance aggregation share."""

import math

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)


def next_power(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def query_tiles(queries: jax.Array, kv_heads: int, *, group: int, count: int, width: int) -> jax.Array:
    """Queries as the kernels read them; a padding head repeats the group's last, which changes no maximum.

    Args:
        queries: [L, B, Q, N, H].
        kv_heads: K.
        group: query heads a key head, padded, at least N / K.
        count: queries a tile.
        width: head size, padded.

    Returns:
        [L, B, K, tiles, group * count, width]: a tile's rows are `count` queries of head 0 of the group, of head 1, ...
    """
    layers, batch, total, heads, size = queries.shape
    tiles = -(-total // count)
    x = queries.reshape(layers, batch, total, kv_heads, heads // kv_heads, size)
    x = jnp.pad(x, [(0, 0)] * 4 + [(0, group - heads // kv_heads), (0, 0)], mode="edge")
    x = jnp.pad(x, [(0, 0)] * 2 + [(0, tiles * count - total), (0, 0), (0, 0), (0, width - size)])
    x = x.reshape(layers, batch, tiles, count, kv_heads, group, width)
    # [L, B, tiles, Q, K, G, H] -> [L, B, K, tiles, G, Q, H]
    return x.transpose(0, 1, 4, 2, 5, 3, 6).reshape(layers, batch, kv_heads, tiles, group * count, width)


def visible_rows(visible: jax.Array, *, tiles: int, group: int, count: int) -> jax.Array:
    """Keys that each row of `query_tiles` attends to: [B, Q] -> int32 [B, tiles, group * count]."""
    batch, total = visible.shape
    x = jnp.pad(visible.astype(jnp.int32), ((0, 0), (0, tiles * count - total)), mode="edge")
    x = jnp.broadcast_to(x.reshape(batch, tiles, 1, count), (batch, tiles, group, count))
    return x.reshape(batch, tiles, group * count)


def merge(most: jax.Array, total: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """Maxima, and sums of 2**((s - maximum) * scale), of parts (axis 0) -> maximum and 1 / sum of all of them.

    They are kept apart, since a log-sum-exp of large scores has lost the digits that a difference needs.
    """
    top = most.max(axis=0)
    return top, 1 / (total * jnp.exp2((most - top) * scale)).sum(axis=0)


def poison(maxima: jax.Array, inverses: jax.Array) -> jax.Array:
    """Infinity for the prompts one of whose softmax denominators is not a number: a kernel's maximum may lose a NaN.

    Args:
        maxima: [B, Q, S].
        inverses: [L, B, ...].
    """
    axes = (0, *range(2, inverses.ndim))
    return jnp.where(jnp.isfinite(inverses).all(axis=axes)[:, None, None], maxima, jnp.inf)
