"""What people see on a terminal: columns, bars and words with a colour. Colour only repeats what a word says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from fairlane.cli.choosing import with_app

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import Console
    from rich.text import Text

    from fairlane.operations.views import Counted, GaugeView, Hint, KeyMinute, QueueStatus

    Cell = str | Text

__all__ = [
    "as_of",
    "bar",
    "chart_lines",
    "columns",
    "counted",
    "gauge_line",
    "hint_lines",
    "make_console",
    "number",
    "per_minute",
    "printable",
    "run_time",
    "sparkline",
    "status_word",
    "wait",
    "wrapped",
]

NARROWEST = 5
LONGEST = IN_A_PIPE = 10_000
"""Columns: nothing is cut off where no terminal sets a width."""
STATUS_STYLES = {
    "idle": "dim",
    "flowing": "green",
    "limited": "cyan",
    "lagging": "bold yellow",
    "paused": "magenta",
    "stopped": "bold red",
}
HINT_STYLES = {"fault": "bold red", "lag": "bold yellow", "pause": "magenta", "warning": "yellow", "limit": "cyan"}
SPARKS = "▁▂▃▄▅▆▇█"


def make_console() -> Console:
    """Where to print: as wide as the terminal, or as wide as need be."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else IN_A_PIPE, highlight=False, soft_wrap=False)


def as_of(now: datetime) -> str:
    """When all that is shown was looked at."""
    return f"{now:%Y-%m-%d %H:%M:%S} UTC"


def printable(text: str) -> str:
    """Text that moves no cursor: keys come from tenants, and a terminal obeys what it is sent."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def number(count: int) -> str:
    """Exact as long as that is short: 99,999, then 123k, 1.2M."""
    if count < 100_000:
        return f"{count:,}"
    return f"{count / 1_000_000:.1f}M" if count >= 999_500 else f"{count / 1_000:.0f}k"


def counted(given: Counted) -> str:
    return number(given.count) if given.is_all else f"{number(given.count)}+"


def per_minute(rate: float) -> str:
    return number(round(rate)) if rate >= 10 or rate == 0 else f"{rate:.1f}"


def wait(seconds: float | None) -> str:
    from fairlane.clock import lasting

    return "" if seconds is None else lasting(seconds)


def run_time(seconds: float | None) -> str:
    from fairlane.clock import measured

    return measured(seconds) if seconds is not None and seconds < 1 else wait(seconds)


def bar(fraction: float, width: int = 10) -> str:
    """How full something is. What is not empty shows at least a mark, and only what is full looks full."""
    filled = min(max(round(fraction * width), fraction > 0), width if fraction >= 1 else width - 1)
    return "█" * filled + "░" * (width - filled)


def sparkline(values: Sequence[float]) -> str:
    """The highest is a full block, and nothing at all a blank."""
    top = max(values, default=0)
    if top <= 0:
        return " " * len(values)
    return "".join(" " if value <= 0 else SPARKS[min(7, int(8 * value / top))] for value in values)


def chart_lines(minutes: Sequence[KeyMinute], width: int) -> list[Text]:
    """A line for each figure of the last hour, and the most that any minute had of it."""
    from rich.text import Text

    shown = minutes[-min(60, max(10, width - 20)) :]
    rows: list[tuple[str, Callable[[KeyMinute], float], Callable[[float], str]]] = [
        ("started", lambda each: each.started, lambda most: number(int(most))),
        ("failed", lambda each: each.failed, lambda most: number(int(most))),
        ("waited", lambda each: each.mean_wait, wait),
    ]
    lines = []
    for name, figure, said in rows:
        values = [figure(each) for each in shown]
        most = max(values, default=0.0)
        lines.append(Text(f"  {name:<8}{sparkline(values)}  {said(most) if most else 'none'}"))
    return lines


def status_word(status: QueueStatus) -> Text:
    from rich.text import Text

    return Text(str(status), STATUS_STYLES[str(status)])


def columns(
    headings: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    width: int,
    *,
    flexible: Sequence[str] = (),
    right: Sequence[str] = (),
) -> list[Text]:
    """Lines of a table, the headings first. Only the `flexible` columns give way: ids can always be copied."""
    from rich.text import Text

    cells = [[_text(cell) for cell in row] for row in rows]
    yielding = [n for n, heading in enumerate(headings) if heading in flexible]
    widths = [max([len(heading), *(row[n].cell_len for row in cells)]) for n, heading in enumerate(headings)]
    room = width - 2 * (len(widths) - 1)
    while sum(widths) > room and any(widths[n] > NARROWEST for n in yielding):
        widths[max(yielding, key=lambda n: widths[n])] -= 1
    lines = []
    for row in ([Text(heading, "bold") for heading in headings], *cells):
        line = Text(no_wrap=True, overflow="ellipsis")
        for n, (cell, size) in enumerate(zip(row, widths, strict=True)):
            if cell.cell_len > size:
                cell.truncate(size, overflow="ellipsis")
            padding = " " * (size - cell.cell_len)
            line.append(padding if headings[n] in right else "")
            line.append_text(cell)
            line.append("" if headings[n] in right else padding)
            line.append("  " if n < len(widths) - 1 else "")
        line.rstrip()
        lines.append(line)
    return lines


def _text(cell: Cell) -> Text:
    from rich.text import Text

    return Text(printable(cell)) if isinstance(cell, str) else cell.copy()


def wrapped(text: str, width: int, indent: str = "  ", hanging: str | None = None, style: str = "") -> list[Text]:
    """A sentence over as many lines as it takes, and never wider."""
    import textwrap

    from rich.text import Text

    following = indent if hanging is None else hanging
    lines = textwrap.wrap(
        printable(text),
        max(20, width),
        initial_indent=indent,
        subsequent_indent=following,
        break_on_hyphens=False,
    )
    return [Text(line, style) for line in lines]


def hint_lines(hints: Iterable[Hint], width: int) -> list[Text]:
    """What is worth knowing, and under each the knob to turn."""
    lines: list[Text] = []
    for hint in hints:
        kind = str(hint.kind)
        told = wrapped(hint.words, width, f"  {kind:<7} ", " " * 10)
        told[0].stylize(HINT_STYLES[kind], 2, 2 + len(kind))
        # The knob stays on one line, however long, where it is a command: it can be copied as it stands.
        is_command = hint.knob.startswith("fairlane ")
        lines += told + wrapped(f"→ {with_app(hint.knob)}", LONGEST if is_command else width, " " * 10, " " * 12, "dim")
    return lines


def gauge_line(gauge: GaugeView, width: int) -> Text:
    """`██████░░░░  60%  3 of 5  Concurrency(5, by="account")`."""
    from rich.text import Text

    style = "bold cyan" if gauge.room <= 0 else ""
    line = Text(no_wrap=True, overflow="ellipsis")
    line.append(bar(gauge.saturation), style)
    line.append(f" {gauge.saturation:>5.0%}  {gauge.used:g} of {gauge.bound:g}  ")
    line.append(printable(gauge.words))
    if gauge.bound_from.words:
        line.append(f" ({gauge.bound_from.words})")
    if gauge.room <= 0 and gauge.opens_at is not None:
        line.append(f" opens {gauge.opens_at:%H:%M:%S} UTC")
    line.truncate(width, overflow="ellipsis")
    return line
