"""What tensors a Llama has: their names in files, their shapes there, and the arrays the model takes.

One table; checking a file and reading it both follow it. Letters: E embed, F feed-forward, V vocabulary, N query heads,
K key heads, H head size, as in a model's `LlamaConfig`.
"""

import abc
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from specprefill_jax.errors import CheckpointError, argument_error
from specprefill_jax.models.config import LlamaConfig
from specprefill_jax.models.safetensors_file import FLOAT8, TensorInfo

if TYPE_CHECKING:
    from specprefill_jax.tokens import Tokenizer


@dataclass(frozen=True)
class Row:
    """One tensor of the model: its name here, in HF files, in GGUF files, and its shape in files, [out, in]."""

    ours: str
    hf: str
    gguf: str
    shape: str
    when: str = ""  # the config flag that says whether it is there; empty: always
    stored: Literal["float", "float8", "scale"] = "float"


LAYER_ROWS = (
    Row("attn_norm", "input_layernorm.weight", "attn_norm.weight", "E"),
    Row("q", "self_attn.q_proj.weight", "attn_q.weight", "NH,E"),
    Row("k", "self_attn.k_proj.weight", "attn_k.weight", "KH,E"),
    Row("v", "self_attn.v_proj.weight", "attn_v.weight", "KH,E"),
    Row("o", "self_attn.o_proj.weight", "attn_output.weight", "E,NH"),
    Row("mlp_norm", "post_attention_layernorm.weight", "ffn_norm.weight", "E"),
    Row("gate", "mlp.gate_proj.weight", "ffn_gate.weight", "F,E"),
    Row("up", "mlp.up_proj.weight", "ffn_up.weight", "F,E"),
    Row("down", "mlp.down_proj.weight", "ffn_down.weight", "E,F"),
    Row("q_bias", "self_attn.q_proj.bias", "attn_q.bias", "NH", "attention_bias"),
    Row("k_bias", "self_attn.k_proj.bias", "attn_k.bias", "KH", "attention_bias"),
    Row("v_bias", "self_attn.v_proj.bias", "attn_v.bias", "KH", "attention_bias"),
    Row("o_bias", "self_attn.o_proj.bias", "attn_output.bias", "E", "attention_bias"),
    Row("gate_bias", "mlp.gate_proj.bias", "ffn_gate.bias", "F", "mlp_bias"),
    Row("up_bias", "mlp.up_proj.bias", "ffn_up.bias", "F", "mlp_bias"),
    Row("down_bias", "mlp.down_proj.bias", "ffn_down.bias", "E", "mlp_bias"),
)
OUTER_ROWS = (
    Row("embed", "model.embed_tokens.weight", "token_embd.weight", "V,E"),
    Row("norm", "model.norm.weight", "output_norm.weight", "E"),
    Row("head", "lm_head.weight", "output.weight", "V,E", "untied"),
)

# Buffers that checkpoints carry and that the config says better, or that belong to a float8 cache, which ours is not.
HARMLESS = re.compile(
    r"(model\.layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq"
    r"|model\.layers\.\d+\.self_attn\.([kv]_scale|[kv]_proj\.output_scale)"
    r"|model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.input_scale_ub"
)


