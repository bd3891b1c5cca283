"""An engine without models: it answers by a script, at once or held, and fails or refuses when it is told to.

Tokens, stop strings, limits, selections and events are as the real one's; only what is said is made up.
"""

import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from small_tokenizers import byte_level
from tokenizers import AddedToken

from specprefill_jax.decode import TokenLogprobs
from specprefill_jax.engine.request import Delta, EngineConfig, Finished, OnEvent, QueueFullError, Request, Stats
from specprefill_jax.engine.request import UnavailableError as Unavailable
from specprefill_jax.errors import argument_error
from specprefill_jax.kernels.chunk_topk import Choice
from specprefill_jax.planning import plan
from specprefill_jax.selection import Selection
from specprefill_jax.timing import Timings
from specprefill_jax.tokens import StreamDecoder, Tokenizer

TEMPLATE = (
    "{% if tools %}<|begin|>tools {{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|begin|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}{{ suffix }}"
)
ANSWER = "hello, world: the 日本 boat is Ada's. 🙂 And so on, to the end"


def make_tokenizer() -> Tokenizer:
    return Tokenizer(
        byte_level([AddedToken("«tool»", special=False)]),
        special_tokens={"eos_token": "<|end|>"},
        chat_templates={"default": TEMPLATE},
        source="fake-tokenizer",
    )


@dataclass
class _Job:
    request: Request
    on_event: OnEvent
    cancelled: threading.Event = field(default_factory=threading.Event)


