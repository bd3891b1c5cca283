"""What a load run's records say: percentiles, goodput, whether a rate holds, the highest that does, and the ceiling."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from specprefill_jax.config import check_integer, check_real
from specprefill_jax.costs import ModelShape, decode_flops, prefill_flops
from specprefill_jax.errors import argument_error
from specprefill_jax.evals.load import Record

PERCENTILES = (50, 90, 95, 99)
OBJECTIVES = ("ttft", "tpot", "e2e")
LATE = 0.05
"""Seconds: a client whose 99th percentile of lateness is above it did not offer the load that it says it did."""


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (interpolated between neighbours) and maximum; None of nothing."""
    if not values:
        return None
    points = np.percentile(values, PERCENTILES)
    named = {f"p{name}": float(value) for name, value in zip(PERCENTILES, points, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": float(max(values))}


def parse_objectives(pairs: Iterable[str]) -> dict[str, float]:
    """Objectives for goodput from "ttft=2", "tpot=0.1" and "e2e=10": the most seconds that a good request takes.

    Raises:
        ArgumentError: another name, the same one twice, or a value that is not a number of seconds above 0.
    """
    objectives: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        try:
            seconds = float(value)
        except ValueError:
            seconds = 0.0
        if name not in OBJECTIVES or name in objectives or not 0 < seconds < math.inf:
            raise argument_error("goodput", pair, "ttft=SECONDS, tpot=SECONDS or e2e=SECONDS, each once at most")
        objectives[name] = seconds
    return objectives


def is_good(record: Record, objectives: Mapping[str, float]) -> bool:
    """Whether a request was answered well and within every objective; one token has no TPOT that could be too long."""
    if record.outcome != "ok":
        return False
    for name, most in objectives.items():
        seconds = getattr(record, name)
        if seconds is None and name == "tpot":
            continue
        if seconds is None or seconds > most:
            return False
    return True


def is_missed(record: Record) -> bool:
    """Whether a request that has ended counts against its rate: it timed out, was refused, or failed in another way."""
    return record.outcome not in ("ok", "pending", "cancelled")


def summary(records: Sequence[Record], objectives: Mapping[str, float] | None = None) -> dict[str, Any]:
    """Counts, rates and latencies of one run, for JSON. Latencies are those of the requests that were answered.

    A run lasts from its beginning to the end of its last request. `offered_rate` is that of the requests sent.
    """
    sent = [record for record in records if record.sent is not None]
    answered = [record for record in sent if record.outcome == "ok"]
    ends = [record.end for record in sent if record.end is not None]
    duration = max(ends, default=0.0)
    outcomes = Counter(record.outcome for record in records)
    late = spread([record.late for record in sent if record.late is not None])

    def per_second(count: float) -> float:
        return count / duration if duration > 0 else 0.0

    found: dict[str, Any] = {
        "requests": len(records),
        "sent": len(sent),
        "outcomes": dict(sorted(outcomes.items())),
        "errors": dict(Counter(record.error for record in sent if is_missed(record)).most_common(5)),
        "duration": duration,
        "offered_rate": (len(sent) - 1) / (sent[-1].due - sent[0].due) if len(sent) > 1 else None,
        "completed_rate": per_second(len(answered)),
        "prompt_tokens_per_s": per_second(sum(record.prompt_tokens or 0 for record in answered)),
        "output_tokens_per_s": per_second(sum(record.generated for record in answered)),
        "ttft": spread([record.ttft for record in answered if record.ttft is not None]),
        "tpot": spread([record.tpot for record in answered if record.tpot is not None]),
        "itl": spread([gap for record in answered for gap in record.itl]),
        "e2e": spread([record.e2e for record in answered if record.e2e is not None]),
        "lateness": late,
        "client_late": late is not None and late["p99"] > LATE,
        "prompt_tokens": spread([record.prompt_tokens for record in answered if record.prompt_tokens is not None]),
        "kept_tokens": spread([record.kept_tokens for record in answered if record.kept_tokens is not None]),
        "cached_share": sum(map(_cached, answered)) / max(1, sum(record.prompt_tokens or 0 for record in answered)),
        "generated_tokens": spread([record.generated for record in answered]),
        "reasons": dict(Counter(str(record.specprefill.get("reason")) for record in answered if record.specprefill)),
        "goodput": None,
    }
    if objectives:
        good = sum(is_good(record, objectives) for record in records)
        share = good / len(records) if records else 0.0
        found["goodput"] = {"objectives": dict(objectives), "good": good, "share": share, "rate": per_second(good)}
    return found


def _cached(record: Record) -> int:
    details = (record.usage or {}).get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else 0


@dataclass(frozen=True)
class Search:
    """The outcome of a search for the highest rate that holds."""

    best: float | None
    """The highest that held, requests a second; None if none did."""
    failed: float | None
    """The lowest above it that did not; None if none was tried."""
    trials: tuple[tuple[float, bool], ...]
    """Every rate that was tried, in that order, and whether it held."""


def try_rates(rates: Sequence[float], holds: Callable[[float], bool]) -> Search:
    """The paper's sweep: the rates in ascending order, up to the first that does not hold."""
    trials: list[tuple[float, bool]] = []
    for rate in sorted(rates):
        trials.append((rate, holds(rate)))
        if not trials[-1][1]:
            break
    held = [rate for rate, ok in trials if ok]
    failed = [rate for rate, ok in trials if not ok]
    return Search(held[-1] if held else None, failed[0] if failed else None, tuple(trials))


def search_rate(
    start: float,
    holds: Callable[[float], bool],
    *,
    precision: float = 0.05,
    factor: float = 2.0,
    most_trials: int = 16,
    most: float = math.inf,
) -> Search:
    """The highest rate that holds: steps by `factor` from `start` until one holds and one does not, then halving.

    Halving is of ratios, and ends when the rate that failed is at most 1 + precision times the one that held, or when
    `most_trials` rates have been tried, or when `most` holds. It is given up when none of the first five holds. A rate
    is never tried twice, nor one above a rate that failed, or above `most`.
    """
    check_real("start", start, "a finite number above 0", lambda x: x > 0)
    check_real("precision", precision, "a finite number above 0", lambda x: x > 0)
    check_real("factor", factor, "a finite number above 1", lambda x: x > 1)
    check_integer("most_trials", most_trials, 1)
    if not most >= start:
        raise argument_error("most", most, f"at least start, {start}")
    best: float | None = None
    failed: float | None = None
    trials: list[tuple[float, bool]] = []
    while len(trials) < most_trials and not (best and (best >= most or (failed and failed <= best * (1 + precision)))):
        if best and failed:
            rate = math.sqrt(best * failed)
        elif best:
            rate = min(best * factor, most)
        else:
            rate = failed / factor if failed else start
        ok = holds(rate)
        trials.append((rate, ok))
        best, failed = (rate, failed) if ok else (best, rate)
        if best is None and len(trials) == 5:
            break
    return Search(best, failed, tuple(trials))


def mix_ceiling(main: ModelShape, speculator: ModelShape, mix: Iterable[tuple[int, int, int]]) -> float | None:
    """How many times the dense rate FLOPs alone allow, for a mix of requests; None for no requests.

    For each request of n prompt tokens, of which the main model reads k, and g generated tokens:

        dense  = prefill(main, n) + decode(main, n + 1) + ... + decode(main, n + g - 1)
        sparse = prefill(speculator, n) + prefill(main, k) + decode(main, k + 1) + ... + decode(main, k + g - 1)

    in the FLOPs of `costs.prefill_flops` and `costs.decode_flops`; a request that is read whole (k = n) has the cost
    dense in both. The ceiling is the sum of dense over the sum of sparse. As in `costs.flop_ceiling`, look-ahead and
    scoring are left out, which makes it no lower.

    Args:
        main, speculator: the two models' shapes.
        mix: (n, k, g) of each request.
    """
    dense_sum = sparse_sum = 0
    for tokens, kept, generated in mix:
        check_integer("kept", kept, 1, tokens)
        dense = prefill_flops(main, tokens) + _decoding(main, tokens, generated)
        sparse = prefill_flops(speculator, tokens) + prefill_flops(main, kept) + _decoding(main, kept, generated)
        dense_sum += dense
        sparse_sum += sparse if kept < tokens else dense
    return dense_sum / sparse_sum if sparse_sum else None


def _decoding(shape: ModelShape, read: int, generated: int) -> int:
    """FLOPs of the decode steps after the first token, which the prefill gives."""
    return sum(decode_flops(shape, read + step) for step in range(1, generated))


def mix_of(records: Iterable[Record]) -> list[tuple[int, int, int]] | None:
    """(prompt tokens, kept tokens, generated tokens) of the answered requests; None where the server did not say."""
    mix = []
    for record in records:
        if record.outcome == "ok":
            if not record.prompt_tokens or not record.kept_tokens:
                return None
            mix.append((record.prompt_tokens, record.kept_tokens, record.generated))
    return mix or None
