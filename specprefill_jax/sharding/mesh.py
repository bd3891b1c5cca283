"""Meshes of devices."""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import index
from typing import SupportsIndex

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from specprefill_jax.errors import ArgumentError, argument_error
from specprefill_jax.sharding.rules import DATA, TENSOR

NATIVE_FLOAT8 = (8, 9)
"""The compute capability from which NVIDIA GPUs multiply float8: Ada's."""


def make_mesh(devices: Sequence[jax.Device] | SupportsIndex | None = None, data: int = 1) -> Mesh:
    """A mesh of the axes `data` and `tensor`.

    Args:
        devices: the devices, or how many of JAX's, of every process as many as can be; None: all of them.
        data: length of the axis `data`: as many groups of devices hold the whole model, and share the rows of a batch.

    Raises:
        ArgumentError: more devices than there are, or none; or a number of groups that does not divide them.
    """
    here = jax.devices()
    known = devices is None or isinstance(devices, SupportsIndex | Sequence)
    if not known or isinstance(devices, bool | str | bytes):
        raise argument_error("devices", devices, "None, a number or a sequence of devices")
    if devices is None or isinstance(devices, SupportsIndex):
        count = len(here) if devices is None else index(devices)
        if not 1 <= count <= len(here):
            raise argument_error("devices", devices, f"from 1 to the {len(here)} that JAX sees")
        devices = _spread(here, count)
    if not devices:
        raise argument_error("devices", devices, "at least one device")
    if not (isinstance(data, int) and data >= 1 and len(devices) % data == 0):
        raise argument_error("data", data, f"a divisor of the {len(devices)} devices")
    return Mesh(np.array(devices).reshape(data, -1), (DATA, TENSOR), axis_types=(AxisType.Auto,) * 2)


def _spread(devices: Sequence[jax.Device], count: int) -> list[jax.Device]:
    """`count` of the devices in their order, as evenly from the processes as can be: each takes part only with some."""
    ranks = Counter[int]()
    order = []
    for place, device in enumerate(devices):
        order.append((ranks[device.process_index], place))
        ranks[device.process_index] += 1
    return [devices[place] for place in sorted(place for _, place in sorted(order)[:count])]


def check_mesh(mesh: object) -> Mesh:
    """The mesh as models are laid out on it: of the automatic axes `data` and `tensor`, whatever it was made with.

    Raises:
        ArgumentError: it is no mesh, lacks the axis `tensor`, has axes but these longer than 1, a device twice, or no
            device of some process.
    """
    known = mesh.shape.get(DATA, 1) * mesh.shape.get(TENSOR, 0) if isinstance(mesh, Mesh) else 0
    if not isinstance(mesh, Mesh) or mesh.size != known:
        allowed = f"None or a jax.sharding.Mesh with an axis {TENSOR!r} and no other longer than 1 but {DATA!r}"
        raise argument_error("mesh", mesh, allowed)
    if len(set(mesh.devices.flat)) != mesh.size:
        raise argument_error("mesh", mesh, "a mesh with each device once")
    check_processes(mesh)
    names = list(mesh.axis_names)
    devices = mesh.devices if DATA not in names else np.moveaxis(mesh.devices, names.index(DATA), 0)
    return make_mesh(list(devices.flat), mesh.shape.get(DATA, 1))


def check_processes(mesh: Mesh) -> None:
    """Check that every process has a device of the mesh: one without could take no part in the others' computations.

    Raises:
        ArgumentError: one has none.
    """
    without = set(range(jax.process_count())) - {device.process_index for device in mesh.devices.flat}
    if without:
        allowed = f"a mesh with devices of every process; process {min(without)} has none there"
        raise argument_error("mesh", dict(mesh.shape), allowed)


def largest_mesh(check: Callable[[Mesh], object]) -> Mesh | None:
    """The mesh of most devices that `check` does not raise an ArgumentError for, or None where that is one device."""
    for count in range(len(jax.devices()), 1, -1):
        mesh = make_mesh(count)
        try:
            check_processes(mesh)
            check(mesh)
        except ArgumentError:
            continue
        return mesh
    return None


def platform(mesh: Mesh | None) -> str:
    """What a mesh's devices are, or JAX's default ones: "cpu", "gpu" or "tpu"."""
    name = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else name


def compute_capability(mesh: Mesh | None) -> tuple[int, int]:
    """Of the NVIDIA GPUs of a mesh, or of JAX's default ones; (0, 0): they are none."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else (0, 0)
