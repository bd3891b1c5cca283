"""Run by test_tensor_parallel.py with eight CPU devices: float8 models on meshes of 2, 4 and 8 of them."""

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from agreement import MAIN, SPECULATOR, prompt_of, relative_error
from checkpoint_files import write_folder
from eight_models import collectives
from float8_files import KINDS, quantised

from specprefill_jax.models import loaded
from specprefill_jax.models.checkpoint import open_checkpoint
from specprefill_jax.models.loaded import load
from specprefill_jax.sharding.mesh import make_mesh

IDS = np.asarray([prompt_of(24)], np.int32)
# The tiny main model has 8 query heads and 2 key heads, the speculator 4 and 1: it takes copies of query heads, too.
CASES = (
    ("static", MAIN, ((8, False), (8, True))),
    ("fbgemm", MAIN, ((2, True),)),
    ("channel", SPECULATOR, ((4, False), (8, False))),
)


def logits(model) -> np.ndarray:
    """Logits [1, V] after the prompt."""
    at, zero = np.arange(IDS.size, dtype=np.int32)[None], np.zeros(1, np.int32)
    step = model.step(IDS, at, model.new_cache(1, 256), zero, np.full(1, IDS.size - 1, np.int32))
    return np.asarray(model.logits(model.weights, step.hidden))


def check_layout(model, devices: int) -> None:
    """Each device holds its slice of every float8 matrix."""
    eights = [leaf for leaf in jax.tree.leaves(model.weights) if leaf.dtype == "float8_e4m3fn"]
    assert eights
    for leaf in eights:
        assert leaf.addressable_shards[0].data.size * devices == leaf.size


def main() -> None:
    assert jax.device_count() == 8
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        for kind, source, meshes in CASES:
            checkpoint = open_checkpoint(write_folder(Path(folder) / kind, *quantised(source, KINDS[kind])))
            alone, lost = {}, 0.0
            for native in sorted({False, *(native for _, native in meshes)}):
                patch.setattr(loaded, "multiplies_float8", lambda mesh, native=native: native)
                alone[native] = logits(load(checkpoint, "float32", layerwise=True))
            if True in alone:
                lost = relative_error(alone[True], alone[False])
            for devices, native in meshes:
                patch.setattr(loaded, "multiplies_float8", lambda mesh, native=native: native)
                model = load(checkpoint, "float32", mesh=make_mesh(devices))
                check_layout(model, devices)
                error = relative_error(logits(model), alone[False])
                # Native: each device scales its own slice of what o and down take, and loses no more by it.
                assert error < (1.5 * lost if native else 1e-5), (kind, devices, native, error, lost)
                # Two for each run of like layers (a loop's body, compiled once), and one for the embedding.
                found = collectives(model, IDS.size)
                assert found == {"all-reduce": 2 * len(model.runs) + 1}, (kind, devices, native, found)
            print(kind, flush=True)


if __name__ == "__main__":
    main()
