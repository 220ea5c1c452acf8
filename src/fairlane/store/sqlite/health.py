"""The condition of a SQLite file, and of what waits in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from fairlane.clock import Instant
from fairlane.store.health import SqliteHealth, Standstill
from fairlane.store.sqlite.database import Transaction

__all__ = ["examine_file", "find_standstills"]


def examine_file(tx: Transaction, path: str | None) -> SqliteHealth:
    wal = 0 if path is None else _size(f"{path}-wal")
    return SqliteHealth(
        path=path,
        journal_mode=tx.value("select_journal_mode"),
        size=tx.value("select_page_count") * tx.value("select_page_size"),
        wal_size=wal,
        free_space=None if path is None else shutil.disk_usage(Path(path).resolve().parent).free,
        others=[] if path is None else sorted(_processes_with(Path(path).resolve())),
    )


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def _processes_with(file: Path) -> Iterator[int]:
    """Processes that have the file open, where the system tells (Linux), and of those that this user may ask."""
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        try:
            if any(os.readlink(each) == str(file) for each in (process / "fd").iterdir()):
                yield int(process.name)
        except OSError:  # it has ended, or is somebody else's
            continue


def find_standstills(tx: Transaction, queues: Sequence[str], before: Instant, limit: int) -> list[Standstill]:
    return [
        Standstill(queue=queue, limit=gate, key=msgspec.json.decode(key), lanes=lanes, since=since)
        for queue in queues
        for gate, key, lanes, since in tx.all("select_standstills", queue, before, limit)
    ]
