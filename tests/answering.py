"""A stand-in for a pair of models that answers at once, for tests of what runs around it."""

from types import SimpleNamespace

import numpy as np

from specprefill_jax import Output, Timings
from specprefill_jax.errors import SpecPrefillError
from specprefill_jax.evals.samples import Sample
from specprefill_jax.planning import plan
from specprefill_jax.selection import Selection
from specprefill_jax.tokens import Tokenizer


class Answering:
    """Answers with the number of tokens that were read; counts what it was asked."""

    max_prompt_tokens = 400

    def __init__(self, fails: frozenset[int] = frozenset(), tokenizer: Tokenizer | None = None):
        self.tokenizer = tokenizer
        self.speculator = SimpleNamespace(model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=300)))
        self.speculated = self.answered = 0
        self.fails = fails
        self.asked = []

    def select_many(self, ids, configs):
        self.speculated += 1
        if len(ids) in self.fails:
            raise SpecPrefillError("the speculator failed: on purpose")
        plans = [plan(len(ids), config) for config in configs]
        return [Selection.of_chunks(ids, range(p.kept_chunks), chunk_size=p.chunk_size) for p in plans]

    def generate(self, ids, sampling, config, *, selection):
        self.answered += 1
        kept = selection.num_kept
        self.asked.append((ids.tolist(), sampling))
        text = "" if self.tokenizer is None else f"{kept} of {len(ids)}"
        return Output(text, [kept, len(ids)][: sampling.max_tokens], "length", selection, Timings(decode=0.5), None)


def samples_of(count: int, length: int = 100) -> list[Sample]:
    """Samples of token ids; a dense answer is right."""
    return [
        Sample(
            benchmark="made",
            task=f"task-{index % 2}",
            key=str(index),
            input=tuple(np.random.default_rng(index).integers(5, 512, length + index).tolist()),
            outputs=(str(length + index),),
            score=lambda answer, right=str(length + index): float(answer.split()[0] == right),
            max_tokens=2,
            category="even" if index % 2 == 0 else "odd",
            bucket=str(length),
            length=length,
            notes={"wording": "own"},
        )
        for index in range(count)
    ]
