"""Rows of results into tables: means with bootstrap intervals, by task, length, category and way of reading."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from specprefill_jax.config import KeepRate
from specprefill_jax.evals.document import Table

RESAMPLES = 2000


class Estimate(NamedTuple):
    """A mean, and the interval that holds it in 95 % of resamples."""

    mean: float
    low: float
    high: float
    samples: int


def bootstrap(groups: Sequence[Sequence[float]], seed: int = 0, resamples: int = RESAMPLES) -> Estimate:
    """The mean of the groups' means, and its 95 % interval: percentiles over resamples within each group, seeded.

    One group is the usual bootstrap of a mean; several are such as the tasks of a category, all of one weight. A group
    of one sample says nothing of its spread: the interval is NaN.
    """
    mean = float(np.mean([np.mean(group) for group in groups]))
    samples = sum(map(len, groups))
    if min(map(len, groups)) < 2:
        return Estimate(mean, math.nan, math.nan, samples)
    draw = np.random.default_rng(seed)
    means = np.zeros(resamples)
    for group in groups:
        values = np.asarray(group, np.float64)
        # Counts of each value: as many numbers as the group has, not resamples times as many indices at once.
        weights = draw.multinomial(len(values), np.full(len(values), 1 / len(values)), size=resamples)
        means += weights @ values / len(values) / len(groups)
    low, high = np.percentile(means, (2.5, 97.5))
    return Estimate(mean, float(low), float(high), samples)


@dataclass(frozen=True)
class Row:
    """What tables need of a row of results."""

    sample: str
    """Names the sample within the benchmark."""
    benchmark: str
    task: str
    category: str
    bucket: str
    setting: str
    method: str
    keep_rate: KeepRate
    score: float | None
    """None for one that could not be read."""
    kept: float
    """Share of the prompt's tokens that was read."""
    ttft: float
    """Seconds to the first token, the choice included."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> "Row":
        """From a row of a file."""
        timings = row["timings"]
        return cls(
            sample=f"{row['task']}/{row['bucket']}/{row['key']}",
            **{name: row[name] for name in ("benchmark", "task", "category", "bucket", "setting", "method")},
            keep_rate=row["keep_rate"],
            score=row["score"],
            kept=row["num_kept"] / row["num_tokens"] if row["score"] is not None else 0.0,
            ttft=timings["choose"] + timings["ttft"] if timings else 0.0,
        )


def order_of(setting: str, method: str, keep_rate: KeepRate) -> tuple[bool, str, float, str]:
    """Sorts ways of reading: dense, then the methods, each from the lowest keep rate up, "auto" last."""
    return method != "dense", method, 2.0 if keep_rate == "auto" else keep_rate, setting


def settings_of(rows: Iterable[Row]) -> list[str]:
    """The ways of reading in the rows, in the order of `order_of`."""
    found = {(row.setting, row.method, row.keep_rate) for row in rows}
    return [setting for setting, _, _ in sorted(found, key=lambda known: order_of(*known))]


def estimates(rows: Iterable[Row], by: Sequence[str], seed: int = 0) -> dict[tuple[str, ...], Estimate]:
    """Scores times 100 by the fields named in `by`; tasks in one cell have the same weight, however many samples."""
    cells: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.score is not None:
            cells[tuple(str(getattr(row, name)) for name in by)][row.task].append(100 * row.score)
    return {key: bootstrap(list(tasks.values()), seed) for key, tasks in cells.items()}


def against_dense(rows: Sequence[Row], seed: int = 0) -> dict[str, Estimate]:
    """By setting, its scores times 100 less those of the whole prompt, over the samples that both read, tasks alike.

    Paired: what is common to both readings of a sample does not widen the interval.
    """
    whole = {row.sample: row.score for row in rows if row.method == "dense" and row.score is not None}
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        dense = whole.get(row.sample)
        if row.method != "dense" and row.score is not None and dense is not None:
            found[row.setting][row.task].append(100 * (row.score - dense))
    return {setting: bootstrap(list(tasks.values()), seed) for setting, tasks in found.items()}


def table(head: str, columns: Sequence[str], lines: Mapping[str, Mapping[str, Estimate]]) -> Table:
    """A table of estimates as `mean [low, high]`; an empty cell is a dash.

    Args:
        head: the first column's title.
        columns: the others, in order.
        lines: cells by line and column.
    """
    cells = [
        [name, *(cell(own[column]) if column in own else "-" for column in columns)] for name, own in lines.items()
    ]
    return Table([head, *columns], cells)


def cell(estimate: Estimate) -> str:
    """An estimate as `mean [low, high]`, one decimal each; `mean` alone where there is no interval."""
    if math.isnan(estimate.low):
        return f"{estimate.mean:.1f}"
    return f"{estimate.mean:.1f} [{estimate.low:.1f}, {estimate.high:.1f}]"
