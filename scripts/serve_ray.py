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

import contextlib
import functools
import ipaddress
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
from specprefill_jax.config import SpecPrefillConfig, check_integer
from specprefill_jax.engine.request import EngineConfig
from specprefill_jax.errors import argument_error
from specprefill_jax.server.ray_settings import RaySettings
from specprefill_jax.server.service import ServerSettings
from specprefill_jax.view.spans import visible

if TYPE_CHECKING:
    from specprefill_jax.server.ray_app import ReplicaEngine


@dataclass(frozen=True)
class Options:
    """Serve a main model and its speculator from several processes or machines, on Ray Serve."""

    main: str = "smollm2-135m-deep4"
    """The model that answers: a folder, a .gguf file, a Hub id, or a built-in name; every node must have it."""

    speculator: str = "smollm2-135m"
    """The small model that chooses what is read, with the same tokenizer."""

    dtype: str = "float32"
    """float32, bfloat16 or float16."""

    devices: int | None = None
    """Devices of a replica that share both models (tensor parallelism); by default as many as can."""

    kernels: str | None = None
    """What scores and chooses: reference, triton or mosaic_tpu; by default what fits the devices."""

    model_name: str | None = None
    """The model's id in requests and answers; by default the last part of --main."""

    address: str | None = None
    """A Ray cluster to use, as ray.init takes it ("auto": the one this machine belongs to)."""

    host: str = "127.0.0.1"
    """The address to listen at; 0.0.0.0 for all of a machine's."""

    port: int = 8000
    """The port to listen at."""

    every_node: bool = False
    """Listen on every node that has replicas, not on the head node alone."""

    api_key: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A key that clients must give; may be repeated. Other users of this machine can read flags: the environment's
    SPECPREFILL_API_KEY is a key too."""

    max_body_bytes: int = 1 << 24
    """Longer request bodies are refused."""

    keep_alive_seconds: float = 15.0
    """A stream that has nothing to say for so long sends a comment, so that no proxy takes it for dead."""

    log_requests: bool = False
    """One line in the replicas' logs for every request."""

    quiet: bool = False
    """Nothing of what Ray and the replicas log."""

    deployment: tyro.conf.OmitArgPrefixes[RaySettings] = field(default_factory=RaySettings)
    config: tyro.conf.OmitArgPrefixes[SpecPrefillConfig] = field(default_factory=SpecPrefillConfig)
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = field(default_factory=EngineConfig)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's arguments) and return its exit status."""
    try:
        options = parse(sys.argv[1:] if argv is None else argv)
        named = os.environ.get("SPECPREFILL_API_KEY")
        settings = ServerSettings(
            api_keys=options.api_key if named is None else (*options.api_key, named),
            model_name=options.model_name,
            max_body_bytes=options.max_body_bytes,
            keep_alive_seconds=options.keep_alive_seconds,
            defaults=options.config,
        )
        if not settings.api_keys and not loopback(options.host):
            print("warning: anyone who can reach this address can use the server: set --api-key", file=sys.stderr)
        prepare_environment(options)
        import ray

        from specprefill_jax.server.ray_app import build, deploy, shut_down

        application = build(functools.partial(load, options), options.engine, settings, options.deployment)
        connect(options)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(visible(str(error)).split())}", file=sys.stderr)
        return 2
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
    from specprefill_jax.engine.engine import Engine
    from specprefill_jax.sharding.mesh import make_mesh

    log = logging.getLogger("ray.serve")
    engine = Engine.from_pretrained(
        options.main,
        options.speculator,
        dtype=options.dtype,
        mesh=None if options.devices is None else make_mesh(options.devices),
        config=options.engine,
        defaults=options.config,
        kernels=options.kernels,
        report=lambda phase, done, total: log.info("%s %d/%d", phase, done, total),
    )
    engine.start()
    return engine


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


def loopback(host: str) -> bool:
    """Whether other machines cannot reach this address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def url(host: str, port: int) -> str:
    """Where clients on this machine reach the proxy."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


if __name__ == "__main__":
    sys.exit(main())
