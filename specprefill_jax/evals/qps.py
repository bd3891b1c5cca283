"""One server under rates of requests: which hold, read whole and sparsely, and what came of each run.

The protocols and the ceiling are described in `scripts/bench_qps.py`.
"""

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from specprefill_jax.config import check_integer, check_real
from specprefill_jax.errors import argument_error
from specprefill_jax.evals.load import Job, Record, constant, poisson, run_load
from specprefill_jax.evals.prompts import QUESTION, Prompt, head, prose, read_prompts, with_head
from specprefill_jax.evals.rates import (
    Search,
    is_missed,
    mix_ceiling,
    mix_of,
    parse_objectives,
    search_rate,
    summary,
    try_rates,
)
from specprefill_jax.evals.served import ServerError, about_client
from specprefill_jax.evals.wire import ProtocolError, Target, fetch_json
from specprefill_jax.models.checkpoint import open_checkpoint

MOST_CACHED = 0.02
"""Share of prompt tokens that a cache may have saved: a chat template's first words. The ceiling counts none as saved,
so that above it there is none."""
LONGEST = 600.0
"""Seconds that a request may take before it counts."""


@dataclass
class QpsArgs:
    """Measure a running server (--url), or one that is started and stopped here (--main and --speculator)."""

    url: str | None = None
    """Address of any OpenAI-compatible server, with or without /v1."""
    api_key: str | None = None
    """Sent as a bearer token; None: the environment variable SPECPREFILL_API_KEY, where there is one."""
    model: str | None = None
    """Name to ask for; None: the first that the server lists."""
    main: str | None = None
    """Main model of a server that is started here."""
    speculator: str | None = None
    """Its speculator."""
    serve: str = ""
    """Further flags for scripts/serve.py, in one string: --serve="--dtype bfloat16"."""

    protocol: Literal["constant", "poisson"] = "constant"
    rates: tuple[float, ...] = ()
    """Requests a second. None with "constant": search for the highest that holds."""
    start_rate: float | None = None
    """Where the search begins; None: at one request in the time that one takes alone."""
    precision: float = 0.05
    """The search ends when the rate that failed is at most so much (0.05: 5 %) above the one that held."""
    requests: int = 128
    """A run's."""
    timeout: float = 10.0
    """Seconds that a request may take as a whole; then its connection is closed."""
    timeout_factor: float | None = None
    """In place of --timeout: so many times what one request takes alone, read in the same way. With few requests a fast
    way of reading could else fall further behind than a slow one before it fails."""
    max_missed: float = 4 / 128
    """Share of a run's requests that may miss before its rate fails (rounded down to whole requests)."""
    goodput: tuple[str, ...] = ()
    """Objectives of a good request in seconds, as ttft=2 tpot=0.1 e2e=10."""

    dense: bool = True
    """Measure with `specprefill: {"enabled": false}`."""
    keep_rates: tuple[float, ...] = (0.1,)
    """Measure with `specprefill: {"enabled": true, "keep_rate": ...}` at each of these."""
    plain: bool = False
    """Measure once, and send no `specprefill` at all: for servers that know none."""
    settings: str = "{}"
    """Further members of `specprefill` where it is enabled, as JSON: '{"mode": "paper"}'."""

    prompts: tuple[Path, ...] = ()
    """Files of JSON lines with messages, with prompt, or with context and input (LongBench); taken from in turn."""
    generate: int | None = None
    """Generate prompts of about so many tokens, by the server's own count, in place of files."""
    shared_prefix: int = 0
    """So many words at the beginning of generated prompts are the same in all of them."""
    unique_heads: bool = True
    """Begin every prompt (after what is shared) with a line of its own, so that no cache of earlier ones can help."""
    endpoint: Literal["auto", "chat", "completions"] = "auto"
    """ "auto": chat, but completions for LongBench's few-shot and code rows."""
    max_tokens: int = 32
    """Most tokens of an answer, where a row does not say it."""
    ignore_eos: bool = False
    """Make every answer as long as it may be (an extension that not all servers know)."""
    stream: bool = True
    """Ask for streams; without, there is no TTFT, TPOT or ITL, as with the paper's client."""
    seed: int = 227
    warm_up: int = 2
    """Requests, one by one, before each way of reading is measured; at least 1."""
    pause: float = 10.0
    """Seconds between runs."""
    out: Path | None = None
    """JSON file to write."""
    records: Path | None = None
    """File of JSON lines to write: a line a request, with each token's time."""
    plot: Path | None = None
    """SVG file to write: latency over rate."""


