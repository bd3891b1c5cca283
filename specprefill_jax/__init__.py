"""Speculative prefill in JAX: a small Llama chooses which chunks of a long prompt a large one reads."""

from specprefill_jax.config import SamplingParams, SpecPrefillConfig
from specprefill_jax.errors import ArgumentError, CheckpointError, SpecPrefillError, TokenizerError
from specprefill_jax.pipeline import Output, Piece, SpecPrefill
from specprefill_jax.planning import Reason
from specprefill_jax.selection import Selection
from specprefill_jax.timing import Timings

__all__ = [
    "ArgumentError",
    "CheckpointError",
    "Output",
    "Piece",
    "Reason",
    "SamplingParams",
    "Selection",
    "SpecPrefill",
    "SpecPrefillConfig",
    "SpecPrefillError",
    "Timings",
    "TokenizerError",
]
