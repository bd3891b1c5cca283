"""What the two serving commands share: flags, the settings and the engine they stand for, addresses, errors."""

import contextlib
import ipaddress
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import tyro

from specprefill_jax.config import SpecPrefillConfig
from specprefill_jax.engine.request import EngineConfig
from specprefill_jax.server.service import ServerSettings
from specprefill_jax.sharding.mesh import make_mesh
from specprefill_jax.view.spans import visible

if TYPE_CHECKING:
    from specprefill_jax.engine.engine import Engine


@dataclass(frozen=True)
class ServeFlags:
    """Flags of every command that serves."""

    main: str = "smollm2-135m-deep4"
    """The model that answers: a folder, a .gguf file, a Hub id, or a built-in name."""

    speculator: str = "smollm2-135m"
    """The small model that chooses what is read, with the same tokenizer."""

    dtype: str = "float32"
    """float32, bfloat16 or float16."""

    devices: int | None = None
    """Devices of an engine that share both models (tensor parallelism); by default as many of those there as can."""

    kernels: str | None = None
    """What scores and chooses: reference, triton or mosaic_tpu; by default what fits the devices."""

    card: str | None = None
    """A pair card: a file, or auto for the one in the speculator's folder or of a built-in pair. It says how many of
    the speculator's layers are run, which heads score and with which queries; flags that are given come first."""

    model_name: str | None = None
    """The model's id in requests and answers; by default the last part of --main."""

    host: str = "127.0.0.1"
    """The address to listen at; 0.0.0.0 or :: for all of a machine's."""

    port: int = 8000
    """The port to listen at."""

    api_key: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """A key that clients must give; may be repeated. Other users of this machine can read flags: the environment's
    SPECPREFILL_API_KEY is a key too."""

    max_body_bytes: int = 1 << 24
    """Longer request bodies are refused."""

    keep_alive_seconds: float = 15.0
    """A stream that has nothing to say for so long sends a comment, so that no proxy takes it for dead."""

    log_requests: bool = False
    """One line in the log for every request."""

    quiet: bool = False
    """No progress."""

    config: tyro.conf.OmitArgPrefixes[SpecPrefillConfig] = field(default_factory=SpecPrefillConfig)
    engine: tyro.conf.OmitArgPrefixes[EngineConfig] = field(default_factory=EngineConfig)

    def settings(self) -> ServerSettings:
        """The app's; raises ArgumentError for values that are not allowed."""
        named = os.environ.get("SPECPREFILL_API_KEY")
        return ServerSettings(
            api_keys=self.api_key if named is None else (*self.api_key, named),
            model_name=self.model_name,
            max_body_bytes=self.max_body_bytes,
            keep_alive_seconds=self.keep_alive_seconds,
            defaults=self.config,
        )

    def load(self, report: Callable[[str, int, int], None]) -> "Engine":
        """An engine that has been started; takes minutes, and raises what `Engine.from_pretrained` does.

        Args:
            report: told of every step: the phase, how much of it is done, and of how much.
        """
        from specprefill_jax.engine.engine import Engine

        engine = Engine.from_pretrained(
            self.main,
            self.speculator,
            dtype=self.dtype,
            mesh=None if self.devices is None else make_mesh(self.devices),
            config=self.engine,
            defaults=self.config,
            kernels=self.kernels,
            card=self.card,
            report=report,
        )
        engine.start()
        return engine


def warn_if_open(settings: ServerSettings, host: str) -> None:
    """Say on stderr that the server is open to all who can reach `host`, where there is no key and others can."""
    if not settings.api_keys and not loopback(host):
        print("warning: anyone who can reach this address can use the server: set --api-key", file=sys.stderr)


def loopback(host: str) -> bool:
    """Whether other machines cannot reach this address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def url(host: str, port: int) -> str:
    """Where clients on this machine reach what listens there."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def complain(error: Exception) -> int:
    """Say what was wrong with the input, in one line on stderr, and return the exit status for it."""
    print(f"error: {' '.join(visible(str(error)).split())}", file=sys.stderr)
    return 2