class Checkpoint(abc.ABC):
    """A model whose tensors were checked and whose data has not been read.

    Attributes:
        name: what to call it: a folder's name, a built-in name, a Hub id.
        config: the model's sizes.
    """

    name: str
    config: LlamaConfig

    @abc.abstractmethod
    def read(self, name: str) -> np.ndarray:
        """The tensor of an HF name, in the file's type and in HF layout ([out, in], half-split rotary)."""

    @abc.abstractmethod
    def tokenizer(self) -> "Tokenizer | None":
        """The tokenizer that comes with the model, or None where there is none."""

    def outer(self) -> dict[str, np.ndarray]:
        """{"embed": [V, E], "norm": [E], "head": [V, E]}; no head where it is tied to the embedding."""
        return {row.ours: to_ours(self.config, row, self.read(row.hf)) for row in outer_rows(self.config)}

    def layer(self, index: int) -> dict[str, np.ndarray]:
        """Arrays of layer `index` (from 0), as views of the file where they can be.

        Returns:
            attn_norm [E], q [N, H, E], k [K, H, E], v [K, H, E], o [E, N, H], mlp_norm [E], gate [F, E], up [F, E],
            down [E, F]; with attention_bias q_bias [N, H], k_bias [K, H], v_bias [K, H], o_bias [E]; with mlp_bias
            gate_bias [F], up_bias [F], down_bias [E]. With a float8 matrix comes its scale, e.g. down_scale [E], and
            where activations are static down_input_scale [], both float32.
        """
        self._check_layer(index)
        return {
            row.ours: to_ours(self.config, row, self.read(layer_name(index, row)))
            for row in layer_rows(self.config, index)
        }

    def _check_layer(self, index: int) -> None:
        if not 0 <= index < self.config.num_layers:
            raise argument_error("index", index, f"a layer from 0 to {self.config.num_layers - 1}")


def layer_name(index: int, row: Row) -> str:
    """Name of a layer's tensor in an HF file."""
    return f"model.layers.{index}.{row.hf}"


def outer_rows(config: LlamaConfig) -> tuple[Row, ...]:
    """The tensors outside the layers that this model has."""
    return _rows_of(config, OUTER_ROWS)


def layer_rows(config: LlamaConfig, index: int) -> tuple[Row, ...]:
    """The tensors of layer `index` (from 0): a float8 matrix brings its scale, and where static its input's."""
    if config.float8 is None:
        return _rows_of(config, LAYER_ROWS)
    rows: list[Row] = []
    for row in _rows_of(config, LAYER_ROWS):
        module = layer_name(index, row).removesuffix(".weight")
        if "," not in row.shape or not config.float8.converts(module):
            rows.append(row)
            continue
        rows.append(replace(row, stored="float8"))
        rows.append(Row(f"{row.ours}_scale", f"{row.hf}_scale", "", row.shape.split(",")[0], stored="scale"))
        if config.float8.static:
            name = row.hf.removesuffix("weight") + "input_scale"
            rows.append(Row(f"{row.ours}_input_scale", name, "", "", stored="scale"))
    return tuple(rows)


def float8_names(config: LlamaConfig, index: int) -> frozenset[str]:
    """Our names of the matrices of layer `index` that are float8."""
    return frozenset(row.ours for row in layer_rows(config, index) if row.stored == "float8")


