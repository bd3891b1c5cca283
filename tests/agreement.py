"""What it means that the package agrees with the oracle: the checks that several test files share.

Greedy choices and kept chunks may differ only where the oracle itself sees a tie within float32 rounding; all that
follows such a tie is compared with the oracle going the same way. So no case is skipped and none hangs on a coin.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from pathlib import Path

import numpy as np
import oracle

DATA = Path(__file__).parent / "data"
MAIN = DATA / "checkpoints" / "tiny-main"
SPECULATOR = DATA / "checkpoints" / "tiny-draft"
TIE = 1e-3  # relative gap of chunk scores under which float32 may swap them


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A prompt of `length` random ids (no special ones) for the tiny models."""
    return np.random.default_rng([seed, length]).integers(5, 512, length).tolist()


def goldens() -> list[Path]:
    """The golden cases of the tiny pair."""
    return sorted((DATA / "goldens").glob("tiny_*.npz"))


def load_tiny(**options):
    """A new tiny pair, in float32 unless `options` of from_pretrained say otherwise."""
    from specprefill_jax import SpecPrefill  # here, so that tests of parts run where the whole cannot be imported

    return SpecPrefill.from_pretrained(
        **{"main": str(MAIN), "speculator": str(SPECULATOR), "dtype": "float32", **options}
    )


def relative_error(actual, expected) -> float:
    """Norm of the difference over the norm of `expected`."""
    return float(np.linalg.norm(np.asarray(actual, np.float64) - expected) / np.linalg.norm(expected))


def assert_greedy(tokens: Sequence[int], logits: np.ndarray):
    """Each token is the argmax of its logits [T, V], or ties with it within float32 rounding."""
    assert len(tokens) == len(logits)
    for step, token in enumerate(tokens):
        gap = logits[step].max() - logits[step][token]
        assert gap <= 1e-4 * np.abs(logits[step]).max(), (
            f"step {step}: {token} is not greedy, {logits[step].argmax()} leads by {gap}"
        )


class Reference(oracle.SpecPrefill):
    """The oracle, remembering what it computed."""

    def __init__(self, main: Path, speculator: Path, speculator_layers: int | None = None):
        super().__init__(main, speculator, speculator_layers)
        self._look = lru_cache(None)(super().look)
        self._logits = lru_cache(None)(super().logits_of)

    def look(self, ids, look_ahead, tokens=None):
        return self._look(tuple(ids), look_ahead, tokens and tuple(tokens))

    def logits_of(self, ids, kept, tokens):
        return self._logits(tuple(ids), tuple(kept), tuple(tokens))


def assert_selection(selection, reference: Reference, ids, *, look_ahead=8, width=13, chunk=32, rate="0.3", eos=()):
    """A paper-mode selection equals the oracle's: look-ahead, queries, importance, chunk scores, kept tokens."""
    given = [int(token) for token in selection.look_ahead_tokens]
    assert selection.num_queries <= len(given) <= look_ahead
    # One pass over what was given, in place of one a step: each token is greedy after those before it.
    scores = reference.look(ids, len(given), given)
    assert_greedy(given, scores.look_ahead_logits)
    choice = reference.choose(ids, look_ahead=look_ahead, width=width, chunk=chunk, rate=rate, eos=eos, scores=scores)
    assert selection.num_queries == choice.num_queries
    np.testing.assert_allclose(selection.importance, choice.importance, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(selection.chunk_scores, choice.chunk_scores, rtol=1e-3, atol=1e-5)
    assert_kept(selection.kept_indices, choice, chunk, rate, len(ids))


def assert_kept(kept_indices, choice: oracle.Choice, chunk: int, rate: str, total: int):
    """The kept tokens are whole chunks, ascending, as many as they should be, and none dropped beats a kept one."""
    kept = [int(index) for index in kept_indices]
    chunks = sorted({index // chunk for index in kept})
    assert kept == oracle.tokens_of(chunks, chunk, total), "not whole chunks in ascending order"
    assert len(chunks) == math.ceil(len(choice.chunk_scores) * Fraction(rate))
    if choice.margin > TIE:
        assert kept == choice.kept
    dropped = sorted(set(range(len(choice.chunk_scores))) - set(chunks))
    if dropped:
        lowest, highest = choice.chunk_scores[chunks].min(), choice.chunk_scores[dropped].max()
        assert lowest >= highest * (1 - TIE), f"a dropped chunk scores {highest}, a kept one {lowest}"


def assert_answer(model, reference: Reference, ids, selection, tokens: Sequence[int]):
    """After the selection, prefill's logits and the greedy `tokens` equal the oracle's over the same kept tokens."""
    kept = [int(index) for index in selection.kept_indices]
    expected = reference.logits_of(ids, kept, [int(token) for token in tokens])
    assert relative_error(model.prefill(ids, selection), expected[0]) < 1e-3
    assert_greedy(tokens, expected)
