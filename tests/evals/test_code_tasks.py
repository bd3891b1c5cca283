"""HumanEval and MBPP: rows into problems, answers into programs, and scripts/eval_code.py. Rows here are made up."""

import gzip
import json
import os

import pytest
from answering import Answering
from script_modules import load_script
from small_tokenizers import byte_level

from specprefill_jax.errors import ArgumentError, SpecPrefillError
from specprefill_jax.evals import code_tasks, command, sandbox
from specprefill_jax.evals.code_tasks import code_samples, data_file, read_problems
from specprefill_jax.evals.results import read_rows
from specprefill_jax.evals.sandbox import Limits, Verdict
from specprefill_jax.tokens import Tokenizer

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
HEAD = 'from typing import List\n\n\ndef twice(x: int) -> int:\n    """Two times x."""\n'
FUNCTION = {
    "task_id": "HumanEval/0",
    "prompt": HEAD,
    "entry_point": "twice",
    "canonical_solution": "    return 2 * x\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(0) == 0\n",
}
PROGRAM = {
    "task_id": 11,
    "text": "Write a function that adds one.",
    "code": "def add_one(x):\r\n  return x + ONE",
    "test_setup_code": "ONE = 1",
    "test_list": ["assert add_one(1) == 2", "assert add_one(-1) == 0"],
    "challenge_test_list": [],
}


def lines(*rows) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "HumanEval.jsonl.gz").write_bytes(gzip.compress(lines(FUNCTION).encode()))
    numbers = (10, 11, 510, 511)
    (folder / "mbpp.jsonl").write_text(lines(*({**PROGRAM, "task_id": number} for number in numbers)) + "\n")
    return folder


def problem_of(name, row, tmp_path):
    (tmp_path / "rows").write_text(lines(row))
    [problem] = read_problems(tmp_path / "rows", name)
    return problem


def test_files(data):
    assert data_file(data, "humaneval").name == "HumanEval.jsonl.gz"
    assert [p.key for p in read_problems(data_file(data, "humaneval"), "humaneval")] == ["HumanEval/0"]
    mbpp = data_file(data, "mbpp")
    assert [p.key for p in read_problems(mbpp, "mbpp")] == ["11", "510"]  # the test split is 11 to 510
    assert [p.key for p in read_problems(mbpp, "mbpp", 1)] == ["11"]


def test_whole_programs(tmp_path):
    function = problem_of("humaneval", FUNCTION, tmp_path)
    assert function.program("    return 2 * x\n") == f"{HEAD}    return 2 * x\n\n{FUNCTION['test']}\ncheck(twice)\n"
    program = problem_of("mbpp", PROGRAM, tmp_path)
    assert program.program("def add_one(x): return x + 1") == (
        "def add_one(x): return x + 1\nONE = 1\nassert add_one(1) == 2\nassert add_one(-1) == 0\n"
    )


def test_what_is_asked(tmp_path):
    problems = {name: [problem_of(name, row, tmp_path)] for name, row in (("humaneval", FUNCTION), ("mbpp", PROGRAM))}
    function, program = code_samples(problems)
    assert function.input.endswith(f"\n\n```python\n{HEAD}```")
    assert (function.answer_prefix, function.stop, function.chat) == ("```python\n" + HEAD, ("```",), True)
    assert PROGRAM["text"] in program.input
    assert "assert add_one(1) == 2\nassert add_one(-1) == 0\n" in program.input
    assert PROGRAM["code"] not in program.input
    assert (program.answer_prefix, program.stop, program.max_tokens) == ("```python\n", ("```",), 512)
    assert [sample.notes["wording"] for sample in (function, program)] == ["own", "own"]
    plain, text = code_samples(problems, chat=False)
    assert (plain.input, plain.answer_prefix, plain.chat) == (HEAD, "", False)
    assert {"\nclass", "\ndef", "\n#", "\nif", "\nprint"} <= set(plain.stop)
    assert plain.notes["wording"] == "the benchmark's"
    assert (text.input, text.answer_prefix, text.stop) == (program.input, "```python\n", ("```",))
    assert function.name == "code/humaneval/0-shot/HumanEval/0"


