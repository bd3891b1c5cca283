"""Causal attention of new tokens over a cache, in blocks, with memory bounded by a block.

Letters: B batch, T new tokens, S cache slots, N query heads, K key heads, G = N/K, H head size, R = rows of a block.
Attention is causal over *slots*: the token in slot s sees slots 0..s. That is what both a dense prefill and a sparse
prefill over compacted tokens need; positions only enter through RoPE, before this module.

Loops over key blocks have bounds that depend on how much of the cache is filled, not on its capacity, so one compiled
program serves every prompt length. Each step is two plain 2-D matrix products, which is what XLA does best on a CPU,
and an online softmax (Milakov and Gimelshein, arXiv 1805.02867) in float32. GPUs prefill by a fused kernel instead
(`attend_fused`), where a step this small is lost in the time it takes to start it.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specprefill_jax.cache import KVCache

QUERY_BLOCK = 1024
KEY_BLOCK = 512
DIAGONAL_BLOCK = 128
DECODE_KEY_BLOCK = 1024
ACCELERATOR_DECODE_KEY_BLOCK = 16384
FEW_TOKENS = 31
"""So many new tokens are few, such as proposals to check; pieces of a prompt have more. All of a row's queries look at
a long block of keys at once, as a lone token's do."""
Carry = tuple[jax.Array, jax.Array, jax.Array]
Keys = Callable[[jax.Array, jax.Array, jax.Array, int], tuple[jax.Array, jax.Array]]
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


