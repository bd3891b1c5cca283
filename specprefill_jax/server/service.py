"""What the routes share: the engine once there is one, the settings, a few threads for tokenising, the metrics."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from specprefill_jax.config import SpecPrefillConfig, check_integer, check_real
from specprefill_jax.engine.request import EngineConfig, OnEvent, Request, Stats
from specprefill_jax.errors import argument_error
from specprefill_jax.server.errors import ApiError, unavailable
from specprefill_jax.server.metrics import Metrics
from specprefill_jax.tokens import Tokenizer


class EngineLike(Protocol):
    """What the server asks of an engine. Every method may be called from any thread."""

    @property
    def config(self) -> EngineConfig:
        """Its limits."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None for a model that knows ids alone."""

    @property
    def model_name(self) -> str:
        """The id under which the model is served."""

    @property
    def model_root(self) -> str:
        """The path or name that it was loaded from."""

    @property
    def vocab_size(self) -> int:
        """Ids are below it."""

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""

    @property
    def cache_tokens(self) -> int:
        """Tokens that the main model's cache holds, of all requests together."""

    @property
    def state(self) -> str:
        """One of "loading", "ready", "draining", "stuck", "failed" and "closed"."""

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Take a request; raises ArgumentError, QueueFullError or UnavailableError."""

    def cancel(self, request_id: str) -> None:
        """End a request soon, if it has not ended."""

    def stats(self) -> Stats:
        """The state at this moment."""


@dataclass(frozen=True)
class ServerSettings:
    """What an operator sets. A value that is not allowed raises `errors.ArgumentError`."""

    api_keys: tuple[str, ...] = ()
    """Any of these opens the API; without one it is open to all who can reach it."""

    model_name: str | None = None
    """The model's id in requests and answers; None: the engine's."""

    max_body_bytes: int = 1 << 24
    """Longer request bodies are refused."""

    keep_alive_seconds: float = 15.0
    """A stream that has nothing to say for so long sends a comment, so that no proxy takes it for dead."""

    tokenise_threads: int = 2
    """Threads that parse, render and tokenise."""

    defaults: SpecPrefillConfig = field(default_factory=SpecPrefillConfig)
    """How prompts are read where a request does not say."""

    def __post_init__(self) -> None:
        for key in self.api_keys:
            if not key or not key.isascii() or not key.isprintable() or key != key.strip():
                raise argument_error("api_keys", "(hidden)", "printable ASCII that neither starts nor ends with spaces")
        check_integer("max_body_bytes", self.max_body_bytes, 1024)
        check_integer("tokenise_threads", self.tokenise_threads, 1)
        check_real("keep_alive_seconds", self.keep_alive_seconds, "a finite number above 0", lambda x: x > 0)


class Service:
    """The engine and everything around it that outlives one request."""

    def __init__(self, settings: ServerSettings) -> None:
        """Serve nothing until `attach`."""
        self.settings = settings
        self.engine: EngineLike | None = None
        self.draining = False
        """Set as soon as the process is asked to end; the engine may not know yet."""
        self.metrics = Metrics()
        self._pool = ThreadPoolExecutor(settings.tokenise_threads, "tokenise")
        self._preparing = 0

    def attach(self, engine: EngineLike) -> None:
        """Serve `engine` from now on; called once."""
        self.metrics.attach(engine, self.name_of(engine))
        self.engine = engine

    def close(self) -> None:
        """Give up what has not begun to be tokenised, and the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def name_of(self, engine: EngineLike) -> str:
        """The model's id for clients."""
        return self.settings.model_name or engine.model_name

    @property
    def state(self) -> str:
        """The engine's, "loading" before there is one and "draining" once the process has been asked to end."""
        if self.draining:
            return "draining"
        return "loading" if self.engine is None else self.engine.state

    def ready(self) -> EngineLike:
        """The engine; raises ApiError 503 unless it takes requests."""
        if self.engine is None or self.state != "ready":
            raise unavailable(self.state)
        return self.engine

    def named(self, model: str | None) -> EngineLike:
        """The engine; raises ApiError 503 unless it takes requests, and 404 for another model's name."""
        engine = self.ready()
        if model is not None and model != self.name_of(engine):
            message = f"model={model[:100]!r} is not served here: it must be {self.name_of(engine)!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return engine

    async def in_thread[*Arguments, T](self, function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
        """Call `function` off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    @contextlib.contextmanager
    def admission(self) -> Iterator[None]:
        """Count a request while it is tokenised, which the engine cannot; raises ApiError 429 for too many."""
        most = self.ready().config.max_queued_requests
        if self._preparing >= most:
            message = f"{self._preparing} requests wait to be tokenised, at most {most} may"
            raise ApiError(429, message, code="queue_full", retry_after=1.0)
        self._preparing += 1
        try:
            yield
        finally:
            self._preparing -= 1
