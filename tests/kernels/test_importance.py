"""Pooled maxima of every backend against the slow version."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specprefill_jax.kernels.importance import pooled_maxima

from .cases import BACKENDS, BOUND, EDGES, KERNELS, SHAPES, Shape, check_maxima, poisoned

SMALL = Shape(batch=10)
FAULTS = Shape(2, 3, 2, 1, 3, 16, 150, 150)


def warnings_in(caplog) -> list[str]:
    records = [record for record in caplog.get_records("call") if record.name.startswith("specprefill_jax")]
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def no_kernel_is_replaced(request, caplog):
    """A kernel that leaves its work to the reference says so; what is supported must not come to that."""
    yield
    # The TPU's compiler knows no float16.
    if "very_wide_pool" not in request.node.name and "f16-mosaic" not in request.node.name.replace("bf16", ""):
        assert warnings_in(caplog) == []


@functools.cache
def program(backend, size: int, width: int):
    return jax.jit(functools.partial(pooled_maxima, size=size, pool_width=width, backend=backend))


def run(backend, shape: Shape, keys, queries, num_tokens) -> np.ndarray:
    keys, queries = jnp.asarray(keys, shape.dtype), jnp.asarray(queries, shape.dtype)
    return np.asarray(program(backend, shape.size, shape.width)(keys, queries, jnp.asarray(num_tokens, jnp.int32)))


def check(backend, shape: Shape, keys, queries, num_tokens) -> None:
    """Of keys with NaN past each prompt's end."""
    keys, queries = np.asarray(jnp.asarray(keys, shape.dtype)), np.asarray(jnp.asarray(queries, shape.dtype))
    got = run(backend, shape, poisoned(keys, num_tokens), queries, num_tokens)
    check_maxima(got, keys, queries, num_tokens, shape.size, shape.width)


# --- against the slow version -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name, backend):
    shape = SHAPES[name]
    keys, queries = shape.draw()
    lengths = [shape.size, *[count for count in EDGES if count < shape.size]]
    # Short with long, so that no batch is of like lengths.
    step = max(len(lengths) // shape.batch, 1)
    for first in range(0, step, 3):
        places = [(first + step * row) % len(lengths) for row in range(shape.batch)]
        check(backend, shape, keys, queries, [lengths[place] for place in places])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("width", [13, 63])
def test_every_length(width, backend):
    """Every residue of every block size, ten lengths a call, short beside long."""
    shape = SMALL._replace(width=width)
    keys, queries = shape.draw()
    for first in range(1, 31):
        check(backend, shape, keys, queries, range(first, 301, 30))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["three_heads_a_group", "most_queries", "large_heads_no_pool"])
