#!/usr/bin/env python3
"""Write rows of RULER's tasks, as long as a model's tokenizer and chat template make them, to .jsonl files.

One file for each task and length, <out>/<length>/<task>.jsonl, written anew and whole. The same arguments give the same
files. Essays are fetched once (or --essays-dir); qa_1 and qa_2 need --data-dir with SQuAD v2 and HotpotQA, which may be
dev-v2.0.json and hotpot_dev_distractor_v1.json or smaller files squad*.json and hotpot*.json of the same layouts.
Progress goes to stderr, the closing line to stdout. Exit status: 0, 2 for bad input, 130 when interrupted.

    python scripts/ruler_rows.py --tasks niah_single_2 vt --lengths 1024 2048 --samples 20 --out build/rows
    python scripts/ruler_rows.py --model models/llama-70b --data-dir data --lengths 65536 --out build/rows
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from specprefill_jax.command_line import parse
from specprefill_jax.errors import argument_error
from specprefill_jax.evals.ruler import TASKS, Sources, check_tasks, generate, prompting
from specprefill_jax.view.spans import visible

if TYPE_CHECKING:
    from specprefill_jax.tokens import Tokenizer


@dataclass(frozen=True)
class Options:
    """Write rows of RULER's tasks, as long as a model's tokenizer and chat template make them, to .jsonl files."""

    out: Path
    """The folder to write: <out>/<length>/<task>.jsonl."""

    tasks: tuple[str, ...] = tuple(TASKS)
    """Names of tasks."""

    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536, 131072)
    """Most tokens of a row, answer included."""

    samples: int = 500
    """Rows of each file."""

    seed: int = 42

    model: str = "smollm2-135m"
    """Whose tokenizer: a folder (tokenizer.json is enough), a .gguf file, a Hub id or a built-in name."""

    essays_dir: Path | None = None
    """A folder of .txt files to use as essays."""

    data_dir: Path | None = None
    """A folder with SQuAD and HotpotQA; RULER's english_words.json is used where it lies there."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's arguments) and return its exit status."""
    try:
        ruler_rows(parse(Options, sys.argv[1:] if argv is None else argv, "ruler_rows.py"))
        return 0
    except KeyboardInterrupt:
        print("interrupted; the files that are there are whole", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(visible(str(error)).split())}", file=sys.stderr)
        return 2


def ruler_rows(options: Options) -> None:
    """Write the files as `options` say, with a bar."""
    sources = Sources(options.essays_dir, options.data_dir)
    check_tasks(options.tasks, sources)
    tokenizer = open_tokenizer(options.model)
    label, counts = TextColumn("{task.description}"), MofNCompleteColumn()
    columns = (label, BarColumn(), counts, TimeElapsedColumn(), TimeRemainingColumn())
    jobs = [(length, task) for length in options.lengths for task in options.tasks]
    with Progress(*columns, console=Console(stderr=True)) as bar:
        shown = bar.add_task("", total=len(jobs) * options.samples)
        for length, task in jobs:
            bar.update(shown, description=f"{task} at {length}")
            rows = generate(
                task,
                length=length,
                samples=options.samples,
                seed=options.seed,
                sources=sources,
                **prompting(tokenizer)._asdict(),
            )
            file = options.out / str(length) / f"{task}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            part = file.with_name(f".{file.name}.part")
            with part.open("w", encoding="utf-8") as lines:
                for row in rows:
                    lines.write(json.dumps(asdict(row), ensure_ascii=False) + "\n")
                    bar.advance(shown)
            os.replace(part, file)
    print(f"{options.out}: {len(jobs)} files of {options.samples} rows each, by the tokenizer of {options.model}")


def open_tokenizer(model: str) -> "Tokenizer":
    """The tokenizer of a model, of which no weights are read."""
    import jax

    from specprefill_jax.models.checkpoint import open_checkpoint
    from specprefill_jax.tokens import Tokenizer

    jax.config.update("jax_platforms", "cpu")  # accelerators are for others
    folder = Path(model).expanduser()
    if (folder / "tokenizer.json").is_file():
        return Tokenizer.from_folder(folder)
    tokenizer = open_checkpoint(model).tokenizer()
    if tokenizer is None:
        raise argument_error("model", model, "a model with a tokenizer: rows are measured in its tokens")
    return tokenizer


if __name__ == "__main__":
    sys.exit(main())
