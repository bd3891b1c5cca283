"""The engine: requests come in from any thread, one thread of its own drives the models, events go out.

A round is enqueued before the results of the one before it are read, so that devices never wait for Python. Where
enqueuing takes as long as running (layerwise models, on CPUs), results are read at once instead.
"""

import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Self

import jax
import numpy as np
from jax.sharding import Mesh

from specprefill_jax import costs
from specprefill_jax.cards import PairCard
from specprefill_jax.config import SpecPrefillConfig, check_integer
from specprefill_jax.engine.blocks import BlockManager
from specprefill_jax.engine.loop import Loop
from specprefill_jax.engine.request import (
    EngineConfig,
    FinishReason,
    OnEvent,
    QueueFullError,
    Request,
    Stats,
    UnavailableError,
)
from specprefill_jax.engine.runner import Runner
from specprefill_jax.engine.scheduler import Phase, Scheduler
from specprefill_jax.engine.scheduler import Sequence as Scheduled
from specprefill_jax.engine.sizes import cache_sizes
from specprefill_jax.engine.warm_up import warm_up
from specprefill_jax.engine.work import Work
from specprefill_jax.errors import ArgumentError, argument_error
from specprefill_jax.models.llama import FEW_ROWS
from specprefill_jax.models.paged import PAGE
from specprefill_jax.pipeline import SpecPrefill
from specprefill_jax.planning import Plan, Reason, most_checks, plan
from specprefill_jax.sharding.mesh import platform
from specprefill_jax.sharding.rules import DATA
from specprefill_jax.speculative import Acceptance, step_cost
from specprefill_jax.tokens import StreamDecoder, Tokenizer

ACCELERATOR_FEW_ROWS = 256
"""Tokens that a pass reads in about the time of one: some hundred multiplications take as long as reading a weight."""

State = Literal["loading", "ready", "draining", "stuck", "failed", "closed"]
Report = Callable[[str, int, int], None]
log = logging.getLogger(__name__)


