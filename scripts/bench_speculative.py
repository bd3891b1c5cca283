"""Decoding with proposals of the speculator beside plain decoding: tokens a second, in one run.

    python scripts/bench_speculative.py --out benchmarks/speculative.json

Each setting answers the same prompt, read in the same way; runs alternate, and ratios are taken within a round. The
answers must be equal. The worst case: proposals are random tokens, once the speculator has taken its time over them.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from specprefill_jax import SamplingParams, SpecPrefill, SpecPrefillConfig
from specprefill_jax.evals.prompts import prose
from specprefill_jax.machine import describe
from specprefill_jax.speculative import Drafts


@dataclass
class Args:
    """Time decoding with proposals."""

    main: str = "smollm2-135m-deep4"
    """The main model."""
    speculator: str = "smollm2-135m"
    """The speculator."""
    dtype: str = "float32"
    tokens: int = 512
    """Of the prompt."""
    answer: int = 160
    """Of the answer."""
    draft_tokens: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Proposals a round, at most."""
    rounds: int = 3
    temperature: float = 0.0
    out: Path | None = None
    """JSON file to write."""


def main(args: Args) -> None:
    """Measure, print, write."""
    console = Console()
    model = SpecPrefill.from_pretrained(args.main, args.speculator, args.dtype)
    sampling = SamplingParams(max_tokens=args.answer, temperature=args.temperature, seed=1, ignore_eos=True)
    config = SpecPrefillConfig.paper(0.3)
    ids = model.encode(prose(2 * args.tokens, "bench"))[: args.tokens]
    right, rng = Drafts.propose, np.random.default_rng(0)

    def wrong(drafts: Drafts, said: Any, count: int) -> np.ndarray:
        right(drafts, said, count)  # takes its time all the same
        return rng.integers(0, model.main.config.vocab_size, count).astype(np.int32)

    def speed(draft_tokens: int, propose: Any) -> tuple[float, list[int], int, int]:
        with mock.patch.object(Drafts, "propose", propose):
            out = model.generate(ids, sampling, config, draft_tokens=draft_tokens)
        return (args.answer - 1) / out.timings.decode, out.token_ids, out.accepted_tokens, out.proposed_tokens

    settings = [(k, propose) for propose in (right, wrong) for k in args.draft_tokens]
    for k, propose in ((0, right), *settings):  # compile
        speed(k, propose)
    found: list[list[tuple[float, int, int]]] = [[] for _ in settings]
    plain_rates = []
    for _ in range(args.rounds):
        plain, answer, _, _ = speed(0, right)
        plain_rates.append(plain)
        for i, (k, propose) in enumerate(settings):
            rate, tokens, accepted, proposed = speed(k, propose)
            assert tokens == answer, f"draft_tokens={k}: another answer than plain decoding's"
            found[i].append((rate / plain, accepted, proposed))
    rows = []
    table = Table(
        "proposals",
        "draft tokens",
        "x plain",
        "accepted",
        title=f"plain: {statistics.median(plain_rates):.2f} tokens/s",
    )
    for (k, propose), runs in zip(settings, found, strict=True):
        kind = "speculator's" if propose is right else "wrong"
        ratio = statistics.median(run[0] for run in runs)
        accepted, proposed = runs[-1][1:]
        rows.append({"proposals": kind, "draft_tokens": k, "ratio": ratio, "accepted": accepted, "proposed": proposed})
        table.add_row(kind, str(k), f"{ratio:.2f}", f"{accepted} of {proposed}")
    console.print(table)
    if args.out:
        settings_used = {key: value for key, value in vars(args).items() if key != "out"}
        result = {**describe(), "settings": settings_used, "plain_tokens_per_s": plain_rates, "rows": rows}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(tyro.cli(Args))
