"""What all tests share: JAX on the CPU, caches in a temporary folder, the tiny models, the oracle's answers."""

import atexit
import os
import shutil
import tempfile
from functools import cache

import pytest
from hypothesis import settings

# Nothing above imports JAX or numpy. Tests neither look for accelerators nor touch the user's caches.
CACHE = tempfile.mkdtemp(prefix="specprefill-tests-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile more than they compute: LLVM's optimisations would take twice as long as they save, splitting a small
# program among threads a tenth.
UNOPTIMISED = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if UNOPTIMISED not in os.environ.get("XLA_FLAGS", ""):  # once: a compiled program is found again by its flags, too
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {UNOPTIMISED}".strip()
os.environ["XDG_CACHE_HOME"] = CACHE
# The first process's folder is that of all: of pytest's workers, and of the processes that tests start.
os.environ.setdefault("SPECPREFILL_TESTS_COMPILED", os.path.join(CACHE, "jax"))
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["SPECPREFILL_TESTS_COMPILED"]
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # new model objects find what others compiled
os.environ["HF_HUB_OFFLINE"] = "1"
# The oracle's products are small: threads that wait for each other, in each worker, cost ten times what they compute.
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"
# Examples compile, on machines that do other things: how long one takes says nothing.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


@pytest.fixture(scope="session")
def optimised():
    """The environment of a process that computes more than it compiles."""
    return os.environ | {"XLA_FLAGS": os.environ["XLA_FLAGS"].replace(UNOPTIMISED, "")}


@pytest.fixture(scope="session")
def tiny():
    """The tiny pair in float32: main model 4 layers, speculator 3 layers, 512 tokens, 4096 positions."""
    from agreement import load_tiny  # imports numpy, which reads the environment then

    return load_tiny()


@pytest.fixture(scope="session")
def tiny_chunked(tiny):
    """A function from a prefill chunk size to the tiny pair that reads prompts in such chunks.

    All run the same two models: what one pipeline compiled, the others find.
    """
    from specprefill_jax import SpecPrefill

    @cache
    def chunked(size: int) -> SpecPrefill:
        return SpecPrefill(tiny.main, tiny.speculator.model, tiny.tokenizer, prefill_chunk=size)

    return chunked


@pytest.fixture(scope="session")
def reference():
    """The oracle of the tiny pair, remembering its answers for the session."""
    from agreement import MAIN, SPECULATOR, Reference

    return Reference(MAIN, SPECULATOR)
