"""The report: kinds of prompts, recall, and the page that needs no other file."""

import itertools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specprefill_jax.errors import ArgumentError, SpecPrefillError
from specprefill_jax.evals.compressibility import TOLERANCE, Curve, Kind, as_tsv, classify, curves, kinds_table
from specprefill_jax.evals.document import Figure, Heading, Table, Text, to_html, to_markdown
from specprefill_jax.evals.report import Results, figures, read, report
from specprefill_jax.evals.tables import Row


@pytest.mark.parametrize(
    ("scores", "kind"),
    [
        ([1, 1, 1], "compressible"),
        ([0.95, 1, 1], "compressible"),
        ([0.9, 0.95, 1], "compressible"),  # exactly the tolerance
        ([0, 1, 1], "information-dense"),
        ([0, 0, 0.5], "information-dense"),
        ([0.3, 0.5, 0.7], "information-dense"),
        ([1, 0, 1], "noisy"),
        ([1, 1, 0], "noisy"),  # sparse is better than dense
        ([0, 1, 0.5], "noisy"),
        ([0.5, 0.45, 0.38], "noisy"),  # falls little by little
        ([0, 0, 0], "unanswered"),
        ([0.1, 0, 0], "unanswered"),
    ],
)
def test_kinds(scores, kind):
    assert classify(scores) == kind


@given(st.lists(st.integers(0, 10).map(lambda tenths: tenths / 10), min_size=2, max_size=5))
def test_every_sample_is_of_one_kind(scores):
    """Each kind means what it says, by the obvious loops."""
    falls = [a - b for a, b in itertools.combinations(scores, 2)]
    kind = classify(scores)
    if kind is Kind.UNANSWERED:
        assert max(scores) <= TOLERANCE
    elif kind is Kind.NOISY:
        assert max(falls) > TOLERANCE
    else:
        assert max(falls) <= TOLERANCE < max(scores)
        assert (scores[-1] - scores[0] <= TOLERANCE) == (kind is Kind.COMPRESSIBLE)


def row(setting, key, score, rate=1.0, method="specprefill", task="t", benchmark="made") -> Row:
    return Row(f"{task}/1/{key}", benchmark, task, "", "1", setting, method, rate, score, rate, 1.0)


ROWS = [
    row("p3", "a", 1.0, 0.3),
    row("dense", "a", 1.0, method="dense"),
    row("p1", "a", 0.0, 0.1),
    row("dense", "b", 0.0, method="dense", task="u"),
    row("p1", "b", 1.0, 0.1, task="u"),
    row("p1", "c", 1.0, 0.1),  # never read whole
    row("p1", "d", None, 0.1),
    row("dense", "d", 1.0, method="dense"),
    row("random_p1", "a", 0.0, 0.1, "random"),
    row("p1_full", "a", 1.0, 0.1),
]


def test_curves():
    found = curves(ROWS)
    assert found == [
        Curve("made", "t", "t/1/a", "p*", ((0.1, 0.0), (0.3, 1.0), (1.0, 1.0))),
        Curve("made", "u", "u/1/b", "p*", ((0.1, 1.0), (1.0, 0.0))),
        Curve("made", "t", "t/1/a", "p*_full", ((0.1, 1.0), (1.0, 1.0))),
    ]
    assert [curve.kind for curve in found] == ["information-dense", "noisy", "compressible"]
    assert [curve.needed for curve in found] == [0.3, 0.1, 0.1]
    assert kinds_table(found[:2]).lines == [
        ["t", "0", "1", "0", "0", "1"],
        ["u", "0", "0", "1", "0", "1"],
        ["all tasks", "0", "1", "1", "0", "2"],
    ]


def test_needed_looks_down_from_the_whole_prompt():
    curve = Curve("b", "t", "s", "p*", ((0.1, 1.0), (0.3, 0.0), (0.5, 0.95), (1.0, 1.0)))
    assert curve.needed == 0.5
    assert Curve("b", "t", "s", "p*", ((0.1, 0.0), (0.3, 0.8), (1.0, 1.0))).needed == 1.0


def test_samples_as_lines():
    found = [*curves(ROWS), Curve("b", "t", "odd\tkey\n", "p*", ((0.2, 0.123456789), (1.0, 1.0)))]
    lines = [line.split("\t") for line in as_tsv(found).splitlines()]
    head = ["benchmark", "sample", "task", "way", "kind", "needed"]
    assert lines[0] == [*head, "score at 0.1", "score at 0.2", "score at 0.3", "score at 1"]
    assert lines[1] == ["made", "t/1/a", "t", "p*", "information-dense", "0.3", "0", "", "1", "1"]
    assert lines[4] == ["b", "odd key", "t", "p*", "information-dense", "1", "", "0.123457", "", "1"]


