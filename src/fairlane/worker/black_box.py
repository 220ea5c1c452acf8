"""What runs in a worker's process, written where it outlives the process.

A process that dies by `os._exit`, a signal or a fault in C tells nobody what it was doing. Its pool gives each child a
piece of memory to note that in, and gives the same piece to whoever takes the child's place: who finds it signed knows
that the one before did not end in order, and which jobs ran when it died, or had ended without being recorded. Three
small writes a job.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from uuid import UUID

from fairlane.scheduler.settlement import DeadWorker

__all__ = ["BlackBox", "new_black_box"]

ENTRY = 17
"""A job's id and what it does."""
NOTHING = bytes(ENTRY)
RUNS, ENDED = b"\x01", b"\x02"


def new_black_box() -> int:
    """The descriptor of an empty one, for children to inherit."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("fairlane-black-box")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class BlackBox:
    """One process's notes. The first entry is the worker's id, the others are jobs."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory: mmap.mmap | None = None
        self._free: list[int] = []
        self._taken: dict[UUID, int] = {}

    def read(self) -> DeadWorker | None:
        """What the process before us left behind; nothing, if it ended in order or there was none."""
        written = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        worker, *jobs = [written[at : at + ENTRY] for at in range(0, len(written), ENTRY)] or [NOTHING]
        if worker == NOTHING:
            return None
        running, ended = (
            frozenset(UUID(bytes=each[:-1]) for each in jobs if each[-1:] == state) for state in (RUNS, ENDED)
        )
        return DeadWorker(UUID(bytes=worker[:-1]), running, ended)

    def sign(self, worker: UUID, jobs: int) -> None:
        """From now on these are the notes of this worker, which has up to so many jobs at once to note."""
        os.ftruncate(self._descriptor, 0)
        os.ftruncate(self._descriptor, ENTRY * (1 + jobs))
        self._memory = mmap.mmap(self._descriptor, ENTRY * (1 + jobs))
        self._free = [ENTRY * (jobs - place) for place in range(jobs)]
        self._memory[:ENTRY] = worker.bytes + RUNS

    def note(self, job: UUID) -> None:
        """This job runs from now on."""
        if self._memory is not None and self._free:
            place = self._taken[job] = self._free.pop()
            self._memory[place : place + ENTRY] = job.bytes + RUNS

    def note_end(self, job: UUID) -> None:
        """It has ended, and that is not recorded yet."""
        if self._memory is not None and (place := self._taken.get(job)) is not None:
            self._memory[place + ENTRY - 1 : place + ENTRY] = ENDED

    def erase(self, job: UUID) -> None:
        """It is no longer of this process."""
        place = self._taken.pop(job, None)
        if self._memory is not None and place is not None:
            self._memory[place : place + ENTRY] = NOTHING
            self._free.append(place)

    def close(self) -> None:
        """This worker has ended in order: whatever it left will be found by its leases."""
        if self._memory is not None:
            self._memory[:ENTRY] = NOTHING
            self._memory.close()
            self._memory = None
