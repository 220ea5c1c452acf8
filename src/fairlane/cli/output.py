"""How a command looks at a database and prints what it saw: once or again and again, for people or as JSON.

Colour only repeats what a word says.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import datetime
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fairlane.cli.database import app_of, operations_on
from fairlane.cli.options import with_app
from fairlane.clock import SECOND, Instant, as_instant, lasting, measured
from fairlane.errors import StoreUnavailable
from fairlane.operations import Operations
from fairlane.operations.views import Counted, GaugeView, Hint, KeyMinute
from fairlane.redaction import json_text

T = TypeVar("T")
Given = Mapping[str, Any]
"""The options of a command: `app` and `url` say which database, `as_json` how it is printed."""
Ask = Callable[[Operations], Awaitable[T]]
Cell = str | Text
Draw = Callable[[T, int], Iterable[Cell]]
"""The lines of a view, none wider than so many columns."""

NARROWEST = 5
LONGEST = IN_A_PIPE = 10_000
"""Columns: nothing is cut off where no terminal sets a width."""
HINT_STYLES = {"fault": "bold red", "lag": "bold yellow", "pause": "magenta", "warning": "yellow", "limit": "cyan"}
SPARKS = "▁▂▃▄▅▆▇█"


def look(ask: Ask[T], given: Given) -> T:
    """Ask once, of the database that the options name."""

    async def asked() -> T:
        async with operations_on(app) as operations:
            return await ask(operations)

    app = app_of(given["app"], given.get("url"))
    return asyncio.run(asked())


def look_now(ask: Ask[T], given: Given) -> tuple[T, Instant]:
    """Ask once, and return the time by the database's clock as well."""

    async def asked(operations: Operations) -> tuple[T, Instant]:
        return await ask(operations), await operations.now()

    return look(asked, given)


def show(view: T, draw: Draw[T], given: Given, document: Callable[[T], Any] = msgspec.to_builtins) -> None:
    """Print a view, as lines or as its JSON document."""
    if given["as_json"]:
        click.echo(json_text(document(view)))
        return
    console = make_console()
    for line in draw(view, console.width):
        console.print(_text(line), soft_wrap=True)


def show_rest(after: object, given: Given, option: str = "--after") -> None:
    """Say how to see the next page of a list, if there is one. JSON documents say it themselves."""
    if after is not None and not given["as_json"]:
        click.echo(f"there are more: {option} {after}", err=True)


# Again and again.

EVERY = 2.0
SHORTEST = 0.2
watch_option = click.option(
    "--watch",
    is_flag=False,
    flag_value=EVERY,
    type=click.FloatRange(min=SHORTEST, max=3_600),
    metavar="[SECONDS]",
    help=f"Refresh every so many seconds, until Ctrl-C.  [{EVERY:g} if no number follows]",
)


def look_again(ask: Ask[T], draw: Draw[T], every: float, given: Given) -> None:
    """Ask again and again: drawn in place on a terminal, and a block (or a JSON document) each in a pipe."""

    def show_block(view: T) -> None:
        show(view, draw, given)
        if not given["as_json"]:
            click.echo()

    def lost(why: str) -> None:
        click.echo(f"{why}; looking again", err=True)

    async def in_a_pipe() -> None:
        async with operations_on(app_of(given["app"], given["url"])) as operations:
            await watch(lambda: ask(operations), show_block, lost, Ticker(every))

    if make_console().is_terminal and not given["as_json"]:
        run_until_stopped(lambda: look_in_place(ask, draw, Ticker(every), given))
    else:
        run_until_stopped(in_a_pipe)


async def look_in_place(
    ask: Ask[T], draw: Draw[T], ticker: Ticker, given: Given, keyboard: AbstractContextManager[None] | None = None
) -> None:
    """Ask again and again, drawn in place; with a keyboard, on a screen of its own."""
    console = make_console()
    live = Live(console=console, auto_refresh=False, screen=keyboard is not None, vertical_overflow="ellipsis")
    async with operations_on(app_of(given["app"], given["url"])) as operations:
        with live, keyboard or nullcontext():
            screen = Screen(lambda lines: live.update(Group(*map(_text, lines)), refresh=True))
            await watch(
                lambda: ask(operations), lambda view: screen.show(draw(view, console.width)), screen.lost, ticker
            )