def _rows_of(config: LlamaConfig, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """The rows of a table that this model has."""
    flags = {
        "": True,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "untied": not config.tie_word_embeddings,
    }
    return tuple(row for row in rows if flags[row.when])


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """HF name to file shape ([out, in]) of every tensor that a checkpoint of this model must hold, layers in order."""
    return {name: file_shape(config, row) for name, row in _all_rows(config).items()}


def _all_rows(config: LlamaConfig) -> dict[str, Row]:
    """HF name to row of every tensor, layers in order."""
    rows = {row.hf: row for row in outer_rows(config)}
    for index in range(config.num_layers):
        rows.update({layer_name(index, row): row for row in layer_rows(config, index)})
    return rows


def check_tensors(config: LlamaConfig, tensors: Mapping[str, TensorInfo], source: str) -> None:
    """Compare headers with what the model must have.

    Args:
        config: the model.
        tensors: HF name to what the files say of the tensor.
        source: what to call the whole checkpoint in errors.

    Raises:
        CheckpointError: a tensor is missing, unknown, of another shape, or float8 where the config does not say so or
            the other way round; names file and tensor.
    """
    rows = _all_rows(config)
    # Float8 first: else what is told is a scale that is missing or unknown.
    for row in OUTER_ROWS:
        if row.hf in tensors and tensors[row.hf].dtype == FLOAT8:
            where = tensors[row.hf].where
            raise CheckpointError(f"{where}: dtype {FLOAT8} is not allowed: only matrices of layers may be float8")
    for name, row in rows.items():
        said = row.stored == "float8"
        if name in tensors and (tensors[name].dtype == FLOAT8) != said:
            what = f"dtype {tensors[name].dtype}, but by quantization_config it {'is' if said else 'is not'} {FLOAT8}"
            raise CheckpointError(f"{tensors[name].where}: {what}")
    # Then names, in file order of the layers, so that a wrong num_layers is told as missing or unknown tensors.
    missing = [name for name in rows if name not in tensors]
    if missing:
        raise CheckpointError(
            f"{source}: tensor {missing[0]} is missing{_and_more(missing)}; "
            f"a Llama of {config.num_layers} layers needs it"
        )
    unknown = [name for name in tensors if name not in rows and not _is_ignored(config, name)]
    if unknown:
        raise CheckpointError(
            f"{tensors[unknown[0]].file}: tensor {unknown[0]} is unknown{_and_more(unknown)}: "
            f"a Llama of {config.num_layers} layers with this config has no such tensor"
        )
    for name, row in rows.items():
        info, shape = tensors[name], file_shape(config, row)
        if row.stored == "scale":
            many = config.float8 is not None and config.float8.per_channel and shape != ()
            allowed = [shape, (*shape, 1)] if many else [(), (1,), (1, 1)]
            if info.shape not in allowed:
                says = " or ".join(str(list(shape)) for shape in allowed)
                raise CheckpointError(f"{info.where}: shape {list(info.shape)}, the config says {says}")
        elif info.shape != shape:
            raise CheckpointError(f"{info.where}: shape {list(info.shape)}, the config says {list(shape)}")


def sizes_of(config: LlamaConfig) -> dict[str, int]:
    """The length of each axis, by letter."""
    return {
        "E": config.hidden_size,
        "F": config.intermediate_size,
        "V": config.vocab_size,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": config.head_dim,
    }


def file_shape(config: LlamaConfig, row: Row) -> tuple[int, ...]:
    """The shape of a tensor in a file; a scale is there for each output channel."""
    sizes = sizes_of(config)
    return tuple(math.prod(sizes[letter] for letter in axis) for axis in row.shape.split(",") if axis)


def to_ours(config: LlamaConfig, row: Row, array: np.ndarray) -> np.ndarray:
    """The array of a file with its head axes split in two: a view, [out, in] as it is there.

    A scale of a whole tensor is repeated for every output channel.
    """
    sizes = sizes_of(config)
    shape = [sizes[letter] for letter in axes_of(row.ours)]
    if row.stored == "scale":
        scale = array.astype(np.float32)
        return np.broadcast_to(scale.reshape(()), shape) if scale.size == 1 else scale.reshape(shape)
    return array.reshape(shape)


def row_of(ours: str) -> Row:
    """The row of the table with that name here."""
    return next(row for row in (*OUTER_ROWS, *LAYER_ROWS) if row.ours == ours)


def axes_of(ours: str) -> str:
    """The letters of the axes of one of our arrays, e.g. "NHE" for q, "NH" for q_scale."""
    if ours.endswith("_input_scale"):
        return ""
    shape = row_of(ours.removesuffix("_scale")).shape
    return shape.split(",")[0] if ours.endswith("_scale") else shape.replace(",", "")


def copy_heads(name: str, array: np.ndarray, q_copies: int, kv_copies: int) -> np.ndarray:
    """One of our arrays with each head repeated; only the first copy of a query head counts in the output.

    Args:
        name: of the array.
        array: as `Checkpoint.layer` gives it.
        q_copies: times each query head is there.
        kv_copies: times each key head is there.
    """
    axes = axes_of(name)
    for letter, copies in (("N", q_copies), ("K", kv_copies)):
        if copies > 1 and letter in axes:
            array = np.repeat(array, copies, axis=axes.index(letter))
    if name == "o" and q_copies > 1:
        heads = np.moveaxis(array, axes.index("N"), 0)  # a view
        heads[np.arange(len(heads)) % q_copies > 0] = 0
    return array


def _is_ignored(config: LlamaConfig, name: str) -> bool:
    # Some savers write the head of a tied model as well: it is the embedding.
    return HARMLESS.fullmatch(name) is not None or (config.tie_word_embeddings and name == "lm_head.weight")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
