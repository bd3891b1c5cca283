"""HumanEval (arXiv 2107.03374) and MBPP (arXiv 2108.07732): programs by a model, run against the benchmark's tests.

Rows are read from local files. Answers are greedy, one a problem: the mean score is pass@1. HumanEval's prompt is the
row's own; what else is asked is in words of our own, and rows say so (`wording`).

Answers always begin with a given piece of code, so that no code has to be looked for in prose: HumanEval's prompt, or
the head of a block. Only what `sandbox` promises keeps a program from doing harm.
"""

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from specprefill_jax.errors import argument_error
from specprefill_jax.evals.samples import Graded, Sample, parsed_row
from specprefill_jax.evals.sandbox import Limits, run_program

FILES: Mapping[str, tuple[str, ...]] = {
    "humaneval": ("HumanEval.jsonl", "HumanEval.jsonl.gz"),
    "mbpp": ("mbpp.jsonl", "mbpp.jsonl.gz"),
}
"""The names under which a benchmark's rows are looked for."""

MBPP_TEST = range(11, 511)
"""MBPP's `task_id`s that are its test split."""

ANSWER_TOKENS = 512

_BLOCK, _END = "```python\n", "```"

# Where a function's body is completed as plain text it ends with the next thing that is not of it.
_AFTER_A_FUNCTION = ("\nclass", "\ndef", "\n#", "\nif", "\nprint", "\n" + _END)


@dataclass(frozen=True)
class Problem:
    """One problem."""

    key: str
    ask: str
    """What is asked of a chat model; of others, too, where `head` is empty."""
    head: str
    """The program's beginning, which is given."""
    tests: str
    """What follows the answer in the program."""

    def program(self, answer: str) -> str:
        """The whole program, tests included."""
        return f"{self.head}{answer}\n{self.tests}"


def data_file(folder: Path, name: str) -> Path:
    """The file of a benchmark's rows.

    Raises:
        ArgumentError: an unknown benchmark, or no such file.
    """
    if name not in FILES:
        raise argument_error("tasks", name, "one of " + ", ".join(FILES))
    for file in FILES[name]:
        if (folder / file).is_file():
            return folder / file
    raise argument_error("data_dir", str(folder), f"a folder with {' or '.join(FILES[name])}")


def read_problems(file: Path, name: str, limit: int | None = None) -> list[Problem]:
    """The problems of a file, of MBPP those of its test split.

    Raises:
        ArgumentError: a file that cannot be read, a row (its line is named) that is no problem, or no problems.
    """
    make = {"humaneval": _humaneval, "mbpp": _mbpp}[name]
    try:
        content = file.read_bytes()
        text = (gzip.decompress(content) if file.suffix == ".gz" else content).decode()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise argument_error("data_dir", str(file), f"a readable file ({error})") from None
    found = (
        make(parsed_row(line, where), where)
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
        for where in [f"{file}, line {number}"]
    )
    problems = list(islice((problem for problem in found if problem is not None), limit))
    if not problems:
        raise argument_error("data_dir", str(file), f"a file with problems of {name}")
    return problems


def code_samples(
    problems: Mapping[str, Sequence[Problem]], *, chat: bool = True, limits: Limits | None = None, isolated: bool = True
) -> Iterator[Sample]:
    """Yield the samples of several benchmarks, whose scores run what the model wrote.

    Args:
        problems: by benchmark.
        chat: ask through the chat template; False for base models, which complete HumanEval's functions as text.
        limits: of each program.
        isolated: see `sandbox.run_program`.
    """
    for name, of in problems.items():
        for problem in of:
            completes = not chat and bool(problem.head)
            yield Sample(
                benchmark="code",
                task=name,
                key=problem.key,
                input=problem.head if completes else problem.ask,
                outputs=(),
                score=partial(_score, problem, limits, isolated),
                max_tokens=ANSWER_TOKENS,
                bucket="0-shot",
                chat=chat,
                answer_prefix="" if completes else _BLOCK + problem.head,
                stop=_AFTER_A_FUNCTION if completes else (_END,),
                notes={"wording": "the benchmark's" if completes else "own"},
            )


def _score(problem: Problem, limits: Limits | None, isolated: bool, answer: str) -> Graded:
    verdict = run_program(problem.program(answer), limits, isolated=isolated)
    return Graded(float(verdict.passed), {"verdict": verdict.how})


def _humaneval(row: Mapping[str, Any], where: str) -> Problem:
    key, prompt, test, name = (_text(row, field, where) for field in ("task_id", "prompt", "test", "entry_point"))
    ask = (
        f"Complete this Python function. Answer with the whole function in one block of code.\n\n{_BLOCK}{prompt}{_END}"
    )
    return Problem(key, ask, prompt, f"{test}\ncheck({name})\n")


def _mbpp(row: Mapping[str, Any], where: str) -> Problem | None:
    number, tests = row.get("task_id"), row.get("test_list")
    if isinstance(number, bool) or not isinstance(number, int):
        raise argument_error(f"{where}: task_id", number, "an integer")
    if number not in MBPP_TEST:
        return None
    if not isinstance(tests, list) or not tests or not all(isinstance(test, str) for test in tests):
        raise argument_error(f"{where}: test_list", tests, "a list of at least one text")
    what = _text(row, "text" if "text" in row else "prompt", where)
    setup = row.get("test_setup_code") or ""
    if not isinstance(setup, str):
        raise argument_error(f"{where}: test_setup_code", setup, "a text")
    asserts = "\n".join(tests)
    ask = f"{what}\nThese must hold:\n\n{_BLOCK}{asserts}\n{_END}\n\nAnswer with the program in one block of code.\n"
    return Problem(str(number), ask, "", f"{setup}\n{asserts}\n")


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value:
        raise argument_error(f"{where}: {field}", value, "a text")
    return value
