"""How much of a prompt its scores ask for: keep rate "auto" where the speculator does not look ahead.

Importance is a mass over the prompt: a chunk holds its mean times its tokens. What is always kept is left out of the
account, since the first chunk is the attention sink of every prompt and the last ones are near to the queries; the
rest decides. Top-p budgets of attention are AttnComp's (arXiv 2509.17486).
"""

import numpy as np


def chunk_masses(scores: np.ndarray, num_tokens: int, chunk_size: int) -> np.ndarray:
    """Importance that each chunk holds, float64 [C]: its score, a mean, times its tokens; the last may be short."""
    tokens = np.minimum(num_tokens - np.arange(len(scores)) * chunk_size, chunk_size)
    return scores.astype(np.float64) * tokens


def chunks_for_share(masses: np.ndarray, share: float) -> int:
    """How many of masses [n], which are in the order of keeping, it takes to hold `share` of all; at least 1."""
    held = np.cumsum(masses)
    return min(int(np.searchsorted(held, share * held[-1])) + 1, len(masses))
