"""The pacer: holds jobs that were claimed ahead until their instants, and keeps the distance between their starts.

What waits here takes no slot. One job of a rate is let go at a time, and the next one only once that has really begun:
however late a process is (it was stopped, its loop was blocked), starts are never bunched. What would come after the
instants that its claim owns is given back.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from bisect import insort
from collections.abc import Callable
from functools import cache
from heapq import heappop, heappush
from typing import TYPE_CHECKING

from fairlane.clock import SECOND, Clock, Instant, SystemClock
from fairlane.scheduler.snapshot import Pace, Passed
from fairlane.waits import Alarm

if TYPE_CHECKING:
    from fairlane.worker.execution import Run


AT_INSTANT = 1
"""What timerfd_settime(2) calls TFD_TIMER_ABSTIME."""


class Pacer:
    """The jobs of one worker that wait for their instants. Instants are of the monotonic clock."""

    def __init__(self, clock: Clock, launch: Callable[[Run], None], give_back: Callable[[Run], None]) -> None:
        self._now = clock.monotonic
        self._launch = launch
        self._give_back = give_back
        self._loop = asyncio.get_running_loop()
        self._passed = Passed()
        self._waiting: dict[bytes, list[Run]] = {}
        """By the last gate that they pass, the first to start in front."""
        self._launched: dict[bytes, Run] = {}
        """By every gate that it passes, the one job that was let go there and has not begun."""
        self._behind: dict[bytes, set[bytes]] = {}
        """By the gate of such a job, the groups that wait for it to begin."""
        self._due: list[tuple[Instant, int, bytes]] = []
        self._entries = 0
        self._timer = (
            _SystemTimer(self._loop, self._ring) if isinstance(clock, SystemClock) else Alarm(clock, self._ring)
        )

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def starts_within(self, time: int) -> bool:
        """Whether the next of them is to start by then, or about to."""
        return bool(self._launched) or bool(self._due and self._due[0][0] <= self._now() + time)

    def runs(self) -> list[Run]:
        return [run for group in self._waiting.values() for run in group]

    def add(self, run: Run) -> None:
        group = self._waiting.setdefault(_group(run), [])
        insort(group, run, key=_at)
        if group[0] is run:
            self._look_at(_group(run))

    def began(self, run: Run, at: Instant) -> None:
        """Its handler is called. What follows from that is seen to afterwards: the handler comes first."""
        assert run.pace is not None
        pace, run.pace = run.pace, None
        self._loop.call_soon(self._note, pace, at)

    def _note(self, pace: Pace, at: Instant) -> None:
        self._passed.note(pace, at)
        self._let_pass(pace)

    def drop(self, run: Run) -> None:
        """It does not wait any more, or was let go and has ended without a start."""
        assert run.pace is not None
        name = _group(run)
        if self._launched.get(name) is run:
            self._let_pass(run.pace)
            return
        if run in (group := self._waiting.get(name, [])):
            group.remove(run)
        self._look_at(name)

    def _let_pass(self, pace: Pace) -> None:
        """Whoever was let go at these gates is through, or will not come: the next may."""
        names = {pace.gates[-1][0]}
        for gate, _ in pace.gates:
            self._launched.pop(gate, None)
            names |= self._behind.pop(gate, set())
        for name in names:
            self._look_at(name)

    def is_spent(self, run: Run) -> bool:
        """Whether its instant is gone: what started before it came so late that there is no place for it any more."""
        return run.pace is not None and self._passed.opens_at(run.pace) > run.pace.at

    def close(self) -> None:
        self._timer.close()

    def _look_at(self, name: bytes) -> None:
        """Find out when the next of a rate may start. What may not any more is given back."""
        group = self._waiting.get(name)
        while group:
            run = group[0]
            assert run.pace is not None
            if self._stands_behind(name, run.pace):
                return
            due = self._passed.opens_at(run.pace)
            if max(due, self._now()) <= run.pace.latest:
                self._entries += 1
                heappush(self._due, (due, self._entries, name))
                self._set_timer()
                return
            group.pop(0)
            self._give_back(run)
        if group is not None and not group:
            del self._waiting[name]

    def _stands_behind(self, name: bytes, pace: Pace) -> bool:
        """Whether somebody was let go at one of these gates and has not begun; if so, this group is next."""
        for gate, _ in pace.gates:
            if gate in self._launched:
                self._behind.setdefault(gate, set()).add(name)
                return True
        return False

    def _ring(self) -> None:
        now = self._now()
        while self._due and self._due[0][0] <= now:
            _, _, name = heappop(self._due)
            group = self._waiting.get(name)
            if not group:
                continue
            run = group[0]
            assert run.pace is not None
            if self._stands_behind(name, run.pace):
                continue
            if self._passed.opens_at(run.pace) <= now <= run.pace.latest:
                group.pop(0)
                self._launched.update(dict.fromkeys((gate for gate, _ in run.pace.gates), run))
                self._launch(run)
            else:
                self._look_at(name)
        self._set_timer()

    def _set_timer(self) -> None:
        if self._due:
            self._timer.set(self._due[0][0])


def _at(run: Run) -> Instant:
    assert run.pace is not None
    return run.pace.at


def _group(run: Run) -> bytes:
    assert run.pace is not None
    return run.pace.gates[-1][0]


class _SystemTimer:
    """Rings in the event loop at an instant of the machine's monotonic clock.

    The timers of event loops are a millisecond late on Linux, which counts in milliseconds when it waits for sockets.
    It has timers that are read like sockets, and those are exact to some 50 µs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._now = SystemClock().monotonic
        self._at: Instant | None = None
        self._handle: asyncio.Handle | None = None
        self._file = -1
        self._is_exact = sys.platform == "linux" and sys.maxsize > 2**32

    def set(self, moment: Instant) -> None:
        if self._at is not None and self._at <= moment:
            return
        self._at = moment
        if moment <= self._now():
            self._loop.call_soon(self._look)
        elif not self._set_exactly(moment):
            if self._handle is not None:
                self._handle.cancel()
            self._handle = self._loop.call_later((moment - self._now()) / SECOND, self._look)

    def close(self) -> None:
        self._at = None
        if self._handle is not None:
            self._handle.cancel()
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1
        self._is_exact = False

    def _look(self) -> None:
        if self._at is None:
            return
        if self._at > self._now():
            moment, self._at = self._at, None
            self.set(moment)
        else:
            self._at = None
            self._ring()

    def _set_exactly(self, moment: Instant) -> bool:
        """Say whether the system has such a timer, and one was left for us."""
        if self._is_exact and self._file < 0:
            self._file = _libc().timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
            self._is_exact = self._file >= 0
            if self._is_exact:
                self._loop.add_reader(self._file, self._expired)
        if not self._is_exact:
            return False
        seconds, rest = divmod(moment, SECOND)
        once = (ctypes.c_long * 4)(0, 0, seconds, rest * 1_000)
        self._is_exact = _libc().timerfd_settime(self._file, AT_INSTANT, once, None) == 0
        return self._is_exact

    def _expired(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._file, 8)
        self._look()


@cache
def _libc() -> ctypes.CDLL:
    # `os.timerfd_create` came with Python 3.13.
    return ctypes.CDLL(None, use_errno=True)
