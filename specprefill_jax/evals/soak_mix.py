"""What a soak sends: a seeded mix of requests, conversations that grow, and requests that must be refused."""

import asyncio
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specprefill_jax.evals.answers import Choice
from specprefill_jax.evals.load import Job
from specprefill_jax.evals.prompts import QUESTION, head, prose
from specprefill_jax.evals.served import ServerError
from specprefill_jax.evals.wire import ProtocolError, Target, fetch_json
from specprefill_jax.models.checkpoint import open_checkpoint


@dataclass
class SoakArgs:
    """Soak a running server (--url), or one that is started and stopped here."""

    url: str | None = None
    """Address of a server that runs; its memory is not watched."""
    api_key: str | None = None
    """Sent as a bearer token."""
    main: str = "smollm2-135m-deep4"
    """Main model of a server that is started here."""
    speculator: str = "smollm2-135m"
    """Its speculator."""
    serve: str = ""
    """Further flags for scripts/serve.py, in one string: --serve="--max-running 8"."""
    minutes: float = 10.0
    """How long the load lasts; the references come before it."""
    concurrency: int = 16
    """Clients that send at the same time."""
    cases: int = 200
    """Different requests in the mix."""
    prompt_tokens: tuple[int, int] = (8, 900)
    """Shortest and longest prompt, about."""
    max_tokens: int = 48
    """Longest answer."""
    tie: float = 1e-3
    """Scores closer than this are equal."""
    most_growth: float = 4.0
    """MiB a minute that the server's memory may grow."""
    seed: int = 0
    out: Path | None = None
    """JSON file to write."""


@dataclass(frozen=True, eq=False)
class Case:
    """One request of the mix, without what says how its answer is sent."""

    path: str
    body: dict[str, Any]
    sparse: bool

    @property
    def count(self) -> int:
        """Choices that it asks for."""
        return int(self.body.get("n", 1))

    def job(self, **more: Any) -> Job:
        """It as it is sent; `more` goes into the body."""
        body = {**self.body, "return_token_ids": True, **more}
        return Job(self.path, body | ({"stream_options": {"include_usage": True}} if body.get("stream") else {}))


@dataclass
class Server:
    """What the mix must know of the server."""

    target: Target
    model: str
    max_model_len: int
    has_text: bool
    """Whether it has a tokenizer."""
    vocab_size: int | None


def connect(target: Target, main: str | None) -> Server:
    """Ask the server what it is; raises ServerError."""
    try:
        [card] = asyncio.run(fetch_json(target, "/v1/models"))[1]["data"]
        status, _ = asyncio.run(fetch_json(target, "/tokenizer_info"))
    except (OSError, ProtocolError, TypeError, KeyError, ValueError) as error:
        raise ServerError(f"no list of one model from the server: {type(error).__name__}: {error}") from None
    vocab_size = None if main is None else open_checkpoint(main).config.vocab_size
    return Server(target, card["id"], card["max_model_len"], status == 200, vocab_size)


