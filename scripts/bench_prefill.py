"""Dense prefill and decode speed of one Llama, beside the machine's own matrix product and, if there is one, a peer.

    python scripts/bench_prefill.py --peer build/peer/bin/python --out benchmarks/prefill.json

The peer is transformers + torch in an environment of its own (`make peer`). Runs alternate (A B A B) and ratios are
taken within a round, so that a machine whose speed drifts does not decide them.
"""

import json
import os
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from specprefill_jax.cache import capacity_for
from specprefill_jax.compilation import use_compilation_cache
from specprefill_jax.costs import prefill_flops
from specprefill_jax.machine import describe, matmul_rate, peak_memory, read_rate
from specprefill_jax.models.builtin import builtin_folder
from specprefill_jax.models.checkpoint import open_checkpoint
from specprefill_jax.models.loaded import LoadedLlama, Step, load
from specprefill_jax.prefill import DEFAULT_CHUNK, padded, prefill


@dataclass
class Args:
    """Time dense prefill over lengths, and decoding."""

    model: str = "smollm2-135m"
    """Folder, .gguf file, built-in name or Hub id."""
    dtype: str = "float32"
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    """Prompt lengths in tokens."""
    decode_at: int = 1024
    """Context length at which decoding is timed; 0 leaves it out."""
    decode_steps: int = 16
    rounds: int = 3
    chunk: int = DEFAULT_CHUNK
    """Tokens a forward pass reads at most."""
    peer: Path | None = None
    """Python of an environment with torch and transformers; None measures no peer."""
    out: Path | None = None
    """JSON file to write."""


class Peer:
    """The other process, asked over pipes."""

    def __init__(self, python: Path, model: str):
        folder = builtin_folder(model) if model.startswith("smollm2") else Path(model)
        worker = Path(__file__).with_name("peer_worker.py")
        self._process = subprocess.Popen(
            [python, worker, folder, str(os.cpu_count() or 1)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.about = self._answer()

    def seconds(self, request: dict[str, int]) -> float:
        """Time one request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()["seconds"]

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the peer process ended: check that its environment has torch and transformers")
        return json.loads(line)


def run_prefill(model: LoadedLlama, length: int, chunk: int, room: int = 0) -> tuple[float, Step]:
    """Prefill `length` random tokens and wait; returns (seconds, step)."""
    total = padded(length, chunk)
    ids = jnp.asarray(np.random.default_rng(length).integers(0, model.config.vocab_size, (1, total)), jnp.int32)
    positions = jnp.arange(total, dtype=jnp.int32)[None]
    jax.block_until_ready(ids)
    start = time.perf_counter()
    step = prefill(
        model,
        ids,
        positions,
        np.full((1,), length, np.int32),
        size=length,
        capacity=capacity_for(max(total, length + room)),
        chunk=chunk,
    )
    jax.block_until_ready(model.logits(model.weights, step.hidden))
    return time.perf_counter() - start, step


def run_decode(model: LoadedLlama, context: int, steps: int, chunk: int) -> float:
    """Seconds of `steps` greedy decode steps after `context` tokens, each waiting for the one before."""
    _, step = run_prefill(model, context, chunk, steps)
    pick = jax.jit(lambda weights, hidden: jnp.argmax(model.logits_fn(weights, hidden), -1).astype(jnp.int32))
    token = pick(model.weights, step.hidden)
    row = np.zeros((1,), np.int32)
    int(token[0])
    start = time.perf_counter()
    for i in range(steps):
        at = np.full((1,), context + i, np.int32)
        step = model.step(token[:, None], at[:, None], step.cache, at, row)
        token = pick(model.weights, step.hidden)
        int(token[0])
    return time.perf_counter() - start


def main(args: Args) -> None:
    """Measure, print a table, write JSON."""
    console = Console(stderr=True)
    use_compilation_cache()
    model = load(open_checkpoint(args.model), args.dtype)
    peer = Peer(args.peer, args.model) if args.peer else None
    rows: list[dict[str, Any]] = []
    for length in args.lengths:
        run_prefill(model, length, args.chunk)
        rounds: list[dict[str, Any]] = []
        for _ in range(args.rounds):
            rate = matmul_rate(1)
            ours, _ = run_prefill(model, length, args.chunk)
            rate = (rate + matmul_rate(1)) / 2
            theirs = peer.seconds({"prefill": length}) if peer else None
            rounds.append({"seconds": ours, "matmul_flops_per_s": rate, "peer_seconds": theirs})
        flops = prefill_flops(model.config, length)
        rows.append(
            {
                "tokens": length,
                "tokens_per_s": length / statistics.median(r["seconds"] for r in rounds),
                "flops_per_s": flops / statistics.median(r["seconds"] for r in rounds),
                "matmul_share": statistics.median(flops / r["seconds"] / r["matmul_flops_per_s"] for r in rounds),
                "peer_tokens_per_s": length / statistics.median(r["peer_seconds"] for r in rounds) if peer else None,
                "ratio_to_peer": statistics.median(r["peer_seconds"] / r["seconds"] for r in rounds) if peer else None,
                "rounds": rounds,
            }
        )
        console.log({key: value for key, value in rows[-1].items() if key != "rounds"})
    result: dict[str, Any] = {
        **describe(),
        "model": args.model,
        "dtype": args.dtype,
        "chunk": args.chunk,
        "prefill": rows,
    }
    if args.decode_at:
        run_decode(model, args.decode_at, 2, args.chunk)
        rounds = []
        for _ in range(args.rounds):
            ours = run_decode(model, args.decode_at, args.decode_steps, args.chunk) / args.decode_steps
            request = {"decode": args.decode_at, "steps": args.decode_steps}
            theirs = peer.seconds(request) / args.decode_steps if peer else None
            rounds.append({"seconds": ours, "peer_seconds": theirs})
        result["decode"] = {
            "context": args.decode_at,
            "seconds_per_token": statistics.median(r["seconds"] for r in rounds),
            "peer_seconds_per_token": statistics.median(r["peer_seconds"] for r in rounds) if peer else None,
            "ratio_to_peer": statistics.median(r["peer_seconds"] / r["seconds"] for r in rounds) if peer else None,
            "rounds": rounds,
        }
    result |= {"read_bytes_per_s": read_rate(), "peak_memory_bytes": peak_memory(), "peer": peer and peer.about}
    table = Table("tokens", "tokens/s", "GFLOP/s", "of matmul rate", "peer tokens/s", "ratio")
    for r in rows:
        peer_cells = [f"{r['peer_tokens_per_s']:.0f}", f"{r['ratio_to_peer']:.2f}"] if peer else ["", ""]
        cells = [f"{r['tokens_per_s']:.0f}", f"{r['flops_per_s'] / 1e9:.1f}", f"{r['matmul_share']:.2f}"]
        table.add_row(str(r["tokens"]), *cells, *peer_cells)
    Console().print(table)
    if args.decode_at:
        Console().print({key: value for key, value in result["decode"].items() if key != "rounds"})
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
