"""Which axis goes where, and what cannot be split."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from specprefill_jax.models.weights import LAYER_ROWS, OUTER_ROWS, axes_of, copy_heads
from specprefill_jax.sharding.mesh import check_mesh, make_mesh
from specprefill_jax.sharding.rules import check_divides, head_copies, spec


def mesh_of(devices: int) -> AbstractMesh:
    return AbstractMesh((devices,), ("tensor",), axis_types=(AxisType.Auto,))


def test_parameters_are_split_as_in_megatron():
    layouts = {row.ours: spec(axes_of(row.ours)) for row in (*OUTER_ROWS, *LAYER_ROWS)}
    columns = {"q", "k", "v"}
    for name in columns:
        assert layouts[name] == P("tensor", None, None)
    assert layouts["o"] == P(None, "tensor", None)
    assert layouts["gate"] == layouts["up"] == layouts["head"] == layouts["embed"] == P("tensor", None)
    assert layouts["down"] == P(None, "tensor")
    assert layouts["q_bias"] == layouts["k_bias"] == P("tensor", None)
    assert layouts["gate_bias"] == P("tensor")
    assert layouts["attn_norm"] == layouts["norm"] == layouts["o_bias"] == layouts["down_bias"] == P(None)
    assert spec("LBKSH") == P(None, "data", "tensor", None, None)
    assert spec("LbKSH") == P(None, None, "tensor", None, None)


def test_two_axes_for_one_mesh_axis_collide():
    with pytest.raises(ValueError, match="letters='NK' is not allowed: letters must be axes that go to different"):
        spec("NK")


@pytest.mark.parametrize(
    ("devices", "heads", "kv_heads", "copies"),
    [(1, 9, 3, (1, 1)), (8, 32, 8, (1, 1)), (4, 32, 8, (1, 1)), (8, 8, 2, (1, 4)), (8, 4, 1, (2, 8)), (3, 9, 3, (1, 1)),
     (16, 64, 8, (1, 2)), (8, 8, 1, (1, 8))],
)  # fmt: skip
def test_head_copies(devices, heads, kv_heads, copies):
    assert head_copies(mesh_of(devices), heads, kv_heads) == copies


@pytest.mark.parametrize(("devices", "heads", "kv_heads"), [(2, 9, 3), (8, 12, 4), (6, 8, 2), (3, 8, 8)])
def test_heads_that_cannot_be_split(devices, heads, kv_heads):
    message = f"mesh={{'tensor': {devices}}} is not allowed: mesh must be a mesh of 1, "
    with pytest.raises(ValueError, match=message):
        head_copies(mesh_of(devices), heads, kv_heads)


def test_axes_that_cannot_be_split():
    check_divides(mesh_of(4), {"F": 320, "V": 512})
    with pytest.raises(ValueError, match="divides the model's 514 entries of axis V"):
        check_divides(mesh_of(4), {"F": 320, "V": 514})


def test_copies_of_heads_attend_to_the_same_keys_and_count_once():
    rng = np.random.default_rng(0)
    embed, heads, kv_heads, size = 6, 4, 2, 3
    q, o = rng.normal(size=(heads, size, embed)), rng.normal(size=(embed, heads, size))
    k = rng.normal(size=(kv_heads, size, embed))
    wide = {name: copy_heads(name, array.copy(), 2, 4) for name, array in (("q", q), ("k", k), ("o", o))}
    assert wide["q"].shape == (8, size, embed)
    assert wide["k"].shape == (8, size, embed)
    x = rng.normal(size=embed)

    def products(q, k):
        """Query times key for each query head, at one token."""
        group = len(q) // len(k)
        return np.array([(q[n] @ x) @ (k[n // group] @ x) for n in range(len(q))])

    np.testing.assert_allclose(products(wide["q"], wide["k"]), np.repeat(products(q, k), 2))
    out = rng.normal(size=(heads, size))
    np.testing.assert_allclose(
        np.einsum("NH,ENH->E", np.repeat(out, 2, axis=0), wide["o"]), np.einsum("NH,ENH->E", out, o)
    )


def test_meshes():
    assert make_mesh().shape == {"data": 1, "tensor": jax.device_count()}
    assert make_mesh(1).size == 1
    for bad in (0, -1, jax.device_count() + 1):
        with pytest.raises(ValueError, match=f"devices={bad} is not allowed: devices must be from 1 to the"):
            make_mesh(bad)
    for bad in (2.0, "2", True):
        with pytest.raises(ValueError, match="devices must be None, a number or a sequence of devices"):
            make_mesh(bad)
    with pytest.raises(ValueError, match="devices must be at least one device"):
        make_mesh([])
    with pytest.raises(ValueError, match="data=2 is not allowed: data must be a divisor of the 1 devices"):
        make_mesh(1, data=2)


@pytest.mark.parametrize("bad", ["tensor", 2, Mesh(np.array(jax.devices()[:1]), ("x",))], ids=str)
def test_what_is_no_mesh_for_a_model(bad):
    with pytest.raises(
        ValueError, match="mesh must be None or a jax.sharding.Mesh with an axis 'tensor' and no other longer"
    ):
        check_mesh(bad)


def test_a_mesh_is_taken_with_automatic_axes():
    explicit = jax.make_mesh((1,), ("tensor",))
    assert explicit.axis_types == (AxisType.Explicit,)
    assert check_mesh(explicit).axis_types == (AxisType.Auto,) * 2
    assert check_mesh(explicit).devices.tolist() == [explicit.devices.tolist()]
