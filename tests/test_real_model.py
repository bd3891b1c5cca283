"""SmolLM2-135M against its goldens, and how often its answers are empty: not to be asked of random weights.

`make test-real` runs it: it needs the built-in model (540 MB) and some ten minutes.
"""

from pathlib import Path

import numpy as np
import pytest
from agreement import relative_error

from specprefill_jax import SamplingParams, SpecPrefill, SpecPrefillConfig
from specprefill_jax.evals.prompts import QUESTION, prose

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


def test_omlx_419_sparse_answers_are_as_seldom_empty_as_dense_ones(smollm2):
    """An answer is empty where its first token ends it: of 200, at most 2 more are where a third was read.

    Chunks are small, since 300 tokens make ten of the usual ones, most of them forced.
    """
    sparse = SpecPrefillConfig(0.3, chunk_size=8, tail_tokens=16, min_prompt_tokens=0, min_predicted_gain=0.0)
    empty = {"dense": 0, "sparse": 0}
    for index in range(200):
        text = f"{prose(190, f'empty {index}')}\n\n{QUESTION}"
        chat = smollm2.tokenizer.render_chat([{"role": "user", "content": text}])
        ids = smollm2.tokenizer.encode(chat, add_special_tokens=False)
        for name, config in (("dense", SpecPrefillConfig(enabled=False)), ("sparse", sparse)):
            output = smollm2.generate(ids, SamplingParams(max_tokens=1, temperature=0.0), config)
            assert output.selection.engaged == (name == "sparse")
            empty[name] += output.finish_reason == "stop"
    assert empty["sparse"] <= empty["dense"] + 2
