"""Orbax folders: what is converted comes back bit for bit, whatever kills the conversion, and no damage goes unseen."""

import fcntl
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from agreement import MAIN, SPECULATOR
from checkpoint_files import CONFIG, random_tensors, write_folder
from gguf_files import tokenizer_metadata, write_gguf

from specprefill_jax import SpecPrefill
from specprefill_jax.errors import ArgumentError, CheckpointError
from specprefill_jax.models import convert as convert_module
from specprefill_jax.models import orbax_folder
from specprefill_jax.models.checkpoint import Checkpoint, open_checkpoint
from specprefill_jax.models.config import LlamaConfig
from specprefill_jax.models.convert import convert
from specprefill_jax.models.loaded import load
from specprefill_jax.models.orbax_folder import MANIFEST, UNFINISHED, OrbaxCheckpoint, part_names, seal, unseal
from specprefill_jax.models.weights import expected_shapes

ROOT = Path(__file__).parents[2]
AGAIN = "python scripts/convert_checkpoint.py"


def bits(array) -> np.ndarray:
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def parts_of(checkpoint):
    yield checkpoint.outer()
    for index in range(checkpoint.config.num_layers):
        yield checkpoint.layer(index)


def assert_equal(found, expected):
    """Two checkpoints hold the same arrays under the same names, bit for bit."""
    assert found.config == expected.config
    for ours, theirs in zip(parts_of(found), parts_of(expected), strict=True):
        assert list(ours) == list(theirs)
        for name, array in theirs.items():
            assert (ours[name].shape, ours[name].dtype) == (array.shape, array.dtype)
            np.testing.assert_array_equal(bits(ours[name]), bits(array), err_msg=name)


def read_all(folder):
    for arrays in parts_of(open_checkpoint(folder)):
        for array in arrays.values():
            np.asarray(array)


