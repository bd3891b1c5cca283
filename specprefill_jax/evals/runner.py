"""Asks a model every sample in every setting and keeps what came out; stop it anywhere, run it again, and it goes on.

A prompt is tokenised once, and speculated once for all keep rates and look-aheads, in paper and in product mode.
"""

import hashlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import batched, groupby
from typing import Any

import jax
import numpy as np

from specprefill_jax.config import SamplingParams, SpecPrefillConfig
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.evals.baselines import Embedder, Request, choose
from specprefill_jax.evals.results import ResultFile, row_key
from specprefill_jax.evals.samples import Sample, prompt_ids
from specprefill_jax.evals.settings import Setting
from specprefill_jax.output import Output
from specprefill_jax.pipeline import SpecPrefill
from specprefill_jax.planning import Reason
from specprefill_jax.selection import Selection
from specprefill_jax.together import answer_together


@dataclass(frozen=True)
class Counts:
    """What a run did."""

    done: int
    """Rows added."""
    there: int
    """Rows that were there already."""
    skipped: int
    """Of the rows added, those of prompts that could not be read."""


Rows = Callable[[SpecPrefill, Sample, Sequence[Sequence[Setting]], int], Iterator[dict[str, Any]]]
"""Yields one row for each setting of a sample, from groups of settings that share a speculation, and the seed."""


def run(
    model: SpecPrefill,
    samples: Iterable[Sample],
    settings: Sequence[Setting],
    results: ResultFile,
    *,
    seed: int = 0,
    versions: Mapping[str, str] | None = None,
    total: int | None = None,
    progress: Callable[[str], None] | None = None,
    rows: Rows | None = None,
    whole: bool = False,
) -> Counts:
    """Add a row to the results for every sample and setting that has none yet.

    Rows come in the order of the samples, and of the settings as given except that those which share a speculation are
    together. Memory does not grow with the samples; only the keys of the rows are kept. On several processes each makes
    the same call, all read the same results, and only process 0 writes them.

    Args:
        model: the pair.
        samples: in a fixed order; those that are done are passed over without being tokenised.
        settings: from `parse_setting`.
        results: open.
        seed: of what is drawn (the baseline "random").
        versions: of the libraries, into each row.
        total: number of samples, for the time left; None where it is not known.
        progress: gets a line from time to time; None: standard error.
        rows: what is found out of a sample; None: `answers`.
        whole: `rows` asks in several settings at once, and what it finds may depend on which: a sample of which rows
            are missing is asked in all of them again.

    Raises:
        SpecPrefillError: a row is there already that a later sample would write again (two samples of one name).
    """
    groups = _groups(settings)
    report = Progress(None if total is None else total * len(settings), progress or _to_stderr)
    done = there = skipped = 0
    seen: set[str] = set()
    for sample in samples:
        if sample.name in seen:
            raise SpecPrefillError(f"two samples are called {sample.name}")
        seen.add(sample.name)
        missing = [[s for s in group if f"{sample.name}/{s.name}" not in results.done] for group in groups]
        count = sum(map(len, missing))
        asked = groups if whole else [group for group in missing if group]
        there += len(settings) - count
        report.passed(len(settings) - count)
        if not count:
            continue
        for row in (rows or answers)(model, sample, asked, seed):
            if row_key(row) in results.done:
                continue
            row["versions"] = dict(versions or {})
            results.add(row)
            done += 1
            skipped += row["skipped"] is not None
            report.finished(sample.name)
    return Counts(done, there, skipped)


def _groups(settings: Sequence[Setting]) -> list[list[Setting]]:
    """The settings in order, those that a speculator chooses for together, where the first of them is."""
    groups: dict[str, list[Setting]] = {}
    for setting in settings:
        of = "the prompt" if setting.method in ("specprefill", "product") else setting.method
        shared = setting.name if setting.config is None else f"speculated, {of}"
        groups.setdefault(shared, []).append(setting)
    return list(groups.values())


def answers(
    model: SpecPrefill,
    sample: Sample,
    groups: Sequence[Sequence[Setting]],
    seed: int,
    embedder: Embedder | None = None,
    batch: int = 1,
) -> Iterator[dict[str, Any]]:
    """Rows of answers and their scores; only the settings' own work is done when a row is asked for.

    `embedder`: of the baseline that embeds sentences, if it is among the settings. `batch`: answers that are decoded
    together.
    """
    ids = prompt_ids(sample, model.tokenizer)
    common = common_fields(sample, ids, seed)
    sampling = SamplingParams(max_tokens=sample.max_tokens, stop=sample.stop if model.tokenizer else ())
    for some in batched(_chosen(model, ids, sample, groups, seed, embedder), batch):
        for (setting, _, seconds), output in zip(some, _outputs(model, ids, sampling, some, batch), strict=True):
            if isinstance(output, SpecPrefillError):
                yield {**common, **_unread(setting, output)}
                continue
            row = _answered(sample, setting, output, seconds, model.tokenizer is not None)
            if embedder is not None and setting.method == "embedding_sentences":
                row["embedding_model"] = embedder.model
            yield {**common, **row}


Chosen = tuple[Setting, Selection | SpecPrefillError, float]
"""A setting, what is read in it or why nothing can be, and the seconds that choosing took."""


def _chosen(
    model: SpecPrefill,
    ids: np.ndarray,
    sample: Sample,
    groups: Sequence[Sequence[Setting]],
    seed: int,
    embedder: Embedder | None,
) -> Iterator[Chosen]:
    for group in groups:
        started = time.perf_counter()
        found: Sequence[Selection | SpecPrefillError]
        try:
            _check_room(model, ids, sample.max_tokens, group[0])
            found = selections(model, ids, sample.question, group, seed, embedder)
        except SpecPrefillError as error:
            found = [error] * len(group)
        seconds = time.perf_counter() - started
        yield from ((setting, selection, seconds) for setting, selection in zip(group, found, strict=True))


