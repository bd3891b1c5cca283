"""The compiled layer: both forms of the forward pass agree, and the cache is updated in place."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import MAIN, SPECULATOR, goldens, prompt_of

from specprefill_jax import SpecPrefill, SpecPrefillConfig
from specprefill_jax.models import attention
from specprefill_jax.models.checkpoint import open_checkpoint
from specprefill_jax.models.loaded import load


@pytest.mark.parametrize("capacity", [256, 1024, 4096])
@pytest.mark.parametrize("tokens", [1, 16, 256])
@pytest.mark.parametrize("layerwise", [True, False], ids=["layerwise", "scanned"])
def test_the_cache_is_updated_in_place(tokens, capacity, layerwise):
    """No copy of the whole cache in the compiled program, whatever the capacity: it would cost more than the layer."""
    # One key head, the hardest case; scanned and with a single key head, short prompts are known to be copied once.
    model = load(open_checkpoint(SPECULATOR if layerwise else MAIN), "float32", layerwise=layerwise)
    start = np.zeros(1, np.int32)
    ids = np.zeros((1, tokens), np.int32)
    cache = model.new_cache(1, capacity)
    whole = cache.k.nbytes
    if layerwise:
        x, by, cache = model._begin(model.weights.outer, ids, ids, cache, start)
        lowered = model._block.lower(
            model.weights.blocks[0], x, by, cache, model._layers[0], start, start, run=model.runs[0]
        )
    else:
        lowered = model.scanned.lower(model.weights, ids, ids, cache, start, start)
    compiled = lowered.compile()
    shape = ",".join(map(str, cache.k.shape))
    assert not re.findall(rf"= f32\[{shape}\]\S* copy\(", compiled.as_text())
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * whole


def test_scanned_equals_the_goldens():
    """The form that accelerators run, with its look-ahead as one scan."""
    models = [load(open_checkpoint(path), "float32", layerwise=False) for path in (MAIN, SPECULATOR)]
    pair = SpecPrefill(*models, tokenizer=None, prefill_chunk=64)
    for path in goldens()[::8]:
        g = np.load(path)
        eos = tuple(g["eos"].tolist()) if "eos" in g else (2,)
        config = SpecPrefillConfig.paper(
            float(str(g["rate"])), int(g["look_ahead"]), int(g["pool"]), int(g["chunk"]), eos
        )
        selection = pair.select(g["ids"].tolist(), config)
        assert selection.num_queries == int(g["valid"])
        np.testing.assert_allclose(selection.importance, g["importance"], rtol=1e-3, atol=1e-5)
        np.testing.assert_array_equal(selection.kept_indices, g["kept"])
        logits = pair.prefill(g["ids"].tolist(), selection)
        assert np.linalg.norm(logits - g["logits"]) < 1e-3 * np.linalg.norm(g["logits"])


@pytest.mark.parametrize(
    ("form", "tokens", "start"),
    [
        *itertools.product(["blocks"], [1, 2, 31, 32, 100, 513, 700], [0, 1, 31, 64, 255, 256, 300]),
        *itertools.product(["blocks"], [2, 31], [992, 993, 1023, 1024]),
        *itertools.product(["fused"], [1, 2, 100], [0, 1, 300]),
    ],
)
def test_attention_equals_a_plain_softmax(tokens, start, form):
    """Every mix of earlier slots and block edges, two rows with different starts, poisoned beyond the last token."""
    rng = np.random.default_rng(tokens * 1000 + start)
    starts, capacity, heads, kv_heads, size = [start, start // 2], 2048, 6, 2, 8
    q = rng.standard_normal((2, tokens, heads, size)).astype(np.float32)
    k, v = rng.standard_normal((2, 3, 2, kv_heads, capacity, size)).astype(np.float32)
    for b, first in enumerate(starts):
        k[:, b, :, first + tokens :] = 1e4  # a key that would take all attention
    cache = attention.KVCache(jnp.asarray(k), jnp.asarray(v), jnp.zeros((2, capacity), jnp.int32))
    layer, at = jnp.int32(1), jnp.asarray(starts, jnp.int32)
    if form == "blocks":
        actual = np.asarray(attention.attend(q, cache, layer, at))
    elif tokens == 1:
        actual = np.asarray(attention.attend(q, cache, layer, at, accelerator=True))
    else:
        new = [np.stack([x[1, b, :, f : f + tokens].swapaxes(0, 1) for b, f in enumerate(starts)]) for x in (k, v)]
        actual = np.asarray(
            attention.attend_fused(jnp.asarray(q), *map(jnp.asarray, new), attention.row(cache, layer), at, "xla")
        )
    for b, first in enumerate(starts):
        for n in range(heads):
            keys, values = (x[1, b, n // 3, : first + tokens].astype(np.float64) for x in (k, v))
            scores = q[b, :, n] @ keys.T / np.sqrt(size)
            seen = np.arange(first + tokens) <= first + np.arange(tokens)[:, None]
            p = np.exp(np.where(seen, scores, -np.inf) - np.where(seen, scores, -np.inf).max(1, keepdims=True))
            expected = (p / p.sum(1, keepdims=True)) @ values
            np.testing.assert_allclose(actual[b, :, n], expected, rtol=1e-4, atol=1e-5)


def test_one_layer_compiles_all_and_means_nothing():
    """`one_layer` gives the right shapes, and afterwards the model is as before."""
    model = load(open_checkpoint(MAIN), "float32", layerwise=True)
    ids = np.asarray(prompt_of(20), np.int32)[None]
    positions, start, row = np.arange(20, dtype=np.int32)[None], np.zeros(1, np.int32), np.full(1, 19, np.int32)
    whole = model.step(ids, positions, model.new_cache(1, 256), start, row)
    with model.one_layer():
        quick = model.step(ids, positions, model.new_cache(1, 256), start, row)
    again = model.step(ids, positions, model.new_cache(1, 256), start, row)
    assert len(quick.queries) == len(whole.queries) == 4
    assert not np.allclose(quick.hidden, whole.hidden)
    np.testing.assert_array_equal(again.hidden, whole.hidden)


def test_a_stack_on_no_mesh_is_as_free_to_move_as_its_layers():
    """Weights that are bound to a device would have every program compiled twice: for fresh caches, and for its own."""
    model = load(open_checkpoint(SPECULATOR), "float32", layerwise=False)
    assert not any(leaf.committed for leaf in jax.tree.leaves((model.weights, model.new_pages(2))))
