"""Float8 checkpoints: what their configs say, and the products of their matrices.

Two published kinds, both float8_e4m3fn [out, in] with float32 scales:

* `fbgemm_fp8` (Meta's Llama-3.1-405B-Instruct-FP8): a scale for each output channel; activations are scaled token by
  token as they come, by their largest magnitude but no more than `activation_scale_ub`; `modules_to_not_convert` names
  what stayed as it was.
* `compressed-tensors`, format `float-quantized` (llm-compressor): a scale for each channel or for the tensor;
  activations scaled token by token as they come ("dynamic") or by a scale in the file ("static").
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

LARGEST = 448.0
"""Of float8_e4m3fn."""

_PATTERN = re.compile(r"(?:[\w-]|\.[*+]?|\\\.|\\d\+?|\^|\$)+")
# So that matching cannot take long, whoever wrote the config.
_MOST_REPEATS, _MOST_PATTERNS = 3, 50
_SMALLEST = 1e-12  # magnitude that a scale allows for, as in FBGEMM: a scale must not be zero


@dataclass(frozen=True)
class Float8:
    """How the float8 matrices of a checkpoint are stored; hashable."""

    method: str
    """"fbgemm_fp8" or "compressed-tensors"."""
    unconverted: tuple[str, ...] = ()
    """Modules that are not float8, as the config names them: whole names, ends of names, or "re:" and a pattern."""
    per_channel: bool = True
    """A scale for each output channel; else one for the tensor."""
    static: bool = False
    """The file has a scale for each matrix's input; else tokens are scaled as they come."""
    upper_bound: float | None = None
    """Largest magnitude that a token's scale allows for; greater ones are cut off."""

    def converts(self, module: str) -> bool:
        """Whether the matrix of a module, e.g. "model.layers.0.mlp.up_proj", is float8."""
        names, patterns = self._unconverted
        parts = module.split(".")
        tops = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        ends = (".".join(parts[start:]) for start in range(len(parts)))
        return names.isdisjoint((*tops, *ends)) and not any(pattern.match(module) for pattern in patterns)

    @cached_property
    def _unconverted(self) -> tuple[frozenset[str], tuple[re.Pattern[str], ...]]:
        """Names and patterns of what is not float8: a list of a thousand is asked about each matrix of each layer."""
        names = frozenset(entry for entry in self.unconverted if not entry.startswith("re:"))
        return names, tuple(re.compile(entry[3:]) for entry in self.unconverted if entry.startswith("re:"))

    @classmethod
    def from_json(cls, data: Any) -> "Float8":
        """Read a `quantization_config`.

        Raises:
            ValueError: it is none of the kinds above; says what is allowed.
        """
        if not isinstance(data, dict) or data.get("quant_method") not in ("fbgemm_fp8", "compressed-tensors"):
            raise ValueError("absent, or its quant_method fbgemm_fp8 or compressed-tensors (GGUF files are read, too)")
        return _read_fbgemm(data) if data["quant_method"] == "fbgemm_fp8" else _read_compressed(data)

    def to_json(self) -> dict[str, Any]:
        """The `quantization_config`; `from_json` reads it back equal."""
        if self.method == "fbgemm_fp8":
            return {
                "quant_method": self.method,
                "activation_scale_ub": self.upper_bound,
                "modules_to_not_convert": list(self.unconverted),
            }
        activations = {"strategy": "tensor" if self.static else "token", "dynamic": not self.static}
        weights = {"strategy": "channel" if self.per_channel else "tensor", "dynamic": False}
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {"targets": ["Linear"], "weights": number | weights, "input_activations": number | activations}
        return {
            "quant_method": self.method,
            "format": "float-quantized",
            "config_groups": {"group_0": group},
            "ignore": list(self.unconverted),
        }


def _read_fbgemm(data: Mapping[str, Any]) -> Float8:
    bound = data.get("activation_scale_ub")
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < 1e30):
        raise ValueError("with an activation_scale_ub that is null or a finite number above 0")
    unconverted = _name_list(data, "modules_to_not_convert")
    return Float8("fbgemm_fp8", unconverted, upper_bound=None if bound is None else float(bound))


