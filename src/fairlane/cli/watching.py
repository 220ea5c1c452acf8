"""Looking again and again: on a terminal in place, in a pipe block after block."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import click

from fairlane.errors import StoreUnavailable

__all__ = ["Ticker", "run_until_stopped", "watch", "watch_option"]

T = TypeVar("T")
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
