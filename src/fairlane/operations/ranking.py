"""Keys of one queue or of the busiest ones, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from fairlane.clock import as_datetime
from fairlane.operations.asking import in_force
from fairlane.operations.seeing import queues_at
from fairlane.operations.seeing_keys import page_at
from fairlane.operations.views import KeyView
from fairlane.policy.partitions import whole_of
from fairlane.store.protocol import Store
from fairlane.store.stats import Looking, Moment
from fairlane.store.stats_values import KeySort

__all__ = ["Ranking", "rank_keys"]

MOST_QUEUES = 8
"""Queues that are looked at together, the busiest of all."""
PLACES: dict[str, Callable[[KeyView], Any]] = {
    "waiting": lambda view: -view.waiting,
    "running": lambda view: -view.running,
    "ended": lambda view: -view.ended,
    "started": lambda view: 0.0 if view.last_started_at is None else -view.last_started_at.timestamp(),
    "name": lambda view: [value or "" for value in view.keys.values()],
}
assert set(PLACES) == {str(each) for each in KeySort}


class Ranking(msgspec.Struct, frozen=True, kw_only=True):
    """The first keys in some order."""

    now: datetime
    queues: list[str]
    """Those that were looked at."""
    left_out: int
    """How many others there are, which have less to do."""
    sort: str
    keys: list[KeyView]
    unserved: dict[str, str] = {}
    """Of these queues, those whose waiting jobs nobody starts, with why, in words."""


async def rank_keys(
    store: Store,
    queue: str | None = None,
    by: str | Sequence[str] | None = None,
    *,
    sort: str = "waiting",
    limit: int = 50,
) -> Ranking:
    """The first keys of a queue; of none in particular, those of the busiest, each by what its turns are taken by."""
    if queue is not None:
        await in_force(store, whole_of(queue))
    return await store.ask(lambda moment: _ranked(moment, queue, by, sort, limit))


def _ranked(
    moment: Moment, queue: str | None, by: str | Sequence[str] | None, sort: str, limit: int
) -> Looking[Ranking]:
    if queue is None:
        views = sorted((yield from queues_at(moment)), key=lambda view: (-view.ready - view.running, view.queue))
        names, left_out = [view.queue for view in views[:MOST_QUEUES]], max(0, len(views) - MOST_QUEUES)
    else:
        names, left_out = [queue], 0
    keys: list[KeyView] = []
    unserved: dict[str, str] = {}
    for name in names:
        page = yield from page_at(moment, name, by if queue else None, sort=sort, limit=limit)
        keys += page.keys
        unserved |= {} if page.unserved is None else {name: page.unserved}
    if len(names) > 1:
        keys.sort(key=PLACES[sort])
    now = as_datetime(moment.now)
    return Ranking(
        now=now,
        queues=names,
        left_out=left_out,
        sort=sort,
        keys=keys[:limit],
        unserved=unserved,
    )
