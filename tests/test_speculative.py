"""Speculative decoding: the answer is plain decoding's, whatever is proposed, and its distribution untouched."""

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agreement import prompt_of

from specprefill_jax import SamplingParams, SpecPrefillConfig
from specprefill_jax.decode import Next
from specprefill_jax.sampling import filter_logits, sampling_arrays
from specprefill_jax.speculative import Acceptance, SpeculativeDecoder

SPARSE = SpecPrefillConfig.paper(keep_rate=0.3, chunk_size=8)
WAYS = {"sparse": SPARSE, "dense": SpecPrefillConfig(enabled=False)}


@pytest.fixture
def eager(tiny, monkeypatch):
    """The tiny pair, for which proposals never stop paying: its speculator, another random model, is seldom right."""
    monkeypatch.setattr(Acceptance, "next_count", lambda self: self.most)
    return tiny


@pytest.fixture
def oracle_of(eager, monkeypatch):
    """The tiny pair with proposals that are right up to every third; `oracle_of(answer)` sets what is right."""

    def use(answer: list[int]):
        def propose(drafts, said, count):
            right = [*answer[len(said) : len(said) + count], *[7] * count][:count]
            return np.array([t if i % 3 else (t + (len(said) % 4 == 0)) % 512 for i, t in enumerate(right)], np.int32)

        monkeypatch.setattr("specprefill_jax.speculative.Drafts.propose", propose)
        return eager

    return use


SAMPLINGS = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 40, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "seed": 6, "logprobs": 3},
    {"temperature": 0.0, "repetition_penalty": 0.7, "logprobs": 0},
]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_answer_is_plain_decodings(oracle_of, tiny, way, sampling):
    """With the real speculator's proposals (all wrong, as good as), and with ones that are mostly right."""
    ids = prompt_of(70, seed=3)
    sampling = SamplingParams(max_tokens=21, ignore_eos=True, **sampling)
    plain = tiny.generate(ids, sampling, WAYS[way])
    model = oracle_of(plain.token_ids)
    for count in (1, 4):
        output = model.generate(ids, sampling, WAYS[way], draft_tokens=count)
        assert output.token_ids == plain.token_ids
        assert output.finish_reason == "length"
        assert output.accepted_tokens > 0
        assert output.accepted_tokens <= output.proposed_tokens
        for ours, wanted in zip(output.logprobs or (), plain.logprobs or (), strict=True):
            assert ours.token == pytest.approx(wanted.token, abs=1e-4)
            assert list(ours.top) == list(wanted.top)


def test_the_speculators_own_proposals(eager, tiny):
    """Its cache is that of the look-ahead, whose tokens are the first proposals where the first of them is right."""
    for seed in range(4):
        ids = prompt_of(64 + seed, seed=seed)
        for config in WAYS.values():
            plain = tiny.generate(ids, SamplingParams(max_tokens=10, ignore_eos=True), config)
            output = eager.generate(ids, SamplingParams(max_tokens=10, ignore_eos=True), config, draft_tokens=3)
            assert output.token_ids == plain.token_ids
            assert output.proposed_tokens >= 3


def test_a_model_that_speculates_for_itself_is_always_right(tiny, monkeypatch):
    """Read whole, the main model accepts whatever it proposed itself, so a round gives k + 1 tokens."""
    from specprefill_jax.pipeline import SpecPrefill

    monkeypatch.setattr(Acceptance, "next_count", lambda self: self.most)
    same = SpecPrefill(tiny.main, tiny.main, None)
    ids = prompt_of(64, seed=9)
    plain = same.generate(ids, SamplingParams(max_tokens=17, ignore_eos=True), WAYS["dense"])
    output = same.generate(ids, SamplingParams(max_tokens=17, ignore_eos=True), WAYS["dense"], draft_tokens=3)
    assert output.token_ids == plain.token_ids
    assert output.accepted_tokens == output.proposed_tokens == 12  # 1 + 4 rounds of 3 + 1


@pytest.mark.parametrize("most", range(1, 7))
def test_max_tokens_within_the_proposals(oracle_of, tiny, most):
    ids = prompt_of(70, seed=3)
    answer = tiny.generate(ids, SamplingParams(max_tokens=12, ignore_eos=True), SPARSE).token_ids
    output = oracle_of(answer).generate(ids, SamplingParams(max_tokens=most, ignore_eos=True), SPARSE, draft_tokens=4)
    assert (output.token_ids, output.finish_reason) == (answer[:most], "length")


def test_a_stop_token_within_the_proposals(oracle_of, tiny):
    ids = prompt_of(70, seed=3)
    answer = tiny.generate(ids, SamplingParams(max_tokens=12, ignore_eos=True), SPARSE).token_ids
    place = next(i for i in range(2, 12) if answer[i] not in answer[:i])
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(answer[place],))
    output = oracle_of(answer).generate(ids, sampling, SPARSE, draft_tokens=8)
    assert (output.token_ids, output.finish_reason) == (answer[: place + 1], "stop")


