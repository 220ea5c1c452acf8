"""A host that loses its power beneath a SQLite file: what was not flushed is gone, and so is everybody who knew it.

A process that is killed loses nothing that it committed: its write-ahead log is with the kernel. Only a crash of the
host can, and takes every process along. What is left is a beginning of the log: with all that was flushed, since no
durable commit returns before, and with all that was copied into the file, since the log is flushed before that.
"""

from __future__ import annotations

import sqlite3
import struct
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path

__all__ = ["PowerLoss"]

HEADER, FRAME = 32, 24


class PowerLoss:
    """Made once every other process is dead, while nothing is written; `happen` once nobody has the file open."""

    def __init__(self, file: Path) -> None:
        self._file = file
        log, index = file.with_name(f"{file.name}-wal"), file.with_name(f"{file.name}-shm")
        self._kept, self._log = file.read_bytes(), log.read_bytes()
        self._ends = _commits(self._log, _copied(index)) if self._log else [0]

    def happen(self, is_durable: Callable[[sqlite3.Connection], bool]) -> None:
        """Leave as little of the log as can be left, with everything that was acknowledged as durable."""
        least = bisect_left(self._ends, True, key=lambda end: self._holds(end, is_durable))
        assert least < len(self._ends), "what was acknowledged is not even in the whole log"
        _write(self._file, self._kept, self._log[: self._ends[least]])

    def _holds(self, end: int, is_durable: Callable[[sqlite3.Connection], bool]) -> bool:
        copy = self._file.with_name("copy.db")
        _write(copy, self._kept, self._log[:end])
        connection = sqlite3.connect(copy)
        try:
            return is_durable(connection)
        finally:
            connection.close()
            copy.unlink()


def _copied(index: Path) -> int:
    """How many frames of the log a checkpoint may have copied into the file (`nBackfillAttempted`)."""
    content = index.read_bytes()
    attempted: int = struct.unpack_from("=I", content, 128)[0]
    return attempted


def _commits(log: bytes, copied: int) -> list[int]:
    """The places at which the log may end: behind each commit from what is copied on."""
    (page,) = struct.unpack_from(">I", log, 8)
    salts, ends, at, number = log[16:24], [HEADER], HEADER, 0
    while at + FRAME + page <= len(log) and log[at + 8 : at + 16] == salts:
        (is_commit,) = struct.unpack_from(">I", log, at + 4)
        at, number = at + FRAME + page, number + 1
        if number <= copied:
            ends = [at]
        elif is_commit:
            ends.append(at)
    return ends


def _write(file: Path, kept: bytes, log: bytes) -> None:
    file.write_bytes(kept)
    file.with_name(f"{file.name}-wal").write_bytes(log)
    file.with_name(f"{file.name}-shm").unlink(missing_ok=True)
