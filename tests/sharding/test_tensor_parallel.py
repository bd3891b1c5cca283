"""The tiny pair, and float8 models, on meshes of up to eight devices, in a process that has them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MESHES = [*(f"devices {devices}" for devices in (1, 2, 4, 8)), "rows"]


@pytest.mark.parametrize(
    ("name", "told"), [("eight_models.py", MESHES), ("eight_float8.py", ["static", "fbgemm", "channel"])]
)
def test_one_to_eight_devices_equal_one_and_the_goldens(name, told):
    script = Path(__file__).with_name(name)
    flags = {"XLA_FLAGS": os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    flags["PYTHONPATH"] = str(Path(__file__).parents[2])  # this tree, wherever the package is installed from
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, **flags}, capture_output=True, text=True, timeout=600
    )
    assert done.stdout.splitlines() == told, done.stderr
    assert done.returncode == 0
