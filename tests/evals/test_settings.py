"""Names of the ways of reading."""

import pytest

from specprefill_jax import SpecPrefillConfig
from specprefill_jax.errors import ArgumentError
from specprefill_jax.evals.settings import Setting, names_of, parse_setting


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("p1", SpecPrefillConfig.paper_setting("SpecPrefill", 0.1)),
        ("p3_full", SpecPrefillConfig.paper_setting("Full", 0.3)),
        ("p9_full_lah8", SpecPrefillConfig.paper_setting("Full LAH", 0.9)),
        ("p2.5_full_lah16", SpecPrefillConfig.paper(0.25, 16)),
        ("p10_lah4", SpecPrefillConfig.paper(1.0, 4, 0, 1)),
        ("product_p3", SpecPrefillConfig(0.3, min_predicted_gain=0.0)),
        ("product_p3_lah1", SpecPrefillConfig(0.3, 1, min_predicted_gain=0.0)),
        ("product_p3_win32", SpecPrefillConfig(0.3, query_window=32, min_predicted_gain=0.0)),
        ("product_auto", SpecPrefillConfig("auto", min_predicted_gain=0.0)),
        ("product_auto_lah4", SpecPrefillConfig("auto", 4, min_predicted_gain=0.0)),
        ("product_auto_win8", SpecPrefillConfig("auto", query_window=8, min_predicted_gain=0.0)),
    ],
)
def test_models_that_choose(name, config):
    method = "product" if name.startswith("product") else "specprefill"
    assert parse_setting(name) == Setting(name, method, config.keep_rate, config)


def test_others():
    assert parse_setting("dense") == Setting("dense", "dense", 1.0)
    assert parse_setting("head_tail_p0.5") == Setting("head_tail_p0.5", "head_tail", 0.05)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "p",
        "p0",
        "p11",
        "p1_lah0",
        "p1_lah",
        "random",
        "random_p1_full",
        "bm25_chunks_p1_lah8",
        "product_p1_full",
        "auto",
        "p1_win8",
        "random_auto",
        "product_p3_win0",
        "product_p3_lah8_win8",
        "product_auto_full",
        "product_pauto",
    ],
)
def test_names_that_are_none(name):
    with pytest.raises(ArgumentError, match=r"is not allowed: setting must be 'dense', or such as 'p1', "):
        parse_setting(name)


def test_names_of():
    names = names_of(("dense", "specprefill", "product", "random"), (0.1, 0.25), (1, 8))
    assert names == [
        "dense", "p1_full", "p1_full_lah8", "p2.5_full", "p2.5_full_lah8",
        "product_p1_lah1", "product_p1_lah8", "product_p2.5_lah1", "product_p2.5_lah8", "random_p1", "random_p2.5",
    ]  # fmt: skip
    assert [parse_setting(name).keep_rate for name in names][1::4] == [0.1, 0.1, 0.1]
