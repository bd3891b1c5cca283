"""Libraries of the extras `eval` and `lm-eval`: imported when first needed, with an error that says how to get them."""

import importlib
import warnings
from types import ModuleType

from specprefill_jax.errors import SpecPrefillError


def extra(name: str, of: str = "eval") -> ModuleType:
    """The module `name`, imported without what it warns of at its import.

    Args:
        name: the module.
        of: the extra that has it.

    Raises:
        SpecPrefillError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        raise SpecPrefillError(
            f"{name} is missing ({error}): install the extra `{of}`, pip install 'specprefill-jax[{of}]'"
        ) from error
