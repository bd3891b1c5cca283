"""Which implementation of a kernel runs where."""

import logging
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import jax
from jax.sharding import Mesh

from specprefill_jax.errors import argument_error

_log = logging.getLogger(__name__)

_BY_PLATFORM = {"gpu": "triton", "cuda": "triton", "tpu": "mosaic_tpu"}


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
        platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
        asked = _BY_PLATFORM.get(platform, "reference")
    if asked not in list(Backend):
        raise argument_error("kernels", asked, "None or one of " + ", ".join(map(repr, map(str, Backend))))
    return Backend(asked)


def run[T](
    implementations: Mapping[str, Callable[..., T]],
    reference: Callable[..., T],
    backend: Backend,
    *args: Any,
    **static: int,
) -> T:
    """Call the backend's implementation. Only `Unsupported` falls through to the reference, and is logged."""
    implementation = implementations.get(backend.removesuffix("_interpret"))
    if implementation is not None:
        try:
            return implementation(*args, **static, interpret=backend.interpret)
        except Unsupported as error:
            _log.warning("%s kernel not used, but the reference: %s", backend, error)
    return reference(*args, **static)
