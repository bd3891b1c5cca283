"""Folders of safetensors: what is read, and one test a fault, each of which must name the file and the tensor."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import huggingface_hub.errors
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import CONFIG, hf_shapes, random_tensors, read_raw, write_folder, write_index, write_raw
from safetensors.numpy import load_file

from specprefill_jax.errors import ArgumentError, CheckpointError
from specprefill_jax.models import builtin, safetensors_file
from specprefill_jax.models import checkpoint as checkpoint_module
from specprefill_jax.models.checkpoint import open_checkpoint

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"
Q0 = "model.layers.0.self_attn.q_proj.weight"
DOWN1 = "model.layers.1.mlp.down_proj.weight"


def fails(source, *words):
    """Opening fails with a CheckpointError that has all the words in it."""
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(source)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def forbid_reading(monkeypatch):
    def read(*args, **kwargs):
        raise AssertionError("weights were read while opening")

    monkeypatch.setattr(safetensors_file.np, "memmap", read)


@pytest.mark.parametrize("shards", [0, 1, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_arrays_of_a_folder(tmp_path, shards, bias, dtype):
    config = {**CONFIG, "attention_bias": bias, "mlp_bias": bias}
    tensors = random_tensors(config, dtype=dtype)
    checkpoint = open_checkpoint(write_folder(tmp_path / "m", config, tensors, shards))
    assert checkpoint.name == "m"
    outer = checkpoint.outer()
    assert set(outer) == {"embed", "norm", "head"}
    np.testing.assert_array_equal(outer["embed"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(outer["norm"], tensors["model.norm.weight"])
    np.testing.assert_array_equal(outer["head"], tensors["lm_head.weight"])
    names = {"attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down"}
    if bias:
        names |= {"q_bias", "k_bias", "v_bias", "o_bias", "gate_bias", "up_bias", "down_bias"}
    for index in range(2):
        layer = checkpoint.layer(index)
        assert set(layer) == names
        prefix = f"model.layers.{index}."
        np.testing.assert_array_equal(layer["attn_norm"], tensors[prefix + "input_layernorm.weight"])
        np.testing.assert_array_equal(layer["mlp_norm"], tensors[prefix + "post_attention_layernorm.weight"])
        for ours, heads in (("q", 6), ("k", 2), ("v", 2)):
            weight = tensors[f"{prefix}self_attn.{ours}_proj.weight"]
            assert layer[ours].shape == (heads, 4, 12)
            assert layer[ours].dtype == dtype
            for head in range(heads):
                np.testing.assert_array_equal(layer[ours][head], weight[4 * head : 4 * head + 4])
            if bias:
                expected = tensors[f"{prefix}self_attn.{ours}_proj.bias"].reshape(heads, 4)
                np.testing.assert_array_equal(layer[f"{ours}_bias"], expected)
        o = tensors[prefix + "self_attn.o_proj.weight"]
        np.testing.assert_array_equal(layer["o"].reshape(12, 24), o)
        for ours in ("gate", "up", "down"):
            np.testing.assert_array_equal(layer[ours], tensors[f"{prefix}mlp.{ours}_proj.weight"])
            if bias:
                np.testing.assert_array_equal(layer[ours + "_bias"], tensors[f"{prefix}mlp.{ours}_proj.bias"])
        if bias:
            np.testing.assert_array_equal(layer["o_bias"], tensors[prefix + "self_attn.o_proj.bias"])


def test_tiny_main_is_sharded_bfloat16():
    checkpoint = open_checkpoint(CHECKPOINTS / "tiny-main")
    tensors = {}
    for file in sorted((CHECKPOINTS / "tiny-main").glob("*.safetensors")):
        tensors |= load_file(file)
    assert checkpoint.tokenizer() is None
    assert checkpoint.outer()["head"].dtype == ml_dtypes.bfloat16
    for index in range(4):
        weight = tensors[f"model.layers.{index}.self_attn.k_proj.weight"]
        np.testing.assert_array_equal(checkpoint.layer(index)["k"].reshape(32, 128), weight)


def test_tied_model_has_no_head(tmp_path):
    config = {**CONFIG, "tie_word_embeddings": True}
    assert set(open_checkpoint(write_folder(tmp_path / "a", config)).outer()) == {"embed", "norm"}
    # A saved copy of a tied head is not used; one in an untied model is needed.
    untied = random_tensors(CONFIG)
    assert set(open_checkpoint(write_folder(tmp_path / "b", config, untied)).outer()) == {"embed", "norm"}
    tied = random_tensors(config)
    fails(write_folder(tmp_path / "c", CONFIG, tied), "lm_head.weight is missing", "c")


def test_harmless_buffers_are_ignored(tmp_path):
    tensors = random_tensors(CONFIG)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float64)}
    checkpoint = open_checkpoint(write_folder(tmp_path, tensors={**tensors, **extra}))
    np.testing.assert_array_equal(checkpoint.outer()["norm"], tensors["model.norm.weight"])


def test_one_file_of_another_name(tmp_path):
    folder = write_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert open_checkpoint(folder).layer(0)["q"].shape == (6, 4, 12)


def test_unaligned_data_is_read(tmp_path):
    folder = write_folder(tmp_path)
    header, data = read_raw(folder / "model.safetensors")
    text = json.dumps(header).encode()
    write_raw(folder / "model.safetensors", text + b" " * (3 - (len(text) + 8) % 4), data)  # data at an odd byte
    np.testing.assert_array_equal(open_checkpoint(folder).read(Q0), random_tensors(CONFIG)[Q0])


def test_opening_reads_no_weights(tmp_path, monkeypatch):
    folder = write_folder(tmp_path, shards=2)
    forbid_reading(monkeypatch)
    checkpoint = open_checkpoint(folder)
    with pytest.raises(AssertionError):
        checkpoint.layer(0)


@pytest.mark.parametrize("index", [-1, 2])
def test_layer_that_is_not_there(tmp_path, index):
    with pytest.raises(ArgumentError, match=f"index={index} is not allowed.*0 to 1"):
        open_checkpoint(write_folder(tmp_path)).layer(index)


# Faults of tensors


@pytest.mark.parametrize("name", [*hf_shapes(CONFIG)])
def test_missing_tensor(tmp_path, name):
    tensors = random_tensors(CONFIG)
    del tensors[name]
    fails(write_folder(tmp_path / "m", tensors=tensors), str(tmp_path / "m"), f"tensor {name} is missing")


@pytest.mark.parametrize(
    "name", ["model.layers.2.mlp.up_proj.weight", "model.layers.0.self_attn.q_norm.weight", "x", Q0[:-6] + "bias"]
)
def test_unknown_tensor(tmp_path, name):
    tensors = {**random_tensors(CONFIG), name: np.zeros(3, np.float32)}
    fails(write_folder(tmp_path, tensors=tensors), "model.safetensors", f"tensor {name} is unknown")


@pytest.mark.parametrize("shape", [(12, 24), (24,), (24, 12, 1), (0, 12), (24, 13)])
def test_wrong_shape(tmp_path, shape):
    tensors = {**random_tensors(CONFIG), Q0: np.zeros(shape, np.float32)}
    folder = write_folder(tmp_path, tensors=tensors)
    fails(folder, "model.safetensors", f"tensor {Q0}: shape {list(shape)}", "[24, 12]")


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.bool_])
def test_dtype_that_no_weight_has(tmp_path, dtype):
    tensors = {**random_tensors(CONFIG), Q0: np.zeros((24, 12), dtype)}
    fails(write_folder(tmp_path, tensors=tensors), "model.safetensors", f"tensor {Q0}: dtype", "BF16")


def test_wrong_layer_count_in_config(tmp_path):
    folder = write_folder(tmp_path, {**CONFIG})
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 3}))
    fails(folder, "model.layers.2.input_layernorm.weight is missing (and 8 more)")
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 1}))
    fails(folder, "tensor model.layers.1.", "is unknown (and 8 more)")


# Faults of one file


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 100])
def test_truncated_header(tmp_path, kept):
    file = write_folder(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    fails(tmp_path, str(file), "truncated")


@pytest.mark.parametrize("lost", [1, 4, 500])
def test_truncated_data_names_the_tensor(tmp_path, lost):
    file = write_folder(tmp_path) / "model.safetensors"
    header, _ = read_raw(file)
    last = max((name for name in header if name != "__metadata__"), key=lambda name: header[name]["data_offsets"][1])
    content = file.read_bytes()
    file.write_bytes(content[:-lost])
    fails(tmp_path, str(file), "truncated", "tensor " + (last if lost < 100 else "model."))


def damage(folder, change):
    """Rewrite the header of a folder's only file."""
    file = folder / "model.safetensors"
    header, data = read_raw(file)
    write_raw(file, change(header) or header, data)


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"null", b"3", b"\xff{}", b'{"a": 1,}', b"[" * 50_000, b'{"a": {"dtype": "F32"}}']
)
def test_header_that_is_no_header(tmp_path, text):
    write_raw(write_folder(tmp_path) / "model.safetensors", text, b"")
    fails(tmp_path, "model.safetensors")


