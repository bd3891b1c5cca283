"""RULER's scores, worked out by hand."""

import pytest

from specprefill_jax.errors import ArgumentError
from specprefill_jax.evals.ruler import match_all, match_part, string_match_all, string_match_part

BOTH = [
    # output, references, share found
    ("The number is 1234567.", ["1234567"], 1.0),
    ("The number is 123456.", ["1234567"], 0.0),
    ("91234567890", ["1234567"], 1.0),  # within a longer number counts
    ("1234567 and 7654321", ["7654321", "1234567", "1111111", "2222222"], 0.5),
    ("PARIS", ["paris"], 1.0),
    ("paris", ["Paris, France", "PARIS"], 0.5),
    ("", ["a"], 0.0),
    ("anything", [""], 1.0),  # the empty text is everywhere
    ("a\x00b", ["ab"], 0.0),  # a control character is a line break
    ("a\x00b", ["a\nb"], 1.0),
    ("a\tb", ["a\tb"], 0.0),
    ("a\tb\x1fc", ["a\nb\nc"], 1.0),
    ("a\r\nb", ["a\n\nb"], 1.0),
    ("a\x7fb", ["a\x7fb"], 1.0),  # only those below the space
    ("a\u0085b", ["a\u0085b"], 1.0),
    ("  \x07 a b \x07\n", [" a b "], 0.0),  # ends are stripped before and after
    ("  \x07 a b \x07\n", ["a b"], 1.0),
    ("ÉCOLE, STRASSE", ["école", "straße"], 0.5),  # lower case, without folding
    ("北京", ["北京", "上海"], 0.5),
    ("x1 x2 x3 x4", ["x1", "x1", "x5"], 2 / 3),  # a reference counts as often as it is listed
]


@pytest.mark.parametrize(("output", "references", "share"), BOTH)
def test_one_sample(output, references, share):
    assert match_all(output, references) == share
    assert match_part(output, references) == (1.0 if share else 0.0)


def test_many_samples():
    outputs = ["1 2 3", "1", "nothing"]
    references = [["1", "2"], ["1", "2", "3"], ["4"]]
    assert string_match_all(outputs, references) == 44.44  # (1 + 1/3 + 0) / 3
    assert string_match_part(outputs, references) == 66.67
    assert string_match_all(["a"], [("a",)]) == 100.0
    assert string_match_part(["b"], [("a",)]) == 0.0


def test_means_are_over_samples_and_not_over_references():
    assert string_match_all(["1", "1"], [["1"], ["1", "2", "3", "4"]]) == 62.5


@pytest.mark.parametrize("score", [string_match_all, string_match_part])
def test_no_samples_or_not_as_many(score):
    with pytest.raises(ArgumentError, match="outputs=0"):
        score([], [])
    with pytest.raises(ArgumentError, match="outputs=2 .* 1"):
        score(["a", "b"], [["a"]])


@pytest.mark.parametrize("references", [[], "text"])
def test_references_are_a_list(references):
    with pytest.raises(ArgumentError, match="references="):
        match_all("text", references)
