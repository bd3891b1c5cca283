"""Loading a main model and its speculator so that they fit each other and the devices."""

import os
from functools import partial
from typing import NamedTuple

from jax.sharding import Mesh
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from specprefill_jax.cards import PairCard
from specprefill_jax.compilation import use_compilation_cache
from specprefill_jax.config import check_integer
from specprefill_jax.models.checkpoint import Checkpoint, open_checkpoint
from specprefill_jax.models.loaded import LoadedLlama, check_fits, load
from specprefill_jax.sharding.mesh import check_mesh, largest_mesh
from specprefill_jax.tokens import Tokenizer, same_tokenizer


class Pair(NamedTuple):
    """Two models that read the same ids as the same tokens."""

    main: LoadedLlama
    speculator: LoadedLlama
    tokenizer: Tokenizer | None
    look_ahead: int
    """Queries that score a prompt unless told otherwise: one alone for a speculator that cannot generate."""


def load_pair(
    main: str | os.PathLike[str],
    speculator: str | os.PathLike[str],
    dtype: str,
    mesh: Mesh | None,
    *,
    speculator_mesh: Mesh | None,
    speculator_layers: int | None,
    card: PairCard | None = None,
) -> Pair:
    """Open both, check that they fit, and only then read what is large; see `SpecPrefill.from_pretrained`."""
    mesh, speculator_mesh = (None if given is None else check_mesh(given) for given in (mesh, speculator_mesh))
    opened = open_checkpoint(main)
    shared = os.fspath(main) == os.fspath(speculator)
    draft = opened if shared else open_checkpoint(speculator)
    layers = draft.config.num_layers
    if card is not None:
        card.check_speculator(draft.config)
        if speculator_layers is None:
            speculator_layers = card.speculator_layers
    if speculator_layers is not None:
        allowed = f"None or an integer from 1 to the speculator's {layers}"
        speculator_layers = check_integer("speculator_layers", speculator_layers, 1, layers, allowed)

    def check(mesh: Mesh) -> None:
        check_fits(mesh, opened.config)
        check_fits(speculator_mesh or mesh, draft.config)

    if mesh is None:
        mesh = largest_mesh(check)
    else:
        check(mesh)
    apart = speculator_mesh is not None and speculator_mesh != mesh
    tokenizer = opened.tokenizer()
    if not shared:
        same_tokenizer(tokenizer, draft.tokenizer(), opened.config.vocab_size, draft.config.vocab_size)
    use_compilation_cache()
    main_model = _load(opened, dtype, mesh, None)
    whole = shared and not apart and speculator_layers in (None, layers)
    draft_model = main_model if whole else _load(draft, dtype, speculator_mesh or mesh, speculator_layers)
    return Pair(main_model, draft_model, tokenizer, 8 if speculator_layers in (None, layers) else 1)


def _load(checkpoint: Checkpoint, dtype: str, mesh: Mesh | None, num_layers: int | None) -> LoadedLlama:
    """`load`, with a progress bar where somebody looks on."""
    columns = (TextColumn("Loading {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(checkpoint.name, total=num_layers or checkpoint.config.num_layers)
        show = partial(bar.update, task)
        return load(checkpoint, dtype, num_layers=num_layers, mesh=mesh, report=lambda done, _: show(completed=done))
