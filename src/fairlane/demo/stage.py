"""The stage: the folder that the processes of an act share, with a curtain and a ledger.

The ledger says what ran, written down by the handlers themselves, in one append-only file for each worker process:

    + <started_at> <number> <tenant> <endpoint> <admitted_at>
    - <ended_at> <number>

Times are nanoseconds of the monotonic clock, which on one machine all processes share.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from fairlane.demo.acts import NANOSECONDS, Run

STAGE_VARIABLE = "FAIRLANE_DEMO_STAGE"
"""Names the folder that an act's processes share."""
LOOK_EVERY = 0.005
LOOK_FOR_PARENT_EVERY = 0.5


def wait_for_curtain(stage: Path) -> None:
    """In a worker process: return when all of them are ready. Ends this process if whoever started it is gone."""
    parent = os.getppid()
    (stage / f"{os.getpid()}.ready").touch()
    while not (stage / "curtain").exists():
        if os.getppid() != parent:
            raise SystemExit("whoever started this worker is gone")
        time.sleep(LOOK_EVERY)
    threading.Thread(target=_leave_with, args=(parent,), name="fairlane-demo-parent", daemon=True).start()


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_FOR_PARENT_EVERY)
    os.kill(os.getpid(), signal.SIGTERM)


def count_ready(stage: Path) -> int:
    return sum(1 for _ in stage.glob("*.ready"))


def raise_curtain(stage: Path) -> None:
    (stage / "curtain").touch()


class LedgerWriter:
    """One process's file. Every line is one write, so that a reader never sees half of two lines mixed."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(folder / f"{os.getpid()}.ledger", flags, 0o600)

    @contextmanager
    def record(self, number: int, tenant: str, endpoint: str, admitted_at: int) -> Iterator[None]:
        """Note the start on entering and the end on leaving, however it is left."""
        self._write(f"+ {time.monotonic_ns()} {number} {tenant} {endpoint} {admitted_at}\n")
        try:
            yield
        finally:
            self._write(f"- {time.monotonic_ns()} {number}\n")

    def _write(self, line: str) -> None:
        os.write(self._file, line.encode())


class LedgerReader:
    """Follows all files of a folder. `runs` are those that have ended; `running` those that have not."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}
        self.runs: list[Run] = []
        self.running: dict[tuple[Path, int], Run] = {}
        self._first = 0
        self._latest = 0

    @property
    def elapsed(self) -> float:
        """Seconds from the first start to the last line."""
        return (self._latest - self._first) / NANOSECONDS if self._first else 0.0

    def follow(self) -> bool:
        """Read what was written since the last time; whether there was anything."""
        before = sum(self._offsets.values())
        for path in sorted(self._folder.glob("*.ledger")):
            self._read(path)
        return sum(self._offsets.values()) > before

    def _read(self, path: Path) -> None:
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            file.seek(offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offsets[path] = offset + len(whole)
        for line in whole.decode().splitlines():
            self._take(path, line.split(" "))

    def _take(self, path: Path, fields: list[str]) -> None:
        at = int(fields[1])
        self._first = min(self._first or at, at)
        self._latest = max(self._latest, at)
        match fields:
            case ["+", _, number, tenant, endpoint, admitted_at]:
                run = Run(int(number), tenant, endpoint, at, at, int(admitted_at))
                self.running[path, run.number] = run
            case ["-", _, number]:
                run = self.running.pop((path, int(number)))
                self.runs.append(msgspec.structs.replace(run, ended_at=at))
            case _:
                raise ValueError(f"{path.name}: not a line of a ledger: {fields}")
