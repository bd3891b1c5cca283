"""Generation by the main model: greedy and sampled, what ends it, its log-probabilities, and the stream of it."""

import numpy as np
import oracle
import pytest
from agreement import assert_greedy, prompt_of

from specprefill_jax import SamplingParams, SpecPrefillConfig

CONFIG = SpecPrefillConfig.paper(keep_rate=0.3, chunk_size=8)
IDS = prompt_of(120)


def generate(model, ids=IDS, config=CONFIG, **sampling):
    return model.generate(ids, SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **sampling}), config)


def logits_of(reference, output, ids=IDS):
    """The oracle's logits [T, V] that the output's tokens were drawn from."""
    return reference.logits_of(ids, output.selection.kept_indices, output.token_ids)


@pytest.fixture(scope="module")
def greedy(tiny):
    return [int(token) for token in generate(tiny, temperature=0.0).token_ids]


def test_temperature_zero_is_greedy(tiny, reference):
    output = generate(tiny, temperature=0.0, max_tokens=24)
    assert len(output.token_ids) == 24
    assert_greedy(output.token_ids, logits_of(reference, output))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 0.01},
        {"temperature": 1.0, "top_p": 1e-6},
        {"temperature": 1.0, "min_p": 0.999},
    ],
)
def test_sampling_that_leaves_one_token_is_greedy(tiny, greedy, sampling):
    assert list(generate(tiny, seed=3, **sampling).token_ids) == greedy


def test_seed(tiny, greedy):
    """The same seed draws the same tokens, whatever ran between; other seeds draw others."""
    first = {seed: list(generate(tiny, temperature=1.0, seed=seed).token_ids) for seed in range(6)}
    again = {seed: list(generate(tiny, temperature=1.0, seed=seed).token_ids) for seed in reversed(range(6))}
    assert first == again
    assert len({tuple(tokens) for tokens in first.values()}) == 6
    assert list(generate(tiny, temperature=0.0, seed=5).token_ids) == greedy


@pytest.mark.parametrize("seed", range(3))
def test_filters_keep_to_their_tokens(tiny, reference, seed):
    """Every drawn token is one that top-k, top-p or min-p leaves in the oracle's distribution (ties allowed)."""
    settings = {"temperature": 1.3, "seed": seed, "max_tokens": 24}
    for name, value in (("top_k", 4), ("top_p", 0.5), ("min_p", 0.4)):
        output = generate(tiny, **settings, **{name: value})
        probabilities = oracle.softmax(logits_of(reference, output) / 1.3)
        best = 0
        for row, token in zip(probabilities, output.token_ids, strict=True):
            above = row[row > row[token] * (1 + 1e-3)]
            best += len(above) == 0
            if name == "top_k":
                assert len(above) < 4
            elif name == "top_p":
                assert above.sum() < 0.5
            else:
                assert row[token] >= 0.4 * row.max() * (1 - 1e-3)
        assert best < 24, f"{name}: all draws were greedy"


def test_draws_follow_the_distribution(tiny, reference):
    """First tokens of 120 seeds, two candidates left: the favourite wins as often as the oracle says (5 sigma)."""
    outputs = [generate(tiny, temperature=2.0, top_k=2, seed=seed, max_tokens=1) for seed in range(120)]
    logits = logits_of(reference, outputs[0])[0] / 2.0
    second, first = np.argsort(logits)[-2:]
    drawn = [int(output.token_ids[0]) for output in outputs]
    assert set(drawn) == {int(first), int(second)}
    share = 1 / (1 + np.exp(logits[second] - logits[first]))
    assert abs(drawn.count(int(first)) - 120 * share) < 5 * np.sqrt(120 * share * (1 - share))


def test_max_tokens(tiny, greedy):
    for count in (1, 2, 11):
        output = generate(tiny, temperature=0.0, max_tokens=count)
        assert list(output.token_ids) == greedy[:count]
        assert output.finish_reason == "length"


def test_stop_ids(tiny, greedy):
    """The answer ends with the first stop id, which is reported as the reason and not part of what follows."""
    place = next(i for i in range(3, 12) if greedy.index(greedy[i]) == i)
    output = generate(tiny, temperature=0.0, stop_token_ids=(511, greedy[place]))
    assert output.finish_reason == "stop"
    assert [t for t in output.token_ids if t != greedy[place]] == greedy[:place]
    assert len(output.token_ids) <= place + 1
    first = generate(tiny, temperature=0.0, stop_token_ids=(greedy[0],))
    assert first.finish_reason == "stop"
    assert len(first.token_ids) <= 1


