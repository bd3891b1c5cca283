"""The cost model, against the ceilings of the method's own table and against sums written out."""

import math
from types import SimpleNamespace

import pytest

from specprefill_jax import costs
from specprefill_jax.errors import ArgumentError


def shape(embed: int, feed: int, layers: int, heads: int, kv_heads: int, head: int, vocab: int = 128256):
    return SimpleNamespace(
        vocab_size=vocab, hidden_size=embed, intermediate_size=feed, num_layers=layers, num_heads=heads,
        num_kv_heads=kv_heads, head_dim=head,
    )  # fmt: skip


LLAMA = {
    "1B": shape(2048, 8192, 16, 32, 8, 64),
    "8B": shape(4096, 14336, 32, 32, 8, 128),
    "70B": shape(8192, 28672, 80, 64, 8, 128),
    "405B": shape(16384, 53248, 126, 128, 8, 128),
}
SMOLLM2 = shape(576, 1536, 30, 9, 3, 64, vocab=49152)
DEEP4 = shape(576, 1536, 120, 9, 3, 64, vocab=49152)
TINY = shape(8, 24, 3, 4, 2, 6, vocab=50)

# speculator, main, tokens, ceilings at keep rates 0.1, 0.2, 0.3; as published, rounded to 0.1 (some to 0.05)
CEILINGS = [
    ("1B", "8B", 8192, (4.1, 3.0, 2.35)), ("1B", "8B", 32768, (4.0, 3.1, 2.5)), ("1B", "8B", 131072, (3.9, 3.3, 2.7)),
    ("8B", "70B", 8192, (4.9, 3.4, 2.5)), ("8B", "70B", 32768, (4.9, 3.5, 2.7)), ("8B", "70B", 131072, (4.8, 3.7, 2.9)),
    ("1B", "70B", 8192, (9.1, 4.9, 3.3)), ("1B", "70B", 32768, (9.9, 5.4, 3.7)),
    ("1B", "70B", 131072, (11.9, 6.9, 4.6)),
    ("8B", "405B", 8192, (8.65, 4.7, 3.2)), ("8B", "405B", 32768, (9.0, 5.0, 3.4)),
    ("8B", "405B", 131072, (10.0, 5.8, 4.0)),
]  # fmt: skip


@pytest.mark.parametrize(("speculator", "main", "tokens", "published"), CEILINGS)
def test_published_ceilings(speculator, main, tokens, published):
    for rate, ceiling in zip((0.1, 0.2, 0.3), published, strict=True):
        ours = costs.flop_ceiling(LLAMA[main], LLAMA[speculator], tokens, round(tokens * rate))
        assert abs(ours - ceiling) <= 0.0501, (rate, ours)


@pytest.mark.parametrize(("name", "billions"), [("1B", 1.236), ("8B", 7.505), ("70B", 69.50), ("405B", 403.75)])
def test_weights_are_the_models_without_a_second_embedding(name, billions):
    assert costs.weight_bytes(LLAMA[name], 1) == pytest.approx(billions * 1e9, rel=1e-3)


def test_smollm2_weights_in_float32_are_540_megabytes():
    assert costs.weight_bytes(SMOLLM2, 4) == 4 * (30 * (2 * 576 * 64 * 12 + 3 * 576 * 1536) + 576 * 49152) == 537919488


@pytest.mark.parametrize("tokens", [0, 1, 2, 7, 33])
@pytest.mark.parametrize("heads", [0, 1, 5])
def test_prefill_flops_written_out(tokens, heads):
    macs = heads * 8 * 50
    for _ in range(3):
        for token in range(tokens):
            macs += 8 * 4 * 6 + 2 * 8 * 2 * 6 + 4 * 6 * 8 + 3 * 8 * 24
            macs += sum(2 * 4 * 6 for _ in range(token + 1))
    assert costs.prefill_flops(TINY, tokens, head_tokens=heads) == 2 * macs


def test_prefill_is_all_its_decode_steps():
    steps = sum(costs.decode_flops(TINY, context) for context in range(1, 12))
    assert costs.prefill_flops(TINY, 11, head_tokens=11) == steps


def test_decode_bytes_written_out():
    weights = 3 * (2 * 8 * 6 * (4 + 2) + 3 * 8 * 24) + 8 * 50
    assert costs.decode_bytes(TINY, 10, 4) == 4 * (weights + 3 * 2 * 2 * 6 * 10)
    assert costs.decode_bytes(TINY, 10, 1, 2) == weights + 2 * 3 * 2 * 2 * 6 * 10
    assert costs.key_bytes(LLAMA["8B"], 131072, 2) == 2**33  # two passes: the 17 GB of the scoring floor


def test_scoring_flops_written_out():
    assert costs.scoring_flops(TINY, 10, 8) == 2 * (2 * 3 * 4 * 8 * 10 * 6)


def test_phases_take_the_longer_of_flops_and_bytes():
    machine = costs.Machine(1e9, 1e6)
    prediction = costs.predict(DEEP4, SMOLLM2, 2048, 300, 8, machine, main_bytes=4, speculator_bytes=4)
    assert prediction.dense == costs.prefill_flops(DEEP4, 2048) / 1e9
    assert prediction.speculate == costs.prefill_flops(SMOLLM2, 2048) / 1e9
    assert prediction.sparse == costs.weight_bytes(DEEP4, 4) / 1e6  # 300 tokens are too few to hide the weights
    steps = [costs.decode_bytes(SMOLLM2, 2048 + index, 4) / 1e6 for index in range(1, 8)]
    assert prediction.look_ahead == pytest.approx(sum(steps), rel=1e-12)
    assert prediction.score == 2 * costs.key_bytes(SMOLLM2, 2048, 4) / 1e6
    assert prediction.total == prediction.speculate + prediction.look_ahead + prediction.score + prediction.sparse
    assert prediction.gain == prediction.dense / prediction.total


