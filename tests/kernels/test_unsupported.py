"""What a kernel does not serve, the reference does, and the log says so."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest

from specprefill_jax.kernels.chunk_topk import chunk_topk
from specprefill_jax.kernels.importance import pooled_maxima

WIDE = "24 queries of 43 heads a key head: more than 1024 rows"
KERNELS = ("triton_interpret", "mosaic_tpu_interpret")


def arrays(heads: int, kv_heads: int, queries: int, keys_as, queries_as):
    rng = np.random.default_rng(heads)
    keys = jnp.asarray(rng.normal(size=(1, 1, kv_heads, 40, 16)), keys_as)
    return keys, jnp.asarray(rng.normal(size=(1, 1, queries, heads, 16)), queries_as), jnp.full((1,), 33)


@pytest.mark.parametrize(
    ("kernels", "heads", "queries", "keys_as", "queries_as", "said"),
    [
        *[(name, 2, 3, "bfloat16", "float32", "queries of float32, which bfloat16 cannot hold") for name in KERNELS],
        *[
            (name, 2, 3, "float16", "bfloat16", "queries of bfloat16, which float16 cannot hold")
            for name in KERNELS[:1]
        ],
        ("triton_interpret", 65, 1, "float32", "float32", "65 query heads a key head, more than 64"),
        (
            "mosaic_tpu_interpret",
            43,
            24,
            "float32",
            "float32",
            "24 queries of 43 heads a key head: more than 1024 rows",
        ),
        ("mosaic_tpu_interpret", 2, 3, "float16", "float16", "keys of float16"),
    ],
)
def test_importance(caplog, kernels, heads, queries, keys_as, queries_as, said):
    given = arrays(heads, 1, queries, keys_as, queries_as)
    with caplog.at_level(logging.WARNING, logger="specprefill_jax"):
        got = pooled_maxima(*given, size=40, pool_width=3, backend=kernels)
    assert caplog.messages == [f"{kernels} kernel not used, but the reference: {said}"]
    np.testing.assert_array_equal(got, pooled_maxima(*given, size=40, pool_width=3, backend="reference"))


@pytest.mark.parametrize("kernels", ["reference", *KERNELS])
def test_more_tokens_than_the_prompt_has_are_not_chosen_silently(kernels):
    one = np.ones(1, np.int32)
    choice = chunk_topk(
        np.arange(8.0)[None], np.zeros((1, 8), bool), one * 8, one * 2, one * 32, np.arange(30, dtype=np.int32)[None],
        chunk_size=4, size=8, backend=kernels,
    )  # fmt: skip
    assert not bool(choice.ok[0])


@pytest.mark.parametrize("name", ["num_chunks", "kept_chunks", "num_tokens"])
def test_numbers_are_one_a_prompt(name):
    numbers = {"num_chunks": [8, 8], "kept_chunks": [2, 2], "num_tokens": [30, 30], name: 2}
    with pytest.raises(ValueError, match=rf"^{name}=.* is not allowed: {name} must be of shape \[2\], one number a"):
        chunk_topk(
            np.zeros((2, 8)), np.zeros((2, 8), bool), *numbers.values(), np.zeros((2, 32), np.int32),
            chunk_size=4, size=8,
        )  # fmt: skip
