"""Changing the number of a queue's partitions while it works.

Keys whose partition changes stand still meanwhile; the others go on. The steps, each of which can be repeated:

1. Every partition learns both numbers, the new ones first and partition 0, which producers ask, last. From then on no
   partition starts a job of a key that moves: not where the key was, nor where it goes.
2. What waits moves to where it belongs, a bounded number of jobs at a time. What runs ends where it is.
3. Once nothing of these keys runs or waits where it was, the state of their limits moves too, and every partition
   learns that the change is over; partition 0 last. From then on the keys go on in their new place.

Whoever is stopped in between leaves keys standing still, and nothing wrong: the same command goes on from there.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from fairlane.errors import ConfigurationError
from fairlane.operations.asking import Intent, in_force, partitions_of
from fairlane.policy.by import By
from fairlane.policy.dividing import divided, logical, partitioned, sibling
from fairlane.policy.partitions import Partition, checked_width, parse_partition
from fairlane.policy.policy import Policy
from fairlane.scheduler.rebuild import refuse_to_strand
from fairlane.scheduler.snapshot import GateRow
from fairlane.scheduler.strays import stray_lanes
from fairlane.store.protocol import Store

__all__ = ["PARTITION", "PartitionPlan", "Repartitioned", "change_partitions", "plan_partitions"]

PARTITION = "partition"
MOVED_AT_ONCE = 5_000
"""Jobs that one transaction moves: claims of the partition that they leave wait for it."""

OnProgress = Callable[[int], None]
Rest = Callable[[], Awaitable[None]]


async def _moment() -> None:
    # Not by the store's clock: what is waited for takes place in the world.
    await asyncio.sleep(0.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPlan:
    """What a change of the number of partitions would come to."""

    queue: str
    before: int
    after: int
    by: By
    is_resumed: bool
    """The change has begun before, and goes on."""
    during: tuple[Policy, ...]
    """What partitions enforce while keys move, in the order in which they learn it."""
    final: tuple[Policy, ...]
    """And once they have, likewise."""
    waiting: int
    """Jobs that would move."""
    running: int
    """Jobs of keys that move: they end first."""

    @property
    def is_empty(self) -> bool:
        return self.before == self.after and not self.is_resumed


@dataclass(frozen=True, slots=True, kw_only=True)
class Repartitioned:
    """What a change came to, or would."""

    plan: PartitionPlan
    is_dry_run: bool
    moved: int


async def plan_partitions(
    store: Store, queue: str, to: int, by: By | None = None, *, accept_missing_keys: bool = False
) -> PartitionPlan:
    """See what a change comes to, or refuse what would break order or limits: nothing refuses it once it has begun."""
    return await _planned(store, queue, to, by, accept_missing_keys=accept_missing_keys, keeps=False)


async def _planned(
    store: Store, queue: str, to: int, by: By | None, *, accept_missing_keys: bool, keeps: bool
) -> PartitionPlan:
    checked_width(to)
    names = await partitions_of(store, queue)
    policies = {name: (await in_force(store, name)).policy for name in names}
    first = policies[queue]
    if first.partition is not None and first.partition.index:
        raise ConfigurationError(f"{queue!r} is a partition; give the queue: {first.partition.of!r}")
    begun = _begun(policies.values(), to)
    before = _width(first) if begun is None else begun.was or 1
    place = _place(first, to, before, by if begun is None else _as_begun(begun, by))
    during = replace(first, partition=place) if first.partition else partitioned(first, place)
    indexes = {*range(max(before, to)), *map(_index, names)}
    # New ones first, and partition 0 last: producers ask it, and whoever they send jobs to must know what holds.
    order = sorted(indexes, key=lambda index: (index == 0, index < before, index))
    final = sibling(replace(during, partition=msgspec.structs.replace(place, was=None)), 0)
    whole, own = logical(final)
    plain = divided(replace(whole, keys=first.keys), 1, place.by, own)[0] if to == 1 else final
    lanes = {name: await store.lanes(name, keeps=keeps) for name in names}
    strays = [stray for name in names for stray in stray_lanes(sibling(during, _index(name)), lanes[name])]
    # Jobs may come without the key once it has begun, from producers that do not know of it: then it goes on with them.
    if begun is None and before != to and not accept_missing_keys:
        refuse_to_strand(sibling(during, 0), [lane for name in names for lane in lanes[name]])
    return PartitionPlan(
        queue=queue,
        before=before,
        after=to,
        by=place.by,
        is_resumed=begun is not None,
        during=tuple(sibling(during, index) for index in order),
        final=tuple(plain if index == 0 else sibling(final, index) for index in order),
        waiting=sum(stray.was.ready for stray in strays),
        running=sum(stray.was.in_flight for stray in strays),
    )


def _index(name: str) -> int:
    place = parse_partition(name)
    return 0 if place is None else place[1]


def _width(policy: Policy) -> int:
    return 1 if policy.partition is None else policy.partition.width


def _begun(policies: Iterable[Policy], to: int) -> Partition | None:
    """A change that has begun and is not over, as one of the partitions knows it."""
    for place in (policy.partition for policy in policies):
        if place is not None and place.was is not None:
            if place.width != to:
                raise ConfigurationError(
                    f"queue {place.of!r} is on its way from {place.was} to {place.width} partitions; finish that "
                    f"first: `fairlane partition {place.of} --to {place.width}`"
                )
            return place
    return None


def _as_begun(begun: Partition, by: By | None) -> By:
    if by is not None and by != begun.by:
        raise ConfigurationError(
            f"queue {begun.of!r} is on its way to {begun.width} partitions by {', '.join(begun.by) or 'no key'}; "
            f"finish that first: `fairlane partition {begun.of} --to {begun.width}`"
        )
    return begun.by


def _place(first: Policy, to: int, before: int, by: By | None) -> Partition:
    place = first.partition
    if place is not None:
        if by is not None and by != place.by:
            raise ConfigurationError(
                f"queue {place.of!r} is partitioned by {', '.join(place.by) or 'no key'}; to change that, let it be "
                f"one queue in between: `fairlane partition {place.of} --to 1`"
            )
        return msgspec.structs.replace(place, width=to, was=before, is_guarded=True)
    if by is None and to > 1:
        raise ConfigurationError(
            f"queue {first.queue!r} is not partitioned yet; say by which key: "
            f"`fairlane partition {first.queue} --to {to} --by account`, or give the --app that declares it"
        )
    return Partition(of=first.queue, index=0, width=to, by=by or (), was=before, is_guarded=True)


async def change_partitions(
    store: Store,
    queue: str,
    to: int,
    intent: Intent,
    *,
    by: By | None = None,
    accept_missing_keys: bool = False,
    rest: Rest = _moment,
    on_progress: OnProgress | None = None,
) -> Repartitioned:
    """Change the number of a queue's partitions while it works. While running jobs end, it rests between two looks."""
    # In earnest, what was folded to count it need not be folded again to move it.
    plan = await _planned(store, queue, to, by, accept_missing_keys=accept_missing_keys, keeps=not intent.dry_run)
    if intent.dry_run or plan.is_empty:
        return Repartitioned(plan=plan, is_dry_run=intent.dry_run, moved=0)
    await _begin(store, plan, intent)
    moved = await _move(store, [policy.queue for policy in plan.during], rest, on_progress)
    await _finish(store, plan, intent)
    return Repartitioned(plan=plan, is_dry_run=False, moved=moved)


