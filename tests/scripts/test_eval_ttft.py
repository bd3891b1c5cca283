"""scripts/eval_ttft.py on the tiny pair: what is timed, what is said, what is refused."""

import json
import xml.etree.ElementTree as ElementTree
from contextlib import contextmanager

import numpy as np
import pytest
from agreement import MAIN, SPECULATOR
from rich.console import Console
from script_modules import load_script

from specprefill_jax.config import SpecPrefillConfig
from specprefill_jax.engine.request import Finished
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.evals import first_tokens
from specprefill_jax.evals.first_tokens import PERCENTILES, Batch, seconds_of
from specprefill_jax.planning import Reason
from specprefill_jax.selection import Selection
from specprefill_jax.timing import Timings

script = load_script("eval_ttft")
FLAGS = [f"--main={MAIN}", f"--speculator={SPECULATOR}", "--total-tokens=256", "--lengths", "128", "192"]


def test_the_grid(tmp_path, monkeypatch, capsys):
    submitted = []
    real = seconds_of

    def watched(engine, prompts, config, name):
        submitted.append(prompts)
        return real(engine, prompts, config, name)

    monkeypatch.setattr(first_tokens, "seconds_of", watched)
    out, plot = tmp_path / "new" / "ttft.json", tmp_path / "ttft.svg"
    flags = [*FLAGS, "--keep-rates", "0.25", "0.5", "--look-aheads", "4", "--warm-up=1", "--rounds=2"]
    assert script.main([*flags, f"--out={out}", f"--plot={plot}", "--prefill-chunk=64"]) == 0
    rows = json.loads(out.read_text())["ttft"]
    grid = [
        (prompts, tokens, setting)
        for prompts, tokens in ((2, 128), (1, 192))
        for setting in ("dense", "p2.5_full_lah4", "p5_full_lah4")
    ]
    assert [(row["prompts"], row["tokens"], row["setting"]) for row in rows] == grid
    assert [row["kept"] for row in rows] == [128, 32, 64, 192, 64, 96]
    assert [row["look_ahead"] for row in rows[:3]] == [None, 4, 4]
    assert len(submitted) == 3 * len(rows)
    assert all(not np.array_equal(a[0, :32], b[0, :32]) for i, a in enumerate(submitted) for b in submitted[:i])
    for row in rows:
        seconds = row["seconds"]
        assert len(seconds["all"]) == 2
        assert seconds["mean"] == pytest.approx(sum(seconds["all"]) / 2)
        assert [seconds[f"p{p}"] for p in PERCENTILES] == pytest.approx(np.percentile(seconds["all"], PERCENTILES))
        assert row["ideal"] == row["tokens"] / row["kept"]
        if row["setting"] == "dense":
            assert (row["speedup"], row["flop_ceiling"]) == (1.0, None)
        else:
            assert 0 < row["flop_ceiling"] < row["ideal"]
    dense, sparse = (rows[i]["seconds"]["all"] for i in (0, 1))
    assert rows[1]["speedup"] == pytest.approx(np.median(np.divide(dense, sparse)))
    text = ElementTree.parse(plot).getroot().find("{*}desc").text
    assert f"2 x 128, p*_full_lah4: {rows[1]['speedup']:.2f} at 0.25, {rows[2]['speedup']:.2f} at 0.5." in text
    assert "2 x 128" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--settings", "random_p1"], "settings='random_p1' is not allowed"),
        (["--lengths", "63"], "lengths=63 is not allowed"),
        (["--rounds", "0"], "rounds=0 is not allowed"),
        (["--keep-rates", "1.5"], "setting='p15_full' is not allowed"),
        (["--main", "nowhere/at-all"], "nowhere/at-all"),
    ],
)
def test_wrong_flags(flags, message, tmp_path, capsys):
    out = tmp_path / "ttft.json"
    assert script.main([*FLAGS, *flags, f"--out={out}"]) == 2
    assert message in "".join(capsys.readouterr().err.splitlines())
    assert not out.exists()


def test_settings_that_are_compiled_alike_take_turns(monkeypatch):
    engines, calls = [], []

    @contextmanager
    def engine_for(pair, args, batches, defaults):
        engines.append((defaults.look_ahead, defaults.pool_width, defaults.chunk_size))
        yield None

    def measure(pair, engine, batch, settings, **options):
        calls.append((batch, [setting.name for setting in settings]))
        return [{"n": len(calls)}]

    monkeypatch.setattr(script, "engine_for", engine_for)
    monkeypatch.setattr(script, "measure", measure)
    names = ["p1_full", "dense", "p1", "p3_full_lah8", "p3_full", "p3"]
    args = script.Args(total_tokens=1, lengths=(64, 96), settings=tuple(names))
    rows = script.run(None, args, script.check(args), Console(quiet=True))
    assert engines == [(1, 0, 1), (1, 13, 32), (8, 13, 32)]
    groups = [["dense", "p1", "p3"], ["dense", "p1_full", "p3_full"], ["dense", "p3_full_lah8"]]
    assert calls == [(Batch(1, tokens), group) for group in groups for tokens in (64, 96)]
    assert [row["n"] for row in rows] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("reason", "finish", "error", "said"),
    [
        (Reason.SPECULATOR_FAILED, "length", None, "out of luck"),
        (Reason.ENGAGED, "error", "boom", "boom"),
        (Reason.ENGAGED, "abort", None, "abort"),
    ],
)
def test_a_prompt_that_was_not_read_as_asked_is_no_measurement(reason, finish, error, said):
    """Such as one whose speculator failed: it was read whole, and its time is no sparse one."""
    read = Selection.whole(128, reason, detail="out of luck") if reason is Reason.SPECULATOR_FAILED else None

    class Ending:
        def submit(self, request, on_event):
            on_event(Finished(finish, 128, 1, read, Timings(), error=error))

    with pytest.raises(SpecPrefillError, match=f"p1 0: .*{said}"):
        seconds_of(Ending(), np.full((1, 128), 7, np.int32), SpecPrefillConfig.paper(0.25, 1), "p1 0")
