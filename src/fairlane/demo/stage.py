"""Runs the scenarios: enqueue, start the workers, watch the ledger, count.

Everything is enqueued before the workers start; time counts from the first start of a handler.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from itertools import groupby
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import msgspec

from fairlane.demo.app import CURTAIN, STAGE_VARIABLE, LedgerReader, make_app
from fairlane.demo.scenarios import ACTS, Act, Figures, Promise, Run, Workload, class_of, judge, measure
from fairlane.errors import FairlaneError

LOOK_EVERY = 0.1
READY_WITHIN = 30.0
STALLED_AFTER = 20.0
STOP_WITHIN = 10.0
GRACE = 3.0
ENQUEUE_AT_ONCE = 1_000


class DemoFailed(FairlaneError):
    """The demo could not be played to its end."""


class Progress(msgspec.Struct, frozen=True):
    """One look at a running act: who runs and who waits."""

    act: Act
    workload: Workload
    stage: str
    """What is going on, in a word or two: `enqueueing`, `starting workers`, `running`, `done`."""
    elapsed: float = 0.0
    """Seconds since the first handler started."""
    done: Counter[str] = msgspec.field(default_factory=Counter)
    """Runs by class: `whale` or `small`."""
    running: Counter[str] = msgspec.field(default_factory=Counter)


class Performance(msgspec.Struct, frozen=True):
    """An act that was played."""

    act: Act
    workload: Workload
    runs: list[Run]
    stats: Figures


class Report(msgspec.Struct, frozen=True):
    """What the whole demo showed."""

    workload: Workload
    stats: list[Figures]
    promises: list[Promise]


class Watcher:
    """What shows the demo. This one shows nothing: it is for `--json`."""

    def around(self) -> AbstractContextManager[object]:
        """What lasts as long as the demo."""
        return nullcontext()

    def look(self, progress: Progress) -> None: ...

    def finish(self, performance: Performance) -> None: ...


def play(url: str, workload: Workload, watcher: Watcher) -> Report:
    """Play all acts on one database and judge what they showed."""
    asyncio.run(make_app(url)[0].migrate())
    stats = []
    for act in ACTS:
        with tempfile.TemporaryDirectory(prefix="fairlane-demo-") as stage:
            runs = Stage(act, workload, url, Path(stage), watcher).play()
        stats.append(measure(act, workload, runs))
        watcher.finish(Performance(act, workload, runs, stats[-1]))
    return Report(workload, stats, judge(stats, workload.all_slots))


class Stage:
    """One act on a database, played by worker processes that the public command starts."""

    def __init__(self, act: Act, workload: Workload, url: str, folder: Path, watcher: Watcher) -> None:
        self._act = act
        self._workload = workload
        self._url = url
        self._folder = folder
        self._watcher = watcher
        self._ledger = LedgerReader(folder)
        self._workers: dict[Path, subprocess.Popen[bytes]] = {}

    def play(self) -> list[Run]:
        self._show("enqueueing")
        asyncio.run(self._enqueue())
        self._show("starting workers")
        try:
            self._start_workers()
            self._wait_until_ready()
            (self._folder / CURTAIN).touch()
            self._follow()
            self._drain()
        finally:
            self._end_workers()
        self._ledger.follow()
        self._show("done")
        return self._ledger.runs

    def _show(self, stage: str) -> None:
        runs = self._ledger.runs, self._ledger.running.values()
        done, running = (Counter(class_of(run.tenant) for run in each) for each in runs)
        self._watcher.look(Progress(self._act, self._workload, stage, self._ledger.elapsed, done, running))

    async def _enqueue(self) -> None:
        """The whale first; then each small tenant brings all of its jobs at once."""
        app, deliver = make_app(self._url)
        on_queue = deliver.using(queue=self._act.queue)
        async with app:
            for _, jobs in groupby(self._workload.deliveries(), key=lambda job: job.tenant):
                calls = [on_queue.call(job.number, job.tenant, job.endpoint) for job in jobs]
                for first in range(0, len(calls), ENQUEUE_AT_ONCE):
                    await app.enqueue_many(calls[first : first + ENQUEUE_AT_ONCE])

    def _start_workers(self) -> None:
        options = ["--queues", self._act.queue, "--concurrency", str(self._workload.slots), "--log-level", "warning"]
        for nth in range(1, self._workload.processes + 1):
            log = self._folder / f"worker-{nth}.log"
            with log.open("wb") as output:
                self._workers[log] = subprocess.Popen(
                    # The same program and the same Python as this one, whatever PATH says.
                    [sys.executable, "-m", "fairlane.cli", "worker", "fairlane.demo.app:app", *options],
                    env={**os.environ, "FAIRLANE_URL": self._url, STAGE_VARIABLE: str(self._folder)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the demo, which then stops its workers itself
                )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + READY_WITHIN
        while len(list(self._folder.glob("*.ready"))) < self._workload.processes:
            self._check_workers()
            if time.monotonic() > deadline:
                raise DemoFailed(f"the workers were not ready within {READY_WITHIN:g} s")
            time.sleep(LOOK_EVERY / 10)

    def _follow(self) -> None:
        """Look at the ledger until every job has run, or nothing has happened for too long."""
        total, runs, moved_at = self._workload.total, self._ledger.runs, time.monotonic()
        while len(runs) < total:
            time.sleep(LOOK_EVERY)
            if self._ledger.follow():
                moved_at = time.monotonic()
            elif time.monotonic() - moved_at > STALLED_AFTER:
                nothing = f"nothing has run for {STALLED_AFTER:g} s"
                raise DemoFailed(f"act {self._act.name}: {nothing}; {len(runs):,} of {total:,} jobs had ended by then")
            self._show("running")
            self._check_workers()

    def _check_workers(self) -> None:
        """Raise `DemoFailed` when a worker has ended by itself."""
        for log, process in self._workers.items():
            if process.poll() is not None:
                raise DemoFailed(f"a worker ended by itself with status {process.returncode}; {_last_words(log)}")

    def _drain(self) -> None:
        """Stop the workers as a user would, and raise `DemoFailed` where one does not end well."""
        self._check_workers()
        self._signal_workers()
        for log, process in self._workers.items():
            try:
                status = process.wait(STOP_WITHIN)
            except subprocess.TimeoutExpired:
                raise DemoFailed(f"a worker had not stopped {STOP_WITHIN:g} s after SIGTERM") from None
            if status != 0:
                raise DemoFailed(f"a worker stopped with status {status}; {_last_words(log)}")

    def _end_workers(self) -> None:
        """Give them a moment to remove what they made, such as sockets, and then end whatever is left, with everything
        it started: each worker leads a process group of its own."""
        self._signal_workers()
        deadline = time.monotonic() + GRACE
        for process in self._workers.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._workers.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _signal_workers(self) -> None:
        for process in self._workers.values():
            process.send_signal(signal.SIGTERM)


def _last_words(log: Path, lines: int = 3) -> str:
    last = " / ".join(log.read_text(errors="replace").rstrip().splitlines()[-lines:])
    return f"its last words: {last or '(none)'}"


@contextmanager
def sqlite_file() -> Iterator[str]:
    """The URL of a SQLite file in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="fairlane-demo-") as folder:
        yield f"sqlite:///{Path(folder) / 'demo.db'}"


