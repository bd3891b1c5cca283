"""LlamaConfig: both key styles, defaults, and every value that is refused."""

import dataclasses
import json
from pathlib import Path

import pytest

from specprefill_jax.errors import CheckpointError
from specprefill_jax.models.config import LlamaConfig, RopeConfig, read_config

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
}


def read(generation=None, **changes):
    data = {key: value for key, value in {**BASE, **changes}.items() if value != "absent"}
    return LlamaConfig.from_json(data, "somewhere/config.json", generation)


def test_published_keys_of_tiny_main():
    config = read_config(CHECKPOINTS / "tiny-main")
    assert config == LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=320,
        num_layers=4,
        num_heads=8,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope=RopeConfig("llama3", 500_000.0, 8.0, 1.0, 4.0, 128),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_ids=(2, 3, 4),
        dtype="bfloat16",
    )


def test_transformers_5_keys_of_tiny_draft():
    config = read_config(CHECKPOINTS / "tiny-draft")
    assert config.rope == RopeConfig("llama3", 500_000.0, 32.0, 1.0, 4.0, 128)
    assert (config.num_kv_heads, config.head_dim, config.tie_word_embeddings) == (1, 16, True)
    assert (config.dtype, config.eos_token_ids, config.rms_norm_eps) == ("float32", (2,), 1e-6)


def test_both_key_styles_read_the_same():
    old = read(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3}, torch_dtype="float16")
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}, dtype="float16")
    oldest = read(rope_theta=5e5, rope_scaling={"type": "llama3", **LLAMA3}, torch_dtype="float16")
    assert old == new == oldest
    assert old.rope == RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 8192)
    assert hash(old) == hash(new)


def test_defaults_are_those_of_transformers():
    config = read(
        num_key_value_heads="absent", max_position_embeddings="absent", rms_norm_eps="absent", rope_scaling=None
    )
    assert (config.num_kv_heads, config.head_dim, config.max_position_embeddings) == (8, 8, 2048)
    assert (config.rms_norm_eps, config.rope, config.dtype) == (1e-6, RopeConfig("default", 10_000.0), "float32")
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert (config.bos_token_id, config.eos_token_ids) == (None, ())


def test_explicit_head_dim_needs_no_relation_to_hidden_size():
    assert read(head_dim=32, hidden_size=60).head_dim == 32


def test_flags():
    config = read(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
    assert (config.attention_bias, config.mlp_bias, config.tie_word_embeddings) == (True, True, True)


@pytest.mark.parametrize(
    ("config_eos", "generation", "ids"),
    [
        (2, None, (2,)),
        ([2, 3], None, (2, 3)),
        (None, None, ()),
        (2, {"eos_token_id": [5, 6]}, (5, 6)),
        ([2, 3], {"eos_token_id": 7}, (7,)),
        (2, {"eos_token_id": 0}, (0,)),
        (2, {"eos_token_id": None}, (2,)),
        (2, {}, (2,)),
    ],
)
def test_eos_ids(config_eos, generation, ids):
    assert read(generation, eos_token_id=config_eos).eos_token_ids == ids


def test_generation_config_beside_config_wins(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "eos_token_id": 2}))
    assert read_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9]}))
    assert read_config(tmp_path).eos_token_ids == (8, 9)