class Screen:
    """What is drawn in place. While the database cannot be reached, what was seen last stays, and says so."""

    def __init__(self, draw: Callable[[list[Cell]], None]) -> None:
        self._draw = draw
        self._seen: list[Cell] = []

    def show(self, lines: Iterable[Cell]) -> None:
        self._seen = list(lines)
        self._draw(self._seen)

    def lost(self, why: str) -> None:
        # At the top: what does not fit on the screen is cut off below.
        self._draw([Text(f"{why}; looking again. This was seen last:", "bold red"), *self._seen])


class Ticker:
    """The time between two looks, which may be cut short."""

    def __init__(self, every: float) -> None:
        self._every = every
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        self._hurry.set()

    async def __call__(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._every):
                await self._hurry.wait()
        self._hurry.clear()


async def watch(
    look: Callable[[], Awaitable[T]],
    show: Callable[[T], None],
    lost: Callable[[str], None],
    pause: Callable[[], Awaitable[None]],
) -> None:
    """Look, show, pause, forever. A database that cannot be reached is reported, and asked again."""
    while True:
        try:
            seen = await look()
        except StoreUnavailable as error:
            lost(str(error))
        else:
            show(seen)
        await pause()


def run_until_stopped(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run until it ends, or until Ctrl-C or SIGTERM: being stopped is how such a command ends, and no failure."""

    async def run() -> None:
        task = asyncio.current_task()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with suppress(asyncio.CancelledError):
            await work()

    asyncio.run(run())


class Progress:
    """Says how far a bulk action is, once it has taken a second: on a terminal, and beside what is printed."""

    def __init__(self, action: str) -> None:
        self._action = action
        self._next = time.monotonic() + 1.0
        self._is_shown = False

    def __call__(self, done: int) -> None:
        if sys.stderr.isatty() and time.monotonic() >= self._next:
            self._next = time.monotonic() + 0.2
            self._is_shown = True
            click.echo(f"\r{done:,} {self._action} …", nl=False, err=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_shown:
            click.echo("\r\x1b[K", nl=False, err=True)


# Lines, tables and bars.


def make_console() -> Console:
    """Where to print: as wide as the terminal, or as wide as need be."""
    return Console(width=None if sys.stdout.isatty() else IN_A_PIPE, highlight=False, soft_wrap=False)


def titled(title: str, lines: Iterable[Text]) -> list[Text]:
    """A part with its title, after an empty line; nothing without lines."""
    found = list(lines)
    return [Text(""), Text(title, "bold"), *found] if found else []


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
        for heading, cell, size in zip(headings, row, widths, strict=True):
            cell.overflow = "ellipsis"
            cell.align("right" if heading in right else "left", size)
        line = Text("  ", no_wrap=True, overflow="ellipsis").join(row)
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
    """What is worth knowing, and under each what to do about it."""
    lines: list[Text] = []
    for hint in hints:
        kind = str(hint.kind)
        words = wrapped(hint.words, width, f"  {kind:<7} ", " " * 10)
        words[0].stylize(HINT_STYLES[kind], 2, 2 + len(kind))
        # The knob stays on one line, however long, where it is a command: it can be copied as it stands.
        is_command = hint.knob.startswith("fairlane ")
        lines += words + wrapped(
            f"→ {with_app(hint.knob)}", LONGEST if is_command else width, " " * 10, " " * 12, "dim"
        )
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


# Words and numbers.


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def as_of(now: datetime) -> str:
    """The time of everything that is shown."""
    return f"{now:%Y-%m-%d %H:%M:%S} UTC"


def printable(text: str) -> str:
    """Text that moves no cursor: keys come from tenants, and a terminal obeys what it is sent."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def number(count: int) -> str:
    """Exact while it is short: 99,999, then 123k, 1.2M."""
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
    """Bars of these values: the highest is a full block, zero a blank."""
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


def ago(at: Instant | datetime | None, now: Instant | datetime) -> str:
    """How long ago, in the largest unit: 12s, 5m, 3h, 2d; `in 5m` for what is to come, `now` for the same second."""
    if at is None:
        return ""
    at, now = (as_instant(each) if isinstance(each, datetime) else each for each in (at, now))
    seconds = abs(now - at) // SECOND
    text = f"{seconds}s"
    for size, unit in ((60, "m"), (3_600, "h"), (86_400, "d")):
        if seconds >= 2 * size:
            text = f"{seconds // size}{unit}"
    if at > now:
        return f"in {text}" if seconds else "now"
    return text
