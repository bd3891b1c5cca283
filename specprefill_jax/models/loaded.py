"""A Llama on its devices: its parameters and the compiled programs that run them.

Modules are split from their state once. What is compiled are plain functions over flat tuples of arrays, and the
forward pass exists in two forms that share every line of math:

* scanned: layers are stacked [L, ...] and `lax.scan` runs them. One program holds the whole model, compiles in about a
  second however deep it is, and costs the host nothing per layer. For accelerators.
* layerwise: each layer keeps its own arrays and one compiled layer is called L times. For CPUs, where XLA copies a
  layer's weights out of the stack before it can multiply by them: as much memory traffic again as the weights
  themselves.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from specprefill_jax.cache import KVCache, cache_spec, make_cache
from specprefill_jax.errors import argument_error
from specprefill_jax.models import attention
from specprefill_jax.models.checkpoint import Checkpoint
from specprefill_jax.models.config import DTYPES, LlamaConfig
from specprefill_jax.models.llama import Block, Outer
from specprefill_jax.models.rope import Rotation, frequencies, rotation
from specprefill_jax.models.weights import axes_of, copy_heads
from specprefill_jax.sharding.rules import check_divides, head_copies, sharding, spec

Leaves = tuple[jax.Array, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    """All parameters as flat tuples: an argument of every compiled program."""

    outer: Leaves
    blocks: tuple[Leaves, ...] | Leaves
    """Layerwise: one tuple a layer. Scanned: one tuple of stacked arrays [L, ...]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """What one forward pass leaves behind."""

    hidden: jax.Array
    """[B, E] float32 hidden state, after the last layer, of the token that was asked for in each row."""
    queries: jax.Array | tuple[jax.Array, ...]
    """L arrays [B, N, H], or one stacked [L, B, N, H]: that token's queries, after RoPE, as attention used them."""
    cache: KVCache


