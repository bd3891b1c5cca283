"""Decoding with two counters: the position in the prompt and the slot in the cache.

After a sparse prefill of n of M tokens the first new token stands at position M but goes to slot n; both advance by one
a token. A dense prefill is the case n = M, and the compiled programs are the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import jax
import numpy as np

from specprefill_jax.models.loaded import Cache, LoadedLlama, Step, Weights
from specprefill_jax.sampling import SamplingArrays, mark_seen, sample, token_logprobs


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one generated token, by the model itself, before any sampling stage."""

    token: float
    """Of the generated token."""
    top: dict[int, float]
    """Of the likeliest tokens, by id, best first."""


@dataclass(frozen=True)
class Decoded:
    """One generated token."""

    token_id: int
    logprobs: TokenLogprobs | None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Next:
    """What choosing a token leaves on the device: the token, and where it will be fed."""

    token: jax.Array
    """[B] int32."""
    position: jax.Array
    """[B] int32, in the prompt and the answer behind it."""
    slot: jax.Array
    """[B] int32, in the cache."""
    seen: jax.Array | None
    logprobs: tuple[jax.Array, jax.Array, jax.Array] | None


class Decoder:
    """The decode loop of one model."""

    def __init__(self, model: LoadedLlama):
        self.model = model
        self._choose = model.jit(
            self._choose_fn,
            static_argnames="top_n",
            donate_argnames="seen",
            out_shardings=None if model.mesh is None else model.whole,
        )

    def tokens(
        self,
        step: Step,
        position: jax.Array,
        slot: jax.Array,
        settings: SamplingArrays,
        seen: jax.Array | None,
        *,
        max_tokens: int,
        logprobs: int | None,
    ) -> Iterator[Decoded]:
        """Yield up to `max_tokens` tokens; the cache in `step` is consumed as they are asked for.

        Args:
            step: the prefill's result, one row.
            position: [1] int32, position of the first new token (M).
            slot: [1] int32, cache slot of the first new token (tokens prefilled).
            settings: sampling settings of the one request.
            seen: [1, V] bool tokens for the repetition penalty, or None for none; consumed.
            max_tokens: tokens at most; slot + max_tokens - 1 must not exceed the capacity.
            logprobs: likeliest tokens to report with each one, or None for no log-probabilities.
        """
        now = self.first(step.hidden, position, slot, settings, seen, logprobs)
        yield fetch(now)
        yield from self.later(step.cache, now, settings, 1, max_tokens, logprobs)

    def first(
        self,
        hidden: jax.Array,
        position: jax.Array,
        slot: jax.Array,
        settings: SamplingArrays,
        seen: jax.Array | None,
        logprobs: int | None,
    ) -> Next:
        """The first token, from the hidden state that a prefill left; see `tokens`."""
        start = Next(slot, position - 1, slot - 1, seen, None)
        return self._chosen(hidden, settings, 0, start, logprobs)

    def later(
        self, cache: Cache, now: Next, settings: SamplingArrays, index: int, max_tokens: int, logprobs: int | None
    ) -> Iterator[Decoded]:
        """Tokens number `index` up to `max_tokens` - 1, after the one in `now`; the cache is consumed."""
        return map(fetch, self.ahead(cache, now, settings, index, max_tokens, logprobs))

    def ahead(
        self, cache: Cache, now: Next, settings: SamplingArrays, index: int, max_tokens: int, logprobs: int | None
    ) -> Iterator[Next]:
        """The same for any number of rows, one token each at a time, which are left on the device."""
        row = self.model.put(np.zeros(now.token.shape, np.int32))
        for number in range(index, max_tokens):
            done = self.model.step(now.token[:, None], now.position[:, None], cache, now.slot, row)
            cache = done.cache
            now = self._chosen(done.hidden, settings, number, now, logprobs)
            yield now

    def _chosen(self, hidden: jax.Array, settings: SamplingArrays, index: int, now: Next, logprobs: int | None) -> Next:
        return self._choose(
            self.model.weights, hidden, settings, index, now.position, now.slot, now.seen, top_n=logprobs
        )

    def _choose_fn(
        self,
        weights: Weights,
        hidden: jax.Array,
        settings: SamplingArrays,
        index: jax.Array,
        position: jax.Array,
        slot: jax.Array,
        seen: jax.Array | None,
        *,
        top_n: int | None,
    ) -> Next:
        logits = self.model.logits_fn(weights, hidden)
        token = sample(logits, settings, index, seen)
        seen = None if seen is None else mark_seen(seen, token)
        logprobs = None if top_n is None else token_logprobs(logits, token, top_n)
        return Next(token, position + 1, slot + 1, seen, logprobs)


def fetch(now: Next) -> Decoded:
    """The token, on the host."""
    token, logprobs = jax.device_get((now.token, now.logprobs))
    if logprobs is None:
        return Decoded(int(token[0]), None)
    chosen, ids, values = logprobs
    top = {int(i): float(value) for i, value in zip(ids[0], values[0], strict=True)}
    return Decoded(int(token[0]), TokenLogprobs(float(chosen[0]), top))
