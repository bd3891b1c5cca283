"""Errors: their shape, their status, and that none of them tells more than it should."""

import json
import re

import openai
import pytest
from server.fake_engine import FakeEngine, make_tokenizer
from server.running import held

from specprefill_jax.engine.request import EngineConfig, QueueFullError, UnavailableError
from specprefill_jax.errors import argument_error
from specprefill_jax.server.service import ServerSettings

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "hi"}
ROUTES = [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]


def check(answer, status, message="", param=None, code=None):
    """The error has OpenAI's shape and says this."""
    found, body = answer
    assert found == status, body
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert re.search(message, error["message"]), error
    assert (error["param"], error["code"]) == (param, code), error
    return error


@pytest.mark.parametrize(
    ("change", "message", "param"),
    [
        ({"temperature": -1}, "temperature=-1.* must be", "temperature"),
        ({"temperature": "hot"}, "temperature='hot' is not allowed", "temperature"),
        ({"temperature": True}, "temperature=True is not allowed", "temperature"),
        ({"top_p": 0}, "top_p=0", "top_p"),
        ({"min_p": 1}, "min_p=1", "min_p"),
        ({"top_k": -2}, "top_k=-2", "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty=0", "repetition_penalty"),
        ({"n": 0}, "n=0", "n"),
        ({"n": True}, "n=True", "n"),
        ({"n": 129}, "n=129", "n"),
        ({"n": 100}, "more answers than the 64", "n"),
        ({"best_of": 2}, "best_of=2.*which is 1", "best_of"),
        ({"max_tokens": -1}, "max_tokens=-1", "max_tokens"),
        ({"max_tokens": 0}, "max_tokens=0", "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens=1.5", "max_tokens"),
        ({"stream": "yes"}, "stream='yes'", "stream"),
        ({"stop": ""}, "stop=''.*none of them empty", "stop"),
        ({"stop": ["x"] * 17}, "at most 16", "stop"),
        ({"stop": [1]}, r"stop=\[1\]", "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids"),
        ({"stop_token_ids": [1] * 2000}, "stop_token_ids", "stop_token_ids"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage=1", "stream_options.include_usage"),
        ({"specprefill": 0.3}, "specprefill=0.3", "specprefill"),
        ({"specprefill": {"keep_rate": 0}}, "specprefill.keep_rate=0", "specprefill.keep_rate"),
        ({"specprefill": {"keep_rate": "0.3"}}, "specprefill.keep_rate='0.3'", "specprefill.keep_rate"),
        ({"specprefill": {"keep_rate": True}}, 'a number or "auto"', "specprefill.keep_rate"),
        ({"specprefill": {"keep_rate": "auto", "mode": "paper"}}, "a number in paper mode", "specprefill.keep_rate"),
        ({"specprefill": {"max_keep_rate": 0.01}}, "at most max_keep_rate, 0.01", "specprefill.min_keep_rate"),
        ({"specprefill": {"ttft_budget_ms": 0}}, "ttft_budget_ms=0", "specprefill.ttft_budget_ms"),
        ({"specprefill": {"max_divergence": -1}}, "a finite number of at least 0", "specprefill.max_divergence"),
        ({"specprefill": {"pool_width": 2}}, "odd", "specprefill.pool_width"),
        ({"specprefill": {"enabled": 1}}, "specprefill.enabled=1", "specprefill.enabled"),
        ({"specprefill": {"mode": "fast"}}, "specprefill.mode='fast'", "specprefill.mode"),
    ],
)
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_wrong_value_is_named_with_what_is_allowed(server, path, body, change, message, param):
    check(server.post(path, body | change), 400, message, param)


@pytest.mark.parametrize(("path", "body"), ROUTES)
@pytest.mark.parametrize("key", ["keep_rat", "keepRate", "forced_spans", "eos_token_ids"])
def test_omlx_443_a_misspelt_setting_is_refused_with_those_that_are_allowed(server, engine, path, body, key):
    error = check(server.post(path, body | {"specprefill": {key: 0.1}}), 400, key, "specprefill")
    assert "allowed are enabled, keep_rate, look_ahead" in error["message"]
    assert engine.submitted == []


@pytest.mark.parametrize("name", ["chunk_size", "pool_width", "look_ahead"])
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_setting_that_the_engine_refuses_is_named_where_the_body_has_it(server, engine, path, body, name):
    engine.refusal = argument_error(name, 5, "13, which this engine was started with")
    message = f"^specprefill.{name}=5 is not allowed: .* 13, which this engine was started with$"
    check(server.post(path, body | {"specprefill": {name: 5}}), 400, message, f"specprefill.{name}")
    engine.refusal = argument_error("prompt", 5, "shorter")
    check(server.post(path, body), 400, "^prompt=5 is not allowed", "prompt")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("logit_bias", {"5": 10}),
        ("min_tokens", 3),
        ("response_format", {"type": "json_object"}),
        ("suffix", "x"),
        ("skip_special_tokens", False),
    ],
)
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_what_cannot_be_obeyed_is_refused(server, path, body, name, value):
    check(server.post(path, body | {name: value}), 400, f"{name} is not supported", name, "unsupported_parameter")


