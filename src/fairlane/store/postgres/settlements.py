"""Ending claims on PostgreSQL: fenced by their lease, with their lane events in the same transaction."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from uuid import UUID, uuid4

import msgspec

from fairlane.clock import Instant
from fairlane.errors import DuplicateJob, StoreUnavailable, UnknownQueue
from fairlane.job import BuiltEffects, Claim, State
from fairlane.policy.unique import Conflict
from fairlane.scheduler.settlement import Settlement, abandoned_by
from fairlane.scheduler.settlement import settle as decide
from fairlane.store.faults import Fault
from fairlane.store.postgres import jobs
from fairlane.store.postgres.connections import STATEMENTS, Connection, Connections, StoreClock, fault_of
from fairlane.store.protocol import Landings, Reaped
from fairlane.store.rows import dying, not_taken, refused, tell_of_conflicts

LEASES_AT_MOST = 100
"""Leases that one reaping looks at."""


def storable(text: str | None) -> str | None:
    """A text as PostgreSQL can keep it: whatever a handler raised, its job must be settled."""
    if text is None:
        return None
    return text.replace("\x00", "\ufffd").encode(errors="replace").decode()


class TakenOver(Exception):
    """Another reaper is at this lease."""


class Settler:
    """Settles and reaps.

    It remembers which leases of this process still hold jobs, so that a lease goes with its last settlement without
    asking the database. What it does not know of, the reaper drops once its time has passed.
    """

    def __init__(
        self,
        connections: Connections,
        clock: StoreClock,
        queue_number: Callable[[str], Awaitable[int]],
        piggyback: Piggyback,
    ) -> None:
        self._connections = connections
        self._clock = clock
        self._queue_number = queue_number
        self._piggyback = piggyback
        self._held: dict[UUID, set[UUID]] = {}

    def claimed(self, lease: UUID, claims: Iterable[Claim]) -> None:
        """Remember what a lease holds."""
        if held := {claim.id for claim in claims}:
            self._held[lease] = held

    def gone(self, leases: Iterable[UUID]) -> None:
        """Forget leases that no longer exist."""
        for lease in leases:
            self._held.pop(lease, None)

    async def settle(
        self, settlements: Sequence[Settlement], landed: Landings, *, was_tried: bool = False
    ) -> list[UUID]:
        """Apply what still holds its lease; returns the jobs whose claim was lost."""
        known = await self._with_on_dead(settlements)
        plain = [each for each in known if not each.effects]
        lost = await self._settle_plain(plain, was_tried)
        # Each lands with its own effects: what one of them is refused for is no concern of the others.
        for each in known:
            if each.effects:
                emptied = self._emptied([each])
                lost += await self._settle_with_effects(each, emptied, landed, was_tried=was_tried)
                self._forget([each], emptied)
        return lost

    async def settle_in(
        self, connection: Connection, settlements: Sequence[Settlement], landed: Landings
    ) -> list[UUID]:
        """The same in the caller's transaction, for jobs that are done.

        Their leases stay: whoever holds them settles once more when it knows that the caller has ended, and finds its
        own work, or settles then.
        """
        now = self._clock.parameter()
        lost = []
        for each in settlements:
            if await _settle(connection, now, [each], [], is_reaper=False):
                lost.append(each.job)
            elif each.effects:
                queues = await self._queues_of(each.effects)
                landed[each.job] = await _land(connection, each.effects, queues, now, is_callers=True)
        await connection.execute(STATEMENTS["tell_all_if_blind"])
        return lost

    async def _queues_of(self, effects: BuiltEffects | None) -> dict[str, int]:
        """The numbers of the queues to which follow-ups go."""
        names = {job.queue for job in effects.jobs} if effects else set()
        return {name: await self._queue_number(name) for name in names}

    async def _with_on_dead(
        self, settlements: Sequence[Settlement], connection: Connection | None = None
    ) -> Sequence[Settlement]:
        """The same, and each death with what its job has declared for it."""
        deaths = [each.job for each in settlements if each.is_death]
        if not deaths:
            return settlements
        statement = STATEMENTS["select_on_dead"]
        if connection is None:
            rows = await self._connections.again(lambda connection, _: connection.fetch(statement, deaths))
        else:
            rows = await connection.fetch(statement, deaths)
        on_dead, now = dict(rows), self._clock.estimate()
        return [
            dying(each, on_dead[each.job], now) if each.is_death and each.job in on_dead else each
            for each in settlements
        ]

    def _emptied(self, settlements: Sequence[Settlement]) -> list[UUID]:
        """The leases that hold nothing more after these."""
        ended: defaultdict[UUID, set[UUID]] = defaultdict(set)
        for each in settlements:
            ended[each.lease].add(each.job)
        return [lease for lease, those in ended.items() if lease in self._held and self._held[lease] <= those]

    def _forget(self, settlements: Sequence[Settlement], emptied: Iterable[UUID]) -> None:
        for each in settlements:
            if (held := self._held.get(each.lease)) is not None:
                held.discard(each.job)
        self.gone(emptied)

    async def _settle_plain(self, settlements: Sequence[Settlement], was_tried: bool) -> list[UUID]:
        if not settlements:
            return []
        emptied = self._emptied(settlements)
        are_done = all(each.to is State.DONE and each.lag is None for each in settlements)
        lost = None
        if are_done and not was_tried:
            try:
                lost = await self._piggyback.settle(self._done(settlements, emptied))
            except StoreUnavailable:
                was_tried = True

        async def attempt(connection: Connection, is_repeated: bool) -> list[UUID]:
            gone: list[UUID]
            if are_done:
                done = self._done(settlements, emptied)
                given = (done.now, done.settlements, done.emptied)
                gone = await connection.fetchval(STATEMENTS["settle_done"], *given)
            else:
                gone = await _settle(connection, self._clock.parameter(), settlements, emptied, is_reaper=False)
            if gone and (is_repeated or was_tried):
                return await self._truly_lost(connection, settlements, gone)
            return gone

        if lost is None:
            lost = await self._connections.again(attempt)
        self._forget(settlements, emptied)
        return lost

    def _done(self, settlements: Sequence[Settlement], emptied: list[UUID]) -> Done:
        given = [(each.job, each.lease, each.ran, each.result) for each in sorted(settlements, key=_job)]
        return Done(self._clock.parameter(), given, emptied)

    async def _settle_with_effects(
        self,
        settlement: Settlement,
        emptied: list[UUID],
        landed: Landings,
        *,
        was_tried: bool = False,
        is_reaper: bool = False,
    ) -> list[UUID]:
        """One settlement and its effects, all or nothing."""
        queues: dict[str, int] = {}
        try:
            queues = await self._queues_of(settlement.effects)
        except UnknownQueue as error:
            if not settlement.is_death:
                raise
            settlement = refused(settlement, error)

        async def attempt(connection: Connection, is_repeated: bool) -> list[UUID]:
            now = self._clock.parameter()
            async with connection.transaction():
                if is_reaper and not await connection.fetchval(STATEMENTS["lock_expired_lease"], now, settlement.lease):
                    raise TakenOver
                lost = await _settle(connection, now, [settlement], emptied, is_reaper=is_reaper)
                if lost and (is_repeated or was_tried):
                    # If an earlier try committed, it did so with the effects.
                    return await self._truly_lost(connection, [settlement], lost)
                if not lost and settlement.is_death:
                    await _land_at_death(connection, settlement, queues, now)
                elif not lost and settlement.effects:
                    # Told also if the answer to the commit is not heard: whoever tries again then finds this landing.
                    effects = settlement.effects
                    landed[settlement.job] = await _land(connection, effects, queues, now, is_callers=False)
                return lost

        return await self._connections.again(attempt)

    async def _truly_lost(
        self, connection: Connection, settlements: Sequence[Settlement], lost: list[UUID]
    ) -> list[UUID]:
        """Of these, what is not our own work, from before the connection broke."""
        leases = {each.job: each.lease for each in settlements}
        rows = await connection.fetch(STATEMENTS["select_settled"], lost, [leases[job] for job in lost])
        own = {row[0] for row in rows}
        # Whoever has begun to wait for their results while a caller's transaction was open was seen by nobody.
        await connection.execute(STATEMENTS["announce"], list(own))
        return [job for job in lost if job not in own]

    async def reap(self, limit: int, ended_by: Instant | None = None) -> Reaped:
        """End the claims of leases that ran out."""
        reaped, dying = await self._connections.again(lambda connection, _: self._reap(connection, limit, ended_by))
        if not dying:
            return reaped
        settled = list(reaped.settled)
        for those in dying:
            # Should we not come to the end of them, their lease is found again.
            with contextlib.suppress(TakenOver):
                for number, each in enumerate(those, 1):
                    emptied = [each.lease] if number == len(those) else []
                    if not await self._settle_with_effects(each, emptied, {}, is_reaper=True):
                        settled.append(each)
        next_due = await self._connections.again(
            lambda connection, _: connection.fetchval(STATEMENTS["next_lease_end"])
        )
        return Reaped(settled, next_due, reaped.tasks)

    async def _reap(
        self, connection: Connection, limit: int, ended_by: Instant | None
    ) -> tuple[Reaped, list[list[Settlement]]]:
        """What was reaped; and by lease, the deaths that are to land with effects, in transactions of their own."""
        async with connection.transaction():
            await connection.execute(STATEMENTS["do_not_wait_for_the_disk"])
            await connection.execute(STATEMENTS["delete_deaf_waiters"])
            await connection.execute(STATEMENTS["delete_gone_claimers"])
            await connection.execute(STATEMENTS["delete_deaf_result_listeners"])
            await connection.execute(STATEMENTS["delete_orphaned_cancellations"])
            now = self._clock.parameter()
            ended = await connection.fetch(STATEMENTS["lock_expired_leases"], now, LEASES_AT_MOST, ended_by)
            renewed_at: dict[UUID, int] = {}
            for row in ended:
                if limit > 0:
                    renewed_at[row["id"]] = row["renewed_at"]
                    limit -= row["jobs"]
            settlements: list[Settlement] = []
            inherited: list[list[Settlement]] = []
            tasks: dict[UUID, str] = {}
            if renewed_at:
                free = {row["id"] for row in await connection.fetch(STATEMENTS["lock_abandoned"], list(renewed_at))}
                for row in await connection.fetch(STATEMENTS["select_abandoned"], list(renewed_at)):
                    if row["id"] not in free:
                        # Somebody else is about to end it: the lease is found again later. Were we to wait, so would
                        # all that other leases hold.
                        renewed_at.pop(row["lease"], None)
            if renewed_at:
                dying: dict[UUID, list[Settlement]] = {}
                decided, tasks = await _decided(connection, renewed_at)
                for each in await self._with_on_dead(decided, connection):
                    if each.effects:
                        dying.setdefault(each.lease, []).append(each)
                    else:
                        settlements.append(each)
                inherited = [await _inherit(connection, lease, those) for lease, those in dying.items()]
                lost = set(await _settle(connection, now, settlements, list(renewed_at), is_reaper=True))
                settlements = [each for each in settlements if each.job not in lost]
            return Reaped(settlements, await connection.fetchval(STATEMENTS["next_lease_end"]), tasks), inherited


async def _decided(connection: Connection, renewed_at: Mapping[UUID, int]) -> tuple[list[Settlement], dict[UUID, str]]:
    """How the claims end that still stand under these leases, and the task of each job."""
    settlements, tasks = [], {}
    for *of_claim, worker in await connection.fetch(STATEMENTS["select_abandoned"], list(renewed_at)):
        claim = _abandoned(of_claim)
        ran = max(0, renewed_at[claim.lease] - claim.claimed_at)
        settlements.append(decide(claim, abandoned_by(worker), ran))
        tasks[claim.id] = claim.task
    return settlements, tasks


async def claims_beside(connection: Connection, worker: UUID, leases: Collection[UUID]) -> list[Claim]:
    """The claims of a worker under other leases than these."""
    found = await connection.fetch(STATEMENTS["select_leases_of_worker"], worker, list(leases), LEASES_AT_MOST)
    if not found:
        return []
    rows = await connection.fetch(STATEMENTS["select_abandoned"], [lease for (lease,) in found])
    return [_abandoned(of_claim) for *of_claim, _ in rows]


async def _inherit(connection: Connection, lease: UUID, settlements: Sequence[Settlement]) -> list[Settlement]:
    """The same under a lease of the reaper's: their worker has lost them, with all that its lease held."""
    inherited = uuid4()
    await connection.execute(STATEMENTS["inherit_claims"], lease, inherited, [each.job for each in settlements])
    return [msgspec.structs.replace(each, lease=inherited) for each in settlements]


