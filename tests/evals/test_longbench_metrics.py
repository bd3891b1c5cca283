"""LongBench's metrics: equal to the original scorer's values, and to pairs worked out by hand."""

import json
from pathlib import Path

import pytest

from specprefill_jax.errors import ArgumentError, SpecPrefillError
from specprefill_jax.evals import extras
from specprefill_jax.evals.longbench import DATASETS, check_metric, metrics, score

GOLDENS = Path(__file__).parents[1] / "data" / "goldens" / "longbench_metrics.jsonl"
CLASSES = ["Food", "Food item", "Color", "Other color", "Sport", "Food item in a tin"]

# (answer, reference, value); fractions as they come out of the definition.
BY_HAND = {
    "qa_f1": [
        ("blue house", "The blue house!", 1.0),  # article and mark go
        ("a blue house", "green house", 1 / 2),  # 1 of 2 and 1 of 2
        ("red red red", "red", 1 / 2),  # precision 1/3, recall 1
        ("red", "red red red", 1 / 2),
        ("one two three four", "four five", 1 / 3),  # 1/4 and 1/2
        ("A.n answer", "answer", 1.0),  # marks go first, and what is left of this one is an article
        ("", "", 0.0),  # nothing in common
        ("the", "a", 0.0),
        ("theme park", "the park", 2 / 3),  # only whole words are articles: 1/2 and 1
        ("x-ray", "xray", 1.0),
        ("10,5", "105", 1.0),
        ("Ünï", "ünÏ", 1.0),
    ],
    "qa_f1_zh": [
        ("苹果", "苹果", 1.0),
        ("苹果。", "苹果", 1.0),
        ("《苹果》", "苹果", 2 / 3),  # 《 is not among the marks that go, 》 is: precision 1/2
        ("苹果", "香蕉", 0.0),
        ("苹果香蕉", "香蕉", 2 / 3),
        ("香蕉 苹果", "苹果，香蕉", 1.0),
        ("ABC", "abc", 1.0),
        ("", "苹果", 0.0),
        ("。，！", "。", 0.0),
        ("苹果苹果苹果", "苹果", 1 / 2),
        ("３", "3", 0.0),  # full-width digits stay
        ("苹果．", "苹果", 2 / 3),  # a mark that the original leaves in
    ],
    "rouge_l": [
        ("a b c d", "a b c d", 1.0),
        ("a b", "a b c d", 2 / 3),  # precision 1, recall 1/2
        ("a c", "a b c d", 2 / 3),
        ("c a", "a b c d", 2 * (1 / 2) * (1 / 4) / (3 / 4)),
        ("x", "y", 0.0),
        ("", "y", 0.0),
        ("y", "", 0.0),
        ("...", "y", 0.0),
        ("Y", "y", 0.0),  # case counts
        ("a b. c d.", "a b c d", 1.0),  # a full stop ends a sentence and is no part of a word
        ("b b b", "b", 1.0),  # words count once
    ],
    "rouge_l_zh": [
        ("苹果", "苹果", 1.0),
        ("苹果", "香蕉", 0.0),
        ("苹果香蕉", "香蕉", 2 / 3),
        ("学校老师", "老师学校", 1 / 2),
        ("", "苹果", 0.0),
        ("苹果", "", 0.0),
        ("苹果。", "苹果", 2 / 3),  # the mark is a word
        ("苹果苹果", "苹果", 1.0),
        ("ABC", "abc", 0.0),
        (".", "苹果", 0.0),
    ],
    "classification": [
        ("Sport", "Sport", 1.0),
        ("It is Sport", "Sport", 1.0),
        ("sport", "Sport", 0.0),
        ("Sport or Color", "Sport", 1 / 2),
        ("Food item", "Food item", 1.0),  # "Food", named too, is part of the reference
        ("Food item", "Food", 1 / 2),  # "Food item" is no part of "Food", and stays
        ("Food item in a tin", "Food item in a tin", 1 / 2),  # "Food" goes, and "Food item" is passed over
        ("Food", "Food item", 0.0),
        ("Color", "Sport", 0.0),
        ("", "Sport", 0.0),
        ("Sport Color Food", "Color", 1 / 3),
    ],
    "count": [
        ("7", "7", 1.0),
        ("There are 7.", "7", 1.0),
        ("7 of 8", "7", 1 / 2),
        ("7 7 8", "7", 2 / 3),
        ("07", "7", 0.0),
        ("seven", "7", 0.0),
        ("", "7", 0.0),
        ("77", "7", 0.0),
        ("-7", "7", 1.0),
        ("7e3", "7", 1 / 2),
        ("1 2 3 4", "4", 1 / 4),
    ],
    "retrieval": [
        ("Paragraph 4", "Paragraph 4", 1.0),
        ("4", "Paragraph 4", 1.0),
        ("Paragraph 3, Paragraph 4", "Paragraph 4", 1 / 2),
        ("Paragraph 14", "Paragraph 4", 0.0),
        ("", "Paragraph 4", 0.0),
        ("none", "Paragraph 4", 0.0),
        ("4 4", "Paragraph 4", 1.0),
        ("4, or 5, or 6", "Paragraph 4", 1 / 3),
        ("Paragraph 4", "Paragraph 4 and Paragraph 5", 1.0),  # the first counts
        ("Paragraph 5", "Paragraph 4 and Paragraph 5", 0.0),
    ],
    "retrieval_zh": [
        ("段落4", "段落4", 1.0),
        ("4", "段落4", 1.0),
        ("段落3和段落4", "段落4", 1 / 2),
        ("段落14", "段落4", 0.0),
        ("", "段落4", 0.0),
        ("四", "段落4", 0.0),
        ("段落 4", "段落4", 1.0),
        ("第4段", "段落4", 1.0),
        ("4 5 6 7", "段落4", 1 / 4),
        ("段落５", "段落5", 0.0),  # a full-width digit is a number, but another text
    ],
    "code_similarity": [
        ("x = 1", "x = 1", 1.0),
        ("\n\nx = 1\ny = 2", "x = 1", 1.0),
        ("# note\nx = 1", "x = 1", 1.0),
        ("// note\nx = 1", "x = 1", 1.0),
        ("```\nx = 1\n```", "x = 1", 1.0),
        ("x = 1  # note\nx = 1", "x = 1", 1.0),
        ("abcd", "bcde", 0.75),  # 2 * 3 of 8
        ("ab", "abcdef", 0.5),
        ("abc", "xyz", 0.0),
        ("# only a note", "x = 1", 0.0),
        (" \nx = 1", "x = 1", 0.33),  # a line of white space is a line: 2 * 1 of 6
        ("", "", 1.0),
    ],
}


