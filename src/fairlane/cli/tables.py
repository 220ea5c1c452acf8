"""What people see on a terminal: columns, bars and words with a colour. Colour only repeats what a word says."""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime

import click
from rich.console import Console
from rich.text import Text

from fairlane.cli.job_selection import with_app
from fairlane.clock import Instant, as_datetime, lasting, measured
from fairlane.job import JobRecord
from fairlane.operations import JobDetails, Report, document_of
from fairlane.operations.views import Counted, GaugeView, Hint, KeyMinute, QueueStatus
from fairlane.redaction import indented, json_text, one_line

Cell = str | Text

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
    return Console(width=None if sys.stdout.isatty() else IN_A_PIPE, highlight=False, soft_wrap=False)


def print_lines(lines: list[Text]) -> None:
    console = make_console()
    for line in lines:
        console.print(line, soft_wrap=True)


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


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
    return "" if seconds is None else lasting(seconds)


def run_time(seconds: float | None) -> str:
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
    return Text(printable(cell)) if isinstance(cell, str) else cell.copy()


def wrapped(text: str, width: int, indent: str = "  ", hanging: str | None = None, style: str = "") -> list[Text]:
    """A sentence over as many lines as it takes, and never wider."""
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


SHOWN = 5
"""Skipped jobs that are named; of the others there is a number."""


class Progress:
    """Says how far a bulk action is, once it has taken a second: on a terminal, and beside what is printed."""

    def __init__(self, action: str) -> None:
        self._action = action
        self._clock = time.monotonic
        self._next = self._clock() + 1.0
        self._is_shown = False

    def __call__(self, done: int) -> None:
        if sys.stderr.isatty() and self._clock() >= self._next:
            self._next = self._clock() + 0.2
            self._is_shown = True
            click.echo(f"\r{done:,} {self._action} …", nl=False, err=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_shown:
            click.echo("\r\x1b[K", nl=False, err=True)


def ago(at: Instant | None, now: Instant) -> str:
    """How long ago, in the largest unit: 12s, 5m, 3h, 2d; `in 5m` for what is to come, `now` for the same second."""
    if at is None:
        return ""
    seconds = abs(now - at) // 1_000_000
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= 2 * size:
            text = f"{seconds // size}{unit}"
            break
    else:
        text = f"{seconds}s"
    if at > now:
        return f"in {text}" if seconds else "now"
    return text


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], flexible: Sequence[str]) -> None:
    """A table in which only the `flexible` columns give way: ids can always be copied."""
    print_lines(columns(headings, rows, make_console().width, flexible=flexible))


def keys_of(record: JobRecord) -> str:
    return one_line(" ".join(f"{name}={value}" for name, value in record.keys.items()))


def first_line(text: str | None) -> str:
    return one_line((text or "").strip().partition("\n")[0])


def tell_report(report: Report, as_json: bool, *, hint: str = "") -> None:
    """What was done, or would be; then what was not, and why."""
    if as_json:
        click.echo(json.dumps(document_of(report)))
        return
    count = len(report.done)
    jobs = plural(count, "job")
    if report.is_dry_run:
        click.echo(f"{jobs} would be {report.action}")
        for record in report.sample:
            click.echo(f"  {record.id}  {record.state}  {one_line(record.queue)}  {one_line(record.task)}")
        if count > len(report.sample):
            click.echo(f"  … and {count - len(report.sample):,} more")
    else:
        click.echo(f"{jobs} {report.action}{hint}")
    if report.replaced:
        those = f"{len(report.replaced):,} waiting {'job' if len(report.replaced) == 1 else 'jobs'}"
        happens = "would be" if report.is_dry_run else "was" if len(report.replaced) == 1 else "were"
        shown = ", ".join(map(str, report.replaced[:SHOWN])) + (", …" if len(report.replaced) > SHOWN else "")
        click.echo(f"{those} with the same unique key {happens} cancelled: {shown}")
    for handled in report.skipped[:SHOWN]:
        click.echo(f"skipped {handled.job}: {handled.skipped}", err=True)
    if len(report.skipped) > SHOWN:
        click.echo(f"skipped {len(report.skipped) - SHOWN:,} more", err=True)
    if report.held:
        held = "1 was" if report.held == 1 else f"{report.held:,} were"
        instead = "; --on-conflict replace cancels a holder that waits" if report.action == "replayed" else ""
        click.echo(f"{held} not {report.action}: another job holds the unique key{instead}", err=True)
    if report.more:
        click.echo("the limit was reached and there are more: run it again, or raise --limit", err=True)


def tell_details(details: JobDetails) -> None:
    """One job on as many lines as it takes."""
    described = document_of(details.record)
    error = described.pop("error")
    described["keys"] = keys_of(details.record)
    described["attempt"] = f"{described['attempt']} of {described.pop('max_attempts')}"
    described["call"] = json_text(details.call)
    if details.record.result is not None:
        described["result"] = json_text(details.result)
    for name, value in described.items():
        if value not in (None, "", False):
            click.echo(f"{name.replace('_', ' '):<16} {one_line(str(value))}")
    for each in details.attempts:
        ended = "" if each.ended_at is None else f", {(each.ended_at - each.claimed_at) / 1_000_000:.3f} s"
        click.echo(
            f"\nattempt {each.attempt}: {each.outcome}, {as_datetime(each.claimed_at):%Y-%m-%d %H:%M:%S}{ended}, "
            f"{one_line(each.worker or 'nobody')}"
        )
        if each.error:
            click.echo(indented(each.error))
    if error and not details.attempts:
        click.echo(f"\n{indented(error)}")
