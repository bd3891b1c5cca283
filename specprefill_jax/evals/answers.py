"""Whole answers of an OpenAI-compatible server, token by token, read as strictly as the protocol allows.

`load` asks how long an answer took; this asks whether it is right: several choices, token ids, log-probabilities, and
every rule that streams have to keep. Requests must ask for `return_token_ids`, and streams for their usage.
"""

from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from specprefill_jax.evals.load import Job
from specprefill_jax.evals.wire import ProtocolError, Reply, Target, events_of, open_reply, read_object, whole

_REASONS = ("stop", "length")


class RefusedError(Exception):
    """The server answered with an HTTP status other than 200, or reported an error inside a stream (status 200)."""

    def __init__(self, status: int, message: str):
        super().__init__(f"{status}: {message}")
        self.status = status


@dataclass
class Choice:
    """One answer to a prompt."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """One a token where they were asked for."""
    finish_reason: str | None = None
    specprefill: dict[str, Any] | None = None
    """How its prompt was read."""


@dataclass
class Answer:
    """All that came for one request."""

    choices: list[Choice]
    usage: dict[str, Any]


async def ask(target: Target, job: Job) -> Answer:
    """Send `job` once and read its answer to the end; a task that is cancelled closes its connection at once.

    Raises:
        RefusedError: the server said no, or gave up.
        ProtocolError: the answer breaks HTTP, JSON, or what clients rely on.
        OSError: no connection, or it broke.
    """
    async with open_reply(target, target.message("POST", job.path, job.body)) as reply:
        if reply.status != 200:
            content = (await whole(reply, 65536)).decode(errors="replace")
            raise RefusedError(reply.status, _message(content))
        count = int(job.body.get("n") or 1)
        return await _stream(reply, count) if job.body.get("stream") else _body(read_object(await whole(reply)), count)


def _message(content: str) -> str:
    """An error's message; what is not shaped as OpenAI's breaks the protocol."""
    error = read_object(content).get("error")
    if not isinstance(error, dict) or not isinstance(error.get("message"), str) or "type" not in error:
        raise ProtocolError(f"an error that is not OpenAI-shaped: {content[:80]!r}")
    return str(error["message"])


def _body(answer: dict[str, Any], count: int) -> Answer:
    choices = [Choice() for _ in range(count)]
    said = answer.get("choices")
    if not isinstance(said, list) or [one.get("index") for one in said] != list(range(count)):
        raise ProtocolError(f"not {count} choices in their order")
    for choice, one in zip(choices, said, strict=True):
        _add(choice, one, "message")
        _finish(choice, one, answer)
    return Answer(choices, _usage(answer, choices))


async def _stream(reply: Reply, count: int) -> Answer:
    choices = [Choice() for _ in range(count)]
    usage: dict[str, Any] | None = None
    identity: tuple[Any, ...] | None = None
    async with aclosing(events_of(reply)) as pieces:
        async for events in pieces:
            for event in events:
                chunk = read_object(event)
                if chunk.get("error") is not None:
                    raise RefusedError(200, _message(event))
                if usage is not None:
                    raise ProtocolError("a chunk after the one with usage")
                own = tuple(chunk.get(name) for name in ("id", "object", "created", "model"))
                if None in own or (identity is not None and own != identity):
                    raise ProtocolError(f"chunks of {identity} and of {own} in one stream")
                identity = own
                if chunk.get("choices") == []:
                    usage = _usage(chunk, choices)
                else:
                    _take(chunk, choices)
    if usage is None:
        raise ProtocolError("the stream ended without usage")
    return Answer(choices, usage)


def _take(chunk: dict[str, Any], choices: list[Choice]) -> None:
    """One chunk that says something of a choice."""
    said = chunk.get("choices")
    if not isinstance(said, list) or len(said) != 1 or said[0].get("index") not in range(len(choices)):
        raise ProtocolError(f"not one choice of {len(choices)} in a chunk: {said!r:.80}")
    if chunk.get("usage") is not None:
        raise ProtocolError("usage before the end")
    [one] = said
    choice = choices[one["index"]]
    if choice.finish_reason is not None:
        raise ProtocolError("a chunk after the one with its choice's finish_reason")
    before = len(choice.token_ids)
    _add(choice, one, "delta")
    if one.get("finish_reason") is not None:
        _finish(choice, one, chunk)
    elif len(choice.token_ids) == before and not choice.token_ids:
        raise ProtocolError("a chunk of a choice before its first token")


def _add(choice: Choice, one: dict[str, Any], part: str) -> None:
    """What a chunk, or the whole answer, adds to a choice."""
    text = one[part].get("content") if part in one else one.get("text")
    ids, logprobs = one.get("token_ids") or [], one.get("logprobs") or {}
    values = logprobs.get("token_logprobs")
    if values is None:
        values = [entry["logprob"] for entry in logprobs.get("content") or []]
    if not isinstance(text or "", str) or (logprobs and len(values) != len(ids)):
        raise ProtocolError(f"{len(ids)} tokens with {len(values)} log-probabilities and the text {text!r:.80}")
    choice.text += text or ""
    choice.token_ids += ids
    choice.logprobs += values


def _finish(choice: Choice, one: dict[str, Any], around: dict[str, Any]) -> None:
    choice.finish_reason = one.get("finish_reason")
    choice.specprefill = one.get("specprefill") or around.get("specprefill")
    if choice.finish_reason not in _REASONS:
        raise ProtocolError(f"finish_reason={choice.finish_reason!r:.80} is none of {_REASONS}")


def _usage(around: dict[str, Any], choices: list[Choice]) -> dict[str, Any]:
    if any(choice.finish_reason is None for choice in choices):
        raise ProtocolError("usage before every choice has its finish_reason")
    usage = around.get("usage")
    generated = sum(len(choice.token_ids) for choice in choices)
    if not isinstance(usage, dict) or usage.get("completion_tokens") != generated:
        raise ProtocolError(f"usage {usage!r:.120} of {generated} generated tokens")
    if usage.get("total_tokens") != generated + usage.get("prompt_tokens", 0):
        raise ProtocolError(f"usage {usage!r:.120} does not add up")
    return usage
