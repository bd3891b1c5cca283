"""Rows of local files into samples: the benchmark's own prompts, its truncation, its longest answers.

Nothing of the benchmark is in this package. Its prompts and longest answers are read from a folder that holds
`dataset2prompt.json` and `dataset2maxlen.json`; its rows from a folder of `<dataset>.jsonl` (or `<dataset>_e.jsonl`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from specprefill_jax.errors import argument_error
from specprefill_jax.evals.longbench.scoring import check_metric, dataset_of, score
from specprefill_jax.evals.samples import Sample, parsed_row
from specprefill_jax.tokens import Tokenizer


class Benchmark(NamedTuple):
    """What the benchmark says of its datasets, by name."""

    prompts: Mapping[str, str]
    """With `{context}` and `{input}` in them."""
    max_tokens: Mapping[str, int]
    """Most tokens of an answer."""


def read_benchmark(folder: Path) -> Benchmark:
    """Read `dataset2prompt.json` and `dataset2maxlen.json`.

    Raises:
        ArgumentError: a file is missing, or holds something else than texts and positive integers by dataset.
    """
    prompts = _object(folder / "dataset2prompt.json")
    longest = _object(folder / "dataset2maxlen.json")
    for name, prompt in prompts.items():
        if not isinstance(prompt, str) or "{context}" not in prompt:
            raise argument_error(f"dataset2prompt.json: {name}", prompt, "a text with {context} in it")
    for name, tokens in longest.items():
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise argument_error(f"dataset2maxlen.json: {name}", tokens, "an integer of at least 1")
    return Benchmark(prompts, longest)


def middle_cut(text: str, tokenizer: Tokenizer, max_length: int) -> str:
    """A text of at most `max_length` tokens: the first half of that and the last half, decoded and joined."""
    ids = tokenizer.encode(text)
    if len(ids) <= max_length:
        return text
    half = max_length // 2
    return tokenizer.decode(ids[:half]) + tokenizer.decode(ids[len(ids) - half :])


def length_bucket(length: int | None) -> str:
    """LongBench-E's bucket of a row's `length` (words, or characters of Chinese)."""
    if length is None:
        return "unknown"
    return "0-4k" if length < 4000 else "4-8k" if length < 8000 else "8k+"


def data_file(folder: Path, name: str) -> Path:
    """The file of a dataset's rows.

    Raises:
        ArgumentError: there is none.
    """
    files = [folder / f"{name}.jsonl", folder / f"{name}_e.jsonl"]
    for file in files:
        if file.is_file():
            return file
    raise argument_error("data_dir", str(folder), f"a folder with {files[0].name} or {files[1].name}")


def read_samples(
    data_dir: Path,
    benchmark: Benchmark,
    names: Sequence[str],
    tokenizer: Tokenizer | None = None,
    *,
    max_length: int | None = None,
    limit: int | None = None,
    chat: bool = True,
) -> Iterator[Sample]:
    """Yield the samples of several datasets, read one by one.

    Args:
        data_dir: folder of the rows. A row has `answers` and either `context` and `input`, which go into the
            benchmark's prompt, or `prompt`, which is taken as it is; `all_classes`, `length` and `_id` where it has.
        benchmark: from `read_benchmark`.
        names: the datasets, in the order wanted.
        tokenizer: the main model's; needed for `max_length`.
        max_length: prompts of more tokens lose their middle, before any chat template. None: none does.
        limit: rows of each dataset.
        chat: False for models without a chat template; the datasets that are asked without one always are.

    Raises:
        ArgumentError: a dataset that the benchmark does not have, a file or a row that is not as above. All but the
            rows are checked at once.
        SpecPrefillError: a library that a metric needs is missing.
    """
    if max_length is not None and (max_length < 2 or tokenizer is None):
        raise argument_error("max_length", max_length, "None, or at least 2 with a model that has a tokenizer")
    files = _files(data_dir, benchmark, names)
    samples = _read(files, benchmark, tokenizer, max_length, limit)
    return samples if chat else (replace(sample, chat=False) for sample in samples)


def count_samples(data_dir: Path, benchmark: Benchmark, names: Sequence[str], *, limit: int | None = None) -> int:
    """How many samples `read_samples` yields for the same arguments; raises what it raises at once."""
    total = 0
    for file in _files(data_dir, benchmark, names).values():
        with file.open("rb") as lines:
            total += sum(1 for _ in islice((line for line in lines if line.strip()), limit))
    return total


def _files(data_dir: Path, benchmark: Benchmark, names: Sequence[str]) -> dict[str, Path]:
    """The datasets' files; each can be scored, and the benchmark has it."""
    files = {}
    for name in names:
        check_metric(name)
        if name not in benchmark.max_tokens:
            raise argument_error("dataset", name, "one of dataset2maxlen.json: " + ", ".join(benchmark.max_tokens))
        files[name] = data_file(data_dir, name)
    return files


def _read(
    files: Mapping[str, Path],
    benchmark: Benchmark,
    tokenizer: Tokenizer | None,
    max_length: int | None,
    limit: int | None,
) -> Iterator[Sample]:
    for name, file in files.items():
        with file.open(encoding="utf-8") as lines:
            given = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
            for index, (number, line) in enumerate(islice(given, limit)):
                where = f"{file}, line {number}"
                yield _sample(name, parsed_row(line, where), where, index, benchmark, tokenizer, max_length)


def _sample(
    name: str,
    row: Mapping[str, Any],
    where: str,
    index: int,
    benchmark: Benchmark,
    tokenizer: Tokenizer | None,
    max_length: int | None,
) -> Sample:
    dataset = dataset_of(name)
    answers, classes, length = row.get("answers"), row.get("all_classes"), row.get("length")
    if not isinstance(answers, list) or not answers or not all(isinstance(answer, str) for answer in answers):
        raise argument_error(f"{where}: answers", answers, "a list of at least one text")
    if dataset.metric == "classification" and not (classes and isinstance(classes, list)):
        raise argument_error(f"{where}: all_classes", classes, "a list of at least one text")
    context, question, prompt = row.get("context"), row.get("input"), row.get("prompt")
    if isinstance(prompt, str) and prompt:
        question = ""
    elif isinstance(context, str) and isinstance(question, str):
        if name not in benchmark.prompts:
            raise argument_error("dataset", name, "one of dataset2prompt.json: " + ", ".join(benchmark.prompts))
        # Both at once: a context may hold braces.
        head, *rest = benchmark.prompts[name].split("{context}")
        prompt = context.join(part.replace("{input}", question) for part in (head, *rest))
    else:
        raise argument_error(where, sorted(row), "an object with context and input, or with prompt")
    cut = prompt if max_length is None or tokenizer is None else middle_cut(prompt, tokenizer, max_length)
    return Sample(
        benchmark="longbench",
        task=name,
        key=str(row.get("_id") or index),
        input=cut,
        outputs=tuple(answers),
        score=partial(score, name, references=tuple(answers), classes=classes),
        max_tokens=benchmark.max_tokens[name],
        category=dataset.category,
        bucket=length_bucket(length),
        length=length,
        chat=dataset.chat,
        question=question,
        notes={"truncated": cut != prompt},
    )


def _object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise argument_error("benchmark_dir", str(file.parent), f"a folder with {file.name} ({error})") from None
    if not isinstance(found, dict):
        raise argument_error(file.name, found, "an object by dataset")
    return found
