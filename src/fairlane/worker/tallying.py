"""Adding up what claims have told into stats by key and by minute. Every worker does some of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

from fairlane.clock import SECOND, Clock
from fairlane.errors import StoreUnavailable
from fairlane.store.protocol import Store
from fairlane.store.stats_values import Tallied
from fairlane.waits import Outage, jittered, pause
from fairlane.worker.troubles import Troubles

__all__ = ["EVERY", "RESTS", "conclude", "keep_figures"]

log = logging.getLogger("fairlane.worker")

EVERY = 5 * SECOND
RESTS = 20
"""A pass is followed by a rest of so many times what it took: it never costs more than a twentieth of a core."""
LONGEST_REST = 60 * SECOND
"""A pass that rode out an outage took long, and cost nothing."""
LAST_WITHIN = 5.0
"""Seconds for adding up when the worker stops."""
AT_ONCE, AT_ONCE_BEHIND = 500, 5_000
"""Tallies of one pass. The more it reads, the less it writes for each: whoever is behind catches up."""


async def keep_figures(store: Store, outage: Outage, clock: Clock, queues: Collection[str], troubles: Troubles) -> None:
    """Add up what happened in each queue, every few seconds; whichever worker comes first does it for all."""
    behind: set[str] = set()
    while True:
        await pause(clock, jittered(0 if behind else EVERY))
        for name in list(queues):  # it may grow meanwhile
            if await _pass(store, outage, clock, name, troubles, is_behind=name in behind):
                behind.add(name)
            else:
                behind.discard(name)


async def conclude(store: Store, queues: Sequence[str]) -> None:
    """The worker stops: what it did last is folded and added up, as far as there is time for it."""
    try:
        async with asyncio.timeout(LAST_WITHIN):
            for queue in queues:
                await store.conclude(queue)
    except (StoreUnavailable, TimeoutError) as error:
        log.warning(
            "the last stats were not added up (%s); whoever looks adds them up", str(error) or "it took too long"
        )


async def _pass(store: Store, outage: Outage, clock: Clock, queue: str, troubles: Troubles, *, is_behind: bool) -> bool:
    """Make one pass, and rest; say whether there is more to do at once."""

    limit, rest = (AT_ONCE_BEHIND, 0) if is_behind else (AT_ONCE, EVERY // 2)

    async def once() -> Tallied:
        return await outage.ride_out(lambda: store.tally(queue, limit, rest), "adding up figures")

    started = clock.monotonic()
    tallied = await troubles.endure("tallying", once)
    took = clock.monotonic() - started
    await pause(clock, min(RESTS * took, LONGEST_REST))
    return tallied is not None and tallied.more
