"""GGUF files made by the gguf package's writer: every type, the permutation undone, RoPE, and one test a fault."""

import numpy as np
import pytest
from checkpoint_files import CONFIG, hf_shapes, random_tensors
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFEndian
from gguf.quants import dequantize, quantize
from gguf_files import gguf_name, interleaved, write_gguf

from specprefill_jax.errors import CheckpointError
from specprefill_jax.models.checkpoint import open_checkpoint
from specprefill_jax.models.config import LlamaConfig, RopeConfig
from specprefill_jax.models.gguf import read_gguf_header
from specprefill_jax.models.rope import frequencies

# Rows of 256 values, the block of the K types.
WIDE = {**CONFIG, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
WIDE |= {"num_hidden_layers": 1, "vocab_size": 5}
Q0 = "model.layers.0.self_attn.q_proj.weight"


def small(tmp_path, extra=None, **options):
    return write_gguf(tmp_path / "m.gguf", CONFIG, random_tensors(CONFIG), extra, **options)


def fails(path, *words):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    for word in [str(path), *words]:
        assert word in str(caught.value), str(caught.value)


@pytest.mark.parametrize("bias", [False, True])
def test_float32_file_equals_the_hf_layout(tmp_path, bias):
    config = {**CONFIG, "attention_bias": bias, "mlp_bias": bias}
    tensors = random_tensors(config)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, tensors))
    assert checkpoint.name == "m"
    assert checkpoint.tokenizer() is None  # none was written
    assert checkpoint.config == LlamaConfig.from_json(
        {**config, "rope_theta": 5e5, "bos_token_id": 1, "eos_token_id": 2}, "x"
    )
    for name in hf_shapes(config):
        np.testing.assert_array_equal(checkpoint.read(name), tensors[name])
    assert set(checkpoint.outer()) == {"embed", "norm", "head"}
    assert ("q_bias" in checkpoint.layer(1)) == bias


def block_rows(kind, rows, width, rng):
    """Random blocks of a type that the package cannot make: any bits are values, if the half-precision scales are."""
    # Q4_K: d, dmin, 12 bytes of 6-bit scales, 128 of 4-bit values. Q6_K: 128 + 64 bytes of bits, 16 scales, d.
    layout = [("scales", 2), ("bits", 140)] if kind == Kind.Q4_K else [("bits", 208), ("scales", 1)]
    parts = []
    for what, count in layout:
        shape = (rows * width // 256, count)
        if what == "scales":
            parts.append(rng.uniform(0.001, 0.01, shape).astype(np.float16).view(np.uint8))
        else:
            parts.append(rng.integers(0, 256, shape, dtype=np.uint8))
    return np.concatenate(parts, axis=1).reshape(rows, -1)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_types_with_a_quantiser(tmp_path, kind):
    tensors = random_tensors(WIDE)
    kinds = {name: kind for name, array in tensors.items() if array.ndim == 2}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", WIDE, tensors, kinds=kinds))
    assert checkpoint.config.dtype == {Kind.F16: "float16", Kind.BF16: "bfloat16"}.get(kind, "float32")
    worst = 0.0
    for name, array in tensors.items():
        got = checkpoint.read(name)
        # Rows are quantised one by one, so their order does not change their values.
        expected = dequantize(quantize(array, kind), kind) if name in kinds else array
        np.testing.assert_array_equal(got.astype(np.float32), expected)
        worst = max(worst, float(np.abs(got.astype(np.float32) - array).max()))
    assert 0 < worst < 0.6


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K])
def test_k_types(tmp_path, kind):
    rng = np.random.default_rng(3)
    tensors = random_tensors(WIDE)
    raw, expected = {}, {}
    for name in [Q0, "model.layers.0.mlp.down_proj.weight", "model.embed_tokens.weight"]:
        rows = block_rows(kind, tensors[name].shape[0], tensors.pop(name).shape[1], rng)
        raw[gguf_name(name)] = (rows, kind)
        expected[name] = dequantize(rows, kind)
        assert np.isfinite(expected[name]).all()
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", WIDE, tensors, raw=raw))
    for name, array in expected.items():
        got = checkpoint.read(name)
        assert got.std() > 0.01
        np.testing.assert_array_equal(interleaved(got, 8) if name == Q0 else got, array)


