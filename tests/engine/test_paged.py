"""The paged cache against numpy, slot by slot, and models that read by it against themselves with a plain cache."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import MAIN, prompt_of

from specprefill_jax.models import paged
from specprefill_jax.models.checkpoint import open_checkpoint
from specprefill_jax.models.loaded import load
from specprefill_jax.models.paged import PAGE, PagedCache

HEADS, KV_HEADS, SIZE, LAYERS, PAGES, WIDTH = 4, 2, 8, 2, 18, 5
LAYER = 1
# First slots of three rows, by tokens written; whole pages are written to whole pages.
STARTS = {1: (0, 70, 31), 31: (0, 33, 97), 32: (0, 64, 96), 33: (5, 0, 31), 64: (96, 0, 32)}


def filled(dtype: str, seed: int) -> tuple[PagedCache, np.ndarray]:
    """A cache full of noise and three rows of shuffled pages, and their table."""
    rng = np.random.default_rng(seed)
    shape = (KV_HEADS, LAYERS, PAGES, PAGE, SIZE)
    k, v = (jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2))
    tables = rng.permutation(np.arange(1, PAGES))[: 3 * WIDTH].reshape(3, WIDTH).astype(np.int32)
    return PagedCache(k, v, jnp.asarray(tables)), tables


def drawn(dtype: str, seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


write = jax.jit(paged.write)
attend = jax.jit(paged.attend, static_argnames="accelerator")


@pytest.mark.parametrize("tokens", STARTS)
def test_each_token_is_written_to_its_slot_and_nothing_else_is(tokens):
    cache, tables = filled("bfloat16", tokens)
    k, v = (drawn("float32", seed, 3, tokens, KV_HEADS, SIZE) for seed in range(2))
    start = np.array(STARTS[tokens], np.int32)
    written = write(cache, np.int32(LAYER), start, k, v)
    np.testing.assert_array_equal(written.tables, tables)
    for new, before, after in ((k, cache.k, written.k), (v, cache.v, written.v)):
        expected = np.array(before)
        for row in range(3):
            for token in range(tokens):
                slot = start[row] + token
                expected[:, LAYER, tables[row, slot // PAGE], slot % PAGE] = new[row, token].astype(before.dtype)
        np.testing.assert_array_equal(after, expected)


def test_one_row_of_one_token():
    cache, tables = filled("float32", 0)
    k, v = (drawn("float32", seed, 1, 1, KV_HEADS, SIZE) for seed in range(2))
    written = write(cache.of(cache.tables[1:2]), np.int32(0), np.array([75], np.int32), k, v)
    expected = np.array(cache.k)
    expected[:, 0, tables[1, 2], 11] = k[0, 0]
    np.testing.assert_array_equal(written.k, expected)


@pytest.mark.parametrize("tokens", [33, 64])
def test_padding_goes_to_nobody_s_page(tokens):
    """Past a row's own pages its table says 0."""
    cache, tables = filled("float32", 3)
    tables = np.where(np.arange(WIDTH) < 2, tables, 0).astype(np.int32)
    k, v = (drawn("float32", seed, 3, tokens, KV_HEADS, SIZE) for seed in range(2))
    written = write(cache.of(jnp.asarray(tables)), np.int32(LAYER), np.full(3, PAGE, np.int32), k, v)
    changed = (np.asarray(written.k) != np.asarray(cache.k)).any(axis=(0, 1, 3, 4))
    assert set(np.flatnonzero(changed)) == {0, *tables[:, 1]}


