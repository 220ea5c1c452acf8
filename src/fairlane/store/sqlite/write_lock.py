"""The lock at which the processes that share a file queue to write."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

PRIVATE = 0o600
REMEMBERED = 32
"""Writes without anybody else in the way, until the others are held to be gone."""


class WriteLock:
    """A lock file beside one database file, opened once by each store."""

    def __init__(self, path: str) -> None:
        mode = os.stat(path).st_mode & 0o777 if os.path.exists(path) else PRIVATE
        self._file = _opened(f"{path}.lock", mode)
        self._crowd = 0
        self.is_waited_for = False
        """Another process has it."""

    @property
    def is_crowded(self) -> bool:
        """Whether others have been in the way of late."""
        return self._crowd > 0

    def take(self) -> None:
        """Wait until nobody else writes."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._crowd = max(0, self._crowd - 1)
        except BlockingIOError:
            self._crowd = REMEMBERED
            self.is_waited_for = True
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX)
            finally:
                self.is_waited_for = False

    def holder(self) -> tuple[str, str]:
        """Which process holds the lock, as far as the system says, and what to do about it."""
        found = os.fstat(self._file)
        which = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        with contextlib.suppress(OSError):  # not every system says
            for line in Path("/proc/locks").read_text().splitlines():
                # `1: FLOCK  ADVISORY  WRITE 4711 fe:01:1234 0 EOF`; who waits has an arrow.
                _, kind, *_, pid, file, _, _ = line.split()
                if (kind, file) == ("FLOCK", which) and int(pid) > 0:
                    return _described(int(pid))
        return "another process", "find it with `fuser` or `lsof`, and end it"

    def give(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._file)


def _described(pid: int) -> tuple[str, str]:
    name, state = "", ""
    with contextlib.suppress(OSError):
        # `4711 (python3) T …`; a name may hold blanks and brackets itself.
        before, _, after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        name, state = before.partition("(")[2], after.split()[0]
    who = f"process {pid}" + (f" ({name})" if name else "")
    if state in ("T", "t"):
        return f"{who}, which is stopped", f"let it go on (kill -CONT {pid}), or end it"
    return who, "wait until it has written; it may wait for a transaction that is not Fairlane's itself: see its log"


def make_private(path: str) -> None:
    """Create a database file that only its owner can read. One that is there keeps its mode, and SQLite gives the files
    beside it the mode of the database."""
    os.close(_opened(path, PRIVATE))


def _opened(path: str, mode: int) -> int:
    """The file, open for writing; if it is not there yet, made with exactly this mode."""
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        return os.open(path, flags)
    os.fchmod(file, mode)  # whoever shares the database shares its lock, whatever the umask says
    return file
