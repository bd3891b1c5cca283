"""What chunk top-k computes, in plain JAX; see the package's docstring."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

PADDING = -1
"""Value of `Choice.kept_chunk_ids` and `Choice.kept_indices` past the last kept one."""

STEPS = 32
"""Steps of the search: one a bit of a key."""


class Scored(NamedTuple):
    """A batch of scored prompts, as `kernels.chunk_topk.chunk_topk` takes them."""

    scores: jax.Array
    forced: jax.Array
    num_chunks: jax.Array
    kept_chunks: jax.Array
    num_tokens: jax.Array
    tokens: jax.Array


class Choice(NamedTuple):
    """The kept chunks and tokens of a batch of prompts, or of one prompt (then without B)."""

    kept_chunk_ids: jax.Array
    """int32 [B, ceil(size / chunk_size)] (at most C): ids of the kept chunks, ascending, then `PADDING`."""
    kept_chunk_mask: jax.Array
    """bool [B, C]: the kept chunks."""
    kept_indices: jax.Array
    """int32 [B, size]: their tokens' positions in the prompt, ascending, then `PADDING`."""
    kept_tokens: jax.Array
    """int32 [B, size]: the token ids there, then 0."""
    kept_count: jax.Array
    """int32 [B]: how many they are."""
    ok: jax.Array
    """bool [B]: False if a score was NaN or infinite, or the arguments do not fit together."""


def chunk_topk(prompts: Scored, *, chunk_size: int, size: int) -> Choice:
    """As `kernels.chunk_topk.chunk_topk`."""
    mask = jax.vmap(_kept)(*prompts[:4])
    return expand(mask, prompts, chunk_size=chunk_size, size=size)


def order_key(scores: jax.Array, forced: jax.Array, chunk: jax.Array, num_chunks: jax.Array) -> jax.Array:
    """uint32 keys in the order of the scores: 0 past the prompt, then 1 for NaN, above all the forced chunks.

    Elementwise; zeros meet in the integer domain, where nothing flushes denormals.
    """
    bits = lax.bitcast_convert_type(scores, jnp.uint32)
    magnitude = bits & jnp.uint32(0x7FFFFFFF)
    bits = jnp.where(magnitude == 0, jnp.uint32(0), bits)
    key = jnp.where(bits >= jnp.uint32(1 << 31), ~bits, bits | jnp.uint32(1 << 31))
    key = jnp.where(magnitude > jnp.uint32(0x7F800000), jnp.uint32(1), key)
    key = jnp.where(forced, jnp.uint32(0xFFFFFFFF), key)
    return jnp.where(chunk < num_chunks, key, jnp.uint32(0))


def _kept(scores: jax.Array, forced: jax.Array, num_chunks: jax.Array, kept_chunks: jax.Array) -> jax.Array:
    """The kept chunks of one prompt, bool [C]."""
    chunk = jnp.arange(scores.shape[0], dtype=jnp.int32)
    key = order_key(scores, forced, chunk, num_chunks)

    def search(step: jax.Array, lowest: jax.Array) -> jax.Array:
        candidate = lowest | (jnp.uint32(1) << (STEPS - 1 - step).astype(jnp.uint32))
        return jnp.where(jnp.sum(key >= candidate, dtype=jnp.int32) >= kept_chunks, candidate, lowest)

    lowest = lax.fori_loop(0, STEPS, search, jnp.uint32(0))
    above = key > lowest
    ties = (key == lowest) & (chunk < num_chunks)
    room = kept_chunks - jnp.sum(above, dtype=jnp.int32)
    return above | (ties & (jnp.cumsum(ties, dtype=jnp.int32) <= room))


def expand(mask: jax.Array, prompts: Scored, *, chunk_size: int, size: int) -> Choice:
    """The choice that keeps the chunks of `mask`, bool [B, C]."""
    padded = mask.shape[1]
    slots = min(-(-size // chunk_size), padded)

    def ids(mask: jax.Array) -> jax.Array:
        slot = jnp.where(mask, jnp.cumsum(mask, dtype=jnp.int32) - 1, slots)
        empty = jnp.full(slots, PADDING, jnp.int32)
        return empty.at[slot].set(jnp.arange(padded, dtype=jnp.int32), mode="drop")

    kept = jax.vmap(ids)(mask)
    count = kept_token_count(mask, prompts.num_tokens, chunk_size)
    # [B, slots] -> [B, size]; only the last kept chunk can be short, so padding is at the end alone
    token = jnp.arange(size, dtype=jnp.int32)
    indices = kept[:, jnp.minimum(token // chunk_size, slots - 1)] * chunk_size + token % chunk_size
    inside = token < count[:, None]
    indices = jnp.where(inside, indices, PADDING)
    out = jnp.where(inside, jnp.take_along_axis(prompts.tokens, jnp.maximum(indices, 0), axis=1), 0)
    ok = fits(prompts, count, chunk_size=chunk_size, size=size)
    return Choice(kept, mask, indices, out, jnp.minimum(count, size), ok)


def kept_token_count(mask: jax.Array, num_tokens: jax.Array, chunk_size: int) -> jax.Array:
    """Tokens of the kept chunks, int32 [B]."""
    start = jnp.arange(mask.shape[1], dtype=jnp.int32) * chunk_size
    return jnp.sum(jnp.where(mask, jnp.minimum(num_tokens[:, None] - start, chunk_size), 0), axis=1, dtype=jnp.int32)


def fits(prompts: Scored, count: jax.Array, *, chunk_size: int, size: int) -> jax.Array:
    """Whether scores are finite and the numbers fit together, bool [B]; `count` is of the kept tokens."""
    scores, forced, num_chunks, kept_chunks, num_tokens, tokens = prompts
    padded = scores.shape[1]
    valid = jnp.arange(padded) < num_chunks[:, None]
    return (
        jnp.all(jnp.isfinite(scores) | ~valid, axis=1)
        & (jnp.sum(forced & valid, axis=1, dtype=jnp.int32) <= kept_chunks)
        & (kept_chunks >= 1)
        & (kept_chunks <= num_chunks)
        & (num_chunks <= padded)
        & (num_tokens > (num_chunks - 1) * chunk_size)
        & (num_tokens <= num_chunks * chunk_size)
        & (num_tokens <= tokens.shape[1])
        & (count <= size)
    )
