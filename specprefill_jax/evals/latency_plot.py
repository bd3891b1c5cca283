"""A plot of latency over the rate of requests, a line for each way of reading."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Literal

from specprefill_jax.view.plot import BOTTOM, COLOURS, LEFT, RIGHT, TOP, page

Metric = Literal["ttft", "e2e"]
_NAMES = {"ttft": "Time to first token", "e2e": "Time to the whole answer"}


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to at least `most` (above 0), equally far apart: three to eight of them."""
    power = 10.0 ** math.floor(math.log10(most / 7))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if most / step <= 7)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def latency_svg(rows: Sequence[Mapping[str, Any]], metric: Metric, heading: str) -> str:
    """Medians as lines, bands up to the 95th percentile, and a cross at the top for each run of a rate that failed.

    Args:
        rows: runs, as `rates.summary` describes them, with `mode`, `rate` and `holds` beside.
        metric: what is drawn; of a rate that failed, only the cross.
        heading: a sentence on how it was measured.
    """
    drawn = [row for row in rows if row[metric] and row["holds"]]
    across = ticks(max((row["rate"] for row in rows), default=1.0))
    up = ticks(max((row[metric]["p95"] for row in drawn), default=1.0))

    def x(rate: float) -> float:
        return LEFT + rate / across[-1] * (RIGHT - LEFT)

    def y(seconds: float) -> float:
        return BOTTOM - seconds / up[-1] * (BOTTOM - TOP)

    subtitle = f"{heading} Lines: medians; bands: to the 95th percentile; crosses: failed."
    parts, said = [], []
    for seconds in up:
        kind, height = "grid" if seconds else "axis", f"{y(seconds):.1f}"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{RIGHT}" y1="{height}" y2="{height}"/>')
        label = f'x="{LEFT - 9}" y="{height}" dy="4.5" text-anchor="end"'
        parts.append(f'<text class="quiet" {label}>{seconds:.4g} s</text>')
    for rate in across:
        at = f"{x(rate):.1f}"
        parts.append(f'<line class="axis" x1="{at}" x2="{at}" y1="{BOTTOM}" y2="{BOTTOM + 5}"/>')
        parts.append(f'<text class="quiet" x="{at}" y="{BOTTOM + 22}" text-anchor="middle">{rate:.4g}</text>')
    label = f'x="{(LEFT + RIGHT) / 2:g}" y="{BOTTOM + 46}" text-anchor="middle"'
    parts.append(f"<text {label}>requests a second</text>")
    for i, mode in enumerate(dict.fromkeys(row["mode"] for row in rows)):
        colour = COLOURS[i % len(COLOURS)]
        mine = sorted((row for row in drawn if row["mode"] == mode), key=lambda row: row["rate"])
        line = [f"{x(row['rate']):.1f},{y(row[metric]['p50']):.1f}" for row in mine]
        top = [f"{x(row['rate']):.1f},{y(row[metric]['p95']):.1f}" for row in mine]
        if mine:
            parts.append(f'<polygon class="band" fill="{colour}" points="{" ".join(line + top[::-1])}"/>')
            parts.append(f'<polyline class="line" stroke="{colour}" points="{" ".join(line)}"/>')
            said.append(f"{mode}: up to {mine[-1]['rate']:.3g} a second, {mine[-1][metric]['p50']:.3g} s there.")
        for point in line:
            across_at, up_at = point.split(",")
            parts.append(f'<circle cx="{across_at}" cy="{up_at}" r="4" fill="{colour}"/>')
        for row in rows:
            if row["mode"] == mode and not row["holds"]:
                cross = f"M{x(row['rate']) - 5:.1f} {TOP - 5}l10 10m0 -10l-10 10"
                parts.append(f'<path class="line" stroke="{colour}" d="{cross}"/>')
        at = f'y1="{TOP + 24 + 22 * i}" y2="{TOP + 24 + 22 * i}"'
        parts.append(f'<line class="line" stroke="{colour}" x1="{LEFT + 16}" x2="{LEFT + 46}" {at}/>')
        parts.append(f'<text x="{LEFT + 54}" y="{TOP + 28.5 + 22 * i:g}">{escape(mode)}</text>')
    return page(_NAMES[metric] + " over the rate of requests", subtitle, " ".join([subtitle, *said]), parts)