class Mix:
    """Cases by a seed. Conversations go on with the answers that the server gave, so they come turn by turn."""

    def __init__(self, args: SoakArgs, server: Server):
        self.args, self.server = args, server
        self._draw = random.Random(args.seed)
        self._heads = [self._ids(96) for _ in range(3)]

    def _ids(self, count: int) -> list[int]:
        return [self._draw.randrange(5, self.server.vocab_size or 256) for _ in range(count)]

    def _length(self) -> int:
        """Short ones beside long ones."""
        shortest, longest = self.args.prompt_tokens
        if self._draw.random() < 0.3:
            longest = max(shortest, longest // 8)
        return self._draw.randint(shortest, longest)

    def _text(self, tokens: int, serial: int) -> str:
        start = self._draw.choice(["", prose(60, f"shared {self._draw.randrange(3)}"), head(serial)])
        return f"{start}\n{prose(max(tokens * 3 // 4 - 60, 4), f'{self.args.seed} {serial}')}"

    def _options(self) -> dict[str, Any]:
        draw, text = self._draw, self.server.has_text
        options: dict[str, Any] = {"model": self.server.model, "temperature": 0}
        options["max_tokens"] = draw.choice([1, draw.randint(2, 16), self.args.max_tokens])
        if draw.random() < 0.5:
            options |= {"temperature": draw.choice([0.7, 1.0, 1.3]), "seed": draw.randrange(2**32)}
            options |= draw.choice([{}, {"top_p": 0.8}, {"top_k": 20}, {"min_p": 0.05}, {"top_p": 0.9, "top_k": 50}])
        if draw.random() < 0.15:
            options["repetition_penalty"] = draw.choice([0.9, 1.2])
        if draw.random() < 0.15:
            options["n"] = 2
        if draw.random() < 0.5:
            options["ignore_eos"] = True
        if draw.random() < 0.3:
            options["stop_token_ids"] = self._ids(24)
        if text and draw.random() < 0.3:
            options["stop"] = draw.choice([".", [" the", "\n\n"], ["carried", "ing"]])
        return options

    def _reading(self) -> tuple[bool, dict[str, Any]]:
        sparse = self._draw.random() < 0.6
        if not sparse:
            return False, {"enabled": False}
        return True, {"enabled": True, "keep_rate": self._draw.choice([0.2, 0.3, 0.5]), "tail_tokens": 32}

    def case(self, serial: int) -> Case:
        """A request that stands alone."""
        draw, options = self._draw, self._options()
        sparse, reading = self._reading()
        options["specprefill"] = reading
        wants_logprobs = draw.random() < 0.3
        if self.server.has_text and draw.random() < 0.5:
            options |= {"logprobs": True, "top_logprobs": draw.randint(0, 5)} if wants_logprobs else {}
            messages = [{"role": "system", "content": prose(40, f"system {draw.randrange(3)}")}]
            messages.append({"role": "user", "content": f"{self._text(self._length(), serial)}\n\n{QUESTION}"})
            return Case("/v1/chat/completions", {**options, "messages": messages}, sparse)
        options |= {"logprobs": draw.randint(0, 5)} if wants_logprobs else {}
        if self.server.has_text:
            return Case("/v1/completions", {**options, "prompt": self._text(self._length(), serial)}, sparse)
        length = self._length()
        start = draw.choice([[], draw.choice(self._heads)])
        ids = [*start[: length // 2], *self._ids(max(length - len(start), length - length // 2))]
        return Case("/v1/completions", {**options, "prompt": ids[:length]}, sparse)

    def turn(self, serial: int, before: Case | None, answer: Choice | None) -> Case:
        """The next turn of a conversation, after `answer` to the one `before`."""
        sparse, reading = (before.sparse, before.body["specprefill"]) if before else self._reading()
        options = {"model": self.server.model, "temperature": 0, "max_tokens": 16, "specprefill": reading}
        size = self.args.prompt_tokens[1] // 4
        if self.server.has_text:
            messages = list(before.body["messages"]) if before else []
            messages += [{"role": "assistant", "content": answer.text}] if answer else []
            messages.append({"role": "user", "content": f"{self._text(size, serial)}\n\n{QUESTION}"})
            return Case("/v1/chat/completions", {**options, "messages": messages}, sparse)
        ids = [*before.body["prompt"], *answer.token_ids] if before and answer else []
        return Case("/v1/completions", {**options, "prompt": [*ids, *self._ids(size)]}, sparse)


def refusals(server: Server) -> list[tuple[int, Job]]:
    """Requests that must be refused, and by which status."""
    good = {"model": server.model, "prompt": [7, 8, 9], "max_tokens": 1}

    def bad(status: int, path: str = "/v1/completions", **wrong: Any) -> tuple[int, Job]:
        return status, Job(path, {**good, **wrong})

    return [
        bad(400, prompt=[]),
        bad(400, prompt=[2**31 - 1]),
        bad(400, prompt=[7] * (server.max_model_len + 1)),
        bad(400, max_tokens=server.max_model_len),
        bad(400, max_tokens=0),
        bad(400, temperature=-1),
        bad(400, n=0),
        bad(400, logprobs=99),
        bad(400, stream=True, stream_options=5),
        bad(400, specprefill={"keep_rate": 2}),
        bad(400, specprefill={"keep_rte": 0.5}),
        bad(400, specprefill={"chunk_size": 7}),
        bad(400, "/v1/chat/completions", messages=[]),
        bad(404, model="another"),
        bad(404, "/v1/nothing"),
    ]
