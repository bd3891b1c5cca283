"""Rows of RULER's tasks as samples for the runner."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from types import MappingProxyType

from specprefill_jax.errors import argument_error
from specprefill_jax.evals.ruler.generation import Row, generate, plain, prompting
from specprefill_jax.evals.ruler.sources import Sources
from specprefill_jax.evals.ruler.tasks import TASKS
from specprefill_jax.evals.samples import Sample
from specprefill_jax.tokens import Tokenizer

CATEGORIES = MappingProxyType(
    {
        "niah": "retrieval",
        "vt": "multi-hop tracing",
        "cwe": "aggregation",
        "fwe": "aggregation",
        "qa": "question answering",
    }
)
"""The kinds of tasks that RULER's paper (arXiv 2404.06654, section 3) tells apart, by the first word of their names."""


def check_tasks(tasks: Sequence[str], sources: Sources) -> None:
    """Raise ArgumentError for a task that is not known or whose texts are not there, before anything is made."""
    for task in tasks:
        if task not in TASKS:
            raise argument_error("tasks", task, f"one or more of {', '.join(TASKS)}")
        TASKS[task].maker(1, sources)


def ruler_samples(
    tasks: Sequence[str],
    lengths: Sequence[int],
    samples: int,
    *,
    tokenizer: Tokenizer | None,
    seed: int = 42,
    sources: Sources | None = None,
) -> Iterator[Sample]:
    """`samples` samples of each task at each length, the shortest first; see `generate` for arguments and errors.

    Every task and length is looked at before the first sample is made.

    Raises:
        ArgumentError: as `generate`, or there is no tokenizer, in whose tokens lengths are meant.
    """
    if tokenizer is None:
        raise argument_error("main", None, "a model with a tokenizer: lengths are in its tokens")
    sources = sources or Sources()
    count_tokens, wrap = prompting(tokenizer)
    made = partial(generate, samples=samples, seed=seed, count_tokens=count_tokens, wrap=wrap, sources=sources)
    rows = [made(task, length=length) for length, task in product(sorted(lengths), tasks)]
    return (_sample(row, chat=tokenizer.has_chat_template) for some in rows for row in some)


def _sample(row: Row, *, chat: bool) -> Sample:
    task = TASKS[row.task]
    return Sample(
        benchmark="ruler",
        task=row.task,
        key=f"{row.seed}-{row.index}",
        input=row.input if chat else plain(row.input),
        outputs=row.outputs,
        score=lambda answer: task.score(answer, row.outputs),
        max_tokens=task.answer_tokens,
        category=CATEGORIES[row.task.split("_")[0]],
        bucket=str(row.max_length),
        length=row.length,
        chat=chat,
        answer_prefix=row.answer_prefix,
        question=row.question,
        notes={"made_from": dict(row.made_from), "wording": row.wording},
    )
