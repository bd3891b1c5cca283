"""Both kernels under meshes of up to eight devices, in one process that has them."""

import os
import subprocess
import sys
from pathlib import Path

from .cases import BACKENDS

MESHES = ("eight", "two_by_four")


def test_eight_devices():
    script = Path(__file__).with_name("eight_devices.py")
    flags = {"XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, **flags}, capture_output=True, text=True, timeout=300
    )
    want = []
    for name in BACKENDS:
        want += [*[f"importance {name} {mesh}" for mesh in MESHES], f"chunk_topk {name}"]
    assert done.stdout.splitlines() == want, done.stderr
    assert done.returncode == 0
