"""What people see of queues, keys and workers, as stores hand it out. Looking changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.policy.by import By
from fairlane.policy.partitions import whole_of
from fairlane.scheduler.explain import Service
from fairlane.scheduler.figures import Held, KeyFigures
from fairlane.scheduler.settlement import DISPATCHER
from fairlane.scheduler.snapshot import LaneTally

__all__ = [
    "COUNTED_AT_MOST",
    "LANES_AT_MOST",
    "PUBLISHING",
    "Counted",
    "KeyPage",
    "KeySort",
    "LanesCounted",
    "QueueFigures",
    "Tallied",
    "WorkerReport",
    "WorkerSeen",
    "dead_loops",
    "key_scope",
    "service_of",
    "unbegun_in",
]

COUNTED_AT_MOST = 10_000
"""What is counted row by row is counted up to this: more of it is told as "at least"."""
LANES_AT_MOST = 2_000
"""Bells that no claim has folded and that are looked at one by one."""


class Counted(msgspec.Struct, frozen=True):
    """A number that was counted up to a bound."""

    count: int = 0
    is_all: bool = True
    """False: there are at least so many."""


class Tallied(msgspec.Struct, frozen=True):
    """What one pass of adding tallies up did."""

    tallies: int
    keys: int
    """Keys whose figures were written."""
    more: bool
    """It stopped at its bound."""
    shed: int = 0
    """Tallies that were too many to be added up: their minutes are in, and keys were counted anew instead."""


class QueueFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A queue (one partition, if it has several) at a glance."""

    queue: str
    ready: int
    """As far as claims have seen: `unseen` come on top."""
    running: int
    parked_lanes: int
    unseen: int
    """Jobs that arrived and that no claim has seen yet, as far as `bells` were read."""
    bells: int
    """Bells that no claim has folded, up to `COUNTED_AT_MOST`."""
    scheduled: Counted
    dead: Counted
    """Of the newest dead jobs of all queues, those of this one; `is_all` if all dead jobs were looked at."""
    held: dict[str, Held]
    """By limit, whom it holds back. Gates of the whole queue hold back whoever is ready, and are not among them."""
    oldest_ready_at: Instant | None
    """When the oldest job that still waits became ready, at the time of `tallied_at`."""
    next_due_at: Instant | None
    """When the next scheduled job is due."""
    tallied_at: Instant | None
    """Up to when what claims did is in the figures; `None`: it never was."""
    untallied: int
    """Tallies that are not, up to `COUNTED_AT_MOST`."""


class KeySort(StrEnum):
    """What a list of keys is ordered by: most first, or by name."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    STARTED = "started"
    """The one that started last first."""
    NAME = "name"


class KeyPage(msgspec.Struct, frozen=True):
    """Some keys of a list, each with the partition that it was found in."""

    keys: list[tuple[str, KeyFigures]]
    after: str | None
    """Where to go on; `None`: this was the end."""


class LanesCounted(msgspec.Struct, frozen=True):
    """Jobs by lane: those that are scheduled, or those that no claim has seen. Only keys, priority and `arrived` say
    something."""

    lanes: list[LaneTally]
    is_all: bool


PUBLISHING = "publishing"
"""The trouble of a dispatcher whose broker refuses."""


def unbegun_in(queue: str) -> str:
    """The trouble of a dispatcher whose messages for a queue nobody begins."""
    return f"unbegun in {whole_of(queue)}"


class WorkerReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of itself, every few seconds."""

    name: str
    host: str
    pid: int
    version: str
    """Of Fairlane."""
    queues: dict[str, float]
    """The queues it serves, with their weights."""
    concurrency: int
    started_at: Instant
    every: int
    """Microseconds between two reports."""
    running: int = 0
    waiting: int = 0
    """Claimed, and not started."""
    unsettled: int = 0
    is_well: bool = True
    is_stopping: bool = False
    loops: dict[str, str] = {}
    """Each loop by name: `running`, `ended`, or what it died of."""
    troubles: dict[str, str] = {}
    """What fails now without harm to any job, by name."""
    clock_offset: int = 0
    """The store's clock less the worker's, in microseconds."""
    tasks: list[str] = []
    """The tasks that it knows."""
    figures: dict[str, float] = {}
    """What it has counted since it started, by the name of the metric."""


def dead_loops(loops: Mapping[str, str]) -> dict[str, str]:
    """Of the loops of a worker, those that died, by name, with what each died of."""
    return {name: state for name, state in sorted(loops.items()) if state not in ("running", "ended")}


class WorkerSeen(msgspec.Struct, frozen=True):
    """A worker, and when it was last heard of. One that stopped has taken its report back."""

    id: str
    seen_at: Instant
    report: WorkerReport

    def is_late(self, now: Instant) -> bool:
        """It has missed several reports in a row: it is gone, or stands still."""
        return now - self.seen_at > 4 * self.report.every

    @property
    def is_dispatcher(self) -> bool:
        """It publishes what it claims, and runs nothing."""
        return UUID(self.id).version == DISPATCHER


def service_of(workers: Iterable[WorkerSeen], queues: Iterable[str], now: Instant) -> Service:
    """Who serves a queue, by its name and those of its partitions."""
    names = {name for queue in queues for name in (queue, whole_of(queue))}
    concerned = [each for each in workers if not names.isdisjoint(each.report.queues)]
    alive = [each for each in concerned if not each.is_late(now)]
    refusals = [
        f"{each.report.troubles[PUBLISHING]} (dispatcher {each.report.name})"
        for each in alive
        if each.is_dispatcher and PUBLISHING in each.report.troubles
    ]
    unbegun = [
        each.report.troubles[key] for each in alive for key in map(unbegun_in, names) if key in each.report.troubles
    ]
    return Service(
        is_served=bool(alive),
        is_forwarded=any(each.is_dispatcher for each in concerned),
        refusal=refusals[0] if refusals and len(refusals) == len(alive) else None,
        unbegun=unbegun[0] if unbegun else None,
    )


def key_scope(by: By) -> str:
    """A scope as text: `account`, `account,region`."""
    return ",".join(by)
