"""The choice of chunks of every backend, exactly that of the slow version."""

import functools
import logging
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specprefill_jax.kernels.chunk_topk import PADDING, chunk_topk

from .cases import (
    BACKENDS,
    CHUNK_SHAPES,
    NOTHING,
    ChunkShape,
    Prompt,
    arguments,
    check_choice,
    check_types,
    slow_kept,
    token_ids,
    tokens_of,
)

property_test = partial(settings, deadline=None, max_examples=40)
TINY = float(np.finfo(np.float32).smallest_subnormal)
NORMAL = float(np.finfo(np.float32).tiny)
# Few distinct values, so that ties are common; zero of both signs, and what a CPU may flush to it.
score = st.one_of(
    st.sampled_from([0.0, -0.0, 0.25, 0.5, TINY, -TINY, 2 * TINY, NORMAL]),
    st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=True),
)
TOKENS = CHUNK_SHAPES["tokens"]


@pytest.fixture(autouse=True)
def no_kernel_is_replaced(caplog):
    """A kernel that leaves its work to the reference says so; none of this must come to that."""
    yield
    records = [record for record in caplog.get_records("call") if record.name.startswith("specprefill_jax")]
    assert [record.getMessage() for record in records if record.levelno >= logging.WARNING] == []


@functools.cache
def program(backend, chunk: int, size: int):
    return jax.jit(functools.partial(chunk_topk, chunk_size=chunk, size=size, backend=backend))


def call(backend, shape: ChunkShape, *args):
    got = program(backend, shape.chunk, shape.size)(*args)
    return type(got)(*map(np.asarray, got))


def run(backend, shape: ChunkShape, prompts: list[Prompt], fill: float = np.nan):
    return call(backend, shape, *arguments(shape, prompts, fill))


def plain(count: int, kept: int, tokens: int | None = None, forced=(), seed: int = 0) -> Prompt:
    """Distinct scores, in an order that the seed decides."""
    scores = np.random.default_rng(seed).permutation(count) / 64
    return Prompt(scores.tolist(), [chunk in forced for chunk in range(count)], kept, tokens or count)


def check(backend, shape: ChunkShape, prompts: list[Prompt], fill: float = np.nan) -> None:
    got = run(backend, shape, prompts, fill)
    for row, prompt in enumerate(prompts):
        check_choice(got, shape, row, prompt)


