#!/usr/bin/env python3
"""Answer a question about a long text after reading the part of it that matters.

The answer goes to stdout as it comes; progress, the map and the table of phases go to stderr.
Exit status: 0, 1 when another process was lost, 2 for bad input, 130 when interrupted.

    python scripts/generate.py "Why is the sky blue?"
    python scripts/generate.py --file book.txt --question "Who owns the boat?" --keep-rate 0.15 --map
    python scripts/generate.py --file book.txt --question "Who owns the boat?" --compare --html map.html
    cat book.txt | python scripts/generate.py - --question "Who owns the boat?" --json
    srun python scripts/generate.py --distributed --file book.txt --question "Who owns the boat?"
"""

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import tyro
from rich.console import Console

from specprefill_jax import command_line
from specprefill_jax.config import SamplingParams, SpecPrefillConfig
from specprefill_jax.errors import ArgumentError, argument_error
from specprefill_jax.sharding.mesh import make_mesh
from specprefill_jax.view.page import write_page
from specprefill_jax.view.report import Report, Run, describe, seconds
from specprefill_jax.view.spans import map_prompt, visible
from specprefill_jax.view.terminal import prompt_map, summary

Prompt = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Options:
    """Answer a question about a long text after reading the part of it that matters."""

    text: tyro.conf.Positional[str | None] = None
    """The prompt; - reads it from stdin."""

    prompt: str | None = None
    """The prompt, as a flag."""

    file: str | None = None
    """A UTF-8 text file with the prompt; - reads stdin."""

    chat: str | None = None
    """A JSON file with chat messages, [{"role": "user", "content": "..."}, ...]; - reads stdin."""

    question: str | None = None
    """Asked after the text, or as a further user message after the chat."""

    raw: bool = False
    """Continue the text as it stands, without the model's chat template."""

    main: str = "smollm2-135m-deep4"
    """The model that answers: a folder, a .gguf file, a Hub id or a built-in name. The default is SmolLM2-135M with
    three zero-output blocks after every block: the same function at four times the compute; a stand-in for a larger
    main model."""

    speculator: str = "smollm2-135m"
    """The small model that chooses what is read, with the same tokenizer."""

    speculator_layers: int | None = None
    """Use only the speculator's first layers."""

    card: str | None = None
    """A pair card, which says what of the speculator scores: a file, or auto for the one in its folder or built in."""

    dtype: str = "float32"
    """float32, bfloat16 or float16."""

    devices: int | None = None
    """Devices that share both models (tensor parallelism); by default as many of those here as can."""

    distributed: bool = False
    """Several processes, started alike: work together with those that JAX finds under Slurm, Open MPI or Kubernetes,
    or on a TPU pod. Process 0's flags and prompt count, and it alone prints the answer."""

    coordinator: str | None = None
    """The same where JAX does not find them: "host:port" of process 0, with a port that is free there. Needs the next
    two flags."""

    num_processes: int | None = None
    """How many processes there are."""

    process_id: int | None = None
    """Which of them this is, from 0."""

    dense: bool = False
    """Read the whole prompt."""

    compare: bool = False
    """Answer twice, from the whole prompt and from a part of it, and compare. Compiles before it measures."""

    warm_up: bool = False
    """Compile for the prompt's length beforehand, so that the times are those of a second prompt."""

    map: bool = False
    """Show the prompt shaded by chunk score, with what was dropped dimmed."""

    html: str | None = None
    """Write the map as a self-contained page to this file."""

    json: bool = False
    """Print one JSON object instead of the answer."""

    quiet: bool = False
    """No progress and no table."""

    config: tyro.conf.OmitArgPrefixes[SpecPrefillConfig] = field(default_factory=SpecPrefillConfig)
    sampling: tyro.conf.OmitArgPrefixes[SamplingParams] = field(default_factory=SamplingParams)


