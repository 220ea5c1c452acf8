"""Claiming together: where many workers want one queue's lock, whoever holds it claims for all who wait.

Sixty-four workers with four slots each would take the lock one after the other, for four jobs a time, and each would
hold it over four round trips while the others keep the processors busy. Asking in public (see `fairlane.enter`) costs
whoever is alone one round trip more, so it is done only once the wait for the lock was longer than the work under it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from uuid import UUID, uuid4

import msgspec

from fairlane.errors import StoreUnavailable
from fairlane.job import Claim
from fairlane.store.postgres import rows
from fairlane.store.postgres.connections import STATEMENTS
from fairlane.store.protocol import WorkerIdentity

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

SLOTS_AT_MOST = 1_000
"""How many jobs one claim starts for all its holders, and the most that a request can name."""
NUMBERS = 1 << 22
SMOOTHING = 0.2
RISING = 1.1
"""By how much the quickest load is taken to be slower with every claim that was not as quick."""
GRANTED = 11
"""Columns of `fairlane.granted`."""


class Holder(msgspec.Struct, frozen=True):
    """Somebody for whom jobs are claimed: its lease, and how many it asked for."""

    lease: UUID
    asked: int
    worker: UUID
    name: str
    duration: int
    """How long its lease lasts, in microseconds."""


class Entry(msgspec.Struct, frozen=True):
    """What came of entering: claims that somebody made for us, or the lock and the requests of those who wait."""

    lease: UUID
    claims: list[Claim]
    requests: list[Holder]


def deal(starts: int, holders: Sequence[Holder]) -> list[int]:
    """Who gets which start, counted from 1. Each is filled before the next: as few as possible are left short."""
    if len(holders) == 1:
        return [1] * starts  # what waits for its instant needs no slot yet
    dealt: list[int] = []
    for nth, holder in enumerate(holders, 1):
        dealt += [nth] * min(holder.asked, starts - len(dealt))
    return dealt


class Crowding:
    """Whether a queue's lock is sought after, by what our own claims have seen."""

    def __init__(self) -> None:
        self.is_dense = False
        self.is_limited = True
        """Its jobs wait for limits, as far as we know."""
        self._held = 0.0
        self._quickest = math.inf

    def alone(self, loading: float, held: float) -> None:
        """A claim took so long to get the lock and to load, then held it for so long; both in seconds."""
        self._quickest = min(loading, self._quickest * RISING)
        self._held += (held - self._held) * SMOOTHING
        self.is_dense = loading - self._quickest > self._held

    def led(self, requests: int) -> None:
        """A claim that asked in public came to lead, and found so many who waited."""
        self.is_dense = requests > 0


class Seat:
    """The place of one session among those who ask in public. It goes with the session: its base never changes."""

    def __init__(self) -> None:
        self._base = uuid4()
        self._number = 0
        self._registered: tuple[WorkerIdentity, int] | None = None

    @property
    def is_used_up(self) -> bool:
        """Every number has been used; a session of its own begins afresh."""
        return self._number + 1 >= NUMBERS

    async def enter(
        self,
        connection: Connection,
        queue: int,
        name: str,
        asked: int,
        worker: WorkerIdentity,
        duration: int,
        passenger: Passenger | None = None,
    ) -> Entry:
        """Ask for jobs; come back with them, or with the queue's lock. The passenger is settled first."""
        await self._register(connection, worker, duration)
        self._number += 1
        lease = _lease(self._base, self._number)
        request = queue << 32 | self._number << 10 | min(asked, SLOTS_AT_MOST)
        if passenger is not None:
            requests, grants = await _settle_and_enter(connection, passenger, queue, request, lease)
            return Entry(lease, [_claim(row, lease, name) for row in grants], [Holder(*row) for row in requests])
        found = await connection.fetch(STATEMENTS["enter"], queue, request, lease)
        if found and found[0]["id"] is not None:
            return Entry(lease, [_claim(row, lease, name) for row in found], [])
        return Entry(lease, [], list(_requests(found)))

    async def _register(self, connection: Connection, worker: WorkerIdentity, duration: int) -> None:
        """Write down to whom this session belongs."""
        if self._registered != (worker, duration):
            await connection.execute(STATEMENTS["register_claimer"], self._base, worker.id, worker.name, duration)
            self._registered = (worker, duration)


async def _settle_and_enter(
    connection: Connection, passenger: Passenger, queue: int, request: int, lease: UUID
) -> tuple[Sequence[Any], Sequence[Any]]:
    done = passenger.done
    row = await connection.fetchrow(
        STATEMENTS["settle_and_enter"], done.now, done.settlements, done.emptied, queue, request, lease
    )
    assert row is not None
    lost, requests, grants = row
    passenger.arrived(lost)
    return requests or (), grants or ()


def _lease(base: UUID, number: int) -> UUID:
    return UUID(int=base.int >> 32 << 32 | number)


def _requests(found: Iterable[Any]) -> Iterable[Holder]:
    for lease, asked, worker, name, duration, *_ in found:
        yield Holder(lease, asked, worker, name, duration)


def _claim(row: Any, lease: UUID, queue: str) -> Claim:
    # A row of `fairlane.enter` has columns of requests before those of `fairlane.granted`.
    *columns, claimed_at = row[-GRANTED:]
    return rows.claim_of(columns, lease, queue, claimed_at)


class Done(msgspec.Struct, frozen=True):
    """Claims whose jobs are done, as `fairlane.settle_done` takes them."""

    now: int | None
    settlements: Sequence[tuple[UUID, UUID, int, bytes | None]]
    emptied: list[UUID]


class Passenger:
    """Settlements on their way with a claim."""

    __slots__ = ("_answer", "done")

    def __init__(self, done: Done) -> None:
        self.done = done
        self._answer: asyncio.Future[list[UUID] | None] = asyncio.get_running_loop().create_future()

    def arrived(self, lost: list[UUID] | None) -> None:
        """They are settled, but for those whose claim was lost; `None`: nobody knows. Only the first word counts."""
        if not self._answer.done():
            self._answer.set_result(lost)

    async def answer(self) -> list[UUID]:
        lost = await self._answer
        if lost is None:
            raise StoreUnavailable("the claim that was to settle these jobs as well was broken off")
        return lost


class Carriage:
    """Brings the settlements of a process to its next claim."""

    def __init__(self) -> None:
        self.is_in_service = False
        """The last claim asked in public, so that the next one can take settlements along."""
        self.may_wait = False
        """No limit waits for what is settled: it may stay until the claim that is under way has ended."""
        self._waiting: Passenger | None = None
        self._is_under_way = False
        self._ended = asyncio.Event()

    def depart(self) -> None:
        """A claim begins."""
        self._is_under_way = True

    @contextlib.contextmanager
    def boarded(self) -> Iterator[Passenger | None]:
        """What this claim takes along. If the block is left by an error, nobody knows what became of it."""
        passenger, self._waiting = self._waiting, None
        try:
            yield passenger
        finally:
            if passenger is not None:
                passenger.arrived(None)

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
        passenger = self._waiting = Passenger(done)
        try:
            # Whoever has freed slots asks for jobs in the same turn as it settles.
            await (self._ended.wait() if self._is_under_way else asyncio.sleep(0))
        finally:
            is_left = self._waiting is passenger
            if is_left:
                self._waiting = None
        return None if is_left else await passenger.answer()