@st.composite
def sound(draw, shape: ChunkShape) -> Prompt:
    """A prompt that fits the shape: tokens, chunks, a budget, and forced chunks within it."""
    tokens = draw(st.integers(1, min(shape.slots, shape.padded * shape.chunk)))
    count = -(-tokens // shape.chunk)
    most = min(count, shape.size // shape.chunk)
    kept = draw(st.one_of(st.integers(1, most), st.just(most)))
    values = np.array(draw(st.lists(score, min_size=1, max_size=9)))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    scores = rng.choice(values, count).tolist()
    forced = rng.permutation(count)[: draw(st.integers(0, kept))]
    return Prompt(scores, [chunk in forced for chunk in range(count)], kept, tokens)


def test_padding_is_what_the_cases_take_it_for():
    assert PADDING == NOTHING


# --- against the slow version -----------------------------------------------------------------------------------------


def check_last_chunk(backend, shape: ChunkShape) -> None:
    """At many lengths: kept by its score, kept by force, and dropped."""
    last = min(shape.slots, shape.padded * shape.chunk)
    for tokens in range(last, max(last - 2 * shape.chunk, 0), -max(shape.chunk // 12, 1)):
        count = -(-tokens // shape.chunk)
        kept = max(min(count, shape.size // shape.chunk) - 1, 1)
        falling = [-float(chunk) for chunk in range(count)]
        none = [False] * count
        pairs = [(falling[::-1], none), (falling, [*none[:-1], True]), (falling, none)]
        check(backend, shape, [Prompt(scores, forced, kept, tokens) for scores, forced in pairs])


@pytest.mark.parametrize("name", CHUNK_SHAPES)
def test_agrees_with_the_slow_version(name):
    """All of a shape in one test, which compiles its programs once."""
    shape = CHUNK_SHAPES[name]
    for backend in BACKENDS:
        check_types(run(backend, shape, [plain(1, 1)] * shape.batch), shape)
        check(backend, shape, [plain(1, 1)] * shape.batch)
        check_last_chunk(backend, shape)

    @property_test()
    @given(prompts=st.lists(sound(shape), min_size=shape.batch, max_size=shape.batch))
    def check_drawn(prompts):
        for backend in BACKENDS:
            check(backend, shape, prompts)

    check_drawn()


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_kept(backend):
    check(backend, TOKENS, [plain(48, 48), plain(48, 48, forced=range(48)), plain(5, 5, forced=[2])])


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_budget(backend):
    shape = TOKENS
    for kept in range(1, 49):
        forced = range(47, 47 - kept // 2, -1)
        check(backend, shape, [plain(48, kept, seed=kept), plain(48, kept, forced=forced), plain(kept, kept)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_forced_chunks_count_towards_the_budget(backend):
    scores = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]
    forced = [False, False, False, True, False, True]
    got = run(backend, TOKENS, [Prompt(scores, forced, kept, 6) for kept in (2, 3, 5)])
    assert [np.flatnonzero(row).tolist() for row in got.kept_chunk_mask] == [[3, 5], [0, 3, 5], [0, 1, 2, 3, 5]]
    assert got.kept_tokens[1].tolist() == [49, 52, 54, *[0] * 45]
    assert got.ok.all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_ties_go_to_the_lower_chunk(backend):
    same = [0.5] * 48
    none = [False] * 48
    end = [*none[:-1], True]
    check(backend, TOKENS, [Prompt(same, none, 7, 48), Prompt(same, end, 7, 48), Prompt([-1e30] * 48, none, 47, 48)])
    two = [0.5, 0.25] * 24
    check(backend, TOKENS, [Prompt(two, none, kept, 48) for kept in (23, 24, 25)])


@pytest.mark.parametrize("backend", BACKENDS)
def test_zeros_tie_and_what_is_below_normal_is_in_order(backend):
    rising = [-NORMAL, -2 * TINY, -TINY, -0.0, 0.0, TINY, 2 * TINY, NORMAL / 2, NORMAL - TINY, NORMAL, 2 * NORMAL]
    none = [False] * len(rising)
    for kept in range(1, len(rising) + 1):
        prompts = [Prompt(scores, none, kept, len(rising)) for scores in (rising, rising[::-1])]
        check(backend, TOKENS, [*prompts, Prompt([-0.0, 0.0] * 5 + [-TINY], none, kept, 11)])
    got = run(
        backend,
        TOKENS,
        [Prompt(s, [False] * 3, 1, 3) for s in ([-0.0, 0.0, 0.0], [0.0, -0.0, TINY], [-TINY, -0.0, 0.0])],
    )
    assert got.kept_indices[:, 0].tolist() == [0, 2, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_extremes_of_float32(backend):
    most = float(np.finfo(np.float32).max)
    scores = [-most, -1.0, most, 1.0, np.nextafter(np.float32(1), np.float32(2)), -most, most]
    none = [False] * 7
    for kept in (1, 3, 6):
        check(backend, TOKENS, [Prompt(scores, none, k, 7) for k in (kept, kept + 1, 7)])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fill", [np.nan, np.inf, -np.inf, 3e38])
def test_what_lies_past_the_chunks_does_not_matter(fill, backend):
    check(backend, TOKENS, [plain(1, 1), plain(20, 7, forced=[3]), plain(47, 46)], fill)
    check(backend, CHUNK_SHAPES["few_kept"], [plain(3, 1, 15), plain(32, 9, 224), plain(39, 9, 270)], fill)


@pytest.mark.parametrize("backend", BACKENDS)
def test_token_mode_of_a_long_prompt(backend):
    shape = ChunkShape(131072, 1, 13108, 131072, 2)
    rng = np.random.default_rng(0)
    prompts = []
    for tokens, kept in ((131072, 13108), (100003, 10001)):
        scores = rng.integers(0, 5000, tokens) / np.float32(4096)  # each value about 26 times
        forced = np.zeros(tokens, np.bool_)
        forced[[0, *range(tokens - 64, tokens)]] = True
        prompts.append(Prompt(scores.tolist(), forced.tolist(), kept, tokens))
    check(backend, shape, prompts)


# --- faults -----------------------------------------------------------------------------------------------------------

GOOD = plain(40, 9, seed=1), plain(33, 33, seed=2)


def check_bad(backend, bad: Prompt):
    """`ok` tells the bad prompt in the middle from the others, which are right."""
    got = run(backend, TOKENS, [GOOD[0], bad, GOOD[1]])
    check_choice(got, TOKENS, 0, GOOD[0])
    check_choice(got, TOKENS, 2, GOOD[1])
    assert got.ok.tolist() == [True, False, True]
    return got


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_ranks_last(sign, backend):
    """Whichever its sign bit, and lower chunks before higher; also if no other is left to keep."""
    for places, kept in [([0], 9), ([3, 7], 38), ([3, 7], 39), ([39], 40), (range(40), 5)]:
        good = plain(40, kept)
        scores = [np.copysign(np.nan, sign) if chunk in places else s for chunk, s in enumerate(good.scores)]
        bad = good._replace(scores=scores)
        check_choice(check_bad(backend, bad), TOKENS, 1, bad, ok=False)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_scores_that_are_not_finite(value, backend):
    """Kept or not, forced or not."""
    for place, kept, forced in [(0, 9, ()), (39, 9, ()), (17, 40, ()), (17, 9, (17,))]:
        good = plain(40, kept, forced=forced)
        scores = [value if chunk == place else s for chunk, s in enumerate(good.scores)]
        check_bad(backend, good._replace(scores=scores))


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_forced_than_kept(backend):
    check_bad(backend, plain(40, 4, forced=range(5)))
    check_bad(backend, plain(40, 39, forced=range(40)))


WILD = (-(2**31), -(2**31) + 1, -1, 0, 49, 50, 2**16, 2**24, 2**31 - 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("field", ["num_chunks", "kept_chunks", "num_tokens", "both"])
def test_counts_out_of_range(field, backend):
    """The others of the batch are right whatever the number; `both` is one that num_chunks and num_tokens agree on."""
    for value in (*WILD, *([41] if field == "kept_chunks" else [39, 41] if field != "both" else [])):
        args = list(arguments(TOKENS, [GOOD[0], plain(40, 9), GOOD[1]]))
        args[0] = np.nan_to_num(args[0])  # nothing but the number is wrong
        args[1][1] = False
        for place, name in ((2, "num_chunks"), (3, "kept_chunks"), (4, "num_tokens")):
            if field == name or (field == "both" and name != "kept_chunks"):
                args[place][1] = value
        got = call(backend, TOKENS, *args)
        assert got.ok.tolist() == [True, False, True], value
        check_choice(got, TOKENS, 0, GOOD[0])
        check_choice(got, TOKENS, 2, GOOD[1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_that_do_not_fit_the_chunks(backend):
    shape = CHUNK_SHAPES["few_kept"]
    for tokens, ok in [(21, False), (22, True), (28, True), (29, False), (0, False), (278, False)]:
        prompts = [plain(40, 9, 278), plain(4, 2, tokens), plain(1, 1, 7)]
        prompts[1] = prompts[1]._replace(tokens=tokens)
        got = run(backend, shape, prompts)
        assert got.ok.tolist() == [True, ok, True], tokens
        for row in (0, 1, 2) if ok else (0, 2):
            check_choice(got, shape, row, prompts[row])


@pytest.mark.parametrize("backend", BACKENDS)
def test_size_too_small(backend):
    """65 tokens are 9 chunks of 7 and 2 more: 10 chunks fit where the short last one has but 2 tokens."""
    shape = CHUNK_SHAPES["few_kept"]
    fits = plain(10, 10, 65)
    forced = plain(40, 10, 275, forced=[39])  # 273 tokens in the 39 before
    too_many = [
        plain(40, 10, 278),
        plain(10, 10, 66),
        plain(40, 40, 278),
        plain(10, 10, 70, forced=[9]),
        plain(40, 10, 276, forced=[39]),
    ]
    check(backend, shape, [fits, forced, plain(9, 9, 63)])
    for bad in too_many:
        got = run(backend, shape, [fits, bad, forced])
        assert got.ok.tolist() == [True, False, True], bad
        check_choice(got, shape, 0, fits)
        check_choice(got, shape, 2, forced)


def is_sound(shape: ChunkShape, scores, forced, count: int, kept: int, tokens: int) -> bool:
    if not (1 <= count <= shape.padded and 1 <= kept <= count and -(-tokens // shape.chunk) == count):
        return False
    if not np.isfinite(scores[:count]).all() or forced[:count].sum() > kept:
        return False
    return len(tokens_of(slow_kept(scores[:count], forced[:count], kept), shape.chunk, tokens)) <= shape.size


@property_test()
@given(data=st.data())
def test_ok_is_right_for_any_counts(data):
    """Sound prompts and unsound ones side by side."""
    shape = CHUNK_SHAPES["few_kept"]
    number = st.one_of(st.integers(0, 41), st.sampled_from(WILD))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    scores = rng.choice(
        np.array([0, -0.0, 0.5, 1, np.nan, np.inf], np.float32), (3, 40), p=[0.3, 0.2, 0.2, 0.28, 0.01, 0.01]
    )
    forced = rng.random((3, 40)) < 0.05
    rows = []
    for _ in range(3):
        count, kept, past = data.draw(st.tuples(number, number, st.integers(-1, 8)))
        tokens = (count - 1) * 7 + past
        rows.append((count, kept, tokens if 0 <= tokens <= 278 else 5))
    counts = np.array(rows, np.int64).T.astype(np.int32)
    for backend in BACKENDS:
        got = call(backend, shape, scores, forced, *counts, token_ids(shape))
        for row, (count, kept, tokens) in enumerate(rows):
            fine = is_sound(shape, scores[row], forced[row], count, kept, tokens)
            assert bool(got.ok[row]) is fine
            if fine:
                prompt = Prompt(scores[row, :count].tolist(), forced[row, :count].tolist(), kept, tokens)
                check_choice(got, shape, row, prompt)


def test_no_backend_named_is_the_reference_on_a_cpu():
    check(None, TOKENS, [plain(40, 9), plain(1, 1), plain(48, 48)])


@pytest.mark.parametrize("name", ["cuda", "", "Reference", "triton_interpreted"])
def test_unknown_backend(name):
    args = arguments(TOKENS, [plain(40, 9)] * 3)
    with pytest.raises(ValueError) as caught:
        chunk_topk(*args, chunk_size=1, size=48, backend=name)
    for allowed in ("reference", "triton", "triton_interpret", "mosaic_tpu", "mosaic_tpu_interpret"):
        assert allowed in str(caught.value)
