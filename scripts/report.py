"""Results into tables and figures: what was scored, by task and length, by category and keep rate, and how fast.

    python scripts/report.py results --out results/report.md --html results/report.html --plots results --png

Reads every .jsonl (or .jsonl.gz) file of rows in the folder that scripts/eval_longbench.py and its like, and
scripts/eval_recall.py, have written, and every .json file of scripts/eval_ttft.py and scripts/bench_qps.py. Scores are
times 100, with 95 % intervals by bootstrap over the samples (seeded); tasks weigh the same in an average, however many
samples each has. Beside the report stands a .samples.tsv with each sample's scores by keep rate and what kind of prompt
it is, where samples were read whole and in part.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from specprefill_jax.command_line import parse, status_of
from specprefill_jax.errors import argument_error
from specprefill_jax.evals.compressibility import as_tsv, curves
from specprefill_jax.evals.document import to_html, to_markdown
from specprefill_jax.evals.png import to_png
from specprefill_jax.evals.report import figures, read, report


@dataclass
class Args:
    """Make a report."""

    results: Annotated[Path, tyro.conf.Positional]
    """Folder of results."""
    out: Path | None = None
    """File for the Markdown; None: standard output, unless --html is given."""
    html: Path | None = None
    """File for one page with tables and figures, which needs no other file; None: no page."""
    plots: Path | None = None
    """Folder for the figures, an .svg file for each; None: no such files."""
    png: bool = False
    """Beside each .svg a .png as well (extra `eval`)."""
    paper: bool = False
    """Draw what the paper reports, of other models, into the figures that have the same axes."""
    seed: int = 0
    """Of the bootstrap."""


def main(argv: Sequence[str]) -> int:
    """Write the report; exit status 2 for what is not allowed."""
    return status_of(lambda: write(parse(Args, argv, "report.py")))


def write(args: Args) -> None:
    """The same; SpecPrefillError for a folder that has nothing to report."""
    if args.png and args.plots is None:
        raise argument_error("png", args.png, "given with --plots, the folder for the files")
    results = read(args.results)
    blocks = report(results, args.seed, args.paper)
    files: dict[Path, str | bytes] = {}
    if args.out is not None:
        files[args.out] = to_markdown(blocks)
    elif args.html is None:
        sys.stdout.write(to_markdown(blocks))
    if args.html is not None:
        files[args.html] = to_html("Results", blocks)
    found = [curve for rows in results.answers.values() for curve in curves(rows)]
    if found and files:
        files[next(iter(files)).with_suffix(".samples.tsv")] = as_tsv(found)
    if args.plots is not None:
        for name, svg in figures(results, args.seed, args.paper).items():
            files[args.plots / f"{name}.svg"] = svg
            if args.png:
                files[args.plots / f"{name}.png"] = to_png(svg)
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
