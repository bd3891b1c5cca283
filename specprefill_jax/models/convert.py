"""Any model that `open_checkpoint` knows to an Orbax folder (`orbax_folder`), part by part.

A part is written below `orbax_unfinished/`, read back and compared with the source, renamed into place, and only then
recorded as done. A run that is killed leaves whole, recorded parts and rubbish that nobody mistakes for one; the next
run compares what is there with the source, and does the rest. So every part was compared with the source by the run
that writes the manifest, which is its last act.
"""

import contextlib
import dataclasses
import fcntl
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.progress import Progress

from specprefill_jax.errors import CheckpointError, argument_error
from specprefill_jax.models import config as model_config
from specprefill_jax.models.checkpoint import open_checkpoint
from specprefill_jax.models.config import LlamaConfig, read_config
from specprefill_jax.models.orbax_folder import (
    DTYPES,
    MANIFEST,
    ORIGIN,
    UNFINISHED,
    ArrayEntry,
    FileEntry,
    LaterFormatError,
    Manifest,
    OrbaxCheckpoint,
    Part,
    command,
    is_orbax_folder,
    part_names,
    read_file,
    read_manifest,
    seal,
    stored_arrays,
    unseal,
)
from specprefill_jax.models.weights import axes_of
from specprefill_jax.sharding.rules import RULES

if TYPE_CHECKING:
    from specprefill_jax.tokens import Tokenizer

PIECE_BYTES, PIECES = 1 << 20, 32
"""Arrays are halved along the axis that meshes split until their pieces are no larger, or are so many."""


@dataclass(frozen=True)
class Conversion:
    """What a run did."""

    config: LlamaConfig
    parts: int
    """Parts of the model."""
    kept: int
    """Those that an earlier run had written."""
    nbytes: int
    """Size of all its arrays."""


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    dtype: str | None = None,
    *,
    progress: Progress | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Write a model to an Orbax folder, or finish or mend one that an earlier run began.

    Args:
        source: as for `open_checkpoint`.
        target: a new or empty folder, or one that this function began from the same source and dtype.
        dtype: float32, bfloat16 or float16; None: every array in the type that it has. Float8 matrices and their scales
            stay as they are.
        progress: where to show the download or conversion of a source; None shows it on standard error.
        report: called with (parts done, parts in all).

    Raises:
        CheckpointError: the source is no model or is damaged, or the target cannot be written.
        ArgumentError: the target holds something else, or another run is writing to it, or `dtype` is not allowed.
    """
    if dtype is not None and dtype not in model_config.DTYPES:
        raise argument_error("dtype", dtype, f"one of {', '.join(model_config.DTYPES)}")
    if not isinstance(target, str | os.PathLike) or not os.fspath(target):
        raise argument_error("target", target, "a folder")
    checkpoint = open_checkpoint(source, progress)
    tokenizer = checkpoint.tokenizer()
    config = checkpoint.config if dtype is None else dataclasses.replace(checkpoint.config, dtype=dtype)
    origin = {"source": os.fspath(source), "dtype": dtype, "config": config.to_json()}
    folder = Path(os.path.expanduser(os.fspath(target)))
    given = os.path.expanduser(os.fspath(source))
    if folder.exists() and os.path.exists(given) and folder.samefile(given):
        raise argument_error("target", str(target), "another folder than the source")
    try:
        with _held(folder), ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            records = _begin(folder, origin)
            parts: list[Part] = []
            kept = nbytes = 0
            names = part_names(config)
            for index, name in enumerate(names):
                arrays = _cast(name, checkpoint.layer(index - 1) if index else checkpoint.outer(), dtype)
                part = _kept(folder, records.get(name), arrays, origin, pool)
                kept += part is not None
                parts.append(part or _write_part(folder, name, arrays, origin, pool))
                nbytes += sum(array.nbytes for array in arrays.values())
                del arrays  # else two parts are held while the next is read
                if report is not None:
                    report(index + 1, len(names))
            _finish(folder, origin, config, tokenizer, parts)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error}") from error
    return Conversion(config, len(parts), kept, nbytes)


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Make a folder where there is none, and keep other runs out; the kernel lets go when the process ends."""
    if folder.exists() and not folder.is_dir():
        raise argument_error("target", str(folder), "a folder")
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise argument_error("target", str(folder), "a folder that no other conversion is writing to") from None
        yield
    finally:
        os.close(descriptor)


