"""Prompts longer than a tile: what a tile's pool takes from the tiles beside it."""

from functools import partial

import jax
import numpy as np
import pytest

from specprefill_jax.kernels.importance import pooled_maxima

SIZE = 4500  # three of the TPU's tiles of 2,048, forty of the GPU's
EDGES = (1, 6, 7, *range(1976, 2121), *range(4089, 4104), 4499, 4500)
"""Every residue modulo 128, past the end of the first tile and of what comes along beside it; others at the edges."""


@pytest.mark.parametrize("backend", ["triton_interpret", "mosaic_tpu_interpret"])
def test_lengths_around_the_ends_of_tiles(backend):
    rng = np.random.default_rng(0)
    keys = rng.normal(size=(1, 1, 1, SIZE, 16)).astype(np.float32)
    queries = rng.normal(size=(1, 1, 1, 1, 16)).astype(np.float32) * 2
    score, expected = (
        jax.jit(partial(pooled_maxima, size=SIZE, pool_width=13, backend=name)) for name in (backend, "reference")
    )
    for length in EDGES:
        poisoned = keys.copy()
        poisoned[:, :, :, length:] = np.nan
        want = np.asarray(expected(poisoned, queries, np.array([length])))
        got = np.asarray(score(poisoned, queries, np.array([length])))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * want.max(), err_msg=f"{length} tokens")
