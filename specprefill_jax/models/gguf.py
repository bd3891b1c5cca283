"""Llama models in `.gguf` files: header checked by our own reader, weights dequantised by the `gguf` package.

The package's own reader maps arrays past the end of a damaged file and counts to whatever number it finds there; this
one checks every length against the file first. GGUF stores query and key rows permuted for interleaved rotation
(feature 2i with 2i+1); `read` undoes it, so that tensors come out as an HF file would hold them.
"""

import math
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from specprefill_jax.errors import CheckpointError
from specprefill_jax.models.config import LlamaConfig, RopeConfig
from specprefill_jax.models.rope import frequencies
from specprefill_jax.models.safetensors_file import TensorInfo
from specprefill_jax.models.weights import LAYER_ROWS, OUTER_ROWS, Checkpoint, check_tensors, layer_name

if TYPE_CHECKING:
    from specprefill_jax.tokens import Tokenizer

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # 1 has other length fields and is long gone
_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
_FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_TYPES = (*_FLOATS, *_QUANTISED)
_ROPE_FACTORS = "rope_freqs.weight"


class GgufCheckpoint(Checkpoint):
    """One `.gguf` file of architecture llama.

    Float tensors keep their type; quantised ones are dequantised to float32 each time they are read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.stem
        metadata, tensors = read_gguf_header(path)
        self._has_tokenizer = "tokenizer.ggml.model" in metadata
        factors = tensors.pop(_ROPE_FACTORS, None)
        self.config = _config(path, metadata, tensors, None if factors is None else _read(factors))
        self._tensors = {_hf_name(name): info for name, info in tensors.items()}
        check_tensors(self.config, self._tensors, str(path))

    def read(self, name: str) -> np.ndarray:
        """The tensor of an HF name, dequantised and in HF layout."""
        array = _read(self._tensors[name])
        if ".q_proj." in name:
            return _half_split(array, self.config.num_heads)
        if ".k_proj." in name:
            return _half_split(array, self.config.num_kv_heads)
        return array

    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer in the file's metadata, or None where it has none."""
        if not self._has_tokenizer:
            return None
        from specprefill_jax.tokens import Tokenizer

        return Tokenizer.from_gguf(self.path)


