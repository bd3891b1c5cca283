"""What a prompt costs: FLOPs, bytes, bytes between devices and, from a machine's rates, seconds.

A multiply-add is 2 FLOPs. Causal attention is counted as it must be done, not as a full square. Left out, being under
a percent together: norms, RoPE, softmax, embedding look-up, biases. Communication between devices is counted where the
machine has a rate for it.
"""

from dataclasses import dataclass, fields
from typing import Protocol

from specprefill_jax.config import check_integer, check_real
from specprefill_jax.errors import argument_error


class ModelShape(Protocol):
    """The numbers of a Llama that decide its cost; `models.config.LlamaConfig` has them."""

    @property
    def vocab_size(self) -> int:
        """V, rows of the output head."""
        ...

    @property
    def hidden_size(self) -> int:
        """E, numbers of a token's state."""
        ...

    @property
    def intermediate_size(self) -> int:
        """F, numbers inside the feed-forward part."""
        ...

    @property
    def num_layers(self) -> int:
        """L."""
        ...

    @property
    def num_heads(self) -> int:
        """N, query heads."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """K, key and value heads."""
        ...

    @property
    def head_dim(self) -> int:
        """H, numbers of a head."""
        ...


@dataclass(frozen=True)
class Machine:
    """A machine's rates, as reached and not as printed on a data sheet; with n devices, n times one's."""

    flops_per_s: float
    """A plain matrix product's."""
    bytes_per_s: float
    """A plain read's."""
    attention_flops_per_s: float | None = None
    """Attention's in a prefill; None: as other products."""
    fp8_flops_per_s: float | None = None
    """Products of float8 matrices; None: as other products."""
    devices: int = 1
    """How many share each model by tensor parallelism."""
    link_bytes_per_s: float | None = None
    """Bytes that each device sends to the others meanwhile, n devices or two; None: communication takes no time."""

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bytes_per_s", "attention_flops_per_s", "fp8_flops_per_s", "link_bytes_per_s"):
            value = getattr(self, name)
            if value is not None or name in ("flops_per_s", "bytes_per_s"):
                value = check_real(name, value, "a finite number above 0", lambda x: x > 0)
                object.__setattr__(self, name, value)
        object.__setattr__(self, "devices", check_integer("devices", self.devices, 1))


@dataclass(frozen=True)
class Efficiency:
    """Shares, above 0 and up to 1, of a data sheet's rates that programs reach. The defaults are assumptions."""

    matmul: float = 0.65
    """Products of bfloat16 matrices: more than a whole training run's 0.4 on H100s (arXiv 2407.21783, table 4), less
    than the largest products alone."""
    fp8_matmul: float = 0.65
    """Products of float8 matrices; that rounding activations to float8 takes time is not counted."""
    attention: float = 0.35
    """FlashAttention-2's on an H100, as arXiv 2407.08608 gives it beside its own 0.75."""
    memory: float = 0.8
    """Reads of weights and caches."""
    link: float = 0.7
    """All-reduces within a node."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            value = check_real(field.name, value, "a number above 0 and up to 1", lambda x: 0 < x <= 1)
            object.__setattr__(self, field.name, value)


@dataclass(frozen=True)
class Device:
    """One accelerator by its data sheet."""

    name: str
    flops_per_s: float
    """Bfloat16 matrix products, without structured sparsity."""
    fp8_flops_per_s: float
    """Float8 matrix products, likewise."""
    bytes_per_s: float
    """Its memory's."""
    link_bytes_per_s: float
    """To the other devices of its node, one way."""
    memory_bytes: float

    def machine(self, count: int, efficiency: Efficiency) -> Machine:
        """The rates that `count` of them reach together."""
        return Machine(
            count * self.flops_per_s * efficiency.matmul,
            count * self.bytes_per_s * efficiency.memory,
            count * self.flops_per_s * efficiency.attention,
            count * self.fp8_flops_per_s * efficiency.fp8_matmul,
            count,
            self.link_bytes_per_s * efficiency.link,
        )


