"""Which layers and heads of a speculator carry the signal: what goes into a pair card (`cards`).

Of each prompt is kept what every head of the speculator sees (the pooled attention of the prompt's last tokens to each
chunk), what the oracle sees (`oracle`), and which chunks hold the answer's own words. A non-negative weighting of heads
is fitted to the oracle by optax, with an L1 penalty, for each number of layers that may be run; the best few of them
then score by the method's own rule, a maximum. What is chosen is chosen on one half of the prompts, and told of the
other.

A head's attention is averaged over each chunk before the maximum here, after it in use (`importance`), so that heads
can be tried without reading the prompt again. Only chunks that product mode ranks count: not those it always keeps.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax

from specprefill_jax.evals.oracle import best_chunks, oracle_chunks
from specprefill_jax.evals.samples import Sample, prompt_ids, true_answer_ids
from specprefill_jax.importance import Heads
from specprefill_jax.pipeline import SpecPrefill
from specprefill_jax.planning import num_chunks, plan
from specprefill_jax.prefill import bucket
from specprefill_jax.speculator import LookAhead, Speculator

RANKED = (2, 3, 5)
"""Chunks that may be kept beside those that always are; a score is the mean over these."""
MOST_HEADS = 8
LEAST_GAIN = 0.005
"""What another head must find more, or it is left out: less is chance."""


@dataclass(frozen=True)
class Example:
    """One prompt as calibration sees it."""

    task: str
    window: np.ndarray
    """float [L, N, W, C]: pooled attention of the prompt's last W tokens, by layer, head, query and chunk."""
    look_ahead: np.ndarray
    """float [L, N, Q, C]: likewise of the look-ahead's queries that count."""
    oracle: np.ndarray
    """float [C]."""
    evidence: np.ndarray
    """bool [R, C]: chunks that hold each of the R references word for word; [0, C] where none stands in the prompt."""
    forced: np.ndarray
    """bool [C]: kept whatever the scores say."""


def examples(
    pair: SpecPrefill, samples: Iterable[Sample], *, window: int, look_ahead: int, answer_tokens: int
) -> Iterable[Example]:
    """What is to be known of each sample; reads it twice with the speculator, once with the main model.

    Args:
        pair: with its whole speculator, in product mode's default settings.
        samples: prompts of text.
        window, look_ahead: queries of either kind.
        answer_tokens: of the true answer, at most.

    Raises:
        SpecPrefillError: a sample that cannot be read.
    """
    config = pair.selector.settle(None)
    chunk, width = config.chunk_size, config.pool_width or 0
    reader = Speculator(pair.main, pair.prefill_chunk)
    ends = pair.selector.ends(config)
    for sample in samples:
        ids = prompt_ids(sample, pair.tokenizer)
        answer = true_answer_ids(sample, pair.tokenizer)[:answer_tokens]
        oracle = oracle_chunks(reader, ids, answer, chunk, width, backend=pair.kernels)
        seen = partial(_seen, tokens=len(ids), chunk=chunk, width=width)
        ahead = pair.speculator.read(ids, look_ahead, ends)
        windowed = pair.speculator.read(ids, 1, ends, window=window)
        visible = np.maximum(len(ids) + np.arange(1 - window, 1), 1)
        count = int(ahead.num_queries[0])
        yield Example(
            sample.task,
            seen(windowed, visible)[:, :, -min(window, len(ids)) :],
            seen(ahead, np.full(look_ahead, len(ids)))[:, :, :count],
            oracle,
            _evidence(pair, ids, sample.outputs, chunk),
            plan(len(ids), config).forced_mask(),
        )


