"""The errors of this package: every one is a ValueError that says what was wrong and what is allowed."""


class SpecPrefillError(ValueError):
    """Base of all errors raised for bad input."""


class ArgumentError(SpecPrefillError):
    """An argument, option or prompt has a value that is not allowed."""


class CheckpointError(SpecPrefillError):
    """A model file is missing, damaged or not a Llama; the message names the file and the tensor or key."""


class TokenizerError(SpecPrefillError):
    """A tokenizer cannot be read, or two models' tokenizers differ."""


def argument_error(name: str, value: object, allowed: str) -> ArgumentError:
    """Build the error for argument `name`: `<name>=<value> is not allowed: <name> must be <allowed>`."""
    text = repr(value)
    text = text if len(text) <= 200 else text[:197] + "..."
    return ArgumentError(f"{name}={text} is not allowed: {name} must be {allowed}")
