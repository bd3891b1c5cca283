"""Every program that a runner will ever need, compiled before there is a request."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from specprefill_jax.engine.runner import Batch, Chosen, Runner
from specprefill_jax.models.loaded import Step
from specprefill_jax.planning import Plan, Reason, num_chunks
from specprefill_jax.sampling import SamplingArrays
from specprefill_jax.speculator import LookAhead


def warm_up(
    runner: Runner,
    look_aheads: Sequence[int],
    pool_width: int,
    chunk_size: int,
    report: Callable[[int, int], None],
) -> None:
    """Compile every program, doing little of the work; the caches are empty afterwards.

    Args:
        runner: whose programs.
        look_aheads: queries that prompts may ask for.
        pool_width, chunk_size: of all prompts.
        report: called with (programs compiled, in all).
    """
    jobs = list(_jobs(runner, look_aheads, pool_width, chunk_size))
    with runner.main.one_layer(), runner.draft.one_layer():
        for done, job in enumerate(jobs):
            report(done, len(jobs))
            jax.block_until_ready(job())
    report(len(jobs), len(jobs))
    runner.reset()


def _jobs(runner: Runner, look_aheads: Sequence[int], pool_width: int, chunk_size: int) -> Iterator[Callable[[], Any]]:
    steps: list[Step] = []
    hidden: list[jax.Array] = []

    def speculate(length: int) -> Step:
        before = steps[0] if steps else None
        steps[:] = [runner.speculate(np.zeros(length, np.int32), 0, (), length, before)]
        return steps[0]

    def prefill(length: int) -> jax.Array:
        hidden[:] = [runner.prefill(np.zeros(length, np.int32), np.zeros(length, np.int32), 0, ())]
        return hidden[0]

    for length in runner.lengths:
        yield partial(prefill, length)
        yield partial(speculate, length)
    if runner.window:  # a piece behind another, however few lengths there are
        yield partial(speculate, runner.lengths[0])
    for length in runner.lengths_with_logprobs:
        zeros = np.zeros(length, np.int32)
        yield partial(runner.prefill_with_logprobs, zeros, zeros, 0, ())
    yield lambda: runner.choose(hidden[0], idle_batch(1, runner.max_running))
    for rows in runner.rows:
        batch, at = idle_batch(rows, runner.max_running), np.zeros(rows, np.int32)
        yield partial(runner.decode, batch, at, at, [()] * rows)
        for count in runner.proposals:
            yield partial(_verify, runner, batch, count, False)
            yield partial(_verify, runner, batch, count, True)
    for size in runner.sizes:
        yield partial(runner.fill_seen, runner.max_running, np.zeros(size, np.int32))
    for count in dict.fromkeys(look_aheads):
        found: list[LookAhead] = []

        def look_ahead(rows: int, count: int = count, found: list[LookAhead] = found) -> LookAhead:
            ahead = runner.look_ahead(steps * rows, [0] * rows, [()] * rows, [()] * rows, count)
            found[:] = [ahead]
            return LookAhead(ahead.queries, None, ahead.tokens, ahead.num_queries, ahead.hidden)

        def score(size: int, found: list[LookAhead] = found) -> Any:
            chunks = num_chunks(size, chunk_size)
            plan = Plan(True, Reason.ENGAGED, size, chunk_size, chunks, 1, (), size, size, least_chunks=1)
            return runner.score(found[0], 0, np.zeros(size, np.int32), (), plan, pool_width)

        for rows in runner.look_ahead_rows:
            yield partial(look_ahead, rows)
            yield partial(score, runner.sizes[0])
        for size in runner.sizes[1:]:
            yield partial(score, size)


def _verify(runner: Runner, batch: Batch, count: int, drafted: bool) -> Chosen:
    """Check `count` proposals a row: the speculator's, or the host's, which are those of a look-ahead."""
    at, tables = np.zeros(len(batch.rows), np.int32), [()] * len(batch.rows)
    if drafted:
        proposals = runner.propose(batch.rows, at - np.int32(1), at, tables, count)
    else:
        proposals = runner.main.put(np.zeros((len(at), count), np.int32))
    return runner.verify(batch, at, at, tables, proposals, at)


def idle_batch(rows: int, nobody: int) -> Batch:
    """A batch of padding: greedy rows of the state's row `nobody`."""
    ones, zeros, whole = np.ones(rows, np.float32), np.zeros(rows, np.float32), np.zeros(rows, np.int32)
    settings = SamplingArrays._make((zeros, whole, ones, zeros, ones, np.zeros((rows, 2), np.uint32)))
    return Batch(np.full(rows, nobody, np.int32), settings, whole, np.full(rows, -1, np.int32))
