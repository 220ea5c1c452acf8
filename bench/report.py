"""What a run leaves behind: tables for the reader at the terminal and in bench/RESULTS.md, and plots for the docs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from bench.judging import NOISE, Judged, Series, Verdict, is_noisy, spread
from bench.pictures import draw
from bench.results import ROOT, append_results, commit
from bench.running import Work

__all__ = ["keep", "show"]

IMAGES = ROOT / "docs" / "images"
SIGNS = {Verdict.MET: "met", Verdict.MISSED: "[bold red]missed[/]", Verdict.NOT_MEASURED: "[dim]not measured[/]"}


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _figures(series: Series, name: str) -> str:
    middle, least, most = spread(series.values(name))
    return number(middle) if least == most else f"{number(middle)} ({number(least)} – {number(most)})"


def show(console: Console, series: Mapping[str, Series], judged: Sequence[Judged]) -> None:
    """Every figure's median and spread, then every bar."""
    table = Table("work", "figure", "median (least – most)")
    for each in series.values():
        for nth, name in enumerate(each.names):
            table.add_row("" if nth else each.work, name, _figures(each, name))
        if each.failed or each.unsupported:
            table.add_row(each.work, "", f"failed: {each.failed}" if each.failed else f"none: {each.unsupported}")
    console.print(table)
    bars = Table("bar", "asked", "reached", "of the best, which was", "verdict")
    for one in judged:
        reached = "" if one.value is None else number(one.value)
        bars.add_row(one.bar.what, str(one.bar), reached, one.opponent, SIGNS[one.verdict])
    console.print(bars)


def keep(what: str, works: Sequence[Work], series: Mapping[str, Series], judged: Sequence[Judged]) -> None:
    """Append everything to bench/RESULTS.md, and draw it for the docs."""
    noisy = sum(is_noisy(run) for each in series.values() for run in each.runs)
    total = sum(len(each.runs) for each in series.values())
    lines = [
        f"Load {os.getloadavg()[1]:.1f}; others used more than {NOISE:g} cores during {noisy} of {total} runs.",
        "Figures are medians of alternating runs (least – most).\n",
        "| bar | asked | reached | verdict |",
        "|---|---|---|---|",
    ]
    for one in judged:
        if one.value is not None:
            verdict = "**missed**" if one.verdict is Verdict.MISSED else one.verdict.value
            lines.append(f"| {one.bar.what} | {one.bar} | {number(one.value)} | {verdict} |")
    lines += ["", "| work | figures | foreign load | configuration |", "|---|---|---|---|"]
    for work in works:
        each = series[work.name]
        if each.failed:
            lines.append(f"| {each.work} | **failed**: {each.failed.splitlines()[0]} | | |")
        elif each.unsupported:
            lines.append(f"| {each.work} | not supported: {each.unsupported} | | |")
        elif each.runs:
            figures = "; ".join(f"{_figures(each, name)} {name}" for name in each.names)
            foreign = number(spread(run.foreign_load for run in each.runs)[0])
            lines.append(f"| {each.work} | {figures} | {foreign} | {work.what}; {each.configuration} |")
    append_results(what, lines)
    for name, picture in draw(series, f"{what}, {commit()}").items():
        (IMAGES / name).write_text(picture)
