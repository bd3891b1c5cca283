"""Chunk top-k for one prompt without a batch axis, as most tests want it."""

from functools import partial

import jax
import jax.numpy as jnp

from specprefill_jax.kernels.chunk_topk import Choice, chunk_topk


@partial(jax.jit, static_argnames=("chunk_size", "size"))
def choose(scores, forced, num_chunks, kept_chunks, num_tokens, *, chunk_size: int, size: int) -> Choice:
    scores, forced = jnp.asarray(scores), jnp.asarray(forced)
    numbers = (jnp.asarray(x)[None] for x in (num_chunks, kept_chunks, num_tokens))
    tokens = jnp.arange(len(scores) * chunk_size, dtype=jnp.int32)[None]
    choice = chunk_topk(scores[None], forced[None], *numbers, tokens, chunk_size=chunk_size, size=size)
    return jax.tree.map(lambda x: x[0], choice)


def choice_of(mask, kept_indices) -> Choice:
    """A choice made elsewhere, as a selection takes it; the view and the selection look at no more than this."""
    return Choice(
        kept_chunk_ids=None, kept_chunk_mask=mask, kept_indices=kept_indices, kept_tokens=None,
        kept_count=len(kept_indices), ok=True,
    )  # fmt: skip
