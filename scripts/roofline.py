"""Predict times to first token on eight H100s and eight H200s, dense and sparse, beside what the paper reports.

    make roofline

Nothing runs on a device and nothing was measured on one: the cost model of `specprefill_jax.costs`, which also decides
whether a prompt is worth reading sparsely, counts FLOPs, bytes and bytes between devices, and divides them by the rates
of data sheets times efficiencies that are printed beside the result. Prompts come in batches, as the paper timed them.
"""

import json
import sys
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from specprefill_jax.config import check_integer, check_real
from specprefill_jax.costs import (
    H100,
    H200,
    Device,
    Efficiency,
    Machine,
    Prediction,
    flop_ceiling,
    key_bytes,
    layer_parameters,
    predict,
    weight_bytes,
)
from specprefill_jax.errors import ArgumentError, argument_error
from specprefill_jax.machine import describe
from specprefill_jax.models.config import LlamaConfig
from specprefill_jax.models.published import LLAMAS
from specprefill_jax.planning import budget, num_chunks
from specprefill_jax.prefill import DEFAULT_CHUNK
from specprefill_jax.view.plot import BOTTOM, COLOURS, LEFT, RIGHT, TOP, page

KIND = "Predicted from FLOPs, bytes and data sheets; not measured on any such machine."
KEPT_TOGETHER = 32
BYTES = 2


def parameters(model: LlamaConfig) -> int:
    """All of a model's, norms included."""
    tables = (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size
    return model.num_layers * (layer_parameters(model) + 2 * model.hidden_size) + model.hidden_size + tables


@dataclass(frozen=True)
class Pair:
    """A main model and its speculator, both bfloat16 but for the float8 layers."""

    name: str
    main: LlamaConfig
    speculator: LlamaConfig
    fp8_layers: int = 0


PAIRS = (
    # Llama-3.1-405B-FP8 as published: float8 in the feed-forward matrices of all but the first and the last layer.
    Pair("405B-FP8 + 8B", LLAMAS["Llama-3.1-405B"], LLAMAS["Llama-3.1-8B"], fp8_layers=124),
    Pair("70B + 8B", LLAMAS["Llama-3.1-70B"], LLAMAS["Llama-3.1-8B"]),
    Pair("8B + 1B", LLAMAS["Llama-3.1-8B"], LLAMAS["Llama-3.2-1B"]),
)

SOURCES = {
    "matmul": "assumed; whole training runs reach 0.4 on H100s (arXiv 2407.21783), large products alone more",
    "fp8_matmul": "assumed, as bfloat16; rounding activations to float8 is not counted",
    "attention": "FlashAttention-2 on an H100, by arXiv 2407.08608 (whose own is 0.75)",
    "memory": "assumed",
    "link": "assumed, for all-reduces of megabytes within a node",
}

PAPER: tuple[dict[str, Any], ...] = (
    {"pair": "405B-FP8 + 8B", "figure": "TTFT", "keep_rate": 0.1, "speedup": 7.66, "on": "length not in the abstract"},
    {"pair": "405B-FP8 + 8B", "figure": "max QPS", "keep_rate": 0.1, "speedup": 7.0, "on": "LongBench multi-doc QA"},
    {"pair": "405B-FP8 + 8B", "figure": "max QPS", "keep_rate": 0.3, "speedup": 5.0, "on": "LongBench few-shot"},
    {"pair": "70B + 8B", "figure": "max QPS", "keep_rate": 0.1, "speedup": 4.6, "on": "LongBench multi-doc QA"},
    {"pair": "70B + 8B", "figure": "max QPS", "keep_rate": 0.3, "speedup": 2.1, "on": "LongBench few-shot"},
    {"pair": "70B + 8B", "figure": "max QPS", "keep_rate": 0.5, "speedup": 1.6, "on": "LongBench summarisation"},
)
"""arXiv 2502.02789, abstract and figure 2: 8 x H200, vLLM 0.6.3.post1, eager, whole prefills. TTFT is the time until a
whole batch has its first tokens; a maximum rate of requests under a time limit is another quantity than TTFT."""


@dataclass
class Args:
    """Predict, print, and write JSON and a plot where told."""

    lengths: tuple[int, ...] = (4096, 8192, 16384, 32768, 65536, 131072)
    """Prompt lengths in tokens."""
    tokens: int = 524288
    """Tokens of a batch: so many divided by the length are its prompts, at least one."""
    keep_rates: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7)
    devices: int = 8
    look_ahead: int = 8
    chunk: int = DEFAULT_CHUNK
    """Tokens of each prompt that a pass reads."""
    efficiency: Efficiency = field(default_factory=Efficiency)
    """Shares of the data sheets' rates that are reached."""
    out: Path | None = None
    """JSON file to write."""
    plot: Path | None = None
    """SVG file to write: speed-up over keep rate."""


