"""A server under load with everything at once, and whether every answer is what it is alone.

What counts as wrong and what as a tie, `scripts/soak.py` says.
"""

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from specprefill_jax.config import check_integer, check_real
from specprefill_jax.errors import argument_error
from specprefill_jax.evals.answers import Answer, Choice, RefusedError, ask
from specprefill_jax.evals.load import Job
from specprefill_jax.evals.served import ServerError, about_client
from specprefill_jax.evals.soak_mix import Case, Mix, Server, SoakArgs, connect, refusals
from specprefill_jax.evals.wire import ProtocolError, Target, fetch_json, open_reply, whole

ANY_GAIN = 1e-9
"""A predicted gain that any prompt has. It makes a reference's settings differ from those of the load, so that what
the load chooses is not remembered from the reference."""
LONGEST = 300.0
"""Seconds that a request may take."""
SETTLE = 30.0
"""Seconds that the server may take to be idle after its last client."""
MOST_EXAMINED = 50
MOST_BROKEN = 200
"""The load ends when so much is broken: the server may be gone."""


def check(args: SoakArgs) -> None:
    """Refuse arguments that mean nothing, before anything is started."""
    for name in ("minutes", "tie", "most_growth"):
        check_real(name, getattr(args, name), "a finite number above 0", lambda x: x > 0)
    for name in ("concurrency", "cases", "max_tokens"):
        check_integer(name, getattr(args, name), 1)
    shortest, longest = args.prompt_tokens
    check_integer("prompt_tokens[0]", shortest, 1)
    check_integer("prompt_tokens[1]", longest, max(shortest, 8))
    if args.out is not None and (args.out.is_dir() or not args.out.absolute().parent.is_dir()):
        raise argument_error("out", str(args.out), "a file in a folder that exists")


@dataclass
class Tally:
    """What happened, and what was wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[dict[str, Any]] = field(default_factory=list)
    """Answers that differ from their reference."""
    ties: list[dict[str, Any]] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    """Streams and answers that are not well formed, requests that were lost or refused, refusals that did not come."""
    farthest: float = 0.0
    """Largest difference of a token's log-probability from its reference's."""


class References:
    """Every case's answer when it is alone, each choice by itself."""

    def __init__(self, server: Server):
        self._server = server
        self._found: dict[tuple[Case, bool], list[Choice]] = {}

    async def get(self, case: Case, sparse: bool) -> list[Choice]:
        """The choices of a case, read in part if that can be or whole. Nothing else may run at the server."""
        found = self.known(case, sparse)
        if found is None:
            drawn = case.body["temperature"] > 0
            found = [await self._ask(case, sparse, index) for index in range(case.count if drawn else 1)]
            found = found if drawn else found * case.count
            self._found[case, engaged(found[0])] = found
        return found

    def known(self, case: Case, sparse: bool) -> list[Choice] | None:
        """The same, without asking."""
        return self._found.get((case, sparse))

    async def _ask(self, case: Case, sparse: bool, index: int) -> Choice:
        [choice] = (await ask(self._server.target, case.job(**alone(case, sparse, index)))).choices
        return choice


def alone(case: Case, sparse: bool, index: int) -> dict[str, Any]:
    """What to change in a case's body so that choice `index` is its only one, read in part if that can be or whole."""
    more: dict[str, Any] = {"n": 1, "specprefill": {"enabled": False}}
    if "seed" in case.body:
        more["seed"] = (case.body["seed"] + index) % 2**32
    if sparse:
        more["specprefill"] = {**case.body["specprefill"], "min_predicted_gain": ANY_GAIN, "map": True}
    return more


def engaged(choice: Choice) -> bool:
    """Whether the prompt was read in part."""
    return bool((choice.specprefill or {}).get("engaged"))


def difference(choice: Choice, reference: Choice) -> str | None:
    """What is not as it is alone."""
    if engaged(choice) and (choice.specprefill or {}).get("kept_chunks") != (reference.specprefill or {}).get(
        "kept_chunks"
    ):
        return "kept chunks"
    if choice.token_ids != reference.token_ids:
        return "tokens"
    if choice.finish_reason != reference.finish_reason:
        return "finish_reason"
    return None if choice.text == reference.text else "text"


def gumbel(seed: int, step: int, vocab_size: int) -> np.ndarray:
    """The random numbers that token `step` of a request with this seed is drawn by: float32 [vocab_size]."""
    data = jnp.array((seed >> 32, seed & 0xFFFFFFFF), jnp.uint32)
    key = jax.random.fold_in(jax.random.wrap_key_data(data, impl="threefry2x32"), step)
    return np.asarray(jax.random.gumbel(key, (vocab_size,)))


