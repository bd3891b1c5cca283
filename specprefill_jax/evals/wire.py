"""A little HTTP/1.1 on asyncio streams: a request, its answer as it comes, server-sent events."""

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Self
from urllib.parse import urlsplit

from specprefill_jax.errors import argument_error

LONGEST_LINE = 4 * 1024 * 1024
"""Bytes of a line of a stream, or of a chunk of HTTP."""


class ProtocolError(Exception):
    """An answer breaks HTTP, JSON or the stream's protocol."""


@dataclass(frozen=True)
class Target:
    """Where requests go."""

    host: str
    port: int
    base: str = ""
    """Path before /v1."""
    tls: bool = False
    api_key: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str, api_key: str | None = None) -> Self:
        """From a server's address, with or without /v1 at its end.

        Raises:
            ArgumentError: it is not an http or https address, or the key cannot stand in a header.
        """
        allowed = "http://HOST[:PORT][/PATH] or https://..."
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise argument_error("url", url, allowed) from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise argument_error("url", url, allowed)
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise argument_error("api_key", "...", "printable ASCII")
        tls = parts.scheme == "https"
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if tls else 80), base, tls, api_key)

    def message(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """One whole HTTP request, ready to be sent."""
        content = b"" if body is None else json.dumps(body).encode()
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.base}{path} HTTP/1.1", f"Host: {host}:{self.port}", "Connection: close"]
        if body is not None:
            lines += ["Content-Type: application/json", f"Content-Length: {len(content)}"]
        if self.api_key is not None:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return "\r\n".join([*lines, "", ""]).encode() + content


class EventParser:
    """Server-sent events from a stream of bytes, however it is cut: the data of each, as text.

    Lines end in "\\n" or "\\r\\n"; comments and fields other than data are passed over.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[str]:
        """The events that `piece` completes.

        Raises:
            ProtocolError: data that is not UTF-8, or a line of more than 4 MiB.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            raise ProtocolError(f"a line of the stream has more than {LONGEST_LINE} bytes")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line and self._data:
                try:
                    events.append(b"\n".join(self._data).decode())
                except UnicodeDecodeError:
                    raise ProtocolError("an event of the stream is not UTF-8") from None
                self._data = []
            elif line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events

    def finish(self) -> None:
        """Raise `ProtocolError` if the stream ended within an event."""
        if self._rest or self._data:
            raise ProtocolError("the stream ended within an event")


@dataclass(frozen=True)
class Reply:
    """An answer whose head was read."""

    status: int
    headers: Mapping[str, str]
    """By their names in small letters."""
    reader: asyncio.StreamReader


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()


@asynccontextmanager
async def open_reply(target: Target, message: bytes) -> AsyncIterator[Reply]:
    """Send a message and read the head of its answer; the connection is closed at the end, whatever that is."""
    tls = _certificates() if target.tls else None
    reader, writer = await asyncio.open_connection(target.host, target.port, ssl=tls)
    try:
        writer.write(message)
        await writer.drain()
        status = 100
        headers: dict[str, str] = {}
        while status < 200:
            status, headers = await _head(reader)
        yield Reply(status, headers, reader)
    finally:
        writer.transport.abort()  # closes at once, where close() would first send what is left


async def _head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first = await _line(reader)
    if first == b"":
        raise ConnectionResetError("the connection was closed before an answer")
    parts = first.decode("latin-1").split(None, 2)
    if len(parts) < 2 or not parts[0].startswith("HTTP/1.") or not (parts[1].isdecimal() and len(parts[1]) == 3):
        raise ProtocolError(f"not an HTTP answer: {first[:80]!r}")
    headers: dict[str, str] = {}
    while (line := (await _line(reader)).strip()) != b"":
        name, colon, value = line.decode("latin-1").partition(":")
        if not colon or len(headers) > 200:
            raise ProtocolError(f"not an HTTP header: {line[:80]!r}")
        headers[name.strip().lower()] = value.strip()
    return int(parts[1]), headers


