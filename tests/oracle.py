"""The method, written to be checked by eye: a slow Llama and SpecPrefill in numpy, for the tests.

Nothing here comes from the package. Every forward pass reads the whole sequence again (no cache, no chunks), attention
is one matrix a head, and each step of the method is one function in the order the method states it. Arithmetic is
float64 on the checkpoint's own values, so what differs from a float32 build is that build's rounding.

Letters: M prompt tokens, N look-ahead queries, L layers, H query heads, K key heads, D head size, C chunks,
V vocabulary.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import safe_open

type Array = np.ndarray


def read_tensors(folder: Path) -> dict[str, Array]:
    """All tensors of all safetensors files in `folder`, as float64."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="numpy") as handle:
            names = handle.keys()
            for name in names:
                tensor = handle.get_tensor(name)
                assert tensor.dtype in (np.float32, ml_dtypes.bfloat16), (name, tensor.dtype)
                tensors[name] = tensor.astype(np.float64)
    return tensors


def inverse_frequencies(config: dict) -> Array:
    """The D/2 rotation frequencies of a config with default or llama3 RoPE, by the published formula."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    kind = rope.get("rope_type", "default")
    assert kind in ("default", "llama3"), kind
    frequencies = []
    for i in range(head_dim // 2):
        frequency = theta ** (-2 * i / head_dim)
        if kind == "llama3":
            # Long waves are slowed by the factor, short ones kept, the ones between are blended.
            original = rope["original_max_position_embeddings"]
            low, high, factor = rope["low_freq_factor"], rope["high_freq_factor"], rope["factor"]
            wave_length = 2 * math.pi / frequency
            if wave_length > original / low:
                frequency = frequency / factor
            elif wave_length >= original / high:
                smooth = (original / wave_length - low) / (high - low)
                frequency = (1 - smooth) * frequency / factor + smooth * frequency
        frequencies.append(frequency)
    return np.array(frequencies)


def rotate(x: Array, positions: Sequence[int], frequencies: Array) -> Array:
    """RoPE of heads x [T, heads, D] at `positions` [T]; D's first half pairs with its second."""
    half = len(frequencies)
    angles = np.array(positions)[:, None, None] * frequencies
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def softmax(x: Array) -> Array:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def log_softmax(x: Array) -> Array:
    """Log of the softmax over the last axis."""
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class Pass:
    """One forward pass over T tokens: post-RoPE queries [T, L, H, D] and keys [T, L, K, D], and logits [T, V]."""

    queries: Array
    keys: Array
    logits: Array


