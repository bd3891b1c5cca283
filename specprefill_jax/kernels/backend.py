"""Which implementation of a kernel runs where."""

import logging
from collections.abc import Callable
from enum import StrEnum
from importlib import import_module
from typing import Any

from jax.sharding import Mesh

from specprefill_jax.errors import argument_error
from specprefill_jax.sharding.mesh import platform

_log = logging.getLogger(__name__)

_BY_PLATFORM = {"gpu": "triton", "tpu": "mosaic_tpu"}


class Unsupported(Exception):
    """A kernel does not serve such arguments; the reference does."""


class Backend(StrEnum):
    """An implementation of the kernels."""

    REFERENCE = "reference"
    """Plain JAX: runs everywhere."""
    TRITON = "triton"
    """Pallas through Triton, for NVIDIA GPUs."""
    TRITON_INTERPRET = "triton_interpret"
    """The same kernels, interpreted: for tests on any machine, and slow."""
    MOSAIC_TPU = "mosaic_tpu"
    """Pallas through Mosaic, for TPUs."""
    MOSAIC_TPU_INTERPRET = "mosaic_tpu_interpret"
    """The same kernels, interpreted."""

    @property
    def interpret(self) -> bool:
        """Whether the kernels are interpreted."""
        return self.endswith("_interpret")


def choose_backend(asked: str | None, mesh: Mesh | None = None) -> Backend:
    """The backend of that name; None: the one for the mesh's platform, or for JAX's default one.

    Raises:
        ArgumentError: an unknown name.
    """
    if asked is None:
        asked = _BY_PLATFORM.get(platform(mesh), "reference")
    if asked not in list(Backend):
        raise argument_error("kernels", asked, "None or one of " + ", ".join(map(repr, map(str, Backend))))
    return Backend(asked)


def run[T](reference: Callable[..., T], backend: Backend, *args: Any, **static: int) -> T:
    """Call the backend's namesake of `reference`, from the module beside it that is named after the backend.

    It is imported only now: Pallas takes a while to import, and a CPU has no use for it. Only `Unsupported` falls
    through to the reference, and is logged.
    """
    if backend is not Backend.REFERENCE:
        package = reference.__module__.rpartition(".")[0]
        module = import_module(f"{package}.{backend.removesuffix('_interpret')}")
        try:
            return getattr(module, reference.__name__)(*args, **static, interpret=backend.interpret)
        except Unsupported as error:
            _log.warning("%s kernel not used, but the reference: %s", backend, error)
    return reference(*args, **static)
