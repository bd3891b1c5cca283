"""scripts/eval_ttft.py on the tiny pair: what is timed, what is said, what is refused."""

import json
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from agreement import MAIN, SPECULATOR
from script_modules import load_script

from specprefill_jax.config import SpecPrefillConfig
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.evals import first_tokens
from specprefill_jax.evals.first_tokens import PERCENTILES, seconds_of

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
    flags = [*FLAGS, "--keep-rates", "0.25", "0.5", "--look-aheads", "1", "4", "--warm-up=1", "--rounds=2"]
    assert script.main([*flags, f"--out={out}", f"--plot={plot}", "--prefill-chunk=64"]) == 0
    rows = json.loads(out.read_text())["ttft"]
    grid = [
        (prompts, tokens, setting)
        for end in ("", "_lah4")
        for prompts, tokens in ((2, 128), (1, 192))
        for setting in ("dense", f"p2.5_full{end}", f"p5_full{end}")
    ]
    assert [(row["prompts"], row["tokens"], row["setting"]) for row in rows] == grid
    assert [row["kept"] for row in rows[:6]] == [128, 32, 64, 192, 64, 96]
    assert [row["look_ahead"] for row in rows[4:8]] == [1, 1, None, 4]
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
    assert f"2 x 128, p*_full: {rows[1]['speedup']:.2f} at 0.25, {rows[2]['speedup']:.2f} at 0.5." in text
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


def test_a_prompt_that_was_not_read_as_asked_is_no_measurement(monkeypatch):
    """Such as one whose speculator fails: it is then read whole, and its time would be no sparse one."""
    pair = script.SpecPrefill.from_pretrained(str(MAIN), str(SPECULATOR), "float32")
    args = script.Args(lengths=(128,), total_tokens=1)
    config = SpecPrefillConfig.paper(0.25, 1)
    with script.engine_for(pair, args, [first_tokens.Batch(1, 128)], config) as engine:
        monkeypatch.setattr(engine._runner, "score", lambda *given: 1 / 0)
        with pytest.raises(SpecPrefillError, match="p2.5_full 0: .*ZeroDivisionError"):
            seconds_of(engine, np.full((1, 128), 7, np.int32), config, "p2.5_full 0")
