"""Whether what is kept of a prompt suffices, as the speculator sees it: what keep rate "auto" goes by.

Scores tell which chunks matter most, not whether the best of them are enough: a prompt that hides one fact and one
whose words are to be counted are scored alike. So the speculator predicts its look-ahead tokens once more while it
attends to the kept part of its cache alone. Where its predictions stay, the rest was not needed; where they change even
with the most that may be kept, the prompt is information-dense. It takes a pass over the few look-ahead tokens for each
number of chunks that is tried. This is ours: the published method names its fixed rate as a limitation
(arXiv 2502.02789).
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from specprefill_jax.cache import KVCache, cache_spec, capacity_for
from specprefill_jax.kernels.chunk_topk import chunk_topk
from specprefill_jax.models.loaded import LoadedLlama, Weights
from specprefill_jax.speculator import LookAhead


class SelfCheck:
    """The check by one speculator; its programs depend on the prompt's bucket and the look-ahead alone."""

    def __init__(self, model: LoadedLlama, kernels: str):
        """Make one for a model, and kernels as `SpecPrefill.from_pretrained` takes them."""
        self.model = model
        self._kernels = kernels
        self._part = model.jit(self._part_fn, static_argnames=("chunk_size", "size", "capacity"))
        self._predict = model.jit(self._predict_fn)
        self._compare = model.jit(self._compare_fn, out_shardings=None if model.mesh is None else model.whole)

    def divergences(
        self,
        ahead: LookAhead,
        scores: jax.Array,
        prompt: np.ndarray,
        length: np.ndarray,
        forced: np.ndarray,
        chunks: np.ndarray,
        rungs: Sequence[int],
        *,
        chunk_size: int,
        size: int,
    ) -> dict[int, jax.Array]:
        """How far the predictions of the look-ahead tokens move when so many chunks are all that is attended to.

        Nothing waits for the device; one part of the cache at a time is copied.

        Args:
            ahead: of one prompt, with a contiguous cache.
            scores: float32 [C] of its chunks.
            prompt: int32 [1, S] token ids.
            length: int32 [1], tokens of the prompt.
            forced: bool [1, C], chunks that are always kept, the last one among them.
            chunks: int32 [1], chunks of the prompt.
            rungs: numbers of chunks to keep.
            chunk_size: tokens a chunk.
            size: room for the kept tokens of any rung.

        Returns:
            For each rung a float32 scalar: the mean over the look-ahead tokens of the Kullback-Leibler divergence, in
            nats, of what is predicted with the part from what was predicted with the whole. Nothing for a look-ahead
            of fewer than two tokens, or a window, which has none.
        """
        queries = ahead.tokens.shape[1]
        if not rungs or queries < 2:
            return {}
        before = self._predict(self.model.weights, ahead.hidden)
        capacity = capacity_for(size + queries)
        ends = np.arange(queries, dtype=np.int32)[None]
        found = {}
        for rung in rungs:
            tokens, positions, cache, start = self._part(
                ahead.cache.k,
                ahead.cache.v,
                scores,
                ahead.tokens,
                prompt,
                length,
                forced,
                chunks,
                np.full((1,), rung, np.int32),
                chunk_size=chunk_size,
                size=size,
                capacity=capacity,
            )
            step = self.model.step(tokens, positions, cache, start, ends)
            found[rung] = self._compare(self.model.weights, before, step.hidden, ahead.num_queries)
        return found

    def _part_fn(
        self,
        k: jax.Array,
        v: jax.Array,
        scores: jax.Array,
        generated: jax.Array,
        prompt: jax.Array,
        length: jax.Array,
        forced: jax.Array,
        chunks: jax.Array,
        kept_chunks: jax.Array,
        *,
        chunk_size: int,
        size: int,
        capacity: int,
    ) -> tuple[jax.Array, jax.Array, KVCache, jax.Array]:
        """What the queries' tokens are and where they stand, and the kept slots moved up to the cache's front.

        The first query is the prompt's last token, which is the last that is kept: it is fed again, over itself.
        """
        mesh = self.model.mesh
        choice = chunk_topk(
            scores[None],
            forced,
            chunks,
            kept_chunks,
            length,
            prompt,
            chunk_size=chunk_size,
            size=size,
            backend=self._kernels,
            mesh=mesh,
        )
        slots = jnp.maximum(jnp.pad(choice.kept_indices[0], (0, capacity - size)), 0)
        cache = KVCache(jnp.take(k, slots, axis=3), jnp.take(v, slots, axis=3), slots[None])
        if mesh is not None:
            placed = jax.tree.map(partial(NamedSharding, mesh), cache_spec(mesh, 1))
            cache = lax.with_sharding_constraint(cache, placed)
        last = prompt[:, length[0] - 1][:, None]
        positions = length[:, None] - 1 + jnp.arange(generated.shape[1], dtype=jnp.int32)
        return jnp.concatenate([last, generated[:, :-1]], axis=1), positions, cache, choice.kept_count - 1

    def _predict_fn(self, weights: Weights, hidden: jax.Array) -> jax.Array:
        """Log-probabilities float32 [Q, V] from hidden states [1, Q, E]."""
        return jax.nn.log_softmax(self.model.logits_fn(weights, hidden[0]).astype(jnp.float32))

    def _compare_fn(self, weights: Weights, before: jax.Array, hidden: jax.Array, num_queries: jax.Array) -> jax.Array:
        """Log-probabilities by the whole, hidden states by the part, how many count [1] -> mean divergence."""
        each = (jnp.exp(before) * (before - self._predict_fn(weights, hidden))).sum(axis=-1)
        counts = jnp.arange(len(each)) < num_queries[0]
        return jnp.where(counts, each, 0.0).sum() / num_queries[0]
