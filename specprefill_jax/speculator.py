"""The speculator: reads the whole prompt, then decodes a few look-ahead tokens on the device.

What it leaves are the queries that score the prompt and its cache, whose keys they are scored against
(arXiv 2502.02789, section 3.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specprefill_jax.cache import capacity_for
from specprefill_jax.models.loaded import Cache, LoadedLlama, Step, Weights
from specprefill_jax.prefill import padded, prefill

MAX_EOS_IDS = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LookAhead:
    """What the speculator leaves behind; all of it on the device."""

    queries: jax.Array
    """[L, B, Q, N, H] post-RoPE queries: of the last prompt token, then of the first Q-1 generated tokens; of a window,
    of the prompt's last Q tokens."""
    cache: Any
    """Its cache, `KVCache` or `PagedCache`; slot i holds prompt token i, generated tokens follow."""
    tokens: jax.Array
    """[B, Q] int32 greedy tokens; the last is never fed back. [B, 0] of a window."""
    num_queries: jax.Array
    """[B] int32, queries that count: up to and with the one that produced an end of sequence; of a window, the last so
    many."""
    hidden: jax.Array
    """[B, Q, E] float32 hidden states that the tokens were predicted from; of a window, those of its tokens."""

    def first(self, count: int) -> "LookAhead":
        """What a look-ahead of `count` queries would have left, if that is fewer; not of a window."""
        if count >= self.queries.shape[2]:
            return self
        queries, tokens, num_queries, hidden = _first(
            self.queries, self.tokens, self.num_queries, self.hidden, count=count
        )
        return LookAhead(queries, self.cache, tokens, num_queries, hidden)


class Speculator:
    """A small Llama with its compiled look-ahead."""

    def __init__(self, model: LoadedLlama, chunk: int):
        self.model = model
        self.chunk = chunk
        self.decode = model.jit(self._decode_fn, static_argnames="count", donate_argnames="cache")
        """Compiled look-ahead of a scanned model: see `_decode_fn`."""
        self._greedy = model.jit(self._greedy_fn)
        self._collect = jax.jit(_collect)

    def read(
        self,
        tokens: np.ndarray,
        look_ahead: int,
        eos_token_ids: tuple[int, ...],
        *,
        room: int = 0,
        window: int = 0,
    ) -> LookAhead:
        """Prefill one prompt and look ahead; nothing waits for the device.

        Args:
            tokens: int32 [M] token ids, M >= 1.
            look_ahead: Q, the number of queries; Q - 1 decode steps.
            eos_token_ids: ids that end the look-ahead, at most MAX_EOS_IDS.
            room: slots to have behind the prompt, at least.
            window: take the queries of so many of the prompt's last tokens, and do not look ahead. 0: look ahead.
        """
        size = len(tokens)
        total = padded(size, self.chunk)
        ids = np.zeros((1, total), np.int32)
        ids[0, :size] = tokens
        step = prefill(
            self.model,
            self.model.put(ids),
            self.model.put(np.arange(total, dtype=np.int32)[None]),
            self.model.put(np.full((1,), size, np.int32)),
            size=size,
            capacity=capacity_for(max(total, size + max(0 if window else look_ahead - 1, room))),
            chunk=self.chunk,
            window=window,
        )
        if window:
            queries, generated, count = window_queries(step.queries, np.full((1,), size, np.int32))
            return LookAhead(queries, step.cache, generated, count, step.hidden)
        return self.look_ahead(step, np.full((1,), size, np.int32), [eos_token_ids], look_ahead)

    def look_ahead(
        self, step: Step, lengths: np.ndarray, eos_token_ids: Sequence[Sequence[int]], count: int
    ) -> LookAhead:
        """Decode greedily from where a prefill ended; nothing waits for the device.

        Args:
            step: of B prompts' last tokens; its cache is consumed.
            lengths: int32 [B] tokens of each prompt.
            eos_token_ids: of each prompt, ids that end its look-ahead, at most MAX_EOS_IDS.
            count: Q, the number of queries; Q - 1 decode steps.
        """
        ends = np.full((len(lengths), MAX_EOS_IDS), -1, np.int32)
        for row, ids in zip(ends, eos_token_ids, strict=True):
            row[: len(ids)] = ids
        if self.model.layerwise:
            return self._decode_layerwise(step, lengths, ends, count)
        return self.decode(self.model.weights, step.hidden, step.queries, step.cache, lengths, ends, count=count)

    def _decode_layerwise(self, step: Step, lengths: np.ndarray, ends: np.ndarray, count: int) -> LookAhead:
        """The same loop driven by the host, which never waits: unrolled layers would take XLA half a minute."""
        row = np.zeros_like(lengths)
        queries, hidden, tokens = [step.queries], [step.hidden], [self._greedy(self.model.weights, step.hidden)]
        for i in range(count - 1):
            at = lengths + np.int32(i)
            step = self.model.step(tokens[-1][:, None], at[:, None], step.cache, at, row)
            queries.append(step.queries)
            hidden.append(step.hidden)
            tokens.append(self._greedy(self.model.weights, step.hidden))
        stacked, out, valid, states = self._collect(queries, tokens, hidden, ends)
        return LookAhead(stacked, step.cache, out, valid, states)

    def _greedy_fn(self, weights: Weights, hidden: jax.Array) -> jax.Array:
        """The likeliest next token of each row, [B] int32."""
        return jnp.argmax(self.model.logits_fn(weights, hidden), axis=-1).astype(jnp.int32)

    def _decode_fn(
        self,
        weights: Weights,
        hidden: jax.Array,
        queries: jax.Array | tuple[jax.Array, ...],
        cache: Cache,
        length: jax.Array,
        eos: jax.Array,
        *,
        count: int,
    ) -> LookAhead:
        """Greedy look-ahead as one `lax.scan`, for a scanned model."""

        def step(carry: tuple[jax.Array, Cache, jax.Array], _: None) -> tuple[tuple, tuple]:
            token, cache, at = carry
            done = self.model.run(weights, token[:, None], at[:, None], cache, at, jnp.zeros_like(at))
            token = self._greedy_fn(weights, done.hidden)
            return (token, done.cache, at + 1), (token, done.queries, done.hidden)

        first = self._greedy_fn(weights, hidden)
        (_, cache, _), (tokens, later, states) = lax.scan(step, (first, cache, length), length=count - 1)
        stacked, out, valid, states = _collect([queries, *later], [first, *tokens], [hidden, *states], eos)
        return LookAhead(stacked, cache, out, valid, states)


