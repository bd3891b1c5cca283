"""The ways of reading that an evaluation compares, by short names that say all of it.

    dense                 the whole prompt
    p1, p1_full           the paper's method at keep rate 0.1, in its settings "SpecPrefill" and "Full"
    p1_full_lah8          "Full LAH": with 8 look-ahead queries
    product_p3_lah8       product mode at keep rate 0.3
    product_auto          as much as the speculator's check of itself asks for
    product_p3_win32      scored by the prompt's own last 32 tokens, without a look-ahead
    random_p1             a baseline (`baselines.BASELINES`) at keep rate 0.1

The number after p is in tenths; 2.5 is 0.25. Product mode here reads in part whatever it gains: what a reading is worth
must not depend on this machine's speed.
"""

import re
from dataclasses import dataclass
from decimal import Decimal

from specprefill_jax.config import PAPER_SETTINGS, KeepRate, SpecPrefillConfig
from specprefill_jax.errors import argument_error
from specprefill_jax.evals.baselines import BASELINES

DENSE = "dense"
_NAME = re.compile(
    r"(?:(?P<method>product|" + "|".join(BASELINES) + r")_)?(?:p(?P<tenths>\d+(?:\.\d+)?)|(?P<auto>auto))"
    r"(?P<full>_full)?(?:_lah(?P<ahead>[1-9]\d*)|_win(?P<window>[1-9]\d*))?"
)


@dataclass(frozen=True)
class Setting:
    """One way of reading."""

    name: str
    method: str
    """"dense", "specprefill", "product" or a baseline."""
    keep_rate: KeepRate
    """1 for "dense"."""
    config: SpecPrefillConfig | None = None
    """Of "specprefill" and "product"."""


def parse_setting(name: str) -> Setting:
    """The setting of that name; ArgumentError for one that is not spelled as the module's docstring says."""
    if name == DENSE:
        return Setting(DENSE, DENSE, 1.0)
    known = _NAME.fullmatch(name)
    allowed = "'dense', or such as 'p1', 'p3_full', 'p3_full_lah8', 'product_p3', 'product_auto', 'product_p3_win32', "
    allowed += ", ".join(repr(f"{method}_p3") for method in BASELINES)
    known = _NAME.fullmatch(name)
    wrong = argument_error("setting", name, allowed)
    if known is None or not (known["auto"] or 0 < Decimal(known["tenths"]) <= 10):
        raise wrong
    method, full, ahead = known["method"] or "specprefill", known["full"], known["ahead"]
    if method != "product" and (known["auto"] or known["window"]):
        raise wrong
    rate: KeepRate = "auto" if known["auto"] else float(Decimal(known["tenths"]) / 10)
    look_ahead = int(ahead) if ahead else None
    if method == "product":
        if full:
            raise wrong
        window = int(known["window"] or 0)
        config = SpecPrefillConfig(rate, look_ahead, query_window=window, min_predicted_gain=0.0)
        return Setting(name, method, rate, config)
    assert rate != "auto"
    if method in BASELINES:
        if full or ahead:
            raise wrong
        return Setting(name, method, rate)
    paper = PAPER_SETTINGS["Full" if full else "SpecPrefill"]
    config = SpecPrefillConfig.paper(rate, look_ahead or paper["look_ahead"], paper["pool_width"], paper["chunk_size"])
    return Setting(name, method, rate, config)


def names_of(methods: tuple[str, ...], keep_rates: tuple[float, ...], look_aheads: tuple[int, ...]) -> list[str]:
    """Names of every method at every keep rate; "specprefill" with every look-ahead, in the paper's full setting.

    Args:
        methods: "dense", "specprefill", "product" and baselines.
        keep_rates: of all but "dense".
        look_aheads: of "specprefill" and "product"; 1 is no look-ahead.
    """
    names: list[str] = []
    for method in methods:
        for rate in keep_rates:
            tenths = f"p{(Decimal(str(rate)) * 10).normalize():f}"
            ahead = [f"_lah{count}" if count > 1 or method == "product" else "" for count in look_aheads]
            if method == DENSE:
                names.append(DENSE)
            elif method in ("specprefill", "product"):
                before, after = ("", "_full") if method == "specprefill" else ("product_", "")
                names += [f"{before}{tenths}{after}{end}" for end in ahead]
            else:
                names.append(f"{method}_{tenths}")
    return list(dict.fromkeys(names))
