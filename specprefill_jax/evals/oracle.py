"""The oracle: which parts of a prompt the true answer attends to, and how many of them a choice has found.

A model reads the prompt and then, token by token, its true answer. The attention of the answer's tokens, and of the
prompt's last one, over the prompt is aggregated by the rule of the method itself (arXiv 2502.02789, section 3). What
the main model says so is what a speculator, which has to guess the answer, should say: an answer-informed ground truth
in the sense of arXiv 2602.16054. It shows faults of a scorer that a benchmark's scores hide.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from specprefill_jax.adaptive import chunk_masses
from specprefill_jax.config import check_integer
from specprefill_jax.errors import SpecPrefillError, argument_error
from specprefill_jax.importance import chunk_scores, token_importance
from specprefill_jax.planning import num_chunks
from specprefill_jax.prefill import bucket
from specprefill_jax.speculator import Speculator

QUERY_BLOCK = 8
"""Queries that are scored in one go: answers of any length share a program, and its memory."""

_importance = jax.jit(token_importance, static_argnames=("size", "pool_width", "backend", "mesh"))


def oracle_chunks(
    reader: Speculator,
    ids: np.ndarray,
    answer_ids: Sequence[int],
    chunk_size: int,
    pool_width: int,
    *,
    backend: str | None = None,
) -> np.ndarray:
    """Chunk scores of a prompt by a model that knows the answer.

    Args:
        reader: reads with the model: `Speculator(pair.main, pair.prefill_chunk)` for the oracle, made once as it holds
            compiled programs; `pair.speculator` for what the speculator would say if it guessed right.
        ids: int32 [M] the whole prompt.
        answer_ids: the true answer's tokens, at least one; all of them are read, and all count.
        chunk_size: tokens a chunk.
        pool_width: odd, or 0 for no pooling.
        backend: of the scoring kernel, see `kernels.importance.pooled_maxima`.

    Returns:
        float32 [C].

    Raises:
        ArgumentError: nothing to read, or more than the model's context holds.
        SpecPrefillError: scores that are not finite.
    """
    model, tokens, count = reader.model, len(ids), len(answer_ids)
    check_integer("num_tokens", tokens, 1)
    check_integer("answer_tokens", count, 1)
    context = model.config.max_position_embeddings
    if tokens + count > context:
        raise argument_error(
            "num_tokens", tokens, f"at most {context - count}, with an answer of {count} tokens behind"
        )
    ahead = reader.read(ids, 1, (), room=count)
    cache, queries = ahead.cache, [ahead.queries[:, :, 0]]
    row = model.put(np.zeros((1,), np.int32))
    for i, token in enumerate(answer_ids):
        at = model.put(np.full((1,), tokens + i, np.int32))
        step = model.step(model.put(np.array([[token]], np.int32)), at[:, None], cache, at, row)
        cache = step.cache
        queries.append(jnp.stack(step.queries) if isinstance(step.queries, tuple) else step.queries)
    size, length = bucket(tokens), np.full((1,), tokens, np.int32)
    score = partial(_importance, size=size, pool_width=pool_width, backend=backend, mesh=model.mesh)
    total = jnp.zeros((1, size), jnp.float32)
    for first in range(0, len(queries), QUERY_BLOCK):
        block = queries[first : first + QUERY_BLOCK]
        some = len(block)
        # [L, 1, N, H] each -> [L, 1, QUERY_BLOCK, N, H]; what fills the last block does not count
        stacked = jnp.stack(block + [block[-1]] * (QUERY_BLOCK - some), axis=2)
        total += score(cache.k, stacked, length, np.full((1,), some, np.int32)) * some
    scores = chunk_scores(total / len(queries), length, chunk_size=min(chunk_size, size))
    found = np.asarray(scores[0, : num_chunks(tokens, chunk_size)])
    if not np.isfinite(found).all():
        raise SpecPrefillError("the oracle's chunk scores are not finite: the model's weights or dtype overflow")
    return found


def best_chunks(scores: np.ndarray, count: int) -> np.ndarray:
    """The `count` chunks of highest score, ties to the lower one, as bool [C]."""
    mask = np.zeros(len(scores), np.bool_)
    mask[np.argsort(-scores, kind="stable")[:count]] = True
    return mask


def recall(chosen: np.ndarray, best: np.ndarray) -> float:
    """The share of the oracle's chunks that were chosen, 0 to 1.

    Args:
        chosen: bool [C].
        best: bool [C], at least one; as many as `chosen` has, or a recall says little.
    """
    return float((chosen & best).sum() / best.sum())


def mass_recall(chosen: np.ndarray, scores: np.ndarray, num_tokens: int, chunk_size: int) -> float:
    """The share of the oracle's importance, summed over tokens, that the chosen chunks hold; 0 to 1.

    Args:
        chosen: bool [C].
        scores: the oracle's, float [C]: means over each chunk's tokens.
        num_tokens: M; the last chunk may be short.
        chunk_size: tokens a chunk.
    """
    mass = chunk_masses(scores, num_tokens, chunk_size)
    return float(mass[chosen].sum() / mass.sum())


def pearson(a: np.ndarray, b: np.ndarray) -> float | None:
    """Pearson's correlation of two arrays [C]; None where one of them does not vary."""
    a, b = (x.astype(np.float64) - x.mean(dtype=np.float64) for x in (a, b))
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    # A constant array is not exactly its mean.
    varies = all(np.ptp(x) > 0 for x in (a, b))
    return float(np.clip(a @ b / norm, -1.0, 1.0)) if varies and norm > 0 else None


def spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Spearman's rank correlation: Pearson's of the ranks, those of ties averaged."""
    return pearson(_ranks(a), _ranks(b))


def _ranks(x: np.ndarray) -> np.ndarray:
    _, place, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]