def test_q4_1_by_hand(tmp_path):
    """One block written out: 32 four-bit values, scale and minimum in half precision, low nibbles first."""
    tensors = random_tensors(WIDE)
    name = "model.layers.0.mlp.up_proj.weight"
    del tensors[name]
    nibbles = np.arange(32) % 16
    block = np.concatenate(
        [
            np.array([0.5, -2.0], np.float16).view(np.uint8),
            (nibbles[:16] | nibbles[16:] << 4).astype(np.uint8),
        ]
    )
    raw = {gguf_name(name): (np.tile(block, (256, 8)), Kind.Q4_1)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", WIDE, tensors, raw=raw))
    np.testing.assert_array_equal(checkpoint.read(name), np.tile(nibbles * 0.5 - 2.0, (256, 8)))


def test_tied_file_has_no_head(tmp_path):
    tensors = random_tensors(CONFIG)
    del tensors["lm_head.weight"]
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", CONFIG, tensors))
    assert checkpoint.config.tie_word_embeddings
    assert set(checkpoint.outer()) == {"embed", "norm"}


def test_opening_dequantises_nothing(tmp_path, monkeypatch):
    path = small(tmp_path)
    monkeypatch.setattr("specprefill_jax.models.gguf._read", None)
    assert open_checkpoint(path).config.num_layers == 2


def test_defaults(tmp_path):
    absent = ["attention.key_length", "attention.value_length", "rope.dimension_count", "rope.freq_base"]
    config = {**CONFIG, "hidden_size": 24}
    extra = {"llama." + key: None for key in absent} | {"llama.attention.head_count_kv": 2}
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(config), extra)
    assert open_checkpoint(path).config.head_dim == 4
    assert open_checkpoint(path).config.rope == RopeConfig()


def test_every_end_of_generation_token_counts(tmp_path):
    path = small(tmp_path, {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2})
    assert open_checkpoint(path).config.eos_token_ids == (2, 7)
    path = write_gguf(tmp_path / "n.gguf", CONFIG, random_tensors(CONFIG), {"tokenizer.ggml.eos_token_id": None})
    assert open_checkpoint(path).config.eos_token_ids == ()


# RoPE


def llama3_divisors(theta, head_dim, factor, original):
    """As converters compute rope_freqs.weight, in Python floats."""
    out = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * theta ** (i / head_dim)
        if wavelength < original / 4.0:
            out.append(1.0)
        elif wavelength > original:
            out.append(factor)
        else:
            smooth = (original / wavelength - 1.0) / 3.0
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize(("factor", "original", "head_dim"), [(8.0, 8192, 128), (32.0, 8192, 64), (8.0, 128, 16)])
def test_llama3_divisors_become_llama3(tmp_path, factor, original, head_dim):
    config = {**CONFIG, "head_dim": head_dim}
    divisors = llama3_divisors(5e5, head_dim, factor, original)
    raw = {"rope_freqs.weight": (divisors, None)}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", config, random_tensors(config), raw=raw))
    rope = checkpoint.config.rope
    assert (rope.rope_type, rope.theta, rope.factor) == ("llama3", 5e5, factor)
    if head_dim > 16:  # with eight frequencies more than one context gives the same divisors
        assert rope == RopeConfig("llama3", 5e5, factor, 1.0, 4.0, original)
    plain, _ = frequencies(RopeConfig("default", 5e5), head_dim)
    np.testing.assert_allclose(plain / frequencies(rope, head_dim)[0], divisors, rtol=1e-4)


def test_divisors_of_one_change_nothing(tmp_path):
    raw = {"rope_freqs.weight": (np.ones(2, np.float32), None)}
    assert open_checkpoint(small(tmp_path, raw=raw)).config.rope == RopeConfig("default", 5e5)


