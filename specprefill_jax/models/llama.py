"""Llama in Flax NNX: parameters and math. Positions and caches are arguments, never module state.

Letters: B batch, T tokens, L layers, N query heads, K key heads, H head size, E embed, F feed-forward, V vocabulary.
Numerics follow transformers' LlamaForCausalLM: RMSNorm in float32, rotation in float32, products accumulated in
float32, everything else in the parameters' dtype; but the residual stream stays float32, so that a half-precision
speculator ranks chunks more like a float32 one.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from specprefill_jax.models import float8
from specprefill_jax.models.config import LlamaConfig
from specprefill_jax.models.rope import Rotation, rotate
from specprefill_jax.models.weights import axes_of, row_of, sizes_of
from specprefill_jax.sharding.rules import RULES, TENSOR, batch_letter, spec

FEW_ROWS = 16
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


@dataclass(frozen=True)
class Layout:
    """How a layer lies on its devices, beside the sizes in its config."""

    float8: frozenset[str] = frozenset()
    """Names of its float8 matrices."""
    native: bool = False
    """Whether the devices multiply float8; see `float8.product`."""
    mesh: Mesh | None = None
    """Devices among which matrices are split; None: none are."""
    least_rows: int = 1
    """Rows that products are padded to: for a lone one, XLA's GPU compiler would rather copy the matrix, widened."""
    turned: bool = False
    """Whether a product of few rows is computed turned over; see `times_transposed`."""


class Linear(nnx.Module):
    """A matrix of a layer, with its bias and, where it is float8, its scales.

    A matrix whose inner axis is split over a mesh (o, down) multiplies on each device what lies there and adds up the
    products, in x's dtype: one all-reduce. Float8 activations are then scaled device by device.
    """

    def __init__(self, name: str, config: LlamaConfig, dtype: jnp.dtype, layout: Layout, *, rngs: nnx.Rngs):
        sizes, (out, inner) = sizes_of(config), row_of(name).shape.split(",")
        is_float8 = name in layout.float8
        out_shape = tuple(sizes[letter] for letter in out)
        self.inner_axes = len(inner)
        self.float8 = config.float8 if is_float8 else None
        self.native, self.least_rows, self.turned = layout.native, layout.least_rows, layout.turned
        self.axes = axes_of(name)
        self.mesh = layout.mesh if RULES.keys() & set(inner) else None
        shape = tuple(sizes[letter] for letter in self.axes)
        values = nnx.initializers.normal(0.02)(rngs.params(), shape, dtype)
        self.weight = nnx.Param(values.astype(jnp.float8_e4m3fn) if is_float8 else values)
        self.scale = nnx.Param(jnp.ones(out_shape, jnp.float32)) if is_float8 else None
        static = self.float8 is not None and self.float8.static
        self.input_scale = nnx.Param(jnp.ones((), jnp.float32)) if static else None
        has_bias = config.mlp_bias if "F" in self.axes else config.attention_bias
        self.bias = nnx.Param(jnp.zeros(out_shape, dtype)) if has_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, T, inner axes] -> [B, T, out axes], in x's dtype."""
        arrays = [param[...] for param in (self.weight, self.scale, self.input_scale) if param is not None]
        if self.mesh is None:
            y = self._product(x, *arrays)
        else:
            rows = f"{batch_letter(self.mesh, len(x))}T"
            inner = self.axes[-self.inner_axes :]
            # The scales of this kind of matrix are whole on every device.
            layouts = (spec(rows + inner), spec(self.axes), P(), P())[: 1 + len(arrays)]

            def shared(x: jax.Array, *arrays: jax.Array) -> jax.Array:
                return lax.psum(self._product(x, *arrays), TENSOR)

            y = jax.shard_map(shared, mesh=self.mesh, in_specs=layouts, out_specs=spec(rows + "E"), check_vma=False)(
                x, *arrays
            )
        return y if self.bias is None else y + self.bias[...]

    def _product(
        self, x: jax.Array, weight: jax.Array, scale: jax.Array | None = None, input_scale: jax.Array | None = None
    ) -> jax.Array:
        """As one 2-D product, float32 sums."""
        flat = pad_rows(x.reshape(-1, math.prod(x.shape[2:])), self.least_rows)
        out, matrix = weight.shape[: weight.ndim - self.inner_axes], weight.reshape(-1, flat.shape[1])
        if self.float8 is None or scale is None:
            y = times_transposed(flat, matrix, turned=self.turned)
        else:
            bound = self.float8.upper_bound
            y = float8.product(flat, matrix, scale.reshape(-1), input_scale, bound, native=self.native)
        return y[: x.shape[0] * x.shape[1]].astype(x.dtype).reshape(*x.shape[:2], *out)


