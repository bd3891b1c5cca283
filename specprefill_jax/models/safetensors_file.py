"""Safetensors files, read and written with every byte of the header checked.

Format: 8 bytes little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data, which
the tensors must cover without overlap or hole. Our own reader, so that damage is reported by file and tensor before
any data is touched.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from specprefill_jax.errors import CheckpointError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library

# Every type of the format, so that an unknown one is told from one that no Llama weight may have.
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}
FLOATS: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
FLOAT8 = "F8_E4M3"
_READABLE = FLOATS | {FLOAT8: np.dtype(ml_dtypes.float8_e4m3fn)}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor in a file: where its bytes are (`begin` counted from the start of the file) and what they are."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def where(self) -> str:
        """`<file>: tensor <name>`, the start of every error about it."""
        return f"{self.file}: tensor {self.name}"


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file, from its header and its size alone.

    Raises:
        CheckpointError: truncated, corrupt, overlapping, duplicate or of unknown type; names file and tensor.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > size - 8:
                raise CheckpointError(
                    f"{path}: truncated or not a safetensors file: {size} bytes, too few for its header "
                    f"({'8 bytes and a header' if len(prefix) < 8 else f'{length} bytes'})"
                )
            if length > MAX_HEADER_BYTES:
                raise CheckpointError(f"{path}: header of {length} bytes is not allowed: at most {MAX_HEADER_BYTES}")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: header is not valid JSON: {error}") from error
    if not isinstance(pairs, _Pairs):
        raise CheckpointError(f"{path}: header must be a JSON object, not {type(pairs).__name__}")
    start = 8 + length
    tensors: dict[str, TensorInfo] = {}
    for name, entry in pairs:
        if name == "__metadata__":
            continue
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {name}: occurs twice in the header")
        tensors[name] = _tensor(path, name, entry, start)
    _check_layout(path, tensors.values(), start, size)
    return tensors


def read_tensor(info: TensorInfo) -> np.ndarray:
    """The data of a float tensor as a read-only view of the mapped file: pages are read as they are used."""
    if info.nbytes == 0:
        return np.zeros(info.shape, _READABLE[info.dtype])
    try:
        raw = np.memmap(info.file, np.uint8, "r", offset=info.begin, shape=(info.nbytes,))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{info.where}: cannot be read: {error}") from error
    return np.asarray(raw).view(_READABLE[info.dtype]).reshape(info.shape)


def write_file(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    done: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Write a float32 safetensors file one tensor at a time, and force it to disk.

    Args:
        path: a new file.
        shapes: name to shape, in the order of writing.
        read: gives a tensor's values by name; held only while it is written.
        done: called with the bytes written after each tensor.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "np"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # data starts at a multiple of 8
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in shapes.items():
            array = np.ascontiguousarray(read(name), np.float32)
            if array.shape != shape:
                raise CheckpointError(f"{path}: tensor {name}: shape {array.shape}, expected {shape}")
            file.write(array.data)
            done(array.nbytes)
        file.flush()
        os.fsync(file.fileno())


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as its pairs, so that a key given twice is seen."""


def _tensor(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    def error(text: str) -> CheckpointError:
        return CheckpointError(f"{path}: tensor {name}: {text}")

    fields = dict(entry) if isinstance(entry, _Pairs) else {}
    dtype: Any = fields.get("dtype")
    shape: Any = fields.get("shape")
    offsets: Any = fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise error(f"dtype {dtype!r} is not known: must be one of {', '.join(ITEM_BYTES)}")
    if not _are_sizes(shape):
        raise error(f"shape {shape!r} is not allowed: must be a list of integers of 0 or above")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise error(f"data_offsets {offsets!r} are not allowed: must be [begin, end] with begin <= end")
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != nbytes:
        raise error(f"data_offsets {offsets} hold {offsets[1] - offsets[0]} bytes, {dtype} {shape} needs {nbytes}")
    return TensorInfo(name, path, dtype, tuple(shape), start + offsets[0], nbytes)


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 62 for item in value
    )


def _check_layout(path: Path, tensors: Iterable[TensorInfo], start: int, size: int) -> None:
    """Every byte of the data belongs to exactly one tensor, and all of them are in the file."""
    end, last = start, "the header"
    for info in _in_file_order(tensors):
        if info.begin < end:
            raise CheckpointError(f"{info.where}: its data overlaps that of {last}")
        if info.begin > end:
            raise CheckpointError(f"{info.where}: {info.begin - end} bytes between it and {last} belong to no tensor")
        end, last = info.begin + info.nbytes, info.name
        if end > size:
            raise CheckpointError(f"{info.where}: file is truncated: its data ends at byte {end}, the file at {size}")
    if end < size:
        raise CheckpointError(f"{path}: {size - end} bytes after {last} belong to no tensor")


def _in_file_order(tensors: Iterable[TensorInfo]) -> Iterator[TensorInfo]:
    return iter(sorted(tensors, key=lambda info: (info.begin, info.nbytes)))
