"""`Selection`: what a caller sees of a choice, and that it waits for the device only when asked."""

import json
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chunks import choose

from specprefill_jax import selection as module
from specprefill_jax.config import SpecPrefillConfig
from specprefill_jax.errors import ArgumentError, SpecPrefillError
from specprefill_jax.kernels.chunk_topk import Choice
from specprefill_jax.planning import Reason, plan
from specprefill_jax.selection import Selection

PADDED = 8
PRODUCT = SpecPrefillConfig(0.6, chunk_size=4, tail_tokens=1, min_prompt_tokens=0)


def run(scores, forced, kept: int, tokens: int, size: int = 16) -> Choice:
    """`choose` of chunks of 4, padded to 8 chunks."""
    values = np.full(PADDED, np.nan, np.float32)
    values[: len(scores)] = scores
    mask = np.zeros(PADDED, np.bool_)
    mask[: len(forced)] = forced
    return choose(values, mask, len(scores), kept, tokens, chunk_size=4, size=size)


def select(
    scores=(1.0, 9.0, 3.0, 4.0, 5.0), tokens: int = 18, config: SpecPrefillConfig | None = None, **changes
) -> Selection:
    """The selection of a prompt of 18 tokens in chunks of 4, keeping 3 of 5."""
    decision = plan(tokens, config or PRODUCT)
    choice = run(scores, decision.forced_mask(), decision.kept_chunks, tokens)
    arguments = {
        "choice": choice,
        "chunk_scores": jnp.asarray([*scores, math.nan], jnp.float32),
        "importance": jnp.arange(PADDED * 4, dtype=jnp.float32),
        "num_queries": jnp.int32(2),
        "look_ahead_tokens": jnp.array([11, 12, 13], jnp.int32),
    }
    return Selection(decision, **(arguments | changes))


@pytest.fixture
def waits(monkeypatch):
    """A list that grows by one each time the device is waited for."""
    calls = []
    fetch = jax.device_get

    def device_get(tree):
        calls.append(1)
        return fetch(tree)

    monkeypatch.setattr(module.jax, "device_get", device_get)
    return calls


def test_selection_values(waits):
    selection = select()
    assert (selection.engaged, selection.reason, selection.num_tokens, selection.chunk_size) == (True, "engaged", 18, 4)
    assert (selection.num_chunks, selection.kept_chunks, selection.forced_chunks) == (5, 3, (0, 4))
    assert (selection.num_kept, selection.keep_rate) == (10, 10 / 18)
    assert repr(selection) == "Selection(engaged, 18 tokens, 3 of 5 chunks of 4)"
    assert not waits
    assert selection.kept_indices.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 16, 17]
    assert selection.kept_chunk_mask.tolist() == [True, True, False, False, True]
    assert selection.chunk_scores.tolist() == [1, 9, 3, 4, 5]
    assert selection.importance.tolist() == list(range(18))
    assert (selection.num_queries, selection.look_ahead_tokens) == (2, [11, 12])
    assert len(waits) == 1
    assert selection.kept_indices is selection.kept_indices
    types = [array.dtype for array in (selection.kept_indices, selection.chunk_scores, selection.importance)]
    assert types == [np.int32, np.float32, np.float32]
    assert all(type(array) is np.ndarray for array in (selection.kept_indices, selection.importance))
    assert type(selection.num_queries) is int
    assert type(selection.look_ahead_tokens[0]) is int


def test_paper_mode_asks_the_device_for_the_count(waits):
    paper = partial(SpecPrefillConfig.paper, chunk_size=4)
    kept = select(config=paper(0.6), scores=(1.0, 2.0, 3.0, 4.0, 5.0))
    assert not waits
    assert kept.num_kept == 10
    assert len(waits) == 1
    assert kept.kept_indices.tolist()[-1] == 17
    dropped = select(config=paper(0.6), scores=(5.0, 4.0, 3.0, 2.0, 1.0))
    assert dropped.num_kept == 12
    assert dropped.kept_indices.tolist() == list(range(12))
    assert dropped.keep_rate == 12 / 18


