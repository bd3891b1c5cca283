"""Prompts to load a server with: rows of a .jsonl file, or generated prose of any length, each with a head of its own.

A server that remembers prompts, or their beginnings, would answer the second run of a benchmark faster than the first;
`with_head` makes every prompt begin differently.
"""

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from specprefill_jax.errors import argument_error

QUESTION = "Which of the people above carried something, and where?"
"""Goes with `prose`, at the end of a generated prompt."""

LONGBENCH_TOKENS = MappingProxyType(
    {
        **dict.fromkeys(("hotpotqa", "2wikimqa", "musique", "triviaqa"), 32),
        **dict.fromkeys(("passage_count", "passage_retrieval_en", "passage_retrieval_zh"), 32),
        **dict.fromkeys(("multifieldqa_en", "multifieldqa_zh", "trec", "lsht", "lcc", "repobench-p"), 64),
        **dict.fromkeys(("narrativeqa", "qasper", "dureader", "samsum"), 128),
        **dict.fromkeys(("gov_report", "qmsum", "multi_news", "vcsum"), 512),
    }
)
"""Most tokens of an answer, by LongBench's dataset."""

LONGBENCH_PLAIN = frozenset({"trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p"})
"""LongBench's datasets whose prompts are sent without a chat template."""


@dataclass(frozen=True)
class Prompt:
    """One prompt: the messages of a chat, or a text."""

    messages: tuple[dict[str, Any], ...] = ()
    text: str = ""
    max_tokens: int | None = None
    """Most tokens of the answer, where the row says so."""
    plain: bool = False
    """Whether it must go without a chat template."""


def read_prompts(path: Path) -> list[Prompt]:
    """The rows of a .jsonl file: each an object with `messages`, with `prompt`, or with `context` and `input`.

    `max_tokens` is a row's own, or else LongBench's for its `dataset`. Blank lines are passed over.

    Raises:
        ArgumentError: the file cannot be read, holds no rows, or a row (its line is named) is none of these.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise argument_error("prompts", str(path), f"a file of JSON lines ({error})") from None
    prompts = [_row(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise argument_error("prompts", str(path), "a file with at least one row")
    return prompts


def _row(line: str, where: str) -> Prompt:
    allowed = "an object with messages, with prompt, or with context and input"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise argument_error(where, line, allowed) from None
    if not isinstance(row, dict):
        raise argument_error(where, line, allowed)
    dataset = row.get("dataset")
    known = dataset if isinstance(dataset, str) else ""
    most = row.get("max_tokens", LONGBENCH_TOKENS.get(known))
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise argument_error(f"{where}: max_tokens", most, "an integer of at least 1")
    prompt = Prompt(max_tokens=most, plain=known in LONGBENCH_PLAIN)
    messages, text = row.get("messages"), row.get("prompt")
    if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
        return replace(prompt, messages=tuple(messages))
    if isinstance(text, str) and text:
        return replace(prompt, text=text)
    context, question = row.get("context"), row.get("input")
    if isinstance(context, str) and isinstance(question, str) and (context or question):
        return replace(prompt, text=f"{context}\n\n{question}".strip())
    raise argument_error(where, line, allowed)


_WORDS = {
    name: words.split("|")
    for name, words in {
        "who": "baker|carter|clerk|farmer|gardener|glazier|guide|joiner|keeper|mason|miller|nurse|painter|pilot|potter"
        "|ranger|sailor|shepherd|smith|student|tailor|teacher|warden|weaver",
        "did": "borrowed|brought|carried|cleaned|counted|drew|found|hid|kept|left|lent|measured|mended|moved|sold"
        "|sorted|stored|traded|weighed",
        "like": "blue|broken|clean|copper|dry|grey|heavy|large|long|narrow|new|old|plain|red|round|small|wet|wooden",
        "what": "apples|barrels|baskets|bells|boards|books|bottles|candles|chairs|clocks|coats|coins|crates|jars|keys"
        "|kites|ladders|lamps|letters|maps|nets|oars|plates|ropes|sacks|seeds|shoes|stones|tiles|tools|wheels",
        "near": "above|across from|behind|below|beside|near",
        "where": "bridge|canal|chapel|ferry|forest|garden|gate|harbour|hill|kiln|library|lighthouse|market|meadow|mill"
        "|orchard|quarry|river|school|station|tower|well|workshop",
        "when": "after lunch|after the rain|at dawn|at night|before noon|in autumn|in spring|in the evening|on Friday",
    }.items()
}


def _sentence(draw: random.Random) -> str:
    who, did, like, what, near, where, when = (draw.choice(words) for words in _WORDS.values())
    return f"The {who} {did} {draw.randint(2, 99)} {like} {what} {near} the {where} {when}."


def prose(words: int, seed: int | str) -> str:
    """Filler of `words` words in English sentences (the last may be cut), the same for the same seed."""
    draw = random.Random(f"prose {seed}")
    found: list[str] = []
    while len(found) < words:
        found += _sentence(draw).split(" ")
    return " ".join(found[:words])


def head(seed: int | str) -> str:
    """A line that stands at no other prompt's beginning: 64 random bits."""
    return f"Record {random.Random(f'head {seed}').getrandbits(64):016x}."


def with_head(prompt: Prompt, line: str) -> Prompt:
    """The prompt with `line` before all else: before its text, or before the first message's content."""
    if not prompt.messages:
        return replace(prompt, text=f"{line}\n{prompt.text}")
    first, *rest = prompt.messages
    content = first.get("content")
    if isinstance(content, list):
        content = [{"type": "text", "text": line}, *content]
    else:
        content = f"{line}\n{content}" if content else line
    return replace(prompt, messages=({**first, "content": content}, *rest))