@pytest.mark.parametrize(
    ("path", "body", "message", "param"),
    [
        ("/v1/completions", {}, "prompt is missing", "prompt"),
        ("/v1/completions", {"prompt": None}, "prompt is missing", "prompt"),
        ("/v1/completions", {"prompt": ""}, "empty", "prompt"),
        ("/v1/completions", {"prompt": []}, "a string, a list of token ids", "prompt"),
        ("/v1/completions", {"prompt": [[]]}, "a string, a list of token ids", "prompt"),
        ("/v1/completions", {"prompt": [1, True]}, "a string, a list of token ids", "prompt"),
        ("/v1/completions", {"prompt": ["a", 1]}, "a string, a list of token ids", "prompt"),
        ("/v1/completions", {"prompt": ["a"] * 1025}, "1 to 1024", "prompt"),
        ("/v1/completions", {"prompt": [1, 300]}, "300 is not allowed: ids must be below 300", "prompt"),
        ("/v1/completions", {"prompt": "a", "logprobs": 21}, "logprobs=21", "logprobs"),
        ("/v1/completions", {"prompt": "a", "logprobs": True}, "logprobs=True", "logprobs"),
        ("/v1/chat/completions", {}, "messages is missing", "messages"),
        ("/v1/chat/completions", {"messages": []}, "messages=", "messages"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages='hi'", "messages"),
        ("/v1/chat/completions", {"messages": [{"content": "x"}]}, "messages.0.role is missing", "messages.0.role"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "only text is read",
            "messages.0.content",
        ),
        ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, "it needs logprobs", "logprobs"),
        ("/v1/chat/completions", {**CHAT, "logprobs": 2}, "logprobs=2", "logprobs"),
        ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"messages": 1}, "tools": [1]}, "tools", "tools.0"),
        ("/tokenize", {}, "prompt is missing", "prompt"),
        ("/detokenize", {"tokens": [301]}, "tokens: token id 301", "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens='x'", "tokens"),
    ],
)
def test_a_wrong_prompt(server, path, body, message, param):
    check(server.post(path, body), 400, message, param)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"[1]", "must be an object"),
        (b"null", "must be an object"),
        (b"\xff\xfe{}", "not UTF-8: byte 0"),
        (b'\xef\xbb\xbf{"prompt": "x"}', "not valid JSON"),
        (b'{"prompt": "\xed\xa0\x80"}', "not UTF-8: byte 12"),
        (b'{"prompt": "\\ud800"}', r"lone surrogate, '\\ud800'"),
        (b'{"prompt": "x", "\\udfff": 1}', "lone surrogate"),
        (b'{"prompt": "x", "temperature": NaN}', "NaN is not a JSON number"),
        (b'{"prompt": "x", "temperature": -Infinity}', "Infinity is not a JSON number"),
        (b'{"prompt": "x", "temperature": 1e999}', "too large"),
        (b'{"prompt": "x", "seed": 18446744073709551616}', "64 bits"),
        (b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"prompt": "x", "prompt": "y"}', "'prompt' is given twice"),
        (b'{"prompt": "x", "specprefill": {"keep_rate": 0.1, "keep_rate": 1}}', "'keep_rate' is given twice"),
        (b'{"prompt": ' + b"[" * 70 + b"]" * 70 + b"}", "more than 64 deep"),
        (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", "more than 64 deep"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, "more than 64 deep"),
    ],
)
def test_a_body_that_is_no_proper_json(server, engine, data, message):
    status, _, body = server.ask("POST", "/v1/completions", data)
    check((status, json.loads(body)), 400, message, None, "invalid_json")
    assert engine.submitted == []


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "application/json2"])
def test_what_a_foreign_web_page_could_send_unasked_is_refused(server, kind):
    status, _, body = server.ask("POST", "/v1/completions", json.dumps(TEXT), {"Content-Type": kind})
    check((status, json.loads(body)), 415, "must be application/json")