class Engine:
    """Serves many requests with one main model and one speculator; see `from_pretrained` for the usual way."""

    def __init__(
        self,
        pair: SpecPrefill,
        config: EngineConfig | None = None,
        *,
        defaults: SpecPrefillConfig | None = None,
        model_name: str = "model",
        model_root: str | None = None,
    ):
        """Allocate the caches for a loaded pair.

        Args:
            pair: the two models.
            config: the engine's limits.
            defaults: how prompts are read unless a request says otherwise; requests may ask for another keep rate,
                mode, tail and so on, but only for this pool width, chunk size, query window and scoring heads, and for
                this look-ahead or 1, since everything else would have to be compiled.
            model_name: what clients call the main model.
            model_root: where it came from; None: its name.

        Raises:
            ArgumentError: limits that the models cannot meet.
        """
        self.config = config = config or EngineConfig()
        self.defaults = pair.selector.settle(defaults)
        self.model_name, self.model_root = model_name, model_root or model_name
        self.tokenizer: Tokenizer | None = pair.tokenizer
        self._pair = pair
        main, draft = pair.main, pair.speculator.model
        for mesh in (main.mesh, draft.mesh):
            if mesh is not None and mesh.shape[DATA] > 1:
                raise argument_error("mesh", dict(mesh.shape), f"a mesh whose axis {DATA!r} is 1: replicas share load")
        context = main.config.max_position_embeddings
        self.max_model_len = min(config.max_model_len or context, context)
        if config.max_model_len is not None and config.max_model_len > context:
            raise argument_error("max_model_len", config.max_model_len, f"at most the main model's context, {context}")
        window = self.defaults.query_window
        self._look_aheads = (1, 1 if window else self.defaults.look_ahead or pair.default_look_ahead)
        if self._look_aheads[1] > PAGE:
            raise argument_error("look_ahead", self._look_aheads[1], f"at most {PAGE} in the engine")
        tokens, draft_tokens = cache_sizes(main, draft, config, self.max_model_len)
        pages, draft_pages = (-(-count // PAGE) + 1 for count in (tokens, draft_tokens))
        self._runner = Runner(
            main,
            pair.speculator,
            pair.selector.self_check,
            kernels=pair.kernels,
            max_running=config.max_running,
            chunk=config.prefill_chunk,
            max_model_len=self.max_model_len,
            num_pages=pages,
            num_draft_pages=draft_pages,
            window=window,
            heads=pair.selector.check_heads(self.defaults),
            draft_tokens=config.draft_tokens,
        )
        self._step_cost = step_cost(main, draft)
        share = costs.weight_bytes(draft.config, 1.0) / costs.weight_bytes(main.config, 1.0)
        self._pages = BlockManager(pages)
        self._draft_pages = BlockManager(draft_pages)
        self._scheduler = Scheduler(
            self._pages,
            self._draft_pages,
            max_running=config.max_running,
            chunk=config.prefill_chunk,
            draft_cost=share,
            window=window,
            cheap_tokens=FEW_ROWS if platform(main.mesh) == "cpu" else ACCELERATOR_FEW_ROWS,
        )
        self._loop = Loop(
            self._runner,
            self._scheduler,
            self._plan,
            pair.selector.adapt,
            memoised_selections=config.memoised_selections,
            begun=self._begun,
            ended=self._ended,
        )
        self._lock = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._live: dict[str, int] = {}
        """Under the lock: requests that are not finished, and of those of which nothing was read, the prompt tokens."""
        self._state: State = "loading"
        self._compiled_before = 0
        self._thread: threading.Thread | None = None

    @classmethod
    def from_pretrained(
        cls,
        main: str | os.PathLike[str],
        speculator: str | os.PathLike[str],
        *,
        dtype: str = "bfloat16",
        mesh: Mesh | None = None,
        speculator_mesh: Mesh | None = None,
        speculator_layers: int | None = None,
        kernels: str | None = None,
        card: PairCard | str | os.PathLike[str] | None = None,
        config: EngineConfig | None = None,
        defaults: SpecPrefillConfig | None = None,
        model_name: str | None = None,
        report: Report | None = None,
    ) -> Self:
        """Load a pair of models and compile everything; `start` then begins to serve.

        Args:
            main, speculator, dtype, mesh, speculator_mesh, speculator_layers, kernels, card: see
                `SpecPrefill.from_pretrained`.
            config: the engine's limits.
            defaults: how prompts are read unless a request says otherwise.
            model_name: what clients call the main model; None: the last part of `main`.
            report: called with a phase ("load", "warm up"), how much of it is done, and of how much.
        """
        report = report or (lambda phase, done, total: None)
        report("load", 0, 1)
        pair = SpecPrefill.from_pretrained(
            main,
            speculator,
            dtype,
            mesh,
            speculator_mesh=speculator_mesh,
            speculator_layers=speculator_layers,
            kernels=kernels,
            card=card,
        )
        _ = pair.predictor.rates  # measured before anything runs beside it, for the requests with a `ttft_budget_ms`
        report("load", 1, 1)
        root = os.fspath(main)
        name = model_name or os.path.basename(root.rstrip("/")) or root
        engine = cls(pair, config, defaults=defaults, model_name=name, model_root=root)
        engine.warm_up(partial(report, "warm up"))
        return engine

    # what any thread may call

    @property
    def state(self) -> State:
        """ "loading", "ready", "draining", "stuck" (a device step takes too long), "failed" or "closed"."""
        since = self._loop.busy_since
        stuck = since is not None and time.monotonic() - since > self.config.stuck_after
        return "stuck" if stuck and self._state in ("ready", "draining") else self._state

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._pair.main.config.vocab_size

    @property
    def cache_tokens(self) -> int:
        """Tokens that the main model's cache holds, of all requests together."""
        return (self._runner.num_pages - 1) * PAGE

    def warm_up(self, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile all programs, before `start`; called with (programs compiled, in all)."""
        width, size = self.defaults.pool_width or 0, self.defaults.chunk_size
        warm_up(self._runner, self._look_aheads, width, size, report)
        self._compiled_before = _compiled()

    def start(self) -> None:
        """Begin to serve."""
        with self._lock:
            self._state = "ready"
        self._compiled_before = self._compiled_before or _compiled()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Take a request on; `on_event` then hears of it until `Finished`.

        Raises:
            ArgumentError: a request that is wrong, or that could never fit.
            QueueFullError: too many are waiting.
            UnavailableError: the engine is not serving.
        """
        work = self._work(request, on_event)
        tokens = work.sequence.num_tokens
        with self._lock:
            if self.state != "ready":
                raise UnavailableError(f"the engine is {self.state}: it takes no requests")
            if request.request_id in self._live:
                raise argument_error("request_id", request.request_id, "one that no unfinished request has")
            waiting = [count for count in self._live.values() if count]
            limits = self.config
            if len(waiting) >= limits.max_queued_requests or (
                waiting and sum(waiting) + tokens > limits.max_queued_tokens
            ):
                raise QueueFullError(
                    f"the queue is full: {len(waiting)} requests with {sum(waiting)} prompt tokens are waiting (at "
                    f"most {limits.max_queued_requests} and {limits.max_queued_tokens}); this one has {tokens}",
                    min(max(sum(waiting) / self._loop.rate, 1.0), 60.0) if self._loop.rate else 5.0,
                )
            self._live[request.request_id] = tokens
            self._command(partial(self._loop.admit, work))

    def cancel(self, request_id: str) -> None:
        """End a request as soon as the round that runs is over; one that is unknown or finished is left alone."""

        def end() -> None:
            work = self._loop.works.get(request_id)
            if work is not None:
                self._loop.finish(work, "abort")

        with self._lock:
            if request_id in self._live:
                self._command(end)

    def stats(self) -> Stats:
        """The state at this moment; it may be torn by a round, but each number is right."""
        phases = [work.sequence.phase for work in list(self._loop.works.values())]
        with self._lock:
            waiting = [count for count in self._live.values() if count]
        running = phases.count(Phase.DECODE)
        compiles = _compiled() - self._compiled_before if self._state != "loading" else 0
        return Stats(
            running=running,
            prefilling=max(len(self._live) - len(waiting) - running, 0),
            waiting=len(waiting),
            waiting_tokens=sum(waiting),
            cache_usage=self._pages.usage,
            speculator_cache_usage=self._draft_pages.usage,
            compiles_after_warm_up=compiles,
            **self._loop.counters,
        )

    def drain(self, deadline: float) -> bool:
        """Refuse new requests, finish those there are within `deadline` seconds, cancel the rest.

        Returns whether all finished by themselves.
        """
        with self._lock:
            if self._state == "ready":
                self._state = "draining"
            done = self._lock.wait_for(lambda: not self._live or self._state in ("failed", "closed"), deadline)
            left = list(self._live)
        for request_id in left:
            self.cancel(request_id)
        with self._lock:
            self._lock.wait_for(lambda: not self._live or self._state in ("failed", "closed"), 10.0)
        return done

    def close(self) -> None:
        """End everything at once; requests that are not finished end with "abort"."""
        with self._lock:
            if self._state not in ("failed", "closed"):
                self._state = "closed"
            self._lock.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=self.config.stuck_after)

    # a request's beginning

    def _work(self, request: Request, on_event: OnEvent) -> Work:
        """Check a request; any thread."""
        request = replace(request, config=self._pair.selector.settle(request.config))
        sampling, config = request.sampling, request.config
        prompt = np.array(self._pair.encode(request.prompt), np.int32)
        tokens = len(prompt)
        if tokens >= self.max_model_len:
            raise ArgumentError(
                f"prompt of {tokens} tokens is not allowed: prompt must be shorter than the context of "
                f"{self.max_model_len} tokens, to leave room for an answer"
            )
        if sampling.stop and self.tokenizer is None:
            raise ArgumentError("stop as text is not allowed: the model has no tokenizer, so give stop_token_ids")
        for name in ("pool_width", "chunk_size", "query_window", "scoring_heads"):
            served = getattr(self.defaults, name)
            if getattr(config, name) != served:
                raise argument_error(name, getattr(config, name), f"{served}, which this engine was started with")
        look_ahead = config.look_ahead or self._look_aheads[1]
        if look_ahead not in self._look_aheads:
            allowed = " or ".join(map(str, dict.fromkeys(self._look_aheads)))
            raise argument_error("look_ahead", look_ahead, f"{allowed}: what this engine was started with")
        ends = self._pair.selector.ends(config)
        planned = self._plan(request, tokens, look_ahead, 0)
        detail = None
        draft = self._runner.draft
        room = min(draft.config.max_position_embeddings, (self._runner.num_draft_pages - 1) * PAGE - look_ahead + 1)
        if planned.engaged and tokens > room:
            detail = f"the speculator has room for {room} tokens, not for {tokens}"
            if config.mode == "paper":
                raise ArgumentError(f"prompt of {tokens} tokens is not allowed: {detail}")
            planned = planned.read_whole(Reason.SPECULATOR_FAILED)
        limit = min(sampling.max_tokens, self.max_model_len - tokens)
        self._check_room(planned.max_kept_tokens, limit)
        sequence = Scheduled(
            request.request_id,
            prompt,
            limit,
            look_ahead if planned.engaged else 0,
            planned.max_kept_tokens,
            share=request.prompt_logprobs is None,
        )
        most = self.config.draft_tokens
        if request.draft_tokens is not None:
            most = min(most, check_integer("draft_tokens", request.draft_tokens, 0))
        acceptance = Acceptance(most, self._step_cost)
        sequence.draft_tokens = acceptance.next_count()
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops.update(self._pair.main.config.eos_token_ids)
        queries = None if config.query_window else look_ahead
        work = Work(
            replace(request, config=replace(config, look_ahead=queries, eos_token_ids=ends)),
            on_event,
            planned,
            sequence,
            StreamDecoder(self.tokenizer, sampling.stop) if self.tokenizer else None,
            frozenset(stops),
            secrets.randbits(64) if sampling.seed is None else sampling.seed,
            acceptance,
        )
        if not planned.engaged:
            work.read_whole(planned, detail)
        return work

    def _plan(self, request: Request, tokens: int, look_ahead: int, cached: int) -> Plan:
        more = {"query_window": request.config.query_window, "checks": most_checks(request.config, look_ahead)}

        def gain(kept: int) -> float:
            return self._pair.predictor.gain(tokens, look_ahead, kept, cached, **more)

        return plan(
            tokens,
            request.config,
            generation_tail=request.generation_tail,
            needs_prompt_logprobs=request.prompt_logprobs is not None,
            predicted_gain=gain,
            prediction=partial(self._pair.predictor.phases, tokens, look_ahead, **more),
        )

    def _check_room(self, kept: int, limit: int) -> None:
        need, there = -(-(kept + limit) // PAGE), self._runner.num_pages - 1
        if need > there:
            raise ArgumentError(
                f"a request of {kept} tokens to read and up to {limit} to generate is not allowed: it needs {need} "
                f"pages of {PAGE} tokens, and the cache has {there}"
            )

    # the engine's thread

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    self._lock.wait_for(lambda: self._commands or self._loop.works or self._state == "closed")
                    if self._state == "closed":
                        break
                    commands = list(self._commands)
                    self._commands.clear()
                for command in commands:
                    command()
                if not self._loop.round():
                    with self._lock:  # a fault of the scheduler, but never a spinning thread
                        self._lock.wait_for(lambda: self._commands or self._state == "closed", 0.05)
        except BaseException as error:  # whatever it is, nobody may wait for ever
            log.exception("the engine failed")
            self._state = "failed"
            self._end_all("error", f"the engine failed: {type(error).__name__}: {error}")
        else:
            self._end_all("abort")

    def _end_all(self, reason: FinishReason, error: str | None = None) -> None:
        with self._lock:
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:  # what was submitted must hear of its end, too
            command()
        self._loop.end_all(reason, error)

    def _begun(self, request_id: str) -> None:
        with self._lock:
            self._live[request_id] = 0

    def _ended(self, request_id: str) -> None:
        with self._lock:
            self._live.pop(request_id, None)
            self._lock.notify_all()

    def _command(self, command: Callable[[], None]) -> None:
        """Have the engine's thread run this; the lock is held."""
        self._commands.append(command)
        self._lock.notify_all()


_compilations = 0


def _count_compilation(event: str, duration_secs: float, **_: Any) -> None:
    global _compilations
    if event == "/jax/core/compile/backend_compile_duration":
        _compilations += 1


def _compiled() -> int:
    """Programs compiled in this process since this module was imported."""
    return _compilations


jax.monitoring.register_event_duration_secs_listener(_count_compilation)
