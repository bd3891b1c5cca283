"""The command, with a scripted engine in the real one's place: in this process, and once in one of its own."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from script_modules import load_script
from server.fake_engine import FakeEngine, make_tokenizer

from specprefill_jax.errors import ArgumentError

TESTS = Path(__file__).parents[1]
serve = load_script("serve")


def open_request(port, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    headers |= {"Content-Type": "application/json"} if body else {}
    connection.request(method, path, json.dumps(body) if body else None, headers)
    return connection, connection.getresponse()


def get(port, path, **headers):
    """Status and body."""
    connection, response = open_request(port, "GET", path, **headers)
    with contextlib.closing(connection):
        return response.status, response.read()


def code_of(data):
    return json.loads(data)["error"]["code"]


PROGRAM = """
import sys, types
sys.path.insert(0, sys.argv.pop(1))
from server.fake_engine import FakeEngine, make_tokenizer
from script_modules import load_script

class Engine(FakeEngine):
    @classmethod
    def from_pretrained(cls, main, speculator, *, dtype, mesh, config, defaults, kernels, card, report):
        assert card == "auto"
        report("load", 0, 2)
        sys.stdin.readline()
        report("load", 2, 2)
        engine = cls(make_tokenizer(), config)
        engine.gate.clear()
        return engine

    def start(self):
        pass

sys.modules["specprefill_jax.engine.engine"] = types.SimpleNamespace(Engine=Engine)
sys.exit(load_script("serve").main())
"""


def test_loads_serves_drains_and_leaves_with_0():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    flags = ["--port", str(port), "--model-name", "boat", "--api-key", "a", "--api-key", "b", "--max-running", "3"]
    flags += ["--card", "auto"]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(TESTS), *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "SPECPREFILL_API_KEY": "c"},
    ) as process:
        watchdog = threading.Timer(120, process.kill)
        watchdog.start()
        try:
            assert process.stderr.readline().startswith("load 0/2")
            status, data = get(port, "/health")
            assert (status, code_of(data)) == (503, "engine_loading")

            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"serving boat at http://127.0.0.1:{port}\n"
            assert get(port, "/health")[0] == 200
            statuses = [get(port, "/v1/models", Authorization=f"Bearer {key}")[0] for key in "abcd"]
            assert statuses == [200, 200, 200, 401]

            body = {"prompt": "hi", "max_tokens": 1, "stream": True}
            running, response = open_request(port, "POST", "/v1/completions", body, Authorization="Bearer a")
            assert response.status == 200
            process.send_signal(signal.SIGTERM)
            while get(port, "/health")[0] != 503:
                pass
            late, refused = open_request(port, "POST", "/v1/completions", body, Authorization="Bearer a")
            with contextlib.closing(late):
                assert (refused.status, code_of(refused.read())) == (503, "engine_draining")
            assert process.poll() is None
            running.close()  # the last client goes, and with it the last that runs
            assert process.wait(60) == 0
            assert re.search(r"^load 2/2", process.stderr.read(), re.MULTILINE)
        finally:
            watchdog.cancel()
            process.kill()


class TestLife:
    """The command's life in this process. What would end the process is noted instead."""

    @pytest.fixture
    def left(self, monkeypatch):
        """The statuses that the process would have been left with."""
        statuses = []

        def leave(status):
            statuses.append(status)
            raise SystemExit(status)

        monkeypatch.setattr(serve, "leave", leave)
        return statuses

    @staticmethod
    def live(monkeypatch, capsys, meanwhile, *flags, loading=lambda: None):
        """Run the command; `meanwhile(engine, port)` runs in a thread as soon as it serves. Its status."""
        engine = FakeEngine(make_tokenizer())
        engine.start = lambda: None

        def from_pretrained(main, speculator, **options):
            loading()
            return engine

        module = SimpleNamespace(Engine=SimpleNamespace(from_pretrained=from_pretrained))
        monkeypatch.setitem(sys.modules, "specprefill_jax.engine.engine", module)
        options = serve.parse(["--port", "0", "--quiet", *flags])
        with serve.listen(options.host, options.port) as listening:
            port = listening.getsockname()[1]
            attach = serve.Service.attach

            def attached(self, engine):
                attach(self, engine)
                threading.Thread(target=meanwhile, args=(engine, port), daemon=True).start()

            monkeypatch.setattr(serve.Service, "attach", attached)
            return asyncio.run(serve.serve(options, serve.ServerSettings(), listening))

    def test_a_deadline_that_passes_ends_what_runs(self, monkeypatch, capsys):
        seen = []

        def meanwhile(engine, port):
            engine.gate.clear()
            body = {"prompt": "hi", "stream": True}
            connection, response = open_request(port, "POST", "/v1/completions", body)
            os.kill(os.getpid(), signal.SIGINT)
            seen.append(response.read())
            connection.close()

        assert self.live(monkeypatch, capsys, meanwhile, "--shutdown-timeout", "0.1") == 0
        error, done, _ = seen[0].split(b"\n\n")
        assert code_of(error.removeprefix(b"data: ")) == "aborted"
        assert done == b"data: [DONE]"

    def test_a_second_signal_ends_at_once(self, monkeypatch, capsys, left):
        def meanwhile(engine, port):
            engine.gate.clear()
            connection, _ = open_request(port, "POST", "/v1/completions", {"prompt": "hi", "stream": True})
            os.kill(os.getpid(), signal.SIGTERM)
            while get(port, "/health")[0] != 503:
                pass
            os.kill(os.getpid(), signal.SIGTERM)
            connection.close()

        with pytest.raises(SystemExit):
            self.live(monkeypatch, capsys, meanwhile)
        assert left == [128 + signal.SIGTERM]

    def test_a_signal_while_loading_ends_it(self, monkeypatch, capsys, left):
        def loading():
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()  # for ever, as a compilation may

        with pytest.raises(SystemExit):
            self.live(monkeypatch, capsys, None, loading=loading)
        assert left == [0]

    def test_work_that_outlives_the_loop_ends_quietly(self, monkeypatch):
        ended, faults = threading.Event(), []
        monkeypatch.setattr(threading, "excepthook", faults.append)
        before = set(threading.enumerate())

        async def leave_early():
            waiting = asyncio.create_task(serve.run_in_thread(ended.wait))
            await asyncio.sleep(0)
            waiting.cancel()

        asyncio.run(leave_early())
        [worker] = set(threading.enumerate()) - before
        ended.set()
        worker.join(10)
        assert (worker.is_alive(), faults) == (False, [])

    @pytest.mark.parametrize(
        ("error", "status", "said"),
        [(OSError("no such model"), 2, "error: no such model\n"), (ZeroDivisionError("a fault"), 1, "")],
    )
    def test_a_model_that_cannot_be_loaded(self, monkeypatch, capsys, caplog, left, error, status, said):
        def loading():
            raise error

        with pytest.raises(SystemExit):
            self.live(monkeypatch, capsys, None, loading=loading)
        assert left == [status]
        assert capsys.readouterr().err == said
        assert ("a fault" in caplog.text) == (status == 1)


