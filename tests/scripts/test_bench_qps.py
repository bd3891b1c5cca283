"""scripts/bench_qps.py against a simulated queue, a real server in a thread, and one that it starts itself."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from contextlib import nullcontext
from pathlib import Path

import pytest
from load_server import serving, stream, whole
from script_modules import SCRIPTS, load_script

from specprefill_jax.errors import ArgumentError
from specprefill_jax.evals import qps
from specprefill_jax.evals.load import Record
from specprefill_jax.evals.rates import mix_ceiling
from specprefill_jax.evals.served import ServerError
from specprefill_jax.models.published import LLAMAS

script = load_script("bench_qps")

SVG = "{http://www.w3.org/2000/svg}"
URL = "http://127.0.0.1:9"
CARD = {"id": "tiny", "root": "/models/tiny"}


def words(body: dict) -> int:
    text = body["messages"][0]["content"] if "messages" in body else body["prompt"]
    return len(text.split())


def keep_rate(body: dict) -> float:
    asked = body.get("specprefill", {})
    return asked["keep_rate"] if asked.get("enabled") else 1.0


def simulate(monkeypatch, service, cached: int = 0) -> list[dict]:
    """Put a queue in the server's place that takes `service(body)` seconds for each request; the bodies it gets.

    A token is half a word here, and every answer has three.
    """
    bodies = []

    async def run_load(target, jobs, due, timeout, on_end=lambda record: None):
        free, records = 0.0, []
        for index, (job, at) in enumerate(zip(jobs, due, strict=True)):
            bodies.append(job.body)
            record = Record(index, job.label, at, at)
            free = max(free, at) + service(job.body)
            late = timeout is not None and free - at > timeout
            record.outcome, record.end = ("timeout", at + timeout) if late else ("ok", free)
            tokens = 2 * words(job.body)
            if not late:
                record.tokens = [free - 0.2, free - 0.1, free]
                details = {"cached_tokens": cached}
                record.usage = {"prompt_tokens": tokens, "completion_tokens": 3, "prompt_tokens_details": details}
                kept = max(1, round(tokens * keep_rate(job.body)))
                reason = "engaged" if kept < tokens else "disabled"
                record.specprefill = {"engaged": kept < tokens, "reason": reason, "kept_tokens": kept}
            records.append(record)
            if on_end(record):
                break
        rest = [Record(len(records) + i, job.label, 0.0) for i, job in enumerate(jobs[len(records) :])]
        for record in rest:
            record.outcome = "cancelled"
        return records + rest

    async def fetch_json(target, path, body=None):
        return {"/v1/models": (200, {"data": [CARD]}), "/version": (404, None)}[path]

    monkeypatch.setattr(qps, "run_load", run_load)
    monkeypatch.setattr(qps, "fetch_json", fetch_json)
    return bodies


def service(body: dict) -> float:
    """Dense: 1.6 seconds for 160 words; sparse a fifth of it."""
    return words(body) / 100 * (0.2 if keep_rate(body) < 1 else 1.0)


def measure(tmp_path, **given) -> dict:
    args = qps.QpsArgs(**{"url": URL, "generate": 320, "pause": 0.0, "out": tmp_path / "a.json", **given})
    script.main(args)
    return json.loads((tmp_path / "a.json").read_text())


def test_paper_protocol(monkeypatch, tmp_path, capsys):
    """The capacities are those of tests/evals/test_rates.py: 1 / (service - (timeout - service) / 123)."""
    bodies = simulate(monkeypatch, service)
    monkeypatch.setattr(sys, "argv", ["bench_qps.py", "--api-key", "secret"])
    found = measure(
        tmp_path, plot=tmp_path / "a.svg", records=tmp_path / "a.jsonl", api_key="secret", keep_rates=(0.1,)
    )
    dense, sparse = found["max_rates"]
    [tokens] = {row["prompt_tokens"]["mean"] for row in found["runs"] if row["prompt_tokens"]}
    assert 318 <= tokens <= 320
    alone = tokens / 200
    for row, seconds in ((dense, alone), (sparse, alone / 5)):
        capacity = 1 / (seconds - (10 - seconds) / 123)
        assert row["max_rate"] <= capacity < row["failed_rate"] <= row["max_rate"] * 1.05
    assert sparse["speedup"] == sparse["max_rate"] / dense["max_rate"]
    assert (sparse["ceiling"], sparse["share_of_ceiling"], dense["speedup"]) == (None, None, None)
    for row in found["runs"]:
        limit = dense if row["mode"] == "dense" else sparse
        assert row["holds"] == (row["rate"] <= limit["max_rate"]) == (row["missed"] <= 4)
        assert row["missed"] <= 5  # a rate that has failed is left
        assert row["outcomes"].get("ok", 0) + row["missed"] + row["outcomes"].get("cancelled", 0) == 128
    assert {"date", "commit", "versions", "processor", "settings"} <= found.keys()
    assert "devices" not in found
    assert found["command"] == "python bench_qps.py --api-key ***"
    assert "secret" not in json.dumps(found)
    assert found["server"] == {"model": CARD, "version": None}
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert len(lines) == 128 * len(found["runs"])
    assert {"sent", "tokens", "end", "finish_reason", "usage", "specprefill", "error", "outcome", "ttft"} <= lines[
        0
    ].keys()
    prompts = [body["messages"][0]["content"] for body in bodies]
    assert len({prompt[:24] for prompt in prompts}) == len(prompts)  # none begins as another
    assert {json.dumps(body["specprefill"]) for body in bodies} == {
        '{"enabled": false}',
        '{"enabled": true, "keep_rate": 0.1}',
    }
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in bodies} == {("tiny", 0, 32)}
    shown = capsys.readouterr().out
    assert "Highest rates that hold" in shown
    assert f"{sparse['max_rate']:.3g}" in shown

    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    texts = [element.text for element in root.iter(SVG + "text")]
    assert {"Time to the whole answer over the rate of requests", "dense", "keep 0.1"} <= set(texts)
    crosses = [element for element in root.iter(SVG + "path") if element.get("class") == "line"]
    assert len(crosses) == sum(not row["holds"] for row in found["runs"])
    assert len(list(root.iter(SVG + "circle"))) == sum(row["holds"] for row in found["runs"])
    assert all("nan" not in value for element in root.iter() for value in element.attrib.values())


@pytest.mark.parametrize("cached", [6, 7])
def test_ceiling_for_a_pair_that_is_known(monkeypatch, tmp_path, cached):
    """What `main` and `speculator` name is looked into (nothing is started here); no ceiling with 2 % in a cache."""
    simulate(monkeypatch, service, cached)
    pair = {"big": LLAMAS["Llama-3.1-8B"], "small": LLAMAS["Llama-3.2-1B"]}

    class Opened:
        def __init__(self, name: str):
            self.config = pair[name]

    monkeypatch.setattr(qps, "open_checkpoint", Opened)
    monkeypatch.setattr(script, "server_at", lambda *server: nullcontext((None, None)))
    found = measure(
        tmp_path, url=None, main="big", speculator="small", rates=(0.2, 0.4, 2.0, 6.0), keep_rates=(0.1, 0.5)
    )
    dense, low, high = found["max_rates"]
    assert [row["max_rate"] for row in (dense, low, high)] == [0.4, 2.0, 2.0]
    assert (low["speedup"], dense["ceiling"]) == (5.0, None)
    if cached == 7:
        assert (
            [row["ceiling"] for row in (low, high)] == [row["share_of_ceiling"] for row in (low, high)] == [None, None]
        )
        return
    for row in (low, high):
        [run] = [run for run in found["runs"] if (run["mode"], run["rate"]) == (row["mode"], 2.0)]
        mix = (int(run["prompt_tokens"]["mean"]), int(run["kept_tokens"]["mean"]), 3)
        assert row["ceiling"] == pytest.approx(mix_ceiling(pair["big"], pair["small"], [mix]), rel=1e-3)
        assert row["share_of_ceiling"] == pytest.approx(row["speedup"] / row["ceiling"])
    assert low["ceiling"] > high["ceiling"] > 1


def test_a_request_that_takes_too_long_alone(monkeypatch, tmp_path, capsys):
    """No rate is tried where even one request cannot be answered in time; the other mode is still measured."""
    simulate(monkeypatch, service)
    found = measure(tmp_path, timeout=1.0, requests=16)
    dense, sparse = found["max_rates"]
    assert (dense["max_rate"], sparse["speedup"]) == (None, None)
    assert sparse["max_rate"] > 1
    assert {row["mode"] for row in found["runs"]} == {"keep 0.1"}
    assert "dense: one request alone takes 1." in capsys.readouterr().err


def test_too_few_requests_to_find_a_rate(monkeypatch, tmp_path, capsys):
    """All at once they are answered in time: that is said, and no higher rate is tried."""
    simulate(monkeypatch, service)
    found = measure(tmp_path, timeout=1000.0, requests=4)
    for row in found["max_rates"]:
        runs = [run for run in found["runs"] if run["mode"] == row["mode"]]
        assert all(run["holds"] for run in runs)
        assert row["max_rate"] == pytest.approx(4 * runs[0]["rate"])
        assert row["failed_rate"] is None
    assert capsys.readouterr().err.count("4 requests at once are answered in time: too few to find a rate") == 2


def test_a_timeout_by_what_one_takes_alone(monkeypatch, tmp_path):
    """Sparse is five times as quick: with equal factors its rate is five times as high, however few the requests."""
    simulate(monkeypatch, service)
    found = measure(tmp_path, timeout_factor=2.0, requests=8, precision=0.001)
    dense, sparse = found["max_rates"]
    assert sparse["speedup"] == pytest.approx(5, rel=0.003)
    [alone] = {run["timeout"] / 2 for run in found["runs"] if run["mode"] == "dense"}
    assert dense["max_rate"] == pytest.approx(1 / (alone - alone / 7), rel=0.003)
    with pytest.raises(ValueError, match=r"timeout_factor=1.0 is not allowed"):
        qps.check(qps.QpsArgs(url=URL, generate=320, timeout_factor=1.0))


def test_poisson_protocol(monkeypatch, tmp_path):
    simulate(monkeypatch, service)
    plot = tmp_path / "a.svg"
    found = measure(
        tmp_path,
        protocol="poisson",
        rates=(0.4, 0.1),
        timeout=60.0,
        goodput=("ttft=3", "e2e=9"),
        requests=40,
        plot=plot,
    )
    assert [(row["mode"], row["rate"]) for row in found["runs"]] == [
        (mode, rate) for rate in (0.1, 0.4) for mode in ("dense", "keep 0.1")
    ]
    assert found["max_rates"] == []
    for row in found["runs"]:
        assert row["outcomes"] == {"ok": 40}
        assert row["tpot"]["p99"] == pytest.approx(0.1)
        assert row["itl"]["p50"] == pytest.approx(0.1)
        assert row["goodput"]["good"] <= 40
    assert found["runs"][0]["goodput"]["good"] > found["runs"][2]["goodput"]["good"]
    assert "Time to first token over the rate of requests" in plot.read_text()


def test_prompts_from_files(monkeypatch, tmp_path):
    """Taken from in turn, with a row's own number of tokens, and few-shot rows without a chat template."""
    bodies = simulate(monkeypatch, lambda body: 0.1)
    rows = [{"context": f"c{i}", "input": "q", "dataset": "trec"} for i in range(3)]
    (tmp_path / "trec.jsonl").write_text("\n".join(map(json.dumps, rows)))
    row = {"messages": [{"role": "user", "content": "hello there"}], "max_tokens": 5}
    (tmp_path / "chat.jsonl").write_text(json.dumps(row))
    files = (tmp_path / "trec.jsonl", tmp_path / "chat.jsonl")
    given = {"prompts": files, "generate": None, "requests": 8, "rates": (1.0,), "warm_up": 1, "unique_heads": False}
    measure(tmp_path, **given, plain=True, stream=False, ignore_eos=True)
    run = bodies[1:]
    assert [body.get("prompt", "chat")[:1] for body in run] == ["c"] * 8
    assert [body["prompt"] for body in run[::2]][:3] == [run[0]["prompt"], run[2]["prompt"], run[4]["prompt"]]
    assert {body["prompt"] for body in run[::2]} == {f"c{i}\n\nq" for i in range(3)}
    assert [body["max_tokens"] for body in run] == [64, 5] * 4
    assert all(body["messages"] == row["messages"] for body in run[1::2])
    assert all("specprefill" not in body and not body["stream"] and body["ignore_eos"] for body in run)


