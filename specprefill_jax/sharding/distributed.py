"""Several processes, as a rule one a host, that share a mesh: how they start, agree on inputs, and end together.

Every process runs the same program on the same inputs, and takes part in every computation of the others. So all of
them call `start` before JAX is used in any other way, make the same calls in the same order, and ask `broadcast` for
what only process 0 knows.

A process that is lost leaves the others in a computation that never ends. JAX notices after a while and aborts them,
with a page of its log. `start` therefore keeps a connection from process 0 to each of the others, over which nothing is
sent while all is well: the operating system closes it as soon as a process ends, however it ends, and who sees that
says so in one line and leaves. JAX's own heartbeats remain for a process that neither ends nor goes on.
"""

import atexit
import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax
import numpy as np
from jax._src.distributed import global_state  # words between processes that need no device; nothing public has them
from jax.experimental import multihost_utils

from specprefill_jax.config import check_integer
from specprefill_jax.errors import ArgumentError, argument_error

START_SECONDS = 120
"""How long the processes wait for each other at the start, unless told otherwise."""

EXIT_STATUS = 1
"""Status of a process that leaves because another was lost."""

_HEARTBEAT_SECONDS = 15
_GRACE_SECONDS = 3
"""What a process has for its own words when another says that it fails: all may fail of the same cause."""
_CONNECTION_KEY = "specprefill_jax/connection"

_started = False
_lines: dict[int, "_Line"] = {}
"""Connections by the process at their other end; kept to the last, since what is dropped is closed."""
_listeners: list[threading.Thread] = []
_ending = threading.Lock()
"""Whoever has it ends this process."""


def start(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout_seconds: int = START_SECONDS,
) -> None:
    """Join the other processes; a second call does nothing.

    Under Slurm, Open MPI, Kubernetes and on TPU pods JAX finds all three arguments itself; elsewhere give all three.
    On CPUs the processes' devices work together over Gloo, JAX's default.

    Args:
        coordinator: "host:port" of process 0, with a port that is free there; the same in every process.
        num_processes: how many processes there are.
        process_id: which of them this is, from 0.
        timeout_seconds: how long to wait for process 0 and the others.

    Raises:
        ArgumentError: some of the three are given and some not, or none and JAX finds none; a process id that is out
            of range; process 0 cannot be reached, or not every process has come, in `timeout_seconds`.
        RuntimeError: JAX has been used before.
    """
    global _started
    if _started:
        return
    timeout_seconds = check_integer("timeout_seconds", timeout_seconds, 1)
    given = {"coordinator": coordinator, "num_processes": num_processes, "process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        others = " and ".join(name for name in given if name not in missing)
        raise argument_error(missing[0], None, f"given with {others}: all three or, where JAX finds them, none")
    if coordinator is not None:
        _address(coordinator)
        num_processes = check_integer("num_processes", num_processes, 1)
        process_id = check_integer("process_id", process_id, 0, num_processes - 1)
    # JAX would keep SIGTERM to itself, as notice of a preemption that nothing here asks about.
    jax.config.update("jax_enable_preemption_service", False)
    _initialize(coordinator, num_processes, process_id, timeout_seconds)
    if global_state.num_processes > 1:
        _watch(timeout_seconds)
    _started = True


def broadcast(value: Any) -> Any:
    """Process 0's value in every process; theirs is ignored. Every process must call it.

    Args:
        value: what JSON can say; tuples come back as lists, and keys as strings.
    """
    if jax.process_count() == 1:
        return json.loads(json.dumps(value))
    data = json.dumps(value).encode() if jax.process_index() == 0 else b""
    # Every process must give an array of the same shape: first the length, then as many bytes, rounded up so that few
    # programs are ever compiled.
    length = int(multihost_utils.broadcast_one_to_all(np.array(len(data), np.int32)))
    padded = np.zeros(1 << max(10, (length - 1).bit_length()), np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(padded))[:length].tobytes())


def leave(status: int) -> None:
    """End this process at once after a failure, waiting for no other; does nothing where `start` joined none.

    The usual end of a process waits until all are there; the others may be in a computation that waits for this one.
    """
    if not _lines:
        return
    _tell(f"failed {global_state.process_id}")
    time.sleep(_GRACE_SECONDS / 3)  # so that others that fail likewise get to say so
    _ending.acquire()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    _exit(status)


def _address(coordinator: str) -> tuple[str, int]:
    """Host and port of "host:port"; an IPv6 address stands in brackets."""
    host, _, port = coordinator.rpartition(":") if isinstance(coordinator, str) else ("", "", "")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise argument_error("coordinator", coordinator, 'the "host:port" of process 0, such as "10.0.0.1:12345"')
    return host.removeprefix("[").removesuffix("]"), int(port)


