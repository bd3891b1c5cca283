"""Answers that are decoded in one batch: each as if it were alone."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import pytest
from agreement import prompt_of

from specprefill_jax import SamplingParams, SpecPrefillConfig
from specprefill_jax.cache import KVCache, put_row
from specprefill_jax.errors import ArgumentError
from specprefill_jax.planning import Reason
from specprefill_jax.selection import Selection
from specprefill_jax.together import answer_together

TWELVE = SamplingParams(max_tokens=12, ignore_eos=True)


def selections_of(model, ids) -> list[Selection]:
    """The whole prompt, a choice of the speculator's, and some chunks of eight."""
    config = SpecPrefillConfig.paper(0.3, look_ahead=4, chunk_size=8)
    chosen = model.select_many(ids, [config])[0]
    last = (len(ids) - 1) // 8
    ends = [Selection.of_chunks(ids, sorted({*range(min(kept, last)), last}), chunk_size=8) for kept in (0, 2)]
    return [Selection.whole(len(ids), Reason.DISABLED), chosen, *ends]


def answers(outputs) -> list[tuple]:
    return [(output.token_ids, output.text, output.finish_reason) for output in outputs]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 130, 300])
def test_each_answer_is_the_one_that_generate_gives(tiny, length):
    ids = prompt_of(length)
    selections = selections_of(tiny, ids)
    together = answer_together(tiny, ids, selections, TWELVE, 6)
    alone = [tiny.generate(ids, TWELVE, selection=selection) for selection in selections]
    assert answers(together) == answers(alone)
    assert [output.selection for output in together] == selections
    for output, selection in zip(together, selections, strict=True):
        timings = output.timings
        assert timings.tokens == {"main_prefill": selection.num_kept, "first_token": 1, "decode": 11}
        assert timings.main_prefill > 0
        assert timings.decode > 0


def test_an_answer_does_not_depend_on_the_others(tiny):
    ids = prompt_of(200)
    selections = selections_of(tiny, ids)
    wanted = answers(answer_together(tiny, ids, selections, TWELVE, 4))
    for index, selection in enumerate(selections):
        assert answers(answer_together(tiny, ids, [selection], TWELVE, 4)) == wanted[index : index + 1]
    assert answers(answer_together(tiny, ids, selections[::-1], TWELVE, 4)) == wanted[::-1]


def test_each_ends_where_it_would(tiny):
    ids = prompt_of(130)
    selections = selections_of(tiny, ids)
    free = [output.token_ids for output in answer_together(tiny, ids, selections, TWELVE, 4)]
    ends = free[0][3], free[1][6]
    stopping = dataclasses.replace(TWELVE, stop_token_ids=ends)
    found = answer_together(tiny, ids, selections, stopping, 4)
    assert answers(found) == answers(tiny.generate(ids, stopping, selection=s) for s in selections)
    for output, tokens in zip(found, free, strict=True):
        first = min((tokens.index(end) for end in ends if end in tokens), default=11)
        assert output.token_ids == tokens[: first + 1]
        assert output.timings.tokens.get("decode", 0) == first
    one = answer_together(tiny, ids, selections, SamplingParams(max_tokens=1), 4)
    assert [output.token_ids for output in one] == [tokens[:1] for tokens in free]


def test_at_the_end_of_the_context(tiny):
    ids = prompt_of(tiny.max_prompt_tokens - 3)
    selections = selections_of(tiny, ids)
    found = answer_together(tiny, ids, selections, TWELVE, 5)
    assert [len(output.token_ids) for output in found] == [3] * 4
    assert answers(found) == answers(tiny.generate(ids, TWELVE, selection=s) for s in selections)


@pytest.mark.parametrize(
    ("count", "sampling", "message"),
    [
        (0, TWELVE, "selections=0 is not allowed: selections must be 1 to 3, as many as there are rows"),
        (4, TWELVE, "selections=4 is not allowed: selections must be 1 to 3"),
        (1, SamplingParams(temperature=0.5), "greedy, without repetition penalty and log-probabilities"),
        (1, SamplingParams(repetition_penalty=1.2), "greedy, without repetition penalty and log-probabilities"),
        (1, SamplingParams(logprobs=1), "greedy, without repetition penalty and log-probabilities"),
    ],
)
def test_what_is_not_allowed(tiny, count, sampling, message):
    ids = prompt_of(130)
    with pytest.raises(ArgumentError, match=re.escape(message)):
        answer_together(tiny, ids, selections_of(tiny, ids)[:count], sampling, 3)


def test_what_generate_refuses(tiny):
    ids = prompt_of(130)
    with pytest.raises(ArgumentError, match="selection must be a selection of this prompt"):
        answer_together(tiny, prompt_of(131), selections_of(tiny, ids), TWELVE, 4)
    whole = prompt_of(tiny.max_prompt_tokens)
    with pytest.raises(ArgumentError, match="to leave room for an answer"):
        answer_together(tiny, whole, [Selection.whole(len(whole), Reason.DISABLED)], TWELVE, 4)


def test_put_row():
    into = KVCache(*(jnp.zeros((2, 3, 1, 5, 4)) for _ in range(2)), jnp.zeros((3, 5), jnp.int32))
    row = KVCache(jnp.full((2, 1, 1, 4, 4), 2.0), jnp.full((2, 1, 1, 4, 4), 3.0), jnp.arange(4, dtype=jnp.int32)[None])
    found = put_row(into, row, jnp.int32(1))
    for array, value in ((found.k, 2.0), (found.v, 3.0)):
        wanted = np.zeros((2, 3, 1, 5, 4))
        wanted[:, 1, :, :4] = value
        np.testing.assert_array_equal(array, wanted)
    assert found.positions.tolist() == [[0] * 5, [0, 1, 2, 3, 0], [0] * 5]
