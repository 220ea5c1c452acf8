"""A queue as programs see it: its policy, and claiming from it by hand, for programs that bring their own runtime."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from uuid import UUID

from fairlane.clock import SECOND, Clock, Instant, duration_of
from fairlane.effects import Effects, landed_of
from fairlane.enqueue import Producing, built_effects
from fairlane.errors import (
    AlreadySettled,
    ClaimLost,
    ConfigurationError,
    InvalidPolicy,
    StoreUnavailable,
    UndecodablePayload,
    UnknownQueue,
    UnknownTask,
)
from fairlane.job import Claim, Landed, State
from fairlane.operations import Operations
from fairlane.parameters import check_value, checked, known_options, shown
from fairlane.policy.keys import BUILT_IN
from fairlane.policy.limits import Limit
from fairlane.policy.partitions import checked_width, parse_partition, partition_for, partition_name, whole_of
from fairlane.policy.policy import Policy
from fairlane.scheduler.explain import Explanation
from fairlane.scheduler.settlement import (
    Cancelled,
    Died,
    Done,
    Released,
    Retried,
    RunOutcome,
    Settlement,
    Snoozed,
    settle,
)
from fairlane.store.protocol import Claimed, Landings, Listener, Looked, Store, WorkerIdentity
from fairlane.task import LONGEST_DELAY, Backoff, Duration, Registry, Task
from fairlane.waits import ANSWER_WITHIN, Outage, first_of, jittered, pause
from fairlane.worker.claims import Turns
from fairlane.worker.runs import bounded, storable

T = TypeVar("T")

MOST_CLAIMED = 100_000
"""They are all in memory, and claimed in one transaction."""
ASKED_AT_MOST = 100
"""How often to claim again after a claim that returned nothing but said that there is more."""


_BACKOFF = Backoff()
LONGEST_RUN = 366 * 86_400 * SECOND
"""Run times are added up: the sum of a few thousand of these still fits into a column."""


@dataclass(frozen=True, slots=True)
class Connection:
    """An open store, the event loop that it belongs to, and what an app does with it."""

    store: Store
    loop: asyncio.AbstractEventLoop
    producing: Producing
    identity: WorkerIdentity
    """The worker that claims by hand."""
    alive_lock: QueueListener
    """What waits for jobs, in all queues."""

    async def close(self) -> None:
        await self.producing.telemetry.hooks.flush()
        await self.alive_lock.close()
        await self.store.close()


class QueueSource(Protocol):
    """What a queue and its claims need from the app."""

    clock: Clock
    registry: Registry
    max_payload: int
    operations: Operations

    async def opened(self) -> Store: ...

    async def connected(self, policies: Sequence[Policy] = ()) -> Connection: ...

    def in_force(self, queue: str) -> Policy | None: ...


def check_name(name: str, declared: Collection[str]) -> None:
    """Refuse a queue name that is taken, or that could be the name of a partition."""
    if name in declared:
        raise ConfigurationError(f"queue {name!r} is declared twice; put its whole policy into one declaration")
    if (partition := parse_partition(name)) is not None:
        raise ConfigurationError(
            f"queue {name!r}: names that end in __p and a number belong to partitions; give it another name, or "
            f"declare app.queue({partition[0]!r}, partitions=…), which makes them"
        )


def width_of(queue: str, partitions: object, by: Collection[str], per_partition: Collection[Limit]) -> int:
    """The number of partitions that a queue is declared with. Other options about partitions need it."""
    for given, value in (("partition_by", by), ("per_partition", per_partition)):
        if partitions is None and value:
            raise ConfigurationError(
                f"queue {queue!r}: {given}={value!r} is about partitions, and it has none; give partitions=… too "
                "(with partitions=1 it is one queue, which can be divided later), or leave it out"
            )
    return 1 if partitions is None else checked_width(partitions)


def check_keys(policy: Policy, tasks: Iterable[Task[..., Any]]) -> None:
    """Refuse a policy that uses a key which no task of its queue can provide."""
    listed = list(tasks)
    if not listed:
        return
    scopes: list[tuple[str, tuple[str, ...]]] = [(repr(limit), limit.by) for limit in policy.limits]
    if policy.fair:
        scopes.insert(0, (repr(policy.fair), policy.fair.by))
    scopes.append((f"keys={policy.keys!r}", policy.keys))
    if policy.partition is not None:
        scopes.append((f"partition_by={policy.partition.by!r}", policy.partition.by))
    for what, by in scopes:
        for key in by:
            if key not in BUILT_IN and not any(task.can_provide(key) for task in listed):
                raise InvalidPolicy(
                    f"queue {policy.queue!r}: {what} looks at the key {key!r}, which none of its tasks can provide "
                    f"({', '.join(task.name for task in listed)}); give one of them a parameter {key!r} or keys=…"
                )


def check_divided_by(queue: str, by: Iterable[str], carried: Iterable[str], tasks: Iterable[Task[..., Any]]) -> None:
    """Refuse to divide a queue by a key that its jobs do not carry, and none of its tasks can provide."""
    listed, known = list(tasks), {*carried}
    for key in by:
        if listed and key not in known and not any(task.can_provide(key) for task in listed):
            for task in listed:
                known.update(task.options.keys if isinstance(task.options.keys, tuple) else task.codec.parameters)
            raise ConfigurationError(
                f"queue {queue!r} cannot be divided by {key!r}: none of its tasks can provide that key; "
                f"they can provide {', '.join(sorted(known)) or 'none'}"
            )


class Queue:
    """A queue as this program declares it."""

    __slots__ = ("_source", "_turns", "partitions", "policy")

    def __init__(self, policy: Policy, partitions: tuple[Policy, ...], source: QueueSource) -> None:
        self.policy = policy
        """As declared, for the whole queue."""
        self.partitions = partitions
        """What each partition enforces, as declared; a queue that is not partitioned has one."""
        self._source = source
        self._turns = Turns(())

    def __repr__(self) -> str:
        return f"<queue {self.name!r}>"

    @property
    def name(self) -> str:
        return self.policy.queue

    @property
    def _in_force(self) -> Policy:
        """The policy last read from the database; what is declared, while the app is not open."""
        return self._source.in_force(self.name) or self.partitions[0]

    def partition_for(self, key: object) -> int:
        """The partition, from 0 on, that a value of `partition_by` belongs to; a tuple where it names several keys.

        If the app is open, by the number of partitions in the database; otherwise by the number declared.
        """
        place = self._in_force.partition
        count = len(key) if isinstance(key, tuple) else 1
        if place is not None and place.by and count != len(place.by):
            raise ConfigurationError(
                f"queue {self.name!r} is partitioned by {', '.join(place.by)}; give partition_for a value for each of "
                f"these keys, not {key!r}"
            )
        return partition_for(key, 1 if place is None else place.width)

    @checked(unchecked=["lease"])
    async def claim(self, n: int = 1, *, lease: Duration = "30s", worker: str | None = None) -> list[HeldClaim]:
        """Claim up to `n` jobs for one lease, in the order in which they should start.

        No two callers ever get the same job, and no limit is ever exceeded. The list is empty if no job may start now.
        """
        if not 1 <= n <= MOST_CLAIMED:
            raise ConfigurationError(f"claim: n={n}: claim at least 1 job, and at most {MOST_CLAIMED:,} at once")
        duration = as_lease(lease)
        connection = await self._source.connected(self.partitions)
        identity = connection.identity if worker is None else WorkerIdentity(connection.identity.id, worker)
        held: list[HeldClaim] = []
        served = partition_names(self._in_force)
        for name in served:
            self._turns.add(name)
        # A partition that was removed is not claimed from.
        for queue in [name for name in self._turns.in_order() if name in served]:
            if len(held) < n:
                held += await self._claim(connection, queue, n - len(held), identity, duration)
        return held

    async def _claim(
        self, connection: Connection, queue: str, n: int, identity: WorkerIdentity, duration: timedelta
    ) -> list[HeldClaim]:
        store = connection.store

        async def give_back(claimed: Claimed) -> None:
            outcome = Released("its claimer was cancelled")
            await store.settle([settle(each, outcome, 0) for each in claimed.claims])

        async def once() -> Claimed:
            claiming = store.claim(queue, lambda: n, worker=identity, lease=duration)
            return await _unbroken(claiming, give_back)

        try:
            claimed, asked = await once(), 1
            while claimed.more and not claimed.claims and asked < ASKED_AT_MOST:
                claimed, asked = await once(), asked + 1
        finally:
            connection.alive_lock.claimed(queue)
        self._turns.note(queue, claimed.vtime, is_idle=len(claimed.claims) < n)
        held = HeldLease(claimed.lease, duration)
        return [HeldClaim(each, held, self._source) for each in claimed.claims]

    @known_options
    async def wait(self, timeout: Duration | None = None) -> bool:
        """Return True once a job may start; False after `timeout`, or when the app is closed.

        A job wakes one waiter. No job that arrives after an empty claim is missed.
        """
        until = None if timeout is None else max(0, duration_of("wait: timeout", timeout))
        connection = await self._source.connected(self.partitions)
        return await connection.alive_lock.wait(partition_names(self._in_force), until)

    async def explain(self, **keys: object) -> Explanation:
        """Everything that holds all jobs of the queue, or all of these keys in it, and what would start next."""
        await self._source.connected(self.partitions)
        return await self._source.operations.queues.explain(self.name, keys)

    async def pace(self, timeout: Duration | None = None, /, **keys: object) -> bool:
        """Return True once there is room in all backlogs of these keys; False after `timeout`.

        For producers of many jobs. It checks after 50 ms, then less and less often, at least once a second.
        """
        until = None if timeout is None else max(0, duration_of("pace: timeout", timeout))
        return await (await self._source.connected(self.partitions)).producing.wait_for_room(self.name, keys, until)

    @known_options
    async def renew(self, claims: Iterable[HeldClaim], lease: Duration | None = None) -> None:
        """Renew the leases of these claims. Claims settled meanwhile are left out; `ClaimLost` names the lost ones."""
        await renew_together(self._source, self._own(claims), lease)

    @known_options
    async def ack(
        self, claims: Iterable[HeldClaim], results: Iterable[Any] | None = None, *, ran: Duration | None = None
    ) -> None:
        """Complete these jobs in one transaction. `ClaimLost` names those whose claim is gone; the others are done."""
        held = self._own(claims)
        check_value("ack", "results", results, Iterable[Any] | None)
        values = [None] * len(held) if results is None else list(results)
        if len(values) != len(held):
            raise ConfigurationError(f"ack of {len(held)} claims was given {len(values)} results; give one for each")
        await settle_together(
            self._source, [(claim, claim._done(value)) for claim, value in zip(held, values, strict=True)], ran
        )

    def _own(self, claims: Iterable[HeldClaim]) -> Sequence[HeldClaim]:
        check_value(repr(self), "claims", claims, Iterable[HeldClaim])
        held = list(claims)
        for claim in held:
            if whole_of(claim.queue) != self.name or claim._source is not self._source:
                raise ConfigurationError(f"{claim!r} is not of {self!r} of this app; give it to its own queue")
        return held


async def partitions_served(store: Store, shares: Sequence[str], known: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The queues that a worker claims from, by the names it was given: all partitions, or one of them.

    A partition that is also named by itself is served only under that name.
    """
    served = {}
    for name in shares:
        of, index = parse_partition(name) or (name, None)
        found = await store.policy(of)
        names = () if found is None else partition_names(found.policy)
        if not names or (index is not None and index >= len(names)):
            raise UnknownQueue(f"queues: {name!r} is unknown; this app has {', '.join(known)}")
        alone = {partition_name(*each) for other in shares if (each := parse_partition(other)) is not None}
        served[name] = (
            tuple(each for each in names if each not in alone) if index is None else (partition_name(of, index),)
        )
    return served


