"""Settings: what passes is normalised, what does not is an error that names argument, value and what is allowed."""

import dataclasses
import math
import re

import jax.numpy as jnp
import numpy as np
import pytest
import tyro

from specprefill_jax.config import PAPER_SETTINGS, SamplingParams, SpecPrefillConfig, check_spans
from specprefill_jax.errors import ArgumentError, SpecPrefillError

RATE = "a number above 0 and up to 1"
WIDTH = "an odd integer, or 0 or None for no pooling"
EOS = "None, or token ids (integers of at least 0)"
PAIRS = "pairs (start, end) of token offsets with 0 <= start < end"
GAIN = "a finite number of at least 0"
STOP = "a string or at most 16 strings, none of them empty"
LOGPROBS = "None, or an integer from 0 to 20"
SEED = "None, or an integer from 0 to 4294967295"
IDS = "token ids (integers of at least 0)"

CONFIG = [
    *[("keep_rate", value, f"{RATE}, or 'auto'") for value in (0, 0.0, -0.1, 1.5, math.nan, math.inf, True, None)],
    *[("keep_rate", value, f"{RATE}, or 'auto'") for value in (10**400, "0.3", "Auto", "", np.True_)],
    *[("look_ahead", value, "an integer of at least 1") for value in (0, -1, 2.0, "8", True)],
    *[("pool_width", value, WIDTH) for value in (2, 12, -1, 13.0, "13", True)],
    *[("chunk_size", value, "an integer of at least 1") for value in (0, -32, 8.5, "32", False)],
    *[("eos_token_ids", value, EOS) for value in ((-1,), ("</s>",), "2", (True,), (2.0,), True)],
    *[("mode", value, "'product' or 'paper'") for value in ("Paper", "", None, 1)],
    *[("tail_tokens", value, "an integer of at least 1") for value in (0, -1, 1.0, "64")],
    ("forced_spans", "0-4", PAIRS),
    ("forced_spans", 7, PAIRS),
    *[("min_prompt_tokens", value, "an integer of at least 0") for value in (-1, 0.5, None)],
    *[("min_predicted_gain", value, GAIN) for value in (-0.1, math.nan, math.inf, "1.1", True)],
    *[("enabled", value, "True or False") for value in (1, 0, "no", None)],
    *[("importance_share", value, RATE) for value in (0, -0.5, 1.1, math.nan, "0.5", True, None)],
    *[("min_keep_rate", value, RATE) for value in (0, 1.5, math.inf, "0.1")],
    *[("max_keep_rate", value, RATE) for value in (0.0, 2, None)],
    ("min_keep_rate", 0.6, "at most max_keep_rate, 0.5"),
    *[("ttft_budget_ms", value, "None, or a finite number above 0") for value in (0, -1.0, math.inf, math.nan, "9")],
    *[("max_divergence", value, "a finite number of at least 0") for value in (-0.1, math.inf, math.nan, "1", False)],
]

SAMPLING = [
    *[("max_tokens", value, "an integer of at least 1") for value in (0, -1, 1.5, True, None)],
    *[("temperature", value, GAIN) for value in (-0.1, math.nan, math.inf, "1", False)],
    *[("top_k", value, "an integer of at least 0 (0: all tokens)") for value in (-1, 0.5, True)],
    *[("top_p", value, RATE) for value in (0.0, -0.5, 1.1, math.nan)],
    *[("min_p", value, "a number from 0 to below 1") for value in (-0.1, 1.0, math.nan)],
    *[("repetition_penalty", value, "a finite number above 0") for value in (0.0, -1.0, math.nan, math.inf)],
    *[("seed", value, SEED) for value in (-1, 2**32, 1.0, True, "1")],
    *[("stop", value, STOP) for value in (("",), ("a", 3), ("x",) * 17, (b"x",), b"x", 5, None)],
    *[("stop_token_ids", value, IDS) for value in ((-3,), ("a",), "2", None, (False,))],
    *[("ignore_eos", value, "True or False") for value in (1, "yes")],
    *[("logprobs", value, LOGPROBS) for value in (-1, 21, 1.0, True)],
]


@pytest.mark.parametrize(("kind", "name", "value", "allowed"), [
    *[(SpecPrefillConfig, *case) for case in CONFIG],
    *[(SamplingParams, *case) for case in SAMPLING],
])  # fmt: skip
def test_refused(kind, name, value, allowed):
    shown = repr(value) if len(repr(value)) <= 200 else repr(value)[:197] + "..."
    with pytest.raises(ArgumentError) as refusal:
        kind(**{name: value})
    assert str(refusal.value) == f"{name}={shown} is not allowed: {name} must be {allowed}"


