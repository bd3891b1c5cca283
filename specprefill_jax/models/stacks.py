"""Like layers stacked [L, ...] on their devices, as they are read.

* `stream`: any devices. Layers are placed one after another and set into donated stacks, so that the host and each
  device hold little more than a layer twice.
* `read_in_place`: a mesh of CPU devices. Their memory is the host's, so each device's share of a stack is made first,
  files are read into it, and JAX takes it as it is: no byte is copied again.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from specprefill_jax.models.orbax_folder import StoredArray, fresh
from specprefill_jax.models.weights import axes_of
from specprefill_jax.sharding.rules import sharding

Leaves = tuple[jax.Array, ...]
READERS = 4
"""Threads that read: one that waits for the disk keeps no other from copying."""


def stream(layers: Iterator[Leaves], count: int) -> Leaves:
    """Stream layers into stacked buffers, so that at most one layer is held twice.

    Args:
        layers: the arrays of each layer in turn, of the same shapes, dtypes and layouts.
        count: how many layers there are.
    """
    stack: Leaves = ()
    for i, leaves in enumerate(layers):
        if not stack:
            stack = tuple(_empty_stack(x, count) for x in leaves)
        stack = _set_layer(stack, np.int32(i), leaves)
    return stack


def read_in_place(
    layers: Iterator[dict[str, np.ndarray]], count: int, shapes: Mapping[str, jax.ShapeDtypeStruct], mesh: Mesh
) -> Leaves:
    """Read layers into stacks over a mesh of CPU devices.

    Args:
        layers: the arrays of each layer in turn by name (`weights.Row.ours`), which are used up. What is not read yet
            is read here, and of it only what this process's devices hold.
        count: how many layers there are.
        shapes: of a layer's arrays by name, in the order of the result; values are converted to these dtypes.
        mesh: of CPU devices.
    """
    splits = {name: sharding(mesh, axes_of(name)) for name in shapes}
    shares: dict[str, list[tuple[jax.Device, Any, np.ndarray]]] = {
        name: [
            (device, index, fresh((count, *splits[name].shard_shape(leaf.shape)), np.dtype(leaf.dtype)))
            for device, index in splits[name].addressable_devices_indices_map(leaf.shape).items()
        ]
        for name, leaf in shapes.items()
    }

    def fill(name: str, array: np.ndarray, layer: int) -> None:
        for device, index, share in shares[name]:
            _read(array, index, share[layer, ...], device)

    with ThreadPoolExecutor(READERS) as pool:
        for i, arrays in enumerate(layers):
            list(pool.map(lambda name, arrays=arrays, i=i: fill(name, arrays.pop(name), i), shapes))
    return tuple(
        jax.make_array_from_single_device_arrays(
            (count, *leaf.shape),
            NamedSharding(mesh, P(None, *splits[name].spec)),
            [jax.device_put(share, device) for device, _, share in shares[name]],
        )
        for name, leaf in shapes.items()
    )


def _read(array: np.ndarray | StoredArray, index: Any, out: np.ndarray, device: jax.Device) -> None:
    """Read array[index] into out, by way of a CPU device where it must be converted."""
    if isinstance(array, StoredArray) and array.dtype == out.dtype:
        array.read(index, out)
        return
    part = np.asarray(array[index])
    if part.dtype != out.dtype:
        part = np.asarray(jax.device_put(part, device).astype(out.dtype))
    bits = f"u{out.itemsize}"  # numpy copies these faster than types it does not know
    out.view(bits)[...] = part.view(bits)


@partial(jax.jit, donate_argnums=0)
def _set_layer(stack: Leaves, layer: ArrayLike, leaves: Leaves) -> Leaves:
    return tuple(lax.dynamic_update_index_in_dim(s, x, layer, 0) for s, x in zip(stack, leaves, strict=True))


def _empty_stack(x: jax.Array, count: int) -> jax.Array:
    """Zeros [count, ...] of arrays like x, laid out as it is; where that is no mesh, as free to move as x is."""
    layout = x.sharding
    over_mesh = NamedSharding(layout.mesh, P(None, *layout.spec)) if isinstance(layout, NamedSharding) else None
    return jnp.zeros((count, *x.shape), x.dtype, device=over_mesh)
