"""Budget, plan and choice, against slow versions and the goldens."""

import dataclasses
import math
from decimal import ROUND_CEILING, Decimal
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from chunks import choose
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from specprefill_jax.config import SpecPrefillConfig
from specprefill_jax.errors import ArgumentError
from specprefill_jax.kernels.chunk_topk import PADDING
from specprefill_jax.planning import Plan, Reason, budget, num_chunks, plan
from specprefill_jax.selection import Selection

GOLDENS = sorted((Path(__file__).parent / "data" / "goldens").glob("tiny_*.npz"))
PADDED = 48
"""Chunks every drawn case is padded to, so that hypothesis compiles one program a chunk size."""

property_test = partial(settings, deadline=None)
# Zero of both signs and few distinct values, so that ties are common; no subnormals, which a CPU may flush.
score = st.one_of(
    st.sampled_from([0.0, -0.0, 0.25, 0.5]), st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False)
)


def ungated(keep_rate: float = 0.3, **changes) -> SpecPrefillConfig:
    """Product mode with the smallest tail and no length gate."""
    return SpecPrefillConfig(keep_rate, **{"tail_tokens": 1, "min_prompt_tokens": 0, **changes})


def slow_choice(scores, forced, kept: int, tokens: int, size: int) -> tuple[list[int], list[int]]:
    """Chunks and tokens by sorting: forced first, then the higher score, then the lower chunk."""
    order = sorted(range(len(scores)), key=lambda chunk: (not forced[chunk], -scores[chunk], chunk))
    chunks = sorted(order[:kept])
    return chunks, [token for chunk in chunks for token in range(chunk * size, min(chunk * size + size, tokens))]


def padded(values, fill, dtype, size: int = PADDED) -> np.ndarray:
    out = np.full(size, fill, dtype)
    out[: len(values)] = values
    return out


def run(scores, forced, kept: int, tokens: int, chunk: int, size: int | None = None, fill=np.nan):
    """`choose` on padded inputs; what lies in the padding must not matter."""
    return choose(
        padded(scores, fill, np.float32), padded(forced, True, np.bool_), len(scores), kept, tokens,
        chunk_size=chunk, size=PADDED * chunk if size is None else size,
    )  # fmt: skip


# --- budget -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "rate", "kept"),
    [
        (50, 0.3, 15), (10, 0.1, 1), (11, 0.1, 2), (100, 0.07, 7), (3, 0.7, 3), (1, 0.1, 1), (1, 1, 1), (7, 1.0, 7),
        (100000, 1e-05, 1), (100001, 1e-05, 2), (5, 1e-300, 1), (50, np.float64(0.3), 15), (50, np.float32(0.3), 15),
        (50, np.float16(0.3), 15), (131072, 0.1, 13108),
    ],
)  # fmt: skip
def test_budget(chunks, rate, kept):
    assert budget(chunks, rate) == kept


@property_test()
@given(chunks=st.integers(1, 200_000), places=st.integers(0, 6), data=st.data())
@example(chunks=50, places=1, data=None)
def test_budget_is_exact_for_decimals(chunks, places, data):
    """Against integers: n / 10**places of the chunks, rounded up."""
    scale = 10**places
    share = 3 if data is None else data.draw(st.integers(1, scale))
    rate = share / scale
    assert budget(chunks, rate) == (chunks * share + scale - 1) // scale


@property_test()
@given(chunks=st.integers(1, 10**6), rate=st.floats(1e-12, 1.0))
def test_budget_is_exact_as_written(chunks, rate):
    exact = (Decimal(repr(rate)) * chunks).to_integral_value(ROUND_CEILING)
    assert budget(chunks, rate) == int(exact)
    assert 1 <= int(exact) <= chunks


@pytest.mark.parametrize(
    ("tokens", "chunk", "chunks"),
    [(1, 32, 1), (31, 32, 1), (32, 32, 1), (33, 32, 2), (64, 32, 2), (65, 32, 3), (9, 1, 9)],
)
def test_num_chunks(tokens, chunk, chunks):
    assert num_chunks(tokens, chunk) == chunks


# --- plan -------------------------------------------------------------------------------------------------------------


def test_plan_of_the_defaults():
    decision = plan(2000, SpecPrefillConfig(0.15))
    assert decision == Plan(
        engaged=True, reason=Reason.ENGAGED, num_tokens=2000, chunk_size=32, num_chunks=63, kept_chunks=10,
        forced_chunks=(0, 60, 61, 62), max_kept_tokens=9 * 32 + 16, num_kept_tokens=9 * 32 + 16, predicted_gain=None,
    )  # fmt: skip
    assert hash(decision) == hash(plan(2000, SpecPrefillConfig(0.15)))


