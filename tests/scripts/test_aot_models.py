"""What the report asks for and how it judges; what it compiles needs compilers that tests do not (`make aot`)."""

from dataclasses import asdict

import pytest
from script_modules import load_script

from specprefill_jax.sharding.aot import Report

PAIR = "Llama-3.1-405B-FP8 + Llama-3.1-8B"


@pytest.fixture(scope="module")
def script():
    return load_script("aot_models")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lengths": (0,)}, "lengths=0 is not allowed"),
        ({"lengths": (131_073,)}, "lengths=131073 is not allowed"),
        ({"devices": 9}, "devices=9 is not allowed"),
        ({"keep_rate": 0.0}, "keep_rate=0.0 is not allowed: keep_rate must be a number above 0 and at most 1"),
        ({"chunk": 0}, "chunk=0 is not allowed"),
        ({"chips": ("A100",)}, "chips='A100' is not allowed: chips must be of H100, H200"),
        ({"pairs": ("Llama-3.1-8B",)}, "pairs='Llama-3.1-8B' is not allowed: pairs must be of Llama-3.2-1B, "),
    ],
)
def test_bad_arguments(script, options, said):
    with pytest.raises(ValueError, match=said):
        script.main(script.Args(**options))


def test_slots(script):
    """By hand: 10 % of 256 chunks of 32 is 26 of them; the answer's room goes on top, and slots are a power of two."""
    args = script.Args()
    assert script.kept_tokens(8192, args) == 26 * 32
    assert script.slots_of(8192, args) == (16_384, 2048)
    # 131,072 + 7 look-ahead steps: multiples of 16,384 from 32,768 on. 410 chunks are 13,120 tokens.
    assert script.slots_of(131_072, args) == (147_456, 16_384)


def test_every_program_is_compiled_once(script):
    args = script.Args()
    found = script.cases(args)
    assert len(found) == len(set(found)) == 3 * (2 * 3 + 3 * 2) + 3 * (1 + 2)
    assert {case.program for case in found if case.model == "Llama-3.1-70B"} == {
        *("main prefill", "decode", "engine prefill", "engine decode")
    }
    # The 8B model is a speculator with a cache for the whole prompt, and a main model with one for what is kept.
    slots = {c.program: c.slots for c in found if (c.model, c.tokens, c.batch) == ("Llama-3.1-8B", 8192, 1)}
    assert slots["look-ahead"] == 16_384
    assert slots["decode"] == 2048


@pytest.mark.parametrize(
    ("program", "model", "collectives", "alias", "temp", "said"),
    [
        ("decode", "Llama-3.1-70B", {"all-reduce": 3}, 100, 0, []),
        ("decode", "Llama-3.1-405B-FP8", {"all-reduce": 7}, 100, 0, []),
        ("decode", "Llama-3.1-70B", {"all-reduce": 4}, 100, 0, ["4 all-reduces, not 3"]),
        ("decode", "Llama-3.1-70B", {"all-reduce": 3, "all-gather": 1}, 100, 0, ["1 all-gather"]),
        ("look-ahead", "Llama-3.1-8B", {"all-reduce": 3, "all-gather": 2}, 100, 0, []),
        ("look-ahead", "Llama-3.1-8B", {"all-reduce": 3, "all-gather": 3}, 100, 0, ["3 all-gather"]),
        ("scoring", "Llama-3.1-8B", {"all-reduce": 1}, 0, 0, []),
        ("main prefill", "Llama-3.1-70B", {"all-reduce": 3}, 99, 0, ["the cache is copied, not changed in place"]),
        ("decode", "Llama-3.1-70B", {"all-reduce": 3}, 100, 2**31, ["2.00 GiB of temporary memory"]),
    ],
)
def test_faults(script, program, model, collectives, alias, temp, said):
    case, report = script.Case(program, model, 8192, 2048), Report(temp, 0, alias, collectives)
    assert script.faults(case, script.Args(), report, cache_bytes=100) == said


@pytest.mark.parametrize(("temp", "fits"), [(10 * 2**30, True), (12 * 2**30, False)])
def test_what_a_pair_holds(script, temp, fits):
    """Both models' weights and caches, and the largest program's temporaries; nothing twice."""
    args, gib = script.Args(chips=("H100",)), 2**30
    rows = []
    for case in script.cases(args):
        large = case.model == "Llama-3.1-405B-FP8"
        report = Report(temp if case.program == "decode" else gib, 0, 0, {})
        held = {"weight_bytes": 60 * gib if large else 2 * gib, "cache_bytes": gib if large else 2 * gib}
        rows.append(asdict(case) | held | {"chip": "H100", "faults": [], "report": asdict(report)})
    row = script.fit(PAIR, 131_072, "H100", args, rows)
    assert row["weight_bytes"] == 62 * gib
    assert row["cache_bytes"] == 3 * gib
    assert row["total_bytes"] == 65 * gib + temp
    assert row["limit_bytes"] == 76 * gib
    assert row["fits"] is fits