def found(setting, key, rate, **measured) -> dict:
    """A row of recall, in which three of ten chunks were kept."""
    method = "answer" if setting.endswith("answer") else "specprefill"
    fields = {"recall": 2 / 3, "mass": 0.4, "oracle_mass": 0.5, "spearman": 0.25, "pearson": None, "skipped": None}
    where = {"benchmark": "made", "task": "t", "category": "", "bucket": "1", "key": key, "kind": "recall"}
    chunks = {"num_chunks": 10, "kept_chunks": 3}
    return {**where, "setting": setting, "method": method, "keep_rate": rate, **chunks, **fields, **measured}


def test_recall_is_reported_beside_chance():
    rows = [found(setting, key, 0.3) for setting in ("p3_full", "p3_full_answer") for key in "ab"]
    rows[0]["recall"] = 0.0
    unread = {"skipped": "too long", "recall": None, "mass": None, "oracle_mass": None, "spearman": None}
    rows.append({**found("p3_full", "c", 0.3, **unread)})
    results = Results(recalls={"made": rows})
    text = to_markdown(report(results, 0))
    assert "## made: recall of the oracle\n" in text
    assert "1 of 5 rows could not be read." in text
    head = "| setting | chunks | by chance | attention | oracle's attention | Spearman | Pearson |"
    assert head in text
    both = "30.0 [30.0, 30.0] | 40.0 [40.0, 40.0] | 50.0 [50.0, 50.0] | 25.0 [25.0, 25.0] | - |"
    assert f"| p3_full | 33.3 [0.0, 66.7] | {both}" in text
    assert f"| p3_full_answer | 66.7 [66.7, 66.7] | {both}" in text
    [svg] = figures(results, 0).values()
    assert "random_p*: 30.0 at 0.3." in svg
    assert "p*_full_answer: 66.7 at 0.3." in svg


def test_rows_that_could_not_be_read_have_no_chance():
    unread = {
        key: value for key, value in found("p3_full", "a", 0.3, skipped="too long").items() if "chunks" not in key
    }
    assert "recall of the oracle" in to_markdown(report(Results(recalls={"made": [unread]}), 0))


def test_read_tells_the_kinds_of_rows_apart(tmp_path):
    with pytest.raises(ArgumentError, match="a folder with files of rows"):
        read(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"kind": "recall", "benchmark": "made"}\n')
    results = read(tmp_path)
    assert (dict(results.answers), dict(results.recalls)) == ({}, {"made": [{"kind": "recall", "benchmark": "made"}]})
    (tmp_path / "b.jsonl").write_text("{}{}\n{}\n")
    with pytest.raises(SpecPrefillError, match=r"b.jsonl, line 1"):
        read(tmp_path)


def test_times_to_first_token(tmp_path):
    dense = {"prompts": 2, "tokens": 4096, "setting": "dense", "keep_rate": 1.0, "kept": 4096, "ideal": 1.0}
    sparse = {**dense, "setting": "p1_full", "keep_rate": 0.1, "kept": 416, "ideal": 9.85, "flop_ceiling": 3.126}
    rows = [
        {**dense, "seconds": {"p50": 12.3456}, "speedup": 1.0, "flop_ceiling": None},
        {**sparse, "seconds": {"p50": 4.5}, "speedup": 2.744},
    ]
    (tmp_path / "ttft.json").write_text(json.dumps({"main": "big", "speculator": "small", "ttft": rows}))
    (tmp_path / "rows.about.json").write_text("{}")
    results = read(tmp_path)
    text = to_markdown(report(results, 0))
    assert "## ttft: times to first token, big by small" in text
    assert "| 2 x 4,096 | dense | 100.0% | 12.3 s | 1.00x | - | 1.00x |" in text
    assert "| 2 x 4,096 | p1_full | 10.2% | 4.5 s | 2.74x | 3.13x | 9.85x |" in text
    assert "2 x 4,096, p*_full: 2.74 at 0.1." in figures(results, 0)["ttft"]
    (tmp_path / "ttft.json").write_text("{")
    with pytest.raises(SpecPrefillError, match=r"ttft.json: not JSON"):
        read(tmp_path)


def test_auto_stands_where_what_it_read_puts_it():
    """Not among the keep rates, nor in the curves over them; of one that could not read anything nothing is drawn."""
    dense = row("dense", "a", 0.5, method="dense")
    auto = replace(row("product_auto", "a", 0.4, "auto", "product"), kept=0.25)
    unread = row("product_auto_win8", "a", None, "auto", "product")
    drawn = figures(Results({"made": [dense, auto, unread]}), 0)["made"]
    assert "product_auto: 40.0 at 0.25." in drawn
    assert "product_auto_win8" not in drawn
    assert curves([dense, auto, unread]) == []
    assert "| product_auto | 1 | 0 | 25.0% |" in to_markdown(report(Results({"made": [dense, auto, unread]}), 0))


