"""Compile whole models for eight H100s and H200s on a machine that has none, and say what they would need there.

    make aot

For each pair of a main model and its speculator, at each prompt length: the speculator's prefill chunk, its look-ahead,
scoring and choosing, the main model's prefill chunk and its decode step, split over the devices of one host. The
programs are those that `SpecPrefill` runs; weights are shapes. Exit status 1 if anything does not compile or is not as
it should be. Nothing runs: no figure here is a time on a chip.
"""

import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from specprefill_jax.cache import cache_spec, capacity_for, make_cache
from specprefill_jax.config import check_integer, check_real
from specprefill_jax.errors import ArgumentError, argument_error
from specprefill_jax.machine import describe
from specprefill_jax.models.loaded import Cache, LoadedLlama, abstract, like_layers
from specprefill_jax.models.paged import PAGE, make_paged_cache, paged_spec
from specprefill_jax.models.published import LLAMAS, PAIRS
from specprefill_jax.planning import budget, num_chunks
from specprefill_jax.prefill import DEFAULT_CHUNK, padded
from specprefill_jax.scoring import score_and_choose
from specprefill_jax.sharding import aot
from specprefill_jax.speculator import MAX_EOS_IDS, LookAhead, Speculator

CHIPS = {"H100": ("h100_sxm", 80 * 2**30), "H200": ("h200_sxm", 141 * 10**9)}
"""Name to XLA's description and bytes of memory."""
SPARE = 0.95
"""Share of a device's memory that a program may fill; the rest is the driver's and the collectives' own."""
LOOK_AHEAD, POOL_WIDTH, CHUNK_SIZE = 8, 13, 32
"""Of SpecPrefillConfig, as it is unless told otherwise."""
GATHERS = ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")
READING, ANSWERING = ("speculator prefill", "look-ahead", "scoring"), ("main prefill", "decode")
"""Programs of the speculator and of the main model."""
BATCHED = (8192, 8192, 8)
"""Prompt, slots and batch of one more decode step, of rows that were read whole."""
ENGINE = (("engine prefill", 512, 1), ("engine decode", 1, 64))
"""Programs of the engine's main model: name, tokens a row and rows, over a paged cache."""
PAGED = (8192, 65_536)
"""Longest prompt and answer together, and slots of the whole cache, of these."""
MOST_TEMP = 2**30
"""Bytes of temporary memory a program may take a device."""


@dataclass
class Args:
    """Compile pairs of models ahead of time, and report."""

    lengths: tuple[int, ...] = (8192, 32768, 131072)
    """Prompt lengths in tokens."""
    keep_rate: float = 0.1
    answer: int = 256
    """Tokens of an answer, for which the main model's cache has room."""
    devices: int = 8
    chunk: int = DEFAULT_CHUNK
    """Tokens a prefill pass reads."""
    chips: tuple[str, ...] = tuple(CHIPS)
    """Of H100, H200."""
    pairs: tuple[str, ...] = tuple(f"{main} + {speculator}" for main, speculator in PAIRS)
    out: Path | None = None
    """JSON file to write."""


@dataclass(frozen=True)
class Case:
    """One program of one model."""

    program: str
    model: str
    tokens: int
    """Of the prompt."""
    slots: int
    """Of the cache."""
    batch: int = 1


def kept_tokens(tokens: int, args: Args) -> int:
    """Tokens that the main model reads."""
    chunks = num_chunks(tokens, CHUNK_SIZE)
    return min(tokens, CHUNK_SIZE * budget(chunks, args.keep_rate))


def slots_of(tokens: int, args: Args) -> tuple[int, int]:
    """Slots of the speculator's cache, and of the main model's."""
    kept = kept_tokens(tokens, args)
    reading = capacity_for(max(padded(tokens, args.chunk), tokens + LOOK_AHEAD - 1))
    return reading, capacity_for(max(padded(kept, args.chunk), kept + args.answer))


def cases(args: Args) -> list[Case]:
    """Every program that the pairs need, each once."""
    found = []
    for pair in args.pairs:
        main, speculator = pair.split(" + ")
        for tokens in args.lengths:
            reading, answering = slots_of(tokens, args)
            found += [Case(program, speculator, tokens, reading) for program in READING]
            found += [Case(program, main, tokens, answering) for program in ANSWERING]
        found.append(Case("decode", main, *BATCHED))
        found += [Case(program, main, *PAGED, rows) for program, _, rows in ENGINE]
    return list(dict.fromkeys(found))


