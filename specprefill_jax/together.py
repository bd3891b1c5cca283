"""One prompt read in several ways, and the answers decoded in one batch.

A step of decoding takes hardly longer for a few rows than for one: as long as reading the model's weights takes. For
evaluations, which compare answers to one prompt; what serves different prompts together is `engine`.
"""

from collections.abc import Sequence
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np

from specprefill_jax.cache import capacity_for, put_row
from specprefill_jax.config import SamplingParams
from specprefill_jax.decode import Decoded
from specprefill_jax.errors import argument_error
from specprefill_jax.output import Output
from specprefill_jax.pipeline import SpecPrefill
from specprefill_jax.prefill import padded
from specprefill_jax.prompt import Prompt
from specprefill_jax.sampling import sampling_arrays
from specprefill_jax.selection import Selection
from specprefill_jax.timing import PhaseClock


def answer_together(
    model: SpecPrefill, prompt: Prompt, selections: Sequence[Selection], sampling: SamplingParams, rows: int
) -> list[Output]:
    """Greedy answers to a prompt, one for each selection of it, in their order; see `SpecPrefill.generate`.

    An answer does not depend on the others, but on `rows` in so far as another size of batch rounds otherwise.

    Args:
        model: the pair.
        prompt: text, chat messages, or token ids.
        selections: at most `rows`.
        sampling: greedy, without repetition penalty and log-probabilities.
        rows: size of the batch; there is a KV cache for each row, as long as the longest.

    Returns:
        The answers. Decoding took each as long as it took the longest.

    Raises:
        ArgumentError: what `generate` refuses, another kind of sampling, or more selections than rows.
        SpecPrefillError: a selection by a speculator that failed.
    """
    if not 1 <= len(selections) <= rows:
        raise argument_error("selections", len(selections), f"1 to {rows}, as many as there are rows")
    if sampling.temperature or sampling.repetition_penalty != 1.0 or sampling.logprobs is not None:
        raise argument_error("sampling", sampling, "greedy, without repetition penalty and log-probabilities")
    ids = model.encode(prompt)
    model.check_request(ids, sampling, selections)
    for selection in selections:
        selection.check()
    main = model.main
    limit = min(sampling.max_tokens, model.max_prompt_tokens - len(ids))
    most = max(selection.plan.max_kept_tokens for selection in selections)
    cache = main.new_cache(rows, capacity_for(max(padded(most, model.prefill_chunk), most + limit)))
    states: list[tuple[jax.Array, jax.Array]] = []
    clocks: list[PhaseClock] = []
    for index, selection in enumerate(selections):
        clock = PhaseClock("main_prefill")
        step, filled = model.read(ids, selection, limit)
        jax.block_until_ready(step.hidden)
        clock.count("main_prefill", selection.num_kept)
        clock.stop()
        cache = put_row(cache, step.cache, main.put(np.array(index, np.int32)))
        states.append((step.hidden, filled))
        del step
        clocks.append(clock)
    states += states[:1] * (rows - len(selections))  # rows nobody asked for: of no meaning, but finite
    hidden, slots = (jnp.concatenate(arrays) for arrays in zip(*states, strict=True))
    positions = main.put(np.full((rows,), len(ids), np.int32))
    greedy = sampling_arrays([0.0] * rows, seed=[0] * rows, put=main.put)
    answers = [model.answer(sampling) for _ in selections]
    for clock in clocks:
        clock.phase("first_token", tokens=1)
    first = model.decoder.first(hidden, positions, slots, greedy, None, None)
    later = model.decoder.ahead(cache, first, greedy, 1, limit, None)
    del cache  # consumed by the first step
    for now in chain([first], later):
        tokens = np.asarray(now.token)[: len(answers)].tolist()
        for answer, clock, token in zip(answers, clocks, tokens, strict=True):
            if not answer.stopped:
                clock.phase("decode", tokens=min(len(answer.token_ids), 1))
                answer.push(Decoded(token, None))
        if all(answer.stopped for answer in answers):
            break
    for answer in answers:
        answer.close()
    return [
        answer.output(selection, clock.stop())
        for answer, selection, clock in zip(answers, selections, clocks, strict=True)
    ]
