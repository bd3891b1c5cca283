"""Run by test_mesh.py in a process of its own that has eight CPU devices: both kernels under a mesh.

Prints a line a check that passed.
"""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
from cases import BACKENDS, CHUNK_SHAPES, Prompt, Shape, arguments, check_choice, check_maxima, poisoned
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from specprefill_jax.kernels.chunk_topk import chunk_topk
from specprefill_jax.kernels.importance import pooled_maxima

SHAPE = Shape(1, 2, 8, 3, 4, 16, 150, 140, 13)
NUM_TOKENS = jnp.array([140, 117])
NAMES = "all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter", "collective-broadcast"
COLLECTIVE = rf"= .*? ({'|'.join(NAMES)})(?:-start)?\("


class Fail(logging.Handler):
    """A kernel that leaves its work to the reference says so; here none may."""

    def emit(self, record: logging.LogRecord) -> None:
        raise AssertionError(record.getMessage())


def mesh_of(sizes, names) -> Mesh:
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), names)


def check_one_maximum(compiled: str) -> None:
    """The program has one collective operation, which takes a maximum."""
    lines = [line for line in compiled.splitlines() if re.search(COLLECTIVE, line)]
    assert [re.search(COLLECTIVE, line)[1] for line in lines] == ["all-reduce"], lines
    region = re.search(r"to_apply=(%?[\w.-]+)", lines[0])[1]
    body = compiled[compiled.index(f"\n{region} ") :].split("\n}")[0]
    assert re.search(r"ROOT .* maximum\(", body), body


def check_importance(backend: str, mesh: Mesh, width: int) -> None:
    """Against the slow version, with NaN past the prompts; and what is not finite in one device's heads is seen."""
    keys, queries = SHAPE.draw()
    by_head = NamedSharding(mesh, P(None, None, "tensor")), NamedSharding(mesh, P(None, None, None, "tensor"))
    program = jax.jit(functools.partial(pooled_maxima, size=140, pool_width=width, backend=backend, mesh=mesh))

    def placed(keys, queries=queries):
        return jax.device_put(keys, by_head[0]), jax.device_put(queries, by_head[1]), NUM_TOKENS

    compiled = program.lower(*placed(keys)).compile()
    check_one_maximum(compiled.as_text())
    got = np.asarray(compiled(*placed(poisoned(keys, NUM_TOKENS))))
    check_maxima(got, keys, queries, NUM_TOKENS, 140, width)
    for head in (0, 3, 7):
        for value in (np.nan, np.inf):
            bad = keys.copy()
            bad[0, 0, head, 120, 5] = value
            broken = np.asarray(compiled(*placed(bad)))
            assert not np.isfinite(broken[0]).all(), (head, value)
            np.testing.assert_array_equal(broken[1], got[1])


def check_chunks(backend: str, mesh: Mesh) -> None:
    """The choice is that of one device, on all of them."""
    shape = CHUNK_SHAPES["few_kept"]
    scores = np.random.default_rng(0).integers(0, 9, (3, 40)) / 8
    prompts = [
        Prompt(scores[row, :count].tolist(), [chunk == 2 for chunk in range(count)], kept, tokens)
        for row, (count, kept, tokens) in enumerate([(40, 9, 278), (3, 3, 15), (11, 1, 71)])
    ]
    args = jax.device_put(arguments(shape, prompts), NamedSharding(mesh, P()))
    got = jax.jit(functools.partial(chunk_topk, chunk_size=7, size=65, backend=backend, mesh=mesh))(*args)
    got = type(got)(*map(np.asarray, got))
    for row, prompt in enumerate(prompts):
        check_choice(got, shape, row, prompt)


def main() -> None:
    assert jax.device_count() == 8
    logging.getLogger("specprefill_jax").addHandler(Fail(logging.WARNING))
    meshes = {
        "eight": (mesh_of((8,), ("tensor",)), 13),
        "two_by_four": (mesh_of((2, 4), ("data", "tensor")), 0),
    }
    for backend in BACKENDS:
        for name, (mesh, width) in meshes.items():
            check_importance(backend, mesh, width)
            print("importance", backend, name, flush=True)
        check_chunks(backend, meshes["eight"][0])
        print("chunk_topk", backend, flush=True)


if __name__ == "__main__":
    main()
