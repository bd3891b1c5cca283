"""What the engine adds to the models: the host's time a round, decoding in batches, a short prompt beside a long one.

    python scripts/bench_engine.py --out benchmarks/engine.json

The first needs no model: a runner that gives out tokens at once stands in, so that what is left is scheduling, building
the batch, and turning tokens into text and events.
"""

import json
import statistics
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from specprefill_jax.config import SamplingParams, SpecPrefillConfig
from specprefill_jax.engine.blocks import BlockManager
from specprefill_jax.engine.engine import Engine
from specprefill_jax.engine.loop import Loop
from specprefill_jax.engine.request import Delta, EngineConfig, Event, Finished, Request
from specprefill_jax.engine.runner import Batch, Chosen
from specprefill_jax.engine.scheduler import Phase, Scheduler, Sequence
from specprefill_jax.engine.warm_up import idle_batch
from specprefill_jax.engine.work import Work
from specprefill_jax.machine import describe
from specprefill_jax.models.builtin import builtin_folder
from specprefill_jax.planning import Reason
from specprefill_jax.selection import Selection
from specprefill_jax.speculative import Acceptance
from specprefill_jax.tokens import StreamDecoder, Tokenizer


@dataclass
class Args:
    """Time the engine's own work."""

    main: str = "smollm2-135m-deep4"
    """The main model."""
    speculator: str = "smollm2-135m"
    """The speculator."""
    running: int = 64
    """Requests that decode in the round that is timed."""
    rounds: int = 200
    rows: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Requests that decode together, with the real main model."""
    context: int = 1024
    """Tokens that each of them has in the cache."""
    long: int = 4096
    """Tokens of the long prompt."""
    short: int = 128
    """Tokens of the short one, which arrives while the long one is read whole."""
    prefill_chunk: int = 512
    out: Path | None = None
    """JSON file to write."""


@dataclass
class Instant:
    """A runner whose tokens are there at once."""

    max_running: int
    rows: list[int] = field(default_factory=list)
    eager: bool = True

    def decode(self, batch: Batch, positions: np.ndarray, slots: np.ndarray, pages: Any) -> Any:
        """Some token for each row."""
        tokens: Any = positions % 997 + 1000  # numpy arrays do where the loop reads what a device has computed
        none: Any = np.zeros(len(positions), np.float32)
        return Chosen(tokens, (none, none, none))

    def prefill(self, tokens: np.ndarray, positions: np.ndarray, start: int, pages: Any) -> Any:
        """Nothing."""
        return np.zeros((1, 1))

    def choose(self, hidden: Any, batch: Batch) -> Any:
        """Some token."""
        return self.decode(batch, batch.index, batch.index, ())


def round_ms(tokenizer: Tokenizer, running: int, rounds: int) -> dict[str, float]:
    """Milliseconds of the host that a round of `running` streams takes, and of these the scheduler's."""
    pages = BlockManager(running * 80)
    scheduler = Scheduler(pages, BlockManager(2), max_running=running, chunk=512, draft_cost=0.25, cheap_tokens=0)
    runner: Any = Instant(running, [running])

    def unasked(*_: object) -> Any:
        raise AssertionError("prompts that are read whole need no plan")

    loop = Loop(runner, scheduler, unasked, unasked, memoised_selections=1, begun=lambda _: None, ended=lambda _: None)
    for number in range(running):
        prompt = np.random.default_rng(number).integers(0, 49152, 512).astype(np.int32)
        sequence = Sequence(str(number), prompt, 100_000, 0, 512, kept=512, dense=512)
        selection = Selection.whole(512, Reason.DISABLED)
        request = Request(str(number), prompt, SamplingParams(max_tokens=100_000, stop=("never said",)))
        text = StreamDecoder(tokenizer, request.sampling.stop)
        none = Acceptance(0, 1.0)
        work = Work(request, lambda event: None, selection.plan, sequence, text, frozenset(), 0, none, selection)
        work.kept = np.arange(512, dtype=np.int32)
        loop.admit(work)
    while any(work.sequence.phase is not Phase.DECODE for work in loop.works.values()):
        loop.round()
    whole, own = [], []
    schedule = scheduler.schedule

    def timed() -> Any:
        start = time.perf_counter()
        planned = schedule()
        own.append(time.perf_counter() - start)
        return planned

    with mock.patch.object(scheduler, "schedule", timed):
        for _ in range(rounds):
            start = time.perf_counter()
            loop.round()
            whole.append(time.perf_counter() - start)
    return {"round_ms": 1e3 * statistics.median(whole), "scheduler_ms": 1e3 * statistics.median(own)}


