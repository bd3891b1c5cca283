"""Figures as PNG files."""

import re
import struct
import sys
import zlib
from functools import partial

import pytest
import resvg_py
from script_modules import load_script

from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.evals.png import to_png
from specprefill_jax.view.plot import COLOURS, HEIGHT, LEFT, RIGHT, TOP, WIDTH, curve, page

WITHOUT_FONTS = partial(resvg_py.svg_to_bytes, skip_system_fonts=True)


def pixels(png: bytes) -> tuple[int, int, list[bytes]]:
    """Width, height, and rows of a PNG of 8-bit RGBA without interlacing (PNG specification, 5 and 9)."""
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    at, data, head = 8, b"", b""
    while at < len(png):
        (length,), kind = struct.unpack(">I", png[at : at + 4]), png[at + 4 : at + 8]
        body = png[at + 8 : at + 8 + length]
        head, data = (body if kind == b"IHDR" else head), data + (body if kind == b"IDAT" else b"")
        at += 12 + length
    width, height, *form = struct.unpack(">IIBBBBB", head)
    assert form == [8, 6, 0, 0, 0]
    raw, stride, rows, before = zlib.decompress(data), 4 * width, [], bytes(4 * width)
    for y in range(height):
        line = bytearray(raw[y * (stride + 1) + 1 : (y + 1) * (stride + 1)])
        filtered = raw[y * (stride + 1)]
        for x in range(stride):
            a, b, c = (line[x - 4] if x > 3 else 0), before[x], (before[x - 4] if x > 3 else 0)
            nearest = min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))[2]
            line[x] = (line[x] + (0, a, b, (a + b) // 2, nearest)[filtered]) % 256
        before = bytes(line)
        rows.append(before)
    return width, height, rows


def test_drawn_as_on_a_light_page(monkeypatch):
    monkeypatch.setattr("specprefill_jax.evals.png._WORD", "<rect width='9' height='9'/>")  # fonts or not
    line = [f"{LEFT},{TOP + 40}", f"{RIGHT},{TOP + 40}"]
    width, height, rows = pixels(to_png(page("Title", "subtitle", "words", curve(COLOURS[0], line, ()))))
    assert (width, height) == (2 * WIDTH, 2 * HEIGHT)

    def at(x: float, y: float) -> str:
        return rows[int(2 * y)][8 * int(x) : 8 * int(x) + 4].hex()

    assert at((LEFT + RIGHT) / 2, TOP + 40) == COLOURS[0][1:] + "ff"
    assert at(LEFT + 40, TOP + 100) == "fdfdfcff"  # paper
    assert at(0, 0)[6:] == "00"  # a round corner


@pytest.mark.parametrize("family", ["Arial", "Noto Sans"])
def test_words_are_written_in_a_font_that_is_there(monkeypatch, family):
    drawn = []

    def draw(svg_string, sans_serif_family=None, zoom=1):
        drawn.append((sans_serif_family, zoom))
        words = sans_serif_family == family
        return (svg_string if words else re.sub("<text.*</text>", "", svg_string)).encode()

    monkeypatch.setattr(resvg_py, "svg_to_bytes", draw)
    figure = page("Title", "subtitle", "words", ())
    assert to_png(figure) == figure.encode()
    assert drawn[-1] == (family, 2)


def test_no_font(monkeypatch):
    monkeypatch.setattr(resvg_py, "svg_to_bytes", WITHOUT_FONTS)
    with pytest.raises(SpecPrefillError, match="has no font"):
        to_png(page("Title", "subtitle", "words", ()))


def test_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(SpecPrefillError, match=r"install the extra `eval`"):
        to_png("<svg/>")


def test_wants_a_folder(tmp_path, capsys):
    assert load_script("report").main([str(tmp_path), "--png"]) == 2
    assert "png=True is not allowed: png must be given with --plots" in capsys.readouterr().err
