"""Baselines: what they keep, how much of it, and BM25 by hand."""

import math
import sys
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from agreement import prompt_of
from small_tokenizers import byte_level

from specprefill_jax.errors import ArgumentError, SpecPrefillError
from specprefill_jax.evals.baselines import BASELINES, Embedder, Request, _Text, choose, sentence_embedder
from specprefill_jax.evals.bm25 import bm25
from specprefill_jax.tokens import Tokenizer

IDS = np.asarray(prompt_of(1000), np.int32)  # 32 chunks, the last of 8 tokens


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level())


def kept(name, **options) -> list[int]:
    return choose(name, Request(**{"ids": IDS, "keep_rate": 0.3, **options})).kept_indices.tolist()


@pytest.mark.parametrize("name", [name for name in BASELINES if name != "embedding_sentences"])
@pytest.mark.parametrize(("rate", "chunks"), [(0.01, 1), (0.1, 4), (0.3, 10), (0.5, 16), (1.0, 32)])
def test_all_keep_as_much(name, rate, chunks):
    indices = kept(name, keep_rate=rate)
    assert len(indices) == chunks * 32 - 24  # the short last chunk is always there
    assert indices == sorted(set(indices))
    assert indices[-1] == 999
    assert chunks < 4 or indices[:32] == list(range(32))


@pytest.mark.parametrize("name", ["random", "bm25_chunks", "bm25_sentences"])
def test_the_first_chunk_and_the_tail_come_first_and_the_tail_before_all(name):
    assert set(range(936, 1000)) <= set(kept(name, keep_rate=0.1))
    assert kept(name, keep_rate=0.01) == list(range(992, 1000))
    two = kept(name, keep_rate=0.05)  # 2 chunks
    assert two == list(range(960, 1000))


def test_head_and_tail():
    assert kept("head_tail", keep_rate=0.1) == [*range(64), *range(960, 1000)]
    assert kept("head_tail", keep_rate=0.08) == [*range(32), *range(960, 1000)]  # 3 chunks: the end has the odd one


def test_random_is_seeded_nested_and_another_for_each_prompt():
    assert kept("random") == kept("random", ids=IDS.astype(np.int64))
    assert kept("random") != kept("random", seed=1)
    other = IDS.copy()
    other[0] += 1
    assert kept("random") != kept("random", ids=other)
    assert set(kept("random", keep_rate=0.2)) < set(kept("random", keep_rate=0.4))


def test_bm25_by_hand():
    documents = [["red", "fox", "red"], ["blue", "fox"], ["green"]]
    # log(1 + (3 - 1 + 0.5) / 1.5), and 2 red of 3 words where the mean is 2: norm 1.5 (0.25 + 0.75 * 1.5)
    red = math.log(1 + 2.5 / 1.5) * 2 * 2.5 / (2 + 1.5 * (0.25 + 0.75 * 1.5))
    fox = math.log(1 + 1.5 / 2.5)
    first, second = fox * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 1.5)), fox * 2.5 / (1 + 1.5)
    np.testing.assert_allclose(bm25(documents, ["fox", "red", "red", "owl"]), [red + first, second, 0.0])
    assert bm25(documents, []).tolist() == [0.0, 0.0, 0.0]
    assert bm25([[], []], ["fox"]).tolist() == [0.0, 0.0]


TEXT = "".join(f"The guide moved {what} to the hill. " for what in ("bells", "boats", "oars", "nets", "ropes", "sacks"))
TEXT += "The keeper hid a copper key below the old mill! " + TEXT
TAIL = "Where did somebody hide it? Answer in one word, please, and do it soon."


def test_what_the_question_asks_for_is_kept(tokenizer):
    ids = np.asarray(tokenizer.encode(TEXT + TAIL), np.int32)
    needle = "The keeper hid a copper key below the old mill! "
    for question, found in (("Where is the COPPER key?", True), ("Who moved the bells?", False)):
        request = Request(ids, 0.35, question, tokenizer)
        text = tokenizer.decode(ids[choose("bm25_sentences", request).kept_indices])
        assert (needle in text) == found
        assert text.endswith(TAIL[-64:])
        chunks = choose("bm25_chunks", request)
        assert ("copper" in tokenizer.decode(ids[chunks.kept_indices])) == found


