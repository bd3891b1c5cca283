"""A server as a child process, which is there while a measurement runs and is gone after it, however that ends."""

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.evals.wire import ProtocolError, Target, fetch_json
from specprefill_jax.machine import describe


class ServerError(Exception):
    """The server ended, or was not ready in time."""


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(
    command: Sequence[str],
    target: Target,
    *,
    environment: Mapping[str, str] | None = None,
    start_within: float = 1800.0,
    stop_within: float = 90.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `command`, wait until its /health answers 200, and stop it by SIGTERM at the end of the block.

    Its standard error goes where ours goes; its standard output is dropped. It has a session of its own: Ctrl-C stops
    the measurement, and that stops the server.

    Args:
        command: what to run.
        target: where it will listen.
        environment: variables beside our own.
        start_within: seconds until it is ready, loading and warm-up included.
        stop_within: seconds that it may take to stop before it is killed, with its own children.

    Raises:
        ServerError: it ended by itself, or was not ready in time.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    try:
        _await_health(process, target, start_within)
        yield process
    finally:
        _stop(process, stop_within)


@contextmanager
def server_at(
    url: str | None, script: Path, main: str, speculator: str, flags: str = "", api_key: str | None = None
) -> Iterator[tuple[Target, int | None]]:
    """The server at `url`; or, where there is none, one that is started for the block, and its process id.

    Args:
        url: address of a server that runs.
        script: what serves, a Python file with the flags of scripts/serve.py; it gets a free port.
        main, speculator: the models of a server that is started.
        flags: further flags for it, in one string as a shell takes them.
        api_key: sent to the server; one that is started takes no other.

    Raises:
        ArgumentError: an address or a key that is not allowed.
        ServerError: as `served`.
    """
    if url is not None:
        yield Target.parse(url, api_key), None
        return
    target = Target("127.0.0.1", free_port(), api_key=api_key)
    command = [sys.executable, str(script), "--main", main, "--speculator", speculator]
    command += ["--port", str(target.port), *shlex.split(flags)]
    environment = {"SPECPREFILL_API_KEY": api_key} if api_key else None
    with served(command, target, environment=environment) as process:
        yield target, process.pid


def about_client(api_key: str | None) -> dict[str, Any]:
    """Machine, versions and command of a measurement, for JSON; the key is not told."""
    jax.config.update("jax_platforms", "cpu")  # describe() asks for devices, which are the server's to use
    found = {name: value for name, value in describe().items() if name != "devices"}
    if api_key:
        found["command"] = found["command"].replace(api_key, "***")
    return found


def run_command(command: Callable[[], None]) -> None:
    """Run a script's `command`; where something is wrong, leave with one line.

    A signal to end comes as an exception, so that a server that was started is stopped first.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        command()
    except (SpecPrefillError, ServerError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _await_health(process: subprocess.Popen[bytes], target: Target, within: float) -> None:
    deadline = time.monotonic() + within
    while not asyncio.run(_is_healthy(target)):
        if process.poll() is not None:
            raise ServerError(f"the server ended with status {process.returncode} before it was ready")
        if time.monotonic() > deadline:
            raise ServerError(f"the server was not ready within {within:g} s")
        time.sleep(0.1)


async def _is_healthy(target: Target) -> bool:
    try:
        status, _ = await fetch_json(target, "/health", timeout=5)
    except (OSError, ProtocolError):
        return False
    return status == 200


def _stop(process: subprocess.Popen[bytes], within: float) -> None:
    try:
        process.terminate()
        process.wait(within)
    except subprocess.TimeoutExpired:
        pass
    finally:  # a second Ctrl-C comes here at once
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
