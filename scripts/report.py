"""Results into tables and figures: what was scored, by task and length, by category and keep rate, and how fast.

    python scripts/report.py results --out results/report.md --plots results

Reads every .jsonl file of rows in the folder that scripts/eval_longbench.py and its like have written. Scores are times
100, with 95 % intervals by bootstrap over the samples (seeded); tasks weigh the same in an average, however many
samples each has.
"""

import itertools
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from specprefill_jax.command_line import parse
from specprefill_jax.errors import SpecPrefillError, argument_error
from specprefill_jax.evals.results import read_rows
from specprefill_jax.evals.score_plot import score_svg
from specprefill_jax.evals.tables import Estimate, Row, against_dense, cell, estimates, settings_of, table

INTRODUCTION = """Scores times 100. In brackets: 95 % intervals, by bootstrap over the samples of each task; none stands
where a task has one sample only. Tasks weigh the same in an average. Times to first token include the choice of what
is read, which a keep rate shares with others here but would not in use.
"""


@dataclass
class Args:
    """Make a report."""

    results: Annotated[Path, tyro.conf.Positional]
    """Folder of results."""
    out: Path | None = None
    """File for the Markdown; None: standard output."""
    plots: Path | None = None
    """Folder for the figures, an .svg file for each benchmark; None: no figures."""
    seed: int = 0
    """Of the bootstrap."""


def read(folder: Path) -> dict[str, list[Row]]:
    """The rows of a folder by benchmark."""
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise argument_error("results", str(folder), "a folder with files of rows (*.jsonl)")
    rows: dict[str, list[Row]] = defaultdict(list)
    for file in files:
        for row in read_rows(file):
            rows[row["benchmark"]].append(Row.of(row))
    return dict(rows)


def by_setting(rows: Sequence[Row], field: str, seed: int) -> dict[str, dict[str, Estimate]]:
    """Estimates by the values of a field, then by setting, with a line for the mean of all tasks."""
    lines: dict[str, dict[str, Estimate]] = {}
    for (value, setting), estimate in estimates(rows, (field, "setting"), seed).items():
        lines.setdefault(value, {})[setting] = estimate
    lines["all tasks"] = {setting: estimate for (setting,), estimate in estimates(rows, ("setting",), seed).items()}
    return lines


def by_length(rows: Sequence[Row], setting: str, seed: int) -> tuple[list[str], dict[str, dict[str, Estimate]]]:
    """Lengths, and estimates by task and length of one setting."""
    mine = [row for row in rows if row.setting == setting]
    found = estimates(mine, ("task", "bucket"), seed)
    lengths = sorted({bucket for _, bucket in found}, key=_first_number)
    lines: dict[str, dict[str, Estimate]] = {}
    for (task, bucket), estimate in found.items():
        lines.setdefault(task, {})[bucket] = estimate
    lines["all tasks"] = {bucket: estimate for (bucket,), estimate in estimates(mine, ("bucket",), seed).items()}
    return lengths, lines


def _first_number(bucket: str) -> tuple[float, str]:
    digits = "".join(itertools.takewhile(str.isdigit, bucket))
    return float(digits or "inf"), bucket


def overview(rows: Sequence[Row], settings: Sequence[str], seed: int) -> str:
    """What each setting read, the median time to its first token, and how its scores differ from dense ones."""
    out = ["| setting | rows | could not be read | tokens read | median time to first token | score less dense's |"]
    out.append("|---|---:|---:|---:|---:|---:|")
    less = against_dense(rows, seed)
    for setting in settings:
        mine = [row for row in rows if row.setting == setting]
        read = [row for row in mine if row.score is not None]
        cells = [setting, str(len(mine)), str(len(mine) - len(read))]
        if read:
            kept = statistics.mean(row.kept for row in read)
            cells += [f"{kept:.1%}", f"{statistics.median(row.ttft for row in read):.2f} s"]
        else:
            cells += ["-", "-"]
        cells.append(cell(less[setting]) if setting in less else "-")
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out) + "\n"


def report(rows: dict[str, list[Row]], seed: int) -> str:
    """The report as Markdown."""
    parts = ["# Results\n", INTRODUCTION]
    for benchmark, mine in rows.items():
        settings = settings_of(mine)
        parts += [f"## {benchmark}\n", overview(mine, settings, seed)]
        if len({frozenset(row.sample for row in mine if row.setting == setting) for setting in settings}) > 1:
            parts.append("The settings were not run on the same samples: only the differences from dense are fair.\n")
        if any(row.category for row in mine):
            parts += ["### By category\n", table("category", settings, by_setting(mine, "category", seed))]
        parts += ["### By task\n", table("task", settings, by_setting(mine, "task", seed))]
        for setting in settings:
            lengths, lines = by_length(mine, setting, seed)
            if lengths:
                parts += [f"### By task and length: {setting}\n", table("task", lengths, lines)]
    return "\n".join(parts)


def main(argv: Sequence[str]) -> int:
    """Write the report; exit status 2 for what is not allowed."""
    try:
        args = parse(Args, argv, "report.py")
        rows = read(args.results)
    except SpecPrefillError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False)
        return 2
    text = report(rows, args.seed)
    if args.out is None:
        sys.stdout.write(text)
    else:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    if args.plots is not None:
        args.plots.mkdir(parents=True, exist_ok=True)
        for benchmark, mine in rows.items():
            svg = score_svg(mine, f"{benchmark}: mean score over the share of tokens read", args.seed)
            (args.plots / f"{benchmark}.svg").write_text(svg, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
