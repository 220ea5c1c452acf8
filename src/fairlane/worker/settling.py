"""Settling: outcomes go to the store in batches, one batch at a time; what piles up meanwhile is the next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from uuid import UUID

import msgspec

from fairlane.errors import InvalidJob
from fairlane.scheduler.settlement import Settlement
from fairlane.store.protocol import Store
from fairlane.worker.slots import QueueSlots
from fairlane.worker.timing import Outage
from fairlane.worker.watching import Watching

__all__ = ["Settling"]

log = logging.getLogger("fairlane.worker")

AT_ONCE = 1_000


class Settling:
    """What has ended here and is not yet recorded there."""

    def __init__(self, store: Store, outage: Outage) -> None:
        self._store = store
        self._outage = outage
        self._pending: list[Settlement] = []
        self._in_flight: Sequence[Settlement] = ()
        self._arrived = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._queues: set[QueueSlots] = set()
        self._tried: set[UUID] = set()
        self.on_settled: Callable[[Iterable[QueueSlots]], None] = lambda queues: None
        self.is_held_back: Callable[[], bool] = lambda: False
        """More will have ended in the next turns of the event loop: one settlement of many is cheaper than many."""
        self.watching: Watching | None = None
        self.given_up = 0
        self._loop = asyncio.get_running_loop()

    @property
    def unsettled(self) -> int:
        return len(self._pending) + len(self._in_flight)

    def add(self, settlement: Settlement, queue: QueueSlots, *, may_be_settled: bool = False) -> None:
        """`may_be_settled`: its handler has settled it in a transaction of its own, which may have committed."""
        self._pending.append(settlement)
        if may_be_settled:
            self._tried.add(settlement.job)
        self._queues.add(queue)
        if len(self._pending) == 1:
            self._arrived.set()
            self._empty.clear()

    def leases(self) -> set[UUID]:
        """Leases that must not run out before their settlement has landed."""
        return {each.lease for each in self._pending} | {each.lease for each in self._in_flight}

    async def all_settled(self) -> None:
        await self._empty.wait()

    async def run(self) -> None:
        self._pending = [*self._in_flight, *self._pending]
        while True:
            await self._arrived.wait()
            while self.is_held_back() and len(self._pending) < AT_ONCE:  # noqa: ASYNC110 - every turn brings more
                await asyncio.sleep(0)
            self._in_flight, self._pending = self._pending[:AT_ONCE], self._pending[AT_ONCE:]
            queues = set(self._queues)
            if not self._pending:
                self._queues.clear()
            began = self._loop.time()
            tried = self._tried.intersection(each.job for each in self._in_flight) if self._tried else set()
            await self.record(self._in_flight, was_tried=bool(tried))
            self._tried -= tried
            if self.watching is not None:
                self.watching.settled(len(self._in_flight), self._loop.time() - began)
            self._in_flight = ()
            if not self._pending:
                self._arrived.clear()
                self._empty.set()
            self.on_settled(queues)

    async def record(self, batch: Sequence[Settlement], *, was_tried: bool = False) -> None:
        """Record a batch, however long the database is away. What it refuses for good is told, and does not stop us."""
        tried = 0

        async def once() -> list[UUID]:
            nonlocal tried
            tried += 1
            return await self._store.settle(batch, is_repeated=was_tried or tried > 1)

        try:
            lost = await self._outage.ride_out(once, "settling")
        except Exception as error:
            if len(batch) == 1 and isinstance(error, InvalidJob) and (instead := batch[0].fallback) is not None:
                log.error(
                    "job %s: its effects were refused, so it has failed: %s",
                    batch[0].job,
                    error,
                    extra=_about(batch[0].job),
                )
                reason = f"{instead.error}: {type(error).__name__}: {error}"
                await self.record([msgspec.structs.replace(instead, error=reason)])
                return
            if len(batch) == 1:
                self.given_up += 1
                log.critical(
                    "job %s: its outcome (%s) could not be recorded; it runs again when its lease has ended",
                    batch[0].job,
                    batch[0].outcome,
                    exc_info=error,
                    extra=_about(batch[0].job),
                )
                return
            # One bad apple: the others must not be lost with it. Some of them may have landed.
            for each in batch:
                await self.record([each], was_tried=True)
            return
        if lost and self.watching is not None and tried == 1:
            self.watching.claims_lost(lost, "settled late")
        for job in lost:
            if tried > 1:
                log.warning(
                    "job %s: recorded just before the connection broke, or its claim is lost", job, extra=_about(job)
                )
            else:
                log.error(
                    "job %s: ClaimLost: taken over before it was settled; its outcome is not recorded",
                    job,
                    extra=_about(job),
                )


def _about(job: UUID) -> dict[str, UUID]:
    return {"job": job}
