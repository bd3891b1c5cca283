"""Chunk top-k with Pallas through Mosaic, for TPUs: one program a prompt, its scores in VMEM.

The kernel finds the kept chunks: the search over the bits, and the prefix sum over the ties as products with triangles
of ones. TPUs have no scatter, so XLA expands the mask into ids and tokens.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specprefill_jax.kernels.backend import Unsupported
from specprefill_jax.kernels.chunk_topk.reference import STEPS, Choice, Scored, expand, order_key

LANES = 128
MAX_CHUNKS = 2**18
"""Beyond, the triangle over rows of 128 chunks would not fit into VMEM."""


def chunk_topk(prompts: Scored, *, chunk_size: int, size: int, interpret: bool) -> Choice:
    """As `kernels.chunk_topk.chunk_topk`.

    Raises:
        Unsupported: more than MAX_CHUNKS chunks.
    """
    batch, padded = prompts.scores.shape
    if padded > MAX_CHUNKS:
        raise Unsupported(f"{padded} chunks, more than {MAX_CHUNKS}")
    rows = -(-padded // (8 * LANES)) * 8

    def tiled(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, 0), (0, rows * LANES - padded))).reshape(batch, rows, LANES)

    block = pl.BlockSpec((None, rows, LANES), lambda b, *_: (b, 0, 0))
    mask = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2, grid=(batch,), in_specs=[block, block], out_specs=block
        ),
        out_shape=jax.ShapeDtypeStruct((batch, rows, LANES), jnp.int32),
        interpret=interpret,
        name="chunk_topk",
    )(
        jnp.minimum(prompts.num_chunks, padded),
        prompts.kept_chunks,
        tiled(prompts.scores),
        tiled(prompts.forced.astype(jnp.int32)),
    )
    mask = mask.reshape(batch, rows * LANES)[:, :padded] != 0
    return expand(mask, prompts, chunk_size=chunk_size, size=size)


def _kernel(chunks_ref, kept_ref, scores_ref, forced_ref, mask_ref):
    b = pl.program_id(0)
    kept = kept_ref[b].astype(jnp.float32)
    shape = scores_ref.shape
    chunk = lax.broadcasted_iota(jnp.int32, shape, 0) * LANES + lax.broadcasted_iota(jnp.int32, shape, 1)
    key = order_key(scores_ref[...], forced_ref[...] != 0, chunk, chunks_ref[b])

    def count(mask: jax.Array) -> jax.Array:
        """How many are True; exact in float32, which TPUs add."""
        return jnp.sum(jnp.where(mask, 1.0, 0.0))

    def search(step, lowest):
        candidate = lowest | (jnp.uint32(1) << (STEPS - 1 - step).astype(jnp.uint32))
        return jnp.where(count(key >= candidate) >= kept, candidate, lowest)

    lowest = lax.fori_loop(0, STEPS, search, jnp.uint32(0))
    above = key > lowest
    ties = (key == lowest) & (chunk < chunks_ref[b])
    room = kept - count(above)
    mask_ref[...] = jnp.where(above | (ties & (_prefix_sums(jnp.where(ties, 1.0, 0.0)) <= room)), 1, 0)


def _prefix_sums(x: jax.Array) -> jax.Array:
    """Inclusive sums of zeros and ones [rows, LANES] in row-major order; exact: no factor exceeds 128."""
    rows = x.shape[0]
    dot = partial(jnp.dot, preferred_element_type=jnp.float32)
    row, column = (lax.broadcasted_iota(jnp.int32, (LANES, LANES), axis) for axis in (0, 1))
    within = dot(x.astype(jnp.bfloat16), jnp.where(row <= column, 1.0, 0.0).astype(jnp.bfloat16))
    row, column = (lax.broadcasted_iota(jnp.int32, (rows, rows), axis) for axis in (0, 1))
    totals = jnp.broadcast_to(within[:, LANES - 1 :], x.shape).astype(jnp.bfloat16)
    return within + dot(jnp.where(column < row, 1.0, 0.0).astype(jnp.bfloat16), totals)
