"""scripts/roofline.py: published sizes, rows, the reading of the paper's point, the JSON file, the plot, and errors."""

import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import fields
from pathlib import Path

import pytest
from script_modules import load_script

from specprefill_jax import costs
from specprefill_jax.errors import ArgumentError

ROOT = Path(__file__).parents[2]
script = load_script("roofline")

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[dict, ElementTree.Element]:
    folder = tmp_path_factory.mktemp("roofline") / "new"
    script.main(script.Args(out=folder / "a.json", plot=folder / "a.svg"))
    return json.loads((folder / "a.json").read_text()), ElementTree.parse(folder / "a.svg").getroot()


def find(rows: list[dict], **wanted) -> dict:
    [row] = [row for row in rows if wanted.items() <= row.items()]
    return row


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Llama-3.2-1B", 1.2358),
        ("Llama-3.1-8B", 8.0303),
        ("Llama-3.1-70B", 70.554),
        ("Llama-3.1-405B", 405.853),
    ],
)
def test_sizes_are_the_published_ones(name, billions):
    assert script.parameters(script.LLAMAS[name]) == pytest.approx(billions * 1e9, rel=1e-4)


def test_parts_add_up_to_all_parameters():
    """Float8 and bfloat16 weights, the embedding and the norms, by the pair that has all of them."""
    pair = script.PAIRS[0]
    main = pair.main
    fp8 = pair.fp8_layers * costs.mlp_parameters(main)
    bfloat16 = (costs.weight_bytes(main, 2, pair.fp8_layers) - fp8) / 2
    norms = (2 * main.num_layers + 1) * main.hidden_size
    assert fp8 + bfloat16 + main.vocab_size * main.hidden_size + norms == script.parameters(main)
    assert fp8 / script.parameters(main) == pytest.approx(0.8, abs=0.001)


def test_rows(written):
    rows = written[0]["rows"]
    assert len(rows) == 3 * 2 * 6 * 4
    for row in rows:
        assert row["batch"] * row["tokens"] == 524288
        assert row["kept"] % 32 == 0
        assert row["tokens"] * row["keep_rate"] <= row["kept"] < row["tokens"] * row["keep_rate"] + 32
        phases = ("speculate", "look_ahead", "score", "main_prefill")
        assert row["sparse_ttft"] == pytest.approx(sum(row[phase] for phase in phases))
        assert row["speedup"] == pytest.approx(row["dense_ttft"] / row["sparse_ttft"])
        assert 0 < row["dense_communication"] < row["dense_ttft"]
        assert 0 < row["sparse_communication"] < row["sparse_ttft"]
        assert row["ideal"] == row["tokens"] / row["kept"]
        assert row["speedup"] < 1.15 * row["flop_ceiling"]


def test_speedup_falls_with_the_keep_rate_and_rises_with_the_length(written):
    rows = written[0]["rows"]
    for one in rows:
        for other in rows:
            if (one["pair"], one["device"]) == (other["pair"], other["device"]):
                if one["tokens"] == other["tokens"] and one["keep_rate"] < other["keep_rate"]:
                    assert one["speedup"] > other["speedup"]
                if one["keep_rate"] == other["keep_rate"] and one["tokens"] < other["tokens"]:
                    assert one["dense_ttft"] < other["dense_ttft"]


def test_the_paper_lies_among_its_pairs_predictions(written):
    rows = [r for r in written[0]["rows"] if r["device"] == "H200 SXM" and r["keep_rate"] == 0.1]
    [paper] = [entry["speedup"] for entry in written[0]["paper"] if entry["figure"] == "TTFT"]
    speedups = {row["tokens"]: row["speedup"] for row in rows if row["pair"] == "405B-FP8 + 8B"}
    assert speedups[16384] < paper < speedups[65536]