@partial(jax.jit, static_argnames="count")
def _first(
    queries: jax.Array, tokens: jax.Array, num_queries: jax.Array, hidden: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The first `count` of each row's queries and tokens, how many of them count [B], and their hidden states."""
    return queries[:, :, :count], tokens[:, :count], jnp.minimum(num_queries, count), hidden[:, :count]


@jax.jit
def window_queries(
    queries: jax.Array | tuple[jax.Array, ...], lengths: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries of the last W tokens, as of `prefill` -> [L, B, W, N, H], tokens [B, 0], how many count [B]."""
    stacked = jnp.stack(queries) if isinstance(queries, tuple) else queries
    batch, window = stacked.shape[1:3]
    return stacked, jnp.zeros((batch, 0), jnp.int32), jnp.minimum(lengths, window)


def _collect(
    queries: Sequence[jax.Array | tuple[jax.Array, ...]],
    tokens: Sequence[jax.Array],
    hidden: Sequence[jax.Array],
    eos: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Q steps' queries, tokens [B] and hidden states [B, E] -> queries [L, B, Q, N, H], tokens [B, Q], how many queries
    count [B], hidden states [B, Q, E]."""
    stacked = jnp.stack([jnp.stack(q) if isinstance(q, tuple) else q for q in queries], axis=2)
    out = jnp.stack(tokens, axis=1)
    ended = (out[:, :, None] == eos[:, None]).any(-1)
    # Queries after the first end of sequence do not count; the one that produced it does.
    before = jnp.cumsum(ended, axis=1) - ended == 0
    return stacked, out, before.sum(axis=1, dtype=jnp.int32), jnp.stack(hidden, axis=1)
