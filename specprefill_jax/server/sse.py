"""Answers in pieces: server-sent events as OpenAI's clients read them."""

import json
import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specprefill_jax.server.errors import ApiError, internal
from specprefill_jax.server.generation import ClientGone, Generation
from specprefill_jax.server.reply import Reply

log = logging.getLogger("specprefill_jax.server")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def encode(value: Mapping[str, Any]) -> bytes:
    """Compact JSON in UTF-8; raises ValueError for NaN and infinities."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def frame(value: Mapping[str, Any]) -> bytes:
    """One event. JSON escapes line ends, so it is one line."""
    return b"data: " + encode(value) + b"\n\n"


class EventStream(Response):
    """The chunks of `reply` while `generation` goes on, then [DONE]; an error becomes an event before it.

    The status goes out at once, and no chunk before the first token: what a client waits for until then is a comment
    every `keep_alive` seconds. A client that leaves ends the generation.
    """

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, reply: Reply, keep_alive: float) -> None:
        """Stream `generation`, whose requests have been submitted."""
        self._generation = generation
        self._reply = reply
        self._keep_alive = keep_alive
        self.status_code = 200
        self.background = None
        # X-Accel-Buffering: nginx would collect the events.
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send all of it."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async with self._generation.watching(receive):
                try:
                    await self._send_events(send)
                except ClientGone:
                    return
                except ApiError as error:
                    await self._send(send, frame(error.body))
                except Exception:
                    log.exception("request %s failed while it was streamed", self._reply.call.id)
                    await self._send(send, frame(internal(self._reply.call.id).body))
                await send({"type": "http.response.body", "body": DONE, "more_body": False})
        finally:
            self._generation.close()

    async def _send_events(self, send: Send) -> None:
        while not self._generation.finished:
            events = await self._generation.events(self._keep_alive)
            frames = [frame(chunk) for index, event in events for chunk in self._reply.chunks(index, event)]
            if frames or not events:
                await self._send(send, b"".join(frames) or KEEP_ALIVE)
        if last := self._reply.last_chunks():
            await self._send(send, b"".join(map(frame, last)))

    @staticmethod
    async def _send(send: Send, data: bytes) -> None:
        await send({"type": "http.response.body", "body": data, "more_body": True})
