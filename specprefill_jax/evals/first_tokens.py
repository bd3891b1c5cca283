"""How long a batch of prompts takes to its first tokens, read whole and sparsely, as arXiv 2502.02789 times it.

A batch is there at once, every answer is one token, and the time is that to the last of them. Prompts are random token
ids: what is read costs the same, and nothing can be told of quality. All ways of reading take turns in every round, and
speed-ups are taken within a round.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from specprefill_jax.config import SamplingParams, SpecPrefillConfig
from specprefill_jax.costs import flop_ceiling
from specprefill_jax.engine.engine import Engine
from specprefill_jax.engine.request import Event, Finished, Request
from specprefill_jax.errors import SpecPrefillError, argument_error
from specprefill_jax.evals.settings import Setting
from specprefill_jax.pipeline import SpecPrefill

PERCENTILES = (10, 25, 50, 75, 90, 99)
VOCABULARY = 10_000
"""Prompts are drawn from the token ids below it."""
_ONE = SamplingParams(max_tokens=1, ignore_eos=True)
_WHOLE = SpecPrefillConfig(enabled=False)


@dataclass(frozen=True)
class Batch:
    """Prompts of one length."""

    prompts: int
    tokens: int


def config_of(setting: Setting) -> SpecPrefillConfig:
    """How the engine reads in that setting; ArgumentError for a baseline, which the engine knows nothing of."""
    if setting.config is not None:
        return setting.config
    if setting.method != "dense":
        raise argument_error("settings", setting.name, "'dense', or one that the speculator chooses for")
    return _WHOLE


def seconds_of(engine: Engine, prompts: np.ndarray, config: SpecPrefillConfig, name: str) -> tuple[float, int]:
    """Seconds until all prompts, int32 [B, M], have their first token, and the tokens kept of one of them.

    Raises:
        SpecPrefillError: a prompt was not read as `config` says.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    started = time.perf_counter()
    for row, prompt in enumerate(prompts):
        engine.submit(Request(f"{name} {row}", prompt, _ONE, config), events.put)
    finished: list[Finished] = []
    while len(finished) < len(prompts):
        event = events.get()
        if isinstance(event, Finished):
            finished.append(event)
    seconds = time.perf_counter() - started
    for end in finished:
        selection = end.selection
        if end.finish_reason != "length" or selection is None or selection.engaged != config.enabled:
            raise SpecPrefillError(f"{name}: {end.error or (selection.detail if selection else end.finish_reason)}")
    assert finished[0].selection is not None
    return seconds, finished[0].selection.num_kept


def measure(
    pair: SpecPrefill,
    engine: Engine,
    batch: Batch,
    settings: Sequence[Setting],
    *,
    warm_up: int,
    rounds: int,
    seed: int = 0,
    report: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """A JSON-ready row for each setting: seconds, and where "dense" is among the settings the speed-up over it.

    Args:
        pair: the models of the engine.
        engine: started, compiled for all of the settings.
        batch: what is read.
        settings: ways of reading; see `config_of`.
        warm_up: rounds that do not count.
        rounds: those that do; each draws its own prompts.
        seed: of the prompts.
        report: told of every batch.
    """
    configs = [config_of(setting) for setting in settings]
    draw = np.random.default_rng((seed, batch.prompts, batch.tokens))
    times: list[list[float]] = [[] for _ in settings]
    kept = [0] * len(settings)
    for round_ in range(-warm_up, rounds):
        for i, (setting, config) in enumerate(zip(settings, configs, strict=True)):
            # Of its own, so that no cache knows its beginning.
            shape = (batch.prompts, batch.tokens)
            prompts = draw.integers(0, min(VOCABULARY, engine.vocab_size), shape, dtype=np.int32)
            seconds, kept[i] = seconds_of(engine, prompts, config, f"{setting.name} {round_}")
            report(f"{batch.prompts} x {batch.tokens}, {setting.name}: {seconds:.2f} s")
            if round_ >= 0:
                times[i].append(seconds)
    names = [setting.name for setting in settings]
    dense = times[names.index("dense")] if "dense" in names else None
    rows = []
    for setting, own, count in zip(settings, times, kept, strict=True):
        sparse = setting.config is not None
        percentiles = np.percentile(own, PERCENTILES).tolist()
        ceiling = flop_ceiling(pair.main.config, pair.speculator.model.config, batch.tokens, count) if sparse else None
        rows.append(
            {
                "prompts": batch.prompts,
                "tokens": batch.tokens,
                "setting": setting.name,
                "keep_rate": setting.keep_rate,
                "look_ahead": setting.config.look_ahead if setting.config else None,
                "kept": count,
                "seconds": {
                    "mean": statistics.mean(own),
                    **{f"p{p}": value for p, value in zip(PERCENTILES, percentiles, strict=True)},
                    "all": own,
                },
                "speedup": statistics.median(d / s for d, s in zip(dense, own, strict=True)) if dense else None,
                "flop_ceiling": ceiling,
                "ideal": batch.tokens / count,
            }
        )
    return rows