def files_of(folder) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def python(*arguments, **environment) -> subprocess.CompletedProcess[str]:
    """Run Python with this copy of the package."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **environment}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=300)


def fails(source, *words, kind=CheckpointError, call=read_all):
    with pytest.raises(kind) as caught:
        call(source)
    for word in words:
        assert word in str(caught.value), str(caught.value)


@pytest.fixture(scope="module")
def small_source(tmp_path_factory):
    """A GGUF file with a tokenizer, so that its conversion has every kind of file."""
    config = {**CONFIG, "vocab_size": 260}
    path = tmp_path_factory.mktemp("source") / "small.gguf"
    return write_gguf(path, config, random_tensors(config, dtype=np.float16), tokenizer_metadata())


@pytest.fixture(scope="module")
def small_made(small_source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "small"
    convert(small_source, folder)
    return folder


@pytest.fixture
def small(small_made, tmp_path):
    """A copy of a whole folder, to damage."""
    return Path(shutil.copytree(small_made, tmp_path / "small"))


@pytest.mark.parametrize("source", [MAIN, SPECULATOR])
def test_arrays_are_the_sources(source, tmp_path):
    seen = []
    done = convert(source, tmp_path / "x", report=lambda *counts: seen.append(counts))
    expected = open_checkpoint(source)
    count = expected.config.num_layers + 1
    assert seen == [(i, count) for i in range(1, count + 1)]
    total = sum(array.nbytes for arrays in parts_of(expected) for array in arrays.values())
    assert (done.parts, done.kept, done.nbytes) == (count, 0, total)
    found = open_checkpoint(tmp_path / "x")
    assert isinstance(found, OrbaxCheckpoint)
    assert found.name == "x"
    assert found.tokenizer() is None
    assert_equal(found, expected)
    for name in expected_shapes(expected.config):
        np.testing.assert_array_equal(found.read(name), expected.read(name), err_msg=name)
    with pytest.raises(CheckpointError, match=r"no tensor model\.layers\.0\.x"):
        found.read("model.layers.0.x")
    with pytest.raises(ArgumentError, match="index="):
        found.layer(count - 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype, tmp_path):
    convert(MAIN, tmp_path, dtype)
    found, expected = open_checkpoint(tmp_path), open_checkpoint(MAIN)
    assert found.config.dtype == dtype
    for ours, theirs in zip(parts_of(found), parts_of(expected), strict=True):
        for name, array in theirs.items():
            np.testing.assert_array_equal(bits(ours[name]), bits(array.astype(orbax_folder.DTYPES[dtype])))


def test_values_that_float16_cannot_hold_are_refused(tmp_path):
    tensors = random_tensors(CONFIG)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = 1e6
    source = write_folder(tmp_path / "m", tensors=tensors)
    fails(source, "layer_0001/up", "bfloat16", kind=ArgumentError, call=lambda s: convert(s, tmp_path / "x", "float16"))


def test_biases_and_a_tied_head(tmp_path):
    config = {**CONFIG, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}
    source = write_folder(tmp_path / "m", config, random_tensors(config), shards=2)
    convert(source, tmp_path / "x")
    found, expected = open_checkpoint(tmp_path / "x"), open_checkpoint(source)
    assert_equal(found, expected)
    for name in expected_shapes(expected.config):
        np.testing.assert_array_equal(found.read(name), expected.read(name), err_msg=name)


def test_tokenizer_comes_along(small_source, small_made, tmp_path):
    small_source = Path(shutil.copy(small_source, tmp_path / "copy.gguf"))
    expected = open_checkpoint(small_source)
    folder = Path(shutil.copytree(small_made, tmp_path / "elsewhere"))
    small_source.unlink()  # the folder stands alone
    found = open_checkpoint(folder)
    assert found.config == expected.config
    ours = found.tokenizer()
    assert ours.encode("he<|im_end|>x") == [259, 2, 90]
    assert (ours.eos_token_ids, ours.bos_token_id, ours.vocab_size) == ((2,), 1, 260)


def test_a_folder_is_a_source_too(small_made, tmp_path):
    convert(small_made, tmp_path)
    assert_equal(open_checkpoint(tmp_path), open_checkpoint(small_made))
    assert open_checkpoint(tmp_path).tokenizer().vocabulary == open_checkpoint(small_made).tokenizer().vocabulary


class Mixed(Checkpoint):
    """A model whose second layer has float8 matrices, scales, a lone number, and zeros that take no memory."""

    def __init__(self):
        self.name, self.config = "mixed", LlamaConfig.from_json(CONFIG, "mixed")

    def read(self, name):
        raise AssertionError(name)

    def tokenizer(self):
        return None

    def outer(self):
        return {"embed": np.arange(132, dtype=np.float32).reshape(11, 12), "norm": np.full(12, np.nan, np.float32)}

    def layer(self, index):
        rng = np.random.default_rng(index)
        gate = rng.standard_normal((10, 12)).astype(ml_dtypes.bfloat16)
        if not index:
            return {"gate": gate.T, "up": np.broadcast_to(np.zeros((), np.float32), (12, 10))}
        return {
            "gate": gate.astype(ml_dtypes.float8_e4m3fn),
            "gate_scale": rng.standard_normal(10, dtype=np.float32),
            "gate_input_scale": np.array(0.1, np.float32),
            "up": gate.T,
        }


def test_float8_and_layers_that_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(convert_module, "open_checkpoint", lambda source, progress: Mixed())
    convert("mixed", tmp_path / "x")
    assert_equal(open_checkpoint(tmp_path / "x"), Mixed())
    convert("mixed", tmp_path / "y", "float16")
    layer, given = open_checkpoint(tmp_path / "y").layer(1), Mixed().layer(1)
    for name in ("gate", "gate_scale", "gate_input_scale"):
        np.testing.assert_array_equal(bits(layer[name]), bits(given[name]))
    np.testing.assert_array_equal(layer["up"], given["up"].astype(np.float16))
    assert layer["up"].dtype == np.float16


def test_orbax_itself_reads_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr(convert_module, "PIECE_BYTES", 4096)
    convert(MAIN, tmp_path)
    expected = open_checkpoint(MAIN).layer(2)
    restored = ocp.PyTreeCheckpointer().restore(tmp_path / "layer_0002")
    assert set(restored) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(bits(restored[name]), bits(array), err_msg=name)


def test_only_the_pieces_of_a_slice_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(convert_module, "PIECE_BYTES", 12_000)
    convert(MAIN, tmp_path)
    expected = open_checkpoint(MAIN).layer(1)
    found = open_checkpoint(tmp_path).layer(1)
    # gate [320, 128] in bfloat16 is halved along its feed-forward axis down to 40 rows, q [8, 16, 128] to 2 heads,
    # down [128, 320] to 40 columns.
    pieces = {"gate": "0.0 1.0 2.0 3.0 4.0 5.0 6.0 7.0", "q": "0.0.0 1.0.0 2.0.0 3.0.0"}
    pieces["down"] = "0.0 0.1 0.2 0.3 0.4 0.5 0.6 0.7"
    for name, files in pieces.items():
        assert sorted(p.name for p in (tmp_path / "layer_0001" / name).iterdir() if p.name[0] != ".") == files.split()
    rng = np.random.default_rng(0)
    for name, array in expected.items():
        for _ in range(20):
            cut = tuple(slice(*sorted(rng.integers(0, size + 1, 2))) for size in array.shape)
            np.testing.assert_array_equal(found[name][cut], array[cut], err_msg=f"{name} {cut}")
    np.testing.assert_array_equal(found["gate"][3], expected["gate"][3])
    np.testing.assert_array_equal(found["gate"][..., ::2], expected["gate"][..., ::2])
    for kept in ("gate/2.0", "down/0.2", "q/1.0.0"):
        for path in (tmp_path / "layer_0001" / kept).parent.iterdir():
            if path.name != kept.split("/")[1]:
                path.unlink()
    np.testing.assert_array_equal(found["gate"][80:120, 5:], expected["gate"][80:120, 5:])
    np.testing.assert_array_equal(found["down"][:, 80:119], expected["down"][:, 80:119])
    np.testing.assert_array_equal(found["q"][2:4], expected["q"][2:4])
    fails(found, "gate/3.0: no such file", AGAIN, call=lambda f: f["gate"][80:121])


def test_from_pretrained(tmp_path):
    convert(MAIN, tmp_path / "main")
    convert(SPECULATOR, tmp_path / "draft")
    found = SpecPrefill.from_pretrained(str(tmp_path / "main"), str(tmp_path / "draft"), dtype="float32")
    for model, source in ((found.main, MAIN), (found.speculator.model, SPECULATOR)):
        expected = load(open_checkpoint(source), "float32", layerwise=model.layerwise)
        for ours, theirs in zip(jax.tree.leaves(model.weights), jax.tree.leaves(expected.weights), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_meshes_of_eight_devices():
    script = ROOT / "tests" / "sharding" / "eight_orbax.py"
    done = python(script, XLA_FLAGS=os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8")
    assert done.stdout.splitlines() == [f"equal on {devices}" for devices in (1, 2, 4, 8)], done.stderr
    assert done.returncode == 0


# Conversions that are killed: what was about to happen, how that is found, and how many parts the next run keeps.

KILLS = {
    "an array of the second part is being written": ("piece_shape", 3 + 3 + 4, 1),
    "the second part has not been moved": ("os.rename", 2, 1),
    "the second part has not been recorded": ("os.replace", 3, 1),
    "three parts are done": ("report", 3, 3),
    "the manifest is still to be written": ("Manifest", 1, 5),
    "the manifest is written": ("OrbaxCheckpoint", 1, 5),
}
KILLED = """
import itertools, os, signal, sys
import orbax.checkpoint, tensorstore
from specprefill_jax.models import convert
def counted(function, when):
    calls = itertools.count(1)
    def call(*args):
        if next(calls) == when:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)
    return call
