"""What a Llama is: sizes, RoPE and token ids, read from Hugging Face JSON of both key styles.

Published Llama files say `rope_theta`, `rope_scaling`, `torch_dtype`; transformers 5 writes `rope_parameters`, `dtype`.
"""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from specprefill_jax.errors import CheckpointError
from specprefill_jax.models.float8 import Float8

RopeType = Literal["default", "linear", "llama3", "yarn"]
ROPE_TYPES: tuple[RopeType, ...] = ("default", "linear", "llama3", "yarn")
DTYPES = ("float32", "bfloat16", "float16")

# Far above any Llama there is, low enough that nothing derived from a damaged file is ever allocated or looped over.
_LIMITS = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 13,
    "max_position_embeddings": (1 << 31) - 1,
    "original_max_position_embeddings": (1 << 31) - 1,
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters, each as transformers defines it.

    `None` means "not given": `attention_factor` is then computed from `factor` and the `mscale` pair, and
    `beta_fast` / `beta_slow` are 32 and 1. Which fields count depends on `rope_type`; `from_json` sees to it that
    those a type needs are there.
    """

    rope_type: RopeType = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of one Llama; hashable, so it may be a static argument of a jitted function.

    `dtype` is the one the checkpoint says it is stored in ("float32", "bfloat16" or "float16"). `eos_token_ids` may be
    empty. Query heads come in `num_kv_heads` groups of equal size.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"
    float8: Float8 | None = None
    """Which matrices of the checkpoint are float8, if any."""

    @classmethod
    def from_json(cls, data: dict[str, Any], source: str, generation: dict[str, Any] | None = None) -> "LlamaConfig":
        """Read a Hugging Face `config.json` object.

        Args:
            data: the decoded object, in either key style.
            source: what to call it in errors, usually the file's path.
            generation: the decoded `generation_config.json`; its `eos_token_id` wins where it has one.

        Raises:
            CheckpointError: it is not a Llama, or a value is missing or out of range; names `source`, key and value.
        """
        keys = _Keys(data, source)
        _check_is_llama(keys)
        heads = keys.size("num_attention_heads")
        kv_heads = keys.size("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise keys.error("num_key_value_heads", f"a divisor of num_attention_heads={heads}")
        hidden = keys.size("hidden_size")
        if keys.get("head_dim") is None and hidden % heads:
            raise keys.error("hidden_size", f"a multiple of num_attention_heads={heads} where head_dim is not given")
        head_dim = keys.size("head_dim", default=hidden // heads)
        if head_dim < 2 or head_dim % 2:
            raise CheckpointError(f"{source}: head_dim={head_dim} is not allowed: head_dim must be even (RoPE)")
        max_positions = keys.size("max_position_embeddings", default=2048)
        eos = (generation or {}).get("eos_token_id")
        dtype_key = "dtype" if keys.get("dtype") is not None else "torch_dtype"
        dtype = keys.get(dtype_key, "float32")
        if dtype not in DTYPES:
            raise keys.error(dtype_key, f"one of {', '.join(DTYPES)}")
        return cls(
            vocab_size=keys.size("vocab_size"),
            hidden_size=hidden,
            intermediate_size=keys.size("intermediate_size"),
            num_layers=keys.size("num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=keys.positive("rms_norm_eps", default=1e-6, most=1.0),
            rope=_read_rope(keys, max_positions),
            max_position_embeddings=max_positions,
            tie_word_embeddings=keys.flag("tie_word_embeddings"),
            attention_bias=keys.flag("attention_bias"),
            mlp_bias=keys.flag("mlp_bias"),
            bos_token_id=_token_ids(keys.get("bos_token_id"), "bos_token_id", source, many=False)[0],
            eos_token_ids=tuple(
                token
                for token in _token_ids(keys.get("eos_token_id") if eos is None else eos, "eos_token_id", source)
                if token is not None
            ),
            dtype=dtype,
            float8=_read_float8(keys),
        )

    def to_json(self) -> dict[str, Any]:
        """The `config.json` object of this model in the published Llama key style; `from_json` reads it back equal."""
        eos: int | list[int] | None = list(self.eos_token_ids) or None
        if len(self.eos_token_ids) == 1:
            eos = self.eos_token_ids[0]
        quantised = {} if self.float8 is None else {"quantization_config": self.float8.to_json()}
        return {
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": self.attention_bias,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_position_embeddings,
            "mlp_bias": self.mlp_bias,
            "model_type": "llama",
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_scaling": _rope_scaling(self.rope),
            "rope_theta": self.rope.theta,
            "tie_word_embeddings": self.tie_word_embeddings,
            "torch_dtype": self.dtype,
            "vocab_size": self.vocab_size,
            **quantised,
        }


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in file `path`; anything else in it is a CheckpointError that names the file."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not {type(data).__name__}")
    return data


def read_config(folder: str | os.PathLike[str]) -> LlamaConfig:
    """The model that `config.json`, and `generation_config.json` where there is one, in `folder` describe."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; a model folder needs one beside its safetensors files")
    generation = path.with_name("generation_config.json")
    return LlamaConfig.from_json(read_json(path), str(path), read_json(generation) if generation.is_file() else None)