class Llama:
    """A Llama checkpoint in a folder, read and run in float64."""

    def __init__(self, folder: Path, layers: int | None = None):
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = read_tensors(folder)
        self.layers = self.config["num_hidden_layers"] if layers is None else layers
        self.heads = self.config["num_attention_heads"]
        self.key_heads = self.config["num_key_value_heads"]
        self.head_dim = self.config.get("head_dim", self.config["hidden_size"] // self.heads)
        self.frequencies = inverse_frequencies(self.config)

    def normalise(self, x: Array, weight: Array) -> Array:
        """RMS norm of x [T, E]."""
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + self.config["rms_norm_eps"]) * weight

    def __call__(self, ids: Sequence[int], positions: Sequence[int]) -> Pass:
        """Run `ids` at `positions`; a token sees itself and those before it in the sequence."""
        w, count = self.weights, len(ids)
        x = w["model.embed_tokens.weight"][np.array(ids)]
        all_queries, all_keys = [], []
        for layer in range(self.layers):
            p = f"model.layers.{layer}."
            h = self.normalise(x, w[p + "input_layernorm.weight"])
            q = (h @ w[p + "self_attn.q_proj.weight"].T).reshape(count, self.heads, self.head_dim)
            k = (h @ w[p + "self_attn.k_proj.weight"].T).reshape(count, self.key_heads, self.head_dim)
            v = (h @ w[p + "self_attn.v_proj.weight"].T).reshape(count, self.key_heads, self.head_dim)
            q, k = rotate(q, positions, self.frequencies), rotate(k, positions, self.frequencies)
            visible = np.tril(np.ones((count, count), bool))
            mixed = np.empty_like(q)
            for head in range(self.heads):
                group = head * self.key_heads // self.heads
                scores = q[:, head] @ k[:, group].T / math.sqrt(self.head_dim)
                mixed[:, head] = softmax(np.where(visible, scores, -np.inf)) @ v[:, group]
            x = x + mixed.reshape(count, -1) @ w[p + "self_attn.o_proj.weight"].T
            h = self.normalise(x, w[p + "post_attention_layernorm.weight"])
            gate, up = h @ w[p + "mlp.gate_proj.weight"].T, h @ w[p + "mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[p + "mlp.down_proj.weight"].T
            all_queries.append(q)
            all_keys.append(k)
        x = self.normalise(x, w["model.norm.weight"])
        head = w["model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"]
        return Pass(np.stack(all_queries, axis=1), np.stack(all_keys, axis=1), x @ head.T)

    def greedy(
        self, ids: Sequence[int], positions: Sequence[int], next_position: int, steps: int
    ) -> tuple[list[int], Array]:
        """`steps` greedy tokens after ids at positions, fed at next_position, +1, ...; and their logits [steps, V]."""
        ids, positions = list(ids), list(positions)
        tokens, logits = [], []
        for step in range(steps):
            last = self(ids, positions).logits[-1]
            logits.append(last)
            tokens.append(int(last.argmax()))
            ids.append(tokens[-1])
            positions.append(next_position + step)
        return tokens, np.array(logits)

    def continue_with(
        self, ids: Sequence[int], positions: Sequence[int], next_position: int, tokens: Sequence[int]
    ) -> Array:
        """The logits [len(tokens), V] each of `tokens` was chosen from, when they followed ids at positions."""
        fed = list(tokens[:-1])
        run = self(list(ids) + fed, list(positions) + [next_position + i for i in range(len(fed))])
        return run.logits[len(ids) - 1 :]


def pool(row: Array, width: int | None) -> Array:
    """Average of `width` neighbours along row [M], zeros beyond the ends, always divided by width; 0 or None: as is."""
    if not width:
        return row
    assert width % 2 == 1, width
    padded = np.concatenate([np.zeros(width // 2), row, np.zeros(width // 2)])
    return np.array([padded[j : j + width].sum() / width for j in range(len(row))])


def importance(queries: Array, keys: Array, width: int | None) -> Array:
    """Importance [M] of the prompt tokens from queries [N, L, H, D] and prompt keys [M, L, K, D]."""
    count, layers, heads, dim = queries.shape
    key_heads = keys.shape[2]
    per_query = []
    for n in range(count):
        rows = []
        for layer in range(layers):
            for head in range(heads):
                key = keys[:, layer, head * key_heads // heads]
                rows.append(pool(softmax(key @ queries[n, layer, head] / math.sqrt(dim)), width))
        per_query.append(np.max(rows, axis=0))
    return np.mean(per_query, axis=0)


def window_importance(queries: Array, keys: Array, width: int | None, window: int) -> Array:
    """Importance [M] from queries [M, L, H, D] of the prompt's own last `window` tokens and its keys [M, L, K, D].

    Each sees the tokens up to itself; the first of them weighs 1, the next 2, and so on (product mode's query_window).
    """
    total, layers, heads, dim = queries.shape
    key_heads = keys.shape[2]
    places = range(max(total - window, 0), total)
    per_query = []
    for place in places:
        rows = []
        for layer in range(layers):
            for head in range(heads):
                seen = keys[: place + 1, layer, head * key_heads // heads]
                row = np.zeros(total)
                row[: place + 1] = softmax(seen @ queries[place, layer, head] / math.sqrt(dim))
                rows.append(pool(row, width))
        per_query.append(np.max(rows, axis=0))
    weights = np.arange(1, len(places) + 1)
    return (np.array(per_query) * weights[:, None]).sum(axis=0) / weights.sum()


def of_heads(queries: Array, keys: Array, heads: Sequence[tuple[int, int]]) -> tuple[Array, Array]:
    """Of queries [N, L, H, D] and keys [M, L, K, D] some (layer, head), a layer each: [N, P, 1, D], [M, P, 1, D]."""
    group = queries.shape[2] // keys.shape[2]
    return (
        np.stack([queries[:, layer, head] for layer, head in heads], axis=1)[:, :, None],
        np.stack([keys[:, layer, head // group] for layer, head in heads], axis=1)[:, :, None],
    )


def chunk_scores(values: Array, size: int) -> Array:
    """Mean of values [M] in each chunk of `size`, from token 0; the last over its real length. [C]."""
    return np.array([values[start : start + size].mean() for start in range(0, len(values), size)])


def kept_chunks(scores: Array, rate: str, forced: Sequence[int] = ()) -> list[int]:
    """The ceil(C * rate) chunks of highest score, ties to the lower; ascending. `forced` (product mode) go first."""
    count = math.ceil(len(scores) * Fraction(rate))
    order = sorted(range(len(scores)), key=lambda chunk: (chunk not in forced, -scores[chunk], chunk))
    return sorted(order[:count])


def tokens_of(chunks: Sequence[int], size: int, total: int) -> list[int]:
    """The token indices of `chunks`, ascending."""
    return [t for chunk in chunks for t in range(chunk * size, min((chunk + 1) * size, total))]


@dataclasses.dataclass(frozen=True)
class Scores:
    """What the speculator makes of a prompt: see SpecPrefill.look."""

    queries: Array
    keys: Array
    look_ahead_tokens: list[int]
    look_ahead_logits: Array


@dataclasses.dataclass(frozen=True)
class Choice:
    """The chosen tokens of a prompt, with all that led to them."""

    num_queries: int
    look_ahead_tokens: list[int]
    importance: Array
    chunk_scores: Array
    chunks: list[int]
    kept: list[int]

    @property
    def margin(self) -> float:
        """Relative gap between the last kept and the first dropped chunk; 1 when all are kept."""
        order = np.sort(self.chunk_scores)[::-1]
        k = len(self.chunks)
        return 1.0 if k == len(order) else float((order[k - 1] - order[k]) / order[k - 1])


class SpecPrefill:
    """Paper mode, end to end, of two checkpoint folders."""

    def __init__(self, main: Path, speculator: Path, speculator_layers: int | None = None):
        self.main, self.speculator = Llama(main), Llama(speculator, speculator_layers)

    def look(self, ids: Sequence[int], look_ahead: int, tokens: Sequence[int] | None = None) -> Scores:
        """What N look-ahead steps see and say.

        Queries [N, L, H, D] (of the last prompt token, then of the first N-1 generated), prompt keys [M, L, K, D], the
        N tokens and their logits [N, V]. The tokens are greedy, or `tokens` (where two logits tie, either may win).
        """
        if tokens is None:
            tokens, _ = self.speculator.greedy(ids, range(len(ids)), len(ids), look_ahead)
        fed = [*ids, *tokens[: look_ahead - 1]]
        run = self.speculator(fed, range(len(fed)))
        last = len(ids) - 1
        return Scores(run.queries[last:], run.keys[: len(ids)], list(tokens), run.logits[last:])

    def choose(
        self, ids, *, look_ahead=8, width=13, chunk=32, rate="0.1", eos=(), scores: Scores | None = None
    ) -> Choice:
        """Score and choose; `scores` (of the same ids, at least as many queries) spares the speculator's pass."""
        scores = scores or self.look(ids, look_ahead)
        tokens = scores.look_ahead_tokens[:look_ahead]
        ends = [step for step, token in enumerate(tokens) if token in eos]
        valid = ends[0] + 1 if ends else look_ahead
        values = importance(scores.queries[:valid], scores.keys, width)
        per_chunk = chunk_scores(values, chunk)
        chunks = kept_chunks(per_chunk, rate)
        return Choice(valid, tokens, values, per_chunk, chunks, tokens_of(chunks, chunk, len(ids)))

    def answer(self, ids: Sequence[int], kept: Sequence[int], steps: int) -> tuple[list[int], Array]:
        """`steps` greedy tokens of the main model that read ids[kept] at positions kept; and the logits [steps, V]."""
        return self.main.greedy([ids[i] for i in kept], kept, len(ids), steps)

    def logits_of(self, ids: Sequence[int], kept: Sequence[int], tokens: Sequence[int]) -> Array:
        """The logits [len(tokens), V] that each of `tokens` was drawn from after ids[kept]."""
        return self.main.continue_with([ids[i] for i in kept], kept, len(ids), tokens)