def kept_tokens(tokens: int, keep_rate: float) -> int:
    """Tokens of the kept chunks of 32, the last of a prompt counted whole."""
    return min(tokens, KEPT_TOGETHER * budget(num_chunks(tokens, KEPT_TOGETHER), keep_rate))


def held_bytes(model: LlamaConfig, cached_tokens: int, fp8_layers: int = 0) -> float:
    """Bytes of a model's weights, embedding included, and of its cache."""
    embedding = 0 if model.tie_word_embeddings else model.vocab_size * model.hidden_size
    return weight_bytes(model, BYTES, fp8_layers) + BYTES * embedding + 2 * key_bytes(model, cached_tokens, BYTES)


def foresee(args: Args, pair: Pair, machine: Machine, tokens: int, keep_rate: float, **changes: Any) -> Prediction:
    """One batch of prompts of that length."""
    settings = {
        "main_bytes": BYTES,
        "speculator_bytes": BYTES,
        "main_fp8_layers": pair.fp8_layers,
        "batch": max(1, args.tokens // tokens),
        "chunk": args.chunk,
        "look_ahead": args.look_ahead,
        **changes,
    }
    return predict(pair.main, pair.speculator, tokens, kept_tokens(tokens, keep_rate), machine=machine, **settings)


def row(args: Args, pair: Pair, device: Device, tokens: int, keep_rate: float) -> dict[str, Any]:
    """What is predicted of one setting; times in seconds, sizes in bytes over all devices."""
    machine = device.machine(args.devices, args.efficiency)
    found = foresee(args, pair, machine, tokens, keep_rate)
    silent = foresee(args, pair, replace(machine, link_bytes_per_s=None), tokens, keep_rate)
    kept, batch = kept_tokens(tokens, keep_rate), max(1, args.tokens // tokens)
    both = held_bytes(pair.main, batch * kept, pair.fp8_layers) + held_bytes(pair.speculator, batch * tokens)
    return {
        "pair": pair.name,
        "device": device.name,
        "devices": args.devices,
        "batch": batch,
        "tokens": tokens,
        "keep_rate": keep_rate,
        "kept": kept,
        "dense_ttft": found.dense,
        "sparse_ttft": found.total,
        "speculate": found.speculate,
        "look_ahead": found.look_ahead,
        "score": found.score,
        "main_prefill": found.sparse,
        "dense_communication": found.dense - silent.dense,
        "sparse_communication": found.total - silent.total,
        "speedup": found.gain,
        "ideal": tokens / kept,
        "flop_ceiling": flop_ceiling(pair.main, pair.speculator, tokens, kept),
        "dense_bytes": held_bytes(pair.main, batch * tokens, pair.fp8_layers),
        "sparse_bytes": both,
        "memory_bytes": args.devices * device.memory_bytes,
    }


def variants(args: Args, tokens: int, keep_rate: float) -> list[dict[str, Any]]:
    """The paper's pair on H200s: how the speed-up moves when one assumption does."""
    machine = H200.machine(args.devices, args.efficiency)
    flops = args.devices * H200.flops_per_s
    cases: list[tuple[str, Machine, dict[str, Any]]] = [
        ("as assumed", machine, {}),
        ("devices add up in float32", machine, {"sum_bytes": 4.0}),
        ("communication takes no time", replace(machine, link_bytes_per_s=None), {}),
        ("float8 no faster than bfloat16", replace(machine, fp8_flops_per_s=machine.flops_per_s), {}),
        ("attention at 0.75 of the peak", replace(machine, attention_flops_per_s=0.75 * flops), {}),
        ("no look-ahead", machine, {"look_ahead": 1}),
    ]
    found = []
    for name, changed, changes in cases:
        prediction = foresee(args, PAIRS[0], changed, tokens, keep_rate, **changes)
        times = {"dense_ttft": prediction.dense, "sparse_ttft": prediction.total, "speedup": prediction.gain}
        found.append({"change": name, **times})
    return found


def main(args: Args) -> None:
    """Predict everything; print tables; write what was asked for."""
    check(args)
    rows = [
        row(args, pair, device, tokens, keep_rate)
        for pair in PAIRS
        for device in (H100, H200)
        for tokens in args.lengths
        for keep_rate in args.keep_rates
    ]
    middle, least = sorted(args.lengths)[len(args.lengths) // 2], min(args.keep_rates)
    changed = variants(args, middle, least)
    console = Console(width=150)
    console.print(f"[bold]{KIND}[/bold]")
    shares = {}
    for name, source in SOURCES.items():
        value = getattr(args.efficiency, name)
        shares[name] = {"value": value, "source": source if value == getattr(Efficiency(), name) else "given"}
    table = Table("of the data sheet", "share", "source", title="Assumed efficiencies")
    for name, share in shares.items():
        table.add_row(name, f"{share['value']:g}", share["source"])
    console.print(table)
    console.print(times_table(args, rows))
    table = Table("change", "dense s", "sparse s", "speed-up")
    table.title = f"{PAIRS[0].name}, {args.devices} x H200, {middle:,} tokens, keep {least:g}: what moves the speed-up"
    for case in changed:
        table.add_row(case["change"], *(f"{case[key]:.2f}" for key in ("dense_ttft", "sparse_ttft", "speedup")))
    console.print(table)
    table = Table("pair", "figure", "keep", "speed-up", "on", title="The paper's, on 8 x H200 (arXiv 2502.02789)")
    for entry in PAPER:
        cells = (entry["pair"], entry["figure"], f"{entry['keep_rate']:g}", f"{entry['speedup']:.2f}x", entry["on"])
        table.add_row(*cells)
    console.print(table)
    if args.out:
        jax.config.update("jax_platforms", "cpu")  # describe() asks for devices; none is used
        result = {
            **describe(),
            "kind": KIND,
            "efficiency": shares,
            "look_ahead": args.look_ahead,
            "chunk": args.chunk,
            "rows": rows,
            "variants": {
                "pair": PAIRS[0].name,
                "device": H200.name,
                "tokens": middle,
                "keep_rate": least,
                "cases": changed,
            },
            "paper": list(PAPER),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot:
        args.plot.parent.mkdir(parents=True, exist_ok=True)
        args.plot.write_text(svg(args, middle))


def check(args: Args) -> None:
    """Refuse arguments that mean nothing, before anything is printed or written."""
    for name, values in (("lengths", args.lengths), ("keep_rates", args.keep_rates)):
        if not values:
            raise argument_error(name, values, "at least one number")
    for length in args.lengths:
        check_integer("lengths", length, 1)
    for rate in args.keep_rates:
        check_real("keep_rates", rate, "a number above 0 and up to 1", lambda x: 0 < x <= 1)
    for name in ("tokens", "devices", "look_ahead", "chunk"):
        check_integer(name, getattr(args, name), 1)


def times_table(args: Args, rows: list[dict[str, Any]]) -> Table:
    """A line for each pair, machine and length: phases at the first keep rate, speed-ups at all."""
    title = f"Seconds to a whole batch's first tokens, {args.devices} devices; phases and ceilings at keep"
    title += f" {args.keep_rates[0]:g}; sent: the share of communication"
    caption = "* weights and caches are more than the devices' memory: the batch would go in turns"
    table = Table(title=title, caption=caption, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("pair", "on"):
        table.add_column(column, no_wrap=True)
    columns = ("prompts", "dense", "sent", "speculate", "ahead", "score", "main", "sparse", "sent")
    for column in (*columns, *(f"x, {rate:g}" for rate in args.keep_rates), "1/keep", "FLOPs"):
        table.add_column(column, justify="right", no_wrap=True)
    for start in range(0, len(rows), len(args.keep_rates)):
        same = rows[start : start + len(args.keep_rates)]
        first = same[0]
        cells = [first["pair"], first["device"].split()[0], f"{first['batch']} x {first['tokens']:,}"]
        for kind, phases in (("dense", ()), ("sparse", ("speculate", "look_ahead", "score", "main_prefill"))):
            full = "*" if first[f"{kind}_bytes"] > first["memory_bytes"] else ""
            seconds = first[f"{kind}_ttft"]
            cells += [f"{first[phase]:.{3 if first[phase] < 0.1 else 2}f}" for phase in phases]
            cells += [f"{seconds:.2f}{full}", f"{first[f'{kind}_communication'] / seconds:.0%}"]
        cells += [f"{r['speedup']:.2f}" for r in same]
        table.add_row(*cells, f"{first['ideal']:.1f}", f"{first['flop_ceiling']:.2f}")
    return table


MOST = 10


def svg(args: Args, tokens: int) -> str:
    """Speed-up over keep rate on H200s, and what the paper measured: a line a pair, and a band over all lengths."""
    machine = H200.machine(args.devices, args.efficiency)
    rates = [i / 64 for i in range(3, 65)]  # whole chunks of 32 at any usual length: no steps in the lines
    batch, paper = max(1, args.tokens // tokens), PAPER[0]

    def x(rate: float) -> str:
        return f"{LEFT + rate * (RIGHT - LEFT):.1f}"

    def y(speedup: float) -> str:
        return f"{BOTTOM - speedup / MOST * (BOTTOM - TOP):.1f}"

    def points(at: list[float], speedups: list[float]) -> str:
        return " ".join(f"{x(rate)},{y(speedup)}" for rate, speedup in zip(at, speedups, strict=True))

    title = f"Predicted speed-up of the first token, {args.devices} x H200"
    subtitle = f"Lines: {batch} prompt{'s' * (batch > 1)} of {tokens:,} tokens. "
    subtitle += f"Bands: prompts of {min(args.lengths):,} to {max(args.lengths):,}. Only the dot was measured."
    curves, legend, said = [], [], []
    for pair, colour in zip(PAIRS, COLOURS, strict=False):
        gains = [[foresee(args, pair, machine, n, rate).gain for n in args.lengths] for rate in rates]
        line = [gain[args.lengths.index(tokens)] for gain in gains]
        outline = points(rates + rates[::-1], [max(g) for g in gains] + [min(g) for g in gains[::-1]])
        curves.append(f'<polygon class="band" fill="{colour}" points="{outline}"/>')
        curves.append(f'<polyline class="line" stroke="{colour}" points="{points(rates, line)}"/>')
        said.append(f"{foresee(args, pair, machine, tokens, paper['keep_rate']).gain:.1f} with {pair.name}")
        legend.append((f'<line class="line" stroke="{colour}" x1="450" x2="482" y1="{{0}}" y2="{{0}}"/>', pair.name))
    ideal = points(rates, [1 / rate for rate in rates])
    legend.append(('<line class="ideal" x1="450" x2="482" y1="{0}" y2="{0}"/>', "ideal: 1 / keep rate"))
    measured = f"the paper: {paper['speedup']}x, length unknown"
    legend.append(('<circle class="point" cx="466" cy="{0}" r="6"/>', measured))
    alternative = (
        f"{subtitle} The speed-up falls as more of the prompt is kept, from below the ideal of 1 / keep rate to "
        f"below 1 where all is kept. At keep rate {paper['keep_rate']} it is {', '.join(said)}. The paper "
        f"(arXiv 2502.02789) measured {paper['speedup']} there with {paper['pair']}."
    )
    parts: list[str] = []
    for gain in (0, 1, 2, 4, 6, 8, 10):
        kind = "grid" if gain > 1 else "axis"
        parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{RIGHT}" y1="{y(gain)}" y2="{y(gain)}"/>')
        parts.append(f'<text class="quiet" x="{LEFT - 9}" y="{y(gain)}" dy="4.5" text-anchor="end">{gain}x</text>')
    for tenth in range(11):
        at = x(tenth / 10)
        parts.append(f'<line class="axis" x1="{at}" x2="{at}" y1="{BOTTOM}" y2="{BOTTOM + 5}"/>')
        parts.append(f'<text class="quiet" x="{at}" y="{BOTTOM + 22}" text-anchor="middle">{tenth / 10:g}</text>')
    label = "keep rate: share of the prompt that the main model reads"
    parts.append(f'<text x="{(LEFT + RIGHT) / 2:g}" y="{BOTTOM + 46}" text-anchor="middle">{label}</text>')
    parts += ['<g clip-path="url(#inside)">', f'<polyline class="ideal" points="{ideal}"/>', *curves, "</g>"]
    parts.append(f'<circle class="point" cx="{x(paper["keep_rate"])}" cy="{y(paper["speedup"])}" r="6"/>')
    for i, (mark, text) in enumerate(legend):
        parts += [mark.format(104 + 25 * i), f'<text x="492" y="{108.5 + 25 * i}">{escape(text)}</text>']
    return page(title, subtitle, alternative, parts)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except ArgumentError as error:
        sys.exit(f"error: {error}")