def expected_attention(q: np.ndarray, cache: PagedCache, tables: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Plain softmax over the slots up to each query's own, in float64."""
    k, v = (np.asarray(x, np.float64)[:, LAYER] for x in (cache.k, cache.v))
    out = np.zeros(q.shape)
    for row, table in enumerate(tables):
        keys, values = (x[:, table].reshape(KV_HEADS, -1, SIZE) for x in (k, v))
        for token in range(q.shape[1]):
            seen = start[row] + token + 1
            for head in range(HEADS):
                group = head // (HEADS // KV_HEADS)
                scores = keys[group, :seen] @ q[row, token, head] / np.sqrt(SIZE)
                weights = np.exp(scores - scores.max())
                out[row, token, head] = weights @ values[group, :seen] / weights.sum()
    return out


@pytest.mark.parametrize(
    ("tokens", "dtype", "accelerator"),
    [
        (1, "float32", False),
        (1, "float32", True),
        (1, "bfloat16", True),
        (31, "bfloat16", False),
        (31, "float32", True),
        (32, "float32", False),
        (33, "float32", False),
        (64, "float32", False),
    ],
)
def test_attention_is_over_the_row_s_slots_up_to_its_own(tokens, dtype, accelerator):
    cache, tables = filled(dtype, 7 + tokens)
    q = drawn(dtype, 1, 3, tokens, HEADS, SIZE)
    start = np.array(STARTS[tokens], np.int32)
    out = attend(q, cache, np.int32(LAYER), start, accelerator=accelerator)
    assert out.dtype == q.dtype
    tolerance = 1e-5 if dtype == "float32" else 3e-2
    expected = expected_attention(np.asarray(q, np.float64), cache, tables, start)
    np.testing.assert_allclose(np.asarray(out, np.float64), expected, atol=tolerance)


@pytest.mark.parametrize("tokens", [1, 3, 31])
@pytest.mark.parametrize("accelerator", [False, True])
def test_rows_longer_than_a_step(accelerator, tokens, monkeypatch):
    """Steps of two pages over five: the last is not a whole one."""
    for name in ("DECODE_PAGES", "ACCELERATOR_DECODE_PAGES"):
        monkeypatch.setattr(paged, name, 2)
    cache, tables = filled("float32", 11)
    q = drawn("float32", 2, 3, tokens, HEADS, SIZE)
    start = np.array([160 - tokens, 63, 64], np.int32)
    out = jax.jit(partial(paged.attend, accelerator=accelerator))(q, cache, np.int32(LAYER), start)
    np.testing.assert_allclose(out, expected_attention(np.asarray(q), cache, tables, start), atol=1e-5)


def test_rows_in_the_order_of_their_slots():
    cache, tables = filled("float32", 12)
    for pages, found in zip((cache.k, cache.v), paged.row(cache, jnp.int32(LAYER)), strict=True):
        assert found.shape == (3, WIDTH * PAGE, KV_HEADS, SIZE)
        for row, slot in ((0, 0), (1, 33), (2, 159)):
            np.testing.assert_array_equal(found[row, slot], pages[:, LAYER, tables[row, slot // PAGE], slot % PAGE])


def test_a_model_reads_pages_as_it_reads_a_plain_cache():
    """Two prompts in pieces, one of them sparse, then decoded together; hidden states and queries are the same.

    Layer by layer, that is: the engine's tests compare a scanned model's answers.
    """
    model = load(open_checkpoint(MAIN), "float32", num_layers=2, layerwise=True)
    rng = np.random.default_rng(5)
    tables = rng.permutation(np.arange(1, 13)).reshape(2, 6).astype(np.int32)
    pages = model.new_pages(13)
    assert pages.num_pages == 13
    positions = [np.arange(100), np.sort(rng.choice(400, 70, replace=False))]
    at, expected = [100, 70], {}
    for row, places in enumerate(positions):
        count = len(places)
        ids = np.asarray(prompt_of(count, row), np.int32)
        cache = model.new_cache(1, 256)
        for start in range(0, count, PAGE):
            piece, where = np.zeros((2, 1, PAGE), np.int32)
            length = min(PAGE, count - start)
            piece[0, :length], where[0, :length] = ids[start : start + length], places[start : start + length]
            last, first = np.array([length - 1], np.int32), np.array([start], np.int32)
            found = model.step(piece, where, cache, first, last)
            cache = found.cache
            same = model.step(piece, where, pages.of(jnp.asarray(tables[row : row + 1])), first, last)
            pages = same.cache
            assert_same(same, found)
        expected[row] = cache
    for index in range(3):
        tokens = np.array([[7 + index], [300 + index]], np.int32)
        where = np.array([[100 + index], [400 + index]], np.int32)
        slots, zero = np.array(at, np.int32) + np.int32(index), np.zeros(2, np.int32)
        step = model.step(tokens, where, pages.of(jnp.asarray(tables)), slots, zero)
        pages = step.cache
        for row in range(2):
            one = slice(row, row + 1)
            found = model.step(tokens[one], where[one], expected[row], slots[one], zero[one])
            expected[row] = found.cache
            assert_same(step, found, row)


def assert_same(step, found, row: int = 0):
    """Row `row` of a step in pages is the only row of a step in a plain cache."""
    np.testing.assert_allclose(step.hidden[row], found.hidden[0], rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(step.queries, found.queries, strict=True):  # by layer
        np.testing.assert_allclose(ours[row], theirs[0], rtol=1e-4, atol=1e-4)
