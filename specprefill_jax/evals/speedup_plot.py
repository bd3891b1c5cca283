"""A plot of speed-ups over keep rates: a line for each prompt length, and the ideal."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from specprefill_jax.evals.latency_plot import ticks
from specprefill_jax.evals.score_plot import series_of
from specprefill_jax.view.plot import BOTTOM, COLOURS, LEFT, RIGHT, TOP, page

IDEAL = [i / 100 for i in range(4, 101)]
"""Keep rates at which the ideal is drawn."""


def speedup_svg(rows: Sequence[Mapping[str, Any]], main: str) -> str:
    """Speed-ups of the first token as lines, what FLOPs allow as thin dashes beside, one over the keep rate above.

    Args:
        rows: of `first_tokens.measure`; those without a speed-up are left out.
        main: names the main model in the title.
    """
    drawn = [row for row in rows if row["speedup"] is not None and row["keep_rate"] < 1]
    up = ticks(max((max(row["speedup"], row["flop_ceiling"]) for row in drawn), default=1.0))

    def at(rate: float, speedup: float) -> str:
        return f"{LEFT + rate * (RIGHT - LEFT):.1f},{BOTTOM - speedup / up[-1] * (BOTTOM - TOP):.1f}"

    parts = []
    for gain in up:
        kind, height = "grid" if gain else "axis", at(0, gain).split(",")[1]
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{RIGHT}" y1="{height}" y2="{height}"/>')
        parts.append(f'<text class="quiet" x="{LEFT - 9}" y="{height}" dy="4.5" text-anchor="end">{gain:.4g}x</text>')
    for tenth in range(11):
        across = at(tenth / 10, 0).split(",")[0]
        parts.append(f'<line class="axis" x1="{across}" x2="{across}" y1="{BOTTOM}" y2="{BOTTOM + 5}"/>')
        parts.append(
            f'<text class="quiet" x="{across}" y="{BOTTOM + 22}" text-anchor="middle">{tenth / 10:g}</text>'
        )
    label = f'x="{(LEFT + RIGHT) / 2:g}" y="{BOTTOM + 46}" text-anchor="middle"'
    parts.append(f"<text {label}>keep rate</text>")
    ideal = " ".join(at(rate, 1 / rate) for rate in IDEAL)
    parts.append(f'<polyline class="ideal" clip-path="url(#inside)" points="{ideal}"/>')
    series: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(drawn, key=lambda row: (row["tokens"], row["keep_rate"])):
        name = f"{row['prompts']} x {row['tokens']:,}, {series_of(row['setting'])}"
        series.setdefault(name, []).append(row)
    said = []
    for i, (name, own) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        allowed = " ".join(at(row["keep_rate"], row["flop_ceiling"]) for row in own)
        line = [at(row["keep_rate"], row["speedup"]) for row in own]
        dashes = 'stroke-width="1" stroke-dasharray="2 4" fill="none"'
        parts.append(f'<polyline stroke="{colour}" {dashes} points="{allowed}"/>')
        parts.append(f'<polyline class="line" stroke="{colour}" points="{" ".join(line)}"/>')
        for point in line:
            across, height = point.split(",")
            parts.append(f'<circle cx="{across}" cy="{height}" r="4" fill="{colour}"/>')
        y = f'y1="{TOP + 24 + 22 * i}" y2="{TOP + 24 + 22 * i}"'
        parts.append(f'<line class="line" stroke="{colour}" x1="{RIGHT - 250}" x2="{RIGHT - 222}" {y}/>')
        parts.append(f'<text x="{RIGHT - 214}" y="{TOP + 28.5 + 22 * i:g}">{escape(name)}</text>')
        said.append(f"{name}: " + ", ".join(f"{row['speedup']:.2f} at {row['keep_rate']:g}" for row in own) + ".")
    subtitle = "Lines: measured; dots beside them: what FLOPs allow; dashes: the ideal, 1 / keep rate."
    return page(f"Speed-up of the first token, {main}", subtitle, " ".join([subtitle, *said]), parts)
