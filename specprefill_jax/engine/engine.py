"""The engine: requests come in from any thread, one thread of its own drives the models, events go out.

A round is enqueued before the results of the one before it are read, so that devices never wait for Python. Where
enqueuing takes as long as running (layerwise models, on CPUs), results are read at once instead.
"""

import hashlib
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, Self

import jax
import numpy as np
from jax.sharding import Mesh

from specprefill_jax import costs
from specprefill_jax.config import SpecPrefillConfig
from specprefill_jax.decode import TokenLogprobs
from specprefill_jax.engine.blocks import BlockManager
from specprefill_jax.engine.request import (
    Delta,
    EngineConfig,
    Finished,
    FinishReason,
    OnEvent,
    QueueFullError,
    Request,
    Stats,
    UnavailableError,
)
from specprefill_jax.engine.runner import Batch, Chosen, Runner
from specprefill_jax.engine.scheduler import LookAhead, Phase, Piece, Prefill, Scheduler, Speculate
from specprefill_jax.engine.scheduler import Sequence as Scheduled
from specprefill_jax.engine.sizes import cache_sizes
from specprefill_jax.errors import ArgumentError, SpecPrefillError, argument_error
from specprefill_jax.models.loaded import Step
from specprefill_jax.models.paged import PAGE
from specprefill_jax.pipeline import SpecPrefill
from specprefill_jax.sampling import SamplingArrays
from specprefill_jax.selection import Plan, Reason, Selection, plan
from specprefill_jax.sharding.rules import DATA
from specprefill_jax.tokens import StreamDecoder, Tokenizer

State = Literal["loading", "ready", "draining", "stuck", "failed", "closed"]
Report = Callable[[str, int, int], None]
log = logging.getLogger(__name__)


@dataclass(eq=False)
class _Work:
    """A request on its way, beside what the scheduler knows of it."""

    request: Request
    on_event: OnEvent
    plan: Plan
    sequence: Scheduled
    text: StreamDecoder | None
    ends: frozenset[int]
    seed: int
    selection: Selection | None = None
    kept: np.ndarray | None = None
    """int32 indices of the prompt tokens that the main model reads; None until they are known."""
    step: Step | None = None
    """What the last piece of speculation left."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    has_prompt_logprobs: bool = False
    begun: bool = False
    followers: list["_Work"] = field(default_factory=list)
    """Requests that wait for this one's selection, which will be theirs, too."""

    @property
    def key(self) -> tuple:
        """What a selection depends on."""
        digest = hashlib.blake2b(self.sequence.prompt.tobytes(), digest_size=16).digest()
        return digest, self.request.config, self.request.generation_tail


