"""Going on with a change of the number of a queue's partitions, from wherever it stands: see `policy/partitions.py`.

Whoever changes a partition names the version that it has seen, together with partition 0, and changes nothing if that
is no longer in force. So any number of processes can go on with one change, and one that was stopped for an hour in
the middle of a step finds that the step is not its own any more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from fairlane.policy.partitions import (
    LEARNED_AFTER,
    Phase,
    in_phase,
    next_phase,
    others,
    parse_partition,
    partition_name,
    phase_of,
    widths,
)
from fairlane.policy.policy import Policy
from fairlane.scheduler.snapshot import GateRow
from fairlane.store import policies
from fairlane.store.audit import Note
from fairlane.store.policies import Advanced
from fairlane.store.protocol import Store
from fairlane.store.rows import Declared
from fairlane.store.stats import Moment

PARTITION = "partition"
"""What the audit calls it."""
MOVED_AT_ONCE = 1_000
"""Jobs that one transaction moves: claims of the partition that they leave wait for it."""


async def advance(store: Store, queue: str, note: Note, limit: int = MOVED_AT_ONCE) -> Advanced:
    """Go on with the change of a queue as far as may be now, moving about `limit` jobs out of each partition."""
    moved = 0
    while True:
        known = await _partitions(store, queue)
        if 0 not in known or (phase := phase_of(known[0].policy)) is Phase.RESTING:
            return Advanced(is_over=True, moved=moved)
        gates = await _gates_that_move(store, known) if phase is Phase.SETTLING else {}
        if not await _bring_along(store, known, gates, note):
            continue  # somebody else was faster
        if phase is Phase.MOVING:
            found = await _move(store, known, limit)
            moved += found.moved
            if found.waiting or found.running or found.until is not None:
                return msgspec.structs.replace(found, moved=moved)
        # If somebody else was faster, the next look says how far it has come.
        first = known[0]
        await divide(store, next_phase(first.policy, await store.now()), first.version, gates.get(queue, ()), note)


async def divide(
    store: Store, policy: Policy, version: int, gates: Sequence[GateRow] = (), note: Note | None = None
) -> bool:
    """Put the policy of a partition in force: see `policies.divide`. With version 0, make it known."""
    if version == 0:
        return await store.run(policies.insert(policy, note))
    return await store.run(policies.divide(policy.queue, policy, version, gates, note))


async def _partitions(store: Store, queue: str) -> dict[int, Declared]:
    """What is in force in each partition, all of one moment."""
    found = {}
    for name, declared in (await store.ask(Moment.policies)).items():
        of, index = parse_partition(name) or (name, 0)
        if of == queue:
            found[index] = declared
    return found


async def _bring_along(
    store: Store, known: Mapping[int, Declared], gates: Mapping[str, list[GateRow]], note: Note
) -> bool:
    """Let every other partition come as far as partition 0 says. False: what we know is not so any more."""
    first = known[0].policy
    for index in others(first, known):
        policy, found = in_phase(first, index), known.get(index)
        if found is None or found.policy.digest != policy.digest:
            version = 0 if found is None else found.version
            if not await divide(store, policy, version, gates.get(policy.queue, ()), note):
                return False
        if phase_of(first) is Phase.PREPARING and index >= widths(first)[0]:
            await _take_over_overrides(store, known[0], policy.queue, note)
    return True


async def _take_over_overrides(store: Store, first: Declared, queue: str, note: Note) -> None:
    """What operators have changed holds for keys that come to a new partition too."""
    found = await store.policy(queue)
    assert found is not None
    wanted, known = first.policy.overrides.all, found.policy.overrides.all
    gone = [each.id for each in known if each not in wanted]
    put = [each for each in wanted if each not in known]
    if gone or put:
        await store.change_overrides([queue], put, gone, note)


async def _move(store: Store, known: Mapping[int, Declared], limit: int) -> Advanced:
    first = known[0].policy
    assert first.partition is not None
    names = [partition_name(first.partition.of, index) for index in (0, *others(first, known))]
    found = [await store.run(policies.move_misrouted(name, limit)) for name in names]
    settled_at = (first.partition.since or 0) + LEARNED_AFTER
    return Advanced(
        moved=sum(each.moved for each in found),
        waiting=sum(each.waiting for each in found),
        running=sum(each.running for each in found),
        until=settled_at if await store.now() < settled_at else None,
    )


async def _gates_that_move(store: Store, known: Mapping[int, Declared]) -> dict[str, list[GateRow]]:
    """The state of the limits of keys that move, by the partition that they come to."""
    place = known[0].policy.partition
    assert place is not None
    coming: defaultdict[str, list[GateRow]] = defaultdict(list)
    # Keys of a change that was abandoned have spent nothing in the place that they were to go to.
    for index in () if place.is_abandoned else known:
        for home, gate in await store.run(policies.gates_that_move(partition_name(place.of, index), place.was or 1)):
            coming[home].append(gate)
    return coming