@dataclass(frozen=True)
class Mode:
    """One way of reading prompts."""

    name: str
    specprefill: dict[str, Any] | None
    """What requests say of it; None: nothing."""
    keep_rate: float | None = None


def check(args: QpsArgs) -> dict[str, float]:
    """Refuse arguments that mean nothing, before anything is started; the objectives of goodput."""
    if (args.url is None) == (args.main is None):
        raise argument_error("url", args.url, "given, or else --main and --speculator, and not both")
    if (args.main is None) != (args.speculator is None):
        raise argument_error("speculator", args.speculator, "given together with --main")
    if bool(args.prompts) == (args.generate is not None):
        raise argument_error("generate", args.generate, "given, or else --prompts, and not both")
    if args.generate is not None:
        check_integer("generate", args.generate, 64)
    for name, minimum in (("requests", 1), ("shared_prefix", 0), ("max_tokens", 1), ("warm_up", 1)):
        check_integer(name, getattr(args, name), minimum)
    for name in ("timeout", "precision"):
        check_real(name, getattr(args, name), "a finite number above 0", lambda x: x > 0)
    if args.start_rate is not None:
        check_real("start_rate", args.start_rate, "a finite number above 0", lambda x: x > 0)
    if args.timeout_factor is not None:
        check_real("timeout_factor", args.timeout_factor, "a finite number above 1", lambda x: x > 1)
    check_real("pause", args.pause, "a finite number of at least 0", lambda x: x >= 0)
    check_real("max_missed", args.max_missed, "a number from 0 to below 1", lambda x: 0 <= x < 1)
    for rate in args.rates:
        check_real("rates", rate, "finite numbers above 0", lambda x: x > 0)
    for rate in args.keep_rates:
        check_real("keep_rates", rate, "numbers above 0 and up to 1", lambda x: 0 < x <= 1)
    if args.protocol == "poisson" and not args.rates:
        raise argument_error("rates", args.rates, "at least one with --protocol poisson, which searches for none")
    if not (args.plain or args.dense or args.keep_rates):
        raise argument_error("keep_rates", args.keep_rates, "at least one, or --dense, or --plain")
    objectives = parse_objectives(args.goodput)
    if not args.stream and objectives.keys() & {"ttft", "tpot"}:
        raise argument_error("goodput", args.goodput, "e2e=SECONDS alone with --no-stream")
    try:
        settings = json.loads(args.settings)
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise argument_error("settings", args.settings, "a JSON object")
    for path in (args.out, args.records, args.plot):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise argument_error("out", str(path), "a file in a folder that exists")
    return objectives


def modes(args: QpsArgs) -> list[Mode]:
    """The ways of reading to measure, in this order."""
    if args.plain:
        return [Mode("plain", None)]
    dense = [Mode("dense", {"enabled": False})] if args.dense else []
    settings = json.loads(args.settings)
    sparse = [Mode(f"keep {r:g}", {**settings, "enabled": True, "keep_rate": r}, r) for r in args.keep_rates]
    return dense + sparse


def allowed_misses(args: QpsArgs) -> int:
    """How many of a run's requests may miss."""
    return math.floor(args.max_missed * args.requests + 1e-9)


