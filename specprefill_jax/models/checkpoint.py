"""Opening a model: a local HF folder, an Orbax folder, a `.gguf` file, a built-in name or a Hub id.

Opening reads headers only, and checks every tensor's presence, shape and type against the config; data is read a layer
at a time when asked for.
"""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import huggingface_hub
import huggingface_hub.errors
import numpy as np
from rich.progress import Progress

from specprefill_jax.errors import CheckpointError, argument_error
from specprefill_jax.models import builtin
from specprefill_jax.models.config import read_config, read_json
from specprefill_jax.models.gguf import GgufCheckpoint
from specprefill_jax.models.orbax_folder import OrbaxCheckpoint, is_orbax_folder
from specprefill_jax.models.safetensors_file import FLOAT8, FLOATS, TensorInfo, read_header, read_tensor
from specprefill_jax.models.weights import HARMLESS, Checkpoint, check_tensors, expected_shapes

if TYPE_CHECKING:
    from specprefill_jax.tokens import Tokenizer

__all__ = ["Checkpoint", "FolderCheckpoint", "open_checkpoint"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_TOKENIZER = "tokenizer.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# Text and safetensors only: nothing that could hold a pickle is ever fetched.
_HUB_TEXT = ["*.json", "chat_template.jinja"]
_HUB_WEIGHTS = ["*.safetensors"]
_HUB_IGNORED = ["*/*", "consolidated*"]  # other copies of the same weights


def open_checkpoint(source: str | os.PathLike[str], progress: Progress | None = None) -> Checkpoint:
    """Open a model and check all of it that can be checked without reading weights.

    Args:
        source: a folder in HF layout, one that `convert` wrote, a `.gguf` file, a built-in name (`builtin.NAMES`), or a
            Hub id "owner/name" where there is no folder of that name.
        progress: where to show a download or conversion; None shows it on standard error.

    Raises:
        CheckpointError: there is no such model, or it is damaged or not a Llama; names the file and tensor.
    """
    if not isinstance(source, str | os.PathLike):
        raise argument_error("source", source, "a path, a built-in name or a Hub id")
    name = os.fspath(source)
    if name in builtin.NAMES and isinstance(source, str):
        folder = builtin.builtin_folder(name, progress)
        try:
            return builtin.repeated(FolderCheckpoint(folder, builtin.base_name(name)), name)
        except CheckpointError as error:
            packaged = name in builtin.PACKAGED
            advice = "install the package again" if packaged else f"delete the folder {folder} to have it made again"
            raise CheckpointError(f"{error}; {advice}") from error
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):  # unlike Path's, these answer for names of any form
        return OrbaxCheckpoint(path) if is_orbax_folder(path) else FolderCheckpoint(path)
    if os.path.isfile(path):
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: is not a .gguf file; for safetensors give the folder of config.json")
        return GgufCheckpoint(path)
    if isinstance(source, str) and _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return FolderCheckpoint(_hub_folder(name), name)
    raise CheckpointError(
        f"{name!r}: no such file or folder; a model is a folder in Hugging Face layout, a .gguf file, a Hub id "
        f"(owner/name) or one of {', '.join(builtin.NAMES)}"
    )


class FolderCheckpoint(Checkpoint):
    """A folder in HF layout: config.json, one or many safetensors files, and usually a tokenizer."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        self.folder = folder
        self.name = name or folder.resolve().name
        self.config = read_config(folder)
        self._tensors = _read_headers(folder)
        check_tensors(self.config, self._tensors, str(folder))
        for tensor in expected_shapes(self.config):
            info = self._tensors[tensor]
            if info.dtype not in (*FLOATS, FLOAT8):  # which of these, check_tensors has seen to
                raise CheckpointError(f"{info.where}: dtype {info.dtype} is not allowed: must be {', '.join(FLOATS)}")

    def read(self, name: str) -> np.ndarray:
        """The tensor of an HF name as a read-only view of its file.

        Raises:
            CheckpointError: it is a scale with an entry that is not a finite number above 0.
        """
        array = read_tensor(self._tensors[name])
        if name.endswith("_scale") and not (np.isfinite(array) & (array > 0)).all():
            where = self._tensors[name].where
            raise CheckpointError(f"{where}: has an entry that is not allowed: scales must be finite and above 0")
        return array

    def tokenizer(self) -> "Tokenizer | None":
        """The folder's tokenizer, or None where it has no tokenizer.json."""
        if not (self.folder / _TOKENIZER).is_file():
            return None
        from specprefill_jax.tokens import Tokenizer

        return Tokenizer.from_folder(self.folder)


