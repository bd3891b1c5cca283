"""scripts/bench_kernels.py: what its JSON file holds, its arithmetic, what it leaves out and why, and its errors."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from script_modules import load_script

from specprefill_jax.errors import ArgumentError

script = load_script("bench_kernels")

TINY = script.Shape(layers=2, kv_heads=2, heads=4, head_size=16)
RATE = 5e9
TOKENS = 70


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A tiny model, and a read rate that takes no time."""
    monkeypatch.setitem(script.MODELS, "tiny", TINY)
    monkeypatch.setattr(script, "read_rate", lambda: RATE)


def result_of(tmp_path, **args) -> dict:
    out = tmp_path / "results" / "kernels.json"
    script.main(script.Args(**{"models": ("tiny",), "lengths": (TOKENS,), "rounds": 2, **args}, out=out))
    return json.loads(out.read_text())


def test_rows_of_reference_and_interpreted_kernels(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(script, "MOST_RUNS", 4)
    monkeypatch.setattr(script, "CHUNK_SIZES", (32,))
    result = result_of(tmp_path, backend=("reference", "triton_interpret"))
    assert result["platform"] == "cpu"
    assert result["dtype"] == "float32"
    assert (result["queries"], result["pool_width"], result["keep_rate"]) == (8, 13, 0.3)
    assert result["read_bytes_per_s"] == RATE
    assert result["skipped"] == []
    assert {"date", "command", "commit", "versions", "devices", "peak_memory_bytes"} <= set(result)
    rows = result["kernels"]
    cases = [("pooled_maxima", "tiny", None), ("chunk_topk", None, 32)]
    names = [(*case, backend) for case in cases for backend in ("reference", "triton_interpret")]
    assert [(r["operation"], r["model"], r["chunk_size"], r["backend"]) for r in rows] == names
    # Keys [2, 1, 2, 70, 16] twice, queries [2, 1, 8, 4, 16], maxima [1, 8, 70]; four bytes each.
    importance = 4 * (2 * (2 * 2 * 70 * 16) + 2 * 8 * 4 * 16 + 8 * 70)
    # 3 chunks, of which 1 is kept, 32 tokens. Scores and forced; kept tokens; ids, mask, positions and tokens; the
    # count and whether all fits.
    choice = 5 * 3 + 4 * 32 + (4 + 3 + 2 * 4 * 32) + 5
    assert [r["bytes_moved"] for r in rows] == [importance] * 2 + [choice] * 2
    for row in rows:
        assert row["tokens"] == TOKENS
        assert 2 <= len(row["runs"]) <= 4
        assert row["seconds"] == pytest.approx(np.median(row["runs"]))
        assert row["floor_seconds"] == pytest.approx(row["bytes_moved"] / RATE)
        assert row["floor_fraction"] == pytest.approx(row["floor_seconds"] / row["seconds"])
    for ours, theirs in zip(rows[1::2], rows[::2], strict=True):
        assert theirs["ratio_to_reference"] == 1
        assert theirs["max_difference"] is None
        assert theirs["kept_equal"] is None
        ratios = [t / o for t, o in zip(theirs["runs"], ours["runs"], strict=False)]
        assert ours["ratio_to_reference"] == pytest.approx(np.median(ratios))
        assert ours["kept_equal"] is True
    assert 0 < rows[1]["largest"] <= 1
    assert rows[1]["max_difference"] <= 1e-5 * rows[1]["largest"]
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "triton_interpret" in printed.err
    assert "top-k of 32" in printed.err


def test_chunks_of_one_token():
    [row] = script.measure(script.Case(TOKENS, chunk_size=1), script.complete(script.Args()), RATE)
    # 70 chunks, of which 21 are kept.
    assert row["bytes_moved"] == 5 * 70 + 4 * 21 + (4 * 21 + 70 + 2 * 4 * 21) + 5
    assert row["ratio_to_reference"] == 1


def test_without_the_reference_nothing_is_compared():
    args = script.complete(script.Args(backend=("triton_interpret",)))
    [row] = script.measure(script.Case(TOKENS, chunk_size=32), args, RATE)
    assert row["backend"] == "triton_interpret"
    assert (row["ratio_to_reference"], row["max_difference"], row["kept_equal"]) == (None, None, None)
    assert row["seconds"] > 0


def test_a_wrong_kernel_shows(monkeypatch):
    ramp = jnp.arange(1.0, 129.0)

    def wrong(keys, queries, num_tokens, *, size, pool_width, backend):
        assert (keys.shape, queries.shape, size, pool_width) == ((2, 1, 2, 128, 16), (2, 1, 8, 4, 16), 128, 13)
        values = ramp if backend == "reference" else ramp[::-1] if backend == "triton_interpret" else ramp + 0.25
        return jnp.broadcast_to(values, (1, 8, 128))

    def inputs(seed, *, shape, tokens, dtype):
        assert (shape, tokens, dtype) == (TINY, 128, "bfloat16")
        return jnp.zeros((2, 1, 2, 128, 16), dtype), jnp.zeros((2, 1, 8, 4, 16), dtype)

    monkeypatch.setattr(script, "pooled_maxima", wrong)
    monkeypatch.setattr(script, "scoring_inputs", inputs)
    backends = ("mosaic_tpu_interpret", "triton_interpret", "reference")
    args = script.complete(script.Args(backend=backends, dtype="bfloat16", rounds=1))
    rows = {r["backend"]: r for r in script.measure(script.Case(128, "tiny"), args, RATE)}
    assert rows["triton_interpret"]["max_difference"] == 127
    assert rows["triton_interpret"]["kept_equal"] is False
    assert rows["mosaic_tpu_interpret"]["max_difference"] == 0.25
    assert rows["mosaic_tpu_interpret"]["kept_equal"] is True
    # Two bytes a key and query, four a maximum.
    assert rows["reference"]["bytes_moved"] == 2 * (2 * 2 * 2 * 128 * 16 + 2 * 8 * 4 * 16) + 4 * 8 * 128


@pytest.mark.parametrize("field", script.Choice._fields)
def test_a_wrong_choice_shows(field):
    choice = script.Choice(*(np.arange(3) for _ in script.Choice._fields))
    assert script.agreement(choice, choice) == {"max_difference": None, "kept_equal": True}
    wrong = choice._replace(**{field: np.array([0, 1, 3])})
    assert script.agreement(wrong, choice) == {"max_difference": None, "kept_equal": False}


def test_kept_chunks_by_hand():
    maxima = np.zeros((1, 2, 150), np.float32)
    maxima[0, :, 64:96] = [[1], [3]]
    maxima[0, :, 128:] = 2.5  # a short chunk, averaged over its 22 tokens
    # 5 chunks, of which 2 are kept.
    assert script.kept(jnp.asarray(maxima)).tolist() == [2, 4]


def test_inputs():
    keys, queries = script.scoring_inputs(3, shape=TINY, tokens=TOKENS, dtype="float32")
    assert keys.shape == (2, 1, 2, TOKENS, 16)
    assert queries.shape == (2, 1, 8, 4, 16)
    assert float(keys.std()) == pytest.approx(1, abs=0.1)
    assert float(queries.std()) == pytest.approx(script.SPREAD, rel=0.2)
    heads = np.asarray(keys).reshape(4, -1)
    assert np.abs(np.corrcoef(heads) - np.eye(4)).max() < 0.15


class Clock:
    """Stands in for the time module: only runs take time."""

    def __init__(self):
        self.now = 0.0
        self.ran: list[str] = []

    def perf_counter(self) -> float:
        return self.now

    def program(self, name: str, *seconds: float):
        """A program whose runs take these seconds, the last of them from then on."""
        left = list(seconds)

        def run():
            self.ran.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]
            return jnp.asarray(len(self.ran))

        return run


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(script, "time", clock)
    return clock


