"""SmolLM2-135M against its goldens: opt-in, for it needs a model of 540 MB and a minute.

SPECPREFILL_SMOLLM2 names the model (a folder, a .gguf file or a built-in name), SPECPREFILL_GOLDENS the folder with
smollm2_*.npz.
"""

import os
from pathlib import Path

import numpy as np
import pytest
from agreement import relative_error

from specprefill_jax import SamplingParams, SpecPrefill, SpecPrefillConfig

MODEL = os.environ.get("SPECPREFILL_SMOLLM2", "")
GOLDENS = os.environ.get("SPECPREFILL_GOLDENS", "")

pytestmark = pytest.mark.skipif(
    not (MODEL and GOLDENS), reason="SPECPREFILL_SMOLLM2 and SPECPREFILL_GOLDENS are not set"
)


@pytest.fixture(scope="module")
def smollm2():
    return SpecPrefill.from_pretrained(main=MODEL, speculator=MODEL, dtype="float32")


@pytest.mark.parametrize("number", range(3))
def test_golden(smollm2, number):
    g = np.load(Path(GOLDENS) / f"smollm2_{number}.npz")
    ids = g["ids"].tolist()
    config = SpecPrefillConfig.paper(
        keep_rate=float(str(g["rate"])),
        look_ahead=int(g["look_ahead"]),
        pool_width=int(g["pool"]),
        chunk_size=int(g["chunk"]),
        eos_token_ids=tuple(g["eos"].tolist()) if "eos" in g else (2,),
    )
    selection = smollm2.select(ids, config)
    assert selection.num_queries == int(g["valid"])
    np.testing.assert_allclose(selection.importance, g["importance"], rtol=1e-3, atol=1e-5)
    np.testing.assert_array_equal(selection.kept_indices, g["kept"])
    assert relative_error(smollm2.prefill(ids, selection), g["logits"]) < 1e-3
    sampling = SamplingParams(max_tokens=len(g["tokens"]), temperature=0.0, ignore_eos=True)
    assert list(smollm2.generate(ids, sampling, config).token_ids) == g["tokens"].tolist()