def _begin(folder: Path, origin: dict[str, Any]) -> dict[str, Part]:
    """Parts that are recorded as done in a folder; a record says that a part was whole, not that it still is."""
    records: dict[str, Part] = {}
    begun: list[dict[str, Any]] = []
    if (folder / MANIFEST).is_file():
        try:
            manifest = read_manifest(folder)
        except LaterFormatError:
            raise
        except CheckpointError:
            pass  # damaged: it names nothing that could be kept, and all is written again
        else:
            begun.append(manifest.origin)
            records.update((part.name, part) for part in manifest.parts)
    elif not is_orbax_folder(folder) and any(folder.iterdir()):
        raise argument_error("target", str(folder), "a new or empty folder, or one that an earlier run began")
    elif (
        folder / "config.json"
    ).is_file():  # a manifest was lost; what is left must not be overwritten by another model
        begun.append(origin | {"source": "a model whose manifest is lost", "config": read_config(folder).to_json()})
    unfinished = folder / UNFINISHED
    if unfinished.is_dir():
        for path in sorted(unfinished.glob("*.json")):
            with contextlib.suppress(CheckpointError, ValueError):  # cut short or damaged: the part is done again
                data = unseal(path)
                if path.name == ORIGIN:
                    begun.append(data)
                else:
                    records[path.stem] = Part.from_json(data)
    for earlier in begun:
        if any(earlier.get(key) != origin[key] for key in ("dtype", "config")):
            raise _other_source(folder, earlier, origin)
    if not begun:
        _write_text(unfinished / ORIGIN, seal(origin))
    return records