class TestFlags:
    def test_groups_of_flags(self):
        options = serve.parse(["--keep-rate", "0.1", "--max-running", "5"])
        assert (options.config.keep_rate, options.engine.max_running, options.host) == (0.1, 5, "127.0.0.1")

    @pytest.mark.parametrize(
        "flags",
        [["--keep-rate", "2"], ["--max-running", "0"], ["--port", "70000"], ["--shutdown-timeout", "-1"], ["--nope"]],
    )
    def test_wrong_flags_are_one_line(self, flags, capsys):
        assert serve.main(flags) == 2
        said = capsys.readouterr().err
        assert re.fullmatch(r"error: [^\n]+\n", said)
        assert "parsing" not in said

    def test_a_wrong_key_is_not_shown(self, capsys):
        assert serve.main(["--api-key", "geheim\n"]) == 2
        assert "geheim" not in capsys.readouterr().err

    def test_an_address_in_use_is_said(self, capsys):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            assert serve.main(["--port", str(port)]) == 2
        assert f"127.0.0.1:{port}" in capsys.readouterr().err

    def test_listen(self):
        for address in ("127.0.0.1", "0.0.0.0"):
            with serve.listen(address, 0) as listening:
                host, port = listening.getsockname()
                assert (host, serve.url(host, port)) == (address, f"http://127.0.0.1:{port}")
        with pytest.raises(ArgumentError, match="host:port"):
            serve.listen("no such host", 1)
