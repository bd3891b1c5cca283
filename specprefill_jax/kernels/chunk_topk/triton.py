"""Chunk top-k with Pallas through Triton, for NVIDIA GPUs: one program a prompt.

A tile of chunks is held in registers; more chunks than that are read again, from the L1 or L2 cache, at each step of
the search. Every kept chunk then writes its own id, positions and tokens where its rank puts them.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from specprefill_jax.kernels.chunk_topk.reference import (
    PADDING,
    STEPS,
    Choice,
    Scored,
    fits,
    kept_token_count,
    order_key,
)

TILE = 2048
"""Chunks a step, at most: 8 for each of 256 threads. (Twice as many compile for 20 s: the prefix sum is unrolled.)"""


def chunk_topk(prompts: Scored, *, chunk_size: int, size: int, interpret: bool) -> Choice:
    """As `kernels.chunk_topk.chunk_topk`."""
    scores, forced, num_chunks, kept_chunks, num_tokens, tokens = prompts
    batch, padded = scores.shape
    slots = min(-(-size // chunk_size), padded)
    tile = min(TILE, max(1 << (padded - 1).bit_length(), 32))
    tiles = -(-padded // tile)
    room = tiles * tile
    filled = [(0, 0), (0, room - padded)]
    wide = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    ids, mask, indices, out = pl.pallas_call(
        partial(_kernel, tile=tile, tiles=tiles, slots=slots, size=size, chunk_size=chunk_size),
        grid=(batch,),
        out_shape=(wide((batch, slots)), wide((batch, room)), wide((batch, size)), wide((batch, size))),
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        interpret=interpret,
        name="chunk_topk",
    )(
        jnp.pad(scores, filled),
        jnp.pad(forced.astype(jnp.int32), filled),
        jnp.minimum(num_chunks, padded),
        kept_chunks,
        jnp.minimum(num_tokens, tokens.shape[1]),
        tokens,
    )
    kept = mask[:, :padded] != 0
    count = kept_token_count(kept, num_tokens, chunk_size)
    ok = fits(prompts, count, chunk_size=chunk_size, size=size)
    chunks = jnp.sum(kept, axis=1, dtype=jnp.int32)
    inside = jnp.arange(size) < count[:, None]
    return Choice(
        jnp.where(jnp.arange(slots) < chunks[:, None], ids, PADDING),
        kept,
        jnp.where(inside, indices, PADDING),
        jnp.where(inside, out, 0),
        jnp.minimum(count, size),
        ok,
    )


def _kernel(
    scores_ref,
    forced_ref,
    chunks_ref,
    kept_ref,
    length_ref,
    tokens_ref,
    ids_ref,
    mask_ref,
    indices_ref,
    out_ref,
    *,
    tile,
    tiles,
    slots,
    size,
    chunk_size,
):
    b = pl.program_id(0)
    num_chunks, kept, length = chunks_ref[b], kept_ref[b], length_ref[b]

    def load(i):
        """Ids and keys of a tile's chunks."""
        chunk = i * tile + jnp.arange(tile, dtype=jnp.int32)
        at = (b, pl.ds(i * tile, tile))
        return chunk, order_key(scores_ref[at], forced_ref[at] != 0, chunk, num_chunks)

    held = load(0)

    def read(i):
        return held if tiles == 1 else load(i)

    def count(compare, bound):
        def add(i, total):
            return total + jnp.sum(compare(read(i)[1], bound).astype(jnp.int32))

        return lax.fori_loop(0, tiles, add, jnp.int32(0))

    def search(step, lowest):
        candidate = lowest | (jnp.uint32(1) << (STEPS - 1 - step).astype(jnp.uint32))
        return jnp.where(count(lax.ge, candidate) >= kept, candidate, lowest)

    lowest = lax.fori_loop(0, STEPS, search, jnp.uint32(0))
    room = kept - count(lax.gt, lowest)

    def emit(i, carry):
        before, ties_before = carry
        chunk, key = read(i)
        ties = ((key == lowest) & (chunk < num_chunks)).astype(jnp.int32)
        mask = (key > lowest) | ((ties > 0) & (ties_before + jnp.cumsum(ties) <= room))
        rank = before + jnp.cumsum(mask.astype(jnp.int32)) - 1
        mask_ref[b, pl.ds(i * tile, tile)] = mask.astype(jnp.int32)
        # The interpreter writes old values back where the mask is off: those go past the end, where it drops them.
        inside = mask & (rank < slots)
        plgpu.store(ids_ref.at[b, jnp.where(inside, rank, slots)], chunk, mask=inside)

        def token(j, _):
            source, target = chunk * chunk_size + j, rank * chunk_size + j
            inside = mask & (source < length) & (target < size)
            value = plgpu.load(tokens_ref.at[b, source], mask=inside, other=0)
            target = jnp.where(inside, target, size)
            plgpu.store(indices_ref.at[b, target], source, mask=inside)
            plgpu.store(out_ref.at[b, target], value, mask=inside)

        lax.fori_loop(0, chunk_size, token, None)
        return before + jnp.sum(mask.astype(jnp.int32)), ties_before + jnp.sum(ties)

    lax.fori_loop(0, tiles, emit, (jnp.int32(0), jnp.int32(0)))
