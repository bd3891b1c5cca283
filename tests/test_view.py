"""What people see: text cut by chunks, the map in a terminal and as a page, and the tables."""

import io
import re
from html.parser import HTMLParser
from importlib.resources import files

import numpy as np
import pytest
from chunks import choice_of
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from specprefill_jax.config import SpecPrefillConfig
from specprefill_jax.errors import ArgumentError
from specprefill_jax.planning import Reason, plan
from specprefill_jax.selection import Selection
from specprefill_jax.timing import Timings
from specprefill_jax.view.page import MAX_BARS, render_page, write_page
from specprefill_jax.view.report import DESCRIPTIONS, REASONS, Report, Run, describe, seconds
from specprefill_jax.view.spans import map_prompt, split_text, visible
from specprefill_jax.view.terminal import prompt_map, summary


def decode(ids):
    """Tokens are bytes; what is not UTF-8 becomes U+FFFD, as byte-level tokenizers do it."""
    return bytes(ids).decode(errors="replace")


def select(ids, scores, rate=0.5, **settings):
    """The selection that the given chunk scores lead to; paper mode unless said otherwise."""
    config = SpecPrefillConfig(rate, **{"mode": "paper", "chunk_size": 4, **settings})
    planned = plan(len(ids), config)
    # As chunk_topk does it, without a program to compile for every shape.
    scores = np.asarray(scores, np.float32)
    assert len(scores) == planned.num_chunks
    order = np.argsort(-np.where(planned.forced_mask(), np.inf, scores), kind="stable")
    mask = np.zeros(planned.num_chunks, bool)
    mask[order[: planned.kept_chunks]] = True
    indices = np.flatnonzero(np.repeat(mask, config.chunk_size)[: len(ids)])
    return Selection(planned, choice=choice_of(mask, indices), chunk_scores=scores)


def draw(text, scores, **settings):
    ids = list(text.encode())
    return map_prompt(ids, select(ids, scores, **settings), decode)


def run_of(label="sparse", kept=25, total=100, reason=Reason.ENGAGED, text="Yes.", **times):
    timings = Timings(**{"main_prefill": 2.0, "decode": 1.0, **times}, tokens={"main_prefill": kept})
    return Run(label, text, 3, "stop", timings, kept, total, reason, None, 2.4, timings.total)


def printed(renderable, width=100, **options):
    console = Console(width=width, record=True, file=io.StringIO(), **options)
    console.print(renderable)
    return console.export_text(styles=options.get("force_terminal", False))


# Spans


def test_spans_carry_chunks_scores_and_ranks():
    prompt = draw("aaaabbbbccccdd", [0.1, 0.4, 0.2, 0.4])
    assert [span.text for span in prompt.spans] == ["aaaa", "bbbb", "cccc", "dd"]
    assert [span.kept for span in prompt.spans] == [False, True, False, True]
    assert [span.rank for span in prompt.spans] == [4, 1, 3, 2], "equal scores rank in the order of the text"
    assert [(span.start, span.end) for span in prompt.spans] == [(0, 4), (4, 8), (8, 12), (12, 14)]
    assert [span.score for span in prompt.spans] == pytest.approx([0.1, 0.4, 0.2, 0.4])
    assert [span.shade for span in prompt.spans] == pytest.approx([0.0, 1.0, 0.5, 1.0]), "logarithmic"
    assert (prompt.kept_tokens, prompt.total_tokens, prompt.num_chunks) == (6, 14, 4)
    assert prompt.scored


def test_forced_chunks_are_marked_and_do_not_set_the_scale():
    scores = [100.0, 0.1, 0.4, 0.1, 0.2]
    prompt = draw("aaaabbbbccccddddeeee", scores, rate=0.6, mode="product", tail_tokens=1, min_prompt_tokens=0)
    assert [span.forced for span in prompt.spans] == [True, False, False, False, True]
    assert [span.kept for span in prompt.spans] == [True, False, True, False, True]
    assert [span.shade for span in prompt.spans] == pytest.approx([1.0, 0.0, 1.0, 0.0, 0.5])


def test_a_prompt_read_whole_has_no_scores():
    prompt = map_prompt(list(b"abcdef"), Selection.whole(6, Reason.SHORT_PROMPT, chunk_size=4), decode)
    assert [(span.text, span.kept, span.score, span.forced) for span in prompt.spans] == [
        ("abcd", True, None, False),
        ("ef", True, None, False),
    ]
    assert not prompt.scored


