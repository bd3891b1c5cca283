"""The persistent compilation cache: a program compiled once on this machine is read from disk afterwards."""

import jax

from specprefill_jax.models.builtin import cache_folder

_MIN_SECONDS = 0.1


def use_compilation_cache() -> None:
    """Keep compiled programs in the user's cache folder, unless the caller already told JAX where to keep them.

    JAX's own settings (`jax_compilation_cache_dir`, `jax_enable_compilation_cache`) take precedence.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder().parent / "compiled"))
        # JAX's default of a second would leave out most of a small model's programs.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_SECONDS)