def test_equals_the_original_scorer():
    with GOLDENS.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    assert len(rows) == 75
    for row in rows:
        value = score(row["dataset"], row["prediction"], row["answers"], row["all_classes"])
        assert round(100 * value, 2) == row["score"], row


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    assert len(BY_HAND[name]) >= 10
    for answer, reference, value in BY_HAND[name]:
        found = metrics.METRICS[name](answer, reference, CLASSES)
        assert found == pytest.approx(value, abs=1e-6), (answer, reference)


def test_every_metric_has_pairs_and_every_dataset_a_metric():
    assert BY_HAND.keys() == metrics.METRICS.keys()
    assert {dataset.metric for dataset in DATASETS.values()} == metrics.METRICS.keys()
    assert metrics.LIBRARIES.keys() <= metrics.METRICS.keys()


def test_the_best_reference_counts():
    assert score("hotpotqa", "red", ["blue", "red", "green"]) == 1.0
    assert score("hotpotqa", "red", []) == 0.0


def test_only_few_shot_answers_end_with_their_first_line():
    assert score("triviaqa", "\n\nred\nblue", ["red"]) == 1.0
    assert score("hotpotqa", "\n\nred\nblue", ["red"]) == pytest.approx(2 / 3)
    assert [name for name, dataset in DATASETS.items() if dataset.first_line] == ["trec", "triviaqa", "samsum", "lsht"]


def test_refusals(monkeypatch):
    with pytest.raises(ArgumentError, match=r"^dataset='squad' is not allowed: dataset must be one of narrativeqa, "):
        score("squad", "x", ["x"])
    with pytest.raises(ArgumentError, match=r"^reference='4' is not allowed: reference must be a text that matches"):
        metrics.retrieval("4", "4")
    with pytest.raises(SpecPrefillError, match=r"^no_such_thing is missing .*install the extra `eval`"):
        extras.extra("no_such_thing")
    metrics._fuzz.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(extras.extra("fuzzywuzzy.fuzz"), "SequenceMatcher", object)
        with pytest.raises(SpecPrefillError, match="uninstall python-Levenshtein"):
            check_metric("lcc")
    check_metric("lcc")