async def _land(
    connection: Connection, effects: BuiltEffects, queues: Mapping[str, int], now: int | None, *, is_callers: bool
) -> dict[UUID, Conflict]:
    """Store effects; returns what met a unique key that another job holds."""
    conflicts = {}
    if effects.jobs:
        conflicts = await jobs.insert(connection, effects.jobs, queues, now, is_callers=is_callers)
    await write(connection, effects.puts, effects.deletes)
    return conflicts


async def _land_at_death(
    connection: Connection, settlement: Settlement, queues: Mapping[str, int], now: int | None
) -> None:
    """The effects of a death. Where the database will not take them, the job is dead without."""
    if not settlement.effects:
        return
    try:
        async with connection.transaction():
            follow_ups = settlement.effects.jobs
            while follow_ups:
                try:
                    async with connection.transaction():
                        conflicts = await jobs.insert(connection, follow_ups, queues, now, is_callers=False)
                except DuplicateJob as error:
                    follow_ups = not_taken(settlement, follow_ups, error.job)
                else:
                    tell_of_conflicts(settlement, follow_ups, conflicts)
                    break
            await write(connection, settlement.effects.puts, settlement.effects.deletes)
    except Exception as error:
        if fault_of(error, connection) not in (None, Fault.OURS):
            raise
        await connection.execute(STATEMENTS["note_error"], settlement.job, storable(refused(settlement, error).error))


