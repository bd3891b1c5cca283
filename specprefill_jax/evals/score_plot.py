"""A plot of scores over keep rates: a line for each way of choosing, and one across for the whole prompt."""

import math
import statistics
from collections.abc import Sequence
from html import escape

from specprefill_jax.evals.tables import Estimate, Row, estimates, settings_of
from specprefill_jax.view.plot import BOTTOM, COLOURS, LEFT, RIGHT, Axes, curve, key, page, ticks


def series_of(setting: str) -> str:
    """The way of choosing without its keep rate: `p1_full_lah8` is `p*_full_lah8`; "auto" is a way of its own."""
    parts = setting.split("_")
    return "_".join("p*" if part[:1] == "p" and part[1:2].isdigit() else part for part in parts)


def score_svg(
    rows: Sequence[Row], heading: str, seed: int = 0, reference: Sequence[tuple[float, float]] = (), name: str = ""
) -> str:
    """Means over all tasks as lines, 95 % intervals as bands.

    Args:
        rows: what was scored.
        heading: the title.
        seed: of the bootstrap.
        reference: somebody else's scores, (keep rate, score), drawn as a dashed line; () for none.
        name: whose they are.
    """
    known = {setting: estimate for (setting,), estimate in estimates(rows, ("setting",), seed).items()}
    rates = {row.setting: rate for row in rows if not isinstance(rate := row.keep_rate, str)}
    for setting in known.keys() - rates.keys():  # where what it read puts it
        rates[setting] = statistics.mean(row.kept for row in rows if row.setting == setting and row.score is not None)
    series: dict[str, list[tuple[float, Estimate]]] = {}
    for setting in settings_of(rows):
        if setting in known and setting != "dense":
            series.setdefault(series_of(setting), []).append((rates[setting], known[setting]))
    across = ticks(max([*rates.values(), *(rate for rate, _ in reference)], default=1.0))
    most = max((max(e.mean, 0.0 if math.isnan(e.high) else e.high) for e in known.values()), default=0.0)
    most = max([most, *(score for _, score in reference)])
    axes = Axes(across, ticks(most or 1.0))
    parts, said = axes.parts("keep rate"), []
    if "dense" in known:
        height = f"{axes.y(known['dense'].mean):.1f}"
        parts.append(f'<line class="ideal" x1="{LEFT}" x2="{RIGHT}" y1="{height}" y2="{height}"/>')
        label = f'x="{LEFT + 6}" y="{axes.y(known["dense"].mean) - 6:.1f}"'
        parts.append(f'<text class="quiet" {label}>the whole prompt</text>')
        said.append(f"The whole prompt: {known['dense'].mean:.1f}.")
    if reference:
        parts.append(f'<polyline class="ideal" points="{" ".join(axes.points(reference))}"/>')
        at, height = axes.points(reference[-1:])[0].split(",")
        parts.append(
            f'<text class="quiet" x="{at}" y="{float(height) - 8:.1f}" text-anchor="end">{escape(name)}</text>'
        )
        said.append(f"{name}: " + ", ".join(f"{score:g} at {rate:g}" for rate, score in reference) + ".")
    for i, (way, points) in enumerate(series.items()):
        colour = COLOURS[i % len(COLOURS)]
        sure = [point for point in points if not math.isnan(point[1].low)]
        low = axes.points((rate, estimate.low) for rate, estimate in sure)
        high = axes.points((rate, estimate.high) for rate, estimate in sure)
        parts += curve(colour, axes.points((rate, estimate.mean) for rate, estimate in points), low + high[::-1])
        parts += key(colour, way, RIGHT - 190, RIGHT - 162, BOTTOM - 18 - 20 * i)
        said.append(f"{way}: " + ", ".join(f"{estimate.mean:.1f} at {rate:g}" for rate, estimate in points) + ".")
    subtitle = "Lines: means over all tasks; bands: 95 % intervals."
    return page(heading, subtitle, " ".join([subtitle, *said]), parts)