def test_shared_prefix(monkeypatch, tmp_path):
    bodies = simulate(monkeypatch, lambda body: 0.1)
    measure(tmp_path, shared_prefix=20, requests=4, rates=(1.0,), keep_rates=(), endpoint="completions")
    texts = [body["prompt"] for body in bodies[2:]]  # after those that measure the words
    assert len({text.split("\n")[0] for text in texts}) == 1
    assert len(texts[0].split("\n")[0].split(" ")) == 20
    assert len({text.split("\n")[1] for text in texts}) == len(texts)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": None}, "url=None is not allowed: url must be given, or else --main and --speculator"),
        ({"main": "m", "speculator": "s"}, "url=.* and not both"),
        ({"url": None, "main": "m"}, "speculator=None is not allowed"),
        ({"generate": None}, "generate=None is not allowed: generate must be given, or else --prompts"),
        ({"generate": 8}, "generate=8 is not allowed"),
        ({"requests": 0}, "requests=0 is not allowed"),
        ({"timeout": 0.0}, "timeout=0.0 is not allowed"),
        ({"start_rate": -1.0}, "start_rate=-1.0 is not allowed"),
        ({"pause": -1.0}, "pause=-1.0 is not allowed"),
        ({"max_missed": 1.0}, "max_missed=1.0 is not allowed"),
        ({"rates": (1.0, 0.0)}, "rates=0.0 is not allowed"),
        ({"keep_rates": (2.0,)}, "keep_rates=2.0 is not allowed"),
        ({"keep_rates": (), "dense": False}, r"keep_rates=\(\) is not allowed"),
        ({"protocol": "poisson"}, "rates=.* at least one with --protocol poisson"),
        ({"goodput": ("itl=1",)}, "goodput='itl=1' is not allowed"),
        ({"goodput": ("ttft=1",), "stream": False}, "goodput=.* e2e=SECONDS alone with --no-stream"),
        ({"settings": "[]"}, "settings='.*' is not allowed: settings must be a JSON object"),
        ({"out": Path("no", "such", "folder.json")}, "out=.* must be a file in a folder that exists"),
        ({"url": "localhost:8000"}, "url='localhost:8000' is not allowed"),
    ],
)
def test_bad_arguments(given, said):
    with pytest.raises(ArgumentError, match=said):
        script.main(qps.QpsArgs(**{"url": URL, "generate": 320, **given}))


