"""The SQLite store: the default, with nothing to install."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from fairlane.clock import Clock, Instant, SystemClock, microseconds
from fairlane.errors import InvalidPolicy, SchemaOutOfDate
from fairlane.job import Claim, JobRecord, NewJob
from fairlane.policy.partitions import as_divided
from fairlane.policy.policy import Policy
from fairlane.policy.unique import Conflict
from fairlane.scheduler.settlement import Settlement
from fairlane.store import policies
from fairlane.store.boards import KEPT_EVERY, PLANS_AT_MOST, Checkpoints, QueueClock, QueueTime, Raced
from fairlane.store.health import Health, SqliteHealth
from fairlane.store.procedures import Work
from fairlane.store.protocol import (
    Asked,
    Claimed,
    Landings,
    Listener,
    Looked,
    Reaped,
    Renewed,
    Store,
    WorkerIdentity,
)
from fairlane.store.rows import Declared, cancelled_too_fast
from fairlane.store.scripts import Schema
from fairlane.store.sqlite import claims, jobs, wakeups
from fairlane.store.sqlite.caller_transactions import in_callers_transaction
from fairlane.store.sqlite.database import Database, Transaction
from fairlane.store.sqlite.procedures import Driver
from fairlane.store.sqlite.settlements import claims_beside, reap, settle, sign, truly_lost
from fairlane.store.sqlite.wakeups import WORK, SqliteListener, nudge, take_waiters

T = TypeVar("T")
SCHEMA = Schema.of("sqlite")


class SqliteStore(Store):
    """Jobs in a SQLite file, shared by the processes of one machine; or in memory, for tests."""

    def __init__(self, path: str | None, *, clock: Clock | None = None, durable_claims: bool = False) -> None:
        self._database = Database(path)
        self._clock = QueueClock(clock or SystemClock())
        self._durable_claims = durable_claims
        self._memory: dict[Any, Any] = {}
        self._results = wakeups.ResultListener(self._database, self.job, self._clock.sleep_until)
        self._checkpoints = Checkpoints(self._database.boards, self._checkpoint, self._add_up_claims)
        self.rows_read = 0

    async def open(self) -> None:
        await self._database.open()
        await self.migrate()
        self._database.on_begin = self._begin

    def _begin(self, tx: Transaction, writes: bool) -> None:
        stored = tx.one("select_time")
        assert stored is not None
        self._clock.learn(*stored)
        if writes:
            found = self._clock.time()
            if found.ahead != stored[0] or found.now - stored[1] >= KEPT_EVERY:
                tx.run("keep_time", found.ahead, found.now)

    async def close(self) -> None:
        await self._checkpoints.close()
        await self._results.close()
        await self._database.close()
        self._results.dismiss()

    async def migrate(self) -> list[str]:
        await self._database.open()
        # Looked at first: a database that is up to date is opened without waiting for whoever writes.
        with contextlib.suppress(SchemaOutOfDate):
            await self.run(SCHEMA.require_current())
            return []
        return await self.run(SCHEMA.migrate())

    async def time(self) -> QueueTime:
        return await self._database.read(lambda _: self._clock.time())

    async def keep_time(self) -> QueueTime:
        return await self._database.write(lambda _: self._clock.time(), durable=False)

    async def declare(self, policy: Policy) -> Declared:
        """On SQLite the code's declaration applies, divided as the queue is. Where it cannot hold there, the stored one
        stays, and that is drift."""
        declared = await super().declare(policy)
        if not declared.is_drift:
            return declared
        try:
            as_divided(declared.policy, policy)
        except InvalidPolicy:
            return declared
        return await self.apply(policy)

    async def enqueue(
        self, new: Sequence[NewJob], tx: Any = None, progress: Callable[[int], None] | None = None
    ) -> dict[UUID, Conflict]:
        if not new:
            return {}
        progress = progress or (lambda _: None)

        def work(inner: Transaction) -> dict[UUID, Conflict]:
            return jobs.insert(inner, new, self._clock.now())

        conflicts = await (self._write(work) if tx is None else self._within_callers(tx, work))
        progress(len(new))
        return conflicts

    async def foresee(self, new: Sequence[NewJob]) -> dict[UUID, Conflict]:
        return await self._database.read(lambda tx: jobs.admitted(tx, new, self._clock.now()).conflicts)

    async def claim(self, queue: str, want: Callable[[], int], **options: Any) -> Claimed:
        """There is one writer at a time: this queue's turn comes as soon as that of any other."""
        asked = Asked(want=want, **options)

        def work(tx: Transaction) -> tuple[int, Claimed]:
            now = self._clock.now()
            scheduling, loaded = self._opened(tx, queue, now)
            want = max(0, min(asked.want(), self._database.most_at_once))
            claimed = claims.claim(tx, scheduling, loaded, want, asked)
            self.rows_read += tx.rows_read
            number, is_short = scheduling.number, len(claimed.claims) < want
            _register(tx, number, asked.worker, now if asked.listener and (is_short or claimed.paces) else None)
            if claimed.more and not is_short:
                tx.woken[number] = 1
            return number, claimed

        for _ in range(PLANS_AT_MOST):
            try:
                number, claimed = await self._write(work, durable=self._durable_claims)
            except Raced:
                continue
            self._checkpoints.soon(number)
            return claimed
        raise cancelled_too_fast(queue)

    def _opened(self, tx: Transaction, name: str, now: Instant) -> tuple[claims.Scheduling, claims.Loaded]:
        """A queue's board, once the overrides are gone whose time has come."""
        scheduling = claims.Scheduling(tx, name, now)
        loaded = scheduling.load()
        if loaded.expired:
            Driver(tx, self._clock, self._memory, is_locked=True).perform(policies.end_expired(name).make())
            loaded = scheduling.load()
        return scheduling, loaded

    async def _checkpoint(self, queue: int) -> None:
        """Write what the tables of a queue do not hold."""

        def work(tx: Transaction) -> None:
            name = tx.value("select_queue_name", queue)
            if name is not None:
                scheduling = claims.Scheduling(tx, name, self._clock.now())
                Driver(tx, self._clock, self._memory).perform(scheduling.checkpoint(scheduling.load()))

        await self._database.write(work, durable=False)

    async def _add_up_claims(self, queue: int) -> None:
        name = await self._database.read(lambda tx: tx.value("select_queue_name", queue))
        if name is not None:
            await self._add_some_up(name)

    async def look(self, queue: str, want: int, *, worker: WorkerIdentity, listener: Listener) -> Looked:
        def work(tx: Transaction) -> Looked:
            now = self._clock.now()
            scheduling, loaded = self._opened(tx, queue, now)
            if want <= 0:
                _register(tx, scheduling.number, worker, None)
                tx.woken[scheduling.number] = 1
                return Looked(0, now, None, look_again=False)
            looked = claims.look(tx, scheduling, loaded, want)
            self.rows_read += tx.rows_read
            _register(tx, scheduling.number, worker, now if looked.claimable < want else None)
            return looked

        return await self._write(work, durable=False)

    async def settle(
        self,
        settlements: Sequence[Settlement],
        *,
        is_repeated: bool = False,
        tx: Any = None,
        landed: Landings | None = None,
    ) -> list[UUID]:
        landed = {} if landed is None else landed

        def work(inner: Transaction) -> list[UUID]:
            lost = settle(inner, settlements, self._clock.now(), landed)
            if tx is not None:
                # Who waits for results is nudged by whoever settles these once more.
                sign(inner, [each for each in settlements if each.job not in lost])
            elif lost and is_repeated:
                return truly_lost(inner, settlements, lost)
            return lost

        return await (self._write(work) if tx is None else self._within_callers(tx, work))

    async def renew(self, leases: Sequence[UUID], lease: timedelta) -> Renewed:
        duration = microseconds(lease)

        def work(tx: Transaction) -> Renewed:
            now = self._clock.now()
            gone = [each for each in leases if tx.run("renew_lease", now + duration, now, each.bytes) == 0]
            rows = [row for each in leases for row in tx.all("select_cancellations", each.bytes)]
            return Renewed(gone, [UUID(bytes=job) for (job,) in rows])

        return await self._database.write(work, durable=False)

    async def claims_beside(self, worker: UUID, leases: Collection[UUID]) -> list[Claim]:
        return await self._database.read(lambda tx: claims_beside(tx, worker, leases))

    async def wake_another(self, queue: str, worker: UUID) -> None:
        """Nobody has to be woken: listeners see by themselves that somebody has written."""

    async def reap(self, limit: int = 1_000, *, ended_by: Instant | None = None) -> Reaped:
        def work(tx: Transaction) -> Reaped:
            wakeups.forget_deaf_waiters(tx)
            return reap(tx, self._clock.now(), limit, ended_by)

        return await self._write(work, durable=False)

    async def health(self, *, brief: bool = False) -> Health:
        return await self._database.read(lambda tx: _examine_file(tx, self._database.path, brief=brief))

    async def wait_until_ended(self, job: UUID, until: Instant | None) -> JobRecord:
        return await self._results.ended(job, until)

    async def listen(self, worker: WorkerIdentity) -> Listener:
        return SqliteListener(worker, self._database, self._clock)

    async def run(self, work: Work[T], tx: Any = None) -> T:
        terms = work.terms

        def within(inner: Transaction) -> T:
            return Driver(inner, self._clock, self._memory, is_locked=terms.locks).perform(work.make())

        if tx is not None:
            return await self._within_callers(tx, within, writes=terms.writes)
        if terms.writes:
            return await self._write(within, durable=terms.is_durable, keeps=terms.keeps)
        return await self._database.read(within)

    async def _within_callers(self, tx: Any, work: Callable[[Transaction], T], *, writes: bool = True) -> T:
        """Run `work` in the caller's transaction."""

        def begun(inner: Transaction) -> T:
            self._begin(inner, writes)
            found = work(inner)
            # Sent before the commit: whoever wakes now waits for the caller's transaction to end, and then looks.
            for worker in take_waiters(inner, inner.woken):
                nudge(worker)
            return found

        return await in_callers_transaction(tx, self._database.path, begun, writes=writes)

    async def _write(self, work: Callable[[Transaction], T], *, durable: bool = True, keeps: bool = True) -> T:
        """Run `work` in a write transaction, and nudge whom it wakes once that is committed."""

        def whole(tx: Transaction) -> tuple[T, list[UUID], dict[UUID, bytes]]:
            found = work(tx)
            waiters = take_waiters(tx, tx.woken)
            return found, waiters, tx.nudged | dict.fromkeys(wakeups.take_result_waiters(tx, tx.ended), WORK)

        found, waiters, nudged = await self._database.write(whole, durable=durable, keeps=keeps)
        for worker, what in nudged.items():
            nudge(worker, what)  # who is gone is forgotten in time; who does not listen yet looks once it does
        gone = [worker for worker in waiters if not nudge(worker)]
        while gone:
            # It is rare: all who wait are woken in the place of one that is gone.
            others = await self._database.write(lambda tx, gone=gone: _replace(tx, gone), durable=False)  # type: ignore[misc]
            gone = [worker for worker in others if not nudge(worker)]
        return found


def _register(tx: Transaction, queue: int, worker: WorkerIdentity, since: Instant | None) -> None:
    """A worker waits for work in a queue since then, or (`None`) does not wait any more."""
    if since is None:
        tx.run("withdraw_waiter", queue, worker.id.bytes)
    else:
        tx.run("register_waiter", queue, worker.id.bytes, since)


def _replace(tx: Transaction, gone: Sequence[UUID]) -> list[UUID]:
    tx.run_many("withdraw_worker", [(worker.bytes,) for worker in gone])
    return [UUID(bytes=worker) for (worker,) in tx.all("take_all_waiters")]


def _examine_file(tx: Transaction, path: str | None, *, brief: bool) -> SqliteHealth:
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
    """Processes that have the file open, where the system shows them (Linux), as far as this user may see."""
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        try:
            if any(os.readlink(each) == str(file) for each in (process / "fd").iterdir()):
                yield int(process.name)
        except OSError:  # it has ended, or is somebody else's
            continue
