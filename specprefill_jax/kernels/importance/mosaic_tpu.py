"""Importance aggregation with Pallas through Mosaic, for TPUs.

Both passes stream blocks of keys through VMEM. Pass two visits all layers and heads for one tile of tokens before the
next, so that the running maximum stays in VMEM; `EDGE` keys on each side of the tile come along for the pooling.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specprefill_jax.kernels.backend import Unsupported
from specprefill_jax.kernels.importance.common import LOG2_E, poison, query_tiles, visible_rows
from specprefill_jax.kernels.importance.reference import shown

EDGE = 64
"""Keys read beside a tile, half a lane row on each side: pools up to 2 * EDGE + 1 wide."""

MAX_ROWS = 1024
"""Heads of a group times queries, at most: more do not fit into VMEM."""


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
        Unsupported: a pool wider than the edges allow, dtypes that are not served, or too many rows.
    """
    layers, batch, kv_heads, slots, head_size = keys.shape
    total, heads = queries.shape[2:4]
    if jnp.promote_types(queries.dtype, keys.dtype) != keys.dtype:
        raise Unsupported(f"queries of {queries.dtype}, which {keys.dtype} cannot hold")
    if keys.dtype not in (jnp.float32, jnp.bfloat16):
        raise Unsupported(f"keys of {keys.dtype}")
    halo = pool_width // 2
    if halo > EDGE:
        raise Unsupported(f"pool_width {pool_width} is wider than {2 * EDGE + 1}")
    count = -(-total // 8) * 8
    group = heads // kv_heads
    rows = group * count
    if rows > MAX_ROWS:
        raise Unsupported(f"{total} queries of {group} heads a key head: more than {MAX_ROWS} rows")
    # [rows, tile] scores and their like take at most 1 MiB each of VMEM.
    tile = min(max(2**18 // rows // 128 * 128, 256), 2048, -(-size // 128) * 128)
    edge = EDGE if halo else 0
    tiles = -(-size // tile)
    pairs = layers * kv_heads
    num_tokens = num_tokens.astype(jnp.int32)
    # [L, B, K, 1, rows, H] -> [L, B, K, rows, H]
    q = query_tiles(queries.astype(keys.dtype), kv_heads, group=group, count=count, width=head_size)[:, :, :, 0]
    dot = partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if keys.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    shared = {"tile": tile, "scale": LOG2_E / math.sqrt(head_size), "dot": dot}

    def spec(last: tuple[int, int], at: Callable, pair: int, column: int) -> pl.BlockSpec:
        """Block [last] of [L, B, K, ...]; `pair` and `column` are grid axes, of which `at` makes the block's index."""

        def index(*indices):
            *grid, tokens_ref = indices
            i = at(grid[column], tokens_ref[grid[0]])
            return grid[pair] // kv_heads, grid[0], grid[pair] % kv_heads, i, 0

        return pl.BlockSpec((None, None, None, *last), index)

    def whole(_, tokens):
        return 0

    def here(column, tokens):
        return jnp.minimum(column, (tokens - 1) // tile)  # past the prompt, nothing new is read

    def before(column, tokens):
        return jnp.maximum(here(column, tokens) * (tile // EDGE) - 1, 0)

    def after(column, tokens):
        return jnp.minimum((here(column, tokens) + 1) * (tile // EDGE), -(-slots // EDGE) - 1)

    # [B, 1, rows] -> [B, rows, 1]: one limit a row, of all layers and heads
    limits = () if visible is None else (visible_rows(visible, tiles=1, group=group, count=count).swapaxes(1, 2),)
    limit_specs = [pl.BlockSpec((None, rows, 1), lambda b, *_: (b, 0, 0))] * len(limits)
    statistics = spec((rows, 1), whole, 1, 2)
    top, inverse = pl.pallas_call(
        partial(_statistics, **shared),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, pairs, tiles),
            in_specs=[*limit_specs, spec((rows, head_size), whole, 1, 2), spec((tile, head_size), here, 1, 2)],
            out_specs=(statistics, statistics),
        ),
        out_shape=(jax.ShapeDtypeStruct((layers, batch, kv_heads, rows, 1), jnp.float32),) * 2,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="importance_statistics",
    )(num_tokens, *limits, q, keys)

    where = [here] if not edge else [before, here, after]
    maxima = pl.pallas_call(
        partial(_maxima, **shared, limited=bool(limits), edge=edge, halo=halo, group=group, last=pairs - 1),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, tiles, pairs),
            in_specs=[
                *limit_specs,
                spec((rows, head_size), whole, 2, 1),
                *[spec((rows, 1), whole, 2, 1)] * 2,
                *(spec((tile if at is here else edge, head_size), at, 2, 1) for at in where),
            ],
            out_specs=pl.BlockSpec((None, count, tile), lambda b, i, _, __: (b, 0, i)),
        ),
        out_shape=jax.ShapeDtypeStruct((batch, count, tiles * tile), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="importance_pooled_maxima",
    )(num_tokens, *limits, q, top, inverse, *[keys] * len(where))
    return poison(maxima[:, :total, :size], inverse)


def _statistics(tokens_ref, *refs, tile, scale, dot):
    """Maximum, and 1 / sum of 2**((s - maximum) * scale), over the prompt, for each row of one layer and key head."""
    *limits_ref, q_ref, k_ref, most_ref, inverse_ref = refs
    column = pl.program_id(2)
    tokens = tokens_ref[pl.program_id(0)]

    @pl.when(column == 0)
    def _():
        most_ref[...] = jnp.full_like(most_ref, -1e38)
        inverse_ref[...] = jnp.zeros_like(inverse_ref)  # the sum, until the last step

    @pl.when(column * tile < tokens)
    def _():
        s = shown(dot(q_ref[...], k_ref[...]))
        slot = column * tile + lax.broadcasted_iota(jnp.int32, s.shape, 1)
        s = jnp.where(slot < (limits_ref[0][...] if limits_ref else tokens), s, -jnp.inf)
        most = jnp.maximum(most_ref[...], s.max(axis=1, keepdims=True))
        total = jnp.exp2((s - most) * scale).sum(axis=1, keepdims=True)
        inverse_ref[...] = inverse_ref[...] * jnp.exp2((most_ref[...] - most) * scale) + total
        most_ref[...] = most

    @pl.when(column == pl.num_programs(2) - 1)
    def _():
        inverse_ref[...] = 1 / inverse_ref[...]


def _maxima(tokens_ref, *refs, tile, scale, dot, limited, edge, halo, group, last):
    """Maximum over the layers and heads so far of the pooled probabilities of one tile of tokens."""
    limit_ref, refs = (refs[0], refs[1:]) if limited else (None, refs)
    q_ref, most_ref, inverse_ref, *k_refs, out_ref = refs
    pair = pl.program_id(2)
    first = pl.program_id(1) * tile
    tokens = tokens_ref[pl.program_id(0)]

    @pl.when(pair == 0)
    def _():
        out_ref[...] = jnp.zeros_like(out_ref)

    @pl.when(first < tokens)
    def _():
        s = dot(q_ref[...], jnp.concatenate([ref[...] for ref in k_refs], axis=0))
        slot = first - edge + lax.broadcasted_iota(jnp.int32, s.shape, 1)
        limit = tokens if limit_ref is None else limit_ref[...]
        p = jnp.where((slot >= 0) & (slot < limit), jnp.exp2((s - most_ref[...]) * scale) * inverse_ref[...], 0)
        if halo:
            p = _window_sums(p, 2 * halo + 1, edge - halo)[:, :tile]
        count = out_ref.shape[0]
        most = out_ref[...]
        for g in range(group):
            most = jnp.maximum(most, p[g * count : (g + 1) * count])
        out_ref[...] = most

    @pl.when(pair == last)
    def _():
        token = first + lax.broadcasted_iota(jnp.int32, out_ref.shape, 1)
        out_ref[...] = jnp.where(token < tokens, out_ref[...] / (2 * halo + 1), 0)


def _window_sums(p: jax.Array, width: int, offset: int) -> jax.Array:
    """Entry i is the sum of p[:, i + offset : i + offset + width], wrapping; by doubling, with lane rotations."""
    length = p.shape[1]

    def shifted(x: jax.Array, by: int) -> jax.Array:
        return pltpu.roll(x, length - by, 1) if by else x

    total, power = jnp.zeros_like(p), 1
    while power <= width:
        # Here p[:, i] is the sum of `power` entries from i on.
        if width & power:
            total = total + shifted(p, offset)
            offset += power
        p = p + shifted(p, power)
        power *= 2
    return total