def test_header_longer_than_any(tmp_path, monkeypatch):
    write_folder(tmp_path)
    monkeypatch.setattr(safetensors_file, "MAX_HEADER_BYTES", 100)
    fails(tmp_path, "model.safetensors", "at most 100")


def test_length_that_is_no_length(tmp_path):
    file = write_folder(tmp_path) / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])
    fails(tmp_path, str(file), "18446744073709551615")


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("dtype", "F99", "'F99' is not known"),
        ("dtype", None, "None is not known"),
        ("dtype", ["F32"], "['F32'] is not known"),
        ("dtype", "F16", "needs 576"),
        ("shape", [24, -12], "shape [24, -12]"),
        ("shape", [24, 12.0], "shape [24, 12.0]"),
        ("shape", [24, True], "shape [24, True]"),
        ("shape", [1 << 70], "is not allowed"),
        ("shape", "24", "shape '24'"),
        ("shape", [24, 13], "needs 1248"),
        ("data_offsets", None, "data_offsets None"),
        ("data_offsets", [0], "data_offsets [0]"),
        ("data_offsets", [8, 0], "data_offsets [8, 0]"),
        ("data_offsets", [-8, 0], "data_offsets [-8, 0]"),
        ("data_offsets", [0, 8], "hold 8 bytes"),
    ],
)
def test_bad_entry(tmp_path, key, value, word):
    def change(header):
        header[Q0][key] = value

    damage(write_folder(tmp_path), change)
    fails(tmp_path, "model.safetensors", f"tensor {Q0}", word)


