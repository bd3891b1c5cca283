"""Importance aggregation with Pallas through Triton, for NVIDIA GPUs.

Pass one splits the keys of each head over programs, so that few heads still fill the chip. Pass two gives each program
a tile of tokens and all layers and heads: the running maximum lives in registers, and each key is read once more. A
tile's keys overlap its neighbours' by W - 1, which neighbours that run together find in the L2 cache.

Triton has no shifts along a register tile, so the pooling is a product with a band of ones: exact in bfloat16, and the
probabilities are split into three bfloat16 terms that add up to them exactly.
"""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specprefill_jax.kernels.backend import Unsupported
from specprefill_jax.kernels.importance.common import LOG2_E, merge, next_power, poison, query_tiles, visible_rows
from specprefill_jax.kernels.importance.reference import shown

PROGRAMS = 4 * 132
"""Programs that fill an H100 or H200: four for each of its multiprocessors."""


class Blocks(NamedTuple):
    """Keys a step, warps a program and pipeline stages of each pass."""

    keys: int
    warps: int
    stages: int


MAX_GROUP = 64
"""Query heads a key head at most: with more, registers spill."""

MAX_KEYS = 128
"""Keys a step at most: a wider pool than half of that is not served."""


def max_rows(itemsize: int) -> int:
    """Rows (heads of a group times queries) a program holds at most; more queries are read in tiles."""
    return 64 if itemsize < 4 else 32


def blocks(width: int, itemsize: int, rows: int, pool_width: int) -> tuple[Blocks, Blocks]:
    """Blocks of pass one and pass two.

    Chosen by what ptxas reports for an H100 (`make aot`): no register spills at pool widths up to 32, and mostly two
    or more programs fit on a multiprocessor. float32 has no exact tensor core, and wants more threads.

    Args:
        width: head size, padded.
        itemsize: bytes a key element.
        rows: rows a program holds.
        pool_width: W; an uncommonly wide one needs longer blocks.
    """
    if itemsize == 4:
        keys = 64 if width <= 128 else 32
        one = two = Blocks(keys, 8, 2)
    elif width > 128:
        one, two = Blocks(64, 4, 3), Blocks(64, 4, 2)
    else:
        one, two = Blocks(128, 4, 3), Blocks(64, 4, 3) if rows > 32 else Blocks(128, 8, 2)
    return one, two._replace(keys=max(two.keys, min(next_power(2 * pool_width), MAX_KEYS)) if pool_width else two.keys)


