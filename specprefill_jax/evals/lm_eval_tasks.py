"""lm-eval's tasks as samples of ours: it makes the prompts and scores the answers, the runner asks and keeps rows.

A row's `metrics` has every number that lm-eval computes of the answer, under lm-eval's own names.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from specprefill_jax.errors import SpecPrefillError, argument_error
from specprefill_jax.evals.extras import extra
from specprefill_jax.evals.samples import Graded, Sample
from specprefill_jax.evals.short_tasks import (
    RECIPES,
    Recipe,
    numbers_of,
    prompt_tokens,
    render_history,
    sampling_of,
    score_of,
)
from specprefill_jax.tokens import Tokenizer

# What lm-eval seeds with, unless told otherwise: `random`, numpy, and the draw of examples.
_SEEDS = (0, 1234, 1234)


@dataclass(frozen=True)
class Asked:
    """A task with the requests that lm-eval made of it."""

    name: str
    """As it was asked for; a group's tasks share it."""
    task: Any
    recipe: Recipe
    shots: int


def load_tasks(
    names: Sequence[str],
    tokenizer: Tokenizer,
    *,
    include_path: Path | None = None,
    limit: int | None = None,
    change: Mapping[str, Any] | None = None,
) -> list[Asked]:
    """Load tasks and make their requests, as lm-eval does when it is run with one of them.

    Args:
        names: lm-eval's names of tasks and groups.
        tokenizer: the main model's.
        include_path: a folder with further task files (.yaml).
        limit: samples of each task; of a group, of each of its tasks.
        change: fields of `Recipe` in place of a task's own.

    Raises:
        SpecPrefillError: lm-eval is missing, or does not know a task or cannot load its data.
        ArgumentError: a task that is not generative, runs code, looks at images, or is asked more than once.
    """
    tasks = extra("lm_eval.tasks", "lm-eval")
    manager = tasks.TaskManager(include_path=None if include_path is None else str(include_path))
    found: list[Asked] = []
    for name in dict.fromkeys(names):
        recipe = replace(RECIPES.get(name, Recipe()), **(change or {}))
        random.seed(_SEEDS[0])
        np.random.seed(_SEEDS[1])
        try:
            loaded = manager.load([name])["tasks"]
            for leaf, task in loaded.items():
                found.append(Asked(name, task, recipe, _prepare(leaf, task, recipe)))
                task.build_all_requests(
                    limit=limit,
                    apply_chat_template=recipe.chat,
                    fewshot_as_multiturn=recipe.chat,
                    chat_template=partial(_render, tokenizer) if recipe.chat else None,
                )
        except SpecPrefillError:
            raise
        except Exception as error:  # of datasets, of the hub, of YAML, of a task's own code
            text = " ".join(str(error).split())[:500]
            raise SpecPrefillError(f"lm-eval cannot load the task {name}: {type(error).__name__}: {text}") from error
    return found


def lm_eval_samples(asked: Sequence[Asked], tokenizer: Tokenizer) -> Iterator[Sample]:
    """Yield the samples of tasks from `load_tasks`, in lm-eval's order.

    Raises:
        ArgumentError: generation arguments that are not known here, or that sample.
    """
    for one in asked:
        leaf = one.task.config.task
        for request in one.task.instances:
            text, kwargs = request.args
            sampling = sampling_of(kwargs, one.recipe.max_tokens)
            if sampling.temperature:
                raise argument_error(f"{leaf}: temperature", sampling.temperature, "0: answers are greedy")
            question = one.task.doc_to_text(request.doc)
            yield Sample(
                benchmark="short",
                task=one.name,
                key=str(request.doc_id) if leaf == one.name else f"{leaf}/{request.doc_id}",
                input=tuple(prompt_tokens(tokenizer, text, chat=one.recipe.chat)),
                outputs=(),
                score=partial(_graded, one, request),
                max_tokens=sampling.max_tokens,
                bucket=f"{one.shots}-shot",
                stop=sampling.stop,
                question=question if isinstance(question, str) else "",
                notes={"wording": "lm-eval's", "subtask": leaf},
            )


def _render(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
    return render_history(tokenizer, messages, add_generation_prompt)


def _prepare(leaf: str, task: Any, recipe: Recipe) -> int:
    """Set the number of examples, which is returned, and the seed that draws them."""
    if task.OUTPUT_TYPE != "generate_until":
        allowed = "generative: log-likelihoods need every token of a prompt, and dropped ones have none"
        raise argument_error(f"{leaf}: output_type", task.OUTPUT_TYPE, allowed)
    if getattr(task, "UNSAFE_CODE", False):
        raise argument_error("tasks", leaf, "one that runs no code (scripts/eval_code.py has HumanEval and MBPP)")
    if getattr(task, "MULTIMODAL", False):
        raise argument_error("tasks", leaf, "one of text alone")
    if task.config.repeats not in (None, 1):
        raise argument_error(f"{leaf}: repeats", task.config.repeats, "1: answers are greedy")
    shots = task.config.num_fewshot
    # As lm-eval has it: 0 in a task's file is not to be changed.
    if recipe.num_fewshot is not None and shots != 0:
        shots = recipe.num_fewshot
    task.set_config(key="num_fewshot", value=shots or 0)
    task.set_fewshot_seed(seed=_SEEDS[2])
    return int(shots or 0)


def _graded(asked: Asked, request: Any, answer: str) -> Graded:
    """What lm-eval makes of one answer."""
    one = replace(request, resps=[answer], filtered_resps={})
    found: dict[str, dict[str, float]] = {}
    for ensemble in asked.task._filters:
        ensemble.apply([one])
        metrics = asked.task.process_results(request.doc, [one.filtered_resps[ensemble.name]])
        found[ensemble.name] = numbers_of(metrics)
    notes = {f"{metric},{name}": value for name, some in found.items() for metric, value in some.items()}
    return Graded(score_of(found, asked.recipe.filter), {"metrics": notes})
