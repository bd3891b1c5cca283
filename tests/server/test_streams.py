"""Streams, byte by byte: what real clients trip over."""

import http.client
import json
import socket
import time

import openai
import pytest
from server.fake_engine import ANSWER, FakeEngine, make_tokenizer
from server.running import held

TOKENIZER = make_tokenizer()
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
BODIES = {"chat": {"messages": [{"role": "user", "content": "hi"}]}, "completions": {"prompt": "hi"}}


@pytest.fixture(params=["chat", "completions"])
def route(request, server):
    """A function from options to the chunks of a stream, with `path` and `body` beside it."""

    def chunks(**options):
        return server.chunks(PATHS[request.param], BODIES[request.param] | options)

    chunks.name, chunks.path, chunks.body = request.param, PATHS[request.param], BODIES[request.param]
    return chunks


def text_of(choice):
    return choice["delta"].get("content", "") if "delta" in choice else choice["text"]


def test_the_frames_of_a_chat(server):
    body = {**BODIES["chat"], "max_tokens": 2, "stream_options": {"include_usage": True}}
    first, second, end, usage, done = server.frames(PATHS["chat"], body)
    head = '"object":"chat.completion.chunk","created":'
    assert first.startswith('data: {"id":"chatcmpl-')
    assert head in first
    choice = (
        '"choices":[{"index":0,"finish_reason":null,"delta":{"role":"assistant","content":"hell"},"logprobs":null}]'
    )
    assert first.endswith(choice + ',"usage":null}')
    assert '"delta":{"content":"o"}' in second
    assert '"choices":[{"index":0,"finish_reason":"length","delta":{},"logprobs":null}]' in end
    assert '"usage":null' in end
    assert json.loads(end.removeprefix("data: "))["specprefill"]["reason"] == "short_prompt"
    last = json.loads(usage.removeprefix("data: "))
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 2
    assert last["specprefill"] == json.loads(end.removeprefix("data: "))["specprefill"]
    assert done == "data: [DONE]"
    assert len({json.loads(frame.removeprefix("data: "))["id"] for frame in (first, second, end, usage)}) == 1


def test_the_frames_of_a_completion(server):
    first, end, done = server.frames(PATHS["completions"], {**BODIES["completions"], "max_tokens": 1})
    assert first.startswith('data: {"id":"cmpl-')
    assert '"object":"text_completion"' in first
    assert '"choices":[{"index":0,"finish_reason":null,"text":"hell","logprobs":null}]' in first
    assert '"finish_reason":"length","text":"","logprobs":null' in end
    assert "usage" not in first + end
    assert done == "data: [DONE]"


def test_only_the_last_chunk_has_a_finish_reason_and_it_tells_of_the_prefill(route):
    chunks = route()
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert ["specprefill" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == ANSWER


def test_no_piece_ends_within_a_character_and_none_is_empty(route, server):
    *pieces, _ = [text_of(chunk["choices"][0]) for chunk in route()]
    assert "🙂" in "".join(pieces)
    assert "\ufffd" not in "".join(pieces)
    assert all(pieces)


def test_a_character_that_is_never_completed_is_told_at_the_end(route, engine):
    ids = TOKENIZER.encode("🙂")
    engine.answer = "🙂"
    chunks = route(max_tokens=len(ids) - 1)
    assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == "\ufffd"


def test_the_role_comes_with_the_first_token_even_if_it_has_no_text_yet(server, engine):
    engine.answer = "🙂"
    first, *rest = server.chunks(PATHS["chat"], BODIES["chat"])
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in rest)


def test_an_answer_that_ends_at_once(route, engine):
    engine.answer = ""
    chunks = route()
    assert "".join(text_of(chunk["choices"][0]) for chunk in chunks) == ""
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    if route.name == "chat":
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"


def test_usage_that_grows(route):
    chunks = route(max_tokens=4, stream_options={"include_usage": True, "continuous_usage_stats": True})
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4, 4]
    assert [len(chunk["choices"]) for chunk in chunks] == [1] * 5 + [0]


