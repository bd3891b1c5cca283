"""A server as a child process: waited for, stopped, and gone whatever happens."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from specprefill_jax.errors import ArgumentError
from specprefill_jax.evals.served import ServerError, free_port, run_command, served, server_at
from specprefill_jax.evals.wire import Target

# Answers 503 once and 200 from then on; with "stubborn" it does not mind SIGTERM.
SERVER = """
import http.server, os, signal, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(503 if Handler.asked == 1 or "sick" in sys.argv else 200)
        self.end_headers()
    def log_message(self, *args):
        pass
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(port: int, *how: str) -> list[str]:
    return [sys.executable, "-c", SERVER, str(port), *how]


def is_gone(process: subprocess.Popen) -> bool:
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return process.returncode is not None
    return False


@pytest.mark.parametrize(("how", "status"), [("kind", -15), ("stubborn", -9)])
def test_server_is_stopped_at_the_end(how, status):
    port = free_port()
    with served(command(port, how), Target("127.0.0.1", port), stop_within=0.3) as process:
        assert process.poll() is None
    assert process.returncode == status
    assert is_gone(process)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_server_is_stopped_by_whatever_happens(error):
    port = free_port()

    def measure() -> None:
        with served(command(port), Target("127.0.0.1", port)) as process:
            found.append(process)
            raise error

    found: list[subprocess.Popen] = []
    with pytest.raises(error):
        measure()
    assert is_gone(found[0])


def test_server_that_ends_by_itself():
    with (
        pytest.raises(ServerError, match="the server ended with status 3 before it was ready"),
        served([sys.executable, "-c", "raise SystemExit(3)"], Target("127.0.0.1", free_port())),
    ):
        pass


def test_server_that_is_never_ready():
    port = free_port()
    with (
        pytest.raises(ServerError, match=r"not ready within 0.5 s"),
        served(command(port, "sick"), Target("127.0.0.1", port), start_within=0.5),
    ):
        pass


def test_a_server_that_is_named_is_not_started():
    with server_at("http://h:9/v1", Path("nothing.py"), "m", "s", api_key="k") as (target, pid):
        assert (target, pid) == (Target("h", 9, api_key="k"), None)


def test_a_server_of_our_own_gets_models_flags_and_key(tmp_path):
    """A stand-in for the script, which notes what it was given; tests/scripts/test_bench_qps.py stops one early."""
    script, said = tmp_path / "serve.py", tmp_path / "said"
    note = f"import os; open({str(said)!r}, 'w').write(' '.join([*sys.argv[1:], os.environ['SPECPREFILL_API_KEY']]))\n"
    script.write_text("import sys\n" + note + SERVER.replace("sys.argv[1]", "sys.argv[sys.argv.index('--port') + 1]"))
    with server_at(None, script, "m", "s", "--dtype 'b f'", "k") as (target, pid):
        os.kill(pid, 0)
        assert said.read_text() == f"--main m --speculator s --port {target.port} --dtype b f k"
        assert target.api_key == "k"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_signal_to_end_leaves_by_the_same_way():
    """As an exception, that is, which stops the server as Ctrl-C does (above)."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as left:
            run_command(lambda: signal.raise_signal(signal.SIGTERM))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert left.value.code == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ServerError("it is gone"), "error: it is gone"),
        (ArgumentError("x=1"), "error: x=1"),
        (KeyboardInterrupt(), 130),
    ],
)
def test_what_goes_wrong_is_told_in_one_line(error, code):
    before = signal.getsignal(signal.SIGTERM)

    def fail():
        raise error

    try:
        with pytest.raises(SystemExit) as left:
            run_command(fail)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert left.value.code == code
