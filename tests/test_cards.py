"""Pair cards: what they say holds wherever nothing else was said, and what they must not say."""

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
from agreement import MAIN, SPECULATOR, load_tiny, prompt_of
from hypothesis import given
from hypothesis import strategies as st

from specprefill_jax import SamplingParams, SpecPrefillConfig
from specprefill_jax.cards import NAME, PairCard, find_card, read_card, shape_of
from specprefill_jax.errors import ArgumentError, SpecPrefillError
from specprefill_jax.models.checkpoint import open_checkpoint

SHAPE = shape_of(open_checkpoint(SPECULATOR).config)
SETTINGS = {"query_window": 16, "scoring_heads": [[0, 1], [1, 2]], "importance_share": 0.6, "max_divergence": 0.2}
CARD = PairCard("tiny-main", "tiny-draft", 2, SETTINGS, SHAPE, [{"recall": 0.5}], {"date": "today"})
CONFIG = SpecPrefillConfig(0.5, chunk_size=8, tail_tokens=1, min_prompt_tokens=0, min_predicted_gain=0.0)


def test_round_trip(tmp_path):
    CARD.write(tmp_path / "a" / "card.json")
    assert read_card(tmp_path / "a" / "card.json") == CARD
    assert json.loads((tmp_path / "a" / "card.json").read_text())["format"] == "specprefill pair card 1"


def test_settings_take_the_place_of_defaults_alone():
    settled = CARD.settle(SpecPrefillConfig())
    assert (settled.query_window, settled.scoring_heads) == (16, ((0, 1), (1, 2)))
    assert (settled.importance_share, settled.max_divergence) == (0.6, 0.2)
    assert CARD.settle(settled) == settled
    own = SpecPrefillConfig("auto", scoring_heads=((0, 0),), importance_share=0.3, tail_tokens=9)
    assert CARD.settle(own) == replace(own, query_window=16, max_divergence=0.2)
    # Whoever looks ahead, or has a window, is not given the card's.
    for queries in ({"look_ahead": 4}, {"query_window": 5}):
        settled = CARD.settle(SpecPrefillConfig(**queries))
        assert {name: getattr(settled, name) for name in queries} == queries
        assert settled.scoring_heads == ((0, 1), (1, 2))


def test_paper_mode_stays_the_published_method():
    paper = SpecPrefillConfig.paper(0.1)
    assert replace(CARD, speculator_layers=None).settle(paper) is paper
    with pytest.raises(ArgumentError, match=r"mode='paper' .* 'product' with a card that runs 2 of the speculator's"):
        CARD.settle(paper)


def test_a_pair_with_a_card_is_one_with_its_settings():
    ids = prompt_of(130)
    carded, plain = load_tiny(card=CARD), load_tiny(speculator_layers=2)
    assert carded.speculator.model.config.num_layers == 2
    config = replace(CONFIG, query_window=16, scoring_heads=((0, 1), (1, 2)))
    for found, want in (
        (carded.select(ids, CONFIG), plain.select(ids, config)),
        (carded.select_many(ids, [CONFIG])[0], plain.select(ids, config)),
        (carded.generate(ids, SamplingParams(max_tokens=2), CONFIG).selection, plain.select(ids, config)),
    ):
        np.testing.assert_array_equal(found.importance, want.importance)
        np.testing.assert_array_equal(found.kept_indices, want.kept_indices)
    assert carded.select(ids).reason == plain.select(ids).reason == "short_prompt"
    assert load_tiny(card=CARD, speculator_layers=3).speculator.model.config.num_layers == 3


def test_heads_behind_the_layers_that_are_loaded_are_refused_at_once():
    with pytest.raises(ArgumentError, match=r"scoring_heads=\(1, 2\) .* below the speculator's 1"):
        load_tiny(card=CARD, speculator_layers=1)


def test_found_beside_the_speculator(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    with pytest.raises(SpecPrefillError, match=r"no card of big by .*small: neither .*pair_card.json nor a built-in"):
        find_card("big", folder)
    CARD.write(folder / NAME)
    assert find_card("big", folder) == CARD
    for file in SPECULATOR.iterdir():
        (folder / file.name).symlink_to(file)
    assert load_tiny(speculator=folder, card="auto").card == CARD
    assert load_tiny(speculator=folder).card is None
    assert load_tiny(speculator=folder, card=folder / NAME).card == CARD


def test_of_another_speculator():
    with pytest.raises(ArgumentError, match=r"card=.tiny-main by tiny-draft.*card must be of \{'num_layers': 4"):
        load_tiny(speculator=MAIN, card=CARD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"settings": {"keep_rate": 0.1}}, "settings=.*keep_rate"),
        ({"settings": {"scoring_heads": [[2, 0]]}}, "in the first 2 layers"),
        ({"settings": {"scoring_heads": [[0, 4]]}}, "of 4 heads each"),
        ({"settings": {"scoring_heads": "all"}}, "scoring_heads='all'"),
        ({"settings": {"query_window": -1}}, "query_window=-1"),
        ({"settings": {"query_window": 8, "look_ahead": 4}}, "look_ahead=4"),
        ({"speculator_layers": 0}, "speculator_layers=0"),
        ({"speculator_layers": 4}, "speculator_layers=4"),
        ({"shape": {**SHAPE, "num_layers": 0}}, "shape.num_layers=0"),
        ({"shape": {"num_layers": 3}}, "shape="),
        ({"format": "2"}, "format is not"),
        ({"main": 3}, "fields must be"),
        ({"measured": {}}, "fields must be"),
        ({"more": 1}, "fields must be"),
    ],
)
def test_wrong_cards(tmp_path, change, message):
    CARD.write(tmp_path / "card.json")
    card = json.loads((tmp_path / "card.json").read_text())
    (tmp_path / "card.json").write_text(json.dumps({**card, **change}))
    with pytest.raises(SpecPrefillError, match=rf"card.json: not a pair card: .*{message}"):
        read_card(tmp_path / "card.json")


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff", "null"])
def test_damaged_files(tmp_path, text):
    (tmp_path / "card.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SpecPrefillError, match=r"card.json: not a pair card"):
        read_card(tmp_path / "card.json")
    (tmp_path / "card.json").write_bytes(b" " * ((1 << 20) + 1))
    with pytest.raises(SpecPrefillError, match=r"more than 1048576 bytes"):
        read_card(tmp_path / "card.json")
    with pytest.raises(SpecPrefillError, match="no card"):
        read_card(tmp_path / "none.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(field=st.sampled_from(["speculator_layers", "settings", "shape", "query_window", "scoring_heads"]), value=JSON)
def test_whatever_a_card_says_it_is_read_or_refused(tmp_path_factory, field, value):
    path = tmp_path_factory.mktemp("cards") / "card.json"
    CARD.write(path)
    card = json.loads(path.read_text())
    (card if field in card else card["settings"])[field] = value
    path.write_text(json.dumps(card))
    with contextlib.suppress(SpecPrefillError):
        assert isinstance(read_card(path).settle(SpecPrefillConfig()), SpecPrefillConfig)
