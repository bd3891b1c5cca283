"""LongBench on any pair of models: read whole, by SpecPrefill, and by baselines that keep as much.

    python scripts/eval_longbench.py --benchmark-dir LongBench/config --data-dir LongBench/data --out results
    python scripts/eval_longbench.py ... --methods dense specprefill random --keep-rates 0.1 0.3 --look-aheads 1 8
    python scripts/eval_longbench.py ... --settings dense p1_full_lah8 p9_full_lah8 --max-length 4096 --limit 20

The benchmark is not part of this repository: `--benchmark-dir` holds its dataset2prompt.json and dataset2maxlen.json,
`--data-dir` a <dataset>.jsonl for each dataset. Nothing is truncated, as in arXiv 2502.02789, unless `--max-length`
asks for LongBench's own rule. Needs the extra `eval`. Stop it at any time and run it again: it goes on.
scripts/report.py turns the results into tables.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from specprefill_jax.command_line import parse, status_of
from specprefill_jax.evals.benchmarks import LongBenchArgs
from specprefill_jax.evals.command import RunArgs, execute


@dataclass
class Args(LongBenchArgs, RunArgs):
    """Run LongBench."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; exit status 2 for what is not allowed."""
    return status_of(lambda: run(parse(Args, argv, "eval_longbench.py")))


def run(args: Args) -> None:
    """The same, but what is not allowed is raised: SpecPrefillError."""
    about = {"max_length": args.max_length, "chat": args.chat}
    execute(args, "longbench", args.ways, args.longbench(args.limit), about)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
