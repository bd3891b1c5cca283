"""The oracle's chunk scores, what recall of them means, and the rows that say so."""

import itertools
from dataclasses import replace

import numpy as np
import oracle
import pytest
import scipy.stats
from agreement import prompt_of
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import TOKENIZERS, byte_level

from specprefill_jax import SpecPrefill, SpecPrefillConfig
from specprefill_jax.errors import ArgumentError, SpecPrefillError
from specprefill_jax.evals import oracle as module
from specprefill_jax.evals.oracle import best_chunks, mass_recall, oracle_chunks, pearson, recall, spearman
from specprefill_jax.evals.recall import recall_rows, recall_settings
from specprefill_jax.evals.results import ResultFile, comparable, read_rows
from specprefill_jax.evals.runner import Counts, run
from specprefill_jax.evals.samples import Sample, prompt_ids, true_answer, true_answer_ids
from specprefill_jax.speculator import Speculator
from specprefill_jax.tokens import Tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]{{ '\\n' }}"


@pytest.fixture(scope="module")
def readers(tiny) -> dict[str, Speculator]:
    """Both models, reading 64 tokens at a time."""
    return {"main": Speculator(tiny.main, 64), "speculator": Speculator(tiny.speculator.model, 64)}


def expected(llama: oracle.Llama, ids, answer, chunk: int, width: int) -> np.ndarray:
    """The same in numpy: one pass over prompt and answer, the queries from the prompt's last token on."""
    whole = [*ids, *answer]
    read = llama(whole, range(len(whole)))
    values = oracle.importance(read.queries[len(ids) - 1 :], read.keys[: len(ids)], width)
    return oracle.chunk_scores(values, chunk)


CASES = [
    ("main", 150, 20, 32, 13),  # prefill in pieces; three blocks of queries, the last of five
    ("main", 33, 7, 32, 13),  # one whole block, a last chunk of one token
    ("main", 20, 1, 32, 0),  # a chunk longer than the prompt
    ("main", 1, 8, 1, 3),
    ("speculator", 90, 9, 8, 5),
]


