#!/usr/bin/env python3
"""Write a model to a folder that is read in slices and checked as it is read: one Orbax checkpoint for each layer.

Progress goes to stderr, the closing line to stdout. A run that was stopped, however hard, goes on when the same command
is given again; so does one whose folder was damaged since. Exit status: 0, 2 for bad input, 130 when interrupted.

    python scripts/convert_checkpoint.py smollm2-135m build/smollm2
    python scripts/convert_checkpoint.py models/Llama-3.1-8B.Q8_0.gguf models/llama-8b --dtype bfloat16
    python scripts/generate.py --main models/llama-8b --speculator models/llama-1b --file book.txt
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specprefill_jax.command_line import parse
from specprefill_jax.models.convert import convert
from specprefill_jax.view.report import seconds
from specprefill_jax.view.spans import visible


@dataclass(frozen=True)
class Options:
    """Write a model to a folder that is read in slices and checked as it is read: one Orbax checkpoint for each layer.

    A run that was stopped goes on when the same command is given again. Everything is read back and compared.
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """The model: a folder, a .gguf file, a Hub id or a built-in name."""

    target: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="TARGET")]
    """The folder to write: a new or empty one, or one that an earlier run began."""

    dtype: Annotated[str | None, tyro.conf.arg(metavar="DTYPE")] = None
    """float32, bfloat16 or float16; by default the type that each array has. Float8 matrices stay as they are."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's arguments) and return its exit status."""
    try:
        convert_checkpoint(parse(Options, sys.argv[1:] if argv is None else argv, "convert_checkpoint.py"))
        return 0
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(visible(str(error)).split())}", file=sys.stderr)
        return 2


def convert_checkpoint(options: Options) -> None:
    """Convert as `options` say, with a bar."""
    import jax

    # Nothing is computed: accelerators, and the memory that JAX would take there, are for others.
    jax.config.update("jax_platforms", "cpu")

    start = time.perf_counter()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("converting", total=None)
        done = convert(
            options.source,
            options.target,
            options.dtype,
            report=lambda count, total: bar.update(task, completed=count, total=total),
        )
    kept = f", {done.kept} of them from an earlier run" if done.kept else ""
    print(
        f"{options.target}: {done.parts} parts{kept}, {done.nbytes / 1e6:,.1f} MB, equal to {options.source}"
        f"{'' if options.dtype is None else f' in {options.dtype}'}; took {seconds(time.perf_counter() - start)}"
    )


if __name__ == "__main__":
    sys.exit(main())
