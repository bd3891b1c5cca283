"""RULER's rows: every task obeys its rules at any length and seed; a token is a word here."""

import hashlib
import json
import re
from collections import Counter
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruler_files import write_essays, write_questions

from specprefill_jax.errors import ArgumentError
from specprefill_jax.evals.ruler import TASKS, Sources, generate, match_all, match_part, prompting
from specprefill_jax.evals.ruler.counting import DOTS
from specprefill_jax.evals.ruler.making import SHORT
from specprefill_jax.evals.ruler.needles import DEPTHS, insert
from specprefill_jax.evals.ruler.stream import Stream
from specprefill_jax.evals.ruler.wording import NOISE

NEEDLES = {
    # haystack, keys in all, values a key, keys asked for, values
    "niah_single_1": ("noise", 1, 1, 1, r"\d{7}"),
    "niah_single_2": ("essay", 1, 1, 1, r"\d{7}"),
    "niah_single_3": ("essay", 1, 1, 1, r"[0-9a-f-]{36}"),
    "niah_multikey_1": ("essay", 4, 1, 1, r"\d{7}"),
    "niah_multikey_2": ("needles", 1, 1, 1, r"\d{7}"),
    "niah_multikey_3": ("needles", 1, 1, 1, r"[0-9a-f-]{36}"),
    "niah_multivalue": ("essay", 1, 4, 1, r"\d{7}"),
    "niah_multiquery": ("essay", 4, 1, 4, r"\d{7}"),
}
UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
LENGTHS = st.integers(500, 2500) | st.integers(SHORT, SHORT + 500)
SEEDS = st.integers(0, 2**40)
few = settings(max_examples=8, deadline=None, database=None)


def count_words(text: str) -> int:
    return len(text.split())


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ruler")
    return Sources(write_essays(folder / "essays"), write_questions(folder / "data"))


@pytest.fixture(scope="module")
def rows(sources):
    """A function to the rows of a task."""

    def made(task, length=600, samples=2, seed=42, **options):
        known = {"count_tokens": count_words, "sources": sources}
        return list(generate(task, length=length, samples=samples, seed=seed, **{**known, **options}))

    return made


def body(row) -> str:
    """What stands between the instruction (behind the solved problem of some tasks) and the question."""
    parts = row.input.split("\n\n")
    assert len(parts) == (6 if row.task in ("vt", "cwe") else 3)
    return parts[-2]


def test_the_tasks():
    assert list(TASKS) == [*NEEDLES, "vt", "cwe", "fwe", "qa_1", "qa_2"]
    assert [TASKS[name].answer_tokens for name in TASKS] == [*[128] * 8, 30, 120, 50, 32, 32]
    assert {name for name in TASKS if TASKS[name].score is match_part} == {"qa_1", "qa_2"}
    assert {TASKS[name].score for name in TASKS} == {match_all, match_part}


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (SHORT - 1, [5, *[50] * 3, 5, 5, 50, 50, 5, 10, 127, 1, 1]),
        (SHORT, [25, *[500] * 3, 25, 25, 500, 500, 10, 10, 128, 10, 10]),
    ],
)
def test_increments(sources, length, expected):
    assert [task.maker(length, sources).increment for task in TASKS.values()] == expected


@pytest.mark.parametrize("task", TASKS)
@given(length=LENGTHS, seed=SEEDS, samples=st.integers(1, 3))
@few
def test_rows_are_as_long_as_they_may_be(rows, task, length, seed, samples):
    found = rows(task, length, samples, seed)
    assert [row.index for row in found] == list(range(samples))
    for row in found:
        assert row.length == count_words(row.prompt()) + TASKS[task].answer_tokens <= length
        assert (row.task, row.seed, row.max_length, row.wording) == (task, seed, length, "own")
        assert row.outputs
        assert all(isinstance(text, str) and text for text in row.outputs)
        assert row.prompt() == f"{row.input}\n{row.answer_prefix}"
    # The first sample is of the largest size: one unit more does not fit.
    first = found[0]
    unit = {"qa_1": 60, "qa_2": 40, "noise": 21, "needles": 9, "cwe": 6, "fwe": 8}
    kind = next(key for key in (task, first.made_from["haystack"], "one") if key in unit or key == "one")
    assert first.length > length - unit.get(kind, 2)


