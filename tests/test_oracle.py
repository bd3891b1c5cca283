"""The oracle equals the goldens, which another framework computed. What the other tests compare with stands on this."""

import math

import numpy as np
import oracle
import pytest
from agreement import goldens, relative_error


@pytest.mark.parametrize("case", goldens(), ids=lambda path: path.stem)
def test_golden(reference, case):
    g = np.load(case)
    ids, eos = g["ids"].tolist(), tuple(g["eos"].tolist()) if "eos" in g else (2,)
    settings = {
        "look_ahead": int(g["look_ahead"]),
        "width": int(g["pool"]),
        "chunk": int(g["chunk"]),
        "rate": str(g["rate"]),
    }
    choice = reference.choose(ids, **settings, eos=eos)
    assert choice.look_ahead_tokens == g["lookahead_tokens"].tolist()
    assert choice.num_queries == int(g["valid"])
    np.testing.assert_allclose(choice.importance, g["importance"], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(choice.chunk_scores, g["chunk_scores"], rtol=1e-4, atol=1e-6)
    assert choice.kept == g["kept"].tolist()
    assert choice.margin == pytest.approx(float(g["margin"]), abs=1e-4)
    tokens, logits = reference.answer(ids, choice.kept, len(g["tokens"]))
    assert relative_error(logits[0], g["logits"]) < 1e-4
    assert tokens == g["tokens"].tolist()
    np.testing.assert_allclose(reference.logits_of(ids, choice.kept, tokens), logits, rtol=1e-9, atol=1e-9)


def test_there_are_goldens_of_every_kind():
    cases = [np.load(path) for path in goldens()]
    assert len(cases) == 45
    assert {int(g["look_ahead"]) for g in cases} == {1, 4, 8}
    assert {len(g["ids"]) for g in cases} >= {1, 2, 31, 32, 33, 64, 65, 257, 500}
    assert any(int(g["valid"]) < int(g["look_ahead"]) for g in cases)
    assert any(len(g["kept"]) % int(g["chunk"]) for g in cases)


def test_pool_divides_by_the_width_everywhere():
    np.testing.assert_allclose(oracle.pool(np.array([3.0, 6.0, 9.0]), 3), [3, 6, 5])
    np.testing.assert_allclose(oracle.pool(np.array([3.0, 6.0]), 9), [1, 1])
    np.testing.assert_array_equal(oracle.pool(np.array([3.0, 6.0]), 0), [3, 6])
    np.testing.assert_array_equal(oracle.pool(np.array([3.0, 6.0]), 1), [3, 6])


def test_chunks_and_budget():
    np.testing.assert_allclose(oracle.chunk_scores(np.arange(5.0), 2), [0.5, 2.5, 4.0])
    assert oracle.kept_chunks(np.array([1.0, 3.0, 3.0, 3.0]), "0.5") == [1, 2]
    assert len(oracle.kept_chunks(np.zeros(100), "0.07")) == 7 < math.ceil(100 * 0.07)
    assert oracle.tokens_of([0, 2], 2, 5) == [0, 1, 4]
