"""Every fault a caller can make is a ValueError that names the argument, the value and what is allowed."""

import json
import math
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
from agreement import MAIN, SPECULATOR, load_tiny, prompt_of
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from specprefill_jax import ArgumentError, SamplingParams, SpecPrefill, SpecPrefillConfig

NAN = math.nan


def refused(name: str, value: object, allowed: str = "must be"):
    """Expect a ValueError whose text has the argument's name, the value, and the word on what is allowed."""
    parts = "".join(rf"(?=.*{re.escape(str(part))})" for part in (name, value, allowed))
    return pytest.raises(ValueError, match=rf"(?s){parts}")


CONFIG_FAULTS = [
    ("keep_rate", 0), ("keep_rate", 0.0), ("keep_rate", -0.1), ("keep_rate", 1.5), ("keep_rate", NAN),
    ("keep_rate", math.inf), ("keep_rate", "0.3"), ("keep_rate", True),
    ("look_ahead", 0), ("look_ahead", -1), ("look_ahead", 2.5),
    ("pool_width", 2), ("pool_width", 12), ("pool_width", -1), ("pool_width", 1.5),
    ("chunk_size", 0), ("chunk_size", -32), ("chunk_size", 8.5),
    ("eos_token_ids", (-1,)), ("eos_token_ids", ("</s>",)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), CONFIG_FAULTS)
@pytest.mark.parametrize("build", [SpecPrefillConfig, SpecPrefillConfig.paper], ids=["product", "paper"])
def test_config(build, name, value):
    with refused(name, value if not isinstance(value, tuple) else value[0]):
        build(**{"keep_rate": 0.3, name: value})


SAMPLING_FAULTS = [
    ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5),
    ("temperature", -0.1), ("temperature", NAN), ("temperature", math.inf),
    ("top_k", -1), ("top_k", 0.5),
    ("top_p", 0.0), ("top_p", -0.5), ("top_p", 1.1), ("top_p", NAN),
    ("min_p", -0.1), ("min_p", 1.1), ("min_p", NAN),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", NAN),
    ("stop_token_ids", (-3,)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SAMPLING_FAULTS)
def test_sampling(name, value):
    with refused(name, value if not isinstance(value, tuple) else value[0]):
        SamplingParams(**{name: value})


def test_empty_stop_string():
    """It would end every answer before its first character."""
    with refused("stop", "''"):
        SamplingParams(stop=("",))


@pytest.mark.parametrize("method", ["select", "generate", "stream"])
@pytest.mark.parametrize(
    ("ids", "value"),
    [
        ([], "[]"),
        ([5, -1, 7], "-1"),
        ([5, 512], "512"),
        ([5, 2**40], str(2**40)),
        ([5, 6.5], "6.5"),
        ([5, "six"], "six"),
        ([5, None], "None"),
        (np.zeros((2, 3), np.int32), ""),
        (np.array([5.0, 6.0]), ""),
    ],
    ids=["empty", "negative", "vocabulary", "huge", "float", "string", "none", "matrix", "floats"],
)
def test_prompt(tiny, method, ids, value):
    config = SpecPrefillConfig.paper(keep_rate=0.3)
    with refused("prompt", value):
        call(tiny, method, ids, config)


def call(model, method, ids, config, sampling=None):
    """select, generate or all of stream."""
    if method == "select":
        return model.select(ids, config)
    if method == "generate":
        return model.generate(ids, sampling or SamplingParams(max_tokens=2), config)
    return list(model.stream(ids, sampling or SamplingParams(max_tokens=2), config))


@pytest.mark.parametrize("prompt", ["some text", [{"role": "user", "content": "hello"}]], ids=["text", "chat"])
def test_text_without_a_tokenizer(tiny, prompt):
    with pytest.raises(ValueError, match="tokenizer"):
        tiny.generate(prompt, SamplingParams(max_tokens=2), SpecPrefillConfig.paper(keep_rate=0.3))


@pytest.mark.parametrize("method", ["select", "generate", "stream"])
@pytest.mark.parametrize(
    "config", [SpecPrefillConfig.paper(keep_rate=0.1), SpecPrefillConfig(keep_rate=0.1)], ids=["paper", "product"]
)
def test_prompt_longer_than_the_context(tiny, method, config):
    """4097 tokens are one too many, though a tenth of them would fit: positions beyond what the model knows."""
    with refused("prompt", 4097, "4096"):
        call(tiny, method, prompt_of(4097), config)


def test_faults_leave_the_model_whole(tiny):
    """After a refused prompt the next one gets what it always got."""
    ids, config, sampling = prompt_of(80), SpecPrefillConfig.paper(keep_rate=0.3), SamplingParams(max_tokens=4)
    before = tiny.generate(ids, sampling, config).token_ids
    with pytest.raises(ValueError, match="512"):
        tiny.generate([*ids, 512], sampling, config)
    assert list(tiny.generate(ids, sampling, config).token_ids) == list(before)


def test_prefill_with_the_selection_of_another_prompt(tiny):
    selection = tiny.select(prompt_of(100), SpecPrefillConfig.paper(keep_rate=0.3))
    with refused("selection", 100, "90"):
        tiny.prefill(prompt_of(90), selection)