async def _line(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readline()
    except ValueError:  # asyncio's word for a line that is longer than its buffer
        raise ProtocolError("a line of the answer's head is too long") from None


async def pieces_of(reply: Reply) -> AsyncGenerator[bytes]:
    """The body as it comes, without HTTP's framing."""
    reader = reply.reader
    if "chunked" in reply.headers.get("transfer-encoding", "").lower():
        while True:
            size = (await _line(reader)).split(b";")[0].strip()
            if size == b"":
                raise ConnectionResetError("the connection broke within the answer")
            try:
                length = int(size, 16)
            except ValueError:
                raise ProtocolError(f"not the size of an HTTP chunk: {size[:80]!r}") from None
            if not 0 <= length <= LONGEST_LINE:
                raise ProtocolError(f"not the size of an HTTP chunk: {size[:80]!r}")
            if length == 0:
                return
            try:
                piece = await reader.readexactly(length + 2)
            except asyncio.IncompleteReadError:
                raise ConnectionResetError("the connection broke within the answer") from None
            if piece[-2:] != b"\r\n":
                raise ProtocolError("an HTTP chunk is longer than it says")
            yield piece[:-2]
    length_header = reply.headers.get("content-length")
    if length_header is not None and not length_header.isdecimal():
        raise ProtocolError(f"Content-Length: {length_header[:80]!r}")
    left = None if length_header is None else int(length_header)
    while left is None or left > 0:
        piece = await reader.read(65536 if left is None else min(left, 65536))
        if not piece:
            if left:
                raise ConnectionResetError("the connection broke within the answer")
            return
        if left is not None:
            left -= len(piece)
        yield piece


async def events_of(reply: Reply) -> AsyncGenerator[list[str]]:
    """The data of a stream's events, those of one piece of the body together, up to [DONE].

    Raises:
        ProtocolError: the answer is no stream of events, breaks off within one or without [DONE], or goes on after it.
    """
    kind = reply.headers.get("content-type", "")
    if not kind.startswith("text/event-stream"):
        raise ProtocolError(f"Content-Type {kind[:80]!r} of a stream is not text/event-stream")
    parser, done = EventParser(), False
    async with aclosing(pieces_of(reply)) as pieces:
        async for piece in pieces:
            events = parser.feed(piece)
            if done or "[DONE]" not in events:
                before, after = ([], events) if done else (events, [])
            else:
                end, done = events.index("[DONE]"), True
                before, after = events[:end], events[end + 1 :]
            if before:
                yield before
            if after:
                raise ProtocolError(f"an event after [DONE]: {after[0][:80]!r}")
    parser.finish()
    if not done:
        raise ProtocolError("the stream ended without [DONE]")


async def whole(reply: Reply, most: int = 64 * 1024 * 1024) -> bytes:
    """All of the body, or its first `most` bytes and a little."""
    content = bytearray()
    async with aclosing(pieces_of(reply)) as pieces:
        async for piece in pieces:
            content += piece
            if len(content) > most:
                break
    return bytes(content)


def read_object(content: bytes | str) -> dict[str, Any]:
    """The JSON object in `content`; raises `ProtocolError` for anything else."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise ProtocolError(f"not JSON: {content[:80]!r}") from None
    if not isinstance(value, dict):
        raise ProtocolError(f"not a JSON object: {content[:80]!r}")
    return value


async def fetch_json(
    target: Target, path: str, body: Mapping[str, Any] | None = None, timeout: float = 60.0
) -> tuple[int, Any]:
    """Status and JSON of one GET, or of one POST where there is a body; None for what is not JSON.

    Raises:
        OSError: no connection, or no answer within `timeout` seconds.
        ProtocolError: what answers does not speak HTTP.
    """
    message = target.message("GET" if body is None else "POST", path, body)
    async with asyncio.timeout(timeout), open_reply(target, message) as reply:
        content = await whole(reply)
    try:
        return reply.status, json.loads(content)
    except ValueError:
        return reply.status, None
