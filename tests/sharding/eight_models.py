"""Run by test_tensor_parallel.py with eight CPU devices: the tiny pair on meshes of 1, 2, 4 and 8 of them."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

sys.path.insert(0, str(Path(__file__).parents[1]))

from agreement import goldens, load_tiny
from test_paper_mode import setting_of

from specprefill_jax import SamplingParams, SpecPrefillConfig
from specprefill_jax.sharding.mesh import check_mesh, largest_mesh, make_mesh
from specprefill_jax.sharding.rules import check_divides, head_copies

CASES = ("tiny_17", "tiny_39")  # 33 and 257 tokens


def check_goldens(model, stems: tuple[str, ...]) -> None:
    for case in goldens():
        if case.stem not in stems:
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
        assert cache.k.addressable_shards[0].data.shape[2] * devices == loaded.layout.num_kv_heads


def collectives(loaded, tokens: int) -> dict[str, int]:
    """Collectives of one forward pass: of the layer (the loop's body, compiled once), and of the rest."""
    cache = loaded.new_cache(1, 256)
    ids = jnp.zeros((1, tokens), jnp.int32)
    zero = jnp.zeros((1,), jnp.int32)
    compiled = loaded.scanned.lower(loaded.weights, ids, ids, cache, zero, zero).compile()
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    local = 2 * cache.k.size * cache.k.dtype.itemsize // loaded.mesh.size
    assert memory.alias_size_in_bytes >= local, "the cache is not updated in place"
    kinds = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    found = {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in kinds}
    return {kind: count for kind, count in found.items() if count}


def check_meshes():
    """Without a mesh, as many devices as the models fit; what crosses from one mesh to another arrives.

    Returns:
        The pairs on eight devices and on two, for what is checked next.
    """
    assert largest_mesh(lambda mesh: head_copies(mesh, 9, 3)).size == 3
    assert largest_mesh(lambda mesh: head_copies(mesh, 7, 7)).size == 7
    assert largest_mesh(lambda mesh: check_divides(mesh, {"V": 11})) is None
    twice = Mesh(np.array([jax.devices()[0]] * 2), ("tensor",))
    with pytest.raises(ValueError, match="mesh must be a mesh with each device once"):
        check_mesh(twice)

    free, two = load_tiny(), load_tiny(mesh=jax.make_mesh((2,), ("tensor",), devices=jax.devices()[4:6]))
    assert free.main.mesh.size == free.speculator.model.mesh.size == 8
    assert two.predictor.gain(3000, 8, 900) == free.predictor.gain(3000, 8, 900), (
        "copies of heads are no work of the model's"
    )
    g = next(np.load(case) for case in goldens() if case.stem == CASES[0])
    ids, config = g["ids"].tolist(), setting_of(g).config
    sampling = SamplingParams(max_tokens=len(g["tokens"]), temperature=0.0, ignore_eos=True)
    logits = two.prefill(ids, free.select(ids, config))
    assert np.linalg.norm(logits - g["logits"]) <= 1e-3 * np.linalg.norm(g["logits"])
    # Heads that score alone, of a model whose key head every device has a copy of.
    some = SpecPrefillConfig(
        0.5, chunk_size=8, tail_tokens=1, min_prompt_tokens=0, min_predicted_gain=0, scoring_heads=((0, 3), (2, 1))
    )
    one = load_tiny(mesh=make_mesh(1))
    split, whole = (pair.select(ids, some) for pair in (free, one))
    assert free.selector.check_heads(some) != some.scoring_heads
    np.testing.assert_allclose(split.importance, whole.importance, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(split.kept_indices, whole.kept_indices)
    auto = replace(some, keep_rate="auto", scoring_heads=(), max_keep_rate=0.8)
    split, whole = (pair.select(ids, auto).divergences for pair in (free, one))
    assert list(whole) == [3, 4]
    assert split == pytest.approx(whole, rel=1e-3, abs=1e-6)
    others = make_mesh(jax.devices()[6:])
    apart = load_tiny(mesh=make_mesh(4), speculator_mesh=others)
    assert (apart.main.mesh.size, apart.speculator.model.mesh) == (4, others)
    assert apart.generate(ids, sampling, config).token_ids == g["tokens"].tolist()
    return free, two


def check_rows() -> None:
    """Two groups of four devices, each with the whole model, share the rows of a batch; a lone row is on both."""
    mesh = make_mesh(8, data=2)
    model, alone = load_tiny(mesh=mesh), load_tiny(mesh=make_mesh(1))
    check_goldens(model, CASES[:1])
    ids = np.random.default_rng(0).integers(0, 512, (4, 9), np.int32)
    at = np.broadcast_to(np.arange(9, dtype=np.int32), (4, 9))
    start, row = np.zeros(4, np.int32), np.array([8, 3, 0, 8], np.int32)
    hidden = []
    for main in (model.main, alone.main):
        cache = main.new_cache(4, 256)
        step = main.step(ids, at, cache, start, row)
        hidden.append(np.asarray(step.hidden))
    cache = model.main.new_cache(4, 256)
    assert cache.k.addressable_shards[0].data.shape[1:3] == (2, model.main.layout.num_kv_heads // 4)
    np.testing.assert_allclose(*hidden, rtol=1e-4, atol=1e-4)


def main() -> None:
    assert jax.device_count() == 8
    free, two = check_meshes()
    loaded = {2: two, 8: free}
    for devices in (1, 2, 4, 8):
        model = loaded.get(devices) or load_tiny(mesh=make_mesh(devices))
        check_layout(model, devices)
        if devices > 1:  # of one device the other tests are
            check_goldens(model, CASES if devices == 8 else CASES[:1])  # the more devices, the harder
        for tokens in (1, 32) if devices == 8 else (1,):
            found = collectives(model.main, tokens)
            # Two a layer, and one for the embedding.
            assert found == ({"all-reduce": 3} if devices > 1 else {}), (devices, tokens, found)
        print("devices", devices, flush=True)
    check_rows()
    print("rows", flush=True)


if __name__ == "__main__":
    main()
