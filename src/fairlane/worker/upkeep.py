"""Upkeep: every worker does a little of it, at its own times, so that it needs no leader and no process of its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial

from fairlane.clock import SECOND, Clock, Instant, microseconds
from fairlane.errors import StoreUnavailable
from fairlane.job import State
from fairlane.policy.keys import gate_id
from fairlane.policy.partitions import LEARNED_EVERY, MOVING, Partition, parse_partition, partition_name, whole_of
from fairlane.scheduler.rebuild import Miscount
from fairlane.store import health, policies, records, upkeep
from fairlane.store.audit import UPKEEP, Note
from fairlane.store.protocol import Pruned, Reaped, Retention, Store
from fairlane.store.repartition import PARTITION, advance
from fairlane.waits import REJOINED_WITHIN, Outage, jittered, pause
from fairlane.worker.leases import RENEWALS
from fairlane.worker.runs import log_job
from fairlane.worker.runtime import Runtime, Warnings

log = logging.getLogger("fairlane.worker")

AT_ONCE = 1_000
OLD_JOBS_AT_ONCE = 2_000
"""In a busy worker, waiting for the event loop takes longer than the removal; twice as many take little more."""
SHORTEST_REAP = SECOND // 10
BUSY, LONGEST_IDLE = 5 * SECOND, 60 * SECOND
PASSES_AT_MOST = 20
"""Passes over one queue in one round, at most."""
SOON = 2 * SECOND
"""The wait after a pass that found something, so that finished jobs pile up."""
RESTS = 4
"""The rest after a pass is the time that it took, divided by this."""
BETWEEN_AUDITS = 60 * SECOND
"""The wait between two comparisons of gates with the running jobs."""
BETWEEN_PASSES, BETWEEN_STRETCHES = SECOND // 100, SECOND // 5
"""The shortest rest while there is more to remove: for jobs, and for state, which needs the claim lock."""


async def reap_leases(runtime: Runtime, before: Callable[[], Awaitable[int]]) -> None:
    """End claims whose leases have ended: their workers are gone. `before` returns by how much queue time has gained on
    our clock since it was last called."""
    clock, outage, lease = runtime.clock, runtime.outage, microseconds(runtime.options.lease)
    while True:
        if await before() > lease // RENEWALS:
            # The store's clock was set forward, and leases ended early: workers that are alive renew them first.
            log.warning("the database's clock was set forward; expired leases are left for a while, to be renewed")
            await pause(clock, lease // RENEWALS + lease // 6)
            continue
        # Leases that ended while the database was away may belong to live workers, which renew them first.
        await outage.others_are_back()
        # Leases that end by then have ended even without a step of the clock that happens just now.
        offset = runtime.time.offset
        ended_by = clock.monotonic() + offset + SECOND
        try:
            reaped = await outage.once(partial(_reap, runtime.store, ended_by), "reaping")
        except StoreUnavailable:
            await asyncio.sleep(REJOINED_WITHIN)
            continue
        if reaped.settled:
            runtime.slots.look_everywhere()
            runtime.watching.reaped(reaped.settled)
        # A lease taken from now on ends no sooner than a whole lease from now.
        wait = lease
        if reaped.next_due is not None:
            wait = min(wait, reaped.next_due - offset - clock.monotonic())
            if wait <= 0 and reaped.next_due > ended_by:
                continue  # it has ended meanwhile
        if len(reaped.settled) < AT_ONCE:
            await pause(clock, max(wait, SHORTEST_REAP))


async def _reap(store: Store, ended_by: Instant | None = None) -> Reaped:
    reaped = await store.reap(AT_ONCE, ended_by=ended_by)
    for settlement in reaped.settled:
        job, state = settlement.job, settlement.to
        level = logging.ERROR if state is State.DEAD else logging.WARNING
        # Its worker may have died, or have been suspended: that is not known here.
        words = " (%s): its lease ran out, its worker did not renew it; it is now %s"
        log_job(log, level, job, words, reaped.tasks[job], state)
    return reaped


async def remove_old_jobs(store: Store, outage: Outage, clock: Clock, retention: Retention) -> None:
    """Remove finished jobs after their retention, faster than jobs finish."""
    await _sweep(
        clock, BETWEEN_PASSES, lambda: outage.ride_out(lambda: store.prune(retention, OLD_JOBS_AT_ONCE), "pruning")
    )


async def remove_idle_state(runtime: Runtime) -> None:
    """Forget lanes, flows and gates that nothing needs any more."""

    async def all_queues() -> Pruned:
        removed, more = 0, False
        for name in list(runtime.slots.queues):  # it may grow meanwhile
            each = await runtime.outage.ride_out(partial(runtime.store.collect, name, AT_ONCE), "collecting")
            removed, more = removed + each.lanes + each.flows + each.gates, more or each.more
        return Pruned(removed, more=more)

    await _sweep(runtime.clock, BETWEEN_STRETCHES, all_queues)


async def audit_gates(runtime: Runtime) -> None:
    """Compare gates with the running jobs and correct those that are wrong, so that no slot is lost for good."""
    store, ride_out = runtime.store, runtime.outage.ride_out
    while True:
        await pause(runtime.clock, jittered(BETWEEN_AUDITS))
        for queue in list(runtime.slots.queues):  # it may grow meanwhile
            more = True
            while more:
                counting = partial(store.run, upkeep.count_gates(queue, AT_ONCE))
                counted = await ride_out(counting, "auditing")
                if counted.found and (found := await ride_out(partial(_recount, store, queue), "auditing")):
                    runtime.slots.look_everywhere()
                    runtime.watching.recounted(queue, len(found))
                more = counted.more
                if more:
                    await pause(runtime.clock, BETWEEN_STRETCHES)


async def _recount(store: Store, queue: str) -> list[Miscount]:
    found = await store.run(upkeep.recount(queue))
    for each in found:
        log.warning("queue %s: %s; it was counted anew", queue, each.words, extra={"queue": queue})
    return found


async def keep_up(store: Store, retention: Retention, queues: Sequence[str]) -> bool:
    """One bounded round of all upkeep, for programs without a worker. Returns whether there is more to do at once."""
    reaped = await _reap(store)
    pruned = await store.prune(retention, AT_ONCE)
    known = await store.run(records.queues())
    more = len(reaped.settled) >= AT_ONCE or pruned.more
    for name in [name for name in known if whole_of(name) in queues]:
        more = (await store.collect(name, AT_ONCE)).more or more
        for _ in range(PASSES_AT_MOST):
            if not (await store.add_up(name)).more:
                break
        else:
            more = True
        for _ in range(PASSES_AT_MOST):
            counted = await store.run(upkeep.count_gates(name, AT_ONCE))
            if counted.found:
                await _recount(store, name)
            if not counted.more:
                break
    for name in queues:
        if name in known:
            more = await move_misrouted(store, name, await place_of(store, name)) or more
    return more


async def _sweep(clock: Clock, rest: int, once: Callable[[], Awaitable[Pruned]]) -> None:
    wait = BUSY
    while True:
        await pause(clock, jittered(wait))
        started = clock.monotonic()
        removed = await once()
        if removed.more:
            # A part of the time it took: the slower the database, the more of it is left to claims. (An outage takes
            # longer.) Resting for as long as a pass takes, 6,650 jobs a second were removed while 10,000 finished.
            wait = min(max((clock.monotonic() - started) // RESTS, rest), BUSY)
        elif removed.jobs:
            wait = SOON
        else:
            wait = min(max(wait * 2, SOON), LONGEST_IDLE)


EVERY = 5 * SECOND
RESTS_AFTER_A_PASS = 20
"""The rest after a pass is the time that it took, times this: adding up never costs more than a twentieth of a core."""
LONGEST_REST = 60 * SECOND
"""A pass that waited for the database took long, but cost nothing."""
LAST_WITHIN = 5.0
"""Seconds to add up stats when the worker stops."""
CLAIMS_AT_ONCE, AT_ONCE_BEHIND = 500, 5_000
"""Journal rows of one pass. The more it reads, the less it writes for each, so a worker that is behind catches up."""


async def keep_stats(store: Store, outage: Outage, clock: Clock, queues: Collection[str], warnings: Warnings) -> None:
    """Add up the stats of each queue every few seconds; the first worker to do so does it for all."""
    behind: set[str] = set()
    while True:
        await pause(clock, jittered(0 if behind else EVERY))
        for name in list(queues):  # it may grow meanwhile
            limit, rest = (AT_ONCE_BEHIND, 0) if name in behind else (CLAIMS_AT_ONCE, EVERY // 2)
            stats = partial(outage.ride_out, partial(store.add_up, name, limit, rest), "adding up figures")
            started = clock.monotonic()
            counted = await warnings.endure("adding up", stats)
            await pause(clock, min(RESTS_AFTER_A_PASS * (clock.monotonic() - started), LONGEST_REST))
            if counted is not None and counted.more:
                behind.add(name)
            else:
                behind.discard(name)


async def conclude(store: Store, queues: Sequence[str]) -> None:
    """Fold and add up what a stopping worker did last, as far as there is time for it."""
    try:
        async with asyncio.timeout(LAST_WITHIN):
            for queue in queues:
                await store.conclude(queue)
    except (StoreUnavailable, TimeoutError) as error:
        log.warning(
            "the last stats were not added up (%s); whoever looks adds them up", str(error) or "it took too long"
        )


FOLLOWS_SOON = SECOND
"""The wait between two looks while jobs move."""


async def follow_partitions(runtime: Runtime, look_again: Callable[[], Awaitable[None]] | None) -> None:
    """Check from time to time whether queues have more partitions, and whether jobs lie in the wrong one."""
    store, slots, ride_out = runtime.store, runtime.slots, runtime.outage.ride_out
    wait = LEARNED_EVERY
    while True:
        await pause(runtime.clock, jittered(wait))
        wait = LEARNED_EVERY
        if look_again is not None:
            await ride_out(look_again, "partitions")
        for whole in slots.wholes:
            queue = whole.share.name
            place = await ride_out(partial(place_of, store, queue), "partitions")
            for name in () if place is None else place.names:
                if name not in slots.queues:
                    log.info("queue %s has a new partition; serving %s too", queue, name)
                    slots.look_at([slots.add(whole, name)])
            if await ride_out(partial(move_misrouted, store, queue, place), "moving jobs"):
                wait = FOLLOWS_SOON


async def place_of(store: Store, queue: str) -> Partition | None:
    found = await store.policy(queue)
    return None if found is None else found.policy.partition


async def move_misrouted(store: Store, queue: str, place: Partition | None) -> bool:
    """Continue a change of the number of partitions, and move a bounded number of jobs that lie in the wrong partition.
    Returns whether there is more to move."""
    if place is None or not place.is_changing:
        return await _move_misrouted(store, queue, place)
    advanced = await advance(store, queue, Note(actor=UPKEEP, action=PARTITION), AT_ONCE)
    if advanced.is_over:
        log.info("queue %s: the change of its partitions is over", queue)
    return advanced.moved > 0 and advanced.waiting > 0


async def _move_misrouted(store: Store, queue: str, place: Partition | None) -> bool:
    width = 1 if place is None else place.width
    named = [
        each
        for each in map(parse_partition, await store.run(records.queues()))
        if each is not None and each[0] == queue
    ]
    if not named or (place is not None and not place.is_guarded):
        return False
    more = False
    for index in (0, *sorted(index for _, index in named)):
        name = partition_name(queue, index)
        # A claim parks such jobs at a gate of their own. In a partition that is no more, nobody claims.
        gate = gate_id(name, MOVING, ())
        if index >= width or gate in (await store.run(health.traces(name, [], [gate]))).found:
            moved = await store.run(policies.move_misrouted(name, AT_ONCE))
            more = more or moved.waiting > 0
            if moved.moved:
                log.info("queue %s: %d jobs were in %s and belong elsewhere; moved", queue, moved.moved, name)
    return more
