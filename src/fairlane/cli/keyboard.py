"""Single keys from a terminal, as they are pressed."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["has_keyboard", "pressed_keys"]

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
