"""Figures as every store keeps them, for people who look. Nothing but upkeep writes them, and no claim reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fairlane.clock import Instant
from fairlane.job import JobRecord
from fairlane.policy.by import By
from fairlane.scheduler.figures import KeyFigures, Minute
from fairlane.scheduler.snapshot import GateRow, LaneRow, SharedGateRow
from fairlane.store.figures import FlowWeight, KeyPage, KeySort, LanesCounted, QueueFigures, Tallied
from fairlane.store.health import Health, Standstill

__all__ = ["FigureKeeping"]


class FigureKeeping(Protocol):
    """What a store tells of its queues, their keys and itself."""

    async def tally(self, queue: str, limit: int = 500, rest: int = 0) -> Tallied:
        """Add up to `limit` claims of a queue to its stats, unless somebody else is at it; forget what is old.

        Nothing is done if somebody was at it within the last `rest` microseconds, and no more than `limit` wait.
        """
        ...

    async def conclude(self, queue: str) -> None:
        """Fold what has happened and add it up: whoever claimed last stops, and perhaps nobody comes after it."""
        ...

    async def survey(self, queues: Sequence[str]) -> list[QueueFigures]:
        """These queues at a glance, in a fixed number of statements however many they are."""
        ...

    async def minutes(self, queues: Sequence[str], since: Instant) -> dict[str, list[Minute]]:
        """What happened in each queue, minute by minute, the oldest first; minutes without anything are left out."""
        ...

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
        """A page of the keys of one scope, in these partitions of a queue. `search` is in any of its values, whatever
        the case. `ConfigurationError` where `after` is nothing that a page has given."""
        ...

    async def keys_named(
        self, queues: Sequence[str], places: Sequence[tuple[By, tuple[str | None, ...]]]
    ) -> list[tuple[str, KeyFigures]]:
        """The figures of single keys, wherever they are known."""
        ...

    async def list_held(self, queues: Sequence[str], limit: int = 20) -> list[tuple[str, KeyFigures]]:
        """Of all scopes of these queues, the keys behind whose limits and pauses most jobs wait, the most first."""
        ...

    async def lanes_of(self, queue: str, flow: bytes, limit: int = 50) -> list[LaneRow]:
        """The lanes of a flow, those that jobs wait in first."""
        ...

    async def scheduled_by_lane(self, queues: Sequence[str]) -> LanesCounted:
        """The scheduled jobs that are due first, up to `COUNTED_AT_MOST`, by lane."""
        ...

    async def gates_named(
        self, gates: Mapping[str, Sequence[bytes]], shared: Sequence[bytes]
    ) -> tuple[list[GateRow], list[SharedGateRow]]:
        """Gates of queues, and shared ones, by their ids, where they exist: as the last claims have left them."""
        ...

    async def weights_named(self, flows: Mapping[str, Sequence[bytes]]) -> dict[bytes, FlowWeight]:
        """The weights of flows by their ids, where they exist, as they are stored."""
        ...

    async def next_jobs(self, queue: str, keys: Mapping[str, str | None], limit: int = 20) -> list[JobRecord]:
        """Ready jobs of one flow of a queue (or, without `Fair`, of the whole) in the order in which it would start
        them if nothing held it back: its lanes by the rank of their heads, each from its floor on."""
        ...

    async def health(self, *, brief: bool = False) -> Health:
        """The condition of the database itself, as far as it tells; `brief`: only what comes and goes, and is cheap to
        ask: old snapshots, connections, space."""
        ...

    async def standstills(self, queues: Sequence[str], before: Instant, limit: int = 10) -> list[Standstill]:
        """Flows of these queues where no claim looks, and gates that were to wake their lanes before a certain time: at
        most `limit` of each queue and kind."""
        ...
