"""The part of the PostgreSQL store that is for people who look: figures, and the upkeep that makes them."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from fairlane.clock import Instant
from fairlane.errors import UnknownQueue
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
from fairlane.store.key_rows import KeyPlace
from fairlane.store.postgres import health, seeing, tallying
from fairlane.store.postgres.claims import Claimer
from fairlane.store.postgres.connections import Connections
from fairlane.store.postgres.scheduling import QueueHandle
from fairlane.store.postgres.timing import StoreClock
from fairlane.store.protocol import WorkerIdentity

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["Figures"]

T = TypeVar("T")

LAST_TALLIES = 5_000
"""Claims that are added up together when a worker stops."""


class Figures:
    """What `Store` says of figures."""

    def __init__(self, connections: Connections, clock: StoreClock, claimer: Claimer) -> None:
        self._connections = connections
        self._clock = clock
        self._claimer = claimer
        self._pace = Pace()

    async def _ask(self, question: Callable[[Connection], Awaitable[T]]) -> T:
        """Ask what may be asked twice: a session that the server has ended meanwhile is not the caller's concern."""
        return await self._connections.again(lambda connection, _: question(connection))

    async def tally(self, queue: str, limit: int = 500, rest: int = 0) -> Tallied:
        handle = await self._claimer.queue(queue)
        async with self._connections.session() as connection:
            return await tallying.tally(connection, handle, self._clock.parameter(), limit, rest, self._pace)

    async def conclude(self, queue: str) -> None:
        async with self._claimer.locked(await self._claimer.queue(queue), durable=False) as scheduling:
            await scheduling.checkpoint(await scheduling.fold_all())
        while (await self.tally(queue, LAST_TALLIES)).more:
            pass

    async def survey(self, queues: Sequence[str]) -> list[QueueFigures]:
        handles, now = await self._handles(queues), self._clock.parameter()
        return await self._ask(lambda connection: seeing.survey(connection, handles, now))

    async def _handles(self, queues: Sequence[str]) -> list[QueueHandle]:
        """Those of them that are known."""
        handles = []
        for queue in queues:
            with contextlib.suppress(UnknownQueue):
                handles.append(await self._claimer.queue(queue))
        return handles

    async def minutes(self, queues: Sequence[str], since: Instant) -> dict[str, list[Minute]]:
        handles, now = await self._handles(queues), self._clock.parameter()
        return await self._ask(lambda connection: seeing.minutes(connection, handles, since, now))

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
        handles, now = await self._handles(queues), self._clock.parameter()
        return await self._ask(
            lambda connection: seeing.list_keys(
                connection, handles, by, sort, search, place, limit, now, held_only=held_only
            )
        )

    async def keys_named(
        self, queues: Sequence[str], places: Sequence[tuple[By, tuple[str | None, ...]]]
    ) -> list[tuple[str, KeyFigures]]:
        handles, now = await self._handles(queues), self._clock.parameter()
        return await self._ask(lambda connection: seeing.keys_named(connection, handles, places, now))

    async def list_held(self, queues: Sequence[str], limit: int = 20) -> list[tuple[str, KeyFigures]]:
        handles, now = await self._handles(queues), self._clock.parameter()
        return await self._ask(lambda connection: seeing.list_held(connection, handles, limit, now))

    async def lanes_of(self, queue: str, flow: bytes, limit: int = 50) -> list[LaneRow]:
        handle = await self._claimer.queue(queue)
        return await self._ask(lambda connection: seeing.lanes_of(connection, handle, flow, limit))

    async def scheduled_by_lane(self, queues: Sequence[str]) -> LanesCounted:
        return await self._ask(lambda connection: seeing.scheduled_by_lane(connection, queues))

    async def gates_named(
        self, gates: Mapping[str, Sequence[bytes]], shared: Sequence[bytes]
    ) -> tuple[list[GateRow], list[SharedGateRow]]:
        named = [(await self._claimer.queue(queue), each) for queue, each in gates.items()]
        return await self._ask(lambda connection: seeing.gates_named(connection, named, shared))

    async def weights_named(self, flows: Mapping[str, Sequence[bytes]]) -> dict[bytes, FlowWeight]:
        named = [(await self._claimer.queue(queue), each) for queue, each in flows.items()]
        return await self._ask(lambda connection: seeing.weights_named(connection, named))

    async def next_jobs(self, queue: str, keys: Mapping[str, str | None], limit: int = 20) -> list[JobRecord]:
        handle = await self._claimer.queue(queue)
        now = self._clock.parameter()
        return await self._ask(lambda connection: seeing.next_jobs(connection, handle, now, keys, limit))

    async def report(self, worker: WorkerIdentity, report: WorkerReport | None) -> None:
        now = self._clock.parameter()
        await self._ask(lambda connection: seeing.report(connection, worker.id, report, now))

    async def workers(self) -> list[WorkerSeen]:
        now = self._clock.parameter()
        return await self._ask(lambda connection: seeing.workers(connection, now))

    async def health(self, *, brief: bool = False) -> Health:
        return await self._ask(lambda connection: health.examine_server(connection, brief=brief))

    async def standstills(self, queues: Sequence[str], before: Instant, limit: int = 10) -> list[Standstill]:
        handles = [await self._claimer.queue(queue) for queue in queues]
        return await self._ask(lambda connection: health.find_standstills(connection, handles, before, limit))