class Stream:
    """A request's events, with their times."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.times: list[float] = []
        self.end: Finished | None = None
        self.done = threading.Event()

    def __call__(self, event: Event) -> None:
        """Take one."""
        if isinstance(event, Delta):
            self.times.append(time.perf_counter())
        else:
            self.end = event
            self.done.set()


def decode_rates(engine: Engine, rows: tuple[int, ...], context: int, steps: int = 6) -> list[dict[str, float]]:
    """Seconds a step, and tokens a second, of so many streams with `context` tokens each; the engine must not run."""
    runner, found = engine._runner, []
    for count in rows:
        per_row = -(-(context + steps) // 32)
        pages = [list(range(1 + row * per_row, 1 + (row + 1) * per_row)) for row in range(count)]
        batch = replace(idle_batch(count, 0), rows=np.arange(count, dtype=np.int32))
        times = []
        for step in range(steps):
            at = np.full(count, context + step, np.int32)
            start = time.perf_counter()
            np.asarray(runner.decode(batch, at, at, pages).tokens)
            times.append(time.perf_counter() - start)
        seconds = statistics.median(times[1:])
        found.append({"rows": count, "seconds_per_step": seconds, "tokens_per_s": count / seconds})
    return found


def overtaking(engine: Engine, long: int, short: int) -> dict[str, float]:
    """How many chunks of a long prompt, read whole, a short one's first token takes; and what it takes alone."""
    rng = np.random.default_rng(0)
    whole = SpecPrefillConfig(enabled=False)

    def ask(name: str, tokens: int) -> Stream:
        stream = Stream()
        prompt = rng.integers(100, engine.vocab_size, tokens).astype(np.int32)
        engine.submit(Request(name, prompt, SamplingParams(max_tokens=1, ignore_eos=True), whole), stream)
        return stream

    start = time.perf_counter()
    alone = ask("alone", short)
    alone.done.wait()
    seconds_alone = alone.times[0] - start
    start = time.perf_counter()
    first = ask("long", long)
    chunks = -(-long // engine.config.prefill_chunk)
    time.sleep(seconds_alone)  # it is being read
    asked = time.perf_counter()
    second = ask("short", short)
    second.done.wait()
    first.done.wait()
    chunk = (first.times[0] - start - seconds_alone) / chunks
    waited = second.times[0] - asked
    return {
        "seconds_alone": seconds_alone,
        "seconds_beside_the_long": waited,
        "seconds_per_chunk": chunk,
        "chunks_waited": (waited - seconds_alone) / chunk,
    }


def main() -> None:
    """Run the command."""
    args = tyro.cli(Args)
    console = Console()
    tokenizer = Tokenizer.from_folder(builtin_folder("smollm2-135m"))
    result: dict[str, Any] = describe() | {"main": args.main, "speculator": args.speculator}
    result["host"] = {"running": args.running, **round_ms(tokenizer, args.running, args.rounds)}
    console.print(result["host"])
    limits = EngineConfig(
        max_running=max(args.rows),
        prefill_chunk=args.prefill_chunk,
        max_model_len=args.long + 32,
        cache_tokens=max(max(args.rows) * (args.context + 64), args.long + args.short + 64),
        speculator_cache_tokens=args.long + 64,
    )
    engine = Engine.from_pretrained(args.main, args.speculator, dtype="float32", config=limits)
    result["decode"] = decode_rates(engine, args.rows, args.context)
    table = Table("rows", "seconds a step", "tokens/s")
    for row in result["decode"]:
        table.add_row(f"{row['rows']}", f"{row['seconds_per_step']:.3f}", f"{row['tokens_per_s']:.2f}")
    console.print(table)
    engine.start()
    result["overtaking"] = overtaking(engine, args.long, args.short)
    engine.close()
    console.print(result["overtaking"])
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