@pytest.mark.parametrize(
    ("tail", "header", "forced"),
    [
        (1, 0, (0, 3)), (2, 0, (0, 3)), (3, 0, (0, 2, 3)), (1, 6, (0, 2, 3)), (7, 1, (0, 1, 2, 3)),
        (12, 13, (0, 1, 2, 3)), (500, 0, (0, 1, 2, 3)),
    ],
)  # fmt: skip
def test_tail_keeps_every_chunk_it_touches(tail, header, forced):
    """14 tokens in chunks of 4: the last chunk, of tokens 12 and 13, is short."""
    config = ungated(0.9, chunk_size=4, tail_tokens=tail)
    assert plan(14, config, generation_tail=header).forced_chunks == forced


def test_forced_spans_keep_every_chunk_they_touch():
    config = ungated(0.9, chunk_size=4, forced_spans=((7, 9),))
    assert plan(40, config, forced_spans=[(20, 21), (27, 28)]).forced_chunks == (0, 1, 2, 5, 6, 9)
    assert plan(40, config).forced_mask().tolist() == [True, True, True, *[False] * 6, True]
    assert plan(40, config).forced_mask(16).tolist()[10:] == [False] * 6


@pytest.mark.parametrize(
    ("changes", "arguments", "reason"),
    [
        ({"enabled": False}, {}, "disabled"),
        ({"enabled": False, "mode": "paper"}, {}, "disabled"),
        ({}, {"needs_prompt_logprobs": True}, "prompt_logprobs"),
        ({"min_prompt_tokens": 1001}, {}, "short_prompt"),
        ({"keep_rate": 1.0}, {}, "nothing_to_drop"),
        ({"chunk_size": 512, "keep_rate": 0.51}, {}, "nothing_to_drop"),
        ({"keep_rate": 0.125}, {}, "forced_cover_budget"),
        ({"keep_rate": 0.1}, {}, "forced_cover_budget"),
        ({}, {"forced_spans": ((0, 260),)}, "forced_cover_budget"),
        ({}, {"generation_tail": 300}, "forced_cover_budget"),
        ({}, {"predicted_gain": 1.09}, "low_predicted_gain"),
        ({"min_predicted_gain": 3.0}, {"predicted_gain": lambda kept: 2.9}, "low_predicted_gain"),
    ],
)
def test_read_whole(changes, arguments, reason):
    decision = plan(1000, SpecPrefillConfig(**{"keep_rate": 0.3, **changes}), **arguments)
    assert decision.reason == reason
    assert not decision.engaged
    assert decision.kept_chunks == decision.num_chunks
    assert decision.num_kept_tokens == decision.max_kept_tokens == 1000


@pytest.mark.parametrize(
    ("changes", "arguments"),
    [
        ({}, {}),
        ({"keep_rate": 0.13}, {}),  # 5 chunks, 4 of them forced
        ({"min_prompt_tokens": 1000}, {}),
        ({}, {"predicted_gain": 1.1}),
        ({"min_predicted_gain": 0.0}, {"predicted_gain": 0.2}),
        ({"mode": "paper", "min_prompt_tokens": 5000}, {"predicted_gain": 0.2, "generation_tail": 10}),
        ({"mode": "paper", "keep_rate": 1.0}, {}),
    ],
)
def test_read_in_part(changes, arguments):
    decision = plan(1000, SpecPrefillConfig(**{"keep_rate": 0.3, **changes}), **arguments)
    assert decision.engaged
    assert decision.reason == "engaged"


def test_the_first_reason_counts():
    """Every gate is shut; opening them one by one gives the reasons in the order in which they are declared."""
    config = SpecPrefillConfig(1.0, min_prompt_tokens=2000, enabled=False)
    arguments = {"needs_prompt_logprobs": True, "predicted_gain": 0.5}
    reasons = []
    for change in ({}, {"enabled": True}, None, {"min_prompt_tokens": 0}, {"keep_rate": 0.1}, {"keep_rate": 0.5}):
        if change is None:
            arguments["needs_prompt_logprobs"] = False
        config = dataclasses.replace(config, **(change or {}))
        reasons.append(plan(1000, config, **arguments).reason)
    assert reasons == list(Reason)[1:7]
    assert [str(reason) for reason in Reason] == [
        "engaged", "disabled", "prompt_logprobs", "short_prompt", "nothing_to_drop", "forced_cover_budget",
        "low_predicted_gain", "information_dense", "speculator_failed",
    ]  # fmt: skip


