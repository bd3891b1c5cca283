"""Two replicas on a Ray cluster of this machine, with the scripted engine in each: where requests go, and what is lost
when a replica is killed. `make test-ray` runs these; they need the extra `ray` and take a minute or two."""

import asyncio
import json
import os
import re
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.running import DEFAULTS, Server

from specprefill_jax.errors import ArgumentError
from specprefill_jax.server.ray_settings import RaySettings
from specprefill_jax.server.service import ServerSettings

# Ray's own threads and sockets, which live as long as its cluster.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]
TESTS = Path(__file__).parents[1]
KEY = "a-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}


class Remote(Server):
    """Clients for the deployment."""

    def __init__(self, port):
        self.port = port

    def frames(self, path, body, headers):
        """The frames of a stream."""
        status, _, data = self.ask("POST", path, body, headers)
        assert (status, data[-2:]) == (200, b"\n\n")
        return data.decode()[:-2].split("\n\n")


@pytest.fixture(scope="module")
def remote():
    """The deployment with two replicas, prefixes never giving way to load, and Ray looking after them every second."""
    known = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join((str(TESTS), str(TESTS.parent)))
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # else anybody may run code in it

    import ray
    from ray import serve
    from server.ray_engine import load

    from specprefill_jax.engine.request import EngineConfig
    from specprefill_jax.server import ray_app

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray")  # its sockets' paths must be short
    try:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=folder,
            object_store_memory=100 << 20,
        )
        settings = RaySettings(
            replicas=2, num_cpus=0.5, prefix_slack=1000, health_check_period=1.0, shutdown_timeout=5.0
        )
        server = ServerSettings(api_keys=(KEY,), defaults=DEFAULTS, max_body_bytes=4096)
        ray_app.deploy(ray_app.build(load, EngineConfig(), server, settings), "127.0.0.1", port)
        yield Remote(port)
    finally:
        serve.shutdown()
        ray.shutdown()
        os.environ.clear()
        os.environ.update(known)
        shutil.rmtree(folder, ignore_errors=True)


def chat(system, **more):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"a question {time.monotonic()}"}]
    return {"messages": messages, **more}


def process_in(text):
    return int(re.match(r"process (\d+)", text)[1])


def ask(remote, body):
    """The text of an answer and the code of the error that came instead: one of them is None."""
    status, _, data = remote.ask("POST", "/v1/chat/completions", body, HEADERS)
    if status != 200:
        return None, json.loads(data)["error"]["code"]
    if not body.get("stream"):
        return json.loads(data)["choices"][0]["message"]["content"], None
    *frames, last, rest = data.decode().split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames if not frame.startswith(":")]
    if "error" in chunks[-1]:
        return None, chunks[-1]["error"]["code"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks), None


def homes(remote, systems):
    """By the beginning of its prompts, the process that answers."""
    return {system: process_in(ask(remote, chat(system))[0]) for system in systems}


def two_homes(remote):
    """Four beginnings for each of the two replicas, and their processes."""
    found = {}
    for number in range(200):
        system = f"you are number {number}"
        found.setdefault(process_in(ask(remote, chat(system))[0]), []).append(system)
        if len(found) == 2 and min(map(len, found.values())) >= 4:
            return {process: systems[:4] for process, systems in found.items()}
    raise AssertionError(f"one replica gets too little: {found}")


def test_answers_as_one_server_does(remote):
    assert remote.ask("GET", "/health")[0] == 200
    status, headers, data = remote.ask("GET", "/v1/models", None, {**HEADERS, "X-Request-Id": "mine"})
    assert (status, headers["x-request-id"]) == (200, "mine")
    assert json.loads(data)["data"][0]["root"] == "root/of/fake"
    assert remote.ask("GET", "/")[2].startswith(b"<!")
    assert remote.post("/v1/chat/completions", chat("x"))[0] == 401
    assert remote.post("/v1/chat/completions", {"messages": []}, HEADERS)[1]["error"]["param"] == "messages"
    status, value = remote.post("/v1/nowhere", {}, HEADERS)
    assert (status, value["error"]["type"]) == (404, "not_found_error")
    long = chat("x" * 5000)
    status, value = remote.post("/v1/chat/completions", long, HEADERS)
    assert (status, value["error"]["code"]) == (413, "request_too_large")
    assert remote.post("/v1/chat/completions", long)[0] == 401
    text, error = ask(remote, chat("be brief", stream=True))
    assert error is None
    assert text.startswith("process ")