def test_against_a_server_over_http(tmp_path, capsys):
    """All the way: models, warm-up, streams, refusals and timeouts that are counted and not repeated."""

    def answer(path: str, body: dict) -> list:
        if path == "/v1/models":
            return [whole({"data": [CARD]})]
        if path == "/version":
            return [whole({"version": "9"})]
        answered.append(body)
        number = len(answered)
        if number == 6:
            return [whole({"error": {"message": "full"}}, "429 Too Many Requests")]
        if number == 8:
            return [None]
        return stream(["a", "b"], usage={"prompt_tokens": 2 * words(body), "completion_tokens": 2})

    answered: list[dict] = []
    with serving(answer) as seen:
        url = f"http://127.0.0.1:{seen.target.port}/v1"
        given = {"url": url, "api_key": "k", "dense": False, "protocol": "poisson", "rates": (100.0,), "requests": 8}
        found = measure(tmp_path, **given, warm_up=1, timeout=0.5)
    assert {headers["authorization"] for headers in seen.headers} == {"bearer k"}
    assert len(answered) == 2 + 1 + 8  # two that measure the words, the warm-up, the run
    [row] = found["runs"]
    assert row["outcomes"] == {"ok": 6, "refused": 1, "timeout": 1}
    assert row["errors"] == {"full": 1, "no whole answer within 0.5 s": 1}
    assert (row["missed"], row["holds"], row["reasons"]) == (2, False, {"engaged": 6})
    assert row["ttft"]["p50"] > 0
    assert row["lateness"]["p50"] >= 0
    assert found["server"] == {"model": CARD, "version": {"version": "9"}}
    assert "keep 0.1, 100 a second: fails, 2 of 8 missed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({}, "the server lists no model .GET /v1/models: status 404"),
        ({"/v1/models": whole({"data": []})}, "lists no model"),
        ({"/v1/models": b"hello\r\n"}, "no answer from http.*: ProtocolError: not an HTTP answer"),
        ({"/v1/models": whole({"data": [CARD]})}, r"keep 0.1: refused \(status 404\): gone"),
        ({"/v1/models": whole({"data": [CARD]}), "/v1/chat/completions": b""}, "keep 0.1: lost: ConnectionReset"),
    ],
)
def test_servers_that_cannot_be_measured(answers, said):
    missing = whole({"error": {"message": "gone"}}, "404 Not Found")
    with serving(lambda path, body: [answers.get(path, missing)]) as seen:
        url = f"http://127.0.0.1:{seen.target.port}"
        with pytest.raises(ServerError, match=said):
            script.main(qps.QpsArgs(url=url, generate=320))