class Interrupted(Exception):
    """Ctrl-C while answering; `text` is what had been produced."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with `argv` (default: the process's arguments) and return its exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        argv = sys.argv[1:] if argv is None else argv
        generate(*agree(parse(argv), argv))
        return 0
    except Interrupted:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        print("interrupted before the first token", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # Nobody reads on. What is still buffered must not be written when the interpreter leaves.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(visible(str(error)).split())}", file=sys.stderr)
        return 2


def parse(argv: Sequence[str]) -> Options:
    """Flags as `Options`; an `ArgumentError` of one line for wrong ones."""
    options = command_line.parse(Options, argv, "generate.py", (tyro.conf.FlagCreatePairsOff,))
    if options.dense and options.compare:
        raise ArgumentError("--dense and --compare cannot go together: --compare reads the prompt both ways")
    return options


def agree(options: Options, argv: Sequence[str]) -> tuple[Options, Prompt]:
    """Flags, and the prompt but for its question: with several processes those of process 0, in all of them."""
    together = (options.coordinator, options.num_processes, options.process_id)
    if not options.distributed and together == (None, None, None):
        return options, read_prompt(options)
    import jax

    from specprefill_jax.sharding import distributed  # here: it reaches into JAX, which one process alone need not risk

    distributed.start(*together)
    first = jax.process_index() == 0
    # The answer's alone: Gloo says to the process's stdout what it does, and so may others.
    answer = os.dup(1) if first else os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    os.dup2(2, 1)
    sys.stdout = os.fdopen(answer, "w", encoding=sys.stdout.encoding, errors="replace")
    said: dict[str, Any] = {}
    if first:
        try:
            said = {"argv": list(argv), "prompt": read_prompt(options)}
        except (ValueError, OSError) as error:
            said = {"error": str(error)}
    said = distributed.broadcast(said)
    if "error" in said:
        raise ArgumentError(said["error"])
    options = parse(said["argv"])
    return options if first else replace(options, quiet=True, map=False, html=None), said["prompt"]


def generate(options: Options, document: Prompt) -> None:
    """Answer as `options` say, and show what was asked for."""
    console = Console(stderr=True, quiet=options.quiet, highlight=False, soft_wrap=False)
    say = console.print

    model = load(options, say)
    prompt = compose(document, options, model.tokenizer)
    ids = model.encode(prompt).tolist()
    ways = {"sparse": options.config, "dense": replace(options.config, enabled=False)}
    labels = ("dense", "sparse") if options.compare else ("dense",) if options.dense else ("sparse",)

    compiling = None
    if options.compare or options.warm_up:
        say(f"Compiling for {len(ids):,} tokens ...")
        start = time.perf_counter()
        model.warm_up(len(ids), options.config, options.sampling)
        compiling = time.perf_counter() - start
        say(f"  took {seconds(compiling)}")

    runs, outputs = [], []
    for label in labels:
        say({"dense": "Reading the whole prompt ...", "sparse": "Reading what matters, where that pays ..."}[label])
        start = time.perf_counter()
        outputs.append(answer(model, prompt, options, ways[label]))
        runs.append(Run.of(label, outputs[-1], time.perf_counter() - start))
    report = Report(options.main, None if options.dense else options.speculator, tuple(runs), compiling)
    show(report, outputs[-1].selection, ids, model.tokenizer, options, console)


def show(report: Report, selection: Any, ids: list[int], tokenizer: Any, options: Options, console: Console) -> None:
    """Whatever is shown after the answer: JSON on stdout, the map and the table on stderr, the page in its file."""
    if options.json:
        scores = selection.chunk_scores
        chosen = selection.to_dict() | {
            "kept_chunk_ids": selection.kept_chunk_mask.nonzero()[0].tolist(),
            "chunk_scores": None if scores is None else scores.tolist(),
        }
        settings = {"config": asdict(options.config), "sampling": asdict(options.sampling), "dtype": options.dtype}
        emit(json.dumps(report.as_dict() | {"selection": chosen, "settings": settings}, allow_nan=False) + "\n")
    if options.map or options.html is not None:
        drawn = map_prompt(ids, selection, lambda part: tokenizer.decode(part, skip_special_tokens=False))
        if options.map:
            err = Console(stderr=True, highlight=False)  # shown even when all else is quiet
            err.print()
            err.print(prompt_map(drawn, colour=err.color_system is not None), soft_wrap=err.color_system is None)
        if options.html is not None:
            write_page(options.html, drawn, report)
    if not options.json:
        console.print()
        console.print(summary(report))
    if options.html is not None:
        console.print(f"\nmap written to {options.html}", markup=False)


def answer(model: Any, prompt: Prompt, options: Options, config: SpecPrefillConfig) -> Any:
    """Stream one answer to stdout (nothing with --json) and return the pipeline's output."""
    pieces: list[str] = []
    output = None
    write: Callable[[str], None] = (lambda text: None) if options.json else emit
    try:
        for piece in model.stream(prompt, options.sampling, config):
            pieces.append(piece.text)
            write(piece.text)
            output = piece.output or output
    except KeyboardInterrupt:
        text = "".join(pieces)
        emit(json.dumps({"interrupted": True, "text": text}) + "\n" if options.json else "\n")
        raise Interrupted(text) from None
    write("\n")
    return output


