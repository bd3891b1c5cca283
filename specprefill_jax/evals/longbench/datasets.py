"""The table of LongBench's datasets: what each measures and how it is asked and scored."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specprefill_jax.evals.prompts import LONGBENCH_PLAIN


@dataclass(frozen=True)
class Dataset:
    """One dataset of LongBench."""

    name: str
    category: str
    """One of `CATEGORIES`, over which the paper's figures average."""
    metric: str
    """One of `metrics.METRICS`."""
    chat: bool
    """Whether the prompt goes through the model's chat template."""
    first_line: bool
    """Whether only the first line of an answer counts, empty ones before it left out."""


CATEGORIES = ("single-doc QA", "multi-doc QA", "summarisation", "few-shot", "synthetic", "code")

_TABLE = """
narrativeqa           single-doc QA  qa_f1
qasper                single-doc QA  qa_f1
multifieldqa_en       single-doc QA  qa_f1
multifieldqa_zh       single-doc QA  qa_f1_zh
hotpotqa              multi-doc QA   qa_f1
2wikimqa              multi-doc QA   qa_f1
musique               multi-doc QA   qa_f1
dureader              multi-doc QA   rouge_l_zh
gov_report            summarisation  rouge_l
qmsum                 summarisation  rouge_l
multi_news            summarisation  rouge_l
vcsum                 summarisation  rouge_l_zh
trec                  few-shot       classification
triviaqa              few-shot       qa_f1
samsum                few-shot       rouge_l
lsht                  few-shot       classification
passage_count         synthetic      count
passage_retrieval_en  synthetic      retrieval
passage_retrieval_zh  synthetic      retrieval_zh
lcc                   code           code_similarity
repobench-p           code           code_similarity
"""


def _dataset(line: str) -> Dataset:
    name, rest = line.split(maxsplit=1)
    category, metric = rest.rsplit(maxsplit=1)
    return Dataset(
        name,
        category.strip(),
        metric,
        chat=name not in LONGBENCH_PLAIN,
        first_line=category.strip() == "few-shot",
    )


DATASETS: Mapping[str, Dataset] = MappingProxyType(
    {dataset.name: dataset for dataset in map(_dataset, _TABLE.strip().splitlines())}
)
"""The datasets by name, in the paper's order."""
