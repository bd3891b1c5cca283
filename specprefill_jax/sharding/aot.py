"""Compiling for GPUs and TPUs on a machine that has none: XLA partitions, fuses, lowers and reports; nothing runs.

Needs the packages of the `aot` extra. `targets/` holds descriptions of GPUs in XLA's own text format
(`GpuTargetConfigProto`).
"""

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from specprefill_jax.errors import argument_error
from specprefill_jax.sharding.mesh import make_mesh

_TARGETS = Path(__file__).parent / "targets"
_COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


@dataclass(frozen=True)
class KernelReport:
    """What `ptxas` says of one Pallas kernel of a GPU program."""

    name: str
    registers: int
    """Registers a thread."""
    spills: int
    """Bytes that a thread spills to memory, stores and loads together."""
    shared_memory: int
    """Bytes of shared memory a program."""


@dataclass(frozen=True)
class Report:
    """What compiling one program for one device of a mesh told."""

    temp_bytes: int
    """Temporary memory a device, beside arguments and results."""
    argument_bytes: int
    alias_bytes: int
    """Of arguments that are donated and come back, changed in place, as results."""
    collectives: dict[str, int]
    """How many of each kind."""
    kernels: list[KernelReport] = field(default_factory=list)
    """The Pallas kernels; GPU only."""


def prepare(dump: Path | None) -> None:
    """Let JAX compile without the chips, before it has met any device.

    Args:
        dump: for GPUs, the folder where XLA leaves what it made. None: TPUs.
    """
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if dump is not None:
        flags = f"--xla_dump_to={dump} --xla_dump_emitter_re=ptx"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    jax.config.update("jax_platforms", "cpu" if dump is None else "cpu,cuda")
    jax.devices()


@cache
def gpu_mesh(devices: int, target: str = "h100_sxm") -> Mesh:
    """A compile-only mesh of `devices` GPUs on one host along the axis "tensor"."""
    description = (_TARGETS / f"{target}.textproto").read_text()
    topology = topologies.get_topology_desc(target, "cuda", target_config=description, topology="1x1x8")
    return _mesh(topology, devices)


@cache
def tpu_mesh(devices: int, topology: str = "v5e:2x4") -> Mesh:
    """A compile-only mesh of `devices` TPU cores along the axis "tensor"."""
    return _mesh(topologies.get_topology_desc(topology, "tpu"), devices)


def _mesh(topology: Any, devices: int) -> Mesh:
    if not 1 <= devices <= len(topology.devices):
        raise argument_error("devices", devices, f"from 1 to the {len(topology.devices)} of the topology")
    return make_mesh(topology.devices[:devices])


def compile_for(function: Callable, arguments: tuple, name: str, dump: Path | None) -> Report:
    """Compile `function` of `jax.ShapeDtypeStruct`s with shardings, and report.

    Args:
        function: what is compiled.
        arguments: its positional arguments, their shardings on a compile-only mesh.
        name: a unique name: how its files in `dump` are found.
        dump: the folder given to `prepare`.
    """

    def named(*args: Any) -> Any:
        return function(*args)

    named.__name__ = name
    lowered = jax.jit(named).lower(*arguments)
    ours = re.findall(r'name = "(\w+)"', lowered.as_text()) if dump else []
    report = compile_lowered(lowered)
    return report if dump is None else replace(report, kernels=_kernels(name, ours, dump))


def compile_lowered(lowered: jax.stages.Lowered) -> Report:
    """Compile what was lowered with shardings on a compile-only mesh, and report."""
    compiled = lowered.compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None
    assert text is not None
    collectives = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in _COLLECTIVES}
    return Report(
        memory.temp_size_in_bytes,
        memory.argument_size_in_bytes,
        memory.alias_size_in_bytes,
        {kind: count for kind, count in collectives.items() if count},
    )


def _kernels(name: str, ours: list[str], dump: Path) -> list[KernelReport]:
    """Reports of the kernels `ours` of the program of that name."""
    shared = {}
    for path in dump.glob(f"module_*.jit_{name}.thunk_sequence.txt"):
        for line in path.read_text().splitlines():
            if found := re.search(r"\] (\w+) grid:.*shared_memory: (\d+) bytes", line):
                shared[found[1]] = int(found[2])
    told = {}
    for path in dump.glob(f"module_*.jit_{name}.*.ptx"):
        entry = re.search(r"\.entry (\w+)\(", path.read_text())
        if entry and entry[1] in ours:
            told[entry[1]] = _ptxas(path, shared.get(entry[1], 0), entry[1])
    return [told[kernel] for kernel in ours if kernel in told]


def _ptxas(path: Path, shared: int, kernel: str) -> KernelReport:
    text = path.read_text()
    target = re.search(r"\.target (\w+)", text)
    assert target
    command = [_find_ptxas(), "-v", f"-arch={target[1]}", str(path), "-o", os.devnull]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    assert registers
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", said))
    return KernelReport(kernel, int(registers[1]), spills, shared)


@cache
def _find_ptxas() -> str:
    wheel = Path(sysconfig.get_path("purelib")) / "nvidia" / "cuda_nvcc" / "bin" / "ptxas"
    found = str(wheel) if wheel.exists() else shutil.which("ptxas")
    if found is None:
        raise FileNotFoundError("no ptxas: install the `aot` extra, or put CUDA's own on the path")
    return found