def test_errors_are_value_errors():
    assert issubclass(ArgumentError, SpecPrefillError)
    assert issubclass(SpecPrefillError, ValueError)


@pytest.mark.parametrize("span", [(3, 3), (5, 2), (-1, 4), (0, 2.5), (1,), (1, 2, 3), 7, "ab", (False, True)])
def test_spans_are_named_by_their_place(span):
    with pytest.raises(ArgumentError) as refusal:
        SpecPrefillConfig(forced_spans=((0, 2), span))
    assert str(refusal.value) == f"forced_spans[1]={span!r} is not allowed: forced_spans[1] must be {PAIRS}"


def test_spans_past_the_prompt():
    assert check_spans("spans", [(0, 10), (9, 10)], 10) == ((0, 10), (9, 10))
    with pytest.raises(ArgumentError, match=r"^spans\[0\]=\(3, 11\) .* 0 <= start < end <= 10, the prompt's length$"):
        check_spans("spans", [(3, 11)], 10)


def test_defaults():
    assert dataclasses.asdict(SpecPrefillConfig()) == {
        "keep_rate": 0.3, "look_ahead": None, "pool_width": 13, "chunk_size": 32, "eos_token_ids": None,
        "mode": "product", "tail_tokens": 64, "forced_spans": (), "min_prompt_tokens": 512, "min_predicted_gain": 1.1,
        "enabled": True, "max_divergence": 0.15, "importance_share": 0.4, "min_keep_rate": 0.05, "max_keep_rate": 0.5,
        "ttft_budget_ms": None, "query_window": 0, "scoring_heads": (),
    }  # fmt: skip
    assert dataclasses.asdict(SamplingParams()) == {
        "max_tokens": 128, "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0,
        "seed": None, "stop": (), "stop_token_ids": (), "ignore_eos": False, "logprobs": None,
    }  # fmt: skip


@pytest.mark.parametrize("rate", [np.float64(0.3), np.float32(0.3)])
def test_numpy_scalars_become_the_numbers_they_print_as(rate):
    config = SpecPrefillConfig(rate, np.int64(4), np.int32(5), np.uint8(16), np.array([2, 3]), enabled=np.False_)
    same = SpecPrefillConfig(0.3, 4, 5, 16, (2, 3), enabled=False)
    assert config == same
    assert hash(config) == hash(same)
    assert repr(config) == repr(same)
    values = [type(value) for value in dataclasses.astuple(config)]
    assert values == [
        float,
        int,
        int,
        int,
        tuple,
        str,
        int,
        tuple,
        int,
        float,
        bool,
        *[float] * 4,
        type(None),
        int,
        tuple,
    ]
    sampling = SamplingParams(np.int64(3), np.float16(0.1), top_k=np.int8(4), seed=np.uint32(2**32 - 1))
    assert sampling == SamplingParams(3, 0.1, top_k=4, seed=2**32 - 1)


def test_arrays_are_not_scalars():
    with pytest.raises(ArgumentError, match=r"^keep_rate=array\(0\.3\)"):
        SpecPrefillConfig(np.array(0.3))
    with pytest.raises(ArgumentError, match=r"^look_ahead="):
        SpecPrefillConfig(look_ahead=jnp.int32(3))


def test_equal_settings_are_equal_however_written():
    assert SpecPrefillConfig(1, pool_width=None) == SpecPrefillConfig(1.0, pool_width=0)
    assert SpecPrefillConfig(eos_token_ids=2).eos_token_ids == (2,)
    assert SpecPrefillConfig(eos_token_ids=[]).eos_token_ids == ()
    assert SpecPrefillConfig(forced_spans=[[0, 4], np.array([5, 6])]).forced_spans == ((0, 4), (5, 6))
    assert SamplingParams(stop="END") == SamplingParams(stop=["END"])
    assert SamplingParams(stop_token_ids=7).stop_token_ids == (7,)
    assert len(SamplingParams(stop=["x"] * 16).stop) == 16