def load(options: Options, say: Callable[[str], None]) -> Any:
    """The pair of models."""
    say(f"Loading main model {describe(options.main)} ...")
    if not options.dense:
        say(f"Loading speculator {describe(options.speculator)} ...")
    from specprefill_jax import SpecPrefill

    start = time.perf_counter()
    model = SpecPrefill.from_pretrained(
        main=options.main,
        speculator=options.main if options.dense else options.speculator,  # the same model is loaded once
        dtype=options.dtype,
        mesh=None if options.devices is None else make_mesh(options.devices),
        speculator_layers=None if options.dense else options.speculator_layers,
        card=None if options.dense else options.card,
    )
    say(f"  took {seconds(time.perf_counter() - start)}")
    return model


def read_prompt(options: Options) -> Prompt:
    """The text or the chat messages that the prompt is made of, before the question.

    Other files are checked on the way: no model should be loaded in vain.
    """
    if options.html is not None:
        check_writable(Path(options.html))
    given = [name for name in ("text", "prompt", "file", "chat") if getattr(options, name) is not None]
    if len(given) != 1:
        names = {"text": "a prompt as argument", "prompt": "--prompt", "file": "--file", "chat": "--chat"}
        said = " and ".join(names[name] for name in given) or "nothing"
        raise ArgumentError(f"the prompt must come from one of: {', '.join(names.values())}; {said} was given")
    if options.chat is not None:
        if options.raw:
            raise ArgumentError("--raw and --chat cannot go together: a chat needs the model's template")
        return parse_chat(read_text("chat", options.chat), options.chat)
    if options.file is not None:
        text = read_text("file", options.file)
    elif options.text == "-":
        text = read_text("text", "-")
    else:
        text = options.text if options.text is not None else options.prompt or ""
    if not text.strip():
        raise argument_error("prompt", text, "text, and it is empty")
    return text


def read_text(name: str, source: str) -> str:
    """All of a file, or of stdin for "-", as text."""
    try:
        data = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise argument_error(name, source, f"a readable file ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise argument_error(name, source, f"UTF-8 text (byte {error.start} is not)") from None


def parse_chat(text: str, source: str) -> list[dict[str, Any]]:
    """Chat messages from JSON: a list of messages, or an object that holds one as `messages`."""
    allowed = 'JSON: [{"role": "user", "content": "..."}, ...], alone or as the "messages" of an object'
    try:
        chat = json.loads(text)
    except ValueError as error:
        raise argument_error("chat", source, f"{allowed} ({error})") from None
    messages = chat.get("messages") if isinstance(chat, dict) else chat
    if not isinstance(messages, list) or not messages:
        raise argument_error("chat", source, f"{allowed} (there are no messages)")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or "content" not in message:
            raise argument_error("chat", source, f"{allowed} (message {index} has no role or no content)")
    return messages


def compose(document: Prompt, options: Options, tokenizer: Any) -> Prompt:
    """Document and question as one prompt: chat messages where the tokenizer has a template, else text."""
    question = [] if options.question is None else [options.question]
    if not isinstance(document, str):
        return [*document, *({"role": "user", "content": text} for text in question)]
    text = "\n\n".join([document.rstrip("\n"), *question]) if question else document
    chat = not options.raw and tokenizer is not None and tokenizer.has_chat_template
    return [{"role": "user", "content": text}] if chat else text


def emit(text: str) -> None:
    """Write to stdout at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def check_writable(path: Path) -> None:
    """Raise, before minutes are spent, where the page could not be written."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argument_error("html", str(path), "a file in a folder that exists and can be written to")


def run() -> NoReturn:
    """Leave the process with `main`'s status."""
    status = main()
    distributed = sys.modules.get("specprefill_jax.sharding.distributed")
    if status and distributed is not None:
        distributed.leave(status)  # the others must not wait for this process
    sys.exit(status)


if __name__ == "__main__":
    run()
