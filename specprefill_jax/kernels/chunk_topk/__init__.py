"""Chunk top-k: chunk scores -> the kept chunks, their tokens and positions, all on the device.

The budget is exact and ties go to the lower chunk, as in a stable descending sort, but there is no sort: a search over
the bits of the lowest kept score, then a prefix sum. So 131,072 chunks of one token are no special case.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specprefill_jax.errors import argument_error
from specprefill_jax.kernels.backend import Backend, choose_backend, run
from specprefill_jax.kernels.chunk_topk import reference
from specprefill_jax.kernels.chunk_topk.reference import PADDING, Choice, Scored

__all__ = ["PADDING", "Choice", "chunk_topk"]


def chunk_topk(
    scores: jax.Array,
    forced: jax.Array,
    num_chunks: jax.Array,
    kept_chunks: jax.Array,
    num_tokens: jax.Array,
    tokens: jax.Array,
    *,
    chunk_size: int,
    size: int,
    backend: Backend | str | None = None,
    mesh: Mesh | None = None,
) -> Choice:
    """Keep `kept_chunks` chunks of each prompt: the forced ones, then those of highest score, ties to the lower chunk.

    Args:
        scores: float32 [B, C] chunk scores; entries from num_chunks[b] on are ignored, whatever they hold.
        forced: bool [B, C], likewise; at most kept_chunks[b] are True.
        num_chunks: [B] int32, chunks of each prompt, 1 to C.
        kept_chunks: [B] int32, chunks to keep, 1 to num_chunks[b].
        num_tokens: [B] int32, tokens of each prompt; the last chunk may be short.
        tokens: int32 [B, S] token ids of the prompts.
        chunk_size: tokens a chunk (static).
        size: room for kept tokens (static).
        backend: implementation; None: the one for the platform.
        mesh: where the arrays lie, replicated: every device then makes the same choice. None: no mesh.

    Returns:
        `Choice`. -0.0 ties with 0.0; denormals count. A NaN ranks last, but clears `ok`, as do an infinite score, too
        many forced chunks, numbers that do not fit together and a `size` that is too small.

    Raises:
        ArgumentError: an unknown backend, or numbers that are not one a prompt.
    """
    chosen = choose_backend(backend, mesh)
    compute = partial(run, reference.chunk_topk, chosen, chunk_size=chunk_size, size=size)
    if mesh is not None:
        compute = jax.shard_map(compute, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    prompts = Scored(
        scores=jnp.asarray(scores, jnp.float32),
        forced=jnp.asarray(forced, jnp.bool_),
        num_chunks=jnp.asarray(num_chunks, jnp.int32),
        kept_chunks=jnp.asarray(kept_chunks, jnp.int32),
        num_tokens=jnp.asarray(num_tokens, jnp.int32),
        tokens=jnp.asarray(tokens, jnp.int32),
    )
    batch = len(prompts.scores)
    for name in ("num_chunks", "kept_chunks", "num_tokens"):
        if getattr(prompts, name).shape != (batch,):
            raise argument_error(name, getattr(prompts, name), f"of shape [{batch}], one number a prompt")
    return compute(prompts)
