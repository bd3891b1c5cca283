"""A load client for OpenAI-compatible servers: it sends requests when they are due and notes when each token came.

    target = Target.parse("http://127.0.0.1:8000")
    jobs = [Job.chat("model", [{"role": "user", "content": text}], max_tokens=32) for text in texts]
    records = asyncio.run(run_load(target, jobs, constant(rate=2.0, count=len(jobs)), timeout=10))

Requests are sent when they are due, whether or not earlier ones have been answered, and are never sent again. Each has
a connection of its own, which is closed at once when its time is up or its task is cancelled. Plain asyncio streams
and a few lines of HTTP/1.1, since a client that shares the machine with the server must cost next to nothing.
"""

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from specprefill_jax.config import check_integer, check_real
from specprefill_jax.errors import argument_error
from specprefill_jax.evals.wire import ProtocolError, Reply, Target, events_of, open_reply, read_object, whole

Outcome = Literal["pending", "ok", "timeout", "cancelled", "refused", "error", "malformed", "lost"]
"""What became of a request. "refused": an HTTP status other than 200; "error": the server reported one in the stream;
"malformed": the answer breaks HTTP, JSON or the stream's protocol; "lost": no connection, or it broke; "cancelled": by
the caller. "pending" only while it runs."""

_LONGEST_ERROR = 64 * 1024


def constant(rate: float, count: int) -> list[float]:
    """When `count` requests are due, seconds: the first at 0, each 1 / rate after the one before."""
    rate = check_real("rate", rate, "a finite number above 0", lambda x: x > 0)
    return [i / rate for i in range(check_integer("count", count, 0))]


def poisson(rate: float, count: int, seed: int = 0) -> list[float]:
    """When `count` requests of a Poisson process are due, seconds: gaps drawn from Exp(rate), before the first too.

    The same seed gives the same gaps at every rate, but for their scale.
    """
    rate = check_real("rate", rate, "a finite number above 0", lambda x: x > 0)
    draw = random.Random(seed)
    due, times = 0.0, []
    for _ in range(check_integer("count", count, 0)):
        due += draw.expovariate(1.0)
        times.append(due / rate)
    return times


@dataclass(frozen=True)
class Job:
    """One request to send: a path below the server's address and a JSON body that asks for one choice."""

    path: str
    body: Mapping[str, Any]
    label: str = ""
    """Carried into the record; says what the request stands for."""

    @classmethod
    def chat(cls, model: str, messages: Sequence[Mapping[str, Any]], *, label: str = "", **options: Any) -> Self:
        """A chat completion; `options` go into the body as they are (see `Job.completion`)."""
        return cls("/v1/chat/completions", _body({"model": model, "messages": messages}, options), label)

    @classmethod
    def completion(cls, model: str, prompt: str | Sequence[int], *, label: str = "", **options: Any) -> Self:
        """A completion of a text or of token ids.

        `options` go into the body as they are. The answer is streamed unless they say stream=False, and a stream is
        asked for its usage, too.
        """
        return cls("/v1/completions", _body({"model": model, "prompt": prompt}, options), label)


