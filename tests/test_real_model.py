"""SmolLM2-135M against its goldens. `make test-real` runs it: it needs the built-in model (540 MB) and a minute."""

from pathlib import Path

import numpy as np
import pytest
from agreement import relative_error

from specprefill_jax import SamplingParams, SpecPrefill, SpecPrefillConfig

GOLDENS = sorted((Path(__file__).parent / "data" / "goldens").glob("smollm2_*.npz"))
pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def smollm2():
    return SpecPrefill.from_pretrained(main="smollm2-135m", speculator="smollm2-135m", dtype="float32")


@pytest.mark.parametrize("path", GOLDENS, ids=lambda path: path.stem)
def test_golden(smollm2, path):
    g = np.load(path)
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
