"""What an operator sets of a deployment on Ray Serve; apart from it, since Ray reads its environment when imported."""

from dataclasses import dataclass

from specprefill_jax.config import check_integer, check_real
from specprefill_jax.errors import argument_error


@dataclass(frozen=True)
class RaySettings:
    """The deployment's size and manners. A value that is not allowed raises `errors.ArgumentError`."""

    replicas: int = 1
    """Engines to start with, and to keep at least."""

    max_replicas: int | None = None
    """Engines that queued prompt tokens may call for; None: no more than `replicas`."""

    queued_tokens_per_replica: int = 16384
    """Prompt tokens that wait, a replica, before there shall be another replica."""

    fronts: int = 1
    """Processes that pass requests on; each takes a few hundred streams."""

    num_cpus: float = 1.0
    """CPUs that Ray sets aside for a replica."""

    num_gpus: float = 0.0
    """GPUs that Ray sets aside for a replica and shows it; all of them share its models."""

    prefix_slack: int = 8
    """So many requests more than the least busy replica has may wait where their prompt's beginning is known."""

    shutdown_timeout: float = 60.0
    """Seconds that running requests may take to finish when a replica is to go."""

    health_check_period: float = 5.0
    """Seconds between two looks at an engine; one that is stuck or has failed three times in a row is replaced."""

    def __post_init__(self) -> None:
        for name in ("replicas", "queued_tokens_per_replica", "fronts"):
            check_integer(name, getattr(self, name), 1)
        check_integer("prefix_slack", self.prefix_slack, 0)
        if self.max_replicas is not None:
            check_integer("max_replicas", self.max_replicas, self.replicas)
        for name in ("num_cpus", "num_gpus", "shutdown_timeout"):
            check_real(name, getattr(self, name), "a finite number of at least 0", lambda x: x >= 0)
        if self.num_gpus > 1 and self.num_gpus != int(self.num_gpus):
            raise argument_error("num_gpus", self.num_gpus, "a whole number where it is above 1")
        check_real("health_check_period", self.health_check_period, "a finite number above 0", lambda x: x > 0)
