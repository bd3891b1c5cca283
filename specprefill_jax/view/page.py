"""The map as one self-contained HTML page: no request leaves it, and no text of the prompt can run in it."""

import base64
import hashlib
import math
import os
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from specprefill_jax.view.report import DESCRIPTIONS, Report, Run, percent, seconds, times
from specprefill_jax.view.spans import PromptMap, Span, visible

MAX_BARS = 480
"""Bars of the score strip; longer prompts share one among neighbouring chunks, which then shows the best of them."""

_KEYS = (
    ("j →", "next part that was kept"),
    ("k ←", "the one before"),
    ("n / p", "kept part of the next lower / higher score"),
    ("J / K", "next / previous part, dropped ones too"),
    ("g / G", "first / last kept part"),
    ("o", "show only what was read"),
    ("t", "light or dark"),
    ("?", "this help"),
)


def write_page(path: str | os.PathLike[str], prompt: PromptMap, report: Report) -> None:
    """Write the page to `path`, whole or not at all; raises OSError where that cannot be done."""
    target = Path(path)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_text(render_page(prompt, report), encoding="utf-8", newline="\n")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def render_page(prompt: PromptMap, report: Report) -> str:
    """The page as text: figures, answers, a strip of chunk scores, the shaded prompt, and where the time went."""
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    script = files(__package__).joinpath("page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    headline = _headline(report.shown)
    body = (
        '<a class="skip" href="#text">Skip to the prompt</a>',
        '<div class="wrap">',
        f"<header><h1>{_safe(headline)}</h1>{_models(report)}{_figures(prompt, report)}</header>",
        _answers(report.runs),
        _strip(prompt),
        '<div class="columns"><main>',
        _tools(prompt),
        _text(prompt),
        "</main><aside>",
        _detail(),
        f'<section aria-label="Where the time went">{_phases(report.runs)}</section>',
        _settings(prompt, report.shown),
        "</aside></div></div>",
        _help(),
        '<p id="live" role="status" class="skip"></p>',
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{_safe(headline)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + f"\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _safe(text: str) -> str:
    """Text of any origin as HTML."""
    return escape(visible(text))


def _headline(run: Run) -> str:
    if run.engaged:
        return f"The main model read {run.kept_tokens:,} of {run.total_tokens:,} tokens"
    return f"The main model read all {run.total_tokens:,} tokens"


def _models(report: Report) -> str:
    models = {"Main model": report.main, "Speculator": report.speculator}
    lines = []
    for role, name in models.items():
        if name is not None:
            what = f", {_safe(DESCRIPTIONS[name])}" if name in DESCRIPTIONS else ""
            lines.append(f"{role} <b>{_safe(name)}</b>{what}")
    return f'<p class="models">{"<br>".join(lines)}</p>'


def _figures(prompt: PromptMap, report: Report) -> str:
    run = report.shown
    figures = [("of the prompt read", percent(run.keep_rate)), ("to the first token", seconds(run.timings.ttft))]
    if report.dense is not None and report.speedup is not None:
        figures.append(("to the first token, dense", seconds(report.dense.timings.ttft)))
        figures.append(("faster", times(report.speedup)))
    if report.ceiling is not None:
        figures.append(("the cost model's ceiling", times(report.ceiling)))
    rows = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures)
    return f'<dl class="figures">{rows}</dl>'


def _answers(runs: tuple[Run, ...]) -> str:
    def one(run: Run) -> str:
        title = "Answer" if len(runs) == 1 else f"Answer, {run.label}"
        note = f"{run.new_tokens} tokens, ended by {run.finish_reason}"
        text = run.text.strip() or "(nothing)"
        return f'<article class="answer"><h2>{title} <span>{_safe(note)}</span></h2><p>{_safe(text)}</p></article>'

    return f'<section class="answers" aria-label="Answers">{"".join(one(run) for run in runs)}</section>'


def _strip(prompt: PromptMap) -> str:
    """Chunk scores as bars on a logarithmic scale; chunks are binned where there are more than `MAX_BARS`."""
    if not prompt.scored:
        return ""
    chunks = [next(group) for _, group in groupby(prompt.spans, key=lambda span: span.chunk)]
    size = -(-len(chunks) // MAX_BARS)
    bins = [chunks[start : start + size] for start in range(0, len(chunks), size)]
    heights = _heights([max(span.score or 0.0 for span in group) for group in bins])
    rects = []
    for index, (group, height) in enumerate(zip(bins, heights, strict=True)):
        best = next((span for span in group if span.kept and not span.forced), None) or next(
            (span for span in group if span.kept), group[0]
        )
        rects.append(
            f'<rect x="{index}.08" y="{100 - height:.1f}" width=".84" height="{height:.1f}"'
            f'{_kind(best)} data-c="{best.chunk}"/>'
        )
    each = "a bar for each chunk" if size == 1 else f"a bar for {size} chunks"
    kept = sum(span.kept for span in chunks)
    label = f"Scores of {len(chunks)} chunks along the prompt; {kept} were kept"
    return (
        f'<figure class="strip"><svg viewBox="0 0 {len(bins)} 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}">{"".join(rects)}</svg>'
        f"<figcaption>Chunk scores along the prompt, {each}, logarithmic</figcaption></figure>"
    )


def _heights(scores: list[float]) -> list[float]:
    """Heights 6 to 100 on a logarithmic scale; scores that are not above 0 are lowest."""
    positive = [score for score in scores if score > 0]
    if not positive or max(positive) == min(positive):
        return [53.0 if score > 0 else 6.0 for score in scores]
    low, high = math.log(min(positive)), math.log(max(positive))
    return [6 + 94 * (math.log(score) - low) / (high - low) if score > 0 else 6.0 for score in scores]


def _kind(span: Span) -> str:
    return ' class="f"' if span.forced else ' class="k"' if span.kept else ""


def _tools(prompt: PromptMap) -> str:
    items = ['<li><i class="dropped">Grey text</i> was dropped</li>']
    if any(span.kept and not span.forced for span in prompt.spans):
        shade = "kept, by score from low to high" if prompt.scored else "kept"
        items.insert(0, f'<li><i class="ranked"></i>{shade}</li>')
    if any(span.forced for span in prompt.spans):
        items.insert(1, '<li><i class="held"></i>always kept</li>')
    if prompt.kept_tokens == prompt.total_tokens:
        items.pop()
    return (
        f'<div class="tools"><ul class="legend" aria-label="Legend">{"".join(items)}</ul><div class="buttons">'
        '<button data-do="previous">Previous kept</button><button data-do="next">Next kept</button>'
        '<button data-do="only" id="only" aria-pressed="false">Only what was read</button>'
        '<button data-do="theme">Light or dark</button><button data-do="help">Keys <kbd>?</kbd></button></div></div>'
    )


def _text(prompt: PromptMap) -> str:
    parts = []
    for kept, group in groupby(prompt.spans, key=lambda span: span.kept):
        spans = list(group)
        gap = "" if kept else f' data-gap="{sum(span.end - span.start for span in spans):,}"'
        parts += [_part(span, gap) for span in spans if span.text]
    return (
        f'<section class="text" id="text" tabindex="-1" aria-label="The prompt" data-chunks="{prompt.num_chunks:,}">'
        + "".join(parts)
        + "</section>"
    )


def _part(span: Span, gap: str) -> str:
    state = "always kept" if span.forced else "kept" if span.kept else "dropped"
    tokens = f"{span.start:,}" if span.end - span.start == 1 else f"{span.start:,} to {span.end - 1:,}"
    score = "" if span.score is None else f"{span.score:.3g}"
    title = f"chunk {span.chunk + 1}, {state}" + (f", score {score}, rank {span.rank:,}" if score else "")
    data = f' data-c="{span.chunk}" data-t="{tokens}"' + (f' data-v="{score}" data-r="{span.rank}"' if score else "")
    shade = f' style="--s:{span.shade * 100:.0f}%"'
    tag, kind = ("mark", ' class="f"' if span.forced else "") if span.kept else ("span", "")
    return f'<{tag}{kind} tabindex="-1" title="{title}"{data}{gap}{shade}>{_safe(span.text)}</{tag}>'


def _detail() -> str:
    return (
        '<section class="detail" aria-label="Chosen part"><h2>Chunk</h2>'
        '<dl id="detail"><dt class="wide">Move over the text, or press j.</dt></dl></section>'
    )


def _phases(runs: tuple[Run, ...]) -> str:
    longest = max((run.timings.total for run in runs), default=0.0) or 1.0
    return "".join(_waterfall(run, longest, single=len(runs) == 1) for run in runs)


def _waterfall(run: Run, longest: float, single: bool) -> str:
    def row(label: str, value: float, bar: str = "", kind: str = "") -> str:
        shown = seconds(value) if value else "–"
        return f'<tr{kind}><th scope="row">{label}</th><td class="n">{shown}</td><td class="w">{bar}</td></tr>'

    rows, at = [], 0.0
    for lap in run.timings.laps():
        if lap.name == "queue" and not lap.seconds:
            continue  # one prompt at a time never waits
        width = 100 * lap.seconds / longest
        colour = ' class="k"' if lap.name != "decode" else ""
        bar = f'<i{colour} style="margin-left:{100 * at / longest:.2f}%;width:{width:.2f}%"></i>' if lap.seconds else ""
        rows.append(row(lap.label, lap.seconds, bar))
        at += lap.seconds
    rows.append(row("to the first token", run.timings.ttft, kind=' class="sum"'))
    rows.append(row("total", run.timings.total))
    caption = "Where the time went" if single else f"Where the time went, {run.label}"
    return f"<table><caption>{caption}</caption><tbody>{''.join(rows)}</tbody></table>"


def _settings(prompt: PromptMap, run: Run) -> str:
    return (
        '<section class="settings"><h2>Choice</h2><dl>'
        + _pairs(
            (
                ("Tokens read", f"{run.kept_tokens:,} of {run.total_tokens:,}"),
                ("Keep rate", percent(run.keep_rate)),
                ("Chunks", f"{prompt.num_chunks:,} of {prompt.chunk_size} tokens"),
                ("Reason", run.why),
            )
        )
        + "</dl></section>"
    )


def _help() -> str:
    return (
        '<dialog id="help" aria-labelledby="help-title"><h2 id="help-title">Keys</h2><dl>'
        + "".join(f"<dt><kbd>{keys}</kbd></dt><dd>{what}</dd>" for keys, what in _KEYS)
        + '</dl><button data-do="help">Close</button></dialog>'
    )


def _pairs(rows: Iterable[tuple[str, str]]) -> str:
    return "".join(f"<dt>{_safe(name)}</dt><dd>{_safe(value)}</dd>" for name, value in rows)
