"""The report's arguments; what it compiles needs compilers that tests do not (`make aot`)."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "aot_report.py"


@pytest.fixture(scope="module")
def script():
    found = importlib.util.spec_from_file_location("aot_report", SCRIPT)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lengths": (0,)}, "lengths=0 is not allowed: lengths must be a power of two from 1 to 1048576"),
        ({"lengths": (8192, 1000)}, "lengths=1000 is not allowed"),
        ({"lengths": ()}, r"lengths=\(\) is not allowed: lengths must be at least one number"),
        ({"devices": (16,)}, "devices=16 is not allowed: devices must be a power of two from 1 to 8"),
        ({"devices": (-1,)}, "devices=-1 is not allowed"),
    ],
)
def test_bad_arguments(script, options, said):
    with pytest.raises(ValueError, match=said):
        script.main(script.Args(**options))
