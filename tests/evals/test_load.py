"""The load client: arrivals, addresses, events however they are cut, and what becomes of every kind of answer."""

import asyncio
import json
import socket

import pytest
from load_server import END, READ, STREAM, USAGE, chunked, delta, event, serving, stream, whole

from specprefill_jax.errors import ArgumentError
from specprefill_jax.evals import load
from specprefill_jax.evals.load import Job, Record, constant, poisson
from specprefill_jax.evals.wire import EventParser, ProtocolError, Target, fetch_json

ASK = [{"role": "user", "content": "?"}]
JOB = Job.chat("m", ASK, label="x", max_tokens=3)
WHOLE = Job.chat("m", ASK, stream=False)


def run(target: Target, jobs=(JOB,), due=None, timeout=10.0, **options) -> list[Record]:
    return asyncio.run(load.run_load(target, jobs, due or [0.0] * len(jobs), timeout, **options))


def answered(steps: list, job: Job = JOB) -> Record:
    """The record of one request that is answered by `steps`."""
    with serving(lambda path, body: steps) as seen:
        [record] = run(seen.target, [job])
    assert len(seen.requests) == 1  # never sent again
    return record


def test_constant_arrivals():
    assert constant(4.0, 5) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert constant(1, 0) == []


def test_poisson_arrivals():
    times = poisson(2.0, 4000, seed=1)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    assert all(gap > 0 for gap in gaps)
    assert times[-1] / 4000 == pytest.approx(0.5, rel=0.05)
    assert sum(gap > 0.5 for gap in gaps) / 4000 == pytest.approx(0.3679, abs=0.03)  # exp(-1)
    assert times == poisson(2.0, 4000, seed=1)
    assert times != poisson(2.0, 4000, seed=2)
    assert poisson(8.0, 10, seed=1) == pytest.approx([at / 4 for at in times[:10]])


@pytest.mark.parametrize("arrivals", [constant, poisson])
def test_bad_arrivals(arrivals):
    with pytest.raises(ArgumentError, match="rate=0 is not allowed: rate must be a finite number above 0"):
        arrivals(0, 3)
    with pytest.raises(ArgumentError, match="count=-1 is not allowed"):
        arrivals(1.0, -1)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000)),
        ("http://host/v1/", Target("host", 80)),
        ("https://host:8443/api/v1", Target("host", 8443, "/api", tls=True)),
        ("https://[::1]", Target("::1", 443, tls=True)),
    ],
)
def test_addresses(url, expected):
    assert Target.parse(url) == expected


@pytest.mark.parametrize(
    "url", ["host:8000", "ftp://host", "http://", "http://host:x", "http://host?a=b", "http://u@h"]
)
def test_bad_addresses(url):
    with pytest.raises(ArgumentError, match="is not allowed: url must be http://HOST"):
        Target.parse(url)


def test_key_is_sent_but_never_shown():
    target = Target.parse("http://h", "secret")
    assert b"\r\nAuthorization: Bearer secret\r\n" in target.message("GET", "/x")
    assert "secret" not in repr(target)
    with pytest.raises(ArgumentError, match=r"^api_key='\.\.\.' is not allowed: api_key must be printable ASCII$"):
        Target.parse("http://h", "sec\r\nret")