def test_entry_that_is_no_object(tmp_path):
    damage(write_folder(tmp_path), lambda header: {**header, Q0: 3})
    fails(tmp_path, "model.safetensors", f"tensor {Q0}")


def test_overlap(tmp_path):
    def change(header):
        header["model.layers.1.mlp.up_proj.weight"]["data_offsets"] = header[DOWN1]["data_offsets"]

    damage(write_folder(tmp_path), change)
    fails(tmp_path, "model.safetensors", "overlaps", "model.layers.1.mlp.up_proj.weight", DOWN1)


def test_hole(tmp_path):
    def change(header):
        del header[Q0]

    damage(write_folder(tmp_path), change)
    fails(tmp_path, "model.safetensors: tensor", "1152 bytes between", "belong to no tensor")


def test_bytes_after_the_end(tmp_path):
    file = write_folder(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"12345")
    fails(tmp_path, str(file), "5 bytes after")


def test_duplicate_in_one_header(tmp_path):
    def change(header):
        text = json.dumps(header)
        return (text[:-1] + f', "{Q0}": {json.dumps(header[Q0])}}}').encode()

    damage(write_folder(tmp_path), change)
    fails(tmp_path, "model.safetensors", f"tensor {Q0}: occurs twice")


# Faults of many files


def sharded(tmp_path):
    folder = write_folder(tmp_path, shards=3)
    return folder, json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def test_index_names_a_file_that_is_not_there(tmp_path):
    folder, weight_map = sharded(tmp_path)
    (folder / weight_map[Q0]).unlink()
    first = next(name for name, file in weight_map.items() if file == weight_map[Q0])
    fails(folder, str(folder / weight_map[Q0]), "no such file", f"tensor {first}")


