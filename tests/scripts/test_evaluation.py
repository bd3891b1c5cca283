"""scripts/eval_longbench.py, eval_ruler.py, eval_recall.py and report.py: from rows of a benchmark to tables."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
from answering import Answering
from ruler_files import write_essays, write_questions
from script_modules import load_script
from small_tokenizers import byte_level

from specprefill_jax import SpecPrefill
from specprefill_jax.evals import command
from specprefill_jax.evals.baselines import Embedder
from specprefill_jax.evals.document import to_markdown
from specprefill_jax.evals.report import Results, report
from specprefill_jax.evals.results import read_rows
from specprefill_jax.evals.ruler import TASKS, Sources, generate, prompting
from specprefill_jax.evals.tables import Estimate, Row, against_dense, bootstrap, cell
from specprefill_jax.tokens import Tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


@pytest.fixture
def model(monkeypatch) -> Answering:
    model = Answering(tokenizer=Tokenizer(byte_level(), chat_templates={"default": TEMPLATE}))
    monkeypatch.setattr(command.SpecPrefill, "from_pretrained", lambda *given, **named: model)
    return model


@pytest.fixture
def files(tmp_path) -> list[str]:
    names = ("hotpotqa", "samsum")
    (tmp_path / "dataset2prompt.json").write_text(json.dumps(dict.fromkeys(names, "Of {context}: {input}")))
    (tmp_path / "dataset2maxlen.json").write_text(json.dumps(dict.fromkeys(names, 7)))
    for name in names:
        rows = [
            {"context": "word " * 30, "input": f"which {i}?", "answers": ["200"], "length": 4000 * i} for i in range(3)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folders = ["--benchmark-dir", str(tmp_path), "--data-dir", str(tmp_path), "--out", str(tmp_path / "out")]
    return [*folders, "--datasets", *names]


def test_longbench_to_report(model, files, tmp_path, monkeypatch, capsys):
    script, reporting = load_script("eval_longbench"), load_script("report")
    flags = ["--methods", "dense", "specprefill", "bm25_chunks", "--keep-rates", "0.3", "0.5"]
    assert script.main([*files, *flags, "--limit", "1"]) == 0
    assert "10 rows added to " in " ".join(capsys.readouterr().err.split())
    assert script.main([*files, *flags]) == 0
    assert "20 rows added to" in (said := " ".join(capsys.readouterr().err.split()))
    assert "10 were there, 0 could not be read" in said
    assert "30 of 30 rows, about 0 s left" in said
    rows = list(read_rows(tmp_path / "out" / "longbench.jsonl"))
    assert [row["setting"] for row in rows[:5]] == [
        "dense", "p3_full_lah8", "p5_full_lah8", "bm25_chunks_p3", "bm25_chunks_p5"
    ]  # fmt: skip
    assert {row["versions"]["rouge"] for row in rows} == {"1.0.1"}
    assert rows[0]["output"] == f"{rows[0]['num_tokens']} of {rows[0]['num_tokens']}"
    tokens, sampling = model.asked[-1]
    assert model.tokenizer.decode(tokens) == "Of " + "word " * 30 + ": which 2?"
    assert (sampling.max_tokens, sampling.stop, sampling.temperature) == (7, (), 0.0)
    about = json.loads((tmp_path / "out" / "longbench.about.json").read_text())
    assert (about["max_length"], about["main"], about["seed"]) == (None, "smollm2-135m", 0)

    out, plots, page = tmp_path / "report.md", tmp_path / "plots", tmp_path / "report.html"
    flags = ["--out", str(out), "--plots", str(plots), "--html", str(page)]
    assert reporting.main([str(tmp_path / "out"), *flags]) == 0
    text = out.read_text()
    head = "| category | dense | bm25_chunks_p3 | bm25_chunks_p5 | p3_full_lah8 | p5_full_lah8 |"
    assert head in text
    assert "### By task and length: p3_full_lah8\n\n| task | 0-4k | 4-8k | 8k+ |" in text
    assert "| multi-doc QA | " in text
    assert "| dense | 6 | 0 | 100.0% | 0.00 s | - |" in text
    assert "not run on the same samples" not in text
    assert ElementTree.parse(plots / "longbench.svg").getroot().tag.endswith("svg")
    assert [path.name for path in plots.iterdir()] == ["longbench.svg"]
    again = tmp_path / "again.md"
    assert reporting.main([str(tmp_path / "out"), "--out", str(again)]) == 0
    assert again.read_text() == text
    assert reporting.main([str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out == text

    samples = [line.split("\t") for line in (tmp_path / "report.samples.tsv").read_text().splitlines()]
    assert samples[0][4:] == ["kind", "needed", "score at 0.3", "score at 0.5", "score at 1"]
    assert len(samples) == 1 + 6
    assert samples[1][:4] == ["longbench", "hotpotqa/0-4k/0", "hotpotqa", "p*_full_lah8"]
    assert "### Kinds of prompts: p*_full_lah8" in text
    assert "| task | compressible | information-dense | noisy | unanswered | samples |" in text
    body = page.read_text()
    assert body.count("<svg") == 1
    assert all(heading in body for heading in ("<h2>longbench</h2>", "<h3>By category</h3>", "<th", "p3_full_lah8"))
    monkeypatch.setattr(reporting, "to_png", lambda svg: f"drawn {svg}".encode())
    assert reporting.main([str(tmp_path / "out"), "--plots", str(plots), "--png"]) == 0
    assert (plots / "longbench.png").read_text() == f"drawn {(plots / 'longbench.svg').read_text()}"
    assert capsys.readouterr().out == text
    page.unlink()
    (tmp_path / "report.samples.tsv").unlink()
    assert reporting.main([str(tmp_path / "out"), "--html", str(page)]) == 0
    assert (page.read_text(), capsys.readouterr().out) == (body, "")
    assert (tmp_path / "report.samples.tsv").is_file()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--settings", "p0"], "setting='p0' is not allowed"),
        (["--methods", "best"], "best"),
        (["--limit", "0"], "limit=0 is not allowed"),
        (["--datasets", "squad"], "dataset='squad' is not allowed"),
        (["--benchmark-dir", "nowhere"], "a folder with dataset2prompt.json"),
        (["--max-length", "1"], "max_length=1 is not allowed"),
        (["--keep-rates", "1.5"], "setting='p15_full_lah8' is not allowed"),
        (["--methods", "embedding_sentences"], "embedding_model=None is not allowed"),
    ],
)
def test_wrong_flags(model, files, flags, message, capsys):
    assert load_script("eval_longbench").main([*files, *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_rows_say_whose_embeddings_chose(model, files, tmp_path, monkeypatch):
    """Added to what other methods were asked before."""
    embedder = Embedder("some/model", lambda texts: np.eye(len(texts)))
    monkeypatch.setattr(command, "sentence_embedder", {"some/model": embedder}.__getitem__)
    assert load_script("eval_longbench").main([*files, "--settings", "random_p3"]) == 0
    flags = ["--settings", "random_p3", "embedding_sentences_p3", "--embedding-model", "some/model"]
    assert load_script("eval_longbench").main([*files, *flags]) == 0
    rows = list(read_rows(tmp_path / "out" / "longbench.jsonl"))
    assert [row["setting"] for row in rows] == ["random_p3"] * 6 + ["embedding_sentences_p3"] * 6
    assert [row.get("embedding_model") for row in rows] == [None] * 6 + ["some/model"] * 6


@pytest.fixture
def ruler(model, tmp_path) -> list[str]:
    model.max_prompt_tokens = model.speculator.model.config.max_position_embeddings = 4000
    write_essays(tmp_path / "essays")
    write_questions(tmp_path / "data")
    folders = {"essays-dir": "essays", "data-dir": "data", "out": "out"}
    return [f"--{flag}={tmp_path / folder}" for flag, folder in folders.items()]


def test_ruler_to_report(model, ruler, tmp_path, capsys):
    script = load_script("eval_ruler")
    flags = [*ruler, "--lengths", "3500", "3000", "--settings", "dense", "p3_full_lah8", "bm25_chunks_p3"]
    assert script.main([*flags, "--limit", "1"]) == 0
    assert "78 rows added to" in " ".join(capsys.readouterr().err.split())
    assert script.main([*flags, "--limit", "2"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "78 rows added to" in said
    assert "78 were there, 0 could not be read" in said
    rows = list(read_rows(tmp_path / "out" / "ruler.jsonl"))
    assert [row["bucket"] for row in rows[:78]] == ["3000"] * 39 + ["3500"] * 39
    assert {(row["task"], row["bucket"], row["setting"]) for row in rows} == {
        (task, bucket, setting)
        for task in TASKS
        for bucket in ("3000", "3500")
        for setting in ("dense", "p3_full_lah8", "bm25_chunks_p3")
    }
    assert {row["wording"] for row in rows} == {"own"}
    assert all(row["num_tokens"] + TASKS[row["task"]].answer_tokens == row["length"] for row in rows)
    assert all(row["length"] <= int(row["bucket"]) for row in rows)

    sources = Sources(tmp_path / "essays", tmp_path / "data")
    wanted = list(generate("qa_2", length=3500, samples=2, sources=sources, **prompting(model.tokenizer)._asdict()))[1]
    tokens, sampling = model.asked[-1]
    assert model.tokenizer.decode(tokens) == f"[user]{wanted.input}[assistant]{wanted.answer_prefix}"
    assert (sampling.max_tokens, sampling.stop) == (32, ())

    reporting = load_script("report")
    assert reporting.main([str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "### By task and length: bm25_chunks_p3\n\n| task | 3000 | 3500 |" in text
    for category in ("retrieval", "multi-hop tracing", "aggregation", "question answering"):
        assert f"| {category} | " in text


def test_ruler_scores_what_the_text_tells(model, ruler, tmp_path, monkeypatch):
    """A model that repeats its prompt gets all the points that can be had."""
    asked = Answering.generate

    def parrot(self, ids, *given, **named):
        return replace(asked(self, ids, *given, **named), text=self.tokenizer.decode(ids))

    monkeypatch.setattr(Answering, "generate", parrot)
    tasks = [task for task in TASKS if task != "qa_2"]  # whose answer is yes
    flags = [*ruler, "--lengths", "3000", "--limit", "1", "--settings", "dense", "--tasks", *tasks]
    assert load_script("eval_ruler").main(flags) == 0
    assert [row["score"] for row in read_rows(tmp_path / "out" / "ruler.jsonl")] == [1.0] * 12


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--tasks", "niah"], "tasks='niah' is not allowed"),
        (["--lengths", "3000", "40"], "length=40 is not allowed: length must be at least"),
        (["--limit", "0"], "limit=0 is not allowed"),
        (["--tasks", "qa_2", "--limit", "7"], "samples=7 is not allowed: samples must be at most 6"),
        (["--seed", "-1"], "seed=-1 is not allowed"),
        (["--tasks", "qa_1", "--data-dir", "nowhere"], "nowhere"),
    ],
)
def test_wrong_ruler_flags(model, ruler, flags, message, tmp_path, capsys):
    """All are refused before a prompt is read."""
    assert load_script("eval_ruler").main([*ruler, "--settings", "dense", *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert model.answered == 0


def test_ruler_wants_a_tokenizer(model, ruler, capsys):
    model.tokenizer = None
    assert load_script("eval_ruler").main([*ruler, "--tasks", "vt", "--lengths", "3000", "--limit", "1"]) == 2
    assert "a model with a tokenizer" in " ".join(capsys.readouterr().err.split())


def test_a_results_folder_of_another_run_is_refused(model, files, capsys):
    script = load_script("eval_longbench")
    assert script.main([*files, "--settings", "dense", "--limit", "1"]) == 0
    assert script.main([*files, "--settings", "dense", "--limit", "1", "--max-length", "40"]) == 2
    assert "max_length=40 is not allowed: max_length must be None, as in the run" in " ".join(
        capsys.readouterr().err.split()
    )


def row(setting, sample, score, task="t", method="specprefill"):
    return Row(sample, "made", task, "", "1", setting, method, 0.3, score, 0.3, 1.0)


def test_differences_from_dense_are_paired_and_tasks_weigh_the_same():
    rows = [row("dense", f"t/{i}", i / 10, method="dense") for i in range(10)]
    rows += [row("dense", "u/0", 0.5, "u", "dense"), row("dense", "u/1", 0.5, "u", "dense")]
    rows += [row("p3", f"t/{i}", i / 10 - 0.1) for i in range(5)] + [row("p3", "t/9", None), row("p3", "t/77", 1.0)]
    rows += [row("p3", f"u/{i}", 0.8, "u") for i in range(2)]
    found = against_dense(rows)
    assert found.keys() == {"p3"}
    assert found["p3"] == pytest.approx((10.0, 10.0, 10.0, 7))  # -10 of t and +30 of u, each without spread


def test_a_report_of_unequal_samples_says_so():
    rows = [row("dense", "t/0", 1.0, method="dense"), row("p3", "t/0", 0.0), row("p3", "t/1", 0.5)]
    text = to_markdown(report(Results({"made": rows}), 0))
    assert "The settings were not run on the same samples" in text
    assert "| p3 | 2 | 0 | 30.0% | 1.00 s | -100.0 |" in text
    assert "| t | 100.0 | 25.0 [0.0, 50.0] |" in text


def test_report_of_nothing(tmp_path, capsys):
    assert load_script("report").main([str(tmp_path)]) == 2
    assert "a folder with files of rows" in " ".join(capsys.readouterr().err.split())


def test_bootstrap():
    assert bootstrap([[50.0] * 10, [100.0] * 2]) == Estimate(75.0, 75.0, 75.0, 12)
    values = [0.0, 100.0] * 50
    found = bootstrap([values])
    assert found == bootstrap([values])
    assert found != bootstrap([values], seed=1)
    one = bootstrap([values, [3.0]])
    assert (one.mean, one.samples, cell(one)) == (26.5, 101, "26.5")
    # A mean of 100 coin flips: 50 and 1.96 times 5.
    assert (found.mean, found.low, found.high) == pytest.approx((50, 40.2, 59.8), abs=1.5)
    # The mean of two tasks of one weight: half of each one's variance.
    both = bootstrap([values, values[:50]])
    assert both.high - both.low == pytest.approx(2 * 1.96 * (25 / 4 + 50 / 4) ** 0.5, rel=0.15)
    assert cell(found) == f"50.0 [{found.low:.1f}, {found.high:.1f}]"


@pytest.fixture
def pair(tiny, monkeypatch) -> SpecPrefill:
    """The tiny pair with a tokenizer, whatever is asked for."""
    tokenizer = Tokenizer(byte_level(), chat_templates={"default": TEMPLATE})
    pair = SpecPrefill(tiny.main, tiny.speculator.model, tokenizer, prefill_chunk=64)
    monkeypatch.setattr(command.SpecPrefill, "from_pretrained", lambda *given, **named: pair)
    return pair


def test_recall_to_report(pair, files, tmp_path, capsys):
    script, reporting = load_script("eval_recall"), load_script("report")
    out = files.index("--out")
    flags = ["--keep-rates", "0.3", "--look-aheads", "4", *files[out : out + 2]]
    dataset = [*files[:out], "--datasets", "hotpotqa"]
    assert script.main(["--limit", "1", *flags, "longbench", *dataset]) == 0
    assert script.main(["--limit", "2", *flags, "longbench", *dataset]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "2 rows added to" in said
    assert "2 were there, 0 could not be read" in said
    rows = list(read_rows(tmp_path / "out" / "longbench_recall.jsonl"))
    assert [row["setting"] for row in rows] == ["p3_full_lah4", "p3_full_answer"] * 2
    about = json.loads((tmp_path / "out" / "longbench_recall.about.json").read_text())
    assert (about["answer_tokens"], about["max_length"], about["chat"]) == (128, None, True)
    assert all(0 <= row["recall"] <= 1 and row["mass"] <= row["oracle_mass"] <= 1 for row in rows)
    assert reporting.main([str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "## longbench: recall of the oracle" in text
    assert "| hotpotqa | " in text
    assert script.main(["--limit", "2", "--answer-tokens", "2", *flags, "longbench", *dataset]) == 2
    assert "answer_tokens=2 is not allowed: answer_tokens must be 128, as in the run" in " ".join(
        capsys.readouterr().err.split()
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["ruler", "--tasks", "niah"], "tasks='niah' is not allowed"),
        (["ruler", "--lengths", "40", "--tasks", "vt"], "length=40 is not allowed"),
        (["longbench", "--benchmark-dir", "nowhere"], "a folder with dataset2prompt.json"),
        (["--answer-tokens", "0", "ruler", "--tasks", "vt"], "answer_tokens=0 is not allowed"),
        (["--keep-rates", "0", "ruler", "--tasks", "vt"], "setting='p0_full' is not allowed"),
        ([], "ruler"),
    ],
)
def test_wrong_recall_flags(model, flags, message, tmp_path, capsys):
    assert load_script("eval_recall").main(["--out", str(tmp_path / "out"), *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
