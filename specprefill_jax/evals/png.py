"""Figures as PNG files, for papers and slides that take no SVG; drawn by resvg (extra `eval`)."""

from typing import Any

from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.evals.extras import extra

ZOOM = 2
"""Pixels for each unit of a figure."""
_EMPTY = '<svg xmlns="http://www.w3.org/2000/svg" width="40" height="20">{}</svg>'
_WORD = '<text y="16" font-family="sans-serif" font-size="16">word</text>'


def to_png(svg: str) -> bytes:
    """A figure of `view.plot.page` as a PNG file, in the colours of a light page, `ZOOM` times as large.

    Raises:
        SpecPrefillError: resvg is not installed, or the machine has no font: words would be left out silently.
    """
    resvg: Any = extra("resvg_py")
    if resvg.svg_to_bytes(svg_string=_EMPTY.format(_WORD)) == resvg.svg_to_bytes(svg_string=_EMPTY.format("")):
        raise SpecPrefillError("this machine has no font to write a figure's words with: install one, or use the .svg")
    return bytes(resvg.svg_to_bytes(svg_string=svg, zoom=ZOOM))