def row(cache: KVCache, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values of one layer, in the order of slots: each [B, S, K, H]."""

    def one(x: jax.Array) -> jax.Array:
        # [B, K, S, H] -> [B, S, K, H]
        return jnp.swapaxes(lax.dynamic_index_in_dim(x, layer, keepdims=False), 1, 2)

    return one(cache.k), one(cache.v)


def attend_fused(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    earlier: tuple[jax.Array, jax.Array],
    start: jax.Array,
    implementation: Literal["cudnn", "xla"],
) -> jax.Array:
    """The same as `attend` for T > 1, by a flash kernel: over the earlier slots, over the new tokens, then merged.

    Args:
        q, start: see `attend`.
        k, v: [B, T, K, H] the new tokens' keys and values.
        earlier: keys and values of the slots, each [B, S, K, H], of which those below start[b] are attended to.
        implementation: of `jax.nn.dot_product_attention`: "cudnn" takes half precision on an NVIDIA GPU, "xla" is for
            tests.
    """
    fused = partial(jax.nn.dot_product_attention, implementation=implementation, return_residual=True)
    # With no earlier slot, one is attended to all the same, and counts for nothing: kernels differ on empty sums.
    before, weight_before = fused(q, *earlier, key_value_seq_lengths=jnp.maximum(start, 1))
    weight_before = jnp.where((start > 0)[:, None, None], weight_before, MASKED)
    own, weight_own = fused(q, k, v, is_causal=True)
    top = jnp.maximum(weight_before, weight_own)
    share = [jnp.exp(weight - top)[..., None] for weight in (weight_before, weight_own)]
    out = (before.astype(jnp.float32) * share[0] + own.astype(jnp.float32) * share[1]) / (share[0] + share[1])
    return out.astype(q.dtype)


def attend(q: jax.Array, cache: KVCache, layer: jax.Array, start: jax.Array, *, accelerator: bool = False) -> jax.Array:
    """Attention of queries in slots start[b] .. start[b]+T-1 over the slots up to their own.

    Args:
        q: [B, T, N, H] queries after RoPE; their keys and values are already in the cache.
        cache: the cache, of which layer `layer` (int32 scalar) is read.
        start: [B] int32, slot of the first query of each row.
        accelerator: whether at few tokens (FEW_TOKENS) all rows are looked at at once, in long steps, lest many small
            ones be started; or one row after the other, each as far as it is filled, in steps that the caches of a CPU
            hold.

    Returns:
        [B, T, N, H] in q's dtype.
    """
    if q.shape[1] <= FEW_TOKENS:
        return _attend_few(q, cache, layer, start, accelerator)
    return _attend_many(q, cache, layer, start)


def _key_block(most: int, capacity: int) -> int:
    """Slots a step reads: at most half of them.

    Where one block is the whole row, XLA takes the slice out of the loop, and then copies the whole cache instead of
    updating it in place.
    """
    return max(1, min(most, capacity // 2))


def _slots(at: jax.Array, count: int, capacity: int) -> tuple[jax.Array, jax.Array]:
    """The slots of the block at slot `at`, and which of them are new, each [count].

    A block that would reach past the cache begins before `at`: XLA would shift its slice there without a word.
    """
    slots = jnp.minimum(at, capacity - count) + jnp.arange(count)
    return slots, slots >= at


def _attend_many(q: jax.Array, cache: KVCache, layer: jax.Array, start: jax.Array) -> jax.Array:
    size = q.shape[3]

    def keys(b: jax.Array, head: jax.Array, slot: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        at, shape = (layer, b, head, slot, 0), (1, 1, 1, count, size)
        return lax.dynamic_slice(cache.k, at, shape)[0, 0, 0], lax.dynamic_slice(cache.v, at, shape)[0, 0, 0]

    return attend_blocks(q, keys, start, *cache.k.shape[2:4])


def attend_blocks(q: jax.Array, keys: Keys, start: jax.Array, kv_heads: int, capacity: int) -> jax.Array:
    """The same as `attend` for many tokens, over whatever holds the keys.

    Args:
        q: [B, T, N, H] queries after RoPE.
        keys: from row, key head, first slot and a static count of slots to their keys and values, each [count, H].
        start: [B] int32, slot of the first query of each row.
        kv_heads: K.
        capacity: slots of a row.
    """
    batch, tokens, heads, size = q.shape
    group = heads // kv_heads
    key_block = _key_block(KEY_BLOCK, capacity)
    blocks = -(-tokens // QUERY_BLOCK)
    rows = min(-(-tokens // (blocks * 16)) * 16, tokens)
    # Blocks of equal length; the last one overlaps the one before it rather than reach past the tokens.
    offsets = [min(i * rows, tokens - rows) for i in range(blocks)]
    q = by_key_head(q, kv_heads)

    def block(index: jax.Array) -> jax.Array:
        b, head, i = index // (kv_heads * blocks), index // blocks % kv_heads, index % blocks
        offset = jnp.asarray(offsets, jnp.int32)[i]
        first = start[b] + offset
        qb = lax.dynamic_slice(q, (b, head, offset * group, 0), (1, 1, rows * group, size))[0, 0]

        carry = nothing_seen(qb)
        # Earlier slots: whole key blocks, then what is left before the first query.
        whole = first // key_block

        def earlier(j: jax.Array, carry: Carry) -> Carry:
            return seen_more(qb, *keys(b, head, j * key_block, key_block), carry, None)

        def rest(j: jax.Array, carry: Carry) -> Carry:
            # `whole + j` is `whole`; without j XLA would take the products out of a loop that seldom runs.
            slots, new = _slots((whole + j) * key_block, key_block, capacity)
            return seen_more(qb, *keys(b, head, slots[0], key_block), carry, new & (slots < first))

        carry = lax.fori_loop(0, whole, earlier, carry)
        carry = lax.fori_loop(0, (first % key_block > 0).astype(jnp.int32), rest, carry)
        # The block's own slots, in narrow steps that leave out the rows before them.
        done = []
        for left in range(0, rows, DIAGONAL_BLOCK):
            width = min(DIAGONAL_BLOCK, rows - left)
            # A constant made on the host: XLA would redo the division for every score.
            seen = jnp.arange(width) <= (np.arange((rows - left) * group, dtype=np.int32) // group)[:, None]
            k, v = keys(b, head, first + left, width)
            carry = seen_more(qb[left * group :], k, v, carry, seen)
            _, total, out = carry
            done.append(out[: width * group] / total[: width * group, None])
            carry = (carry[0][width * group :], total[width * group :], out[width * group :])
        return jnp.concatenate(done).astype(q.dtype)

    out = lax.map(block, jnp.arange(batch * kv_heads * blocks))
    out = out.reshape(batch, kv_heads, blocks, rows, group, size)
    fresh = blocks * rows - tokens  # rows of the last block that the one before it has, too
    parts = [out[:, :, : blocks - 1].reshape(batch, kv_heads, -1, group, size), out[:, :, -1, fresh:]]
    out = jnp.concatenate(parts, axis=2)
    # [B, K, T, G, H] -> [B, T, N, H]
    return out.transpose(0, 2, 1, 3, 4).reshape(batch, tokens, heads, size)


def nothing_seen(q: jax.Array) -> Carry:
    """What `seen_more` starts with for queries [..., R, H]."""
    return jnp.full(q.shape[:-1], MASKED), jnp.zeros(q.shape[:-1]), jnp.zeros(q.shape)


def seen_more(q: jax.Array, k: jax.Array, v: jax.Array, carry: Carry, seen: jax.Array | None) -> Carry:
    """Online softmax over one more block of keys.

    Args:
        q: [..., R, H] queries.
        k, v: [..., S, H] keys and values.
        carry: (largest product [..., R], sum of exponentials [..., R], weighted sum of values [..., R, H]) so far,
            float32.
        seen: bool, broadcast to [..., R, S], which keys each query sees; None for all.
    """
    top, total, out = carry
    scale = 1.0 / math.sqrt(q.shape[-1])
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    s = product("...RH,...SH->...RS", q, k)
    if seen is not None:
        s = jnp.where(seen, s, MASKED)
    new_top = jnp.maximum(top, s.max(axis=-1))
    # Scaled here, within the exponential's own pass over the scores; scaled before, they would be stored once more.
    p = jnp.exp((s - new_top[..., None]) * scale)
    keep = jnp.exp((top - new_top) * scale)
    pv = product("...RS,...SH->...RH", p.astype(v.dtype), v)
    return new_top, total * keep + p.sum(axis=-1), out * keep[..., None] + pv


def _attend_few(q: jax.Array, cache: KVCache, layer: jax.Array, start: jax.Array, accelerator: bool) -> jax.Array:
    batch, tokens, _, size = q.shape
    kv_heads = cache.k.shape[2]
    most = ACCELERATOR_DECODE_KEY_BLOCK if accelerator else DECODE_KEY_BLOCK
    key_block = _key_block(most, cache.capacity)
    q = by_key_head(q, kv_heads)
    last = start[:, None] + token_of(q, tokens)

    def some(first: jax.Array | int, q: jax.Array, last: jax.Array) -> jax.Array:
        """As many rows as `q` [B', K, T * G, H] has, from row `first` on: float32, likewise."""

        def step(j: jax.Array, carry: Carry) -> Carry:
            slots, new = _slots(j * key_block, key_block, cache.capacity)
            at, shape = (layer, first, 0, slots[0], 0), (1, len(q), kv_heads, key_block, size)
            k, v = (lax.dynamic_slice(x, at, shape)[0] for x in (cache.k, cache.v))
            seen = new & (slots <= last[..., None])
            return seen_more(q, k, v, carry, seen[:, None])

        carry = nothing_seen(q)
        _, total, out = lax.fori_loop(0, last.max() // key_block + 1, step, carry)
        return out / total[..., None]

    if batch == 1 or accelerator:
        out = some(0, q, last)
    else:
        out = lax.map(lambda row: some(row[0], row[1][None], row[2][None])[0], (jnp.arange(batch), q, last))
    return by_token(out.astype(q.dtype), tokens)


def by_key_head(q: jax.Array, kv_heads: int) -> jax.Array:
    """Queries [B, T, N, H] as [B, K, T * G, H]: those that share keys together, token by token."""
    batch, tokens, heads, size = q.shape
    q = q.reshape(batch, tokens, kv_heads, heads // kv_heads, size).transpose(0, 2, 1, 3, 4)
    return q.reshape(batch, kv_heads, -1, size)


def by_token(out: jax.Array, tokens: int) -> jax.Array:
    """[B, K, T * G, H] back as [B, T, N, H]."""
    batch, kv_heads, _, size = out.shape
    return out.reshape(batch, kv_heads, tokens, -1, size).transpose(0, 2, 1, 3, 4).reshape(batch, tokens, -1, size)


def token_of(q: jax.Array, tokens: int) -> np.ndarray:
    """int32 [T * G], of which token each of the queries [..., T * G, H] is."""
    return np.arange(q.shape[-2], dtype=np.int32) // (q.shape[-2] // tokens)