def pooled_maxima(
    keys: jax.Array,
    queries: jax.Array,
    num_tokens: jax.Array,
    visible: jax.Array | None = None,
    *,
    size: int,
    pool_width: int,
    interpret: bool,
) -> jax.Array:
    """As `kernels.importance.pooled_maxima`.

    Raises:
        Unsupported: a pool wider than half a block, or dtypes, a head size or a group of heads that are not served.
    """
    layers, batch, kv_heads, slots, head_size = keys.shape
    total, heads = queries.shape[2:4]
    if jnp.promote_types(queries.dtype, keys.dtype) != keys.dtype:
        raise Unsupported(f"queries of {queries.dtype}, which {keys.dtype} cannot hold")
    if keys.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16) or head_size > 256:
        raise Unsupported(f"keys of {keys.dtype} and head size {head_size}")
    group = next_power(heads // kv_heads)
    if group > MAX_GROUP:
        raise Unsupported(f"{heads // kv_heads} query heads a key head, more than {MAX_GROUP}")
    count = next_power(total)
    count = max(min(count, max_rows(keys.dtype.itemsize) // group), 16 // group, 1)
    rows, width = group * count, max(next_power(head_size), 16)
    one, two = blocks(width, keys.dtype.itemsize, rows, pool_width)
    halo = pool_width // 2
    if pool_width > MAX_KEYS // 2:
        raise Unsupported(f"pool_width {pool_width} is wider than half a block of {MAX_KEYS} keys")

    q = query_tiles(queries.astype(keys.dtype), kv_heads, group=group, count=count, width=width)
    tiles = q.shape[3]
    num_tokens = num_tokens.astype(jnp.int32)
    limits = () if visible is None else (visible_rows(visible, tiles=tiles, group=group, count=count),)
    # Products of half-precision numbers are exact in float32; float32 needs its own multiplier.
    dot = partial(
        lax.dot_general,
        precision=lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    scale = LOG2_E / math.sqrt(head_size)
    shared = {
        "head_size": head_size,
        "slots": slots,
        "kv_heads": kv_heads,
        "tiles": tiles,
        "scale": scale,
        "dot": dot,
    }

    pairs = layers * kv_heads
    parts = min(-(-PROGRAMS // (pairs * batch * tiles)), -(-size // one.keys))
    statistics = jax.ShapeDtypeStruct((parts, layers, batch, kv_heads, tiles, rows), jnp.float32)
    most, sums = pl.pallas_call(
        partial(_statistics, **shared, block=one.keys, parts=parts),
        grid=(parts, pairs, batch * tiles),
        out_shape=(statistics, statistics),
        compiler_params=plgpu.CompilerParams(num_warps=one.warps, num_stages=one.stages),
        interpret=interpret,
        name="importance_statistics",
    )(num_tokens, *limits, q, keys)
    top, inverse = merge(most, sums, scale)

    step = two.keys - 2 * halo
    columns = -(-size // step)
    parts = min(-(-PROGRAMS // (columns * batch * tiles)), pairs)
    maxima = pl.pallas_call(
        partial(_maxima, **shared, block=two.keys, parts=parts, halo=halo, pairs=pairs, group=group),
        grid=(columns, parts, batch * tiles),
        out_shape=jax.ShapeDtypeStruct((parts, batch, tiles, count, columns, two.keys), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=two.warps, num_stages=two.stages),
        interpret=interpret,
        name="importance_pooled_maxima",
    )(num_tokens, *limits, q, top, inverse, keys)
    # [parts, B, tiles, Q / tiles, columns, block] -> [B, Q, size]
    maxima = maxima[..., :step].max(axis=0).reshape(batch, tiles * count, columns * step)[:, :total, :size]
    return poison(maxima, inverse)


def _keys(ref, at: tuple, slot: jax.Array, head_size: int, width: int) -> jax.Array:
    """Keys [block, width] at the slots, zero past the head size."""
    if width == head_size:
        return ref[*at, slot, :]
    column = jnp.arange(width)[None, :]
    return plgpu.load(ref.at[*at, slot[:, None], jnp.minimum(column, head_size - 1)], mask=column < head_size, other=0)


def _statistics(tokens_ref, *refs, block, parts, head_size, slots, kv_heads, tiles, scale, dot):
    """Maximum, and sum of 2**((s - maximum) * scale), of each row over one part of the prompt's keys."""
    *limits_ref, q_ref, k_ref, most_ref, sum_ref = refs
    part, pair, at = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    layer, head, prompt, tile = pair // kv_heads, pair % kv_heads, at // tiles, at % tiles
    tokens = tokens_ref[prompt]
    limit = limits_ref[0][prompt, tile, :][:, None] if limits_ref else tokens
    q = q_ref[layer, prompt, head, tile, :, :]
    steps = pl.cdiv(tokens, block)
    share = pl.cdiv(steps, parts)

    def step(i, carry):
        most, total = carry
        slot = i * block + jnp.arange(block, dtype=jnp.int32)
        k = _keys(k_ref, (layer, prompt, head), jnp.minimum(slot, slots - 1), head_size, q.shape[1])
        # [rows, block]
        s = shown(dot(q, k, (((1,), (1,)), ((), ()))))
        s = jnp.where(slot[None, :] < limit, s, -jnp.inf)
        top = jnp.maximum(most, s.max(axis=1))
        return top, total * jnp.exp2((most - top) * scale) + jnp.exp2((s - top[:, None]) * scale).sum(axis=1)

    rows = q.shape[0]
    start = (jnp.full((rows,), -1e38, jnp.float32), jnp.zeros((rows,), jnp.float32))
    most, total = lax.fori_loop(part * share, jnp.minimum((part + 1) * share, steps), step, start)
    most_ref[part, layer, prompt, head, tile, :] = most
    sum_ref[part, layer, prompt, head, tile, :] = total


def _maxima(
    tokens_ref,
    *refs,
    block,
    parts,
    halo,
    pairs,
    group,
    head_size,
    slots,
    kv_heads,
    tiles,
    scale,
    dot,
):
    """Maximum over one part of the (layer, key head) pairs of the pooled probabilities of one tile of tokens."""
    *limits_ref, q_ref, most_ref, inverse_ref, k_ref, out_ref = refs
    column, part, at = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    prompt, tile = at // tiles, at % tiles
    tokens = tokens_ref[prompt]
    limit = limits_ref[0][prompt, tile, :][:, None] if limits_ref else tokens
    first = column * (block - 2 * halo)
    slot = first - halo + jnp.arange(block, dtype=jnp.int32)
    real = (slot >= 0)[None, :] & (slot[None, :] < limit)
    slot = jnp.clip(slot, 0, slots - 1)
    rows, width = q_ref.shape[-2:]
    if halo:
        source = lax.broadcasted_iota(jnp.int32, (block, block), 0)
        target = lax.broadcasted_iota(jnp.int32, (block, block), 1)
        # Token t of the tile is the sum of the block's keys t to t + W - 1.
        band = ((source >= target) & (source - target <= 2 * halo)).astype(jnp.bfloat16)

    def step(i, most):
        layer, head = i // kv_heads, i % kv_heads
        q = q_ref[layer, prompt, head, tile, :, :]
        k = _keys(k_ref, (layer, prompt, head), slot, head_size, width)
        s = dot(q, k, (((1,), (1,)), ((), ())))
        top = most_ref[layer, prompt, head, tile, :][:, None]
        inverse = inverse_ref[layer, prompt, head, tile, :][:, None]
        p = jnp.where(real, jnp.exp2((s - top) * scale) * inverse, 0)
        if halo:
            p = _band_sums(p, band)
        return jnp.maximum(most, p)

    share = pl.cdiv(pairs, parts)
    last = jnp.where(first < tokens, jnp.minimum((part + 1) * share, pairs), 0)
    most = lax.fori_loop(part * share, last, step, jnp.zeros((rows, block), jnp.float32))
    most = most.reshape(group, rows // group, block).max(axis=0) / (2 * halo + 1)
    token = first + jnp.arange(block, dtype=jnp.int32)
    out_ref[part, prompt, tile, :, column, :] = jnp.where((token < tokens)[None, :], most, 0)


def _band_sums(p: jax.Array, band: jax.Array) -> jax.Array:
    """p @ band for a band of ones, exact but for the additions: p as three bfloat16 terms of 8 bits each."""
    terms = []
    for _ in range(3):
        bits = lax.bitcast_convert_type(p, jnp.uint32) & jnp.uint32(0xFFFF0000)
        terms.append(lax.bitcast_convert_type(bits, jnp.float32))
        p = p - terms[-1]
    high, middle, low = (jnp.dot(t.astype(jnp.bfloat16), band, preferred_element_type=jnp.float32) for t in terms)
    return high + (middle + low)
