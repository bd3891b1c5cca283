"""scripts/soak.py against a scripted engine that is right, and against some that are not."""

import asyncio
import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from rich.console import Console
from script_modules import load_script
from server.fake_engine import FakeEngine, make_tokenizer
from server.running import Server

from specprefill_jax.engine.request import Stats
from specprefill_jax.errors import ArgumentError, argument_error
from specprefill_jax.evals import soak as soaking
from specprefill_jax.evals import soak_mix
from specprefill_jax.evals.answers import Choice
from specprefill_jax.evals.wire import Target
from specprefill_jax.sampling import sample, sampling_arrays

script = load_script("soak")
IDLE = Stats(0, 0, 0, 0, 0.0, 0.0, 100, 60, 20, 50, 4, 5, 0)


class Engine(FakeEngine):
    """As good as the real one in what the soak looks at."""

    done = IDLE

    def __init__(self, tokenizer=None):
        super().__init__(tokenizer)
        self.done = IDLE

    def submit(self, request, on_event):
        if request.config.chunk_size != 32:
            raise argument_error("chunk_size", request.config.chunk_size, "32")
        super().submit(request, on_event)


@pytest.fixture
def soak(another, capsys, tmp_path):
    """A function that soaks an engine for a second: what the script wrote, and what it left with."""

    def run(engine, **settings):
        out = tmp_path / "soak.json"
        url = another(engine).url
        given = {"minutes": 0.02, "concurrency": 4, "cases": 20, "prompt_tokens": (8, 600), "max_tokens": 12}
        try:
            script.main(soak_mix.SoakArgs(url=url, out=out, **given | settings))
        except SystemExit as left:
            return json.loads(out.read_text()), left.code
        return json.loads(out.read_text()), 0

    return run


@pytest.fixture
def another():
    started = []

    def start(engine):
        started.append(Server(engine))
        return started[-1]

    yield start
    for server in started:
        server.stop()


@pytest.mark.parametrize("tokenizer", [None, make_tokenizer()])
def test_a_server_that_is_right(soak, capsys, tokenizer):
    result, left = soak(Engine(tokenizer))
    assert left == 0
    assert result["requests"]["compared"] >= result["requests"]["answered"] > 0
    assert (result["wrong"], result["ties"], result["broken"], result["violations"]) == ([], [], [], [])
    assert "memory, MiB a minute" in capsys.readouterr().out


@pytest.mark.parametrize("has_text", [False, True])
def test_everything_is_in_the_mix(has_text):
    server = soak_mix.Server(None, "model", 4096, has_text, 512)
    mix = soak_mix.Mix(soak_mix.SoakArgs(prompt_tokens=(8, 600)), server)
    cases = [mix.case(serial) for serial in range(80)]
    options = {name for case in cases for name in case.body}
    assert {"seed", "top_p", "top_k", "min_p", "repetition_penalty", "n", "ignore_eos", "stop_token_ids"} <= options
    assert {"logprobs", "temperature", "max_tokens", "specprefill"} <= options
    assert ({"stop", "messages"} <= options) == has_text
    assert {case.sparse for case in cases} == {True, False}
    again = soak_mix.Mix(soak_mix.SoakArgs(prompt_tokens=(8, 600)), server)
    assert [again.case(serial).body for serial in range(80)] == [case.body for case in cases]


def test_conversations_go_on_with_the_answers():
    mix = soak_mix.Mix(soak_mix.SoakArgs(), soak_mix.Server(None, "model", 4096, False, 512))
    first = mix.turn(0, None, None)
    second = mix.turn(1, first, Choice(token_ids=[7, 8]))
    length = len(first.body["prompt"])
    assert second.body["prompt"][: length + 2] == [*first.body["prompt"], 7, 8]
    assert len(second.body["prompt"]) == 2 * length + 2
    assert second.sparse == first.sparse


def test_wrong_tokens_are_found(soak, monkeypatch):
    engine, load = Engine(make_tokenizer()), soaking.Soak.load

    def fails_under_load(self):
        engine.answer = "good evening"
        return load(self)

    monkeypatch.setattr(soaking.Soak, "load", fails_under_load)
    result, left = soak(engine)
    assert "wrong answers" in left
    assert {one["what"] for one in result["wrong"]} <= {"tokens", "finish_reason", "text"}
    assert all(one["tokens"] != one["reference"] for one in result["wrong"] if one["what"] == "tokens")


