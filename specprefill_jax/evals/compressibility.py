"""How a sample's score changes with what is read of it: the kinds of prompts that arXiv 2502.02789 tells apart.

The paper names three kinds and gives no rule; `classify` is ours.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from specprefill_jax.evals.document import Table
from specprefill_jax.evals.score_plot import series_of
from specprefill_jax.evals.tables import Row

TOLERANCE = 0.1
"""Differences of a score, which is from 0 to 1, up to which it counts as the same."""


class Kind(StrEnum):
    """What a prompt is like."""

    COMPRESSIBLE = "compressible"
    INFORMATION_DENSE = "information-dense"
    NOISY = "noisy"
    UNANSWERED = "unanswered"


def classify(scores: Sequence[float]) -> Kind:
    """The kind of a sample by its scores, from the lowest keep rate up, that of the whole prompt last.

    The first that holds; "more" and "less" are differences above `TOLERANCE`:

    * unanswered: no score is above the tolerance, so nothing can be said of the prompt;
    * noisy: somewhere a score is less than at a lower keep rate, so that reading more does harm: what was left out
      distracted the model, or its answers are a matter of chance;
    * compressible: at the lowest keep rate the score is not less than of the whole prompt;
    * information-dense: the rest, which lose where little is read, and gain as more is.
    """
    if max(scores) <= TOLERANCE:
        return Kind.UNANSWERED
    if any(low - high > TOLERANCE for i, low in enumerate(scores) for high in scores[i + 1 :]):
        return Kind.NOISY
    return Kind.COMPRESSIBLE if scores[-1] - scores[0] <= TOLERANCE else Kind.INFORMATION_DENSE


@dataclass(frozen=True)
class Curve:
    """One sample read in one way at several keep rates, and whole."""

    benchmark: str
    task: str
    sample: str
    """Task, bucket and key."""
    series: str
    """The way without its keep rate, such as "p*_full_lah8"."""
    scores: tuple[tuple[float, float], ...]
    """(keep rate, score), ascending; the whole prompt last, at 1."""

    @property
    def kind(self) -> Kind:
        """See `classify`."""
        return classify([score for _, score in self.scores])

    @property
    def needed(self) -> float:
        """The lowest keep rate from which up no score is less than that of the whole prompt, beyond the tolerance."""
        whole = self.scores[-1][1]
        needed = 1.0
        for rate, score in reversed(self.scores):
            if whole - score > TOLERANCE:
                break
            needed = rate
        return needed


def curves(rows: Iterable[Row]) -> list[Curve]:
    """Curves of the samples that were read whole and, by a speculator's choice, in part; in the order of the rows."""
    rows = [row for row in rows if row.score is not None]
    whole = {(row.benchmark, row.sample): row.score for row in rows if row.method == "dense"}
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        scored = row.method in ("specprefill", "product") and row.keep_rate != "auto"
        if scored and (row.benchmark, row.sample) in whole:
            found.setdefault((series_of(row.setting), row.benchmark, row.sample), []).append(row)
    out = []
    for (series, benchmark, sample), own in found.items():
        points = sorted((rate, row.score or 0.0) for row in own if not isinstance(rate := row.keep_rate, str))
        dense = whole[benchmark, sample] or 0.0
        out.append(Curve(benchmark, own[0].task, sample, series, (*points, (1.0, dense))))
    return out


def kinds_table(found: Sequence[Curve]) -> Table:
    """How many samples of each task are of each kind."""
    counts: dict[str, Counter[Kind]] = {}
    for curve in found:
        counts.setdefault(curve.task, Counter())[curve.kind] += 1
    counts["all tasks"] = Counter(curve.kind for curve in found)
    lines = [[task, *(str(of[kind]) for kind in Kind), str(of.total())] for task, of in counts.items()]
    return Table(["task", *Kind, "samples"], lines)


def as_tsv(found: Sequence[Curve]) -> str:
    """A line for each curve: what it is of, its kind, the keep rate it needs, and its score at every keep rate."""
    rates = sorted({rate for curve in found for rate, _ in curve.scores})
    head = ["benchmark", "sample", "task", "way", "kind", "needed", *(f"score at {rate:g}" for rate in rates)]
    lines = ["\t".join(head)]
    for curve in found:
        scores = dict(curve.scores)
        cells = [f"{scores[rate]:.6g}" if rate in scores else "" for rate in rates]
        known = [curve.benchmark, curve.sample, curve.task, curve.series, curve.kind, f"{curve.needed:g}"]
        # A key is the benchmark's: whatever is in it, a line stays a line.
        lines.append("\t".join(" ".join(cell.split()) for cell in (*known, *cells)))
    return "\n".join(lines) + "\n"
