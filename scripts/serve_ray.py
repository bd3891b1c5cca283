#!/usr/bin/env python3
"""Serve a main model and its speculator from several processes or machines, on Ray Serve.

The same API as scripts/serve.py behind one address. Each replica is a process with an engine of its own, on the devices
that Ray gives it. Requests whose prompts begin alike go to the same replica, unless it has much more to do than others.
Without --address a Ray cluster of this machine alone is started, and ended again. SIGTERM or Ctrl-C: what runs may
finish within --shutdown-timeout; a second one ends at once.
Exit status: 0 after a shutdown, 1 when a replica could not start, 2 for bad input, 130 or 143 after a second signal.

    python scripts/serve_ray.py --replicas 2
    python scripts/serve_ray.py --main meta-llama/Llama-3.1-8B-Instruct --speculator meta-llama/Llama-3.2-1B-Instruct \
        --dtype bfloat16 --replicas 2 --max-replicas 8 --num-gpus 1 --address auto --every-node --host 0.0.0.0
"""

import functools
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import tyro

from specprefill_jax import command_line
from specprefill_jax.config import check_integer
from specprefill_jax.errors import argument_error
from specprefill_jax.server.flags import ServeFlags, complain, url, warn_if_open
from specprefill_jax.server.ray_settings import RaySettings
from specprefill_jax.view.spans import visible

if TYPE_CHECKING:
    from specprefill_jax.server.ray_app import ReplicaEngine


@dataclass(frozen=True)
class Options(ServeFlags):
    """Serve a main model and its speculator from several processes or machines, on Ray Serve."""

    address: str | None = None
    """A Ray cluster to use, as ray.init takes it ("auto": the one this machine belongs to); each of its nodes must have
    the models."""

    every_node: bool = False
    """Listen on every node that has replicas, not on the head node alone."""

    quiet: bool = False
    """Nothing of what Ray and the replicas log."""

    deployment: tyro.conf.OmitArgPrefixes[RaySettings] = field(default_factory=RaySettings)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's arguments) and return its exit status."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        settings = options.settings()
        warn_if_open(settings, options.host)
        prepare_environment(options)
        import ray

        from specprefill_jax.server.ray_app import build, deploy, shut_down

        application = build(functools.partial(load, options), options.engine, settings, options.deployment)
        connect(options)
    except (ValueError, OSError) as error:
        return complain(error)
    try:
        watch_signals()
        deploy(
            application, options.host, options.port, every_node=options.every_node, log_requests=options.log_requests
        )
        print(f"serving {options.deployment.replicas} replicas at {url(options.host, options.port)}", flush=True)
        while True:
            signal.pause()
    except KeyboardInterrupt:
        return 0
    except RuntimeError as error:
        print(f"error: {visible(str(error))}", file=sys.stderr)
        return 1
    finally:
        shut_down(options.deployment.shutdown_timeout)
        ray.shutdown()


def parse(argv: Sequence[str]) -> Options:
    """Flags as `Options`; an `ArgumentError` of one line for wrong ones."""
    options = command_line.parse(Options, argv, "serve_ray.py", (tyro.conf.FlagCreatePairsOff,))
    check_integer("port", options.port, 1, 65535)
    return options


def load(options: Options) -> "ReplicaEngine":
    """A replica's engine; called in its process, on its devices."""
    log = logging.getLogger("ray.serve")
    return options.load(lambda phase, done, total: log.info("%s %d/%d", phase, done, total))


def prepare_environment(options: Options) -> None:
    """Set what Ray reads when it is imported, unless the user has."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray tells its makers of every cluster
    if options.address is None:
        # Ray listens on all of this machine's addresses and runs whatever it is sent by those who have the token.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


def connect(options: Options) -> None:
    """Join the cluster, or start one here; raises ArgumentError where the replicas have no room, or there is none."""
    import ray

    if options.address is not None:
        try:
            ray.init(address=options.address, log_to_driver=not options.quiet)
        except ConnectionError as error:
            raise argument_error("address", options.address, f"a Ray cluster's ({error})") from None
        return
    ray.init(include_dashboard=False, log_to_driver=not options.quiet)
    there, wanted = ray.cluster_resources(), options.deployment
    for flag, kind, each in (("num_cpus", "CPU", wanted.num_cpus), ("num_gpus", "GPU", wanted.num_gpus)):
        if each * wanted.replicas > there.get(kind, 0):
            ray.shutdown()
            allowed = f"at most {there.get(kind, 0) / wanted.replicas:g} for {wanted.replicas} replicas here"
            raise argument_error(flag, each, allowed)


def watch_signals() -> None:
    """From now on the first SIGTERM or Ctrl-C is a KeyboardInterrupt, and the second the end."""
    seen: list[int] = []

    def take(number: int, _: FrameType | None) -> Any:
        if seen:
            os._exit(128 + number)
        seen.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, take)


if __name__ == "__main__":
    sys.exit(main())
