"""What plots share: a page in SVG with a title, a frame with axes, curves, colours that fit a light and a dark page."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 470
LEFT, RIGHT, TOP, BOTTOM = 62, 734, 74, 408
"""The frame that lines are drawn in; the clip path "inside" cuts off what leaves it."""
COLOURS = ("#c2571a", "#2a6fb5", "#2f8f5b", "#8a4fb0", "#a8801c", "#b03a5b")

_STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #24292f; }
  .title { font-size: 17px; font-weight: 600; }
  .quiet { fill: #57606a; }
  .page { fill: #fdfdfc; stroke: #d0d7de; }
  .grid { stroke: #e2e6ea; }
  .axis { stroke: #57606a; }
  .ideal { stroke: #57606a; stroke-dasharray: 6 5; stroke-width: 1.6; fill: none; }
  .line { stroke-width: 2.6; fill: none; }
  .band { opacity: 0.17; }
  .point { fill: #24292f; stroke: #fdfdfc; stroke-width: 1.5; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; }
    .quiet { fill: #9aa4af; }
    .page { fill: #161b22; stroke: #30363d; }
    .grid { stroke: #2b313a; }
    .axis, .ideal { stroke: #9aa4af; }
    .band { opacity: 0.28; }
    .point { fill: #e6edf3; stroke: #161b22; }
  }
"""


def page(title: str, subtitle: str, alternative: str, parts: Iterable[str]) -> str:
    """The SVG of a plot: its heads in words, `alternative` for those who cannot see it, then `parts` as they are."""
    frame = f'x="{LEFT}" y="{TOP}" width="{RIGHT - LEFT}" height="{BOTTOM - TOP}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
            'role="img" aria-labelledby="title text">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="text">{escape(alternative)}</desc>',
            f"<style>{_STYLE}</style>",
            f'<clipPath id="inside"><rect {frame}/></clipPath>',
            f'<rect class="page" x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8"/>',
            f'<text class="title" x="20" y="31">{escape(title)}</text>',
            f'<text class="quiet" x="20" y="53">{escape(subtitle)}</text>',
            *parts,
            "</svg>",
            "",
        ]
    )


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to at least `most` (above 0), equally far apart: three to eight of them."""
    power = 10.0 ** math.floor(math.log10(most / 7))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if most / step <= 7)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


@dataclass(frozen=True)
class Axes:
    """The frame as a plane: both axes begin at 0 and end at their last tick."""

    across: Sequence[float]
    """Ticks of the lower side."""
    up: Sequence[float]
    """Ticks of the left side; a line crosses the frame at each."""

    def x(self, value: float) -> float:
        """Where a value across is."""
        return LEFT + value / self.across[-1] * (RIGHT - LEFT)

    def y(self, value: float) -> float:
        """Where a value up is."""
        return BOTTOM - value / self.up[-1] * (BOTTOM - TOP)

    def points(self, values: Iterable[tuple[float, float]]) -> list[str]:
        """Pairs (across, up) as SVG has them."""
        return [f"{self.x(across):.1f},{self.y(up):.1f}" for across, up in values]

    def parts(self, label: str, unit: str = "") -> list[str]:
        """The lines, their numbers (with `unit` after those of the left side), and `label` below."""
        parts = []
        for value in self.up:
            kind, height = "grid" if value else "axis", f"{self.y(value):.1f}"
            parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{RIGHT}" y1="{height}" y2="{height}"/>')
            where = f'x="{LEFT - 9}" y="{height}" dy="4.5" text-anchor="end"'
            parts.append(f'<text class="quiet" {where}>{value:.4g}{unit}</text>')
        for value in self.across:
            at = f"{self.x(value):.1f}"
            parts.append(f'<line class="axis" x1="{at}" x2="{at}" y1="{BOTTOM}" y2="{BOTTOM + 5}"/>')
            parts.append(f'<text class="quiet" x="{at}" y="{BOTTOM + 22}" text-anchor="middle">{value:.4g}</text>')
        where = f'x="{(LEFT + RIGHT) / 2:g}" y="{BOTTOM + 46}" text-anchor="middle"'
        return [*parts, f"<text {where}>{label}</text>"]


def curve(colour: str, line: Sequence[str], band: Sequence[str]) -> list[str]:
    """A line through points with a dot at each, over a band with this outline; nothing where there is no point."""
    if not line:
        return []
    parts = [f'<polygon class="band" fill="{colour}" points="{" ".join(band)}"/>']
    parts.append(f'<polyline class="line" stroke="{colour}" points="{" ".join(line)}"/>')
    for point in line:
        at, height = point.split(",")
        parts.append(f'<circle cx="{at}" cy="{height}" r="4" fill="{colour}"/>')
    return parts


def key(colour: str, name: str, start: float, end: float, height: float) -> list[str]:
    """A piece of line from `start` to `end`, and the name of what has its colour."""
    at = f'y1="{height}" y2="{height}"'
    return [
        f'<line class="line" stroke="{colour}" x1="{start}" x2="{end}" {at}/>',
        f'<text x="{end + 8}" y="{height + 4.5:g}">{escape(name)}</text>',
    ]
