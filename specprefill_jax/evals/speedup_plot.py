"""A plot of speed-ups over keep rates: a line for each prompt length, and the ideal."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from specprefill_jax.evals.score_plot import series_of
from specprefill_jax.view.plot import COLOURS, RIGHT, TOP, Axes, curve, key, page, ticks

IDEAL = [i / 100 for i in range(4, 101)]
"""Keep rates at which the ideal is drawn."""


def speedup_svg(
    rows: Sequence[Mapping[str, Any]], main: str, reference: tuple[str, tuple[float, float]] | None = None
) -> str:
    """Speed-ups of the first token as lines, what FLOPs allow as dots beside them, one over the keep rate as dashes.

    Args:
        rows: of `first_tokens.measure`; those without a speed-up are left out.
        main: names the main model in the title.
        reference: somebody else's: a name, and (keep rate, speed-up), drawn as a point; None: none.
    """
    drawn = [row for row in rows if row["speedup"] is not None and row["flop_ceiling"] is not None]
    most = max((max(row["speedup"], row["flop_ceiling"]) for row in drawn), default=1.0)
    most = max(most, reference[1][1] if reference else 0.0)
    axes = Axes(ticks(1.0), ticks(most))
    parts, said = axes.parts("keep rate", "x"), []
    ideal = " ".join(axes.points((rate, 1 / rate) for rate in IDEAL))
    parts.append(f'<g clip-path="url(#inside)"><polyline class="ideal" points="{ideal}"/></g>')
    series: dict[str, list[Mapping[str, Any]]] = {}
    for row in sorted(drawn, key=lambda row: (row["tokens"], row["keep_rate"])):
        name = f"{row['prompts']} x {row['tokens']:,}, {series_of(row['setting'])}"
        series.setdefault(name, []).append(row)
    for i, (name, own) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        allowed = " ".join(axes.points((row["keep_rate"], row["flop_ceiling"]) for row in own))
        parts.append(f'<polyline stroke="{colour}" stroke-dasharray="2 4" fill="none" points="{allowed}"/>')
        parts += curve(colour, axes.points((row["keep_rate"], row["speedup"]) for row in own), ())
        parts += key(colour, name, RIGHT - 250, RIGHT - 222, TOP + 24 + 22 * i)
        said.append(f"{name}: " + ", ".join(f"{row['speedup']:.2f} at {row['keep_rate']:g}" for row in own) + ".")
    if reference is not None:
        name, point = reference
        at, height = axes.points([point])[0].split(",")
        parts.append(f'<circle class="point" cx="{at}" cy="{height}" r="6"/>')
        parts.append(f'<text x="{float(at) + 12:.1f}" y="{height}" dy="4.5">{escape(name)}</text>')
        said.append(f"{name}: {point[1]:g} at {point[0]:g}.")
    subtitle = "Lines: measured; dots beside them: what FLOPs allow; dashes: the ideal, 1 / keep rate."
    return page(f"Speed-up of the first token, {main}", subtitle, " ".join([subtitle, *said]), parts)
