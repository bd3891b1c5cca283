"""The rows of a results folder into a report: scores by task, length and category, kinds of prompts, recall."""

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specprefill_jax.errors import SpecPrefillError, argument_error
from specprefill_jax.evals import paper, recall
from specprefill_jax.evals.compressibility import TOLERANCE, Curve, curves, kinds_table
from specprefill_jax.evals.document import Block, Figure, Heading, Table, Text
from specprefill_jax.evals.latency_plot import latency_svg
from specprefill_jax.evals.results import read_rows
from specprefill_jax.evals.score_plot import score_svg
from specprefill_jax.evals.speedup_plot import speedup_svg
from specprefill_jax.evals.tables import Estimate, Row, against_dense, cell, estimates, settings_of, table

INTRODUCTION = (
    "Scores times 100. In brackets: 95 % intervals, by bootstrap over the samples of each task; none stands where a "
    "task has one sample only. Tasks weigh the same in an average. Times to first token include the choice of what is "
    "read, which a keep rate shares with others here but would not in use."
)
KINDS = (
    f"Scores within {100 * TOLERANCE:g} points count as the same. Unanswered: no keep rate scores more than that. "
    "Noisy: somewhere reading more scores less. Compressible: the lowest keep rate scores no less than the whole "
    "prompt. Information-dense: the rest."
)
RECALL = (
    "The oracle is the main model's attention while it is given the true answer, aggregated as the method does. Times "
    "100: the share of the oracle's chunks that were chosen, and what random chunks would have of them; the share of "
    "the oracle's attention that the chosen chunks hold, and that its own chunks do; the correlations of chunk scores "
    "with the oracle's. After `answer` the speculator was given the true answer, too."
)
FIRST_TOKENS = (
    "Medians over rounds. Beside the measured speed-up stand what FLOPs alone would allow, look-ahead not counted, and "
    "the ideal, one over the share that is read."
)

RATES = (
    "Requests a second; a rate fails when more requests than are allowed are not answered in time. What FLOPs allow "
    "counts no look-ahead."
)


