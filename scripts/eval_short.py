"""Short tasks on any pair of models, through lm-eval: generative MMLU, IFEval, GSM8K, ARC-Challenge, GPQA.

    python scripts/eval_short.py --main MODEL --speculator SMALL --out results
    python scripts/eval_short.py --tasks gsm8k_cot_llama --settings dense p3_full_lah8 p9_full_lah8 --limit 100
    python scripts/eval_short.py --tasks my_task --include-path my_tasks --chat False --out results

lm-eval (extra `lm-eval`) makes the prompts and scores the answers. It fetches its tasks' data from the hub when it
first needs them; data of your own come with task files of your own (`--include-path`). The tasks of arXiv 2502.02789
are asked as the paper asked them, others through the chat template unless `--chat False`. Stop it at any time and run
it again: it goes on. scripts/report.py turns the results into tables.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specprefill_jax.command_line import parse, status_of
from specprefill_jax.config import check_integer
from specprefill_jax.errors import argument_error
from specprefill_jax.evals.command import RunArgs, execute
from specprefill_jax.evals.lm_eval_tasks import lm_eval_samples, load_tasks
from specprefill_jax.evals.samples import Sample
from specprefill_jax.evals.short_tasks import RECIPES
from specprefill_jax.pipeline import SpecPrefill


@dataclass
class Args(RunArgs):
    """Run short tasks."""

    tasks: tuple[str, ...] = tuple(RECIPES)
    """lm-eval's names of tasks and groups."""
    include_path: Path | None = None
    """A folder with task files of your own."""
    chat: bool | None = None
    """Ask through the chat template; None: as the paper did."""
    num_fewshot: int | None = None
    """Examples before a question; None: as the paper had, or else the task."""
    max_tokens: int | None = None
    """Most tokens of an answer; None: as the paper had, or else the task."""


def main(argv: Sequence[str]) -> int:
    """Run the tasks; exit status 2 for what is not allowed."""
    return status_of(lambda: run(parse(Args, argv, "eval_short.py")))


def run(args: Args) -> None:
    """The same, but what is not allowed is raised: SpecPrefillError."""
    given = {"chat": args.chat, "num_fewshot": args.num_fewshot, "max_tokens": args.max_tokens}
    for name, least in (("limit", 1), ("num_fewshot", 0), ("max_tokens", 1)):
        if getattr(args, name) is not None:
            check_integer(name, getattr(args, name), least)
    if args.include_path is not None and not args.include_path.is_dir():
        raise argument_error("include_path", str(args.include_path), "a folder with task files")

    def samples(model: SpecPrefill) -> tuple[Iterable[Sample], int]:
        if model.tokenizer is None:
            raise argument_error("main", args.main, "a model with a tokenizer")
        change = {name: value for name, value in given.items() if value is not None}
        asked = load_tasks(args.tasks, model.tokenizer, include_path=args.include_path, limit=args.limit, change=change)
        return lm_eval_samples(asked, model.tokenizer), sum(len(one.task.instances) for one in asked)

    execute(args, "short", args.ways, samples, given)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
