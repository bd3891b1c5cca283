"""An engine around the tiny pair, what its listeners heard, and faults to put before its runner."""

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from agreement import load_tiny
from jax.sharding import Mesh

from specprefill_jax import SamplingParams, SpecPrefillConfig
from specprefill_jax.engine.engine import Engine
from specprefill_jax.engine.request import Delta, EngineConfig, Finished, Request

SPARSE = SpecPrefillConfig(keep_rate=0.4, min_prompt_tokens=64, min_predicted_gain=0, tail_tokens=8)
DENSE = replace(SPARSE, enabled=False)
LIMITS = EngineConfig(
    max_running=4, prefill_chunk=64, max_model_len=512, cache_tokens=2048, speculator_cache_tokens=2048
)
PATIENCE = 120.0


def greedy(count: int, **changes) -> SamplingParams:
    return SamplingParams(**{"max_tokens": count, "ignore_eos": True, **changes})


class Listener:
    """What became of one request, and when it was heard."""

    def __init__(self, request: Request, on_delta: Callable[[int], None] | None = None):
        self.request = request
        self.on_delta = on_delta
        self.deltas: list[Delta] = []
        self.times: list[float] = []
        self.finished: Finished | None = None
        self.over = threading.Event()

    def __call__(self, event):
        assert self.finished is None, "something came after the end"
        self.times.append(time.perf_counter())
        if isinstance(event, Finished):
            self.finished = event
            self.over.set()
            return
        self.deltas.append(event)
        if self.on_delta is not None:
            self.on_delta(len(self.deltas))

    def wait(self) -> Finished:
        assert self.over.wait(PATIENCE), f"{self.request.request_id} has not ended"
        return self.finished

    @property
    def tokens(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def logprobs(self) -> list:
        return [entry for delta in self.deltas for entry in delta.logprobs or ()]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)


class Bench:
    """An engine, and the same models alone."""

    def __init__(self, mesh: Mesh | None, limits: EngineConfig, defaults: SpecPrefillConfig = SPARSE, **options):
        # Alone, prompts of all lengths are read by one program.
        self.pair = load_tiny(mesh=mesh, prefill_chunk=16, **options)
        self.engine = Engine(self.pair, limits, defaults=defaults)
        self.reports: list[tuple[int, int]] = []
        self.engine.warm_up(lambda done, total: self.reports.append((done, total)))
        self.outputs: dict[tuple, Any] = {}
        self.elsewhere = 0
        self.count = 0
        self.engine.start()

    @property
    def runner(self):
        return self.engine._runner

    @property
    def compiled(self) -> int:
        return self.engine.stats().compiles_after_warm_up - self.elsewhere

    @property
    def usage(self) -> float:
        return self.engine._draft_pages.usage

    def alone(self, request: Request):
        """The request's run alone, by `SpecPrefill.generate`, whose compilations are no fault of the engine's."""
        key = request.prompt.tobytes(), request.sampling, request.config
        if key not in self.outputs:
            before = self.engine.stats().compiles_after_warm_up
            self.outputs[key] = self.pair.generate(request.prompt, request.sampling, request.config)
            self.elsewhere += self.engine.stats().compiles_after_warm_up - before
        return self.outputs[key]

    def forget(self) -> None:
        """As if nothing had been asked before."""
        self.engine._loop._selections.clear()
        for pages in (self.engine._pages, self.engine._draft_pages):
            pages.forget()

    def request(self, prompt, sampling=None, config=SPARSE, **others) -> Request:
        self.count += 1
        ids = np.asarray(prompt, np.int32)
        return Request(f"r{self.count}", ids, sampling or greedy(4), config, **others)

    def submit(self, request: Request, on_delta=None) -> Listener:
        listener = Listener(request, on_delta)
        self.engine.submit(request, listener)
        return listener

    def ask(self, *requests: Request) -> list[Listener]:
        """Ask all at the same moment, and wait for all."""
        with self.engine._lock:
            listeners = [self.submit(request) for request in requests]
        for listener in listeners:
            listener.wait()
        return listeners

    def check(self, listener: Listener) -> None:
        """A request that ended by itself is as if it had been alone."""
        finished, want = listener.wait(), self.alone(listener.request)
        assert finished.error is None
        assert listener.tokens == want.token_ids
        assert finished.finish_reason == want.finish_reason
        assert finished.num_generated == len(want.token_ids)
        assert finished.selection.reason == want.selection.reason
        np.testing.assert_array_equal(finished.selection.kept_indices, want.selection.kept_indices)
        assert len(listener.logprobs) == len(want.logprobs or ())
        for got, expected in zip(listener.logprobs, want.logprobs or (), strict=True):
            assert got.token == pytest.approx(expected.token, abs=1e-4)
            assert list(got.top.values()) == pytest.approx(list(expected.top.values()), abs=1e-4)

    def check_clean(self) -> None:
        """Nobody holds anything, nothing was compiled, and it still serves."""
        assert self.engine.state == "ready"
        stats = self.engine.stats()
        assert (stats.running, stats.prefilling, stats.waiting, stats.waiting_tokens) == (0, 0, 0, 0)
        assert (stats.cache_usage, stats.speculator_cache_usage) == (0.0, 0.0)
        for pages in (self.engine._pages, self.engine._draft_pages):
            pages.check()
        assert self.compiled == 0


class Tap:
    """Stands before a method of the runner, counts its calls, and does something at one of them."""

    def __init__(self, monkeypatch, runner, name: str, at=None, do=None, after: bool = False):
        self.calls: list[tuple] = []
        real = getattr(runner, name)

        def tapped(*args, **others):
            self.calls.append(args)
            hit = at(self, args) if callable(at) else at == len(self.calls)
            if hit and do is not None and not after:
                do()
            result = real(*args, **others)
            if hit and do is not None and after:
                do()
            return result

        monkeypatch.setattr(runner, name, tapped)


def fail() -> None:
    raise RuntimeError("injected")


def lose(runner) -> Callable[[], None]:
    """A device that takes the caches with it."""

    def do():
        for array in jax.tree.leaves((runner.cache, runner.draft_cache)):
            array.delete()
        raise RuntimeError("the device is lost")

    return do


def once(do: Callable[[], None]) -> Callable[[], None]:
    done = []

    def first():
        if not done:
            done.append(True)
            do()

    return first