def _abandoned(row: Sequence[object]) -> Claim:
    job, lease, task, attempt, most, suspicion, claimed_at = row
    # Only what the decision looks at; the payload stays where it is.
    return Claim(job, lease, "", task, 0, {}, b"", attempt, most, claimed_at, claimed_at, False, suspicion)  # type: ignore[arg-type]


async def _settle(
    connection: Connection,
    now: int | None,
    settlements: Sequence[Settlement],
    emptied: list[UUID],
    *,
    is_reaper: bool,
) -> list[UUID]:
    ordered = sorted(settlements, key=_job)
    given = [_settled_row(each) for each in ordered]
    lags = [each.lag for each in ordered] if any(each.lag is not None for each in ordered) else None
    lost: list[UUID] = await connection.fetchval(STATEMENTS["settle"], now, given, emptied, is_reaper, lags)
    return lost


def _job(settlement: Settlement) -> UUID:
    # A policy that begins to share a limit locks what runs in this order too: neither waits crosswise for the other.
    return settlement.job


def _settled_row(each: Settlement) -> tuple[object, ...]:
    asked = each.if_asked_to_cancel()
    return (
        each.job,
        each.lease,
        each.to,
        each.outcome,
        asked.to,
        asked.outcome,
        each.ran,
        each.delay,
        each.result,
        storable(each.error),
        each.counts_attempt,
        each.unstarted,
        each.suspicion,
        each.is_spent,
        each.verdict,
        each.is_cut_short,
    )


