"""The lock at which the processes that share a file queue to write."""

from __future__ import annotations

import fcntl
import os

__all__ = ["WriteLock"]

REMEMBERED = 32
"""Writes without anybody else in the way, until the others are held to be gone."""


class WriteLock:
    """A lock file beside one database file, opened once by each store."""

    def __init__(self, path: str) -> None:
        self._file = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._crowd = 0

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
            fcntl.flock(self._file, fcntl.LOCK_EX)

    def give(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        os.close(self._file)