@pytest.mark.parametrize(
    ("divisors", "word"),
    [
        (np.float32([2.0, 3.0]), "Llama 3.1"),
        (np.float32([1.0, np.nan]), "finite"),
        (np.float32([1.0, 0.0]), "above 0"),
        (np.float32([1.0, 1.0, 8.0]), "shape [3]"),
    ],
)
def test_other_divisors_are_refused(tmp_path, divisors, word):
    fails(small(tmp_path, raw={"rope_freqs.weight": (divisors, None)}), "rope_freqs.weight", word)


def test_divisors_beside_a_scaling_are_refused(tmp_path):
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    fails(small(tmp_path, extra, raw={"rope_freqs.weight": (np.float32([1, 8]), None)}), "rope_freqs.weight", "linear")


@pytest.mark.parametrize(
    ("extra", "rope"),
    [
        ({}, RopeConfig("default", 5e5)),
        ({"type": "none", "factor": 4.0}, RopeConfig("default", 5e5)),
        ({"type": "linear", "factor": 4.0}, RopeConfig("linear", 5e5, 4.0)),
        (
            {"type": "yarn", "factor": 16.0, "original_context_length": 32, "yarn_beta_fast": 16.0},
            RopeConfig("yarn", 5e5, 16.0, original_max_position_embeddings=32, beta_fast=16.0),
        ),
    ],
)
def test_rope_scaling(tmp_path, extra, rope):
    path = small(tmp_path, {f"llama.rope.scaling.{key}": value for key, value in extra.items()})
    assert open_checkpoint(path).config.rope == rope


def test_old_linear_key(tmp_path):
    path = small(tmp_path, {"llama.rope.scale_linear": 4.0})
    assert open_checkpoint(path).config.rope == RopeConfig("linear", 5e5, 4.0)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"type": "longrope", "factor": 2.0}, ["type='longrope'", "yarn"]),
        ({"type": "linear"}, ["factor is missing"]),
        ({"type": "yarn", "factor": 2.0, "attn_factor": 1.5}, ["attn_factor=1.5"]),
        ({"type": "yarn", "factor": 2.0, "yarn_log_multiplier": 0.5}, ["yarn_log_multiplier=0.5"]),
    ],
)
def test_rope_scaling_that_is_not_read(tmp_path, extra, words):
    fails(small(tmp_path, {f"llama.rope.scaling.{key}": value for key, value in extra.items()}), *words)


# Faults


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"llama.block_count": None}, ["num_hidden_layers is missing"]),
        ({"llama.block_count": 4_000_000_000}, ["num_hidden_layers=4000000000"]),
        ({"llama.block_count": 3}, ["tensor model.layers.2.input_layernorm.weight is missing"]),
        ({"llama.block_count": 1}, ["is unknown"]),
        ({"llama.embedding_length": 24}, ["shape"]),
        ({"llama.attention.head_count": [6, 6]}, ["num_attention_heads=[6, 6]"]),
        ({"llama.attention.head_count": 0}, ["num_attention_heads=0"]),
        ({"llama.attention.head_count_kv": 4}, ["num_key_value_heads=4"]),
        ({"llama.attention.value_length": 8}, ["llama.attention.value_length=8", "4"]),
        ({"llama.rope.dimension_count": 2}, ["llama.rope.dimension_count=2"]),
        ({"llama.attention.layer_norm_rms_epsilon": None}, ["layer_norm_rms_epsilon is missing"]),
        ({"llama.context_length": None}, ["llama.context_length is missing"]),
        ({"llama.expert_count": 8}, ["llama.expert_count=8"]),
        ({"split.count": 2}, ["split.count=2"]),
    ],
)
def test_bad_metadata(tmp_path, extra, words):
    fails(small(tmp_path, extra), *words)


def test_other_architecture(tmp_path):
    fails(small(tmp_path, arch="qwen2"), "general.architecture='qwen2'")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight", Q0])
def test_missing_tensor(tmp_path, name):
    tensors = random_tensors(CONFIG)
    del tensors[name]
    known = gguf_name(name) if "embed" in name else name
    fails(write_gguf(tmp_path / "m.gguf", CONFIG, tensors), f"tensor {known} is missing")