def _initialize(
    coordinator: str | None, num_processes: int | None, process_id: int | None, timeout_seconds: int
) -> None:
    """`jax.distributed.initialize`, with an error where JAX would abort the process when time is up."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            jax.distributed.initialize(
                coordinator,
                num_processes,
                process_id,
                initialization_timeout=timeout_seconds + 24 * 3600,
                heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
            )
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    if thread.is_alive():
        found = global_state.coordinator_address or coordinator
        raise ArgumentError(
            f"coordinator={found!r} is not allowed: within {timeout_seconds} s {_missing_part(found)}; every process "
            f"must be given the address of process 0, a different process_id, and the same num_processes"
        )
    if raised and isinstance(raised[0], ValueError) and coordinator is None:
        raise ArgumentError(
            f"coordinator=None is not allowed: coordinator, num_processes and process_id must be given where JAX "
            f"finds no Slurm, Open MPI, Kubernetes or TPU pod ({raised[0]})"
        ) from raised[0]
    if raised:
        raise raised[0]


def _missing_part(coordinator: str | None) -> str:
    """What a start lacked that did not come about in time."""
    if coordinator is None:
        return "process 0 was not found"
    if global_state.process_id != 0:
        try:
            socket.create_connection(_address(coordinator), timeout=2).close()
        except OSError as error:
            return f"process 0 could not be reached there ({error.strerror or error})"
    return f"not all of {global_state.num_processes} processes came"


class _Line:
    """A connection to another process: words of one line each."""

    def __init__(self, connection: socket.socket):
        self._socket = connection
        # A host that is gone closes nothing: ask it every other second, and give it up after three without an answer.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 4), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._words = connection.makefile("r", encoding="ascii", errors="replace")

    def say(self, words: str) -> None:
        with contextlib.suppress(OSError):  # who hears nothing any more need not be told
            self._socket.sendall(words.encode() + b"\n")

    def hear(self, timeout_seconds: float | None = None) -> str:
        """The next words of the other process; none where the connection is closed, or time is up."""
        try:
            self._socket.settimeout(timeout_seconds)
            return self._words.readline(100).strip()
        except OSError:
            return ""

    def close(self) -> None:
        self._words.close()
        self._socket.close()


def _watch(timeout_seconds: int) -> None:
    """Connect process 0 with each of the others, and end this process when one of them is lost."""
    try:
        lines = _accept(timeout_seconds) if global_state.process_id == 0 else {0: _connect(timeout_seconds)}
    except OSError as error:
        raise ArgumentError(
            f"coordinator={global_state.coordinator_address!r} is not allowed: the processes must be able to connect "
            f"to any port of process 0's host ({error})"
        ) from error
    _lines.update(lines)
    for peer, line in lines.items():
        _listeners.append(threading.Thread(target=_listen, args=(peer, line), daemon=True))
    for listener in _listeners:
        listener.start()
    atexit.register(_say_goodbye)
    sys.excepthook = _then_leave(sys.excepthook)


def _accept(timeout_seconds: int) -> dict[int, _Line]:
    """Process 0's end of the connections."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", 0), family=family, dualstack_ipv6=both) as server:
        secret = secrets.token_hex(16)  # a stranger who connects to the port is no process of ours
        client: Any = global_state.client
        client.key_value_set(_CONNECTION_KEY, f"{server.getsockname()[1]} {secret}")
        found: dict[int, _Line] = {}
        until = time.monotonic() + timeout_seconds
        while len(found) < global_state.num_processes - 1:
            server.settimeout(max(0.1, until - time.monotonic()))
            line = _Line(server.accept()[0])
            word, _, peer = line.hear(timeout_seconds=5).partition(" ")
            if word == secret:
                found[int(peer)] = line
            else:
                line.close()
    return found


def _connect(timeout_seconds: int) -> _Line:
    """The end of the connection in a process other than 0."""
    client: Any = global_state.client
    said = client.blocking_key_value_get(_CONNECTION_KEY, timeout_seconds * 1000)
    port, secret = said.split()
    host, _ = _address(str(global_state.coordinator_address))
    line = _Line(socket.create_connection((host, int(port)), timeout=timeout_seconds))
    line.say(f"{secret} {global_state.process_id}")
    return line


def _listen(peer: int, line: _Line) -> None:
    """Wait for bad news from process `peer`: that it, or one that it knows of, fails or is lost."""
    what, _, who = line.hear().partition(" ")
    if what == "left":
        return
    who = who or str(peer)
    if what == "failed":
        _tell(f"failed {who}")
        time.sleep(_GRACE_SECONDS)
        end = f"process {who} of {global_state.num_processes} failed: its own output says why"
    else:
        _tell(f"lost {who}")
        end = f"process {who} of {global_state.num_processes} was lost: its connection closed"
    if _ending.acquire(blocking=False):
        # Past Python's and JAX's usual end, which would wait for the process that is gone.
        os.write(2, f"error: {end}; process {global_state.process_id} ends, too\n".encode())
        _exit(EXIT_STATUS)
    while line.hear():
        pass


def _tell(words: str) -> None:
    for line in _lines.values():
        line.say(words)


def _exit(status: int) -> None:
    """End this process; process 0 after the others, since JAX aborts them as soon as it is gone."""
    if global_state.process_id == 0:
        until = time.monotonic() + 2 * _GRACE_SECONDS
        for listener in _listeners:
            if listener is not threading.current_thread():
                listener.join(max(0.0, until - time.monotonic()))
    os._exit(status)


def _say_goodbye() -> None:
    """Tell the others that this process ends as it should."""
    _tell(f"left {global_state.process_id}")


def _then_leave(hook: Callable[[type[BaseException], BaseException, TracebackType | None], Any]) -> Callable:
    """An exception hook that does what `hook` does and then leaves: the others must not wait for this process."""

    def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        hook(kind, error, trace)
        # A computation fails, too, where another process is lost: its line comes first.
        time.sleep(_GRACE_SECONDS / 3)
        leave(EXIT_STATUS)

    return report
