"""What a caller can set: frozen dataclasses that check themselves, and the source of the command-line flags."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Self

import numpy as np

from specprefill_jax.errors import argument_error

KeepRate = float | Literal["auto"]
"""Share of the prompt's chunks that is read, or "auto": as much as the prompt asks for."""

MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20

PAPER_SETTINGS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "SpecPrefill": MappingProxyType({"chunk_size": 1, "pool_width": 0, "look_ahead": 1}),
        "Full": MappingProxyType({"chunk_size": 32, "pool_width": 13, "look_ahead": 1}),
        "Full LAH": MappingProxyType({"chunk_size": 32, "pool_width": 13, "look_ahead": 8}),
    }
)
"""The settings the paper (arXiv 2502.02789) names in its tables; see `SpecPrefillConfig.paper_setting`."""


def check_integer(
    name: str, value: object, minimum: int, maximum: int | None = None, allowed: str | None = None
) -> int:
    """Return `value` as an int from `minimum` to `maximum`; numpy integers pass, bools, floats and strings do not."""
    if allowed is None:
        allowed = f"an integer of at least {minimum}" if maximum is None else f"an integer from {minimum} to {maximum}"
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise argument_error(name, value, allowed)
    number = int(value)
    if number < minimum or (maximum is not None and number > maximum):
        raise argument_error(name, value, allowed)
    return number