def run(what, when, folder):
    report = counted(lambda done, total: None, when) if what == "report" else None
    if report is None:
        *holder, name = what.split(".")
        holder = getattr(convert, holder[0]) if holder else convert
        setattr(holder, name, counted(getattr(holder, name), when))
    convert.convert(source, folder, report=report)
source, *kills = sys.argv[1:]
for what, when, folder in zip(kills[::3], kills[1::3], kills[2::3]):
    child = os.fork()  # nothing has started a thread yet
    if not child:
        run(what, int(when), folder)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Folders of conversions of the tiny main model that were killed with SIGKILL."""
    root = tmp_path_factory.mktemp("killed")
    folders = {name: root / str(index) for index, name in enumerate(KILLS)}
    kills = [word for name, (what, when, _) in KILLS.items() for word in (what, str(when), str(folders[name]))]
    done = python("-c", KILLED, str(MAIN), *kills)
    assert done.stdout.split() == [str(-signal.SIGKILL)] * len(KILLS), done.stderr
    return folders


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "x"
    convert(str(MAIN), folder)
    return files_of(folder)


@pytest.mark.parametrize("name", KILLS)
def test_killed_and_run_again(name, killed, undisturbed, monkeypatch):
    folder = killed[name]
    assert (folder / UNFINISHED).is_dir()
    if name == "the manifest is written":
        read_all(folder)
    else:
        fails(folder, "was not finished", f"{AGAIN} {MAIN} {folder}")
        fails(folder, "was not finished", call=lambda f: SpecPrefill.from_pretrained(str(f), str(f)))
    # Nor does another run's rubbish count as a part, whatever it is.
    (folder / UNFINISHED / "layer_0003").mkdir(exist_ok=True)
    (folder / UNFINISHED / "layer_0003" / "_METADATA").write_text("{")
    written = []
    save = convert_module._save
    monkeypatch.setattr(convert_module, "_save", lambda f, arrays: (written.append(f.name), save(f, arrays)))
    done = convert(str(MAIN), folder)
    assert done.kept == KILLS[name][2]
    assert written == part_names(open_checkpoint(MAIN).config)[done.kept :]
    assert files_of(folder) == undisturbed
    assert_equal(open_checkpoint(folder), open_checkpoint(MAIN))


# Damage. All files of a folder with every kind of file, one after another.


def damaged_one_by_one(folder, damage):
    for name, content in files_of(folder).items():
        damage(folder / name, content)
        yield name
        (folder / name).write_bytes(content)
    read_all(folder)  # all is well again


def test_a_flipped_bit_of_any_file_is_seen(small):
    rng = np.random.default_rng(0)

    def flip(path, content):
        changed = bytearray(content)
        changed[rng.integers(len(changed))] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)

    seen = [name for _ in range(3) for name in damaged_one_by_one(small, flip) if not fails(small, name, AGAIN)]
    kinds = {MANIFEST, "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    kinds |= {"outer/_METADATA", "layer_0001/q/.zarray", "layer_0001/q/0.0.0", "outer/norm/0"}
    assert kinds <= set(seen)


def test_a_file_cut_short_is_seen(small):
    for name in damaged_one_by_one(small, lambda path, content: path.write_bytes(content[:-1])):
        fails(small, name, AGAIN)
    for name in damaged_one_by_one(small, lambda path, content: path.write_bytes(b"")):
        fails(small, name, AGAIN)


def test_a_missing_file_is_seen_at_once(small):
    for name in damaged_one_by_one(small, lambda path, content: path.unlink()):
        fails(small, name, "no such file", AGAIN, call=open_checkpoint)


def test_damage_is_seen_by_load(small):
    file = small / "layer_0001" / "up" / "0.0"
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    for dtype in ("float32", "bfloat16"):
        fails(open_checkpoint(small), str(file), "checksum", AGAIN, call=lambda c, d=dtype: load(c, d))


@pytest.mark.parametrize("name", ["config.json", MANIFEST, "outer/_METADATA", "layer_0000/q/0.0.0"])
def test_running_again_mends(name, small, small_source, small_made):
    file = small / name
    file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    done = convert(small_source, small)
    assert done.kept == (0 if name == MANIFEST else 3 if "/" not in name else 2)
    assert files_of(small) == files_of(small_made)
    shutil.rmtree(small / "layer_0001")
    assert convert(small_source, small).kept == 2
    assert files_of(small) == files_of(small_made)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("parts"),
        lambda data: data["parts"].pop(),
        lambda data: data.update(parts={"a": 1}),
        lambda data: data["parts"][0].pop("arrays"),
        lambda data: data["parts"][1]["arrays"]["q"].update(shape=[1 << 40, 6, 4]),
        lambda data: data["parts"][1]["arrays"]["q"].update(piece=[0, 6, 4]),
        lambda data: data["parts"][1]["arrays"]["q"].update(dtype="object"),
        lambda data: data["parts"][1]["arrays"].update({"../q": data["parts"][1]["arrays"]["q"]}),
        lambda data: data["files"].update({"../../secret": "1 00000000"}),
        lambda data: data["files"].update({"config.json": "x"}),
        lambda data: data.update(files=3),
        lambda data: data.update(origin=3),
    ],
)
def test_a_manifest_that_is_none(change, small):
    data = unseal(small / MANIFEST)
    change(data)
    (small / MANIFEST).write_text(seal(data))
    fails(small, MANIFEST, AGAIN, call=open_checkpoint)


def test_a_later_format(small, small_source):
    data = unseal(small / MANIFEST)
    (small / MANIFEST).write_text(seal(data | {"format": 2}))
    fails(small, MANIFEST, "format 2", "update", call=open_checkpoint)
    fails(small, MANIFEST, "format 2", "update", call=lambda folder: convert(small_source, folder))


# Targets that are something else


def test_a_lost_manifest_is_made_again_and_hides_no_other_model(small, small_source, tmp_path):
    before = files_of(small)
    (small / MANIFEST).unlink()
    fails(small, "no such file", AGAIN)
    # What is left is a model all the same: another one must not overwrite it.
    fails(MAIN, "holds another model", "a model whose manifest is lost", call=lambda source: convert(source, small))
    fails(small_source, "dtype 'float32'", call=lambda source: convert(source, small, "float32"))
    assert convert(small_source, small).kept == 0
    assert files_of(small) == before


def test_a_folder_is_not_its_own_source(small):
    before = files_of(small)
    with pytest.raises(ArgumentError, match="target must be another folder than the source"):
        convert(small, small)
    assert files_of(small) == before


def test_another_source(small, small_source, tmp_path):
    config = {**CONFIG, "vocab_size": 260}
    before = files_of(small)
    values = write_gguf(tmp_path / "b", config, random_tensors(config, 1, np.float16), tokenizer_metadata())
    values = values.rename(tmp_path / "values.gguf")
    fails(values, "outer: holds another model", repr(str(values)), call=lambda source: convert(source, small))
    fails(MAIN, "holds another model", str(small_source), str(MAIN), call=lambda source: convert(source, small))
    fails(small_source, "dtype 'float32'", call=lambda source: convert(source, small, "float32"))
    assert files_of(small) == before
    # The same of one that is not finished.
    begun = tmp_path / "begun"

    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(small_source, begun, report=interrupt)
    for source, dtype in ((values, None), (MAIN, None), (small_source, "float32")):
        fails(source, "holds another model", call=lambda s, d=dtype: convert(s, begun, d))
    assert convert(small_source, begun).kept == 1
    assert files_of(begun) == before


def test_targets_that_hold_something_else(tmp_path):
    (tmp_path / "file").write_text("x")
    fails(MAIN, "target=", kind=ArgumentError, call=lambda source: convert(source, tmp_path / "file"))
    fails(MAIN, "new or empty", kind=ArgumentError, call=lambda source: convert(source, tmp_path))
    fails(MAIN, str(tmp_path / "file" / "x"), call=lambda source: convert(source, tmp_path / "file" / "x"))
    for target in ("", None, 3):
        fails(MAIN, "target=", kind=ArgumentError, call=lambda source, t=target: convert(source, t))
    fails(MAIN, "dtype='int8'", kind=ArgumentError, call=lambda source: convert(source, tmp_path / "y", "int8"))
    assert files_of(tmp_path) == {"file": b"x"}


def test_two_runs_at_once(tmp_path):
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    fails(MAIN, "no other conversion", kind=ArgumentError, call=lambda source: convert(source, tmp_path))
    os.close(descriptor)
    assert convert(MAIN, tmp_path).kept == 0


def test_too_little_room(tmp_path, monkeypatch):
    monkeypatch.setattr(convert_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=100_000))
    fails(MAIN, "outer", "100,000 are free", "make room", AGAIN, call=lambda source: convert(source, tmp_path / "x"))
    fails(tmp_path / "x", "was not finished")


# The command

LIMITED = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.argv[0] = sys.argv.pop(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_command_and_a_disk_that_takes_no_more(tmp_path, undisturbed):
    script = str(ROOT / "scripts" / "convert_checkpoint.py")
    arguments = [script, str(MAIN), str(tmp_path / "x")]
    # Files cannot grow beyond 100,000 bytes; the model's embedding has 131,072.
    done = python("-c", LIMITED, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    message = done.stderr.splitlines()[-1]
    assert message.startswith(f"error: {tmp_path / 'x' / 'outer'}: cannot be written: ")
    assert "Traceback" not in done.stderr
    assert AGAIN in message
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    assert not any((tmp_path / "x").rglob("outer"))
    fails(tmp_path / "x", "was not finished")
    done = python(*arguments)
    assert done.returncode == 0
    assert done.stdout.startswith(f"{tmp_path / 'x'}: 5 parts, 1.6 MB, equal to {MAIN}; took ")
    assert "5/5" in done.stderr
    assert "WARNING" not in done.stderr
    assert files_of(tmp_path / "x") == undisturbed


def test_opening_imports_neither_orbax_nor_tensorstore(small_made):
    code = (
        "import sys; from specprefill_jax.models.checkpoint import open_checkpoint as o; "
        f"c = o({str(small_made)!r}); c.layer(0)['q'][:]; "
        "print([name for name in ('orbax.checkpoint', 'tensorstore') if name in sys.modules])"
    )
    done = python("-c", code)
    assert done.stdout == "[]\n", done.stderr


def test_manifest_is_for_people_too(small_made, small_source):
    data = json.loads((small_made / MANIFEST).read_text())
    assert data["origin"]["source"] == str(small_source)
    assert data["parts"][1]["arrays"]["q"] == {"shape": [6, 4, 12], "dtype": "float16", "piece": [6, 4, 12]}
    assert data["parts"][1]["files"]["q/0.0.0"].split()[0] == "576"
