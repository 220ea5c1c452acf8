"""The demo's program, as a user would write it: three queues and one task. And the ledger that its handlers keep.

`fairlane worker fairlane.demo.app:app` runs it. The database comes from FAIRLANE_URL. The processes of an act share a
folder, with a curtain and a ledger. The ledger says what ran, in one append-only file for each worker process:

    + <started_at> <number> <tenant> <endpoint> <admitted_at>
    - <ended_at> <number>

Times are nanoseconds of the monotonic clock, which on one machine all processes share.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import msgspec

from fairlane.app import App
from fairlane.demo.scenarios import ACTS, FIFO, NANOSECONDS, Run
from fairlane.task import AsyncTask
from fairlane.worker.runs import current_run

STAGE_VARIABLE = "FAIRLANE_DEMO_STAGE"
"""Names the folder that an act's processes share."""
CURTAIN = "curtain"
"""The file in it for which workers wait. Each makes one of its own when it is ready: `<pid>.ready`."""
LOOK_EVERY = 0.005
LOOK_FOR_PARENT_EVERY = 0.5
RUN_TIME = 0.005  # seconds


async def deliver(number: int, tenant: str, endpoint: str) -> int:
    """Stands for a call to somebody's server, and writes down when it began and ended."""
    admitted_at = current_run.get().claim.claimed_at * 1_000
    with _ledger().record(number, tenant, endpoint, admitted_at):
        await asyncio.sleep(RUN_TIME)
    return number


@cache
def _ledger() -> LedgerWriter:
    return LedgerWriter(Path(os.environ[STAGE_VARIABLE]))


def make_app(url: str | None = None) -> tuple[App, AsyncTask[[int, str, str], int]]:
    """The app on a database, and its task."""
    app = App(url)
    for act in ACTS:
        app.queue(act.queue, fair=act.fair, limits=act.limits)
    return app, app.task(queue=FIFO.queue, name="deliver", keys=("tenant", "endpoint"))(deliver)


def wait_for_curtain(stage: Path) -> None:
    """In a worker process: return when all of them are ready. Ends this process if whoever started it is gone."""
    parent = os.getppid()

    def leave_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_FOR_PARENT_EVERY)
        os.kill(os.getpid(), signal.SIGTERM)

    (stage / f"{os.getpid()}.ready").touch()
    while not (stage / CURTAIN).exists():
        if os.getppid() != parent:
            raise SystemExit("whoever started this worker is gone")
        time.sleep(LOOK_EVERY)
    threading.Thread(target=leave_with_parent, name="fairlane-demo-parent", daemon=True).start()


class LedgerWriter:
    """One process's file. Every line is one write, so that a reader never sees half of two lines mixed."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(folder / f"{os.getpid()}.ledger", flags, 0o600)

    @contextmanager
    def record(self, number: int, tenant: str, endpoint: str, admitted_at: int) -> Iterator[None]:
        """Note the start on entering and the end on leaving, however it is left."""
        os.write(self._file, f"+ {time.monotonic_ns()} {number} {tenant} {endpoint} {admitted_at}\n".encode())
        try:
            yield
        finally:
            os.write(self._file, f"- {time.monotonic_ns()} {number}\n".encode())


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
            offset = self._offsets.get(path, 0)
            with path.open("rb") as file:
                file.seek(offset)
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(whole)
            for line in whole.decode().splitlines():
                self._take(path, line.split(" "))
        return sum(self._offsets.values()) > before

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


app = make_app()[0]
if STAGE_VARIABLE in os.environ:
    wait_for_curtain(Path(os.environ[STAGE_VARIABLE]))