def _body(prompt: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    body = {**prompt, "stream": True, **options}
    return {**body, "stream_options": {"include_usage": True}} if body["stream"] else body


@dataclass
class Record:
    """What one request went through. Times are seconds since its run began; `due` is when it should have been sent."""

    index: int
    label: str
    due: float
    sent: float | None = None
    """When its connection was asked for, before there was one."""
    tokens: list[float] = field(default_factory=list)
    """When each piece of text came: the server may put several tokens into one."""
    end: float | None = None
    """When the whole answer was there, or it was given up."""
    outcome: Outcome = "pending"
    status: int | None = None
    """HTTP status, once there was one."""
    error: str | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    specprefill: dict[str, Any] | None = None
    """What the server says of how the prompt was read: engaged, reason, kept_tokens, ..."""
    text: str = ""

    @property
    def late(self) -> float | None:
        """Seconds that the client itself sent it too late."""
        return None if self.sent is None else self.sent - self.due

    @property
    def ttft(self) -> float | None:
        """Seconds from sending to the first text of a stream; where there is none, to its end. None without either."""
        if self.sent is None or not self.tokens:
            return None
        return self.tokens[0] - self.sent

    @property
    def e2e(self) -> float | None:
        """Seconds from sending to the end of the answer; None unless it ended well."""
        return self.end - self.sent if self.outcome == "ok" and self.end is not None and self.sent is not None else None

    @property
    def generated(self) -> int:
        """Tokens generated: as the server counts them, or else the pieces of text that came."""
        return _count(self.usage, "completion_tokens", len(self.tokens))

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt, where the server said so."""
        return _count(self.usage, "prompt_tokens", None)

    @property
    def kept_tokens(self) -> int | None:
        """Tokens of it that the main model read, where the server said so."""
        return _count(self.specprefill, "kept_tokens", None)

    @property
    def tpot(self) -> float | None:
        """Mean seconds a token after the first; None for an answer of one token, or one that came whole."""
        if len(self.tokens) < 2 or self.generated < 2:
            return None
        return (self.tokens[-1] - self.tokens[0]) / (self.generated - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds between one piece of text and the next."""
        return [after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False)]

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the fields but the text, whose length stands for it, and what follows from them."""
        fields = asdict(self)
        derived = {"characters": len(fields.pop("text")), "late": self.late, "ttft": self.ttft}
        return {**fields, **derived, "tpot": self.tpot, "e2e": self.e2e}


def _count[T](said: Mapping[str, Any] | None, name: str, default: T) -> int | T:
    value = (said or {}).get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else default


class _ServerError(Exception):
    """The server reported an error inside a stream."""


async def send(target: Target, job: Job, record: Record, timeout: float | None, now: Callable[[], float]) -> None:
    """Send `job` once and note in `record` what comes of it; whatever the server does, this does not raise.

    Args:
        target, job: where to, and what.
        record: filled in as things happen, so that it is of use to a caller that cancels this task, too.
        timeout: seconds after which it is given up and its connection closed; None waits for ever.
        now: the clock of the record, seconds.
    """
    record.sent = now()
    limit = asyncio.timeout(timeout)
    try:
        async with limit, open_reply(target, target.message("POST", job.path, job.body)) as reply:
            record.status = reply.status
            if reply.status != 200:
                record.outcome, record.error = "refused", _error_text(await whole(reply, _LONGEST_ERROR))
            elif job.body.get("stream"):
                await _read_stream(reply, record, now)
            else:
                _read_answer(read_object(await whole(reply)), record)
            if record.outcome == "pending":
                record.outcome = "ok"
    except asyncio.CancelledError:
        record.outcome = "cancelled"
        raise
    except _ServerError as error:
        record.outcome, record.error = "error", str(error)
    except ProtocolError as error:
        record.outcome, record.error = "malformed", str(error)
    except OSError as error:  # TimeoutError is one, and a connection can time out by itself
        timed_out = limit.expired()
        record.outcome = "timeout" if timed_out else "lost"
        record.error = f"no whole answer within {timeout:g} s" if timed_out else f"{type(error).__name__}: {error}"
    finally:
        record.end = now()


async def run_load(
    target: Target,
    jobs: Sequence[Job],
    due: Sequence[float],
    timeout: float | None,
    on_end: Callable[[Record], bool | None] = lambda record: None,
) -> list[Record]:
    """Send each job when it is due, and wait for all of them.

    Args:
        target: where to.
        jobs, due: what, and when: seconds from now, ascending, one a job.
        timeout: seconds that each may take, from when it was sent.
        on_end: called with each record that has ended; True gives up all the others, whose outcome is "cancelled".

    Returns:
        A record a job, in their order.
    """
    if len(due) != len(jobs):
        raise argument_error("due", due, f"{len(jobs)} times, one a job")
    loop = asyncio.get_running_loop()
    start = loop.time()

    def now() -> float:
        return loop.time() - start

    async def one(job: Job, record: Record) -> None:
        await send(target, job, record, timeout, now)
        if on_end(record):
            raise _GiveUp

    records = [Record(index, job.label, at) for index, (job, at) in enumerate(zip(jobs, due, strict=True))]
    try:
        async with asyncio.TaskGroup() as group:
            for job, record in zip(jobs, records, strict=True):
                await asyncio.sleep(record.due - now())
                group.create_task(one(job, record))
    except* _GiveUp:
        for record in records:
            if record.outcome == "pending":
                record.outcome = "cancelled"
    return records


class _GiveUp(Exception):
    """Ends a run early."""


def _error_text(content: bytes) -> str:
    """The message of an OpenAI-shaped error, or the beginning of whatever else it is."""
    try:
        return _message(json.loads(content)["error"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return content[:400].decode(errors="replace")


def _message(error: object) -> str:
    said = error.get("message") if isinstance(error, dict) else error
    return str(said)[:400]


def _choice(answer: dict[str, Any]) -> dict[str, Any] | None:
    """The answer's choice, after its usage and its `specprefill`; None for a chunk that has none."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ProtocolError(f"choices={str(choices)[:80]} is not a list of objects")
    if len(choices) > 1:
        raise ProtocolError(f"{len(choices)} choices, where one was asked for")
    return choices[0] if choices else None


