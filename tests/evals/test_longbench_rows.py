"""LongBench's rows: prompts, truncation, template-free datasets, and files that are wrong."""

import json

import pytest
from small_tokenizers import byte_level

from specprefill_jax.errors import ArgumentError
from specprefill_jax.evals.longbench import (
    CATEGORIES,
    DATASETS,
    count_samples,
    middle_cut,
    read_benchmark,
    read_samples,
)
from specprefill_jax.evals.samples import Sample, prompt_ids
from specprefill_jax.tokens import Tokenizer

PROMPTS = dict.fromkeys(DATASETS, "Text: {context}\nAsked: {input}\nSaid:") | {"lcc": "Go on: {context}"}
LONGEST = dict.fromkeys(DATASETS, 20)
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), chat_templates={"default": TEMPLATE})


@pytest.fixture
def files(tmp_path):
    """A function that writes a benchmark and rows by dataset, and reads them as samples."""

    def write(rows, prompts=PROMPTS, longest=LONGEST, **options) -> list[Sample]:
        (tmp_path / "dataset2prompt.json").write_text(json.dumps(prompts))
        (tmp_path / "dataset2maxlen.json").write_text(json.dumps(longest))
        for name, given in rows.items():
            lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in given]
            (tmp_path / f"{name}.jsonl").write_text("\n\n".join(lines) + "\n")
        found = list(read_samples(tmp_path, read_benchmark(tmp_path), list(rows), **options))
        assert count_samples(tmp_path, read_benchmark(tmp_path), list(rows), limit=options.get("limit")) == len(found)
        return found

    return write


def row(**changes):
    return {"context": "c {input} c", "input": "q {context}", "answers": ["a", "b"], **changes}


def test_the_table():
    assert len(DATASETS) == 21
    assert {dataset.category for dataset in DATASETS.values()} == set(CATEGORIES)
    plain = {name for name, dataset in DATASETS.items() if not dataset.chat}
    assert plain == {"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"}


def test_samples(files):
    rows = {
        "hotpotqa": [row(_id="x7", length=4000), row(length=3999)],
        "trec": [row(all_classes=["a", "b", "c"], length=8000)],
        "lcc": [row(prompt="def f():", context=None)],
    }
    first, second, third, fourth = files(rows)
    assert first.input == "Text: c {input} c\nAsked: q {context}\nSaid:"  # braces of a row are text
    assert (first.name, first.category, first.max_tokens, first.chat) == ("longbench/hotpotqa/4-8k/x7",
        "multi-doc QA", 20, True)  # fmt: skip
    assert (first.question, first.outputs, first.notes) == ("q {context}", ("a", "b"), {"truncated": False})
    assert (second.key, second.bucket, third.bucket, fourth.bucket) == ("1", "0-4k", "8k+", "unknown")
    assert (fourth.input, fourth.question, fourth.chat) == ("def f():", "", False)
    assert first.score("the b") == 1.0
    assert third.score("a, c\nb") == 1 / 2
    assert files(rows, limit=1)[1].task == "trec"
    assert not any(sample.chat for sample in files(rows, chat=False))


def test_prompts_in_a_chat_and_without(files, tokenizer):
    rows = {"hotpotqa": [row()], "trec": [row(all_classes=["a"])]}
    chat, plain = (tokenizer.decode(prompt_ids(sample, tokenizer)) for sample in files(rows))
    text = "Text: c {input} c\nAsked: q {context}\nSaid:"
    assert (chat, plain) == (f"[user]{text}[assistant]", text)
    with pytest.raises(ArgumentError, match="token ids, as the main model has no tokenizer"):
        prompt_ids(files(rows)[0], None)


def test_the_middle_is_cut(files, tokenizer):
    text = "0123456789abcdefghij"
    assert len(tokenizer.encode(text)) == 20
    assert middle_cut(text, tokenizer, 20) == text
    assert middle_cut(text, tokenizer, 6) == "012hij"
    assert middle_cut(text, tokenizer, 7) == "012hij"  # halves are whole tokens
    assert middle_cut(text, tokenizer, 19) == "012345678bcdefghij"
    [cut, whole] = files({"lcc": [row(prompt=text), row(prompt="0")]}, tokenizer=tokenizer, max_length=8)
    assert (cut.input, cut.notes["truncated"], whole.notes["truncated"]) == ("0123ghij", True, False)
    for options in ({"max_length": 8}, {"max_length": 1, "tokenizer": tokenizer}):
        with pytest.raises(
            ArgumentError, match=r"^max_length=. is not allowed: max_length must be None, or at least 2"
        ):
            files({"lcc": [row()]}, **options)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"squad": [row()]}, r"^dataset='squad' is not allowed: dataset must be one of narrativeqa, "),
        ({"lcc": ["{"]}, r"lcc.jsonl, line 1='{.*a JSON object"),
        ({"lcc": [row(), "[1]"]}, r"lcc.jsonl, line 3="),
        ({"lcc": [row(answers=[])]}, r"lcc.jsonl, line 1: answers=\[\] is not allowed"),
        ({"lcc": [row(answers="x")]}, r"answers='x' is not allowed"),
        ({"lcc": [row(context=None)]}, r"an object with context and input, or with prompt"),
        ({"trec": [row()]}, r"all_classes=None is not allowed"),
    ],
)
def test_wrong_rows(files, rows, message):
    with pytest.raises(ArgumentError, match=message):
        files(rows)


def test_wrong_benchmark(files, tmp_path):
    with pytest.raises(ArgumentError, match=r"^benchmark_dir=.* a folder with dataset2prompt.json"):
        read_benchmark(tmp_path)
    with pytest.raises(ArgumentError, match=r"^dataset2maxlen.json: lcc=0 is not allowed"):
        files({"lcc": [row()]}, longest={"lcc": 0})
    with pytest.raises(ArgumentError, match=r"^dataset2prompt.json: lcc='x' is not allowed: .* with {context} in it"):
        files({"lcc": [row()]}, prompts={"lcc": "x"})
    with pytest.raises(ArgumentError, match=r"^dataset='lcc' is not allowed: dataset must be one of dataset2maxlen"):
        files({"lcc": [row()]}, longest={"trec": 1})
    with pytest.raises(ArgumentError, match=r"^dataset='lcc' is not allowed: dataset must be one of dataset2prompt"):
        files({"lcc": [row()]}, prompts={"trec": "{context}"})
    files({"lcc": [row(prompt="x")]}, prompts={})  # a whole prompt needs none
    with pytest.raises(ArgumentError, match=r"^data_dir=.* a folder with qmsum.jsonl or qmsum_e.jsonl"):
        read_samples(tmp_path, read_benchmark(tmp_path), ["qmsum"])
