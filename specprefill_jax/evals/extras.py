"""Libraries of the extra `eval`: imported when first needed, with an error that says how to get them."""

import importlib
import warnings
from types import ModuleType

from specprefill_jax.errors import SpecPrefillError


def extra(name: str) -> ModuleType:
    """The module `name`, imported without what it warns of at its import.

    Raises:
        SpecPrefillError: it is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        raise SpecPrefillError(
            f"{name} is missing ({error}): install the extra `eval`, pip install 'specprefill-jax[eval]'"
        ) from error
