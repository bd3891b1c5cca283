#!/usr/bin/env python3
"""Serve a main model and its speculator over an OpenAI-compatible API.

It listens at once and answers /health with 503 while the models load; a line on stdout gives the URL when requests are
taken. SIGTERM or Ctrl-C: no new requests, what runs may finish within --shutdown-timeout; a second one ends at once.
Exit status: 0 after a shutdown, 1 when loading failed unexpectedly, 2 for bad input, 130 or 143 after a second signal.

    python scripts/serve.py
    python scripts/serve.py --main smollm2-135m-deep4 --speculator smollm2-135m --keep-rate 0.15
    python scripts/serve.py --host 0.0.0.0 --api-key "$KEY" --max-running 32 --cache-tokens 200000
"""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import tyro
import uvicorn
from rich.console import Console

from specprefill_jax import command_line
from specprefill_jax.config import check_integer, check_real
from specprefill_jax.errors import argument_error
from specprefill_jax.server.app import create_app
from specprefill_jax.server.flags import ServeFlags, complain, url, warn_if_open
from specprefill_jax.server.service import ServerSettings, Service
from specprefill_jax.view.report import seconds


@dataclass(frozen=True)
class Options(ServeFlags):
    """Serve a main model and its speculator over an OpenAI-compatible API."""

    port: int = 8000
    """The port to listen at; 0 for any that is free."""

    shutdown_timeout: float = 60.0
    """Seconds that running requests may take to finish once the process is asked to end."""


class Server(uvicorn.Server):
    """A uvicorn that leaves the signals to us: they must drain the engine before it stops listening."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's arguments) and return its exit status."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        settings = options.settings()
        with listen(options.host, options.port) as listening:
            return asyncio.run(serve(options, settings, listening))
    except (ValueError, OSError) as error:
        return complain(error)


def parse(argv: Sequence[str]) -> Options:
    """Flags as `Options`; an `ArgumentError` of one line for wrong ones."""
    options = command_line.parse(Options, argv, "serve.py", (tyro.conf.FlagCreatePairsOff,))
    check_integer("port", options.port, 0, 65535)
    check_real("shutdown_timeout", options.shutdown_timeout, "a finite number of at least 0", lambda x: x >= 0)
    return options


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; raises ArgumentError where that cannot be done."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise argument_error("host:port", f"{host}:{port}", f"free to listen at ({error.strerror or error})") from None


async def serve(options: Options, settings: ServerSettings, listening: socket.socket) -> int:
    """Listen, load, serve until a signal or a failure, drain; returns the exit status."""
    say = Console(stderr=True, quiet=options.quiet, highlight=False).print
    host, port = listening.getsockname()[:2]
    warn_if_open(settings, host)
    app = create_app(None, settings)
    service: Service = app.state.service
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    server = Server(
        uvicorn.Config(
            app,
            log_config=None,  # logging as set up above
            log_level="info" if options.log_requests else "warning",
            access_log=options.log_requests,
            timeout_graceful_shutdown=5,
        )
    )
    loop = asyncio.get_running_loop()
    ending: asyncio.Future[int] = loop.create_future()

    def end(status: int) -> None:
        if not ending.done():
            ending.set_result(status)

    def stop(number: signal.Signals) -> None:
        if service.draining:
            leave(128 + number)
        service.draining = True
        end(0)

    loaded: list[Any] = []

    def ready(engine: Any) -> None:
        loaded.append(engine)
        service.attach(engine)
        if not service.draining:
            print(f"serving {service.name_of(engine)} at {url(host, port)}", flush=True)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    hand_over = (lambda engine: tell(loop, ready, engine), lambda status: tell(loop, end, status))
    serving = asyncio.create_task(server.serve([listening]))
    threading.Thread(target=load, args=(options, say, *hand_over), name="load", daemon=True).start()
    await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
    status = ending.result() if ending.done() else 1
    if not loaded:
        leave(status)  # XLA is at work in the other thread, and does not like to lose the ground under its feet
    [engine] = loaded
    service.draining = True
    say("Finishing what runs ...")
    await run_in_thread(functools.partial(engine.drain, options.shutdown_timeout))
    server.should_exit = True
    await serving
    await run_in_thread(engine.close)
    return status


async def run_in_thread(work: Callable[[], object]) -> None:
    """Wait for `work` in a thread that nothing waits for when the process ends."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def run() -> None:
        try:
            work()
        finally:
            tell(loop, done.set)

    threading.Thread(target=run, daemon=True).start()
    await done.wait()


def tell(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *arguments: object) -> None:
    """From another thread, have the loop call `call(*arguments)`, unless it was closed meanwhile: nobody listens."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)


def load(
    options: Options, say: Callable[[str], None], ready: Callable[[Any], object], failed: Callable[[int], object]
) -> None:
    """Load and warm up the engine, and hand it to `ready`; else say why not and give the exit status to `failed`."""
    start = time.perf_counter()
    told: tuple[str, float] = ("", start)

    def report(phase: str, done: int, total: int) -> None:
        nonlocal told
        now = time.perf_counter()
        if phase != told[0] or done == total or now - told[1] > 5:
            told = (phase, now)
            say(f"{phase} {done}/{total}  {seconds(now - start)}")

    try:
        ready(options.load(report))
    except (ValueError, OSError) as error:
        failed(complain(error))
    except BaseException:
        logging.getLogger("specprefill_jax.server").exception("the engine could not be loaded")
        failed(1)


def leave(status: int) -> NoReturn:
    """End the process at once, whatever other threads do."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