class LoadedLlama:
    """A Llama ready to run; built by `load`."""

    def __init__(
        self,
        config: LlamaConfig,
        dtype: jnp.dtype,
        weights: Weights,
        *,
        layerwise: bool,
        layout: LlamaConfig | None = None,
        mesh: Mesh | None = None,
    ):
        self.config = config
        self.layout = layout or config
        """The sizes as they lie on the mesh: a head that it makes several devices hold is counted as often."""
        self.mesh = mesh
        self.dtype = dtype
        self.weights = weights
        self.layerwise = layerwise
        self._one_layer = False
        self._inv_freq, self._rope_scaling = frequencies(config.rope, config.head_dim)
        self._outer_def, self._outer_tree = _abstract(Outer, self.layout, dtype)
        self._block_def, self._block_tree = _abstract(Block, self.layout, dtype)
        self._layers = [jnp.int32(i) for i in range(config.num_layers)]
        self._begin = jax.jit(self._begin_fn, donate_argnames="cache")
        self._block = jax.jit(self._block_fn, donate_argnames=("x", "cache"))
        self._take = jax.jit(_take_row)
        self._scanned = jax.jit(self.run, donate_argnames="cache")
        self.logits: Callable[[Weights, jax.Array], jax.Array] = jax.jit(self.logits_fn)
        """Compiled `logits_fn`."""

    @property
    def whole(self) -> Sharding:
        """Where an array lies that every device of this model holds whole."""
        return self.weights.outer[0].sharding if self.mesh is None else NamedSharding(self.mesh, P())

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache in this model's dtype."""
        return make_cache(self.layout, batch, capacity, self.dtype, self.mesh)

    def step(self, tokens: ArrayLike, positions: ArrayLike, cache: KVCache, start: ArrayLike, row: ArrayLike) -> Step:
        """Run one forward pass from the host; the cache is consumed (donated) and comes back in the result.

        Args:
            tokens: [B, T] int32 token ids.
            positions: [B, T] int32 positions in the prompt.
            cache: where keys and values go; slots below `start` are attended to.
            start: [B] int32, slot of each row's first token; start + T must not exceed the capacity.
            row: [B] int32 in 0..T-1, the token of each row whose hidden state and queries are returned.
        """
        if not self.layerwise:
            return self._scanned(self.weights, tokens, positions, cache, start, row)
        if self._one_layer:
            weights = Weights(self.weights.outer, self.weights.blocks[:1])
            step = self.run(weights, tokens, positions, cache, start, row)
            return dataclasses.replace(step, queries=step.queries * self.config.num_layers)
        return self.run(self.weights, tokens, positions, cache, start, row)

    @contextlib.contextmanager
    def one_layer(self) -> Iterator[None]:
        """Within it a layerwise `step` runs one layer for all: to compile every program at little of the cost.

        Results have the right shapes and no meaning. A scanned model is not affected.
        """
        self._one_layer = True
        try:
            yield
        finally:
            self._one_layer = False

    def run(
        self,
        weights: Weights,
        tokens: ArrayLike,
        positions: ArrayLike,
        cache: KVCache,
        start: ArrayLike,
        row: ArrayLike,
    ) -> Step:
        """The forward pass as a function of its weights, for use within another compiled program; see `step`."""
        x, by, cache = self._begin(weights.outer, tokens, positions, cache, start)
        if self.layerwise:
            queries = []
            for layer, leaves in zip(self._layers, weights.blocks, strict=False):
                x, cache, q = self._block(leaves, x, by, cache, layer, start, row)
                queries.append(q)
            return Step(self._take(x, row), tuple(queries), cache)

        def body(carry: tuple[jax.Array, KVCache], xs: Any) -> tuple[tuple[jax.Array, KVCache], jax.Array]:
            x, cache, q = self._block(xs[0], carry[0], by, carry[1], xs[1], start, row)
            return (x, cache), q

        layers = jnp.arange(self.config.num_layers)
        (x, cache), stacked = lax.scan(body, (x, cache), (weights.blocks, layers))
        return Step(self._take(x, row), stacked, cache)

    def logits_fn(self, weights: Weights, hidden: jax.Array) -> jax.Array:
        """Next-token logits, float32 [B, V], of hidden states [B, E]."""
        return _merge(self._outer_def, self._outer_tree, weights.outer).logits(hidden)

    def _begin_fn(
        self, outer: Leaves, tokens: jax.Array, positions: jax.Array, cache: KVCache, start: jax.Array
    ) -> tuple[jax.Array, Rotation, KVCache]:
        x = _merge(self._outer_def, self._outer_tree, outer).embedding(tokens)
        if self.mesh is not None:
            x = lax.with_sharding_constraint(x, sharding(self.mesh, "BTE"))
        stored = jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, axis=0))
        cache = KVCache(cache.k, cache.v, stored(cache.positions, positions, start))
        return x, rotation(positions, self._inv_freq, self._rope_scaling), cache

    def _block_fn(
        self,
        leaves: Leaves,
        x: jax.Array,
        by: Rotation,
        cache: KVCache,
        layer: jax.Array,
        start: jax.Array,
        row: jax.Array,
    ) -> tuple[jax.Array, KVCache, jax.Array]:
        block = _merge(self._block_def, self._block_tree, leaves)
        seen: list = []

        def local(
            q: jax.Array, k: jax.Array, v: jax.Array, cache: KVCache, layer: jax.Array, start: jax.Array
        ) -> tuple[KVCache, jax.Array]:
            written = attention.write(cache, layer, start, k, v)
            return written, attention.attend(q, written, layer, start)

        if self.mesh is not None:  # each device attends with its own heads; left to itself, XLA would gather them
            q_spec, kv_spec, cache_specs = spec("BTNH"), spec("BTKH"), cache_spec()
            arguments = (q_spec, kv_spec, kv_spec, cache_specs, P(), P())
            local = jax.shard_map(
                local, mesh=self.mesh, in_specs=arguments, out_specs=(cache_specs, q_spec), check_vma=False
            )

        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            written, out = local(q, k, v, cache, layer, start)
            seen.extend((written, _take_row(q, row)))
            return out

        x = block(x, by, attend)
        return x, seen[0], seen[1]


