"""Product mode: what is always kept, when a prompt is read whole and what is said of it, and the phase times."""

import math
import time
from functools import partial

import jax
import numpy as np
import oracle
import pytest
from agreement import assert_greedy, prompt_of, relative_error
from small_tokenizers import byte_level

from specprefill_jax import SamplingParams, SpecPrefillConfig, selecting
from specprefill_jax.chat_prompt import encode_chat
from specprefill_jax.kernels.chunk_topk import chunk_topk
from specprefill_jax.planning import plan
from specprefill_jax.tokens import Tokenizer

OPEN = {"min_prompt_tokens": 0, "min_predicted_gain": 0.0, "eos_token_ids": ()}  # no gate but the budget's own
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


def product(**settings) -> SpecPrefillConfig:
    return SpecPrefillConfig(**{"keep_rate": 0.3, **OPEN, **settings})


def chunks_of(selection) -> list[int]:
    return sorted({int(index) // selection.chunk_size for index in selection.kept_indices})


def span_chunks(start: int, end: int, size: int) -> set[int]:
    return {token // size for token in range(start, end)}


@pytest.mark.parametrize("length", [500, 511, 512, 513, 601])
@pytest.mark.parametrize(
    ("chunk", "tail", "spans"), [(32, 64, ()), (32, 1, ()), (16, 40, ((100, 101), (143, 145))), (8, 64, ((0, 9),))]
)
def test_kept_chunks_are_the_forced_ones_and_the_best_of_the_rest(tiny, reference, length, chunk, tail, spans):
    ids = prompt_of(length)
    selection = tiny.select(ids, product(chunk_size=chunk, tail_tokens=tail, forced_spans=spans))
    assert selection.engaged
    assert selection.reason == "engaged"
    scores = reference.choose(ids, chunk=chunk, rate="0.3").chunk_scores
    np.testing.assert_allclose(selection.chunk_scores, scores, rtol=1e-3, atol=1e-5)
    forced = {0} | span_chunks(length - tail, length, chunk)
    for start, end in spans:
        forced |= span_chunks(start, end, chunk)
    kept = chunks_of(selection)
    assert forced <= set(kept)
    assert len(kept) == math.ceil(math.ceil(length / chunk) * 3 / 10)
    assert list(selection.kept_indices) == oracle.tokens_of(kept, chunk, length)
    assert selection.kept_indices[-1] == length - 1
    # Of the others, no dropped chunk leads a kept one by more than a tie.
    ranked = sorted(set(kept) - forced)
    dropped = sorted(set(range(len(scores))) - set(kept))
    assert ranked
    assert scores[ranked].min() >= scores[dropped].max() * (1 - 1e-3)
    assert set(oracle.kept_chunks(scores, "0.3", tuple(forced))) >= forced
    assert selection.keep_rate == pytest.approx(len(selection.kept_indices) / length)


def test_logits_follow_the_last_token(tiny, reference):
    """The answer is read at position M-1, which is always kept; prefill and generate equal the oracle there."""
    ids = prompt_of(450)
    output = tiny.generate(ids, GREEDY, product())
    kept = [int(index) for index in output.selection.kept_indices]
    expected = reference.logits_of(ids, kept, output.token_ids)
    assert kept[-1] == 449
    assert relative_error(tiny.prefill(ids, output.selection), expected[0]) < 1e-3
    assert_greedy(output.token_ids, expected)


def test_a_tail_of_low_score_is_kept(tiny, reference):
    """A prompt whose last three chunks paper mode drops: product mode keeps them all the same."""
    ids = prompt_of(400, seed=10)
    choice = reference.choose(ids, look_ahead=1, width=None, chunk=16, rate="0.3")
    assert not {22, 23, 24} & set(choice.chunks)
    selection = tiny.select(ids, product(look_ahead=1, pool_width=None, chunk_size=16, tail_tokens=40))
    assert {0, 22, 23, 24} <= set(chunks_of(selection))


def assert_whole(model, reference, ids, config, reason: str):
    """Select and generate read the whole prompt, say why, and answer as the main model alone does."""
    selection = model.select(ids, config)
    assert (selection.engaged, selection.reason) == (False, reason)
    assert selection.keep_rate == 1.0
    assert list(selection.kept_indices) == list(range(len(ids)))
    output = model.generate(ids, GREEDY, config)
    assert (output.selection.engaged, output.selection.reason) == (False, reason)
    assert_greedy(output.token_ids, reference.logits_of(ids, range(len(ids)), output.token_ids))
    assert output.timings.speculate <= 1e-3 + 0.05 * output.timings.total


@pytest.mark.parametrize(
    ("length", "settings", "reason"),
    [
        (
            300,
            {"tail_tokens": 64, "keep_rate": 0.1},
            "forced_cover_budget",
        ),  # forced: first and two of the tail; budget 1
        (300, {"forced_spans": ((0, 250),)}, "forced_cover_budget"),
        (320, {"tail_tokens": 1, "keep_rate": 0.2}, "forced_cover_budget"),  # budget 2, both forced: nothing ranked
        (300, {"keep_rate": 1.0}, "nothing_to_drop"),
        (20, {}, "nothing_to_drop"),
        (1, {}, "nothing_to_drop"),
        (300, {"enabled": False}, "disabled"),
        (300, {"min_prompt_tokens": 301}, "short_prompt"),
        (300, {"min_predicted_gain": 1000.0, "tail_tokens": 1}, "low_predicted_gain"),
    ],
)
def test_prompts_that_are_read_whole(tiny, reference, length, settings, reason):
    assert_whole(tiny, reference, prompt_of(length), product(**{"tail_tokens": 32, **settings}), reason)


def test_short_prompts_are_whole_by_default(tiny, reference):
    assert_whole(tiny, reference, prompt_of(200), SpecPrefillConfig(), "short_prompt")
    assert_whole(tiny, reference, prompt_of(511), SpecPrefillConfig(keep_rate=0.1), "short_prompt")


def test_one_more_chunk_of_budget_than_is_forced_engages(tiny):
    """320 tokens are ten chunks; first and last are forced; a budget of three ranks one."""
    selection = tiny.select(prompt_of(320), product(tail_tokens=1))
    assert selection.engaged
    assert len(chunks_of(selection)) == 3
    assert {0, 9} <= set(chunks_of(selection))


def test_forced_span_past_the_prompt_is_refused(tiny):
    with pytest.raises(ValueError, match=r"(?s)(?=.*forced_spans)(?=.*401)(?=.*400)"):
        tiny.select(prompt_of(400), product(forced_spans=((390, 401),)))


def test_paper_mode_can_be_disabled_too(tiny):
    config = SpecPrefillConfig(keep_rate=0.3, mode="paper", enabled=False)
    assert tiny.select(prompt_of(100), config).reason == "disabled"


def test_paper_mode_is_never_read_whole_for_being_short(tiny):
    selection = tiny.select(prompt_of(40), SpecPrefillConfig.paper(keep_rate=0.3))
    assert selection.engaged
    assert selection.reason == "engaged"
    assert len(chunks_of(selection)) == 1


@pytest.mark.parametrize(
    "config",
    [product(), product(enabled=False), SpecPrefillConfig.paper(keep_rate=0.3)],
    ids=["sparse", "dense", "paper"],
)
def test_phases_add_up_to_the_wall_clock(tiny, config):
    """Within 2 % and 2 ms of what the caller's own clock says, in the best of three runs on a busy machine."""
    ids = prompt_of(700)
    tiny.generate(ids, GREEDY, config)
    missing = []
    for _ in range(3):
        start = time.perf_counter()
        output = tiny.generate(ids, GREEDY, config)
        wall = time.perf_counter() - start
        timings = output.timings
        phases = (
            timings.tokenise
            + timings.speculate
            + timings.score
            + timings.main_prefill
            + timings.first_token
            + timings.decode
        )
        assert phases == pytest.approx(timings.total)
        assert 0 < timings.ttft <= timings.total <= wall
        assert (timings.speculate > 1e-3 * timings.total) == output.selection.engaged
        assert timings.main_prefill > 0
        assert timings.decode > 0
        missing.append(wall - phases - 0.02 * wall)
    assert min(missing) <= 0.002


def test_output_says_what_was_decided(tiny):
    output = tiny.generate(prompt_of(600), GREEDY, product(keep_rate=0.25))
    assert output.selection.engaged is True
    assert output.selection.reason == "engaged"
    assert output.selection.num_queries == 8
    assert 0.2 < output.selection.keep_rate < 0.35
    assert output.finish_reason == "length"


def chat_tokenizer(header: str = "[assistant]") -> Tokenizer:
    """A byte or little more a token; ids that the tiny models have."""
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}" + header
    return Tokenizer(byte_level(), chat_templates={"default": template})


CHAT = [
    {"role": "system", "content": "Answer from what is found. " * 2},
    {"role": "user", "content": "Where is the boat?"},
    {"role": "tool", "content": "The river is slow. " * 18},
    {"role": "user", "content": "And which colour has it?"},
]


def test_a_chats_generation_header_is_kept_whatever_its_length(tiny, monkeypatch):
    """Longer than `tail_tokens`, and all of it is read; text given as ids has no header."""
    monkeypatch.setattr(tiny, "tokenizer", chat_tokenizer("[" + "-" * 198 + "]"))
    messages = [{"role": "tool", "content": "The river is slow. " * 15}, {"role": "user", "content": "Why?"}]
    ids = tiny.encode(messages)
    chat, plain = (tiny.select(prompt, product(keep_rate=0.7)) for prompt in (messages, ids))
    assert chat.engaged
    last = len(ids)
    assert set(range(last - 200, last)) <= set(chat.kept_indices.tolist())
    assert set(plain.forced_chunks) == {0} | span_chunks(last - 64, last, 32)
    assert set(chat.forced_chunks) == {0} | span_chunks(last - 200 - len("\n[user]Why?\n"), last, 32)


def test_a_chats_forced_spans_are_kept_whatever_the_scores(tiny, reference, monkeypatch):
    """https://github.com/jundot/omlx/issues/2439: a scorer that puts what matters last cannot have it dropped."""

    def worst_first(ahead, prompt, length, forced, chunks, kept_chunks, *, chunk_size, kept_size, size, **_):
        position = np.arange(forced.shape[-1], dtype=np.float32)
        scores = 1.0 + position * (position < 9)  # nothing for system prompt and tail, most for the middle
        choose = jax.jit(partial(chunk_topk, chunk_size=chunk_size, size=kept_size))
        choice = choose(scores[None], forced, chunks, kept_chunks, length, prompt)
        row = jax.tree.map(lambda values: values[0], choice)
        return np.zeros(size, np.float32), scores, row, ahead.num_queries[0], ahead.tokens[0]

    monkeypatch.setattr(selecting, "score_and_choose", worst_first)
    monkeypatch.setattr(tiny, "tokenizer", chat_tokenizer())
    config = product(keep_rate=0.6, tail_tokens=1)
    output = tiny.generate(CHAT, GREEDY, config)
    ids = tiny.encode(CHAT).tolist()
    prompt = encode_chat(tiny.tokenizer, CHAT)
    kept = output.selection.kept_indices.tolist()
    assert output.selection.engaged
    planned = plan(len(ids), config, forced_spans=prompt.forced_spans, generation_tail=prompt.generation_tail)
    assert output.selection.forced_chunks == planned.forced_chunks
    for start, end in prompt.forced_spans:
        assert set(range(start, end)) <= set(kept)
    assert prompt.forced_spans[-1][1] == len(ids) == kept[-1] + 1
    assert tiny.tokenizer.decode(ids[-prompt.generation_tail :]) == "\n[assistant]"
    # The answer follows the last token, as it does in the oracle, given the same kept tokens.
    assert_greedy(output.token_ids, reference.logits_of(ids, kept, output.token_ids))


def test_paper_mode_forces_nothing_of_a_chat(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "tokenizer", chat_tokenizer())
    config = SpecPrefillConfig.paper(keep_rate=0.3, eos_token_ids=())
    chat, plain = tiny.select(CHAT, config), tiny.select(tiny.encode(CHAT), config)
    assert chat.engaged
    assert chat.forced_chunks == ()
    np.testing.assert_array_equal(chat.kept_indices, plain.kept_indices)


def test_a_callers_forced_spans_are_kept_beside_a_chats(tiny, monkeypatch):
    monkeypatch.setattr(tiny, "tokenizer", chat_tokenizer())
    own = set(tiny.select(CHAT, product(keep_rate=0.7)).forced_chunks)
    assert 8 not in own
    both = tiny.select(CHAT, product(keep_rate=0.7, forced_spans=((260, 261),)))
    assert set(both.forced_chunks) == own | {8}


@pytest.mark.parametrize("length", [40, 511, 512, 513, 900])
def test_rapid_mlx_1458_a_pair_that_nobody_measured_is_read_conservatively(tiny, length):
    """Without settings it is read whole, or at the rate that cost the paper's pair nothing, with both its ends."""
    selection = tiny.select(prompt_of(length))
    kept = set(map(int, selection.kept_indices))
    assert selection.engaged == (length >= 512)
    if not selection.engaged:
        assert kept == set(range(length))
        return
    assert {*range(32), *range(length - 64, length)} <= kept
    assert len(chunks_of(selection)) == math.ceil(math.ceil(length / 32) * 3 / 10)