def test_message():
    message = Target("::1", 80, "/a").message("POST", "/v1/x", {"text": "é\ud800"})
    content = json.dumps({"text": "é\ud800"}).encode()
    head = "POST /a/v1/x HTTP/1.1\r\nHost: [::1]:80\r\nConnection: close\r\nContent-Type: application/json\r\n"
    assert message == f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def test_bodies():
    assert JOB.body == {
        "model": "m",
        "messages": ASK,
        "max_tokens": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (JOB.path, JOB.label) == ("/v1/chat/completions", "x")
    job = Job.completion("m", [1, 2], stream=False, specprefill={"enabled": False})
    assert job.path == "/v1/completions"
    assert job.body == {"model": "m", "prompt": [1, 2], "stream": False, "specprefill": {"enabled": False}}


TEXT = ': ping\n\ndata: one\n\nevent: x\r\ndata:two\r\ndata:  "é"\r\n\r\nid: 3\n\ndata: [DONE]\n\n'.encode()


@pytest.mark.parametrize("size", range(1, len(TEXT) + 1))
def test_events_however_they_are_cut(size):
    parser, events = EventParser(), []
    for start in range(0, len(TEXT), size):
        events += parser.feed(TEXT[start : start + size])
    parser.finish()
    assert events == ["one", 'two\n "é"', "[DONE]"]


@pytest.mark.parametrize("text", [b"data: x", b"data: x\n", b": comment"])
def test_stream_that_ends_within_an_event(text):
    parser = EventParser()
    assert parser.feed(text) == []
    with pytest.raises(ProtocolError, match="ended within an event"):
        parser.finish()


def test_events_that_are_none():
    with pytest.raises(ProtocolError, match="not UTF-8"):
        EventParser().feed(b"data: \xff\n\n")
    with pytest.raises(ProtocolError, match="more than"):
        EventParser().feed(b"x" * (5 * 1024 * 1024))


def test_stream():
    record = answered(stream(["a", "bé", "c"], gap=0.02))
    assert (record.outcome, record.status, record.error) == ("ok", 200, None)
    assert (record.text, record.finish_reason) == ("abéc", "stop")
    assert (record.usage, record.specprefill) == (USAGE, READ)
    assert (record.prompt_tokens, record.kept_tokens, record.generated) == (70, 14, 3)
    assert record.sent >= record.due == 0.0
    assert len(record.tokens) == 3
    assert record.ttft >= 0.02
    assert all(gap > 0 for gap in record.itl)
    assert record.e2e >= record.ttft + 0.04
    assert record.tpot == pytest.approx((record.tokens[2] - record.tokens[0]) / 2)
    assert record.end - record.sent == record.e2e
    shown = json.loads(json.dumps(record.as_dict()))
    assert shown["characters"] == 4
    assert "text" not in shown
    assert (shown["ttft"], shown["late"]) == (record.ttft, record.late)


def test_role_alone_is_not_the_first_token():
    first = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}
    record = answered([STREAM, event(first), 0.03, *stream()[1:]])
    assert record.ttft >= 0.03
    assert len(record.tokens) == 3


def test_answer_without_text():
    """An end of sequence at once: its chunk is the first that came."""
    record = answered(stream([]))
    assert (record.outcome, record.text, len(record.tokens)) == ("ok", "", 1)
    assert record.tpot is None


def test_comments_between_chunks():
    record = answered([STREAM, chunked(b": keep-alive\n\n"), *stream()[1:]])
    assert (record.outcome, record.text) == ("ok", "abc")


def test_completion_stream_without_chunks():
    """A body that ends with its connection, and everything in one piece."""
    chunk = json.dumps({"choices": [{"text": "ab", "finish_reason": "length"}]})
    head = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    record = answered([head + f"data: {chunk}\r\n\r\ndata: [DONE]\r\n\r\n".encode()], Job.completion("m", "x"))
    assert (record.outcome, record.text, record.finish_reason) == ("ok", "ab", "length")
    assert (record.generated, record.prompt_tokens, record.kept_tokens) == (1, None, None)


@pytest.mark.parametrize("choice", [{"text": "abc"}, {"message": {"role": "assistant", "content": "abc"}}])
def test_whole_answer(choice):
    answer = {"choices": [{**choice, "finish_reason": "stop"}], "usage": USAGE, "specprefill": READ}
    record = answered([0.02, whole(answer)], WHOLE)
    assert (record.outcome, record.text, record.finish_reason) == ("ok", "abc", "stop")
    assert (record.usage, record.specprefill) == (USAGE, READ)
    assert (record.ttft, record.tpot, record.itl) == (None, None, [])
    assert record.e2e >= 0.02