def test_each_query_sees_its_own_keys(name, backend):
    """The last ones of a prompt, each up to itself, and any others: what lies past its own is as if it were not."""
    shape = SHAPES[name]
    keys, queries = shape.draw()
    compute = jax.jit(functools.partial(pooled_maxima, size=shape.size, pool_width=shape.width, backend=backend))
    rng = np.random.default_rng(3)
    for num_tokens in ([shape.size, 1], [129, 117], [128, 6]):
        causal = np.maximum(np.array(num_tokens)[:, None] + np.arange(1 - shape.queries, 1), 1)
        drawn = np.stack([rng.integers(1, count + 1, shape.queries) for count in num_tokens])
        for visible in (causal, drawn):
            numbers = (jnp.asarray(num_tokens, jnp.int32), jnp.asarray(visible, jnp.int32))
            got = compute(poisoned(keys, num_tokens), queries, numbers[0], visible=numbers[1])
            check_maxima(got, keys, queries, num_tokens, shape.size, shape.width, visible)
    every = np.repeat(np.array([[129], [117]]), shape.queries, axis=1)
    got = compute(keys, queries, jnp.array([129, 117]), visible=jnp.asarray(every))
    np.testing.assert_array_equal(got, run(backend, shape, keys, queries, [129, 117]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("size", "width"), [(1, 13), (129, 3)])
def test_small_sizes(size, width, backend):
    """Results shorter than a block or than the pool is wide; keys have more slots than the result."""
    shape = SMALL._replace(batch=5, slots=size + 3, size=size, width=width)
    keys, queries = shape.draw()
    for last in range(1, size + 1, max(size // 8, 1)):
        check(backend, shape, keys, queries, [1, last, max(last // 2, 1), size, max(size - 1, 1)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_very_wide_pool(backend, caplog):
    """A kernel that cannot take it says so, and the answer is right."""
    shape = SMALL._replace(width=301, size=299)
    keys, queries = shape.draw()
    program.cache_clear()
    for first in (1, 9, 29):
        check(backend, shape, keys, queries, range(first, 300, 30))
    assert any("301" in message for message in warnings_in(caplog)) is (backend in KERNELS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_that_rise_and_fall(backend):
    """Along the prompt, by quarters to 37 on both sides of zero: each logit is a new maximum, or only the first is."""
    shape = SMALL
    ramp = (np.arange(shape.slots) - shape.slots // 2) / 4
    keys = np.zeros((1, shape.batch, 1, shape.slots, shape.dim), np.float32)
    keys[..., 0] = ramp
    queries = np.zeros((1, shape.batch, 1, 1, shape.dim), np.float32)
    queries[..., 0] = np.where(np.arange(shape.batch) % 2, 4, -4)[None, :, None, None]
    check(backend, shape, keys, queries, [300, 300, 129, 129, 128, 128, 117, 117, 1, 2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("offset", [256, -256])
def test_large_logits(offset, backend):
    """Exact in float32 and all of one size, so only what they differ by counts."""
    shape = SMALL
    rng = np.random.default_rng(0)
    keys = np.zeros((1, shape.batch, 1, shape.slots, shape.dim), np.float32)
    keys[..., 0] = offset
    keys[..., 1] = rng.integers(-16, 17, keys.shape[:-1]) / 8
    queries = np.zeros((1, shape.batch, 1, 1, shape.dim), np.float32)
    queries[..., :2] = 4
    check(backend, shape, keys, queries, [300, 299, 257, 129, 128, 127, 117, 13, 2, 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_key_takes_all(backend):
    """Weight 1 at one slot, and exactly a thirteenth around it, also at both ends of the prompt."""
    shape = SMALL
    num_tokens = np.array([300, 300, 300, 257, 129, 129, 128, 128, 20, 2])
    hot = np.array([0, 299, 128, 256, 128, 5, 127, 121, 6, 1])
    keys = np.zeros((1, shape.batch, 1, shape.slots, shape.dim), np.float32)
    keys[0, np.arange(10), 0, hot] = 10
    queries = np.ones((1, shape.batch, 1, 1, shape.dim), np.float32)
    got = run(backend, shape, poisoned(keys, num_tokens), queries, num_tokens)
    slots = np.arange(shape.size)
    near = (np.abs(slots - hot[:, None]) <= 6) & (slots < num_tokens[:, None])
    np.testing.assert_allclose(got[:, 0], near / 13, rtol=BOUND, atol=1e-12)


# --- what must not matter ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_does_not_matter(backend):
    keys, queries = SMALL.draw()
    num_tokens = [1, 12, 116, 117, 127, 128, 129, 256, 299, 300]
    want = run(backend, SMALL, poisoned(keys, num_tokens, 0), queries, num_tokens)
    for fill in (np.nan, np.inf, -np.inf, 3e38):
        np.testing.assert_array_equal(run(backend, SMALL, poisoned(keys, num_tokens, fill), queries, num_tokens), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_neighbours_in_the_batch_do_not_matter(backend):
    keys, queries = SMALL.draw()
    num_tokens = np.array([1, 12, 116, 117, 127, 128, 129, 256, 299, 300])
    turned = np.roll(np.arange(10), 3)
    want = run(backend, SMALL, keys, queries, num_tokens)
    got = run(backend, SMALL, keys[:, turned], queries[:, turned], num_tokens[turned])
    np.testing.assert_array_equal(got, want[turned])


def test_arrays_of_the_host_without_jit():
    shape = Shape(slots=9, size=7, width=3)
    keys, queries = shape.draw()
    num_tokens = np.array([7, 2], np.int32)
    got = pooled_maxima(keys, queries, num_tokens, size=7, pool_width=3)
    check_maxima(got, keys, queries, num_tokens, 7, 3)


def test_no_backend_named_is_the_reference_on_a_cpu():
    keys, queries = SMALL.draw()
    num_tokens = range(1, 11)
    want = run("reference", SMALL, keys, queries, num_tokens)
    np.testing.assert_array_equal(run(None, SMALL, keys, queries, num_tokens), want)


# --- faults -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_shows_in_its_prompt_alone(backend):
    """In any layer, head, slot that counts and entry, of a key or of one query."""
    keys, queries = FAULTS.draw()
    num_tokens = [130, 117, 150]
    want = run(backend, FAULTS, keys, queries, num_tokens)
    assert np.isfinite(want).all()
    for value in (np.nan, np.inf, -np.inf):
        for layer, head, slot, entry in [(0, 0, 0, 0), (1, 1, 116, 15), (0, 1, 110, 3), (1, 0, 60, 7)]:
            bad = keys.copy()
            bad[layer, 1, head, slot, entry] = value
            got = run(backend, FAULTS, bad, queries, num_tokens)
            assert not np.isfinite(got[1]).all(), ("key", value, layer, head, slot, entry)
            np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])
        for layer, query, head, entry in [(0, 0, 0, 0), (1, 2, 1, 15), (1, 1, 0, 8)]:
            bad = queries.copy()
            bad[layer, 1, query, head, entry] = value
            got = run(backend, FAULTS, keys, bad, num_tokens)
            assert not np.isfinite(got[1]).all(), ("query", value, layer, query, head, entry)
            np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_shows_with_one_head_and_one_query(value, backend):
    """No other row can show it, whichever the sign of the product."""
    keys, queries = SMALL.draw()
    num_tokens = np.array([1, 12, 116, 117, 127, 128, 129, 256, 299, 300])
    keys[0, np.arange(10), 0, num_tokens - 1, np.arange(10)] = value
    got = run(backend, SMALL, keys, queries, num_tokens)
    assert np.isfinite(got).all(axis=(1, 2)).tolist() == [False] * 10


@pytest.mark.parametrize("name", ["cuda", "", "Reference", "triton_interpreted"])
def test_unknown_backend(name):
    keys, queries = SMALL.draw()
    with pytest.raises(ValueError) as caught:
        pooled_maxima(keys, queries, np.ones(10, np.int32), size=300, pool_width=13, backend=name)
    for allowed in ("reference", "triton", "triton_interpret", "mosaic_tpu", "mosaic_tpu_interpret"):
        assert allowed in str(caught.value)