@pytest.mark.parametrize(
    ("name", "value"), [("keep_rate", 1e-300), ("keep_rate", 1), ("pool_width", 1), ("tail_tokens", 1)]
)
def test_edges_pass(name, value):
    assert getattr(SpecPrefillConfig(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value"), [("max_tokens", 1), ("top_p", 1), ("min_p", 0), ("seed", 0), ("logprobs", 0), ("logprobs", 20)]
)
def test_sampling_edges_pass(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


def test_an_adaptive_rate_is_not_the_papers():
    assert SpecPrefillConfig("auto").keep_rate == "auto"
    assert SpecPrefillConfig("auto", min_keep_rate=0.5, max_keep_rate=0.5, max_divergence=0).max_divergence == 0.0
    message = r"^keep_rate='auto' is not allowed: keep_rate must be a number in paper mode, whose budget is fixed$"
    with pytest.raises(ArgumentError, match=message):
        SpecPrefillConfig.paper("auto")
    with pytest.raises(ArgumentError, match=message):
        dataclasses.replace(SpecPrefillConfig("auto"), mode="paper")


def test_frozen():
    for value, name in ((SpecPrefillConfig(), "keep_rate"), (SamplingParams(), "top_k")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, name, 1)


def test_replace_checks_again():
    with pytest.raises(ArgumentError, match=r"^chunk_size=0 "):
        dataclasses.replace(SpecPrefillConfig(), chunk_size=0)


def test_paper_mode():
    assert SpecPrefillConfig.paper(0.1, 4, 5, 16, (2,)) == SpecPrefillConfig(0.1, 4, 5, 16, (2,), mode="paper")
    config = SpecPrefillConfig.paper(keep_rate=0.2)
    assert (config.mode, config.look_ahead, config.pool_width, config.chunk_size) == ("paper", None, 13, 32)
    with pytest.raises(
        ArgumentError, match=r"^forced_spans=\(\(0, 4\),\) .* empty in paper mode, which forces nothing$"
    ):
        SpecPrefillConfig(mode="paper", forced_spans=((0, 4),))


@pytest.mark.parametrize(
    ("name", "look_ahead", "width", "chunk"), [("SpecPrefill", 1, 0, 1), ("Full", 1, 13, 32), ("Full LAH", 8, 13, 32)]
)
def test_named_settings(name, look_ahead, width, chunk):
    expected = SpecPrefillConfig(0.1, look_ahead, width, chunk, (9,), mode="paper")
    assert SpecPrefillConfig.paper_setting(name, 0.1, eos_token_ids=(9,)) == expected


@pytest.mark.parametrize("name", ["full", "", None])
def test_unknown_named_setting(name):
    assert list(PAPER_SETTINGS) == ["SpecPrefill", "Full", "Full LAH"]
    with pytest.raises(ArgumentError, match=f"^name={name!r} .* one of 'SpecPrefill', 'Full', 'Full LAH'$"):
        SpecPrefillConfig.paper_setting(name, 0.1)


def test_flags_are_generated_from_the_fields():
    args = [
        "--keep-rate",
        "0.1",
        "--pool-width",
        "None",
        "--eos-token-ids",
        "2",
        "3",
        "--mode",
        "paper",
        "--no-enabled",
    ]
    assert tyro.cli(SpecPrefillConfig, args=args) == SpecPrefillConfig(0.1, None, 0, 32, (2, 3), "paper", enabled=False)
    assert tyro.cli(SpecPrefillConfig, args=["--keep-rate", "auto"]) == SpecPrefillConfig("auto")
    assert tyro.cli(SpecPrefillConfig, args=["--forced-spans", "0", "4", "8", "9"]).forced_spans == ((0, 4), (8, 9))
    sampling = tyro.cli(
        SamplingParams,
        args=["--max-tokens", "4", "--stop", "END", ".", "--seed", "3", "--logprobs", "2", "--ignore-eos"],
    )
    assert sampling == SamplingParams(4, seed=3, stop=("END", "."), logprobs=2, ignore_eos=True)


@pytest.mark.parametrize("kind", [SpecPrefillConfig, SamplingParams])
def test_every_flag_has_its_help(kind, capsys):
    with pytest.raises(SystemExit):
        tyro.cli(kind, args=["--help"])
    text = " ".join(re.sub("[^ -~]", " ", capsys.readouterr().out).split())
    for field in dataclasses.fields(kind):
        assert "--" + field.name.replace("_", "-") in text
    sentence = {
        SpecPrefillConfig: "Tokens that are kept or dropped together.",
        SamplingParams: "Most tokens to generate",
    }
    assert sentence[kind] in text
