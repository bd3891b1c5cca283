"""Configs of published Llamas, as their config.json files have them: to plan for models that are not here."""

from types import MappingProxyType

from specprefill_jax.models.config import LlamaConfig, RopeConfig
from specprefill_jax.models.float8 import Float8


def _llama(
    hidden: int,
    feed_forward: int,
    layers: int,
    heads: int,
    head_dim: int = 128,
    *,
    factor: float = 8.0,
    tied: bool = False,
    float8: Float8 | None = None,
) -> LlamaConfig:
    rope = RopeConfig("llama3", 500_000.0, factor, 1.0, 4.0, 8192)
    return LlamaConfig(
        vocab_size=128_256,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=rope,
        max_position_embeddings=131_072,
        tie_word_embeddings=tied,
        bos_token_id=128_000,
        eos_token_ids=(128_001, 128_008, 128_009),
        dtype="bfloat16",
        float8=float8,
    )


# Only the feed-forward matrices, and neither the first nor the last layer's.
_FLOAT8 = Float8(
    "fbgemm_fp8",
    (
        *(f"model.layers.{i}.self_attn" for i in range(126)),
        "model.layers.0.mlp",
        "model.layers.125.mlp",
        "lm_head",
    ),
    upper_bound=1200.0,
)

LLAMAS = MappingProxyType(
    {
        "Llama-3.2-1B": _llama(2048, 8192, 16, 32, 64, factor=32.0, tied=True),
        "Llama-3.1-8B": _llama(4096, 14_336, 32, 32),
        "Llama-3.1-70B": _llama(8192, 28_672, 80, 64),
        "Llama-3.1-405B": _llama(16_384, 53_248, 126, 128),
        "Llama-3.1-405B-FP8": _llama(16_384, 53_248, 126, 128, float8=_FLOAT8),
    }
)

PAIRS = (
    ("Llama-3.1-8B", "Llama-3.2-1B"),
    ("Llama-3.1-70B", "Llama-3.1-8B"),
    ("Llama-3.1-405B-FP8", "Llama-3.1-8B"),
)
"""(main model, speculator): the paper's two, and one for small machines."""
