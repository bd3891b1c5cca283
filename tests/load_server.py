"""A server for tests of the load client: each request is answered by the steps that a function gives for it."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from specprefill_jax.evals.wire import Target

Step = bytes | float | None
"""Bytes to send, seconds to wait, or None: wait until the client is gone."""

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
USAGE = {"prompt_tokens": 70, "completion_tokens": 3, "total_tokens": 73}
READ = {"engaged": True, "reason": "engaged", "kept_tokens": 14}


def chunked(content: bytes) -> bytes:
    """One chunk of HTTP."""
    return b"%x\r\n%b\r\n" % (len(content), content)


def event(data: object) -> bytes:
    """One server-sent event in a chunk of HTTP; an object as JSON, text as it is."""
    return chunked(f"data: {data if isinstance(data, str) else json.dumps(data)}\n\n".encode())


def delta(text: str, finish: str | None = None) -> dict:
    """A chunk of a chat's stream."""
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}], "usage": None}


def whole(value: object, status: str = "200 OK") -> bytes:
    """A JSON answer with its length."""
    content = json.dumps(value).encode()
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content


def stream(texts: Sequence[str] = ("a", "b", "c"), gap: float = 0.0, **said: object) -> list[Step]:
    """A well-formed stream of a chat: `gap` seconds before each text; `said` goes into the last chunks."""
    steps: list[Step] = [STREAM]
    for text in texts:
        steps += [gap, event(delta(text))]
    last = {"choices": [], "usage": {**USAGE, "completion_tokens": len(texts)}, "specprefill": READ, **said}
    return [*steps, event(delta("", "stop")), event(last), event("[DONE]"), END]


@dataclass
class Seen:
    """What the server saw."""

    target: Target
    requests: list[tuple[str, dict]] = field(default_factory=list)
    """Path and body of each, in order of arrival."""
    headers: list[dict[str, str]] = field(default_factory=list)
    gone: int = 0
    """Clients that left before their answer was sent."""
    everyone_left: threading.Event = field(default_factory=threading.Event)
    """Set whenever no connection is open after one was."""


@contextmanager
def serving(answer: Callable[[str, dict], list[Step]]) -> Iterator[Seen]:
    """Answer requests by `answer(path, body)` on a free port, from a thread of its own."""
    loop = asyncio.new_event_loop()
    seen = Seen(Target("127.0.0.1", 0))
    open_now = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal open_now
        open_now += 1
        seen.everyone_left.clear()
        try:
            first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines if line)
            content = await reader.readexactly(int(headers.get("content-length", 0)))
            path, body = first.split(" ")[1], json.loads(content) if content else {}
            seen.requests.append((path, body))
            seen.headers.append(headers)
            left = asyncio.ensure_future(reader.read())
            for step in answer(path, body):
                if isinstance(step, bytes):
                    writer.write(step)
                    await writer.drain()
                elif (await asyncio.wait([left], timeout=step))[0]:
                    seen.gone += 1
                    break
            left.cancel()
        except (ConnectionError, asyncio.IncompleteReadError):
            seen.gone += 1
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            open_now -= 1
            if not open_now:
                seen.everyone_left.set()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(handle, "127.0.0.1", 0)

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    seen.target = Target("127.0.0.1", server.sockets[0].getsockname()[1])

    async def stop() -> None:
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        yield seen
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
