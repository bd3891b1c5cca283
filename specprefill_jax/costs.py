"""What a prompt costs: FLOPs, bytes and, from a machine's two rates, seconds.

A multiply-add is 2 FLOPs. Causal attention is counted as it must be done, not as a full square. Left out, being under
a percent together: norms, RoPE, softmax, embedding look-up, biases, and communication between devices.
"""

from dataclasses import dataclass
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
    """A machine's two rates, as reached by a plain matrix product and a plain read; with n devices, n times that."""

    flops_per_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        for name in ("flops_per_s", "bytes_per_s"):
            value = check_real(name, getattr(self, name), "a finite number above 0", lambda x: x > 0)
            object.__setattr__(self, name, value)


CPU = Machine(115e9, 15e9)
"""Two cores, float32, as measured where this package was first built: 7.7 FLOPs a byte."""
ACCELERATOR = Machine(989e12, 3.35e12)
"""One H100 SXM, bfloat16, by its data sheet: 295 FLOPs a byte. Only the ratio matters to a predicted gain."""


def default_machine(platform: str) -> Machine:
    """The rates assumed where none were measured, for a JAX platform name: `CPU` for "cpu", else `ACCELERATOR`."""
    return CPU if platform == "cpu" else ACCELERATOR


def layer_parameters(shape: ModelShape) -> int:
    """Weights of one layer's matrices: q, k, v, o, gate, up, down."""
    attention = 2 * shape.hidden_size * shape.head_dim * (shape.num_heads + shape.num_kv_heads)
    return attention + 3 * shape.hidden_size * shape.intermediate_size


def prefill_flops(shape: ModelShape, num_tokens: int, *, head_tokens: int = 1) -> int:
    """FLOPs to read `num_tokens` tokens into an empty cache; sparse prefill is this for the kept tokens.

    Token i (from 0) attends to i + 1 tokens, 4 * N * H * (i + 1) FLOPs a layer; the output head is counted for
    `head_tokens` tokens (0 for a speculator without look-ahead).
    """
    tokens = check_integer("num_tokens", num_tokens, 0)
    linear = 2 * layer_parameters(shape) * tokens
    attention = 4 * shape.num_heads * shape.head_dim * (tokens * (tokens + 1) // 2)
    return shape.num_layers * (linear + attention) + 2 * shape.hidden_size * shape.vocab_size * head_tokens


def decode_flops(shape: ModelShape, context: int) -> int:
    """FLOPs of one decode step that attends to `context` tokens, itself among them."""
    check_integer("context", context, 1)
    attention = 4 * shape.num_heads * shape.head_dim * context
    return shape.num_layers * (2 * layer_parameters(shape) + attention) + 2 * shape.hidden_size * shape.vocab_size


def weight_bytes(shape: ModelShape, bytes_per_param: float) -> float:
    """Bytes of the weights one forward pass reads: all layers and the output head; embedding rows are nothing."""
    return (shape.num_layers * layer_parameters(shape) + shape.hidden_size * shape.vocab_size) * bytes_per_param


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


def flop_ceiling(main: ModelShape, speculator: ModelShape, num_tokens: int, kept_tokens: int) -> float:
    """The speed-up FLOPs alone allow: dense / (speculator + sparse) prefill; no look-ahead, no scoring."""
    _check_kept(num_tokens, kept_tokens)
    sparse = prefill_flops(speculator, num_tokens) + prefill_flops(main, kept_tokens)
    return prefill_flops(main, num_tokens) / sparse


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds to the first token, by phase; host work and communication are not in it."""

    dense: float
    """The main model reads everything."""
    speculate: float
    """The speculator reads everything."""
    look_ahead: float
    """Its decode steps, one fewer than the queries."""
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
    main_bytes: float = 2.0,
    speculator_bytes: float = 2.0,
) -> Prediction:
    """Predict the phases of one prompt; each takes the longer of its FLOPs and its bytes at the machine's rates.

    Args:
        main, speculator: the two models' shapes.
        num_tokens: tokens of the prompt.
        kept_tokens: tokens that the main model reads, 1 to num_tokens.
        look_ahead: queries; look_ahead - 1 decode steps, each bound by weight and cache bytes.
        machine: measured rates, or `default_machine`.
        main_bytes, speculator_bytes: bytes a weight (and a cached number): 4 float32, 2 bfloat16, 1 float8.
    """
    _check_kept(num_tokens, kept_tokens)
    queries = check_integer("look_ahead", look_ahead, 1)
    for name, value in (("main_bytes", main_bytes), ("speculator_bytes", speculator_bytes)):
        check_real(name, value, "a finite number above 0", lambda x: x > 0)

    def seconds(flops: float, read: float) -> float:
        return max(flops / machine.flops_per_s, read / machine.bytes_per_s)

    def step(context: int) -> float:
        return seconds(decode_flops(speculator, context), decode_bytes(speculator, context, speculator_bytes))

    main_weights = weight_bytes(main, main_bytes)
    head_tokens = 1 if queries > 1 else 0
    return Prediction(
        dense=seconds(prefill_flops(main, num_tokens), main_weights),
        speculate=seconds(
            prefill_flops(speculator, num_tokens, head_tokens=head_tokens), weight_bytes(speculator, speculator_bytes)
        ),
        look_ahead=sum(step(num_tokens + index) for index in range(1, queries)),
        score=seconds(
            scoring_flops(speculator, num_tokens, queries), 2 * key_bytes(speculator, num_tokens, speculator_bytes)
        ),
        sparse=seconds(prefill_flops(main, kept_tokens), main_weights),
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
    sizes = {"main_bytes": main_bytes, "speculator_bytes": speculator_bytes}
    return predict(main, speculator, num_tokens, kept_tokens, look_ahead, machine, **sizes).gain


def _check_kept(num_tokens: int, kept_tokens: int) -> None:
    check_integer("kept_tokens", kept_tokens, 1, check_integer("num_tokens", num_tokens, 1))