H100 = Device("H100 SXM", 989e12, 1979e12, 3.35e12, 450e9, 80e9)
"""NVIDIA H100 SXM, 80 GB; NVLink's 900 GB/s are both ways together."""
H200 = Device("H200 SXM", 989e12, 1979e12, 4.8e12, 450e9, 141e9)
"""NVIDIA H200 SXM: an H100 with more and faster memory."""
CPU = Machine(115e9, 15e9)
"""Two cores, float32, as measured where this package was first built: 7.7 FLOPs a byte."""
ACCELERATOR = Machine(H100.flops_per_s, H100.bytes_per_s)
"""One H100 SXM, bfloat16, by its data sheet: 295 FLOPs a byte. Only the ratio matters to a predicted gain."""


def default_machine(platform: str) -> Machine:
    """The rates assumed where none were measured, for a JAX platform name: `CPU` for "cpu", else `ACCELERATOR`."""
    return CPU if platform == "cpu" else ACCELERATOR


def mlp_parameters(shape: ModelShape) -> int:
    """Weights of one layer's feed-forward matrices: gate, up, down."""
    return 3 * shape.hidden_size * shape.intermediate_size


def layer_parameters(shape: ModelShape) -> int:
    """Weights of one layer's matrices: q, k, v, o, gate, up, down."""
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    return attention + mlp_parameters(shape)