def check_real(name: str, value: object, allowed: str, accept: Callable[[float], bool]) -> float:
    """Return `value` as a finite Python float that `accept` takes; numpy scalars pass, bools and strings do not.

    A narrow numpy float stands for the number it prints as: np.float32(0.3) is 0.3, not 0.30000001192.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise argument_error(name, value, allowed)
    try:
        number = float(str(value)) if isinstance(value, np.floating) else float(value)
    except OverflowError:  # an int too large for a float
        raise argument_error(name, value, allowed) from None
    if not math.isfinite(number) or not accept(number):
        raise argument_error(name, value, allowed)
    return number


def check_flag(name: str, value: object) -> bool:
    """Return `value` as a Python bool; only True and False (Python's or numpy's) pass."""
    if not isinstance(value, bool | np.bool_):
        raise argument_error(name, value, "True or False")
    return bool(value)


def check_spans(name: str, spans: object, num_tokens: int | None = None) -> tuple[tuple[int, int], ...]:
    """Return token spans [start, end) as a tuple of pairs; each must hold a token, and end by `num_tokens` if given."""
    within = "" if num_tokens is None else f" <= {num_tokens}, the prompt's length"
    allowed = f"pairs (start, end) of token offsets with 0 <= start < end{within}"
    if isinstance(spans, str | bytes) or not isinstance(spans, Iterable):
        raise argument_error(name, spans, allowed)
    checked = []
    for position, span in enumerate(spans):
        here = f"{name}[{position}]"
        pair = tuple(span) if isinstance(span, Iterable) and not isinstance(span, str | bytes) else ()
        if len(pair) != 2:
            raise argument_error(here, span, allowed)
        try:
            start = check_integer(here, pair[0], 0)
            checked.append((start, check_integer(here, pair[1], start + 1, num_tokens)))
        except ValueError:
            raise argument_error(here, pair, allowed) from None
    return tuple(checked)


def _check_ids(name: str, ids: object, allowed: str) -> tuple[int, ...]:
    """Return token ids as a tuple; a single id passes as itself."""
    if isinstance(ids, int | np.integer) and not isinstance(ids, bool):
        ids = (ids,)
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise argument_error(name, ids, allowed)
    values = tuple(ids)
    try:
        return tuple(check_integer(name, token, 0, 2**31 - 1) for token in values)
    except ValueError:
        raise argument_error(name, values, allowed) from None


def _check_heads(heads: object) -> tuple[tuple[int, int], ...]:
    """Return pairs (layer, head) as a sorted tuple without repetitions."""
    allowed = "pairs (layer, head) of integers of at least 0"
    if isinstance(heads, str | bytes) or not isinstance(heads, Iterable):
        raise argument_error("scoring_heads", heads, allowed)
    values = tuple(heads)
    found = set()
    for value in values:
        pair = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else ()
        if len(pair) != 2:
            raise argument_error("scoring_heads", values, allowed)
        layer, head = (check_integer("scoring_heads", number, 0, allowed=allowed) for number in pair)
        found.add((layer, head))
    return tuple(sorted(found))


@dataclass(frozen=True)
class SpecPrefillConfig:
    """How a prompt is scored and how much of it the main model reads.

    Values are checked and normalised on construction (numpy scalars become Python numbers, lists become tuples), so
    that equal settings compare and hash equal. A value that is not allowed raises `errors.ArgumentError`.
    """

    keep_rate: KeepRate = 0.3
    """Share of the prompt's chunks that the main model reads, above 0 and up to 1: ceil(rate * chunks), exactly.
    0.3 cost the paper's pair nothing on LongBench (53.92 against 53.55 in full); 0.1 is three times cheaper and loses
    on tasks that count or sum over the whole prompt. "auto" keeps as few as leave the speculator's own predictions as
    they are, and reads prompts whole that have no such few; not in paper mode."""

    look_ahead: int | None = None
    """Queries that score the prompt: its last token, and the first look_ahead - 1 tokens the speculator generates.
    1 means no look-ahead. None: 8, or 1 for a speculator that is the first layers of a model (it cannot generate)."""

    pool_width: int | None = 13
    """Width of the average pooling over attention rows along the prompt: odd; 0 or None for none (stored as 0)."""

    chunk_size: int = 32
    """Tokens that are kept or dropped together. 1 is the paper's token mode."""

    eos_token_ids: tuple[int, ...] | None = None
    """Tokens that end the look-ahead. None takes the speculator's own; an empty tuple means that none does."""

    mode: Literal["product", "paper"] = "product"
    """"product": first chunk, tail and forced spans are kept, and prompts that gain nothing are read whole.
    "paper": exactly the published method; nothing is forced and nothing is read whole. The fields below do not apply
    to it, except `enabled`."""

    tail_tokens: int = 64
    """The prompt's last tokens, always kept (every chunk that they touch), so that the question, the end of the chat
    template and the position that answers are never dropped. At least 1."""

    forced_spans: tuple[tuple[int, int], ...] = ()
    """Further spans [start, end) of token offsets that are always kept (every chunk that they touch)."""

    min_prompt_tokens: int = 512
    """Shorter prompts are read whole: forced chunks are most of their budget, and there is little to gain."""

    min_predicted_gain: float = 1.1
    """Prompts for which the cost model predicts a smaller speed-up of the first token are read whole; 0: none is."""

    enabled: bool = True
    """False reads every prompt whole, in either mode."""

    max_divergence: float = 0.15
    """With keep_rate "auto" and a look-ahead of 2 or more: the fewest chunks are kept with which the speculator,
    attending to them alone, predicts its look-ahead tokens as it did from the whole prompt, within so many nats a token
    (`SelfCheck`), at least 0. Prompts for which `max_keep_rate` does not suffice are read whole, as
    "information_dense"."""

    importance_share: float = 0.4
    """With keep_rate "auto" and no look-ahead (a `query_window`, or a speculator that cannot generate): chunks are kept
    in the order of their scores until they hold this share of the importance of all that are not kept anyway, above 0
    and up to 1."""

    min_keep_rate: float = 0.05
    """With keep_rate "auto" or a `ttft_budget_ms`: at least this share of the chunks is kept, forced ones included."""

    max_keep_rate: float = 0.5
    """With keep_rate "auto": at most this share of the chunks is kept; the predicted gain is that of so many."""

    ttft_budget_ms: float | None = None
    """Milliseconds until the first token, at most, by the cost model and this machine's measured rates: speculating,
    scoring and the main prefill of a prompt that waits for nobody and finds nothing in a cache. As many chunks are
    dropped as it takes, at any keep rate, but no more than `min_keep_rate` allows; None: no limit."""

    query_window: int = 0
    """Score with the queries of so many of the prompt's own last tokens, later ones weighing more, in place of a
    look-ahead: the speculator then generates nothing. 0: look ahead. Not in paper mode."""

    scoring_heads: tuple[tuple[int, int], ...] = ()
    """Score with these heads of the speculator alone: pairs (layer, query head), both from 0; a calibrated few find
    more than all do. Empty: all. Not in paper mode."""

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        if not isinstance(self.keep_rate, str) or self.keep_rate != "auto":
            allowed = "a number above 0 and up to 1, or 'auto'"
            put("keep_rate", check_real("keep_rate", self.keep_rate, allowed, lambda x: 0 < x <= 1))
        elif self.mode == "paper":
            raise argument_error("keep_rate", self.keep_rate, "a number in paper mode, whose budget is fixed")
        if self.look_ahead is not None:
            put("look_ahead", check_integer("look_ahead", self.look_ahead, 1))
        pool = "an odd integer, or 0 or None for no pooling"
        width = 0 if self.pool_width is None else check_integer("pool_width", self.pool_width, 0, allowed=pool)
        if width and width % 2 == 0:
            raise argument_error("pool_width", self.pool_width, pool)
        put("pool_width", width)
        put("chunk_size", check_integer("chunk_size", self.chunk_size, 1))
        if self.eos_token_ids is not None:
            allowed = "None, or token ids (integers of at least 0)"
            put("eos_token_ids", _check_ids("eos_token_ids", self.eos_token_ids, allowed))
        if self.mode not in ("product", "paper"):
            raise argument_error("mode", self.mode, "'product' or 'paper'")
        put("tail_tokens", check_integer("tail_tokens", self.tail_tokens, 1))
        put("forced_spans", check_spans("forced_spans", self.forced_spans))
        if self.mode == "paper" and self.forced_spans:
            raise argument_error("forced_spans", self.forced_spans, "empty in paper mode, which forces nothing")
        put("min_prompt_tokens", check_integer("min_prompt_tokens", self.min_prompt_tokens, 0))
        allowed = "a finite number of at least 0"
        put("min_predicted_gain", check_real("min_predicted_gain", self.min_predicted_gain, allowed, lambda x: x >= 0))
        put("enabled", check_flag("enabled", self.enabled))
        rate = "a number above 0 and up to 1"
        for name in ("importance_share", "min_keep_rate", "max_keep_rate"):
            put(name, check_real(name, getattr(self, name), rate, lambda x: 0 < x <= 1))
        if self.min_keep_rate > self.max_keep_rate:
            raise argument_error("min_keep_rate", self.min_keep_rate, f"at most max_keep_rate, {self.max_keep_rate}")
        allowed = "a finite number of at least 0"
        put("max_divergence", check_real("max_divergence", self.max_divergence, allowed, lambda x: x >= 0))
        if self.ttft_budget_ms is not None:
            allowed = "None, or a finite number above 0"
            put("ttft_budget_ms", check_real("ttft_budget_ms", self.ttft_budget_ms, allowed, lambda x: x > 0))
        put("query_window", check_integer("query_window", self.query_window, 0))
        if self.query_window and self.mode == "paper":
            raise argument_error("query_window", self.query_window, "0 in paper mode, which looks ahead")
        put("scoring_heads", _check_heads(self.scoring_heads))
        if self.scoring_heads and self.mode == "paper":
            raise argument_error("scoring_heads", self.scoring_heads, "empty in paper mode, which scores with all")
        if self.query_window and self.look_ahead is not None:
            raise argument_error("look_ahead", self.look_ahead, "None beside a query_window, which takes its place")

    @classmethod
    def paper(
        cls,
        keep_rate: float,
        look_ahead: int | None = None,
        pool_width: int | None = 13,
        chunk_size: int = 32,
        eos_token_ids: tuple[int, ...] | None = None,
    ) -> Self:
        """The published method (arXiv 2502.02789) and nothing else."""
        return cls(keep_rate, look_ahead, pool_width, chunk_size, eos_token_ids, mode="paper")

    @classmethod
    def paper_setting(cls, name: str, keep_rate: float, eos_token_ids: tuple[int, ...] | None = None) -> Self:
        """One of the settings the paper's tables name: "SpecPrefill", "Full" or "Full LAH" (`PAPER_SETTINGS`)."""
        if not isinstance(name, str) or name not in PAPER_SETTINGS:
            raise argument_error("name", name, "one of " + ", ".join(repr(known) for known in PAPER_SETTINGS))
        return cls.paper(keep_rate, eos_token_ids=eos_token_ids, **PAPER_SETTINGS[name])


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn and when generation ends.

    The filters apply in this order: repetition penalty, temperature, top-k, top-p, min-p. Values are checked and
    normalised on construction; one that is not allowed raises `errors.ArgumentError`.
    """

    max_tokens: int = 128
    """Most tokens to generate, at least 1."""

    temperature: float = 0.0
    """0 takes the likeliest token each time; above 0 the logits are divided by it and a token is drawn."""

    top_k: int = 0
    """Draw among the k likeliest tokens; 0 for all."""

    top_p: float = 1.0
    """Draw among the likeliest tokens that together hold this probability, above 0 and up to 1; 1 for all."""

    min_p: float = 0.0
    """Draw among tokens at least this share as likely as the likeliest, from 0 to below 1; 0 for all."""

    repetition_penalty: float = 1.0
    """Above 1 makes tokens of the prompt and the answer so far less likely, below 1 more; 1 for neither."""

    seed: int | None = None
    """Seed of the draw, 0 to 2**32 - 1: the same seed and prompt give the same answer. None takes a fresh one."""

    stop: tuple[str, ...] = ()
    """Strings that end the answer and are left out of it, at most 16; a lone string is one of them."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, beside the model's own end of sequence."""

    ignore_eos: bool = False
    """True goes on past the model's end-of-sequence tokens."""

    logprobs: int | None = None
    """Log-probabilities with every token: its own and this many of the likeliest, 0 to 20. None for none."""

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        def real(name: str, allowed: str, accept: Callable[[float], bool]) -> None:
            put(name, check_real(name, getattr(self, name), allowed, accept))

        put("max_tokens", check_integer("max_tokens", self.max_tokens, 1))
        real("temperature", "a finite number of at least 0", lambda x: x >= 0)
        put("top_k", check_integer("top_k", self.top_k, 0, allowed="an integer of at least 0 (0: all tokens)"))
        real("top_p", "a number above 0 and up to 1", lambda x: 0 < x <= 1)
        real("min_p", "a number from 0 to below 1", lambda x: 0 <= x < 1)
        real("repetition_penalty", "a finite number above 0", lambda x: x > 0)
        if self.seed is not None:
            put("seed", check_integer("seed", self.seed, 0, 2**32 - 1, "None, or an integer from 0 to 4294967295"))
        put("stop", _check_stop(self.stop))
        put("stop_token_ids", _check_ids("stop_token_ids", self.stop_token_ids, "token ids (integers of at least 0)"))
        put("ignore_eos", check_flag("ignore_eos", self.ignore_eos))
        if self.logprobs is not None:
            allowed = f"None, or an integer from 0 to {MAX_LOGPROBS}"
            put("logprobs", check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, allowed))


def _check_stop(stop: object) -> tuple[str, ...]:
    """Return stop strings as a tuple; a lone string is one stop string, not its letters."""
    allowed = f"a string or at most {MAX_STOP_STRINGS} strings, none of them empty"
    if isinstance(stop, str):
        stop = (stop,)
    if isinstance(stop, bytes) or not isinstance(stop, Iterable):
        raise argument_error("stop", stop, allowed)
    values = tuple(stop)
    if len(values) > MAX_STOP_STRINGS or any(not isinstance(value, str) or not value for value in values):
        raise argument_error("stop", values, allowed)
    return values
