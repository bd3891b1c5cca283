"""Models in Orbax folders, which `convert` writes: one Orbax checkpoint for each layer, and a manifest of all files.

    config.json, tokenizer files
    orbax_manifest.json     sizes and checksums of every other file; written last
    outer/, layer_0000/...  Orbax checkpoints, each array cut into files along the axis that meshes split

Orbax stores these arrays as plain numbers (zarr, not compressed), and they are read here from its files directly, each
file checked as its bytes come in. Orbax's own reading knows no checksums of them: every byte would be read twice.
"""

import contextlib
import itertools
import json
import math
import mmap
import os
import re
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import ml_dtypes
import numpy as np

from specprefill_jax.errors import CheckpointError
from specprefill_jax.models.config import LlamaConfig, read_config, read_json
from specprefill_jax.models.weights import Checkpoint, file_shape, layer_rows, outer_rows

if TYPE_CHECKING:
    from specprefill_jax.tokens import Tokenizer

MANIFEST = "orbax_manifest.json"
UNFINISHED = "orbax_unfinished"
"""Folder of a conversion's records and of what it is writing; gone when all is done."""
ORIGIN = "origin.json"
OUTER = "outer"
FORMAT = 1

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
_BLOCK = 1 << 18  # read and checked at a time: stays in the processor's cache between the two
_ALIGNMENT = 64  # bytes
_HUGE = 4 << 20  # from here on numpy asks for huge pages; making room for them took half of all the time of loading
_local = threading.local()
_FILE_NAME = re.compile(r"(\w[\w.-]*/)?[\w.][\w.-]*")  # below its folder, whatever a manifest says


@dataclass(frozen=True)
class FileEntry:
    """What a file must be."""

    size: int
    crc32: int


@dataclass(frozen=True)
class ArrayEntry:
    """An array and the shape of the pieces it is cut into, one a file; pieces divide it evenly."""

    shape: tuple[int, ...]
    dtype: str
    piece: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One Orbax checkpoint: arrays by name, and its files by path below its folder."""

    name: str
    arrays: dict[str, ArrayEntry]
    files: dict[str, FileEntry]

    def to_json(self) -> dict[str, Any]:
        """An object that `from_json` reads back equal."""
        arrays = {
            name: {"shape": list(array.shape), "dtype": array.dtype, "piece": list(array.piece)}
            for name, array in self.arrays.items()
        }
        return {"name": self.name, "arrays": arrays, "files": files_to_json(self.files)}

    @classmethod
    def from_json(cls, data: Any) -> "Part":
        """Read what `to_json` gave.

        Raises:
            ValueError: it is something else.
        """
        try:
            part = cls(str(data["name"]), {}, files_from_json(data["files"]))
            for name, entry in data["arrays"].items():
                shape, piece = tuple(map(int, entry["shape"])), tuple(map(int, entry["piece"]))
                array = ArrayEntry(shape, entry["dtype"], piece)
                even = len(shape) == len(piece) and all(p > 0 and s % p == 0 for s, p in zip(shape, piece, strict=True))
                nbytes = math.prod(piece) * DTYPES[array.dtype].itemsize
                if not even or any(part.files[file].size != nbytes for file in piece_files(name, array)):
                    raise ValueError(f"array {name} and its files do not go together")
                part.arrays[name] = array
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no part of a model: {error!r}") from error
        return part


@dataclass(frozen=True)
class Manifest:
    """A whole folder: where it came from, its own files, its parts in order."""

    origin: dict[str, Any]
    files: dict[str, FileEntry]
    parts: tuple[Part, ...]

    def render(self) -> str:
        """The file's text: JSON with a checksum of itself."""
        data = {
            "format": FORMAT,
            "origin": self.origin,
            "files": files_to_json(self.files),
            "parts": [part.to_json() for part in self.parts],
        }
        return seal(data)


def seal(data: dict[str, Any]) -> str:
    """JSON text of an object, with a checksum of all the rest as its last key."""
    return json.dumps(data | {"crc32": f"{zlib.crc32(json.dumps(data).encode()):08x}"}, indent=1) + "\n"