def test_rates_of_requests(tmp_path):
    runs = [
        {"mode": "dense", "rate": 1.0, "holds": True, "e2e": {"p50": 2.0, "p95": 3.0}},
        {"mode": "keep 0.1", "rate": 4.0, "holds": False, "e2e": None},
    ]
    best = {"mode": "dense", "max_rate": 1.0, "failed_rate": 1.0512, "speedup": None, "ceiling": None}
    maxima = [best | {"share_of_ceiling": None}, {**best, "mode": "keep 0.1", "max_rate": None, "speedup": 2.5}]
    maxima[1] |= {"ceiling": 3.125, "share_of_ceiling": 0.8}
    about = {"settings": {"protocol": "constant", "requests": 128}, "server": {"model": {"id": "big"}}}
    (tmp_path / "multi_doc.json").write_text(json.dumps({**about, "max_rates": maxima, "runs": runs}))
    results = read(tmp_path)
    text = to_markdown(report(results, 0))
    assert "## multi_doc: requests a second, big" in text
    assert "| dense | 1 | 1.05 | - | - | - |" in text
    assert "| keep 0.1 | - | 1.05 | 2.50 | 3.12 | 0.80 |" in text
    drawn = figures(results, 0)["multi_doc"]
    assert "Constant arrivals, 128 requests a run." in drawn
    assert "dense: up to 1 a second, 2 s there." in drawn


def test_the_papers_numbers_are_drawn_where_they_are_asked_for():
    rows = [row("dense", "a", 0.4, method="dense", benchmark=name) for name in ("longbench", "made")]
    rows.append(row("p1", "a", 0.5, 0.1, benchmark="longbench"))
    times = {"prompts": 2, "tokens": 64, "setting": "p1", "keep_rate": 0.1, "speedup": 2.0, "flop_ceiling": 3.0}
    results = Results({"longbench": rows[::2], "made": rows[1:2]}, {}, {"ttft": {"main": "big", "ttft": [times]}})
    plain, drawn = figures(results, 0), figures(results, 0, with_paper=True)
    assert plain["made"] == drawn["made"]
    assert "paper" not in plain["longbench"] + plain["ttft"]
    assert "paper, 70B by 8B: 52.74 at 0.1, 53.92 at 0.3" in drawn["longbench"]
    assert "paper, 405B: 7.66 at 0.1." in drawn["ttft"]
    Page(drawn["longbench"])
    text = drawn["longbench"]
    frame = re.search(r'id="inside"><rect x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)"', text)
    left, top, width, height = map(int, frame.groups())
    [line] = re.findall(r'class="ideal" points="([^"]+)"', text)
    for point in line.split():
        at, up = map(float, point.split(","))
        assert left <= at <= left + width
        assert top <= up <= top + height


class Page(HTMLParser):
    """Checks that tags close, and collects ids, references to them, and addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.ids, self.referred, self.addresses = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        known = dict(attributes)
        if tag not in ("meta", "link"):
            self.open.append(tag)
        self.ids += [known["id"]] if "id" in known else []
        self.referred += known.get("aria-labelledby", "").split()
        self.referred += [value[5:-1] for value in known.values() if value and value.startswith("url(#")]
        self.addresses += [known[name] for name in ("src", "href") if name in known]

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_stands_alone():
    rows = [replaced for key in "ab" for replaced in (row("dense", key, 1.0, method="dense"), row("p1", key, 0.5, 0.1))]
    recalls = [found("p3_full", key, 0.3) for key in "ab"]
    results = Results({"made": rows, "<b>&": rows}, {"made": recalls})
    text = to_html("Results", report(results, 0))
    page = Page(text)
    assert text.count("<svg") == 3
    assert len(page.ids) == len(set(page.ids)) == 9
    assert set(page.referred) <= set(page.ids)
    assert len(page.referred) >= 6
    assert page.addresses == ["data:,"]
    assert "@import" not in text
    assert "url(h" not in text
    assert "prefers-color-scheme: dark" in text
    assert "<h2>&lt;b&gt;&amp;</h2>" in text
    assert "<b>" not in text


def test_blocks():
    blocks = [Heading(2, "A < B"), Text("x & y"), Table(["a", "b"], [["1|2", "3"]]), Figure("<svg/>")]
    assert to_markdown(blocks) == "## A < B\n\nx & y\n\n| a | b |\n|---|---:|\n| 1\\|2 | 3 |\n"
    text = to_html("t<", blocks)
    assert "<title>t&lt;</title>" in text
    assert "<tr><td>1|2</td><td>3</td></tr>" in text
    assert "<figure><svg/></figure>" in text
