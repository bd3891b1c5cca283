"""Rows on how well a speculator finds what the oracle would keep, by keep rate and look-ahead.

Two things may go wrong between a speculator and the main model: it guesses another answer, or it attends to other
parts of the prompt for the same one. The method "specprefill" has both; "answer" gives the true answer to the
speculator too, and so has the second alone: whether attention is transferable (arXiv 2502.02789, section 3).
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from specprefill_jax.config import PAPER_SETTINGS, SpecPrefillConfig
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.evals.oracle import best_chunks, mass_recall, oracle_chunks, pearson, recall, spearman
from specprefill_jax.evals.runner import Rows, common_fields, named
from specprefill_jax.evals.samples import Sample, prompt_ids, true_answer_ids
from specprefill_jax.evals.settings import Setting, names_of, parse_setting
from specprefill_jax.pipeline import SpecPrefill
from specprefill_jax.planning import budget
from specprefill_jax.speculator import Speculator

KIND = "recall"
"""Marks the rows, in their field `kind`."""
MEASURES = ("recall", "mass", "oracle_mass", "spearman", "pearson")
"""Fields of a row; the shares are from 0 to 1, the correlations, of chunk scores, from -1 to 1 or None."""


def recall_settings(keep_rates: tuple[float, ...], look_aheads: tuple[int, ...]) -> list[Setting]:
    """The paper's full setting at every keep rate and look-ahead, and given the true answer (`p1_full_answer`)."""
    settings = [parse_setting(name) for name in names_of(("specprefill",), keep_rates, look_aheads)]
    full = PAPER_SETTINGS["Full"]
    for rate in keep_rates:
        [name] = names_of(("specprefill",), (rate,), (1,))
        config = SpecPrefillConfig.paper(rate, 1, full["pool_width"], full["chunk_size"])
        settings.append(Setting(f"{name}_answer", "answer", rate, config))
    return settings


def recall_rows(answer_tokens: int) -> Rows:
    """What the runner asks for rows; of the true answers the first `answer_tokens` tokens are read.

    What it returns is for one pair of models: the oracle's compiled programs are kept.
    """
    return partial(_rows, answer_tokens=answer_tokens, readers={})


def _rows(
    model: SpecPrefill,
    sample: Sample,
    groups: Sequence[Sequence[Setting]],
    seed: int,
    *,
    answer_tokens: int,
    readers: dict[str, Speculator],
) -> Iterator[dict[str, Any]]:
    ids = prompt_ids(sample, model.tokenizer)
    answer = true_answer_ids(sample, model.tokenizer)[:answer_tokens]
    common = {**common_fields(sample, ids, seed), "kind": KIND, "answer_tokens": len(answer)}
    if "main" not in readers:
        readers["main"] = Speculator(model.main, model.prefill_chunk)
    full = PAPER_SETTINGS["Full"]
    chunk_size, pool_width = full["chunk_size"], full["pool_width"]
    started = time.perf_counter()
    try:
        oracle = oracle_chunks(readers["main"], ids, answer, chunk_size, pool_width, backend=model.kernels)
    except SpecPrefillError as error:
        for setting in (setting for group in groups for setting in group):
            yield {**common, **_unread(setting, error)}
        return
    timings = {"oracle": time.perf_counter() - started}
    for group in groups:
        started = time.perf_counter()
        chosen: list[tuple[np.ndarray, np.ndarray | None, int]]
        try:
            if group[0].method == "answer":
                found = oracle_chunks(model.speculator, ids, answer, chunk_size, pool_width, backend=model.kernels)
                rates = [rate for setting in group if not isinstance(rate := setting.keep_rate, str)]
                masks = [best_chunks(found, budget(len(found), rate)) for rate in rates]
                chosen = [(mask, found, len(answer) + 1) for mask in masks]
            else:
                configs = [setting.config for setting in group if setting.config is not None]
                chosen = [
                    (made.kept_chunk_mask, made.chunk_scores, made.num_queries)
                    for made in model.select_many(ids, configs)
                ]
        except SpecPrefillError as error:
            for setting in group:
                yield {**common, **_unread(setting, error)}
            continue
        timings["choose"] = time.perf_counter() - started
        for setting, (mask, scores, queries) in zip(group, chosen, strict=True):
            assert scores is not None  # in paper mode no prompt is read whole
            yield {
                **common,
                **named(setting),
                "look_ahead": setting.config.look_ahead if setting.config and setting.method != "answer" else None,
                "num_queries": queries,
                "num_chunks": len(oracle),
                "kept_chunks": int(mask.sum()),
                **_shares(mask, oracle, len(ids), chunk_size),
                "spearman": spearman(scores, oracle),
                "pearson": pearson(scores, oracle),
                "skipped": None,
                "timings": dict(timings),
            }


def _shares(mask: np.ndarray, oracle: np.ndarray, num_tokens: int, chunk_size: int) -> dict[str, float]:
    best = best_chunks(oracle, int(mask.sum()))
    return {
        "recall": recall(mask, best),
        "mass": mass_recall(mask, oracle, num_tokens, chunk_size),
        "oracle_mass": mass_recall(best, oracle, num_tokens, chunk_size),
    }


def _unread(setting: Setting, error: SpecPrefillError) -> dict[str, Any]:
    return {**named(setting), **dict.fromkeys(MEASURES), "skipped": str(error), "timings": {}}
