"""One sample of every benchmark on the pair that truly retrieves, by the commands that people type, and the report.

`make eval-smoke` runs this and what the pair itself promises (tests/test_retrieval_pair.py).
"""

import json

import pytest
from ruler_files import write_essays, write_questions
from script_modules import load_script

from specprefill_jax.evals.longbench import DATASETS
from specprefill_jax.evals.prompts import prose
from specprefill_jax.evals.results import read_rows
from specprefill_jax.evals.ruler import TASKS

PAIR = ["--main=retrieval-tiny", "--speculator=retrieval-tiny-speculator", "--dtype=float32"]
SETTINGS = ["--settings", "dense", "p1_full_lah8"]


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Small texts in the benchmarks' layouts."""
    folder = tmp_path_factory.mktemp("data")
    write_essays(folder / "essays")
    write_questions(folder)
    (folder / "dataset2prompt.json").write_text(json.dumps(dict.fromkeys(DATASETS, "{context}\n{input}")))
    (folder / "dataset2maxlen.json").write_text(json.dumps(dict.fromkeys(DATASETS, 4)))
    asked = {"input": "Which?", "answers": ["Paragraph 1, 段落1"], "all_classes": ["coins", "keys"]}
    for name in DATASETS:
        row = {"context": prose(300, name), **asked}
        (folder / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    return folder


def test_ruler(out, data):
    flags = [f"--data-dir={data}", f"--essays-dir={data / 'essays'}", "--lengths", "1200", "--limit=1", f"--out={out}"]
    assert load_script("eval_ruler").main([*PAIR, *flags, "--settings", "p1_full_lah8"]) == 0
    assert load_script("eval_ruler").main([*PAIR, *SETTINGS, *flags, "--tasks", "niah_single_1", "vt"]) == 0
    rows = list(read_rows(out / "ruler.jsonl"))
    assert [(row["task"], row["setting"]) for row in rows] == [
        *((task, "p1_full_lah8") for task in TASKS), ("niah_single_1", "dense"), ("vt", "dense")
    ]  # fmt: skip
    for row in rows:
        assert row["skipped"] is None
        assert 0 <= row["score"] <= 1
        chunks = -(-row["num_tokens"] // 32)
        assert row["num_kept"] <= (row["num_tokens"] if row["setting"] == "dense" else 32 * -(-chunks // 10))


def test_longbench(out, data):
    flags = [f"--benchmark-dir={data}", f"--data-dir={data}", f"--out={out}", "--no-chat"]
    assert load_script("eval_longbench").main([*PAIR, *flags, "--settings", "p1_full_lah8"]) == 0
    assert load_script("eval_longbench").main([*PAIR, *SETTINGS, *flags, "--datasets", "qasper"]) == 0
    rows = list(read_rows(out / "longbench.jsonl"))
    assert [(row["task"], row["setting"]) for row in rows] == [
        *((name, "p1_full_lah8") for name in DATASETS), ("qasper", "dense")
    ]  # fmt: skip
    assert [row["skipped"] for row in rows] == [None] * len(rows)
    assert all(row["num_generated"] <= 4 for row in rows)


def test_recall(out, data):
    flags = ["--keep-rates=0.1", "--look-aheads=8", "--limit=1", f"--out={out}", "ruler", "--tasks", "niah_single_1"]
    assert load_script("eval_recall").main([*PAIR, *flags, "--lengths", "1200"]) == 0
    rows = list(read_rows(out / "ruler_recall.jsonl"))
    assert [row["setting"] for row in rows] == ["p1_full_lah8", "p1_full_answer"]
    assert all(0 <= row["mass"] <= row["oracle_mass"] <= 1 for row in rows)


def test_report(out):
    page = out / "report.html"
    assert load_script("report").main([str(out), f"--out={out / 'report.md'}", f"--html={page}"]) == 0
    text = (out / "report.md").read_text()
    for heading in ("## ruler", "## longbench"):
        assert f"{heading}\n" in text
    assert "<svg" in page.read_text()
    assert "http://" not in page.read_text().replace("http://www.w3.org/2000/svg", "")
