"""Plays the acts: enqueue, start the workers, watch the ledger, count.

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

from fairlane.demo.acts import ACTS, Act, Figures, Promise, Run, Workload, class_of, judge, measure
from fairlane.demo.app import CURTAIN, STAGE_VARIABLE, LedgerReader, make_app
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
    figures: Figures


class Report(msgspec.Struct, frozen=True):
    """What the whole demo showed."""

    workload: Workload
    performances: list[Performance]
    promises: list[Promise]

    @property
    def figures(self) -> list[Figures]:
        return [each.figures for each in self.performances]


class Watcher:
    """Whoever shows the demo. This one shows nothing: for `--json`."""

    def around(self) -> AbstractContextManager[object]:
        """What lasts as long as the demo."""
        return nullcontext()

    def look(self, progress: Progress) -> None: ...

    def finish(self, performance: Performance) -> None: ...


def play(url: str, workload: Workload, watcher: Watcher) -> Report:
    """Play all acts on one database and judge what they showed."""
    asyncio.run(make_app(url)[0].migrate())
    performances = []
    for act in ACTS:
        with tempfile.TemporaryDirectory(prefix="fairlane-demo-") as stage:
            runs = _perform(act, workload, url, Path(stage), watcher)
        performances.append(Performance(act, workload, runs, measure(act, workload, runs)))
        watcher.finish(performances[-1])
    return Report(workload, performances, judge([each.figures for each in performances], workload.all_slots))


def _perform(act: Act, workload: Workload, url: str, stage: Path, watcher: Watcher) -> list[Run]:
    watcher.look(Progress(act, workload, "enqueueing"))
    asyncio.run(_enqueue(act, workload, url))
    watcher.look(Progress(act, workload, "starting workers"))
    ledger, workers = LedgerReader(stage), Workers()
    try:
        workers.start(act, workload, url, stage)
        _wait_until_ready(workers, workload, stage)
        (stage / CURTAIN).touch()
        for progress in _follow(act, workload, ledger):
            watcher.look(progress)
            workers.check()
        workers.drain()
    finally:
        workers.end()
    ledger.follow()
    watcher.look(_progress(act, workload, ledger, "done"))
    return ledger.runs


async def _enqueue(act: Act, workload: Workload, url: str) -> None:
    """The whale first; then each small tenant brings all of its jobs at once."""
    app, deliver = make_app(url)
    on_queue = deliver.using(queue=act.queue)
    async with app:
        for _, jobs in groupby(workload.deliveries(), key=lambda job: job.tenant):
            calls = [on_queue.call(job.number, job.tenant, job.endpoint) for job in jobs]
            for first in range(0, len(calls), ENQUEUE_AT_ONCE):
                await app.enqueue_many(calls[first : first + ENQUEUE_AT_ONCE])


def _wait_until_ready(workers: Workers, workload: Workload, stage: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN
    while len(list(stage.glob("*.ready"))) < workload.processes:
        workers.check()
        if time.monotonic() > deadline:
            raise DemoFailed(f"the workers were not ready within {READY_WITHIN:g} s")
        time.sleep(LOOK_EVERY / 10)


def _follow(act: Act, workload: Workload, ledger: LedgerReader) -> Iterator[Progress]:
    """Look at the ledger until every job has run, or nothing has happened for too long."""
    moved_at = time.monotonic()
    while len(ledger.runs) < workload.total:
        time.sleep(LOOK_EVERY)
        if ledger.follow():
            moved_at = time.monotonic()
        elif time.monotonic() - moved_at > STALLED_AFTER:
            raise DemoFailed(
                f"act {act.name}: nothing has run for {STALLED_AFTER:g} s; "
                f"{len(ledger.runs):,} of {workload.total:,} jobs had ended by then"
            )
        yield _progress(act, workload, ledger, "running")


def _progress(act: Act, workload: Workload, ledger: LedgerReader, stage: str) -> Progress:
    done, running = (Counter(class_of(run.tenant) for run in runs) for runs in (ledger.runs, ledger.running.values()))
    return Progress(act, workload, stage, ledger.elapsed, done, running)


class Workers:
    """The worker processes of an act, started by the public command."""

    def __init__(self) -> None:
        self._processes: dict[Path, subprocess.Popen[bytes]] = {}

    def start(self, act: Act, workload: Workload, url: str, stage: Path) -> None:
        options = ["--queues", act.queue, "--concurrency", str(workload.slots), "--log-level", "warning"]
        for nth in range(1, workload.processes + 1):
            log = stage / f"worker-{nth}.log"
            with log.open("wb") as output:
                self._processes[log] = subprocess.Popen(
                    # The same program and the same Python as this one, whatever PATH says.
                    [sys.executable, "-m", "fairlane.cli", "worker", "fairlane.demo.app:app", *options],
                    env={**os.environ, "FAIRLANE_URL": url, STAGE_VARIABLE: str(stage)},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C is for the demo, which then stops its workers itself
                )

    def check(self) -> None:
        """Raise `DemoFailed` when a worker has ended by itself."""
        for log, process in self._processes.items():
            if process.poll() is not None:
                raise DemoFailed(f"a worker ended by itself with status {process.returncode}; {_last_words(log)}")

    def drain(self) -> None:
        """Stop them as a user would, and raise `DemoFailed` where one does not end well."""
        self.check()
        self._tell_to_stop()
        for log, process in self._processes.items():
            try:
                status = process.wait(STOP_WITHIN)
            except subprocess.TimeoutExpired:
                raise DemoFailed(f"a worker had not stopped {STOP_WITHIN:g} s after SIGTERM") from None
            if status != 0:
                raise DemoFailed(f"a worker stopped with status {status}; {_last_words(log)}")

    def end(self) -> None:
        """Give them a moment to remove what they made, such as sockets, and then end whatever is left, with everything
        it started: each worker leads a process group of its own."""
        self._tell_to_stop()
        deadline = time.monotonic() + GRACE
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _tell_to_stop(self) -> None:
        for process in self._processes.values():
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
    """The URL of a new database on the server of `url`, dropped afterwards; what `url` itself names is only a door."""
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