def test_runs_alternate_until_enough_is_spent(clock):
    programs = {"a": clock.program("a", 3, 0.0625), "b": clock.program("b", 0.25), "c": clock.program("c", 2**-10)}
    seconds, results = script.compare(programs, 3)
    # The first run warms up.
    assert seconds == {"a": [0.0625] * 5, "b": [0.25] * 3, "c": [2**-10] * 30}
    assert "".join(clock.ran) == "abc" * 4 + "ac" * 2 + "c" * 25
    assert [int(results[name]) for name in "abc"] == [1, 2, 3]


def test_a_slow_backend_runs_once(clock):
    programs = {"a": clock.program("a", 5.5, 100), "b": clock.program("b", 0.25)}
    seconds, _ = script.compare(programs, 4)
    assert seconds == {"a": [5.5], "b": [0.25] * 4}
    assert "".join(clock.ran) == "ab" + "b" * 4


def test_budget_that_is_spent_skips_the_rest(tmp_path, capfd, monkeypatch, clock):
    done = []

    def measure(case, args, bytes_per_s):
        done.append(case)
        clock.now += 10
        return []

    monkeypatch.setattr(script, "measure", measure)
    result = result_of(tmp_path, lengths=(8, 16), budget_s=35)
    assert [(c.tokens, c.model, c.chunk_size) for c in done] == [
        (8, "tiny", None),
        (8, None, 32),
        (8, None, 1),
        (16, "tiny", None),
    ]
    reason = "the budget of 35 s is spent"
    assert result["skipped"] == [
        {"tokens": 16, "model": None, "chunk_size": 32, "reason": reason},
        {"tokens": 16, "model": None, "chunk_size": 1, "reason": reason},
    ]
    assert result["seconds"] == 40
    assert "chunk_topk 32, 16 tokens: skipped, " + reason in " ".join(capfd.readouterr().err.split())


