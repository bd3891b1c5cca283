"""The KV cache: keys, values and the position of every slot."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from specprefill_jax.models.config import LlamaConfig
from specprefill_jax.sharding.rules import batch_letter, spec

MIN_CAPACITY = 256
_COARSE = 16_384


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of a batch of prompts, compact: slot s holds the s-th token that was prefilled or decoded.

    Slots count what is stored; `positions` says where each token stood in its prompt (they differ after a sparse
    prefill). How many slots of a row are filled is the caller's to know and passed to every program that needs it.
    The layout lets a layer be updated in place and its heads be sharded without moving data.
    """

    k: jax.Array
    """[L, B, K, S, H] keys, after RoPE."""
    v: jax.Array
    """[L, B, K, S, H] values."""
    positions: jax.Array
    """[B, S] int32, position in the prompt of the token in each slot."""

    @property
    def capacity(self) -> int:
        """S, the number of slots a row has."""
        return self.k.shape[3]


def cache_spec(mesh: Mesh, batch: int) -> KVCache:
    """The layout of a cache over a mesh, for `jax.shard_map`: partition specs where a cache has arrays."""
    rows = batch_letter(mesh, batch)
    heads: Any = spec(f"L{rows}KSH")
    whole: Any = spec(f"{rows}S")
    return KVCache(heads, heads, whole)


def capacity_for(tokens: int) -> int:
    """Slots to allocate for `tokens`: the next power of two, so that few shapes are ever compiled.

    From 32,768 on the next multiple of 16,384, so that the memory of a long prompt is not doubled by its answer.
    """
    if tokens > 2 * _COARSE:
        return -(-tokens // _COARSE) * _COARSE
    return max(MIN_CAPACITY, 1 << (tokens - 1).bit_length())


def make_cache(config: LlamaConfig, batch: int, capacity: int, dtype: jnp.dtype, mesh: Mesh | None = None) -> KVCache:
    """An empty cache of `capacity` slots (zeros, positions 0), its rows and heads split over the mesh.

    Zeros matter: a masked slot contributes probability 0 times its value, so the value must be finite.
    """
    shape = (config.num_layers, batch, config.num_kv_heads, capacity, config.head_dim)
    heads = whole = None
    if mesh is not None:
        placed = jax.tree.map(partial(NamedSharding, mesh), cache_spec(mesh, batch))
        heads, whole = placed.k, placed.positions
    k, v = (jnp.zeros(shape, dtype, device=heads) for _ in range(2))
    return KVCache(k, v, jnp.zeros((batch, capacity), jnp.int32, device=whole))


@partial(jax.jit, donate_argnames="into")
def put_row(into: KVCache, row: KVCache, index: jax.Array) -> KVCache:
    """`into`, which is consumed, with row `index` (int32 scalar) from a cache of one row and no more slots."""

    def put(whole: jax.Array, part: jax.Array, batch_axis: int) -> jax.Array:
        return jax.lax.dynamic_update_slice(whole, part, [index if a == batch_axis else 0 for a in range(whole.ndim)])

    return KVCache(put(into.k, row.k, 1), put(into.v, row.v, 1), put(into.positions, row.positions, 0))