def test_one_query_needs_no_look_ahead_and_no_head():
    prediction = costs.predict(DEEP4, SMOLLM2, 1024, 300, 1, costs.CPU)
    assert prediction.look_ahead == 0
    assert prediction.speculate == costs.prefill_flops(SMOLLM2, 1024, head_tokens=0) / costs.CPU.flops_per_s


def test_the_demo_pair_on_two_cores():
    """Ceiling about 2.6 at keep 0.15 and 2k tokens; below what FLOPs alone allow, by the look-ahead."""
    rates = {"flops_per_s": 115e9, "bytes_per_s": 15e9}
    gain = costs.predicted_gain(DEEP4, SMOLLM2, 2048, 307, 8, **rates, main_bytes=4, speculator_bytes=4)
    assert 2.5 < gain < costs.flop_ceiling(DEEP4, SMOLLM2, 2048, 307) < 2.75


def test_gain_without_rates_is_that_of_the_accelerator():
    expected = costs.predict(LLAMA["70B"], LLAMA["8B"], 32768, 3277, 8, costs.ACCELERATOR).gain
    assert costs.predicted_gain(LLAMA["70B"], LLAMA["8B"], 32768, 3277, 8) == expected
    assert 4.5 < expected < costs.flop_ceiling(LLAMA["70B"], LLAMA["8B"], 32768, 3277)


def test_only_the_ratio_of_the_rates_matters():
    gains = [
        costs.predicted_gain(LLAMA["8B"], LLAMA["1B"], 4096, 512, 8, flops_per_s=300 * scale, bytes_per_s=scale)
        for scale in (1.0, 1e12)
    ]
    assert gains[0] == pytest.approx(gains[1], rel=1e-12)


def test_no_gain_where_there_is_none():
    assert costs.predicted_gain(LLAMA["8B"], LLAMA["8B"], 8192, 819, 8) < 1
    assert costs.predicted_gain(LLAMA["70B"], LLAMA["8B"], 40, 8, 8) < 1.1  # look-ahead outweighs a short prompt


@pytest.mark.parametrize(
    ("platform", "machine"), [("cpu", costs.CPU), ("gpu", costs.ACCELERATOR), ("tpu", costs.ACCELERATOR)]
)
def test_default_machine(platform, machine):
    assert costs.default_machine(platform) is machine


@pytest.mark.parametrize(("kept", "allowed"), [(0, "from 1 to 10"), (11, "from 1 to 10"), (2.5, "from 1 to 10")])
def test_kept_tokens_out_of_range(kept, allowed):
    for call in (
        lambda: costs.flop_ceiling(DEEP4, SMOLLM2, 10, kept),
        lambda: costs.predict(DEEP4, SMOLLM2, 10, kept, 8, costs.CPU),
    ):
        with pytest.raises(ArgumentError, match=f"^kept_tokens={kept} .* an integer {allowed}$"):
            call()


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "1", True])
def test_rates_out_of_range(value):
    allowed = "a finite number above 0$"
    with pytest.raises(ArgumentError, match=f"^flops_per_s={value!r} .* {allowed}"):
        costs.Machine(value, 1.0)
    with pytest.raises(ArgumentError, match=f"^bytes_per_s={value!r} .* {allowed}"):
        costs.predicted_gain(DEEP4, SMOLLM2, 10, 5, 8, flops_per_s=1.0, bytes_per_s=value)
    with pytest.raises(ArgumentError, match=f"^main_bytes={value!r} .* {allowed}"):
        costs.predict(DEEP4, SMOLLM2, 10, 5, 8, costs.CPU, main_bytes=value)
    with pytest.raises(ArgumentError, match=f"^speculator_bytes={value!r} .* {allowed}"):
        costs.predict(DEEP4, SMOLLM2, 10, 5, 8, costs.CPU, speculator_bytes=value)


def test_other_arguments_out_of_range():
    with pytest.raises(ArgumentError, match=r"^flops_per_s=1.0 .* given together with the other rate, or not at all$"):
        costs.predicted_gain(DEEP4, SMOLLM2, 10, 5, 8, flops_per_s=1.0)
    with pytest.raises(ArgumentError, match=r"^bytes_per_s=2.0 .* given together with the other rate, or not at all$"):
        costs.predicted_gain(DEEP4, SMOLLM2, 10, 5, 8, bytes_per_s=2.0)
    with pytest.raises(ArgumentError, match=r"^look_ahead=0 "):
        costs.predict(DEEP4, SMOLLM2, 10, 5, 0, costs.CPU)
    with pytest.raises(ArgumentError, match=r"^num_tokens=0 "):
        costs.flop_ceiling(DEEP4, SMOLLM2, 0, 1)
    with pytest.raises(ArgumentError, match=r"^num_tokens=-1 "):
        costs.prefill_flops(TINY, -1)
    for call in (costs.decode_flops, lambda model, context: costs.decode_bytes(model, context, 4)):
        with pytest.raises(ArgumentError, match=r"^context=0 .* an integer of at least 1$"):
            call(TINY, 0)
