"""A report as blocks, written as Markdown or as one HTML page that needs nothing but itself."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True)
class Heading:
    """A heading."""

    level: int
    """1 to 6."""
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table; the first column is text, the others are figures."""

    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    """Cells, as many in each line as in the head."""


@dataclass(frozen=True)
class Figure:
    """A figure, which Markdown leaves out."""

    svg: str
    """A whole file of `view.plot.page`."""


Block = Heading | Text | Table | Figure

_STYLE = """
:root { color-scheme: light dark;
  --ink: #24292f; --quiet: #57606a; --paper: #ffffff; --rule: #d0d7de; --band: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --quiet: #9aa4af; --paper: #0d1117; --rule: #30363d; --band: #161b22; }
}
body { margin: 0 auto; max-width: 70rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
p { max-width: 46rem; }
.wide { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: 0.9rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { color: var(--quiet); font-weight: 600; }
tbody tr:nth-child(even) { background: var(--band); }
figure { margin: 1.5rem 0; }
figure svg { max-width: 100%; height: auto; }
"""


def to_markdown(blocks: Iterable[Block]) -> str:
    """The blocks as Markdown, without figures."""
    parts = [_marked(block) for block in blocks if not isinstance(block, Figure)]
    return "\n\n".join(parts) + "\n"


def _marked(block: Heading | Text | Table) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Text):
        return block.text
    rule = "|---" + "|---:" * (len(block.head) - 1) + "|"
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in (block.head, *block.lines)]
    return "\n".join([lines[0], rule, *lines[1:]])


def to_html(title: str, blocks: Iterable[Block]) -> str:
    """The blocks as a page: style and figures are in it, nothing is fetched, no script runs."""
    body = "\n".join(_tagged(block, number) for number, block in enumerate(blocks))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
        'img-src data:">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n'
        f"{body}\n</body>\n</html>\n"
    )


def _tagged(block: Block, number: int) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{escape(block.text)}</h{block.level}>"
    if isinstance(block, Text):
        return f"<p>{escape(block.text)}</p>"
    if isinstance(block, Figure):
        return f"<figure>{_own_names(block.svg, number)}</figure>"
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in block.head)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in line) for line in block.lines]
    rows = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'


def _own_names(svg: str, number: int) -> str:
    """The figure with ids that no other figure of the page has: each is a file of its own, with the same ones."""
    svg = re.sub(r'\bid="([\w-]+)"', rf'id="figure-{number}-\1"', svg)
    svg = re.sub(r"url\(#([\w-]+)\)", rf"url(#figure-{number}-\1)", svg)
    return re.sub(
        r'aria-labelledby="([^"]*)"',
        lambda found: f'aria-labelledby="{" ".join(f"figure-{number}-{name}" for name in found[1].split())}"',
        svg,
    )
