"""How the demo looks: a live view while an act runs, and one picture at the end. It only draws."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fairlane.demo.acts import (
    ACTS,
    RATED_ENDPOINT,
    WHALE,
    Act,
    Figures,
    Promise,
    Run,
    Workload,
    class_of,
    shares_over_time,
)
from fairlane.demo.show import Performance, Progress, Report, Watcher

_WEB_FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)

WHALE_STYLE, SMALL_STYLE, IDLE_STYLE = "magenta", "bright_green", "bright_black"
BAR_WIDTH = 20
CHART_COLUMNS, CHART_ROWS = 72, 4
EIGHTHS = " ▁▂▃▄▅▆▇█"
A_LINE_EVERY = 1.0  # seconds
PICTURE_WIDTH = 84


class LineView(Watcher):
    """One line a second, for a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0

    def look(self, progress: Progress) -> None:
        match progress.stage:
            case "enqueueing":
                self._next = 0.0
                self._console.print(f"\n{_heading(progress.act).plain}")
            case "running" if progress.elapsed < self._next:
                return
            case "running":
                self._next = progress.elapsed + A_LINE_EVERY
                self._print(progress)
            case "done":
                self._print(progress)

    def _print(self, progress: Progress) -> None:
        work = progress.workload
        self._console.print(
            f"  {progress.elapsed:5.1f} s   whale {progress.whale_done:>5,} of {work.whale_jobs:,} done, "
            f"{progress.whale_running:2} running   small {progress.small_done:>5,} of {work.small_total:,} done, "
            f"{progress.small_running:2} running",
            soft_wrap=True,
            highlight=False,
        )


class LiveView(Watcher):
    """Bars that move: who runs, who waits."""

    def __init__(self, console: Console) -> None:
        # Drawn only when there is something new: a thread that draws would take time from the workers.
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def around(self) -> AbstractContextManager[object]:
        return self._live

    def look(self, progress: Progress) -> None:
        self._live.update(_draw_progress(progress), refresh=True)

    def finish(self, performance: Performance) -> None:
        """What the act did with its slots stays on the screen, above whatever comes next."""
        self._live.update(Text(), refresh=True)
        if performance.act is ACTS[0]:
            self._live.console.print(_legend(performance.workload))
        self._live.console.print(_draw_performance(performance))


def _heading(act: Act) -> Text:
    return Text.assemble(f"Act {ACTS.index(act) + 1} of {len(ACTS)}  ", (act.name, "bold"), f"  {act.title}")


def _draw_progress(progress: Progress) -> RenderableType:
    work = progress.workload
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", min_width=18)
    grid.add_row("whale", _bar(progress.whale_done, progress.whale_running, work.whale_jobs, WHALE_STYLE))
    grid.add_row(
        f"{work.small_tenants} small tenants",
        _bar(progress.small_done, progress.small_running, work.small_total, SMALL_STYLE),
    )
    grid.add_row("slots", _slots(progress))
    grid.add_row("elapsed", f"{progress.elapsed:.1f} s   [dim]{progress.stage}[/]")
    return Group(Text(), _heading(progress.act), Padding(grid, (1, 0, 1, 0)))


def _bar(done: int, running: int, total: int, style: str) -> Text:
    filled = round(BAR_WIDTH * done / total)
    waiting = total - done - running
    bar = Text("━" * filled, style=style)
    bar.append("━" * (BAR_WIDTH - filled), style=IDLE_STYLE)
    bar.append(f"  {done:>5,} done  {running:>2} running  {waiting:>5,} waiting", style="default")
    return bar


def _slots(progress: Progress) -> Text:
    free = max(0, progress.workload.all_slots - progress.running)
    slots = Text("■" * progress.whale_running, style=WHALE_STYLE)
    slots.append("■" * progress.small_running, style=SMALL_STYLE)
    slots.append("□" * free, style=IDLE_STYLE)
    return slots.append(f"  {progress.running} of {progress.workload.all_slots} in use", style="default")


def draw_report(report: Report, *, with_charts: bool = False) -> RenderableType:
    """The last screen: what each act did with its slots, the figures, and what was promised."""
    charts: list[RenderableType] = []
    if with_charts:
        charts = [_legend(report.workload), *(_draw_performance(each) for each in report.performances)]
    return Group(
        *charts,
        Text(),
        _draw_figures(report.figures, report.workload),
        Text(),
        *(_draw_promise(promise) for promise in report.promises),
    )


