"""Load a generated checkpoint onto a mesh of CPU devices: how long, and how much memory beyond the model's own.

    python scripts/bench_load.py

Writes a sharded bfloat16 checkpoint of about 3 GB into a temporary folder, reads its files once as they are, then
loads it; both from the disk (the kernel is told to forget the files), then both from the page cache. Then the same of
its conversion to Orbax. In a process of its own, so that the peak is the loader's. Linux only.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
import tyro
from rich.console import Console

from specprefill_jax.config import check_integer
from specprefill_jax.errors import ArgumentError
from specprefill_jax.machine import describe
from specprefill_jax.models.config import LlamaConfig, RopeConfig
from specprefill_jax.models.convert import convert
from specprefill_jax.models.weights import expected_shapes

LAYER_BYTES = 122e6
"""Of a layer of `config`."""


@dataclass
class Args:
    """Measure loading."""

    gigabytes: int = 3
    """Size of the checkpoint."""
    devices: int = 8
    rounds: int = 3
    out: Path | None = None
    """JSON file to write."""
    folder: Path | None = None
    """Measure this checkpoint, and write none: what the measuring process is told."""
    warm: bool = False
    """With it: do not forget the files before."""


def config(gigabytes: int) -> LlamaConfig:
    """A Llama of 1B's width, with as many layers as the size asks for."""
    tables = 2 * 2 * 64_000 * 2048
    return LlamaConfig(
        vocab_size=64_000,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=max(1, round((gigabytes * 1e9 - tables) / LAYER_BYTES)),
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position_embeddings=8192,
        dtype="bfloat16",
    )


def write(folder: Path, model: LlamaConfig, most: int = 500_000_000) -> int:
    """Write a checkpoint in files of at most so many bytes; bytes in all."""
    from safetensors.numpy import save_file

    random = np.random.default_rng(0)
    weight_map: dict[str, str] = {}
    part: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())):05d}.safetensors"
        save_file(part, folder / name)
        weight_map.update(dict.fromkeys(part, name))
        part.clear()

    for name, shape in expected_shapes(model).items():
        part[name] = random.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        total += part[name].nbytes
        if sum(array.nbytes for array in part.values()) > most:
            flush()
    if part:
        flush()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(model.to_json()))
    return total


def measure(args: Args, folder: Path) -> dict[str, float]:
    """Seconds to read the files and to load them, and peak memory, of one process."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())

    def forget() -> None:
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    import jax

    from specprefill_jax.models.checkpoint import open_checkpoint
    from specprefill_jax.models.loaded import load
    from specprefill_jax.sharding.mesh import make_mesh

    mesh = make_mesh(args.devices)
    checkpoint = open_checkpoint(folder)
    buffer = bytearray(1 << 24)

    def read() -> float:
        start = time.perf_counter()
        for path in files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
        return time.perf_counter() - start

    if not args.warm:
        forget()
    reading = read()
    if not args.warm:
        forget()
    before = _forget_peak()
    start = time.perf_counter()
    model = load(checkpoint, "bfloat16", mesh=mesh)
    jax.block_until_ready(model.weights)
    loading = time.perf_counter() - start
    peak = _kilobytes("VmHWM") * 1024 - before
    leaves = jax.tree.leaves(model.weights)
    own = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
    return {"warm": args.warm, "read_s": reading, "load_s": loading, "peak_bytes": peak, "model_bytes": own}


def _forget_peak() -> int:
    """Start the kernel's record of this process's peak memory anew (it outlives fork and exec); bytes held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _kilobytes("VmRSS") * 1024


def _kilobytes(field: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field + ":")]
    return int(line.split()[1])


def main(args: Args) -> None:
    """Write, measure, print."""
    check_integer("gigabytes", args.gigabytes, 1, 100)
    check_integer("devices", args.devices, 1, 8)
    check_integer("rounds", args.rounds, 1)
    if args.folder is not None:
        print(json.dumps(measure(args, args.folder)))
        return
    model = config(args.gigabytes)
    largest = 2 * max(int(np.prod(shape)) for shape in expected_shapes(model).values())
    with tempfile.TemporaryDirectory() as name:
        folders = {"safetensors": Path(name, "source"), "orbax": Path(name, "orbax")}
        folders["safetensors"].mkdir()
        total = write(folders["safetensors"], model)
        convert(folders["safetensors"], folders["orbax"])
        command = [sys.executable, __file__, "--devices", str(args.devices), "--folder"]
        flags = f"--xla_force_host_platform_device_count={args.devices}"
        # The devices' memory is glibc's here, which would keep some of what is freed: 0.2 to 1 GB of it, by chance.
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "MALLOC_MMAP_THRESHOLD_": "1000000"}
        rows = []
        for _ in range(args.rounds):
            for (kind, folder), where in itertools.product(folders.items(), ([], ["--warm"])):
                done = subprocess.run(
                    [*command, str(folder), *where], env=env, stdout=subprocess.PIPE, text=True, check=True
                )
                rows.append({"format": kind, **json.loads(done.stdout)})
    console = Console()
    for row in rows:
        source = f"{row['format']} {'in the page cache' if row['warm'] else 'on disk'}"
        console.print(
            f"{total / 1e9:.2f} GB of {source} to {args.devices} devices: "
            f"read {row['read_s']:.2f} s, loaded {row['load_s']:.2f} s ({row['load_s'] / row['read_s']:.2f}x); "
            f"peak {row['peak_bytes'] / 1e9:.2f} GB, the model's own bytes and "
            f"{(row['peak_bytes'] - row['model_bytes']) / largest:.2f} of its largest tensor"
        )
    if args.out:
        result = {"machine": describe(), "checkpoint_bytes": total, "largest_tensor_bytes": largest, "rounds": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except ArgumentError as error:
        sys.exit(f"error: {error}")
