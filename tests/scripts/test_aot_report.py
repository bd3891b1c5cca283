"""The report's arguments; what it compiles needs compilers that tests do not (`make aot`)."""

import pytest
from script_modules import load_script


@pytest.fixture(scope="module")
def script():
    return load_script("aot_report")


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