def test_what_is_left_over_is_found(soak, monkeypatch):
    monkeypatch.setattr(soaking, "SETTLE", 0.1)
    engine = Engine()
    engine.done = replace(IDLE, running=1, cache_usage=0.1, compiles_after_warm_up=2)
    left = soak(engine)[1]
    assert "num_requests_running is 1" in left
    assert "kv_cache_usage_perc is 0.1" in left
    assert "2.0 programs compiled" in left


def test_failing_requests_are_found(soak, monkeypatch):
    engine = Engine()
    found = soaking.violations(soak_mix.SoakArgs(), soaking.Tally(), {"ended by error": 2.0}, None)
    assert "2 requests failed in the engine" in found
    load = soaking.Soak.load

    def fails_under_load(self):
        engine.fails_after = 0
        return load(self)

    monkeypatch.setattr(soaking.Soak, "load", fails_under_load)
    result, left = soak(engine)
    assert "broken or refused" in left
    assert any("RefusedError" in line for line in result["broken"])


def test_the_numbers_of_a_draw_are_those_that_the_server_draws_by():
    logits = np.random.default_rng(0).normal(size=64).astype(np.float32)
    drawing = jax.jit(sample)
    for seed in (0, 5, 2**32 - 1):
        settings = sampling_arrays([0.7], seed=[seed])
        for step in (0, 3):
            drawn = int(drawing(logits[None], settings, step)[0])
            assert drawn == int(np.argmax(logits / np.float32(0.7) + soaking.gumbel(seed, step, 64)))


@pytest.mark.parametrize("drawing", [{"temperature": 0}, {"temperature": 0.5, "seed": 7}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_tokens_that_are_equal_but_for_rounding_are_ties(another, path, drawing):
    tokenizer = make_tokenizer()
    first, second = (tokenizer.decode([token]) for token in (0, 1))  # the scripted engine finds both equally likely
    engine = Engine(tokenizer)
    server = soak_mix.connect(Target.parse(another(engine).url), None)
    server.vocab_size = 300
    run = soaking.Soak(soak_mix.SoakArgs(), server, Console(quiet=True), None)
    prompt = {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    case = soak_mix.Case(path, {**prompt, **drawing, "max_tokens": 4, "specprefill": {"enabled": False}}, False)

    async def leave_the_reference():
        engine.answer = 20 * first
        await run.references.get(case, False)
        engine.answer = first + 9 * second
        await run._answered(case, True)
        engine.answer = 20 * first
        await run.finish()

    asyncio.run(leave_the_reference())
    [found] = run.tally.ties + run.tally.wrong
    assert (found["what"], found["step"]) == ("tokens", 1)
    noise = soaking.gumbel(7, 1, 300) if drawing["temperature"] else [0.0, 0.0]
    assert found["gap"] == pytest.approx(abs(noise[0] - noise[1]))
    assert bool(run.tally.ties) == (not drawing["temperature"])


def test_what_differs():
    read = {"engaged": True, "kept_chunks": "101"}
    choice = Choice("ab", [5, 6], [], "stop", read)
    assert soaking.difference(choice, choice) is None
    assert soaking.difference(choice, replace(choice, specprefill={**read, "kept_chunks": "110"})) == "kept chunks"
    assert soaking.difference(choice, replace(choice, token_ids=[5, 7])) == "tokens"
    assert soaking.difference(choice, replace(choice, finish_reason="length")) == "finish_reason"
    assert soaking.difference(choice, replace(choice, text="a")) == "text"


def test_growth_is_by_the_minute_and_leaves_out_the_first():
    line = [(float(second), (100 + max(second - 60, 0) // 30) * 2**20) for second in range(0, 301, 30)]
    assert soaking.growth(line) == pytest.approx(2.0)
    assert soaking.growth([(0.0, 0), (10.0, 2**20), (20.0, 2**20), (30.0, 2**20), (40.0, 2**20)]) == pytest.approx(0)
    assert soaking.growth([]) is None
    found = soaking.violations(soak_mix.SoakArgs(most_growth=1.5), soaking.Tally(), {}, 2.0)
    assert "memory grows by 2.00 MiB a minute (at most 1.5)" in found


@pytest.mark.parametrize(
    ("name", "value"), [("minutes", 0.0), ("concurrency", 0), ("prompt_tokens", (9, 8)), ("tie", -1.0), ("cases", 0)]
)
def test_arguments_that_mean_nothing(name, value):
    with pytest.raises(ArgumentError, match=name):
        soaking.check(soak_mix.SoakArgs(**{name: value}))
