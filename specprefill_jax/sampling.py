"""From logits to tokens, a batch at a time: repetition penalty, temperature, top-k, top-p, min-p, log-probabilities.

Stages and their order are transformers'. Every setting is an array with one value per row, so that nothing compiles
again when a request changes it, and a stage that no row wants costs nothing. There is no sort: the smallest logit that
top-k or top-p keeps is found by halving the range of float32 numbers, 32 masked sums whatever the vocabulary's size.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from specprefill_jax.errors import argument_error


class SamplingArrays(NamedTuple):
    """The settings of B requests, as the compiled functions take them."""

    temperature: Array  # [B] float32; 0 is greedy
    top_k: Array  # [B] int32; 0 is off
    top_p: Array  # [B] float32; 1 is off
    min_p: Array  # [B] float32; 0 is off
    repetition_penalty: Array  # [B] float32; 1 is off
    key: Array  # [B, 2] uint32: the request's seed


def sampling_arrays(
    temperature: Sequence[float],
    top_k: Sequence[int | None] | None = None,
    top_p: Sequence[float] | None = None,
    min_p: Sequence[float] | None = None,
    repetition_penalty: Sequence[float] | None = None,
    seed: Sequence[int | None] | None = None,
    *,
    put: Callable[[np.ndarray], Array] = jnp.asarray,
) -> SamplingArrays:
    """Gather plain settings, one entry per row; what is left out is off. A seed of None draws a fresh one.
    `put` takes the host's arrays to where they are used.

    Raises ArgumentError when the lists differ in length. Values are checked where they come from (SamplingParams).
    """
    rows = len(temperature)

    def column[T](name: str, values: Sequence[T] | None, off: T) -> list[T]:
        if values is not None and len(values) != rows:
            raise argument_error(name, values, f"a list of {rows} values, as many as temperature has")
        return [off] * rows if values is None else list(values)

    seeds = [secrets.randbits(64) if value is None else value % (1 << 64) for value in column("seed", seed, None)]
    # top_k beyond int32 keeps everything, as off does.
    limits = [min(value or 0, np.iinfo(np.int32).max) for value in column("top_k", top_k, None)]
    return SamplingArrays(
        temperature=put(np.asarray(temperature, np.float32)),
        top_k=put(np.asarray(limits, np.int32)),
        top_p=put(np.asarray(column("top_p", top_p, 1.0), np.float32)),
        min_p=put(np.asarray(column("min_p", min_p, 0.0), np.float32)),
        repetition_penalty=put(np.asarray(column("repetition_penalty", repetition_penalty, 1.0), np.float32)),
        key=put(np.asarray([(value >> 32, value & 0xFFFFFFFF) for value in seeds], np.uint32).reshape(rows, 2)),
    )


def seen_tokens(ids: Array, lengths: Array, vocab_size: int) -> Array:
    """Mask [B, V] bool of the tokens in the first `lengths` [B] of `ids` [B, T], for the repetition penalty."""
    inside = jnp.arange(ids.shape[1]) < lengths[:, None]
    rows = jnp.arange(ids.shape[0])[:, None]
    # Padding is sent past the end of the vocabulary, where the scatter drops it.
    columns = jnp.where(inside, ids, vocab_size)
    return jnp.zeros((ids.shape[0], vocab_size), bool).at[rows, columns].set(True, mode="drop")


def mark_seen(seen: Array, tokens: Array) -> Array:
    """`seen` [B, V] with the newly generated `tokens` [B] added."""
    return seen.at[jnp.arange(seen.shape[0]), tokens].set(True)


def filter_logits(logits: Array, settings: SamplingArrays, seen: Array | None = None) -> Array:
    """Logits [B, V] float32 after all stages, -inf where a token is ruled out; sampling draws from their softmax.

    `seen` [B, V] bool is what the repetition penalty applies to; without it there is none. Rows with temperature 0 are
    not scaled. Tokens with equal logits are kept or dropped together (transformers picks some of them by sorting).
    """
    scaled = _penalise(logits.astype(jnp.float32), settings, seen)
    scaled = scaled / jnp.where(settings.temperature > 0, settings.temperature, 1.0)[:, None]
    scaled = _stage(_top_k, scaled, settings.top_k, settings.top_k > 0)
    scaled = _stage(_top_p, scaled, settings.top_p, settings.top_p < 1)
    # p < min_p * max(p), without the exponentials
    floor = scaled.max(axis=-1) + jnp.log(settings.min_p)
    return jnp.where(scaled < floor[:, None], -jnp.inf, scaled)


def sample(logits: Array, settings: SamplingArrays, step: Array | int, seen: Array | None = None) -> Array:
    """The next token of every row: [B] int32.

    Args:
        logits: [B, V], any float dtype.
        settings: of the B requests. Temperature 0 takes the largest logit, the lowest id among equals.
        step: int or [B] int32, how many tokens the request has generated. The random numbers depend on the row's seed
            and step alone, so a seed gives the same tokens whatever else is in the batch.
        seen: [B, V] bool for the repetition penalty, which counts for greedy rows too.
    """
    penalised = _penalise(logits.astype(jnp.float32), settings, seen)
    greedy = jnp.argmax(penalised, axis=-1).astype(jnp.int32)

    def draw() -> Array:
        filtered = filter_logits(logits, settings, seen)
        steps = jnp.broadcast_to(jnp.asarray(step, jnp.int32), greedy.shape)
        keys = jax.random.wrap_key_data(settings.key, impl="threefry2x32")
        drawn = jax.vmap(lambda key, at, row: jax.random.categorical(jax.random.fold_in(key, at), row))(
            keys, steps, filtered
        )
        return jnp.where(settings.temperature > 0, drawn.astype(jnp.int32), greedy)

    return lax.cond(jnp.any(settings.temperature > 0), draw, lambda: greedy)


def token_logprobs(logits: Array, tokens: Array, top_n: int) -> tuple[Array, Array, Array]:
    """Log-probabilities by the model itself, before any sampling stage, in float32.

    Args:
        logits: [B, V], any float dtype.
        tokens: [B] int32, the chosen ones.
        top_n: how many of the likeliest to report; static, clipped to V.

    Returns:
        The chosen tokens' values [B]; ids [B, top_n] int32 of the likeliest, lowest id first among equals; their values
        [B, top_n]. A chosen token among them has the same value there, to the bit.
    """
    raw = logits.astype(jnp.float32)
    largest = raw.max(axis=-1, keepdims=True)
    log_sum = jnp.log(jnp.exp(raw - largest).sum(axis=-1, keepdims=True))
    chosen = jnp.take_along_axis(raw, tokens[:, None].astype(jnp.int32), axis=-1)
    values, ids = lax.top_k(raw, min(top_n, raw.shape[-1]))
    # One array for both, so that the compiler cannot round the two differently.
    result = jnp.concatenate([chosen, values], axis=-1) - largest - log_sum
    return result[:, 0], ids.astype(jnp.int32), result[:, 1:]


def _penalise(logits: Array, settings: SamplingArrays, seen: Array | None) -> Array:
    if seen is None:
        return logits
    penalty = settings.repetition_penalty[:, None]
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)


def _stage(stage: Callable[[Array, Array], Array], logits: Array, value: Array, wanted: Array) -> Array:
    """Drop what lies below the threshold [B] that `stage` finds, in the rows that want it; skipped when none does."""

    def apply() -> Array:
        dropped = wanted[:, None] & (logits < stage(logits, value)[:, None])
        return jnp.where(dropped, -jnp.inf, logits)

    return lax.cond(jnp.any(wanted), apply, lambda: logits)


def _top_k(logits: Array, count: Array) -> Array:
    """The `count`-th largest logit of each row [B]."""
    return _smallest_kept(logits, jnp.ones_like(logits), count.astype(jnp.float32))


def _top_p(logits: Array, mass: Array) -> Array:
    """The smallest logit of each row for which those above it have less than `mass` of the probability [B]."""
    # The largest logit stays even at top_p = 0.
    return _smallest_kept(logits, jax.nn.softmax(logits, axis=-1), jnp.maximum(mass, jnp.finfo(jnp.float32).tiny))


def _smallest_kept(logits: Array, weights: Array, limit: Array) -> Array:
    """The smallest number t for which the weights of logits > t add up to less than `limit`; one of the logits. [B]

    Float32 numbers order like integers once the bits of negative ones are flipped, so t is built from its top bit down.
    """
    bits = lax.bitcast_convert_type(logits + 0.0, jnp.uint32)  # + 0.0 makes -0.0 equal to 0.0
    sign = jnp.uint32(1 << 31)
    codes = jnp.where(bits >= sign, ~bits, bits | sign)

    def halve(index: Array, low: Array) -> Array:
        half = sign >> index.astype(jnp.uint32)
        above = jnp.where(codes > (low + (half - 1))[:, None], weights, 0.0).sum(axis=-1)
        return jnp.where(above < limit, low, low + half)

    code = lax.fori_loop(jnp.int32(0), jnp.int32(32), halve, jnp.zeros(logits.shape[0], jnp.uint32))
    return lax.bitcast_convert_type(jnp.where(code >= sign, code ^ sign, ~code), jnp.float32)
