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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, cast

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
from specprefill_jax.models import attention, paged, stacks
from specprefill_jax.models.checkpoint import Checkpoint
from specprefill_jax.models.config import DTYPES, LlamaConfig
from specprefill_jax.models.llama import Block, Layout, Outer
from specprefill_jax.models.paged import PagedCache, make_paged_cache, paged_spec
from specprefill_jax.models.rope import Rotation, frequencies, rotation
from specprefill_jax.models.stacks import Leaves
from specprefill_jax.models.weights import axes_of, copy_heads, float8_names
from specprefill_jax.sharding.mesh import NATIVE_FLOAT8, check_mesh, compute_capability, platform
from specprefill_jax.sharding.rules import TENSOR, batch_letter, check_divides, head_copies, sharding, spec

Cache = KVCache | PagedCache


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Weights:
    """All parameters as flat tuples: an argument of every compiled program."""

    outer: Leaves
    blocks: tuple[Leaves, ...]
    """Layerwise: one tuple a layer. Scanned: one tuple of stacked arrays [count, ...] a run of like layers."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Step:
    """What one forward pass leaves behind."""

    hidden: jax.Array
    """[B, E] float32 hidden state, after the last layer, of the token that was asked for in each row; or [B, W, E]."""
    queries: jax.Array | tuple[jax.Array, ...]
    """L arrays [B, N, H], or one stacked [L, B, N, H]: that token's queries, after RoPE, as attention used them; with a
    further axis W behind B where W were asked for."""
    cache: Any
    """The cache that was given, `KVCache` or `PagedCache`, with the new tokens in it."""


@dataclass(frozen=True)
class Run:
    """Consecutive layers of the same arrays, which one compiled program serves: as a rule all of them."""

    first: int
    count: int
    definition: nnx.GraphDef
    tree: jax.tree_util.PyTreeDef


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
        half = dtype in (jnp.bfloat16, jnp.float16)
        cudnn = half and compute_capability(mesh) >= (8, 0)
        self.fused_attention: Literal["cudnn", "xla"] | None = "cudnn" if cudnn else None
        """The fused kernel that prefills, see `attention.attend_fused`; None: `attention.attend`."""
        self._accelerator = platform(mesh) != "cpu"
        self._inv_freq, self._rope_scaling = frequencies(config.rope, config.head_dim)
        self._outer_def, self._outer_tree = _abstract(_outer(self.layout, dtype, mesh))
        self.runs = tuple(
            Run(first, count, *_abstract(_block(self.layout, dtype, mesh, first)))
            for first, count in like_layers(config)
        )
        """The layers, in order."""
        self._layers = [self.put(np.array(i, np.int32)) for i in range(config.num_layers)] if layerwise else []
        self._begin = jax.jit(self._begin_fn, donate_argnames="cache")
        block: dict[str, Any] = {"donate_argnames": ("x", "cache"), "static_argnames": "run"}
        self._block = self.jit(self._block_fn, **block)
        self._inner_block = jax.jit(self._block_fn, **block)  # JAX takes options of whole programs only
        self._take = jax.jit(_take_row)
        self.scanned = self.jit(self.run, donate_argnames="cache", static_argnames="every")
        """Compiled `run`, of a scanned model."""
        self.logits: Callable[[Weights, jax.Array], jax.Array] = self.jit(
            self.logits_fn, out_shardings=None if mesh is None else self.whole
        )
        """Compiled `logits_fn`."""

    def jit(self, function: Callable, **options: Any) -> Any:
        """`jax.jit` of a whole program of this model, compiled as suits its devices."""
        return jax.jit(function, compiler_options=compiler_options(self.mesh), **options)

    @property
    def native_float8_layers(self) -> int:
        """Layers whose feed-forward products are float8 ones."""
        if not multiplies_float8(self.mesh):
            return 0
        return sum(run.count for run in self.runs if {"gate", "up", "down"} <= float8_names(self.config, run.first))

    @property
    def whole(self) -> Sharding:
        """Where an array lies that every device of this model holds whole."""
        return self.weights.outer[0].sharding if self.mesh is None else NamedSharding(self.mesh, P())

    def put(self, array: np.ndarray) -> jax.Array:
        """An array of the host's, whole on every device of this model; every process must give the same one."""
        if self.mesh is None:
            return jnp.asarray(array)
        return jax.make_array_from_callback(array.shape, self.whole, lambda index: array[index])

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache in this model's dtype."""
        return make_cache(self.layout, batch, capacity, self.dtype, self.mesh)

    def new_pages(self, count: int) -> PagedCache:
        """An empty paged cache in this model's dtype, page 0 included in its `count` pages."""
        return make_paged_cache(self.layout, count, self.dtype, self.mesh)

    def step(
        self,
        tokens: ArrayLike,
        positions: ArrayLike,
        cache: Cache,
        start: ArrayLike,
        row: ArrayLike,
        *,
        every: bool = False,
    ) -> Step:
        """Run one forward pass from the host; the cache is consumed (donated) and comes back in the result.

        Args:
            tokens: [B, T] int32 token ids.
            positions: [B, T] int32 positions in the prompt.
            cache: where keys and values go; slots below `start` are attended to.
            start: [B] int32, slot of each row's first token; start + T must not exceed the capacity.
            row: [B] int32 in 0..T-1, the token of each row whose hidden state and queries are returned, or [B, W] of
                several.
            every: return the hidden states of all tokens, [B, T, E].
        """
        run = self.run if self.layerwise else self.scanned
        return run(self.weights, tokens, positions, cache, start, row, every=every)

    @contextlib.contextmanager
    def one_layer(self) -> Iterator[None]:
        """Within it a layerwise `step` runs one layer for all like it: to compile every program at little of the cost.

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
        cache: Cache,
        start: ArrayLike,
        row: ArrayLike,
        *,
        every: bool = False,
    ) -> Step:
        """The forward pass as a function of its weights, for use within another compiled program; see `step`."""
        x, by, cache = self._begin(weights.outer, tokens, positions, cache, start)
        if self.layerwise:
            queries = []
            block = self._inner_block if isinstance(x, jax.core.Tracer) else self._block
            for run in self.runs:
                for i in range(run.first, run.first + (1 if self._one_layer else run.count)):
                    x, cache, q = block(weights.blocks[i], x, by, cache, self._layers[i], start, row, run=run)
                    queries += [q] * (run.count if self._one_layer else 1)
            return Step(x if every else self._take(x, row), tuple(queries), cache)

        stacked = []
        for run, leaves in zip(self.runs, weights.blocks, strict=True):

            def body(
                carry: tuple[jax.Array, Cache], xs: Any, run: Run = run
            ) -> tuple[tuple[jax.Array, Cache], jax.Array]:
                x, cache, q = self._inner_block(xs[0], carry[0], by, carry[1], xs[1], start, row, run=run)
                return (x, cache), q

            layers = jnp.arange(run.first, run.first + run.count)
            (x, cache), q = lax.scan(body, (x, cache), (leaves, layers))
            stacked.append(q)
        hidden = x if every else self._take(x, row)
        return Step(hidden, jnp.concatenate(stacked) if len(stacked) > 1 else stacked[0], cache)

    def logits_fn(self, weights: Weights, hidden: jax.Array) -> jax.Array:
        """Next-token logits, float32 [B, V], of hidden states [B, E]."""
        return _merge(self._outer_def, self._outer_tree, weights.outer).logits(hidden)

    def _begin_fn(
        self, outer: Leaves, tokens: jax.Array, positions: jax.Array, cache: Cache, start: jax.Array
    ) -> tuple[jax.Array, Rotation, Cache]:
        x = _merge(self._outer_def, self._outer_tree, outer).embedding(tokens)
        if isinstance(cache, KVCache):
            stored = jax.vmap(lambda row, new, at: lax.dynamic_update_slice_in_dim(row, new, at, axis=0))
            cache = KVCache(cache.k, cache.v, stored(cache.positions, positions, start))
        return x, rotation(positions, self._inv_freq, self._rope_scaling), cache

    def _block_fn(
        self,
        leaves: Leaves,
        x: jax.Array,
        by: Rotation,
        cache: Cache,
        layer: jax.Array,
        start: jax.Array,
        row: jax.Array,
        *,
        run: Run,
    ) -> tuple[jax.Array, Cache, jax.Array]:
        block = _merge(run.definition, run.tree, leaves)
        seen: list = []

        def local(
            q: jax.Array, k: jax.Array, v: jax.Array, cache: Cache, layer: jax.Array, start: jax.Array
        ) -> tuple[Cache, jax.Array]:
            fused = self.fused_attention if q.shape[1] > 1 else None
            if isinstance(cache, PagedCache):
                pages = paged.write(cache, layer, start, k, v)
                if fused is not None and q.shape[1] > attention.FEW_TOKENS:
                    return pages, attention.attend_fused(q, k, v, paged.row(pages, layer), start, fused)
                return pages, paged.attend(q, pages, layer, start, accelerator=self._accelerator)
            written = attention.write(cache, layer, start, k, v)
            if fused is not None:
                return written, attention.attend_fused(q, k, v, attention.row(written, layer), start, fused)
            return written, attention.attend(q, written, layer, start, accelerator=self._accelerator)

        if self.mesh is not None:  # each device attends with its own heads; left to itself, XLA would gather them
            in_pages = isinstance(cache, PagedCache)
            rows = "b" if in_pages else batch_letter(self.mesh, len(x))
            cache_specs = paged_spec() if in_pages else cache_spec(self.mesh, len(x))
            q_spec, kv_spec = spec(f"{rows}TNH"), spec(f"{rows}TKH")
            arguments = (q_spec, kv_spec, kv_spec, cache_specs, P(), spec(rows))
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
        mesh: devices that share the model (`sharding.mesh.make_mesh`); each gets only its own slices.
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
    mesh = None if mesh is None else check_mesh(mesh)
    copies = (1, 1) if mesh is None else check_fits(mesh, config)
    layout, kind = _with_copies(config, copies), jnp.dtype(dtype)

    def place(name: str, array: np.ndarray) -> jax.Array:
        to = array.dtype if array.dtype == jnp.float8_e4m3fn else jnp.float32 if name.endswith("_scale") else kind
        if mesh is None:
            return jnp.asarray(np.asarray(array), to)  # what is not read yet is read here
        array, split = copy_heads(name, array, *copies), sharding(mesh, axes_of(name))
        placed = jax.make_array_from_callback(array.shape, split, lambda index: np.asarray(array[index]))
        return placed.astype(to)  # on the devices, which are quicker at it

    outer = _leaves(list(_shapes(_outer(layout, kind, mesh))), checkpoint.outer(), place)

    def layers(first: int, count: int) -> Iterator[Leaves]:
        names = list(_shapes(_block(layout, kind, mesh, first)))
        for i in range(first, first + count):
            yield _leaves(names, checkpoint.layer(i), place)
            if report is not None:
                report(i + 1, config.num_layers)

    def in_files(first: int, count: int) -> Iterator[dict[str, np.ndarray]]:
        for i in range(first, first + count):
            yield {name: copy_heads(name, array, *copies) for name, array in checkpoint.layer(i).items()}
            if report is not None:
                report(i + 1, config.num_layers)

    blocks: list[Leaves] = []
    for first, count in like_layers(config):
        if layerwise:
            blocks += layers(first, count)
        elif mesh is None or platform(mesh) != "cpu":
            blocks.append(stacks.stream(layers(first, count), count))
        else:
            shapes = _shapes(_block(layout, kind, mesh, first))
            blocks.append(stacks.read_in_place(in_files(first, count), count, shapes, mesh))
    return LoadedLlama(config, kind, Weights(outer, tuple(blocks)), layerwise=layerwise, layout=layout, mesh=mesh)


def abstract(config: LlamaConfig, dtype: str, mesh: Mesh) -> LoadedLlama:
    """A model with shapes and layouts in place of its parameters: to compile for devices that are not here.

    Args:
        config: the model.
        dtype: of its parameters that are not float8, its cache and its activations.
        mesh: the devices.

    Raises:
        ArgumentError: it cannot be split over the mesh.
    """
    layout, kind = _with_copies(config, check_fits(mesh, config)), jnp.dtype(dtype)

    def leaves(make: Callable[[nnx.Rngs], nnx.Module], *stacked: int) -> Leaves:
        out = []
        for name, shape in _shapes(make).items():
            placed = NamedSharding(mesh, P(*(None for _ in stacked), *spec(axes_of(name))))
            out.append(jax.ShapeDtypeStruct((*stacked, *shape.shape), shape.dtype, sharding=placed))
        return cast(Leaves, tuple(out))

    outer = leaves(_outer(layout, kind, mesh))
    blocks = tuple(leaves(_block(layout, kind, mesh, first), count) for first, count in like_layers(config))
    return LoadedLlama(config, kind, Weights(outer, blocks), layerwise=False, layout=layout, mesh=mesh)


def like_layers(config: LlamaConfig) -> list[tuple[int, int]]:
    """(first, count) of each run of consecutive layers that have the same arrays: the same matrices in float8."""
    kinds = [float8_names(config, i) for i in range(config.num_layers)]
    firsts = [i for i in range(len(kinds)) if i == 0 or kinds[i] != kinds[i - 1]]
    return [(first, end - first) for first, end in pairwise([*firsts, len(kinds)])]


def multiplies_float8(mesh: Mesh | None) -> bool:
    """Whether products of float8 matrices are float8 products on these devices; see `float8.product`."""
    return compute_capability(mesh) >= NATIVE_FLOAT8


def compiler_options(mesh: Mesh | None) -> dict[str, bool | int]:
    """XLA's options for a whole model's programs.

    On GPUs, library matrix products that read a layer's weights where they lie in the stack. Triton's, and products
    merged into one, have XLA copy them out of it first: three times the memory traffic of a decode step, and 0.2 GiB
    instead of 0.03 a device for a 70B model on eight (seen in programs compiled for H100).

    On CPUs, vectors as long as the machine has them; XLA's own choice stops at 256 bits.
    """
    options: dict[str, dict[str, bool | int]] = {
        "gpu": {"xla_gpu_enable_triton_gemm": False, "xla_gpu_dot_merger_threshold_mb": 0},
        "cpu": {"xla_cpu_prefer_vector_width": 512},
    }
    return options.get(platform(mesh), {})


def check_fits(mesh: Mesh, config: LlamaConfig) -> tuple[int, int]:
    """Check that a model can be split over a mesh; how often each query head and each key head is then held.

    Raises:
        ArgumentError: it cannot; says what can.
    """
    check_divides(mesh, {"F": config.intermediate_size, "V": config.vocab_size})
    return head_copies(mesh, config.num_heads, config.num_kv_heads)


def _take_row(x: jax.Array, row: jax.Array) -> jax.Array:
    """[B, T, ...] -> [B, ...], the entry row[b] of each b; or [B, W, ...] for row [B, W]."""
    if row.ndim == 2:
        return jax.vmap(lambda xb, r: xb[r])(x, row)
    return jax.vmap(lambda xb, r: lax.dynamic_index_in_dim(xb, r, keepdims=False))(x, row)


def _with_copies(config: LlamaConfig, copies: tuple[int, int]) -> LlamaConfig:
    """The sizes of a model as it lies on a mesh, its query and key heads repeated so often."""
    heads, kv_heads = config.num_heads * copies[0], config.num_kv_heads * copies[1]
    return dataclasses.replace(config, num_heads=heads, num_kv_heads=kv_heads)


def _outer(layout: LlamaConfig, dtype: jnp.dtype, mesh: Mesh | None) -> Callable[[nnx.Rngs], Outer]:
    """How what stands outside the layers is made."""
    return lambda rngs: Outer(layout, dtype, _layout(mesh), rngs=rngs)


def _block(layout: LlamaConfig, dtype: jnp.dtype, mesh: Mesh | None, index: int) -> Callable[[nnx.Rngs], Block]:
    """How layer `index` is made."""
    lies = _layout(mesh, float8_names(layout, index))
    return lambda rngs: Block(layout, dtype, lies, rngs=rngs)


def _layout(mesh: Mesh | None, float8: frozenset[str] = frozenset()) -> Layout:
    """How one of the modules lies on its devices."""
    return Layout(
        float8,
        native=multiplies_float8(mesh),
        mesh=mesh if mesh is not None and mesh.shape[TENSOR] > 1 else None,
        least_rows=8 if platform(mesh) == "gpu" else 1,
        turned=platform(mesh) == "cpu",
    )


def _abstract(make: Callable[[nnx.Rngs], nnx.Module]) -> tuple[nnx.GraphDef, jax.tree_util.PyTreeDef]:
    """The module's structure without any array: its graph definition and the tree its flat leaves belong to."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return graphdef, jax.tree.structure(state)


def _merge(graphdef: nnx.GraphDef, tree: jax.tree_util.PyTreeDef, leaves: Leaves) -> nnx.Module:
    return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))


def _leaves(
    names: list[str],
    arrays: dict[str, np.ndarray],
    place: Callable[[str, np.ndarray], jax.Array],
) -> Leaves:
    """Arrays by name, which are used up -> a module's flat leaves, of these names, where they belong."""
    # Popped: what is read is let go.
    with ThreadPoolExecutor(stacks.READERS) as pool:
        return tuple(pool.map(lambda name: place(name, arrays.pop(name)), names))


def _shapes(make: Callable[[nnx.Rngs], nnx.Module]) -> dict[str, Any]:
    """A module's flat leaves in its own order, shapes without arrays, by our names (`weights.Row.ours`)."""
    state = nnx.state(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    return {"_".join(path).removesuffix("_weight"): param for path, param in nnx.to_flat_state(state)}
