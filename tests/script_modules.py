"""The scripts as modules, which no import can find."""

import importlib.util
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[1] / "scripts"


def load_script(name: str):
    """A new module of scripts/<name>.py, under a name that clashes with no other."""
    known = f"{name}_script"
    spec = importlib.util.spec_from_file_location(known, SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[known] = module  # dataclasses ask for it
    spec.loader.exec_module(module)
    return module
