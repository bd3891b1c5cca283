"""Time to the first token over batches, prompt lengths, keep rates and look-aheads: the paper's grid.

    python scripts/eval_ttft.py --main MODEL --speculator SMALL --out results/ttft.json --plot results/ttft.svg
    python scripts/eval_ttft.py ... --total-tokens 524288 --lengths 4096 8192 16384 32768 65536 131072
    python scripts/eval_ttft.py ... --look-aheads 1 2 4 8 16 --lengths 16384
    python scripts/eval_ttft.py ... --settings dense p1 p1_full p1_full_lah8

Batches are read through the engine that serves. Every length gets as many prompts as make `--total-tokens`, at least
one. Beside the measured speed-up stand what FLOPs alone would allow and the ideal, one over the share that is kept.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specprefill_jax.command_line import parse, status_of
from specprefill_jax.config import SpecPrefillConfig, check_integer
from specprefill_jax.engine.engine import Engine
from specprefill_jax.engine.request import EngineConfig
from specprefill_jax.errors import argument_error
from specprefill_jax.evals.first_tokens import Batch, config_of, measure
from specprefill_jax.evals.settings import Setting, names_of, parse_setting
from specprefill_jax.evals.speedup_plot import speedup_svg
from specprefill_jax.machine import describe
from specprefill_jax.models.paged import PAGE
from specprefill_jax.pipeline import SpecPrefill


@dataclass
class Args:
    """Time batches of prompts to their first tokens."""

    main: str = "smollm2-135m-deep4"
    """The model that answers: a folder, a .gguf file, a built-in name or a Hub id."""
    speculator: str = "smollm2-135m"
    """The model that chooses."""
    dtype: str = "float32"
    total_tokens: int = 524_288
    """Tokens of a batch; 1 for a single prompt of each length."""
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536, 131072)
    """Tokens of a prompt."""
    keep_rates: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7)
    look_aheads: tuple[int, ...] = (1,)
    """Queries that score; 1 is no look-ahead."""
    settings: tuple[str, ...] = ()
    """Ways of reading by name, in place of the two above: dense p1_full p3_full_lah8."""
    prefill_chunk: int = 1024
    """Tokens that are read in one go."""
    warm_up: int = 2
    """Rounds that do not count."""
    rounds: int = 8
    seed: int = 0
    out: Path | None = None
    """JSON file to write."""
    plot: Path | None = None
    """SVG file to write: speed-ups over keep rates."""


def check(args: Args) -> list[Setting]:
    """The settings; ArgumentError for what is not allowed, before a model is loaded."""
    for name in ("total_tokens", "rounds", "prefill_chunk"):
        check_integer(name, getattr(args, name), 1)
    check_integer("warm_up", args.warm_up, 0)
    check_integer("seed", args.seed, 0)
    if not args.lengths:
        raise argument_error("lengths", args.lengths, "at least one number")
    for length in args.lengths:
        check_integer("lengths", length, 2 * PAGE)
    names = args.settings or names_of(("dense", "specprefill"), args.keep_rates, args.look_aheads)
    settings = [parse_setting(name) for name in names]
    for setting in settings:
        config_of(setting)
    return settings


def compiled_for(setting: Setting) -> SpecPrefillConfig:
    """What an engine has to be made for: settings that differ in their keep rate alone share one."""
    config = config_of(setting)
    return SpecPrefillConfig.paper(1.0, config.look_ahead or 1, config.pool_width, config.chunk_size)


@contextmanager
def engine_for(
    pair: SpecPrefill, args: Args, batches: Sequence[Batch], defaults: SpecPrefillConfig
) -> Iterator[Engine]:
    """An engine that has compiled everything and serves, closed in the end."""
    room = max(args.lengths) + PAGE
    most = max(batch.prompts for batch in batches)
    config = EngineConfig(
        max_running=min(most, 8),
        prefill_chunk=args.prefill_chunk,
        max_model_len=room,
        cache_tokens=2 * room,
        speculator_cache_tokens=2 * room,
        max_queued_requests=most,
        max_queued_tokens=max(batch.prompts * batch.tokens for batch in batches),
        memoised_selections=1,
    )
    engine = Engine(pair, config, defaults=defaults)
    engine.warm_up()
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def main(argv: Sequence[str]) -> int:
    """Measure, print, write; exit status 2 for what is not allowed."""
    return status_of(lambda: time_grid(parse(Args, argv, "eval_ttft.py")))


def time_grid(args: Args) -> None:
    """The same, but what is not allowed is raised: SpecPrefillError."""
    settings = check(args)
    pair = SpecPrefill.from_pretrained(args.main, args.speculator, args.dtype)
    rows = run(pair, args, settings, Console(stderr=True))
    Console().print(shown(rows))
    result = {**describe(), "main": args.main, "speculator": args.speculator, "dtype": args.dtype, "ttft": rows}
    for path, text in ((args.out, json.dumps(result, indent=1) + "\n"), (args.plot, speedup_svg(rows, args.main))):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")


def run(pair: SpecPrefill, args: Args, settings: Sequence[Setting], console: Console) -> list[dict[str, Any]]:
    """The rows of all batches and settings; those compiled alike are timed side by side, with dense among them."""
    batches = [Batch(max(1, args.total_tokens // length), length) for length in args.lengths]
    dense = [setting for setting in settings if setting.config is None]
    sparse = [setting for setting in settings if setting.config is not None]
    groups = [list(same) for _, same in groupby(sorted(sparse, key=_order), key=_order)] or [[]]
    rows = []
    for group in groups:
        defaults = compiled_for(group[0] if group else dense[0])
        with engine_for(pair, args, batches, defaults) as engine:
            for batch in batches:
                rows += measure(
                    pair,
                    engine,
                    batch,
                    [*dense, *group],
                    warm_up=args.warm_up,
                    rounds=args.rounds,
                    seed=args.seed,
                    report=console.log,
                )
    return rows


def _order(setting: Setting) -> tuple[int, int, int]:
    config = compiled_for(setting)
    return config.look_ahead or 1, config.pool_width or 0, config.chunk_size


def shown(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for people."""
    table = Table("prompts", "setting", "kept", "seconds, mean", "p10", "p90", "speed-up", "FLOPs allow", "ideal")
    for row in rows:
        seconds = row["seconds"]
        cells = [f"{row['prompts']} x {row['tokens']:,}", row["setting"], f"{row['kept']:,}"]
        cells += [f"{seconds[name]:.2f}" for name in ("mean", "p10", "p90")]
        cells += [
            "-" if value is None else f"{value:.2f}" for value in (row["speedup"], row["flop_ceiling"], row["ideal"])
        ]
        table.add_row(*cells)
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