def test_equal_and_zero_scores_do_not_divide_by_zero():
    assert [span.shade for span in draw("aaaabbbb", [0.5, 0.5]).spans] == [1.0, 1.0]
    assert [span.shade for span in draw("aaaabbbb", [0.0, 0.0]).spans] == [0.0, 0.0]
    assert [span.shade for span in draw("aaaabbbbcccc", [0.0, 0.25, 0.5]).spans] == [0.0, 0.0, 1.0]


def test_ids_of_another_prompt_are_refused():
    with pytest.raises(ArgumentError, match="ids='3 tokens'.*the 8 tokens"):
        map_prompt([1, 2, 3], select(list(range(8)), [1.0, 2.0]), decode)


def test_a_character_across_chunks_is_in_the_later_one():
    text = "ab\N{WATER WAVE}c"  # two bytes, four bytes, one byte
    assert split_text(list(text.encode()), [1, 3, 5, 7], decode) == ["a", "b", "", "\N{WATER WAVE}c"]


@given(
    st.text(st.characters(codec="utf-8", exclude_characters="\ufffd")),
    st.lists(st.integers(1, 12), min_size=1, max_size=60),
)
@settings(max_examples=200, deadline=None)
def test_texts_join_to_the_whole_text(text, steps):
    ids = list(text.encode())
    if not ids:
        return
    ends = [end for end in np.cumsum(steps).tolist() if end < len(ids)] + [len(ids)]
    texts = split_text(ids, ends, decode)
    assert "".join(texts) == text
    for end, done in zip(ends, np.cumsum([len(part) for part in texts]), strict=True):
        assert text[:done] == decode(ids[:end]).rstrip("\ufffd"), "no more than is certain, and no less"


