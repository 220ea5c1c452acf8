"""How a command shows what it has looked at: once or again and again, for people or as JSON."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import click
import msgspec
from rich.console import Group
from rich.live import Live
from rich.text import Text

from fairlane.app import App
from fairlane.cli.database import app_of, operations_on
from fairlane.cli.tables import make_console, print_lines
from fairlane.clock import Instant
from fairlane.errors import StoreUnavailable
from fairlane.operations import Operations
from fairlane.redaction import json_text

T = TypeVar("T")
Ask = Callable[[Operations], Awaitable[T]]
Draw = Callable[[T, int], list[Text]]
"""The lines of a view, none wider than so many columns."""


def as_json_text(view: Any) -> str:
    return json_text(msgspec.to_builtins(view))


def look(ask: Ask[T], app: str | None, url: str | None) -> T:
    """Ask once, of the database that the options name."""

    return ask_app(ask, app_of(app, url))


def ask_app(ask: Ask[T], app: App) -> T:
    """The same, of an app's database."""

    async def asked() -> T:
        async with operations_on(app) as operations:
            return await ask(operations)

    return asyncio.run(asked())


def look_now(ask: Ask[T], app: App) -> tuple[T, Instant]:
    """The same, and the time by the database's clock."""

    async def asked(operations: Operations) -> tuple[T, Instant]:
        return await ask(operations), await operations.now()

    return ask_app(asked, app)


def tell(view: T, draw: Draw[T], as_json: bool) -> None:
    """Print what was seen."""
    if as_json:
        click.echo(as_json_text(view))
    else:
        print_lines(draw(view, make_console().width))


def look_again(ask: Ask[T], draw: Draw[T], every: float, *, app: str | None, url: str | None, as_json: bool) -> None:
    """Ask again and again: drawn in place on a terminal, and a block (or a JSON document) each in a pipe."""
    console = make_console()

    def show(view: T) -> None:
        tell(view, draw, as_json)
        if not as_json:
            click.echo()

    def lost(why: str) -> None:
        click.echo(f"{why}; looking again", err=True)

    async def in_a_pipe() -> None:
        async with operations_on(app_of(app, url)) as operations:
            await watch(lambda: ask(operations), show, lost, Ticker(every))

    async def in_place() -> None:
        async with operations_on(app_of(app, url)) as operations:
            with Live(console=console, auto_refresh=False, vertical_overflow="ellipsis") as live:
                screen = Screen(lambda lines: live.update(Group(*lines), refresh=True))
                await watch(
                    lambda: ask(operations),
                    lambda view: screen.show(draw(view, console.width)),
                    screen.lost,
                    Ticker(every),
                )

    run_until_stopped(in_place if console.is_terminal and not as_json else in_a_pipe)


class Screen:
    """What is drawn in place. While the database cannot be reached, what was seen last stays, and says so."""

    def __init__(self, draw: Callable[[list[Text]], None]) -> None:
        self._draw = draw
        self._seen: list[Text] = []

    def show(self, lines: list[Text]) -> None:
        self._seen = lines
        self._draw(lines)

    def lost(self, why: str) -> None:
        # At the top: what does not fit on the screen is cut off below.
        self._draw([Text(f"{why}; looking again. This was seen last:", "bold red"), *self._seen])


F = TypeVar("F", bound=Callable[..., Any])
EVERY = 2.0
SHORTEST = 0.2


def watch_option(function: F) -> F:
    return click.option(
        "--watch",
        is_flag=False,
        flag_value=EVERY,
        type=click.FloatRange(min=SHORTEST, max=3_600),
        metavar="[SECONDS]",
        help=f"Refresh every so many seconds, until Ctrl-C.  [{EVERY:g} if no number follows]",
    )(function)


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
    """Look, show it, pause, without an end. A database that is lost is told, and looked for again."""
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
