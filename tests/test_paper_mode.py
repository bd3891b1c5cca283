"""Paper mode equals the goldens and the oracle: every length, every prefill chunk size, every setting of the method."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from agreement import (
    MAIN,
    SPECULATOR,
    Reference,
    assert_answer,
    assert_greedy,
    assert_selection,
    goldens,
    load_tiny,
    prompt_of,
    relative_error,
)

from specprefill_jax import SamplingParams, SpecPrefillConfig
from specprefill_jax.planning import plan
from specprefill_jax.scoring import score_and_choose

SLOTS = 512  # of `score_golden`
EDGES = (1, 2, 6, 7, 8, 13, 14, 15, 31, 32, 33, 63, 64, 65, 96, 97, 127, 128, 129, 130)
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One point of the method's settings, as paper mode and as the oracle take it."""

    look_ahead: int = 8
    width: int | None = 13
    chunk: int = 32
    rate: str = "0.3"
    eos: tuple[int, ...] = ()

    @property
    def config(self) -> SpecPrefillConfig:
        return SpecPrefillConfig.paper(
            keep_rate=float(self.rate),
            look_ahead=self.look_ahead,
            pool_width=self.width,
            chunk_size=self.chunk,
            eos_token_ids=self.eos,
        )


def setting_of(golden) -> Setting:
    """The setting of a golden case."""
    eos = tuple(golden["eos"].tolist()) if "eos" in golden else (2,)
    g = {name: int(golden[name]) for name in ("look_ahead", "pool", "chunk")}
    return Setting(g["look_ahead"], g["pool"], g["chunk"], str(golden["rate"]), eos)


