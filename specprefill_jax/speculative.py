"""Speculative decoding: the speculator, whose cache of the prompt is paid for, proposes tokens; the main model checks.

A round: the speculator decodes k tokens greedily, the main model reads them in one pass behind the last token, and a
token is drawn at each place as plain decoding would draw it, from the same distribution with the same random numbers
(they depend on the seed and the token's number alone, `sampling.sample`). The proposals that equal what was drawn are
right, and so is the first draw that differs. So the answer is that of plain decoding, to the token, whatever the
temperature and filters; only float32 rounding, which depends on how many tokens a pass reads, can tell them apart.
With proposals that are not random, this is the acceptance rule of arXiv 2211.17192.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from specprefill_jax import costs
from specprefill_jax.decode import Decoded, Decoder, Next, TokenLogprobs, fetch
from specprefill_jax.models.loaded import Cache, LoadedLlama, Step, Weights
from specprefill_jax.sampling import SamplingArrays, mark_seen, sample, token_logprobs
from specprefill_jax.speculator import Speculator

log = logging.getLogger(__name__)

PRIOR_TESTED, PRIOR_ACCEPTED = 4.0, 3.0
"""What is believed of proposals before any has been checked, as if so many had been."""


def step_cost(main: LoadedLlama, speculator: LoadedLlama) -> float:
    """A speculator's step relative to one of the main model's: decoding takes as long as reading the weights."""
    draft, whole = (costs.weight_bytes(model.config, model.dtype.itemsize) for model in (speculator, main))
    return draft / whole


@dataclass
class Acceptance:
    """How proposals fared, and how many to make next."""

    most: int
    """Proposals a round, at most."""
    cost: float
    """A speculator's step relative to one of the main model's."""
    proposed: int = 0
    accepted: int = 0
    tested: int = 0
    """Proposals that were accepted, or were the first of their round that was not."""

    def add(self, proposed: int, accepted: int) -> None:
        """Count a round."""
        self.proposed += proposed
        self.accepted += accepted
        self.tested += min(accepted + 1, proposed)

    def next_count(self) -> int:
        """Proposals that promise the most tokens a second: a power of two or `most`; 0 where none pays.

        A pass of the main model over few tokens takes as long as over one. That of the speculator's that begins a round
        reads two, and each later one gives a proposal.
        """
        rate = (self.accepted + PRIOR_ACCEPTED) / (self.tested + PRIOR_TESTED)
        best, count = 1.0, 0
        for tried in (*(1 << i for i in range(self.most.bit_length()) if 1 << i < self.most), self.most):
            tokens = sum(rate**i for i in range(tried + 1))
            gain = tokens / (1 + self.cost * tried)
            if gain > best:
                best, count = gain, tried
        return count


class Drafts:
    """The speculator's proposals for one prompt's answer."""

    def __init__(self, speculator: Speculator, prompt: np.ndarray, room: int):
        """Propose answers of at most `room` tokens, look-ahead and proposals included, to `prompt` [M] int32."""
        self.speculator, self.prompt, self.room = speculator, prompt, room
        self.cache: Cache | None = None
        """Holds the prompt and what was proposed since; None until the speculator has read the prompt."""

    def propose(self, said: Sequence[int], count: int) -> np.ndarray:
        """`count` tokens int32 after the prompt and `said`, which is not empty."""
        if self.cache is None:
            self.cache = self.speculator.read(self.prompt, 1, (), room=self.room).cache
        model, tokens = self.speculator.model, len(self.prompt)
        # The last token was never read, and the one before it was not where every proposal was right.
        before = said[-2] if len(said) > 1 else int(self.prompt[-1])
        start = tokens + len(said) - 2
        pair = model.put(np.array([[before, said[-1]]], np.int32))
        at = model.put(np.array([[start, start + 1]], np.int32))
        first, last = (model.put(np.array([value], np.int32)) for value in (start, 1))
        step = model.step(pair, at, self.cache, first, last)
        ahead = self.speculator.look_ahead(step, np.array([start + 2], np.int32), [()], count)
        self.cache = ahead.cache
        return np.asarray(ahead.tokens[0])


class SpeculativeDecoder:
    """The decode loop with proposals."""

    def __init__(self, decoder: Decoder, speculator: Speculator):
        self.decoder, self.model = decoder, decoder.model
        self._accept = self.model.jit(
            self._accept_fn,
            static_argnames="top_n",
            out_shardings=None if self.model.mesh is None else self.model.whole,
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
        drafts: Drafts,
        looked_ahead: Sequence[int],
        acceptance: Acceptance,
    ) -> Iterator[Decoded]:
        """Yield up to `max_tokens` tokens; the cache in `step` is consumed as they are asked for.

        Args:
            step, position, slot, settings, seen, max_tokens, logprobs: see `Decoder.tokens`; the cache must have room
                for `acceptance.most` tokens more.
            drafts: of this prompt.
            looked_ahead: tokens that the speculator expected before the first was known: the first proposals are free.
            acceptance: how many are proposed; it learns.
        """
        now = self.decoder.first(step.hidden, position, slot, settings, seen, logprobs)
        cache: Cache = step.cache
        first = fetch(now)
        yield first
        said = [first.token_id]
        free = list(looked_ahead[1:]) if looked_ahead and looked_ahead[0] == first.token_id else []
        while len(said) < max_tokens:
            count = acceptance.next_count()
            if not count:
                yield from self.decoder.later(cache, now, settings, len(said), max_tokens, logprobs)
                return
            if free:
                proposals = np.resize(np.array(free[:count], np.int32), count)
                free = []
            else:
                try:
                    proposals = drafts.propose(said, count)
                except Exception as error:  # nothing of the main model's is touched: the answer goes on without
                    log.warning("the speculator failed, decoding goes on without it: %s", error)
                    yield from self.decoder.later(cache, now, settings, len(said), max_tokens, logprobs)
                    return
            cache, now, drawn, accepted = self._check(
                cache, now, proposals, len(drafts.prompt), said, settings, logprobs
            )
            acceptance.add(count, accepted)
            for token in drawn[: max_tokens - len(said)]:
                said.append(token.token_id)
                yield token

    def _check(
        self,
        cache: Cache,
        now: Next,
        proposals: np.ndarray,
        prompt_tokens: int,
        said: Sequence[int],
        settings: SamplingArrays,
        logprobs: int | None,
    ) -> tuple[Cache, Next, list[Decoded], int]:
        """Read the last token and the proposals: the cache, where decoding goes on, what was drawn, how many fit."""
        model = self.model
        tokens = model.put(np.array([[said[-1], *proposals]], np.int32))
        first = prompt_tokens + len(said) - 1
        positions = model.put(np.arange(first, first + tokens.shape[1], dtype=np.int32)[None])
        row = model.put(np.zeros(1, np.int32))
        step = model.step(tokens, positions, cache, now.slot, row, every=True)
        now, drawn, accepted = self._accept(
            model.weights, step.hidden[0], model.put(proposals), settings, len(said), now, top_n=logprobs
        )
        ids, count, seen = jax.device_get((drawn, accepted, now.logprobs))
        out = []
        for i in range(int(count) + 1):
            entry = None
            if seen is not None:
                own, top, values = seen
                entry = TokenLogprobs(float(own[i]), dict(zip(top[i].tolist(), values[i].tolist(), strict=True)))
            out.append(Decoded(int(ids[i]), entry))
        return step.cache, now, out, int(count)

    def _accept_fn(
        self,
        weights: Weights,
        hidden: jax.Array,
        proposals: jax.Array,
        settings: SamplingArrays,
        index: jax.Array,
        now: Next,
        *,
        top_n: int | None,
    ) -> tuple[Next, jax.Array, jax.Array]:
        """Hidden states [k + 1, E] -> where decoding goes on (with log-probabilities of all), tokens, how many fit."""
        logits = self.model.logits_fn(weights, hidden)
        drawn, counts, token, seen = check_proposals(
            logits[None], proposals[None], settings, jnp.asarray(index)[None], now.seen
        )
        logprobs = None if top_n is None else token_logprobs(logits, drawn[0], top_n)
        accepted = counts[0]
        after = Next(token, now.position + accepted + 1, now.slot + accepted + 1, seen, logprobs)
        return after, drawn[0], accepted


def check_proposals(
    logits: jax.Array,
    proposals: jax.Array,
    settings: SamplingArrays,
    index: jax.Array,
    seen: jax.Array | None,
    limits: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Draw a token at every place as plain decoding would, and see how many proposals were right.

    Args:
        logits: [B, k + 1, V], at the last token and at each proposal, any float dtype.
        proposals: [B, k] int32.
        settings: of the B requests.
        index: [B] int32, which of its tokens each row gets at the first place.
        seen: [B, V] bool tokens so far, for the repetition penalty; None for none.
        limits: [B] int32, so many proposals of each row count; None: all.

    Returns:
        The tokens drawn [B, k + 1] int32, of which the first accepted + 1 are right; how many proposals were accepted
        [B] int32; the last right token [B]; `seen` with all right tokens.
    """
    batch, places, vocabulary = logits.shape
    rows = SamplingArrays(*(jnp.repeat(value, places, axis=0) for value in settings))
    before = None
    if seen is not None:
        # At place i the proposals before it have been said.
        earlier = jnp.arange(places - 1) < jnp.arange(places)[:, None]
        columns = jnp.where(earlier, proposals[:, None], vocabulary)
        at = (jnp.arange(batch)[:, None, None], jnp.arange(places)[:, None], columns)
        before = seen[:, None] | jnp.zeros(logits.shape, bool).at[at].set(True, mode="drop")
    steps = (jnp.asarray(index)[:, None] + jnp.arange(places)).reshape(-1)
    flat = None if before is None else before.reshape(-1, vocabulary)
    drawn = sample(logits.reshape(-1, vocabulary), rows, steps, flat).reshape(batch, places)
    right = drawn[:, :-1] == proposals
    if limits is not None:
        right &= jnp.arange(places - 1) < limits[:, None]
    accepted = jnp.cumprod(right, axis=1).sum(axis=1, dtype=jnp.int32)
    token = jnp.take_along_axis(drawn, accepted[:, None], axis=1)[:, 0]
    if before is None:
        return drawn, accepted, token, None
    said = jnp.take_along_axis(before, accepted[:, None, None], axis=1)[:, 0]
    return drawn, accepted, token, mark_seen(said, token)
