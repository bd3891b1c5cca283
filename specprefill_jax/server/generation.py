"""One HTTP request at the engine: its prompts submitted, their events brought to the event loop, cancelled when the
client goes."""

import asyncio
import contextlib
import copy
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from starlette.types import Receive

from specprefill_jax.decode import TokenLogprobs
from specprefill_jax.engine.request import Delta, Event, Finished, OnEvent, Request
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.server.errors import ApiError, internal, refused
from specprefill_jax.server.service import EngineLike

log = logging.getLogger("specprefill_jax.server")


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


@dataclass
class Answer:
    """All that came for one request of the engine."""

    end: Finished
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Gathered:
    """Deltas put together until the end."""

    def __init__(self) -> None:
        """Nothing has come yet."""
        self._texts: list[str] = []
        self._ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    def add(self, delta: Delta) -> None:
        """Take the next piece."""
        self._texts.append(delta.text)
        self._ids += delta.token_ids
        self._logprobs += delta.logprobs or ()

    def answer(self, end: Finished) -> Answer:
        """The whole."""
        return Answer(end, "".join(self._texts), self._ids, self._logprobs)


class Generation:
    """The engine's requests behind one HTTP request, numbered from 0.

    Construct it on the event loop. `close` must follow whatever happens: it cancels what has not ended.
    """

    def __init__(self, engine: EngineLike, watch: Callable[[Request], OnEvent]) -> None:
        """Use `engine`; what `watch` returns for a request sees its events first, in the engine's thread."""
        self._engine = engine
        self._watch = watch
        self._loop = asyncio.get_running_loop()
        self._pending: deque[tuple[int, Event]] = deque()
        self._news = asyncio.Event()
        self._open: dict[int, str] = {}
        self._gone = False
        self._closed = False

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand all of them to the engine, or none; called in a thread. Raises ApiError where one is refused."""
        for index, request in enumerate(requests):
            try:
                self._open[index] = request.request_id
                self._engine.submit(request, self._taker(index, self._watch(request)))
            except SpecPrefillError as error:
                del self._open[index]
                self.close()
                raise refused(error) from None
            except BaseException:
                self.close()
                raise
        if self._closed:  # the client's connection was torn down meanwhile
            self.close()

    def _taker(self, index: int, watch: OnEvent) -> OnEvent:
        def take(event: Event) -> None:
            watch(event)
            self._pending.append((index, event))
            with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody listens
                self._loop.call_soon_threadsafe(self._news.set)

        return take

    async def events(self, timeout: float | None = None) -> list[tuple[int, Event]]:
        """What has come since, at least one event; none if nothing came within `timeout` seconds.

        Raises ClientGone once the client has left (see `watching`), and ApiError where the engine gave up a request.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not self._pending and not self._gone:  # the news may be of what an earlier batch held
                    self._news.clear()
                    await self._news.wait()
        if self._gone:
            raise ClientGone
        batch: list[tuple[int, Event]] = []
        while self._pending:
            index, event = self._pending[0]
            if isinstance(event, Finished):
                failure = self._failure(event, self._open[index])
                if failure is not None and batch:
                    break  # first what came before it
                del self._open[index]
                if failure is not None:
                    raise failure
            batch.append(self._pending.popleft())
        return batch

    @staticmethod
    def _failure(end: Finished, request_id: str) -> ApiError | None:
        if end.finish_reason == "error":
            log.error("request %s failed in the engine: %s", request_id, end.error)
            return internal(request_id)
        if end.finish_reason == "abort":
            return ApiError(503, "the server ended this request: it is going down", code="aborted", retry_after=5.0)
        return None

    @property
    def finished(self) -> bool:
        """Whether every request has ended."""
        return not self._open

    async def answers(self) -> list[Answer]:
        """Everything, when all requests have ended; raises as `events` does."""
        parts = [Gathered() for _ in self._open]
        answers: dict[int, Answer] = {}
        while not self.finished:
            for index, event in await self.events():
                if isinstance(event, Finished):
                    answers[index] = parts[index].answer(event)
                else:
                    parts[index].add(event)
        return [answers[index] for index in range(len(parts))]

    @contextlib.asynccontextmanager
    async def watching(self, receive: Receive) -> AsyncIterator[None]:
        """Notice meanwhile when the client goes. The body must have been read."""

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self._gone = True
            self.close()
            self._news.set()

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def close(self) -> None:
        """Cancel what has not ended. May be called again, from any thread."""
        self._closed = True
        for request_id in copy.copy(self._open).values():
            self._engine.cancel(request_id)
