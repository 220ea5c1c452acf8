"""Upkeep: every worker does a little of it, at its own times, so that it needs no leader and no process of its own."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

from fairlane.clock import SECOND, Clock, Instant
from fairlane.errors import StoreUnavailable
from fairlane.job import State
from fairlane.policy.division import LEARNED_EVERY
from fairlane.policy.keys import gate_id
from fairlane.policy.partitions import MOVING, Partition, parse_partition, partition_name, whole_of
from fairlane.scheduler.rebuild import Miscount
from fairlane.store import health, policies, records, upkeep
from fairlane.store.audit import UPKEEP, Note
from fairlane.store.protocol import Pruned, Reaped, Retention, Store
from fairlane.store.repartition import PARTITION, advance
from fairlane.store.stats_values import Tallied
from fairlane.waits import REJOINED_WITHIN, Outage, jittered, pause
from fairlane.worker.claims import Claiming, Slots
from fairlane.worker.settlements import RENEWALS
from fairlane.worker.supervision import Troubles

log = logging.getLogger("fairlane.worker")

AT_ONCE = 1_000
OLD_JOBS_AT_ONCE = 2_000
"""In a busy worker the turns of its event loop take longer than the removal; twice as many take little more."""
SHORTEST_REAP = SECOND // 10
BUSY, LONGEST_IDLE = 5 * SECOND, 60 * SECOND
PASSES_AT_MOST = 20
"""Of adding up, in one round."""
SOON = 2 * SECOND
"""Until the next look after one that found something: what finishes meanwhile piles up."""
RESTS = 4
"""A pass is followed by a rest of this part of the time that it took."""
BETWEEN_AUDITS = 60 * SECOND
"""Until gates are held against the running jobs again."""
BETWEEN_PASSES, BETWEEN_STRETCHES = SECOND // 100, SECOND // 5
"""The shortest rest while there is more to remove: jobs, and state, which is looked at under the claim lock."""


async def reap_leases(
    store: Store,
    outage: Outage,
    clock: Clock,
    lease: int,
    before: Callable[[], Awaitable[tuple[int, int]]],
    on_reaped: Callable[[Reaped], None],
) -> None:
    """End the claims of workers that are gone, once their leases are. `before` returns what to add to the monotonic
    clock to get queue time, and by how much that has grown since it was last asked."""
    while True:
        offset, growth = await before()
        if growth > lease // RENEWALS:
            # The store's clock was set forward, and leases ended early: workers that are alive renew them first.
            log.warning("the database's clock was set forward; expired leases are left for a while, to be renewed")
            await pause(clock, lease // RENEWALS + lease // 6)
            continue
        # Leases that ended while the database was away are not those of the dead: who lives renews them first.
        await outage.others_are_back()
        # Should the clock be set forward just now, this tells which leases have ended without that.
        ended_by = clock.monotonic() + offset + SECOND
        try:
            reaped = await outage.once(lambda ended_by=ended_by: _reap(store, ended_by), "reaping")  # type: ignore[misc]
        except StoreUnavailable:
            await asyncio.sleep(REJOINED_WITHIN)
            continue
        if reaped.settled:
            on_reaped(reaped)
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
        # Its worker may have died, or be alive and have stood still: nobody knows here.
        log.log(
            level,
            "job %s (%s): its lease ran out, its worker did not renew it; it is now %s",
            job,
            reaped.tasks[job],
            state,
            extra={"job": job},
        )
    return reaped


async def remove_old_jobs(store: Store, outage: Outage, clock: Clock, retention: Retention) -> None:
    """Remove finished jobs whose time has passed, faster than they finish."""
    await _sweep(
        clock, BETWEEN_PASSES, lambda: outage.ride_out(lambda: store.prune(retention, OLD_JOBS_AT_ONCE), "pruning")
    )


async def remove_idle_state(store: Store, outage: Outage, clock: Clock, queues: Collection[str]) -> None:
    """Forget lanes, flows and gates that nothing needs any more."""

    async def all_queues() -> Pruned:
        found = [
            await outage.ride_out(lambda name=name: store.collect(name, AT_ONCE), "collecting")  # type: ignore[misc]
            for name in list(queues)  # it may grow meanwhile
        ]
        removed = sum(each.lanes + each.flows + each.gates for each in found)
        return Pruned(removed, more=any(each.more for each in found))

    await _sweep(clock, BETWEEN_STRETCHES, all_queues)


async def audit_gates(
    store: Store,
    outage: Outage,
    clock: Clock,
    queues: Collection[str],
    on_recounted: Callable[[str, Sequence[Miscount]], None],
) -> None:
    """Hold gates against the jobs that run, and count those anew that are wrong: no slot is lost for good."""
    while True:
        await pause(clock, jittered(BETWEEN_AUDITS))
        for queue in list(queues):  # it may grow meanwhile
            more = True
            while more:
                counting = upkeep.count_gates(queue, AT_ONCE)
                counted = await outage.ride_out(lambda counting=counting: store.run(counting), "auditing")  # type: ignore[misc]
                if counted.found:
                    found = await outage.ride_out(lambda name=queue: _recount(store, name), "auditing")  # type: ignore[misc]
                    if found:
                        on_recounted(queue, found)
                more = counted.more
                if more:
                    await pause(clock, BETWEEN_STRETCHES)


async def _recount(store: Store, queue: str) -> list[Miscount]:
    found = await store.run(upkeep.recount(queue))
    for each in found:
        log.warning("queue %s: %s; it was counted anew", queue, each.words, extra={"queue": queue})
    return found


async def _audit(store: Store, queue: str) -> None:
    """One round of the same."""
    for _ in range(PASSES_AT_MOST):
        counted = await store.run(upkeep.count_gates(queue, AT_ONCE))
        if counted.found:
            await _recount(store, queue)
        if not counted.more:
            return


async def keep_up(store: Store, retention: Retention, queues: Sequence[str]) -> bool:
    """One bounded round of all upkeep, for those who run no worker; whether there is more to do at once."""
    reaped = await _reap(store)
    pruned = await store.prune(retention, AT_ONCE)
    known = await store.run(records.queues())
    partitions = [name for name in known if whole_of(name) in queues]
    collected = [await store.collect(name, AT_ONCE) for name in partitions]
    behind = [await _add_up(store, name) for name in partitions]
    for name in partitions:
        await _audit(store, name)
    strays = [await rehome(store, name, await place_of(store, name)) for name in queues if name in known]
    is_partial = [pruned.more, *(each.more for each in collected), *behind, *strays]
    return len(reaped.settled) >= AT_ONCE or any(is_partial)


async def _add_up(store: Store, queue: str) -> bool:
    """Add up what claims have told, pass by pass; whether there is more than that."""
    for _ in range(PASSES_AT_MOST):
        if not (await store.tally(queue)).more:
            return False
    return True


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
"""A pass is followed by a rest of so many times what it took: it never costs more than a twentieth of a core."""
LONGEST_REST = 60 * SECOND
"""A pass that rode out an outage took long, and cost nothing."""
LAST_WITHIN = 5.0
"""Seconds for adding up when the worker stops."""
CLAIMS_AT_ONCE, AT_ONCE_BEHIND = 500, 5_000
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

    limit, rest = (AT_ONCE_BEHIND, 0) if is_behind else (CLAIMS_AT_ONCE, EVERY // 2)

    async def once() -> Tallied:
        return await outage.ride_out(lambda: store.tally(queue, limit, rest), "adding up figures")

    started = clock.monotonic()
    tallied = await troubles.endure("tallying", once)
    took = clock.monotonic() - started
    await pause(clock, min(RESTS_AFTER_A_PASS * took, LONGEST_REST))
    return tallied is not None and tallied.more


FOLLOWS_SOON = SECOND
"""Until the next look while jobs move."""

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
                wait = FOLLOWS_SOON


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
            rehomed = await store.run(policies.rehome(name, AT_ONCE))
            more = more or rehomed.waiting > 0
            if rehomed.moved:
                log.info("queue %s: %d jobs were in %s and belong elsewhere; moved", queue, rehomed.moved, name)
    return more
