"""What scripts share: tyro's flags, but what is wrong with them, or comes up later, is told in one line."""

import contextlib
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import tyro
from rich.console import Console

from specprefill_jax.errors import ArgumentError, SpecPrefillError


def parse[T](options: type[T], argv: Sequence[str], prog: str, config: tuple[Any, ...] = ()) -> T:
    """Flags as a dataclass; what tyro would say about wrong ones in a box becomes an error of one line.

    Args:
        options: the dataclass.
        argv: the arguments, without the command's name.
        prog: the command's name.
        config: of `tyro.cli`.

    Raises:
        ArgumentError: wrong flags.
        SystemExit: --help, after it was printed.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return tyro.cli(options, args=list(argv), prog=prog, config=config)
    except SystemExit as leave:
        if not leave.code:
            raise
        raise ArgumentError(_unboxed(said.getvalue())) from None


def status_of(command: Callable[[], None]) -> int:
    """Run a script's command and return its exit status: 0, or 2 where something was not allowed, which is told."""
    try:
        command()
    except SpecPrefillError as error:
        Console(stderr=True).print(str(error), style="red", markup=False, highlight=False)
        return 2
    return 0


def _unboxed(said: str) -> str:
    """tyro's message without its frame, title and hints: what stands between the first two rules, drawn or in ASCII."""
    lines = [line.strip("│| ") for line in said.splitlines()]
    rules = [index for index, line in enumerate(lines) if line[-3:] in ("──╮", "───", "──╯", "--+", "---")]
    body = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    text = re.sub(r"^Error parsing (config|deployment|engine|sampling): ", "", " ".join(body))
    return f"{text or 'wrong arguments'} (--help lists all flags)"
