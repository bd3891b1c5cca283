"""Prometheus metrics: the names that vLLM's dashboards ask for, and our own. No label holds what a client chose."""

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specprefill_jax.engine.request import Event, Finished, FinishReason, Request, Stats
from specprefill_jax.planning import Reason

if TYPE_CHECKING:
    from specprefill_jax.server.service import EngineLike

UNREAD = "unread"
"""The reason of a request whose prompt was not read to its end."""

_LABELS = ("model_name", "engine")
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000)
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
_PHASE = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 60, 120, 240, 480, 960)
_WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_SHARE = tuple(step / 20 for step in range(1, 21))

_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("From arrival, before tokenising, to the first token", _PHASE),
    "vllm:inter_token_latency_seconds": ("Between one token and the next", _SHORT),
    "vllm:time_per_output_token_seconds": ("Between one token and the next, under its older name", _SHORT),
    "vllm:e2e_request_latency_seconds": ("From arrival to the end", _WHOLE),
    "vllm:request_queue_time_seconds": ("Waiting for the engine to begin", _PHASE),
    "vllm:request_prefill_time_seconds": ("From the engine's begin to the first token", _PHASE),
    "vllm:request_decode_time_seconds": ("From the first token to the end", _WHOLE),
    "vllm:request_prompt_tokens": ("Prompt tokens a request", _TOKENS),
    "vllm:request_generation_tokens": ("Generated tokens a request", _TOKENS),
    "vllm:request_params_max_tokens": ("The most tokens that a request may generate", _TOKENS),
    "specprefill:keep_ratio": (
        "Share of the tokens that was read, of prompts read in part",
        _SHARE,
    ),
    "specprefill:speculator_seconds": ("The speculator's prefill and look-ahead, where there was one", _PHASE),
    "specprefill:score_seconds": ("Scoring and choosing, where there was any", _PHASE),
    "specprefill:main_prefill_seconds": ("The main model over what it read of the prompt", _PHASE),
}

_GAUGES: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "vllm:num_requests_running": ("Requests that are read or answered", lambda s: s.running + s.prefilling),
    "vllm:num_requests_waiting": ("Requests of which nothing has been read", lambda s: s.waiting),
    "vllm:kv_cache_usage_perc": ("Share of the main model's cache in use, 0 to 1", lambda s: s.cache_usage),
    "specprefill:waiting_tokens": ("Prompt tokens of waiting requests", lambda s: s.waiting_tokens),
    "specprefill:prefilling_requests": ("Requests whose prompt is being read", lambda s: s.prefilling),
    "specprefill:speculator_cache_usage_ratio": (
        "Share of the speculator's cache in use, 0 to 1",
        lambda s: s.speculator_cache_usage,
    ),
}

_COUNTERS: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "vllm:prompt_tokens": ("Prompt tokens of requests that reached their first token", lambda s: s.prompt_tokens),
    "vllm:generation_tokens": ("Generated tokens", lambda s: s.generation_tokens),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the cache", lambda s: s.prompt_tokens),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the cache", lambda s: s.cached_tokens),
    "vllm:num_preemptions": ("Requests that lost their pages and were computed again", lambda s: s.preemptions),
    "vllm:spec_decode_num_drafts": ("Steps of a request that checked the speculator's proposals", lambda s: s.drafts),
    "vllm:spec_decode_num_draft_tokens": ("Tokens that the speculator proposed", lambda s: s.proposed_tokens),
    "vllm:spec_decode_num_accepted_tokens": ("Of these, those that were right", lambda s: s.accepted_tokens),
    "specprefill:preemptions": ("The same, under our name", lambda s: s.preemptions),
    "specprefill:kept_tokens": (
        "Prompt tokens that were read or found in the cache",
        lambda s: s.kept_tokens,
    ),
    "specprefill:memoised_selections": ("Prompts whose selection was remembered", lambda s: s.memoised_selections),
    "specprefill:compiles_after_warm_up": ("Programs compiled after the warm-up", lambda s: s.compiles_after_warm_up),
}


class Metrics:
    """The metrics of one app, in a registry of their own."""

    def __init__(self) -> None:
        """Without an engine there is only how often the server answered with which status."""
        self.registry = CollectorRegistry()
        self.responses = Counter(
            "specprefill:http_responses", "Answers by HTTP status", ("status",), registry=self.registry
        )

    def attach(self, engine: "EngineLike", model_name: str) -> None:
        """Add the engine's figures, labelled with the model's name."""
        values = (model_name, "0")
        self._histograms = {
            name: Histogram(name, text, _LABELS, buckets=buckets, registry=self.registry).labels(*values)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        success = Counter(
            "vllm:request_success", "Requests that ended", (*_LABELS, "finished_reason"), registry=self.registry
        )
        self._ended = {reason: success.labels(*values, reason) for reason in get_args(FinishReason)}
        requests = Counter(
            "specprefill:requests",
            "Requests that ended, by why their prompt was read in part or whole",
            (*_LABELS, "reason"),
            registry=self.registry,
        )
        self._reasons = {reason: requests.labels(*values, reason) for reason in (*map(str, Reason), UNREAD)}
        self.registry.register(_StatsCollector(engine, values))

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self.registry)

    def watch(self, request: Request, arrived: float) -> Callable[[Event], None]:
        """A function that takes the request's events, in the engine's thread, and counts them.

        `arrived` is a reading of `time.perf_counter`.
        """
        last: float | None = None

        def take(event: Event) -> None:
            nonlocal last
            if isinstance(event, Finished):
                self._finish(event, request.sampling.max_tokens)
            elif event.token_ids:
                now = time.perf_counter()
                if last is None:
                    self._histograms["vllm:time_to_first_token_seconds"].observe(now - arrived)
                else:
                    self._histograms["vllm:inter_token_latency_seconds"].observe(now - last)
                    self._histograms["vllm:time_per_output_token_seconds"].observe(now - last)
                last = now

        return take

    def _finish(self, end: Finished, max_tokens: int) -> None:
        spent, selection = end.timings, end.selection
        seen: dict[str, float] = {
            "vllm:e2e_request_latency_seconds": spent.total,
            "vllm:request_queue_time_seconds": spent.queue,
            "vllm:request_prompt_tokens": end.num_prompt_tokens,
            "vllm:request_generation_tokens": end.num_generated,
            "vllm:request_params_max_tokens": max_tokens,
        }
        if end.num_generated:
            seen["vllm:request_prefill_time_seconds"] = spent.ttft - spent.tokenise - spent.queue
            seen["vllm:request_decode_time_seconds"] = spent.decode
        if selection is not None:
            seen["specprefill:main_prefill_seconds"] = spent.main_prefill
            if selection.engaged:
                seen["specprefill:keep_ratio"] = selection.keep_rate
            if spent.speculate:
                seen["specprefill:speculator_seconds"] = spent.speculate
                seen["specprefill:score_seconds"] = spent.score
        for name, value in seen.items():
            self._histograms[name].observe(value)
        self._ended[end.finish_reason].inc()
        self._reasons[UNREAD if selection is None else str(selection.reason)].inc()


class _StatsCollector(Collector):
    """The engine's own figures, asked for when they are read."""

    def __init__(self, engine: "EngineLike", values: tuple[str, str]) -> None:
        self._engine = engine
        self._values = values

    def describe(self) -> Iterator[Metric]:
        return iter(())  # else registering would ask the engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            gauge.add_metric(self._values, value(stats))
            yield gauge
        for name, (text, value) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            counter.add_metric(self._values, value(stats))
            yield counter
