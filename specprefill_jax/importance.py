"""Look-ahead queries and prompt keys -> token importance and chunk scores (arXiv 2502.02789, section 3).

The order of operations matters and is the paper's: softmax over the prompt -> average pooling -> maximum over layers
and heads -> mean over the queries that count -> mean over each chunk. The kernels do the first three.

A window of the prompt's own last tokens can stand in for the look-ahead (as in SpecPC, arXiv 2506.08373): each attends
to the tokens up to itself, and the mean is weighted, the last one's most.

Letters: L layers, B batch, K key heads, N query heads, Q look-ahead queries, S prompt slots, H head size, C chunks.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specprefill_jax.kernels.importance import pooled_maxima

Heads = tuple[tuple[int, int], ...]
"""(layer, query head) pairs of a model, both from 0."""


def token_importance(
    keys: jax.Array,
    queries: jax.Array,
    num_tokens: jax.Array,
    num_queries: jax.Array,
    *,
    size: int,
    pool_width: int,
    window: bool = False,
    heads: Heads = (),
    backend: str | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Importance of every prompt token; all arithmetic in float32.

    Under jit, where only chunk scores are asked for, the importance is not stored.

    Args:
        keys: [L, B, K, S, H] post-RoPE keys, prompt token i in slot i: the speculator's cache as it lies.
        queries: [L, B, Q, N, H] post-RoPE queries of the last prompt token and of the generated tokens.
        num_tokens: [B] int32, M of each prompt, at least 1.
        num_queries: [B] int32, queries that count, at least 1.
        size: prompt slots to look at, at least every M (static).
        pool_width: odd, or 0 for no pooling (static).
        window: the queries are of the prompt's last Q tokens, of which the last num_queries[b] count, with weights 1,
            2, ... (static).
        heads: the maximum is over these (layer, query head) alone; empty: over all (static).
        backend: implementation of the kernel, see `kernels.importance.pooled_maxima` (static).
        mesh: devices among which the heads are split (static).

    Returns:
        float32 [B, size]; zero from M on.
    """
    count = queries.shape[2]
    if heads:
        keys, queries = only(keys, queries, heads)
        if mesh is not None and mesh.size > 1:
            # So few are not worth splitting, and the kernels run on one device or on a mesh they are split over.
            backend, mesh = "reference", None
    maxima = partial(
        pooled_maxima, keys, queries, num_tokens, size=size, pool_width=pool_width, backend=backend, mesh=mesh
    )
    if window:
        # [B, Q]
        visible = jnp.maximum(jnp.asarray(num_tokens)[:, None] + jnp.arange(1 - count, 1), 1)
        weights = jnp.maximum(jnp.arange(1, count + 1) - (count - num_queries[:, None]), 0)
        # [B, Q, size] -> [B, size]
        return (maxima(visible=visible) * weights[:, :, None]).sum(axis=1) / weights.sum(axis=1)[:, None]
    counted = (jnp.arange(count) < num_queries[:, None])[:, :, None]
    # [B, Q, size] -> [B, size]
    return jnp.where(counted, maxima(), 0).sum(axis=1) / num_queries[:, None]


def only(keys: jax.Array, queries: jax.Array, heads: Heads) -> tuple[jax.Array, jax.Array]:
    """The keys and queries of some heads, as of a model that has no others.

    Args:
        keys: [L, B, K, S, H].
        queries: [L, B, Q, N, H].
        heads: (layer, query head) pairs, sorted, at least one.

    Returns:
        [P, B, 1, S, H] and [P, B, Q, G, H]: a layer for each of the P key heads that they share, with as many query
        heads as the most of them have. Where one has fewer, its first stands in: a maximum is the same.
    """
    group = queries.shape[3] // keys.shape[2]
    by_key: dict[tuple[int, int], list[int]] = {}
    for layer, head in heads:
        by_key.setdefault((layer, head // group), []).append(head)
    most = max(map(len, by_key.values()))
    layers, key_heads = (np.array(numbers) for numbers in zip(*by_key, strict=True))
    filled = np.array([own + own[:1] * (most - len(own)) for own in by_key.values()])
    # numpy's rule: what two lists of indices choose comes first.
    return keys[layers, :, key_heads][:, :, None], jnp.moveaxis(queries[layers[:, None], :, :, filled], 1, 3)


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