def times_transposed(x: jax.Array, matrix: jax.Array, *, turned: bool) -> jax.Array:
    """x [R, I] times the transpose of a matrix [O, I], which is how files hold it: float32 [R, O].

    XLA is no slower at this on any platform, and for a lone row on a CPU twice as fast as at a matrix [I, O]. For 2 to
    FEW_ROWS rows its CPU runtime takes up to three times as long as for one, unless the matrix comes first (`turned`):
    then as long as for one, which is what reading the matrix takes.
    """
    # Float32 must mean float32 on accelerators too, where the default would round the inputs.
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    product = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    contract = (((1,), (1,)), ((), ()))
    if turned and 1 < len(x) <= FEW_ROWS:
        # Behind the barrier, lest XLA turn it back.
        return lax.optimization_barrier(product(matrix, x, contract)).T
    return product(x, matrix, contract)


def pad_rows(x: jax.Array, least: int) -> jax.Array:
    """[R, I] -> [max(R, least), I], zeros below."""
    return x if len(x) >= least else jnp.pad(x, ((0, least - len(x)), (0, 0)))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root mean square norm of float32 x over its last axis, in the weight's dtype."""
    x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return weight * x.astype(weight.dtype)


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, layout: Layout, *, rngs: nnx.Rngs):
        def linear(name: str) -> Linear:
            return Linear(name, config, dtype, layout, rngs=rngs)

        self.attn_norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        self.q, self.k, self.v, self.o = linear("q"), linear("k"), linear("v"), linear("o")
        self.mlp_norm = nnx.Param(jnp.ones((config.hidden_size,), dtype))
        self.gate, self.up, self.down = linear("gate"), linear("up"), linear("down")
        self.eps = config.rms_norm_eps

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
            x = x + self.o(attend(rotate(self.q(y), by), rotate(self.k(y), by), self.v(y)))
        with jax.named_scope("mlp"):
            y = rms_norm(x, self.mlp_norm[...], self.eps)
            return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class Outer(nnx.Module):
    """What stands before the first layer and after the last: embedding, final norm, language-model head."""

    def __init__(self, config: LlamaConfig, dtype: jnp.dtype, layout: Layout, *, rngs: nnx.Rngs):
        c = config
        normal = nnx.initializers.normal(0.02)
        self.embed = nnx.Param(normal(rngs.params(), (c.vocab_size, c.hidden_size), dtype))
        self.norm = nnx.Param(jnp.ones((c.hidden_size,), dtype))
        tied = c.tie_word_embeddings
        self.head = None if tied else nnx.Param(normal(rngs.params(), (c.vocab_size, c.hidden_size), dtype))
        self.eps = c.rms_norm_eps
        self.mesh, self.least_rows, self.turned = layout.mesh, layout.least_rows, layout.turned

    def embedding(self, tokens: jax.Array) -> jax.Array:
        """Token ids [B, T] -> float32 [B, T, E]."""
        if self.mesh is None:
            return self.embed[...][tokens].astype(jnp.float32)

        def shared(embed: jax.Array, tokens: jax.Array) -> jax.Array:
            at = tokens - lax.axis_index(TENSOR) * len(embed)
            here = (at >= 0) & (at < len(embed))
            return lax.psum(jnp.where(here[..., None], embed[jnp.where(here, at, 0)], 0), TENSOR)

        # By hand: for a lone token XLA would rather gather the whole table.
        rows = batch_letter(self.mesh, len(tokens))
        layouts = (spec("VE"), spec(f"{rows}T"))
        look_up = jax.shard_map(shared, mesh=self.mesh, in_specs=layouts, out_specs=spec(f"{rows}TE"), check_vma=False)
        return look_up(self.embed[...], tokens).astype(jnp.float32)

    def logits(self, x: jax.Array) -> jax.Array:
        """Float32 hidden states [B, E] of one token a row -> float32 [B, V]."""
        x = rms_norm(x, self.norm[...], self.eps)
        matrix = self.embed[...] if self.head is None else self.head[...]
        y = times_transposed(pad_rows(x, self.least_rows), matrix, turned=self.turned)
        return y[: len(x)]
