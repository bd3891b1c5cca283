"""Calibrate a pair: which of the speculator's layers and heads find what matters to the main model; writes a pair card.

    python scripts/calibrate.py --main MODEL --speculator SMALL --out pair_card.json ruler --lengths 4096 --limit 8
    python scripts/calibrate.py --main MODEL --speculator SMALL longbench --data-dir LongBench/data --max-length 8192

Samples are read whole, with their true answers, and halved: heads are fitted to one half (every second sample of a
task), and what is printed as held out is found in the other. Beside the speculator's look-ahead with all heads, which
is what product mode uses without a card, stand its prompt's last tokens with all heads, and the few best heads of its
first so many layers. The card has the fewest layers that find no less than the look-ahead does, and no less than the
best of all depths does by `--tolerance`. A card that lies in the speculator's folder as pair_card.json is used with
`--card auto`.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from specprefill_jax import costs
from specprefill_jax.cards import PairCard, shape_of
from specprefill_jax.command_line import parse, status_of
from specprefill_jax.config import check_integer, check_real
from specprefill_jax.errors import SpecPrefillError, argument_error
from specprefill_jax.evals.benchmarks import LongBenchArgs, RulerArgs
from specprefill_jax.evals.calibration import (
    Example,
    Scorer,
    by_look_ahead,
    by_window,
    choose_heads,
    examples,
    fewest,
    fit,
    found,
)
from specprefill_jax.importance import Heads
from specprefill_jax.machine import describe
from specprefill_jax.pipeline import SpecPrefill
from specprefill_jax.planning import budget

SHARES = (0.2, 0.27, 0.4, 0.53, 0.67, 0.8, 1.0)
"""Of the speculator's layers, what is tried unless told otherwise."""
KEEP_RATE = 0.1
"""That of the speed-ups that are printed."""
COMPARED = 3
"""Chunks, beside those always kept, whose finding by the look-ahead is what equal recall means."""


@dataclass
class Args:
    """Find out what of a speculator to use, and write it down."""

    benchmark: (
        Annotated[RulerArgs, tyro.conf.subcommand("ruler")]
        | Annotated[LongBenchArgs, tyro.conf.subcommand("longbench")]
    ) = tyro.MISSING
    main: str = "smollm2-135m-deep4"
    """The model that answers: a folder, a .gguf file, a built-in name or a Hub id."""
    speculator: str = "smollm2-135m"
    """The model that chooses."""
    dtype: str = "bfloat16"
    limit: int = 8
    """Samples of each task (and length)."""
    seed: int = 1
    """Of RULER's samples; another than evaluations have."""
    query_window: int = 32
    """The prompt's last tokens that score."""
    look_ahead: int = 8
    """Queries of the look-ahead that is compared."""
    answer_tokens: int = 48
    """Tokens of a true answer that the oracle reads at most."""
    layers: tuple[int, ...] = ()
    """Numbers of layers to try; none: seven, from a fifth of the speculator's to all."""
    tolerance: float = 0.05
    """How much less than the best depth the card may find."""
    out: Path = Path("pair_card.json")
    """The card to write."""


def main(argv: Sequence[str]) -> int:
    """Calibrate; exit status 2 for what is not allowed."""
    flags = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    return status_of(lambda: run(parse(Args, argv, "calibrate.py", flags)))


def run(args: Args) -> None:
    """The same, but what is not allowed is raised: SpecPrefillError."""
    for name, least in (("limit", 2), ("seed", 0), ("query_window", 1), ("look_ahead", 1), ("answer_tokens", 1)):
        check_integer(name, getattr(args, name), least)
    check_real("tolerance", args.tolerance, "a number from 0 to 1", lambda x: 0 <= x <= 1)
    if not args.out.absolute().parent.is_dir():
        raise argument_error("out", str(args.out), "a file in a folder that exists")
    benchmark = args.benchmark
    if isinstance(benchmark, RulerArgs):
        samples = benchmark.ruler(args.limit, args.seed)
    else:
        samples = benchmark.longbench(args.limit)
    pair = SpecPrefill.from_pretrained(args.main, args.speculator, args.dtype)
    depth = pair.speculator.model.config.num_layers
    for count in args.layers:
        check_integer("layers", count, 1, depth)
    console = Console(stderr=True)
    asked, total = samples(pair)
    given: list[Example] = []
    for example in examples(
        pair, asked, window=args.query_window, look_ahead=args.look_ahead, answer_tokens=args.answer_tokens
    ):
        given.append(example)
        console.print(f"read {len(given)} of {total}: {example.task}")
    card = calibrate(pair, args, given)
    card.write(args.out)
    Console(width=120).print(table(card))