@pytest.mark.parametrize(("name", "tokens", "answered", "chunk", "width"), CASES)
def test_oracle_chunks_equal_the_slow_ones(readers, reference, name, tokens, answered, chunk, width):
    ids, answer = prompt_of(tokens), prompt_of(answered, seed=1)
    found = oracle_chunks(readers[name], np.array(ids, np.int32), answer, chunk, width)
    slow = expected(getattr(reference, name), ids, answer, chunk, width)
    assert (found.dtype, found.shape) == (np.float32, (-(-tokens // chunk),))
    np.testing.assert_allclose(found, slow, rtol=1e-3, atol=1e-6)


def test_the_answer_matters(readers):
    ids = np.array(prompt_of(150), np.int32)
    one, other = (oracle_chunks(readers["main"], ids, prompt_of(9, seed), 32, 13) for seed in (1, 2))
    assert np.abs(one - other).max() > 1e-3


def test_given_its_own_look_ahead_a_speculator_scores_as_it_does(tiny, readers):
    ids = np.array(prompt_of(150), np.int32)
    selection = tiny.select(ids, SpecPrefillConfig.paper(0.3, 6, eos_token_ids=()))
    found = oracle_chunks(readers["speculator"], ids, selection.look_ahead_tokens[:5], 32, 13)
    np.testing.assert_allclose(found, selection.chunk_scores, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("tokens", "answered", "message"),
    [
        (0, 3, "num_tokens=0 is not allowed"),
        (9, 0, "answer_tokens=0 is not allowed"),
        (4090, 7, "num_tokens=4090 is not allowed: num_tokens must be at most 4089, with an answer of 7 tokens behind"),
    ],
)
def test_what_cannot_be_read_is_refused(readers, tokens, answered, message):
    with pytest.raises(ArgumentError, match=message):
        oracle_chunks(readers["main"], np.full(tokens, 7, np.int32), [8] * answered, 32, 13)


def test_scores_that_are_not_finite_are_refused(readers, monkeypatch):
    monkeypatch.setattr(module, "chunk_scores", lambda *given, **named: np.array([[1.0, np.nan]]))
    with pytest.raises(SpecPrefillError, match="not finite"):
        oracle_chunks(readers["main"], np.array(prompt_of(33), np.int32), [8], 32, 13)


def test_recall_by_hand():
    scores = np.array([0.5, 0.1, 0.2, 0.2, 0.4], np.float32)
    best = best_chunks(scores, 3)
    assert best.tolist() == [True, False, True, False, True]  # of the tie the lower chunk
    chosen = np.array([True, True, False, False, True])
    assert recall(chosen, best) == pytest.approx(2 / 3)
    # Chunks of four tokens, the last of two: masses 2, 0.4, 0.8, 0.8, 0.8.
    assert mass_recall(chosen, scores, 18, 4) == pytest.approx(3.2 / 4.8)
    assert mass_recall(best, scores, 18, 4) == pytest.approx(3.6 / 4.8)


@given(st.lists(st.sampled_from([0.0, 0.125, 0.25, 1.0]), min_size=1, max_size=7), st.data())
def test_recall_of_every_choice(values, data):
    """The best choice has all; no other of the same number holds more mass; the mean of all is what chance has."""
    scores = np.array([value + 0.5 for value in values], np.float32)
    count, size = data.draw(st.integers(1, len(scores))), data.draw(st.integers(1, 9))
    tokens = len(scores) * size
    best = best_chunks(scores, count)
    every = range(len(scores))
    masks = [np.isin(every, chunks) for chunks in itertools.combinations(every, count)]
    recalls = [recall(mask, best) for mask in masks]
    shares = [mass_recall(mask, scores, tokens, size) for mask in masks]
    assert recall(best, best) == max(recalls) == 1.0
    assert mass_recall(best, scores, tokens, size) == pytest.approx(max(shares))
    assert np.mean(recalls) == pytest.approx(count / len(scores))
    assert np.mean(shares) == pytest.approx(count / len(scores))


def test_correlations_equal_scipys():
    draw = np.random.default_rng(0)
    for _ in range(5):
        a = draw.integers(0, 6, 20).astype(np.float32)  # with ties
        b = (a + draw.normal(0, 2, 20)).astype(np.float32)
        assert pearson(a, b) == pytest.approx(scipy.stats.pearsonr(a.astype(float), b.astype(float))[0], abs=1e-9)
        assert spearman(a, b) == pytest.approx(scipy.stats.spearmanr(a, b)[0], abs=1e-9)
    rising = np.array([0.1, 0.2, 0.4, 0.7, 1.0], np.float32)
    assert spearman(rising, rising**3) == pytest.approx(1.0)
    assert pearson(rising, -rising) == pytest.approx(-1.0)
    assert 0.8 < pearson(rising, rising**3) < 0.99


@pytest.mark.parametrize("flat", [[0.1] * 4, [0.1]])
def test_what_does_not_vary_has_no_correlation(flat):
    flat = np.array(flat, np.float32)
    other = np.arange(len(flat), dtype=np.float32)
    assert pearson(flat, other) is pearson(other, flat) is spearman(flat, other) is None


def made(text: str, outputs: tuple[str, ...], every: bool = False, **fields) -> Sample:
    """A sample whose score is the share of the references in the answer, or whether any is there."""

    def score(answer: str) -> float:
        found = [output in answer for output in outputs]
        return sum(found) / len(found) if every else float(any(found))

    return Sample("made", "t", "0", text, outputs, score, 4, **fields)


def test_the_true_answer_is_what_scores_best():
    assert true_answer(made("a", ("12", "34", "56"), every=True)) == "12, 34, 56"
    assert true_answer(made("a", ("Paris", "paris"))) == "Paris"
    assert true_answer(made("a", ("one",), every=True)) == "one"


@pytest.mark.parametrize(
    ("sample", "after"),
    [
        (made("hello", ("well",), chat=False), " well"),
        (made("hello\n", ("well",), chat=False), "well"),
        (made("答：", ("好",), chat=False), "好"),
        (made("hello", ("well",)), "well"),  # the template ends with a line break
        (made("hello", ("well",), answer_prefix="It is"), " well"),
        (made("", ("well",), chat=False), "well"),
    ],
)
def test_tokens_of_the_true_answer_follow_the_prompt(sample, after):
    tokenizer = Tokenizer(byte_level(), chat_templates={"default": TEMPLATE})
    ids = true_answer_ids(sample, tokenizer)
    assert tokenizer.decode(ids) == after
    assert (ids[0] == tokenizer.encode(" w")[0]) == (after == " well")
    whole = tokenizer.decode([*prompt_ids(sample, tokenizer), *ids])
    assert whole.endswith(sample.answer_prefix + after)


def test_a_tokenizer_that_puts_spaces_in_front_adds_none_of_its_own():
    tokenizer = TOKENIZERS["llama2"]
    ids = true_answer_ids(made("hi", ("hi",), chat=False), tokenizer)
    assert tokenizer.encode("hi hi", add_special_tokens=False) == [*tokenizer.encode("hi", False), *ids]
    assert len(ids) == 1


def test_tokens_of_the_true_answer_where_it_joins_the_prompt():
    """A prompt that would be read in other tokens if the answer stood behind it: its own stay, the answer is apart."""
    tokenizer = Tokenizer(byte_level())
    sample = made("h\n", ("e",), chat=False)
    assert true_answer_ids(sample, tokenizer) == tokenizer.encode("e")
    joined = made(" ", ("w",), chat=False)  # the space and the w are one token
    assert true_answer_ids(joined, tokenizer) == tokenizer.encode("w") != tokenizer.encode(" w")
    given_ids = replace(sample, input=(5, 6))
    assert true_answer_ids(given_ids, tokenizer) == tokenizer.encode("e")
    with pytest.raises(ArgumentError, match="tokenizer=None is not allowed"):
        true_answer_ids(sample, None)


def test_settings():
    settings = recall_settings((0.1, 0.25), (1, 8))
    names = ["p1_full", "p1_full_lah8", "p2.5_full", "p2.5_full_lah8", "p1_full_answer", "p2.5_full_answer"]
    assert [setting.name for setting in settings] == names
    assert [setting.keep_rate for setting in settings] == [0.1, 0.1, 0.25, 0.25, 0.1, 0.25]
    assert {setting.method for setting in settings[4:]} == {"answer"}


@pytest.fixture(scope="module")
def pair(tiny) -> SpecPrefill:
    tokenizer = Tokenizer(byte_level(), chat_templates={"default": TEMPLATE})
    return SpecPrefill(tiny.main, tiny.speculator.model, tokenizer, prefill_chunk=64)


def samples(count: int) -> list[Sample]:
    texts = ["what? hello " * 20 + f"{index}?" for index in range(count)]
    return [replace(made(text, (f"hello {i}{i}",)), key=str(i)) for i, text in enumerate(texts)]


def run_into(path, pair, asked, **options) -> Counts:
    settings = recall_settings((0.3, 0.5), (1, 4))
    with ResultFile(path, {"main": "tiny"}) as results:
        return run(pair, asked, settings, results, rows=recall_rows(5), progress=lambda line: None, **options)


def test_rows_equal_what_the_slow_oracle_says(pair, reference, tmp_path):
    path = tmp_path / "rows.jsonl"
    [sample] = samples(1)
    assert run_into(path, pair, [sample], versions={"jax": "1"}) == Counts(6, 0, 0)
    rows = {row["setting"]: row for row in read_rows(path)}
    assert len(rows) == 6
    ids = prompt_ids(sample, pair.tokenizer).tolist()
    answer = true_answer_ids(sample, pair.tokenizer)[:5]
    slow = expected(reference.main, ids, answer, 32, 13)
    own = expected(reference.speculator, ids, answer, 32, 13)
    row = rows["p5_full_answer"]
    count = -(-len(slow) // 2)
    best, chosen = (set(oracle.kept_chunks(scores, "0.5")) for scores in (slow, own))
    assert (row["num_chunks"], row["kept_chunks"], row["num_queries"]) == (len(slow), count, len(answer) + 1)
    assert (row["kind"], row["method"], row["look_ahead"], row["answer_tokens"]) == (
        "recall",
        "answer",
        None,
        len(answer),
    )
    assert row["recall"] == len(best & chosen) / count
    sizes = np.array([min(32, len(ids) - 32 * chunk) for chunk in range(len(slow))])
    assert row["mass"] == pytest.approx((slow * sizes)[list(chosen)].sum() / (slow * sizes).sum(), rel=1e-3)
    assert row["oracle_mass"] == pytest.approx((slow * sizes)[list(best)].sum() / (slow * sizes).sum(), rel=1e-3)
    assert row["spearman"] == pytest.approx(scipy.stats.spearmanr(slow, own)[0], abs=1e-3)
    assert row["pearson"] == pytest.approx(scipy.stats.pearsonr(slow, own)[0], abs=1e-3)
    assert row["timings"].keys() == {"oracle", "choose"}
    assert row["versions"] == {"jax": "1"}

    row = rows["p3_full_lah4"]
    selection = pair.select(ids, SpecPrefillConfig.paper(0.3, 4))
    best = set(oracle.kept_chunks(slow, "0.3"))
    assert row["recall"] == len(best & set(np.flatnonzero(selection.kept_chunk_mask).tolist())) / len(best)
    assert (row["look_ahead"], row["num_queries"]) == (4, selection.num_queries)
    assert row["spearman"] == pytest.approx(spearman(selection.chunk_scores, slow), abs=1e-3)


def test_an_interruption_changes_nothing(pair, tmp_path):
    run_into(tmp_path / "a.jsonl", pair, samples(2))
    run_into(tmp_path / "b.jsonl", pair, samples(2))
    with (tmp_path / "b.jsonl").open("rb+") as file:
        file.truncate((tmp_path / "b.jsonl").stat().st_size - 1500)
    counts = run_into(tmp_path / "b.jsonl", pair, samples(2))
    assert counts.done > 1
    assert counts.done + counts.there == 12
    assert [comparable(row) for row in read_rows(tmp_path / "a.jsonl")] == [
        comparable(row) for row in read_rows(tmp_path / "b.jsonl")
    ]


def test_what_cannot_be_read_is_a_row_that_says_so(pair, tmp_path, monkeypatch):
    long, empty = made("x" * 4095, ("well",)), replace(made("hello", ("",)), key="1")
    path = tmp_path / "rows.jsonl"
    assert run_into(path, pair, [long, empty]) == Counts(12, 0, 12)
    said = [row["skipped"] for row in read_rows(path)]
    assert all("with an answer of 3 tokens behind" in text for text in said[:6])
    assert all("answer_tokens=0 is not allowed" in text for text in said[6:])
    assert {row["recall"] for row in read_rows(path)} == {None}

    def fail(*given, **named):
        raise SpecPrefillError("the speculator failed: on purpose")

    monkeypatch.setattr(pair, "select_many", fail)
    path = tmp_path / "failed.jsonl"
    assert run_into(path, pair, samples(1)) == Counts(6, 0, 4)
    rows = {row["setting"]: row["skipped"] for row in read_rows(path)}
    assert rows["p3_full_answer"] is None
    assert rows["p3_full_lah4"] == "the speculator failed: on purpose"
