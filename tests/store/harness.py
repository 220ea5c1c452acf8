"""What the contract suite is written in: a database of each kind, and the few verbs of workers and producers.

Everything goes through the `Store` protocol. Nothing here knows a table.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, TypeVar
from uuid import UUID, uuid4

import asyncpg

from fairlane.clock import Clock, ManualClock, SystemClock
from fairlane.job import Claim, NewJob, State, new_job_ids
from fairlane.operations import Finding, Operations, PartitionPlan
from fairlane.policy import Concurrency, Policy, Rate, canonical_keys, lane_id
from fairlane.policy.gates import AT_REST
from fairlane.scheduler.settlement import Done, RunOutcome, settle
from fairlane.store import records
from fairlane.store.postgres import PostgresStore
from fairlane.store.protocol import Claimed, Listener, QueueCounts, Store, WorkerIdentity
from fairlane.store.sqlite import SqliteStore
from fairlane.store.stats_values import WorkerReport
from tests.waiting import PATIENCE

__all__ = [
    "LEASE",
    "MINUTE",
    "SECOND",
    "WORKER",
    "Database",
    "Kind",
    "OpenTransaction",
    "assert_at_rest",
    "by_key",
    "checkpointed",
    "claim",
    "claim_once",
    "diagnosed",
    "finish",
    "given_jobs",
    "hear",
    "ids",
    "new_jobs",
    "operations_on",
    "planned",
    "soon",
    "state_of",
    "worker_named",
]

T = TypeVar("T")
Kind = Literal["sqlite-memory", "sqlite-file", "postgres"]

SECOND = 1_000_000
MINUTE = 60 * SECOND
LEASE = timedelta(seconds=30)
WORKER = WorkerIdentity(UUID(int=1), "worker:1")
ASKED_IN_VAIN = 200
"""Claims that bring nothing and promise more, after which a worker would be spinning."""


@dataclass
class OpenTransaction:
    """A producer's own transaction: `tx` is what it hands to `enqueue`."""

    tx: Any

    async def commit(self) -> None:
        await self._end("commit")

    async def rollback(self) -> None:
        await self._end("rollback")

    async def _end(self, how: str) -> None:
        if isinstance(self.tx, sqlite3.Connection):
            self.tx.execute(how)
        else:
            await self.tx.execute(how)


@dataclass
class Database:
    """Where jobs live for one test. Several stores may be open on it, as if each were a process of its own."""

    kind: Kind
    url: str
    _open: list[Store] = field(default_factory=list)

    def connect(self, clock: Clock | None = None, *, durable_claims: bool = False) -> Store:
        """A store that is not open yet."""
        match self.kind:
            case "sqlite-memory":
                return SqliteStore(None, clock=clock, durable_claims=durable_claims)
            case "sqlite-file":
                return SqliteStore(self.url, clock=clock, durable_claims=durable_claims)
            case "postgres":
                return PostgresStore(self.url, clock=clock, durable_claims=durable_claims)

    async def open(self, clock: Clock | None = None, *, durable_claims: bool = False) -> Store:
        """One more open store. A database in memory has only one: whoever opens it again gets the same."""
        if self.kind == "sqlite-memory" and self._open:
            return self._open[0]
        store = self.connect(clock, durable_claims=durable_claims)
        await store.open()
        self._open.append(store)
        return store

    async def close(self) -> None:
        while self._open:
            await self._open.pop().close()

    @asynccontextmanager
    async def transaction(self, *, begin: bool = True) -> AsyncIterator[OpenTransaction]:
        """A connection of the producer's own, with a transaction open on it unless told otherwise."""
        assert self.kind != "sqlite-memory", "nobody else can connect to a database in memory"
        if self.kind == "sqlite-file":
            local = sqlite3.connect(self.url, isolation_level=None)
            try:
                if begin:
                    local.execute("begin immediate")
                yield OpenTransaction(local)
            finally:
                local.close()
            return
        remote = await asyncpg.connect(self.url)
        try:
            if begin:
                await remote.execute("begin")
            yield OpenTransaction(remote)
        finally:
            await remote.close()


