"""What the kernels become on a GPU and a TPU, seen without either: they lower, and they read keys twice and no more."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from specprefill_jax.kernels.chunk_topk import chunk_topk
from specprefill_jax.kernels.importance import pooled_maxima

CHIPS = {
    "triton": ("cuda", AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")),
    "mosaic_tpu": ("tpu", AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")),
}
TARGETS = {"triton": "__gpu$xla.gpu.triton", "mosaic_tpu": "tpu_custom_call"}
MODELS = {"1B": (16, 8, 32, 64), "8B": (32, 8, 32, 128), "70B": (80, 8, 64, 128)}
LENGTHS = (8192, 131072)


def lower(function, arguments, backend: str) -> str:
    platform, device = CHIPS[backend]
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def scoring(model: str, size: int, backend: str):
    layers, kv_heads, heads, width = MODELS[model]
    keys = jax.ShapeDtypeStruct((layers, 1, kv_heads, size, width), jnp.bfloat16)
    queries = jax.ShapeDtypeStruct((layers, 1, 8, heads, width), jnp.bfloat16)
    function = partial(pooled_maxima, size=size, pool_width=13, backend=backend)
    return function, (keys, queries, jax.ShapeDtypeStruct((1,), jnp.int32))


@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", CHIPS)
def test_only_the_two_passes_touch_the_keys(backend, model, size):
    text = lower(*scoring(model, size, backend), backend)
    main = text[text.index("func.func public @main") :].split("func.func private", 1)[0]
    uses = [line for line in main.splitlines() if re.search(r"%arg0\b", line) and "func.func" not in line]
    assert len(uses) == 2, uses
    assert all(f"@{TARGETS[backend]}(" in line for line in uses)


def kernels_of(function, arguments) -> list:
    """The pallas_call equations of a traced function."""
    found = []

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "pallas_call":
                found.append(equation)
                continue
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(jax.make_jaxpr(function)(*arguments).jaxpr)
    return found


def loads_of(jaxpr, ref) -> list:
    """Shapes that are loaded from `ref`, also in loops; a loop must carry or close over it."""
    shapes = []
    for equation in jaxpr.eqns:
        if ref not in equation.invars:
            continue
        if equation.primitive.name in ("get", "masked_load", "load"):
            shapes.append(equation.outvars[0].aval.shape)
            continue
        inner = equation.params.get("body_jaxpr") or equation.params["jaxpr"]
        inner = getattr(inner, "jaxpr", inner)
        skip = equation.params.get("cond_nconsts", 0)
        shapes += loads_of(inner, inner.invars[equation.invars.index(ref) - skip])
    return shapes


@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize("model", MODELS)
def test_triton_reads_each_key_once_a_pass_but_for_the_halo(model, size):
    """Floor: 2 x key bytes. Pass two's tiles overlap by W - 1 = 12 keys."""
    width = MODELS[model][-1]
    one, two = kernels_of(*scoring(model, size, "triton"))
    for kernel, keys_at in ((one, 2), (two, 4)):
        body = kernel.params["jaxpr"]
        loads = loads_of(body, body.invars[keys_at])
        assert len(loads) == 1  # one load, in the loop over keys or heads
        assert loads[0][1] == width
    (block, _), columns = loads[0], two.params["grid_mapping"].grid[0]
    assert columns == -(-size // (block - 12))
    assert columns * block / size <= 128 / 116 + 0.02 if model != "70B" else columns * block / size <= 64 / 52 + 0.02


@pytest.mark.parametrize("size", LENGTHS)
@pytest.mark.parametrize("model", MODELS)
def test_mosaic_reads_each_key_once_a_pass_but_for_the_edges(model, size):
    layers, kv_heads, _, width = MODELS[model]
    one, two = kernels_of(*scoring(model, size, "mosaic_tpu"))
    for kernel, most in ((one, 1.0), (two, 1 + 128 / 1024)):
        mapping = kernel.params["grid_mapping"]
        blocks = [b for b in mapping.block_mappings if b.array_aval.shape == (layers, 1, kv_heads, size, width)]
        read = sum(int(b.block_shape[-2].block_size) for b in blocks) * (size // 2048 or 1)
        tiles = sorted(mapping.grid[1:])
        assert layers * kv_heads in mapping.grid
        assert read / size <= most, (read, tiles)


@pytest.mark.parametrize("chunk", [1, 32])
@pytest.mark.parametrize("backend", CHIPS)
def test_chunk_topk_lowers(backend, chunk):
    size = 131072
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    scores, forced = (jax.ShapeDtypeStruct((1, size // chunk), dtype) for dtype in (jnp.float32, jnp.bool_))
    tokens = jax.ShapeDtypeStruct((1, size), jnp.int32)
    function = partial(chunk_topk, chunk_size=chunk, size=size // 10, backend=backend)
    text = lower(function, (scores, forced, one, one, one, tokens), backend)
    assert text.count(f"@{TARGETS[backend]}(") == 1
    assert "stablehlo.sort" not in text