@pytest.mark.parametrize("name", ["blk.0.attn_q_norm.weight", "blk.x.attn_q.weight", "blk.0.ffn_gate_exps.weight"])
def test_unknown_tensor(tmp_path, name):
    fails(small(tmp_path, raw={name: (np.zeros(4, np.float32), None)}), f"tensor {name} is unknown")


def test_wrong_shape(tmp_path):
    tensors = {**random_tensors(CONFIG), Q0: np.zeros((24, 11), np.float32)}
    fails(write_gguf(tmp_path / "m.gguf", CONFIG, tensors), "tensor blk.0.attn_q.weight: shape [24, 11]", "[24, 12]")


def test_type_that_is_not_read(tmp_path):
    tensors = random_tensors(WIDE)
    fails(
        write_gguf(tmp_path / "m.gguf", WIDE, tensors, kinds={Q0: Kind.TQ1_0}), "tensor blk.0.attn_q.weight: type TQ1_0"
    )


def test_big_endian_file(tmp_path):
    fails(small(tmp_path, endianess=GGUFEndian.BIG), "little-endian")


@pytest.mark.parametrize("content", [b"", b"GGU", b"GGUF", b"GGML" + b"\0" * 40, b"GGUF\1\0\0\0" + b"\0" * 40])
def test_not_gguf(tmp_path, content):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    fails(path)


def test_truncated_anywhere(tmp_path):
    path = small(tmp_path)
    content = path.read_bytes()
    header = min(info.begin for info in read_gguf_header(path)[1].values())
    for kept in [*range(4, header, 97), header - 1, header]:
        path.write_bytes(content[:kept])
        fails(path, "truncated")
    path.write_bytes(content[: header + 10])
    fails(path, "tensor token_embd.weight", "truncated")
    path.write_bytes(content[:-4])
    fails(path, "tensor", "truncated")


@pytest.mark.parametrize("at", [8, 16])
def test_counts_that_no_file_has(tmp_path, at):
    """2**60 tensors or keys end at the end of the file, not after hours."""
    path = small(tmp_path)
    content = bytearray(path.read_bytes())
    content[at + 7] = 0x10
    path.write_bytes(content)
    fails(path)


def edit(path, old, new):
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))


def test_tensor_that_occurs_twice(tmp_path):
    path = small(tmp_path)
    edit(path, b"blk.0.attn_k.weight", b"blk.0.attn_q.weight")
    fails(path, "tensor blk.0.attn_q.weight: occurs twice")


def test_key_that_occurs_twice(tmp_path):
    path = small(tmp_path, {"llama.other_count": 1})
    edit(path, b"llama.other_count", b"llama.block_count")
    fails(path, "llama.block_count occurs twice")


def test_overlapping_tensors(tmp_path):
    path = small(tmp_path)
    name = b"blk.1.ffn_down.weight"
    content = bytearray(path.read_bytes())
    offset = content.index(name) + len(name) + 4 + 16 + 4  # axes, two sizes, type
    content[offset : offset + 8] = (0).to_bytes(8, "little")
    path.write_bytes(content)
    fails(path, "overlaps")


def test_value_of_no_type(tmp_path):
    path = small(tmp_path)
    key = b"llama.block_count"
    content = bytearray(path.read_bytes())
    at = content.index(key) + len(key)
    content[at : at + 4] = (99).to_bytes(4, "little")
    path.write_bytes(content)
    fails(path, "llama.block_count", "99")


@pytest.mark.parametrize("alignment", [3, 0])
def test_alignment(tmp_path, alignment):
    fails(small(tmp_path, {"general.alignment": alignment}), f"general.alignment={alignment}")


def test_no_bytes_of_damage_escape(tmp_path):
    """Any one damaged byte of the header gives an error of ours or a model that loads, never another error."""
    path = small(tmp_path)
    content = path.read_bytes()
    header = min(info.begin for info in read_gguf_header(path)[1].values())
    rng = np.random.default_rng(0)
    refused = []
    for _ in range(200):
        broken = bytearray(content)
        broken[int(rng.integers(0, header))] = int(rng.integers(0, 256))
        path.write_bytes(broken)
        try:
            open_checkpoint(path).layer(0)
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all(str(path) in message for message in refused)