def test_no_budget_measures_nothing(tmp_path):
    result = result_of(tmp_path, budget_s=0)
    assert result["kernels"] == []
    assert len(result["skipped"]) == 3


def test_keys_that_do_not_fit_are_never_made(tmp_path, capfd, monkeypatch):
    made = []
    monkeypatch.setattr(script, "scoring_inputs", lambda *args, **kwargs: made.append(kwargs))
    # Llama-3.1-8B, 128K tokens, bfloat16: 8 GiB, and 1 GiB of slack.
    monkeypatch.setattr(script, "memory_limit", lambda: 8 * 2**30)
    monkeypatch.setattr(script, "CHUNK_SIZES", ())
    result = result_of(tmp_path, models=("Llama-3.1-8B",), lengths=(131072,), dtype="bfloat16")
    reason = "keys and slack are 9.0 GiB, the device has 8.0 GiB"
    expected = {"tokens": 131072, "model": "Llama-3.1-8B", "chunk_size": None, "reason": reason}
    assert (result["kernels"], result["skipped"], made) == ([], [expected], [])
    assert result["memory_limit_bytes"] == 8 * 2**30
    assert reason in " ".join(capfd.readouterr().err.split())


def test_keys_that_just_fit_are_measured():
    case = script.Case(131072, "Llama-3.1-8B")
    assert script.obstacle(case, "bfloat16", 9 * 2**30, 0, 1) is None
    assert script.obstacle(case, "bfloat16", 9 * 2**30 - 1, 0, 1) is not None
    assert script.obstacle(case, "float32", 9 * 2**30, 0, 1) is not None
    assert script.obstacle(case, "bfloat16", None, 0, 1) is None
    assert script.obstacle(script.Case(131072, chunk_size=1), "bfloat16", 1, 0, 1) is None


class Device:
    """A device with these memory statistics."""

    platform = "gpu"

    def __init__(self, stats):
        self.stats = stats

    def memory_stats(self):
        return self.stats


@pytest.mark.parametrize(("stats", "limit"), [({"bytes_limit": 123}, 123), ({}, None), (None, None)])
def test_memory_limit(monkeypatch, stats, limit):
    assert 2**28 < script.memory_limit() < 2**50
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(stats)])
    assert script.memory_limit() == limit


def test_bandwidth_of_an_accelerator_reads_what_there_is_room_for(monkeypatch):
    sizes, clock = [], iter([1.0, 0.5, 0.25, 0.125, 0.5, 1.0])

    def timed(run):
        sizes.append(run().nbytes)
        return next(clock), None

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(script, "timed", timed)
    # A quarter of 32 MiB is 64 rows of 128 KiB, each summed to one float32.
    assert script.bandwidth(2**25) == 2**23 / 0.125
    assert sizes == [64 * 4] * 6


def test_defaults(monkeypatch):
    args = script.complete(script.Args())
    assert (args.models, args.lengths, args.dtype) == (("smollm2-135m",), (1024, 4096), "float32")
    assert args.backend == ("reference",)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    args = script.complete(script.Args())
    assert args.models == ("Llama-3.2-1B", "Llama-3.1-8B", "Llama-3.1-70B")
    assert (args.lengths, args.dtype) == ((8192, 32768, 131072), "bfloat16")
    assert args.backend == ("reference", "triton")
    assert script.complete(script.Args(backend=("triton", "triton"))).backend == ("triton",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"models": ("tiny", "gpt")}, r"models='gpt' is not allowed: models must be .*'Llama-3.1-8B'"),
        ({"lengths": (8, 0)}, r"lengths=0 is not allowed: lengths must be .* from 1"),
        ({"backend": ("cuda",)}, r"backend='cuda' is not allowed: backend must be .*'triton_interpret'"),
        ({"backend": ("triton",)}, r"backend='triton' is not allowed: .*on this platform, cpu"),
        ({"dtype": "int8"}, r"dtype='int8' is not allowed: dtype must be one of .*bfloat16"),
        ({"rounds": 0}, r"rounds=0 is not allowed: rounds must be a whole number from 1"),
        ({"budget_s": -1.0}, r"budget_s=-1.0 is not allowed: budget_s must be .* from 0"),
        ({"budget_s": math.nan}, r"budget_s=nan is not allowed"),
    ],
)
def test_errors(tmp_path, given, message):
    with pytest.raises(ArgumentError, match=message):
        result_of(tmp_path, **given)
    assert list(tmp_path.iterdir()) == []
