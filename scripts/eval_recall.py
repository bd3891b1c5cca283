"""How well a speculator finds what the oracle would keep, on RULER's or LongBench's samples.

    python scripts/eval_recall.py --main MODEL --speculator SMALL --out results ruler --tasks vt --lengths 4096
    python scripts/eval_recall.py ... --keep-rates 0.1 0.3 --look-aheads 1 8 longbench --data-dir LongBench/data

The oracle is the main model's own attention while it is given the true answer. A row says which share of the oracle's
chunks was chosen, which share of its attention these hold, and how the speculator's chunk scores correlate with the
oracle's: after look-ahead, and given the true answer as well. Flags of the pair stand before the benchmark's name.
Stop it at any time and run it again: it goes on. scripts/report.py turns the results into tables.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from specprefill_jax.command_line import parse, status_of
from specprefill_jax.config import check_integer
from specprefill_jax.evals.benchmarks import LongBenchArgs, RulerArgs
from specprefill_jax.evals.command import PairArgs, execute
from specprefill_jax.evals.recall import recall_rows, recall_settings


@dataclass
class Args(PairArgs):
    """Compare a speculator with the oracle."""

    benchmark: (
        Annotated[RulerArgs, tyro.conf.subcommand("ruler")]
        | Annotated[LongBenchArgs, tyro.conf.subcommand("longbench")]
    ) = tyro.MISSING
    look_aheads: tuple[int, ...] = (1, 8)
    """Queries that score; 1 is no look-ahead."""
    seed: int = 42
    """Of RULER's samples."""
    answer_tokens: int = 128
    """Tokens of a true answer that are read at most."""


def main(argv: Sequence[str]) -> int:
    """Run the comparison; exit status 2 for what is not allowed."""
    flags = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    return status_of(lambda: run(parse(Args, argv, "eval_recall.py", flags)))


def run(args: Args) -> None:
    """The same, but what is not allowed is raised: SpecPrefillError."""
    check_integer("answer_tokens", args.answer_tokens, 1)
    settings = recall_settings(args.keep_rates, args.look_aheads)
    about: dict[str, Any] = {"answer_tokens": args.answer_tokens}
    if isinstance(args.benchmark, RulerArgs):
        name, samples = "ruler", args.benchmark.ruler(args.limit, args.seed)
    else:
        name, samples = "longbench", args.benchmark.longbench(args.limit)
        about |= {"max_length": args.benchmark.max_length, "chat": args.benchmark.chat}
    execute(args, f"{name}_recall", settings, samples, about, recall_rows(args.answer_tokens))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