def _outputs(
    model: SpecPrefill, ids: np.ndarray, sampling: SamplingParams, chosen: Sequence[Chosen], batch: int
) -> list[Output | SpecPrefillError]:
    """What comes out of each setting, or why nothing does."""
    read = [(setting, selection) for setting, selection, _ in chosen if isinstance(selection, Selection)]
    outputs: Sequence[Output | SpecPrefillError]
    try:
        if batch > 1 and read:
            outputs = answer_together(model, ids, [selection for _, selection in read], sampling, batch)
        else:
            outputs = [
                model.generate(ids, sampling, setting.config or SpecPrefillConfig(), selection=selection)
                for setting, selection in read
            ]
    except SpecPrefillError as error:
        outputs = [error] * len(read)
    made = iter(outputs)
    return [next(made) if isinstance(selection, Selection) else selection for _, selection, _ in chosen]


def common_fields(sample: Sample, ids: np.ndarray, seed: int) -> dict[str, Any]:
    """What all rows of a sample, whose prompt is `ids` [M], have in common."""
    return {
        "benchmark": sample.benchmark,
        "task": sample.task,
        "category": sample.category,
        "bucket": sample.bucket,
        "length": sample.length,
        "key": sample.key,
        **sample.notes,
        "seed": seed,
        "prompt_sha256": hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest(),
        "num_tokens": len(ids),
    }


def _check_room(model: SpecPrefill, ids: np.ndarray, max_tokens: int, setting: Setting) -> None:
    """SpecPrefillError where the prompt and the longest answer do not fit the models."""
    need = len(ids) + max_tokens
    if need > model.max_prompt_tokens:
        room = f"{len(ids)} tokens and {max_tokens} of an answer"
        raise SpecPrefillError(f"{room} do not fit the main model's context of {model.max_prompt_tokens}")
    context = model.speculator.model.config.max_position_embeddings
    if setting.config is not None and len(ids) > context:
        raise SpecPrefillError(f"{len(ids)} tokens do not fit the speculator's context of {context}")


def selections(
    model: SpecPrefill,
    ids: np.ndarray,
    question: str,
    group: Sequence[Setting],
    seed: int,
    embedder: Embedder | None = None,
) -> list[Selection]:
    """What is read of a prompt in each of several settings that a speculator chooses for, or in one of another kind.

    Args:
        model: the pair.
        ids: int32 [M], the prompt.
        question: see `Sample.question`.
        group: the settings; one, or several with a `config`.
        seed: of what is drawn.
        embedder: of the baseline that embeds sentences.

    Raises:
        SpecPrefillError: the speculator failed.
    """
    configs = [setting.config for setting in group if setting.config is not None]
    if configs:
        return model.select_many(ids, configs)
    first = group[0]
    if first.method == "dense":
        return [Selection.whole(len(ids), Reason.DISABLED)]
    assert first.keep_rate != "auto"  # no baseline has it
    return [choose(first.method, Request(ids, first.keep_rate, question, model.tokenizer, seed, embedder))]


def _answered(sample: Sample, setting: Setting, output: Output, seconds: float, as_text: bool) -> dict[str, Any]:
    text = output.text if as_text else " ".join(map(str, output.token_ids))
    score, notes = sample.grade(text)
    what = output.selection  # not what was given, where reading that failed
    return {
        **named(setting),
        "num_kept": what.num_kept,
        "kept": spans(what.kept_indices),
        "reason": str(what.reason),
        "detail": what.detail,
        **({"divergences": what.divergences} if what.divergences else {}),
        "output": text,
        "num_generated": len(output.token_ids),
        "finish_reason": output.finish_reason,
        "score": score,
        **notes,
        "skipped": None,
        # The choices of a group are made together.
        "timings": {"choose": seconds, **output.timings.as_dict()},
    }


def _unread(setting: Setting, error: SpecPrefillError) -> dict[str, Any]:
    return {**named(setting), "output": None, "score": None, "skipped": str(error), "timings": {}}


def named(setting: Setting) -> dict[str, Any]:
    """Which way of reading a row is of."""
    return {"setting": setting.name, "method": setting.method, "keep_rate": setting.keep_rate}


def spans(indices: np.ndarray) -> list[list[int]]:
    """Ascending indices as runs [start, end)."""
    runs = groupby(enumerate(indices.tolist()), key=lambda pair: pair[1] - pair[0])
    return [[run[0][1], run[-1][1] + 1] for run in (list(pairs) for _, pairs in runs)]


class Progress:
    """Says how far a run is and how long the rest will take, at most every ten seconds."""

    def __init__(
        self, total: int | None, say: Callable[[str], None], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total
        self._say = say
        self._now = now
        self._started = now()
        self._said: float | None = None
        self._finished = self._passed = 0

    def passed(self, rows: int) -> None:
        """So many rows were there already."""
        self._passed += rows

    def finished(self, name: str) -> None:
        """A row was made, of the sample `name`."""
        self._finished += 1
        at, now = self._finished + self._passed, self._now()
        if self._said is not None and now - self._said < 10 and at != self._total:
            return
        self._said = now
        each = (now - self._started) / self._finished
        line = f"{at} rows"
        if self._total is not None:
            left = max(self._total - at, 0) * each
            line = f"{at} of {self._total} rows, about {_duration(left)} left"
        self._say(f"{line}, {each:.2f} s a row ({name})")


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _to_stderr(line: str) -> None:
    if jax.process_index() == 0:
        print(line, file=sys.stderr, flush=True)