REFUSALS = [
    (whole({"error": {"message": "too many", "type": "x"}}, "429 Too Many Requests"), 429, "too many"),
    (whole({"error": "busy"}, "503 Service Unavailable"), 503, "busy"),
    (whole({"detail": 1}, "400 Bad Request"), 400, '{"detail": 1}'),
    (b"HTTP/1.1 500 Oops\r\n\r\n<html>", 500, "<html>"),
]


@pytest.mark.parametrize(("answer", "status", "error"), REFUSALS)
def test_refused(answer, status, error):
    record = answered([answer])
    assert (record.outcome, record.status, record.error) == ("refused", status, error)
    assert record.e2e is None


def test_error_in_a_stream():
    record = answered([STREAM, event(delta("a")), event({"error": {"message": "device lost"}}), event("[DONE]"), END])
    assert (record.outcome, record.error, record.text) == ("error", "device lost", "a")
    assert len(record.tokens) == 1


TWO = {"choices": [{"delta": {"content": "a"}}, {"delta": {"content": "b"}}]}
MALFORMED = {
    "not HTTP": ([b"SSH-2.0-OpenSSH\r\n"], "not an HTTP answer"),
    "a header that is none": ([b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n"], "not an HTTP header"),
    "a line without end": ([b"HTTP/1.1 200 " + b"x" * 200_000], "too long"),
    "not a stream": ([whole({"choices": []})], "Content-Type '' of a stream is not text/event-stream"),
    "not JSON": ([STREAM, event("{"), END], "not JSON: '{'"),
    "not an object": ([STREAM, event("[1]"), END], "not a JSON object"),
    "deep": ([STREAM, event("[" * 100_000), END], "not JSON"),
    "not UTF-8": ([STREAM, chunked(b"data: \xff\n\n"), END], "not UTF-8"),
    "no choices": ([STREAM, event({"x": 1}), END], "choices=None is not a list"),
    "two choices": ([STREAM, event(TWO), END], "2 choices, where one was asked for"),
    "a choice that is none": ([STREAM, event({"choices": [1]}), END], "is not a list of objects"),
    "a delta that is none": ([STREAM, event({"choices": [{"delta": 1}]}), END], "delta=1 is not an object"),
    "text that is none": ([STREAM, event({"choices": [{"text": 1}]}), END], "text=1 is not a string"),
    "a reason that is none": ([STREAM, event({"choices": [{"finish_reason": 1}]}), END], "finish_reason=1 is not a"),
    "usage that is none": ([STREAM, event({"choices": [], "usage": 1}), END], "usage=1 is not an object"),
    "no [DONE]": ([STREAM, event(delta("a", "stop")), END], "without [DONE]"),
    "no finish": ([STREAM, event(delta("a")), event("[DONE]"), END], "without a finish_reason"),
    "after the finish": ([STREAM, event(delta("a", "stop")), event(delta("b"))], "a choice after the one"),
    "after [DONE]": ([STREAM, event(delta("a", "stop")), event("[DONE]"), event("x"), END], "an event after [DONE]"),
    "half an event": ([STREAM, event(delta("a", "stop")), chunked(b"data: [DO"), END], "ended within an event"),
    "a chunk's size": ([STREAM, b"zz\r\n"], "not the size of an HTTP chunk"),
    "a negative size": ([STREAM, b"-1\r\n"], "not the size of an HTTP chunk"),
    "a huge size": ([STREAM, b"fffffffffff\r\n"], "not the size of an HTTP chunk"),
    "a chunk too long": ([STREAM, b"1\r\nabc\r\n"], "longer than it says"),
    "a length": (
        [b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: -1\r\n\r\n"],
        "Content-Length",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_answers_are_reported(name):
    steps, said = MALFORMED[name]
    record = answered(steps)
    assert record.outcome == "malformed"
    assert said in record.error
    assert record.end is not None


@pytest.mark.parametrize("answer", [{"choices": []}, {"choices": [{"text": "a"}]}, []])
def test_malformed_whole_answers_are_reported(answer):
    assert answered([whole(answer)], WHOLE).outcome == "malformed"


@pytest.mark.parametrize(
    "steps",
    [
        [],
        [STREAM],
        [STREAM, event(delta("a"))],
        [STREAM, b"10\r\nabc"],
        [b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"],
    ],
)
def test_broken_connections(steps):
    record = answered(steps, WHOLE if steps and steps[0] != STREAM else JOB)
    assert record.outcome == "lost"
    assert "ConnectionResetError" in record.error


def test_nobody_listens():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        [record] = run(Target("127.0.0.1", probe.getsockname()[1]))
    assert record.outcome == "lost"
    assert "ConnectionRefusedError" in record.error


@pytest.mark.parametrize("steps", [[None], [STREAM, event(delta("a")), None]])
def test_timeout_closes_the_connection(steps):
    with serving(lambda path, body: steps) as seen:
        [record] = run(seen.target, timeout=0.1)
        assert seen.everyone_left.wait(10)
    assert (record.outcome, record.error) == ("timeout", "no whole answer within 0.1 s")
    assert record.end - record.sent >= 0.1
    assert record.e2e is None
    assert len(seen.requests) == seen.gone == 1


def test_cancelled_task_closes_the_connection():
    record = Record(0, "", 0.0)

    async def scenario(target: Target) -> None:
        now = asyncio.get_running_loop().time
        task = asyncio.create_task(load.send(target, JOB, record, None, now))
        while not record.tokens:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with serving(lambda path, body: [STREAM, event(delta("a")), None]) as seen:
        asyncio.run(scenario(seen.target))
        assert seen.everyone_left.wait(10)
    assert (record.outcome, record.text, seen.gone) == ("cancelled", "a", 1)


def test_load_does_not_wait_for_answers():
    """The first answer takes longer than all arrivals together; the records are in the order of the jobs."""
    jobs = [Job.chat("m", ASK, label=str(i), max_tokens=1) for i in range(4)]
    answers = iter([[0.25, *stream("a")], stream("b"), stream("c"), stream("d")])
    ended = []
    with serving(lambda path, body: next(answers)) as seen:
        records = run(seen.target, jobs, [0.0, 0.04, 0.08, 0.12], on_end=lambda record: ended.append(record.label))
    assert [record.text for record in records] == ["a", "b", "c", "d"]
    assert [(record.index, record.label, record.due) for record in records][3] == (3, "3", 0.12)
    assert ended[-1] == "0"
    assert all(record.late >= 0 for record in records)
    assert records[3].sent < records[0].end


def test_giving_up():
    """What runs is cancelled, what is due later is never sent."""
    with serving(lambda path, body: [None]) as seen:
        due = [0.0, 0.0, 1000.0]
        records = run(seen.target, [JOB] * 3, due, timeout=0.1, on_end=lambda record: record.outcome == "timeout")
        assert seen.everyone_left.wait(10)
    assert records[0].outcome == "timeout"
    assert {record.outcome for record in records[1:]} <= {"timeout", "cancelled"}
    assert (records[2].outcome, records[2].sent) == ("cancelled", None)
    assert len(seen.requests) == 2


def test_times_for_other_jobs():
    with pytest.raises(ArgumentError, match="due=.* must be 1 times, one a job"):
        run(Target("127.0.0.1", 1), [JOB], [0.0, 1.0])


def test_json_of_a_page():
    answers = {"/a": [whole({"x": 1})], "/b": [whole([], "404 Not Found")], "/c": [b"HTTP/1.1 200 OK\r\n\r\nhi"]}
    with serving(lambda path, body: answers[path]) as seen:
        target = Target(seen.target.host, seen.target.port, api_key="k")
        found = [asyncio.run(fetch_json(target, path)) for path in answers]
    assert found == [(200, {"x": 1}), (404, []), (200, None)]
    assert [headers["authorization"] for headers in seen.headers] == ["bearer k"] * 3


def test_json_that_never_comes():
    with serving(lambda path, body: [None]) as seen, pytest.raises(TimeoutError):
        asyncio.run(fetch_json(seen.target, "/a", timeout=0.1))