@dataclass
class Results:
    """What a folder holds."""

    answers: dict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))
    """Rows of answers, by benchmark."""
    recalls: dict[str, list[Mapping[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    """Rows of recall, by benchmark."""
    first_tokens: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """What scripts/eval_ttft.py wrote, by the file's name without its ending."""
    rates: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    """What scripts/bench_qps.py wrote, likewise."""


def read(folder: Path) -> Results:
    """What a folder holds; ArgumentError where that is nothing to report, SpecPrefillError for a damaged file."""
    results = Results()
    for file in sorted(folder.glob("*.json")):
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise SpecPrefillError(f"{file}: not JSON: {error}") from error
        if isinstance(found, dict) and isinstance(found.get("ttft"), list):
            results.first_tokens[file.stem] = found
        elif isinstance(found, dict) and isinstance(found.get("max_rates"), list):
            results.rates[file.stem] = found
    files = sorted([*folder.glob("*.jsonl"), *folder.glob("*.jsonl.gz")])
    if not (files or results.first_tokens or results.rates):
        raise argument_error(
            "results", str(folder), "a folder with files of rows (*.jsonl, .gz or not) or times (*.json)"
        )
    for file in files:
        for row in read_rows(file):
            if row.get("kind") == recall.KIND:
                results.recalls[row["benchmark"]].append(row)
            else:
                results.answers[row["benchmark"]].append(Row.of(row))
    return results


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


def overview(rows: Sequence[Row], settings: Sequence[str], seed: int) -> Table:
    """What each setting read, the median time to its first token, and how its scores differ from dense ones."""
    lines = []
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
        lines.append([*cells, cell(less[setting]) if setting in less else "-"])
    head = ["setting", "rows", "could not be read", "tokens read", "median time to first token", "score less dense's"]
    return Table(head, lines)


def figures(results: Results, seed: int, with_paper: bool = False) -> dict[str, str]:
    """The figures as SVG, by name: scores and recall of each benchmark, speed-ups, latencies over rates.

    `with_paper`: the paper's own numbers are in those that have the same axes.
    """
    found = {}
    for benchmark, rows in results.answers.items():
        reference = paper.SCORES.get(benchmark, ()) if with_paper else ()
        heading = f"{benchmark}: mean score over the share of tokens read"
        found[benchmark] = score_svg(rows, heading, seed, reference, paper.PAIR)
    for benchmark, recalls in results.recalls.items():
        heading = f"{benchmark}: share of the oracle's chunks that are read"
        rows = [*_measured(recalls, lambda row: row["recall"]), *_by_chance(recalls)]
        found[f"{benchmark}_recall"] = score_svg(rows, heading, seed)
    for name, times in results.first_tokens.items():
        found[name] = speedup_svg(times["ttft"], times["main"], paper.FIRST_TOKEN if with_paper else None)
    for name, measured in results.rates.items():
        settings = measured["settings"]
        heading = f"{settings['protocol'].capitalize()} arrivals, {settings['requests']} requests a run."
        found[name] = latency_svg(measured["runs"], "e2e", heading)
    return found


def report(results: Results, seed: int, with_paper: bool = False) -> list[Block]:
    """The report, figures (see there) among the tables."""
    drawn = figures(results, seed, with_paper)
    blocks: list[Block] = [Heading(1, "Results"), Text(INTRODUCTION)]
    for benchmark, rows in results.answers.items():
        blocks += [*_answers(benchmark, rows, drawn[benchmark], seed), *_kinds(curves(rows))]
    for benchmark, recalls in results.recalls.items():
        blocks += _recalls(benchmark, recalls, drawn[f"{benchmark}_recall"], seed)
    for name, times in results.first_tokens.items():
        heading = Heading(2, f"{name}: times to first token, {times['main']} by {times['speculator']}")
        blocks += [heading, Text(FIRST_TOKENS), _first_tokens(times["ttft"]), Figure(drawn[name])]
    for name, measured in results.rates.items():
        heading = Heading(2, f"{name}: requests a second, {measured['server']['model']['id']}")
        blocks += [heading, Text(RATES), _rates(measured["max_rates"]), Figure(drawn[name])]
    return blocks


def _answers(benchmark: str, rows: Sequence[Row], figure: str, seed: int) -> list[Block]:
    settings = settings_of(rows)
    blocks: list[Block] = [Heading(2, benchmark), overview(rows, settings, seed), Figure(figure)]
    if len({frozenset(row.sample for row in rows if row.setting == setting) for setting in settings}) > 1:
        blocks.append(Text("The settings were not run on the same samples: only the differences from dense are fair."))
    if any(row.category for row in rows):
        lines = by_setting(rows, "category", seed)
        blocks += [Heading(3, "By category"), table("category", settings, lines)]
    blocks += [Heading(3, "By task"), table("task", settings, by_setting(rows, "task", seed))]
    for setting in settings:
        lengths, lines = by_length(rows, setting, seed)
        if lengths:
            blocks += [Heading(3, f"By task and length: {setting}"), table("task", lengths, lines)]
    return blocks


def _kinds(found: Sequence[Curve]) -> list[Block]:
    blocks: list[Block] = []
    for series in dict.fromkeys(curve.series for curve in found):
        mine = [curve for curve in found if curve.series == series]
        blocks += [Heading(3, f"Kinds of prompts: {series}"), Text(KINDS), kinds_table(mine)]
    return blocks


def _recalls(benchmark: str, recalls: Sequence[Mapping[str, Any]], figure: str, seed: int) -> list[Block]:
    rows = _measured(recalls, lambda row: row["recall"])
    settings = settings_of(rows)
    columns: dict[str, Callable[[Mapping[str, Any]], float | None]] = {
        "chunks": lambda row: row["recall"],
        "by chance": _chance,
        "attention": lambda row: row["mass"],
        "oracle's attention": lambda row: row["oracle_mass"],
        "Spearman": lambda row: row["spearman"],
        "Pearson": lambda row: row["pearson"],
    }
    lines: dict[str, dict[str, Estimate]] = {setting: {} for setting in settings}
    for column, value in columns.items():
        for (setting,), estimate in estimates(_measured(recalls, value), ("setting",), seed).items():
            lines[setting][column] = estimate
    unread = sum(row["skipped"] is not None for row in recalls)
    blocks: list[Block] = [Heading(2, f"{benchmark}: recall of the oracle"), Text(RECALL)]
    if unread:
        blocks.append(Text(f"{unread} of {len(recalls)} rows could not be read."))
    blocks += [table("setting", list(columns), lines), Figure(figure)]
    return [*blocks, Heading(3, "Chunks by task"), table("task", settings, by_setting(rows, "task", seed))]


def _first_tokens(rows: Sequence[Mapping[str, Any]]) -> Table:
    lines = []
    for row in rows:
        gains = [row["speedup"], row["flop_ceiling"], row["ideal"]]
        read = f"{row['kept'] / row['tokens']:.1%}"
        known = [f"{row['prompts']} x {row['tokens']:,}", row["setting"], read, f"{row['seconds']['p50']:.3g} s"]
        lines.append([*known, *("-" if gain is None else f"{gain:.2f}x" for gain in gains)])
    head = ["prompts x tokens", "setting", "tokens read", "time", "speed-up", "FLOPs allow", "ideal"]
    return Table(head, lines)


def _rates(rows: Sequence[Mapping[str, Any]]) -> Table:
    def of(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    lines = [
        [
            row["mode"],
            of(row["max_rate"], ".3g"),
            of(row["failed_rate"], ".3g"),
            *(of(row[name], ".2f") for name in ("speedup", "ceiling", "share_of_ceiling")),
        ]
        for row in rows
    ]
    return Table(["read", "highest rate that holds", "fails at", "x dense", "FLOPs allow", "share of it"], lines)


def _measured(recalls: Sequence[Mapping[str, Any]], value: Callable[[Mapping[str, Any]], float | None]) -> list[Row]:
    """Rows whose score is what was measured, so that tables and figures of scores serve."""
    names = ("benchmark", "task", "category", "bucket", "setting", "method", "keep_rate")
    return [
        Row(
            sample=f"{row['task']}/{row['bucket']}/{row['key']}",
            **{name: row[name] for name in names},
            score=None if row["skipped"] is not None else value(row),
            kept=0.0,
            ttft=0.0,
        )
        for row in recalls
    ]


def _chance(row: Mapping[str, Any]) -> float:
    """The share of any chunks that as many random ones hold, on average."""
    return float(row["kept_chunks"] / row["num_chunks"])


def _by_chance(recalls: Sequence[Mapping[str, Any]]) -> list[Row]:
    """A row of random chunks for each sample and keep rate."""
    found = {}
    for row, known in zip(recalls, _measured(recalls, _chance), strict=True):
        setting = f"random_{row['setting'].split('_')[0]}"
        found[known.sample, setting] = replace(known, setting=setting, method="random")
    return list(found.values())
