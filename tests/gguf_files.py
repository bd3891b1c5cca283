"""GGUF files made for tests by the gguf package's writer, from tensors in HF layout, as a converter would."""

import numpy as np
from gguf import GGUFWriter
from gguf.quants import quantize
from tokenizers import pre_tokenizers

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    """A tensor's GGUF name by its HF name."""
    if name in NAMES:
        return NAMES[name]
    _, _, index, rest = name.split(".", 3)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{index}.{NAMES[stem]}.{kind}"


def interleaved(array, heads):
    """What converters do to query and key rows: feature i and i + H/2 of each head become 2i and 2i + 1."""
    out = np.empty_like(array)
    size = array.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = array[head * size + i]
            out[head * size + 2 * i + 1] = array[head * size + i + size // 2]
    return out


def metadata_of(config):
    """The llama.* keys of an HF config."""
    return {
        "llama.block_count": config["num_hidden_layers"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.attention.key_length": config["head_dim"],
        "llama.attention.value_length": config["head_dim"],
        "llama.rope.dimension_count": config["head_dim"],
        "llama.rope.freq_base": 500000.0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def write_gguf(path, config, tensors, extra=None, kinds=None, raw=None, arch="llama", **options):
    """Write HF-layout `tensors` as a converter would.

    Args:
        extra: metadata to add, or to leave out where None.
        kinds: HF name to quantised type; others keep their own.
        raw: GGUF name to (bytes as rows, type), written as they are.
    """
    writer = GGUFWriter(path, arch, **options)
    for key, value in {**metadata_of(config), **(extra or {})}.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name, array in tensors.items():
        if ".q_proj." in name:
            array = interleaved(array, config["num_attention_heads"])
        if ".k_proj." in name:
            array = interleaved(array, config["num_key_value_heads"])
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(gguf_name(name), array)
        else:
            writer.add_tensor(gguf_name(name), quantize(array, kind), raw_dtype=kind)
    for name, (rows, kind) in (raw or {}).items():
        writer.add_tensor(name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tokenizer_metadata():
    """A byte-level BPE of 260 tokens: three control tokens, the bytes, and one merge."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*control, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(control) + [1] * (len(tokens) - len(control)),
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
