"""scripts/ruler_rows.py as a command, with a small tokenizer: the files it writes, and what it says to wrong flags."""

import json

import pytest
from ruler_files import write_essays, write_questions
from script_modules import load_script
from small_tokenizers import byte_level

from specprefill_jax.evals.ruler import TASKS
from specprefill_jax.tokens import Tokenizer

script = load_script("ruler_rows")


@pytest.fixture(scope="module")
def flags(tmp_path_factory):
    """Flags for a model and data that are here."""
    folder = tmp_path_factory.mktemp("rows")
    template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\n{% endfor %}[assistant] "
    Tokenizer(byte_level(), chat_templates={"default": template}).save(folder / "model")
    write_essays(folder / "essays")
    write_questions(folder / "data")
    return [f"--{name.replace('_', '-')}={folder / name.split('_')[0]}" for name in ("model", "essays_dir", "data_dir")]


def test_every_task(flags, tmp_path, capsys):
    assert script.main([*flags, "--lengths", "3000", "3500", "--samples=2", f"--out={tmp_path}"]) == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path}: 26 files of 2 rows each, by the tokenizer of ")
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {f"{length}/{task}.jsonl" for length in (3000, 3500) for task in TASKS}
    tokenizer = script.open_tokenizer(flags[0].partition("=")[2])
    for task in TASKS:
        rows = [json.loads(line) for line in (tmp_path / "3000" / f"{task}.jsonl").read_text().splitlines()]
        assert [row["index"] for row in rows] == [0, 1]
        for row in rows:
            prompt = f"[user] {row['input']}\n[assistant] {row['answer_prefix']}"
            assert row["length"] == len(tokenizer.encode(prompt, add_special_tokens=False)) + TASKS[task].answer_tokens
            assert (row["task"], row["seed"], row["max_length"], row["wording"]) == (task, 42, 3000, "own")
            assert TASKS[task].score(" and ".join(row["outputs"]), row["outputs"]) == 1


def test_same_flags_give_the_same_files(flags, tmp_path):
    for out in ("a", "b"):
        known = [*flags, "--tasks", "vt", "niah_single_2", "--lengths", "3000", "--samples=1", "--seed=5"]
        assert script.main([*known, f"--out={tmp_path / out}"]) == 0
    for task in ("vt", "niah_single_2"):
        first, second = ((tmp_path / out / "3000" / f"{task}.jsonl").read_bytes() for out in ("a", "b"))
        assert first == second


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--tasks", "niah"], "tasks='niah' is not allowed"),
        (["--tasks", "vt", "--lengths", "100", "--samples=2"], "length=100 is not allowed: length must be at least "),
        (["--tasks", "vt", "--samples=0"], "samples=0 is not allowed"),
        (["--tasks", "vt", "--model=no such model"], "no such file or folder"),
        (["--tasks", "qa_2", "--data-dir=nowhere"], "data_dir='nowhere' is not allowed"),
        (["--lengths", "x"], "--help lists all flags"),
    ],
)
def test_wrong_flags(flags, tmp_path, capsys, wrong, message):
    assert script.main([*flags, f"--out={tmp_path}", *wrong]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err.splitlines()[-1]


def test_missing_data_is_told_before_anything_is_made(flags, tmp_path, capsys):
    assert script.main([*flags[:2], f"--out={tmp_path}"]) == 2
    assert "data_dir=None is not allowed" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
