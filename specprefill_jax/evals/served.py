"""A server as a child process, which is there while a measurement runs and is gone after it, however that ends."""

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from specprefill_jax.evals.wire import ProtocolError, Target, fetch_json


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