def halves(given: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """Every second example of each task, and the others."""
    seen: dict[str, int] = {}
    parts: tuple[list[Example], list[Example]] = ([], [])
    for example in given:
        count = seen.get(example.task, 0)
        parts[count % 2].append(example)
        seen[example.task] = count + 1
    return parts


def calibrate(pair: SpecPrefill, args: Args, given: Sequence[Example]) -> PairCard:
    """The card of a pair whose examples have been read."""
    fitted, held_out = halves(given)
    if not held_out:
        raise SpecPrefillError("no task has two samples: nothing would be held out")
    speculator, main = pair.speculator.model.config, pair.main.config
    chunk = pair.selector.settle(None).chunk_size
    length = max(1, round(sum(len(example.oracle) for example in given) / len(given)))
    tokens, kept = chunk * length, chunk * budget(length, KEEP_RATE)
    whole = costs.prefill_flops(speculator, tokens)
    forced = round(sum(int(example.forced.sum()) for example in given) / len(given))
    equal = found(held_out, by_look_ahead(), (COMPARED,))

    def row(name: str, scorer: Scorer, layers: int, heads: Heads, queries: str) -> dict[str, Any]:
        shape = replace(speculator, num_layers=layers)
        inside, outside = found(fitted, scorer), found(held_out, scorer)
        count = fewest(held_out, scorer, equal)
        as_good = None if count is None else forced + count
        return {
            "scored by": name,
            "layers": layers,
            "heads": [list(head) for head in heads],
            "queries": queries,
            "fitted": {"recall": inside.recall, "evidence": inside.evidence, "value": inside.value},
            "held_out": {"recall": outside.recall, "evidence": outside.evidence, "value": outside.value},
            "speculator_share": costs.prefill_flops(shape, tokens) / whole,
            "flop_ceiling": costs.flop_ceiling(main, shape, tokens, kept),
            "at_equal_recall": None
            if as_good is None
            else {
                "keep_rate": as_good / length,
                "flop_ceiling": costs.flop_ceiling(main, shape, tokens, chunk * as_good),
            },
        }

    depth, window = speculator.num_layers, args.query_window
    last = f"last {window} tokens"
    uncalibrated = row("all heads", by_look_ahead(), depth, (), f"look-ahead {args.look_ahead}")
    rows = [uncalibrated, row("all heads", by_window(), depth, (), last)]
    few: list[dict[str, Any]] = []
    for layers in args.layers or sorted({max(1, round(share * depth)) for share in SHARES}):
        heads = choose_heads(fitted, fit(fitted, layers))
        if layers < depth:
            rows.append(row("all heads", by_window(layers=layers), layers, (), last))
        name = "1 head" if len(heads) == 1 else f"{len(heads)} heads"
        rows.append(row(name, by_window(heads), layers, heads, last))
        few.append(rows[-1])
    wanted = max(uncalibrated["fitted"]["value"], max(one["fitted"]["value"] for one in few) - args.tolerance)
    good = [one for one in few if one["fitted"]["value"] >= wanted]
    settings: dict[str, Any]
    if good:
        best = min(good, key=lambda one: one["layers"])
        settings = {"query_window": window, "scoring_heads": best["heads"]}
    else:  # the uniform maximum wins
        best, settings = uncalibrated, {"look_ahead": args.look_ahead}
    best["chosen"] = True
    about = describe()
    return PairCard(
        main=Path(args.main).name,
        speculator=Path(args.speculator).name,
        speculator_layers=None if best["layers"] == depth else best["layers"],
        settings=settings,
        shape=shape_of(speculator),
        measured=rows,
        about={
            **{name: about[name] for name in ("date", "command", "commit", "versions")},
            "samples": {"fitted": len(fitted), "held out": len(held_out), "mean tokens": tokens},
        },
    )


def table(card: PairCard) -> Table:
    """What was tried, and what it found of the samples that were held out."""
    shown = Table(title=f"{card.speculator} for {card.main}; recall and evidence of the samples held out")
    for column in (
        "layers",
        "scored by",
        "queries",
        "recall",
        "evidence",
        "fitted, both",
        "cost",
        f"x at {KEEP_RATE}",
        "x equal",
    ):
        shown.add_column(column, justify="left" if column in ("scored by", "queries") else "right")
    for row in card.measured:
        outside = row["held_out"]
        evidence = "-" if outside["evidence"] is None else f"{outside['evidence']:.3f}"
        name = row["scored by"]
        shown.add_row(
            str(row["layers"]),
            f"[bold]{name}, chosen[/bold]" if row.get("chosen") else name,
            row["queries"],
            f"{outside['recall']:.3f}",
            evidence,
            f"{row['fitted']['value']:.3f}",
            f"{row['speculator_share']:.0%}",
            f"{row['flop_ceiling']:.2f}",
            "-" if (equal := row["at_equal_recall"]) is None else f"{equal['flop_ceiling']:.2f}",
        )
    shown.caption = (
        "cost: of the whole speculator's prefill; x: the speed-up of the first token that FLOPs allow, "
        f"equal: with as few chunks as find what the look-ahead finds with {COMPARED} beside those always kept"
    )
    return shown


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
