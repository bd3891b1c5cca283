"""Everything compiled that the engine needs, the caches and the decode state on the device.

Shapes come from a few buckets, so that `warm_up.warm_up` can compile all there will ever be. Nothing here knows of
requests.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from specprefill_jax.cache import KVCache
from specprefill_jax.config import MAX_LOGPROBS
from specprefill_jax.engine.scheduler import MAX_LOOK_AHEAD_ROWS
from specprefill_jax.engine.shapes import piece_lengths, prompt_sizes, up
from specprefill_jax.importance import Heads
from specprefill_jax.models.loaded import LoadedLlama, Step, Weights
from specprefill_jax.models.paged import PAGE, PagedCache
from specprefill_jax.planning import Plan, doubling, num_chunks
from specprefill_jax.prefill import later
from specprefill_jax.sampling import SamplingArrays, mark_seen, sample, token_logprobs
from specprefill_jax.scoring import score_and_choose
from specprefill_jax.self_check import SelfCheck
from specprefill_jax.speculative import check_proposals
from specprefill_jax.speculator import LookAhead, Speculator, window_queries

LOGPROB_ROWS = 64
"""Prompt tokens whose logits exist at the same time."""

SHORT_WITH_LOGPROBS = 128
"""Tokens of the shorter of the two pieces that give the prompt's log-probabilities."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """What decoding carries from step to step, by row; the last row is nobody's, for padding."""

    tokens: jax.Array
    """[R] int32 the token that each row got last."""
    seen: jax.Array
    """[R, V] bool the tokens of prompt and answer, for the repetition penalty; right only where there is one."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """The rows of one decode step, or the one whose first token is chosen; numpy arrays."""

    rows: Any
    """[B] int32 rows of the state."""
    settings: SamplingArrays
    index: Any
    """[B] int32, which of its tokens each row is to get."""
    top_n: Any
    """[B] int32 likeliest tokens whose log-probabilities are wanted; below 0: none, nor the token's own."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chosen:
    """Tokens that are on their way to the host."""

    tokens: jax.Array
    """[B] int32; [B, k + 1] where k proposals were checked."""
    logprobs: tuple[jax.Array, jax.Array, jax.Array]
    """As of `token_logprobs`, for MAX_LOGPROBS; zeros where no row wants any."""
    accepted: jax.Array | None = None
    """[B] int32 proposals that were right: so many tokens and one more are the row's; None: there were none."""


