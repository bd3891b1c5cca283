"""Cases and slow answers in float64 for the scoring and choosing kernels; every backend answers the same ones.

Nothing here comes from the package.

Letters: L layers, B prompts, K key heads, G query heads a key head, N = K * G query heads, Q queries, S slots,
H head size, M tokens of a prompt, W pool width, C chunks.
"""

import math
from typing import NamedTuple

import numpy as np

BACKENDS = ("reference", "triton_interpret", "mosaic_tpu_interpret")
KERNELS = BACKENDS[1:]
BOUND = 1e-5
"""Largest error of a pooled maximum, relative to the value plus the largest value of its prompt."""
NOTHING = -1
"""What fills chunk ids and token indices after the last."""


# --- importance -------------------------------------------------------------------------------------------------------


class Shape(NamedTuple):
    """The static side of one call."""

    layers: int = 1
    batch: int = 2
    key_heads: int = 1
    group: int = 1
    queries: int = 1
    dim: int = 16
    slots: int = 300
    size: int = 300
    width: int = 13
    dtype: str = "float32"

    def draw(self, seed: int = 0, spread: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
        """Float32 keys [L, B, K, S, H] and queries [L, B, Q, N, H]; logits have `spread` as standard deviation."""
        rng = np.random.default_rng(seed)
        keys = rng.standard_normal((self.layers, self.batch, self.key_heads, self.slots, self.dim))
        heads = self.key_heads * self.group
        queries = rng.standard_normal((self.layers, self.batch, self.queries, heads, self.dim)) * spread
        return keys.astype(np.float32), queries.astype(np.float32)


# Each figure that the kernels support at least once, in few programs.
SHAPES = {
    "three_heads_a_group": Shape(2, 2, 3, 3, 8, 64, 400, 300, 13),
    "one_query_bf16": Shape(3, 2, 1, 16, 1, 128, 260, 260, 13, "bfloat16"),
    "most_queries": Shape(2, 2, 2, 1, 32, 80, 300, 300, 3),
    "odd_counts_f16": Shape(1, 2, 3, 5, 5, 96, 300, 290, 33, "float16"),
    "large_heads_no_pool": Shape(1, 2, 1, 2, 32, 256, 257, 257, 0),
    "most_rows": Shape(1, 1, 1, 16, 32, 64, 150, 150, 1),
}

# Around the edges of blocks of 128 slots and of what a pool of 13 leaves of them, 116.
EDGES = (1, 2, 6, 7, 12, 13, 115, 116, 117, 121, 122, 123, 127, 128, 129, 133, 134, 135, 231, 232, 233, 255, 256, 257)


def poisoned(keys: np.ndarray, num_tokens, fill: float = np.nan) -> np.ndarray:
    """A copy of keys with `fill` in every slot past its prompt."""
    keys = keys.copy()
    for prompt, count in enumerate(num_tokens):
        keys[:, prompt, :, count:] = fill
    return keys


def pool(row: np.ndarray, width: int) -> np.ndarray:
    """Average of `width` neighbours along row [M], zeros beyond the ends, always divided by width; 0: as is."""
    if width == 0:
        return row
    assert width % 2 == 1, width
    return np.convolve(row, np.ones(width))[width // 2 : width // 2 + len(row)] / width


def slow_pooled_maxima(keys, queries, num_tokens, size: int, width: int, visible=None) -> np.ndarray:
    """[B, Q, size], one row of one head at a time, of the values as they are given; `visible` [B, Q] keys, or all."""
    keys, queries = np.asarray(keys).astype(np.float64), np.asarray(queries).astype(np.float64)
    layers, batch, key_heads, _, dim = keys.shape
    _, _, count, heads, _ = queries.shape
    out = np.zeros((batch, count, size))
    for prompt, tokens in enumerate(num_tokens):
        for layer in range(layers):
            for head in range(heads):
                key = keys[layer, prompt, head // (heads // key_heads), :tokens]
                for q in range(count):
                    seen = tokens if visible is None else visible[prompt][q]
                    logits = key[:seen] @ queries[layer, prompt, q, head] / math.sqrt(dim)
                    weights = np.exp(logits - logits.max())
                    row = pool(np.append(weights / weights.sum(), np.zeros(tokens - seen)), width)
                    out[prompt, q, :tokens] = np.maximum(out[prompt, q, :tokens], row)
    return out


def error(got, want) -> float:
    """The largest error in multiples of BOUND; infinite where a value is not finite."""
    got = np.asarray(got, np.float64)
    if not np.isfinite(got).all():
        return math.inf
    allowed = BOUND * (want + want.max(axis=(1, 2), keepdims=True))
    return float((np.abs(got - want) / allowed).max())


def check_maxima(got, keys, queries, num_tokens, size: int, width: int, visible=None) -> None:
    """`got` is what the slow version says, and nothing at all from each prompt's end on."""
    got = np.asarray(got)
    want = slow_pooled_maxima(keys, queries, num_tokens, size, width, visible)
    assert got.dtype == np.float32
    assert got.shape == want.shape
    for prompt, count in enumerate(num_tokens):
        assert not got[prompt, :, count:].any(), (prompt, count)
    assert error(got, want) <= 1, list(num_tokens)


# --- chunks -----------------------------------------------------------------------------------------------------------


class Prompt(NamedTuple):
    """One prompt of a batch: scores and forced over its chunks (what follows them is the padding), and its counts."""

    scores: list[float]
    forced: list[bool]
    kept: int
    tokens: int


class ChunkShape(NamedTuple):
    """The static side of one call: padded chunks, chunk size, kept tokens at most, slots for prompt tokens."""

    padded: int
    chunk: int
    size: int
    slots: int
    batch: int = 3


# Every token kept, few of them, a chunk that is no power of two, more chunks than lanes, the largest chunk.
CHUNK_SHAPES = {
    "tokens": ChunkShape(48, 1, 48, 48),
    "few_kept": ChunkShape(40, 7, 65, 278),
    "default": ChunkShape(150, 32, 640, 4800),
    "largest": ChunkShape(5, 256, 1280, 1271),
}


def slow_kept(scores, forced, kept: int) -> list[int]:
    """Kept chunks by sorting: forced first, then the higher score with NaN last, then the lower chunk; ascending."""

    def rank(chunk: int):
        unknown = math.isnan(scores[chunk])
        return not forced[chunk], unknown, 0.0 if unknown else -scores[chunk], chunk

    return sorted(sorted(range(len(scores)), key=rank)[:kept])


def tokens_of(chunks: list[int], size: int, total: int) -> list[int]:
    """The token indices of `chunks`, ascending; the last chunk ends with the prompt."""
    return [token for chunk in chunks for token in range(chunk * size, min(chunk * size + size, total))]


def filled(values, fill, size: int) -> list:
    """`values`, then `fill` up to `size` entries."""
    assert len(values) <= size
    return [*values, *[fill] * (size - len(values))]


def token_ids(shape: ChunkShape) -> np.ndarray:
    """Distinct prompt ids [B, S], none of them 0."""
    return np.arange(1, shape.batch * shape.slots + 1, dtype=np.int32).reshape(shape.batch, shape.slots)


def arguments(shape: ChunkShape, prompts: list[Prompt], fill: float = np.nan):
    """The arrays of a call; after the last chunk come `fill` and forced chunks, which must not matter."""
    assert len(prompts) == shape.batch
    scores = np.full((shape.batch, shape.padded), fill, np.float32)
    forced = np.ones((shape.batch, shape.padded), np.bool_)
    for row, prompt in enumerate(prompts):
        scores[row, : len(prompt.scores)] = prompt.scores
        forced[row, : len(prompt.forced)] = prompt.forced
    counts = [[len(p.scores) for p in prompts], [p.kept for p in prompts], [p.tokens for p in prompts]]
    return scores, forced, *np.array(counts, np.int32), token_ids(shape)


def check_choice(got, shape: ChunkShape, row: int, prompt: Prompt, ok: bool = True) -> None:
    """Every field of `got` at `row` is what the slow version says."""
    scores = np.array(prompt.scores, np.float32).tolist()
    chunks = slow_kept(scores, prompt.forced, prompt.kept)
    kept = tokens_of(chunks, shape.chunk, prompt.tokens)
    ids = min(-(-shape.size // shape.chunk), shape.padded)
    equal = np.testing.assert_array_equal
    equal(got.kept_chunk_ids[row], filled(chunks, NOTHING, ids))
    equal(np.flatnonzero(got.kept_chunk_mask[row]), chunks)
    equal(got.kept_indices[row], filled(kept, NOTHING, shape.size))
    equal(got.kept_tokens[row], filled(token_ids(shape)[row][kept], 0, shape.size))
    assert got.kept_count[row] == len(kept)
    assert bool(got.ok[row]) is ok


def check_types(got, shape: ChunkShape) -> None:
    """Shapes and dtypes of all fields."""
    ids = min(-(-shape.size // shape.chunk), shape.padded)
    assert {name: (value.shape[1:], str(value.dtype)) for name, value in got._asdict().items()} == {
        "kept_chunk_ids": ((ids,), "int32"),
        "kept_chunk_mask": ((shape.padded,), "bool"),
        "kept_indices": ((shape.size,), "int32"),
        "kept_tokens": ((shape.size,), "int32"),
        "kept_count": ((), "int32"),
        "ok": ((), "bool"),
    }
    assert {len(value) for value in got} == {shape.batch}