def _read_headers(folder: Path) -> dict[str, TensorInfo]:
    """HF name to header entry, over all the folder's weight files."""
    single, index = folder / _SINGLE, folder / _INDEX
    if single.is_file():  # as transformers does, before an index
        return read_header(single)
    if index.is_file():
        return _read_sharded(index)
    if index.is_symlink() or single.is_symlink():
        link = single if single.is_symlink() else index
        raise CheckpointError(f"{link}: is a link to a file that is not there; was a download interrupted?")
    files = sorted(folder.glob("*.safetensors"))
    if len(files) == 1:
        return read_header(files[0])
    if files:
        raise CheckpointError(f"{index}: no such file; {len(files)} safetensors files need an index that names them")
    pickles = sorted(path.name for pattern in ("*.bin", "*.pth", "*.pt") for path in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{folder / pickles[0]}: pickled weights are never loaded, since they can run code; convert the model to "
            f"safetensors (transformers: save_pretrained) or get a copy that has them"
        )
    raise CheckpointError(f"{folder}: has no safetensors file; expected {_SINGLE} or {_INDEX}")


def _read_sharded(index: Path) -> dict[str, TensorInfo]:
    """Headers of all the files that an index names, checked against it both ways."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map must be an object of tensor names to file names")
    files: dict[str, list[str]] = {}
    for tensor, file in weight_map.items():
        # A plain name: an index must not reach outside its folder.
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: tensor {tensor}: {file!r} must name a safetensors file beside it")
        files.setdefault(file, []).append(tensor)
    for file, names in files.items():  # all of them first: a missing file is told before any is read
        if not (index.parent / file).is_file():
            raise CheckpointError(f"{index.parent / file}: no such file; {index.name} says it holds tensor {names[0]}")
    tensors: dict[str, TensorInfo] = {}
    for file in sorted(files):
        for tensor, info in read_header(index.parent / file).items():
            if tensor in tensors:
                raise CheckpointError(f"{info.where}: duplicate: {tensors[tensor].file.name} holds it too")
            if weight_map.get(tensor, file) != file:
                raise CheckpointError(f"{info.where}: duplicate: {index.name} says {weight_map[tensor]} holds it")
            if tensor not in weight_map and not HARMLESS.fullmatch(tensor):
                raise CheckpointError(f"{info.where}: unknown: {index.name} does not list it")
            tensors[tensor] = info
        absent = [name for name in files[file] if name not in tensors]
        if absent:
            raise CheckpointError(f"{index.parent / file}: tensor {absent[0]} is missing; {index.name} says it is here")
    return tensors


def _hub_folder(repo: str) -> Path:
    """The local folder of a Hub model, downloaded through huggingface_hub where it is not cached."""
    # Text first: a model that is no Llama is refused before its weights are fetched.
    read_config(_snapshot(repo, _HUB_TEXT))
    return _snapshot(repo, _HUB_TEXT + _HUB_WEIGHTS)


def _snapshot(repo: str, patterns: list[str]) -> Path:
    try:
        folder = huggingface_hub.snapshot_download(repo, allow_patterns=patterns, ignore_patterns=_HUB_IGNORED)
    except huggingface_hub.errors.GatedRepoError as error:
        advice = "the model is gated: ask for access on its page, then log in (`hf auth login`)"
        raise CheckpointError(f"{repo}: {advice}") from error
    except huggingface_hub.errors.RepositoryNotFoundError as error:
        advice = "no such folder here and no such model on the Hub (a private one needs `hf auth login`)"
        raise CheckpointError(f"{repo}: {advice}") from error
    except Exception as error:  # whatever the network stack raises, the advice is the same
        advice = (
            "no such folder here, and the model could not be downloaded; download it where there is a network and "
            f"give its folder, or use a built-in model ({', '.join(builtin.NAMES)})"
        )
        raise CheckpointError(f"{repo}: {advice}: {error}") from error
    return Path(folder)