def load(
    checkpoint: Checkpoint,
    dtype: str,
    *,
    num_layers: int | None = None,
    layerwise: bool | None = None,
    mesh: Mesh | None = None,
    report: Callable[[int, int], None] | None = None,
) -> LoadedLlama:
    """Read a checkpoint's parameters onto the default device, or split over a mesh.

    Args:
        checkpoint: an opened checkpoint.
        dtype: float32, bfloat16 or float16: of parameters, cache and activations.
        num_layers: use only the first so many layers (all of them when None).
        layerwise: the form of the forward pass (see the module); by default layerwise on one CPU, scanned elsewhere.
        mesh: devices that share the model along the axis `tensor`; each gets only its own slices.
        report: called with (layers read, layers in all) as loading goes on.
    """
    if dtype not in DTYPES:
        raise argument_error("dtype", dtype, f"one of {', '.join(DTYPES)}")
    config = checkpoint.config
    if num_layers is not None:
        if not 1 <= num_layers <= config.num_layers:
            raise argument_error("num_layers", num_layers, f"from 1 to the checkpoint's {config.num_layers}")
        config = dataclasses.replace(config, num_layers=num_layers)
    if layerwise is None:
        layerwise = jax.default_backend() == "cpu" and mesh is None
    copies = (1, 1) if mesh is None else check_fits(mesh, config)
    layout = dataclasses.replace(
        config, num_heads=config.num_heads * copies[0], num_kv_heads=config.num_kv_heads * copies[1]
    )
    kind = jnp.dtype(dtype)

    def place(name: str, array: np.ndarray) -> jax.Array:
        if mesh is None:
            return jnp.asarray(np.asarray(array), kind)  # what is not read yet is read here
        array = copy_heads(name, array, *copies)
        split = sharding(mesh, axes_of(name))
        return jax.make_array_from_callback(array.shape, split, lambda index: np.asarray(array[index], kind))

    outer = _leaves(Outer, layout, kind, checkpoint.outer(), place)

    def layers() -> Iterator[Leaves]:
        for i in range(config.num_layers):
            yield _leaves(Block, layout, kind, checkpoint.layer(i), place)
            if report is not None:
                report(i + 1, config.num_layers)

    blocks: tuple[Leaves, ...] | Leaves = tuple(layers()) if layerwise else _stack(layers(), config.num_layers)
    return LoadedLlama(config, kind, Weights(outer, blocks), layerwise=layerwise, layout=layout, mesh=mesh)


def check_fits(mesh: Mesh, config: LlamaConfig) -> tuple[int, int]:
    """Check that a model can be split over a mesh; how often each query head and each key head is then held.

    Raises:
        ArgumentError: it cannot; says what can.
    """
    check_divides(mesh, {"F": config.intermediate_size, "V": config.vocab_size})
    return head_copies(mesh, config.num_heads, config.num_kv_heads)


def _take_row(x: jax.Array, row: jax.Array) -> jax.Array:
    """[B, T, ...] -> [B, ...], the entry row[b] of each b."""
    return jax.vmap(lambda xb, r: lax.dynamic_index_in_dim(xb, r, keepdims=False))(x, row)


def _abstract(kind: type[nnx.Module], config: LlamaConfig, dtype: jnp.dtype) -> tuple:
    """The module's structure without any array: its graph definition and the tree its flat leaves belong to."""
    module = nnx.eval_shape(lambda: kind(config, dtype, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(module)
    return graphdef, jax.tree.structure(state)


def _merge(graphdef: nnx.GraphDef, tree: jax.tree_util.PyTreeDef, leaves: Leaves) -> nnx.Module:
    return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))


def _leaves(
    kind: type[nnx.Module],
    config: LlamaConfig,
    dtype: jnp.dtype,
    arrays: dict[str, np.ndarray],
    place: Callable[[str, np.ndarray], jax.Array],
) -> Leaves:
    """Arrays by name -> the module's flat leaves in its own order, cast and where they belong."""
    state = nnx.state(nnx.eval_shape(lambda: kind(config, dtype, rngs=nnx.Rngs(0))))
    paths = [path for path, _ in nnx.to_flat_state(state)]
    return tuple(place(str(path[-1]), arrays[path[-1]]) for path in paths)


@partial(jax.jit, donate_argnums=0)
def _set_layer(stack: Leaves, layer: jax.Array, leaves: Leaves) -> Leaves:
    return tuple(lax.dynamic_update_index_in_dim(s, x, layer, 0) for s, x in zip(stack, leaves, strict=True))


def _empty_stack(x: jax.Array, count: int) -> jax.Array:
    """Zeros [count, ...] of arrays like x, laid out as it is."""
    layout = x.sharding
    if isinstance(layout, NamedSharding):
        layout = NamedSharding(layout.mesh, P(None, *layout.spec))
    return jnp.zeros((count, *x.shape), x.dtype, device=layout)


def _stack(layers: Iterator[Leaves], count: int) -> Leaves:
    """Stream layers into stacked buffers, so that at most one layer is held twice."""
    stack: Leaves | None = None
    for i, leaves in enumerate(layers):
        if stack is None:
            stack = tuple(_empty_stack(x, count) for x in leaves)
        stack = _set_layer(stack, jnp.int32(i), leaves)
    assert stack is not None
    return stack
