"""Log-likelihood of a text after another, both read whole by the main model."""

import jax.numpy as jnp
import numpy as np

from specprefill_jax.cache import capacity_for
from specprefill_jax.errors import argument_error
from specprefill_jax.models.loaded import LoadedLlama
from specprefill_jax.prefill import padded, pieces
from specprefill_jax.sampling import token_logprobs


def log_likelihood(model: LoadedLlama, ids: np.ndarray, continuation: int, *, chunk: int) -> tuple[float, bool]:
    """How likely the last tokens of a text are after the others.

    Args:
        model: the model.
        ids: int32 [M], what comes before and the continuation.
        continuation: tokens of the continuation, 0 to M - 1.
        chunk: tokens a forward pass reads at most.

    Returns:
        The sum of the continuation's natural log-probabilities (float32 logits), and whether each of its tokens is the
        likeliest, so that greedy decoding would give it.
    """
    context = len(ids) - continuation
    if continuation < 0 or context < 1:
        raise argument_error("continuation", continuation, f"from 0 to {len(ids) - 1}, so that something comes before")
    if len(ids) - 1 > model.config.max_position_embeddings:
        raise argument_error("ids", len(ids), f"at most {model.config.max_position_embeddings + 1} tokens")
    if not continuation:
        return 0.0, True
    size = len(ids) - 1  # nothing is asked after the last token
    total = padded(size, chunk)
    tokens, positions = np.zeros((2, 1, total), np.int32)
    tokens[0, :size], positions[0, :size] = ids[:size], np.arange(size)
    following = np.zeros(total, np.int32)
    following[:size] = ids[1:]
    cache = model.new_cache(1, capacity_for(total))
    said, greedy = 0.0, True
    for offset, length in pieces(size, chunk):
        span = slice(offset, offset + length)
        start, last = np.full(1, offset, np.int32), np.full(1, length - 1, np.int32)
        put = model.put
        step = model.step(put(tokens[:, span]), put(positions[:, span]), cache, put(start), put(last), every=True)
        cache = step.cache
        first = max(context - 1 - offset, 0)
        count = min(offset + length, size) - offset
        if first >= count:
            continue  # nothing of the continuation is predicted here
        logits = model.logits(model.weights, step.hidden[0])
        chosen, likeliest, _ = token_logprobs(logits, jnp.asarray(following[span]), 1)
        said += float(np.asarray(chosen, np.float64)[first:count].sum())
        greedy &= bool(np.array_equal(np.asarray(likeliest)[first:count, 0], following[span][first:count]))
    return said, greedy
