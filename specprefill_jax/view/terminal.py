"""The map and the tables in a terminal, as things that rich prints."""

from itertools import groupby

from rich import box
from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from specprefill_jax.timing import LABELS, PHASES, Lap
from specprefill_jax.view.report import Report, Run, describe, percent, seconds, times
from specprefill_jax.view.spans import PromptMap, Span, visible

_INK = "#1d1a0f"
_RANKED = ((255, 246, 201), (255, 186, 26))  # pale to strong: lowest to highest score
_FORCED = ((214, 231, 247), (136, 185, 232))
_BARS = " ▁▂▃▄▅▆▇█"
_RATED = ("speculate", "main_prefill", "decode")  # phases whose tokens a second mean something
_DROPPED = Style(dim=True)


def prompt_map(prompt: PromptMap, colour: bool = True) -> RenderableType:
    """The prompt with what was kept shaded by its chunk's score and what was dropped dimmed.

    Without colour (a file, `NO_COLOR`) there is no shade to see, so what was kept stands on lines of its own behind a
    bar for its score, and a line says how much was dropped between.
    """
    return Group(_coloured(prompt), Text(), _legend()) if colour else _plain(prompt)


def phase_table(report: Report) -> Table:
    """Seconds by phase; with one run also each phase's share, tokens and tokens a second."""
    single = report.runs[0] if len(report.runs) == 1 else None
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, header_style="bold")
    table.add_column("phase")
    for run in report.runs:
        table.add_column(run.label, justify="right")
    if single:
        for heading in ("share", "tokens", "tokens/s"):
            table.add_column(heading, justify="right")
    for name in PHASES:
        laps = [_lap(run, name) for run in report.runs]
        if name == "queue" and not any(lap.seconds for lap in laps):
            continue  # one prompt at a time never waits
        row = [seconds(lap.seconds) if lap.seconds else "–" for lap in laps]
        if single:
            rate = laps[0].tokens_per_second if name in _RATED else None
            row.append(percent(laps[0].seconds / single.timings.total) if single.timings.total else "–")
            row.append(f"{laps[0].tokens:,}" if laps[0].tokens else "")
            row.append(f"{rate:,.0f}" if rate and rate >= 10 else f"{rate:.1f}" if rate else "")
        table.add_row(LABELS[name], *row)
    table.add_section()
    table.add_row("to the first token", *(seconds(run.timings.ttft) for run in report.runs), style="bold")
    table.add_row("total", *(seconds(run.timings.total) for run in report.runs))
    table.add_row("wall clock", *(seconds(run.wall) for run in report.runs))
    table.add_section()
    table.add_row("tokens read", *(f"{run.kept_tokens:,} of {run.total_tokens:,}" for run in report.runs))
    table.add_row("keep rate", *(percent(run.keep_rate) for run in report.runs))
    return table


def summary(report: Report) -> RenderableType:
    """The models, where the time went, why, and for two runs both answers and how they compare."""
    parts: list[RenderableType] = [Text(f"main        {describe(report.main)}")]
    if report.speculator is not None:
        parts.append(Text(f"speculator  {describe(report.speculator)}"))
    parts += [Text(), phase_table(report), Text()]
    for run in report.runs:
        prefix = f"{run.label}: " if len(report.runs) > 1 else ""
        parts.append(Text(f"{prefix}{run.why}", style="" if run.engaged or run.label == "dense" else "yellow"))
    if report.compile_seconds is not None:
        parts.append(Text(f"compiling took {seconds(report.compile_seconds)} before that and is in no phase"))
    if report.dense is not None:
        parts += [Text(), answers(report), Text(), verdict(report)]
    return Group(*parts)


def answers(report: Report) -> Table:
    """The answers of all runs beside each other."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, expand=True, header_style="bold")
    for run in report.runs:
        table.add_column(f"{run.label} answer", ratio=1, overflow="fold")
    table.add_row(*(Text(visible(run.text.strip()) or "(nothing)") for run in report.runs))
    return table


def verdict(report: Report) -> Text:
    """One line that says how the first token's times compare, and with what the cost model allows."""
    if report.dense is None or report.speedup is None:
        return Text()
    sparse = report.shown
    text = Text(
        f"first token: dense {seconds(report.dense.timings.ttft)}, {sparse.label} {seconds(sparse.timings.ttft)}: "
    )
    text.append(times(report.speedup), style="bold")
    if report.ceiling is not None:
        text.append(f"; the cost model's ceiling is {times(report.ceiling)}")
    return text


def _lap(run: Run, name: str) -> Lap:
    return next(lap for lap in run.timings.laps() if lap.name == name)


def _coloured(prompt: PromptMap) -> Text:
    text = Text(overflow="fold")
    for span in prompt.spans:
        text.append(visible(span.text), style=_style(span))
    return text


def _style(span: Span) -> Style:
    if not span.kept:
        return _DROPPED
    low, high = _FORCED if span.forced else _RANKED
    red, green, blue = (round(a + (b - a) * span.shade) for a, b in zip(low, high, strict=True))
    return Style(color=_INK, bgcolor=f"#{red:02x}{green:02x}{blue:02x}")


def _legend() -> Text:
    def sample(kept: bool, forced: bool, shade: float, label: str) -> Text:
        return Text(f" {label} ", style=_style(Span(0, 0, 0, "", kept, forced, shade=shade)))

    return Text("  ").join(
        (
            sample(True, False, 0.0, "kept, low score"),
            sample(True, False, 1.0, "kept, high score"),
            sample(True, True, 0.5, "always kept"),
            sample(False, False, 0.0, "dropped"),
        )
    )


def _plain(prompt: PromptMap) -> Group:
    lines: list[RenderableType] = []
    for kept, group in groupby(prompt.spans, key=lambda span: span.kept):
        spans = list(group)
        if not kept:
            lines.append(Text(f"  ... {sum(span.end - span.start for span in spans):,} tokens dropped ..."))
            continue
        for span in spans:
            mark = "│" if span.score is None else _BARS[1 + round(span.shade * (len(_BARS) - 2))]
            lines += [Text(f"{mark} {line}") for line in visible(span.text).strip("\n").split("\n")]
    return Group(*lines)
