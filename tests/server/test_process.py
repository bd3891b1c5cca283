"""The whole server in a process of its own, with the tiny models in it: what clients do is not felt by others.

One server serves the file; the test that ends it comes last.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path

import pytest
from agreement import MAIN, SPECULATOR, prompt_of

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve.py"
FLAGS = (
    *("--main", str(MAIN), "--speculator", str(SPECULATOR), "--port", "0", "--look-ahead", "1"),
    *("--max-running", "8", "--prefill-chunk", "32", "--max-model-len", "2048", "--cache-tokens", "16384"),
    *("--min-prompt-tokens", "64", "--min-predicted-gain", "0", "--keep-rate", "0.5", "--tail-tokens", "8"),
)
PATIENCE = 60.0
DENSE = {"enabled": False}
WAITING, RUNNING = "vllm:num_requests_waiting", "vllm:num_requests_running"
CACHE, DRAFT_CACHE = "vllm:kv_cache_usage_perc", "specprefill:speculator_cache_usage_ratio"
PROMPTS, ABORTED = "vllm:prompt_tokens_total", "vllm:request_success_total abort"


class Process:
    """A server, and what tests ask of it."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), *FLAGS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=lambda: self.said.extend(self.process.stderr), daemon=True)
        self._reader.start()
        line = self.process.stdout.readline()
        found = re.fullmatch(r"serving tiny-main at http://127\.0\.0\.1:(\d+)\n", line)
        assert found, (line, self.said)
        self.port = int(found[1])

    def close(self):
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()
        self.process.stderr.close()

    def open(self, body: dict):
        """A connection on which a completion was asked for, and its response, not yet read."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection, connection.getresponse()

    def complete(self, body: dict) -> dict:
        connection, response = self.open(body)
        with closing(connection):
            data = response.read()
        assert response.status == 200, data
        return json.loads(data)

    def metrics(self) -> dict[str, float]:
        """The figures by name; of their labels only the reason of an end is told."""
        with closing(HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)) as connection:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        found = {}
        for line in lines:
            name, _, value = line.rpartition(" ")
            reason = re.search(r'finished_reason="(\w+)"', name)
            if not line.startswith("#"):
                found[name.partition("{")[0] + (f" {reason[1]}" if reason else "")] = float(value)
        return found

    def wait(self, what) -> dict[str, float]:
        """The metrics as soon as `what` of them is true."""
        deadline = time.monotonic() + PATIENCE
        while not what(found := self.metrics()):
            assert time.monotonic() < deadline, found
            time.sleep(0.01)
        return found

    def wait_idle(self, since: dict[str, float] | None = None) -> dict[str, float]:
        """The same when nothing runs or waits, no page is held, and the end of a request `since` then was counted.

        A request that nobody listens to any more is counted just after its pages were given back.
        """
        return self.wait(
            lambda m: (
                not (m[RUNNING] or m[WAITING] or m[CACHE] or m[DRAFT_CACHE])
                and (since is None or ended(m) > ended(since))
            )
        )


def ended(metrics: dict[str, float]) -> float:
    """How many requests have ended, however they did."""
    return sum(value for name, value in metrics.items() if name.startswith("vllm:request_success_total "))


@pytest.fixture(scope="module")
def servers():
    """The servers that were started: one, unless tests are spread over processes or the last one does not come last."""
    started: list[Process] = []
    yield started
    for server in started:
        server.close()


@pytest.fixture
def server(servers):
    """A server on which nothing runs."""
    if not servers or servers[-1].process.poll() is not None:
        servers.append(Process())
    servers[-1].wait_idle()
    return servers[-1]


def raw(body: dict) -> bytes:
    """An HTTP request for a completion; the connection closes after its answer, which is not chunked."""
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def body_of(length: int, which: int = 0, **more) -> dict:
    return {"prompt": prompt_of(length, which), "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}


def chunks_of(stream: bytes) -> list[dict]:
    """The chunks of a stream, which must end with [DONE]."""
    *frames, last, rest = stream.decode().split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in frames if frame != ": keep-alive"]


def ids_of(chunks: list[dict], index: int = 0) -> list[int]:
    """The tokens of a choice; it must have ended, once and last."""
    mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == [mine[-1]["finish_reason"]]
    return [token for choice in mine for token in choice.get("token_ids", ())]


def test_sixteen_at_once_are_answered_as_each_alone(server):
    reading = [DENSE, {"keep_rate": 0.5}, {"keep_rate": 0.3}, DENSE]
    drawing = [{}, {"temperature": 1.0, "seed": 7}]
    bodies = [
        body_of(20 + 31 * n, n, specprefill=reading[n % 4], return_token_ids=True, **drawing[n // 4 % 2])
        for n in range(16)
    ]
    alone = [server.complete(body)["choices"][0]["token_ids"] for body in bodies]
    # As if the choices of the first round had been forgotten: other settings with the same meaning.
    for body in bodies[1::4] + bodies[2::4]:
        body["specprefill"] = {**body["specprefill"], "min_predicted_gain": 1e-9}
    start = threading.Barrier(16)

    def ask(body: dict):
        start.wait()
        return server.complete(body)

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, bodies))
    assert [answer["choices"][0]["token_ids"] for answer in together] == alone
    reasons = Counter(answer["specprefill"]["reason"] for answer in together)
    assert reasons["disabled"] == 8
    assert reasons["engaged"] >= 5
    assert server.wait_idle()["specprefill:compiles_after_warm_up_total"] == 0


CLIENT = """
import socket, sys
request = sys.stdin.buffer.read()
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.sendall(request)
    seen = b""
    while b"token_ids" not in seen:
        seen += connection.recv(4096)
    print("streaming", flush=True)
    while connection.recv(4096):
        pass
