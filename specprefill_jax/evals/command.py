"""What the scripts that run a benchmark share: their flags, the models, the results folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import jax
from rich.console import Console

from specprefill_jax.config import check_integer
from specprefill_jax.errors import argument_error
from specprefill_jax.evals.baselines import sentence_embedder
from specprefill_jax.evals.benchmarks import Samples
from specprefill_jax.evals.results import ResultFile
from specprefill_jax.evals.runner import Rows, answers, run
from specprefill_jax.evals.settings import Setting, names_of, parse_setting
from specprefill_jax.machine import describe
from specprefill_jax.pipeline import SpecPrefill

Method = Literal[
    "dense", "specprefill", "product", "random", "head_tail", "bm25_chunks", "bm25_sentences", "embedding_sentences"
]

LIBRARIES = ("rouge", "jieba", "fuzzywuzzy", "lm-eval", "datasets")
"""Packages that scores depend on; their versions go into every row, where they are installed."""


@dataclass
class PairArgs:
    """Flags of every script that asks a benchmark's samples."""

    main: str = "smollm2-135m"
    """The model that answers: a folder, a .gguf file, a built-in name or a Hub id."""
    speculator: str = "smollm2-135m"
    """The model that chooses."""
    dtype: str = "bfloat16"
    card: str | None = None
    """A pair card for product mode: a file, or auto for the one in the speculator's folder or of a built-in pair."""
    speculator_layers: int | None = None
    """Use only the speculator's first so many layers."""
    out: Path = Path("results")
    """Folder of the results; a run that was stopped goes on where it was."""
    keep_rates: tuple[float, ...] = (0.1, 0.3, 0.5)
    """Shares of a prompt that are read."""
    look_aheads: tuple[int, ...] = (8,)
    """Queries that score; 1 is no look-ahead."""
    limit: int | None = None
    """Samples of each task (and length) at most."""
    seed: int = 0
    """Of what is drawn."""


@dataclass
class RunArgs(PairArgs):
    """Flags of every benchmark."""

    methods: tuple[Method, ...] = ("dense", "specprefill")
    """Ways of reading that are compared, each but "dense" at every keep rate."""
    settings: tuple[str, ...] = ()
    """Ways of reading by name, in place of methods, keep rates and look-aheads: dense p1_full_lah8 bm25_chunks_p1."""

    embedding_model: str | None = None
    """Model of sentence-transformers, a folder or a Hub id, for the method "embedding_sentences"."""
    batch: int = 1
    """Answers to a prompt, read in so many ways, that are decoded together: faster, and with as many KV caches."""

    @property
    def ways(self) -> list[Setting]:
        """The ways of reading; ArgumentError for one that is not allowed."""
        names = self.settings or names_of(self.methods, self.keep_rates, self.look_aheads)
        found = [parse_setting(name) for name in names]
        if self.embedding_model is None and any(setting.method == "embedding_sentences" for setting in found):
            raise argument_error("embedding_model", None, "given, for the method 'embedding_sentences'")
        return found


def execute(
    args: PairArgs,
    benchmark: str,
    settings: Sequence[Setting],
    samples: Samples,
    about: Mapping[str, Any],
    rows: Rows | None = None,
) -> None:
    """Load the pair, ask every sample in every setting, and say what was done.

    Args:
        args: the flags.
        benchmark: names the file of rows, `<out>/<benchmark>.jsonl`.
        settings: ways of reading.
        samples: called once with the pair.
        about: what, beside the models and the seed, all rows of the file have in common.
        rows: what is found out of a sample, see `runner.run`; None: answers.

    Raises:
        SpecPrefillError: flags, models, samples or an existing file that are not allowed.
    """
    if args.limit is not None:
        check_integer("limit", args.limit, 1)
    check_integer("seed", args.seed, 0)
    batch = 1
    if isinstance(args, RunArgs):
        batch = check_integer("batch", args.batch, 1)
        embedder = None if args.embedding_model is None else sentence_embedder(args.embedding_model)
        rows = partial(answers, embedder=embedder, batch=batch)
    common = {
        "benchmark": benchmark,
        "main": args.main,
        "speculator": args.speculator,
        "speculator_layers": args.speculator_layers,
        "dtype": args.dtype,
        **({"card": args.card} if args.card else {}),
        "seed": args.seed,
        **({"batch": batch} if batch > 1 else {}),  # another size rounds otherwise
        **about,
    }
    path = args.out / f"{benchmark}.jsonl"
    with ResultFile(path, common, write=jax.process_index() == 0) as results:
        model = SpecPrefill.from_pretrained(
            args.main, args.speculator, args.dtype, speculator_layers=args.speculator_layers, card=args.card
        )
        found, total = samples(model)
        counts = run(
            model,
            found,
            settings,
            results,
            seed=args.seed,
            versions=_versions(),
            total=total,
            rows=rows,
            whole=batch > 1,
        )
    said = f"{counts.done} rows added to {path}, {counts.there} were there, {counts.skipped} could not be read"
    Console(stderr=True).print(said)


def _versions() -> dict[str, str]:
    """Versions of the packages that results depend on, and the commit where there is one."""
    machine = describe()
    versions = dict(machine["versions"])
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions | ({"commit": machine["commit"]} if machine["commit"] else {})
