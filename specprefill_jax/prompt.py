"""Prompts: what they may be, and token ids that are checked before anything is done with them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specprefill_jax.errors import ArgumentError, argument_error
from specprefill_jax.prefill import bucket

Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]
"""Text, chat messages, or token ids."""

PROMPT_KINDS = "text, chat messages or a flat sequence of integer token ids"


def check_ids(ids: Sequence[int] | np.ndarray, vocabulary: int, context: int) -> np.ndarray:
    """Token ids as int32 [M], which must be of the vocabulary and fit the context; else ArgumentError."""
    if not len(ids):
        raise argument_error("prompt", list(ids), "at least one token")
    if len(ids) > context:
        raise ArgumentError(
            f"prompt of {len(ids)} tokens is not allowed: prompt must be at most {context} tokens, the main "
            "model's context (dropped tokens make no room: kept ones keep their positions)"
        )
    try:
        checked = np.asarray(ids)
    except ValueError:  # a ragged sequence
        raise argument_error("prompt", list(ids)[:8], PROMPT_KINDS) from None
    booleans = not isinstance(ids, np.ndarray) and any(isinstance(token, bool) for token in ids)
    if checked.ndim != 1 or checked.dtype.kind not in "iu" or booleans:
        raise argument_error("prompt", list(ids)[:8], PROMPT_KINDS)
    bad = np.flatnonzero((checked < 0) | (checked >= vocabulary))
    if bad.size:
        where = f"prompt[{bad[0]}]"
        raise argument_error(where, int(checked[bad[0]]), f"a token id from 0 to {vocabulary - 1}")
    return checked.astype(np.int32)


def padded_ids(ids: np.ndarray) -> np.ndarray:
    """A prompt as int32 [1, bucket]."""
    out = np.zeros((1, bucket(len(ids))), np.int32)
    out[0, : len(ids)] = ids
    return out
