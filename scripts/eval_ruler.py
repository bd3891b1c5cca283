"""RULER on any pair of models: read whole, by SpecPrefill, and by baselines that keep as much.

    python scripts/eval_ruler.py --tasks niah_single_2 vt --lengths 1024 2048 --limit 20 --out results
    python scripts/eval_ruler.py --methods dense specprefill random --keep-rates 0.1 0.3 --look-aheads 1 8 --out results
    python scripts/eval_ruler.py --data-dir data --settings dense p1_full_lah8 p9_full_lah8 --out results

Rows are made as the models' tokenizer and chat template measure them, with prompts of our own, and each says so. Essays
are fetched once (or --essays-dir); qa_1 and qa_2 need --data-dir. Stop it at any time and run it again: it goes on.
scripts/report.py turns the results into tables.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from specprefill_jax.command_line import parse, status_of
from specprefill_jax.evals.benchmarks import RULER_SAMPLES, RulerArgs
from specprefill_jax.evals.command import RunArgs, execute


@dataclass
class Args(RulerArgs, RunArgs):
    """Run RULER."""

    limit: int | None = RULER_SAMPLES
    """Samples of each task and length."""
    seed: int = 42


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; exit status 2 for what is not allowed."""
    return status_of(lambda: run(parse(Args, argv, "eval_ruler.py")))


def run(args: Args) -> None:
    """The same, but what is not allowed is raised: SpecPrefillError."""
    execute(args, "ruler", args.ways, args.ruler(args.limit, args.seed), {})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
