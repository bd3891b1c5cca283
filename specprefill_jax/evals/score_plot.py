"""A plot of scores over keep rates: a line for each way of choosing, and one across for the whole prompt."""

import math
from collections.abc import Sequence
from html import escape

from specprefill_jax.evals.latency_plot import ticks
from specprefill_jax.evals.tables import Estimate, Row, estimates, settings_of
from specprefill_jax.view.plot import BOTTOM, COLOURS, LEFT, RIGHT, TOP, page


def series_of(setting: str) -> str:
    """The way of choosing without its keep rate: `p1_full_lah8` is `p*_full_lah8`."""
    parts = setting.split("_")
    return "_".join("p*" if part[:1] == "p" and part[1:2].isdigit() else part for part in parts)


def score_svg(rows: Sequence[Row], heading: str, seed: int = 0) -> str:
    """Means over all tasks as lines, 95 % intervals as bands."""
    known = {setting: estimate for (setting,), estimate in estimates(rows, ("setting",), seed).items()}
    rates = {row.setting: row.keep_rate for row in rows}
    series: dict[str, list[tuple[float, Estimate]]] = {}
    for setting in settings_of(rows):
        if setting in known and setting != "dense":
            series.setdefault(series_of(setting), []).append((rates[setting], known[setting]))
    across = ticks(max(rates.values(), default=1.0))
    up = ticks(max((max(e.mean, 0.0 if math.isnan(e.high) else e.high) for e in known.values()), default=0.0) or 1.0)

    def x(rate: float) -> float:
        return LEFT + rate / across[-1] * (RIGHT - LEFT)

    def y(score: float) -> float:
        return BOTTOM - score / up[-1] * (BOTTOM - TOP)

    parts, said = [], []
    for score in up:
        kind, height = "grid" if score else "axis", f"{y(score):.1f}"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{RIGHT}" y1="{height}" y2="{height}"/>')
        label = f'x="{LEFT - 9}" y="{height}" dy="4.5" text-anchor="end"'
        parts.append(f'<text class="quiet" {label}>{score:.4g}</text>')
    for rate in across:
        at = f"{x(rate):.1f}"
        parts.append(f'<line class="axis" x1="{at}" x2="{at}" y1="{BOTTOM}" y2="{BOTTOM + 5}"/>')
        parts.append(f'<text class="quiet" x="{at}" y="{BOTTOM + 22}" text-anchor="middle">{rate:.4g}</text>')
    label = f'x="{(LEFT + RIGHT) / 2:g}" y="{BOTTOM + 46}" text-anchor="middle"'
    parts.append(f"<text {label}>keep rate</text>")
    if "dense" in known:
        height = f"{y(known['dense'].mean):.1f}"
        parts.append(f'<line class="ideal" x1="{LEFT}" x2="{RIGHT}" y1="{height}" y2="{height}"/>')
        label = f'x="{LEFT + 6}" y="{y(known["dense"].mean) - 6:.1f}"'
        parts.append(f'<text class="quiet" {label}>the whole prompt</text>')
        said.append(f"The whole prompt: {known['dense'].mean:.1f}.")
    for i, (name, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        sure = [point for point in points if not math.isnan(point[1].low)]
        low = [f"{x(rate):.1f},{y(estimate.low):.1f}" for rate, estimate in sure]
        high = [f"{x(rate):.1f},{y(estimate.high):.1f}" for rate, estimate in sure]
        line = [f"{x(rate):.1f},{y(estimate.mean):.1f}" for rate, estimate in points]
        parts.append(f'<polygon class="band" fill="{colour}" points="{" ".join(low + high[::-1])}"/>')
        parts.append(f'<polyline class="line" stroke="{colour}" points="{" ".join(line)}"/>')
        for point in line:
            at, height = point.split(",")
            parts.append(f'<circle cx="{at}" cy="{height}" r="4" fill="{colour}"/>')
        at = f'y1="{BOTTOM - 18 - 20 * i}" y2="{BOTTOM - 18 - 20 * i}"'
        parts.append(f'<line class="line" stroke="{colour}" x1="{RIGHT - 190}" x2="{RIGHT - 162}" {at}/>')
        parts.append(f'<text x="{RIGHT - 154}" y="{BOTTOM - 13.5 - 20 * i:g}">{escape(name)}</text>')
        said.append(f"{name}: " + ", ".join(f"{estimate.mean:.1f} at {rate:g}" for rate, estimate in points) + ".")
    subtitle = "Lines: means over all tasks; bands: 95 % intervals."
    return page(heading, subtitle, " ".join([subtitle, *said]), parts)
