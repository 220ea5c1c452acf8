"""The part of the SQLite store that is for people who look: figures, and the upkeep that makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fairlane.clock import Instant
from fairlane.job import JobRecord
from fairlane.policy.by import By
from fairlane.scheduler.figures import KeyFigures, Minute
from fairlane.scheduler.snapshot import GateRow, LaneRow, SharedGateRow
from fairlane.store.adding_up import Pace
from fairlane.store.figures import (
    FlowWeight,
    KeyPage,
    KeySort,
    LanesCounted,
    QueueFigures,
    Tallied,
    WorkerReport,
    WorkerSeen,
)
from fairlane.store.health import Health, Standstill
from fairlane.store.job_rows import no_such_queue
from fairlane.store.key_rows import KeyPlace
from fairlane.store.protocol import Declared, WorkerIdentity
from fairlane.store.queue_time import QueueClock
from fairlane.store.sqlite import claims, health, policies, seeing, tallying
from fairlane.store.sqlite.database import Database, Transaction

__all__ = ["Figures", "known_queue"]

LAST_TALLIES = 5_000
"""Claims that are added up together when a worker stops."""


def known_queue(tx: Transaction, name: str) -> claims.QueueInForce:
    """A queue by its name, or `UnknownQueue`."""
    queue = claims.load_queue(tx, name)
    if queue is None:
        raise no_such_queue(name)
    return queue


class Figures:
    """What `Store` says of figures."""

    def __init__(self, database: Database, clock: QueueClock) -> None:
        self._database = database
        self._clock = clock
        self._pace = Pace()

    async def tally(self, queue: str, limit: int = 500, rest: int = 0) -> Tallied:
        now = self._clock.now()
        # Looked at first: most of the time there is nothing to do, and no need to wait for whoever writes.
        if not await self._database.read(lambda tx: tallying.has_work(tx, known_queue(tx, queue), now, limit, rest)):
            return Tallied(0, 0, more=False)
        return await self._database.write(
            lambda tx: tallying.tally(tx, known_queue(tx, queue), now, limit, self._pace), durable=False
        )

    async def policies(self) -> dict[str, Declared]:
        return await self._database.read(policies.all_in_force)

    async def conclude(self, queue: str) -> None:
        def fold(tx: Transaction) -> None:
            now = self._clock.now()
            claims.checkpoint(tx, claims.fold_all(tx, known_queue(tx, queue), now), now)

        await self._database.write(fold, durable=False)
        while (await self.tally(queue, LAST_TALLIES)).more:
            pass

    async def survey(self, queues: Sequence[str]) -> list[QueueFigures]:
        return await self._database.read(lambda tx: seeing.survey(tx, queues, self._clock.now()))

    async def minutes(self, queues: Sequence[str], since: Instant) -> dict[str, list[Minute]]:
        return await self._database.read(lambda tx: seeing.minutes(tx, queues, since, self._clock.now()))

    async def list_keys(
        self,
        queues: Sequence[str],
        by: By,
        *,
        sort: KeySort = KeySort.WAITING,
        search: str = "",
        held_only: bool = False,
        after: str | None = None,
        limit: int = 50,
    ) -> KeyPage:
        place = None if after is None else KeyPlace.decode(after, sort, queues)
        return await self._database.read(
            lambda tx: seeing.list_keys(
                tx, queues, by, sort, search, place, limit, self._clock.now(), held_only=held_only
            )
        )

    async def keys_named(
        self, queues: Sequence[str], places: Sequence[tuple[By, tuple[str | None, ...]]]
    ) -> list[tuple[str, KeyFigures]]:
        return await self._database.read(lambda tx: seeing.keys_named(tx, queues, places, self._clock.now()))

    async def list_held(self, queues: Sequence[str], limit: int = 20) -> list[tuple[str, KeyFigures]]:
        return await self._database.read(lambda tx: seeing.list_held(tx, queues, limit, self._clock.now()))

    async def lanes_of(self, queue: str, flow: bytes, limit: int = 50) -> list[LaneRow]:
        return await self._database.read(lambda tx: seeing.lanes_of(tx, known_queue(tx, queue), flow, limit))

    async def scheduled_by_lane(self, queues: Sequence[str]) -> LanesCounted:
        return await self._database.read(lambda tx: seeing.scheduled_by_lane(tx, queues))

    async def gates_named(
        self, gates: Mapping[str, Sequence[bytes]], shared: Sequence[bytes]
    ) -> tuple[list[GateRow], list[SharedGateRow]]:
        return await self._database.read(lambda tx: seeing.gates_named(tx, gates, shared))

    async def weights_named(self, flows: Mapping[str, Sequence[bytes]]) -> dict[bytes, FlowWeight]:
        return await self._database.read(lambda tx: seeing.weights_named(tx, flows))

    async def next_jobs(self, queue: str, keys: Mapping[str, str | None], limit: int = 20) -> list[JobRecord]:
        now = self._clock.now()
        return await self._database.read(lambda tx: seeing.next_jobs(tx, known_queue(tx, queue), now, keys, limit))

    async def report(self, worker: WorkerIdentity, report: WorkerReport | None) -> None:
        now = self._clock.now()
        await self._database.write(lambda tx: seeing.report(tx, worker.id, report, now), durable=False)

    async def workers(self) -> list[WorkerSeen]:
        now = self._clock.now()
        return await self._database.read(lambda tx: seeing.workers(tx, now))

    async def health(self, *, brief: bool = False) -> Health:
        return await self._database.read(lambda tx: health.examine_file(tx, self._database.path, brief=brief))

    async def standstills(self, queues: Sequence[str], before: Instant, limit: int = 10) -> list[Standstill]:
        return await self._database.read(
            lambda tx: health.find_standstills(tx, [known_queue(tx, queue) for queue in queues], before, limit)
        )