def worker_named(name: str) -> WorkerIdentity:
    return WorkerIdentity(uuid4(), name)


def new_jobs(
    policy: Policy,
    keys: Mapping[str, object] | None = None,
    count: int = 1,
    *,
    priority: int = 0,
    task: str = "deliver",
    payload: bytes = b"{}",
    max_attempts: int = 3,
    delay: int | None = None,
    run_at: int | None = None,
) -> list[NewJob]:
    """Jobs as a producer stamps them, all alike."""
    built = canonical_keys(keys or {})
    lane_keys = {name: task if name == "task" else built[name] for name in policy.lane_keys}
    lane = lane_id(policy.queue, priority, lane_keys)
    return [
        NewJob(job, policy.queue, task, priority, lane, lane_keys, built, payload, max_attempts, delay, run_at)
        for job in new_job_ids(0, count)
    ]


async def given_jobs(
    store: Store,
    policy: Policy,
    keys: Mapping[str, object] | None = None,
    count: int = 1,
    *,
    priority: int = 0,
    max_attempts: int = 3,
    delay: int | None = None,
    run_at: int | None = None,
) -> list[UUID]:
    """Enqueue so many jobs, all alike, at once; return their ids."""
    jobs = new_jobs(policy, keys, count, priority=priority, max_attempts=max_attempts, delay=delay, run_at=run_at)
    await store.enqueue(jobs)
    return [job.id for job in jobs]


async def claim_once(
    store: Store,
    queue: str,
    want: int,
    *,
    worker: WorkerIdentity = WORKER,
    lease: timedelta = LEASE,
    listener: Listener | None = None,
) -> Claimed:
    """One claim, with all that it says."""
    brought = await store.claim(queue, lambda: want, worker=worker, lease=lease, listener=listener)
    assert len(brought.claims) <= want, f"asked for {want} jobs and got {len(brought.claims)}"
    return brought


async def claim(
    store: Store,
    queue: str,
    want: int = 1,
    *,
    worker: WorkerIdentity = WORKER,
    lease: timedelta = LEASE,
) -> list[Claim]:
    """What a worker with so many free slots gets: it asks again for as long as it is told that there is more."""
    claims: list[Claim] = []
    in_vain = 0
    while True:
        brought = await claim_once(store, queue, want - len(claims), worker=worker, lease=lease)
        claims += brought.claims
        if len(claims) >= want or not brought.more:
            return claims
        in_vain = 0 if brought.claims else in_vain + 1
        assert in_vain < ASKED_IN_VAIN, "the store promises more and brings nothing: a worker would spin"


async def finish(store: Store, claims: Iterable[Claim], outcome: RunOutcome | None = None, *, ran: int = 1_000) -> None:
    """Settle claims that this worker holds, as done unless told otherwise."""
    settlements = [settle(each, outcome or Done(None), ran) for each in claims]
    assert await store.settle(settlements) == [], "a claim that its worker held was lost"


async def hear(store: Store, queue: str, listener: Listener, *, worker: WorkerIdentity = WORKER) -> Claimed:
    """Register a listener with a queue that has nothing for it, until the store says that it need not look again."""
    while True:
        brought = await claim_once(store, queue, 1, worker=worker, listener=listener)
        assert brought.claims == [], "the queue was meant to be empty"
        if not brought.look_again:
            return brought


async def serving(store: Store, clock: Clock, *queues: str, slots: int = 1, worker: WorkerIdentity = WORKER) -> None:
    """Report as a worker that serves these queues does every few seconds."""
    said = WorkerReport(
        name=worker.name,
        host="vm",
        pid=1,
        version="1",
        queues=dict.fromkeys(queues, 1.0),
        concurrency=slots,
        started_at=clock.now(),
        every=5 * SECOND,
    )
    await store.run(records.report(worker.id, said))


