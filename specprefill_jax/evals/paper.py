"""What the paper reports (arXiv 2502.02789, version of ICML 2025), for figures that have the same axes.

Llama-3.1-70B-Instruct with Llama-3.1-8B-Instruct as its speculator on eight H100 or H200, unless a name says 405B.
"""

from collections.abc import Mapping
from types import MappingProxyType

PAIR = "paper, 70B by 8B"

SCORES: Mapping[str, tuple[tuple[float, float], ...]] = MappingProxyType(
    {"longbench": ((0.1, 52.74), (0.3, 53.92), (0.5, 53.59), (0.7, 53.42), (0.9, 53.27), (1.0, 53.55))}
)
"""Mean score over keep rate, by benchmark; at 1 that of the whole prompt."""

FIRST_TOKEN = ("paper, 405B", (0.1, 7.66))
"""The largest speed-up of the first token: (keep rate, times)."""
