"""What every store does about stats. It answers questions, and writes what is added up; the rest is written once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from fairlane.clock import Instant
from fairlane.job import JobRecord
from fairlane.policy.by import By
from fairlane.scheduler.figures import Minute, Place
from fairlane.scheduler.snapshot import GateRow, LaneRow, SharedGateRow
from fairlane.store.decoding import Declared
from fairlane.store.figures import KeyPage, KeySort, LanesCounted, QueueFigures, Tallied, WorkerSeen
from fairlane.store.health import Health, Standstill
from fairlane.store.stats import Looking, Moment, Named
from fairlane.store.sums import NOTHING, Work, work_of

__all__ = ["StatsKeeper"]

T = TypeVar("T")

LAST_TALLIES = 5_000
"""Claims that are added up together when a worker stops."""
EVER = 1 << 62
AT_CHECKPOINT = 1_000
"""Claims that may wait for a worker to add them up, before whoever claims does it. Workers do so every few seconds."""


class StatsKeeper(Protocol):
    """A store, as far as stats are concerned. A question by itself is `ask` with one method of `Moment`."""

    async def ask(self, question: Callable[[Moment], Looking[T]]) -> T:
        """Answer a question from one snapshot, as of one moment: whatever it asks, and however much. It may be asked
        again from the beginning, if the database breaks off."""
        ...

    async def add_up(self, work: Work, limit: int) -> Tallied:
        """Add up to `limit` claims in one transaction, unless somebody else is at it."""
        ...

    async def fold(self, queue: str) -> None:
        """Fold what has happened in a queue, and write its tables."""
        ...

    async def tally(self, queue: str, limit: int = 500, rest: int = 0) -> Tallied:
        """Add up to `limit` claims of a queue to its stats, unless somebody else is at it; forget what is old.

        Nothing is done if somebody was at it within the last `rest` microseconds, and no more than `limit` wait.
        """
        work = await self.ask(lambda moment: work_of(moment, queue, limit, rest))
        return NOTHING if work is None else await self.add_up(work, limit)

    async def conclude(self, queue: str) -> None:
        """Fold what has happened and add it up: whoever claimed last stops, and perhaps nobody comes after it."""
        await self.fold(queue)
        await self._add_all_up(queue)

    async def _add_all_up(self, queue: str) -> None:
        """Add up whatever claims have told, and count keys that the policy looks at for the first time."""
        while (await self.tally(queue, LAST_TALLIES)).more:
            pass

    async def _add_some_up(self, queue: str) -> None:
        """The tables of a queue were written. Perhaps no worker is there to add up, and nobody but those who claim."""
        if (await self.tally(queue, AT_CHECKPOINT, EVER)).more:
            await self._add_all_up(queue)

    async def policies(self) -> dict[str, Declared]:
        return await self.ask(Moment.policies)

    async def survey(self, queues: Sequence[str]) -> list[QueueFigures]:
        return await self.ask(lambda moment: moment.survey(queues))

    async def minutes(self, queues: Sequence[str], since: Instant) -> dict[str, list[Minute]]:
        return await self.ask(lambda moment: moment.minutes(queues, since))

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
        return await self.ask(
            lambda moment: moment.list_keys(
                queues, by, sort=sort, search=search, held_only=held_only, after=after, limit=limit
            )
        )

    async def keys_named(self, queues: Sequence[str], places: Sequence[Place]) -> list[Named]:
        return await self.ask(lambda moment: moment.keys_named(queues, places))

    async def list_held(self, queues: Sequence[str], limit: int = 20) -> list[Named]:
        return await self.ask(lambda moment: moment.list_held(queues, limit))

    async def lanes_of(self, queue: str, flow: bytes, limit: int = 50) -> list[LaneRow]:
        return await self.ask(lambda moment: moment.lanes_of(queue, flow, limit))

    async def scheduled_by_lane(self, queues: Sequence[str]) -> LanesCounted:
        return await self.ask(lambda moment: moment.scheduled_by_lane(queues))

    async def gates_named(
        self, gates: Mapping[str, Sequence[bytes]], shared: Sequence[bytes]
    ) -> tuple[list[GateRow], list[SharedGateRow]]:
        return await self.ask(lambda moment: moment.gates_named(gates, shared))

    async def next_jobs(self, queue: str, keys: Mapping[str, str | None], limit: int = 20) -> list[JobRecord]:
        return await self.ask(lambda moment: moment.next_jobs(queue, keys, limit))

    async def workers(self) -> list[WorkerSeen]:
        return await self.ask(Moment.workers)

    async def health(self, *, brief: bool = False) -> Health:
        """The condition of the database itself, as far as it tells; `brief`: only what comes and goes, and is cheap to
        ask: old snapshots, connections, space."""
        ...

    async def standstills(self, queues: Sequence[str], before: Instant, limit: int = 10) -> list[Standstill]:
        """Flows of these queues where no claim looks, and gates that were to wake their lanes before a certain time: at
        most `limit` of each queue and kind."""
        ...
