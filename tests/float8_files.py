"""Float8 checkpoints of both published kinds, made from ordinary ones, and what they are when dequantised."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from checkpoint_files import write_folder
from safetensors.numpy import load_file

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BF16 = np.dtype(ml_dtypes.bfloat16)
ATTENTION = [f"self_attn.{part}_proj" for part in "qkvo"]
MLP = [f"mlp.{part}_proj" for part in ("gate", "up", "down")]
INPUT_TOP = 8.0  # that static scales are made for


@dataclass(frozen=True)
class Kind:
    """One way in which float8 checkpoints are published."""

    method: str = "compressed-tensors"
    per_channel: bool = True
    static: bool = False
    scale_dtype: Any = np.float32
    column: bool = True
    """Scales of shape [out, 1] and [1], not [out] and []."""
    unconverted: tuple[str, ...] = ("lm_head",)

    def converts(self, layer: int, layers: int, module: str) -> bool:
        """Whether a matrix of a layer is float8; Meta's: the feed-forward ones of all layers but the first and last."""
        return self.method != "fbgemm_fp8" or (module in MLP and 0 < layer < layers - 1)

    def quantization_config(self, layers: int) -> dict[str, Any]:
        """As the published files have it, fields that say nothing new included."""
        if self.method == "fbgemm_fp8":
            kept = [f"model.layers.{i}.{m}" for i in range(layers) for m in ATTENTION + MLP]
            kept = [name for name in kept if not self.converts(int(name.split(".")[2]), layers, name.split(".", 3)[3])]
            return {
                "activation_scale_ub": 1200.0,
                "modules_to_not_convert": ["lm_head", *kept],
                "quant_method": "fbgemm_fp8",
            }
        number = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "block_structure": None}
        weights = {**number, "strategy": "channel" if self.per_channel else "tensor", "dynamic": False}
        activations = {**number, "strategy": "tensor" if self.static else "token", "dynamic": not self.static}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
        return {
            "config_groups": {"group_0": {**group, "output_activations": None}},
            "format": "float-quantized",
            "ignore": list(self.unconverted),
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
            "sparsity_config": {},
            "transform_config": {},
        }


KINDS = {
    "fbgemm": Kind("fbgemm_fp8"),
    "channel": Kind(scale_dtype=BF16),
    "tensor": Kind(per_channel=False, unconverted=("re:.*lm_head",)),
    "static": Kind(per_channel=False, static=True, scale_dtype=BF16, unconverted=("lm_head", "re:.*up_proj$")),
    "static-channel": Kind(static=True, column=False),
}


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Config and tensors of a checkpoint."""
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return json.loads((folder / "config.json").read_text()), tensors


@lru_cache
def quantised(source: Path, kind: Kind) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A float8 checkpoint: the config and tensors of an ordinary one, converted. Not to be written to."""
    config, tensors = read_folder(source)
    layers = config["num_hidden_layers"]
    for i in range(layers):
        for order, module in enumerate(ATTENTION + MLP):
            if not kind.converts(i, layers, module) or (kind is KINDS["static"] and module == "mlp.up_proj"):
                continue
            name = f"model.layers.{i}.{module}"
            weight = tensors[f"{name}.weight"].astype(np.float32)
            top = np.abs(weight).max(axis=1, keepdims=True) if kind.per_channel else np.abs(weight).max()
            scale = np.asarray(top / 448, np.float32).astype(kind.scale_dtype)
            whole = (1,) if kind.column else ()
            tensors[f"{name}.weight"] = np.clip(weight / scale.astype(np.float32), -448, 448).astype(E4M3)
            shape = (len(weight), *whole) if kind.per_channel else whole
            tensors[f"{name}.weight_scale"] = scale.reshape(shape)
            if kind.static:  # unlike ones, so that none stands in for another
                value = INPUT_TOP * (1 + order / 8 + i / 16) / 448
                tensors[f"{name}.input_scale"] = np.full(whole, value, kind.scale_dtype)
    return {**config, "quantization_config": kind.quantization_config(layers)}, tensors


def dequantised(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The ordinary float32 checkpoint that a float8 one stands for."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"} | {"torch_dtype": "float32"}
    out = {}
    for name, array in tensors.items():
        if name.endswith("_scale"):
            continue
        out[name] = array.astype(np.float32)
        if array.dtype == E4M3:
            scale = tensors[name + "_scale"].astype(np.float32)
            out[name] *= scale.reshape(-1, 1)
    return plain, out


def write_pair(folder: Path, source: Path, kind: Kind, shards: int = 0) -> tuple[Path, Path]:
    """A float8 checkpoint made from an ordinary one, and its dequantised form."""
    made = quantised(source, kind)
    return (
        write_folder(folder / "float8", *made, shards=shards),
        write_folder(folder / "plain", *dequantised(*made)),
    )


def round_e4m3(x: np.ndarray) -> np.ndarray:
    """The nearest float8_e4m3fn, ties to even, cut off at 448: by arithmetic, not by a conversion."""
    exponent = np.floor(np.log2(np.maximum(np.abs(x), 2.0**-6)))  # below 2**-6 the numbers are 2**-9 apart
    unit = 2.0 ** (exponent - 3)
    return np.clip(np.rint(x / unit) * unit, -448, 448)


class Float8Matrix:
    """What float8.product says, in float64, for `oracle.Llama`: `x @ matrix.T` with x quantised."""

    __array_ufunc__ = None  # so that numpy leaves `x @` to this class

    def __init__(self, weight: np.ndarray, scale: np.ndarray, input_scale: np.ndarray | None, bound: float | None):
        self.weight, self.scale = weight.astype(np.float64), scale.astype(np.float64).reshape(-1)
        self.input_scale = None if input_scale is None else float(input_scale.reshape(()))
        self.bound = bound

    @property
    def T(self) -> "Float8Matrix":
        return self

    def __rmatmul__(self, x: np.ndarray) -> np.ndarray:
        if self.input_scale is None:
            top = np.abs(x).max(axis=-1, keepdims=True)
            scale = np.where(top > 0, top if self.bound is None else np.minimum(top, self.bound), 1.0) / 448
        else:
            scale = np.full((len(x), 1), self.input_scale)
        return (round_e4m3(x / scale) * scale) @ self.weight.T * self.scale