async def write(connection: Connection, puts: Mapping[str, bytes], deletes: Iterable[str] = ()) -> None:
    """Put and delete all of these, in the order of their keys: two that write the same keys never deadlock.

    A key that is both deleted and put has the value that is put.
    """
    changes: dict[str, bytes | None] = {**dict.fromkeys(deletes), **puts}
    if changes:
        await connection.execute(STATEMENTS["write_values"], list(changes), list(changes.values()))


class Done(msgspec.Struct, frozen=True):
    """Claims whose jobs are done, as `fairlane.settle_done` takes them."""

    now: int | None
    settlements: Sequence[tuple[UUID, UUID, int, bytes | None]]
    emptied: list[UUID]


class PendingSettlements:
    """Settlements on their way with a claim."""

    __slots__ = ("answer", "done")

    def __init__(self, done: Done) -> None:
        self.done = done
        self.answer: asyncio.Future[list[UUID] | None] = asyncio.get_running_loop().create_future()

    def arrived(self, lost: list[UUID] | None) -> None:
        """They are settled, but for those whose claim was lost; `None`: nobody knows. Only the first word counts."""
        if not self.answer.done():
            self.answer.set_result(lost)


class Piggyback:
    """Brings the settlements of a process to its next claim."""

    def __init__(self) -> None:
        self.is_in_service = False
        """The last claim asked in public, so that the next one can take settlements along."""
        self.may_wait = False
        """No limit waits for what is settled: it may stay until the claim that is under way has ended."""
        self._waiting: PendingSettlements | None = None
        self._is_under_way = False
        self._ended = asyncio.Event()

    def depart(self) -> None:
        """A claim begins."""
        self._is_under_way = True

    @contextlib.contextmanager
    def taken(self) -> Iterator[PendingSettlements | None]:
        """What this claim takes along. If the block is left by an error, nobody knows what became of it."""
        pending, self._waiting = self._waiting, None
        try:
            yield pending
        finally:
            if pending is not None:
                pending.arrived(None)

    def arrive(self) -> None:
        """A claim has ended, and the next may follow in the same turn of the loop."""
        self._is_under_way = False
        self._ended.set()
        self._ended.clear()

    async def settle(self, done: Done) -> list[UUID] | None:
        """Have these settled by the next claim: what was lost. `None`: there is no such claim, and nothing was done.

        `StoreUnavailable`: a claim took them along, and it is not known whether they are settled.
        """
        if not self.is_in_service or self._waiting is not None or (self._is_under_way and not self.may_wait):
            return None
        pending = self._waiting = PendingSettlements(done)
        try:
            # Whoever has freed slots asks for jobs in the same turn as it settles.
            await (self._ended.wait() if self._is_under_way else asyncio.sleep(0))
        finally:
            is_left = self._waiting is pending
            if is_left:
                self._waiting = None
        if is_left:
            return None
        if (lost := await pending.answer) is None:
            raise StoreUnavailable("the claim that was to settle these jobs as well was broken off")
        return lost