"""


def test_a_client_that_is_killed_gives_its_pages_back(server):
    before = server.metrics()
    request = raw(body_of(200, max_tokens=1800, stream=True, return_token_ids=True))
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(server.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as client:
        client.stdin.write(request)
        client.stdin.close()
        assert client.stdout.readline() == b"streaming\n"
        assert server.metrics()[CACHE] > 0
        os.kill(client.pid, signal.SIGKILL)
    after = server.wait_idle(since=before)
    assert after[ABORTED] == before[ABORTED] + 1
    assert after["vllm:generation_tokens_total"] < before["vllm:generation_tokens_total"] + 1800


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_its_prompt_is_speculated(server, stream):
    for attempt in range(20):  # it may be over before one has looked, on a busy machine more often
        before = server.wait_idle()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(raw(body_of(2000, 10 * attempt + stream, stream=stream)))
            seen = server.wait(lambda m, before=before: m[DRAFT_CACHE] > 0 or m[PROMPTS] > before[PROMPTS])
        after = server.wait_idle(since=before)
        if seen[CACHE] == 0 and after[PROMPTS] == before[PROMPTS]:
            break
    assert seen[DRAFT_CACHE] > seen[CACHE] == 0
    assert after[ABORTED] == before[ABORTED] + 1
    assert after[PROMPTS] == before[PROMPTS]  # it never came to its first token


def test_a_client_that_reads_slowly_holds_nobody_up(server):
    slow_body = body_of(100, max_tokens=150, n=2, logprobs=20, stream=True, return_token_ids=True)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(PATIENCE)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(raw(slow_body))
        begun = server.wait(lambda m: m[RUNNING] == 2)
        quick = server.complete(body_of(100, 5))
        assert quick["usage"]["completion_tokens"] == 8
        # The engine waits for nobody: it has all tokens before the client has read the first.
        ended = server.wait_idle()
        assert ended["vllm:generation_tokens_total"] >= begun["vllm:generation_tokens_total"] + 200
        stream = bytearray()
        while piece := slow.recv(1 << 16):
            stream += piece
    head, _, stream = bytes(stream).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    chunks = chunks_of(stream)
    assert len(stream) > 1 << 18
    first, second = ids_of(chunks, 0), ids_of(chunks, 1)
    assert len(first) == 150
    assert first == second


def test_sigterm_under_load_finishes_what_runs_and_leaves_with_0(server):
    bodies = [body_of(50 + 100 * n, max_tokens=120, stream=True, return_token_ids=True) for n in range(4)]
    opened = [server.open(body) for body in bodies]
    server.process.send_signal(signal.SIGTERM)
    late = None
    while late is None or late.status == 200:  # the signal is on its way
        connection, late = server.open(body_of(8, max_tokens=1))
        with closing(connection):
            refusal = late.read()
    assert (late.status, json.loads(refusal)["error"]["code"]) == (503, "engine_draining")
    assert late.headers["Retry-After"]
    assert server.process.poll() is None
    for connection, response in opened:
        with closing(connection):
            assert len(ids_of(chunks_of(response.read()))) == 120
    assert server.process.wait(PATIENCE) == 0
    assert not [line for line in server.said if "Traceback" in line or "ERROR" in line]