@pytest.mark.parametrize(("eos", "seed"), [(2, 37), (3, 114), (4, 204)])
def test_every_eos_of_the_config_ends_the_answer_unless_ignored(tiny, reference, eos, seed):
    """The main model's config lists 2, 3 and 4; ignore_eos goes on past them."""
    ids = prompt_of(6, seed)
    tokens, _ = reference.main.greedy(ids, range(6), 6, 6)
    step = tokens.index(eos)
    assert step > 0
    config = SpecPrefillConfig.paper(keep_rate=1.0)
    stopped = generate(tiny, ids, config, temperature=0.0, ignore_eos=False)
    ignored = generate(tiny, ids, config, temperature=0.0, ignore_eos=True)
    assert stopped.finish_reason == "stop"
    assert ignored.finish_reason == "length"
    assert len(ignored.token_ids) == 12
    assert ignored.token_ids[step] == eos
    cut = min(list(ignored.token_ids).index(e) for e in (2, 3, 4) if e in ignored.token_ids)
    assert [t for t in stopped.token_ids if t not in (2, 3, 4)] == list(ignored.token_ids)[:cut]


def test_context_ends_the_answer(tiny):
    """4090 tokens leave room for a few: the answer is cut there, with reason length, not refused."""
    output = generate(tiny, prompt_of(4090), SpecPrefillConfig.paper(keep_rate=0.1), temperature=0.0, max_tokens=128)
    assert output.finish_reason == "length"
    assert len(output.token_ids) == 6


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 20, "seed": 1}])
def test_log_probabilities(tiny, reference, sampling):
    """The model's own log-softmax of each token, before temperature and filters."""
    output = generate(tiny, logprobs=5, **sampling)
    expected = oracle.log_softmax(logits_of(reference, output))
    given = [entry.token for entry in output.logprobs]
    np.testing.assert_allclose(given, expected[np.arange(12), list(output.token_ids)], atol=2e-4)
    for entry, row in zip(output.logprobs, expected, strict=True):
        assert len(entry.top) == 5
        best = np.sort(row)[::-1][:5]
        np.testing.assert_allclose(list(entry.top.values()), best, atol=2e-4)
        np.testing.assert_allclose([row[token] for token in entry.top], best, atol=2e-4)
    assert list(output.token_ids) == list(generate(tiny, **sampling).token_ids)


def test_repetition_penalty(tiny, reference):
    """Greedy under a strong penalty: no token of the prompt or the answer comes again while any other is close."""
    plain, penalised = generate(tiny, temperature=0.0), generate(tiny, temperature=0.0, repetition_penalty=1.8)
    assert list(plain.token_ids) != list(penalised.token_ids)
    seen = set(IDS)
    for row, token in zip(logits_of(reference, penalised), penalised.token_ids, strict=True):
        places = np.array(sorted(seen))
        row = row.copy()
        row[places] = np.where(row[places] > 0, row[places] / 1.8, row[places] * 1.8)
        assert_greedy([token], row[None])
        seen.add(int(token))


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 1.0, "seed": 9}])
def test_stream_gives_the_same(tiny, sampling):
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, **sampling)
    pieces = list(tiny.stream(IDS, sampling, CONFIG))
    output = tiny.generate(IDS, sampling, CONFIG)
    tokens = [int(piece.token_id) for piece in pieces if piece.token_id is not None]
    assert tokens == list(output.token_ids)
    assert "".join(piece.text for piece in pieces) == output.text


def test_dense_is_the_main_model_alone(tiny, reference):
    output = generate(tiny, config=SpecPrefillConfig(enabled=False), temperature=0.0)
    expected, _ = reference.main.greedy(IDS, range(len(IDS)), len(IDS), 12)
    assert_greedy(
        output.token_ids, reference.main.continue_with(IDS, range(len(IDS)), len(IDS), list(output.token_ids))
    )
    assert list(output.token_ids) == expected


def test_look_ahead_eos_ids_do_not_silence_the_main_models(tiny):
    """`eos_token_ids` ends the look-ahead; the answer still ends at the main model's own EOS (see the seeds above)."""
    config = SpecPrefillConfig.paper(keep_rate=1.0, eos_token_ids=())
    assert generate(tiny, prompt_of(6, 37), config, temperature=0.0, ignore_eos=False).finish_reason == "stop"


def test_without_logprobs_there_are_none(tiny):
    assert generate(tiny, temperature=0.0, max_tokens=1).logprobs is None
