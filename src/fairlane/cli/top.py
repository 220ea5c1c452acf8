"""`fairlane top`: keys as they come and go, on a terminal."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.text import Text

from fairlane.cli.keys import draw_keys
from fairlane.cli.options import json_option, place_options
from fairlane.cli.output import (
    Given,
    Ticker,
    as_of,
    look,
    look_in_place,
    make_console,
    printable,
    run_until_stopped,
    show,
    wrapped,
)
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
@click.option("--sort", type=click.Choice(list(SORTS.values())), default="waiting")
@click.option("--every", type=click.FloatRange(0.2, 3_600), default=2.0, help="Seconds.")
@place_options
@json_option("a JSON object, once")
def top(queue: str | None, by: str | None, sort: str, every: float, **given: Any) -> None:
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
    if is_on_a_terminal() and not given["as_json"]:
        run_until_stopped(lambda: _watch(queue, by, sort, every, given))
        return
    ranking = look(lambda operations: operations.keys.rank(queue, by, sort=sort, limit=IN_A_PIPE), given)
    show(ranking, draw_ranking, given)


async def _watch(queue: str | None, by: str | None, sort: str, every: float, given: Given) -> None:
    ticker, watching = Ticker(every), asyncio.current_task()
    assert watching is not None

    def press(key: str) -> None:
        nonlocal sort
        if key.lower() == "q":
            watching.cancel()
        elif key.lower() in SORTS:
            sort = SORTS[key.lower()]
            ticker.hurry()

    async def ask(operations: Operations) -> Ranking:
        limit = max(1, make_console().height - AROUND)
        return await operations.keys.rank(queue, by, sort=sort, limit=limit)

    await look_in_place(
        ask, lambda ranking, width: draw_ranking(ranking, width, help=HELP), ticker, given, pressed_keys(press)
    )


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
"""What a closed terminal counts as."""


def is_on_a_terminal() -> bool:
    """Whether somebody types there and reads what is shown."""
    return sys.stdin.isatty() and sys.stdout.isatty()


@contextmanager
def pressed_keys(on_key: Callable[[str], None]) -> Iterator[None]:
    """While this lasts, `on_key` is called with each key as it is pressed, which is not shown. Ctrl-C stays what it
    is."""
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
