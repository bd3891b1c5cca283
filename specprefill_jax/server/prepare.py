"""From a checked body to the engine's requests: settings, limits, token ids."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from specprefill_jax.config import SamplingParams, SpecPrefillConfig
from specprefill_jax.engine.request import Request
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.server.errors import invalid, refused
from specprefill_jax.server.protocol import GenerationBody, SpecPrefillOptions, StreamOptions
from specprefill_jax.server.service import EngineLike, Service
from specprefill_jax.timing import PhaseClock
from specprefill_jax.tokens import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """Token ids of one prompt and what must stay of them."""

    ids: Sequence[int]
    text: str | None = None
    """What the client sent, where it sent a text."""
    forced_spans: tuple[tuple[int, int], ...] = ()
    generation_tail: int = 0


class Arrival(NamedTuple):
    """A request's arrival."""

    request_id: str
    created: int
    """Seconds since 1970."""
    clock: PhaseClock


@dataclass(frozen=True)
class Prepared:
    """The engine's requests of one HTTP request, `n` a prompt, and what the answer must look like."""

    id: str
    created: int
    model: str
    tokenizer: Tokenizer | None
    prompts: Sequence[Prompt]
    requests: list[Request]
    n: int
    stream: bool
    stream_options: StreamOptions
    map: bool
    """Whether the answer says which chunks were kept."""
    token_ids: bool
    """Whether the answer holds token ids."""
    logprobs: int | None
    echo: bool
    """Whether the answer begins with the prompt."""
    drop: bool
    """Whether the one token that is generated is none that was asked for (max_tokens 0)."""

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of choice `index`."""
        return self.prompts[index // self.n]


def read_config(defaults: SpecPrefillConfig, options: SpecPrefillOptions) -> SpecPrefillConfig:
    """The server's defaults with what the request says instead; raises ApiError 400 for values out of range."""
    try:
        return replace(defaults, **options.settings())
    except SpecPrefillError as error:
        raise refused(error) from None


def read_sampling(body: GenerationBody, max_tokens: int, logprobs: int | None) -> SamplingParams:
    """How tokens are drawn; raises ApiError 400 for values out of range."""
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=body.temperature,
            top_k=max(body.top_k, 0),  # -1 stands for all of them too
            top_p=body.top_p,
            min_p=body.min_p,
            repetition_penalty=body.repetition_penalty,
            seed=None if body.seed is None else body.seed % 2**32,
            stop=body.stop,
            stop_token_ids=body.stop_token_ids,
            ignore_eos=body.ignore_eos,
            logprobs=logprobs,
        )
    except SpecPrefillError as error:
        raise refused(error) from None


def check_ids(ids: Sequence[int], vocab_size: int, name: str) -> None:
    """Raise ApiError 400 unless every id is a token's."""
    if ids and max(ids) >= vocab_size:
        raise invalid(f"{name}: token id {max(ids)} is not allowed: ids must be below {vocab_size}", name)


def need_tokenizer(engine: EngineLike, name: str) -> Tokenizer:
    """The tokenizer; raises ApiError 400 where there is none for the argument `name`."""
    if engine.tokenizer is None:
        raise invalid(f"{name}: the model has no tokenizer; give token ids to /v1/completions", name)
    return engine.tokenizer


def build(
    service: Service,
    engine: EngineLike,
    body: GenerationBody,
    prompts: Sequence[Prompt],
    arrival: Arrival,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    echo: bool = False,
) -> Prepared:
    """`body.n` requests a prompt, with seeds that follow each other; each goes on with its own copy of the clock.

    Raises ApiError 400 for values out of range and for a prompt that can never fit.
    """
    most = engine.config.max_queued_requests
    if len(prompts) * body.n > most:
        raise invalid(f"{len(prompts)} prompts with n={body.n} are more answers than the {most} that may wait", "n")
    if body.best_of not in (None, body.n):
        raise invalid(f"best_of={body.best_of} is not allowed: best_of must be n, which is {body.n}", "best_of")
    base = read_config(service.settings.defaults, body.specprefill)
    drop = max_tokens == 0
    requests: list[Request] = []
    for prompt in prompts:
        config = base
        if prompt.forced_spans and base.mode == "product":
            config = replace(base, forced_spans=(*base.forced_spans, *prompt.forced_spans))
        room = _answer_tokens(engine, len(prompt.ids), 1 if drop else max_tokens)
        sampling = read_sampling(body, room, logprobs)
        ids = np.asarray(prompt.ids, np.int32)
        for index in range(body.n):
            seed = None if sampling.seed is None else (sampling.seed + index) % 2**32
            requests.append(
                Request(
                    request_id=f"{arrival.request_id}-{len(requests)}",
                    prompt=ids,
                    sampling=replace(sampling, seed=seed),
                    config=config,
                    generation_tail=prompt.generation_tail,
                    prompt_logprobs=logprobs if echo else None,
                    draft_tokens=body.specprefill.draft_tokens,
                    clock=copy.deepcopy(arrival.clock),
                )
            )
    return Prepared(
        id=arrival.request_id,
        created=arrival.created,
        model=service.name_of(engine),
        tokenizer=engine.tokenizer,
        prompts=prompts,
        requests=requests,
        n=body.n,
        stream=body.stream,
        stream_options=body.stream_options,
        map=body.specprefill.map,
        token_ids=body.return_token_ids,
        logprobs=logprobs,
        echo=echo,
        drop=drop,
    )


def _answer_tokens(engine: EngineLike, prompt_tokens: int, max_tokens: int | None) -> int:
    """How many tokens may be generated after a prompt of so many."""
    if not prompt_tokens:
        raise invalid("the prompt is empty: it must hold at least one token", "prompt")
    room = engine.max_model_len - prompt_tokens
    needed = 1 if max_tokens is None else max_tokens
    if room < needed:
        raise invalid(
            f"this model's context is {engine.max_model_len} tokens, and {prompt_tokens + needed} were asked for: "
            f"{prompt_tokens} in the prompt and {needed} for the answer",
            "max_tokens" if room > 0 else "prompt",
            "context_length_exceeded",
        )
    if max_tokens is not None:
        return max_tokens
    # What is left of the context, as far as the cache can hold it with a prompt that is read whole; with one that is
    # longer than the cache, and so must be read in part, half of it.
    return max(1, min(room, max(engine.cache_tokens - prompt_tokens, engine.cache_tokens // 2)))