@pytest.mark.parametrize("task", TASKS)
def test_same_rows_for_same_arguments(rows, task):
    first = rows(task, 700, 3, 7)
    assert rows(task, 700, 3, 7) == first
    assert rows(task, 700, 1, 7) == first[:1]
    assert json.loads(json.dumps(asdict(first[0])))["outputs"] == list(first[0].outputs)
    longer = rows(task, 1400, 3, 7)
    if task != "fwe":  # its vocabulary grows with the length
        assert [row.outputs for row in longer] == [row.outputs for row in first]
    assert all(row.made_from["size"] > other.made_from["size"] for row, other in zip(longer, first, strict=True))
    if not task.startswith("qa"):
        assert rows(task, 700, 3, 8)[0].outputs != first[0].outputs


def test_rows_are_these_in_every_python(rows):
    """Rows that are made of draws alone, by their checksums; words and files may change with their packages."""
    found = {}
    for task in ("niah_multikey_3", "vt", "fwe"):
        lines = [json.dumps(asdict(row), sort_keys=True) for row in rows(task, 600, 2)]
        found[task] = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    assert found == {
        "niah_multikey_3": "adc8fda917ef6f46",
        "vt": "c5fae99768ea595e",
        "fwe": "42bb7ddead9217d2",
    }


def test_draws_are_these_in_every_python():
    draw = Stream(42, "vt", 0)
    assert [draw.below(100) for _ in range(6)] == [55, 29, 11, 6, 21, 35]
    assert draw.sample("abcdefgh", 4) == ["b", "c", "d", "g"]
    assert draw.shuffled(range(5)) == [3, 1, 4, 0, 2]
    assert draw.choice("xyz") == "x"


def test_draws():
    draw = Stream("draws")
    assert Counter(draw.below(4) for _ in range(4000)).keys() == {0, 1, 2, 3}
    assert sorted(draw.shuffled(range(50))) == list(range(50))
    assert len(set(draw.sample(range(50), 20))) == 20
    taken = {"1", "2"}
    assert sorted(draw.distinct(lambda draw: str(draw.below(5)), 3, taken)) == ["0", "3", "4"]
    assert taken == {"0", "1", "2", "3", "4"}
    places = Counter(Stream("place", trial).shuffled(range(3))[0] for trial in range(3000))
    assert all(900 < places[place] < 1100 for place in range(3))


