"""No prompt leaves a trace on the next: neither in its answer, nor when it failed, nor when its stream was dropped."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from agreement import assert_greedy, load_tiny, prompt_of

from specprefill_jax import SamplingParams, SpecPrefillConfig

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PAPER = SpecPrefillConfig.paper(keep_rate=0.3, chunk_size=16, eos_token_ids=())
PRODUCT = SpecPrefillConfig(
    keep_rate=0.3, chunk_size=16, eos_token_ids=(), tail_tokens=1, min_prompt_tokens=0, min_predicted_gain=0.0
)
DENSE = SpecPrefillConfig(enabled=False)
CONFIGS = {"paper": PAPER, "product": PRODUCT, "dense": DENSE}

# Twenty sparse prompts of lengths that hit and straddle chunks, and ten dense ones between them. They share a few
# compiled lengths: a program that kept something of its last prompt would show it.
LENGTHS = (160, 481, 161, 512, 145, 256, 497, 176, 241, 159, 500, 162, 255, 511, 146, 170, 242, 482, 175, 499)
SPARSE = [(length, "paper" if i % 2 else "product") for i, length in enumerate(LENGTHS)]
DENSES = [(length, "dense") for length in (48, 160, 501, 64, 150, 1, 80, 490, 33, 76)]


def run(model, case: tuple[int, str]) -> tuple[list[int], list[int]]:
    """The kept indices and the tokens of a case."""
    length, kind = case
    output = model.generate(prompt_of(length), GREEDY, CONFIGS[kind])
    assert output.selection.engaged == (kind != "dense"), output.selection.reason
    return [int(i) for i in output.selection.kept_indices], [int(t) for t in output.token_ids]


ALONE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import conftest
from agreement import load_tiny
from test_isolation import run
print(json.dumps(run(load_tiny(), tuple(json.loads(sys.argv[2])))))
"""


