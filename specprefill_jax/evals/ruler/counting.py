"""Counting: the most common words of a list (cwe), and the most frequent ones of a coded text (fwe)."""

import math

from specprefill_jax.evals.ruler import wording
from specprefill_jax.evals.ruler.making import SHORT, Maker, Sample
from specprefill_jax.evals.ruler.sources import Sources, Words
from specprefill_jax.evals.ruler.stream import Stream

_ZETA_2 = math.pi**2 / 6
_CODE_LETTERS = 6
DOTS = "..."


def common_words(length: int, sources: Sources, *, common: int = 10) -> Maker:
    """Samples of a shuffled, numbered list, behind a solved one; a size counts the different words of the list.

    `common` words stand in it 30 times each and the others 3 times, 6 times and once in short texts. The solved list
    has 40 words, 10 times and 3 times (20 words, 3 times and once).
    """
    words = sources.words
    often, seldom = (6, 1) if length < SHORT else (30, 3)
    solved_size, solved_often, solved_seldom = (20, 3, 1) if length < SHORT else (40, 10, 3)

    def make(draw: Stream, _: int, size: int) -> Sample:
        chosen = draw.sample(words.words, solved_size + common)
        asked, *solved = chosen[:common], chosen[common : 2 * common], chosen[2 * common :]
        text, prefix = wording.common_question(_list(draw, solved[0], solved_often, solved[1], solved_seldom), common)
        example = f"{text}\n{prefix} {_numbered(solved[0])}"
        others, made_from = _others(draw, words, asked, size - common)
        text, prefix = wording.common_question(_list(draw, asked, often, others, seldom), common)
        made_from = {"haystack": "words", "size": size, "repeats": [often, seldom], **made_from}
        return Sample(f"{example}\n\n{text}", prefix, tuple(asked), made_from)

    return Maker(make, least=common + 1, increment=10)


def _others(draw: Stream, words: Words, asked: list[str], count: int) -> tuple[list[str], dict[str, object]]:
    """`count` words that are not asked for, and what they are made of.

    Where the words do not suffice, further ones are taken, and where these do not, "adjective-noun" pairs.
    """
    taken = set(asked)
    plain = [word for word in words.words if word not in taken]
    if count <= len(plain):
        return draw.sample(plain, count), {"words": words.made_from}
    found = plain + draw.sample(words.more, min(count - len(plain), len(words.more)))
    pairs = count - len(found)
    if pairs:
        # A pair of which half is asked for would blur what is counted.
        adjectives, nouns = ([word for word in kind if word not in taken] for kind in (words.adjectives, words.nouns))
        taken |= {*found}
        found += draw.distinct(lambda draw: f"{draw.choice(adjectives)}-{draw.choice(nouns)}", pairs, taken)
    return found, {"words": words.made_from, "pairs": pairs}


def _list(draw: Stream, common: list[str], often: int, others: list[str], seldom: int) -> str:
    return _numbered(draw.shuffled(common * often + others * seldom))


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))


def frequent_words(length: int, _: Sources, *, asked: int = 3) -> Maker:
    """Samples of a shuffled text in which the word of rank r stands floor(size / r**2 / zeta(2)) times.

    The first rank is dots, and the next `asked` are asked for. There are (length - 50) / 50 words; those of no
    occurrence are left out.
    """
    vocabulary = max(asked + 1, (length - 50) // 50)
    # From here on the counts of two neighbours among the first ranks differ by one at least.
    ranks = range(1, asked + 2)
    least = math.ceil(max(_ZETA_2 / (1 / rank**2 - 1 / (rank + 1) ** 2) for rank in ranks))

    def make(draw: Stream, _: int, size: int) -> Sample:
        coded = [DOTS, *draw.distinct(_code, vocabulary - 1, {DOTS})]
        text = [word for rank, word in enumerate(coded, 1) for word in [word] * math.floor(size / _ZETA_2 / rank**2)]
        question, prefix = wording.frequent_question(" ".join(draw.shuffled(text)))
        made_from = {"haystack": "coded words", "size": size, "vocabulary": vocabulary, "alpha": 2.0}
        return Sample(question, prefix, tuple(coded[1 : asked + 1]), made_from)

    return Maker(make, least=least, increment=max(1, length // 32))


def _code(draw: Stream) -> str:
    return "".join(chr(ord("a") + draw.below(26)) for _ in range(_CODE_LETTERS))
