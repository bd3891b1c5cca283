"""Figures as PNG files, for papers and slides that take no SVG; drawn by resvg (extra `eval`)."""

from typing import Any

from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.evals.extras import extra

ZOOM = 2
"""Pixels for each unit of a figure."""
FAMILIES = ("Arial", "DejaVu Sans", "Liberation Sans", "Noto Sans", "Helvetica", "Segoe UI")
"""What "sans-serif" may mean, the first that the machine has; resvg itself knows the first alone."""
_EMPTY = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20">{}</svg>'
_WORD = '<text y="16" font-family="sans-serif" font-size="16">word</text>'


def to_png(svg: str) -> bytes:
    """A figure of `view.plot.page` as a PNG file, in the colours of a light page, `ZOOM` times as large.

    Raises:
        SpecPrefillError: resvg is not installed, or the machine has none of `FAMILIES`: words would be left out
            silently.
    """
    draw: Any = extra("resvg_py").svg_to_bytes
    empty = draw(svg_string=_EMPTY.format(""))
    for family in FAMILIES:
        if draw(svg_string=_EMPTY.format(_WORD), sans_serif_family=family) != empty:
            return bytes(draw(svg_string=svg, sans_serif_family=family, zoom=ZOOM))
    known = ", ".join(FAMILIES)
    raise SpecPrefillError(f"this machine has no font to write a figure's words with ({known}): use the .svg")
