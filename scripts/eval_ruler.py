"""RULER on any pair of models: read whole, by SpecPrefill, and by baselines that keep as much.

    python scripts/eval_ruler.py --tasks niah_single_2 vt --lengths 1024 2048 --limit 20 --out results
    python scripts/eval_ruler.py --methods dense specprefill random --keep-rates 0.1 0.3 --look-aheads 1 8 --out results
    python scripts/eval_ruler.py --data-dir data --settings dense p1_full_lah8 p9_full_lah8 --out results

Rows are made as the models' tokenizer and chat template measure them, with prompts of our own, and each says so. Essays
are fetched once (or --essays-dir); qa_1 and qa_2 need --data-dir. Stop it at any time and run it again: it goes on.
scripts/report.py turns the results into tables.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from specprefill_jax.command_line import parse
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.evals.command import RunArgs, execute
from specprefill_jax.evals.ruler import TASKS, Sources, check_tasks, ruler_samples
from specprefill_jax.evals.samples import Sample
from specprefill_jax.pipeline import SpecPrefill

SAMPLES = 500
"""RULER's number of samples of a task and length."""


@dataclass
class Args(RunArgs):
    """Run RULER."""

    tasks: tuple[str, ...] = tuple(TASKS)
    """Names of tasks."""
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536, 131072)
    """Most tokens of a prompt, answer included."""
    limit: int | None = SAMPLES
    """Samples of each task and length."""
    seed: int = 42
    essays_dir: Path | None = None
    """A folder of .txt files to use as essays."""
    data_dir: Path | None = None
    """A folder with SQuAD and HotpotQA; RULER's english_words.json is used where it lies there."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; exit status 2 for what is not allowed."""
    console = Console(stderr=True)
    try:
        args = parse(Args, argv, "eval_ruler.py")
        sources = Sources(args.essays_dir, args.data_dir)
        check_tasks(args.tasks, sources)
        count = SAMPLES if args.limit is None else args.limit

        def samples(model: SpecPrefill) -> tuple[Iterable[Sample], int]:
            found = ruler_samples(
                args.tasks, args.lengths, count, tokenizer=model.tokenizer, seed=args.seed, sources=sources
            )
            return found, count * len(args.tasks) * len(args.lengths)

        counts, path = execute(args, "ruler", samples, {})
    except SpecPrefillError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 2
    console.print(f"{counts.done} rows added to {path}, {counts.there} were there, {counts.skipped} could not be read")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
