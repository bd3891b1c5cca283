"""What all tests share: JAX on the CPU, caches in a temporary folder, the tiny models, the oracle's answers."""

import atexit
import os
import shutil
import tempfile

import pytest
from agreement import MAIN, SPECULATOR, Reference, load_tiny

# Nothing above imports JAX. Tests neither look for accelerators nor touch the user's caches.
CACHE = tempfile.mkdtemp(prefix="specprefill-tests-")
atexit.register(shutil.rmtree, CACHE, ignore_errors=True)
os.environ["JAX_PLATFORMS"] = "cpu"
# Tests compile more than they compute: LLVM's optimisations would take twice as long as they save.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
os.environ["XDG_CACHE_HOME"] = CACHE
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(CACHE, "jax")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # new model objects find what others compiled
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def tiny():
    """The tiny pair in float32: main model 4 layers, speculator 3 layers, 512 tokens, 4096 positions."""
    return load_tiny()


@pytest.fixture(scope="session")
def tiny_chunked():
    """A function from a prefill chunk size to the tiny pair that reads prompts in such chunks, loaded once each."""
    models = {}

    def load(size: int):
        if size not in models:
            models[size] = load_tiny(prefill_chunk=size)
        return models[size]

    return load


@pytest.fixture(scope="session")
def reference() -> Reference:
    """The oracle of the tiny pair, remembering its answers for the session."""
    return Reference(MAIN, SPECULATOR)
