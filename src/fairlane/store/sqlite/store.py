"""The SQLite store: the default, with nothing to install."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from fairlane.clock import Clock, Instant, SystemClock, microseconds
from fairlane.errors import InvalidPolicy, SchemaOutOfDate
from fairlane.job import Claim, JobRecord, NewJob, Outcome
from fairlane.policy.division import as_divided
from fairlane.policy.policy import Policy
from fairlane.policy.unique import Conflict
from fairlane.scheduler.settlement import Settlement
from fairlane.store import policies
from fairlane.store.boards import KEPT_EVERY, PLANS_AT_MOST, Checkpoints, QueueClock, QueueTime, Raced
from fairlane.store.health import Health, SqliteHealth
from fairlane.store.procedures import Work
from fairlane.store.protocol import (
    Adopted,
    Choice,
    Claimed,
    Landings,
    Listener,
    Looked,
    Reaped,
    Renewed,
    Store,
    WorkerIdentity,
)
from fairlane.store.results import forever
from fairlane.store.rows import Declared, cancelled_too_fast
from fairlane.store.scripts import Schema
from fairlane.store.sqlite import claims, jobs, results
from fairlane.store.sqlite.caller_transactions import in_callers_transaction
from fairlane.store.sqlite.database import Database, Transaction
from fairlane.store.sqlite.procedures import Driver, Nudges, known_queue
from fairlane.store.sqlite.rows import claim_of
from fairlane.store.sqlite.settlements import claims_beside, reap, settle, sign, truly_lost
from fairlane.store.sqlite.wakeups import SCHEDULES, SqliteListener, nudge
from fairlane.store.sqlite.wakeups import take_waiters as _take_waiters

T = TypeVar("T")
SCHEMA = Schema.of("sqlite")


class SqliteStore(Store):
    """Jobs in a SQLite file, shared by the processes of one machine; or in memory, for tests."""

    def __init__(self, path: str | None, *, clock: Clock | None = None, durable_claims: bool = False) -> None:
        self._database = Database(path)
        self._clock = QueueClock(clock or SystemClock())
        self._durable_claims = durable_claims
        self._memory: dict[Any, Any] = {}
        self._results = results.ResultListener(self._database)
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
        if tx is not None:
            conflicts = await self._borrowed(tx, lambda inner: _enqueue(inner, new, self._clock.now()))
            if progress is not None:
                progress(len(new))
            return conflicts

        def work(inner: Transaction) -> tuple[list[UUID], set[UUID], dict[UUID, Conflict]]:
            ready, conflicts = jobs.insert(inner, new, self._clock.now())
            replaced = [each.holder for each in conflicts.values() if each.outcome is Outcome.REPLACED]
            return _take_waiters(inner, ready), results.take_waiters(inner, replaced), conflicts

        waiters, awaiting, conflicts = await self._write(work)
        await self._nudge(waiters)
        _announce(awaiting)
        if progress is not None:
            progress(len(new))
        return conflicts

    async def foresee(self, new: Sequence[NewJob]) -> dict[UUID, Conflict]:
        return await self._database.read(lambda tx: jobs.admitted(tx, new, self._clock.now()).conflicts)

    async def claim(
        self,
        queue: str,
        want: Callable[[], int],
        *,
        worker: WorkerIdentity,
        lease: timedelta,
        listener: Listener | None = None,
        start_lag: int = 0,
        ahead: int | None = None,
        others: Sequence[str] = (),
        chose: Callable[[Choice], None] | None = None,
    ) -> Claimed:
        duration = microseconds(lease)

        def work(tx: Transaction) -> tuple[int, Claimed, list[UUID]]:
            now = self._clock.now()
            found = self._without_ended(tx, queue, now)
            count = max(0, min(want(), self._database.most_at_once))
            ends_at, listens = now + duration, listener is not None
            claimed, rung = claims.claim(
                tx,
                found,
                count,
                now=now,
                worker=worker,
                lease_expires_at=ends_at,
                lag=start_lag,
                ahead=ahead,
                listens=listens,
            )
            self.rows_read += tx.rows_read
            if listener is not None and (len(claimed.claims) < count or claimed.paces):
                tx.run("register_waiter", found.id, worker.id.bytes, now)
            else:
                tx.run("withdraw_waiter", found.id, worker.id.bytes)
            left = {found.id: 1} if claimed.more and len(claimed.claims) >= count else {}
            return found.id, claimed, _take_waiters(tx, left | rung)

        for _ in range(PLANS_AT_MOST):
            try:
                number, claimed, waiters = await self._database.write(work, durable=self._durable_claims)
            except Raced:
                continue
            self._checkpoints.soon(number)
            await self._nudge(waiters)
            return claimed
        raise cancelled_too_fast(queue)

    def _without_ended(self, tx: Transaction, name: str, now: Instant) -> claims.QueueInForce:
        """A queue, once the overrides are gone whose time has come."""
        queue = known_queue(tx, name)
        if not (expired := queue.policy.overrides.expired(now)):
            return queue
        Driver(tx, self._clock, self._memory).perform(policies.end_overrides(queue.policy, expired, now))
        return known_queue(tx, name)

    async def _checkpoint(self, queue: int) -> None:
        """Write what the tables of a queue do not hold."""

        def work(tx: Transaction) -> None:
            name = tx.value("select_queue_name", queue)
            if name is not None:
                claims.checkpoint(tx, known_queue(tx, name), self._clock.now())

        await self._database.write(work, durable=False)

    async def _add_up_claims(self, queue: int) -> None:
        name = await self._database.read(lambda tx: tx.value("select_queue_name", queue))
        if name is not None:
            await self._add_some_up(name)

    async def look(self, queue: str, want: int, *, worker: WorkerIdentity, listener: Listener) -> Looked:
        def work(tx: Transaction) -> tuple[Looked, list[UUID]]:
            now = self._clock.now()
            found = self._without_ended(tx, queue, now)
            if want <= 0:
                tx.run("withdraw_waiter", found.id, worker.id.bytes)
                return Looked(0, now, None, look_again=False), _take_waiters(tx, {found.id: 1})
            looked, rung = claims.look(tx, found, want, now=now)
            self.rows_read += tx.rows_read
            if looked.claimable < want:
                tx.run("register_waiter", found.id, worker.id.bytes, now)
            else:
                tx.run("withdraw_waiter", found.id, worker.id.bytes)
            return looked, _take_waiters(tx, rung)

        looked, waiters = await self._database.write(work, durable=False)
        await self._nudge(waiters)
        return looked

    async def settle(
        self,
        settlements: Sequence[Settlement],
        *,
        is_repeated: bool = False,
        tx: Any = None,
        landed: Landings | None = None,
    ) -> list[UUID]:
        if tx is not None:
            return await self._borrowed(tx, lambda inner: _settle(inner, settlements, self._clock.now(), landed))

        def work(tx: Transaction) -> tuple[list[UUID], list[UUID], set[UUID]]:
            lost, ready, replaced = settle(tx, settlements, self._clock.now(), landed)
            if lost and is_repeated:
                lost = truly_lost(tx, settlements, lost)
            ended = (*(each.job for each in settlements), *replaced)
            return lost, _take_waiters(tx, ready), results.take_waiters(tx, ended)

        lost, waiters, result_waiters = await self._write(work)
        _announce(result_waiters)
        await self._nudge(waiters)
        return lost

    async def renew(self, leases: Sequence[UUID], lease: timedelta) -> Renewed:
        duration = microseconds(lease)

        def work(tx: Transaction) -> Renewed:
            now = self._clock.now()
            gone = [each for each in leases if tx.run("renew_lease", now + duration, now, each.bytes) == 0]
            rows = [row for each in leases for row in tx.all("select_cancellations", each.bytes)]
            return Renewed(gone, [UUID(bytes=job) for (job,) in rows])

        return await self._database.write(work, durable=False)

    async def adopt(
        self,
        job: UUID,
        lease: UUID,
        own: UUID,
        *,
        tasks: Sequence[str],
        worker: WorkerIdentity,
        lease_for: timedelta,
    ) -> Adopted | None:
        def work(tx: Transaction) -> Adopted | None:
            found = tx.one("select_adoptable", job.bytes, lease.bytes, own.bytes)
            if found is None:
                return None
            *columns, claimed_at, queue, position, under = found
            claim = claim_of(columns, own, queue, claimed_at)
            if claim.task not in tasks:
                return None
            at = self._clock.time()
            now = at.now
            ends_at = now + microseconds(lease_for)
            if under == own.bytes:
                tx.run("renew_lease", ends_at, now, own.bytes)
            else:
                held = msgspec.json.encode([position]).decode()
                tx.run("insert_lease", own.bytes, worker.id.bytes, ends_at, now, 1, held)
                tx.run("adopt_job", own.bytes, worker.name, position)
                if tx.value("drop_claims", 1, lease.bytes) == 0:
                    tx.run("delete_lease", lease.bytes)
                    tx.run("delete_cancellations", lease.bytes)
            return Adopted(claim, at)

        return await self._database.write(work, durable=True)

    async def claims_beside(self, worker: UUID, leases: Collection[UUID]) -> list[Claim]:
        return await self._database.read(lambda tx: claims_beside(tx, worker, leases))

    async def wake_another(self, queue: str, worker: UUID) -> None:
        """Nobody has to be woken: listeners see by themselves that somebody has written."""

    async def reap(self, limit: int = 1_000, *, ended_by: Instant | None = None) -> Reaped:
        def work(tx: Transaction) -> tuple[Reaped, list[UUID], set[UUID]]:
            reaped, ready, replaced = reap(tx, self._clock.now(), limit, ended_by)
            results.forget_deaf_waiters(tx)
            return (
                reaped,
                _take_waiters(tx, ready),
                results.take_waiters(tx, [*(each.job for each in reaped.settled), *replaced]),
            )

        reaped, waiters, result_waiters = await self._database.write(work, durable=False)
        _announce(result_waiters)
        await self._nudge(waiters)
        return reaped

    async def health(self, *, brief: bool = False) -> Health:
        return await self._database.read(lambda tx: _examine_file(tx, self._database.path, brief=brief))

    async def wait_until_ended(self, job: UUID, until: Instant | None) -> JobRecord:
        record = await self.job(job)
        if record.state.is_final:
            return record
        alarm = forever if until is None else lambda: self._clock.sleep_until(until)
        return await self._results.ended(job, lambda: self.job(job), alarm)

    async def listen(self, worker: WorkerIdentity) -> Listener:
        return SqliteListener(worker, self._database, self._clock)

    async def run(self, work: Work[T], tx: Any = None) -> T:
        terms = work.terms

        def within(inner: Transaction) -> tuple[T, Nudges]:
            driver = Driver(inner, self._clock, self._memory)
            return driver.perform(work.make()), driver.nudges()

        if tx is not None:
            found, _ = await self._borrowed(tx, within, writes=terms.writes)
        elif terms.writes:
            found, nudges = await self._database.write(within, durable=terms.is_durable, keeps=terms.keeps)
            for worker in nudges.others:
                nudge(worker)
            await self._nudge(nudges.waiters)
            for worker in nudges.schedule_holders:
                # Who does not listen yet looks once it does; who is gone is forgotten in time.
                nudge(worker, SCHEDULES)
        else:
            found, _ = await self._database.read(within)
        return found

    async def _borrowed(self, tx: Any, work: Callable[[Transaction], T], *, writes: bool = True) -> T:
        def begun(inner: Transaction) -> T:
            self._begin(inner, writes)
            return work(inner)

        return await in_callers_transaction(tx, self._database.path, begun, writes=writes)

    async def _write(self, work: Callable[[Transaction], T]) -> T:
        return await self._database.write(work, durable=True)

    async def _nudge(self, workers: Sequence[UUID]) -> None:
        """Wake these workers. One that is gone is forgotten, and all who wait are woken in its place: it is rare."""
        gone = [worker for worker in workers if not nudge(worker)]
        while gone:
            others = await self._database.write(lambda tx, gone=gone: _replace(tx, gone), durable=False)  # type: ignore[misc]
            gone = [worker for worker in others if not nudge(worker)]


def _enqueue(tx: Transaction, new: Sequence[NewJob], now: Instant) -> dict[UUID, Conflict]:
    """Store jobs in the caller's transaction."""
    ready, conflicts = jobs.insert(tx, new, now)
    # Sent before the commit: whoever wakes now waits for the caller's transaction to end, and then looks.
    for worker in _take_waiters(tx, ready):
        nudge(worker)
    return conflicts


def _settle(
    tx: Transaction,
    settlements: Sequence[Settlement],
    now: Instant,
    landed: Landings | None,
) -> list[UUID]:
    """End claims in the caller's transaction. Who waits for results is told by whoever settles them once more."""
    lost, ready, _ = settle(tx, settlements, now, landed)
    sign(tx, [each for each in settlements if each.job not in lost])
    for worker in _take_waiters(tx, ready):
        nudge(worker)
    return lost


def _announce(waiters: Iterable[UUID]) -> None:
    """Let those look who wait for the end of a job. Who is gone has been forgotten already."""
    for waiter in waiters:
        nudge(waiter)


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
    """Processes that have the file open, where the system tells (Linux), and of those that this user may ask."""
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) == os.getpid():
            continue
        try:
            if any(os.readlink(each) == str(file) for each in (process / "fd").iterdir()):
                yield int(process.name)
        except OSError:  # it has ended, or is somebody else's
            continue