def _legend(work: Workload) -> Text:
    return Text.assemble(
        f"\n{work.all_slots} slots over time:  ",
        ("█ the whale", WHALE_STYLE),
        f" ({work.whale_jobs:,} jobs, enqueued first)   ",
        (f"█ {work.small_tenants} small tenants", SMALL_STYLE),
        f" ({work.small_jobs} each)",
    )


def _draw_performance(performance: Performance) -> RenderableType:
    axis = Text("  0 s", style="dim")
    axis.append(f"{performance.figures.total:.1f} s".rjust(CHART_COLUMNS - 3))
    return Group(Text(), _heading(performance.act), *_chart(performance.runs, performance.workload.all_slots), axis)


def _chart(runs: Sequence[Run], slots: int) -> list[Text]:
    """Time runs to the right; from the bottom up, the slots that small tenants held, then those of the whale."""
    shares = shares_over_time(
        runs,
        lambda run: class_of(run.tenant),
        since=min(run.started_at for run in runs),
        until=max(run.ended_at for run in runs),
        columns=CHART_COLUMNS,
    )
    steps = CHART_ROWS * 8
    columns = []
    for share in shares:
        small = round(steps * share.get("small", 0.0) / slots)
        both = round(steps * (share.get("small", 0.0) + share.get(WHALE, 0.0)) / slots)
        columns.append((small, both))
    return [_chart_row(columns, 8 * row) for row in reversed(range(CHART_ROWS))]


def _chart_row(columns: Sequence[tuple[int, int]], floor: int) -> Text:
    text = Text("  ")
    for small, both in columns:
        small_part = min(8, max(0, small - floor))
        both_part = min(8, max(0, both - floor))
        if small_part == 0 or small_part == both_part:
            text.append(EIGHTHS[both_part], style=SMALL_STYLE if small_part else WHALE_STYLE)
        else:
            # Both share this cell. A cell has two colours, so what little is idle above them is not drawn.
            text.append(EIGHTHS[small_part], style=f"{SMALL_STYLE} on {WHALE_STYLE}")
    return text


def _draw_figures(figures: Sequence[Figures], work: Workload) -> Table:
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("counted from what ran")
    for each in figures:
        table.add_column(each.act, justify="right")
    rows = {
        f"jobs run exactly once, of {work.total:,}": [f"{each.jobs_run - each.ran_twice:,}" for each in figures],
        "total time": [f"{each.total:.2f} s" for each in figures],
        "last small-tenant job": [f"{each.last_small:.2f} s" for each in figures],
        "last small-tenant job / total": [f"{each.last_small_share:.2f}" for each in figures],
        f"whale jobs before it, of {work.whale_jobs:,}": [f"{each.whale_before:,}" for each in figures],
        "Jain index of worker-seconds": [f"{each.jain:.3f}" for each in figures],
        "most in flight, the whale": [_against(each.in_flight_whale, each.in_flight_limit) for each in figures],
        "most in flight, a small tenant": [_against(each.in_flight_small, each.in_flight_limit) for each in figures],
        f"busiest second, {RATED_ENDPOINT}": [
            _against(each.rate.busiest_second, each.rate.most_in_a_second) for each in figures
        ],
        "room in the tightest window, at admission": [_room(each.rate.worst_excess) for each in figures],
        "the same, by the handlers' own starts": [_room(each.rate.worst_excess_at_start) for each in figures],
    }
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _against(most: int, limit: int | None) -> str:
    return f"{most}" if limit is None else f"{most} of {limit}"


def _room(excess: float | None) -> str:
    return "–" if excess is None else f"{0.0 - excess:.2f} jobs"


def _draw_promise(promise: Promise) -> Text:
    mark = ("✔ ", "bold green") if promise.kept else ("✘ ", "bold red")
    return Text.assemble(mark, promise.sentence, (f"  {promise.seen}", "dim"))


def save_svg(report: Report, path: str) -> None:
    """The last screen as a picture."""
    from io import StringIO

    console = Console(record=True, width=PICTURE_WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(draw_report(report, with_charts=True))
    # Without rich's web fonts: the picture asks nobody for anything.
    picture = _WEB_FONT.sub("", console.export_svg(title="fairlane demo"))
    Path(path).write_text(picture, encoding="utf-8")
