"""What plots share: a page in SVG with a title, a frame for the lines, colours that fit a light and a dark page."""

from collections.abc import Iterable
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