def test_without_a_question_the_tail_asks(tokenizer):
    ids = np.asarray(tokenizer.encode(TEXT + "So which keeper hid the copper key, and where, if you know?"), np.int32)
    selection = choose("bm25_sentences", Request(ids, 0.35, "", tokenizer))
    assert "The keeper hid a copper key below the old mill! " in tokenizer.decode(ids[selection.kept_indices])


def test_sentences_end_where_they_should(tokenizer):
    parts = ["One. ", 'Two?" ', "2.5 is no end; ", "三。", "四！”", "five\n\n", "six"]
    ids = np.asarray(tokenizer.encode("".join(parts)), np.int32)
    borders = _Text(Request(ids, 1.0, "", tokenizer)).sentence_borders()
    texts = [tokenizer.decode(ids[start:end]) for start, end in pairwise(borders)]
    assert texts == ["One. ", 'Two?" ', "2.5 is no end; 三。", "四！”", "five\n\n", "six"]


def test_without_a_tokenizer_ids_are_words():
    ids = np.arange(5, 325, dtype=np.int32)
    ids[100:104] = ids[-4:]  # what the tail holds stands in chunk 3, too
    for name in ("bm25_chunks", "bm25_sentences"):
        assert set(range(96, 128)) <= set(choose(name, Request(ids, 0.4)).kept_indices.tolist())


def letters(texts) -> np.ndarray:
    """An embedding by how often each letter is there."""
    counts = np.array(
        [[text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts], float
    )
    return counts / np.maximum(np.linalg.norm(counts, axis=1, keepdims=True), 1e-9)


def test_sentences_near_the_question_s_embedding(tokenizer):
    """They are what BM25 would keep in its place, to as many tokens; without a question the tail asks."""
    asked = []

    def embed(texts):
        asked.append(texts)
        return letters(texts)

    ids = np.asarray(tokenizer.encode(TEXT + TAIL), np.int32)
    needle = "The keeper hid a copper key below the old mill! "
    request = Request(ids, 0.35, needle.strip(), tokenizer, embedder=Embedder("letters", embed))
    indices = choose("embedding_sentences", request).kept_indices
    assert len(indices) == len(choose("bm25_sentences", request).kept_indices)
    assert needle in tokenizer.decode(ids[indices])
    *sentences, question = asked[0]
    assert "".join(sentences) == TEXT + TAIL
    assert question == needle.strip()
    choose("embedding_sentences", replace(request, question=""))
    assert asked[1][-1] == tokenizer.decode(ids[-64:])


def test_embeddings_want_an_embedder_and_text(tokenizer):
    embedder = Embedder("letters", letters)
    for given in ({"embedder": embedder}, {"tokenizer": tokenizer}):
        with pytest.raises(ArgumentError, match="embedder must be given, together with a tokenizer"):
            choose("embedding_sentences", Request(IDS, 0.3, **given))


def test_a_model_of_sentence_transformers(monkeypatch, tmp_path):
    """Loaded without code of its own; the embeddings are of length 1; what it cannot load is told."""
    loaded = []

    class Encoder:
        def __init__(self, model, *, trust_remote_code, model_kwargs):
            assert not trust_remote_code
            assert model_kwargs == {"use_safetensors": True}
            if model == "none":
                raise OSError("not there")
            loaded.append(model)

        def encode(self, texts, *, normalize_embeddings, show_progress_bar):
            assert normalize_embeddings
            assert not show_progress_bar
            return letters(texts)

    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=Encoder))
    embedder = sentence_embedder("small")
    assert (loaded, embedder.model) == (["small"], "small")
    np.testing.assert_allclose(embedder.embed(("ab", "c")), letters(["ab", "c"]), rtol=1e-6)
    with pytest.raises(SpecPrefillError, match="none is no model of sentence-transformers: not there"):
        sentence_embedder("none")
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(SpecPrefillError, match=r"install the extra `embedding`"):
        sentence_embedder("small")


def test_refusals():
    with pytest.raises(
        ArgumentError, match=r"^name='best' is not allowed: name must be one of random, head_tail, bm25"
    ):
        choose("best", Request(IDS, 0.3))
    with pytest.raises(ArgumentError, match=r"^ids="):
        choose("random", Request(IDS[:0], 0.3))