@pytest.mark.parametrize("dtype", ["int7", "int8", "float64", "", "bf32"])
def test_dtype(dtype):
    with refused("dtype", repr(dtype), "bfloat16"):
        load_tiny(dtype=dtype)


@pytest.mark.parametrize("layers", [0, -1, 4, 1.5])
def test_speculator_layers(layers):
    """The tiny speculator has three."""
    with refused("speculator_layers", layers, "3"):
        load_tiny(speculator_layers=layers)


@pytest.mark.parametrize("size", [0, -7, 2.5])
def test_prefill_chunk(size):
    with refused("prefill_chunk", size):
        load_tiny(prefill_chunk=size)


@pytest.mark.parametrize("which", ["main", "speculator"])
def test_folder_that_is_not_there(tmp_path, which):
    missing = str(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="nowhere"):
        load_tiny(**{which: missing})


def copy_of(folder, target, **changes):
    """A copy of a tiny checkpoint with keys of its config changed."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_speculator_with_another_vocabulary_size(tmp_path):
    folder = copy_of(SPECULATOR, tmp_path / "draft", vocab_size=500)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:500].copy()
    save_file(tensors, folder / "model.safetensors")
    with refused("speculator", 500, "512"):
        SpecPrefill.from_pretrained(main=str(MAIN), speculator=str(folder), dtype="float32")


def write_tokenizer(folder, words: list[str]) -> list[str]:
    """A word-level tokenizer of `words` and as many made-up ones as fill 512 ids. Returns them all, by id."""
    words = [*words, *(f"w{i}" for i in range(512 - len(words)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return words


def test_speculator_with_another_tokenizer(tmp_path):
    """Equal sizes, one pair of words swapped: refused. The same vocabulary: loaded."""
    main, draft = copy_of(MAIN, tmp_path / "main"), copy_of(SPECULATOR, tmp_path / "draft")
    write_tokenizer(main, ["<unk>", "<s>", "</s>", "cat", "dog"])
    write_tokenizer(draft, ["<unk>", "<s>", "</s>", "dog", "cat"])
    with refused("speculator", "draft", "tokenizer"):
        SpecPrefill.from_pretrained(main=str(main), speculator=str(draft), dtype="float32")
    words = write_tokenizer(draft, ["<unk>", "<s>", "</s>", "cat", "dog"])
    model = SpecPrefill.from_pretrained(main=str(main), speculator=str(draft), dtype="float32")
    output = model.generate(
        "cat dog dog", SamplingParams(max_tokens=3, ignore_eos=True), SpecPrefillConfig.paper(keep_rate=1.0)
    )
    assert len(output.token_ids) == 3
    assert output.text.split() == [words[token] for token in output.token_ids]
    assert list(output.token_ids) == list(
        model.generate([3, 4, 4], SamplingParams(max_tokens=3, ignore_eos=True)).token_ids
    )


def test_a_broken_checkpoint_names_file_and_tensor(tmp_path):
    folder = copy_of(SPECULATOR, tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = np.ones(63, ml_dtypes.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"(?s)(?=.*model\.safetensors)(?=.*model\.norm\.weight)(?=.*63)(?=.*64)"):
        load_tiny(speculator=str(folder))


def test_prompt_longer_than_the_speculators_context(tmp_path):
    """Paper mode refuses it; product mode reads it whole and says why."""
    draft = copy_of(SPECULATOR, tmp_path / "draft", max_position_embeddings=256)
    model = load_tiny(speculator=str(draft))
    with refused("prompt", 257, "256"):
        model.select(prompt_of(257), SpecPrefillConfig.paper(keep_rate=0.3))
    config = SpecPrefillConfig(keep_rate=0.5, min_prompt_tokens=0, min_predicted_gain=0.0)
    assert model.select(prompt_of(256), config).engaged
    selection = model.select(prompt_of(257), config)
    assert selection.reason == "speculator_failed"
    assert "256" in selection.detail


@pytest.mark.parametrize(
    "prompt",
    [np.array(5), [[1, 2], [3]], [True, 5], bytearray(b"abc"), memoryview(b"abc"), b"abc", None, 7, {3: 4}],
    ids=["0-d", "ragged", "bools", "bytearray", "memoryview", "bytes", "None", "int", "dict"],
)
def test_prompts_that_are_no_flat_sequence(tiny, prompt):
    with pytest.raises(ArgumentError, match=r"^prompt=.* must be text, chat messages or a flat sequence"):
        tiny.encode(prompt)


@pytest.mark.parametrize("ids", [tuple(range(17)), (2**40,)], ids=["many", "large"])
def test_look_ahead_ends_are_checked_before_the_speculator(tiny, ids):
    with pytest.raises(ArgumentError, match=r"^eos_token_ids="):
        tiny.select([5] * 900, SpecPrefillConfig(eos_token_ids=ids, min_predicted_gain=0.0))


def test_a_chunk_far_longer_than_the_prompt(tiny):
    assert tiny.select([5] * 40, SpecPrefillConfig.paper(0.1, chunk_size=10**9)).kept_indices.tolist() == list(
        range(40)
    )
