"""The SQLite store: the default, with nothing to install."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from fairlane.clock import Clock, Instant, SystemClock, microseconds
from fairlane.errors import InvalidPolicy, JobNotFound, SchemaOutOfDate
from fairlane.job import Claim, JobRecord, NewJob, Outcome, State
from fairlane.policy.backlog import add_bells
from fairlane.policy.overrides import Amendment, Override
from fairlane.policy.partitions import as_divided
from fairlane.policy.policy import Policy
from fairlane.policy.unique import NO_KEYS, Conflict, Holder, OnReplayConflict
from fairlane.scheduler.rebuild import Miscount, WaitingLane
from fairlane.scheduler.settlement import Settlement
from fairlane.scheduler.snapshot import GateRow
from fairlane.store import audit
from fairlane.store.audit import Note
from fairlane.store.boards import KEPT_EVERY, PLANS_AT_MOST, Checkpoints, QueueClock, QueueTime, Raced
from fairlane.store.health import Traces
from fairlane.store.operators import CANCEL, Handled
from fairlane.store.procedures import Work
from fairlane.store.protocol import (
    EVERYONE,
    UNFOLDED_AT_MOST,
    Adopted,
    Choice,
    Claimed,
    Counted,
    Landings,
    Listener,
    Looked,
    Pruned,
    QueueCounts,
    Reaped,
    Rehomed,
    Renewed,
    Retention,
    Store,
    WorkerIdentity,
)
from fairlane.store.results import forever
from fairlane.store.rows import Declared, cancelled_too_fast
from fairlane.store.scripts import Schema
from fairlane.store.sqlite import claims, jobs, operators, partitions, results, shared_limits, upkeep
from fairlane.store.sqlite.caller_transactions import in_callers_transaction
from fairlane.store.sqlite.database import Database, Transaction
from fairlane.store.sqlite.procedures import Driver, Nudges, perform
from fairlane.store.sqlite.reads import Stats, known_queue
from fairlane.store.sqlite.rows import arrival, claim_of
from fairlane.store.sqlite.settlements import claims_beside, reap, settle, sign, truly_lost
from fairlane.store.sqlite.wakeups import SCHEDULES, SqliteListener, is_listening, nudge
from fairlane.store.sqlite.wakeups import take_waiters as _take_waiters

T = TypeVar("T")
SCHEMA = Schema.of("sqlite")
IN_FLIGHT = 3
"""Its place in a row of `select_gate`."""


class SqliteStore(Stats, Store):
    """Jobs in a SQLite file, shared by the processes of one machine; or in memory, for tests."""

    def __init__(self, path: str | None, *, clock: Clock | None = None, durable_claims: bool = False) -> None:
        super().__init__(Database(path), QueueClock(clock or SystemClock()))
        self._durable_claims = durable_claims
        self._walk = upkeep.Walk()
        self._counted: dict[str, tuple[bytes, bytes]] = {}
        """How far gates have been held against jobs, by queue."""
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

    async def now(self) -> Instant:
        return (await self.time()).now

    async def time(self) -> QueueTime:
        return await self._database.read(lambda _: self._clock.time())

    async def keep_time(self) -> QueueTime:
        return await self._database.write(lambda _: self._clock.time(), durable=False)

    async def declare(self, policy: Policy) -> Declared:
        """On SQLite the code's declaration applies, divided as the queue is. Where it cannot hold there, the stored one
        stays, and that is drift."""
        known = await self.policy(policy.queue)
        if known is not None:
            try:
                fitting = as_divided(known.policy, policy)
            except InvalidPolicy:
                return Declared(known.policy, known.version, is_drift=True)
            if known.policy.digest == fitting.digest:
                return known
        return await self.apply(policy)

    async def apply(self, policy: Policy, note: Note | None = None, *, accept_missing_keys: bool = False) -> Declared:
        declared = await self._write(lambda tx: self._put_in_force(tx, policy, note, accept_missing_keys))
        await self._wake(lambda tx: dict.fromkeys(shared_limits.sharers(tx, claims.queue_number(tx, policy.queue)), 1))
        await self._add_all_up(policy.queue)
        return declared

    def _put_in_force(
        self,
        tx: Transaction,
        policy: Policy,
        note: Note | None = None,
        accept_missing_keys: bool = False,
        coming: Sequence[GateRow] | None = None,
    ) -> Declared:
        queue = claims.load_queue(tx, policy.queue)
        if queue is not None and coming is None:
            policy = as_divided(queue.policy, policy)
        shared_limits.check(tx, policy)
        now = self._clock.now()
        if queue is None:
            tx.run("insert_queue", policy.queue, policy.encoded, policy.digest)
            shared_limits.put_in_force(tx, claims.queue_number(tx, policy.queue), policy, now)
            if note is not None:
                perform(tx, audit.record(note, now, policy.queue, "version 1", None, policy.encoded))
            return Declared(policy, 1, is_drift=False)
        if queue.policy.digest == policy.digest:
            return Declared(queue.policy, queue.version, is_drift=False)
        claims.replace_policy(tx, queue, policy, now, accept_missing_keys=accept_missing_keys, coming=coming or ())
        if note is not None:
            target = f"version {queue.version + 1}"
            perform(tx, audit.record(note, now, policy.queue, target, queue.policy.encoded, policy.encoded))
        return Declared(policy.overridden(queue.policy.overrides), queue.version + 1, is_drift=False)

    async def divide(
        self, policy: Policy, version: int, gates: Sequence[GateRow] = (), note: Note | None = None
    ) -> bool:
        def work(tx: Transaction) -> bool:
            found = claims.load_queue(tx, policy.queue)
            if version != (0 if found is None else found.version):
                return False
            self._put_in_force(tx, policy, note, True, gates)
            return True

        is_done = await self._write(work)
        await self._wake(
            lambda tx: dict.fromkeys(shared_limits.sharers(tx, claims.queue_number(tx, policy.queue)), EVERYONE)
        )
        await self._tell_holders()
        return is_done

    async def rehome(self, queue: str, limit: int = 1_000) -> Rehomed:
        def work(tx: Transaction) -> tuple[Rehomed, list[UUID]]:
            rehomed, woken = partitions.rehome(tx, known_queue(tx, queue), limit, self._clock.now())
            return rehomed, _take_waiters(tx, woken)

        rehomed, waiters = await self._write(work)
        await self._nudge(waiters)
        return rehomed

    async def lanes(self, queue: str, *, keeps: bool = False) -> list[WaitingLane]:
        return await self._database.write(
            lambda tx: partitions.folded_lanes(tx, known_queue(tx, queue), self._clock.now()),
            durable=False,
            keeps=keeps,
        )

    async def gates_of_strays(self, queue: str, was: int) -> list[tuple[str, GateRow]]:
        return await self._database.read(lambda tx: partitions.select_gates_of_strays(tx, known_queue(tx, queue), was))

    async def check_waiting(self, policy: Policy) -> None:
        await self._database.read(lambda tx: claims.check_waiting(tx, known_queue(tx, policy.queue), policy))

    async def policy(self, queue: str) -> Declared | None:
        found = await self._database.read(lambda tx: claims.load_queue(tx, queue))
        return None if found is None else Declared(found.policy, found.version, is_drift=False)

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

    async def count_ready(self, policy: Policy, gates: Sequence[bytes], tx: Any = None) -> dict[bytes, int]:
        counts = await self._looked(lambda inner: _count_ready(inner, policy, gates), tx)
        if counts is not None:
            return counts
        return await self._written(lambda inner: _count_folded(inner, policy, gates, self._clock.now()), tx)

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
            found = operators.expire(tx, known_queue(tx, queue), now)
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
            found = operators.expire(tx, known_queue(tx, queue), now)
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

    async def held(self, pairs: Sequence[tuple[UUID, UUID]]) -> list[UUID]:
        return await self._database.read(
            lambda tx: [job for job, lease in pairs if tx.one("select_running", job.bytes, lease.bytes) is not None]
        )

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

    async def prune(self, retention: Retention, limit: int = 1_000) -> Pruned:
        return await self._database.write(
            lambda tx: upkeep.prune(tx, retention, self._clock.time(), limit), durable=False
        )

    async def collect(self, queue: str, limit: int = 1_000) -> Pruned:
        return await self._database.write(
            lambda tx: upkeep.collect(tx, known_queue(tx, queue), self._walk, self._clock.now(), limit),
            durable=False,
        )

    async def count_gates(self, queue: str, limit: int = 1_000) -> Counted:
        def look(tx: Transaction) -> tuple[Counted, tuple[bytes, bytes]]:
            return upkeep.count(tx, known_queue(tx, queue), self._counted.get(queue, (b"", b"")), limit)

        counted, self._counted[queue] = await self._database.read(look)
        return counted

    async def recount(self, queue: str) -> list[Miscount]:
        found = await self._write(lambda tx: upkeep.recount(tx, known_queue(tx, queue), self._clock.now()))
        if found:
            await self._wake(lambda tx: dict.fromkeys(shared_limits.sharers(tx, known_queue(tx, queue).id), EVERYONE))
        return found

    async def cancel(self, job: UUID, note: Note | None = None) -> State:
        def work(tx: Transaction) -> tuple[jobs.Cancelled, list[UUID], set[UUID]]:
            now = self._clock.now()
            cancelled = jobs.cancel(tx, job, now)
            perform(tx, audit.record_jobs(note, now, CANCEL.handled([job], {job: cancelled.was})))
            waiters = [] if cancelled.frees is None else _take_waiters(tx, {cancelled.frees: 1})
            return cancelled, waiters, results.take_waiters(tx, [job])

        cancelled, waiters, result_waiters = await self._write(work)
        _announce(result_waiters)
        if cancelled.worker is not None:
            nudge(cancelled.worker)
        await self._nudge(waiters)
        return cancelled.state

    async def cancel_jobs(self, given: Sequence[UUID], note: Note, *, waits: bool = False) -> list[Handled]:
        def work(tx: Transaction) -> tuple[list[Handled], dict[UUID, jobs.Cancelled], list[UUID], set[UUID]]:
            now = self._clock.now()
            ended: dict[UUID, jobs.Cancelled] = {}
            for job in CANCEL.bounded(given):
                with contextlib.suppress(JobNotFound):
                    ended[job] = jobs.cancel(tx, job, now)
            handled = CANCEL.handled(given, {job: each.was for job, each in ended.items()})
            perform(tx, audit.record_jobs(note, now, handled))
            freed = Counter(each.frees for each in ended.values() if each.frees is not None)
            return handled, ended, _take_waiters(tx, freed), results.take_waiters(tx, list(ended))

        handled, ended, waiters, result_waiters = await self._write(work)
        _announce(result_waiters)
        for worker in {each.worker for each in ended.values() if each.worker is not None}:
            nudge(worker)
        await self._nudge(waiters)
        return handled

    async def report_progress(self, claim: Claim, fraction: float, message: str | None) -> None:
        await self._database.write(
            lambda tx: tx.run("update_progress", fraction, message, claim.id.bytes, claim.lease.bytes), durable=False
        )

    async def wait_until_ended(self, job: UUID, until: Instant | None) -> JobRecord:
        record = await self.job(job)
        if record.state.is_final:
            return record
        alarm = forever if until is None else lambda: self._clock.sleep_until(until)
        return await self._results.ended(job, lambda: self.job(job), alarm)

    async def counts(self, queue: str) -> QueueCounts:
        def look(tx: Transaction) -> QueueCounts:
            number = known_queue(tx, queue).id
            ready, running, parked = tx.one("select_counts", number) or (0, 0, 0)
            return QueueCounts(ready, running, parked, tx.value("count_bells", number))

        return await self._database.read(look)

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
            await self._nudge(nudges.waiters)
            for worker in nudges.schedule_holders:
                # Who does not listen yet looks once it does; who is gone is forgotten in time.
                nudge(worker, SCHEDULES)
        else:
            found, _ = await self._database.read(within)
        return found

    async def _looked(self, work: Callable[[Transaction], T], tx: Any) -> T:
        return await self._database.read(work) if tx is None else await self._borrowed(tx, work, writes=False)

    async def _written(self, work: Callable[[Transaction], T], tx: Any) -> T:
        return await self._write(work) if tx is None else await self._borrowed(tx, work)

    async def _borrowed(self, tx: Any, work: Callable[[Transaction], T], *, writes: bool = True) -> T:
        def begun(inner: Transaction) -> T:
            self._begin(inner, writes)
            return work(inner)

        return await in_callers_transaction(tx, self._database.path, begun, writes=writes)

    async def replay(
        self,
        jobs: Sequence[UUID],
        delay: int | None = None,
        note: Note | None = None,
        *,
        on_conflict: OnReplayConflict = "reject",
        earlier: Mapping[bytes, Holder] = NO_KEYS,
        dry_run: bool = False,
    ) -> list[Handled]:
        if dry_run:
            now = self._clock.now()
            return await self._database.read(lambda tx: operators.foresee_replay(tx, jobs, now, on_conflict, earlier))
        return await self._handle(lambda tx, now: operators.replay(tx, jobs, delay, now, on_conflict, earlier), note)

    async def purge(self, jobs: Sequence[UUID], note: Note | None = None) -> list[Handled]:
        return await self._handle(lambda tx, now: (operators.purge(tx, jobs), {}), note)

    async def retry_now(self, jobs: Sequence[UUID], note: Note | None = None) -> list[Handled]:
        return await self._handle(lambda tx, now: operators.retry_now(tx, jobs, now), note)

    async def force(self, jobs: Sequence[UUID], note: Note) -> list[Handled]:
        return await self._handle(lambda tx, now: operators.force(tx, jobs, now), note)

    async def amend(
        self, queues: Sequence[str], put: Sequence[Override], remove: Sequence[str], note: Note
    ) -> list[Amendment]:
        def work(tx: Transaction) -> tuple[list[Amendment], list[UUID]]:
            found = [known_queue(tx, queue) for queue in queues]
            amendments = operators.apply(tx, found, put, remove, note, self._clock.now())
            return amendments, _take_waiters(tx, {each.id: EVERYONE for each in found})

        amendments, waiters = await self._write(work)
        await self._nudge(waiters)
        await self._tell_holders()
        return amendments

    async def traces(self, queue: str, flows: Sequence[bytes], gates: Sequence[bytes]) -> Traces:
        def look(tx: Transaction) -> tuple[frozenset[bytes], list[UUID]]:
            known = known_queue(tx, queue)
            board = claims.tail_of(tx, known)
            found = [each for each in flows if each in board.flows or tx.value("has_flow", known.id, each)]
            found += [each for each in gates if each in board.gates or tx.value("has_gate", known.id, each)]
            return frozenset(found), [UUID(bytes=worker) for (worker,) in tx.all("select_waiters", known.id)]

        found, waiters = await self._database.read(look)
        return Traces(found, sum(map(is_listening, waiters)))

    async def _handle(
        self, action: Callable[[Transaction, Instant], tuple[list[Handled], dict[int, int]]], note: Note | None
    ) -> list[Handled]:
        def work(tx: Transaction) -> tuple[list[Handled], list[UUID]]:
            now = self._clock.now()
            handled, ready = action(tx, now)
            perform(tx, audit.record_jobs(note, now, handled))
            return handled, _take_waiters(tx, ready)

        handled, waiters = await self._write(work)
        await self._nudge(waiters)
        return handled

    async def _write(self, work: Callable[[Transaction], T]) -> T:
        return await self._database.write(work, durable=True)

    async def _wake(self, queues: Callable[[Transaction], Mapping[int, int]]) -> None:
        await self._nudge(await self._database.write(lambda tx: _take_waiters(tx, queues(tx)), durable=False))

    async def _tell_holders(self) -> None:
        """Let those look who hold claims: what has not started stands by terms that have just changed."""
        for (worker,) in await self._database.read(lambda tx: tx.all("select_holders")):
            nudge(UUID(bytes=worker))

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


def _count_ready(tx: Transaction, policy: Policy, gates: Sequence[bytes]) -> dict[bytes, int] | None:
    """Ready jobs by gate; `None` where so many bells wait that they are to be folded first."""
    queue = claims.queue_number(tx, policy.queue)
    arrived = tx.all("select_arrivals", queue, UNFOLDED_AT_MOST + 1)
    if len(arrived) > UNFOLDED_AT_MOST:
        return None
    found = {gate: tx.one("select_gate", queue, gate) for gate in gates}
    counts = {gate: 0 if row is None else row[IN_FLIGHT] for gate, row in found.items()}
    bells = [arrival(row) for row in arrived]
    return add_bells(policy, counts, [(bell.priority, bell.keys, bell.count) for bell in bells])


def _count_folded(tx: Transaction, policy: Policy, gates: Sequence[bytes], now: Instant) -> dict[bytes, int]:
    """The same, once every bell is folded: nobody claims, and somebody has to."""
    queue = claims.load_queue(tx, policy.queue)
    if queue is not None:
        claims.fold_all(tx, queue, now)
    return _count_ready(tx, policy, gates) or {}