@pytest.mark.parametrize(
    ("task", "answer", "graded"),
    [
        ("humaneval", "    return 2 * x\n", (1.0, {"verdict": "passed"})),
        ("humaneval", "    return 3 * x\n", (0.0, {"verdict": "AssertionError"})),
        ("humaneval", "return 2 * x\n", (0.0, {"verdict": "SyntaxError"})),
        ("humaneval", "    import sys; sys.exit(0)\n", (0.0, {"verdict": "exit before the end"})),
        ("mbpp", "def add_one(x):\n    return x + ONE\n", (1.0, {"verdict": "passed"})),
        ("mbpp", "def add_two(x):\n    return x + 2\n", (0.0, {"verdict": "NameError"})),
        ("mbpp", "", (0.0, {"verdict": "NameError"})),
    ],
)
def test_answers_are_run(tmp_path, task, answer, graded):
    problem = problem_of(task, FUNCTION if task == "humaneval" else PROGRAM, tmp_path)
    limits = Limits(cpu_seconds=5, wall_seconds=60)
    ran = 0
    for isolated in (True, False):
        [sample] = code_samples({task: [problem]}, limits=limits, isolated=isolated)
        try:
            sandbox.check(isolated=isolated)
        except SpecPrefillError:  # a system, or root, that this way is not for
            with pytest.raises(SpecPrefillError):
                sample.score(answer)
            continue
        assert sample.score(answer) == graded
        ran += 1
    # A kernel without namespaces, and root: nobody can run a program there.
    assert ran or not os.getuid()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("mbpp", "{", "rows, line 1=.*a JSON object"),
        ("mbpp", "\n[1]\n", "rows, line 2=.*a JSON object"),
        ("mbpp", "", "a file with problems of mbpp"),
        ("mbpp", lines({**PROGRAM, "task_id": 1}), "a file with problems of mbpp"),
        ("mbpp", lines({**PROGRAM, "task_id": "11"}), "line 1: task_id='11'"),
        ("mbpp", lines({**PROGRAM, "test_list": []}), r"line 1: test_list=\[\]"),
        ("mbpp", lines({**PROGRAM, "text": 3}), "line 1: text=3"),
        ("mbpp", lines({**PROGRAM, "test_setup_code": 3}), "line 1: test_setup_code=3"),
        ("humaneval", lines({**FUNCTION, "entry_point": ""}), "line 1: entry_point=''"),
        ("humaneval", lines(PROGRAM), "line 1: task_id=11"),
    ],
)
def test_rows_that_are_no_problems(tmp_path, name, content, message):
    (tmp_path / "rows").write_text(content)
    with pytest.raises(ArgumentError, match=message):
        read_problems(tmp_path / "rows", name)


def test_files_that_are_not_there_or_damaged(tmp_path):
    with pytest.raises(ArgumentError, match=r"tasks='apps' is not allowed: tasks must be one of humaneval, mbpp"):
        data_file(tmp_path, "apps")
    with pytest.raises(ArgumentError, match=r"a folder with mbpp.jsonl or mbpp.jsonl.gz"):
        data_file(tmp_path, "mbpp")
    for content in (b"no gzip", gzip.compress(b"x" * 100)[:-20], gzip.compress(b"\xff")):
        (tmp_path / "mbpp.jsonl.gz").write_bytes(content)
        with pytest.raises(ArgumentError, match="a readable file"):
            read_problems(tmp_path / "mbpp.jsonl.gz", "mbpp")


@pytest.fixture
def model(monkeypatch) -> Answering:
    model = Answering(tokenizer=Tokenizer(byte_level(), chat_templates={"default": TEMPLATE}))
    model.max_prompt_tokens = model.speculator.model.config.max_position_embeddings = 4000
    monkeypatch.setattr(command.SpecPrefill, "from_pretrained", lambda *given, **named: model)
    return model


