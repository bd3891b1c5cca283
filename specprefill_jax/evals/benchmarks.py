"""The benchmarks' own flags, which all scripts that ask their samples share."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from specprefill_jax.evals.longbench import DATASETS, count_samples, read_benchmark, read_samples
from specprefill_jax.evals.ruler import TASKS, Sources, check_tasks, ruler_samples
from specprefill_jax.evals.samples import Sample
from specprefill_jax.pipeline import SpecPrefill

Samples = Callable[[SpecPrefill], tuple[Iterable[Sample], int]]
"""From a model, whose tokenizer may be needed, to the samples and their number."""

RULER_SAMPLES = 500
"""RULER's number of samples of a task and length."""


@dataclass
class RulerArgs:
    """Which samples of RULER."""

    tasks: tuple[str, ...] = tuple(TASKS)
    """Names of tasks."""
    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536, 131072)
    """Most tokens of a prompt, answer included."""
    essays_dir: Path | None = None
    """A folder of .txt files to use as essays."""
    data_dir: Path | None = None
    """A folder with SQuAD and HotpotQA; RULER's english_words.json is used where it lies there."""

    def ruler(self, limit: int | None, seed: int) -> Samples:
        """So many samples of each task and length; ArgumentError for flags that are not allowed."""
        sources = Sources(self.essays_dir, self.data_dir)
        check_tasks(self.tasks, sources)
        count = RULER_SAMPLES if limit is None else limit

        def samples(model: SpecPrefill) -> tuple[Iterable[Sample], int]:
            found = ruler_samples(
                self.tasks, self.lengths, count, tokenizer=model.tokenizer, seed=seed, sources=sources
            )
            return found, count * len(self.tasks) * len(self.lengths)

        return samples


@dataclass
class LongBenchArgs:
    """Which samples of LongBench."""

    benchmark_dir: Path = Path("LongBench/config")
    """Folder with the benchmark's dataset2prompt.json and dataset2maxlen.json."""
    data_dir: Path = Path("LongBench/data")
    """Folder with <dataset>.jsonl, or <dataset>_e.jsonl."""
    datasets: tuple[str, ...] = tuple(DATASETS)
    max_length: int | None = None
    """Prompts of more tokens lose their middle; None: none does."""
    chat: bool = True
    """Put prompts into the chat template, but for the datasets that are asked without."""

    def longbench(self, limit: int | None) -> Samples:
        """The samples, `limit` of each dataset at most; ArgumentError for flags that are not allowed."""
        benchmark = read_benchmark(self.benchmark_dir)
        count = count_samples(self.data_dir, benchmark, self.datasets, limit=limit)

        def samples(model: SpecPrefill) -> tuple[Iterable[Sample], int]:
            found = read_samples(
                self.data_dir,
                benchmark,
                self.datasets,
                model.tokenizer,
                max_length=self.max_length,
                limit=limit,
                chat=self.chat,
            )
            return found, count

        return samples
