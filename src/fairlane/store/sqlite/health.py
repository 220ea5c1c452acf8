"""The condition of a SQLite file, and of what waits in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from fairlane.clock import Instant
from fairlane.store.health import SqliteHealth, Standstill, standstills_in
from fairlane.store.sqlite import claims
from fairlane.store.sqlite.database import Transaction


def examine_file(tx: Transaction, path: str | None, *, brief: bool) -> SqliteHealth:
    wal = 0 if path is None else _size(f"{path}-wal")
    return SqliteHealth(
        path=path,
        journal_mode=tx.value("select_journal_mode"),
        size=tx.value("select_page_count") * tx.value("select_page_size"),
        wal_size=wal,
        free_space=None if path is None else shutil.disk_usage(Path(path).resolve().parent).free,
        others=[] if path is None or brief else sorted(_processes_with(Path(path).resolve())),
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


def find_standstills(
    tx: Transaction, queues: Sequence[claims.QueueInForce], before: Instant, limit: int
) -> list[Standstill]:
    found: list[Standstill] = []
    for queue in queues:
        board, state, name = claims.tail_of(tx, queue), queue.state, queue.policy.queue
        behind = tx.some("select_flows_behind", limit, board.changed[0], queue.id, state.cursor, state.cursor_tie)
        overdue = tx.some("select_overdue_gates", limit, board.changed[2], queue.id, before)
        found += [
            Standstill(queue=name, limit=gate, key=msgspec.json.decode(key), lanes=lanes, since=since)
            for _, gate, key, lanes, since in (*behind, *overdue)
        ]
        found += standstills_in(name, board.changed_rows(), state, before)
    return found
