"""LongBench's metrics: what one answer is worth against one reference, from 0 to 1.

They equal the original scorer's values to the last digit, its oddities included, and so stand on the libraries it uses:
rouge, jieba and fuzzywuzzy (extra `eval`).
"""

import difflib
import logging
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

from specprefill_jax.errors import SpecPrefillError, argument_error
from specprefill_jax.evals.extras import extra

Metric = Callable[[str, str, Sequence[str]], float]
"""(answer, reference, classes) -> 0 to 1."""

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_NUMBERS = re.compile(r"\d+")


def _is_chinese_mark(character: str) -> bool:
    """Whether the original drops this character from Chinese words. It leaves a few marks in, such as 《 and ．."""
    if character in "《〈〉〽．":
        return False
    code, kind = ord(character), unicodedata.category(character)
    if 0xFF01 <= code <= 0xFF64:  # full- and half-width forms
        return kind[0] in "PS"
    return character in "、。〃〾〿–—‘’‛“”„‟…‧﹏" or (0x300B <= code <= 0x3030 and kind in ("Ps", "Pe", "Pd", "Po"))


_MARKS = frozenset(string.punctuation)


def normal_words(text: str) -> list[str]:
    """The words of an English answer: lower case, without punctuation, then without articles."""
    bare = "".join(character for character in text.lower() if character not in _MARKS)
    return _ARTICLES.sub(" ", bare).split()


def _segments(text: str) -> list[str]:
    """The words of a Chinese text, all its characters kept."""
    return list(_jieba().cut(text, cut_all=False))


def normal_words_zh(text: str) -> list[str]:
    """The words of a Chinese answer: segmented first, then lower case without white space and punctuation."""
    words = []
    for word in _segments(text):
        kept = (c for c in word.lower() if c not in _MARKS and not _is_chinese_mark(c) and not c.isspace())
        words.append("".join(kept))
    return [word for word in words if word]


def _f1(answer: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall of the words, each counted as often as it stands in both."""
    shared = (Counter(answer) & Counter(reference)).total()
    if not shared:
        return 0.0
    precision, recall = shared / len(answer), shared / len(reference)
    return 2 * precision * recall / (precision + recall)


def qa_f1(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the words of two English texts."""
    return _f1(normal_words(answer), normal_words(reference))


def qa_f1_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the words of two Chinese texts."""
    return _f1(normal_words_zh(answer), normal_words_zh(reference))


def rouge_l(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F of Rouge-L as the package `rouge` computes it; 0 where it refuses, as it does for a text without words."""
    try:
        return float(_rouge().get_scores([answer], [reference], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def rouge_l_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Rouge-L over Chinese words."""
    return rouge_l(" ".join(_segments(answer)), " ".join(_segments(reference)))


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 over the number of classes that the answer names, if the reference is among them.

    Names that are part of the reference's do not count, but of two such names in a row the original removes the first
    only, and so does this.
    """
    named = [name for name in classes if name in answer]
    at = 0
    while at < len(named):
        if named[at] != reference and named[at] in reference:
            named.remove(named[at])
        at += 1  # also past the one that moved up
    return 1 / len(named) if reference in named else 0.0


def count(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that are the reference."""
    numbers = _NUMBERS.findall(answer)
    return numbers.count(reference) / len(numbers) if numbers else 0.0


def _retrieval(answer: str, reference: str, pattern: str) -> float:
    found = re.search(pattern, reference)
    if found is None:
        raise argument_error("reference", reference, f"a text that matches {pattern!r}")
    return count(answer, found[1])


def retrieval(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Share of the numbers in the answer that are the reference's paragraph."""
    return _retrieval(answer, reference, r"Paragraph (\d+)")


def retrieval_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """The same for references in Chinese."""
    return _retrieval(answer, reference, r"段落(\d+)")


def code_similarity(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Similarity of characters, in hundredths, of the answer's first line that is no comment and no fence."""
    lines = answer.lstrip("\n").split("\n")
    code = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return float(_fuzz().ratio(code, reference)) / 100


@cache
def _jieba() -> Any:
    jieba = extra("jieba")
    logging.getLogger("jieba").setLevel(logging.WARNING)  # it tells how long its dictionary took
    return jieba


@cache
def _rouge() -> Any:
    return extra("rouge").Rouge()


@cache
def _fuzz() -> Any:
    fuzz = extra("fuzzywuzzy.fuzz")
    if fuzz.SequenceMatcher is not difflib.SequenceMatcher:
        raise SpecPrefillError(
            "fuzzywuzzy uses Levenshtein here, which gives other values than the benchmark's: "
            "uninstall python-Levenshtein and Levenshtein"
        )
    return fuzz


METRICS: Mapping[str, Metric] = MappingProxyType(
    {
        "qa_f1": qa_f1,
        "qa_f1_zh": qa_f1_zh,
        "rouge_l": rouge_l,
        "rouge_l_zh": rouge_l_zh,
        "classification": classification,
        "count": count,
        "retrieval": retrieval,
        "retrieval_zh": retrieval_zh,
        "code_similarity": code_similarity,
    }
)
"""The metrics by name."""

LIBRARIES: Mapping[str, tuple[Callable[[], Any], ...]] = MappingProxyType(
    {
        "qa_f1_zh": (_jieba,),
        "rouge_l": (_rouge,),
        "rouge_l_zh": (_rouge, _jieba),
        "code_similarity": (_fuzz,),
    }
)
"""What must be importable for a metric."""
