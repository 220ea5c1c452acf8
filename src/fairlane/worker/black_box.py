"""What has begun in a process, written where it outlives the process and where the worker above it can look.

A process that dies by `os._exit`, a signal or a fault in C tells nobody what it was doing, and one whose event loop is
blocked answers no question. The worker gives each of its processes a piece of memory to note that in. A job is noted
*before* the process looks at the clock to see whether it may still begin: so whatever is not noted once that time is
over has not begun, and never will there. Three small writes a job.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from enum import IntEnum
from uuid import UUID

__all__ = ["BlackBox", "Noted"]

ENTRY = 17
"""A job's id and what it does."""
NOTHING = bytes(ENTRY)


class Noted(IntEnum):
    """What a job does."""

    RUNS = 1
    ENDED = 2
    """It has ended, and the worker has not been told yet."""
    RUNS_ELSEWHERE = 3
    """In a process of its own: whatever kills this one, it was not this job."""


class BlackBox:
    """One process's notes, for up to so many jobs at once."""

    def __init__(self, descriptor: int, jobs: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, ENTRY * jobs)
        self._free = [ENTRY * place for place in range(jobs)]
        self._taken: dict[UUID, int] = {}

    @classmethod
    def empty(cls, jobs: int) -> BlackBox:
        """A new one, whose descriptor a child is to inherit."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("fairlane-black-box")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, ENTRY * jobs)
        return cls(descriptor, jobs)

    def read(self) -> dict[UUID, Noted]:
        """What has begun, as whoever looks from outside sees it."""
        written = self._memory[:]
        entries = (written[at : at + ENTRY] for at in range(0, len(written), ENTRY))
        return {UUID(bytes=each[:-1]): Noted(each[-1]) for each in entries if each[-1]}

    def note(self, job: UUID, what: Noted = Noted.RUNS) -> None:
        """This job begins, unless it is too late for that."""
        place = self._taken[job] = self._free.pop()
        self._memory[place : place + ENTRY] = job.bytes + bytes((what,))

    def note_end(self, job: UUID) -> None:
        """It has ended."""
        if (place := self._taken.get(job)) is not None:
            self._memory[place + ENTRY - 1] = Noted.ENDED

    def erase(self, job: UUID) -> None:
        """It has not begun, or the worker knows how it ended."""
        if (place := self._taken.pop(job, None)) is not None:
            self._memory[place : place + ENTRY] = NOTHING
            self._free.append(place)

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)
