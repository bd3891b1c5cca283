"""How logical axes are laid out over a mesh: one table for parameters, caches, activations and kernels.

Tensor parallelism as in Megatron-LM (arXiv 1909.08053): query and key heads, the feed-forward's inner axis and the
vocabulary are split along the mesh axis `tensor`; everything else is whole on every device. A layer then needs two
all-reduces: after the attention's output and after the feed-forward's. Along the mesh axis `data` the rows of a batch
are split, and parameters are whole.

Letters: B batch, T tokens, S key slots, L layers, N query heads, K key heads, H head size, E embed, F feed-forward,
V vocabulary.
"""

from collections.abc import Mapping
from types import MappingProxyType

from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specprefill_jax.errors import argument_error

DATA, TENSOR = "data", "tensor"
RULES: Mapping[str, str] = MappingProxyType({"B": DATA, "N": TENSOR, "K": TENSOR, "F": TENSOR, "V": TENSOR})
"""Logical axis to mesh axis; an axis that is not here is not split."""


def spec(letters: str) -> P:
    """The layout of an array whose axes have these letters.

    Raises:
        ArgumentError: two of them go to the same mesh axis.
    """
    axes = [RULES.get(letter) for letter in letters]
    used = [axis for axis in axes if axis is not None]
    if len(used) != len(set(used)):
        raise argument_error("letters", letters, f"axes that go to different mesh axes, by the rules {dict(RULES)}")
    return P(*axes)


def sharding(mesh: Mesh, letters: str) -> NamedSharding:
    """The layout of such an array on a mesh."""
    return NamedSharding(mesh, spec(letters))


def batch_letter(mesh: Mesh, batch: int) -> str:
    """The letter of the batch axis: B, or b (whole on every device) where the mesh cannot split so many rows evenly."""
    return "b" if batch % mesh.shape[DATA] else "B"


def head_copies(mesh: Mesh, num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """How often each query head and each key head is repeated so that every device has whole groups of them.

    Where the axis is longer than K, devices share key heads: each holds a copy of the one that its query heads use.
    Where it is longer than N too, query heads are copied likewise, with no share in the attention's output.

    Raises:
        ArgumentError: heads that cannot be split evenly.
    """
    copies = _copies(mesh.shape[TENSOR], num_heads, num_kv_heads)
    if copies is None:
        fit = [str(n) for n in range(1, num_heads) if _copies(n, num_heads, num_kv_heads)]
        allowed = (
            f"a mesh of {', '.join(fit)} or a multiple of {num_heads} devices along {TENSOR!r}, for a model of "
            f"{num_heads} query and {num_kv_heads} key heads"
        )
        raise argument_error("mesh", dict(mesh.shape), allowed)
    return copies


def _copies(devices: int, num_heads: int, num_kv_heads: int) -> tuple[int, int] | None:
    if num_kv_heads % devices == 0:
        return 1, 1
    if devices % num_kv_heads == 0 and num_heads % devices == 0:
        return 1, devices // num_kv_heads
    if devices % num_kv_heads == 0 and devices % num_heads == 0:
        return devices // num_heads, devices // num_kv_heads
    return None


def check_divides(mesh: Mesh, sizes: Mapping[str, int]) -> None:
    """Check that the axes named by letter (F, V) can be split.

    Raises:
        ArgumentError: one that cannot.
    """
    devices = mesh.shape[TENSOR]
    for letter, size in sizes.items():
        if size % devices:
            allowed = f"a mesh whose axis {TENSOR!r} divides the model's {size} entries of axis {letter}"
            raise argument_error("mesh", dict(mesh.shape), allowed)