def test_yarn_optional_values():
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    plain = read(rope_scaling=scaling).rope
    assert plain == RopeConfig("yarn", 1e4, 4.0, original_max_position_embeddings=4096)
    extra = {"beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.5, "attention_factor": 1.1}
    full = read(rope_scaling={**scaling, **extra, "truncate": False}).rope
    assert full == RopeConfig("yarn", 1e4, 4.0, None, None, 4096, 16.0, 2.0, 0.7, 0.5, 1.1, False)
    # null means: as many times as the context is longer
    assert read(rope_scaling={**scaling, "factor": None}).rope.factor == 32.0


def test_original_length_beside_the_rope_object_wins():
    scaling = {"rope_type": "llama3", **LLAMA3}
    assert read(rope_scaling=scaling, original_max_position_embeddings=64).rope.original_max_position_embeddings == 64
    del scaling["original_max_position_embeddings"]
    assert read(rope_scaling=scaling).rope.original_max_position_embeddings == 131072


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"eos_token_id": [1, 2], "bos_token_id": 1, "dtype": "bfloat16", "head_dim": 32},
        {"eos_token_id": 3, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4, "mscale": 1.0, "truncate": False, "beta_slow": 2}},
    ],
)
def test_to_json_round_trip(changes):
    config = read(**changes)
    assert LlamaConfig.from_json(json.loads(json.dumps(config.to_json())), "x") == config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MistralForCausalLM"]}, ["architectures", "MistralForCausalLM", "LlamaForCausalLM"]),
        ({"architectures": "LlamaForCausalLM"}, ["architectures"]),
        ({"model_type": "qwen2"}, ["model_type", "qwen2"]),
        ({"architectures": None, "model_type": None}, ["architectures is missing"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantization_config", "gptq"]),
        ({"vocab_size": "absent"}, ["vocab_size is missing"]),
        ({"vocab_size": -1}, ["vocab_size=-1"]),
        ({"hidden_size": 0}, ["hidden_size=0"]),
        ({"hidden_size": 64.0}, ["hidden_size=64.0"]),
        ({"hidden_size": True}, ["hidden_size=True"]),
        ({"hidden_size": "64"}, ["hidden_size='64'"]),
        ({"hidden_size": 60}, ["hidden_size=60", "num_attention_heads=8"]),
        ({"intermediate_size": 1 << 40}, ["intermediate_size=1099511627776"]),
        ({"num_hidden_layers": 4_000_000_000}, ["num_hidden_layers=4000000000"]),
        ({"num_attention_heads": 10}, ["hidden_size=64", "num_attention_heads=10"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=8"]),
        ({"num_key_value_heads": 16}, ["num_key_value_heads=16"]),
        ({"head_dim": 15}, ["head_dim=15", "even"]),
        ({"hidden_size": 24}, ["head_dim=3", "even"]),
        ({"max_position_embeddings": 1 << 31}, ["max_position_embeddings=2147483648"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps=0"]),
        ({"rms_norm_eps": float("nan")}, ["rms_norm_eps=nan"]),
        ({"rms_norm_eps": 1e300}, ["rms_norm_eps=1e+300", "up to 1"]),
        ({"rms_norm_eps": 10**400}, ["rms_norm_eps=1000", "finite"]),
        ({"tie_word_embeddings": 1}, ["tie_word_embeddings=1"]),
        ({"eos_token_id": -1}, ["eos_token_id=-1"]),
        ({"eos_token_id": [2, None]}, ["eos_token_id=[2, None]"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id='</s>'"]),
        ({"bos_token_id": [1]}, ["bos_token_id=[1]"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["torch_dtype='float8_e4m3fn'", "bfloat16"]),
        ({"dtype": "int8"}, ["dtype='int8'", "bfloat16"]),
        ({"rope_theta": 0}, ["rope_theta=0"]),
        ({"rope_scaling": [1]}, ["rope_scaling=[1]"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, ["rope_type='dynamic'", "llama3, yarn"]),
        ({"rope_scaling": {"type": "su", "factor": 2}}, ["rope_scaling.type='su'"]),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, ["rope_parameters.rope_type=['yarn']"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling.factor is missing"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, ["rope_scaling.factor=-2"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, ["low_freq_factor is missing"]),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}}, ["high_freq_factor=1.0"]),
        ({"rope_scaling": {"rope_type": "yarn"}}, ["rope_scaling.factor is missing"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": -1}}, ["beta_fast=-1"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2, "truncate": "no"}}, ["truncate='no'"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}, "rope_theta": 1}, ["rope_theta"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, ["partial_rotary_factor=0.25"]),
    ],
)
def test_refused_values_name_source_key_and_value(changes, words):
    with pytest.raises(CheckpointError) as caught:
        read(**changes)
    for word in ["somewhere/config.json", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("text", [b"{", b"", b"[1]", b"\xff\xfe", b'"llama"', b"[" * 100_000])
def test_config_that_is_no_json_object(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)


def test_missing_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        read_config(tmp_path)


def test_damaged_generation_config_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_config(tmp_path)


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        read().vocab_size = 3