def test_several_choices_end_each(route):
    chunks = route(n=2, max_tokens=2)
    ends = [chunk for chunk in chunks if chunk["choices"][0]["finish_reason"]]
    assert [chunk["choices"][0]["index"] for chunk in ends] == [0, 1]
    assert all("specprefill" in chunk["choices"][0] for chunk in ends)


def test_token_ids_in_chunks(route):
    chunks = route(return_token_ids=True, max_tokens=4)
    ids = [index for chunk in chunks for index in chunk["choices"][0].get("token_ids", [])]
    assert ids == TOKENIZER.encode(ANSWER)[:4]


def test_nothing_but_comments_comes_before_the_first_token(another, route):
    engine = FakeEngine(make_tokenizer())
    server = another(engine, keep_alive_seconds=0.02)
    with held(engine):
        connection, response = server.open("POST", route.path, {**route.body, "stream": True})
        lines = [response.readline() for _ in range(4)]
    assert lines == [b": keep-alive\n", b"\n"] * 2
    rest = response.read()
    connection.close()
    data = [part for part in rest.split(b"\n\n") if part.startswith(b"data: ")]
    assert data[-1] == b"data: [DONE]"
    assert json.loads(data[0].removeprefix(b"data: "))["choices"]


def test_headers(server, route):
    connection, response = server.open("POST", route.path, {**route.body, "stream": True})
    assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.headers["X-Accel-Buffering"] == "no"
    response.read()
    connection.close()


def test_an_error_amid_the_stream_follows_what_came_before_it(server, engine, route, caplog):
    engine.fails_after = 2
    first, second, error, done = server.frames(route.path, route.body)
    assert "hell" in first
    assert '"o"' in second
    body = json.loads(error.removeprefix("data: "))["error"]
    assert (body["type"], body["code"]) == ("server_error", "internal_error")
    assert "secret" not in error
    assert "a secret path" in caplog.text
    assert done == "data: [DONE]"


def test_the_openai_client_raises_on_an_error_amid_the_stream(client, engine):
    engine.fails_after = 1
    stream = client.completions.create(model="fake", prompt="hi", stream=True)
    with pytest.raises(openai.APIError, match="the server failed"):
        list(stream)


def test_a_fault_of_ours_amid_the_stream(server, engine, route, monkeypatch, caplog):
    from specprefill_jax.server.reply import Reply

    monkeypatch.setattr(Reply, "usage", lambda self: 1 / 0)
    *_, error, done = server.frames(route.path, {**route.body, "stream_options": {"include_usage": True}})
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "internal_error"
    assert done == "data: [DONE]"
    assert "ZeroDivisionError" in caplog.text


class TestClientGone:
    """A client that leaves frees its place at once."""

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    @pytest.mark.parametrize("tokens", [0, 2], ids=["before the first token", "amid the answer"])
    def test_what_runs_for_it_is_cancelled(self, server, engine, route, stream, tokens):
        with held(engine, tokens):
            connection = None
            if stream:
                connection, response = server.open("POST", route.path, {**route.body, "stream": True, "n": 2})
                if tokens:
                    response.readline()
            else:
                connection = http.client.HTTPConnection("127.0.0.1", server.port)
                data = json.dumps({**route.body, "n": 2})
                connection.request("POST", route.path, data, {"Content-Type": "application/json"})
            engine.wait(lambda: len(engine.submitted) == 2)
            if stream:
                response.close()
            connection.close()
            engine.wait(lambda: len(engine.cancelled) == 2)
            engine.wait(lambda: len(engine.ended) == 2)
        assert {reason for _, reason in engine.ended} == {"abort"}

    def test_a_client_that_leaves_amid_its_body_does_no_harm(self, server, engine, caplog):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            lines = ("POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json", "Content-Length: 99")
            connection.sendall("".join(f"{line}\r\n" for line in (*lines, "")).encode() + b'{"prompt')
            time.sleep(0.05)
        assert server.post("/v1/completions", BODIES["completions"])[0] == 200
        assert len(engine.submitted) == 1
        assert caplog.text == ""

    def test_a_client_that_stays_is_not_cancelled(self, server, engine, route):
        server.post(route.path, route.body)
        route()
        assert engine.cancelled == []
