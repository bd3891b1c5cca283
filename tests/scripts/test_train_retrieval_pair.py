"""scripts/train_retrieval_pair.py: its texts, its first weights, its model beside ours, and going on after a kill."""

import dataclasses
import random
from functools import cache, partial

import jax
import numpy as np
import pytest
from script_modules import load_script

from specprefill_jax import SpecPrefill, SpecPrefillConfig
from specprefill_jax.models.checkpoint import open_checkpoint

script = load_script("train_retrieval_pair")
Stage = script.Stage
CONFIG = dataclasses.replace(script.SPECULATOR, num_layers=2, num_heads=2, num_kv_heads=1)


@pytest.fixture(scope="module")
def tokenizer():
    return script.train_tokenizer()


@pytest.fixture(scope="module")
def encode(tokenizer):
    return cache(partial(tokenizer.encode, add_special_tokens=False))


def test_tokenizer_is_that_of_the_built_in_pair(tokenizer):
    for name in script.CONFIGS:
        assert tokenizer.vocabulary == open_checkpoint(name).tokenizer().vocabulary


def test_built_in_models_are_those_of_the_script():
    for name, config in script.CONFIGS.items():
        assert open_checkpoint(name).config == config


@pytest.mark.parametrize(("lists", "seeds"), [(0.0, range(40)), (1.0, range(10))])
def test_texts(tokenizer, encode, lists, seeds):
    stage = Stage(300, 1, lists, 0.0)
    lengths = []
    for seed in seeds:
        ids, answers = script.draw_text(random.Random(seed), stage, encode)
        assert ids[0] == tokenizer.bos_token_id
        assert len(ids) == len(answers) <= stage.tokens
        lengths.append(len(ids))
        text = tokenizer.decode(ids)
        assert tokenizer.encode(tokenizer.decode(ids, skip_special_tokens=False), add_special_tokens=False) == ids
        learned = tokenizer.decode([index for index, answer in zip(ids, answers, strict=True) if answer])
        values = [value for value in learned.replace(".", " ").split() if value.isdecimal()]
        assert values
        assert all(text.count(f" {value}.") == 2 for value in values)  # told, and answered
        assert sum(index == tokenizer.eos_token_ids[0] for index in ids) == (0 if lists else len(values))
    assert np.mean(lengths) > 0.9 * stage.tokens


def test_positions():
    assert script.draw_positions(random.Random(0), Stage(100, 1, 0.0, 0.0)).tolist() == list(range(100))
    last = []
    for seed in range(50):
        positions = script.draw_positions(random.Random(seed), Stage(100, 1, 0.0, 1.0))
        steps = np.diff(positions)
        assert (positions[0], steps.min()) == (0, 1)
        assert (steps > 1).sum() <= 8
        last.append(positions[-1])
    assert 2000 < max(last) < CONFIG.max_position_embeddings


def test_batches_depend_on_seed_and_step_alone(tokenizer, encode):
    stage = Stage(128, 1, 0.3, 0.5)
    batch = script.make_batch(1, 7, stage, 512, encode)
    assert batch.tokens.shape == batch.positions.shape == (4, 128)
    again = script.make_batch(1, 7, stage, 512, cache(partial(tokenizer.encode, add_special_tokens=False)))
    for array, same in zip(batch, again, strict=True):
        np.testing.assert_array_equal(array, same)
    rows, at = np.nonzero(batch.weights)
    np.testing.assert_array_equal(batch.tokens[rows, batch.rows[rows, at] + 1], batch.targets[rows, at])
    assert not np.array_equal(batch.tokens, script.make_batch(1, 8, stage, 512, encode).tokens)
    assert not np.array_equal(batch.tokens, script.make_batch(2, 7, stage, 512, encode).tokens)


def test_first_weights_look_up_and_ours_agree(tokenizer, encode, tmp_path):
    """Untrained, the main model finds values in short lists; what is written computes the same in our pipeline."""
    config = dataclasses.replace(script.MAIN, num_layers=2)
    weights = script.start_weights(config, 0)
    script.write_folder(tmp_path, config, weights, tokenizer)
    rounded = {name: open_checkpoint(tmp_path).read(name).astype(np.float32) for name in weights}
    logits_of = jax.jit(script.make_logits(config))
    batch = script.make_batch(0, 0, Stage(64, 1, 1.0, 0.0), 2048, encode)
    logits = logits_of(rounded, batch.tokens, batch.positions, batch.rows)
    right = (np.argmax(logits, axis=-1) == batch.targets)[batch.weights > 0]
    assert right.mean() > 0.6
    ours = SpecPrefill.from_pretrained(tmp_path, tmp_path, "float32")
    prompt = batch.tokens[0, : batch.rows[0, 3] + 1]
    whole = ours.prefill(prompt, ours.select(prompt, SpecPrefillConfig(enabled=False)))
    np.testing.assert_allclose(whole, logits[0, 3], rtol=1e-3, atol=1e-3)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tokenizer, tmp_path):
    stages = (Stage(32, 3, 1.0, 0.0), Stage(48, 2, 0.5, 0.5))
    undisturbed = script.Args(work=tmp_path / "a", step_tokens=96, save_every=2)
    expected = script.train("x", CONFIG, tokenizer, stages, undisturbed)

    class Killed(Exception):
        pass

    def kill(step, steps, means):
        if step == 3:
            raise Killed

    args = dataclasses.replace(undisturbed, work=tmp_path / "b")
    with pytest.raises(Killed):
        script.train("x", CONFIG, tokenizer, stages, args, kill)
    seen = []
    found = script.train("x", CONFIG, tokenizer, stages, args, lambda step, steps, means: seen.append((step, steps)))
    assert seen == [(3, 5), (4, 5), (5, 5)]
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    start = script.start_weights(CONFIG, 0)
    assert not any(np.array_equal(found[name], start[name]) for name in expected)
    # Done: nothing more is trained.
    again = script.train("x", CONFIG, tokenizer, stages, args, kill)
    assert all(np.array_equal(again[name], expected[name]) for name in expected)
