"""Short tasks of lm-eval (generative MMLU, IFEval, GSM8K, ARC-Challenge, GPQA): how they are asked and what counts.

All of it works without lm-eval, which `lm_eval_tasks` and `lm_eval_model` need.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from specprefill_jax.config import SamplingParams
from specprefill_jax.errors import argument_error
from specprefill_jax.tokens import Tokenizer

DEFAULT_TOKENS = 256
"""Most tokens of an answer where neither the task nor the caller says so; lm-eval's own models have the same."""


@dataclass(frozen=True)
class Recipe:
    """How a task is asked."""

    chat: bool = True
    """Through the chat template, examples as turns of their own."""
    num_fewshot: int | None = None
    """Examples before the question; None: as many as the task says."""
    max_tokens: int | None = None
    """Most tokens of an answer; None: what the task says."""
    filter: str | None = None
    """Of the ways in which the task looks for the answer in what the model wrote, the one whose metric is the score;
    None: its first."""


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "mmlu_generative": Recipe(chat=False, num_fewshot=0, max_tokens=4),
        "arc_challenge_llama": Recipe(num_fewshot=0),
        "gsm8k_cot_llama": Recipe(num_fewshot=8),
        # Its strict filter wants a phrase that no example shows.
        "gpqa_main_generative_n_shot": Recipe(num_fewshot=8, filter="flexible-extract"),
        "leaderboard_ifeval": Recipe(num_fewshot=0),
    }
)
"""The tasks of arXiv 2502.02789 by their names in lm-eval 0.4.13, asked as the paper asked them."""

_SAME = {"max_gen_toks": "max_tokens", "max_new_tokens": "max_tokens", "until": "stop"}
_PASSED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")


def sampling_of(kwargs: Mapping[str, Any], max_tokens: int | None = None) -> SamplingParams:
    """lm-eval's generation arguments as ours.

    Args:
        kwargs: of a request: `until` (one or several strings), `max_gen_toks`, `do_sample`, `temperature` and the like.
            Without `do_sample` a temperature above 0 samples, as it does in lm-eval's own models.
        max_tokens: in place of the request's.

    Raises:
        ArgumentError: an argument that is not known here, or has a value that is not allowed.
    """
    given: dict[str, Any] = {"max_tokens": DEFAULT_TOKENS}
    sample = kwargs.get("do_sample")
    for name, value in kwargs.items():
        if name in _SAME:
            given[_SAME[name]] = value
        elif name in _PASSED:
            given[name] = value
        elif name != "do_sample":
            allowed = "one of " + ", ".join((*_SAME, "do_sample", *_PASSED))
            raise argument_error("generation argument", name, allowed)
    if sample is False:
        given["temperature"] = 0.0
    elif sample and "temperature" not in given:
        given["temperature"] = 1.0
    stop = given.pop("stop", None) or ()
    given["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    return SamplingParams(**given)


def render_history(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool) -> str:
    """The prompt of a chat, as lm-eval asks for it.

    Args:
        tokenizer: with a chat template.
        messages: the turns; the last may be the beginning of the answer.
        add_generation_prompt: False where it is: the answer then goes on, without a mark of a turn's end.

    Raises what `Tokenizer.render_chat` raises.
    """
    *before, last = messages
    if not add_generation_prompt and before and last["role"] == "assistant":
        return tokenizer.render_chat(before) + str(last["content"])
    return tokenizer.render_chat(list(messages), add_generation_prompt=add_generation_prompt)


def prompt_tokens(tokenizer: Tokenizer, text: str, *, chat: bool) -> list[int]:
    """Token ids of a rendered prompt; nothing is added to a chat's, nor a second BOS to a text that begins with it."""
    bos = tokenizer.special_tokens.get("bos_token")
    return tokenizer.encode(text, add_special_tokens=not chat and not (bos and text.startswith(bos)))


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of one answer that are a number, or a list of numbers (their mean)."""
    found = {}
    for name, value in metrics.items():
        values = value if isinstance(value, list | tuple) else [value]
        if values and all(isinstance(one, bool | int | float | np.number | np.bool_) for one in values):
            found[name] = float(np.mean([float(one) for one in values]))
    return found


def score_of(metrics: Mapping[str, Mapping[str, float]], wanted: str | None) -> float:
    """The score of an answer.

    Args:
        metrics: numbers by filter, then by metric, both in the task's order.
        wanted: a filter, whose first metric it is; None: the first filter.

    Raises:
        ArgumentError: no such filter, or it has no metric that is a number.
    """
    name = next(iter(metrics), None) if wanted is None else wanted
    if name is None or not metrics.get(name):
        allowed = "a filter with a metric that is a number: " + ", ".join(key for key, some in metrics.items() if some)
        raise argument_error("filter", name, allowed)
    return next(iter(metrics[name].values()))
