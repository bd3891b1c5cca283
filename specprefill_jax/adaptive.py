"""How much of a prompt its scores ask for: the keep rate "auto".

Importance is a mass over the prompt: a chunk holds its mean times its tokens. What is always kept is left out of the
account, since the first chunk is the attention sink of every prompt and the last ones are near to the queries; the
rest decides. The published method names its fixed rate as a limitation (arXiv 2502.02789); top-p budgets of attention
are AttnComp's (arXiv 2509.17486).
"""

import math

import numpy as np


def chunk_masses(scores: np.ndarray, num_tokens: int, chunk_size: int) -> np.ndarray:
    """Importance that each chunk holds, float64 [C]: its score, a mean, times its tokens; the last may be short."""
    tokens = np.minimum(num_tokens - np.arange(len(scores)) * chunk_size, chunk_size)
    return scores.astype(np.float64) * tokens


def normalised_entropy(masses: np.ndarray) -> float:
    """Entropy of masses [n] over that of equal ones, log(n): 0 where one holds all, 1 where all are equal or zero."""
    total = masses.sum()
    if len(masses) < 2 or total <= 0:
        return 1.0
    shares = masses / total
    shares = shares[shares > 0]
    return min(max(float(-(shares * np.log(shares)).sum()) / math.log(len(masses)), 0.0), 1.0)


def chunks_for_share(masses: np.ndarray, share: float) -> int:
    """How many of masses [n], which are in the order of keeping, it takes to hold `share` of all; at least 1."""
    held = np.cumsum(masses)
    return min(int(np.searchsorted(held, share * held[-1])) + 1, len(masses))