class Soak:
    """One server under load."""

    def __init__(self, args: SoakArgs, server: Server, console: Console, pid: int | None):
        self.args, self.server, self.console, self.pid = args, server, console, pid
        self.tally = Tally()
        self.references = References(server)
        self.cases: list[Case] = []
        self.conversations: list[list[Case]] = []
        self.memory: list[tuple[float, int]] = []
        """Seconds since the load began, and bytes of the server."""
        self.peak: dict[str, float] = defaultdict(float)
        self._refusals = refusals(server)
        self._unchecked: list[tuple[Case, int, bool, Choice]] = []
        self._latest: Case | None = None
        self._usual = 0.5  # seconds that a request takes, lately

    async def prepare(self) -> None:
        """Make the mix and its references."""
        mix = Mix(self.args, self.server)
        conversations = max(1, self.args.cases // 15)
        for serial in range(conversations):
            turns: list[Case] = []
            answer = None
            for number in range(3):
                turns.append(mix.turn(serial * 3 + number, turns[-1] if turns else None, answer))
                [answer] = await self.references.get(turns[-1], turns[-1].sparse)
            self.conversations.append(turns)
        for serial in range(max(1, self.args.cases - 3 * conversations)):
            self.cases.append(mix.case(3 * conversations + serial))
            await self.references.get(self.cases[-1], self.cases[-1].sparse)
            if serial % 50 == 49:
                self.console.log(f"{serial + 1} references")

    async def load(self) -> None:
        """All clients at once, and somebody who watches."""
        begun = time.monotonic()
        end = begun + 60 * self.args.minutes
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(self._watch(begun))
            clients = [group.create_task(self._client(number, end)) for number in range(self.args.concurrency)]
            await asyncio.wait(clients)
            watcher.cancel()

    async def _watch(self, begun: float) -> None:
        while True:
            try:
                gauges = await metrics(self.server.target)
                if self.pid is not None:
                    self.memory.append((time.monotonic() - begun, resident_memory(self.pid)))
            except (OSError, ProtocolError) as error:
                self.tally.broken.append(f"/metrics: {type(error).__name__}: {error}")
            else:
                for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc"):
                    self.peak[name] = max(self.peak[name], gauges.get(name, 0.0))
            await asyncio.sleep(1)

    async def _client(self, number: int, end: float) -> None:
        draw = random.Random(f"{self.args.seed} client {number}")
        while time.monotonic() < end and len(self.tally.broken) < MOST_BROKEN:
            roll = draw.random()
            if roll < 0.1:
                await self._refused(*draw.choice(self._refusals))
            elif roll < 0.25:
                await self._cancelled(draw)
            elif roll < 0.35:
                for case in draw.choice(self.conversations):
                    await self._answered(case, draw.random() < 0.5)
            else:
                again = self._latest is not None and draw.random() < 0.2
                case = self._latest if again and self._latest else draw.choice(self.cases)
                self._latest = case
                await self._answered(case, draw.random() < 0.6)

    async def _refused(self, status: int, job: Job) -> None:
        try:
            await ask(self.server.target, job)
        except RefusedError as error:
            self.tally.counts["refused"] += 1
            if error.status != status:
                self.tally.broken.append(f"status {status} was due: {error}")
        except (ProtocolError, OSError) as error:
            self.tally.broken.append(f"a refusal: {type(error).__name__}: {error}")
        else:
            self.tally.broken.append(f"not refused: {str(job.body)[:200]}")

    async def _cancelled(self, draw: random.Random) -> None:
        """A client that leaves at a random moment; sometimes that is too late."""
        case, streamed = draw.choice([*self.cases, *chain(*self.conversations)]), draw.random() < 0.7
        try:
            async with asyncio.timeout(draw.uniform(0, 1.2 * self._usual)):
                await self._answered(case, streamed)
        except TimeoutError:
            self.tally.counts["cancelled"] += 1

    async def _answered(self, case: Case, streamed: bool) -> None:
        more: dict[str, Any] = {"stream": streamed}
        if case.sparse:
            more["specprefill"] = {**case.body["specprefill"], "map": True}
        begun = time.monotonic()
        try:
            async with asyncio.timeout(LONGEST):
                answer = await ask(self.server.target, case.job(**more))
        except (RefusedError, ProtocolError, OSError) as error:
            self.tally.broken.append(f"{case.path}, stream={streamed}: {type(error).__name__}: {error}")
            return
        self._usual += 0.1 * (time.monotonic() - begun - self._usual)
        self._count(case, streamed, answer)
        for index, choice in enumerate(answer.choices):
            self._check(case, index, streamed, choice)

    def _count(self, case: Case, streamed: bool, answer: Answer) -> None:
        first = answer.choices[0]
        labels = ["answered", "streamed" if streamed else "whole", "sparse" if engaged(first) else "dense"]
        labels.append("drawn" if case.body["temperature"] else "greedy")
        labels += ["log-probabilities"] * ("logprobs" in case.body) + ["several choices"] * (case.count > 1)
        labels += ["stopped"] * (first.finish_reason == "stop")
        labels += ["partly cached"] * bool(answer.usage["prompt_tokens_details"]["cached_tokens"])
        self.tally.counts.update(labels)
        self.tally.counts["tokens"] += answer.usage["completion_tokens"]

    def _check(self, case: Case, index: int, streamed: bool, choice: Choice) -> None:
        read = case.sparse and engaged(choice)
        known = self.references.known(case, read)
        if known is None:
            self._unchecked.append((case, index, streamed, choice))
        else:
            self._compare(case, index, streamed, choice, known[index])

    def _compare(self, case: Case, index: int, streamed: bool, choice: Choice, reference: Choice) -> None:
        self.tally.counts["compared"] += 1
        what = difference(choice, reference)
        if what is None:
            gaps = [abs(a - b) for a, b in zip(choice.logprobs, reference.logprobs, strict=True)]
            self.tally.farthest = max([self.tally.farthest, *gaps])
            return
        found = {"what": what, "index": index, "stream": streamed, "specprefill": choice.specprefill}
        found |= {"body": {name: value for name, value in case.body.items() if name not in ("prompt", "messages")}}
        found |= {"case": case, "choice": choice, "reference": reference}
        self.tally.wrong.append(found)

    async def finish(self) -> dict[str, float]:
        """Wait until the server is idle, compare what had no reference, examine what differed; the last metrics."""
        deadline = time.monotonic() + SETTLE
        while busy(found := await metrics(self.server.target)) and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        for case, index, streamed, choice in self._unchecked:
            reference = (await self.references.get(case, case.sparse and engaged(choice)))[index]
            self._compare(case, index, streamed, choice, reference)
        suspects, self.tally.wrong = self.tally.wrong, []
        for serial, found_wrong in enumerate(suspects):
            case, choice, reference = (found_wrong.pop(name) for name in ("case", "choice", "reference"))
            if found_wrong["what"] == "tokens" and serial < MOST_EXAMINED:
                await self._examine(found_wrong, case, choice, reference)
            found_wrong |= {"tokens": choice.token_ids, "reference": reference.token_ids}
            close = found_wrong.get("gap") is not None and found_wrong["gap"] < self.args.tie
            (self.tally.ties if close else self.tally.wrong).append(found_wrong)
        return found

    async def _examine(self, found: dict[str, Any], case: Case, choice: Choice, reference: Choice) -> None:
        """Find by how much the two tokens differ, where an answer first leaves its reference."""
        pairs = zip(choice.token_ids, reference.token_ids, strict=False)
        step = next((at for at, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        if step is None or "repetition_penalty" in case.body:  # the penalty's scores cannot be told from outside
            return
        wanted: dict[str, Any] = {"logprobs": 20}
        if case.path.endswith("chat/completions"):
            wanted = {"logprobs": True, "top_logprobs": 20}
        scores = []
        temperature = case.body["temperature"]
        for token in (choice.token_ids[step], reference.token_ids[step]):
            logprob = await self._logprob(case, engaged(reference), found["index"], step, token, wanted)
            if logprob is None:
                return
            if temperature:
                if self.server.vocab_size is None:
                    return
                seed = (case.body["seed"] + found["index"]) % 2**32
                logprob = logprob / temperature + float(gumbel(seed, step, self.server.vocab_size)[token])
            scores.append(logprob)
        found |= {"step": step, "gap": abs(scores[0] - scores[1])}

    async def _logprob(
        self, case: Case, sparse: bool, index: int, step: int, token: int, wanted: dict[str, Any]
    ) -> float | None:
        """A token's log-probability after the first `step` tokens of the reference, if it is among the likeliest."""
        body = {**case.body, **alone(case, sparse, index), **wanted}
        status, answer = await fetch_json(self.server.target, case.path, body)
        if status != 200:
            return None
        name = f"token_id:{token}"
        if self.server.has_text:
            name = (await fetch_json(self.server.target, "/detokenize", {"tokens": [token]}))[1]["prompt"]
        logprobs = answer["choices"][0]["logprobs"]
        if "content" in logprobs:
            likeliest = {one["token"]: one["logprob"] for one in logprobs["content"][step]["top_logprobs"]}
        else:
            likeliest = logprobs["top_logprobs"][step]
        return likeliest.get(name)


async def metrics(target: Target) -> dict[str, float]:
    """The server's figures, those of all labels together."""
    async with asyncio.timeout(30), open_reply(target, target.message("GET", "/metrics")) as reply:
        lines = (await whole(reply)).decode().splitlines()
    found: dict[str, float] = defaultdict(float)
    for line in lines:
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.split("{")[0]] += float(value)
            if name.startswith("vllm:request_success_total"):
                found[f"ended by {name.split('finished_reason="')[1].split('"')[0]}"] += float(value)
    return dict(found)


_IDLE = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "specprefill:speculator_cache_usage_ratio",
)


def busy(found: dict[str, float]) -> bool:
    """Whether anything runs, waits or is held."""
    return any(found.get(name, 1.0) for name in _IDLE)


def resident_memory(pid: int) -> int:
    """Bytes of a process that are in memory (Linux)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmRSS:")))


def growth(samples: Sequence[tuple[float, int]]) -> float | None:
    """MiB a minute, by least squares after the first minute, or in the second half of what is shorter than two."""
    if not samples:
        return None
    since = min(60.0, samples[-1][0] / 2)
    late = np.array([sample for sample in samples if sample[0] >= since], np.float64)
    if len(late) < 3:
        return None
    return float(np.polyfit(late[:, 0] / 60, late[:, 1] / 2**20, 1)[0])


def violations(args: SoakArgs, tally: Tally, found: dict[str, float], slope: float | None) -> list[str]:
    """What must not be, in words."""
    said = [f"{len(tally.wrong)} wrong answers"] if tally.wrong else []
    said += [f"{len(tally.broken)} broken or refused"] if tally.broken else []
    said += [f"{name} is {found.get(name)} at the end" for name in _IDLE if found.get(name) != 0]
    compiled = found.get("specprefill:compiles_after_warm_up_total")
    said += [f"{compiled} programs compiled after the warm-up"] if compiled != 0 else []
    failed = found.get("ended by error", 0)
    said += [f"{failed:g} requests failed in the engine"] if failed else []
    if tally.farthest > args.tie:
        said.append(f"a log-probability is off by {tally.farthest:.2g}")
    if slope is not None and slope > args.most_growth:
        said.append(f"memory grows by {slope:.2f} MiB a minute (at most {args.most_growth:g})")
    if not tally.counts["compared"]:
        said.append("nothing was compared")
    return said


def soak(args: SoakArgs, target: Target, pid: int | None, console: Console) -> dict[str, Any]:
    """All of it, for JSON; raises ServerError.

    Args:
        args: the flags.
        target: the server.
        pid: its process, whose memory is watched; None for one that runs elsewhere.
        console: told how far it is.
    """
    about = about_client(args.api_key)
    server = connect(target, args.main if args.url is None else None)
    run = Soak(args, server, console, pid if Path("/proc/self/status").exists() else None)

    async def everything() -> dict[str, float]:
        await run.prepare()
        console.log("the load begins")
        await run.load()
        console.log("the load has ended")
        return await run.finish()

    try:
        found = asyncio.run(everything())
    except (OSError, ProtocolError, RefusedError) as error:
        raise ServerError(f"the server cannot be soaked: {type(error).__name__}: {error}") from None
    slope, tally = growth(run.memory), run.tally
    sizes = [size / 2**20 for _, size in run.memory]
    settings = {name: value for name, value in asdict(args).items() if name not in ("api_key", "out", "url")}
    return {
        **about,
        "settings": settings,
        "violations": violations(args, tally, found, slope),
        "requests": {**dict(tally.counts.most_common()), "different": args.cases},
        "wrong": tally.wrong,
        "ties": tally.ties,
        "broken": tally.broken,
        "farthest_logprob": tally.farthest,
        "engine": {
            **{name.split(":")[1]: found.get(name, float("nan")) for name in _IDLE},
            **{f"peak {name.split(':')[1]}": value for name, value in run.peak.items()},
            **{
                name: found.get(f"specprefill:{name}_total", float("nan"))
                for name in ("compiles_after_warm_up", "preemptions", "memoised_selections")
            },
            **{name: value for name, value in found.items() if name.startswith("ended by")},
        },
        "memory": {
            "MiB at the beginning": sizes[0] if sizes else None,
            "MiB at the end": sizes[-1] if sizes else None,
            "MiB a minute": slope,
            "MiB a minute, at most": args.most_growth,
        },
    }
