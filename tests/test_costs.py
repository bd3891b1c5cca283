"""The cost model, against the ceilings of the method's own table and against sums written out."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_float8_weights_written_out():
    feed = 3 * 8 * 24
    other = 3 * 2 * 8 * 6 * (4 + 2) + 8 * 50
    assert costs.mlp_parameters(TINY) == feed
    assert costs.weight_bytes(TINY, 2, 2) == 2 * (other + feed) + 2 * feed
    # Llama-3.1-405B-FP8: four fifths of its weights in float8; 483 GB a pass where bfloat16 takes 808.
    assert 124 * costs.mlp_parameters(LLAMA["405B"]) == pytest.approx(324.5e9, rel=1e-3)
    assert costs.weight_bytes(LLAMA["405B"], 2, 124) == pytest.approx(483.0e9, rel=1e-3)


def test_communication_written_out():
    # Ten states of eight numbers over four devices: each sends 2 * 3/4 of them in a ring.
    assert costs.all_reduce_bytes(10 * 8, 4, 1) == 120
    # Two all-reduces in each of three layers and the embedding's, all in bfloat16; then the layers' in float32.
    assert costs.collective_bytes(TINY, 10, 4, 2) == 7 * 120 * 2
    assert costs.collective_bytes(TINY, 10, 4, 2, 4) == 6 * 120 * 4 + 120 * 2
    assert costs.collective_bytes(TINY, 10, 1, 2) == 0


def test_data_sheets_times_efficiency():
    efficiency = costs.Efficiency(0.5, 0.25, 0.125, 0.75, 0.375)
    machine = costs.H100.machine(8, efficiency)
    assert machine == costs.Machine(8 * 494.5e12, 8 * 2.5125e12, 8 * 123.625e12, 8 * 494.75e12, 8, 168.75e9)
    assert costs.H200.bytes_per_s > costs.H100.bytes_per_s
    assert replace(costs.H200, name="", bytes_per_s=0, memory_bytes=0) == replace(
        costs.H100, name="", bytes_per_s=0, memory_bytes=0
    )


BUSY = costs.Machine(1e9, 1e30, 5e8, 4e9, devices=4, link_bytes_per_s=1e6)
"""Reads take no time."""
READING = costs.Machine(1e30, 1e6)


def test_every_kind_of_flop_has_its_rate():
    tokens, batch = 100, 3
    attention = 3 * 4 * 4 * 6 * 5050
    fp8 = 2 * 2 * 3 * 8 * 24 * tokens
    plain = costs.prefill_flops(TINY, tokens) - attention - fp8
    sent = costs.collective_bytes(TINY, batch * tokens, 4, 2)
    prediction = costs.predict(TINY, TINY, tokens, 40, 1, BUSY, main_fp8_layers=2, batch=batch)
    assert costs.attention_flops(TINY, tokens) == attention
    seconds = batch * (plain / 1e9 + attention / 5e8 + fp8 / 4e9) + sent / 1e6
    assert prediction.dense == pytest.approx(seconds, rel=1e-12)


def test_score_and_look_ahead_of_a_batch():
    prediction = costs.predict(TINY, TINY, 100, 40, 3, BUSY, batch=5)
    sent = 2 * 3 / 4 * 5 * 3 * 100 * 4
    assert prediction.score == pytest.approx(5 * costs.scoring_flops(TINY, 100, 3) / 1e9 + sent / 1e6, rel=1e-12)
    flops = 5 * (costs.decode_flops(TINY, 101) + costs.decode_flops(TINY, 102))
    sent = 2 * costs.collective_bytes(TINY, 5, 4, 2)
    assert prediction.look_ahead == pytest.approx(flops / 1e9 + sent / 1e6, rel=1e-12)


def test_a_check_reads_the_weights_and_the_kept_part_once():
    prediction = costs.predict(TINY, TINY, 1000, 301, 2, READING, batch=3, checks=4)
    free = costs.predict(TINY, TINY, 1000, 301, 2, READING, batch=3)
    check = (costs.weight_bytes(TINY, 2) + 3 * 2 * costs.key_bytes(TINY, 301, 2)) / 1e6
    assert prediction.look_ahead == pytest.approx(free.look_ahead + 4 * check, rel=1e-12)
    assert replace(prediction, look_ahead=free.look_ahead) == free
    busy = [costs.predict(TINY, TINY, 100, 40, 3, BUSY, checks=count).look_ahead for count in (0, 1)]
    flops, sent = 3 * costs.decode_flops(TINY, 40), costs.collective_bytes(TINY, 3, 4, 2)
    assert busy[1] - busy[0] == pytest.approx(flops / 1e9 + sent / 1e6, rel=1e-9)
    with pytest.raises(ArgumentError, match="^checks=-1 "):
        costs.predict(TINY, TINY, 100, 40, 3, BUSY, checks=-1)


def test_weights_are_read_once_a_pass_and_caches_once_a_prompt():
    prediction = costs.predict(TINY, TINY, 1000, 301, 2, READING, main_fp8_layers=1, batch=3, chunk=300)
    main, draft = costs.weight_bytes(TINY, 2, 1), costs.weight_bytes(TINY, 2)
    seconds = [4 * main / 1e6, 4 * draft / 1e6, 2 * main / 1e6]
    assert [prediction.dense, prediction.speculate, prediction.sparse] == pytest.approx(seconds, rel=1e-12)
    assert prediction.look_ahead == (draft + 3 * 2 * costs.key_bytes(TINY, 1001, 2)) / 1e6
    assert prediction.score == 3 * 2 * costs.key_bytes(TINY, 1000, 2) / 1e6


def test_one_device_sends_nothing():
    alone = replace(BUSY, devices=1)
    silent = replace(BUSY, link_bytes_per_s=None)
    assert costs.predict(TINY, TINY, 50, 20, 4, alone) == costs.predict(TINY, TINY, 50, 20, 4, silent)
    assert costs.predict(TINY, TINY, 50, 20, 4, BUSY).dense > costs.predict(TINY, TINY, 50, 20, 4, alone).dense


MACHINES = st.sampled_from([costs.CPU, costs.ACCELERATOR, costs.H100.machine(8, costs.Efficiency())])
NAMES = st.sampled_from(["1B", "8B", "70B", "405B"])


@settings(max_examples=60, deadline=None)
@given(NAMES, NAMES, MACHINES, st.integers(2, 200_000), st.data())
def test_more_kept_or_longer_takes_longer(main, speculator, machine, tokens, data):
    kept = data.draw(st.integers(1, tokens - 1))
    common = {"batch": data.draw(st.integers(1, 64)), "chunk": data.draw(st.sampled_from([None, 512]))}
    models = LLAMA[main], LLAMA[speculator]
    one = costs.predict(*models, tokens, kept, 8, machine, **common)
    more = costs.predict(*models, tokens, kept + 1, 8, machine, **common)
    longer = costs.predict(*models, tokens + 1, kept, 8, machine, **common)
    whole = costs.predict(*models, tokens, tokens, 8, machine, **common)
    assert one.sparse <= more.sparse <= one.dense == more.dense <= longer.dense
    assert one.gain >= more.gain >= whole.gain
    assert longer.speculate >= one.speculate
    assert longer.look_ahead >= one.look_ahead
    assert longer.score > one.score
    assert whole.total == whole.speculate + whole.look_ahead + whole.score + whole.dense
    assert whole.gain < 1


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: costs.Machine(1, 1, devices=0), "devices=0 "),
        (lambda: costs.Machine(1, 1, link_bytes_per_s=0), "link_bytes_per_s=0 "),
        (lambda: costs.Machine(1, 1, attention_flops_per_s=-1), "attention_flops_per_s=-1 "),
        (lambda: costs.Machine(1, 1, fp8_flops_per_s="1"), "fp8_flops_per_s='1' "),
        (lambda: costs.Efficiency(matmul=0), "matmul=0 .* a number above 0 and up to 1$"),
        (lambda: costs.Efficiency(link=1.01), "link=1.01 "),
        (lambda: costs.predict(TINY, TINY, 9, 3, 8, BUSY, batch=0), "batch=0 "),
        (lambda: costs.predict(TINY, TINY, 9, 3, 8, BUSY, chunk=0), "chunk=0 "),
        (lambda: costs.predict(TINY, TINY, 9, 3, 8, BUSY, sum_bytes=0), "sum_bytes=0 "),
        (lambda: costs.predict(TINY, TINY, 9, 3, 8, BUSY, main_fp8_layers=4), "main_fp8_layers=4 .* from 0 to 3$"),
    ],
)
def test_machines_and_batches_out_of_range(make, said):
    with pytest.raises(ArgumentError, match=f"^{said}"):
        make()
