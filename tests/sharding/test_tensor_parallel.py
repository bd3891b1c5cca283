"""The tiny pair on meshes of up to eight devices, in one process that has them."""

import os
import subprocess
import sys
from pathlib import Path


def test_one_to_eight_devices_equal_the_goldens():
    script = Path(__file__).with_name("eight_models.py")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, **flags}, capture_output=True, text=True, timeout=600
    )
    told = [*(f"goldens {devices}" for devices in (1, 2, 4, 8)), "rows"]
    assert done.stdout.splitlines() == told, done.stderr
    assert done.returncode == 0
