"""The runner: rows, what is shared between settings, and that no interruption shows in the file."""

import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from answering import Answering, samples_of

from specprefill_jax.errors import ArgumentError, SpecPrefillError
from specprefill_jax.evals import results as module
from specprefill_jax.evals.results import ResultFile, comparable, read_rows
from specprefill_jax.evals.runner import Counts, Progress, answers, run, spans
from specprefill_jax.evals.settings import parse_setting

NAMES = ["dense", "p1_full_lah8", "p5_full_lah8", "p5_full", "random_p3", "bm25_chunks_p3"]
SETTINGS = [parse_setting(name) for name in NAMES]
ABOUT = {"main": "tiny", "seed": 0}


def quiet(line: str) -> None:
    """Progress that nobody sees."""


def run_into(path, samples, model=None, settings=SETTINGS, **options):
    with ResultFile(path, ABOUT) as results:
        return run(model or Answering(), samples, settings, results, **{"progress": quiet, **options})


def rows_of(path) -> list[dict]:
    return [comparable(row) for row in read_rows(path)]


@pytest.fixture
def undisturbed(tmp_path) -> list[dict]:
    run_into(tmp_path / "undisturbed.jsonl", samples_of(6))
    return rows_of(tmp_path / "undisturbed.jsonl")


def test_rows(tmp_path):
    model, path = Answering(), tmp_path / "results" / "rows.jsonl"
    assert run_into(path, samples_of(2), model, versions={"jax": "1"}) == Counts(done=12, there=0, skipped=0)
    assert (model.speculated, model.answered) == (2, 12)  # once a sample, however many keep rates and look-aheads
    rows = list(read_rows(path))
    prompt = np.array(samples_of(1)[0].input, "<i4").tobytes()
    assert [row["setting"] for row in rows] == NAMES * 2
    dense, sparse = rows[0], rows[1]
    assert dense.pop("timings")["choose"] >= 0
    assert dense == {
        "benchmark": "made",
        "task": "task-0",
        "category": "even",
        "bucket": "100",
        "length": 100,
        "key": "0",
        "wording": "own",
        "seed": 0,
        "prompt_sha256": hashlib.sha256(prompt).hexdigest(),
        "num_tokens": 100,
        "setting": "dense",
        "method": "dense",
        "keep_rate": 1.0,
        "num_kept": 100,
        "kept": [[0, 100]],
        "reason": "disabled",
        "detail": None,
        "output": "100 100",
        "num_generated": 2,
        "finish_reason": "length",
        "score": 1.0,
        "skipped": None,
        "versions": {"jax": "1"},
    }
    assert (sparse["keep_rate"], sparse["num_kept"], sparse["kept"], sparse["score"]) == (0.1, 32, [[0, 32]], 0.0)
    assert sparse["timings"]["decode"] == 0.5
    assert rows[6]["prompt_sha256"] != dense["prompt_sha256"]
    assert [row["num_kept"] for row in rows[4:6]] == [36, 36]
    assert json.loads((tmp_path / "results" / "rows.about.json").read_text()) == ABOUT


def test_packed_rows_are_read_as_they_are(tmp_path):
    path, packed = tmp_path / "rows.jsonl", tmp_path / "rows.jsonl.gz"
    run_into(path, samples_of(2))
    whole = gzip.compress(path.read_bytes())
    packed.write_bytes(whole)
    assert list(read_rows(packed)) == list(read_rows(path))
    for damaged in (whole[:-9], b"no gzip", whole[:60] + b"\0" * 40 + whole[100:]):
        packed.write_bytes(damaged)
        with pytest.raises(SpecPrefillError, match=r"rows\.jsonl\.gz: not a whole gzip file"):
            list(read_rows(packed))


def test_paper_and_product_mode_share_a_speculation(tmp_path):
    names = ["product_p3_lah8", "p1_full_lah8", "dense", "product_auto", "p3", "product_p3_win32"]
    model = Answering()
    run_into(tmp_path / "rows.jsonl", samples_of(2), model, settings=[parse_setting(name) for name in names])
    assert (model.speculated, model.answered) == (2, 12)
    together = [*names[:2], *names[3:], "dense"]
    assert [row["setting"] for row in read_rows(tmp_path / "rows.jsonl")] == together * 2


def test_nothing_is_done_twice(tmp_path):
    path, model = tmp_path / "rows.jsonl", Answering()
    run_into(path, samples_of(2), settings=SETTINGS[:2])
    before = path.read_bytes()
    assert run_into(path, samples_of(2), model, SETTINGS[:2]) == Counts(0, 4, 0)
    assert (model.speculated, model.answered, path.read_bytes()) == (0, 0, before)
    assert run_into(path, samples_of(3), model) == Counts(done=14, there=4, skipped=0)
    assert path.read_bytes().startswith(before)
    assert len({module.row_key(row) for row in read_rows(path)}) == 18


