"""The kernels of scoring and choosing at real speculators' shapes: time, its floor, and agreement with plain JAX.

    python scripts/bench_kernels.py --out benchmarks/kernels.json

The floor is bytes moved over the rate of a plain read, measured in the same run. Bytes moved are by design: the keys
twice, everything else once. Backends alternate (A B A B), each run waits for its result, compiling is not timed.
Chunk top-k sees scores alone, so one row serves every model. Without flags: the Llamas at 8K to 128K tokens on an
accelerator, smollm2-135m at lengths that take seconds on a CPU.
"""

import json
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax import lax
from rich.console import Console
from rich.table import Table

from specprefill_jax.compilation import use_compilation_cache
from specprefill_jax.errors import argument_error
from specprefill_jax.kernels.backend import Backend, choose_backend
from specprefill_jax.kernels.chunk_topk import Choice, chunk_topk
from specprefill_jax.kernels.importance import pooled_maxima
from specprefill_jax.machine import describe, peak_memory, read_rate
from specprefill_jax.models.loaded import DTYPES
from specprefill_jax.planning import budget, num_chunks


class Shape(NamedTuple):
    """The part of a speculator that scoring sees."""

    layers: int
    kv_heads: int
    heads: int
    head_size: int


MODELS = {
    "smollm2-135m": Shape(30, 3, 9, 64),
    "Llama-3.2-1B": Shape(16, 8, 32, 64),
    "Llama-3.1-8B": Shape(32, 8, 32, 128),
    "Llama-3.1-70B": Shape(80, 8, 64, 128),
}
QUERIES = 8
POOL_WIDTH = 13
CHUNK_SIZES = (32, 1)
KEEP_RATE = 0.3
SPREAD = 2.0
"""Standard deviation of the logits: attention is neither flat nor on one token."""

ENOUGH_S = 0.3
MOST_RUNS = 30
"""A backend runs `rounds` times, then on until it has spent `ENOUGH_S`, at most so often."""
SLOW_S = 5.0
"""A backend whose first run takes longer is not run again."""
READ_BYTES = 2**32
SLACK_BYTES = 2**30
"""Room beside the keys: what the backends and the random numbers need, and what is on the device already."""


@dataclass
class Args:
    """Time the kernels over models and prompt lengths."""

    models: tuple[str, ...] | None = None
    """Speculators by name: smollm2-135m, Llama-3.2-1B, Llama-3.1-8B, Llama-3.1-70B; no weights are needed."""
    lengths: tuple[int, ...] | None = None
    """Prompt lengths in tokens."""
    backend: tuple[str, ...] | None = None
    """Backends to time; without it the reference and the platform's own."""
    dtype: str | None = None
    """Of keys and queries: float32, bfloat16 or float16; without it bfloat16 on accelerators, float32 on CPUs."""
    rounds: int = 3
    """Timed runs of each backend, at least; quick ones get more."""
    budget_s: float = 200
    """Seconds after which what remains is left out."""
    out: Path | None = None
    """JSON file to write."""


class Case(NamedTuple):
    """One comparison: a model's importance, or, with a chunk size, chunk top-k."""

    tokens: int
    model: str | None = None
    chunk_size: int | None = None

    def __str__(self) -> str:
        what = f"pooled_maxima {self.model}" if self.model else f"chunk_topk {self.chunk_size}"
        return f"{what}, {self.tokens} tokens"


def complete(args: Args) -> Args:
    """The arguments with this platform's defaults filled in.

    Raises:
        ArgumentError: a value that is not allowed.
    """
    cpu = jax.default_backend() == "cpu"
    own = choose_backend(None)
    runnable = [b for b in Backend if b in (Backend.REFERENCE, own) or b.interpret]
    models = ("smollm2-135m",) if cpu else ("Llama-3.2-1B", "Llama-3.1-8B", "Llama-3.1-70B")
    lengths = (1024, 4096) if cpu else (8192, 32768, 131072)
    done = replace(
        args,
        models=models if args.models is None else args.models,
        lengths=lengths if args.lengths is None else args.lengths,
        backend=tuple(dict.fromkeys((Backend.REFERENCE, own) if args.backend is None else args.backend)),
        dtype=("float32" if cpu else "bfloat16") if args.dtype is None else args.dtype,
    )
    for name in done.models or ():
        if name not in MODELS:
            raise argument_error("models", name, "of " + ", ".join(map(repr, MODELS)))
    for length in done.lengths or ():
        if length < 1:
            raise argument_error("lengths", length, "of whole numbers from 1")
    for backend in done.backend or ():
        if backend not in runnable:
            allowed = ", ".join(repr(str(b)) for b in runnable)
            raise argument_error("backend", backend, f"of {allowed} (on this platform, {jax.default_backend()})")
    if done.dtype not in DTYPES:
        raise argument_error("dtype", done.dtype, f"one of {', '.join(DTYPES)}")
    if done.rounds < 1:
        raise argument_error("rounds", done.rounds, "a whole number from 1")
    if not done.budget_s >= 0:
        raise argument_error("budget_s", done.budget_s, "a number of seconds from 0")
    return done


