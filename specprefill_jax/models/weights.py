"""What tensors a Llama has: their names in files, their shapes there, and the arrays the model takes.

One table; checking a file and reading it both follow it. Letters: E embed, F feed-forward, V vocabulary, N query heads,
K key heads, H head size, as in a model's `LlamaConfig`.
"""

import abc
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from specprefill_jax.errors import CheckpointError, argument_error
from specprefill_jax.models.config import LlamaConfig
from specprefill_jax.models.safetensors_file import TensorInfo

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

# Buffers that old checkpoints carry and that the config says better.
HARMLESS = re.compile(r"(model\.layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|model\.rotary_emb\.inv_freq")


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
        """{"embed": [V, E], "norm": [E], "head": [E, V]}; no head where it is tied to the embedding."""
        return {row.ours: to_ours(self.config, row, self.read(row.hf)) for row in rows_of(self.config, OUTER_ROWS)}

    def layer(self, index: int) -> dict[str, np.ndarray]:
        """Arrays of layer `index` (from 0), as views of the file where they can be.

        Returns:
            attn_norm [E], q [E, N, H], k [E, K, H], v [E, K, H], o [N, H, E], mlp_norm [E], gate [E, F], up [E, F],
            down [F, E]; with attention_bias q_bias [N, H], k_bias [K, H], v_bias [K, H], o_bias [E]; with mlp_bias
            gate_bias [F], up_bias [F], down_bias [E].
        """
        self._check_layer(index)
        return {
            row.ours: to_ours(self.config, row, self.read(layer_name(index, row)))
            for row in rows_of(self.config, LAYER_ROWS)
        }

    def _check_layer(self, index: int) -> None:
        if not 0 <= index < self.config.num_layers:
            raise argument_error("index", index, f"a layer from 0 to {self.config.num_layers - 1}")


def layer_name(index: int, row: Row) -> str:
    """Name of a layer's tensor in an HF file."""
    return f"model.layers.{index}.{row.hf}"


def rows_of(config: LlamaConfig, rows: tuple[Row, ...]) -> tuple[Row, ...]:
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
    shapes = {row.hf: _file_shape(config, row) for row in rows_of(config, OUTER_ROWS)}
    per_layer = [(row, _file_shape(config, row)) for row in rows_of(config, LAYER_ROWS)]
    for index in range(config.num_layers):
        shapes.update({layer_name(index, row): shape for row, shape in per_layer})
    return shapes


def check_tensors(config: LlamaConfig, tensors: Mapping[str, TensorInfo], source: str) -> None:
    """Compare headers with what the model must have.

    Args:
        config: the model.
        tensors: HF name to what the files say of the tensor.
        source: what to call the whole checkpoint in errors.

    Raises:
        CheckpointError: a tensor is missing, unknown or of another shape; names file and tensor.
    """
    # Names first, in file order of the layers, so that a wrong num_layers is told as missing or unknown tensors.
    shapes = expected_shapes(config)
    missing = [name for name in shapes if name not in tensors]
    if missing:
        raise CheckpointError(
            f"{source}: tensor {missing[0]} is missing{_and_more(missing)}; "
            f"a Llama of {config.num_layers} layers needs it"
        )
    unknown = [name for name in tensors if name not in shapes and not _is_ignored(config, name)]
    if unknown:
        raise CheckpointError(
            f"{tensors[unknown[0]].file}: tensor {unknown[0]} is unknown{_and_more(unknown)}: "
            f"a Llama of {config.num_layers} layers with this config has no such tensor"
        )
    for name, shape in shapes.items():
        info = tensors[name]
        if info.shape != shape:
            raise CheckpointError(f"{info.where}: shape {list(info.shape)}, the config says {list(shape)}")


def _sizes(config: LlamaConfig) -> dict[str, int]:
    return {
        "E": config.hidden_size,
        "F": config.intermediate_size,
        "V": config.vocab_size,
        "N": config.num_heads,
        "K": config.num_kv_heads,
        "H": config.head_dim,
    }


def _file_shape(config: LlamaConfig, row: Row) -> tuple[int, ...]:
    sizes = _sizes(config)
    shape = []
    for axis in row.shape.split(","):
        size = 1
        for letter in axis:
            size *= sizes[letter]
        shape.append(size)
    return tuple(shape)


def to_ours(config: LlamaConfig, row: Row, array: np.ndarray) -> np.ndarray:
    """File layout [out, in] to ours [in, out], head axes split in two; a view wherever numpy can make one."""
    if row.ours == "embed":
        return array
    sizes = _sizes(config)
    # One group of sizes an axis of the file, e.g. "NH,E" -> [[N, H], [E]]
    groups = [[sizes[letter] for letter in axis] for axis in row.shape.split(",")]
    split = array.reshape([size for group in groups for size in group])
    if len(groups) == 1:
        return split
    out_axes = len(groups[0])
    return np.moveaxis(split, range(out_axes), range(split.ndim - out_axes, split.ndim))


def axes_of(ours: str) -> str:
    """The letters of the axes of one of our arrays, e.g. "ENH" for q."""
    row = next(row for row in (*OUTER_ROWS, *LAYER_ROWS) if row.ours == ours)
    first, *rest = row.shape.split(",")
    return first + "".join(rest) if ours == "embed" else "".join(rest) + first


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
        array[np.arange(len(array)) % q_copies > 0] = 0
    return array


def _is_ignored(config: LlamaConfig, name: str) -> bool:
    # Some savers write the head of a tied model as well: it is the embedding.
    return HARMLESS.fullmatch(name) is not None or (config.tie_word_embeddings and name == "lm_head.weight")


def _and_more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
