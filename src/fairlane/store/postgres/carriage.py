"""Settlements that travel with a claim: where many workers of few slots ask in public, one round trip serves for both.

A worker whose jobs end settles them and asks for new ones in the same turn of its loop. In a crowd each of the two
costs more than the jobs themselves, so the settlement waits for that turn, and the claim that begins in it takes it
along. It is durable before the claim waits for anything (see `fairlane.settle_and_enter`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from uuid import UUID

import msgspec

from fairlane.errors import StoreUnavailable

__all__ = ["Carriage", "Done", "Passenger"]


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