def test_index_names_a_tensor_that_is_not_in_the_file(tmp_path):
    folder, weight_map = sharded(tmp_path)
    file = folder / weight_map[Q0]
    tensors = load_file(file)
    del tensors[Q0]
    safetensors_file.write_file(
        tmp_path / "new", {name: array.shape for name, array in tensors.items()}, tensors.__getitem__
    )
    (tmp_path / "new").rename(file)
    fails(folder, str(file), f"tensor {Q0} is missing")


def test_tensor_in_two_files(tmp_path):
    folder, weight_map = sharded(tmp_path)
    other = "model-00004-of-00004.safetensors"
    shutil.copy(folder / weight_map[Q0], folder / other)
    write_index(folder, {**weight_map, Q0: other})
    fails(folder, "duplicate", "tensor model.")


def test_tensor_that_the_index_gives_to_another_file(tmp_path):
    folder, weight_map = sharded(tmp_path)
    other = next(file for file in weight_map.values() if file != weight_map[Q0])
    write_index(folder, {**weight_map, Q0: other})
    fails(folder, weight_map[Q0] if weight_map[Q0] < other else other, f"tensor {Q0}")


def test_tensor_that_the_index_does_not_list(tmp_path):
    folder, weight_map = sharded(tmp_path)
    file = weight_map.pop(Q0)
    write_index(folder, weight_map)
    fails(folder, str(folder / file), f"tensor {Q0}: unknown")


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "model.bin", 3, None, ""])
def test_index_that_leaves_its_folder(tmp_path, file):
    folder, weight_map = sharded(tmp_path)
    write_index(folder, {**weight_map, Q0: file})
    fails(folder, "model.safetensors.index.json", f"tensor {Q0}", repr(file))


@pytest.mark.parametrize("weight_map", [None, {}, [], "x"])
def test_index_without_a_map(tmp_path, weight_map):
    folder, _ = sharded(tmp_path)
    write_index(folder, weight_map)
    fails(folder, "model.safetensors.index.json", "weight_map")


def test_damaged_index(tmp_path):
    folder, _ = sharded(tmp_path)
    (folder / "model.safetensors.index.json").write_text('{"weight_map"')
    fails(folder, "model.safetensors.index.json", "not valid JSON")


