"""Needle smoke run: a magic number hidden in prose, asked for after a dense and after a sparse prefill.

    python scripts/eval_needle.py --cases 8
    python scripts/eval_needle.py --lookups --main retrieval-tiny --speculator retrieval-tiny-speculator --cases 100

Exit status 1 if fewer than `--expect` of the cases that the dense prefill answers are answered by the sparse one.
"""

import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from specprefill_jax import SamplingParams, SpecPrefill, SpecPrefillConfig
from specprefill_jax.evals.lookups import draw_case
from specprefill_jax.machine import describe

TEXT = Path(__file__).parent.parent / "examples" / "ferry-house.txt"
QUESTION = "What is the special magic number mentioned in the text?"
# The start of the answer is given, as RULER does, so that the look-ahead is spent on the number itself.
ANSWER = "The special magic number mentioned in the text is"


@dataclass
class Args:
    """Hide numbers in prose and ask for them."""

    main: str = "smollm2-135m"
    speculator: str = "smollm2-135m"
    dtype: str = "float32"
    text: Path = TEXT
    """Prose to hide the number in."""
    lookups: bool = False
    """Ask for values in made-up prose instead, the way the pair `retrieval-tiny` learned it."""
    cases: int = 8
    tokens: int = 1000
    """Tokens of prose a case."""
    keep_rate: float = 0.1
    look_ahead: int = 8
    expect: float = 7 / 8
    """Share of the cases answered densely that must be answered sparsely."""
    seed: int = 0
    out: Path | None = None
    """JSON file to write."""


def haystack(
    model: SpecPrefill, sentences: list[str], tokens: int, rng: random.Random, depth: float
) -> tuple[str, str]:
    """(text of about `tokens` tokens with the needle at `depth`, the number)."""
    number = str(rng.randint(1_000_000, 9_999_999))
    first = rng.randrange(len(sentences))
    chosen: list[str] = []
    length = 0
    while length < tokens:
        sentence = sentences[(first + len(chosen)) % len(sentences)]
        chosen.append(sentence)
        length += len(model.encode(sentence))
    chosen.insert(round(depth * len(chosen)), f"The special magic number is {number}.")
    return " ".join(chosen), number


def main(args: Args) -> int:
    """Run the cases and report."""
    console = Console()
    model = SpecPrefill.from_pretrained(args.main, args.speculator, args.dtype)
    if model.tokenizer is None:
        raise SystemExit("the main model has no tokenizer, and this evaluation is made of text")
    tokenizer = model.tokenizer
    text = " ".join(args.text.read_text(encoding="utf-8").split())
    sentences = [sentence.strip() + "." for sentence in text.split(". ") if sentence.strip()]
    rng = random.Random(args.seed)
    sampling = SamplingParams(max_tokens=16)
    sparse = SpecPrefillConfig.paper(args.keep_rate, args.look_ahead)
    rows: list[dict[str, Any]] = []
    for case in range(args.cases):
        depth: float | None = None
        if args.lookups:
            drawn = draw_case(rng, args.tokens, lambda text: len(tokenizer.encode(text, add_special_tokens=False)))
            prompt, number = tokenizer.encode(drawn.prompt), drawn.value
        else:
            depth = (case + 0.5) / args.cases
            context, number = haystack(model, sentences, args.tokens, rng, depth)
            chat = tokenizer.render_chat([{"role": "user", "content": f"{context}\n\n{QUESTION}"}])
            prompt = tokenizer.encode(chat + ANSWER, add_special_tokens=False)
        whole = model.generate(prompt, sampling, SpecPrefillConfig(enabled=False))
        kept = model.generate(prompt, sampling, sparse)
        row = {
            "depth": depth,
            "number": number,
            "tokens": kept.selection.num_tokens,
            "kept": kept.selection.num_kept,
            "dense": whole.text,
            "sparse": kept.text,
            "dense_right": number in whole.text,
            "sparse_right": number in kept.text,
        }
        rows.append(row)
        console.print(row)
    answered = [row for row in rows if row["dense_right"]]
    right = sum(row["sparse_right"] for row in answered)
    console.print(f"{right} of {len(answered)} cases that dense answers are answered at keep rate {args.keep_rate}")
    if args.out:
        result = {
            **describe(),
            "settings": {k: v.name if isinstance(v, Path) else v for k, v in asdict(args).items()},
            "cases": rows,
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return 0 if answered and right >= args.expect * len(answered) else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Args)))
