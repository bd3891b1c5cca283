"""BM25: how well each of several lists of terms answers a query, by the terms alone."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

K1, B = 1.5, 0.75
"""The usual constants: how soon a repeated term stops to count, and how much a long list is held against itself."""


def bm25(documents: Sequence[Sequence[Hashable]], query: Sequence[Hashable]) -> np.ndarray:
    """Scores of the documents, float64 [D]: 0 for one that shares no term with the query. Each query term counts once.

    score = sum over terms of log(1 + (D - n + 1/2) / (n + 1/2)) * f (K1 + 1) / (f + K1 (1 - B + B length / mean)),
    for a term that stands f times in the document and in n documents.
    """
    scores = np.zeros(len(documents))
    terms = set(query)
    lengths = [len(document) for document in documents]
    mean = sum(lengths) / len(lengths) if sum(lengths) else 1.0
    found = [Counter(term for term in document if term in terms) for document in documents]
    holding = Counter(term for counts in found for term in counts)
    for index, counts in enumerate(found):
        norm = K1 * (1 - B + B * lengths[index] / mean)
        for term in sorted(counts, key=str):  # sums in one order: a set's depends on the process
            n, f = holding[term], counts[term]
            scores[index] += math.log(1 + (len(documents) - n + 0.5) / (n + 0.5)) * f * (K1 + 1) / (f + norm)
    return scores
