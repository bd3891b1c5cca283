#!/usr/bin/env python3
"""Load a server for minutes with everything at once, and check every token, every stream, its pages and its memory.

    python scripts/soak.py --minutes 10 --main tiny-main --speculator tiny-draft --out soak.json
    python scripts/soak.py --minutes 2 --serve="--max-model-len 2048 --cache-tokens 12000"
    python scripts/soak.py --url http://127.0.0.1:8000

Before the load, every case of a seeded mix is sent alone, one after the other: these answers are the references. Then
`--concurrency` clients send cases at random: sparse and dense, streamed and whole, greedy and by seeds, with
log-probabilities, stop conditions and several choices, short beside long, the same prompt again and at the same moment,
conversations that grow, requests that are cancelled at a random moment, requests that must be refused. Each answer must
equal its reference, token by token: that of the sparse prompt where it was read in part, that of the dense one where
it was read whole, which a prompt whose beginning is cached may be.

Sums in float32 depend on what else is in the batch, in the last digits, and two tokens that are equal but for these may
change places. A token that differs is examined: it counts as a tie, and not as wrong, only if the scores by which the
two tokens were chosen differ by less than `--tie`, as the server itself says when it is asked alone. Scores are
log-probabilities; where tokens are drawn, divided by the temperature, with the random numbers of the seed added.

At the end nothing runs or waits, no page is held, nothing was compiled since the warm-up, and the server's memory has
grown by at most `--most-growth` MiB a minute, by least squares after the first minute (the second half of a shorter
run). Prints a table; exit status 1 when anything was wrong.
"""

import json
import sys
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from specprefill_jax.evals.served import run_command, server_at
from specprefill_jax.evals.soak import check, soak
from specprefill_jax.evals.soak_mix import SoakArgs


def table(result: dict[str, Any]) -> Table:
    """What happened, a line each."""
    settings = result["settings"]
    shown = Table("", "", title=f"{settings['minutes']:g} minutes, {settings['concurrency']} clients")
    for name, value in result["requests"].items():
        shown.add_row(name, str(value))
    shown.add_section()
    for name in ("wrong", "ties", "broken"):
        shown.add_row(name, str(len(result[name])))
    shown.add_row("largest tie", "" if not result["ties"] else f"{max(one['gap'] for one in result['ties']):.1e}")
    shown.add_row("log-probabilities off by", f"{result['farthest_logprob']:.1e}")
    shown.add_section()
    for name, value in result["engine"].items():
        shown.add_row(name, f"{value:g}")
    for name, value in result["memory"].items():
        shown.add_row(f"memory, {name}", "not measured" if value is None else f"{value:.2f}")
    return shown


def main(args: SoakArgs) -> None:
    """Soak, print the table, write what was asked for; exit status 1 when anything was wrong."""
    check(args)
    serve = Path(__file__).with_name("serve.py")
    with server_at(args.url, serve, args.main, args.speculator, args.serve, args.api_key) as (target, pid):
        result = soak(args, target, pid, Console(stderr=True))
    out = Console()
    out.print(table(result))
    for line in result["broken"][:20]:
        out.print(line, highlight=False, markup=False)
    for one in result["wrong"][:20]:
        out.print(f"wrong: {json.dumps(one)}", highlight=False, markup=False)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if result["violations"]:
        sys.exit("error: " + "; ".join(result["violations"]))


if __name__ == "__main__":
    run_command(lambda: main(tyro.cli(SoakArgs, description=__doc__)))