@given(st.binary(min_size=1, max_size=200), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_bytes_that_are_no_text_join_too(data, size):
    ids = list(data)
    ends = [*range(size, len(ids), size), len(ids)]
    texts = split_text(ids, ends, decode)
    assert "".join(texts) == decode(ids)
    assert len(texts) == len(ends)


def test_a_decoder_that_strips_leading_spaces():
    """Sentencepiece decoders drop the space of the first word, so a chunk cannot be decoded alone."""
    words = ["once", "upon", "a", "time"]
    texts = split_text([0, 1, 2, 3], [1, 2, 4], lambda ids: " ".join(words[index] for index in ids))
    assert texts == ["once", " upon", " a time"]


def test_control_characters_are_made_inert():
    assert visible("a\x1b[31m\x00\tb\r\nc\rd\x7f") == "a\u241b[31m\u2400\tb\nc\u240dd\u2421"
    assert visible("\u202eabc\x9b\ud800") == "<U+202E>abc<U+009B>\ufffd"
    assert visible("naïve 日本 👩\u200d👧") == "naïve 日本 👩\u200d👧"


# Terminal

TEXT = "keep drop this part keep"


def test_map_with_colour_holds_all_text_and_dims_what_was_dropped():
    prompt = draw(TEXT, [0.9, 0.1, 0.1, 0.1, 0.1, 0.8], rate=0.3)
    said = printed(prompt_map(prompt), force_terminal=True, color_system="truecolor")
    assert re.sub(r"\x1b\[[0-9;]*m", "", said).startswith(TEXT + "\n")
    assert "\x1b[38;2;29;26;15;48;2;255;186;26mkeep\x1b[0m" in said, "the best chunk has the strongest shade"
    assert "\x1b[2m drop\x1b[0m" in said or "\x1b[2m dro\x1b[0m" in said
    assert "always kept" in said


def test_map_without_colour_shows_what_was_kept_and_counts_the_rest():
    prompt = draw(TEXT, [0.9, 0.1, 0.1, 0.1, 0.1, 0.8], rate=0.3)
    lines = [line.rstrip() for line in printed(prompt_map(prompt, colour=False)).splitlines()]
    assert lines == ["█ keep", "  ... 16 tokens dropped ...", "█ keep"]


def test_the_map_cannot_drive_the_terminal():
    prompt = draw("a\x1b]0;x\x07[b]red", [0.9, 0.1, 0.2, 0.3], rate=1.0)
    said = printed(prompt_map(prompt), force_terminal=True, color_system="truecolor")
    assert "\x1b]" not in said
    assert "\x07" not in said
    assert "[b]" in re.sub(r"\x1b\[[0-9;]*m", "", said), "the prompt is no markup"


def test_one_run_shows_shares_and_rates():
    said = printed(summary(Report("m", "s", (run_of(speculate=1.0),))))
    assert re.search(r"speculate +1\.00 s +25\.0 %", said)
    assert re.search(r"main prefill +2\.00 s +50\.0 % +25 +12\b", said)
    assert re.search(r"tokenise +–", said)
    assert re.search(r"to the first token +3\.00 s", said)
    assert re.search(r"tokens read +25 of 100", said)
    assert re.search(r"keep rate +25\.0 %", said)
    assert "engaged: the speculator chose what to read" in said
    assert "answer" not in said


def test_two_runs_are_compared():
    dense = run_of("dense", kept=100, reason=Reason.DISABLED, main_prefill=6.0, text="Dense says so.")
    report = Report("smollm2-135m-deep4", "smollm2-135m", (dense, run_of(text="Sparse too.")), 12.5)
    said = printed(summary(report), width=200)
    assert report.speedup == 3.0
    assert "dense 6.00 s, sparse 2.00 s: 3.00x; the cost model's ceiling is 2.40x" in said
    assert re.search(r"Dense says so\. +Sparse too\.", said)
    assert "compiling took 12.5 s" in said
    assert DESCRIPTIONS["smollm2-135m-deep4"] in said
    assert report.as_dict()["speedup"] == 3.0


def test_one_run_has_nothing_to_compare():
    report = Report("m", None, (run_of("dense", reason=Reason.DISABLED),))
    assert (report.dense, report.speedup) == (None, None)
    assert report.as_dict()["speedup"] is None


def test_every_reason_has_words():
    assert set(REASONS) == set(Reason)


def test_the_stand_in_is_described():
    assert describe("smollm2-135m-deep4") == (
        "smollm2-135m-deep4 (SmolLM2-135M with three zero-output blocks after every block: the same function at four "
        "times the compute; a stand-in for a larger main model)"
    )
    assert describe("/models/mine") == "/models/mine"


@pytest.mark.parametrize(
    ("value", "text"),
    [(123.4, "123.4 s"), (9.876, "9.88 s"), (0.9, "900 ms"), (0.045, "45 ms"), (0.0003, "0.3 ms")],
)
def test_seconds_for_people(value, text):
    assert seconds(value) == text


# Page


class Page(HTMLParser):
    """Elements of a page: (tag, attributes, text inside), and every tag must be closed."""

    VOID = ("meta", "link", "br", "rect")

    def __init__(self, source):
        super().__init__()
        self.elements, self.open = [], []
        self.feed(source)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.elements.append([tag, dict(attributes), ""])
        if tag not in self.VOID:
            self.open.append((tag, len(self.elements) - 1))

    def handle_startendtag(self, tag, attributes):
        self.elements.append([tag, dict(attributes), ""])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, index in self.open:
            self.elements[index][2] += data

    def all(self, tag, **attributes):
        return [e for e in self.elements if e[0] == tag and all(e[1].get(k) == v for k, v in attributes.items())]

    def one(self, tag, **attributes):
        (element,) = self.all(tag, **attributes)
        return element


def page_of(text=TEXT, scores=(0.9, 0.1, 0.1, 0.1, 0.1, 0.8), rate=0.3, runs=None, **names):
    report = Report(names.get("main", "m"), names.get("speculator", "s"), runs or (run_of(),))
    return render_page(draw(text, list(scores), rate=rate), report)


def test_page_holds_the_prompt_and_the_figures():
    page = Page(page_of())
    assert page.one("section", id="text")[2] == TEXT
    assert [mark[2] for mark in page.all("mark")] == ["keep", "keep"]
    first = page.all("mark")[0][1]
    assert first["title"] == "chunk 1, kept, score 0.9, rank 1"
    assert (first["data-c"], first["data-t"], first["data-v"], first["data-r"]) == ("0", "0 to 3", "0.9", "1")
    gaps = [span for span in page.all("span") if "data-gap" in span[1]]
    assert {span[1]["data-gap"] for span in gaps} == {"16"}
    assert page.one("h1")[2] == "The main model read 25 of 100 tokens"
    assert [dd[2] for dd in page.all("dd")[:3]] == ["25.0 %", "2.00 s", "2.40x"]
    assert page.one("article")[2].endswith("Yes.")
    assert len(page.all("rect")) == 6
    assert [rect[1]["data-c"] for rect in page.all("rect", **{"class": "k"})] == ["0", "5"]


def test_page_stands_alone():
    source = page_of()
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)|url\(|@import|https?:""", source)
    policy = Page(source).one("meta", **{"http-equiv": "Content-Security-Policy"})[1]["content"]
    assert "default-src 'none'" in policy
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/]{43}='", policy)


def test_page_has_its_script_and_style_as_files_of_the_package():
    script = files("specprefill_jax.view").joinpath("page.js").read_text("utf-8")
    style = files("specprefill_jax.view").joinpath("page.css").read_text("utf-8")
    assert "</script" not in script
    assert "</style" not in style
    page = Page(page_of())
    assert page.one("script")[2] == script
    assert page.one("style")[2].strip() == style.strip()


def test_help_lists_the_keys_that_the_script_knows():
    source = page_of()
    shown = set("".join(kbd[2] for kbd in Page(source).one("dialog") and Page(source).all("kbd"))) - set(" /")
    keys = re.search(r"const keys = \{(.*?)\};", source, re.S).group(1)
    known = set(re.findall(r'(?:^|[,\s])"?([a-zA-Z?]|Arrow\w+)"?:', keys))
    arrows = {"ArrowRight": "→", "ArrowLeft": "←"}
    assert {arrows.get(key, key) for key in known} == shown


def test_hostile_text_stays_text():
    hostile = "</section><script>alert(1)</script><img src=x onerror=alert(1)>&lt;\u202e\x1b\"'--><!--"
    chunks = -(-len(hostile.encode()) // 4)
    names = {"main": "<b>m</b>", "speculator": "s\"'><script>"}
    source = page_of(hostile, range(1, chunks + 1), runs=(run_of(text="<script>alert(2)</script>"),), **names)
    page = Page(source)
    assert page.one("section", id="text")[2] == visible(hostile)
    assert len(page.all("script")) == 1
    assert not page.all("img")
    assert page.one("article")[2].endswith("<script>alert(2)</script>")
    assert "<b>m</b>" in page.one("p", **{"class": "models"})[2]
    assert "\x1b" not in source
    assert "\u202e" not in source


def test_a_page_of_a_prompt_read_whole():
    ids = list(b"abcdef")
    prompt = map_prompt(ids, Selection.whole(6, Reason.SHORT_PROMPT), decode)
    page = Page(render_page(prompt, Report("m", "s", (run_of(kept=6, total=6, reason=Reason.SHORT_PROMPT),))))
    assert page.one("h1")[2] == "The main model read all 6 tokens"
    assert not page.all("rect")
    assert page.one("section", **{"class": "settings"})[2].endswith("short_prompt: the prompt is short")
    assert "was dropped" not in page.one("ul", **{"class": "legend"})[2]


def test_a_page_compares_two_runs():
    dense = run_of("dense", kept=100, reason=Reason.DISABLED, main_prefill=6.0, text="Dense.")
    page = Page(page_of(runs=(dense, run_of(text="Sparse.")), main="smollm2-135m-deep4"))
    assert [article[2] for article in page.all("article")] == [
        "Answer, dense 3 tokens, ended by stopDense.",
        "Answer, sparse 3 tokens, ended by stopSparse.",
    ]
    assert len(page.all("table")) == 2
    assert [dd[2] for dd in page.all("dd")[:5]] == ["25.0 %", "2.00 s", "6.00 s", "3.00x", "2.40x"]
    assert "a stand-in for a larger main model" in page.one("p", **{"class": "models"})[2]


def test_long_prompts_share_bars():
    chunks = 2 * MAX_BARS + 1
    page = Page(page_of("abcd" * chunks, np.linspace(1, 2, chunks), rate=0.001))
    assert len(page.all("rect")) == -(-chunks // 3)
    assert [rect[1]["data-c"] for rect in page.all("rect", **{"class": "k"})] == [str(chunks - 1)]
    heights = [float(rect[1]["height"]) for rect in page.all("rect")]
    assert heights == sorted(heights)
    assert heights[-1] == 100.0


def test_the_page_is_written_whole_or_not_at_all(tmp_path):
    prompt = draw(TEXT, [0.9, 0.1, 0.1, 0.1, 0.1, 0.8])
    report = Report("m", "s", (run_of(),))
    target = tmp_path / "map.html"
    target.write_text("old")
    write_page(target, prompt, report)
    assert target.read_text(encoding="utf-8") == render_page(prompt, report)
    assert [path.name for path in tmp_path.iterdir()] == ["map.html"]
    with pytest.raises(OSError, match="nowhere"):
        write_page(tmp_path / "nowhere" / "map.html", prompt, report)