class Bench:
    """One server under measurement: what is sent to it, and what came back."""

    def __init__(self, args: QpsArgs, target: Target, console: Console):
        self.args = args
        self.target = target
        self.console = console
        self.objectives = parse_objectives(args.goodput)
        self.rows: list[dict[str, Any]] = []
        self.mixes: dict[tuple[str, float], list[tuple[int, int, int]] | None] = {}
        # Heads differ between two runs of this script as well: the server may outlive the first.
        self._heads = (f"{args.seed} {time.time_ns()} {serial}" for serial in itertools.count())
        draw = random.Random(args.seed)
        self._pools = [draw.sample(rows, len(rows)) for rows in map(read_prompts, args.prompts)]
        self._words = 0
        self.alone: dict[str, float] = {}
        """Seconds that a request of each mode takes that has the server for itself."""
        if args.records:
            args.records.write_text("")

    def connect(self) -> dict[str, Any]:
        """Ask the server what it is; the model's name where none was given."""
        try:
            status, listed = asyncio.run(fetch_json(self.target, "/v1/models"))
            version = asyncio.run(fetch_json(self.target, "/version"))[1]
        except (OSError, ProtocolError) as error:
            where = self.args.url or "the server"
            raise ServerError(f"no answer from {where}: {type(error).__name__}: {error}") from None
        try:
            cards = [card for card in listed["data"] if self.args.model in (None, card["id"])]
            self.model = str(cards[0]["id"])
        except (TypeError, KeyError, IndexError):
            wanted = "no model" if self.args.model is None else f"no model {self.args.model!r}"
            raise ServerError(f"the server lists {wanted} (GET /v1/models: status {status})") from None
        return {"model": cards[0], "version": version}

    def size_prompts(self, mode: Mode) -> None:
        """Find how many words make `generate` tokens, from what the server counts for two lengths."""
        wanted = self.args.generate
        if wanted is None:
            return
        few, many = 16, max(32, wanted // 2)
        counts = []
        for self._words in (few, many):
            [record] = self._one_by_one(mode, 1)
            if record.prompt_tokens is None:
                raise ServerError("the server does not say how many tokens a prompt has: give --prompts")
            counts.append(record.prompt_tokens)
        per_word = max(0.5, (counts[1] - counts[0]) / (many - few))
        self._words = max(1, many + math.floor((wanted - counts[1]) / per_word))

    def _prompt(self, index: int) -> Prompt:
        """The prompt of a run's request `index`."""
        if self._pools:
            pool = self._pools[index % len(self._pools)]
            prompt = pool[index // len(self._pools) % len(pool)]
            return with_head(prompt, head(next(self._heads))) if self.args.unique_heads else prompt
        text = f"{prose(self._words, f'{self.args.seed} {index}')}\n\n{QUESTION}"
        prompt = Prompt(text=text)
        if self.args.unique_heads:
            prompt = with_head(prompt, head(next(self._heads)))
        if self.args.shared_prefix:
            prompt = with_head(prompt, prose(self.args.shared_prefix, f"{self.args.seed} shared"))
        return prompt

    def _job(self, mode: Mode, index: int) -> Job:
        args, prompt = self.args, self._prompt(index)
        options: dict[str, Any] = {"max_tokens": prompt.max_tokens or args.max_tokens, "temperature": 0}
        options["stream"] = args.stream
        if args.ignore_eos:
            options["ignore_eos"] = True
        if mode.specprefill is not None:
            options["specprefill"] = mode.specprefill
        chat = args.endpoint == "chat" or (args.endpoint == "auto" and not prompt.plain)
        if chat or prompt.messages:
            messages = list(prompt.messages) or [{"role": "user", "content": prompt.text}]
            return Job.chat(self.model, messages, label=mode.name, **options)
        return Job.completion(self.model, prompt.text, label=mode.name, **options)

    def _one_by_one(self, mode: Mode, count: int) -> list[Record]:
        """Send requests that each wait for the one before; all must be answered."""
        records: list[Record] = []
        for index in range(count):
            records += asyncio.run(run_load(self.target, [self._job(mode, index)], [0.0], LONGEST))
            if records[-1].outcome != "ok":
                status = f" (status {records[-1].status})" if records[-1].status else ""
                raise ServerError(f"{mode.name}: {records[-1].outcome}{status}: {records[-1].error}")
        return records

    def timeout(self, mode: Mode) -> float:
        """Seconds that a request may take."""
        factor = self.args.timeout_factor
        return self.args.timeout if factor is None else factor * self.alone[mode.name]

    def warm_up(self, mode: Mode) -> None:
        """Some requests before it counts; the fastest tells how long one takes alone, since noise only adds."""
        records = self._one_by_one(mode, self.args.warm_up)
        last = records[-1]
        said = last.specprefill or {}
        if mode.keep_rate is not None and not said.get("engaged"):
            reason = said.get("reason", "the server does not say")
            self.console.print(f"[yellow]{mode.name}: the prompt was not read sparsely ({reason})[/yellow]")
        self.alone[mode.name] = min(record.e2e for record in records if record.e2e is not None)

    def run(self, mode: Mode, rate: float) -> bool:
        """Offer one rate and note what came of it; whether it held."""
        args = self.args
        if self.rows:
            time.sleep(args.pause)
        constantly = args.protocol == "constant"
        due = constant(rate, args.requests) if constantly else poisson(rate, args.requests, args.seed)
        jobs = [self._job(mode, index) for index in range(args.requests)]
        missed, allowed = 0, allowed_misses(args)

        def on_end(record: Record) -> bool:
            nonlocal missed
            missed += is_missed(record)
            return constantly and missed > allowed

        cpu = time.process_time()
        records = asyncio.run(run_load(self.target, jobs, due, self.timeout(mode), on_end))
        cpu = time.process_time() - cpu
        if missed and all(record.outcome in ("lost", "cancelled") for record in records):
            raise ServerError(f"the server is gone: {next(record.error for record in records if record.error)}")
        found = summary(records, self.objectives)
        row: dict[str, Any] = {"mode": mode.name, "keep_rate": mode.keep_rate, "rate": rate, "missed": missed}
        row["timeout"] = self.timeout(mode)
        row |= {"holds": missed <= allowed, **found, "client_cpu_share": cpu / max(found["duration"], 1e-9)}
        self.rows.append(row)
        self.mixes[mode.name, rate] = mix_of(records)
        if args.records:
            with args.records.open("a") as file:
                file.writelines(json.dumps({"rate": rate, **record.as_dict()}) + "\n" for record in records)
        e2e = row["e2e"]
        middle = f", half of them within {e2e['p50']:.2f} s" if e2e else ""
        verdict = "holds" if row["holds"] else "fails"
        self.console.log(f"{mode.name}, {rate:.3g} a second: {verdict}, {missed} of {args.requests} missed{middle}")
        if row["client_late"]:
            late = row["lateness"]["p99"]
            self.console.print(
                f"[yellow]the client was late itself: 1 % of requests by more than {late:.3f} s[/yellow]"
            )
        return bool(row["holds"])

    def find_rate(self, mode: Mode) -> Search:
        """The highest rate that holds."""

        def holds(rate: float) -> bool:
            return self.run(mode, rate)

        if self.args.rates:
            return try_rates(self.args.rates, holds)
        alone = self.alone[mode.name]
        if alone > self.timeout(mode):
            self.console.print(f"[yellow]{mode.name}: one request alone takes {alone:.2f} s: no rate can hold[/yellow]")
            return Search(None, None, ())
        # Faster than in the time that one takes, all of them come at once: no higher rate is another one.
        start = self.args.start_rate or 1 / alone
        most = max(start, self.args.requests / alone)
        found = search_rate(start, holds, precision=self.args.precision, most=most)
        if found.failed is None:
            said = f"{mode.name}: {self.args.requests} requests at once are answered in time: too few to find a rate"
            self.console.print(f"[yellow]{said}[/yellow]")
        return found


def compare(args: QpsArgs, bench: Bench, found: Sequence[tuple[Mode, Search]]) -> list[dict[str, Any]]:
    """Highest rates side by side, with speed-ups over dense and the ceiling where it can be told."""
    dense = next((search.best for mode, search in found if mode.name == "dense"), None)
    shapes = None
    if args.main is not None and args.speculator is not None:
        shapes = [open_checkpoint(name).config for name in (args.main, args.speculator)]
    rows = []
    for mode, search in found:
        speedup = ceiling = None
        if mode.keep_rate is not None and search.best:
            compared = ((mode.name, search.best), ("dense", dense))
            cached = max(row["cached_share"] for row in bench.rows if (row["mode"], row["rate"]) in compared)
            mix = bench.mixes[mode.name, search.best]
            speedup = search.best / dense if dense else None
            if shapes and mix and cached <= MOST_CACHED:
                ceiling = mix_ceiling(shapes[0], shapes[1], mix)
        share = speedup / ceiling if speedup and ceiling else None
        rows.append(
            {
                "mode": mode.name,
                "keep_rate": mode.keep_rate,
                "max_rate": search.best,
                "failed_rate": search.failed,
                "speedup": speedup,
                "ceiling": ceiling,
                "share_of_ceiling": share,
            }
        )
    return rows


def about(args: QpsArgs) -> dict[str, Any]:
    """Machine, versions, command and settings of the client; the key is not told."""
    settings = {
        name: value for name, value in asdict(args).items() if name not in ("api_key", "out", "records", "plot")
    }
    return {**about_client(args.api_key), "settings": {**settings, "prompts": [str(path) for path in args.prompts]}}


def measure(args: QpsArgs, bench: Bench) -> list[tuple[Mode, Search]]:
    """All runs; the highest rates where they were looked for."""
    ways = modes(args)
    bench.size_prompts(ways[-1])
    for mode in ways:
        bench.warm_up(mode)
    if args.protocol == "constant":
        return [(mode, bench.find_rate(mode)) for mode in ways]
    for rate in sorted(args.rates):
        for mode in ways:
            bench.run(mode, rate)
    return []