def _seen(ahead: LookAhead, visible: np.ndarray, *, tokens: int, chunk: int, width: int) -> np.ndarray:
    """float32 [L, N, Q, C] of queries that each see the first `visible` [Q] tokens."""
    size = bucket(tokens)
    chunks = -(-size // chunk)
    keys = ahead.cache.k[:, 0, :, :size]
    keys = jnp.pad(keys, ((0, 0), (0, 0), (0, chunks * chunk - keys.shape[2]), (0, 0)))
    found = _attention(keys, ahead.queries[:, 0], np.int32(tokens), visible.astype(np.int32), chunk=chunk, width=width)
    return np.asarray(found, np.float32)[..., : num_chunks(tokens, chunk)]


@partial(jax.jit, static_argnames=("chunk", "width"))
def _attention(
    keys: jax.Array, queries: jax.Array, tokens: jax.Array, visible: jax.Array, *, chunk: int, width: int
) -> jax.Array:
    """Keys [L, K, S, H] and queries [L, Q, N, H] -> pooled attention, averaged over chunks, [L, N, Q, S / chunk]."""
    slots = keys.shape[2]
    real = jnp.arange(slots) < tokens

    def layer(given: tuple[jax.Array, jax.Array]) -> jax.Array:
        k, q = (array.astype(jnp.float32) for array in given)
        count, heads, dim = q.shape
        grouped = q.reshape(count, k.shape[0], heads // k.shape[0], dim)
        logits = jnp.einsum("qkgh,ksh->kgqs", grouped, k) / np.sqrt(dim)
        logits = jnp.where(jnp.arange(slots) < visible[:, None], logits, -jnp.inf)
        rows = jax.nn.softmax(logits, axis=-1).reshape(heads, count, slots)
        if width:
            side = width // 2
            sums = jnp.cumsum(jnp.pad(rows, ((0, 0), (0, 0), (side + 1, side))), axis=-1)
            rows = (sums[..., width:] - sums[..., :-width]) / width
        rows = jnp.where(real, rows, 0).reshape(heads, count, slots // chunk, chunk).sum(axis=-1)
        return rows / jnp.clip(tokens - jnp.arange(slots // chunk) * chunk, 1, chunk)

    return jax.lax.map(layer, (keys, queries))


def _evidence(pair: SpecPrefill, ids: np.ndarray, references: Sequence[str], chunk: int) -> np.ndarray:
    """Which chunks hold each reference, in part if it lies across two; those that are nowhere are left out."""
    assert pair.tokenizer is not None
    starts = range(0, len(ids), chunk)
    texts = [pair.tokenizer.decode(ids[start : start + chunk].tolist()).casefold() for start in starts]
    rows = []
    for reference in references:
        wanted = reference.casefold()
        row = np.array([wanted in text for text in texts])
        if not row.any():
            across = [wanted in first + second for first, second in pairwise(texts)]
            row[:-1] |= across
            row[1:] |= across
        if row.any():
            rows.append(row)
    return np.array(rows, np.bool_).reshape(-1, len(texts))


Scorer = Callable[[Example], np.ndarray]
"""An example's chunk scores, [C]."""


def by_window(heads: Heads = (), layers: int | None = None, window: int | None = None) -> Scorer:
    """Scores by the prompt's last tokens: the maximum over some heads, or over all of the first layers."""

    def scores(example: Example) -> np.ndarray:
        rows = _of(example.window, heads, layers)
        rows = rows[:, -(window or rows.shape[1]) :]
        weights = np.arange(1, rows.shape[1] + 1)
        return (rows.max(axis=0) * weights[:, None]).sum(axis=0) / weights.sum()

    return scores


def by_look_ahead(heads: Heads = (), count: int | None = None) -> Scorer:
    """Scores by the look-ahead's queries, the first `count` of them."""
    return lambda example: _of(example.look_ahead, heads, None)[:, :count].max(axis=0).mean(axis=0)


def _of(seen: np.ndarray, heads: Heads, layers: int | None) -> np.ndarray:
    """[L, N, Q, C] -> [heads, Q, C]."""
    if heads:
        return np.stack([seen[layer, head] for layer, head in heads])
    return seen[:layers].reshape(-1, *seen.shape[2:])


@dataclass(frozen=True)
class Found:
    """What a way of scoring finds, both from 0 to 1: means over budgets, tasks weighing the same."""

    recall: float
    """Share of the oracle's chunks."""
    evidence: float | None
    """Share of the references of which a chunk is kept; None where no prompt holds any."""

    @property
    def value(self) -> float:
        """What ways are compared by."""
        return self.recall if self.evidence is None else (self.recall + self.evidence) / 2


def found(given: Sequence[Example], scorer: Scorer, budgets: Sequence[int] = RANKED) -> Found:
    """What a way of scoring finds in the examples; of prompts of too few chunks nothing is asked.

    Args:
        given: the examples.
        scorer: the way.
        budgets: chunks that may be kept beside those that always are.
    """
    recalls: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    for example in given:
        ranked = ~example.forced
        scores = np.where(ranked, scorer(example), -1.0)
        oracle = np.where(ranked, example.oracle, -1.0)
        for count in budgets:
            if count >= ranked.sum():
                continue
            kept = best_chunks(scores, count)
            best = best_chunks(oracle, count)
            recalls.setdefault(example.task, []).append(float((kept & best).sum() / count))
            if len(example.evidence):
                hit = (example.evidence & (kept | example.forced)).any(axis=1)
                shares.setdefault(example.task, []).append(float(hit.mean()))

    def mean(values: dict[str, list[float]]) -> float:
        return float(np.mean([np.mean(own) for own in values.values()]))

    return Found(mean(recalls) if recalls else 0.0, mean(shares) if shares else None)


def fewest(given: Sequence[Example], scorer: Scorer, wanted: Found) -> int | None:
    """Chunks beside those always kept with which a way finds no less, of either kind; None: not with any number."""
    most = max((int((~example.forced).sum()) for example in given), default=0)
    for count in range(1, most):
        one = found(given, scorer, (count,))
        if one.recall >= wanted.recall and (one.evidence or 0.0) >= (wanted.evidence or 0.0):
            return count
    return None


def fit(given: Sequence[Example], layers: int, *, penalty: float = 0.02, steps: int = 400) -> np.ndarray:
    """Weights [layers, N] of the heads of the first layers, non-negative and mostly near 0.

    The oracle's attention over the chunks that are ranked, above its median, is a distribution; so is the weighted sum
    of the heads'. The loss is the cross-entropy of the second under the first, and `penalty` times the sum of the
    weights, which are of heads scaled to equal means.
    """
    heads = given[0].window.shape[1]
    rows, targets = [], []
    for example in given:
        count = np.arange(1, example.window.shape[2] + 1)
        seen = (example.window[:layers] * count[:, None]).sum(axis=2) / count.sum()
        ranked = ~example.forced
        above = np.maximum(example.oracle[ranked] - np.median(example.oracle[ranked]), 0)
        if above.sum() > 0:
            rows.append(seen.reshape(layers * heads, -1)[:, ranked])
            targets.append(above / above.sum())
    if not rows:
        return np.zeros((layers, heads), np.float32)
    most = max(row.shape[1] for row in rows)
    scale = np.mean([row.mean(axis=1) for row in rows], axis=0) + 1e-12
    seen = jnp.stack([jnp.pad(row / scale[:, None], ((0, 0), (0, most - row.shape[1]))) for row in rows])
    target = jnp.stack([jnp.pad(one, (0, most - len(one))) for one in targets])

    def loss(raw: jax.Array) -> jax.Array:
        weights = jax.nn.softplus(raw)
        scores = jnp.einsum("h,ehc->ec", weights, seen) + 1e-9
        shares = scores / scores.sum(axis=1, keepdims=True)
        return -(target * jnp.log(shares)).sum(axis=1).mean() + penalty * weights.sum()

    optimiser = optax.adam(0.1)
    raw = jnp.full(layers * heads, -3.0)

    @jax.jit
    def step(raw: jax.Array, state: optax.OptState) -> tuple[jax.Array, optax.OptState]:
        updates, state = optimiser.update(jax.grad(loss)(raw), state)
        return jnp.asarray(optax.apply_updates(raw, updates)), state

    state = optimiser.init(raw)
    for _ in range(steps):
        raw, state = step(raw, state)
    return np.asarray(jax.nn.softplus(raw)).reshape(layers, heads)


def choose_heads(given: Sequence[Example], weights: np.ndarray) -> Heads:
    """The few heads that find most by a maximum over them, of those that weigh most.

    Added one by one as long as that finds more; the first is tried from each of the heaviest.
    """
    order = np.argsort(-weights.ravel(), kind="stable")[: 4 * MOST_HEADS]
    able = [divmod(int(index), weights.shape[1]) for index in order]
    chosen: Heads = ()
    best = -1.0
    while len(chosen) < MOST_HEADS:
        tried = [(found(given, by_window((*chosen, head))).value, head) for head in able if head not in chosen]
        value, head = max(tried, key=lambda one: one[0])
        if value < best + LEAST_GAIN:
            break
        best, chosen = value, (*chosen, head)
    return tuple(sorted(chosen))