def test_gain_is_asked_for_the_kept_tokens_and_only_if_it_decides():
    asked = []

    def gain(kept: int) -> float:
        asked.append(kept)
        return 2.5

    assert plan(1000, SpecPrefillConfig(0.3), predicted_gain=gain).predicted_gain == 2.5
    assert asked == [9 * 32 + 8]
    plan(100, SpecPrefillConfig(0.3), predicted_gain=gain)
    plan(1000, SpecPrefillConfig.paper(0.3), predicted_gain=gain)
    assert len(asked) == 1


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 64, 65, 97])
@pytest.mark.parametrize("rate", [0.1, 0.3, 1.0])
def test_paper_mode_forces_and_gates_nothing(tokens, rate):
    decision = plan(tokens, SpecPrefillConfig.paper(rate))
    chunks = math.ceil(tokens / 32)
    assert decision.engaged
    assert decision.forced_chunks == ()
    assert decision.kept_chunks == budget(chunks, rate)
    if decision.kept_chunks == chunks:
        assert decision.num_kept_tokens == decision.max_kept_tokens == tokens
    else:
        assert decision.num_kept_tokens == (None if tokens % 32 else 32 * decision.kept_chunks)
        assert decision.max_kept_tokens == 32 * decision.kept_chunks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_tokens": 0}, "num_tokens=0 is not allowed: num_tokens must be an integer of at least 1"),
        ({"num_tokens": 9.0}, "num_tokens=9.0 is not allowed: num_tokens must be an integer of at least 1"),
        ({"generation_tail": -1},
         "generation_tail=-1 is not allowed: generation_tail must be an integer from 0 to 100"),
        ({"generation_tail": 101},
         "generation_tail=101 is not allowed: generation_tail must be an integer from 0 to 100"),
        ({"needs_prompt_logprobs": 1},
         "needs_prompt_logprobs=1 is not allowed: needs_prompt_logprobs must be True or False"),
        ({"predicted_gain": math.nan},
         "predicted_gain=nan is not allowed: predicted_gain must be a finite number above 0, or None"),
        ({"predicted_gain": lambda kept: 0.0},
         "predicted_gain=0.0 is not allowed: predicted_gain must be a finite number above 0, or None"),
        ({"forced_spans": [(0, 5), (90, 101)]},
         "forced_spans[1]=(90, 101) is not allowed: forced_spans[1] must be pairs (start, end) of token offsets with "
         "0 <= start < end <= 100, the prompt's length"),
        ({"config": ungated(forced_spans=((100, 101),))},
         "config.forced_spans[0]=(100, 101) is not allowed: config.forced_spans[0] must be pairs (start, end) of token "
         "offsets with 0 <= start < end <= 100, the prompt's length"),
        ({"config": SpecPrefillConfig.paper(0.1), "forced_spans": [(0, 5)]},
         "forced_spans=((0, 5),) is not allowed: forced_spans must be empty in paper mode, which forces nothing"),
        ({"config": SpecPrefillConfig.paper(0.1), "needs_prompt_logprobs": True},
         "needs_prompt_logprobs=True is not allowed: needs_prompt_logprobs must be False in paper mode, which reads no "
         "prompt whole: log-probabilities need every token"),
    ],
)  # fmt: skip
def test_plan_refuses(arguments, message):
    arguments = {"num_tokens": 100, "config": ungated(chunk_size=4), **arguments}
    with pytest.raises(ArgumentError) as refusal:
        plan(arguments.pop("num_tokens"), arguments.pop("config"), **arguments)
    assert str(refusal.value) == message


