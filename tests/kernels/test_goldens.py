"""The goldens with the interpreted kernels where the pipeline has the reference on a CPU."""

import numpy as np
import pytest
from agreement import goldens
from test_paper_mode import score_golden, setting_of

from specprefill_jax import SamplingParams, SpecPrefill

KERNELS = ("triton_interpret", "mosaic_tpu_interpret")


@pytest.mark.parametrize("kernels", KERNELS)
def test_scores_and_choices(tiny_chunked, kernels):
    for case in goldens():
        g = np.load(case)
        ids, setting = g["ids"], setting_of(g)
        importance, scores, choice, num_queries, _ = score_golden(tiny_chunked(32), g, setting, kernels)
        chunks = -(-len(ids) // setting.chunk)
        close = {"rtol": 1e-3, "atol": 1e-5, "err_msg": case.stem}
        assert int(num_queries) == int(g["valid"]), case.stem
        assert bool(choice.ok), case.stem
        np.testing.assert_allclose(importance[: len(ids)], g["importance"], **close)
        np.testing.assert_allclose(scores[:chunks], g["chunk_scores"], **close)
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