@dataclass(frozen=True)
class _Pending:
    """Results on their way to the host, whose they are, and what is done with them there."""

    works: Sequence[_Work]
    receive: Callable[[], None]
    decoding: bool = False


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
                mode, tail and so on, but only for this pool width and chunk size, and for this look-ahead or 1, since
                everything else would have to be compiled.
            model_name: what clients call the main model.
            model_root: where it came from; None: its name.

        Raises:
            ArgumentError: limits that the models cannot meet.
        """
        self.config = config = config or EngineConfig()
        self.defaults = defaults or SpecPrefillConfig()
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
        self._look_aheads = (1, self.defaults.look_ahead or pair.default_look_ahead)
        if self._look_aheads[1] > PAGE:
            raise argument_error("look_ahead", self._look_aheads[1], f"at most {PAGE} in the engine")
        tokens, draft_tokens = cache_sizes(main, draft, config, self.max_model_len)
        pages, draft_pages = (-(-count // PAGE) + 1 for count in (tokens, draft_tokens))
        self._runner = Runner(
            main,
            pair.speculator,
            kernels=pair.kernels,
            max_running=config.max_running,
            chunk=config.prefill_chunk,
            max_model_len=self.max_model_len,
            num_pages=pages,
            num_draft_pages=draft_pages,
        )
        share = costs.weight_bytes(draft.config, 1.0) / costs.weight_bytes(main.config, 1.0)
        self._pages = BlockManager(pages)
        self._draft_pages = BlockManager(draft_pages)
        self._scheduler = Scheduler(
            self._pages,
            self._draft_pages,
            max_running=config.max_running,
            chunk=config.prefill_chunk,
            draft_cost=share,
        )
        self._works: dict[str, _Work] = {}
        self._selections: OrderedDict[tuple, Selection] = OrderedDict()
        self._selecting: dict[tuple, _Work] = {}
        self._pending: list[_Pending] = []
        self._lock = threading.Condition()
        self._commands: deque[Callable[[], None]] = deque()
        self._live: dict[str, int] = {}
        """Under the lock: requests that are not finished, and of those of which nothing was read, the prompt tokens."""
        self._state: State = "loading"
        self._stuck = False
        self._busy_since: float | None = None
        self._counters = dict.fromkeys(
            (
                "prompt_tokens",
                "kept_tokens",
                "cached_tokens",
                "generation_tokens",
                "preemptions",
                "memoised_selections",
            ),
            0,
        )
        self._compiled_before = 0
        self._rate = 0.0
        self._threads: list[threading.Thread] = []

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
        config: EngineConfig | None = None,
        defaults: SpecPrefillConfig | None = None,
        model_name: str | None = None,
        report: Report | None = None,
    ) -> Self:
        """Load a pair of models and compile everything; `start` then begins to serve.

        Args:
            main, speculator, dtype, mesh, speculator_mesh, speculator_layers, kernels: see
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
        )
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
        return "stuck" if self._stuck and self._state in ("ready", "draining") else self._state

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._pair.main.config.vocab_size

    def warm_up(self, report: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compile all programs, before `start`; called with (programs compiled, in all)."""
        width, size = self.defaults.pool_width or 0, self.defaults.chunk_size
        self._runner.warm_up(self._look_aheads, width, size, report)
        self._compiled_before = _compiled()

    def start(self) -> None:
        """Begin to serve."""
        with self._lock:
            self._state = "ready"
        self._compiled_before = self._compiled_before or _compiled()
        for target, name in ((self._run, "engine"), (self._watch, "engine-watchdog")):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

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
            if self._state != "ready" or self._stuck:
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
                    min(max(sum(waiting) / self._rate, 1.0), 60.0) if self._rate else 5.0,
                )
            self._live[request.request_id] = tokens
            self._command(partial(self._admit, work))

    def cancel(self, request_id: str) -> None:
        """End a request as soon as the round that runs is over; one that is unknown or finished is left alone."""

        def end() -> None:
            work = self._works.get(request_id)
            if work is not None:
                self._finish(work, "abort")

        with self._lock:
            if request_id in self._live:
                self._command(end)

    def stats(self) -> Stats:
        """The state at this moment; it may be torn by a round, but each number is right."""
        phases = [work.sequence.phase for work in list(self._works.values())]
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
            **self._counters,
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
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=self.config.stuck_after)
        self._threads.clear()

    # a request's beginning

    def _work(self, request: Request, on_event: OnEvent) -> _Work:
        """Check a request; any thread."""
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
        for name in ("pool_width", "chunk_size"):
            served = getattr(self.defaults, name)
            if getattr(config, name) != served:
                raise argument_error(name, getattr(config, name), f"{served}, which this engine was started with")
        look_ahead = config.look_ahead or self._look_aheads[1]
        if look_ahead not in self._look_aheads:
            allowed = " or ".join(map(str, dict.fromkeys(self._look_aheads)))
            raise argument_error("look_ahead", look_ahead, f"{allowed}: what this engine was started with")
        ends = self._pair.look_ahead_ends(config)
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
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops.update(self._pair.main.config.eos_token_ids)
        work = _Work(
            replace(request, config=replace(config, eos_token_ids=ends)),
            on_event,
            planned,
            sequence,
            StreamDecoder(self.tokenizer, sampling.stop) if self.tokenizer else None,
            frozenset(stops),
            secrets.randbits(64) if sampling.seed is None else sampling.seed,
        )
        if not planned.engaged:
            work.selection = Selection(planned, detail=detail)
        return work

    def _plan(self, request: Request, tokens: int, look_ahead: int, cached: int) -> Plan:
        def gain(kept: int) -> float:
            return self._pair.predicted_gain(tokens, look_ahead, kept, cached)

        return plan(
            tokens,
            request.config,
            generation_tail=request.generation_tail,
            needs_prompt_logprobs=request.prompt_logprobs is not None,
            predicted_gain=gain,
        )

    def _check_room(self, kept: int, limit: int) -> None:
        need, there = -(-(kept + limit) // PAGE), self._runner.num_pages - 1
        if need > there:
            raise ArgumentError(
                f"a request of {kept} tokens to read and up to {limit} to generate is not allowed: it needs {need} "
                f"pages of {PAGE} tokens, and the cache has {there}"
            )

    def _admit(self, work: _Work) -> None:
        """Take a checked request on; engine's thread, as everything below."""
        sequence = work.sequence
        self._works[sequence.request_id] = work
        work.request.clock.phase("queue")
        if sequence.look_ahead:
            cached = self._pages.count_published(sequence.hashes) * PAGE
            if cached and work.request.config.mode == "product":
                # What a dense read would find in the cache counts against speculation.
                planned = self._plan(work.request, sequence.num_tokens, sequence.look_ahead, cached)
                if not planned.engaged and self._fits_whole(sequence):
                    work.plan, work.selection = planned, Selection(planned)
                    sequence.look_ahead = 0
        if not sequence.look_ahead:
            self._read_whole(work)
            self._scheduler.add(sequence)
            return
        found = self._selections.get(work.key)
        if found is not None:
            self._selections.move_to_end(work.key)
            self._counters["memoised_selections"] += 1
            sequence.look_ahead = 0
            self._select(work, found)
            self._scheduler.add(sequence)
            return
        leader = self._selecting.setdefault(work.key, work)
        if leader is not work:
            leader.followers.append(work)
            return
        self._scheduler.add(sequence)

    def _fits_whole(self, sequence: Scheduled) -> bool:
        return -(-(sequence.num_tokens + sequence.max_tokens) // PAGE) < self._runner.num_pages

    def _read_whole(self, work: _Work) -> None:
        tokens = work.sequence.num_tokens
        work.kept = np.arange(tokens, dtype=np.int32)
        work.sequence.kept = work.sequence.dense = tokens

    def _select(self, work: _Work, selection: Selection) -> None:
        work.selection, work.plan = selection, selection.plan
        work.kept = kept = selection.kept_indices
        gaps = np.flatnonzero(kept != np.arange(len(kept)))
        work.sequence.kept, work.sequence.dense = len(kept), int(gaps[0]) if gaps.size else len(kept)

    # the loop

    def _run(self) -> None:
        try:
            while True:
                with self._lock:
                    self._lock.wait_for(lambda: self._commands or self._works or self._state == "closed")
                    if self._state == "closed":
                        break
                    commands = list(self._commands)
                    self._commands.clear()
                for command in commands:
                    command()
                self._round()
        except BaseException as error:  # whatever it is, nobody may wait for ever
            log.exception("the engine failed")
            self._state = "failed"
            self._end_all("error", f"the engine failed: {type(error).__name__}: {error}")
        else:
            self._end_all("abort", None)

    def _end_all(self, reason: FinishReason, error: str | None) -> None:
        with self._lock:
            commands = list(self._commands)
            self._commands.clear()
        for command in commands:  # what was submitted must hear of its end, too
            command()
        self._pending.clear()
        for work in list(self._works.values()):
            self._finish(work, reason, error)

    def _round(self) -> None:
        """Enqueue what the scheduler says, then receive the results of the round before."""
        planned = self._scheduler.schedule()
        self._counters["preemptions"] += len(planned.preempted)
        self._busy_since = time.monotonic()
        before, self._pending = self._pending, []
        if planned.decode:
            self._attempt([self._works[s.request_id] for s in planned.decode], self._decode, decoding=True)
        if planned.piece is not None:
            self._piece(planned.piece)
        for pending in before:
            self._receive(pending)
        self._busy_since, self._stuck = None, False
        if not before and not planned.decode and planned.piece is None and not self._pending:
            with self._lock:  # followers of nobody, or a fault of the scheduler: never a spinning thread
                self._lock.wait(0.05)

    def _piece(self, piece: Piece) -> None:
        if isinstance(piece, LookAhead):
            self._attempt([self._works[s.request_id] for s in piece.sequences], self._look_ahead)
            return
        work = self._works[piece.sequence.request_id]
        if not work.begun:
            work.begun = True
            work.request.clock.phase("speculate" if isinstance(piece, Speculate) else "main_prefill")
            with self._lock:
                self._live[work.request.request_id] = 0
        if isinstance(piece, Speculate):
            self._attempt([work], lambda works: self._speculate(works[0], piece))
        else:
            self._attempt([work], lambda works: self._prefill(works[0], piece))

    def _attempt(
        self, works: list[_Work], enqueue: Callable[[list[_Work]], _Pending | None], decoding: bool = False
    ) -> None:
        try:
            pending = enqueue(works)
        except Exception as error:
            self._failed(works, error, decoding)
            return
        if pending is None:
            return
        pending = replace(pending, decoding=decoding)
        if self._runner.eager:
            self._receive(pending)
        else:
            self._pending.append(pending)

    def _receive(self, pending: _Pending) -> None:
        try:
            pending.receive()
        except Exception as error:
            self._failed(pending.works, error, pending.decoding)

    def _failed(self, works: Sequence[_Work], error: Exception, decoding: bool) -> None:
        """A step for these requests failed: they alone, or one by one until the culprit is found, pay for it."""
        works = [work for work in works if work.sequence.phase is not Phase.DONE]
        log.error("a step for %s failed", [work.request.request_id for work in works], exc_info=error)
        lost = not self._runner.intact
        if lost:
            self._pending.clear()  # of programs that took the lost cache
            self._runner.reset()
        victims = []
        for work in works:
            detail = f"{type(error).__name__}: {error}"
            speculating = work.sequence.phase in (Phase.SPECULATE, Phase.LOOK_AHEAD, Phase.CHOOSING)
            if speculating and work.request.config.mode == "product" and self._fits_whole(work.sequence):
                self._fall_back(work, detail)
            elif decoding and len(works) > 1:
                work.sequence.suspect = True
                victims.append(work.sequence)
            else:
                what = "the speculator failed" if speculating else "the request failed"
                self._finish(work, "error", f"{what}: {detail}", publish=False)
        if lost:
            self._scheduler.start_over([work.sequence for work in self._works.values()])
        elif victims:
            self._scheduler.start_over(victims)

    def _fall_back(self, work: _Work, detail: str) -> None:
        """Read a prompt whole, from a clean state, since its speculation failed."""
        self._settle_followers(work, None)
        tokens = work.sequence.num_tokens
        work.plan = work.plan.read_whole(Reason.SPECULATOR_FAILED)
        work.selection = Selection(work.plan, detail=detail)
        self._read_whole(work)
        self._scheduler.chosen(work.sequence, tokens, tokens)
        work.step = None
        work.request.clock.phase("main_prefill")

    # the steps

    def _speculate(self, work: _Work, piece: Speculate) -> None:
        sequence = piece.sequence
        tokens = sequence.prompt[piece.start : piece.start + piece.count]
        step = self._runner.speculate(tokens, piece.start, sequence.draft_pages)
        if sequence.phase is Phase.LOOK_AHEAD:
            work.step = step
        if self._runner.eager:
            jax.block_until_ready(step.hidden)

    def _look_ahead(self, works: list[_Work]) -> _Pending:
        sequences = [work.sequence for work in works]
        ahead = self._runner.look_ahead(
            [work.step for work in works if work.step is not None],
            [sequence.num_tokens for sequence in sequences],
            [sequence.draft_pages for sequence in sequences],
            [work.request.config.eos_token_ids or () for work in works],
            sequences[0].look_ahead,
        )
        outputs = [
            self._runner.score(
                ahead,
                row,
                work.sequence.prompt,
                work.sequence.draft_pages,
                work.plan,
                work.request.config.pool_width or 0,
            )
            for row, work in enumerate(works)
        ]
        for work in works:
            work.step = None

        def receive() -> None:
            jax.block_until_ready(ahead.num_queries)
            for work in works:
                work.request.clock.phase("score")
            for work, output in zip(works, outputs, strict=True):
                if work.sequence.phase is Phase.CHOOSING:
                    self._choice(work, output)

        return _Pending(works, receive)

    def _choice(self, work: _Work, output: tuple) -> None:
        """The device has chosen; what the host is told of it is remembered, but for the importance of every token."""
        _, scores, choice, num_queries, tokens = jax.device_get(output)
        count = int(num_queries)
        selection = Selection(
            work.plan,
            choice=choice,
            chunk_scores=scores,
            num_queries=count,
            look_ahead_tokens=[int(token) for token in tokens[:count]],
        )
        try:
            selection.check()
        except SpecPrefillError as error:
            self._failed([work], error, decoding=False)
            return
        key = work.key
        self._selections[key] = selection
        if len(self._selections) > self.config.memoised_selections:
            self._selections.popitem(last=False)
        self._select(work, selection)
        self._scheduler.chosen(work.sequence, work.sequence.kept, work.sequence.dense)
        work.request.clock.phase("main_prefill")
        self._settle_followers(work, selection)

    def _settle_followers(self, work: _Work, selection: Selection | None) -> None:
        """Those who waited for this one's selection take it, or, where there is none, try for themselves."""
        if self._selecting.get(work.key) is work:
            del self._selecting[work.key]
        followers, work.followers = work.followers, []
        for follower in followers:
            if selection is not None:
                follower.sequence.look_ahead = 0
                self._counters["memoised_selections"] += 1
                self._select(follower, selection)
            else:
                leader = self._selecting.setdefault(follower.key, follower)
                if leader is not follower:
                    leader.followers.append(follower)
                    continue
            self._scheduler.add(follower.sequence)

    def _prefill(self, work: _Work, piece: Prefill) -> _Pending | None:
        sequence, runner, kept = work.sequence, self._runner, work.kept
        assert kept is not None
        end = piece.start + piece.count
        tokens, positions = sequence.prompt[kept], kept
        if sequence.generated:  # it was preempted
            more = np.asarray(sequence.generated, np.int32)
            tokens = np.concatenate([tokens, more])
            positions = np.concatenate([positions, sequence.num_tokens + np.arange(len(more), dtype=np.int32)])
        tokens, positions = tokens[piece.start : end], positions[piece.start : end]
        logprobs = None
        if work.request.prompt_logprobs is not None and not work.has_prompt_logprobs:
            following = sequence.prompt[piece.start + 1 : end + 1]
            hidden, logprobs = runner.prefill_with_logprobs(tokens, following, piece.start, sequence.pages)
        else:
            hidden = runner.prefill(tokens, positions, piece.start, sequence.pages)
        chosen = None
        if piece.is_last:
            if work.request.sampling.repetition_penalty != 1.0:
                assert sequence.row is not None
                known = np.concatenate([sequence.prompt, np.asarray(sequence.generated, np.int32)])
                runner.fill_seen(sequence.row, known)
            chosen = runner.choose(hidden, self._batch([work], 1))
        elif runner.eager:
            jax.block_until_ready(hidden)
        if chosen is None and logprobs is None:
            return None

        def receive() -> None:
            if logprobs is not None:
                self._receive_prompt_logprobs(work, piece, logprobs)
            if chosen is not None:
                jax.block_until_ready(hidden)
                if not sequence.generated:
                    work.request.clock.phase("first_token")
                self._receive_tokens([work], chosen)

        return _Pending([work], receive)

    def _decode(self, works: list[_Work]) -> _Pending:
        sequences, runner = [work.sequence for work in works], self._runner
        size = next(rows for rows in runner.rows if rows >= len(works))
        extra = size - len(works)
        positions = np.array([s.num_tokens + s.issued - 2 for s in sequences] + [0] * extra, np.int32)
        slots = np.array([s.done - 1 for s in sequences] + [0] * extra, np.int32)
        pages = [s.pages for s in sequences] + [[]] * extra
        chosen = runner.decode(self._batch(works, size), positions, slots, pages)
        return _Pending(works, lambda: self._receive_tokens(works, chosen))

    def _batch(self, works: Sequence[_Work], size: int) -> Batch:
        rows, extra = [self._row(work) for work in works], size - len(works)
        rows += [(self.config.max_running, 0.0, 0, 1.0, 0.0, 1.0, 0, 0, -1)] * extra
        row, temperature, top_k, top_p, min_p, penalty, seed, index, top_n = zip(*rows, strict=True)
        key = np.array([(s >> 32 & 0xFFFFFFFF, s & 0xFFFFFFFF) for s in seed], np.uint32)
        ints, floats = partial(np.asarray, dtype=np.int32), partial(np.asarray, dtype=np.float32)
        settings = SamplingArrays._make(
            (floats(temperature), ints(top_k), floats(top_p), floats(min_p), floats(penalty), key)
        )
        return Batch(ints(row), settings, ints(index), ints(top_n))

    def _row(self, work: _Work) -> tuple:
        sampling, sequence = work.request.sampling, work.sequence
        return (
            sequence.row,
            sampling.temperature,
            min(sampling.top_k, np.iinfo(np.int32).max),
            sampling.top_p,
            sampling.min_p,
            sampling.repetition_penalty,
            work.seed,
            sequence.issued - 1,
            -1 if sampling.logprobs is None else sampling.logprobs,
        )

    # results

    def _receive_tokens(self, works: Sequence[_Work], chosen: Chosen) -> None:
        wanted = any(work.request.sampling.logprobs is not None for work in works)
        tokens, logprobs = jax.device_get((chosen.tokens, chosen.logprobs if wanted else None))
        for row, work in enumerate(works):
            if work.sequence.phase is Phase.DONE:
                continue  # it ended with the token before, or was cancelled
            count = work.request.sampling.logprobs
            entry = None if count is None else _logprobs(logprobs, row, count)
            try:
                self._token(work, int(tokens[row]), entry)
            except Exception as error:  # of its text or its listener: no other's business
                self._failed([work], error, decoding=False)

    def _token(self, work: _Work, token: int, logprobs: TokenLogprobs | None) -> None:
        sequence = work.sequence
        sequence.generated.append(token)
        sequence.suspect = False
        self._counters["generation_tokens"] += 1
        clock = work.request.clock
        if len(sequence.generated) == 1:
            self._first_token(work)
            clock.count("first_token", 1)
        text = work.text.push(token) if work.text is not None else ""
        work.on_event(Delta(text, (token,), None if logprobs is None else (logprobs,)))
        clock.phase("decode", tokens=1 if len(sequence.generated) > 1 else 0)
        if token in work.ends or (work.text is not None and work.text.stopped):
            self._finish(work, "stop")
        elif len(sequence.generated) == sequence.max_tokens:
            self._finish(work, "length")

    def _first_token(self, work: _Work) -> None:
        sequence, clock = work.sequence, work.request.clock
        for name, count in (
            ("prompt_tokens", sequence.num_tokens),
            ("kept_tokens", sequence.kept),
            ("cached_tokens", sequence.cached),
        ):
            self._counters[name] += count
        if work.plan.engaged:
            clock.count("speculate", sequence.num_tokens)
        clock.count("main_prefill", sequence.kept - sequence.cached)
        timings = clock.timings()
        busy = timings.speculate + timings.score + timings.main_prefill
        if busy > 0:
            rate = sequence.num_tokens / busy
            self._rate = rate if not self._rate else 0.8 * self._rate + 0.2 * rate

    def _receive_prompt_logprobs(self, work: _Work, piece: Prefill, logprobs: Any) -> None:
        found, count = work.prompt_logprobs, work.request.prompt_logprobs
        assert count is not None
        if piece.start == 0 or found is None:
            found = work.prompt_logprobs = [None]
        host = jax.device_get(logprobs)
        missing = work.sequence.num_tokens - len(found)
        found += [_logprobs(host, row, count) for row in range(min(piece.count, missing))]
        work.has_prompt_logprobs = len(found) == work.sequence.num_tokens

    def _finish(self, work: _Work, reason: FinishReason, error: str | None = None, *, publish: bool = True) -> None:
        if work.sequence.phase is Phase.DONE:
            return
        self._settle_followers(work, None)
        leader = self._selecting.get(work.key)
        if leader is not None and work in leader.followers:
            leader.followers.remove(work)
        read = bool(work.sequence.generated)
        self._scheduler.finish(work.sequence, publish=publish)
        del self._works[work.request.request_id]
        with self._lock:
            self._live.pop(work.request.request_id, None)
            self._lock.notify_all()
        try:
            if work.text is not None and reason in ("stop", "length"):
                rest = work.text.flush()
                if rest:
                    work.on_event(Delta(rest, (), None))
            work.on_event(
                Finished(
                    reason,
                    work.sequence.num_tokens,
                    len(work.sequence.generated),
                    work.selection if read else None,
                    work.request.clock.stop(),
                    work.sequence.cached,
                    tuple(work.prompt_logprobs) if work.has_prompt_logprobs and work.prompt_logprobs else None,
                    work.sequence.preemptions,
                    error,
                )
            )
        except Exception:
            log.exception("a listener failed at the end of %s", work.request.request_id)

    def _command(self, command: Callable[[], None]) -> None:
        """Have the engine's thread run this; the lock is held."""
        self._commands.append(command)
        self._lock.notify_all()

    def _watch(self) -> None:
        """Say so when a device step does not end."""
        while self._state in ("ready", "draining"):
            since = self._busy_since
            if since is not None and time.monotonic() - since > self.config.stuck_after:
                if not self._stuck:
                    log.error("a device step has not ended within %g s", self.config.stuck_after)
                self._stuck = True
            time.sleep(min(0.5, self.config.stuck_after / 4))


def _logprobs(arrays: Any, row: int, count: int) -> TokenLogprobs:
    chosen, ids, values = arrays
    top = {int(i): float(value) for i, value in zip(ids[row, :count], values[row, :count], strict=True)}
    return TokenLogprobs(float(chosen[row]), top)


_compilations = 0


def _count_compilation(event: str, duration_secs: float, **_: Any) -> None:
    global _compilations
    if event == "/jax/core/compile/backend_compile_duration":
        _compilations += 1


def _compiled() -> int:
    """Programs compiled in this process since this module was imported."""
    return _compilations


jax.monitoring.register_event_duration_secs_listener(_count_compilation)
