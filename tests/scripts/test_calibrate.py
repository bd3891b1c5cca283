"""scripts/calibrate.py: which depth and heads it chooses, and from samples to a card that a pair is loaded with."""

import json

import numpy as np
import pytest
from agreement import load_tiny
from script_modules import load_script

from specprefill_jax import SpecPrefill
from specprefill_jax.cards import read_card
from specprefill_jax.evals.calibration import Example

script = load_script("calibrate")
PAIR = ["--main=retrieval-tiny", "--speculator=retrieval-tiny-speculator", "--dtype=float32"]


@pytest.fixture(scope="module")
def pair():
    return load_tiny()


def seen(best: dict[tuple[int, int], float], seed: int, look_ahead: float = 0.2) -> Example:
    """One chunk of twelve matters; a head sees so much of it, and the look-ahead's all so much."""
    draw = np.random.default_rng(seed)
    matter = int(draw.integers(2, 10))
    window = draw.random((3, 4, 4, 12)).astype(np.float32)
    ahead = window[:, :, :2].copy()
    ahead[..., matter] = look_ahead
    for (layer, head), much in best.items():
        window[layer, head] = 0.0
        window[layer, head, :, matter] = much
    oracle = np.linspace(0.1, 0.01, 12).astype(np.float32)
    oracle[matter] = 1.0
    evidence = np.arange(12)[None] == matter
    forced = np.isin(np.arange(12), [0, 10, 11])
    return Example("t", window, ahead, oracle, evidence, forced)


def card_of(pair, best, look_ahead: float = 0.2, **changes):
    args = script.Args(benchmark=None, main="a/big", speculator="small", layers=(1, 2, 3), query_window=4, **changes)
    return script.calibrate(pair, args, [seen(best, seed, look_ahead) for seed in range(12)])


def test_the_fewest_layers_that_find_as_much(pair):
    card = card_of(pair, {(1, 3): 2.0, (2, 0): 2.0})
    assert (card.main, card.speculator, card.speculator_layers) == ("big", "small", 2)
    assert card.settings["query_window"] == 4
    assert [1, 3] in card.settings["scoring_heads"]
    assert max(layer for layer, _ in card.settings["scoring_heads"]) < 2
    rows = card.measured
    assert [(row["layers"], bool(row["heads"])) for row in rows] == [
        (3, False), (3, False), (1, False), (1, True), (2, False), (2, True), (3, True)
    ]  # fmt: skip
    [chosen] = [row for row in rows if row.get("chosen")]
    assert chosen["heads"] == card.settings["scoring_heads"]
    assert chosen["held_out"]["evidence"] == 1.0 > rows[0]["held_out"]["evidence"]
    shares = [row["speculator_share"] for row in rows]
    assert shares[0] == 1.0 > shares[4] > shares[2] > 0.3
    assert rows[3]["flop_ceiling"] > rows[5]["flop_ceiling"] > rows[6]["flop_ceiling"]
    # As much as the look-ahead finds: one chunk beside the three that are always kept, of twelve.
    assert chosen["at_equal_recall"]["keep_rate"] == pytest.approx(4 / 12)
    assert 1 < chosen["at_equal_recall"]["flop_ceiling"] < chosen["flop_ceiling"]
    assert card.about["samples"] == {"fitted": 6, "held out": 6, "mean tokens": 384}


def test_what_is_told_was_held_out(pair):
    """Samples of which nothing was fitted: those of the other half say what a choice is worth."""
    good, bad = ([seen({(0, 0): much}, seed) for seed in range(6)] for much in (2.0, 0.0))
    given = [example for both in zip(good, bad, strict=True) for example in both]
    card = script.calibrate(pair, script.Args(benchmark=None, layers=(1,), query_window=4), given)
    row = card.measured[-1]
    assert row["fitted"]["evidence"] == 1.0 > row["held_out"]["evidence"]


def test_all_heads_stay_where_they_win(pair):
    card = card_of(pair, {}, look_ahead=9.0, tolerance=0.0)
    assert (card.speculator_layers, card.settings) == (None, {"look_ahead": 8})
    assert card.measured[0]["chosen"]


def test_one_sample_leaves_none_to_hold_out(pair):
    with pytest.raises(ValueError, match="nothing would be held out"):
        script.calibrate(pair, script.Args(benchmark=None), [seen({}, 0)])


def test_from_samples_to_a_pair_with_a_card(tmp_path, capsys):
    out = tmp_path / "card.json"
    flags = ["--limit=2", "--layers", "1", "2", f"--out={out}", "ruler", "--tasks", "niah_single_1", "--lengths", "800"]
    assert script.main([*PAIR, *flags]) == 0
    said = capsys.readouterr()
    assert "read 2 of 2: niah_single_1" in said.err
    assert "chosen" in said.out
    card = read_card(out)
    assert len(card.measured) == 2 + 2 + (2 if card.shape["num_layers"] > 2 else 1)
    model = SpecPrefill.from_pretrained("retrieval-tiny", "retrieval-tiny-speculator", "float32", card=out)
    config = model.selector.settle(None)
    assert [list(head) for head in config.scoring_heads] == card.settings.get("scoring_heads", [])
    counted = json.loads(out.read_text())["about"]["samples"]
    assert (counted["fitted"], counted["held out"]) == (1, 1)
    assert 500 < counted["mean tokens"] <= 800


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--limit=1", "ruler"], "limit=1 is not allowed"),
        (["--query-window=0", "ruler"], "query_window=0 is not allowed"),
        (["--tolerance=2", "ruler"], "tolerance=2.0 is not allowed"),
        (["--out=nowhere/card.json", "ruler"], "a file in a folder that exists"),
        (["ruler", "--tasks", "best"], "best"),
        (["--layers", "99", "ruler", "--tasks", "niah_single_1"], "layers=99 is not allowed"),
    ],
)
def test_wrong_flags(flags, message, capsys):
    assert script.main([*PAIR, *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