def test_what_cannot_be_read_is_a_row_that_says_so(tmp_path):
    path = tmp_path / "rows.jsonl"
    samples = [samples_of(1, 350)[0], samples_of(1, 399)[0], samples_of(1, 120)[0], samples_of(1, 100)[0]]
    counts = run_into(path, samples, Answering(frozenset({120})), SETTINGS[:3])
    assert counts == Counts(done=12, there=0, skipped=7)
    said = [row["skipped"] for row in read_rows(path)]
    assert said[0] is None
    assert said[1:3] == ["350 tokens do not fit the speculator's context of 300"] * 2
    assert said[3:6] == ["399 tokens and 2 of an answer do not fit the main model's context of 400"] * 3
    assert said[6:] == [None, *["the speculator failed: on purpose"] * 2, None, None, None]
    assert [row["score"] for row in read_rows(path)][3:6] == [None] * 3
    assert run_into(path, samples, settings=SETTINGS[:3]) == Counts(0, 12, 0)


def test_two_samples_of_one_name_are_refused(tmp_path):
    with pytest.raises(SpecPrefillError, match="two samples are called made/task-0/100/0"):
        run_into(tmp_path / "rows.jsonl", samples_of(1) * 2)


class Killed(BaseException):
    """The process ends here."""


def test_cut_off_at_any_byte_and_resumed_gives_the_same_file(tmp_path, undisturbed, monkeypatch):
    draw = random.Random(0)
    for attempt in range(10):
        path = tmp_path / f"{attempt}.jsonl"
        left, write = [draw.randrange(36 * 600)], os.write

        def cut(file, data, left=left, write=write):
            if left[0] < len(data):
                write(file, data[: left[0]])
                raise Killed
            left[0] -= len(data)
            return write(file, data)

        with monkeypatch.context() as patch:
            patch.setattr(module.os, "write", cut)
            while left[0] < 2**40:
                try:
                    run_into(path, samples_of(6))
                    left[0] = 2**41
                except Killed:
                    left[0] = draw.randrange(36 * 600) if draw.random() < 0.5 else 2**40
        run_into(path, samples_of(6))
        assert rows_of(path) == undisturbed


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from answering import Answering, samples_of
from specprefill_jax.evals.results import ResultFile
from specprefill_jax.evals.runner import run
from specprefill_jax.evals.settings import parse_setting
with ResultFile(Path(sys.argv[1]), {"main": "tiny", "seed": 0}) as results:
    run(Answering(), samples_of(6), [parse_setting(name) for name in sys.argv[3:]], results,
        progress=lambda line: (print("row", flush=True), sys.stdin.read()))
