"""Causal attention of new tokens over a cache, in blocks, with memory bounded by a block.

Letters: B batch, T new tokens, S cache slots, N query heads, K key heads, G = N/K, H head size, R = rows of a block.
Attention is causal over *slots*: the token in slot s sees slots 0..s. That is what both a dense prefill and a sparse
prefill over compacted tokens need; positions only enter through RoPE, before this module.

Loops over key blocks have bounds that depend on how much of the cache is filled, not on its capacity, so one compiled
program serves every prompt length. Each step is two plain 2-D matrix products, which is what XLA does best on a CPU,
and an online softmax (Milakov and Gimelshein, arXiv 1805.02867) in float32.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from specprefill_jax.cache import KVCache

QUERY_BLOCK = 256
KEY_BLOCK = 512
DECODE_KEY_BLOCK = 1024
MASKED = -1e30  # finite: exp(MASKED - MASKED) must not be NaN


def write(cache: KVCache, layer: jax.Array, start: jax.Array, k: jax.Array, v: jax.Array) -> KVCache:
    """Store k and v [B, T, K, H] of one layer in slots start[b] .. start[b]+T-1, in place where the cache is donated.

    The caller guarantees start + T <= capacity: XLA would silently shift a slice that does not fit.
    """

    def put(into: jax.Array, new: jax.Array) -> jax.Array:
        # [B, T, K, H] -> [B, K, T, H]
        new = jnp.swapaxes(new, 1, 2).astype(into.dtype)

        def row(b: jax.Array, into: jax.Array) -> jax.Array:
            block = lax.dynamic_slice_in_dim(new, b, 1, axis=0)[None]
            return lax.dynamic_update_slice(into, block, (layer, b, 0, start[b], 0))

        if new.shape[0] == 1:
            return row(jnp.int32(0), into)
        return lax.fori_loop(0, new.shape[0], row, into)

    return KVCache(put(cache.k, k), put(cache.v, v), cache.positions)


def attend(q: jax.Array, cache: KVCache, layer: jax.Array, start: jax.Array) -> jax.Array:
    """Attention of queries in slots start[b] .. start[b]+T-1 over the slots up to their own.

    Args:
        q: [B, T, N, H] queries after RoPE; their keys and values are already in the cache.
        cache: the cache, of which layer `layer` (int32 scalar) is read.
        start: [B] int32, slot of the first query of each row.

    Returns:
        [B, T, N, H] in q's dtype.
    """
    return _attend_one(q, cache, layer, start) if q.shape[1] == 1 else _attend_many(q, cache, layer, start)


def _scores(q: jax.Array, k: jax.Array, scale: float) -> jax.Array:
    """[R, H] x [S, H] -> [R, S] float32."""
    return lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32) * scale


def _attend_many(q: jax.Array, cache: KVCache, layer: jax.Array, start: jax.Array) -> jax.Array:
    batch, tokens, heads, size = q.shape
    kv_heads = cache.k.shape[2]
    group = heads // kv_heads
    scale = 1.0 / math.sqrt(size)
    key_block = min(KEY_BLOCK, cache.capacity)
    blocks = -(-tokens // QUERY_BLOCK)
    rows = -(-tokens // blocks)
    q = jnp.pad(q, ((0, 0), (0, blocks * rows - tokens), (0, 0), (0, 0)))
    # [B, blocks*T', N, H] -> [B, K, blocks, G*T', H]: the heads that share keys make one tall matrix
    q = q.reshape(batch, blocks, rows, kv_heads, group, size).transpose(0, 3, 1, 4, 2, 5)
    q = q.reshape(batch * kv_heads * blocks, group * rows, size)

    def block(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        index, qb = args
        b, head, i = index // (kv_heads * blocks), index // blocks % kv_heads, index % blocks
        first = start[b] + i * rows
        slot = first + jnp.tile(jnp.arange(rows), group)

        def step(j: jax.Array, carry: tuple[jax.Array, ...], masked: bool) -> tuple[jax.Array, ...]:
            top, total, out = carry
            at = (layer, b, head, j * key_block, 0)
            k = lax.dynamic_slice(cache.k, at, (1, 1, 1, key_block, size)).reshape(key_block, size)
            v = lax.dynamic_slice(cache.v, at, (1, 1, 1, key_block, size)).reshape(key_block, size)
            s = _scores(qb, k, scale)
            if masked:
                s = jnp.where(j * key_block + jnp.arange(key_block) <= slot[:, None], s, MASKED)
            new_top = jnp.maximum(top, s.max(axis=1))
            p = jnp.exp(s - new_top[:, None])
            keep = jnp.exp(top - new_top)
            pv = lax.dot_general(p.astype(v.dtype), v, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
            return new_top, total * keep + p.sum(axis=1), out * keep[:, None] + pv

        height = qb.shape[0]
        carry = (jnp.full((height,), MASKED), jnp.zeros((height,)), jnp.zeros((height, size)))
        # Blocks wholly before the first query need no mask.
        whole = (first + 1) // key_block
        end = jnp.minimum(-(-(first + rows) // key_block), cache.capacity // key_block)
        carry = lax.fori_loop(0, whole, lambda j, c: step(j, c, masked=False), carry)
        _, total, out = lax.fori_loop(whole, end, lambda j, c: step(j, c, masked=True), carry)
        return (out / total[:, None]).astype(q.dtype)

    out = lax.map(block, (jnp.arange(q.shape[0]), q))
    out = out.reshape(batch, kv_heads, blocks, group, rows, size).transpose(0, 2, 4, 1, 3, 5)
    return out.reshape(batch, blocks * rows, heads, size)[:, :tokens]


def _attend_one(q: jax.Array, cache: KVCache, layer: jax.Array, start: jax.Array) -> jax.Array:
    batch, _, heads, size = q.shape
    kv_heads = cache.k.shape[2]
    scale = 1.0 / math.sqrt(size)
    key_block = min(DECODE_KEY_BLOCK, cache.capacity)
    # [B, 1, N, H] -> [B, K, G, H]
    q = q.reshape(batch, kv_heads, heads // kv_heads, size)

    def step(j: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, out = carry
        at = (layer, 0, 0, j * key_block, 0)
        k = lax.dynamic_slice(cache.k, at, (1, batch, kv_heads, key_block, size))[0]
        v = lax.dynamic_slice(cache.v, at, (1, batch, kv_heads, key_block, size))[0]
        s = jnp.einsum("BKGH,BKSH->BKGS", q, k, preferred_element_type=jnp.float32) * scale
        seen = j * key_block + jnp.arange(key_block) <= start[:, None]
        s = jnp.where(seen[:, None, None, :], s, MASKED)
        new_top = jnp.maximum(top, s.max(axis=-1))
        p = jnp.exp(s - new_top[..., None])
        keep = jnp.exp(top - new_top)
        pv = jnp.einsum("BKGS,BKSH->BKGH", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_top, total * keep + p.sum(axis=-1), out * keep[..., None] + pv

    shape = q.shape[:3]
    carry = (jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, size)))
    _, total, out = lax.fori_loop(0, start.max() // key_block + 1, step, carry)
    return (out / total[..., None]).astype(q.dtype).reshape(batch, 1, heads, size)