def score_golden(model, golden, setting: Setting, kernels: str | None = None):
    """What `score_and_choose` says of a golden, in one shape for all of them: their own would be forty programs.

    The slots that are added for it are poisoned.
    """
    ids = golden["ids"].astype(np.int32)
    planned = plan(len(ids), setting.config)
    ahead = model.speculator.read(ids, setting.look_ahead, setting.eos)
    keys = ahead.cache.k[:, :, :, :SLOTS]
    keys = jnp.pad(keys, [(0, 0)] * 3 + [(0, SLOTS - keys.shape[3]), (0, 0)], constant_values=jnp.nan)
    ahead = dataclasses.replace(ahead, cache=dataclasses.replace(ahead.cache, k=keys))
    prompt = np.zeros((1, SLOTS), np.int32)
    prompt[0, : len(ids)] = ids
    return score_and_choose(
        ahead, prompt, np.full(1, len(ids), np.int32), np.zeros((1, SLOTS // setting.chunk), bool),
        np.full(1, planned.num_chunks, np.int32), np.full(1, planned.kept_chunks, np.int32),
        size=SLOTS, pool_width=setting.width or 0, chunk_size=setting.chunk, kept_size=SLOTS, backend=kernels,
    )  # fmt: skip


def check(model, reference, ids, setting: Setting, sampling: SamplingParams = GREEDY):
    """Select, prefill and generate equal the oracle. Returns the selection."""
    selection = model.select(ids, setting.config)
    assert_selection(selection, reference, ids, **dataclasses.asdict(setting))
    output = model.generate(ids, sampling, setting.config)
    assert len(output.token_ids) == sampling.max_tokens
    np.testing.assert_array_equal(output.selection.kept_indices, selection.kept_indices)
    assert_answer(model, reference, ids, selection, output.token_ids)
    return selection


# Which cases each prefill chunk size reads: a chunk of 32 all of them, others samples of every length and setting (four
# settings take turns); None, the default, reads each of them whole. Up to 256 tokens a chunk of 256 is None's program.
GOLDENS = {
    None: slice(0, None, 3), 1: slice(0, None, 5), 7: slice(1, None, 5), 32: slice(None), 256: slice(36, 44)
}  # fmt: skip


@pytest.mark.parametrize("prefill_chunk", GOLDENS)
def test_goldens(tiny, tiny_chunked, prefill_chunk):
    model = tiny if prefill_chunk is None else tiny_chunked(prefill_chunk)
    cases = goldens()[GOLDENS[prefill_chunk]]
    assert len({(setting.look_ahead, setting.width) for setting in map(setting_of, map(np.load, cases))}) == 4
    for case in cases:
        g = np.load(case)
        ids, setting = g["ids"].tolist(), setting_of(g)
        selection = model.select(ids, setting.config)
        assert selection.num_queries == int(g["valid"]), case.stem
        given = list(selection.look_ahead_tokens)
        assert given == g["lookahead_tokens"].tolist()[: len(given)], case.stem
        np.testing.assert_allclose(selection.importance, g["importance"], rtol=1e-3, atol=1e-5, err_msg=case.stem)
        np.testing.assert_allclose(selection.chunk_scores, g["chunk_scores"], rtol=1e-3, atol=1e-5, err_msg=case.stem)
        np.testing.assert_array_equal(selection.kept_indices, g["kept"], err_msg=case.stem)
        logits = np.asarray(model.prefill(ids, selection))
        assert logits.dtype == np.float32
        assert logits.shape == (512,)
        assert relative_error(logits, g["logits"]) < 1e-3, case.stem
        sampling = SamplingParams(max_tokens=len(g["tokens"]), temperature=0.0, ignore_eos=True)
        assert list(model.generate(ids, sampling, setting.config).token_ids) == g["tokens"].tolist(), case.stem


# Chunks of 8 tokens let a prompt of 130 have seventeen, so that a dozen lengths drop most of themselves.
EVERY_LENGTH = Setting(chunk=8)


@pytest.mark.parametrize("start", range(1, 131, 26))
@pytest.mark.parametrize("prefill_chunk", [None, 7])
def test_every_length(tiny, tiny_chunked, reference, prefill_chunk, start):
    model = tiny if prefill_chunk is None else tiny_chunked(prefill_chunk)
    for length in range(start, start + 26):
        check(model, reference, prompt_of(length), EVERY_LENGTH)


@pytest.mark.parametrize("prefill_chunk", [1, 32])  # larger ones read each of these whole, as None does above
def test_lengths_at_the_edges_of_prefill_chunks(tiny_chunked, reference, prefill_chunk):
    for length in EDGES:
        check(tiny_chunked(prefill_chunk), reference, prompt_of(length), EVERY_LENGTH)


@pytest.mark.parametrize("length", [257, 500])
def test_prompt_that_spans_several_chunks_of_256(tiny_chunked, reference, length):
    check(tiny_chunked(256), reference, prompt_of(length), Setting(rate="0.3"))


NAMED = {
    "SpecPrefill": Setting(look_ahead=1, width=None, chunk=1, rate="0.3"),
    "Full": Setting(look_ahead=1, width=13, chunk=32, rate="0.3"),
    "Full LAH": Setting(look_ahead=8, width=13, chunk=32, rate="0.3"),
}


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("length", [40, 277])  # here and below: lengths that find the goldens' programs
def test_settings_the_paper_names(tiny, reference, name, length):
    check(tiny, reference, prompt_of(length), NAMED[name])


def test_token_mode_keeps_single_tokens(tiny, reference):
    ids = prompt_of(150)
    selection = check(tiny, reference, ids, NAMED["SpecPrefill"])
    assert len(selection.kept_indices) == 45
    np.testing.assert_allclose(selection.chunk_scores, selection.importance, rtol=1e-6)


@pytest.mark.parametrize("width", [None, 0, 1, 3, 13, 201])
@pytest.mark.parametrize("length", [5, 100])
def test_pool_widths(tiny, reference, width, length):
    check(tiny, reference, prompt_of(length), Setting(width=width, chunk=8))


def test_no_pool_and_width_one_are_the_same(tiny):
    ids = prompt_of(90)
    none, zero, one = (tiny.select(ids, Setting(width=width).config).importance for width in (None, 0, 1))
    np.testing.assert_array_equal(none, zero)
    np.testing.assert_allclose(none, one, rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 5, 32, 110])
@pytest.mark.parametrize("rate", ["0.07", "0.3"])
def test_chunk_sizes(tiny, reference, chunk, rate):
    """100 tokens in chunks of 1, 5, 32 and of more than the prompt; 0.07 of 100 chunks is exactly 7."""
    selection = check(tiny, reference, prompt_of(100), Setting(chunk=chunk, rate=rate))
    if chunk == 110:
        assert list(selection.kept_indices) == list(range(100))


@pytest.mark.parametrize("look_ahead", [1, 2, 3, 8, 16])
def test_look_ahead(tiny, reference, look_ahead):
    assert check(tiny, reference, prompt_of(120), Setting(look_ahead=look_ahead, chunk=8)).num_queries == look_ahead


@pytest.mark.parametrize("length", [33, 130])
def test_keep_everything_equals_dense(tiny, reference, length):
    ids = prompt_of(length)
    selection = check(tiny, reference, ids, Setting(rate="1.0"))
    assert list(selection.kept_indices) == list(range(length))


@pytest.mark.parametrize("stop_at", [0, 1, 4, 7])
def test_queries_after_eos_do_not_count(tiny, reference, stop_at):
    """Whichever look-ahead token is called EOS, the query that produced it is the last to count."""
    ids = prompt_of(140)
    tokens = reference.look(ids, 8).look_ahead_tokens
    first = tokens.index(tokens[stop_at])
    cut = check(tiny, reference, ids, Setting(chunk=8, eos=(3, tokens[stop_at], 510)))
    assert cut.num_queries == first + 1
    whole = tiny.select(ids, Setting(chunk=8).config)
    assert whole.num_queries == 8
    if first < 7:
        assert not np.allclose(cut.importance, whole.importance, rtol=1e-3, atol=1e-7)


def test_eos_ids_default_to_the_speculators_own(tiny):
    """tiny_22's third look-ahead token is 2, the EOS id in the speculator's config; nothing names it here."""
    (case,) = [path for path in goldens() if path.stem == "tiny_22"]
    g = np.load(case)
    config = SpecPrefillConfig.paper(keep_rate=0.5, look_ahead=8, pool_width=0, chunk_size=32)
    assert tiny.select(g["ids"].tolist(), config).num_queries == 3


def test_positions_are_the_original_ones(tiny, reference):
    """At 30 % keep the logits are those of scattered positions, and far from those of the same tokens renumbered."""
    ids = prompt_of(500)
    selection = tiny.select(ids, Setting().config)
    kept = [int(index) for index in selection.kept_indices]
    assert len(kept) <= 0.32 * 500
    assert kept != list(range(len(kept)))
    logits = tiny.prefill(ids, selection)
    assert relative_error(logits, reference.logits_of(ids, kept, [0])[0]) < 1e-3
    renumbered = reference.main([ids[i] for i in kept], range(len(kept))).logits[-1]
    assert relative_error(logits, renumbered) > 1e-2


def test_decode_continues_at_the_prompts_length(tiny, reference):
    """New tokens stand at M, M+1, ...: sixteen of them equal the oracle's, which differ from a decode at len(kept)."""
    ids = prompt_of(280)
    sampling = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    output = tiny.generate(ids, sampling, Setting().config)
    kept = [int(index) for index in output.selection.kept_indices]
    assert_greedy(output.token_ids, reference.logits_of(ids, kept, output.token_ids))
    wrong, _ = reference.main.greedy([ids[i] for i in kept], kept, len(kept), 16)
    assert list(output.token_ids) != wrong


def test_first_token_is_read_off_the_last_kept_token(tiny, reference):
    """Nothing is forced in paper mode: find a prompt whose last token is dropped, and see that it truly is."""
    setting = Setting(look_ahead=1, width=None, chunk=4, rate="0.1")
    for seed in range(20):
        ids = prompt_of(150, seed)
        if 149 not in reference.choose(ids, look_ahead=1, width=None, chunk=4, rate="0.1").kept:
            selection = check(tiny, reference, ids, setting)
            assert selection.kept_indices[-1] < 149
            return
    pytest.fail("no prompt of twenty drops its last token")


def test_bfloat16_keeps_what_float32_keeps():
    """On at least 98 % of the golden cases' chunks; and it is bfloat16 that ran."""
    model = load_tiny(dtype="bfloat16", prefill_chunk=32)
    same = total = 0
    differs = False
    for path in goldens():
        g = np.load(path)
        setting, count = setting_of(g), len(g["ids"])
        importance, _, choice, *_ = score_golden(model, g, setting)
        chunks = -(-count // setting.chunk)
        expected = np.isin(np.arange(chunks), g["kept"] // setting.chunk)
        actual = np.asarray(choice.kept_chunk_mask)[:chunks]
        differs |= not np.array_equal(g["importance"], importance[:count])
        same, total = same + int((expected == actual).sum()), total + chunks
    assert differs
    assert same >= 0.98 * total, f"{same} of {total} chunks agree"
    # The pipeline's own selection of the last case, which is as this function scored it.
    np.testing.assert_array_equal(model.select(g["ids"].tolist(), setting.config).kept_chunk_mask, actual)


def test_a_speculator_of_a_few_layers(reference):
    """The first two of its three layers score, with one query unless told otherwise."""
    model = load_tiny(speculator_layers=2)
    shallow = Reference(MAIN, SPECULATOR, speculator_layers=2)
    ids = prompt_of(200)
    assert check(model, shallow, ids, Setting(look_ahead=1, chunk=8)).num_queries == 1
    assert check(model, shallow, ids, Setting(look_ahead=4, chunk=8)).num_queries == 4
    whole = reference.choose(ids, look_ahead=1, chunk=8)
    assert not np.allclose(model.select(ids, Setting(look_ahead=1).config).importance, whole.importance, rtol=1e-2)
    assert model.select(ids, SpecPrefillConfig.paper(keep_rate=0.3, eos_token_ids=())).num_queries == 1
    default = SpecPrefillConfig(min_prompt_tokens=0, min_predicted_gain=0.0, tail_tokens=1, eos_token_ids=())
    assert model.select(ids, default).num_queries == 1
