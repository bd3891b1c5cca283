"""The built-in pair `retrieval-tiny`: its files, its tokenizer, and that it retrieves, read whole and in part."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specprefill_jax import SamplingParams, SpecPrefill
from specprefill_jax.errors import CheckpointError
from specprefill_jax.evals.lookups import draw_needles, prose
from specprefill_jax.models import builtin
from specprefill_jax.models.checkpoint import open_checkpoint

MAIN, SPECULATOR = "retrieval-tiny", "retrieval-tiny-speculator"


@pytest.fixture(scope="module")
def model():
    return SpecPrefill.from_pretrained(MAIN, SPECULATOR, "float32")


def test_files_are_few_and_the_models_differ():
    sizes = [path.stat().st_size for name in (MAIN, SPECULATOR) for path in builtin.PACKAGED[name].iterdir()]
    assert sum(sizes) < 4_000_000
    main, speculator = open_checkpoint(MAIN), open_checkpoint(SPECULATOR)
    assert (main.name, speculator.name) == (MAIN, SPECULATOR)
    assert (main.config.dtype, speculator.config.dtype) == ("bfloat16", "bfloat16")
    assert main.config.num_layers > speculator.config.num_layers
    assert main.config.hidden_size > speculator.config.hidden_size


def test_a_damaged_file_is_told(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text((builtin.PACKAGED[MAIN] / "config.json").read_text())
    monkeypatch.setitem(builtin.PACKAGED, MAIN, tmp_path)
    with pytest.raises(CheckpointError, match="install the package again"):
        open_checkpoint(MAIN)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_tokenizer_round_trip(model, text):
    tokenizer = model.tokenizer
    ids = tokenizer.encode(text.replace("<", ""))
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == text.replace("<", "")


def test_words_of_the_texts_are_tokens(model):
    text = "".join(prose(random.Random(0), 3000, len))
    assert len(model.tokenizer.encode(text)) < 1.05 * len(text.replace(",", " ,").replace(".", " .").split())


def test_chat_is_a_prompt_as_trained_on(model):
    (needle,) = draw_needles(random.Random(0), 1)
    question = needle.question.removesuffix("\nAnswer:\n")
    chat = [{"role": "user", "content": f" It is late.{needle.told}{question}"}]
    assert model.encode(chat).tolist() == model.encode(f" It is late.{needle.told}{needle.question}").tolist()
    output = model.generate(chat, SamplingParams(max_tokens=20))
    assert output.text == f"{needle.prefix} {needle.value}."
    assert output.finish_reason == "stop"


def test_a_hundred_needles(tmp_path, optimised):
    """Dense reads find needles in a thousand tokens; reads of a tenth find at least 95 of 100 of those."""
    out = tmp_path / "needles.json"
    script = Path(__file__).parents[1] / "scripts" / "eval_needle.py"
    flags = [
        f"--main={MAIN}",
        f"--speculator={SPECULATOR}",
        "--lookups",
        "--cases=100",
        "--expect=0.95",
        f"--out={out}",
    ]
    done = subprocess.run([sys.executable, script, *flags], env=optimised, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = json.loads(out.read_text())["cases"]
    assert len(cases) == 100
    assert all(case["tokens"] >= 1000 and case["kept"] <= 128 for case in cases)
    answered = [case for case in cases if case["dense"] == f" {case['number']}."]
    assert len(answered) >= 95
    assert sum(case["sparse"] == case["dense"] for case in answered) >= 0.95 * len(answered)