def test_dense_seconds_by_hand(written):
    """70B over 4 x 131,072 tokens: products, attention and all-reduces, each at its rate."""
    row = find(written[0]["rows"], pair="70B + 8B", device="H100 SXM", tokens=131072, keep_rate=0.1)
    products = 4 * (2 * 80 * 855_638_016 * 131072 + 2 * 8192 * 128256) / (8 * 989e12 * 0.65)
    attention = 4 * 80 * 4 * 64 * 128 * (131072 * 131073 // 2) / (8 * 989e12 * 0.35)
    sent = 524288 * 8192 * (160 + 1) * 2 * 1.75 / (450e9 * 0.7)
    assert row["dense_ttft"] == pytest.approx(products + attention + sent, rel=1e-9)
    assert row["dense_communication"] == pytest.approx(sent, rel=1e-9)
    assert row["dense_bytes"] == pytest.approx(70.552e9 * 2 + 524288 * 80 * 8 * 128 * 4, rel=1e-4)


def test_what_does_not_fit(written):
    """405B-FP8 and the cache of 524,288 tokens: too much for H100s read whole, not sparsely."""
    for device, dense in (("H100 SXM", False), ("H200 SXM", True)):
        row = find(written[0]["rows"], pair="405B-FP8 + 8B", device=device, tokens=32768, keep_rate=0.1)
        assert (row["dense_bytes"] <= row["memory_bytes"]) is dense
        assert row["sparse_bytes"] <= row["memory_bytes"]


def test_json(written):
    result = written[0]
    assert {"date", "command", "commit", "versions", "devices"} <= set(result)
    assert "not measured" in result["kind"]
    assert set(result["efficiency"]) == {field.name for field in fields(costs.Efficiency)}
    assert all(share["source"] and 0 < share["value"] <= 1 for share in result["efficiency"].values())
    cases = {case["change"]: case["speedup"] for case in result["variants"]["cases"]}
    base = find(result["rows"], pair="405B-FP8 + 8B", device="H200 SXM", tokens=32768, keep_rate=0.1)
    assert cases.pop("as assumed") == base["speedup"]
    assert len(cases) == 5
    assert all(math.isfinite(value) and value != base["speedup"] for value in cases.values())


def test_a_share_that_was_given_says_so(tmp_path):
    out = tmp_path / "a.json"
    script.main(script.Args(lengths=(8192,), keep_rates=(0.5,), efficiency=costs.Efficiency(link=1.0), out=out))
    shares = json.loads(out.read_text())["efficiency"]
    assert shares["link"] == {"value": 1.0, "source": "given"}
    assert shares["memory"]["source"] == "assumed"


def test_plot(written):
    root = written[1]
    assert root.tag == SVG + "svg"
    assert root.get("role") == "img"
    named = {part.get("id"): part.text for part in root.iter() if part.tag in (SVG + "title", SVG + "desc")}
    assert set(named) == set(root.get("aria-labelledby").split())
    assert "7.66" in named["text"]
    assert "Only the dot was measured" in named["text"]
    lines = [part for part in root.iter(SVG + "polyline") if part.get("class") == "line"]
    assert len(lines) == len(list(root.iter(SVG + "polygon"))) == 3
    for line in lines:
        heights = [float(point.split(",")[1]) for point in line.get("points").split()]
        assert heights == sorted(heights)
        assert script.TOP < heights[-1] < script.BOTTOM
    texts = [text.text for text in root.iter(SVG + "text")]
    assert all(pair.name in texts for pair in script.PAIRS)
    dot, legend = root.iter(SVG + "circle")
    assert float(dot.get("cx")) == pytest.approx(script.LEFT + 0.1 * (script.RIGHT - script.LEFT), abs=0.1)
    assert float(legend.get("cx")) > float(dot.get("cx"))


def test_committed_files_are_of_this_model(written):
    """benchmarks/roofline.json and docs/roofline.svg are what the script writes now."""
    committed = json.loads((ROOT / "benchmarks" / "roofline.json").read_text())
    for key in ("kind", "efficiency", "look_ahead", "chunk", "rows", "variants", "paper"):
        assert committed[key] == written[0][key]
    plot = ElementTree.parse(ROOT / "docs" / "roofline.svg").getroot()
    assert ElementTree.tostring(plot) == ElementTree.tostring(written[1])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lengths": ()}, r"lengths=\(\) is not allowed: lengths must be at least one number"),
        ({"lengths": (0,)}, "lengths=0 is not allowed"),
        ({"keep_rates": (0.1, 1.5)}, "keep_rates=1.5 is not allowed: keep_rates must be a number above 0 and up to 1"),
        ({"tokens": 0}, "tokens=0 is not allowed"),
        ({"devices": 0}, "devices=0 is not allowed"),
        ({"chunk": 0}, "chunk=0 is not allowed"),
    ],
)
def test_bad_arguments(tmp_path, given, said):
    with pytest.raises(ArgumentError, match=said):
        script.main(script.Args(**given, out=tmp_path / "a.json"))
    assert list(tmp_path.iterdir()) == []
