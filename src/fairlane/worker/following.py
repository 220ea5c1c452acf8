"""Following the partitions of queues: a worker that serves a whole queue serves those that it is given later too, goes
on with a change of their number that whoever began it has left, and moves to where they belong what producers that knew
another number have left behind."""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable

from fairlane.clock import SECOND, Clock
from fairlane.policy.keys import gate_id
from fairlane.policy.partitions import MOVING, Partition, parse_partition, partition_name
from fairlane.policy.repartition import LEARNED_EVERY
from fairlane.store.auditing import UPKEEP, Note
from fairlane.store.protocol import Store
from fairlane.store.repartition import PARTITION, advance
from fairlane.waits import Outage, jittered, pause
from fairlane.worker.claiming import Claiming
from fairlane.worker.slots import Slots

__all__ = ["LookAgain", "follow_partitions", "place_of", "rehome"]

log = logging.getLogger("fairlane.worker")

SOON = SECOND
"""Until the next look while jobs move."""
AT_ONCE = 1_000

LookAgain = Callable[[], Awaitable[None]]


async def follow_partitions(
    store: Store, outage: Outage, clock: Clock, slots: Slots, claiming: Claiming, look_again: LookAgain | None
) -> None:
    """Look from time to time whether queues have grown, and whether jobs lie where they do not belong.

    `look_again` tells the handlers of this process where the follow-ups go that they declare.
    """
    wait = LEARNED_EVERY
    while True:
        await pause(clock, jittered(wait))
        wait = LEARNED_EVERY
        if look_again is not None:
            await outage.ride_out(look_again, "following")
        for whole in slots.wholes:
            place = await outage.ride_out(functools.partial(place_of, store, whole.share.name), "following")
            for name in () if place is None else place.names:
                if name not in slots.queues:
                    log.info("queue %s has a new partition; serving %s too", whole.share.name, name)
                    claiming.look_at([slots.add(whole, name)])
            moving = functools.partial(rehome, store, whole.share.name, place)
            if await outage.ride_out(moving, "moving jobs"):
                wait = SOON


async def place_of(store: Store, queue: str) -> Partition | None:
    found = await store.policy(queue)
    return None if found is None else found.policy.partition


async def rehome(store: Store, queue: str, place: Partition | None) -> bool:
    """Go on with a change of the number of partitions, and move a bounded number of jobs that lie in a partition and
    belong to another; say whether there is more to move."""
    if place is None or not place.is_changing:
        return await _rehome_strays(store, queue, place)
    advanced = await advance(store, queue, Note(actor=UPKEEP, action=PARTITION), AT_ONCE)
    if advanced.is_over:
        log.info("queue %s: the change of its partitions is over", queue)
    return advanced.moved > 0 and advanced.waiting > 0


async def _rehome_strays(store: Store, queue: str, place: Partition | None) -> bool:
    width = 1 if place is None else place.width
    named = [each for each in map(parse_partition, await store.queues()) if each is not None and each[0] == queue]
    if not named or (place is not None and not place.is_guarded):
        return False
    more = False
    for index in (0, *sorted(index for _, index in named)):
        name = partition_name(queue, index)
        # A claim parks such jobs at a gate of their own. In a partition that is no more, nobody claims.
        gate = gate_id(name, MOVING, ())
        if index >= width or gate in (await store.traces(name, [], [gate])).found:
            rehomed = await store.rehome(name, AT_ONCE)
            more = more or rehomed.waiting > 0
            if rehomed.moved:
                log.info("queue %s: %d jobs were in %s and belong elsewhere; moved", queue, rehomed.moved, name)
    return more
