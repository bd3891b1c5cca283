"""Pair cards: what calibration has found for a main model and its speculator, in a small JSON file.

`scripts/calibrate.py` writes them. A card says how many of the speculator's layers are run, which of their heads score,
and with which queries, and beside it what that found of what matters, and at what cost.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from specprefill_jax.config import SpecPrefillConfig, check_integer
from specprefill_jax.errors import ArgumentError, SpecPrefillError, argument_error
from specprefill_jax.models.config import LlamaConfig

FORMAT = "specprefill pair card 1"
NAME = "pair_card.json"
"""Of a card that lies in its speculator's folder."""
SETTINGS = ("look_ahead", "query_window", "scoring_heads", "importance_share", "max_divergence")
"""The settings of `SpecPrefillConfig` that a card may have; all others are the caller's."""
PACKAGED = Path(__file__).parent / "models" / "cards"
"""Cards of built-in pairs, by <main>+<speculator>.json."""
_LARGEST = 1 << 20
_SHAPE = ("num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size")
_DEFAULTS = {known.name: known.default for known in fields(SpecPrefillConfig) if known.default is not MISSING}


@dataclass(frozen=True)
class PairCard:
    """What calibration has found; checks itself."""

    main: str
    """Names the main model, for people."""
    speculator: str
    speculator_layers: int | None
    """Layers of the speculator that are run; None: all."""
    settings: Mapping[str, Any]
    """Some of `SETTINGS`."""
    shape: Mapping[str, int]
    """Sizes of the whole speculator: a card of another is refused."""
    measured: Sequence[Mapping[str, Any]] = ()
    """Recall and cost of what was tried, for people and plots."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Machine, versions, command and date."""

    def __post_init__(self) -> None:
        unknown = sorted(set(self.settings) - set(SETTINGS))
        if unknown:
            raise argument_error("settings", unknown, "some of " + ", ".join(SETTINGS))
        if sorted(self.shape) != sorted(_SHAPE):
            raise argument_error("shape", sorted(self.shape), "exactly " + ", ".join(_SHAPE))
        for name, value in self.shape.items():
            check_integer(f"shape.{name}", value, 1)
        layers = self.shape["num_layers"]
        if self.speculator_layers is not None:
            layers = check_integer("speculator_layers", self.speculator_layers, 1, layers)
        for layer, head in self.settle(SpecPrefillConfig()).scoring_heads:
            if layer >= layers or head >= self.shape["num_heads"]:
                allowed = f"in the first {layers} layers, of {self.shape['num_heads']} heads each"
                raise argument_error("scoring_heads", (layer, head), allowed)

    def settle(self, config: SpecPrefillConfig) -> SpecPrefillConfig:
        """The config with the card's settings in place of those that are at their defaults.

        Paper mode stays as it is: no card changes the published method.

        Raises:
            ArgumentError: paper mode, and a card that runs a part of the speculator.
        """
        if config.mode == "paper":
            if self.speculator_layers is not None:
                allowed = f"'product' with a card that runs {self.speculator_layers} of the speculator's layers"
                raise argument_error("mode", config.mode, allowed)
            return config
        looks = config.look_ahead is not None or config.query_window > 0
        own = ("look_ahead", "query_window") if looks else ()
        taken = {
            name: value
            for name, value in self.settings.items()
            if name not in own and getattr(config, name) == _DEFAULTS[name]
        }
        return replace(config, **taken)

    def check_speculator(self, config: LlamaConfig) -> None:
        """ArgumentError unless the card is of a speculator of this size (the whole one's config)."""
        found = shape_of(config)
        if dict(self.shape) != found:
            raise argument_error("card", f"{self.main} by {self.speculator}, {dict(self.shape)}", f"of {found}")

    def write(self, path: Path) -> None:
        """Write the card."""
        card = {
            "format": FORMAT,
            "main": self.main,
            "speculator": self.speculator,
            "speculator_layers": self.speculator_layers,
            "settings": dict(self.settings),
            "shape": dict(self.shape),
            "measured": [dict(row) for row in self.measured],
            "about": dict(self.about),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")


def shape_of(config: LlamaConfig) -> dict[str, int]:
    """The sizes that a card knows its speculator by."""
    return {name: getattr(config, name) for name in _SHAPE}


def read_card(path: str | os.PathLike[str]) -> PairCard:
    """The card in a file; SpecPrefillError for one that is not there, damaged, or says what is not allowed."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise SpecPrefillError(f"{path}: no card: {error.strerror}") from None
    try:
        if len(data) > _LARGEST:
            raise ArgumentError(f"more than {_LARGEST} bytes")
        found = json.loads(data)
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise ArgumentError(f"format is not {FORMAT!r}")
        kinds = {"main": str, "speculator": str, "settings": dict, "shape": dict, "measured": list, "about": dict}
        wrong = [name for name, kind in kinds.items() if not isinstance(found.get(name), kind)]
        if wrong or found.keys() - kinds != {"speculator_layers"}:
            raise ArgumentError(f"fields must be {', '.join(kinds)} and speculator_layers, each of its kind")
        return PairCard(**found)
    except (ValueError, TypeError, RecursionError) as error:
        raise SpecPrefillError(f"{path}: not a pair card: {error}") from None


def find_card(main: str | os.PathLike[str], speculator: str | os.PathLike[str]) -> PairCard:
    """The card that lies in the speculator's folder, or that of a built-in pair; SpecPrefillError where none is."""
    beside = Path(speculator) / NAME
    packaged = PACKAGED / f"{os.path.basename(main)}+{os.path.basename(speculator)}.json"
    for path in (beside, packaged):
        if path.is_file():
            return read_card(path)
    raise SpecPrefillError(f"no card of {main} by {speculator}: neither {beside} nor a built-in one; see calibrate.py")
