"""`fairlane top`: keys as they come and go, on a terminal."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import click
from rich.console import Group
from rich.live import Live
from rich.text import Text

from fairlane.cli.database import app_of, operations_on
from fairlane.cli.job_selection import place_options
from fairlane.cli.keys import draw_keys
from fairlane.cli.output import Screen, Ticker, look, run_until_stopped, tell, watch
from fairlane.cli.tables import as_of, make_console, printable, wrapped
from fairlane.errors import ConfigurationError
from fairlane.operations import Operations, Ranking

SORTS = {"w": "waiting", "r": "running", "e": "ended", "s": "started", "n": "name"}
HELP = "w waiting  r running  e ended  s started  n name  q quit"
AROUND = 4
"""Lines of the screen that are not keys: two above the headings and them, and one below."""
IN_A_PIPE = 50


@click.command()
@click.argument("queue", required=False, metavar="[QUEUE]")
@click.option("--by", metavar="KEYS", help="List these keys of the queue.  [default: the fair key]")
@click.option("--sort", type=click.Choice(list(SORTS.values())), default="waiting", show_default=True)
@click.option("--every", type=click.FloatRange(0.2, 3_600), default=2.0, show_default=True, help="Seconds.")
@place_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object, once.")
def top(
    queue: str | None, by: str | None, sort: str, every: float, app: str | None, url: str | None, as_json: bool
) -> None:
    """Watch the keys of a queue, or of the busiest queues. Looking changes nothing.

    On a terminal it is drawn anew every so often, and a key sorts it: w, r, e, s, n; q quits. In a pipe it prints once.
    What the columns mean, `fairlane keys --help` says.

    \b
    Example:
      fairlane top
      fairlane top webhooks --by endpoint --sort running
      fairlane top webhooks --json | jq '.keys[0]'
    """
    if by and queue is None:
        raise ConfigurationError("--by is about the keys of one queue; name it: fairlane top QUEUE --by …")
    if has_keyboard() and not as_json:
        run_until_stopped(lambda: _Top(queue, by, sort).run(every, app, url))
        return
    asked = _Top(queue, by, sort)
    tell(look(lambda operations: asked.ask(operations, IN_A_PIPE), app, url), draw_ranking, as_json)


class _Top:
    """What is on the screen: which keys, in which order."""

    def __init__(self, queue: str | None, by: str | None, sort: str) -> None:
        self._queue, self._by, self._sort = queue, by, sort

    async def ask(self, operations: Operations, limit: int) -> Ranking:
        return await operations.keys.rank(self._queue, self._by, sort=self._sort, limit=limit)

    async def run(self, every: float, app: str | None, url: str | None) -> None:
        console, ticker = make_console(), Ticker(every)
        async with operations_on(app_of(app, url)) as operations:
            with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
                screen = Screen(lambda lines: live.update(Group(*lines), refresh=True))
                watching = asyncio.create_task(
                    watch(
                        lambda: self.ask(operations, max(1, console.height - AROUND)),
                        lambda ranking: screen.show(draw_ranking(ranking, console.width, help=HELP)),
                        screen.lost,
                        ticker,
                    )
                )
                with pressed_keys(lambda key: self._press(key, ticker, watching)), suppress(asyncio.CancelledError):
                    await watching

    def _press(self, key: str, ticker: Ticker, watching: asyncio.Task[None]) -> None:
        if key.lower() == "q":
            watching.cancel()
        elif key.lower() in SORTS:
            self._sort = SORTS[key.lower()]
            ticker.hurry()


def draw_ranking(ranking: Ranking, width: int, *, help: str = "") -> list[Text]:
    where = ", ".join(ranking.queues) or "no queue is known to this database yet"
    more = f" and {ranking.left_out:,} queues with less to do" if ranking.left_out else ""
    said = Text(f"{as_of(ranking.now)}  {printable(where)}{more}  by {ranking.sort}", "bold")
    said.truncate(width, overflow="ellipsis")
    lines = [said, Text("")]
    for queue, words in ranking.unserved.items():
        lines += wrapped(words if len(ranking.queues) == 1 else f"{queue}: {words}", width, "")
    lines += draw_keys(ranking.keys, ranking.now, width, with_queue=len(ranking.queues) > 1)
    if not ranking.keys:
        lines.append(Text("nobody has a job here"))
    return [*lines, Text(help, "dim")] if help else lines


GONE = "q"
"""What a terminal that was closed is taken for: somebody has left."""


def has_keyboard() -> bool:
    """Whether somebody sits there: what is typed and what is shown are both a terminal's."""
    return sys.stdin.isatty() and sys.stdout.isatty()


@contextmanager
def pressed_keys(on_key: Callable[[str], None]) -> Iterator[None]:
    """While this lasts, each key is told as it is pressed and is not shown. Ctrl-C stays what it is."""
    terminal = sys.stdin.fileno()
    loop = asyncio.get_running_loop()
    before = termios.tcgetattr(terminal)

    def read() -> None:
        try:
            typed = os.read(terminal, 64)
        except OSError:
            typed = b""
        if not typed:
            loop.remove_reader(terminal)
        for key in typed.decode(errors="ignore") or GONE:
            on_key(key)

    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