class LaterFormatError(CheckpointError):
    """A manifest of a format that a later version of the package wrote."""


def unseal(path: Path) -> dict[str, Any]:
    """The object that `seal` wrote to a file.

    Raises:
        CheckpointError: a byte of it is not as it was written.
    """
    data = read_json(path)
    data.pop("crc32", None)
    if path.read_bytes() != seal(data).encode():  # also where a byte differs that JSON does not care for
        raise CheckpointError(f"{path}: is damaged: its checksum is another")
    return data


def files_to_json(files: Mapping[str, FileEntry]) -> dict[str, Any]:
    """Sizes and checksums of files for JSON."""
    return {name: f"{entry.size} {entry.crc32:08x}" for name, entry in files.items()}


def files_from_json(data: Any) -> dict[str, FileEntry]:
    """Read what `files_to_json` gave; ValueError, TypeError or AttributeError for anything else."""
    files = {}
    for name, text in data.items():
        if not _FILE_NAME.fullmatch(name) or ".." in name.split("/"):
            raise ValueError(f"{name!r} is no file of a part")
        size, crc = text.split()
        files[name] = FileEntry(int(size), int(crc, 16))
    return files


def part_names(config: LlamaConfig) -> list[str]:
    """The parts of a model in order."""
    return [OUTER, *(f"layer_{index:04}" for index in range(config.num_layers))]


def piece_file(name: str, index: Iterable[int]) -> str:
    """Where Orbax keeps a piece of an array, below its part."""
    return f"{name}/{'.'.join(map(str, index)) or '0'}"