def _other_source(folder: Path, earlier: Mapping[str, Any], origin: Mapping[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"{folder}: holds another model, or another dtype: from {earlier.get('source')!r} with dtype "
        f"{earlier.get('dtype')!r}, not from {origin['source']!r} with dtype {origin['dtype']!r}; "
        "give those or another folder, or delete this one"
    )


def _cast(part: str, arrays: Mapping[str, np.ndarray], dtype: str | None) -> dict[str, np.ndarray]:
    """Arrays in the type they are stored in: as they are, or cast."""
    out: dict[str, np.ndarray] = {}
    for name, given in arrays.items():
        array = np.asarray(given)
        matrix = arrays.get(name.removesuffix("_scale").removesuffix("_input"))
        float8 = matrix is not None and matrix.dtype.itemsize == 1
        if dtype is not None and not float8:
            with np.errstate(over="ignore"):
                small = array.astype(DTYPES[dtype])
            if dtype == "float16" and not np.isfinite(small).all() and np.isfinite(array).all():
                raise argument_error("dtype", dtype, f"one that holds the values of {part}/{name}; bfloat16 does")
            array = small
        out[name] = array
    return out


def _kept(
    folder: Path, part: Part | None, arrays: Mapping[str, np.ndarray], origin: dict[str, Any], pool: ThreadPoolExecutor
) -> Part | None:
    """The part, if it is whole and holds the source's arrays; None if it must be written (again)."""
    if part is None:
        return None
    try:
        list(pool.map(lambda item: read_file(folder / part.name / item[0], item[1]), part.files.items()))
        same = _is_same(folder / part.name, part, arrays, pool)
    except CheckpointError:
        return None
    if not same:
        earlier = origin | {"source": "a model with other values"}
        raise _other_source(folder / part.name, earlier, origin)
    return part


def _is_same(folder: Path, part: Part, arrays: Mapping[str, np.ndarray], pool: ThreadPoolExecutor) -> bool:
    """Whether a part holds these arrays, bit for bit."""
    if list(part.arrays) != list(arrays):
        return False
    stored = stored_arrays(folder, part, pool)
    for name, array in arrays.items():
        if stored[name].shape != array.shape or stored[name].dtype != array.dtype:
            return False
        bits = f"u{array.dtype.itemsize}"
        if not np.array_equal(np.asarray(stored[name]).view(bits), array.view(bits)):
            return False
    return True


def piece_shape(name: str, array: np.ndarray) -> tuple[int, ...]:
    """The shape of the pieces that an array is stored in; see `PIECE_BYTES`."""
    shape, pieces = list(array.shape), 1
    if array.nbytes > PIECE_BYTES:
        for axis in [axis for axis, letter in enumerate(axes_of(name)) if letter in RULES]:
            while pieces < PIECES and array.nbytes > PIECE_BYTES * pieces and shape[axis] % 2 == 0:
                shape[axis] //= 2
                pieces *= 2
    return tuple(shape)


def _write_part(
    folder: Path, name: str, arrays: dict[str, np.ndarray], origin: dict[str, Any], pool: ThreadPoolExecutor
) -> Part:
    """Write, compare, move into place, record."""
    unfinished = folder / UNFINISHED
    unfinished.mkdir(exist_ok=True)
    (unfinished / f"{name}.json").unlink(missing_ok=True)
    work, final = unfinished / name, folder / name
    for rubbish in (work, final):
        shutil.rmtree(rubbish, ignore_errors=True)
    needed = sum(array.nbytes for array in arrays.values())
    free = shutil.disk_usage(folder).free
    advice = f"make room, then run the command again, it goes on where it stopped: {command(origin, folder)}"
    if free < needed:
        raise CheckpointError(f"{final}: needs {needed:,} bytes, {free:,} are free on that disk; {advice}")
    work.mkdir()
    try:
        _save(work, arrays)
        entries = {array: ArrayEntry(v.shape, v.dtype.name, piece_shape(array, v)) for array, v in arrays.items()}
        paths = [path for path in sorted(work.rglob("*")) if path.is_file()]
        files = dict(zip((str(p.relative_to(work)) for p in paths), pool.map(_settle, paths), strict=True))
        part = Part.from_json(Part(name, entries, files).to_json())  # as a reader will see it
        same = _is_same(work, part, arrays, pool)
    except Exception as error:  # Orbax and tensorstore raise many kinds; what to do is the same
        shutil.rmtree(work, ignore_errors=True)
        reason = str(error).split(" [", 1)[0].splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{final}: cannot be written: {reason}; {advice}") from error
    if not same:
        shutil.rmtree(work, ignore_errors=True)
        raise CheckpointError(f"{final}: what was read back is not what was written; is the disk damaged?")
    _sync(work)
    os.rename(work, final)
    _write_text(unfinished / f"{name}.json", seal(part.to_json()))
    return part


def _save(folder: Path, arrays: dict[str, np.ndarray]) -> None:
    """Save arrays as an Orbax checkpoint, cut into pieces, one array after another.

    Orbax's own handler of numpy arrays copies all of them first and leaves them in one piece each.
    """
    import orbax.checkpoint as ocp
    import tensorstore

    class Handler(ocp.type_handlers.NumpyHandler):
        async def serialize(self, values: Sequence[np.ndarray], infos: Sequence[Any], args: Any = None) -> list:
            for value, info in zip(values, infos, strict=True):
                shape = piece_shape(info.name, value)
                spec = ocp.type_handlers.get_json_tspec_write(
                    info, use_ocdbt=False, global_shape=value.shape, local_shape=shape, dtype=value.dtype
                )
                store = await tensorstore.open(tensorstore.Spec(spec), create=True, open=True, context=info.ts_context)
                await store.write(value, can_reference_source_data_indefinitely=True)
            return []

    registry = ocp.type_handlers.create_type_handler_registry((np.ndarray, Handler()))
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # else it warns of what is meant: no jax.Array among the handled types
    try:
        handler = ocp.PyTreeCheckpointHandler(
            use_ocdbt=False, use_zarr3=False, use_compression=False, type_handler_registry=registry
        )
        handler.save(folder, args=ocp.args.PyTreeSave(arrays))
        handler.close()
    finally:
        logger.setLevel(level)


def _settle(path: Path) -> FileEntry:
    """Force a file to disk; what it is."""
    with path.open("rb") as file:
        data = file.read()
        os.fsync(file.fileno())
    return FileEntry(len(data), zlib.crc32(data))


def _sync(folder: Path) -> None:
    """Force the entries of a folder and of those below it to disk."""
    for path in [folder, *(path for path in folder.iterdir() if path.is_dir())]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _write_text(path: Path, text: str) -> None:
    """Write a file such that it is there whole or not at all."""
    path.parent.mkdir(exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    _settle(new)
    os.replace(new, path)
    _sync(path.parent)


def _finish(
    folder: Path, origin: dict[str, Any], config: LlamaConfig, tokenizer: "Tokenizer | None", parts: list[Part]
) -> None:
    """Write what is not weights, then the manifest; with it the folder is a model."""
    unfinished = folder / UNFINISHED
    unfinished.mkdir(exist_ok=True)
    texts = unfinished / "texts"
    shutil.rmtree(texts, ignore_errors=True)
    texts.mkdir()
    if tokenizer is not None:
        tokenizer.save(texts)
    ends = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids)}
    for name, data in (("config.json", config.to_json()), ("generation_config.json", ends)):
        (texts / name).write_text(json.dumps(data, indent=2) + "\n")
    if read_config(texts) != config:
        raise CheckpointError(f"{folder}: this model's config cannot be written as config.json")
    files = {path.name: _settle(path) for path in sorted(texts.iterdir())}
    for name in files:
        os.replace(texts / name, folder / name)
    _write_text(folder / MANIFEST, Manifest(origin, files, tuple(parts)).render())
    OrbaxCheckpoint(folder)
    shutil.rmtree(unfinished)
