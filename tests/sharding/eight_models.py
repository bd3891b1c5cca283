"""Run by test_tensor_parallel.py with eight CPU devices: the tiny pair on meshes of 1, 2, 4 and 8 of them."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from agreement import goldens, load_tiny
from test_paper_mode import setting_of

from specprefill_jax import SamplingParams
from specprefill_jax.sharding.mesh import make_mesh

CASES = ("tiny_17", "tiny_39")  # 33 and 257 tokens


def check_goldens(model) -> None:
    for case in goldens():
        if case.stem not in CASES:
            continue
        g = np.load(case)
        sampling = SamplingParams(max_tokens=len(g["tokens"]), temperature=0.0, ignore_eos=True)
        output = model.generate(g["ids"].tolist(), sampling, setting_of(g).config)
        selection = output.selection
        np.testing.assert_array_equal(selection.kept_indices, g["kept"], err_msg=case.stem)
        np.testing.assert_allclose(selection.importance, g["importance"], rtol=1e-3, atol=1e-5, err_msg=case.stem)
        assert output.token_ids == g["tokens"].tolist(), case.stem


def check_layout(model, devices: int) -> None:
    """Every device holds its part of what is split, and of the cache."""
    for loaded in (model.main, model.speculator.model):
        split = 0
        for leaf in jax.tree.leaves(loaded.weights):
            local = leaf.addressable_shards[0].data.size
            assert local in (leaf.size, leaf.size // devices)
            split += local < leaf.size
        assert devices == 1 or split >= 7
        cache = loaded.new_cache(1, 256)
        assert cache.k.addressable_shards[0].data.shape[2] * devices == loaded.config.num_kv_heads


def collectives(loaded, tokens: int) -> dict[str, int]:
    """Collectives of one forward pass: of the layer (the loop's body, compiled once), and of the rest."""
    cache = loaded.new_cache(1, 256)
    ids = jnp.zeros((1, tokens), jnp.int32)
    zero = jnp.zeros((1,), jnp.int32)
    compiled = loaded._scanned.lower(loaded.weights, ids, ids, cache, zero, zero).compile()
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    local = 2 * cache.k.size * cache.k.dtype.itemsize // loaded.mesh.size
    assert memory.alias_size_in_bytes >= local, "the cache is not updated in place"
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    found = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}
    return {kind: count for kind, count in found.items() if count}


def main() -> None:
    assert jax.device_count() == 8
    for devices in (1, 2, 4, 8):
        model = load_tiny(mesh=make_mesh(devices))
        check_layout(model, devices)
        check_goldens(model)
        for tokens in (1, 32):
            found = collectives(model.main, tokens)
            # Two a layer, and one for the embedding.
            assert found == ({"all-reduce": 3} if devices > 1 else {}), (devices, tokens, found)
        print("goldens", devices, flush=True)


if __name__ == "__main__":
    main()