async def _begin(store: Store, plan: PartitionPlan, intent: Intent) -> None:
    overrides = (await in_force(store, plan.queue)).policy.overrides.all
    for policy in plan.during:
        if await _is_done(store, policy, plan.final):
            continue
        await store.divide(policy, (), intent.note(PARTITION))
        if policy.partition is not None and policy.partition.index >= plan.before:
            # What operators have changed holds for keys that come here too.
            known = (await in_force(store, policy.queue)).policy.overrides.all
            gone = [each.id for each in known if each not in overrides]
            put = [each for each in overrides if each not in known]
            if gone or put:
                await store.amend([policy.queue], put, gone, intent.note(PARTITION))


async def _is_done(store: Store, policy: Policy, final: Sequence[Policy]) -> bool:
    """Whether a partition has learned that the change is over: it goes on already."""
    found = await store.policy(policy.queue)
    done = next(each for each in final if each.queue == policy.queue)
    return found is not None and found.policy.digest == done.digest


async def _move(store: Store, names: Sequence[str], rest: Rest, on_progress: OnProgress | None) -> int:
    moved = 0
    while True:
        found = [await store.rehome(name, MOVED_AT_ONCE) for name in names]
        moved += sum(each.moved for each in found)
        if on_progress is not None:
            on_progress(moved)
        if not any(each.waiting or each.running for each in found):
            return moved
        if not any(each.moved for each in found):
            await store.reap()  # perhaps nobody else is there to end the claims of a worker that is gone
            await rest()


async def _finish(store: Store, plan: PartitionPlan, intent: Intent) -> None:
    coming: defaultdict[str, list[GateRow]] = defaultdict(list)
    for policy in plan.during:
        for home, gate in await store.gates_of_strays(policy.queue):
            coming[home].append(gate)
    for policy in plan.final:
        if not await _is_done(store, policy, plan.final):
            await store.divide(policy, coming[policy.queue], intent.note(PARTITION))
