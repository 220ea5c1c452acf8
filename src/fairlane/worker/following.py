"""Following the partitions of queues: a worker that serves a whole queue serves those that it is given later too, and
moves to where they belong what producers that knew another width have left behind."""

from __future__ import annotations

import logging

from fairlane.clock import SECOND, Clock
from fairlane.policy.keys import gate_id
from fairlane.policy.moving import MOVING
from fairlane.policy.partitions import parse_partition, partition_name
from fairlane.store.protocol import Store
from fairlane.worker.claiming import Claiming
from fairlane.worker.slots import Slots
from fairlane.worker.timing import Outage, jittered, pause

__all__ = ["follow_partitions", "rehome_strays"]

log = logging.getLogger("fairlane.worker")

EVERY = 10 * SECOND
AT_ONCE = 1_000


async def follow_partitions(store: Store, outage: Outage, clock: Clock, slots: Slots, claiming: Claiming) -> None:
    """Look from time to time whether queues have grown, and whether jobs lie where they do not belong."""
    while True:
        await pause(clock, jittered(EVERY))
        for whole in slots.wholes:
            names = await outage.ride_out(lambda of=whole.share.name: _partitions(store, of), "following")  # type: ignore[misc]
            for name in names:
                if name not in slots.queues:
                    log.info("queue %s has a new partition; serving %s too", whole.share.name, name)
                    claiming.look_at([slots.add(whole, name)])
            await outage.ride_out(lambda of=whole.share.name: rehome_strays(store, of), "moving jobs")  # type: ignore[misc]


async def _partitions(store: Store, queue: str) -> tuple[str, ...]:
    found = await store.policy(queue)
    return () if found is None or found.policy.partition is None else found.policy.partition.names


async def rehome_strays(store: Store, queue: str) -> bool:
    """Move a bounded number of jobs that lie in a partition and belong to another; say whether there are more."""
    found = await store.policy(queue)
    if found is None:
        return False
    place = found.policy.partition
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
