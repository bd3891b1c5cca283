"""The score of an answer: LongBench's post-processing, then the best of the references."""

from collections.abc import Sequence

from specprefill_jax.errors import argument_error
from specprefill_jax.evals.longbench.datasets import DATASETS, Dataset
from specprefill_jax.evals.longbench.metrics import LIBRARIES, METRICS


def dataset_of(name: str) -> Dataset:
    """The dataset of that name; ArgumentError where there is none."""
    if name not in DATASETS:
        raise argument_error("dataset", name, "one of " + ", ".join(DATASETS))
    return DATASETS[name]


def check_metric(name: str) -> None:
    """Raise SpecPrefillError where a dataset's metric lacks a library, so that a run fails before it begins."""
    for load in LIBRARIES.get(dataset_of(name).metric, ()):
        load()


def score(name: str, answer: str, references: Sequence[str], classes: Sequence[str] | None = None) -> float:
    """What an answer is worth, 0 to 1: the most over all references.

    Args:
        name: the dataset's.
        answer: as it was generated.
        references: accepted answers.
        classes: all classes of a classification.
    """
    dataset = dataset_of(name)
    if dataset.first_line:
        answer = answer.lstrip("\n").split("\n")[0]
    metric = METRICS[dataset.metric]
    return max((metric(answer, reference, classes or ()) for reference in references), default=0.0)
