"""Llama in Flax NNX: parameters and math. Positions and caches are arguments, never module state.

Letters: B batch, T tokens, L layers, N query heads, K key heads, H head size, E embed, F feed-forward, V vocabulary.
Numerics follow transformers' LlamaForCausalLM: RMSNorm in float32, rotation in float32, products accumulated in
float32, everything else in the parameters' dtype; but the residual stream stays float32, so that a half-precision
speculator ranks chunks more like a float32 one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from specprefill_jax.models.config import LlamaConfig
from specprefill_jax.models.rope import Rotation, rotate

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def project(x: jax.Array, weight: jax.Array, bias: jax.Array | None, contract: int = 1) -> jax.Array:
    """x's last `contract` axes times weight's first ones, as one 2-D product, plus bias; in x's dtype."""
    rows, inner = x.shape[: x.ndim - contract], weight.shape[:contract]
    size = 1
    for n in inner:
        size *= n
    # Float32 must mean float32 on accelerators too, where the default would round the inputs.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    y = lax.dot_general(
        x.reshape(-1, size),
        weight.reshape(size, -1),
        (((1,), (0,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    ).astype(x.dtype)
    y = y.reshape(*rows, *weight.shape[contract:])
    return y if bias is None else y + bias


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root mean square norm of float32 x over its last axis, in the weight's dtype."""
    x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return weight * x.astype(weight.dtype)


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        c = config
        normal = nnx.initializers.normal(0.02)

        def weight(*shape: int) -> nnx.Param:
            return nnx.Param(normal(rngs.params(), shape, dtype))

        def bias(has: bool, *shape: int) -> nnx.Param | None:
            return nnx.Param(jnp.zeros(shape, dtype)) if has else None

        self.attn_norm = nnx.Param(jnp.ones((c.hidden_size,), dtype))
        self.q = weight(c.hidden_size, c.num_heads, c.head_dim)
        self.k = weight(c.hidden_size, c.num_kv_heads, c.head_dim)
        self.v = weight(c.hidden_size, c.num_kv_heads, c.head_dim)
        self.o = weight(c.num_heads, c.head_dim, c.hidden_size)
        self.q_bias = bias(c.attention_bias, c.num_heads, c.head_dim)
        self.k_bias = bias(c.attention_bias, c.num_kv_heads, c.head_dim)
        self.v_bias = bias(c.attention_bias, c.num_kv_heads, c.head_dim)
        self.o_bias = bias(c.attention_bias, c.hidden_size)
        self.mlp_norm = nnx.Param(jnp.ones((c.hidden_size,), dtype))
        self.gate = weight(c.hidden_size, c.intermediate_size)
        self.up = weight(c.hidden_size, c.intermediate_size)
        self.down = weight(c.intermediate_size, c.hidden_size)
        self.gate_bias = bias(c.mlp_bias, c.intermediate_size)
        self.up_bias = bias(c.mlp_bias, c.intermediate_size)
        self.down_bias = bias(c.mlp_bias, c.hidden_size)
        self.eps = c.rms_norm_eps

    def __call__(self, x: jax.Array, by: Rotation, attend: Attend) -> jax.Array:
        """Float32 [B, T, E] -> float32 [B, T, E].

        Args:
            x: the residual stream.
            by: rotation of each token to its position.
            attend: from q [B, T, N, H], k and v [B, T, K, H], q and k rotated, to the attention output [B, T, N, H];
                it sees exactly the queries and keys that attention uses.
        """
        with jax.named_scope("attention"):
            y = rms_norm(x, self.attn_norm[...], self.eps)
            q = rotate(project(y, self.q[...], _value(self.q_bias)), by)
            k = rotate(project(y, self.k[...], _value(self.k_bias)), by)
            v = project(y, self.v[...], _value(self.v_bias))
            x = x + project(attend(q, k, v), self.o[...], _value(self.o_bias), contract=2)
        with jax.named_scope("mlp"):
            y = rms_norm(x, self.mlp_norm[...], self.eps)
            gate = project(y, self.gate[...], _value(self.gate_bias))
            up = project(y, self.up[...], _value(self.up_bias))
            return x + project(nnx.silu(gate) * up, self.down[...], _value(self.down_bias))


def _value(param: nnx.Param | None) -> jax.Array | None:
    return None if param is None else param[...]


class Outer(nnx.Module):
    """What stands before the first layer and after the last: embedding, final norm, language-model head."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, *, rngs: nnx.Rngs):
        c = config
        normal = nnx.initializers.normal(0.02)
        self.embed = nnx.Param(normal(rngs.params(), (c.vocab_size, c.hidden_size), dtype))
        self.norm = nnx.Param(jnp.ones((c.hidden_size,), dtype))
        tied = c.tie_word_embeddings
        self.head = None if tied else nnx.Param(normal(rngs.params(), (c.hidden_size, c.vocab_size), dtype))
        self.eps = c.rms_norm_eps

    def embedding(self, tokens: jax.Array) -> jax.Array:
        """Token ids [B, T] -> float32 [B, T, E]."""
        return self.embed[...][tokens].astype(jnp.float32)

    def logits(self, x: jax.Array) -> jax.Array:
        """Float32 hidden states [B, E] of one token a row -> float32 [B, V]."""
        x = rms_norm(x, self.norm[...], self.eps)
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        weight, axis = (self.embed[...], 1) if self.head is None else (self.head[...], 0)
        contract = (((1,), (axis,)), ((), ()))
        return lax.dot_general(x, weight, contract, precision=precision, preferred_element_type=jnp.float32)
