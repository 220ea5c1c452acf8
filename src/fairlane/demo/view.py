"""How the demo looks: a live view while an act runs, and one picture at the end. It only draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fairlane.demo.scenarios import ACTS, RATED_ENDPOINT, WHALE, Act, Figures, Run, Workload, shares_over_time
from fairlane.demo.stage import Performance, Progress, Report, Watcher

WHALE_STYLE, SMALL_STYLE, IDLE_STYLE = "magenta", "bright_green", "bright_black"
BAR_WIDTH = 20
CHART_COLUMNS, CHART_ROWS = 72, 4
EIGHTHS = " ▁▂▃▄▅▆▇█"
A_LINE_EVERY = 1.0  # seconds
MARKS = {True: ("✔ ", "bold green"), False: ("✘ ", "bold red")}


class LineView(Watcher):
    """One line a second, for a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0

    def look(self, progress: Progress) -> None:
        if progress.stage == "enqueueing":
            self._next = 0.0
            self._console.print(f"\n{_heading(progress.act).plain}")
        if progress.stage != "done" and (progress.stage != "running" or progress.elapsed < self._next):
            return
        self._next = progress.elapsed + A_LINE_EVERY
        work, done, running = progress.workload, progress.done, progress.running
        self._console.print(
            f"  {progress.elapsed:5.1f} s   whale {done[WHALE]:>5,} of {work.whale_jobs:,} done, "
            f"{running[WHALE]:2} running   small {done['small']:>5,} of {work.small_total:,} done, "
            f"{running['small']:2} running",
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
    work, running = progress.workload, progress.running
    grid = Table.grid(padding=(0, 2))
    grid.add_column(justify="right", min_width=18)
    for name, kind, total, style in (
        ("whale", WHALE, work.whale_jobs, WHALE_STYLE),
        (f"{work.small_tenants} small tenants", "small", work.small_total, SMALL_STYLE),
    ):
        done = progress.done[kind]
        filled = round(BAR_WIDTH * done / total)
        counts = f"  {done:>5,} done  {running[kind]:>2} running  {total - done - running[kind]:>5,} waiting"
        bar = Text.assemble(("━" * filled, style), ("━" * (BAR_WIDTH - filled), IDLE_STYLE), (counts, "default"))
        grid.add_row(name, bar)
    in_use = running.total()
    slots = Text.assemble(
        ("■" * running[WHALE], WHALE_STYLE),
        ("■" * running["small"], SMALL_STYLE),
        ("□" * max(0, work.all_slots - in_use), IDLE_STYLE),
        (f"  {in_use} of {work.all_slots} in use", "default"),
    )
    grid.add_row("slots", slots)
    grid.add_row("elapsed", f"{progress.elapsed:.1f} s   [dim]{progress.stage}[/]")
    return Group(Text(), _heading(progress.act), Padding(grid, (1, 0, 1, 0)))


def draw_report(report: Report) -> RenderableType:
    """The end of the demo: the figures, and what was promised."""
    return Group(
        Text(),
        _draw_figures(report.stats, report.workload),
        Text(),
        *(
            Text.assemble(MARKS[promise.kept], promise.sentence, (f"  {promise.seen}", "dim"))
            for promise in report.promises
        ),
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
    axis.append(f"{performance.stats.total:.1f} s".rjust(CHART_COLUMNS - 3))
    return Group(Text(), _heading(performance.act), *_chart(performance.runs, performance.workload.all_slots), axis)


def _chart(runs: Sequence[Run], slots: int) -> list[Text]:
    """Time runs to the right; from the bottom up, the slots that small tenants held, then those of the whale."""
    steps = CHART_ROWS * 8
    columns = []
    for share in shares_over_time(runs, CHART_COLUMNS):
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


def _draw_figures(stats: Sequence[Figures], work: Workload) -> Table:
    table = Table(header_style="bold", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("counted from what ran")
    for each in stats:
        table.add_column(each.act, justify="right")
    rows: dict[str, Callable[[Figures], str]] = {
        f"jobs run exactly once, of {work.total:,}": lambda each: f"{each.jobs_run - each.ran_twice:,}",
        "total time": lambda each: f"{each.total:.2f} s",
        "last small-tenant job": lambda each: f"{each.last_small:.2f} s",
        "last small-tenant job / total": lambda each: f"{each.last_small_share:.2f}",
        f"whale jobs before it, of {work.whale_jobs:,}": lambda each: f"{each.whale_before:,}",
        "Jain index of worker-seconds": lambda each: f"{each.jain:.3f}",
        "most in flight, the whale": lambda each: _against(each.in_flight_whale, each.in_flight_limit),
        "most in flight, a small tenant": lambda each: _against(each.in_flight_small, each.in_flight_limit),
        f"busiest second, {RATED_ENDPOINT}": lambda each: _against(
            each.rate.busiest_second, each.rate.most_in_a_second
        ),
        "room in the tightest window, at admission": lambda each: _room(each.rate.worst_excess),
        "the same, by the handlers' own starts": lambda each: _room(each.rate.worst_excess_at_start),
    }
    for name, cell in rows.items():
        table.add_row(name, *map(cell, stats))
    return table


def _against(most: int, limit: int | None) -> str:
    return f"{most}" if limit is None else f"{most} of {limit}"


def _room(excess: float | None) -> str:
    return "–" if excess is None else f"{0.0 - excess:.2f} jobs"
