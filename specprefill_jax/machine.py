"""What the machine at hand can do, measured by plain JAX, and how to name it beside a figure."""

import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from specprefill_jax.costs import Machine

_MATMUL_SIZE = 2048
_READ_SHAPE = (4096, 32768)
_ACCELERATOR_MATMUL_SIZE = 8192
"""A smaller product would measure how long it takes to ask for one."""
_ACCELERATOR_READ_SHAPE = (16384, 32768)


def _best(run: Callable[[], jax.Array], repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def matmul_rate(repeats: int = 3, dtype: DTypeLike = jnp.float32) -> float:
    """FLOPs a second of one plain matrix product, 2,048 cubed (8,192 on accelerators): the best of `repeats`."""
    size = _MATMUL_SIZE if jax.default_backend() == "cpu" else _ACCELERATOR_MATMUL_SIZE
    x = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: a @ a)
    return 2 * size**3 / _best(lambda: product(x), repeats)


def read_rate(repeats: int = 3) -> float:
    """Bytes a second that one plain matrix-vector product reads from 512 MiB (2 GiB on accelerators) of float32."""
    shape = _READ_SHAPE if jax.default_backend() == "cpu" else _ACCELERATOR_READ_SHAPE
    weight = jnp.ones(shape, jnp.float32)
    x = jnp.ones((1, shape[0]), jnp.float32)
    product = jax.jit(lambda x, w: x @ w)
    return weight.nbytes / _best(lambda: product(x, weight), repeats)


def measure(repeats: int = 3, dtype: DTypeLike = jnp.float32) -> Machine:
    """Both rates, now, of one device; products are of numbers of `dtype`."""
    return Machine(matmul_rate(repeats, dtype), read_rate(repeats))


def peak_memory() -> int:
    """Peak resident memory of this process so far, bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def describe() -> dict[str, Any]:
    """Machine, versions, command and date, as they stand beside every figure in `benchmarks/`."""
    packages = ("specprefill-jax", "jax", "jaxlib", "flax", "numpy")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": " ".join(["python", *sys.argv]),
        "commit": _commit(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "devices": [str(device.device_kind) for device in jax.local_devices()],
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        head = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() or None