@contextmanager
def throwaway_postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server that lives as long as this block."""
    from fairlane.testing.postgres import PostgresUnavailable, ThrowawayPostgres

    with ExitStack() as stack:
        try:
            server = stack.enter_context(ThrowawayPostgres())
        except PostgresUnavailable as error:
            raise DemoFailed(str(error)) from error
        yield server.url()


@contextmanager
def own_database(url: str) -> Iterator[str]:
    """The URL of a new database on the server of `url`, dropped afterwards. `url` itself is only connected to."""
    import asyncpg

    from fairlane.testing.postgres import create_database, drop_database

    if urlsplit(url).scheme not in ("postgresql", "postgres"):
        raise DemoFailed(f"--url takes a PostgreSQL, such as postgresql://user@host/database; {url!r} is none")
    name = f"fairlane_demo_{uuid4().hex[:12]}"
    try:
        asyncio.run(create_database(url, name))
    except asyncpg.InsufficientPrivilegeError as error:
        raise DemoFailed(
            "the demo plays in a database of its own and drops it afterwards, but this user may not create one "
            f"({error}); give a user that may, or use --postgres"
        ) from error
    except (OSError, ValueError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise DemoFailed(f"the PostgreSQL of --url cannot be used: {error}") from error
    try:
        yield urlunsplit(urlsplit(url)._replace(path=f"/{name}"))
    finally:
        asyncio.run(drop_database(url, name))
