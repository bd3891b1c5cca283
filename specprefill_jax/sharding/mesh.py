"""Meshes of devices."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from specprefill_jax.errors import argument_error
from specprefill_jax.sharding.rules import TENSOR


def make_mesh(devices: Sequence[jax.Device] | int | None = None) -> Mesh:
    """A mesh with the one axis `tensor`.

    Args:
        devices: the devices, or how many of JAX's; None: all of them.

    Raises:
        ArgumentError: more devices than there are, or none.
    """
    here = jax.devices()
    if devices is None or isinstance(devices, int):
        count = len(here) if devices is None else devices
        if not 1 <= count <= len(here):
            raise argument_error("devices", devices, f"from 1 to the {len(here)} that JAX sees")
        devices = here[:count]
    if not devices:
        raise argument_error("devices", devices, "at least one device")
    return Mesh(np.array(devices), (TENSOR,), axis_types=(AxisType.Auto,))


def check_mesh(mesh: object) -> Mesh:
    """The mesh, if models can be laid out on it.

    Raises:
        ArgumentError: it is no mesh, lacks the axis `tensor`, or has other axes longer than 1.
    """
    if not isinstance(mesh, Mesh) or TENSOR not in mesh.shape or mesh.shape[TENSOR] != mesh.size:
        raise argument_error("mesh", mesh, f"None or a jax.sharding.Mesh whose only axis longer than 1 is {TENSOR!r}")
    return mesh