def read_gguf_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Metadata and tensors (by the file's own names) of a GGUF file, every length checked against the file's size.

    Raises:
        CheckpointError: truncated, corrupt, split over files, or a tensor overlaps, repeats or has a type that is not
            read; names the file and the key or tensor.
    """
    try:
        size = path.stat().st_size
        data = np.memmap(path, np.uint8, "r") if size else np.zeros(0, np.uint8)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    cursor = _Cursor(path, memoryview(data))
    if cursor.take(4, "magic number") != _MAGIC:
        raise CheckpointError(f"{path}: is not a GGUF file: it does not start with {_MAGIC.decode()}")
    version = cursor.number("<I", "version")
    if version not in _VERSIONS:
        raise CheckpointError(f"{path}: GGUF version {version} is not allowed: must be 2 or 3, little-endian")
    tensor_count, key_count = cursor.number("<Q", "tensor count"), cursor.number("<Q", "key count")
    metadata: dict[str, Any] = {}
    for index in range(key_count):
        key = cursor.string(f"key {index} of {key_count}")
        if key in metadata:
            raise CheckpointError(f"{path}: metadata key {key} occurs twice")
        metadata[key] = cursor.value(f"metadata key {key}")
    entries = [_entry(path, cursor, f"tensor {index} of {tensor_count}") for index in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
        raise CheckpointError(f"{path}: general.alignment={alignment!r} is not allowed: must be a power of two")
    start = cursor.offset + -cursor.offset % alignment
    tensors: dict[str, TensorInfo] = {}
    for name, dtype, shape, offset in entries:
        if name in tensors:
            raise CheckpointError(f"{path}: tensor {name}: occurs twice")
        tensors[name] = _tensor(path, name, dtype, shape, start + offset, size)
    end, last = start, "the header"
    for info in sorted(tensors.values(), key=lambda info: (info.begin, info.nbytes)):
        if info.begin < end:
            raise CheckpointError(f"{info.where}: its data overlaps that of {last}")
        end, last = info.begin + info.nbytes, info.name
    return metadata, tensors


class _Cursor:
    """Reads little-endian values one after another and never past the end."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.offset = path, data, 0

    def take(self, count: int, what: str) -> bytes:
        end = self.offset + count
        if end > len(self.data):
            raise CheckpointError(
                f"{self.path}: truncated or corrupt at {what}: needs bytes up to {end}, the file has {len(self.data)}"
            )
        out = bytes(self.data[self.offset : end])
        self.offset = end
        return out

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def string(self, what: str) -> str:
        text = self.take(self.number("<Q", what), what)
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{self.path}: {what} is not valid UTF-8: {error}") from error

    def value(self, what: str, depth: int = 0) -> Any:
        kind = self._kind(what)
        if kind == GGUFValueType.STRING:
            return self.string(what)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if depth:  # arrays of arrays: no Llama file has them
            raise CheckpointError(f"{self.path}: {what} nests arrays, which is not allowed")
        return self._array(what)

    def _array(self, what: str) -> list[Any]:
        kind, count = self._kind(what), self.number("<Q", what)
        if kind in _SCALARS:
            form = _SCALARS[kind]
            return [item for (item,) in struct.iter_unpack(form, self.take(count * struct.calcsize(form), what))]
        if kind != GGUFValueType.STRING:
            raise CheckpointError(f"{self.path}: {what} nests arrays, which is not allowed")
        return [self.string(what) for _ in range(count)]

    def _kind(self, what: str) -> GGUFValueType:
        code = self.number("<I", what)
        try:
            return GGUFValueType(code)
        except ValueError as error:
            raise CheckpointError(f"{self.path}: {what} has type {code}, which no GGUF value has") from error


def _entry(path: Path, cursor: _Cursor, what: str) -> tuple[str, int, tuple[int, ...], int]:
    name = cursor.string(what)
    where = f"tensor {name}"
    axes = cursor.number("<I", where)
    if not 1 <= axes <= 4:
        raise CheckpointError(f"{path}: {where}: {axes} axes are not allowed: must be 1 to 4")
    sizes = [cursor.number("<Q", where) for _ in range(axes)]
    return name, cursor.number("<I", where), tuple(reversed(sizes)), cursor.number("<Q", where)


def _tensor(path: Path, name: str, code: int, shape: tuple[int, ...], begin: int, size: int) -> TensorInfo:
    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        kind = None
    if kind is None or kind.name not in _TYPES:
        found = f"number {code}" if kind is None else kind.name
        raise CheckpointError(f"{path}: tensor {name}: type {found} is not read: must be one of {', '.join(_TYPES)}")
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise CheckpointError(f"{path}: tensor {name}: rows of {shape[-1]} are not whole {kind.name} blocks of {block}")
    nbytes = math.prod(shape) // block * block_bytes
    if begin + nbytes > size:
        raise CheckpointError(
            f"{path}: tensor {name}: file is truncated: its data ends at byte {begin + nbytes}, the file at {size}"
        )
    return TensorInfo(name, path, kind.name, shape, begin, nbytes)


def _read(info: TensorInfo) -> np.ndarray:
    """A tensor's values, in the file's own row order."""
    if info.nbytes == 0:
        return np.zeros(info.shape, np.float32)
    try:
        raw = np.asarray(np.memmap(info.file, np.uint8, "r", offset=info.begin, shape=(info.nbytes,)))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{info.where}: cannot be read: {error}") from error
    if info.dtype in _FLOATS:
        return raw.view(_FLOATS[info.dtype]).reshape(info.shape)
    rows = raw.reshape(math.prod(info.shape[:-1]), -1)
    return dequantize(rows, GGMLQuantizationType[info.dtype]).reshape(info.shape)


def _half_split(array: np.ndarray, heads: int) -> np.ndarray:
    """Rows (or biases) of each head from interleaved pairs (0, 1), (2, 3), ... to halves (0, H/2), (1, H/2 + 1), ..."""
    # [n*H, ...] -> [n, H/2, 2, ...] -> [n, 2, H/2, ...]
    pairs = array.reshape(heads, -1, 2, *array.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(array.shape)


def _hf_name(name: str) -> str:
    """HF name of a GGUF tensor; one that no Llama has keeps its own, and is refused by it later."""
    for row in OUTER_ROWS:
        if name == row.gguf:
            return row.hf
    prefix, _, rest = name.partition(".")
    index, _, suffix = rest.partition(".")
    if prefix == "blk" and index.isascii() and index.isdigit():
        for row in LAYER_ROWS:
            if suffix == row.gguf:
                return layer_name(int(index), row)
    return name


def _config(
    path: Path, metadata: dict[str, Any], tensors: dict[str, TensorInfo], factors: np.ndarray | None
) -> LlamaConfig:
    """The model, by way of the HF keys so that both formats pass the same checks."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(f"{path}: general.architecture={architecture!r} is not allowed: must be 'llama'")
    if (parts := metadata.get("split.count", 1)) not in (0, 1):
        raise CheckpointError(f"{path}: split.count={parts}: models split over many files are not read; merge them")
    if experts := metadata.get("llama.expert_count", 0):
        raise CheckpointError(f"{path}: llama.expert_count={experts!r} is not allowed: experts are not a Llama's")
    embed = tensors.get("token_embd.weight")
    if embed is None:
        raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
    heads = metadata.get("llama.attention.head_count")
    hidden = metadata.get("llama.embedding_length")
    head_dim = metadata.get("llama.attention.key_length")
    if head_dim is None and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        head_dim = hidden // heads
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if metadata.get(key, head_dim) != head_dim:
            raise CheckpointError(f"{path}: {key}={metadata[key]!r} is not allowed: must be the head size, {head_dim}")
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    ends = [token for token in ends if token is not None]
    data = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": embed.shape[0],
        "hidden_size": hidden,
        "intermediate_size": metadata.get("llama.feed_forward_length"),
        "num_hidden_layers": metadata.get("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv"),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.get("llama.context_length"),
        "rms_norm_eps": _shortest(metadata.get("llama.attention.layer_norm_rms_epsilon")),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(ends)) or None,
        "torch_dtype": {"F16": "float16", "BF16": "bfloat16"}.get(embed.dtype, "float32"),
        "rope_parameters": _rope(path, metadata),
    }
    # HF has defaults for these two, GGUF files do not.
    for key in ("llama.attention.layer_norm_rms_epsilon", "llama.context_length"):
        if metadata.get(key) is None:
            raise CheckpointError(f"{path}: metadata key {key} is missing")
    config = LlamaConfig.from_json(data, str(path))
    if factors is None:
        return config
    rope = _rope_from_factors(path, config, factors)
    return LlamaConfig.from_json({**config.to_json(), **rope}, str(path))


def _shortest(value: Any) -> Any:
    """A float32 metadata value as the shortest decimal that means it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _rope(path: Path, metadata: dict[str, Any]) -> dict[str, Any]:
    """RoPE keys as HF has them."""
    rope: dict[str, Any] = {"rope_theta": _shortest(metadata.get("llama.rope.freq_base", 10_000.0))}
    prefix = "llama.rope.scaling."
    kind = metadata.get(prefix + "type", "none")
    # Refused rather than dropped: each changes what the model computes.
    for key, neutral in (("attn_factor", 1.0), ("yarn_attn_factor", 1.0), ("yarn_log_multiplier", 0.0)):
        if metadata.get(prefix + key, neutral) != neutral:
            raise CheckpointError(f"{path}: {prefix}{key}={metadata[prefix + key]!r} is not read: must be {neutral}")
    factor = metadata.get(prefix + "factor", metadata.get("llama.rope.scale_linear"))
    if kind == "none" and "llama.rope.scale_linear" in metadata and factor != 1.0:
        kind = "linear"  # how files before 2024 said it
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{path}: {prefix}type={kind!r} is not allowed: must be none, linear or yarn")
    if factor is None:
        raise CheckpointError(f"{path}: metadata key {prefix}factor is missing; {prefix}type={kind!r} needs it")
    rope |= {"rope_type": kind, "factor": _shortest(factor)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = metadata.get(prefix + "original_context_length")
        rope["beta_fast"] = _shortest(metadata.get(prefix + "yarn_beta_fast"))
        rope["beta_slow"] = _shortest(metadata.get(prefix + "yarn_beta_slow"))
    return rope


def _rope_from_factors(path: Path, config: LlamaConfig, factors: np.ndarray) -> dict[str, Any]:
    """The llama3 parameters that a table of frequency divisors was made from.

    Converters write Llama 3.1's scaling as one divisor a frequency. The factor is the largest of them; what is left
    are the two wavelengths of the blend, and the original context is a power of two with the usual bounds 1 and 4.
    The candidate must give the table back, so a table of any other origin is refused, never approximated.
    """
    where = f"{path}: tensor {_ROPE_FACTORS}"
    if factors.shape != (config.head_dim // 2,):
        raise CheckpointError(f"{where}: shape {list(factors.shape)}, the head size says {[config.head_dim // 2]}")
    if not np.all(np.isfinite(factors)) or np.any(factors <= 0):
        raise CheckpointError(f"{where}: values must be finite and above 0")
    if config.rope.rope_type != "default":
        raise CheckpointError(f"{where}: not read together with rope scaling {config.rope.rope_type!r}")
    if np.all(factors == 1):
        return {}
    base, _ = frequencies(config.rope, config.head_dim)
    factor = _shortest(float(factors.max()))

    def error(original: int) -> float:
        made, _ = frequencies(RopeConfig("llama3", config.rope.theta, factor, 1.0, 4.0, original), config.head_dim)
        return float(np.max(np.abs(base / made / factors - 1)))

    best = min((1 << power for power in range(5, 25)), key=error)
    if not error(best) <= 1e-4:
        raise CheckpointError(f"{where}: is not Llama 3.1's scaling for any original context, and no other is read")
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return {"rope_scaling": scaling | {"original_max_position_embeddings": best}}
