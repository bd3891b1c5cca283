"""The goldens with the interpreted kernels where the pipeline has the reference on a CPU."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from agreement import goldens
from test_paper_mode import setting_of

from specprefill_jax import SamplingParams, SpecPrefill
from specprefill_jax.scoring import score_and_choose
from specprefill_jax.selection import plan

SLOTS = 512  # one shape for all goldens: interpreted kernels compile for seconds
KERNELS = ("triton_interpret", "mosaic_tpu_interpret")


def resized(keys):
    """Keys [L, B, K, S, H] with SLOTS slots; those that are added are poisoned."""
    keys = keys[:, :, :, :SLOTS]
    return jnp.pad(keys, [(0, 0)] * 3 + [(0, SLOTS - keys.shape[3]), (0, 0)], constant_values=jnp.nan)


@pytest.mark.parametrize("kernels", KERNELS)
def test_scores_and_choices(tiny, kernels):
    for case in goldens():
        g = np.load(case)
        ids, setting = g["ids"], setting_of(g)
        planned = plan(len(ids), setting.config)
        ahead = tiny.speculator.read(ids.astype(np.int32), setting.look_ahead, setting.eos)
        ahead = dataclasses.replace(ahead, cache=dataclasses.replace(ahead.cache, k=resized(ahead.cache.k)))
        prompt = np.zeros((1, SLOTS), np.int32)
        prompt[0, : len(ids)] = ids
        importance, scores, choice, num_queries, _ = score_and_choose(
            ahead, prompt, np.full(1, len(ids)), np.zeros((1, SLOTS // setting.chunk), bool),
            np.full(1, planned.num_chunks), np.full(1, planned.kept_chunks),
            size=SLOTS, pool_width=setting.width or 0, chunk_size=setting.chunk, kept_size=SLOTS, backend=kernels,
        )  # fmt: skip
        close = {"rtol": 1e-3, "atol": 1e-5, "err_msg": case.stem}
        assert int(num_queries) == int(g["valid"]), case.stem
        assert bool(choice.ok), case.stem
        np.testing.assert_allclose(importance[: len(ids)], g["importance"], **close)
        np.testing.assert_allclose(scores[: planned.num_chunks], g["chunk_scores"], **close)
        count = int(choice.kept_count)
        np.testing.assert_array_equal(choice.kept_indices[:count], g["kept"], err_msg=case.stem)
        np.testing.assert_array_equal(choice.kept_tokens[:count], ids[g["kept"]], err_msg=case.stem)


@pytest.mark.parametrize("kernels", KERNELS)
def test_the_pipeline_uses_them(tiny, kernels):
    model = SpecPrefill(tiny.main, tiny.speculator.model, tiny.tokenizer, kernels=kernels)
    g = np.load(goldens()[-1])
    sampling = SamplingParams(max_tokens=len(g["tokens"]), temperature=0.0, ignore_eos=True)
    output = model.generate(g["ids"].tolist(), sampling, setting_of(g).config)
    np.testing.assert_array_equal(output.selection.kept_indices, g["kept"])
    assert output.token_ids == g["tokens"].tolist()


def test_an_unknown_name_is_an_error(tiny):
    with pytest.raises(ValueError, match="kernels='cuda' is not allowed: kernels must be None or one of 'reference'"):
        SpecPrefill(tiny.main, tiny.speculator.model, tiny.tokenizer, kernels="cuda")
