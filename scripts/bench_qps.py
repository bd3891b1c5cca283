"""The highest rate of requests that a server holds, and latencies over rates, dense and sparse in one run.

    python scripts/bench_qps.py --url http://127.0.0.1:8000 --generate 2048 --out qps.json
    python scripts/bench_qps.py --main smollm2-135m-deep4 --speculator smollm2-135m --generate 2048 --plot qps.svg
    python scripts/bench_qps.py --url http://127.0.0.1:8000 --protocol poisson --rates 0.5 1 2 --goodput ttft=2 tpot=0.1

Protocol "constant" is that of arXiv 2502.02789: requests come at equal distances, each has `--timeout` seconds for its
whole answer, none is sent again, and a rate fails when more than 4 of 128 are not answered in time (refusals and errors
count as well; a rate that has failed is left at once). The result is the highest rate that holds: by a search, or of
the rates given, in ascending order up to the first that fails. Protocol "poisson" draws arrivals at each rate given and
reports percentiles, and goodput under the objectives of `--goodput`.

Every way of reading is measured on the same kind of prompts: dense, and sparse at each of `--keep-rates`. With models
that this script may look into (`--main` and `--speculator`) a ceiling stands beside the highest rates: the rate that
FLOPs alone allow, as a multiple of the dense one, for the prompt, kept and generated tokens of the answered requests,

    ceiling = sum(dense) / sum(sparse)
    dense   = main model reads the prompt + decode steps after the first token
    sparse  = speculator reads the prompt + main model reads what is kept + decode steps over what is kept

by `specprefill_jax.costs`, without look-ahead and scoring; share_of_ceiling = sparse max / (dense max * ceiling). There
is no ceiling where more than 2 % of the prompt tokens were in a cache.

How late the client sent its requests is measured, too: a run in which the 99th percentile passes 50 ms says so.
"""

import json
import os
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from specprefill_jax.evals.latency_plot import Metric, latency_svg
from specprefill_jax.evals.qps import Bench, QpsArgs, about, allowed_misses, check, compare, measure
from specprefill_jax.evals.served import run_command, server_at


def tables(args: QpsArgs, rows: list[dict[str, Any]], maxima: list[dict[str, Any]]) -> list[Table]:
    """All runs, and the highest rates."""

    def cell(value: float | None, form: str = ".2f") -> str:
        return "" if value is None else format(value, form)

    limit = f"{args.timeout:g} s" if args.timeout_factor is None else f"{args.timeout_factor:g} x one alone"
    table = Table(title=f"{args.protocol} arrivals, {args.requests} requests a run, timeout {limit}")
    for column in ("read", "rate", "answered", "missed"):
        table.add_column(column, justify="left" if column == "read" else "right")
    for column in ("TTFT p50", "p99", "TPOT p50", "p99", "ITL p99", "E2E p50", "p95", "p99", "good/s", "late p99"):
        table.add_column(column, justify="right")
    for row in rows:
        cells = [row["mode"], cell(row["rate"], ".3g"), str(row["outcomes"].get("ok", 0))]
        cells.append(f"{row['missed']}{'' if row['holds'] else ' *'}")
        shown = [("ttft", "p50"), ("ttft", "p99"), ("tpot", "p50"), ("tpot", "p99"), ("itl", "p99")]
        shown += [("e2e", "p50"), ("e2e", "p95"), ("e2e", "p99")]
        cells += [
            cell((row[name] or {}).get(point), ".3f" if name in ("tpot", "itl") else ".2f") for name, point in shown
        ]
        cells += [cell((row["goodput"] or {}).get("rate"), ".3g"), cell((row["lateness"] or {}).get("p99"), ".3f")]
        table.add_row(*cells)
    table.caption = f"seconds; * more than {allowed_misses(args)} missed: the rate fails"
    if not maxima:
        return [table]
    highest = Table("read", "max rate", "fails at", "x dense", "ceiling", "of ceiling", title="Highest rates that hold")
    for row in maxima:
        best = "none" if row["max_rate"] is None else f"{row['max_rate']:.3g}"
        cells = [cell(row[key]) for key in ("speedup", "ceiling", "share_of_ceiling")]
        highest.add_row(row["mode"], best, cell(row["failed_rate"], ".3g"), *cells)
    return [table, highest]


def main(args: QpsArgs) -> None:
    """Measure, print tables, write what was asked for."""
    check(args)
    console = Console(stderr=True)
    key = args.api_key or os.environ.get("SPECPREFILL_API_KEY")
    serve = Path(__file__).with_name("serve.py")
    with server_at(args.url, serve, str(args.main), str(args.speculator), args.serve, key) as (target, _):
        bench = Bench(args, target, console)
        server = bench.connect()
        found = measure(args, bench)
    maxima = compare(args, bench, found)
    out = Console(width=150)
    for table in tables(args, bench.rows, maxima):
        out.print(table)
    if args.out:
        result = {**about(args), "server": server, "max_rates": maxima, "runs": bench.rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        metric: Metric = "ttft" if args.protocol == "poisson" and args.stream else "e2e"
        heading = f"{args.protocol.capitalize()} arrivals, {args.requests} requests a run."
        args.plot.write_text(latency_svg(bench.rows, metric, heading))


if __name__ == "__main__":
    run_command(lambda: main(tyro.cli(QpsArgs, description=__doc__)))