def lower(case: Case, chip: str, args: Args) -> tuple[LoadedLlama, Cache, jax.stages.Lowered]:
    """The program as `SpecPrefill` would compile it, with its model and cache as shapes."""
    mesh = aot.gpu_mesh(args.devices, CHIPS[chip][0])
    model = abstract(LLAMAS[case.model], "bfloat16", mesh)
    batch = case.batch

    def whole(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def split(shape: jax.ShapeDtypeStruct, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

    for program, length, _ in ENGINE:
        if case.program == program:
            pages = jax.eval_shape(partial(make_paged_cache, model.layout, case.slots // PAGE + 1, model.dtype))
            paged: Any = jax.tree.map(split, pages, paged_spec()).of(whole(batch, (case.tokens + length) // PAGE))
            ids = whole(batch, length)
            return model, paged, model.scanned.lower(model.weights, ids, ids, paged, whole(batch), whole(batch))

    shapes = jax.eval_shape(partial(make_cache, model.layout, batch, case.slots, model.dtype))
    cache = jax.tree.map(split, shapes, cache_spec(mesh, batch))
    layers, heads, width = model.config.num_layers, model.layout.num_heads, model.config.head_dim
    if case.program in ("speculator prefill", "main prefill", "decode"):
        length = 1 if case.program == "decode" else args.chunk
        ids = whole(batch, length)
        lowered = model.scanned.lower(model.weights, ids, ids, cache, whole(batch), whole(batch))
    elif case.program == "look-ahead":
        reader = Speculator(model, args.chunk)
        queries = split(whole(layers, 1, heads, width, dtype=model.dtype), P(None, None, "tensor"))
        hidden = whole(1, model.config.hidden_size, dtype=jnp.float32)
        lowered = reader.decode.lower(
            model.weights, hidden, queries, cache, whole(1), whole(1, MAX_EOS_IDS), count=LOOK_AHEAD
        )
    else:
        queries = split(whole(layers, 1, LOOK_AHEAD, heads, width, dtype=model.dtype), P(None, None, None, "tensor"))
        chunks = num_chunks(case.tokens, CHUNK_SIZE)
        hidden = whole(1, LOOK_AHEAD, model.config.hidden_size, dtype=jnp.float32)
        ahead: Any = (queries, cache, whole(1, LOOK_AHEAD), whole(1), hidden)
        lowered = score_and_choose.lower(
            LookAhead(*ahead),
            whole(1, case.tokens),
            whole(1),
            whole(1, chunks, dtype=jnp.bool_),
            whole(1),
            whole(1),
            size=case.tokens,
            pool_width=POOL_WIDTH,
            chunk_size=CHUNK_SIZE,
            kept_size=kept_tokens(case.tokens, args),
            backend="triton",
            mesh=mesh,
        )
    return model, cache, lowered


def device_bytes(tree: Any) -> int:
    """Bytes of arrays on one device."""
    shards = [(x.sharding.shard_shape(x.shape), x.dtype.itemsize) for x in jax.tree.leaves(tree)]
    return sum(itemsize * math.prod(shape) for shape, itemsize in shards)


def compile_chip(chip: str, args: Args) -> list[dict[str, Any]]:
    """The rows of one chip; in a process of its own, as two compile at once on two cores."""
    with tempfile.TemporaryDirectory() as folder:
        aot.prepare(Path(folder))
        return [compile_case(case, chip, args) for case in cases(args)]


def compile_case(case: Case, chip: str, args: Args) -> dict[str, Any]:
    """The row of one program."""
    start = time.perf_counter()
    row = asdict(case) | {"chip": chip, "devices": args.devices, "faults": [], "report": None}
    try:
        model, cache, lowered = lower(case, chip, args)
        row |= {"weight_bytes": device_bytes(model.weights), "cache_bytes": device_bytes(cache)}
        report = aot.compile_lowered(lowered)
        row |= {"report": asdict(report), "faults": faults(case, args, report, row["cache_bytes"])}
    except Exception as error:  # every kind of failure is a row of the table
        row["faults"] = [f"{type(error).__name__}: {str(error)[:300]}"]
    row["seconds"] = round(time.perf_counter() - start, 2)
    print(".", end="", file=sys.stderr, flush=True)
    return row


def faults(case: Case, args: Args, report: aot.Report, cache_bytes: int) -> list[str]:
    """What a program that compiled must not do."""
    # To choose a token, devices gather the best of each one's share of the vocabulary: twice two numbers.
    allowed = {"all-gather": 2} if case.program == "look-ahead" else {}
    found = [f"{n} {kind}" for kind, n in report.collectives.items() if kind in GATHERS and n > allowed.get(kind, 0)]
    if report.temp_bytes > MOST_TEMP:
        found.append(f"{report.temp_bytes / 2**30:.2f} GiB of temporary memory")
    reduced = report.collectives.get("all-reduce", 0)
    # Two a layer, of one layer a run of like ones since a loop holds it once; and one for the embedding.
    layers = 2 * len(like_layers(LLAMAS[case.model])) + 1
    wanted = {"scoring": 1, "look-ahead": None}.get(case.program, layers) if args.devices > 1 else 0
    if wanted is not None and reduced != wanted:
        found.append(f"{reduced} all-reduces, not {wanted}")
    if case.program != "scoring" and report.alias_bytes < cache_bytes:
        found.append("the cache is copied, not changed in place")
    return found


def fit(pair: str, tokens: int, chip: str, args: Args, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether a pair fits a device with a prompt of that length: all that it holds at once, and the largest program."""
    main, speculator = pair.split(" + ")
    reading, answering = slots_of(tokens, args)
    wanted = {Case(program, speculator, tokens, reading) for program in READING}
    wanted |= {Case(program, main, tokens, answering) for program in ANSWERING}
    mine = [
        row for row in rows if row["chip"] == chip and Case(**{f.name: row[f.name] for f in fields(Case)}) in wanted
    ]
    held = {(row["model"], row["slots"]): row.get("weight_bytes", 0) + row.get("cache_bytes", 0) for row in mine}
    temp = max((row["report"]["temp_bytes"] for row in mine if row["report"]), default=0)
    limit = SPARE * CHIPS[chip][1]
    weights = {row["model"]: row.get("weight_bytes", 0) for row in mine}
    total = sum(held.values()) + temp
    return {
        "pair": pair,
        "chip": chip,
        "tokens": tokens,
        "kept": kept_tokens(tokens, args),
        "weight_bytes": sum(weights.values()),
        "cache_bytes": sum(held.values()) - sum(weights.values()),
        "temp_bytes": temp,
        "total_bytes": total,
        "limit_bytes": int(limit),
        "fits": total <= limit,
        "spare_bytes": int(limit - total),
        "faults": [fault for row in mine for fault in row["faults"]],
    }


def check(args: Args) -> None:
    """Check the arguments."""
    for name in ("answer", "chunk"):
        check_integer(name, getattr(args, name), 1)
    check_integer("devices", args.devices, 1, 8)
    check_real("keep_rate", args.keep_rate, "a number above 0 and at most 1", lambda x: 0 < x <= 1)
    for length in args.lengths:
        check_integer("lengths", length, 1, 131_072)
    known = [f"{main} + {speculator}" for main in LLAMAS for speculator in LLAMAS]
    for name, values, allowed in (("chips", args.chips, list(CHIPS)), ("pairs", args.pairs, known)):
        for value in values:
            if value not in allowed:
                raise argument_error(name, value, "of " + ", ".join(allowed if name == "chips" else LLAMAS))


def main(args: Args) -> int:
    """Compile every case, print the tables; the exit status."""
    check(args)
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        found = pool.map(compile_chip, args.chips, [args] * len(args.chips))
        rows = [row for of_chip in found for row in of_chip]
    print(file=sys.stderr)
    fits = [
        fit(pair, tokens, chip, args, rows) for chip in args.chips for pair in args.pairs for tokens in args.lengths
    ]
    console = Console(width=150)
    console.print(program_table(rows, args), fit_table(fits, args))
    if args.out:
        jax.config.update("jax_platforms", "cpu")  # describe() asks for devices
        settings = {key: value for key, value in asdict(args).items() if key != "out"}
        result = {"machine": describe(), "settings": settings, "programs": rows, "pairs": fits}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    failed = sum(bool(row["faults"]) for row in rows)
    console.print(f"{len(rows) - failed} of {len(rows)} as they should be; compiled, not run")
    return 1 if failed else 0


def program_table(rows: list[dict[str, Any]], args: Args) -> Table:
    """What each program needs."""
    table = Table(title=f"Programs on {args.devices} devices, bfloat16 but for float8 matrices; GiB a device")
    for column in ("chip", "model", "program", "result", "collectives"):
        table.add_column(column)
    for column in ("batch", "prompt", "slots", "weights", "cache", "temp", "seconds"):
        table.add_column(column, justify="right")
    for row in rows:
        report = row["report"] or {"temp_bytes": 0, "collectives": {}}
        counted = ", ".join(f"{n} {kind}" for kind, n in report["collectives"].items())
        memory = (row.get("weight_bytes", 0), row.get("cache_bytes", 0), report["temp_bytes"])
        table.add_row(
            *(row["chip"], row["model"].removeprefix("Llama-"), row["program"]),
            *("; ".join(row["faults"]) or "compiled", counted, str(row["batch"])),
            *(f"{row['tokens']:,}", f"{row['slots']:,}"),
            *gib(*memory),
            f"{row['seconds']:.1f}",
        )
    return table


def fit_table(fits: list[dict[str, Any]], args: Args) -> Table:
    """What each pair needs."""
    title = f"Pairs on {args.devices} devices, keep rate {args.keep_rate}, one prompt; GiB a device"
    table = Table(title=title)
    for column in ("chip", "pair"):
        table.add_column(column)
    for column in ("prompt", "kept", "weights", "caches", "temp", "in all", "of", "spare"):
        table.add_column(column, justify="right")
    table.add_column("fits")
    for row in fits:
        memory = [row[f"{part}_bytes"] for part in ("weight", "cache", "temp", "total", "limit", "spare")]
        numbers = (f"{row['tokens']:,}", f"{row['kept']:,}", *gib(*memory))
        table.add_row(row["chip"], row["pair"].replace("Llama-", ""), *numbers, "yes" if row["fits"] else "no")
    return table


def gib(*numbers: float) -> Iterator[str]:
    """Bytes as GiB."""
    return (f"{n / 2**30:.2f}" for n in numbers)


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except ArgumentError as error:
        sys.exit(f"error: {error}")
