"""A server as a child process: waited for, stopped, and gone whatever happens."""

import os
import subprocess
import sys

import pytest

from specprefill_jax.evals.served import ServerError, free_port, served
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