def test_a_speculator_that_fails_while_it_proposes(eager, tiny, monkeypatch, caplog):
    """The answer goes on without it."""
    ids = prompt_of(70, seed=3)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = tiny.generate(ids, sampling, SPARSE)

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr("specprefill_jax.speculative.Drafts.propose", fail)
    with caplog.at_level(logging.WARNING):
        output = eager.generate(ids, sampling, SPARSE, draft_tokens=4)
    assert output.token_ids == plain.token_ids
    assert "out of memory" in caplog.text


@pytest.mark.parametrize("bad", [-1, 33, 1.5, True])
def test_bad_counts(tiny, bad):
    with pytest.raises(ValueError, match="draft_tokens=.*is not allowed: .*an integer from 0 to 32"):
        tiny.generate(prompt_of(8), draft_tokens=bad)


def test_how_many_are_proposed():
    """By hand, a speculator's step costing a quarter: at 3 of 4 right, two proposals give 2.3 tokens for 1.5 steps."""
    acceptance = Acceptance(most=8, cost=0.25)
    gains = {k: sum(0.75**i for i in range(k + 1)) / (1 + 0.25 * k) for k in (1, 2, 4, 8)}
    assert max(gains, key=gains.get) == acceptance.next_count() == 2
    for _ in range(20):
        acceptance.add(8, 8)
    assert acceptance.next_count() == 8  # (160 + 3) / (160 + 4) right: 8.6 tokens for 3 steps
    assert (acceptance.proposed, acceptance.accepted, acceptance.tested) == (160, 160, 160)
    none = Acceptance(most=8, cost=0.25)
    rounds = 0
    while (count := none.next_count()) and rounds < 20:
        none.add(count, 0)
        rounds += 1
    assert rounds <= 9  # then plain decoding
    assert Acceptance(most=8, cost=1.0).next_count() == 0  # a speculator as slow as the main model
    assert Acceptance(most=6, cost=0.001).next_count() == 6


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize(
    ("settings", "seed"),
    [
        ({"temperature": 1.0}, 0),
        ({"temperature": 0.7, "top_k": 5, "repetition_penalty": 1.4}, 1),
        ({"temperature": 1.5, "top_p": 0.85, "min_p": 0.05}, 2),
    ],
)
def test_the_distribution_is_the_main_models(settings, seed):
    """20,000 seeds: what is drawn at the place after the last accepted one follows the filtered distribution there.

    And a rule that accepts a proposal whenever it has any probability fails the same test by far.
    """
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 1.5, (3, 8)).astype(np.float32)
    proposals = jnp.asarray(logits[:2].argmax(axis=1).astype(np.int32))
    model = SimpleNamespace(logits_fn=lambda _, hidden: hidden, jit=lambda f, **_: f, mesh=None, config=None)
    decoder = object.__new__(SpeculativeDecoder)
    decoder.model = model
    seen = jnp.asarray(rng.random((1, 8)) < 0.4)
    draws = 20_000
    base = {name: [value] for name, value in settings.items()}

    def arrays(key=None):
        made = sampling_arrays(**{"temperature": [1.0], **base}, seed=[0])
        return made if key is None else made._replace(key=key)

    def one(key):
        zero = jnp.zeros(1, jnp.int32)
        after, drawn, accepted = decoder._accept_fn(
            None,
            jnp.asarray(logits),
            proposals,
            arrays(key),
            jnp.int32(3),
            Next(zero, zero, zero, seen, None),
            top_n=None,
        )
        return drawn, accepted, after.token[0], after.position[0]

    keys = jnp.asarray(np.stack([np.full(draws, 99, np.uint32), np.arange(draws, dtype=np.uint32)], 1))[:, None]
    drawn, accepted, last, moved = (np.asarray(x) for x in jax.jit(jax.vmap(one))(keys))
    assert (last == drawn[np.arange(draws), accepted]).all()
    assert (moved == accepted + 1).all()
    said = np.asarray(seen)
    limit = 35.0  # far in the tail of chi-square with 7 degrees of freedom (p = 1e-5)
    for place in range(3):
        with_earlier = said.copy()
        with_earlier[0, np.asarray(proposals)[:place]] = True
        filtered = filter_logits(jnp.asarray(logits[place : place + 1]), arrays(), jnp.asarray(with_earlier))
        p = np.asarray(jax.nn.softmax(filtered, axis=-1))[0]
        reached = drawn[accepted >= place, place]
        allowed = p > 0
        counts = np.bincount(reached, minlength=8)
        assert counts[~allowed].sum() == 0
        assert chi_square(counts[allowed], p[allowed] * len(reached)) < limit
        if place < 2 and len(reached) > 1000:
            wrong = np.bincount(np.full(len(reached), proposals[place]), minlength=8)
            assert chi_square(wrong[allowed], p[allowed] * len(reached)) > 10 * limit