@pytest.fixture
def ran(monkeypatch) -> list:
    """What was run, in place of the sandbox: programs of dense answers pass."""
    programs = []

    def run(source, limits, *, isolated):
        programs.append((source, limits, isolated))
        return Verdict(len(programs) % 2 == 1, "passed" if len(programs) % 2 else "NameError")

    monkeypatch.setattr(code_tasks, "run_program", run)
    monkeypatch.setattr(sandbox, "run_program", lambda source, *, isolated: Verdict(True, "passed"))
    return programs


def test_script_to_report(model, ran, data, tmp_path, capsys):
    out = tmp_path / "out"
    flags = ["--data-dir", str(data), "--out", str(out), "--settings", "dense", "p3_full_lah8", "--cpu-seconds", "4"]
    script = load_script("eval_code")
    assert script.main([*flags, "--run-generated-code", "--limit", "1"]) == 0
    assert "4 rows added to" in " ".join(capsys.readouterr().err.split())
    assert script.main([*flags, "--run-generated-code"]) == 0
    assert "2 rows added to" in (said := " ".join(capsys.readouterr().err.split()))
    assert "4 were there, 0 could not be read" in said
    assert "6 of 6 rows" in said
    rows = list(read_rows(out / "code.jsonl"))
    assert [(row["task"], row["key"], row["setting"], row["score"], row["verdict"]) for row in rows[:3]] == [
        ("humaneval", "HumanEval/0", "dense", 1.0, "passed"),
        ("humaneval", "HumanEval/0", "p3_full_lah8", 0.0, "NameError"),
        ("mbpp", "11", "dense", 1.0, "passed"),
    ]
    source, limits, isolated = ran[0]
    assert source == f"{HEAD}{rows[0]['output']}\n{FUNCTION['test']}\ncheck(twice)\n"
    assert (limits, isolated) == (Limits(cpu_seconds=4, wall_seconds=24.0), True)
    tokens, sampling = model.asked[0]
    assert model.tokenizer.decode(tokens).startswith("[user]Complete this Python function.")
    assert model.tokenizer.decode(tokens).endswith("[assistant]```python\n" + HEAD)
    assert (sampling.max_tokens, sampling.stop) == (512, ("```",))
    about = json.loads((out / "code.about.json").read_text())
    assert (about["chat"], about["isolated"], len(about["mbpp_sha256"])) == (True, True, 64)
    assert load_script("report").main([str(out)]) == 0
    text = capsys.readouterr().out
    assert "| humaneval | 100.0 | 0.0 |" in text
    assert "### By task and length: dense\n\n| task | 0-shot |" in text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "run_generated_code=False is not allowed: run_generated_code must be given"),
        (["--run-generated-code", "--tasks", "apps"], "tasks='apps' is not allowed"),
        (["--run-generated-code", "--data-dir", "nowhere"], "nowhere"),
        (["--run-generated-code", "--cpu-seconds", "0"], "cpu_seconds=0 is not allowed"),
        (["--run-generated-code", "--limit", "0"], "limit=0 is not allowed"),
        (["--run-generated-code", "--settings", "p0"], "setting='p0' is not allowed"),
    ],
)
def test_wrong_flags(model, ran, data, flags, message, capsys, tmp_path):
    given = ["--data-dir", str(data), "--out", str(tmp_path / "out"), *flags]
    assert load_script("eval_code").main(given) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert (ran, model.answered) == ([], 0)


def test_without_a_sandbox_nothing_is_asked(model, data, tmp_path, monkeypatch, capsys):
    def refuse(source, *, isolated):
        raise SpecPrefillError("this system does not let a program be isolated (no)")

    monkeypatch.setattr(sandbox, "run_program", refuse)
    flags = ["--data-dir", str(data), "--out", str(tmp_path / "out"), "--run-generated-code"]
    assert load_script("eval_code").main(flags) == 2
    assert "does not let a program be isolated (no)" in " ".join(capsys.readouterr().err.split())
    assert model.answered == 0


def test_isolation_is_given_up_where_that_is_said(model, ran, data, tmp_path):
    flags = ["--data-dir", str(data), "--out", str(tmp_path / "out"), "--run-generated-code", "--without-isolation"]
    assert load_script("eval_code").main([*flags, "--limit", "1", "--settings", "dense"]) == 0
    assert [isolated for _, _, isolated in ran] == [False, False]
