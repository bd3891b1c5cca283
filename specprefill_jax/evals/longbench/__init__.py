"""LongBench (arXiv 2308.14508): its 21 datasets from local files, prompted and scored as the original does."""

from specprefill_jax.evals.longbench.datasets import CATEGORIES, DATASETS, Dataset
from specprefill_jax.evals.longbench.rows import count_samples, middle_cut, read_benchmark, read_samples
from specprefill_jax.evals.longbench.scoring import check_metric, score

__all__ = [
    "CATEGORIES",
    "DATASETS",
    "Dataset",
    "check_metric",
    "count_samples",
    "middle_cut",
    "read_benchmark",
    "read_samples",
    "score",
]