@pytest.mark.parametrize("task", NEEDLES)
@given(length=LENGTHS, seed=SEEDS)
@few
def test_needles(rows, sources, task, length, seed):
    haystack, keys, values, queries, value = NEEDLES[task]
    [row] = rows(task, length, 1, seed)
    kind = "uuid" if "a-f" in value else "number"
    told = re.findall(rf"Note: a secret {kind} of (.+?) is ({value})\.(?=\s|$)", body(row))
    size = row.made_from["size"]
    others = size if haystack == "needles" else 0
    assert row.made_from["haystack"] == haystack
    assert row.made_from["needles"] == keys * values
    assert len(told) == keys * values + others
    # Values are distinct, and so are keys but for the values of one key.
    assert len({secret for _, secret in told}) == len(told)
    assert set(Counter(key for key, _ in told).values()) == {values}
    asked = [key for key in dict.fromkeys(key for key, _ in told) if key in row.input.split("\n\n")[-1]]
    assert len(asked) == queries
    assert sorted(row.outputs) == sorted(secret for key, secret in told if key in asked)
    assert all(key in row.answer_prefix for key in asked)
    for secret in row.outputs:
        assert row.prompt().count(secret) == 1
    if task == "niah_multikey_3":
        assert all(UUID4.fullmatch(text) for pair in told for text in pair)
    elif kind == "uuid":
        assert all(UUID4.fullmatch(secret) for _, secret in told)
    # The haystack without the needles is what it is said to be.
    sentence = rf"Note: a secret {kind} of .+? is {value}\."
    if haystack == "noise":
        assert body(row).split("\n").count(NOISE) == size
    elif haystack == "essay":
        left = re.sub(r" +", " ", re.sub(sentence, "", body(row))).strip()
        assert left == " ".join(sources.essays.first(size))
        assert set(row.made_from["depths"]) <= set(DEPTHS)
    # The depths are those at which the values stand.
    lines = body(row).split("\n")
    for secret, depth in zip(row.outputs, row.made_from["depths"], strict=True):
        if haystack == "essay":
            before = body(row)[: body(row).index(secret)]
            sentences = sources.essays.first(size)
            ahead = re.sub(r" +", " ", re.sub(sentence, "", before.rpartition("Note: ")[0])).strip()
            assert ahead == " ".join(sentences[: len(sentences) * depth // 100])
        else:
            [place] = [at for at, line in enumerate(lines) if secret in line]
            assert depth == round(100 * place / size)


def test_needles_of_one_answer_are_asked_for_in_the_singular(rows):
    [one], [four] = rows("niah_multikey_1", samples=1), rows("niah_multivalue", samples=1)
    assert "a secret number" in one.input.split("\n\n")[0]
    assert "secret numbers" not in one.input
    assert one.answer_prefix.endswith(" is")
    assert "secret numbers" in four.input.split("\n\n")[0]
    assert four.answer_prefix.endswith(" are")


def test_depths_are_forty_steps():
    assert (DEPTHS[0], DEPTHS[1], DEPTHS[-2], DEPTHS[-1]) == (0, 3, 97, 100)
    assert len(set(DEPTHS)) == 40
    assert {after - before for before, after in pairwise(DEPTHS)} == {2, 3}


def test_depths_cover_the_haystack(rows):
    essay = {row.made_from["depths"][0] for row in rows("niah_single_2", 500, 400)}
    assert essay == set(DEPTHS)
    for task in ("niah_single_1", "niah_multikey_2"):
        depths = [row.made_from["depths"][0] for row in rows(task, 500, 200)]
        assert (min(depths), max(depths)) == (0, 100)
        assert all(any(low <= depth <= low + 10 for depth in depths) for low in range(0, 100, 10))


def test_insert():
    assert insert("abc", [0, 1, 1, 3], "1234") == ["1", "a", "2", "3", "b", "c", "4"]


@given(length=LENGTHS, seed=SEEDS)
@few
def test_chains(rows, length, seed):
    [row] = rows("vt", length, 1, seed)
    head, example, solved, head_again, _, asked = row.input.split("\n\n")
    assert head_again == head
    names = set()
    for text, number, boxes in (
        (example, re.search(r"number (\d{5}) in the end", solved)[1], None),
        (body(row), re.search(r"number (\d{5}) in the end", asked)[1], row.outputs),
    ):
        links = re.findall(r"^Box (\w+) gets (?:the number|what is in box) (\w+)\.$", text, re.MULTILINE)
        assert links[0][1] == number
        assert all(link[1] == before[0] for before, link in pairwise(links))
        chain = [name for name, _ in links]
        assert len(chain) == 5
        assert all(re.fullmatch("[A-Z]{5}", name) for name in chain)
        assert names.isdisjoint(chain)
        names |= set(chain)
        if boxes is None:
            boxes = re.search(rf" hold the number {number} are (.+)\.$", solved)[1].replace(" and ", ", ").split(", ")
        assert tuple(chain) == tuple(boxes)
    assert len(names) == 10
    assert re.findall(r"\d{5}", row.answer_prefix) == [number]
    lines = body(row).split("\n")
    assert lines.count(NOISE) == row.made_from["size"] == len(lines) - 5
    noise_before = [sum(line == NOISE for line in lines[: lines.index(line)]) for line in lines if line != NOISE]
    assert row.made_from["depths"] == [round(100 * before / row.made_from["size"]) for before in noise_before]


def listed(text: str) -> Counter:
    """How often each word stands in a numbered list whose numbers are right."""
    pairs = re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", text)
    assert [int(number) for number, _ in pairs] == list(range(1, len(pairs) + 1))
    return Counter(word for _, word in pairs)


@given(length=LENGTHS, seed=SEEDS)
@few
def test_common_words(rows, length, seed):
    [row] = rows("cwe", length, 1, seed)
    often, seldom, solved_often, solved_seldom, solved_size = (6, 1, 3, 1, 20) if length < SHORT else (30, 3, 10, 3, 40)
    counts = listed(body(row))
    assert len(set(row.outputs)) == 10
    assert [counts[word] for word in row.outputs] == [often] * 10
    assert Counter(counts.values()) == {often: 10, seldom: row.made_from["size"] - 10}
    assert row.made_from["repeats"] == [often, seldom]
    _, example, answered, *_ = row.input.split("\n\n")
    solved = listed(example)
    assert Counter(solved.values()) == {solved_often: 10, solved_seldom: solved_size - 10}
    assert listed(answered.partition(": ")[2]).keys() == {word for word, n in solved.items() if n == solved_often}
    assert set(row.outputs).isdisjoint(solved)


def test_common_words_where_words_run_out(rows, sources):
    words = sources.words
    small = replace(
        words, words=words.words[:60], adjectives=words.words[:40], nouns=words.words[20:60], more=("extra",)
    )
    poor = Sources(sources.essays_dir, sources.data_dir)
    poor.__dict__["words"] = small
    [row] = rows("cwe", 700, 1, sources=poor)
    counts = listed(body(row))
    made = [word for word in counts if word not in small.words]
    assert len(counts) == row.made_from["size"]
    assert "extra" in made
    assert len(made) == 1 + row.made_from["pairs"] == len(counts) - 60
    assert set(counts.values()) == {6, 1}
    halves = [word.rsplit("-", 1) for word in made if word != "extra"]
    assert not {half for pair in halves for half in pair} & set(row.outputs)


@given(length=LENGTHS, seed=SEEDS)
@few
def test_frequent_words(rows, length, seed):
    [row] = rows("fwe", length, 1, seed)
    counts = Counter(body(row).split(" "))
    ranked = [word for word, _ in counts.most_common()]
    assert ranked[0] == DOTS
    assert tuple(ranked[1:4]) == row.outputs
    size, zeta = row.made_from["size"], sum(1 / k**2 for k in range(1, 200_000))
    expected = [int(size / zeta / rank**2 + 1e-3) for rank in range(1, row.made_from["vocabulary"] + 1)]
    assert row.made_from["vocabulary"] == (length - 50) // 50
    # Floors of nearly equal numbers may differ by one.
    found = sorted(counts.values(), reverse=True)
    assert all(abs(a - b) <= 1 for a, b in zip(found, expected, strict=False))
    assert len(found) == sum(count > 0 for count in expected) or abs(len(found) - sum(c > 0 for c in expected)) == 1
    first = found[:5]
    assert len(set(first)) == len(first)
    assert all(re.fullmatch("[a-z]{6}", word) for word in ranked[1:])


def test_frequent_words_are_ranked_apart_from_the_least_size_on(sources):
    maker = TASKS["fwe"].maker(2000, sources)
    for size in range(maker.least, maker.least + 200):
        sample = maker.make(Stream(1), 0, size)
        counts = Counter(sample.input.split("\n\n")[1].split(" ")).most_common(5)
        assert len({count for _, count in counts}) == 5


def documents(row) -> list[str]:
    texts = re.findall(r"^Document (\d+):\n(.+?)(?=\n\n)", row.input, re.MULTILINE | re.DOTALL)
    assert [int(number) for number, _ in texts] == list(range(1, len(texts) + 1))
    return [text for _, text in texts]


@pytest.mark.parametrize("task", ["qa_1", "qa_2"])
@given(length=st.integers(200, 3000), seed=SEEDS)
@few
def test_documents(rows, sources, task, length, seed):
    data = sources.squad if task == "qa_1" else sources.hotpotqa
    for row in rows(task, length, 3, seed):
        asked = data.questions[row.index]
        texts = documents(row)
        assert len(texts) == row.made_from["size"]
        assert row.outputs == asked.answers
        assert row.input.endswith(f"Question: {asked.text}")
        counts = Counter(texts)
        assert counts.keys() <= set(data.documents)
        gold = [data.documents[number] for number in asked.gold]
        assert [texts[number - 1] for number in row.made_from["gold"]] == gold
        assert all(counts[text] == 1 for text in gold)
        # Distractors are near ones first, and come again only after all have come.
        rest = len(texts) - len(gold)
        near = {data.documents[number] for number in asked.near}
        assert len(near & counts.keys()) == min(rest, len(near))
        others = Counter(text for text in texts if text not in gold)
        if rest > len(data.documents) - len(gold):
            assert len(others) == len(data.documents) - len(gold)
            assert max(others.values()) - min(others.values()) <= 1
        else:
            assert set(others.values()) <= {1}
        assert row.input.count("Reply with the bare answer") == 2


def test_questions_too_long_are_passed_over(rows):
    every = rows("qa_1", 3000, 36)
    assert [row.index for row in every] == list(range(36))
    short = rows("qa_1", 106, 24)
    assert [row.index for row in short] != list(range(24))
    assert [row.index for row in short] == sorted({row.index for row in short})
    assert [row.outputs for row in short] == [every[row.index].outputs for row in short]


@pytest.mark.parametrize("task", TASKS)
def test_too_small_a_length_tells_the_least_one(rows, task):
    with pytest.raises(ArgumentError, match=rf"length=20 .* at least (\d+) for so many rows of {task}") as caught:
        rows(task, 20, 3)
    least = int(re.search(r"at least (\d+)", str(caught.value))[1])
    found = rows(task, least, 3)
    assert max(row.length for row in found) == least
    with pytest.raises(ArgumentError, match=f"length={least - 1} .* at least {least} "):
        rows(task, least - 1, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"task": "niah"}, r"task='niah' .* one of niah_single_1, .*qa_2"),
        ({"length": 0}, "length=0 .* at least 1"),
        ({"length": True}, "length=True"),
        ({"length": 1000.5}, r"length=1000\.5"),
        ({"samples": 0}, "samples=0 .* at least 1"),
        ({"seed": -1}, "seed=-1 .* at least 0"),
        ({"task": "qa_1", "samples": 37}, "samples=37 .* at most 36, .* task qa_1"),
        ({"task": "qa_2", "samples": 7}, "samples=7 .* at most 6, .* task qa_2"),
        ({"count_tokens": lambda text: 5}, "count_tokens=.* grows with the text"),
        ({"task": "qa_1", "sources": Sources()}, "data_dir=None .* dev-v2.0.json"),
    ],
)
def test_arguments_are_looked_at_before_the_first_row(sources, change, message):
    known = {"task": "vt", "length": 900, "samples": 1, "count_tokens": count_words, "sources": sources}
    with pytest.raises(ArgumentError, match=message):
        generate(**{**known, **change})


def test_the_chat_around_a_row_counts(rows):
    def wrap(text):
        return f"<user> be brief {text} <assistant> "

    [row] = rows("vt", samples=1, wrap=wrap)
    assert row.prompt(wrap) == f"<user> be brief {row.input} <assistant> {row.answer_prefix}"
    assert row.length == count_words(row.prompt(wrap)) + 30 <= 600
    assert row.made_from["size"] <= rows("vt", samples=1)[0].made_from["size"]


class Chat:
    """A tokenizer that counts letters, with BOS where it is asked for."""

    def __init__(self, has_chat_template):
        self.has_chat_template = has_chat_template

    def encode(self, text, add_special_tokens=True):
        return ["bos"] * add_special_tokens + list(text)

    def render_chat(self, messages):
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"


def test_prompts_of_a_tokenizer():
    count, wrap = prompting(Chat(True))
    assert wrap("hello") == "<user>hello<assistant>"
    assert count("four") == 4
    count, wrap = prompting(Chat(False))
    assert wrap("hello") == "hello\n"
    assert count("four") == 5
