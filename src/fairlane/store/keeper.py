"""What every store does about stats. It answers questions, and writes what is added up; the rest is written once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from fairlane.clock import Instant
from fairlane.store.figures import Tallied
from fairlane.store.health import Health, Standstill
from fairlane.store.stats import Looking, Moment
from fairlane.store.sums import NOTHING, Work, work_of

__all__ = ["StatsKeeper"]

T = TypeVar("T")

LAST_TALLIES = 5_000
"""Claims that are added up together when a worker stops."""
EVER = 1 << 62
AT_CHECKPOINT = 1_000
"""Claims that may wait for a worker to add them up, before whoever claims does it. Workers do so every few seconds."""


class StatsKeeper(Protocol):
    """A store, as far as stats are concerned. What there is to ask are the methods of `Moment`."""

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

    async def health(self, *, brief: bool = False) -> Health:
        """The condition of the database itself, as far as it tells; `brief`: only what comes and goes, and is cheap to
        ask: old snapshots, connections, space."""
        ...

    async def standstills(self, queues: Sequence[str], before: Instant, limit: int = 10) -> list[Standstill]:
        """Flows of these queues where no claim looks, and gates that were to wake their lanes before a certain time: at
        most `limit` of each queue and kind."""
        ...