def piece_files(name: str, array: ArrayEntry) -> list[str]:
    """All the files of an array's numbers."""
    counts = [range(size // piece) for size, piece in zip(array.shape, array.piece, strict=True)]
    return [piece_file(name, index) for index in itertools.product(*counts)]


def command(origin: Mapping[str, Any], folder: Path) -> str:
    """The shell command that makes, mends or finishes a folder."""
    dtype = f" --dtype {origin['dtype']}" if origin.get("dtype") else ""
    return f"python scripts/convert_checkpoint.py {origin.get('source', 'SOURCE')} {folder}{dtype}"


def is_orbax_folder(folder: Path) -> bool:
    """Whether a folder holds a conversion, whole or not."""
    return any((folder / name).exists() for name in (MANIFEST, UNFINISHED, f"{OUTER}/_METADATA"))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a whole folder.

    Raises:
        CheckpointError: there is none since the conversion was not finished, or it is damaged, or of a later format.
    """
    path = folder / MANIFEST
    origin: dict[str, Any] = {}
    if not path.is_file() and (folder / UNFINISHED).is_dir():
        with contextlib.suppress(CheckpointError):  # it may have been killed while writing even this
            origin = unseal(folder / UNFINISHED / ORIGIN)
        raise CheckpointError(
            f"{folder}: its conversion was not finished; run the command again, it goes on where it stopped: "
            f"{command(origin, folder)}"
        )
    again = f"convert again: {command(origin, folder)}"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; {again}")
    try:
        data = unseal(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {again}") from error
    if data.get("format") != FORMAT:
        raise LaterFormatError(
            f"{path}: has format {data.get('format')!r}, this version of the package reads {FORMAT}: update the "
            "package, or convert the model to a new folder with this one"
        )
    try:
        parts = tuple(Part.from_json(part) for part in data["parts"])
        return Manifest(dict(data["origin"]), files_from_json(data["files"]), parts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is not a manifest: {error!r}; {again}") from error


def read_file(path: Path, entry: FileEntry, into: np.ndarray | None = None) -> np.ndarray:
    """A file's bytes, checked.

    Args:
        path: the file.
        entry: what it must be.
        into: a C-contiguous array of its size to read into; None: a new one.

    Returns:
        uint8 [size], of `into`'s memory where given.

    Raises:
        CheckpointError: it is missing, has another size or other bytes, or cannot be read.
    """
    data = np.empty(entry.size, np.uint8) if into is None else into.reshape(-1).view(np.uint8)
    view, crc = memoryview(data), 0
    with _told(path), path.open("rb", buffering=0) as file:
        _check_size(path, entry, os.fstat(file.fileno()).st_size)
        done = 0
        while done < entry.size:
            count = file.readinto(view[done : done + _BLOCK])
            if not count:
                raise CheckpointError(f"{path}: ends at byte {done}, {entry.size} were written")
            crc = zlib.crc32(view[done : done + count], crc)
            done += count
    if crc != entry.crc32:
        raise CheckpointError(
            f"{path}: is damaged: its checksum is {crc:08x}, that of what was written {entry.crc32:08x}"
        )
    return data


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """What the operating system says against reading a file, as a `CheckpointError` that names it."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def _check_size(path: Path, entry: FileEntry, size: int) -> None:
    if size != entry.size:
        raise CheckpointError(f"{path}: has {size} bytes, {entry.size} were written: cut short or replaced")


class StoredArray:
    """An array in files, read where it is indexed: only the pieces that hold something of it are opened.

    Attributes:
        shape: its shape.
        dtype: its numpy dtype.
        ndim: the number of its axes.
    """

    def __init__(self, folder: Path, part: Part, name: str, pool: ThreadPoolExecutor, advice: str = "") -> None:
        """See the class.

        Args:
            folder: of the part.
            part: what is in it.
            name: of the array.
            pool: where pieces are read.
            advice: what errors end with.
        """
        entry = part.arrays[name]
        self.shape, self.dtype, self.ndim = entry.shape, DTYPES[entry.dtype], len(entry.shape)
        self._name, self._piece = name, entry.piece
        self._folder, self._files, self._pool, self._advice = folder, part.files, pool, advice

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self[(slice(None),) * self.ndim]
        return array if dtype is None else array.astype(dtype, copy=False)

    def __getitem__(self, index: Any) -> np.ndarray:
        slices = index if isinstance(index, tuple) else (index,)
        if len(slices) > self.ndim or not all(isinstance(s, slice) and s.step in (None, 1) for s in slices):
            return np.asarray(self)[index]
        slices += (slice(None),) * (self.ndim - len(slices))
        box = [range(*s.indices(size)) for s, size in zip(slices, self.shape, strict=True)]
        out = fresh([len(side) for side in box], self.dtype)
        pieces = list(self._pieces(box)) if out.size else []
        if len(pieces) == 1:
            self._read_piece(pieces[0], box, out)
        else:
            list(self._pool.map(lambda piece: self._read_piece(piece, box, out), pieces))
        return out

    def read(self, index: tuple[slice, ...], out: np.ndarray) -> None:
        """Read a slice of it, in this thread, into an array of the slice's shape and this dtype.

        Args:
            index: a slice for each axis.
            out: where to.
        """
        box = [range(*s.indices(size)) for s, size in zip(index, self.shape, strict=True)]
        for piece in self._pieces(box) if out.size else ():
            self._read_piece(piece, box, out)

    def _pieces(self, box: list[range]) -> Iterator[tuple[int, ...]]:
        """Those that hold something of a box, which is not empty."""
        sides = zip(box, self._piece, strict=True)
        return itertools.product(*(range(b.start // p, (b.stop - 1) // p + 1) for b, p in sides))

    def _read_piece(self, piece: tuple[int, ...], box: list[range], out: np.ndarray) -> None:
        """Read one piece's share of `box` into its place in `out`."""
        inside, outside = [], []
        for i, size, side in zip(piece, self._piece, box, strict=True):
            low, high = max(side.start, i * size), min(side.stop, (i + 1) * size)
            inside.append(slice(low - i * size, high - i * size))
            outside.append(slice(low - side.start, high - side.start))
        place = out[tuple(outside)] if self.ndim else out
        direct = place.shape == self._piece and place.flags.c_contiguous
        numbers = place if direct else _scratch(math.prod(self._piece), self.dtype).reshape(self._piece)
        file = piece_file(self._name, piece)
        try:
            read_file(self._folder / file, self._files[file], numbers)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{self._advice}") from error
        if not direct:
            bits = f"u{self.dtype.itemsize}"  # numpy copies these faster than types it does not know
            place.view(bits)[...] = numbers.view(bits)[tuple(inside)]


def stored_arrays(folder: Path, part: Part, pool: ThreadPoolExecutor, advice: str = "") -> dict[str, np.ndarray]:
    """The arrays of a part, not read yet; they stand for numpy arrays wherever one is indexed or converted."""
    return {name: cast(np.ndarray, StoredArray(folder, part, name, pool, advice)) for name in part.arrays}


class OrbaxCheckpoint(Checkpoint):
    """A folder that `convert` wrote.

    Opening checks every file's size, and all bytes of those that hold no weights; weights are checked as they are read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = folder.resolve().name
        manifest = read_manifest(folder)
        self._advice = f"; convert again: {command(manifest.origin, folder)}"
        self._parts = {part.name: part for part in manifest.parts}
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "read-orbax")
        try:
            for name, entry in manifest.files.items():
                read_file(folder / name, entry)
            for part in manifest.parts:
                check_part(folder / part.name, part)
        except CheckpointError as error:
            raise CheckpointError(f"{error}{self._advice}") from error
        self.config = read_config(folder)
        if list(self._parts) != part_names(self.config):
            raise CheckpointError(f"{folder / MANIFEST}: its parts are not those of config.json{self._advice}")

    def read(self, name: str) -> np.ndarray:
        """The tensor of an HF name, in HF layout."""
        layer = re.fullmatch(r"model\.layers\.(\d{1,5})\.(.+)", name)
        index = int(layer[1]) if layer else 0
        known = index < self.config.num_layers
        rows = outer_rows(self.config) if layer is None else layer_rows(self.config, index) if known else ()
        inner = layer[2] if layer else name
        row = next((row for row in rows if row.hf == inner), None)
        if row is None:
            raise CheckpointError(f"{self.folder}: has no tensor {name}")
        array = np.asarray((self.layer(index) if layer else self.outer())[row.ours])
        return array.reshape(file_shape(self.config, row))

    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer that was converted with the model, or None where it had none."""
        if not (self.folder / "tokenizer.json").is_file():
            return None
        from specprefill_jax.tokens import Tokenizer

        return Tokenizer.from_folder(self.folder)

    def outer(self) -> dict[str, np.ndarray]:
        """As `Checkpoint.outer`; each array is a `StoredArray`."""
        return self._arrays(OUTER)

    def layer(self, index: int) -> dict[str, np.ndarray]:
        """As `Checkpoint.layer`; each array is a `StoredArray`."""
        self._check_layer(index)
        return self._arrays(part_names(self.config)[index + 1])

    def _arrays(self, name: str) -> dict[str, np.ndarray]:
        return stored_arrays(self.folder / name, self._parts[name], self._pool, self._advice)


def check_part(folder: Path, part: Part) -> None:
    """Check that all files of a part are there and of their size, and all bytes of those that hold no weights.

    Raises:
        CheckpointError: one is not.
    """
    weights = {file for name, array in part.arrays.items() for file in piece_files(name, array)}
    for name, entry in part.files.items():
        if name not in weights:
            read_file(folder / name, entry)
            continue
        with _told(folder / name):
            _check_size(folder / name, entry, os.stat(folder / name).st_size)


def _scratch(size: int, dtype: np.dtype) -> np.ndarray:
    """An empty array [size] that lasts until this thread asks for the next: fresh memory costs more than reading."""
    room: np.ndarray | None = getattr(_local, "room", None)
    if room is None or room.size < size * dtype.itemsize:
        room = _local.room = np.empty(size * dtype.itemsize, np.uint8)
    return room[: size * dtype.itemsize].view(dtype)


def fresh(shape: Iterable[int], dtype: np.dtype) -> np.ndarray:
    """An empty array, aligned such that JAX on the CPU takes it as it is."""
    shape = tuple(shape)
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < _HUGE:
        room = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = -room.ctypes.data % _ALIGNMENT
        return room[start : start + nbytes].view(dtype).reshape(shape)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype).reshape(shape)
