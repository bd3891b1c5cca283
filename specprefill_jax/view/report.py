"""What is said about a run, before it is drawn in a terminal, on a page or as JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, Self

from specprefill_jax.planning import Reason
from specprefill_jax.selection import Selection
from specprefill_jax.timing import Timings

REASONS: Mapping[Reason, str] = MappingProxyType(
    {
        Reason.ENGAGED: "the speculator chose what to read",
        Reason.DISABLED: "sparse prefill was switched off",
        Reason.PROMPT_LOGPROBS: "log-probabilities of the prompt need every token of it",
        Reason.SHORT_PROMPT: "the prompt is short",
        Reason.NOTHING_TO_DROP: "the budget covers every chunk",
        Reason.FORCED_COVER_BUDGET: "what is always kept fills the budget",
        Reason.LOW_PREDICTED_GAIN: "the cost model predicts too little gain",
        Reason.INFORMATION_DENSE: "no part of the prompt could be left out",
        Reason.SPECULATOR_FAILED: "the speculator failed",
    }
)
"""Each reason in words."""

DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "smollm2-135m": "SmolLM2-135M-Instruct",
        "smollm2-135m-deep4": (
            "SmolLM2-135M with three zero-output blocks after every block: the same function at four times the "
            "compute; a stand-in for a larger main model"
        ),
    }
)
"""What the built-in models are; whatever shows one of them says so."""


def describe(model: str) -> str:
    """`model` as it was asked for, with what it is behind it where it is built in."""
    return f"{model} ({DESCRIPTIONS[model]})" if model in DESCRIPTIONS else model


class Output(Protocol):
    """What the pipeline hands back, as far as a report needs it."""

    @property
    def text(self) -> str:
        """The answer."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Its tokens."""

    @property
    def finish_reason(self) -> str:
        """Why it ended."""

    @property
    def selection(self) -> Selection:
        """What was read."""

    @property
    def timings(self) -> Timings:
        """Where the time went."""


@dataclass(frozen=True)
class Run:
    """One prompt answered one way.

    Attributes:
        label: "sparse" or "dense".
        text: the answer.
        new_tokens: tokens of the answer.
        finish_reason: why it ended.
        timings: where the time went.
        kept_tokens: tokens the main model read.
        total_tokens: tokens of the prompt.
        reason: why it was read in part or whole.
        detail: more about the reason, or None.
        predicted_gain: the cost model's speed-up of the first token, or None where it was not asked.
        wall: seconds from the request to the end of the answer, by the caller's clock.
    """

    label: str
    text: str
    new_tokens: int
    finish_reason: str
    timings: Timings
    kept_tokens: int
    total_tokens: int
    reason: Reason
    detail: str | None
    predicted_gain: float | None
    wall: float

    @classmethod
    def of(cls, label: str, output: Output, wall: float) -> Self:
        """The run that gave `output`."""
        chosen = output.selection
        return cls(
            label=label,
            text=output.text,
            new_tokens=len(output.token_ids),
            finish_reason=str(output.finish_reason),
            timings=output.timings,
            kept_tokens=chosen.num_kept,
            total_tokens=chosen.num_tokens,
            reason=chosen.reason,
            detail=chosen.detail,
            predicted_gain=chosen.plan.predicted_gain,
            wall=wall,
        )

    @property
    def keep_rate(self) -> float:
        """Tokens read over tokens of the prompt."""
        return self.kept_tokens / self.total_tokens

    @property
    def engaged(self) -> bool:
        """Whether part of the prompt was left out."""
        return self.reason == Reason.ENGAGED

    @property
    def why(self) -> str:
        """The reason as the machine-readable word, what it means, and the detail if there is one."""
        return f"{self.reason}: {REASONS[self.reason]}" + (f" ({self.detail})" if self.detail else "")

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {
            "label": self.label,
            "text": self.text,
            "new_tokens": self.new_tokens,
            "finish_reason": self.finish_reason,
            "engaged": self.engaged,
            "reason": str(self.reason),
            "detail": self.detail,
            "kept_tokens": self.kept_tokens,
            "total_tokens": self.total_tokens,
            "keep_rate": self.keep_rate,
            "predicted_gain": self.predicted_gain,
            "timings": self.timings.as_dict(),
            "wall_seconds": self.wall,
        }


@dataclass(frozen=True)
class Report:
    """All runs over one prompt by one pair of models.

    Attributes:
        main: the main model, as it was asked for.
        speculator: the speculator, or None where every run was dense.
        runs: one run, or a dense and a sparse one.
        compile_seconds: what compiling took before the runs, which is in no phase; None where it was not done
            separately, and so is in the phases.
    """

    main: str
    speculator: str | None
    runs: tuple[Run, ...]
    compile_seconds: float | None = None

    @property
    def dense(self) -> Run | None:
        """The run that was asked to read the prompt whole, if there is one beside another."""
        return next((run for run in self.runs if run.label == "dense"), None) if len(self.runs) > 1 else None

    @property
    def shown(self) -> Run:
        """The run whose choice is drawn: the sparse one where there are two."""
        return self.runs[-1]

    @property
    def speedup(self) -> float | None:
        """Dense over sparse time to first token, where both were measured."""
        sparse = self.shown.timings.ttft
        return self.dense.timings.ttft / sparse if self.dense is not None and sparse > 0 else None

    @property
    def ceiling(self) -> float | None:
        """The speed-up the cost model allows for what was kept."""
        return self.shown.predicted_gain

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready values; `speedup` and `ceiling` are None where there is nothing to compare."""
        return {
            "main": self.main,
            "main_description": DESCRIPTIONS.get(self.main),
            "speculator": self.speculator,
            "speculator_description": None if self.speculator is None else DESCRIPTIONS.get(self.speculator),
            "runs": [run.as_dict() for run in self.runs],
            "compile_seconds": self.compile_seconds,
            "speedup": self.speedup,
            "ceiling": self.ceiling,
        }


def seconds(value: float) -> str:
    """A time for people: `12.3 s`, `1.23 s`, `45 ms`, `0.3 ms`."""
    if value >= 10:
        return f"{value:.1f} s"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1000:.0f} ms" if value >= 0.01 else f"{value * 1000:.1f} ms"


def times(value: float) -> str:
    """A speed-up for people: `2.41x`."""
    return f"{value:.2f}x"


def percent(value: float) -> str:
    """A share for people: `9.8 %`."""
    return f"{value * 100:.1f} %"
