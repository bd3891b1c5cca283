"""Flags of the scripts: tyro's, but what is wrong with them is told in one line."""

import contextlib
import io
import re
from collections.abc import Sequence
from typing import Any

import tyro

from specprefill_jax.errors import ArgumentError


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


def _unboxed(said: str) -> str:
    """tyro's message without its frame, title and hints: what stands between the first two rules, drawn or in ASCII."""
    lines = [line.strip("│| ") for line in said.splitlines()]
    rules = [index for index, line in enumerate(lines) if line[-3:] in ("──╮", "───", "──╯", "--+", "---")]
    body = lines[rules[0] + 1 : rules[1]] if len(rules) > 1 else lines
    text = re.sub(r"^Error parsing (config|deployment|engine|sampling): ", "", " ".join(body))
    return f"{text or 'wrong arguments'} (--help lists all flags)"
