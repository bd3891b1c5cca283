"""Texts with hidden values: what they hold, how long they are, and that a seed fixes them."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specprefill_jax.evals.lookups import FORMS, draw_case, draw_needles, draw_sentence, hide, prose

SEEDS = st.integers(0, 10**6)


def words(text: str) -> int:
    return len(text.split())


def test_sentences_vary():
    rng = random.Random(0)
    sentences = [draw_sentence(rng) for _ in range(300)]
    assert len(set(sentences)) > 290
    assert all(re.fullmatch(r"[A-Z][a-zA-Z0-9, ]+\.", sentence) for sentence in sentences)
    assert not any(re.search(r"\ba [aeiou]|\ban [^aeiou]", sentence) for sentence in sentences)
    assert 0.05 < sum(bool(re.search(r"\d", sentence)) for sentence in sentences) / 300 < 0.25


@given(seed=SEEDS, size=st.integers(0, 200))
def test_prose_is_as_long_as_it_may_be(seed, size):
    sentences = prose(random.Random(seed), size, words)
    assert sum(map(words, sentences)) <= size
    longer = prose(random.Random(seed), size + 30, words)
    assert longer[: len(sentences)] == sentences
    assert sum(map(words, longer[: len(sentences) + 1])) > size or len(longer) == len(sentences)


@given(seed=SEEDS, form=st.sampled_from(FORMS), count=st.integers(1, 20))
def test_needles(seed, form, count):
    needles = draw_needles(random.Random(seed), count, form)
    assert len({needle.prefix for needle in needles}) == count
    for needle in needles:
        assert re.fullmatch(r"[1-9]\d{3,7}", needle.value)
        assert needle.told.endswith(needle.answer)
        assert needle.value not in needle.question + needle.prefix
        assert (needle.question == "") == (form == "list")
    assert draw_needles(random.Random(seed), count, form) == needles


def test_the_words_of_needles():
    (plain,) = draw_needles(random.Random(1), 1)
    assert plain.told == f" {plain.prefix} {plain.value}."
    assert re.fullmatch(r"\n\nWhat is the \w+ of [\w -]+\?\nAnswer:\n", plain.question)
    (ruler,) = draw_needles(random.Random(1), 1, "ruler")
    kind, key = re.fullmatch(r"The secret (\w+) of (.+) that the text tells is", ruler.prefix).groups()
    assert ruler.told == f" Note: a secret {kind} of {key} is {ruler.value}."
    assert ruler.question == f"\n\nWhich secret {kind} of {key} does the text tell?\nAnswer:\n"


@given(seed=SEEDS, count=st.integers(0, 6))
def test_hiding_keeps_the_order_of_sentences(seed, count):
    rng = random.Random(seed)
    needles = draw_needles(rng, count)
    sentences = [str(number) for number in range(10)]
    hidden = hide(rng, sentences, needles)
    told = {needle.told for needle in needles}
    assert [sentence for sentence in hidden if sentence not in told] == sentences
    assert sorted(sentence for sentence in hidden if sentence in told) == sorted(told)


def test_needles_lie_everywhere():
    rng = random.Random(0)
    (needle,) = draw_needles(rng, 1)
    assert {hide(rng, ["a", "b", "c"], [needle]).index(needle.told) for _ in range(100)} == {0, 1, 2, 3}


@pytest.mark.parametrize("size", [100, 400])
@given(seed=SEEDS)
def test_cases(size, seed):
    case = draw_case(random.Random(seed), size, words)
    text, question, answer = re.fullmatch(r"(.*)\n\n(.*)\nAnswer:\n(.*)", case.prompt, re.DOTALL).groups()
    assert question == "What is the " + answer.removeprefix("The ").removesuffix(" is") + "?"
    assert text.count(f" {answer} {case.value}.") == 1
    assert size <= words(case.prompt) < size + 30
    assert draw_case(random.Random(seed), size, words) == case
