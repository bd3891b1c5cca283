"""Meshes of devices."""

from collections import Counter
from collections.abc import Callable, Sequence
from operator import index
from typing import SupportsIndex

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from specprefill_jax.errors import ArgumentError, argument_error
from specprefill_jax.sharding.rules import TENSOR


def make_mesh(devices: Sequence[jax.Device] | SupportsIndex | None = None) -> Mesh:
    """A mesh with the one axis `tensor`.

    Args:
        devices: the devices, or how many of JAX's, of every process as many as can be; None: all of them.

    Raises:
        ArgumentError: more devices than there are, or none.
    """
    here = jax.devices()
    if devices is None or isinstance(devices, SupportsIndex):
        count = len(here) if devices is None else index(devices)
        if not 1 <= count <= len(here):
            raise argument_error("devices", devices, f"from 1 to the {len(here)} that JAX sees")
        devices = _spread(here, count)
    if not devices:
        raise argument_error("devices", devices, "at least one device")
    return Mesh(np.array(devices), (TENSOR,), axis_types=(AxisType.Auto,))


def _spread(devices: Sequence[jax.Device], count: int) -> list[jax.Device]:
    """`count` of the devices in their order, as evenly from the processes as can be: each takes part only with some."""
    ranks = Counter[int]()
    order = []
    for place, device in enumerate(devices):
        order.append((ranks[device.process_index], place))
        ranks[device.process_index] += 1
    return [devices[place] for place in sorted(place for _, place in sorted(order)[:count])]


def check_mesh(mesh: object) -> Mesh:
    """The mesh as models are laid out on it: with automatic axes, whatever kind it was made with.

    Raises:
        ArgumentError: it is no mesh, lacks the axis `tensor`, has other axes longer than 1, a device twice, or no
            device of some process.
    """
    if not isinstance(mesh, Mesh) or TENSOR not in mesh.shape or mesh.shape[TENSOR] != mesh.size:
        raise argument_error("mesh", mesh, f"None or a jax.sharding.Mesh whose only axis longer than 1 is {TENSOR!r}")
    if len(set(mesh.devices.flat)) != mesh.size:
        raise argument_error("mesh", mesh, "a mesh with each device once")
    check_processes(mesh)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


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