@pytest.mark.parametrize(
    "ask", ["kept_indices", "chunk_scores", "importance", "num_queries", "look_ahead_tokens", "check"]
)
def test_scores_that_are_not_finite_are_an_error_when_asked(ask, waits):
    selection = select(scores=(1.0, math.nan, 3.0, math.inf, 5.0))
    assert selection.num_kept == 10
    assert not waits
    message = r"^chunk_scores\[1\]=nan is not allowed: chunk_scores must be finite \(2 of 5 chunks are not;"
    for _ in range(2):
        with pytest.raises(SpecPrefillError, match=message):
            selection.check() if ask == "check" else getattr(selection, ask)


def test_a_choice_that_does_not_fit_its_plan_is_an_error():
    good = select()
    good.check()
    small = run(good.chunk_scores, good.plan.forced_mask(), 3, 18, size=9)
    with pytest.raises(
        SpecPrefillError, match=r"^choice.ok=False is not allowed: chunk_topk must be given finite scores"
    ):
        select(choice=small).check()
    other = run(good.chunk_scores, [False] * 5, 2, 18)
    with pytest.raises(SpecPrefillError, match=r"^kept_count=6 is not allowed: it must be the plan's 10$"):
        select(choice=other).check()


def test_choice_and_plan_go_together():
    with pytest.raises(
        ArgumentError, match=r"^choice=None is not allowed: choice must be given exactly when the plan is"
    ):
        Selection(plan(2000, SpecPrefillConfig(0.3)))
    with pytest.raises(ArgumentError, match=r"^choice=Choice"):
        Selection(plan(5, SpecPrefillConfig(0.3)), choice=select().choice)


def test_whole():
    selection = Selection.whole(70, Reason.SPECULATOR_FAILED, detail="out of memory")
    assert (selection.engaged, selection.reason, selection.detail) == (False, "speculator_failed", "out of memory")
    assert selection.kept_indices.tolist() == list(range(70))
    assert selection.kept_indices.dtype == np.int32
    assert (selection.num_kept, selection.keep_rate, selection.kept_chunks, selection.num_chunks) == (70, 1.0, 3, 3)
    assert selection.kept_chunk_mask.tolist() == [True] * 3
    assert selection.forced_chunks == ()
    assert selection.chunk_scores is None
    assert selection.importance is None
    assert (selection.num_queries, selection.look_ahead_tokens) == (0, [])
    selection.check()
    with pytest.raises(ArgumentError, match=r"^num_tokens=0 "):
        Selection.whole(0, Reason.DISABLED)
    with pytest.raises(ArgumentError, match=r"^chunk_size=0 "):
        Selection.whole(5, Reason.DISABLED, chunk_size=0)
    with pytest.raises(ArgumentError, match=r"^reason='tired' .* one of 'disabled', 'prompt_logprobs', "):
        Selection.whole(5, "tired")
    with pytest.raises(ArgumentError, match=r"^reason="):
        Selection.whole(5, Reason.ENGAGED)


def test_whole_of_a_plan():
    decision = plan(1000, SpecPrefillConfig(0.3)).read_whole(Reason.SPECULATOR_FAILED)
    selection = Selection(decision, detail="NaN")
    assert selection.num_kept == 1000
    assert selection.reason == "speculator_failed"
    assert selection.detail == "NaN"


def test_to_dict_is_json():
    assert json.loads(json.dumps(select().to_dict())) == {
        "engaged": True, "reason": "engaged", "detail": None, "num_tokens": 18, "num_kept": 10, "keep_rate": 10 / 18,
        "chunk_size": 4, "num_chunks": 5, "kept_chunks": 3, "forced_chunks": 2, "num_queries": 2,
        "predicted_gain": None, "predicted_ttft_ms": None, "over_budget": False, "divergences": {},
    }  # fmt: skip
    assert json.loads(json.dumps(Selection.whole(5, Reason.SHORT_PROMPT).to_dict()))["reason"] == "short_prompt"