def test_many_files_without_an_index(tmp_path):
    folder, _ = sharded(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    fails(folder, "model.safetensors.index.json", "no such file", "3 safetensors files")


def test_truncated_shard(tmp_path):
    folder, weight_map = sharded(tmp_path)
    file = folder / weight_map[Q0]
    file.write_bytes(file.read_bytes()[:-1])
    fails(folder, str(file), "truncated")


# Faults of sources


def test_pickles_are_refused(tmp_path):
    (write_folder(tmp_path) / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    fails(tmp_path, "pytorch_model.bin", "convert", "safetensors")


def test_folder_without_weights(tmp_path):
    (write_folder(tmp_path) / "model.safetensors").unlink()
    fails(tmp_path, str(tmp_path), "no safetensors file")


def test_dangling_link_is_an_interrupted_download(tmp_path):
    (write_folder(tmp_path) / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    fails(tmp_path, "model.safetensors", "interrupted")


def test_not_a_llama(tmp_path):
    folder = write_folder(tmp_path, {**CONFIG, "architectures": ["GPT2LMHeadModel"]})
    fails(folder, "config.json", "GPT2LMHeadModel")


def test_config_is_checked_before_any_file_is_opened(tmp_path):
    folder = write_folder(tmp_path, {**CONFIG, "num_hidden_layers": 10**12}, random_tensors(CONFIG))
    (folder / "model.safetensors").write_bytes(b"")
    fails(folder, "config.json", "num_hidden_layers=1000000000000")


@pytest.mark.parametrize(
    "source",
    ["nothing-here", "./nothing/here", "/no/such/folder", "x.gguf", "some/x.gguf", "", "~nobody/x", "a\0b", "a" * 999],
)
def test_nothing_there(tmp_path, monkeypatch, source):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    write_folder(tmp_path)  # which the empty name does not mean
    fails(source, repr(source), *builtin.NAMES)


@pytest.mark.parametrize("source", [None, 3, b"x", ["smollm2-135m"]])
def test_source_of_another_kind(source):
    with pytest.raises(ArgumentError, match="source="):
        open_checkpoint(source)


def test_file_of_another_kind(tmp_path):
    fails(write_folder(tmp_path) / "model.safetensors", "model.safetensors", "folder")


# Hub ids; the download itself is huggingface_hub's


def test_hub_id(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "snapshot")
    calls = []

    def download(repo, allow_patterns, ignore_patterns):
        calls.append((repo, allow_patterns))
        return str(folder)

    monkeypatch.setattr(checkpoint_module.huggingface_hub, "snapshot_download", download)
    checkpoint = open_checkpoint("owner/name")
    assert checkpoint.name == "owner/name"
    assert [repo for repo, _ in calls] == ["owner/name"] * 2
    assert "*.safetensors" not in calls[0][1]  # the config is looked at first
    assert "*.safetensors" in calls[1][1]
    assert not any(pattern in ("*", "*.bin", "*.pt", "*.pth") for _, patterns in calls for pattern in patterns)


def test_hub_model_that_is_no_llama_is_refused_before_its_weights(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "snapshot", {**CONFIG, "model_type": "mamba"})
    calls = []

    def download(repo, allow_patterns, ignore_patterns):
        calls.append(allow_patterns)
        return str(folder)

    monkeypatch.setattr(checkpoint_module.huggingface_hub, "snapshot_download", download)
    fails("owner/name", "model_type", "mamba")
    assert len(calls) == 1


def test_local_folder_comes_before_the_hub(tmp_path, monkeypatch):
    write_folder(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint_module.huggingface_hub, "snapshot_download", None)
    assert open_checkpoint("owner/name").name == "name"


@pytest.mark.parametrize(
    ("error", "word"),
    [
        (huggingface_hub.errors.LocalEntryNotFoundError("offline"), "give its folder"),
        (OSError("no route"), "no route"),
        (RuntimeError("closed"), "closed"),
    ],
)
def test_network_failure(tmp_path, monkeypatch, error, word):
    def download(*args, **kwargs):
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint_module.huggingface_hub, "snapshot_download", download)
    fails("owner/name", "owner/name", "smollm2-135m", word)


def test_written_file_is_read_by_the_safetensors_library(tmp_path):
    tensors = {
        "b": np.arange(6, dtype=np.float32).reshape(2, 3),
        "a": np.float32([7]),
        "z": np.zeros((0, 2), np.float32),
    }
    seen = []
    safetensors_file.write_file(
        tmp_path / "x.safetensors", {name: a.shape for name, a in tensors.items()}, tensors.__getitem__, seen.append
    )
    loaded = load_file(tmp_path / "x.safetensors")
    assert set(loaded) == set(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(loaded[name], array)
    assert seen == [24, 4, 0]
    header = safetensors_file.read_header(tmp_path / "x.safetensors")
    assert header["b"].shape == (2, 3)
    with pytest.raises(CheckpointError, match=r"tensor a: shape \(1,\), expected \(2,\)"):
        safetensors_file.write_file(tmp_path / "y.safetensors", {"a": (2,)}, tensors.__getitem__)


def test_no_bytes_of_damage_escape(tmp_path):
    """Any one damaged byte of the header gives an error of ours or a model of the same shapes, never another error."""
    folder = write_folder(tmp_path)
    file = folder / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    rng = np.random.default_rng(0)
    refused = []
    for _ in range(150):
        broken = bytearray(content)
        broken[int(rng.integers(0, 8 + length))] = int(rng.integers(0, 256))
        file.write_bytes(broken)
        try:
            checkpoint = open_checkpoint(folder)
        except CheckpointError as error:
            refused.append(str(error))
        else:
            assert checkpoint.layer(1)["q"].shape == (6, 4, 12)
    assert len(refused) > 100
    assert all(str(folder) in message for message in refused)
