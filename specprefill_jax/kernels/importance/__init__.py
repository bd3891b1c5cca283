"""Importance aggregation: the speculator's queries against its keys -> pooled attention maxima.

For every (layer, head, query): softmax over the prompt's keys, average pooling along the prompt (zero padded, always
over the width); then the maximum over layers and heads (arXiv 2502.02789, section 3; the order matters). Two passes
over the keys, which are the only reads of them: log-sum-exp, then the pooled probabilities.

Letters: L layers, B batch, K key heads, N query heads, Q look-ahead queries, S key slots, H head size.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specprefill_jax.kernels.backend import Backend, choose_backend, run
from specprefill_jax.kernels.importance import reference
from specprefill_jax.sharding.rules import DATA, TENSOR


def pooled_maxima(
    keys: jax.Array,
    queries: jax.Array,
    num_tokens: jax.Array,
    *,
    size: int,
    pool_width: int,
    visible: jax.Array | None = None,
    backend: Backend | str | None = None,
    mesh: Mesh | None = None,
) -> jax.Array:
    """Maximum over layers and heads of the pooled attention of each look-ahead query, arithmetic in float32.

    Args:
        keys: [L, B, K, S, H] post-RoPE keys, prompt token i in slot i: the speculator's cache as it lies. Slots from
            num_tokens[b] on (padding, generated tokens) are ignored, whatever they hold.
        queries: [L, B, Q, N, H] post-RoPE queries, heads n*N/K to (n+1)*N/K - 1 sharing key head n.
        num_tokens: [B] int32, M of each prompt, 1 to `size`.
        size: prompt slots to look at, at most S (static).
        pool_width: odd, or 0 for no pooling (static).
        visible: [B, Q] int32, keys that each query attends to, the first so many, 1 to num_tokens[b]. None: all.
        backend: implementation; None: the one for the platform. What it does not support, the reference computes.
        mesh: devices among which the heads are split, keys over K and queries over N along the axis `tensor`: each
            takes the maximum over its own, then one max-reduce; no key moves. Rows are split along `data`, where the
            mesh has it and it divides them. None: no mesh.

    Returns:
        float32 [B, Q, size]; zero from M on. Where a key or query that counts is not finite, the row is not either.

    Raises:
        ArgumentError: an unknown backend.
    """
    keys, queries, num_tokens = (jnp.asarray(x) for x in (keys, queries, num_tokens))
    chosen = choose_backend(backend, mesh)
    compute = partial(run, reference.pooled_maxima, chosen, size=size, pool_width=pool_width)
    numbers = (num_tokens,) if visible is None else (num_tokens, jnp.asarray(visible, jnp.int32))
    if mesh is None:
        return compute(keys, queries, *numbers)

    def local(keys: jax.Array, queries: jax.Array, *numbers: jax.Array) -> jax.Array:
        most = compute(keys, queries, *numbers)
        # Infinity survives every maximum; what a collective makes of a NaN is its own affair.
        return lax.pmax(jnp.where(jnp.isnan(most), jnp.inf, most), TENSOR)

    rows = DATA if len(num_tokens) % mesh.shape.get(DATA, len(num_tokens) + 1) == 0 else None
    heads = (P(None, rows, TENSOR), P(None, rows, None, TENSOR), *[P(rows)] * len(numbers))
    shared = jax.shard_map(local, mesh=mesh, in_specs=heads, out_specs=P(rows), check_vma=False)
    return shared(keys, queries, *numbers)