def run_alone(case: tuple[int, str]) -> tuple[list[int], list[int]]:
    """The same in a process of its own that sees no other prompt."""
    command = [sys.executable, "-c", ALONE, str(Path(__file__).parent), json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert done.returncode == 0, done.stderr[-2000:]
    kept, tokens = json.loads(done.stdout.splitlines()[-1])
    return kept, tokens


@pytest.fixture(scope="module")
def in_a_row(tiny):
    """What each sparse case gave when the twenty ran back to back."""
    return {case: run(tiny, case) for case in SPARSE}


def test_twenty_back_to_back_equal_the_oracle(in_a_row, reference):
    """The oracle holds no state at all, so to equal it on each is to be alone."""
    assert len(in_a_row) == 20
    for (length, kind), (kept, tokens) in in_a_row.items():
        ids = prompt_of(length)
        chunks = -(-length // 16)
        assert len({i // 16 for i in kept}) == -(-chunks * 3 // 10)
        if kind == "product":
            assert kept[0] == 0
            assert kept[-1] == length - 1
        assert_greedy(tokens, reference.logits_of(ids, kept, tokens))


def test_interleaved_with_dense_prompts(tiny, in_a_row, reference):
    for i, case in enumerate(reversed(SPARSE)):
        assert run(tiny, case) == in_a_row[case], case
        if i % 2:
            dense = DENSES[i // 2]
            kept, tokens = run(tiny, dense)
            assert kept == list(range(dense[0]))
            assert_greedy(tokens, reference.logits_of(prompt_of(dense[0]), kept, tokens))


@pytest.mark.parametrize("case", [SPARSE[0], SPARSE[3], SPARSE[9], (501, "dense")], ids=str)
def test_equals_a_fresh_process(tiny, in_a_row, case):
    assert run_alone(case) == (in_a_row[case] if case in in_a_row else run(tiny, case))


def test_a_new_model_object_starts_cold(tiny, in_a_row):
    """Two models in one process share no state: a second one gives the same, and so does the first after it."""
    other = load_tiny()
    assert run(other, SPARSE[3]) == in_a_row[SPARSE[3]]
    assert run(other, SPARSE[0]) == run(tiny, SPARSE[0]) == in_a_row[SPARSE[0]]


class Compilations:
    """How many programs XLA was asked for while it is entered."""

    def __enter__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._hear)

    def _hear(self, event: str, _seconds: float, **_ignored):
        self.count += event == "/jax/core/compile/backend_compile_duration"


def test_the_counter_counts():
    with Compilations() as compiled:
        jax.jit(lambda x: x * 3 + 1)(np.arange(7))
    assert compiled.count >= 1


@pytest.mark.parametrize("config", [PAPER, PRODUCT, DENSE], ids=["paper", "product", "dense"])
def test_another_length_compiles_nothing_new(config):
    """After one prompt, others of its bucket (481 to 512 with their answers) find every program, sampled ones too."""
    model = load_tiny()
    sampled = SamplingParams(max_tokens=5, temperature=0.9, top_k=9, top_p=0.9, seed=4)
    for sampling in (GREEDY, sampled):
        model.generate(prompt_of(500), sampling, config)
    with Compilations() as compiled:
        for length in (499, 485, 503, 497):
            model.generate(prompt_of(length), GREEDY, config)
            model.generate(prompt_of(length), SamplingParams(max_tokens=9, temperature=0.5, top_k=3, seed=8), config)
            list(model.stream(prompt_of(length), GREEDY, config))
    assert compiled.count == 0


def test_programs_are_few_over_all_lengths():
    """Forty lengths in turn over 100 to 139 need programs for the three multiples of 16 in there, and no more."""
    model = load_tiny()
    compiling = []
    for length in range(100, 140):
        with Compilations() as compiled:
            model.generate(prompt_of(length), GREEDY, PAPER)
        if compiled.count:
            compiling.append(length)
    # A new length, a new number of kept chunks, a new cache size: each once, and not one program a length.
    assert len(compiling) <= 8, compiling


def test_a_stream_that_is_dropped_leaves_nothing(tiny, in_a_row):
    for taken in (1, 2, 5):
        stream = tiny.stream(prompt_of(480), SamplingParams(max_tokens=64, ignore_eos=True), PRODUCT)
        for _ in range(taken):
            next(stream)
        stream.close()
        assert run(tiny, SPARSE[3]) == in_a_row[SPARSE[3]]
        assert run(tiny, SPARSE[0]) == in_a_row[SPARSE[0]]


def test_two_streams_at_once(tiny, in_a_row):
    """Streams that take turns answer as each alone: a stream's cache is its own."""
    cases = [SPARSE[1], SPARSE[2], (160, "dense")]
    streams = [tiny.stream(prompt_of(length), GREEDY, CONFIGS[kind]) for length, kind in cases]
    tokens = [[] for _ in cases]
    for _ in range(GREEDY.max_tokens + 1):
        for stream, seen in zip(streams, tokens, strict=True):
            piece = next(stream, None)
            if piece is not None and piece.token_id is not None:
                seen.append(int(piece.token_id))
    assert tokens[0] == in_a_row[SPARSE[1]][1]
    assert tokens[1] == in_a_row[SPARSE[2]][1]
    assert tokens[2] == run(tiny, (160, "dense"))[1]


def fails(*_args, **_kwargs):
    raise RuntimeError("injected: the speculator broke")


def break_at_once(model, monkeypatch):
    """The speculator raises before it does anything."""
    monkeypatch.setattr(model.speculator, "read", fails)


def break_after_reading(model, monkeypatch):
    """The speculator fills its cache, and only then raises."""
    read = model.speculator.read

    def reads_then_fails(*args, **kwargs):
        jax.block_until_ready(read(*args, **kwargs).queries)
        fails()

    monkeypatch.setattr(model.speculator, "read", reads_then_fails)


def break_with_nan(model, monkeypatch):
    """The speculator's queries are not numbers, seen only after the main prefill is enqueued."""
    read = model.speculator.read

    def reads_nan(*args, **kwargs):
        ahead = read(*args, **kwargs)
        return dataclasses.replace(ahead, queries=ahead.queries * np.nan)

    monkeypatch.setattr(model.speculator, "read", reads_nan)


def break_scoring(_model, monkeypatch):
    """The speculator works, the scoring raises."""
    monkeypatch.setattr("specprefill_jax.selecting.score_and_choose", fails)


BREAKS = [break_at_once, break_after_reading, break_with_nan, break_scoring]


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda f: f.__name__)
def test_a_failed_speculator_falls_back_to_dense(tiny, in_a_row, reference, monkeypatch, break_it):
    """Product mode answers as dense does, says what happened, and the next prompt is as ever."""
    case = SPARSE[4]
    ids = prompt_of(case[0])
    dense = tiny.generate(ids, GREEDY, DENSE)
    with monkeypatch.context() as patch:
        break_it(tiny, patch)
        for output in (tiny.generate(ids, GREEDY, PRODUCT), list(tiny.stream(ids, GREEDY, PRODUCT))[-1].output):
            assert not output.selection.engaged
            assert output.selection.reason == "speculator_failed"
            assert ("injected" if break_it is not break_with_nan else "finite") in output.selection.detail
            assert list(output.selection.kept_indices) == list(range(len(ids)))
            assert output.selection.keep_rate == 1.0
            assert list(output.token_ids) == list(dense.token_ids)
            assert_greedy(output.token_ids, reference.logits_of(ids, range(len(ids)), output.token_ids))
        selection = tiny.select(ids, PRODUCT)
        assert selection.reason == "speculator_failed"
        np.testing.assert_allclose(
            tiny.prefill(ids, selection), reference.logits_of(ids, range(len(ids)), [0])[0], atol=1e-3
        )
    assert run(tiny, case) == in_a_row[case]


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda f: f.__name__)
def test_paper_mode_raises_what_failed(tiny, in_a_row, monkeypatch, break_it):
    """A researcher wants no silent dense result in place of the method's: the error names the failure."""
    case = SPARSE[1]
    match = "finite" if break_it is break_with_nan else "injected"
    with monkeypatch.context() as patch:
        break_it(tiny, patch)
        with pytest.raises(ValueError, match=match):
            tiny.generate(prompt_of(case[0]), GREEDY, PAPER)
        with pytest.raises(ValueError, match=match):
            tiny.select(prompt_of(case[0]), PAPER)
    assert run(tiny, case) == in_a_row[case]


@pytest.mark.parametrize("chunk", [7, 100, 256])
def test_a_selection_of_another_prefill_chunk(tiny, tiny_chunked, chunk):
    """What one pipeline chose, another with a prefill chunk of its own reads correctly."""
    ids = prompt_of(300)
    config = SpecPrefillConfig.paper(0.8, eos_token_ids=())
    selection = tiny.select(ids, config)
    np.testing.assert_allclose(
        tiny_chunked(chunk).prefill(ids, selection), tiny.prefill(ids, selection), rtol=1e-3, atol=1e-3
    )


def test_a_penalty_compiles_nothing_new_within_a_bucket(tiny):
    penalty = SamplingParams(max_tokens=3, repetition_penalty=1.2, ignore_eos=True)
    tiny.generate(prompt_of(500), penalty, DENSE)
    with Compilations() as compiled:
        tiny.generate(prompt_of(499), penalty, DENSE)
    assert compiled.count == 0


def test_warm_up_leaves_nothing_to_compile():
    model = load_tiny(prefill_chunk=128)
    model.warm_up(300, PAPER, GREEDY)
    with Compilations() as compiled:
        model.generate(prompt_of(300), GREEDY, PAPER)
        model.generate(prompt_of(300), GREEDY, DENSE)
    assert compiled.count == 0
