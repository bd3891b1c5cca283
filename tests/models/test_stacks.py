"""Stacks of layers: read in place on CPU devices, they are what streaming makes of the same layers."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from agreement import MAIN

from specprefill_jax.models.checkpoint import open_checkpoint
from specprefill_jax.models.orbax_folder import fresh
from specprefill_jax.models.stacks import read_in_place, stream
from specprefill_jax.sharding.mesh import make_mesh


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_read_in_place_equals_streamed(stored, wanted):
    """Every conversion, values that need rounding, a scalar a layer, and names in the order of `shapes`."""
    rng = np.random.default_rng(0)
    sizes = {"down": (6, 10), "attn_norm": (6,), "down_input_scale": (), "q": (4, 2, 6)}
    layers = [{name: rng.standard_normal(size).astype(stored) for name, size in sizes.items()} for _ in range(3)]
    shapes = {
        name: jax.ShapeDtypeStruct(sizes[name], wanted) for name in ("q", "down_input_scale", "down", "attn_norm")
    }
    expected = stream((tuple(jnp.asarray(arrays[name], wanted) for name in shapes) for arrays in layers), 3)
    found = read_in_place(iter([dict(arrays) for arrays in layers]), 3, shapes, make_mesh(1))
    for name, ours, theirs in zip(shapes, found, expected, strict=True):
        assert ours.shape == (3, *sizes[name])
        assert ours.dtype == wanted
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs), err_msg=name)


def test_read_in_place_makes_no_copy(monkeypatch):
    """The devices' memory is what was read into: peak memory depends on it."""
    made = []
    monkeypatch.setattr("specprefill_jax.models.stacks.fresh", lambda *a: made.append(fresh(*a)) or made[-1])
    layer = open_checkpoint(MAIN).layer(0)
    shapes = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in layer.items()}
    found = read_in_place(iter([dict(layer)]), 1, shapes, make_mesh(1))
    pointers = [leaf.addressable_shards[0].data.unsafe_buffer_pointer() for leaf in found]
    assert pointers == [share.ctypes.data for share in made]


def test_a_layer_that_cannot_be_read_is_told():
    """What a reading thread raises comes out."""
    layer = {"q": np.zeros((4, 2, 6), np.float32)}
    shapes = {"q": jax.ShapeDtypeStruct((4, 2, 6), jnp.float32), "k": jax.ShapeDtypeStruct((4, 2, 6), jnp.float32)}
    with pytest.raises(KeyError, match="k"):
        read_in_place(iter([layer]), 1, shapes, make_mesh(1))