class _Keys:
    """Typed look-ups in one JSON object; every failure names the source, the key, the value and what is allowed."""

    def __init__(self, data: dict[str, Any], source: str, prefix: str = "") -> None:
        self.data, self.source, self.prefix = data, source, prefix

    def get(self, key: str, default: Any = None) -> Any:
        value = self.data.get(key)
        return default if value is None else value

    def error(self, key: str, allowed: str) -> CheckpointError:
        if self.data.get(key) is None:
            return CheckpointError(f"{self.source}: {self.prefix}{key} is missing; it must be {allowed}")
        text = repr(self.data[key])
        text = text if len(text) <= 80 else text[:77] + "..."
        return CheckpointError(f"{self.source}: {self.prefix}{key}={text} is not allowed: {key} must be {allowed}")

    def size(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        limit = _LIMITS[key]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
            raise self.error(key, f"an integer from 1 to {limit}")
        return value

    def number(self, key: str) -> float | None:
        value = self.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise self.error(key, "a finite number")
        return float(value)

    def positive(self, key: str, default: float | None = None, most: float = math.inf) -> float:
        value = self.number(key)
        value = default if value is None else value
        if value is None or not 0 < value <= most:
            raise self.error(key, "a finite number above 0" + (f" and up to {most:g}" if most < math.inf else ""))
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value


def _is_finite(value: int | float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:  # JSON integers have no upper limit, floats do
        return False


def _check_is_llama(keys: _Keys) -> None:
    architectures, model_type = keys.get("architectures"), keys.get("model_type")
    if architectures is not None and (not isinstance(architectures, list) or "LlamaForCausalLM" not in architectures):
        raise keys.error("architectures", "a list with LlamaForCausalLM in it; other models are not served")
    if model_type is not None and model_type != "llama":
        raise keys.error("model_type", "'llama'; other models are not served")
    if architectures is None and model_type is None:
        raise keys.error("architectures", "a list with LlamaForCausalLM in it")
    if keys.get("hidden_act", "silu") != "silu":
        raise keys.error("hidden_act", "'silu'")


def _read_float8(keys: _Keys) -> Float8 | None:
    data = keys.get("quantization_config")
    if data is None:
        return None
    try:
        return Float8.from_json(data)
    except ValueError as error:
        raise keys.error("quantization_config", str(error)) from error


def _read_rope(keys: _Keys, max_positions: int) -> RopeConfig:
    """RoPE of either key style; precedence and defaults are those of transformers' own reader."""
    name = "rope_scaling" if keys.get("rope_scaling") else "rope_parameters"
    data = keys.get(name, {})
    if not isinstance(data, dict):
        raise keys.error(name, "an object or null")
    rope = _Keys(dict(data), keys.source, name + ".")
    if rope.get("rope_theta") is None:
        rope.data["rope_theta"] = keys.get("rope_theta", 10_000.0)
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ROPE_TYPES:
        key = "rope_type" if rope.get("rope_type") is not None else "type"
        raise rope.error(key, f"one of {', '.join(ROPE_TYPES)}")
    for part in (keys, rope):
        if part.get("partial_rotary_factor", 1.0) != 1.0:
            raise part.error("partial_rotary_factor", "1.0: a Llama rotates whole heads")
    kind = cast(RopeType, rope_type)
    theta = rope.positive("rope_theta")
    if kind == "default":
        return RopeConfig("default", theta)
    if kind == "linear":
        return RopeConfig("linear", theta, rope.positive("factor"))
    # A length beside the rope object wins over the one inside; with neither it is the model's whole context.
    holder = keys if keys.get("original_max_position_embeddings") is not None else rope
    original = holder.size("original_max_position_embeddings", default=max_positions)
    if kind == "llama3":
        low, high = rope.positive("low_freq_factor"), rope.positive("high_freq_factor")
        if high <= low:
            raise rope.error("high_freq_factor", f"above low_freq_factor={low}")
        return RopeConfig("llama3", theta, rope.positive("factor"), low, high, original)
    if theta <= 1:
        raise rope.error("rope_theta", "above 1 for yarn")
    explicit_null = "factor" in rope.data and rope.data["factor"] is None
    optional = {key: rope.number(key) or None for key in ("beta_fast", "beta_slow")}
    for key, value in optional.items():
        if value is not None and value <= 0:
            raise rope.error(key, "a finite number above 0")
    return RopeConfig(
        "yarn",
        theta,
        max_positions / original if explicit_null else rope.positive("factor"),
        original_max_position_embeddings=original,
        beta_fast=optional["beta_fast"],
        beta_slow=optional["beta_slow"],
        mscale=rope.number("mscale"),
        mscale_all_dim=rope.number("mscale_all_dim"),
        attention_factor=rope.number("attention_factor"),
        truncate=rope.flag("truncate", default=True),
    )


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.rope_type == "default":
        return None
    out: dict[str, Any] = {"rope_type": rope.rope_type, "factor": rope.factor}
    for key in (
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
    ):
        if (value := getattr(rope, key)) is not None:
            out[key] = value
    if not rope.truncate:
        out["truncate"] = False
    return out


def _token_ids(value: Any, key: str, source: str, many: bool = True) -> tuple[int | None, ...]:
    """Token ids as a tuple: of one or more where `many`, else of exactly one id or None."""
    ids = value if many and isinstance(value, list) else [value]
    for token in ids:
        if token is None and not (many and isinstance(value, list)):
            continue
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 1 << 31:
            allowed = "a token id or a list of token ids" if many else "a token id"
            raise CheckpointError(f"{source}: {key}={value!r} is not allowed: {key} must be {allowed} (0 or above)")
    return tuple(ids)