def test_a_server_that_is_lost_in_a_run_is_no_rate_that_fails(tmp_path):
    def answer(path: str, body: dict) -> list:
        if not body:
            return [whole({"data": [CARD]})]
        asked.append(path)
        return stream() if len(asked) <= 4 else []  # two that measure the words, and the warm-up

    asked: list[str] = []
    with serving(answer) as seen:
        url = f"http://127.0.0.1:{seen.target.port}"
        with pytest.raises(ServerError, match="the server is gone: ConnectionResetError"):
            measure(tmp_path, url=url, keep_rates=(), requests=4, rates=(100.0,))


def test_a_model_that_is_not_there():
    with serving(lambda path, body: [whole({"data": [CARD]})]) as seen:
        url = f"http://127.0.0.1:{seen.target.port}"
        with pytest.raises(ServerError, match="lists no model 'other'"):
            script.main(qps.QpsArgs(url=url, generate=320, model="other"))


SERVE = """
import http.server, os, pathlib, sys
here = pathlib.Path(__file__).parent
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        content = b'{"data": [{"id": "x"}]}'
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
    def do_POST(self):
        (here / "asked").write_text(str(os.getpid()))
        self.rfile.read()
    def log_message(self, *args):
        pass
(here / "argv").write_text(" ".join(sys.argv[1:]))
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
BENCH = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_interrupted_it_leaves_no_server_behind(tmp_path):
    shutil.copy(SCRIPTS / "bench_qps.py", tmp_path)
    (tmp_path / "serve.py").write_text(SERVE)
    command = [sys.executable, "-c", BENCH, str(tmp_path / "bench_qps.py"), "--main", "m", "--speculator", "s"]
    command += ["--generate", "320", "--serve=--dtype bfloat16"]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPTS.parent)}
    asked = tmp_path / "asked"
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as bench:
        try:
            deadline = time.monotonic() + 120
            while bench.poll() is None and not (asked.exists() and asked.read_text()):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            bench.send_signal(signal.SIGINT)
            _, said = bench.communicate(timeout=60)
        finally:
            bench.kill()
    assert (bench.returncode, said) == (130, "")
    with pytest.raises(ProcessLookupError):
        os.kill(int(asked.read_text()), 0)
    arguments = (tmp_path / "argv").read_text()
    assert arguments.startswith("--main m --speculator s --port ")
    assert arguments.endswith(" --dtype bfloat16")