def test_a_charset_behind_the_content_type_is_fine(server):
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert server.post("/v1/completions", TEXT, headers)[0] == 200


class TestTooLong:
    @pytest.fixture
    def small(self, another):
        return another(FakeEngine(make_tokenizer()), max_body_bytes=2000)

    @pytest.mark.parametrize("size", [2001, 7000, 100_000])
    @pytest.mark.parametrize("chunked", [False, True])
    def test_a_body_beyond_the_limit(self, small, size, chunked):
        data = json.dumps({"prompt": "x" * size}).encode()
        body = (data[start : start + 1000] for start in range(0, len(data), 1000)) if chunked else data
        try:
            status, headers, answer = small.ask("POST", "/v1/completions", body)
        except (BrokenPipeError, ConnectionResetError):
            assert size == 100_000  # a client that goes on sending is cut off in the end
            return
        check((status, json.loads(answer)), 413, "longer than 2000 bytes", None, "request_too_large")
        assert headers["Connection"].lower() == "close"

    def test_a_body_at_the_limit(self, small):
        data = json.dumps(TEXT).encode()
        assert small.ask("POST", "/v1/completions", data + b" " * (2000 - len(data)))[0] == 200

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(("path", "body"), ROUTES)
    def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(self, server, path, body, stream):
        long = "z" * 5000
        body = {"prompt": long} if "prompt" in body else {"messages": [{"role": "user", "content": long}]}
        error = check(server.post(path, body | {"stream": stream}), 400, "4096", "prompt", "context_length_exceeded")
        assert re.search(
            r"4096 tokens, and (50\d\d) were asked for: (50\d\d|5000) in the prompt and 1", error["message"]
        )

    @pytest.mark.parametrize(("path", "body"), ROUTES)
    def test_an_answer_beyond_the_context_is_refused(self, server, path, body):
        answer = server.post(path, body | {"max_tokens": 4096})
        check(answer, 400, "4096 for the answer", "max_tokens", "context_length_exceeded")

    def test_the_context_can_be_filled(self, server, engine):
        assert server.post("/v1/completions", {"prompt": [5] * 4095, "max_tokens": 1})[0] == 200
        check(server.post("/v1/completions", {"prompt": [5] * 4096}), 400, "4097", "prompt", "context_length_exceeded")


class TestRouter:
    @pytest.mark.parametrize(
        "path", ["/nowhere", "/v1", "/v1/completions/", "/v1//completions", "/..%2f..%2fetc/passwd"]
    )
    def test_unknown_paths(self, server, path):
        status, _, body = server.ask("GET", path)
        check((status, json.loads(body)), 404, "no path of this server")

    @pytest.mark.parametrize(
        ("method", "path"), [("GET", "/v1/completions"), ("PUT", "/tokenize"), ("POST", "/health")]
    )
    def test_wrong_methods(self, server, method, path):
        status, headers, body = server.ask(method, path)
        check((status, json.loads(body)), 405, f"{method} is not allowed")
        assert headers["Allow"]

    @pytest.mark.parametrize(("path", "body"), [*ROUTES, ("/tokenize", TEXT), ("/detokenize", {"tokens": [1]})])
    def test_another_model(self, server, path, body):
        answer = server.post(path, body | {"model": "gpt-4"})
        error = check(answer, 404, "model='gpt-4'.*must be 'fake'", "model", "model_not_found")
        assert error["type"] == "not_found_error"
        assert server.ask("GET", "/v1/models/gpt-4")[0] == 404