"""


def test_killed_by_the_system_and_resumed_gives_the_same_file(tmp_path, undisturbed):
    path = tmp_path / "killed.jsonl"
    command = [sys.executable, "-c", KILLED, str(path), str(Path(__file__).parents[1]), *NAMES]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "row\n"
        with pytest.raises(SpecPrefillError, match="another process is writing to it"):
            run_into(path, samples_of(6))
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    assert len(rows_of(path)) == 1
    run_into(path, samples_of(6))
    assert rows_of(path) == undisturbed


@pytest.mark.parametrize("torn", [b'{"benchmark": "made', b"\0" * 40, b'{"a": 1}', b"17\n", b"\n"])
def test_a_torn_last_line_is_dropped(tmp_path, torn):
    path = tmp_path / "rows.jsonl"
    run_into(path, samples_of(1))
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    assert len(list(read_rows(path))) == 6
    assert run_into(path, samples_of(1)) == Counts(0, 6, 0)
    assert path.read_bytes() == whole


def test_damage_before_the_last_line_is_an_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    run_into(path, samples_of(1))
    damaged = b"{}{\n" + path.read_bytes()
    path.write_bytes(damaged)
    with pytest.raises(SpecPrefillError, match=r"rows.jsonl, line 1: not a JSON object, and not the last line"):
        run_into(path, samples_of(1))
    assert path.read_bytes() == damaged


def test_rows_of_different_runs_are_not_mixed(tmp_path):
    path = tmp_path / "rows.jsonl"
    run_into(path, samples_of(1))
    message = r"^main='other' is not allowed: main must be 'tiny', as in the run whose rows are in .*rows.jsonl"
    with pytest.raises(ArgumentError, match=message), ResultFile(path, {**ABOUT, "main": "other"}):
        pass
    (tmp_path / "rows.about.json").write_text("{")
    with pytest.raises(SpecPrefillError, match="not JSON"), ResultFile(path, ABOUT):
        pass


def test_a_process_that_does_not_write_knows_what_is_done(tmp_path):
    path = tmp_path / "rows.jsonl"
    with ResultFile(path, ABOUT, write=False) as results:
        assert results.done == set()
        results.add({"benchmark": "b", "task": "t", "bucket": "1", "key": "k", "setting": "dense"})
        assert results.done == {"b/t/1/k/dense"}
    assert not path.exists()
    run_into(path, samples_of(1))
    with ResultFile(path, ABOUT, write=False) as results:
        assert len(results.done) == 6


def test_progress():
    said, now = [], [0.0]
    progress = Progress(20, said.append, lambda: now[0])
    progress.passed(10)
    for _ in range(10):
        now[0] += 6.0
        progress.finished("a")
    assert said == [
        "11 of 20 rows, about 54 s left, 6.00 s a row (a)",
        "13 of 20 rows, about 42 s left, 6.00 s a row (a)",
        "15 of 20 rows, about 30 s left, 6.00 s a row (a)",
        "17 of 20 rows, about 18 s left, 6.00 s a row (a)",
        "19 of 20 rows, about 6 s left, 6.00 s a row (a)",
        "20 of 20 rows, about 0 s left, 6.00 s a row (a)",
    ]
    Progress(None, said.append, lambda: now[0]).finished("b")
    assert said[-1] == "1 rows, 0.00 s a row (b)"


def test_spans():
    assert spans(np.array([0, 1, 2, 5, 7, 8])) == [[0, 3], [5, 6], [7, 9]]
    assert spans(np.array([], int)) == []


def test_on_a_real_pair_an_interruption_changes_nothing(tiny, tmp_path):
    settings = [parse_setting(name) for name in ("dense", "p3_full", "random_p3")]
    run_into(tmp_path / "a.jsonl", samples_of(2), tiny, settings)
    run_into(tmp_path / "b.jsonl", samples_of(1), tiny, settings)
    with (tmp_path / "b.jsonl").open("rb+") as file:
        file.truncate((tmp_path / "b.jsonl").stat().st_size - 900)
    run_into(tmp_path / "b.jsonl", samples_of(2), tiny, settings)
    assert rows_of(tmp_path / "a.jsonl") == rows_of(tmp_path / "b.jsonl")
    kept = [row["num_kept"] for row in rows_of(tmp_path / "a.jsonl")]
    assert kept[0] == 100
    assert [36 <= count <= 64 for count in kept] == [False, True, True] * 2


def test_decoded_in_batches_and_interrupted_the_rows_are_the_same(tiny, tmp_path):
    """A sample of which a row is missing is asked in the same batches again, and only that row is added."""
    settings = [parse_setting(name) for name in ("p3_full", "dense", "p1_full", "random_p3", "head_tail_p3")]
    many = {"rows": partial(answers, batch=2), "whole": True}
    assert run_into(tmp_path / "one.jsonl", samples_of(2), tiny, settings) == Counts(10, 0, 0)
    assert run_into(tmp_path / "a.jsonl", samples_of(2), tiny, settings, **many) == Counts(10, 0, 0)
    rows = rows_of(tmp_path / "a.jsonl")
    assert rows == rows_of(tmp_path / "one.jsonl")
    lines = (tmp_path / "a.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines[:4]))
    assert run_into(tmp_path / "a.jsonl", samples_of(2), tiny, settings, **many) == Counts(6, 4, 0)
    assert rows_of(tmp_path / "a.jsonl") == rows


def test_in_a_batch_what_cannot_be_read_does_not_hinder_the_others(tiny, tmp_path, monkeypatch):
    def failing(ids, configs):
        raise SpecPrefillError("the speculator failed: on purpose")

    settings = [parse_setting(name) for name in ("dense", "p3_full", "p1_full", "random_p3")]
    monkeypatch.setattr(tiny, "select_many", failing)
    path = tmp_path / "rows.jsonl"
    counts = run_into(path, samples_of(1), tiny, settings, rows=partial(answers, batch=2), whole=True)
    assert counts == Counts(done=4, there=0, skipped=2)
    read = {row["setting"]: (row["skipped"], row["output"] is None) for row in read_rows(path)}
    said = ("the speculator failed: on purpose", True)
    assert read == {"dense": (None, False), "p3_full": said, "p1_full": said, "random_p3": (None, False)}