class Runner:
    """Two models on their devices, with a paged cache each."""

    def __init__(
        self,
        main: LoadedLlama,
        speculator: Speculator,
        self_check: SelfCheck,
        *,
        kernels: str,
        max_running: int,
        chunk: int,
        max_model_len: int,
        num_pages: int,
        num_draft_pages: int,
        window: int = 0,
        heads: Heads = (),
        draft_tokens: int = 0,
    ):
        """Allocate caches of `num_pages` and `num_draft_pages` pages, page 0 included; see `Engine` for the rest.

        With a `window` prompts are scored by the queries of so many of their last tokens, and nobody looks ahead; with
        `heads`, by these alone.
        """
        self.main, self.speculator = main, speculator
        self.draft = speculator.model
        self.self_check = self_check
        self.kernels = kernels
        self.window, self.heads = window, heads
        self.max_running = max_running
        self.num_pages, self.num_draft_pages = num_pages, num_draft_pages
        self.width = -(-max_model_len // PAGE)
        """Pages of a row's table."""
        self.max_model_len = max_model_len
        self.lengths = piece_lengths(chunk)
        """Tokens of a prefill piece, by compiled program."""
        self.lengths_with_logprobs = sorted({up(self.lengths, min(SHORT_WITH_LOGPROBS, chunk)), chunk})
        """Likewise of pieces that give the prompt's log-probabilities."""
        self.rows = list(doubling(1, max_running))
        self.sizes = prompt_sizes(max_model_len)
        """Prompt lengths that are scored, by compiled program."""
        self.look_ahead_rows = list(doubling(1, MAX_LOOK_AHEAD_ROWS))
        self.proposals = list(doubling(1, draft_tokens)) if draft_tokens else []
        """Proposals of a decode step, by compiled program."""
        self._choose = main.jit(self._choose_fn, donate_argnames="state")
        self._decode = main.jit(self._decode_fn, donate_argnames=("cache", "state"))
        self._check = main.jit(self._check_fn, donate_argnames="state")
        self._verify = main.jit(self._verify_fn, donate_argnames=("cache", "state"))
        self._behind_last = jax.jit(_behind_last)
        self._last_two = jax.jit(_last_two)
        self._prompt_logprobs = main.jit(self._prompt_logprobs_fn)
        self._last_tokens = jax.jit(lambda state, rows: state.tokens[rows][:, None])
        self._fill_seen = jax.jit(_fill_seen, donate_argnames="state")
        self._join = jax.jit(_join)
        self._contiguous = jax.jit(_contiguous)
        self.cache: Any
        self.draft_cache: Any
        self.state: Any
        self.reset()

    @property
    def eager(self) -> bool:
        """Whether results are best waited for at once: enqueuing a layerwise model takes as long as running it."""
        return self.main.layerwise

    @property
    def intact(self) -> bool:
        """Whether the caches are still there: a program that failed may have consumed one, or be what one waits for."""
        leaves = jax.tree.leaves((self.cache, self.draft_cache, self.state))
        if any(leaf.is_deleted() for leaf in leaves):
            return False
        try:
            jax.block_until_ready(leaves)
        except Exception:  # the error of whichever program failed
            return False
        return True

    def reset(self) -> None:
        """Empty caches, no state."""
        self.cache = self.draft_cache = self.state = None  # the old ones go before the new ones come
        self.cache = self.main.new_pages(self.num_pages)
        self.draft_cache = self.draft.new_pages(self.num_draft_pages)
        rows, vocabulary = self.max_running + 1, self.main.config.vocab_size
        put = self.main.put
        self.state = State(put(np.zeros(rows, np.int32)), put(np.zeros((rows, vocabulary), np.bool_)))

    def speculate(self, tokens: np.ndarray, start: int, pages: Sequence[int], total: int, before: Step | None) -> Step:
        """The speculator reads `tokens` [T] into the slots from `start` on, a multiple of PAGE, of these pages.

        Of a prompt of `total` tokens; `before` is what its last piece left, which a window may begin in.
        """
        positions, wanted = np.arange(start, start + len(tokens)), None
        if self.window:
            wanted = np.clip(total - start + np.arange(-self.window, 0), 0, len(tokens) - 1).astype(np.int32)[None]
        step = self._read(self.draft, self.draft_cache, tokens, positions, start, pages, wanted=wanted)
        self.draft_cache = step.cache
        last = step.hidden, step.queries
        if self.window and before is not None:
            count, first = np.full(1, total, np.int32), np.full(1, start, np.int32)
            last = later((before.hidden, before.queries), last, count, first, window=self.window)
        return Step(*last, None)

    def look_ahead(
        self, steps: Sequence[Step], lengths: Sequence[int], pages: Sequence[Sequence[int]], ends: Any, count: int
    ) -> LookAhead:
        """Decode for several prompts whose last pieces left `steps`; rows of padding follow theirs."""
        size = up(self.look_ahead_rows, len(steps))
        extra = size - len(steps)
        hidden, queries = self._join([(s.hidden, s.queries) for s in [*steps, *[steps[0]] * extra]])
        tables = self.draft.put(self._tables([*pages, *[()] * extra]))
        at = np.array([*lengths, *[0] * extra], np.int32)
        if self.window:
            found, generated, counted = window_queries(queries, at)
            return LookAhead(found, None, generated, counted, hidden)
        step = Step(hidden, queries, self.draft_cache.of(tables))
        ahead = self.speculator.look_ahead(step, at, [*ends, *[()] * extra], count)
        self.draft_cache = ahead.cache
        return ahead

    def score(
        self, ahead: LookAhead, index: int, tokens: np.ndarray, pages: Sequence[int], plan: Plan, pool_width: int
    ) -> tuple[Any, ...]:
        """Importance, chunk scores, choice, number of queries and tokens of the prompt in row `index` of a look-ahead.

        And what `SelfCheck` finds for the plan's `rungs`.

        Args:
            ahead: of `look_ahead`.
            index: the prompt's row in it.
            tokens: int32 [M], the prompt.
            pages: of the speculator's cache.
            plan: what is to be chosen.
            pool_width: of the settings.
        """
        size = up(self.sizes, len(tokens))
        table = np.zeros(size // PAGE, np.int32)
        table[: min(len(pages), len(table))] = pages[: len(table)]
        at = self.draft.put(table)
        k = self._contiguous(self.draft_cache.k, at)
        none = jnp.zeros((0,), k.dtype)
        queries, generated, count, hidden = _row(
            ahead.queries, ahead.tokens, ahead.num_queries, ahead.hidden, np.int32(index)
        )
        row = LookAhead(queries, KVCache(k, none, none), generated, count, hidden)
        ids, length = np.zeros((1, size), np.int32), np.full((1,), len(tokens), np.int32)
        ids[0, : len(tokens)] = tokens
        chunk = min(plan.chunk_size, size)
        forced = plan.forced_mask(num_chunks(size, chunk))[None]
        chunks = np.full((1,), plan.num_chunks, np.int32)
        found = score_and_choose(
            row,
            ids,
            length,
            forced,
            chunks,
            np.full((1,), plan.kept_chunks, np.int32),
            size=size,
            pool_width=pool_width,
            chunk_size=chunk,
            kept_size=size,
            window=self.window > 0,
            heads=self.heads,
            backend=self.kernels,
            mesh=self.draft.mesh,
        )
        if not plan.rungs:
            return *found, {}
        row = replace(row, cache=KVCache(k, self._contiguous(self.draft_cache.v, at), none))
        return *found, self.self_check.divergences(
            row, found[1], ids, length, forced, chunks, plan.rungs, chunk_size=chunk, size=size
        )

    def prefill(self, tokens: np.ndarray, positions: np.ndarray, start: int, pages: Sequence[int]) -> jax.Array:
        """The main model reads `tokens` [T] at `positions` into slots from `start` on, a multiple of PAGE.

        Returns the last token's hidden state [1, E].
        """
        step = self._read(self.main, self.cache, tokens, positions, start, pages)
        self.cache = step.cache
        return step.hidden

    def prefill_with_logprobs(
        self, tokens: np.ndarray, following: np.ndarray, start: int, pages: Sequence[int]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        """The same for a prompt that is read whole, and `token_logprobs` of the token after each of `tokens`."""
        positions = np.arange(start, start + len(tokens))
        step = self._read(self.main, self.cache, tokens, positions, start, pages, every=True)
        self.cache = step.cache
        targets = np.zeros(step.hidden.shape[1], np.int32)
        targets[: len(following)] = following
        last = np.int32(len(tokens) - 1)
        hidden, logprobs = self._prompt_logprobs(self.main.weights, step.hidden, targets, last)
        return hidden, logprobs

    def fill_seen(self, row: int, tokens: np.ndarray) -> None:
        """Tell the repetition penalty of a row's tokens so far."""
        ids = np.full(up(self.sizes, len(tokens)), self.main.config.vocab_size, np.int32)
        ids[: len(tokens)] = tokens
        self.state = self._fill_seen(self.state, np.int32(row), self.main.put(ids))

    def choose(self, hidden: jax.Array, batch: Batch) -> Chosen:
        """The token after hidden states [B, E]; the rows' state knows it from now on."""
        self.state, chosen = self._choose(self.main.weights, hidden, self.state, batch)
        return chosen

    def decode(self, batch: Batch, positions: np.ndarray, slots: np.ndarray, pages: Sequence[Sequence[int]]) -> Chosen:
        """Feed each row its last token, at `positions` and `slots` [B], and choose the next; B is one of `rows`."""
        cache = self.cache.of(self.main.put(self._tables(pages)))
        step = self._decode_fn if self.eager else self._decode
        self.cache, self.state, chosen = step(self.main.weights, cache, self.state, batch, positions, slots)
        return chosen

    def propose(
        self, rows: np.ndarray, before: np.ndarray, starts: np.ndarray, pages: Sequence[Sequence[int]], count: int
    ) -> jax.Array:
        """The speculator's proposals [B, count] for what follows each row's last token; `count` is one of `proposals`.

        Args:
            rows: [B] int32, of the state.
            before: [B] int32, each row's token before its last; -1 where that is the prompt's last.
            starts: [B] int32, slot and position of the first of these two that is no token of the prompt.
            pages: of the speculator's cache.
            count: k.
        """
        draft = self.draft
        pair = self._last_two(self._onto(draft, self._last_tokens(self.state, rows)), before)
        last = (before >= 0).astype(np.int32)
        at = starts[:, None] + np.arange(2, dtype=np.int32)
        step = draft.step(pair, draft.put(at), self.draft_cache.of(draft.put(self._tables(pages))), starts, last)
        self.draft_cache = step.cache
        ahead = self.speculator.look_ahead(step, starts + last + np.int32(1), [()] * len(rows), count)
        self.draft_cache = ahead.cache
        return self._onto(self.main, ahead.tokens)

    def verify(
        self,
        batch: Batch,
        positions: np.ndarray,
        slots: np.ndarray,
        pages: Sequence[Sequence[int]],
        proposals: ArrayLike,
        limits: np.ndarray,
    ) -> Chosen:
        """The same as `decode`, with proposals [B, k] int32 behind each row's last token; of row b limits[b] count.

        What does not fit into a row's pages, or is no proposal that counts, is written to nobody's page or behind what
        the row will write next.
        """
        cache = self.cache.of(self.main.put(self._tables(pages)))
        step = self._verify_fn if self.eager else self._verify
        self.cache, self.state, chosen = step(
            self.main.weights, cache, self.state, batch, positions, slots, proposals, limits
        )
        return chosen

    def _onto(self, model: LoadedLlama, array: jax.Array) -> jax.Array:
        """An array where a model can take it; one that no mesh holds is anywhere at home."""
        return array if model.mesh is None else jax.device_put(array, model.whole)

    def _read(
        self,
        model: LoadedLlama,
        cache: PagedCache,
        tokens: np.ndarray,
        positions: np.ndarray,
        start: int,
        pages: Sequence[int],
        *,
        every: bool = False,
        wanted: np.ndarray | None = None,
    ) -> Step:
        count = len(tokens)
        length = up(self.lengths_with_logprobs if every else self.lengths, count)
        ids, at = np.zeros((2, 1, length), np.int32)
        ids[0, :count], at[0, :count] = tokens, positions
        # Padding past the table's end must find an entry there, and is written to nobody's page.
        table = np.zeros((1, self.width + length // PAGE), np.int32)
        table[0, : len(pages)] = pages
        put = model.put
        first = np.full((1,), start, np.int32)
        last = np.full((1,), count - 1, np.int32) if wanted is None else wanted
        return model.step(put(ids), put(at), cache.of(put(table)), put(first), put(last), every=every)

    def _tables(self, pages: Sequence[Sequence[int]]) -> np.ndarray:
        # A look-ahead may pass the longest context by less than a page.
        tables = np.zeros((len(pages), self.width + 1), np.int32)
        for table, row in zip(tables, pages, strict=True):
            table[: len(row)] = row
        return tables

    def _choose_fn(self, weights: Weights, hidden: jax.Array, state: State, batch: Batch) -> tuple[State, Chosen]:
        logits = self.main.logits_fn(weights, hidden)
        seen = state.seen[batch.rows]
        tokens = sample(logits, batch.settings, batch.index, seen)
        logprobs = lax.cond(
            (jnp.asarray(batch.top_n) >= 0).any(),
            lambda: token_logprobs(logits, tokens, MAX_LOGPROBS),
            lambda: _no_logprobs(len(hidden), logits.shape[1]),
        )
        seen = mark_seen(seen, tokens)
        state = State(state.tokens.at[batch.rows].set(tokens), state.seen.at[batch.rows].set(seen))
        return self._whole((state, Chosen(tokens, logprobs)))

    def _whole(self, results: Any) -> Any:
        """The host reads them, in every process, and the next step takes them: each device must hold them whole."""
        return results if self.main.mesh is None else lax.with_sharding_constraint(results, self.main.whole)

    def _decode_fn(
        self, weights: Weights, cache: PagedCache, state: State, batch: Batch, positions: Any, slots: Any
    ) -> tuple[PagedCache, State, Chosen]:
        tokens = self._last_tokens(state, batch.rows)
        step = self.main.run(weights, tokens, positions[:, None], cache, slots, np.zeros(len(slots), np.int32))
        choose = self._choose if self.eager else self._choose_fn  # JAX takes options of whole programs only
        state, chosen = choose(weights, step.hidden, state, batch)
        return step.cache, state, chosen

    def _check_fn(
        self, weights: Weights, hidden: jax.Array, state: State, batch: Batch, proposals: jax.Array, limits: jax.Array
    ) -> tuple[State, Chosen]:
        rows, places, width = hidden.shape
        logits = self.main.logits_fn(weights, hidden.reshape(-1, width))
        tokens, accepted, last, seen = check_proposals(
            logits.reshape(rows, places, -1), proposals, batch.settings, batch.index, state.seen[batch.rows], limits
        )
        logprobs = lax.cond(
            (jnp.asarray(batch.top_n) >= 0).any(),
            lambda: token_logprobs(logits, tokens.reshape(-1), MAX_LOGPROBS),
            lambda: _no_logprobs(len(logits), logits.shape[1]),
        )
        logprobs = jax.tree.map(lambda x: x.reshape(rows, places, *x.shape[1:]), logprobs)
        state = State(state.tokens.at[batch.rows].set(last), state.seen.at[batch.rows].set(seen))
        return self._whole((state, Chosen(tokens, logprobs, accepted)))

    def _verify_fn(
        self,
        weights: Weights,
        cache: PagedCache,
        state: State,
        batch: Batch,
        positions: Any,
        slots: Any,
        proposals: ArrayLike,
        limits: Any,
    ) -> tuple[PagedCache, State, Chosen]:
        tokens = self._behind_last(state, batch.rows, proposals)
        at = positions[:, None] + np.arange(tokens.shape[1], dtype=np.int32)
        step = self.main.run(weights, tokens, at, cache, slots, np.zeros(len(slots), np.int32), every=True)
        check = self._check if self.eager else self._check_fn
        state, chosen = check(weights, step.hidden, state, batch, jnp.asarray(proposals), limits)
        return step.cache, state, chosen

    def _prompt_logprobs_fn(
        self, weights: Weights, hidden: jax.Array, targets: jax.Array, last: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        rows = math.gcd(LOGPROB_ROWS, len(targets))
        blocks = (hidden[0].reshape(-1, rows, hidden.shape[2]), targets.reshape(-1, rows))

        def block(xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            return token_logprobs(self.main.logits_fn(weights, xs[0]), xs[1], MAX_LOGPROBS)

        out = lax.map(block, blocks)
        return self._whole((hidden[0, last][None], jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)))


def _no_logprobs(rows: int, vocabulary: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    top = (rows, min(MAX_LOGPROBS, vocabulary))
    return jnp.zeros(rows), jnp.zeros(top, jnp.int32), jnp.zeros(top)


def _behind_last(state: State, rows: jax.Array, proposals: jax.Array) -> jax.Array:
    """Each row's last token and its proposals, [B, k + 1]."""
    return jnp.concatenate([state.tokens[rows][:, None], proposals], axis=1)


def _last_two(last: jax.Array, before: jax.Array) -> jax.Array:
    """[B, 2]: the token before the last [B, 1] and that; the last twice where the other is of no use (-1)."""
    return jnp.concatenate([jnp.where(before[:, None] < 0, last, before[:, None]), last], axis=1)


def _fill_seen(state: State, row: jax.Array, ids: jax.Array) -> State:
    seen = jnp.zeros(state.seen.shape[1], jnp.bool_).at[ids].set(True, mode="drop")
    return State(state.tokens, state.seen.at[row].set(seen))


def _join(steps: Sequence[tuple[jax.Array, Any]]) -> tuple[jax.Array, Any]:
    """Hidden states and queries of several prompts as one batch."""
    hidden = jnp.concatenate([hidden for hidden, _ in steps])
    axis = 0 if isinstance(steps[0][1], tuple) else 1
    return hidden, jax.tree.map(lambda *rows: jnp.concatenate(rows, axis), *(queries for _, queries in steps))


def _contiguous(pages: jax.Array, table: jax.Array) -> jax.Array:
    """One prompt's keys or values out of their pages: [K, L, P, PAGE, H] -> [L, 1, K, S, H]."""
    heads, layers, _, _, size = pages.shape
    # [K, L, W, PAGE, H] -> [K, L, S, H]
    found = pages[:, :, table].reshape(heads, layers, -1, size)
    return found.swapaxes(0, 1)[:, None]


@jax.jit
def _row(
    queries: jax.Array, tokens: jax.Array, count: jax.Array, hidden: jax.Array, index: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """One prompt of a batch's look-ahead."""
    queries = lax.dynamic_slice_in_dim(queries, index, 1, axis=1)
    tokens, count, hidden = (lax.dynamic_slice_in_dim(rows, index, 1) for rows in (tokens, count, hidden))
    return queries, tokens, count, hidden