class TestKeys:
    GUARDED = (
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/fake"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/tokenizer_info"),
        ("GET", "/nowhere"),
    )

    @pytest.mark.parametrize(("method", "path"), GUARDED)
    @pytest.mark.parametrize(
        "key", [None, "", "Bearer", "Bearer ", "Bearer tw", "Bearer twoo", "Basic two", "Bearer zwö"]
    )
    def test_without_a_key_nothing_is_open(self, locked, method, path, key):
        headers = {} if key is None else {"Authorization": key}
        status, found, body = locked.ask(method, path, TEXT if method == "POST" else None, headers)
        error = check((status, json.loads(body)), 401, "Bearer KEY", None, "invalid_api_key")
        assert error["type"] == "authentication_error"
        assert found["WWW-Authenticate"] == "Bearer"

    @pytest.mark.parametrize("key", ["Bearer two", "bearer key one"])
    def test_each_key_opens(self, locked, key):
        assert locked.post("/v1/completions", TEXT, {"Authorization": key})[0] == 200

    @pytest.mark.parametrize("path", ["/health", "/metrics", "/version", "/openapi.json"])
    def test_probes_need_none(self, locked, path):
        assert locked.ask("GET", path)[0] == 200

    def test_the_openai_client(self, locked):
        with openai.OpenAI(api_key="two", base_url=locked.url + "/v1") as client:
            assert client.models.list().data[0].id == "fake"
            client.api_key = "bad"
            with pytest.raises(openai.AuthenticationError):
                client.models.list()

    @pytest.mark.parametrize("key", ["", " two", "zwö", "a\nb"])
    def test_keys_that_no_header_can_hold_are_refused_unseen(self, key):
        with pytest.raises(ValueError, match="api_keys='\\(hidden\\)'"):
            ServerSettings(api_keys=(key,))