def memory_limit() -> int | None:
    """Bytes that the device can hold, or None where it does not say; a CPU's is the machine's memory."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    stats = device.memory_stats()
    return stats.get("bytes_limit") if stats else None


def timed[T](run: Callable[[], T]) -> tuple[float, T]:
    """Seconds until the result is there, and the result."""
    start = time.perf_counter()
    result = jax.block_until_ready(run())
    return time.perf_counter() - start, result


def bandwidth(limit: int | None) -> float:
    """Bytes a second of a plain read: on accelerators the best of five sums over rows, of enough to hide the launch."""
    if jax.default_backend() == "cpu":
        return read_rate()
    rows = min(READ_BYTES, (limit or READ_BYTES) // 4) // 2**17
    x = jnp.ones((rows, 2**15), jnp.float32)
    total = jax.jit(partial(jnp.sum, axis=1))
    return x.nbytes / min(timed(lambda: total(x))[0] for _ in range(6))


@partial(jax.jit, static_argnames=("shape", "tokens", "dtype"))
def scoring_inputs(seed: int, *, shape: Shape, tokens: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Random keys [L, 1, K, S, H], made head by head, and queries [L, 1, Q, N, H]."""
    layers, kv_heads, heads, head_size = shape
    for_keys, for_queries = jax.random.split(jax.random.key(seed, impl="rbg"))

    def head(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, (tokens, head_size), jnp.float32).astype(dtype)

    keys = lax.map(head, jax.random.split(for_keys, layers * kv_heads))
    queries = jax.random.normal(for_queries, (layers, 1, QUERIES, heads, head_size), jnp.float32) * SPREAD
    return keys.reshape(layers, 1, kv_heads, tokens, head_size), queries.astype(dtype)


