"""The metrics: names that dashboards ask for, values, and labels that no client chooses."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.fake_engine import FakeEngine, make_tokenizer
from server.running import held

from specprefill_jax.planning import Reason

LONG = "all the boats of the harbour " * 30
LABELS = {"model_name": "fake", "engine": "0"}


@pytest.fixture
def fresh(another):
    return another(FakeEngine(make_tokenizer()))


def scrape(server):
    """Values by name and labels."""
    status, headers, data = server.ask("GET", "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(data.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def value(samples, name, **labels):
    return samples[name, tuple(sorted((LABELS | labels).items()))]


HISTOGRAMS = (
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_per_output_token_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_params_max_tokens",
    "specprefill:keep_ratio",
    "specprefill:speculator_seconds",
    "specprefill:main_prefill_seconds",
)


def test_the_engine_s_figures(fresh):
    samples = scrape(fresh)
    expected = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 3,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:prompt_tokens_total": 100,
        "vllm:generation_tokens_total": 50,
        "vllm:prefix_cache_hits_total": 20,
        "vllm:num_preemptions_total": 4,
        "specprefill:preemptions_total": 4,
        "vllm:spec_decode_num_drafts_total": 8,
        "vllm:spec_decode_num_draft_tokens_total": 30,
        "vllm:spec_decode_num_accepted_tokens_total": 21,
        "specprefill:kept_tokens_total": 60,
        "specprefill:memoised_selections_total": 5,
        "specprefill:compiles_after_warm_up_total": 6,
        "specprefill:waiting_tokens": 40,
    }
    assert {name: value(samples, name) for name in expected} == expected


def test_every_series_is_there_from_the_start(fresh):
    samples = scrape(fresh)
    assert [value(samples, f"{name}_count") for name in HISTOGRAMS] == [0] * len(HISTOGRAMS)
    for reason in ("stop", "length", "abort", "error"):
        assert value(samples, "vllm:request_success_total", finished_reason=reason) == 0
    for reason in (*Reason, "unread"):
        assert value(samples, "specprefill:requests_total", reason=str(reason)) == 0


def test_requests_are_counted(fresh):
    status, answer = fresh.post("/v1/completions", {"prompt": LONG, "max_tokens": 5})
    assert status == 200
    told = answer["specprefill"]
    fresh.chunks("/v1/completions", {"prompt": "hi", "max_tokens": 200, "n": 2})
    samples = scrape(fresh)
    assert value(samples, "vllm:request_success_total", finished_reason="length") == 1
    assert value(samples, "vllm:request_success_total", finished_reason="stop") == 2
    assert value(samples, "specprefill:requests_total", reason="engaged") == 1
    assert value(samples, "specprefill:requests_total", reason="short_prompt") == 2
    assert value(samples, "specprefill:keep_ratio_sum") == pytest.approx(told["keep_rate"])
    assert value(samples, "specprefill:keep_ratio_count") == 1
    assert value(samples, "vllm:request_prompt_tokens_sum") == told["num_tokens"] + 2 * 2
    assert value(samples, "vllm:request_params_max_tokens_sum") == 405
    assert value(samples, "vllm:time_to_first_token_seconds_count") == 3
    assert (
        value(samples, "vllm:inter_token_latency_seconds_count")
        == value(samples, "vllm:request_generation_tokens_sum") - 3
    )
    assert value(samples, "vllm:e2e_request_latency_seconds_count") == 3
    assert value(samples, "specprefill:main_prefill_seconds_count") == 3
    assert value(samples, "specprefill:speculator_seconds_count") >= 1
    assert samples["specprefill:http_responses_total", (("status", "200"),)] >= 2


def test_what_ends_without_an_answer_is_counted_too(fresh):
    engine = fresh.engine
    engine.fails_after = 1
    fresh.post("/v1/completions", {"prompt": "hi"})
    engine.fails_after = None
    with held(engine):
        connection, response = fresh.open("POST", "/v1/completions", {"prompt": "hi", "stream": True})
        response.close()
        connection.close()
        engine.wait(lambda: engine.cancelled)
    engine.wait(lambda: len(engine.ended) == 2)
    fresh.post("/v1/completions", {"prompt": "hi"})  # the one thread has gone on: the end before was told
    samples = scrape(fresh)
    assert value(samples, "vllm:request_success_total", finished_reason="error") == 1
    assert value(samples, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(samples, "specprefill:requests_total", reason="unread") == 2
    assert samples["specprefill:http_responses_total", (("status", "500"),)] == 1


def test_no_label_holds_what_a_client_chose(fresh):
    fresh.post("/v1/completions", {"prompt": "hi", "model": "mine", "user": "mine"}, {"X-Request-Id": "mine"})
    fresh.post("/mine", {})
    assert b"mine" not in fresh.ask("GET", "/metrics")[2]


def test_a_name_that_the_operator_chose(another):
    server = another(FakeEngine(make_tokenizer()), model_name="boat")
    assert b'model_name="boat"' in server.ask("GET", "/metrics")[2]
    assert server.post("/v1/completions", {"prompt": "hi", "model": "boat"})[1]["model"] == "boat"
    assert server.post("/v1/completions", {"prompt": "hi", "model": "fake"})[0] == 404