def _read_compressed(data: Mapping[str, Any]) -> Float8:
    groups = data.get("config_groups")
    group = next(iter(groups.values())) if isinstance(groups, dict) and len(groups) == 1 else None
    if data.get("format") != "float-quantized" or not isinstance(group, dict):
        raise ValueError("of format float-quantized, with one entry in config_groups")
    if group.get("format") not in (None, "float-quantized"):
        raise ValueError("with no other format in config_groups than float-quantized")
    sparsity = data.get("sparsity_config") or {}
    if data.get("transform_config") or not isinstance(sparsity, dict) or sparsity.get("format") not in (None, "dense"):
        raise ValueError("without a transform_config or a sparsity_config that is not dense")
    if group.get("output_activations"):
        raise ValueError("without output_activations")
    if group.get("targets") != ["Linear"]:
        raise ValueError('with targets ["Linear"]')
    weights, activations = group.get("weights") or {}, group.get("input_activations") or {}
    for part in (weights, activations):
        kind = isinstance(part, dict) and (part.get("num_bits"), part.get("type"), part.get("symmetric", True))
        if kind != (8, "float", True):
            raise ValueError("with symmetric 8-bit float weights and input_activations")
    if weights.get("strategy") not in ("channel", "tensor") or weights.get("dynamic"):
        raise ValueError("with static weights of strategy channel or tensor")
    scaled = (activations.get("dynamic"), activations.get("strategy"))
    if scaled not in ((True, "token"), (False, "tensor"), (True, "tensor")):
        raise ValueError("with input_activations either dynamic (strategy token or tensor) or static (strategy tensor)")
    return Float8(
        "compressed-tensors",
        _name_list(data, "ignore"),
        per_channel=weights["strategy"] == "channel",
        static=not activations["dynamic"],
    )


def _name_list(data: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = [] if data.get(key) is None else data[key]
    if not isinstance(names, list) or not all(isinstance(name, str) and len(name) <= 200 for name in names):
        raise ValueError(f"with {key} a list of module names")
    if sum(name.startswith("re:") for name in names) > _MOST_PATTERNS:
        raise ValueError(f"with at most {_MOST_PATTERNS} patterns in {key}")
    for name in names:
        repeats = name.count("*") + name.count("+")
        if name.startswith("re:") and not (_PATTERN.fullmatch(name[3:]) and repeats <= _MOST_REPEATS):
            allowed = r"letters, digits, '.', '\.' and at most three of '.*' and '\d+'"
            raise ValueError(f"with patterns in {key} made of {allowed}, not {name!r}")
    return tuple(names)


def quantise(x: jax.Array, scale: jax.Array | None, upper_bound: float | None) -> tuple[jax.Array, jax.Array]:
    """Activations [R, I] -> float8_e4m3fn [R, I] and the float32 scales [R, 1] (or the one given) that undo it.

    Args:
        x: one token a row.
        scale: a static scale, float32 scalar; None: each row's largest magnitude over that of float8.
        upper_bound: of that magnitude; None for none.
    """
    x = x.astype(jnp.float32)
    if scale is None:
        top = jnp.max(jnp.abs(x), axis=-1, keepdims=True)
        top = top if upper_bound is None else jnp.minimum(top, upper_bound)
        scale = jnp.maximum(top, _SMALLEST) / LARGEST
    return jnp.clip(x / scale, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn), scale


def product(
    x: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    input_scale: jax.Array | None,
    upper_bound: float | None,
    *,
    native: bool,
) -> jax.Array:
    """x [R, I] times the transpose of a float8 matrix [O, I] with scales [O]: float32 [R, O].

    Args:
        x: activations.
        weight: float8_e4m3fn. Contiguous along I, as the tensor cores take it.
        scale: float32, of each output channel.
        input_scale, upper_bound: see `quantise`.
        native: multiply in float8 (float32 sums), activations quantised; else dequantise the weights into x's dtype,
            and leave the activations as they are: where the hardware has no float8 products that is faster, and closer
            to the model that was quantised.
    """
    contract = (((1,), (1,)), ((), ()))
    if native:
        small, undo = quantise(x, input_scale, upper_bound)
        y = lax.dot_general(small, weight, contract, preferred_element_type=jnp.float32)
        return y * undo * scale
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    # Float8 values are exact in every dtype that x may have.
    y = lax.dot_general(x, weight.astype(x.dtype), contract, precision=precision, preferred_element_type=jnp.float32)
    return y * scale