@property_test(max_examples=300)
@given(
    tokens=st.integers(1, 3000), rate=st.floats(0.001, 1.0), chunk=st.integers(1, 70), tail=st.integers(1, 200),
    header=st.integers(0, 100), starts=st.lists(st.tuples(st.integers(0, 2999), st.integers(1, 300)), max_size=3),
)  # fmt: skip
def test_product_mode_is_whole_or_has_a_ranked_chunk(tokens, rate, chunk, tail, header, starts):
    spans = [(start, min(start + length, tokens)) for start, length in starts if start < tokens]
    config = ungated(rate, chunk_size=chunk, tail_tokens=tail)
    decision = plan(tokens, config, forced_spans=spans, generation_tail=min(header, tokens))
    if not decision.engaged:
        assert decision.reason in (Reason.NOTHING_TO_DROP, Reason.FORCED_COVER_BUDGET)
        assert decision.num_kept_tokens == tokens
        return
    assert (
        len(decision.forced_chunks)
        < decision.kept_chunks
        == budget(num_chunks(tokens, chunk), rate)
        < decision.num_chunks
    )
    must = {0, *range(max(tokens - max(tail, header), 0), tokens), *(t for span in spans for t in range(*span))}
    assert {token // chunk for token in must} == set(decision.forced_chunks)
    assert decision.num_kept_tokens == decision.max_kept_tokens < tokens


# --- choose -----------------------------------------------------------------------------------------------------------


@property_test(max_examples=300)
@given(scores=st.lists(score, min_size=1, max_size=PADDED), chunk=st.sampled_from([1, 3, 32]), data=st.data())
def test_choose_equals_the_slow_version(scores, chunk, data):
    scores = np.array(scores, np.float32)
    chunks = len(scores)
    tokens = (chunks - 1) * chunk + data.draw(st.integers(1, chunk))
    kept = data.draw(st.integers(1, chunks))
    forced = np.zeros(chunks, np.bool_)
    forced[data.draw(st.lists(st.integers(0, chunks - 1), max_size=kept))] = True
    choice = run(scores, forced, kept, tokens, chunk)
    expected_chunks, expected = slow_choice(scores, forced, kept, tokens, chunk)

    indices, count, mask = map(np.asarray, (choice.kept_indices, choice.kept_count, choice.kept_chunk_mask))
    assert bool(choice.ok)
    assert mask.sum() == kept
    assert np.flatnonzero(mask).tolist() == expected_chunks
    assert (mask[:chunks] | ~forced).all()
    assert indices.dtype == np.int32
    assert count.dtype == np.int32
    assert int(count) == len(expected)
    assert indices[:count].tolist() == expected
    assert (np.diff(indices[:count]) > 0).all()
    assert (indices[count:] == PADDING).all()


@property_test(max_examples=100)
@given(
    tokens=st.integers(1, 48 * 32),
    rate=st.floats(0.01, 1.0),
    mode=st.sampled_from(["paper", "product"]),
    data=st.data(),
)
def test_plan_and_choice_agree(tokens, rate, mode, data):
    decision = plan(tokens, SpecPrefillConfig(rate, mode=mode, min_prompt_tokens=0))
    assume(decision.engaged)
    scores = data.draw(st.lists(st.floats(0, 1, width=32), min_size=decision.num_chunks, max_size=decision.num_chunks))
    choice = run(scores, decision.forced_mask(), decision.kept_chunks, tokens, 32)
    assert bool(choice.ok)
    assert int(choice.kept_count) <= decision.max_kept_tokens
    assert decision.num_kept_tokens in (None, int(choice.kept_count))
    if mode == "product":
        kept = np.asarray(choice.kept_indices[: int(choice.kept_count)])
        assert kept[0] == 0
        assert kept[-1] == tokens - 1
        assert np.isin(np.arange(max(tokens - 64, 0), tokens), kept).all()


@pytest.mark.parametrize(
    ("scores", "kept", "expected"),
    [
        ([1, 1, 1, 1], 2, [0, 1]),
        ([0, 1, 1, 1], 2, [1, 2]),
        ([0.0, -0.0, 0.0], 1, [0]),
        ([-0.0, 0.0, 0.0], 1, [0]),
        ([-0.0, 0.0, -1.0], 2, [0, 1]),
        ([-1, -3, -2], 2, [0, 2]),
        ([1, np.nextafter(np.float32(1), np.float32(2)), 1], 1, [1]),
        ([np.finfo(np.float32).max, -np.finfo(np.float32).max, 0], 2, [0, 2]),
        ([5], 1, [0]),
    ],
)
def test_ties_go_to_the_lower_chunk(scores, kept, expected):
    choice = run(scores, [False] * len(scores), kept, len(scores) * 4, 4)
    assert np.flatnonzero(choice.kept_chunk_mask).tolist() == expected
    assert bool(choice.ok)


def test_forced_chunks_beat_any_score_and_count():
    choice = run([9, -5, 8, -7, 7], [False, True, False, True, False], 3, 20, 4)
    assert np.flatnonzero(choice.kept_chunk_mask).tolist() == [0, 1, 3]


@pytest.mark.parametrize("chunk", [1, 2, 32])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_lengths_around_a_chunk(chunk, offset):
    tokens = max(2 * chunk + offset, 1)
    chunks = num_chunks(tokens, chunk)
    for kept in range(1, chunks + 1):
        choice = run(np.arange(chunks), [False] * chunks, kept, tokens, chunk)
        expected = slow_choice(np.arange(chunks), [False] * chunks, kept, tokens, chunk)[1]
        assert np.asarray(choice.kept_indices)[: int(choice.kept_count)].tolist() == expected


def test_one_token():
    choice = run([0.5], [False], 1, 1, 32, size=1)
    assert choice.kept_indices.tolist() == [0]
    assert int(choice.kept_count) == 1
    assert bool(choice.ok)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 3, 6])
