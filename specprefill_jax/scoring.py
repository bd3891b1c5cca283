"""From a look-ahead to the kept tokens of one prompt: what runs on the device between the two models."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specprefill_jax.importance import Heads, chunk_scores, token_importance
from specprefill_jax.kernels.chunk_topk import PADDING, Choice, chunk_topk
from specprefill_jax.speculator import LookAhead


@partial(
    jax.jit, static_argnames=("size", "pool_width", "chunk_size", "kept_size", "window", "heads", "backend", "mesh")
)
def score_and_choose(
    ahead: LookAhead,
    prompt: jax.Array,
    length: jax.Array,
    forced: jax.Array,
    chunks: jax.Array,
    kept_chunks: jax.Array,
    *,
    size: int,
    pool_width: int,
    chunk_size: int,
    kept_size: int,
    backend: str,
    window: bool = False,
    heads: Heads = (),
    mesh: Mesh | None = None,
) -> tuple[jax.Array, jax.Array, Choice, jax.Array, jax.Array]:
    """One prompt's importance [size], chunk scores [C], choice, number of queries that count, look-ahead tokens [Q].

    `window`: the queries are of a window, not of a look-ahead; `heads`: those that score (see `token_importance`).
    """
    importance = token_importance(
        ahead.cache.k,
        ahead.queries,
        length,
        ahead.num_queries,
        size=size,
        pool_width=pool_width,
        window=window,
        heads=heads,
        backend=backend,
        mesh=mesh,
    )
    scores = chunk_scores(importance, length, chunk_size=chunk_size)
    choice = chunk_topk(
        scores,
        forced,
        chunks,
        kept_chunks,
        length,
        prompt,
        chunk_size=chunk_size,
        size=kept_size,
        backend=backend,
        mesh=mesh,
    )
    rows = jax.tree.map(lambda row: row[0], (importance, scores, choice, ahead.num_queries, ahead.tokens))
    # The host reads them, in every process: each must hold them whole.
    return rows if mesh is None else lax.with_sharding_constraint(rows, NamedSharding(mesh, P()))


@partial(jax.jit, static_argnames="size")
def kept_batch(choice: Choice, *, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kept tokens [1, size], their positions [1, size], and how many they are [1]; zeros in the padding."""
    fill = (0, max(0, size - len(choice.kept_tokens)))
    tokens = jnp.pad(choice.kept_tokens, fill)[:size]
    positions = jnp.maximum(jnp.pad(choice.kept_indices, fill, constant_values=PADDING)[:size], 0)
    return tokens[None], positions[None], choice.kept_count[None]
