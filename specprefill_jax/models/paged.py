"""A KV cache in pages that many requests share, and attention over it.

A page holds PAGE consecutive slots of one request, in every layer and head; a request's row of `tables` says which
pages are its own, in order. Page 0 belongs to nobody: padding is written there, and the entries of a table past a
request's own pages point to it. Attention is causal over slots, as in `attention`.

Letters: as in `attention`; P pages, W pages of a table's row.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as PSpec

from specprefill_jax.models import attention
from specprefill_jax.models.config import LlamaConfig
from specprefill_jax.sharding.rules import spec

PAGE = 32
"""Slots of a page: as many as tokens of a chunk that is kept or dropped whole, by default."""

DECODE_PAGES = 16
ACCELERATOR_DECODE_PAGES = 512


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PagedCache:
    """Keys and values in pages, and the rows of one batch; a row's slot s lies in its page s // PAGE.

    The layout lets one page of one layer be updated in place, heads be sharded without moving data, and is the one
    that JAX's own paged-attention kernels take once L and P are merged.
    """

    k: jax.Array
    """[K, L, P, PAGE, H] keys, after RoPE."""
    v: jax.Array
    """[K, L, P, PAGE, H] values."""
    tables: jax.Array
    """[B, W] int32 pages of each row, in the order of its slots; 0 where there is none."""

    @property
    def num_pages(self) -> int:
        """P, page 0 included."""
        return self.k.shape[2]

    def of(self, tables: jax.Array) -> "PagedCache":
        """The same pages with the rows of another batch."""
        return PagedCache(self.k, self.v, tables)


def paged_spec() -> PagedCache:
    """The layout of a paged cache over a mesh, for `jax.shard_map`: heads are split, rows are whole everywhere."""
    pages: Any = spec("KLpsH")
    rows: Any = PSpec()
    return PagedCache(pages, pages, rows)


def make_paged_cache(config: LlamaConfig, num_pages: int, dtype: jnp.dtype, mesh: Mesh | None = None) -> PagedCache:
    """An empty cache of `num_pages` pages, page 0 included, and no rows; its heads are split over the mesh."""
    shape = (config.num_kv_heads, config.num_layers, num_pages, PAGE, config.head_dim)
    pages = rows = None
    if mesh is not None:
        placed = jax.tree.map(partial(NamedSharding, mesh), paged_spec())
        pages, rows = placed.k, placed.tables
    # Zeros: a masked slot contributes probability 0 times its value, so the value must be finite.
    k, v = (jnp.zeros(shape, dtype, device=pages) for _ in range(2))
    return PagedCache(k, v, jnp.zeros((0, 0), jnp.int32, device=rows))


def write(cache: PagedCache, layer: jax.Array, start: jax.Array, k: jax.Array, v: jax.Array) -> PagedCache:
    """Store k and v [B, T, K, H] of one layer in slots start[b] .. start[b]+T-1, in place where the cache is donated.

    Where T is a multiple of PAGE, start must be one, too: whole pages are written.
    """
    batch, tokens, heads, size = k.shape

    def put(into: jax.Array, new: jax.Array) -> jax.Array:
        new = new.astype(into.dtype)
        if tokens % PAGE == 0:
            pages = jax.vmap(lambda row, at: lax.dynamic_slice_in_dim(row, at // PAGE, tokens // PAGE))(
                cache.tables, start
            )
            # [B, T, K, H] -> [K, B * T/PAGE, PAGE, H]
            new = new.reshape(batch * (tokens // PAGE), PAGE, heads, size).transpose(2, 0, 1, 3)
            at: tuple = (layer, pages.reshape(-1))
        else:
            slots = start[:, None] + jnp.arange(tokens)
            page = jnp.take_along_axis(cache.tables, slots // PAGE, axis=1)
            # [B, T, K, H] -> [K, B * T, H]
            new = new.reshape(batch * tokens, heads, size).swapaxes(0, 1)
            at = (layer, page.reshape(-1), (slots % PAGE).reshape(-1))
        if batch * tokens == 1:  # a slice is quicker than a scatter of one
            return lax.dynamic_update_slice(into, new[:, None, None], (0, layer, at[1][0], at[2][0], 0))
        return into.at[:, *at].set(new)

    return PagedCache(put(cache.k, k), put(cache.v, v), cache.tables)


def attend(q: jax.Array, cache: PagedCache, layer: jax.Array, start: jax.Array, *, accelerator: bool) -> jax.Array:
    """Attention of queries in slots start[b] .. start[b]+T-1 over the slots up to their own.

    Args:
        q: [B, T, N, H] queries after RoPE; their keys and values are already in the cache.
        cache: the cache, of which layer `layer` (int32 scalar) is read.
        start: [B] int32, slot of the first query of each row.
        accelerator: whether rows are looked at all at once, in long steps, or one after the other, each as far as it
            is filled.

    Returns:
        [B, T, N, H] in q's dtype.
    """
    if q.shape[1] <= attention.FEW_TOKENS:
        return _attend_few(q, cache, layer, start, accelerator)

    def keys(b: jax.Array, head: jax.Array, slot: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        slots = slot + jnp.arange(count)
        # Slots past the table's are masked, so whichever page stands in for theirs will do.
        page = jnp.take(cache.tables[b], slots // PAGE, mode="clip")
        at = (head, layer, page, slots % PAGE)
        return cache.k[at], cache.v[at]

    return attention.attend_blocks(q, keys, start, cache.k.shape[0], cache.tables.shape[1] * PAGE)


def row(cache: PagedCache, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values of one layer, in the order of slots: each [B, W * PAGE, K, H]."""

    def gathered(pages: jax.Array) -> jax.Array:
        # [K, B, W, PAGE, H] -> [B, W * PAGE, K, H]
        x = pages[:, layer, cache.tables]
        return x.transpose(1, 2, 3, 0, 4).reshape(len(cache.tables), -1, pages.shape[0], pages.shape[4])

    return gathered(cache.k), gathered(cache.v)


def _attend_few(q: jax.Array, cache: PagedCache, layer: jax.Array, start: jax.Array, accelerator: bool) -> jax.Array:
    tokens, size = q.shape[1], q.shape[3]
    kv_heads, width = cache.k.shape[0], cache.tables.shape[1]
    pages = min(ACCELERATOR_DECODE_PAGES if accelerator else DECODE_PAGES, width)
    blocks = -(-width // pages)
    tables = jnp.pad(cache.tables, ((0, 0), (0, blocks * pages - width)))
    q = attention.by_key_head(q, kv_heads)
    token = attention.token_of(q, tokens)

    def one(q: jax.Array, table: jax.Array, start: jax.Array) -> jax.Array:
        """One row: [K, T * G, H] -> float32 [K, T * G, H]."""

        def step(j: jax.Array, carry: attention.Carry) -> attention.Carry:
            # [pages] -> [K, pages, PAGE, H] -> [K, S, H]
            at = lax.dynamic_slice_in_dim(table, j * pages, pages)
            k, v = (x[:, layer, at].reshape(kv_heads, pages * PAGE, size) for x in (cache.k, cache.v))
            seen = j * pages * PAGE + jnp.arange(pages * PAGE) <= (start + token)[:, None]
            return attention.seen_more(q, k, v, carry, seen)

        carry = attention.nothing_seen(q)
        _, total, out = lax.fori_loop(0, (start + tokens - 1) // (pages * PAGE) + 1, step, carry)
        return out / total[..., None]

    rows = (q, tables, start)
    out = jax.vmap(one)(*rows) if accelerator else lax.map(lambda row: one(*row), rows)
    return attention.by_token(out.astype(q.dtype), tokens)
