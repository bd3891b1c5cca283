"""Run by test_orbax_folder.py with eight CPU devices: converted models on meshes equal their sources on the same.

Sources are loaded as for accelerators, layer by layer through donated stacks; conversions are read in place.
"""

import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from agreement import MAIN, SPECULATOR

from specprefill_jax.errors import ArgumentError
from specprefill_jax.models import convert, loaded, stacks
from specprefill_jax.models.checkpoint import open_checkpoint
from specprefill_jax.models.loaded import load
from specprefill_jax.sharding.mesh import make_mesh


def main() -> None:
    assert jax.device_count() == 8
    convert.PIECE_BYTES = 8_000
    with tempfile.TemporaryDirectory() as root:
        pairs = []
        # 2 key heads and 1: from four devices on, or two, several hold the same one.
        for source, dtype in ((MAIN, "float32"), (SPECULATOR, "bfloat16")):
            convert.convert(source, Path(root) / source.name)
            pairs.append((open_checkpoint(source), open_checkpoint(Path(root) / source.name), dtype))
        for devices in (1, 2, 4, 8):
            mesh = make_mesh(devices) if devices > 1 else None
            for source, converted, dtype in pairs:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(loaded, "platform", lambda mesh: "gpu")
                    patch.setattr(stacks, "read_in_place", None)
                    expected = load(source, dtype, mesh=mesh)
                found = load(converted, dtype, mesh=mesh)
                leaves = zip(jax.tree.leaves(found.weights), jax.tree.leaves(expected.weights), strict=True)
                for ours, theirs in leaves:
                    assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
                    assert ours.dtype == theirs.dtype
                    np.testing.assert_array_equal(ours, theirs)
            print("equal on", devices, flush=True)
        with pytest.raises(ArgumentError, match="mesh="):
            load(pairs[0][1], "float32", mesh=make_mesh(3))


if __name__ == "__main__":
    main()