def compare(programs: Mapping[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Seconds of every run by backend, in alternation, and the first results."""
    first = {name: timed(run) for name, run in programs.items()}
    seconds = {name: [spent] if spent > SLOW_S else [] for name, (spent, _) in first.items()}

    def unfinished(name: str) -> bool:
        runs = seconds[name]
        return first[name][0] <= SLOW_S and (
            len(runs) < rounds or (sum(runs) < ENOUGH_S and len(runs) < max(MOST_RUNS, rounds))
        )

    while waiting := [name for name in programs if unfinished(name)]:
        for name in waiting:
            seconds[name].append(timed(programs[name])[0])
    return seconds, {name: result for name, (_, result) in first.items()}


def kept(maxima: jax.Array) -> np.ndarray:
    """The chunks that these maxima [1, Q, S] would keep, chosen by a plain sort."""
    importance = np.asarray(maxima, np.float64)[0].mean(0)
    starts = np.arange(0, len(importance), CHUNK_SIZES[0])
    scores = np.add.reduceat(importance, starts) / np.diff(starts, append=len(importance))
    return np.sort(np.argsort(-scores, kind="stable")[: budget(len(scores), KEEP_RATE)])


def agreement(got: Any, expected: Any) -> dict[str, Any]:
    """How far a backend's result is from the reference's."""
    if isinstance(expected, Choice):
        return {"max_difference": None, "kept_equal": all(map(np.array_equal, got, expected))}
    # Where scores tie within rounding, kept chunks may differ though nothing is wrong.
    difference = float(jnp.max(jnp.abs(got - expected)))
    return {"max_difference": difference, "kept_equal": np.array_equal(kept(got), kept(expected))}


def numbers(value: int) -> jax.Array:
    """A batch of one, int32 [1]."""
    return jnp.asarray(np.full(1, value, np.int32))


def measure(case: Case, args: Args, bytes_per_s: float) -> list[dict[str, Any]]:
    """One row a backend."""
    inputs: tuple[jax.Array, ...]
    function: Callable[..., Any]
    if case.chunk_size is None:
        assert case.model is not None
        assert args.dtype is not None
        keys, queries = scoring_inputs(case.tokens, shape=MODELS[case.model], tokens=case.tokens, dtype=args.dtype)
        inputs = keys, queries, numbers(case.tokens)
        function = partial(pooled_maxima, size=case.tokens, pool_width=POOL_WIDTH)
        moved = 2 * keys.nbytes + queries.nbytes
    else:
        chunks = num_chunks(case.tokens, case.chunk_size)
        keep = budget(chunks, KEEP_RATE)
        size = min(keep * case.chunk_size, case.tokens)
        scores = jnp.asarray(np.random.default_rng(case.tokens).random((1, chunks), np.float32))
        forced = jnp.asarray(np.arange(chunks)[None] == 0)
        ids = jnp.asarray(np.arange(case.tokens, dtype=np.int32)[None])
        inputs = scores, forced, numbers(chunks), numbers(keep), numbers(case.tokens), ids
        function = partial(chunk_topk, chunk_size=case.chunk_size, size=size)
        # Of the prompt's tokens, the kept ones.
        moved = scores.nbytes + forced.nbytes + 4 * size
    programs = {
        str(name): partial(jax.jit(partial(function, backend=name)).lower(*inputs).compile(), *inputs)
        for name in args.backend or ()
    }
    seconds, results = compare(programs, args.rounds)
    reference = results.get("reference")
    rows = []
    for name, runs in seconds.items():
        total = moved + sum(x.nbytes for x in jax.tree.leaves(results[name]))
        spent, floor = statistics.median(runs), total / bytes_per_s
        row: dict[str, Any] = {
            "operation": "chunk_topk" if case.chunk_size else "pooled_maxima",
            **case._asdict(),
            "backend": name,
            "bytes_moved": total,
            "floor_seconds": floor,
            "seconds": spent,
            "floor_fraction": floor / spent,
            "ratio_to_reference": None,
            "max_difference": None,
            "kept_equal": None,
        }
        if reference is not None:
            theirs = seconds["reference"]
            # Rounds that both took part in; a slow one's only run stands for all.
            theirs = theirs * len(runs) if len(theirs) == 1 else theirs
            ours = runs * len(theirs) if len(runs) == 1 else runs
            row["ratio_to_reference"] = statistics.median(t / o for t, o in zip(theirs, ours, strict=False))
            row["largest"] = None if isinstance(reference, Choice) else float(jnp.max(reference))
            if name != "reference":
                row |= agreement(results[name], reference)
        rows.append({**row, "runs": runs})
    return rows


def obstacle(case: Case, dtype: str, limit: int | None, spent: float, allowed: float) -> str | None:
    """Why a case is left out, if it is."""
    if spent >= allowed:
        return f"the budget of {allowed:g} s is spent"
    if case.model is not None and limit is not None:
        layers, kv_heads, _, head_size = MODELS[case.model]
        needed = layers * kv_heads * head_size * case.tokens * jnp.dtype(dtype).itemsize + SLACK_BYTES
        if needed > limit:
            return f"keys and slack are {needed / 2**30:.1f} GiB, the device has {limit / 2**30:.1f} GiB"
    return None


def main(args: Args) -> None:
    """Measure, print a table, write JSON."""
    start = time.perf_counter()
    # The table wants the width, also where standard error is a file.
    console = Console(stderr=True, width=max(Console(stderr=True).width, 120), log_path=False)
    args = complete(args)
    assert args.models is not None
    assert args.lengths is not None
    assert args.dtype is not None
    use_compilation_cache()
    limit = memory_limit()
    bytes_per_s = bandwidth(limit)
    console.log(f"plain read: {bytes_per_s / 1e9:.1f} GB/s")
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    for tokens in args.lengths:
        cases = [Case(tokens, model=model) for model in args.models]
        for case in [*cases, *(Case(tokens, chunk_size=size) for size in CHUNK_SIZES)]:
            reason = obstacle(case, args.dtype, limit, time.perf_counter() - start, args.budget_s)
            if reason:
                skipped.append({**case._asdict(), "reason": reason})
                console.log(f"{case}: skipped, {reason}")
                continue
            for r in measure(case, args, bytes_per_s):
                rows.append(r)
                figures = f"{r['seconds'] * 1e3:.3f} ms, {r['floor_fraction']:.3f} of the floor"
                console.log(f"{case}, {r['backend']}: {figures}")
    result = {
        **describe(),
        "platform": jax.default_backend(),
        "dtype": args.dtype,
        "queries": QUERIES,
        "pool_width": POOL_WIDTH,
        "keep_rate": KEEP_RATE,
        "read_bytes_per_s": bytes_per_s,
        "memory_limit_bytes": limit,
        "kernels": rows,
        "skipped": skipped,
        "seconds": time.perf_counter() - start,
        "peak_memory_bytes": peak_memory(),
    }
    table = Table("what", "tokens", "backend", "MB", "floor ms", "ms", "of floor", "ratio", "difference", "kept equal")
    for r in rows:
        what = r["model"] or f"top-k of {r['chunk_size']}"
        cells = [f"{r['bytes_moved'] / 1e6:.3f}", f"{r['floor_seconds'] * 1e3:.4f}", f"{r['seconds'] * 1e3:.3f}"]
        cells.append(f"{r['floor_fraction']:.3f}")
        ratio, difference = r["ratio_to_reference"], r["max_difference"]
        cells += ["" if ratio is None else f"{ratio:.2f}", "" if difference is None else f"{difference:.1e}"]
        equal = {None: "", True: "yes", False: "no"}[r["kept_equal"]]
        table.add_row(what, str(r["tokens"]), r["backend"], *cells, equal)
    console.print(table)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