def test_equal_beginnings_meet_at_one_replica(remote):
    systems = [system for several in two_homes(remote).values() for system in several]
    before = homes(remote, systems)
    assert len(set(before.values())) == 2
    with ThreadPoolExecutor(8) as pool:
        for again in pool.map(lambda _: homes(remote, systems), range(4)):
            assert again == before


def test_metrics_tell_of_every_replica(remote):
    two_homes(remote)
    status, headers, data = remote.ask("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(data.decode())}
    assert families["vllm:request_success"].type == "counter"
    counts = {
        sample.labels["engine"]: sample.value
        for sample in families["vllm:request_success"].samples
        if sample.labels["finished_reason"] == "stop" and sample.name.endswith("_total")
    }
    assert counts.keys() == {"0", "1"}
    assert min(counts.values()) >= 4


def aborted(remote):
    found = re.findall(
        rb'^vllm:request_success_total{.*finished_reason="abort".*} (.*)$', remote.ask("GET", "/metrics")[2], re.M
    )
    return sum(map(float, found))


@pytest.mark.parametrize("stream", [True, False])
def test_work_for_a_client_that_went_ends(remote, stream):
    before = aborted(remote)
    body = chat("long", ignore_eos=True, max_tokens=1000, stream=stream)
    data = json.dumps(body).encode()
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Authorization: Bearer {KEY}",
    ]
    with closing(socket.create_connection(("127.0.0.1", remote.port))) as client:
        client.sendall("\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data)
        if stream:
            client.recv(100)
        else:
            time.sleep(0.3)
    until(lambda: aborted(remote) == before + 1)


def until(true, seconds=180.0):
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@dataclass
class Attempt:
    system: str
    began: float
    error: str | None


@dataclass
class Load:
    """Clients that ask without pause, and again where they are told to."""

    remote: Remote
    attempts: list[Attempt] = field(default_factory=list)
    answers: list[tuple[str, int]] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)

    def ask(self, system, stream):
        while not self.done.is_set():
            for _ in range(20):
                began = time.monotonic()
                text, error = ask(self.remote, chat(system, stream=stream))
                self.attempts.append(Attempt(system, began, error))
                if error is None:
                    self.answers.append((system, process_in(text)))
                    break
                time.sleep(0.2)
            else:
                raise AssertionError(f"{system} has had no answer in 20 attempts")


def test_a_killed_replica_loses_only_what_it_was_working_on(remote):
    found = two_homes(remote)
    (victim, lost), (survivor, kept) = found.items()
    load = Load(remote)

    def replacements():
        return {process for _, process in load.answers} - {victim, survivor}

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(load.ask, system, bool(index % 2)) for index, system in enumerate(lost + kept)]
        try:
            time.sleep(1.0)
            killed = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            until(lambda: replacements() or any(client.done() for client in clients))
        finally:
            load.done.set()
        for client in clients:
            client.result(60)
    failed = [attempt for attempt in load.attempts if attempt.error]
    assert {attempt.error for attempt in failed} == {"replica_lost"}
    assert 1 <= len(failed) <= len(lost)
    assert all(attempt.began < killed and attempt.system in lost for attempt in failed)
    assert len(replacements()) == 1
    assert gone(victim)


def test_an_engine_that_failed_is_replaced(remote):
    from server.ray_engine import BREAK

    found = two_homes(remote)
    (victim, [system, *_]), (survivor, _) = found.items()
    status, value = remote.post(
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": system}, {"role": "user", "content": BREAK}]},
        HEADERS,
    )
    assert (status, value["error"]["code"]) == (503, "engine_unavailable")
    answered = set()

    def replaced():
        text, _ = ask(remote, chat(f"{time.monotonic()}"))
        answered.update([process_in(text)] if text else [])
        return answered - {victim, survivor}

    until(replaced)
    until(lambda: gone(victim))