def attention_flops(shape: ModelShape, num_tokens: int) -> int:
    """FLOPs of a prefill's attention: token i (from 0) attends to i + 1 tokens, 4 * N * H * (i + 1) FLOPs a layer."""
    tokens = check_integer("num_tokens", num_tokens, 0)
    return shape.num_layers * 4 * shape.num_heads * shape.head_dim * (tokens * (tokens + 1) // 2)


def prefill_flops(shape: ModelShape, num_tokens: int, *, head_tokens: int = 1) -> int:
    """FLOPs to read `num_tokens` tokens into an empty cache; sparse prefill is this for the kept tokens.

    `attention_flops` are part of it; the output head is counted for `head_tokens` tokens (0 for a speculator without
    look-ahead).
    """
    tokens = check_integer("num_tokens", num_tokens, 0)
    linear = shape.num_layers * 2 * layer_parameters(shape) * tokens
    return linear + attention_flops(shape, tokens) + 2 * shape.hidden_size * shape.vocab_size * head_tokens


def decode_flops(shape: ModelShape, context: int) -> int:
    """FLOPs of one decode step that attends to `context` tokens, itself among them."""
    check_integer("context", context, 1)
    attention = 4 * shape.num_heads * shape.head_dim * context
    return shape.num_layers * (2 * layer_parameters(shape) + attention) + 2 * shape.hidden_size * shape.vocab_size


def weight_bytes(shape: ModelShape, bytes_per_param: float, fp8_layers: int = 0) -> float:
    """Bytes of the weights one forward pass reads: all layers and the output head; embedding rows are nothing.

    In `fp8_layers` layers the feed-forward matrices are float8: a byte each, their scales being nothing.
    """
    fp8 = fp8_layers * mlp_parameters(shape)
    other = shape.num_layers * layer_parameters(shape) + shape.hidden_size * shape.vocab_size - fp8
    return other * bytes_per_param + fp8


def key_bytes(shape: ModelShape, num_tokens: int, bytes_per_value: float) -> float:
    """Bytes of the keys of `num_tokens` tokens in all layers; the values take as many again."""
    return shape.num_layers * shape.num_kv_heads * shape.head_dim * num_tokens * bytes_per_value


def decode_bytes(
    shape: ModelShape, context: int, bytes_per_param: float, bytes_per_value: float | None = None
) -> float:
    """Bytes one decode step reads: weights, and `context` tokens' keys and values at `bytes_per_value` a number."""
    check_integer("context", context, 1)
    cache = bytes_per_param if bytes_per_value is None else bytes_per_value
    return weight_bytes(shape, bytes_per_param) + 2 * key_bytes(shape, context, cache)


def scoring_flops(shape: ModelShape, num_tokens: int, num_queries: int) -> int:
    """FLOPs of importance scoring: query-key products of every layer and head, in two passes over the keys."""
    return 4 * shape.num_layers * shape.num_heads * shape.head_dim * num_queries * num_tokens


def all_reduce_bytes(num_values: float, devices: int, bytes_per_value: float) -> float:
    """Bytes that each device sends while an array is added up over all: 2 * (n - 1) / n of it, by a ring."""
    return 2 * (devices - 1) / devices * num_values * bytes_per_value


def collective_bytes(
    shape: ModelShape, num_tokens: int, devices: int, bytes_per_param: float, sum_bytes: float = 2.0
) -> float:
    """Bytes that each device sends in a forward pass of `num_tokens` tokens split over `devices`.

    Two all-reduces of [tokens, E] a layer, `sum_bytes` a number, and one for the embedding, in its dtype. This package
    adds up in the model's dtype: 2 bytes in bfloat16, whether or not matrices are float8, and 4 in float32.
    """
    states = num_tokens * shape.hidden_size
    layers = 2 * shape.num_layers * all_reduce_bytes(states, devices, sum_bytes)
    return layers + all_reduce_bytes(states, devices, bytes_per_param)


def flop_ceiling(main: ModelShape, speculator: ModelShape, num_tokens: int, kept_tokens: int) -> float:
    """The speed-up FLOPs alone allow: dense / (speculator + sparse) prefill; no look-ahead, no scoring."""
    _check_kept(num_tokens, kept_tokens)
    sparse = prefill_flops(speculator, num_tokens) + prefill_flops(main, kept_tokens)
    return prefill_flops(main, num_tokens) / sparse


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds to the first token, by phase; host work is not in it."""

    dense: float
    """The main model reads everything."""
    speculate: float
    """The speculator reads everything."""
    look_ahead: float
    """Its decode steps, one fewer than the queries, and under keep rate "auto" its passes to check itself."""
    score: float
    """Two passes over its keys."""
    sparse: float
    """The main model reads the kept tokens."""

    @property
    def total(self) -> float:
        """Seconds of the sparse way: speculate + look_ahead + score + sparse."""
        return self.speculate + self.look_ahead + self.score + self.sparse

    @property
    def gain(self) -> float:
        """Speed-up of the first token: dense / total."""
        return self.dense / self.total


def predict(
    main: ModelShape,
    speculator: ModelShape,
    num_tokens: int,
    kept_tokens: int,
    look_ahead: int,
    machine: Machine,
    *,
    query_window: int = 0,
    checks: int = 0,
    main_bytes: float = 2.0,
    speculator_bytes: float = 2.0,
    main_fp8_layers: int = 0,
    batch: int = 1,
    chunk: int | None = None,
    sum_bytes: float = 2.0,
) -> Prediction:
    """Predict the phases of a batch of equally long prompts, from its start until all have their first token.

    Each phase takes the longer of its FLOPs and its bytes at the machine's rates, and then its communication: XLA does
    not overlap an all-reduce with the products around it unless told to.

    Args:
        main, speculator: the two models' shapes.
        num_tokens: tokens of a prompt.
        kept_tokens: tokens of it that the main model reads, 1 to num_tokens.
        look_ahead: queries; look_ahead - 1 decode steps, each bound by weight and cache bytes.
        machine: measured rates, `default_machine`, or a `Device`'s.
        query_window: queries of the prompt's own last tokens in place of a look-ahead: no decode steps. 0: none.
        checks: passes over the look-ahead's tokens with a part of the cache (`self_check`), at most as long as that of
            the kept tokens.
        main_bytes, speculator_bytes: bytes a weight (and a cached number): 4 float32, 2 bfloat16, 1 float8.
        main_fp8_layers: layers of the main model whose feed-forward matrices are float8, and nothing else of them.
        batch: prompts.
        chunk: tokens of each prompt that a pass reads, the weights being read once a pass; None: all of them.
        sum_bytes: bytes a number in which devices add up a layer's products, 4 for float32 (`collective_bytes`).
    """
    _check_kept(num_tokens, kept_tokens)
    queries = check_integer("query_window", query_window, 0) or check_integer("look_ahead", look_ahead, 1)
    steps = 0 if query_window else queries - 1
    for name, value in (("main_bytes", main_bytes), ("speculator_bytes", speculator_bytes), ("sum_bytes", sum_bytes)):
        check_real(name, value, "a finite number above 0", lambda x: x > 0)
    check_integer("main_fp8_layers", main_fp8_layers, 0, main.num_layers)
    rows = check_integer("batch", batch, 1)
    chunk = num_tokens if chunk is None else check_integer("chunk", chunk, 1)
    # What a FLOP of attention or in float8 takes, in plain ones.
    attention_flop = machine.flops_per_s / (machine.attention_flops_per_s or machine.flops_per_s)
    fp8_flop = machine.flops_per_s / (machine.fp8_flops_per_s or machine.flops_per_s)

    def seconds(flops: float, read: float, sent: float) -> float:
        busy = max(flops / machine.flops_per_s, read / machine.bytes_per_s)
        return busy if machine.link_bytes_per_s is None else busy + sent / machine.link_bytes_per_s

    def sent_bytes(shape: ModelShape, tokens: int, bytes_per_param: float) -> float:
        return collective_bytes(shape, rows * tokens, machine.devices, bytes_per_param, sum_bytes)

    def read(shape: ModelShape, tokens: int, bytes_per_param: float, fp8_layers: int = 0, heads: int = 1) -> float:
        attention = attention_flops(shape, tokens)
        fp8 = 2 * fp8_layers * mlp_parameters(shape) * tokens
        plain = prefill_flops(shape, tokens, head_tokens=heads) - attention - fp8
        flops = plain + attention * attention_flop + fp8 * fp8_flop
        weights = -(-tokens // chunk) * weight_bytes(shape, bytes_per_param, fp8_layers)
        return seconds(rows * flops, weights, sent_bytes(shape, tokens, bytes_per_param))

    def step(context: int, tokens: int = 1) -> float:
        cache = 2 * key_bytes(speculator, context, speculator_bytes)
        moved = weight_bytes(speculator, speculator_bytes) + rows * cache
        flops = tokens * decode_flops(speculator, context)
        return seconds(rows * flops, moved, sent_bytes(speculator, tokens, speculator_bytes))

    return Prediction(
        dense=read(main, num_tokens, main_bytes, main_fp8_layers),
        speculate=read(speculator, num_tokens, speculator_bytes, heads=1 if steps else 0),
        look_ahead=sum(step(num_tokens + index) for index in range(1, steps + 1))
        + check_integer("checks", checks, 0) * step(kept_tokens, queries),
        score=seconds(
            rows * scoring_flops(speculator, num_tokens, queries),
            rows * 2 * key_bytes(speculator, num_tokens, speculator_bytes),
            all_reduce_bytes(rows * queries * num_tokens, machine.devices, 4),
        ),
        sparse=read(main, kept_tokens, main_bytes, main_fp8_layers),
    )


def predicted_gain(
    main: ModelShape,
    speculator: ModelShape,
    num_tokens: int,
    kept_tokens: int,
    look_ahead: int,
    *,
    flops_per_s: float | None = None,
    bytes_per_s: float | None = None,
    main_bytes: float = 2.0,
    speculator_bytes: float = 2.0,
) -> float:
    """Predicted speed-up of the first token; see `predict`. Rates: both, or neither for those of `ACCELERATOR`."""
    if (flops_per_s is None) != (bytes_per_s is None):
        name, value = ("flops_per_s", flops_per_s) if bytes_per_s is None else ("bytes_per_s", bytes_per_s)
        raise argument_error(name, value, "given together with the other rate, or not at all")
    machine = ACCELERATOR if flops_per_s is None or bytes_per_s is None else Machine(flops_per_s, bytes_per_s)
    return predict(
        main,
        speculator,
        num_tokens,
        kept_tokens,
        look_ahead,
        machine,
        main_bytes=main_bytes,
        speculator_bytes=speculator_bytes,
    ).gain


def _check_kept(num_tokens: int, kept_tokens: int) -> None:
    check_integer("kept_tokens", kept_tokens, 1, check_integer("num_tokens", num_tokens, 1))
