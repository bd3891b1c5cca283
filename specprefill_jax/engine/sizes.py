"""How many tokens the two caches hold, by the memory that is free."""

import os
from typing import Any

from specprefill_jax.engine.request import EngineConfig
from specprefill_jax.errors import ArgumentError
from specprefill_jax.models.loaded import LoadedLlama
from specprefill_jax.models.paged import PAGE
from specprefill_jax.sharding.mesh import platform

ACCELERATOR_SHARE = 0.8
"""Of the memory that is free once the weights are loaded; the rest is for activations."""
HOST_SHARE = 0.25
"""Likewise of a host's, which is not ours alone."""
SPECULATOR_SHARE = 0.25
"""Of the caches, at most, unless one prompt of the longest needs more."""


def token_bytes(model: LoadedLlama) -> int:
    """Bytes that a token takes in a model's cache, on the device that holds most of it."""
    layout = model.layout
    heads = layout.num_kv_heads if model.mesh is None else -(-layout.num_kv_heads // model.mesh.shape["tensor"])
    return 2 * layout.num_layers * heads * layout.head_dim * model.dtype.itemsize


def cache_sizes(main: LoadedLlama, draft: LoadedLlama, config: EngineConfig, max_model_len: int) -> tuple[int, int]:
    """Tokens of the main model's cache and of the speculator's.

    What `config` does not say is taken from the memory that is free: enough for every request that may run, if there is
    so much, and for four prompts of the longest in the speculator's cache, which each leave it soon; where it
    proposes tokens, for all that may run, since they stay.

    Raises:
        ArgumentError: not even one page of each fits.
    """
    free = free_bytes(main)
    draft_tokens = config.speculator_cache_tokens
    if draft_tokens is None:
        longest = max_model_len + PAGE
        affordable = int(free * SPECULATOR_SHARE) // token_bytes(draft)
        prompts = max(config.max_running, 4) if config.draft_tokens else 4
        draft_tokens = min(max(affordable, longest), prompts * longest)
    tokens = config.cache_tokens
    if tokens is None:
        left = free - draft_tokens * token_bytes(draft)
        tokens = min(max(left, 0) // token_bytes(main), config.max_running * max_model_len)
        if tokens < PAGE:
            raise ArgumentError(
                f"max_model_len={max_model_len} is not allowed: of {free / 2**30:.1f} GiB for both caches the "
                f"speculator's alone would take {draft_tokens * token_bytes(draft) / 2**30:.1f}"
            )
    return tokens, draft_tokens


def free_bytes(model: LoadedLlama) -> int:
    """Bytes that caches may take on each of a model's devices."""
    if platform(model.mesh) == "cpu":
        pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else 1 << 19
        return int(pages * os.sysconf("SC_PAGE_SIZE") * HOST_SHARE)
    device: Any = next(iter(model.whole.device_set))
    stats = device.memory_stats() or {}
    return int((stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)) * ACCELERATOR_SHARE)