def _note(answer: dict[str, Any], record: Record) -> None:
    for name in ("usage", "specprefill"):
        value = answer.get(name)
        if value is not None:
            if not isinstance(value, dict):
                raise ProtocolError(f"{name}={str(value)[:80]} is not an object")
            setattr(record, name, value)


def _text(choice: dict[str, Any], part: str) -> str:
    """What a choice says: `part` ("delta" or "message") of a chat's, `text` of a completion's."""
    if part in choice:
        inner = choice[part]
        if not isinstance(inner, dict):
            raise ProtocolError(f"{part}={str(inner)[:80]} is not an object")
        content = inner.get("content")
    else:
        content = choice.get("text")
    if content is not None and not isinstance(content, str):
        raise ProtocolError(f"text={str(content)[:80]} is not a string")
    return content or ""


def _finish(choice: dict[str, Any]) -> str | None:
    reason = choice.get("finish_reason")
    if reason is not None and not isinstance(reason, str):
        raise ProtocolError(f"finish_reason={str(reason)[:80]} is not a string")
    return reason


def _read_answer(answer: dict[str, Any], record: Record) -> None:
    """An answer that came whole."""
    _note(answer, record)
    choice = _choice(answer)
    if choice is None:
        raise ProtocolError("the answer has no choice")
    record.text, record.finish_reason = _text(choice, "message"), _finish(choice)
    if record.finish_reason is None:
        raise ProtocolError("the answer has no finish_reason")


async def _read_stream(reply: Reply, record: Record, now: Callable[[], float]) -> None:
    """An answer that comes in events; checked for the order that clients rely on."""
    texts: list[str] = []
    try:
        async with aclosing(events_of(reply)) as pieces:
            async for events in pieces:
                at = now()
                for event in events:
                    _take(read_object(event), record, texts, at)
    finally:
        record.text = "".join(texts)
    if record.finish_reason is None:
        raise ProtocolError("the stream ended without a finish_reason")


def _take(chunk: dict[str, Any], record: Record, texts: list[str], at: float) -> None:
    """One chunk of a stream, which came at `at`."""
    if chunk.get("error") is not None:
        raise _ServerError(_message(chunk["error"]))
    _note(chunk, record)
    choice = _choice(chunk)
    if choice is None:
        return
    if record.finish_reason is not None:
        raise ProtocolError("a choice after the one with finish_reason")
    text = _text(choice, "delta")
    record.finish_reason = _finish(choice)
    if text or (record.finish_reason is not None and not record.tokens):
        record.tokens.append(at)
        texts.append(text)
