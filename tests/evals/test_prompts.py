"""Prompts for load: rows of files, generated prose, heads."""

import json

import pytest

from specprefill_jax.errors import ArgumentError
from specprefill_jax.evals import prompts
from specprefill_jax.evals.prompts import Prompt

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


def read(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return prompts.read_prompts(path)


def test_rows(tmp_path):
    rows = read(
        tmp_path,
        {"messages": MESSAGES, "max_tokens": 5},
        {"prompt": "a\u2028b"},
        {"context": "c", "input": "q", "dataset": "gov_report"},
        {"context": "c", "input": "", "dataset": "trec"},
        {"prompt": "d", "dataset": "hotpotqa", "max_tokens": 7},
    )
    assert rows == [
        Prompt(tuple(MESSAGES), max_tokens=5),
        Prompt(text="a\u2028b"),
        Prompt(text="c\n\nq", max_tokens=512),
        Prompt(text="c", max_tokens=64, plain=True),
        Prompt(text="d", max_tokens=7),
    ]


def test_longbench_has_21_datasets():
    assert len(prompts.LONGBENCH_TOKENS) == 21
    assert prompts.LONGBENCH_TOKENS.keys() >= prompts.LONGBENCH_PLAIN


@pytest.mark.parametrize(
    "row", ["{", "1", "{}", '{"prompt": ""}', '{"messages": [1]}', '{"context": "x"}', "[" * 99999]
)
def test_bad_rows_are_named(tmp_path, row):
    with pytest.raises(
        ArgumentError, match=r"rows.jsonl, line 3=.* is not allowed: .* must be an object with messages"
    ):
        read(tmp_path, {"prompt": "fine"}, row)


@pytest.mark.parametrize("most", ["0", "true", '"9"', "1.5"])
def test_bad_max_tokens(tmp_path, most):
    with pytest.raises(ArgumentError, match="line 1: max_tokens=.* must be an integer of at least 1"):
        read(tmp_path, f'{{"prompt": "x", "max_tokens": {most}}}')


def test_files_without_rows(tmp_path):
    with pytest.raises(ArgumentError, match="prompts=.* must be a file with at least one row"):
        read(tmp_path, "")
    with pytest.raises(ArgumentError, match="prompts=.* must be a file of JSON lines"):
        prompts.read_prompts(tmp_path / "none.jsonl")


def test_prose():
    text = prompts.prose(1000, 1)
    assert len(text.split(" ")) == 1000
    assert text == prompts.prose(1000, 1)
    assert text.startswith(prompts.prose(10, 1))
    assert text != prompts.prose(1000, 2)
    assert text[:4] == "The "
    assert len(set(text.split(". "))) > 80  # it does not repeat itself
    assert prompts.prose(0, 1) == ""


def test_heads_differ():
    heads = {prompts.head(f"7 {serial}") for serial in range(2000)}
    assert len(heads) == 2000
    assert prompts.head(3) == prompts.head(3)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (Prompt(text="t", max_tokens=3), Prompt(text="H\nt", max_tokens=3)),
        (Prompt(tuple(MESSAGES)), Prompt(({"role": "system", "content": "H\ns"}, MESSAGES[1]))),
        (Prompt(({"role": "user", "content": None},)), Prompt(({"role": "user", "content": "H"},))),
        (
            Prompt(({"role": "user", "content": [{"type": "text", "text": "a"}]},)),
            Prompt(({"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "a"}]},)),
        ),
    ],
)
def test_head_comes_first(prompt, expected):
    assert prompts.with_head(prompt, "H") == expected
    assert MESSAGES[0]["content"] == "s"