@pytest.mark.parametrize("forced", [False, True])
def test_scores_that_are_not_finite_clear_ok(bad, place, forced):
    scores = np.linspace(0, 1, 7)
    scores[place] = bad
    choice = run(scores, np.arange(7) == (place if forced else 5), 3, 7 * 4, 4)
    assert not bool(choice.ok)
    assert int(np.sum(choice.kept_chunk_mask)) == 3


def test_nan_ranks_last():
    for sign in (1.0, -1.0):
        choice = run([math.copysign(math.nan, sign), -9.0, -8.0], [False] * 3, 2, 12, 4)
        assert np.flatnonzero(choice.kept_chunk_mask).tolist() == [1, 2]


@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf, 0.0])
def test_padding_is_never_chosen(fill):
    choice = run([-3, -2, -1], [False] * 3, 3, 10, 4, fill=fill)
    assert np.flatnonzero(choice.kept_chunk_mask).tolist() == [0, 1, 2]
    assert bool(choice.ok)


@pytest.mark.parametrize(
    ("kept", "tokens", "forced", "size"),
    [(0, 16, 0, 16), (5, 16, 0, 16), (2, 12, 0, 16), (2, 17, 0, 16), (2, 16, 3, 16), (2, 16, 0, 7)],
    ids=["no chunk", "too many", "short prompt", "long prompt", "forced over budget", "small size"],
)
def test_arguments_that_do_not_fit_clear_ok(kept, tokens, forced, size):
    good = run([1, 2, 3, 4], [False] * 4, 2, 16, 4, size=8)
    assert bool(good.ok)
    assert good.kept_indices.tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    assert not bool(run([1, 2, 3, 4], np.arange(4) < forced, kept, tokens, 4, size=size).ok)


def test_size_need_not_be_a_whole_number_of_chunks():
    choice = run([1, 2, 3, 4], [False] * 4, 2, 14, 4, size=6)
    assert choice.kept_indices.tolist() == [8, 9, 10, 11, 12, 13]
    assert bool(choice.ok)
    assert run([1, 2], [False] * 2, 1, 14 - 8, 4, size=6).kept_indices.tolist() == [4, 5, *[PADDING] * 4]


def test_one_program_serves_all_lengths_of_a_bucket():
    run([1, 2, 3], [False] * 3, 2, 40, 16, size=64)
    compiled = choose._cache_size()
    for chunks, kept, tokens in ((1, 1, 3), (4, 2, 64), (PADDED, 3, PADDED * 16), (PADDED, 4, PADDED * 16 - 15)):
        assert bool(run(np.arange(chunks), [False] * chunks, kept, tokens, 16, size=64).ok)
    assert choose._cache_size() == compiled


@pytest.mark.parametrize(("chunks", "chunk"), [(4096, 32), (131072, 1)])
def test_long_prompts(chunks, chunk):
    rng = np.random.default_rng(chunks)
    scores = rng.integers(0, 1000, chunks).astype(np.float32)  # many ties
    kept = budget(chunks, 0.1)
    choice = choose(
        scores, np.zeros(chunks, np.bool_), chunks, kept, chunks * chunk, chunk_size=chunk, size=kept * chunk
    )
    expected = np.sort(np.argsort(-scores, kind="stable")[:kept])
    indices = (expected[:, None] * chunk + np.arange(chunk)).reshape(-1)
    np.testing.assert_array_equal(choice.kept_indices, indices)
    assert bool(choice.ok)


@pytest.mark.parametrize("case", GOLDENS, ids=lambda path: path.stem)
def test_goldens(case):
    g = np.load(case)
    tokens, chunk = len(g["ids"]), int(g["chunk"])
    decision = plan(tokens, SpecPrefillConfig.paper(float(str(g["rate"])), chunk_size=chunk))
    choice = run(g["chunk_scores"], decision.forced_mask(), decision.kept_chunks, tokens, chunk)
    selection = Selection(
        decision, choice=choice, chunk_scores=jnp.asarray(g["chunk_scores"]), importance=jnp.asarray(g["importance"]),
        num_queries=jnp.int32(g["valid"]), look_ahead_tokens=jnp.asarray(g["lookahead_tokens"], jnp.int32),
    )  # fmt: skip
    np.testing.assert_array_equal(selection.kept_indices, g["kept"])
    assert selection.look_ahead_tokens == g["lookahead_tokens"][: int(g["valid"])].tolist()
