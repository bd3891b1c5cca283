"""Small Llama checkpoints made for tests: whole ones by the safetensors library, damaged ones byte by byte."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def hf_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """HF names and shapes, written out apart from the table under test."""
    e, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    h = config["head_dim"]
    n, k = config["num_attention_heads"] * h, config["num_key_value_heads"] * h
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, e), "model.norm.weight": (e,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (v, e)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}."
        shapes[layer + "input_layernorm.weight"] = (e,)
        shapes[layer + "post_attention_layernorm.weight"] = (e,)
        attention = {"q_proj": (n, e), "k_proj": (k, e), "v_proj": (k, e), "o_proj": (e, n)}
        mlp = {"gate_proj": (f, e), "up_proj": (f, e), "down_proj": (e, f)}
        for part, matrices, flag in (("self_attn", attention, "attention_bias"), ("mlp", mlp, "mlp_bias")):
            for name, shape in matrices.items():
                shapes[f"{layer}{part}.{name}.weight"] = shape
                if config.get(flag):
                    shapes[f"{layer}{part}.{name}.bias"] = shape[:1]
    return shapes


def random_tensors(config: dict[str, Any], seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Values for every tensor of `hf_shapes`."""
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in hf_shapes(config).items()}


def write_folder(
    folder: Path, config: dict[str, Any] | None = None, tensors: dict[str, np.ndarray] | None = None, shards: int = 0
) -> Path:
    """A HF folder: one file where `shards` is 0, else that many and an index."""
    config = CONFIG if config is None else config
    tensors = random_tensors(config) if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not shards:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, folder / file)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: Any) -> None:
    """Write the index of a sharded folder."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def read_raw(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write_raw(path: Path, header: Any, data: bytes) -> None:
    """A safetensors file of any header, an object or ready JSON text, and any data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