async def soon(event: Awaitable[T]) -> T:
    """What must come by itself; the watchdog only ends a test that would hang."""
    try:
        return await asyncio.wait_for(event, PATIENCE)
    except TimeoutError:
        raise AssertionError(f"nothing came of {event!r}") from None


def ids(claims: Iterable[Claim]) -> list[UUID]:
    return [each.id for each in claims]


def by_key(claims: Iterable[Claim], name: str = "account") -> Counter[str | None]:
    """How many of these claims each value of a key has."""
    return Counter(each.keys[name] for each in claims)


async def state_of(store: Store, job: UUID) -> State:
    return (await store.job(job)).state


async def assert_at_rest(
    store: Store, policy: Policy, clock: ManualClock, keys: Sequence[Mapping[str, object]] = ({},)
) -> None:
    """A14: nothing runs, so every count is 0, and every gate admits exactly what its limit allows."""
    assert await claim(store, policy.queue, 10) == [], "the queue was meant to be empty"
    assert await store.counts(policy.queue) == QueueCounts(ready=0, running=0, parked_lanes=0, events=0)
    for each in keys:
        clock.advance("1d")  # every bucket is full again
        plain = [limit for limit in policy.limits if isinstance(limit, Concurrency | Rate)]
        asked = 1 + min((limit.room_at(AT_REST, clock.now()) for limit in plain), default=3)
        room = asked - 1 if policy.limits else asked
        await given_jobs(store, policy, each, asked)
        admitted = await claim(store, policy.queue, asked)
        assert len(admitted) == room, f"{each} has room for {room} and was given {len(admitted)}"
        await finish(store, admitted)
        clock.advance("1d")
        await finish(store, await claim(store, policy.queue, 1))
    assert await claim(store, policy.queue, 1) == []
    assert (await store.counts(policy.queue)).running == 0


@dataclass
class _Program:
    """What operations ask of their app, where a test has only a store."""

    store: Store
    declared_policies: Mapping[str, Policy]
    forwarded: Collection[str] | None
    tasks: list[str]
    clock: Clock
    actor: str = "ops"
    redact: None = None

    async def opened(self) -> Store:
        return self.store

    def known_tasks(self) -> list[str]:
        return self.tasks


class _Resting(SystemClock):
    """Time in which a test does something else, wherever somebody waits."""

    def __init__(self, rest: Callable[[], Awaitable[None]]) -> None:
        self._rest = rest

    async def sleep_until(self, moment: int) -> None:
        await self._rest()


def operations_on(
    store: Store,
    declared: Mapping[str, Policy] | None = None,
    *,
    tasks: Collection[str] | None = None,
    forwarded: Collection[str] | None = (),
    rest: Callable[[], Awaitable[None]] | None = None,
) -> Operations:
    """What operators do with this store, on behalf of a program that declares these policies and knows these tasks."""
    clock = SystemClock() if rest is None else _Resting(rest)
    return Operations(_Program(store, declared or {}, forwarded, list(tasks or ()), clock))


async def planned(store: Store, queue: str, to: int, by: Sequence[str] | None = None) -> PartitionPlan:
    """What a change of the number of partitions would come to."""
    return (await operations_on(store).partitions.change(queue, to, by=by, dry_run=True)).plan


async def diagnosed(store: Store, *declared: Any, **known: Any) -> list[Finding]:
    """What the doctor finds, but for what is on purpose: the server of the tests does not wait for its disk."""
    return [each for each in await operations_on(store, *declared, **known).diagnose() if each.check != "durability"]


async def checkpointed(store: Store) -> None:
    """The tables hold what the journal says, and nobody is going to write them by itself."""
    match store:
        case SqliteStore():
            await store._checkpoints.close()
        case PostgresStore():
            await store._claimer._checkpoints.close()
