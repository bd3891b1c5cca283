"""Compile the kernels for H100s and TPUs on a machine that has neither, and say what they would need there.

    make aot

One H100 and eight, at the shapes of real speculators and prompts of 8K to 128K tokens; one and eight TPU v5e and v6e
cores. Exit status 1 if anything does not compile, spills registers, gathers keys, or takes more temporary memory than
it may. Nothing runs: no figure here is a time on a chip.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from specprefill_jax.errors import ArgumentError, argument_error
from specprefill_jax.kernels.chunk_topk import chunk_topk
from specprefill_jax.kernels.importance import pooled_maxima
from specprefill_jax.machine import describe
from specprefill_jax.planning import budget, num_chunks
from specprefill_jax.sharding import aot

# Layers, key heads, query heads, head size.
MODELS = {
    "Llama-3.2-1B": (16, 8, 32, 64),
    "Llama-3.1-8B": (32, 8, 32, 128),
    "Llama-3.1-70B": (80, 8, 64, 128),
}
QUERIES, POOL_WIDTH, KEEP = 8, 13, 0.1
TEMP_LIMIT = 64 * 2**20
"""Bytes of temporary memory that scoring may take a device."""


@dataclass
class Args:
    """Compile ahead of time, and report."""

    lengths: tuple[int, ...] = (8192, 32768, 131072)
    """Prompt lengths in tokens, powers of two."""
    devices: tuple[int, ...] = (1, 8)
    out: Path | None = None
    """JSON file to write."""


@dataclass(frozen=True)
class Case:
    """One program for one mesh."""

    kernel: str
    chip: str
    model: str
    tokens: int
    mesh: Mesh
    backend: str

    def program(self) -> tuple[Any, tuple]:
        """The function and its arguments."""

        def array(shape: tuple[int, ...], dtype: Any = jnp.int32, *spec: str | None) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, P(*spec)))

        if self.kernel == "importance":
            layers, kv_heads, heads, width = MODELS[self.model]
            keys = array((layers, 1, kv_heads, self.tokens, width), jnp.bfloat16, None, None, "tensor")
            queries = array((layers, 1, QUERIES, heads, width), jnp.bfloat16, None, None, None, "tensor")
            score = partial(
                pooled_maxima, size=self.tokens, pool_width=POOL_WIDTH, backend=self.backend, mesh=self.mesh
            )
            return score, (keys, queries, array((1,)))
        chunk = int(self.model.removeprefix("chunk "))
        chunks = num_chunks(self.tokens, chunk)
        choose = partial(
            chunk_topk, chunk_size=chunk, size=budget(self.tokens, KEEP), backend=self.backend, mesh=self.mesh
        )
        numbers = (array((1,)),) * 3
        prompt = array((1, self.tokens))
        return choose, (array((1, chunks), jnp.float32), array((1, chunks), jnp.bool_), *numbers, prompt)


def cases(family: str, args: Args) -> Iterator[Case]:
    """Everything of a family of chips that should compile."""
    chips: list[tuple[str, Callable[[int], Mesh], str]] = [("H100", aot.gpu_mesh, "triton")]
    if family == "TPU":
        chips = [(f"TPU {k}", partial(aot.tpu_mesh, topology=f"{k}:2x4"), "mosaic_tpu") for k in ("v5e", "v6e")]
    for chip, mesh, backend in chips:
        for count in args.devices:
            for tokens in args.lengths:
                # One TPU core's memory does not hold the keys of longer prompts.
                if family == "GPU" or count > 1 or tokens <= 8192:
                    for model in MODELS:
                        yield Case("importance", chip, model, tokens, mesh(count), backend)
                if count == args.devices[0]:  # every device of a mesh makes the same choice
                    for chunk in (32, 1):
                        yield Case("chunk_topk", chip, f"chunk {chunk}", tokens, mesh(count), backend)


def faults(case: Case, report: aot.Report) -> list[str]:
    """What a program that compiled must not do."""
    found = []
    if report.temp_bytes > TEMP_LIMIT and case.backend == "triton":
        found.append(f"{report.temp_bytes / 2**20:.0f} MiB of temporary memory")
    if any(kernel.spills for kernel in report.kernels):
        found.append("spills")
    sharded = case.kernel == "importance" and case.mesh.size > 1
    if report.collectives != ({"all-reduce": 1} if sharded else {}):
        found.append(f"collectives {report.collectives}")
    if case.backend == "triton" and len(report.kernels) != (2 if case.kernel == "importance" else 1):
        found.append(f"{len(report.kernels)} kernels found")
    return found


def compile_family(family: str, args: Args) -> list[dict[str, Any]]:
    """The rows of one family of chips; in a process of its own, since each wants XLA set up otherwise."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) if family == "GPU" else None
        aot.prepare(dump)
        for i, case in enumerate(cases(family, args)):
            start = time.perf_counter()
            report = None
            try:
                report = aot.compile_for(*case.program(), f"case_{i}", dump)
                wrong = faults(case, report)
            except Exception as error:  # every kind of failure is a row of the table
                wrong = [f"{type(error).__name__}: {str(error)[:300]}"]
            rows.append(
                {
                    "kernel": case.kernel,
                    "chip": case.chip,
                    "devices": case.mesh.size,
                    "scores": case.model,
                    "tokens": case.tokens,
                    "faults": wrong,
                    "seconds": round(time.perf_counter() - start, 2),
                    "report": report and asdict(report),
                }
            )
            print(".", end="", file=sys.stderr, flush=True)
    return rows


def main(args: Args) -> int:
    """Compile every case, print the table; the exit status."""
    for name, values, most in (("lengths", args.lengths, 2**20), ("devices", args.devices, 8)):
        if not values:
            raise argument_error(name, values, "at least one number")
        for value in values:
            if not 1 <= value <= most or value & (value - 1):
                raise argument_error(name, value, f"a power of two from 1 to {most}")
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        rows = [row for found in pool.map(compile_family, ("GPU", "TPU"), (args, args)) for row in found]
    print(file=sys.stderr)
    console = Console(width=150)
    table = Table(title="Compiled ahead of time: bf16, 8 queries, pool width 13; a device's own memory")
    for column in ("kernel", "chip", "scores", "result", "collectives"):
        table.add_column(column)
    for column in ("devices", "tokens", "seconds", "temp MiB", "shared KiB", "registers", "spills"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    if args.out:
        jax.config.update("jax_platforms", "cpu")  # describe() asks for devices
        args.out.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    failed = sum(bool(row["faults"]) for row in rows)
    console.print(f"{len(rows) - failed} of {len(rows)} as they should be")
    return 1 if failed else 0


def cells(row: dict[str, Any]) -> Iterator[str]:
    """A row of the table."""
    report = row["report"] or {"temp_bytes": 0, "kernels": [], "collectives": {}}
    yield from (row["kernel"], row["chip"], row["scores"], "; ".join(row["faults"]) or "compiled")
    yield ", ".join(f"{n} {kind}" for kind, n in report["collectives"].items())
    yield from (str(row["devices"]), f"{row['tokens']:,}", f"{row['seconds']:.1f}")
    yield f"{report['temp_bytes'] / 2**20:.1f}"
    kernels = report["kernels"]
    yield " + ".join(f"{kernel['shared_memory'] / 1024:.0f}" for kernel in kernels)
    yield " + ".join(str(kernel["registers"]) for kernel in kernels)
    yield " + ".join(str(kernel["spills"]) for kernel in kernels)


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Args, description=__doc__)))
    except ArgumentError as error:
        sys.exit(f"error: {error}")