class TestEngine:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(("path", "body"), ROUTES)
    def test_a_full_queue_is_a_429_with_the_time_to_wait(self, server, engine, path, body, stream):
        engine.refusal = QueueFullError("64 requests wait, at most 64 may", 1.25)
        status, headers, data = server.ask("POST", path, body | {"stream": stream})
        error = check((status, json.loads(data)), 429, "at most 64", None, "queue_full")
        assert error["type"] == "rate_limit_error"
        assert (headers["Retry-After"], headers["retry-after-ms"]) == ("2", "1250")

    def test_of_several_prompts_all_are_taken_or_none(self, another):
        engine = FakeEngine(make_tokenizer(), EngineConfig(max_queued_requests=3))
        server = another(engine)
        with held(engine):
            connection, _ = server.open("POST", "/v1/completions", TEXT | {"n": 2, "stream": True})
            engine.wait(lambda: len(engine.submitted) == 2)
            check(server.post("/v1/completions", TEXT | {"n": 2}), 429, "full", None, "queue_full")
            assert engine.cancelled == [engine.submitted[2].request_id]
        connection.close()

    def test_prompts_that_wait_to_be_tokenised_are_counted(self, server, engine):
        server.service._preparing = engine.config.max_queued_requests
        try:
            check(server.post("/v1/completions", TEXT), 429, "tokenised", None, "queue_full")
        finally:
            server.service._preparing = 0

    @pytest.mark.parametrize("state", ["loading", "draining", "stuck", "failed", "closed"])
    def test_an_engine_that_is_not_ready(self, server, engine, state):
        engine.state = state
        for method, path, body in (("GET", "/health", None), *(("POST", path, body) for path, body in ROUTES)):
            status, headers, data = server.ask(method, path, body)
            check((status, json.loads(data)), 503, f"it is {state}", None, f"engine_{state}")
            assert int(headers["Retry-After"]) > 0
        assert server.ask("GET", "/metrics")[0] == 200
        assert server.ask("GET", "/v1/models")[0] == 200

    def test_an_engine_that_has_just_stopped_to_take_requests(self, server, engine):
        engine.refusal = UnavailableError("the engine is draining")
        check(server.post("/v1/completions", TEXT), 503, "draining", None, "engine_unavailable")

    def test_before_there_is_an_engine(self, another):
        server = another(None)
        for path in ("/health", "/v1/models", "/tokenizer_info"):
            status, _, data = server.ask("GET", path)
            check((status, json.loads(data)), 503, "loading", None, "engine_loading")
        check(server.post("/v1/completions", TEXT), 503, "loading", None, "engine_loading")
        assert b"specprefill:http_responses_total" in server.ask("GET", "/metrics")[2]
        server.service.attach(FakeEngine(make_tokenizer()))
        assert server.post("/v1/completions", TEXT)[0] == 200

    @pytest.mark.parametrize(("path", "body"), ROUTES)
    def test_a_request_that_fails_is_a_500_that_tells_nothing(self, server, engine, path, body, caplog):
        engine.fails_after = 1
        error = check(server.post(path, body), 500, "its log has the reason", None, "internal_error")
        assert "secret" not in json.dumps(error)
        assert "a secret path" in caplog.text
        engine.fails_after = None
        assert server.post(path, body)[0] == 200

    def test_one_of_several_that_fails_cancels_the_others(self, server, engine):
        engine.fails_after, engine.fails = 1, "-0"
        with held(engine, 1):
            check(server.post("/v1/completions", TEXT | {"n": 3}), 500, "", None, "internal_error")
            engine.wait(lambda: len(engine.ended) == 3)
        assert [reason for _, reason in engine.ended] == ["error", "abort", "abort"]

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_fault_of_ours_is_a_500_that_tells_nothing(self, server, engine, caplog, stream):
        engine.crashes = True
        status, headers, data = server.ask("POST", "/v1/completions", TEXT | {"stream": stream})
        check((status, json.loads(data)), 500, headers["X-Request-Id"], None, "internal_error")
        assert b"secret" not in data
        assert "a secret path" in caplog.text

    @pytest.mark.parametrize("stream", [False, True])
    def test_what_does_not_finish_within_the_deadline_is_told_so(self, another, stream):
        engine = FakeEngine(make_tokenizer())
        server = another(engine)
        with held(engine, 1):
            import threading

            thread = threading.Thread(
                target=lambda: (engine.wait(lambda: engine.submitted), engine.drain(0.0)), daemon=True
            )
            thread.start()
            status, _, data = server.ask("POST", "/v1/completions", TEXT | {"stream": stream})
            thread.join()
        if stream:
            *_, error, done, _ = data.split(b"\n\n")
            assert (status, done) == (200, b"data: [DONE]")
            data, status = error.removeprefix(b"data: "), 503
        check((status, json.loads(data)), 503, "going down", None, "aborted")

    def test_a_model_without_a_tokenizer_takes_ids_alone(self, another):
        server = another(FakeEngine(None))
        check(server.post("/v1/completions", TEXT), 400, "no tokenizer", "prompt")
        check(server.post("/v1/chat/completions", CHAT), 400, "no tokenizer", "messages")
        body = {"prompt": [5, 6], "max_tokens": 2, "return_token_ids": True, "logprobs": 1, "echo": True}
        status, answer = server.post("/v1/completions", body)
        [choice] = answer["choices"]
        assert (status, choice["text"], choice["token_ids"]) == (200, "", [5, 6])
        assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6"] * 2


class TestRequestIds:
    def test_the_client_s_is_echoed(self, server):
        assert server.ask("GET", "/health", None, {"X-Request-Id": "abc-1"})[1]["X-Request-Id"] == "abc-1"
        assert server.ask("GET", "/nowhere", None, {"x-request-id": "abc-2"})[1]["X-Request-Id"] == "abc-2"

    @pytest.mark.parametrize("given", ["", "a b", "x" * 129, "é"])
    def test_others_are_replaced(self, server, given):
        assert re.fullmatch(
            "[0-9a-f]{32}", server.ask("GET", "/health", None, {"X-Request-Id": given})[1]["X-Request-Id"]
        )
