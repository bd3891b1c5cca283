"""Time to first token, dense and sparse, beside the ceiling that the cost model computes from this machine's own rates.

    python scripts/bench_ttft.py --out benchmarks/ttft.json

The default main model is smollm2-135m-deep4: SmolLM2-135M with three zero-output blocks after every block, the same
function at four times the compute; a stand-in for a larger main model. Dense and sparse runs alternate.
"""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from specprefill_jax import Output, SamplingParams, SpecPrefill, SpecPrefillConfig
from specprefill_jax.costs import Machine, predict
from specprefill_jax.machine import describe, measure, peak_memory


@dataclass
class Args:
    """Time TTFT over prompt lengths and keep rates."""

    main: str = "smollm2-135m-deep4"
    speculator: str = "smollm2-135m"
    dtype: str = "float32"
    lengths: tuple[int, ...] = (2048, 4096)
    """Prompt lengths in tokens."""
    keep_rates: tuple[float, ...] = (0.1, 0.2, 0.3)
    look_ahead: int = 8
    card: str | None = None
    """Read in product mode with this pair card (a file, or auto), in place of paper mode with the look-ahead."""
    decode_tokens: int = 8
    """Tokens decoded after the first, to compare decoding after sparse and dense prefill."""
    rounds: int = 3
    """Each reads the prompt whole once, and once at every keep rate."""
    out: Path | None = None
    """JSON file to write."""


def phases(output: Output) -> dict[str, Any]:
    """Seconds by phase, and a decoded token's."""
    timings = output.timings.as_dict()
    timings.pop("tokens")
    return {**timings, "decode_per_token": output.timings.decode / max(1, len(output.token_ids) - 1)}


def config_at(args: Args, model: SpecPrefill, rate: float) -> SpecPrefillConfig:
    """How a prompt is read at a keep rate."""
    if args.card is None:
        return SpecPrefillConfig.paper(rate, args.look_ahead)
    return model.selector.settle(SpecPrefillConfig(rate, min_predicted_gain=0.0))


def main(args: Args) -> None:
    """Measure, print a table, write JSON."""
    console = Console(stderr=True)
    model = SpecPrefill.from_pretrained(args.main, args.speculator, args.dtype, card=args.card)
    sampling = SamplingParams(max_tokens=1 + args.decode_tokens, ignore_eos=True)
    dense = SpecPrefillConfig(enabled=False)
    rows = []
    for length in args.lengths:
        ids = np.random.default_rng(length).integers(0, model.main.config.vocab_size, length).tolist()
        configs = [config_at(args, model, rate) for rate in args.keep_rates]
        for config in configs:
            model.warm_up(length, config, sampling)
        runs: list[list[tuple[dict, dict, Machine, int]]] = [[] for _ in configs]
        for _ in range(args.rounds):
            machine = measure(1)
            whole = model.generate(ids, sampling, dense)
            for i, config in enumerate(configs):
                sparse = model.generate(ids, sampling, config)
                runs[i].append((phases(whole), phases(sparse), machine, sparse.selection.num_kept))
                console.log(f"{length} {config.keep_rate}: {whole.timings.ttft:.2f} / {sparse.timings.ttft:.2f} s")
        for config, done in zip(configs, runs, strict=True):
            rows.append(row(model, length, config, done))
            console.log({key: value for key, value in rows[-1].items() if not isinstance(value, list)})
    result = {**describe(), "main": args.main, "speculator": args.speculator, "dtype": args.dtype, "card": args.card}
    result["ttft"] = rows
    result["peak_memory_bytes"] = peak_memory()
    table = Table("tokens", "keep", "kept", "dense s", "sparse s", "speed-up", "ceiling", "share", "score/speculate")
    for r in rows:
        numbers = [r["dense_ttft"], r["sparse_ttft"], r["speedup"], r["ceiling"], r["share_of_ceiling"]]
        cells = [*(f"{x:.2f}" for x in numbers), f"{r['score_share']:.3f}"]
        table.add_row(str(r["tokens"]), str(r["keep_rate"]), str(r["kept"]), *cells)
    Console().print(table)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def row(model: SpecPrefill, length: int, config: SpecPrefillConfig, runs: list) -> dict:
    """Medians of one setting, each ratio taken within its round."""

    def ceiling(machine: Machine, kept: int) -> float:
        main, draft = model.main, model.speculator.model
        return predict(
            main.config,
            draft.config,
            length,
            kept,
            config.look_ahead or model.default_look_ahead,
            machine,
            query_window=config.query_window,
            main_bytes=main.dtype.itemsize,
            speculator_bytes=draft.dtype.itemsize,
        ).gain

    speedups = [whole["ttft"] / sparse["ttft"] for whole, sparse, _, _ in runs]
    ceilings = [ceiling(machine, kept) for _, _, machine, kept in runs]
    return {
        "tokens": length,
        "keep_rate": config.keep_rate,
        "kept": runs[0][3],
        "dense_ttft": statistics.median(whole["ttft"] for whole, _, _, _ in runs),
        "sparse_ttft": statistics.median(sparse["ttft"] for _, sparse, _, _ in runs),
        "speedup": statistics.median(speedups),
        "ceiling": statistics.median(ceilings),
        "share_of_ceiling": statistics.median(s / c for s, c in zip(speedups, ceilings, strict=True)),
        "score_share": statistics.median(sparse["score"] / sparse["speculate"] for _, sparse, _, _ in runs),
        "decode_ratio": statistics.median(s["decode_per_token"] / w["decode_per_token"] for w, s, _, _ in runs),
        "rounds": [
            {"dense": whole, "sparse": sparse, "flops_per_s": m.flops_per_s, "bytes_per_s": m.bytes_per_s}
            for whole, sparse, m, _ in runs
        ],
    }


if __name__ == "__main__":
    main(tyro.cli(Args))