class FakeEngine:
    """One thread that answers request by request. Everything below `knobs` may be set by a test; `reset` undoes it."""

    def __init__(self, tokenizer: Tokenizer | None = None, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig(max_queued_requests=64)
        self.tokenizer = tokenizer
        self.model_name = "fake"
        self.model_root = "root/of/fake"
        self.vocab_size = 300
        self.max_model_len = 4096
        self.cache_tokens = 65_536
        self.done = Stats(1, 2, 3, 40, 0.25, 0.5, 100, 60, 20, 50, 4, 5, 6, 8, 30, 21)
        self._jobs: deque[_Job] = deque()
        self._live: dict[str, _Job] = {}
        self._change = threading.Condition()
        self.reset()
        threading.Thread(target=self._run, daemon=True).start()

    def reset(self) -> None:
        # knobs
        self.state = "ready"
        self.answer = ANSWER
        self.gate = threading.Event()  # no token comes before it is set
        self.gate.set()
        self.tokens_before_gate = 0
        self.refusal: Exception | None = None
        self.fails_after: int | None = None  # tokens until the request fails
        self.fails = ""  # the end of its id, if not every request shall fail
        self.crashes = False  # submit raises what nobody expects
        # what a test may look at
        self.submitted: list[Request] = []
        self.cancelled: list[str] = []
        self.ended: list[tuple[str, str]] = []

    # The engine's face.

    def submit(self, request: Request, on_event: OnEvent) -> None:
        if self.crashes:
            raise RuntimeError("a secret path")
        if self.refusal is not None:
            raise self.refusal
        if self.state != "ready":
            raise Unavailable(f"the engine is {self.state}")
        if len(request.prompt) + request.sampling.max_tokens > self.max_model_len:
            raise argument_error("prompt", len(request.prompt), "shorter")
        plan(
            len(request.prompt),
            request.config,
            generation_tail=request.generation_tail,
            needs_prompt_logprobs=request.prompt_logprobs is not None,
        )
        with self._change:
            if len(self._live) >= self.config.max_queued_requests:
                raise QueueFullError("the queue is full", 1.5)
            assert request.request_id not in self._live
            job = _Job(request, on_event)
            self.submitted.append(request)
            self._live[request.request_id] = job
            self._jobs.append(job)
            self._change.notify_all()

    def cancel(self, request_id: str) -> None:
        with self._change:
            if request_id in self._live and not self._live[request_id].cancelled.is_set():
                self.cancelled.append(request_id)
                self._live[request_id].cancelled.set()
                self._change.notify_all()

    def stats(self) -> Stats:
        return self.done

    def drain(self, deadline: float) -> bool:
        self.state = "draining"
        with self._change:
            done = self._change.wait_for(lambda: not self._live, deadline)
            for job in self._live.values():
                job.cancelled.set()
        return done

    def close(self) -> None:
        self.state = "closed"

    # For tests.

    def wait(self, what, timeout: float = 20.0) -> None:
        """Wait until `what()` is true."""
        with self._change:
            assert self._change.wait_for(what, timeout)

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._jobs)
                job = self._jobs.popleft()
            end = self._answer(job)
            with self._change:
                del self._live[job.request.request_id]
                self.ended.append((job.request.request_id, end.finish_reason))
                self._change.notify_all()
            job.on_event(end)

    def _answer(self, job: _Job) -> Finished:
        request, sampling = job.request, job.request.sampling
        job.request.clock.phase("queue")
        selection = select(request)
        job.request.clock.phase("speculate")
        job.request.clock.phase("main_prefill")
        job.request.clock.phase("first_token")
        ids = self.tokenizer.encode(self.answer) if self.tokenizer else list(range(5, 40))
        end_id = self.tokenizer.eos_token_ids[0] if self.tokenizer else 2
        if sampling.seed:
            ids = ids[sampling.seed % 7 :]
        ids = (ids * 100 if sampling.ignore_eos else [*ids, end_id])[: sampling.max_tokens]
        decoder = StreamDecoder(self.tokenizer, sampling.stop) if self.tokenizer else None
        made, reason = 0, "length"
        for index in ids:
            if made == self.fails_after and request.request_id.endswith(self.fails):
                return self._end(request, "error", made, None, error="a secret path")
            if made >= self.tokens_before_gate:
                while not self.gate.wait(0.005) and not job.cancelled.is_set():
                    pass
            if job.cancelled.is_set():
                return self._end(request, "abort", made, None)
            made += 1
            ended = index == end_id or index in sampling.stop_token_ids
            text = decoder.push(index) if decoder and not ended else ""
            job.on_event(Delta(text, (index,), self._logprobs(index, sampling.logprobs)))
            if made == 1:
                request.clock.phase("decode")
            if ended or (decoder and decoder.stopped):
                reason = "stop"
                break
        if decoder and (rest := decoder.flush()):
            job.on_event(Delta(rest, (), None))
        seen = None
        if request.prompt_logprobs is not None:
            each = [self._logprobs(int(index), request.prompt_logprobs)[0] for index in request.prompt[1:]]
            seen = (None, *each)
        return self._end(request, reason, made, selection, seen)

    @staticmethod
    def _logprobs(index: int, most: int | None):
        """The token's own is -id/100; the likeliest are it, and the ids that follow it with twice, thrice as much."""
        if most is None:
            return None
        top = {index + step: -(index / 100) * (step + 1) for step in range(most)}
        return (TokenLogprobs(-index / 100, top),)

    @staticmethod
    def _end(request, reason, made, selection, prompt_logprobs=None, error=None) -> Finished:
        timings = request.clock.stop()
        assert isinstance(timings, Timings)
        cached = 7 if selection is not None else 0
        return Finished(reason, len(request.prompt), made, selection, timings, cached, prompt_logprobs, 0, error, 12, 9)


def select(request: Request) -> Selection:
    """What must be kept, and as many of the first chunks as the budget has room for."""
    chosen = plan(
        len(request.prompt),
        request.config,
        generation_tail=request.generation_tail,
        needs_prompt_logprobs=request.prompt_logprobs is not None,
        predicted_gain=2.5,
    )
    if not chosen.engaged:
        return Selection(chosen)
    mask = chosen.forced_mask()
    mask[np.flatnonzero(~mask)[: chosen.kept_chunks - mask.sum()]] = True
    kept = np.flatnonzero(np.repeat(mask, chosen.chunk_size)[: chosen.num_tokens]).astype(np.int32)
    chunks = np.flatnonzero(mask).astype(np.int32)
    choice = Choice(chunks, mask, kept, request.prompt[kept], np.int32(len(kept)), np.bool_(True))
    return Selection(chosen, choice=choice, prompt=request.prompt)