def gone(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_shutting_down_lets_streams_finish(remote):
    """The last test that uses the deployment: it ends it."""
    from specprefill_jax.server.ray_app import shut_down

    systems = [systems[0] for systems in two_homes(remote).values()]
    with ThreadPoolExecutor(3) as pool:
        bodies = [chat(system, stream=True, ignore_eos=True, max_tokens=400) for system in systems]
        streams = [pool.submit(remote.frames, "/v1/chat/completions", body, HEADERS) for body in bodies]
        time.sleep(0.5)
        ending = pool.submit(shut_down, 30.0)
        until(lambda: remote.ask("GET", "/health")[0] == 503)
        status, value = remote.post("/v1/chat/completions", chat("late"), HEADERS)
        assert (status, value["error"]["code"]) == (503, "engine_draining")
        assert not any(stream.done() for stream in streams)
        for stream in streams:
            *_, end, done = stream.result(60)
            assert done == "data: [DONE]"
            assert json.loads(end.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert ending.result(60)


class TestPolicies:
    """Ray's questions, asked by hand."""

    @staticmethod
    def choose(key, lengths, slack=3):
        """The names of the replicas in the order in which they would be tried."""
        from specprefill_jax.server.ray_policies import PrefixRouter

        router = PrefixRouter.__new__(PrefixRouter)
        router.initialize_state(slack=slack)
        replicas = [SimpleNamespace(replica_id=Id(name)) for name in lengths]
        router._replica_queue_len_cache = {Id(name): length for name, length in lengths.items()}
        pending = SimpleNamespace(
            metadata=SimpleNamespace(session_id=key), routing_context=SimpleNamespace(should_backoff=False)
        )
        ranks = asyncio.run(router.choose_replicas(replicas, pending))
        assert pending.routing_context.should_backoff
        return [[replica.replica_id.unique_id for replica in rank] for rank in ranks]

    def test_load_counts_from_the_slack_on(self):
        lengths = dict.fromkeys("abc", 0)
        [first], [second, third] = self.choose("key", lengths)
        assert self.choose("key", {**lengths, first: 3}) == [[first], [second, third]]
        assert self.choose("key", {**lengths, first: 4}) == [[second], [first, third]]
        assert self.choose("key", {**lengths, first: 9, second: 9}) == [[third], [first, second]]
        assert self.choose("key", dict.fromkeys("abc", 9)) == [[first], [second, third]]

    def test_only_the_keys_of_a_replica_that_goes_move(self):
        keys = [str(number) for number in range(100)]
        before = {key: self.choose(key, dict.fromkeys("abc", 0))[0][0] for key in keys}
        after = {key: self.choose(key, dict.fromkeys("ab", 0))[0][0] for key in keys}
        assert all(after[key] == home for key, home in before.items() if home != "c")
        assert all(20 <= list(before.values()).count(name) <= 47 for name in "abc")

    def test_without_a_key_two_are_compared(self):
        few, all_of_them = self.choose("", dict.fromkeys("abc", 0))
        assert len(few) == 2
        assert all_of_them == ["a", "b", "c"]

    @pytest.mark.parametrize(
        ("waiting", "busy", "replicas"),
        [
            ([], [], 2),
            ([0, 0], [0.1, 0.1], 2),
            ([1000, 2000], [1.0, 1.0], 3),
            ([1000, 2001], [1.0, 1.0], 4),
            ([0, 0, 0], [1.0, 1.0, 0.9], 3),
            ([99_000], [1.0], 5),
        ],
    )
    def test_queued_tokens_call_for_replicas(self, waiting, busy, replicas):
        from specprefill_jax.server.ray_policies import QueuedTokens

        reported = {"waiting_tokens": dict(enumerate(waiting)), "busy": dict(enumerate(busy))}
        context = SimpleNamespace(
            aggregated_metrics=reported, capacity_adjusted_min_replicas=2, capacity_adjusted_max_replicas=5
        )
        assert QueuedTokens(tokens_per_replica=1000)(context) == (replicas, {})

    def test_settings_check_themselves(self):
        with pytest.raises(ArgumentError, match="max_replicas=1 .*at least 2"):
            RaySettings(replicas=2, max_replicas=1)
        with pytest.raises(ArgumentError, match=r"num_gpus=1.5"):
            RaySettings(num_gpus=1.5)


@dataclass(frozen=True)
class Id:
    unique_id: str
