"""Prefill in pieces: any number of tokens, at explicit positions, by few compiled programs.

Sparse prefill is plain causal attention over compacted tokens: token j of the kept ones goes to slot j, while RoPE
turns it to its original position (method of arXiv 2502.02789, section 3).
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from specprefill_jax.errors import argument_error
from specprefill_jax.models.loaded import LoadedLlama, Step

Last = tuple[jax.Array, jax.Array | tuple[jax.Array, ...]]
"""Hidden state and queries of each row's last real token, or of its last ones, as in `Step`."""

DEFAULT_CHUNK = 1024
"""Tokens a forward pass reads at most, unless told otherwise: bounds the memory of activations."""


def bucket(tokens: int) -> int:
    """The compiled length that serves `tokens`: a multiple of 16 up to 128, from there on eight lengths an octave.

    At most an eighth of a piece is padding, and a model has at most 32 lengths up to 1,024 tokens.
    """
    step = 1 << max(4, (tokens - 1).bit_length() - 4)
    return -(-tokens // step) * step


def pieces(tokens: int, chunk: int) -> list[tuple[int, int]]:
    """(offset, length) of the passes that read `tokens`: whole chunks, then the rest in its bucket."""
    whole = tokens // chunk
    parts = [(i * chunk, chunk) for i in range(whole)]
    rest = tokens - whole * chunk
    if rest:
        parts.append((whole * chunk, min(bucket(rest), chunk)))
    return parts


def padded(tokens: int, chunk: int) -> int:
    """Slots that a prefill of `tokens` writes, padding included."""
    offset, length = pieces(tokens, chunk)[-1]
    return offset + length


def prefill(
    model: LoadedLlama,
    tokens: jax.Array,
    positions: jax.Array,
    count: ArrayLike,
    *,
    size: int,
    capacity: int,
    chunk: int,
    window: int = 0,
) -> Step:
    """Read tokens into a new cache.

    Args:
        model: the model.
        tokens: [B, P] int32, P = padded(size, chunk).
        positions: [B, P] int32, where each token stood in the prompt; anything in the padding.
        count: [B] int32, real tokens of each row, 1 to `size`; it may live on the device, unknown to the host.
        size: tokens to read at most (host).
        capacity: slots of the new cache, at least P.
        chunk: tokens a pass reads at most.
        window: real tokens at the end whose hidden states and queries are wanted; 0: the last one's, without an axis.
            Where a row has fewer, the first entries mean nothing.

    Returns:
        The last real token's hidden state and queries, and the cache: slot j of row b holds token j for j < count[b].
    """
    if tokens.shape[1] != padded(size, chunk) or capacity < tokens.shape[1]:
        # XLA would silently shift a slice that does not fit.
        raise argument_error("tokens", tokens.shape, f"[B, {padded(size, chunk)}], and at most {capacity} slots long")
    cache = model.new_cache(tokens.shape[0], capacity)
    last: Last | None = None
    for offset, length in pieces(size, chunk):
        start = np.full((tokens.shape[0],), offset, np.int32)
        piece, at, row = _cut(tokens, positions, count, start, length=length, window=window)
        step = model.step(piece, at, cache, start, row)
        cache = step.cache
        found = (step.hidden, step.queries)
        # The last real token may be in the last piece but one where the host knows only a bound of `count`.
        last = found if last is None else later(last, found, count, start, window=window)
    assert last is not None
    return Step(*last, cache)


def last_tokens(count: ArrayLike, start: ArrayLike, window: int) -> jax.Array:
    """Where the last tokens of rows of `count` [B] stand in a piece from `start` [B] on: [B], or [B, window]."""
    ahead = jnp.subtract(count, start)
    return ahead - 1 if not window else ahead[:, None] + jnp.arange(-window, 0)


@partial(jax.jit, static_argnames=("length", "window"))
def _cut(
    tokens: jax.Array, positions: jax.Array, count: ArrayLike, start: ArrayLike, *, length: int, window: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    offset = jnp.asarray(start)[0]
    piece = lax.dynamic_slice_in_dim(tokens, offset, length, axis=1)
    at = lax.dynamic_slice_in_dim(positions, offset, length, axis=1)
    return piece, at, jnp.clip(last_tokens(count, start, window), 0, length - 1)


@partial(jax.jit, static_argnames="window")
def later(old: Last, new: Last, count: ArrayLike, start: ArrayLike, *, window: int) -> Last:
    """`new` for those of the last tokens that are in the piece from `start` [B] on, `old` for the others."""
    reached = last_tokens(count, start, window) >= 0

    def pick(new: jax.Array, old: jax.Array, batch_axis: int) -> jax.Array:
        shape = [1] * new.ndim
        shape[batch_axis : batch_axis + reached.ndim] = reached.shape
        return jnp.where(reached.reshape(shape), new, old)

    queries_axis = 1 if isinstance(new[1], jax.Array) else 0
    return pick(new[0], old[0], 0), jax.tree.map(lambda n, o: pick(n, o, queries_axis), new[1], old[1])
