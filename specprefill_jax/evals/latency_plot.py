"""A plot of latency over the rate of requests, a line for each way of reading."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from specprefill_jax.view.plot import COLOURS, LEFT, TOP, Axes, curve, key, page, ticks

Metric = Literal["ttft", "e2e"]
_NAMES = {"ttft": "Time to first token", "e2e": "Time to the whole answer"}


def latency_svg(rows: Sequence[Mapping[str, Any]], metric: Metric, heading: str) -> str:
    """Medians as lines, bands up to the 95th percentile, and a cross at the top for each run of a rate that failed.

    Args:
        rows: runs, as `rates.summary` describes them, with `mode`, `rate` and `holds` beside.
        metric: what is drawn; of a rate that failed, only the cross.
        heading: a sentence on how it was measured.
    """
    drawn = [row for row in rows if row[metric] and row["holds"]]
    across = ticks(max((row["rate"] for row in rows), default=1.0))
    axes = Axes(across, ticks(max((row[metric]["p95"] for row in drawn), default=1.0)))
    subtitle = f"{heading} Lines: medians; bands: to the 95th percentile; crosses: failed."
    parts, said = axes.parts("requests a second", " s"), []
    for i, mode in enumerate(dict.fromkeys(row["mode"] for row in rows)):
        colour = COLOURS[i % len(COLOURS)]
        mine = sorted((row for row in drawn if row["mode"] == mode), key=lambda row: row["rate"])
        line, top = (axes.points((row["rate"], row[metric][point]) for row in mine) for point in ("p50", "p95"))
        parts += curve(colour, line, line + top[::-1])
        if mine:
            said.append(f"{mode}: up to {mine[-1]['rate']:.3g} a second, {mine[-1][metric]['p50']:.3g} s there.")
        for row in rows:
            if row["mode"] == mode and not row["holds"]:
                cross = f"M{axes.x(row['rate']) - 5:.1f} {TOP - 5}l10 10m0 -10l-10 10"
                parts.append(f'<path class="line" stroke="{colour}" d="{cross}"/>')
        parts += key(colour, mode, LEFT + 16, LEFT + 46, TOP + 24 + 22 * i)
    return page(_NAMES[metric] + " over the rate of requests", subtitle, " ".join([subtitle, *said]), parts)
