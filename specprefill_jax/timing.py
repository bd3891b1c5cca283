"""Where the time of one prompt went: phases that follow each other without a gap and add up to the wall clock."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import jax

from specprefill_jax.errors import argument_error

PHASES = ("tokenise", "queue", "speculate", "score", "main_prefill", "first_token", "decode")
"""The phases in the order a prompt goes through them; a dense prefill spends nothing in `speculate` and `score`, and
only an engine that reads several prompts lets one wait in `queue`."""

LABELS: Mapping[str, str] = MappingProxyType(
    {
        "tokenise": "tokenise",
        "queue": "wait in the queue",
        "speculate": "speculate",
        "score": "score and choose",
        "main_prefill": "main prefill",
        "first_token": "first token",
        "decode": "decode",
    }
)
"""What people are shown for each phase."""


class Lap(NamedTuple):
    """One phase of a run: its name, its seconds and how many tokens it worked on (None where that means nothing)."""

    name: str
    seconds: float
    tokens: int | None

    @property
    def label(self) -> str:
        """The phase's name as people are shown it."""
        return LABELS[self.name]

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens over seconds, or None without tokens or time."""
        return self.tokens / self.seconds if self.tokens and self.seconds > 0 else None


@dataclass(frozen=True)
class Timings:
    """Seconds spent in each phase of one prompt, and the tokens each phase worked on.

    Attributes:
        tokenise: text or chat to token ids.
        queue: waiting for the engine to begin.
        speculate: the speculator's prefill and look-ahead.
        score: token importance, chunk scores and the choice.
        main_prefill: the main model over the kept tokens (all of them when the prompt is read whole).
        first_token: choosing the first new token and handing it out.
        decode: every later token.
        tokens: phase name to number of tokens, for the phases where a count was given.
    """

    tokenise: float = 0.0
    queue: float = 0.0
    speculate: float = 0.0
    score: float = 0.0
    main_prefill: float = 0.0
    first_token: float = 0.0
    decode: float = 0.0
    tokens: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in PHASES:
            seconds = getattr(self, name)
            if not 0 <= seconds < float("inf"):
                raise argument_error(name, seconds, "a finite number of seconds, 0 or more")
        for name in self.tokens:
            if name not in PHASES:
                raise argument_error("tokens", name, f"keyed by phases ({', '.join(PHASES)})")
        object.__setattr__(self, "tokens", MappingProxyType(dict(self.tokens)))

    @property
    def ttft(self) -> float:
        """Time to first token: everything before `decode`, in seconds."""
        return sum(getattr(self, name) for name in PHASES[:-1])

    @property
    def total(self) -> float:
        """All phases together, in seconds."""
        return sum(getattr(self, name) for name in PHASES)

    def __str__(self) -> str:
        """The phases for people: `first token after 9.36 s (tokenise 0.01, ...), total 10.10 s`."""
        phases = ", ".join(f"{LABELS[name]} {getattr(self, name):.2f}" for name in PHASES if getattr(self, name) > 0)
        return f"first token after {self.ttft:.2f} s, total {self.total:.2f} s ({phases})"

    def laps(self) -> Iterator[Lap]:
        """Yield every phase in order, those that took no time included."""
        for name in PHASES:
            yield Lap(name, getattr(self, name), self.tokens.get(name))

    def as_dict(self) -> dict[str, Any]:
        """Plain dict for JSON: the phases in order, `ttft`, `total` (seconds) and `tokens` (counts by phase)."""
        seconds = {name: getattr(self, name) for name in PHASES}
        return {**seconds, "ttft": self.ttft, "total": self.total, "tokens": dict(self.tokens)}


class PhaseClock:
    """A stopwatch that is always in exactly one phase.

    A phase ends at the very reading of the clock that starts the next, so nothing is lost between two of them and the
    sum of all phases is the time from construction to the last reading. A phase may be entered again; its times add up.
    Work that JAX runs asynchronously belongs to the phase that waits for it.

        clock = PhaseClock()                          # in "tokenise"
        ids = tokenizer.encode(text)
        clock.phase("main_prefill", tokens=len(ids))
        logits = jax.block_until_ready(prefill(ids))
        clock.phase("first_token", tokens=1)
        ...
        timings = clock.stop()

    Args:
        first: the phase to start in.
        now: a monotonic clock in seconds.
    """

    def __init__(self, first: str = PHASES[0], now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._tokens: dict[str, int] = {}
        self._current: str | None = _known(first)
        self._since = now()

    def phase(self, name: str, tokens: int = 0) -> None:
        """End the current phase and be in phase `name` from here on, which works on `tokens` (more) tokens."""
        _known(name)
        self._lap(name)
        self.count(name, tokens)

    def count(self, name: str, tokens: int) -> None:
        """Add `tokens` to what phase `name` worked on; for counts known only later, such as tokens decoded."""
        if tokens < 0:
            raise argument_error("tokens", tokens, "0 or more")
        if tokens:
            self._tokens[_known(name)] = self._tokens.get(name, 0) + tokens

    def stop(self) -> Timings:
        """End the current phase and return the timings; a stopped clock stands still until the next `phase`."""
        self._lap(None)
        return self.timings()

    def timings(self) -> Timings:
        """The timings up to the last change of phase; the clock runs on."""
        return Timings(**self._seconds, tokens=self._tokens)

    def _lap(self, following: str | None) -> None:
        now = self._now()
        if self._current is not None:
            self._seconds[self._current] += now - self._since
        self._current, self._since = following, now


def _known(name: str) -> str:
    if name not in PHASES:
        raise argument_error("phase", name, f"one of {', '.join(PHASES)}")
    return name


@dataclass
class Marks:
    """Ends phases of the clock when their results are ready, without holding up what is enqueued behind them.

    Where a whole pass is one program, everything is enqueued first and the results are waited for in their order. A
    layerwise model fills the queue of the CPU's runtime, so that the host would only get to wait when all is over:
    there each phase is waited for at once, which costs nothing, host and device being the same.
    """

    clock: PhaseClock
    eager: bool

    def __post_init__(self) -> None:
        self._open: list[tuple[jax.Array, str]] = []

    def reach(self, result: jax.Array, following: str) -> None:
        """When `result` is ready, the clock goes over to phase `following`."""
        self._open.append((result, following))
        if self.eager:
            self.settle()

    def settle(self) -> None:
        """Wait for every result so far."""
        for result, following in self._open:
            jax.block_until_ready(result)
            self.clock.phase(following)
        self._open.clear()