def partition_names(policy: Policy) -> tuple[str, ...]:
    """The partitions of a queue; a queue that is not partitioned is its only one."""
    return (policy.queue,) if policy.partition is None else policy.partition.names


async def _unbroken(work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]] | None = None) -> T:
    """See this through. If the waiter is cancelled meanwhile, what was done is undone, if that is possible: a statement
    that is interrupted leaves open whether it was recorded."""
    working = asyncio.ensure_future(work)

    async def undone() -> None:
        with contextlib.suppress(Exception):  # of claims, the lease runs out then
            done = await working
            if undo is not None:
                await undo(done)

    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait({asyncio.ensure_future(undone())}, timeout=ANSWER_WITHIN)
        raise


@dataclass(slots=True)
class HeldLease:
    """The lease that the claims of one batch share."""

    id: UUID
    duration: timedelta
    cancelled: set[UUID] = field(default_factory=set)
    """Jobs that were cancelled, as of the last renewal."""


class HeldClaim:
    """A job that this program holds until it settles it or its lease expires."""

    __slots__ = ("_began", "_call", "_claim", "_is_lent", "_is_lost", "_is_settled", "_lease", "_source", "_tried")

    id: UUID
    """The job's id."""
    queue: str
    task: str
    keys: Mapping[str, str | None]
    priority: int
    attempt: int
    """Counts from 1."""
    max_attempts: int
    enqueued_at: Instant
    claimed_at: Instant
    payload: bytes
    """The arguments, as stored."""

    def __init__(self, claim: Claim, lease: HeldLease, source: QueueSource) -> None:
        self._claim = claim
        self._lease = lease
        self._source = source
        self._began = source.clock.monotonic()
        self._call: tuple[Sequence[Any], Mapping[str, Any]] | None = None
        self._is_settled = False
        self._is_lost = False
        self._is_lent = False
        """Settled in a transaction of the caller, who may settle it again after a rollback."""
        self._tried: tuple[State, str] | None = None
        """The settlement last tried without learning whether it was recorded."""

    def __repr__(self) -> str:
        return f"<claim of job {self.id} ({self.task}), attempt {self.attempt} of {self.max_attempts}>"

    def __getattr__(self, name: str) -> Any:
        if name in HeldClaim.__annotations__ and not name.startswith("_"):
            return getattr(self._claim, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    @property
    def args(self) -> Sequence[Any]:
        """The positional arguments, read by the task's annotations; `UnknownTask` or `UndecodablePayload` if not."""
        return self._decoded()[0]

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The keyword arguments, likewise."""
        return self._decoded()[1]

    @property
    def cancel_requested(self) -> bool:
        """Whether the job was asked to stop, as of the claim or its last renewal."""
        return self._claim.cancel_requested or self.id in self._lease.cancelled

    @property
    def is_settled(self) -> bool:
        """Whether this program has settled it, or is settling it."""
        return self._is_settled

    def _decoded(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        if self._call is None:
            task = self._source.registry.find(self.task)
            if task is None:
                raise UnknownTask(
                    f"job {self.id}: this app has no task {self.task!r} to read its arguments by; register the task, "
                    "or read `payload` yourself"
                )
            try:
                self._call = task.codec.decode_call(self.payload)
            except UndecodablePayload as error:
                raise UndecodablePayload(f"job {self.id}: {error}; its bytes are in `payload`") from error
        return self._call

    # Settling it.

    @checked(unchecked=["ran"])
    async def ack(
        self, result: Any = None, effects: Effects | None = None, *, ran: Duration | None = None, tx: Any = None
    ) -> Landed:
        """The job is done. Its result is stored with it; its effects land with it, or not at all.

        Returns the outcome of each effect. A follow-up whose unique key is held by another job is not stored, unless it
        replaces that job; this job is done all the same. `DuplicateJob` if the id of a follow-up is taken: the claim is
        still held then. With `tx`, everything lands when your own transaction commits. After a rollback, settle the
        claim again: it is no longer renewed.
        """
        done = self._done(result)
        if effects is not None:
            build = (await self._source.connected()).producing.build
            most = self._source.max_payload
            done = Done(done.result, built_effects(effects.enqueue, effects.put, effects.delete, build, most))
        ended = await settle_together(self._source, [(self, done)], ran, tx)
        return landed_of(done.effects, ended.get(self.id))

    @checked(unchecked=["delay", "ran"], any_text=["reason"])
    async def retry(self, delay: Duration | None = None, reason: str = "", *, ran: Duration | None = None) -> None:
        """Retry after `delay`, or when the backoff of the task says; after the last attempt the job is dead."""
        if delay is not None:
            wait = bounded(duration_of("retry: delay", delay))
        else:
            task = self._source.registry.find(self.task)
            wait = (task.options.backoff if task else _BACKOFF).delay(self.attempt, random.random())
        await self._end(Retried(storable(reason) or "retry asked for by its runtime", wait), ran)

    @checked(unchecked=["delay", "ran"], any_text=["reason"])
    async def snooze(self, delay: Duration, reason: str = "", *, ran: Duration | None = None) -> None:
        """Run again after `delay`; this attempt does not count."""
        wait = bounded(duration_of("snooze: delay", delay))
        await self._end(Snoozed(storable(reason) or f"snoozed for {delay}", wait), ran)

    @checked(unchecked=["ran"], any_text=["reason"])
    async def dead(self, reason: str, *, ran: Duration | None = None) -> None:
        """Set aside for good."""
        await self._end(Died(storable(reason)), ran)

    @checked(unchecked=["ran"], any_text=["reason"])
    async def cancel(self, reason: str = "", *, ran: Duration | None = None) -> None:
        """The job ends as cancelled."""
        await self._end(Cancelled(storable(reason) or "cancelled by its runtime"), ran)

    @known_options
    async def release(self, delay: Duration | None = None) -> None:
        """Return the job to the queue as if it had not been claimed: in its place, its attempt and tokens refunded.

        With a `delay` it returns later, at the end of its lane.
        """
        wait = 0 if delay is None else bounded(duration_of("release: delay", delay))
        await self._end(Released("given back by its runtime", wait), None)

    @known_options
    async def renew(self, lease: Duration | None = None) -> None:
        """Renew the lease, from now, of the whole batch. This also updates `cancel_requested`."""
        self._check_held()
        await renew_together(self._source, [self], lease)

    def _done(self, result: Any) -> Done:
        task = self._source.registry.find(self.task)
        if task is not None:
            return Done(task.codec.encode_result(result, self._source.max_payload))
        if result is None or isinstance(result, bytes):
            return Done(result)
        raise UnknownTask(
            f"job {self.id}: this app has no task {self.task!r} to store a result by; give its JSON as bytes, or none"
        )

    async def _end(self, outcome: RunOutcome, ran: Duration | None) -> None:
        await settle_together(self._source, [(self, outcome)], ran)

    def _check_held(self) -> None:
        if self._is_lost:
            raise ClaimLost([self.id])
        if self._is_settled and not self._is_lent:
            raise AlreadySettled(self.id)

    def _settlement(self, outcome: RunOutcome, ran: Duration | None) -> Settlement:
        taken = self._source.clock.monotonic() - self._began if ran is None else duration_of("ran", ran)
        if taken > LONGEST_RUN:
            raise ConfigurationError(f"ran={shown(ran)} is longer than a year; give the time that the job ran")
        return settle(self._claim, outcome, max(0, taken))


async def settle_together(
    source: QueueSource, ends: Sequence[tuple[HeldClaim, RunOutcome]], ran: Duration | None = None, tx: Any = None
) -> Landings:
    """Settle claims in one transaction. `ClaimLost` names those that are gone; the others are settled.

    Returns, by job, the conflicts of its follow-ups, where known.
    """
    claims = [claim for claim, _ in ends]
    settlements = [claim._settlement(outcome, ran) for claim, outcome in ends]
    seen = set()
    for claim in claims:
        claim._check_held()
        if claim in seen:
            raise AlreadySettled(claim.id)
        seen.add(claim)
    store = await source.opened()
    for claim in claims:
        claim._check_held()  # another task may have settled it while the app was opened
    # A claim that was tried before may have been settled then, but only by the same settlement.
    trying = {claim: (each.to, each.outcome) for claim, each in zip(claims, settlements, strict=True)}
    tried = [claim._tried == each for claim, each in trying.items() if claim._tried is not None]
    is_repeated = tx is None and bool(tried) and all(tried)
    for claim, each in trying.items():
        claim._is_settled, claim._is_lent, claim._tried = True, tx is not None, each
    landed: Landings = {}

    async def record() -> None:
        try:
            lost = await store.settle(settlements, is_repeated=is_repeated, tx=tx, landed=landed)
        except BaseException:
            # It is not known whether it was recorded; the same settlement may be tried again.
            for claim in claims:
                claim._is_settled = claim._is_lent
            raise
        for claim in claims:
            claim._is_lost = claim.id in lost

    # We do not learn whether a transaction of the caller commits.
    await (_unbroken(record()) if tx is None else record())
    if lost := [claim.id for claim in claims if claim._is_lost]:
        raise ClaimLost(lost)
    return landed


async def renew_together(source: QueueSource, claims: Iterable[HeldClaim], lease: Duration | None) -> None:
    """Renew the leases of these claims, from now. `ClaimLost` names those that are gone."""
    held = [claim for claim in claims if not claim.is_settled]
    duration = None if lease is None else as_lease(lease)
    by_duration: dict[timedelta, dict[UUID, HeldLease]] = {}
    for claim in held:
        by_duration.setdefault(duration or claim._lease.duration, {})[claim._lease.id] = claim._lease
    store = await source.opened()
    gone: set[UUID] = set()
    for each, leases in by_duration.items():
        renewed = await store.renew(list(leases), each)
        gone |= set(renewed.gone)
        for one in leases.values():
            one.duration = each
            one.cancelled.update(renewed.cancelled)
    # A lease is removed with the last settlement of its claims: what was settled meanwhile is not lost.
    lost = [claim for claim in held if claim._lease.id in gone and not claim.is_settled]
    for claim in lost:
        claim._is_lost = True
    if lost:
        raise ClaimLost(claim.id for claim in lost)


def as_lease(lease: Duration) -> timedelta:
    """The length of a lease, checked."""
    length = duration_of("lease", lease)
    if not 0 < length <= LONGEST_DELAY:
        raise ConfigurationError(f"lease={lease!r} is not a time above 0 and up to a hundred years")
    return timedelta(microseconds=length)


CLAIMS_WITHIN = SECOND
"""A waiter that was woken and has not claimed within this time no longer counts: another is woken for its job."""
POLL = 30 * SECOND
"""The last resort."""
LONGEST_LOOK = 0.05
LONGEST_OVERDUE = 1.0
"""Seconds, at most, until the next look if a due time has passed and nothing opened."""


class _Line:
    """The waiters of one queue, in order of arrival."""

    def __init__(self, queue: str, clock: Clock) -> None:
        self.queue = queue
        self.waiters: deque[asyncio.Future[_Line | None]] = deque()
        self.changed = asyncio.Event()
        self.watcher: asyncio.Task[None] | None = None
        self.is_registered = False
        self.looks = 0
        self._clock = clock
        self._woken: deque[int] = deque()

    @property
    def woken(self) -> int:
        """Waiters that were woken and are about to claim."""
        since = self._clock.monotonic() - CLAIMS_WITHIN
        while self._woken and self._woken[0] <= since:
            self._woken.popleft()
        return len(self._woken)

    def wake(self, count: int) -> None:
        while count > 0 and self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(self)
                self._woken.append(self._clock.monotonic())
                count -= 1

    def arrived(self) -> None:
        """A waiter that was woken has claimed, or will not."""
        if self._woken:
            self._woken.popleft()
        self.changed.set()

    def end(self, error: Exception | None) -> None:
        """End all waits, without a job."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if waiter.done():
                continue
            if error is not None:
                waiter.set_exception(error)
            else:
                waiter.set_result(None)


class QueueListener:
    """What waits for jobs in all queues of an app, in this process."""

    def __init__(self, store: Store, clock: Clock, identity: WorkerIdentity) -> None:
        self.identity = identity
        self._store = store
        self._clock = clock
        self._lines: dict[str, _Line] = {}
        self._outage = Outage(self._look_everywhere)
        self._listener: Listener | None = None
        self._is_open = asyncio.Event()
        self._listening: asyncio.Task[None] | None = None
        self._is_closed = False

    async def wait(self, queues: Sequence[str], timeout: int | None) -> bool:
        """Return True once a job of one of these queues can start that no other waiter was woken for; False after
        `timeout`, in microseconds."""
        if self._is_closed:
            return False
        lines = [self._lines.setdefault(queue, _Line(queue, self._clock)) for queue in queues]
        waiter: asyncio.Future[_Line | None] = asyncio.get_running_loop().create_future()
        for line in lines:
            line.waiters.append(waiter)
            line.changed.set()
            self._watch(line)
        try:
            if timeout is None:
                return await waiter is not None
            await first_of(waiter, pause(self._clock, timeout))
            return not waiter.cancelled() and waiter.result() is not None
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None and (woke := waiter.result()):
                # Woken and cancelled at the same time: its job must wake another waiter, here or elsewhere.
                woke.arrived()
                woke.is_registered = True
                self._watch(woke)
            raise
        finally:
            for line in lines:
                if waiter in line.waiters:
                    line.waiters.remove(waiter)

    def claimed(self, queue: str) -> None:
        """A claim in this process has returned, with or without jobs."""
        if (line := self._lines.get(queue)) is not None:
            line.arrived()

    async def close(self) -> None:
        """End all waits, and stop listening."""
        self._is_closed = True
        for line in self._lines.values():
            line.end(None)
        tasks = [*(line.watcher for line in self._lines.values()), self._listening]
        running = [task for task in tasks if task is not None]
        for task in running:
            # Not in the middle of a statement: that would cost its connection.
            self._outage.cancel(task)
        await asyncio.gather(*running, return_exceptions=True)

    # Looking.

    def _watch(self, line: _Line) -> None:
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen(), name="fairlane listener")
        if line.watcher is None:
            line.watcher = asyncio.create_task(self._serve(line), name=f"fairlane waiters of {line.queue}")

    async def _serve(self, line: _Line) -> None:
        """Look and wake while there are waiters; then deregister, so that wakeups go to other processes."""
        try:
            while line.waiters or line.is_registered:
                await self._is_open.wait()
                line.changed.clear()
                # Before the look: a claim that lands during it sets `changed`, and we look again.
                on_their_way = line.woken if line.waiters else 0
                looked = await self._look(line, len(line.waiters) + on_their_way)
                line.wake(looked.claimable - on_their_way)
                if line.waiters:
                    await self._until_the_next_look(line, looked)
        except Exception as error:
            line.end(error)
        finally:
            line.watcher = None

    async def _look(self, line: _Line, want: int) -> Looked:
        async def once() -> Looked:
            if self._listener is None:
                raise StoreUnavailable("the listener has lost its connection")
            return await self._store.look(line.queue, want, worker=self.identity, listener=self._listener)

        line.is_registered = True
        looked = await self._outage.ride_out(once, "waiting")
        line.is_registered = looked.claimable < want
        return looked

    async def _until_the_next_look(self, line: _Line, looked: Looked) -> None:
        due = jittered(POLL)
        if looked.next_due is not None:
            due = min(due, looked.next_due - looked.now)
        if line.woken:
            due = min(due, CLAIMS_WITHIN)
        if looked.look_again or due <= 0:
            # In real time, not by the app's clock: we wait for other transactions.
            longest = LONGEST_LOOK if looked.look_again else LONGEST_OVERDUE
            moment = min(0.001 * 2 ** min(line.looks, 20), longest)
            line.looks += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(line.changed.wait(), moment)
        else:
            line.looks = 0
            await first_of(line.changed.wait(), pause(self._clock, due))

    def _look_everywhere(self) -> None:
        for line in self._lines.values():
            line.changed.set()

    # Listening.

    async def _listen(self) -> None:
        """Listen for good. What arrives while the connection is lost is found by looking."""
        try:
            while True:
                listener = await self._outage.ride_out(lambda: self._store.listen(self.identity), "listening")
                self._listener = listener
                self._is_open.set()
                self._look_everywhere()
                try:
                    with contextlib.suppress(StoreUnavailable):
                        while True:
                            if await listener.wait(None):
                                self._look_everywhere()
                finally:
                    self._is_open.clear()
                    self._listener = None
                    with contextlib.suppress(StoreUnavailable):
                        await listener.close()
        except Exception as error:
            # No wakeup would ever arrive: fail all waits; the next wait tries to listen again.
            for line in self._lines.values():
                line.end(error)
        finally:
            self._listening = None
