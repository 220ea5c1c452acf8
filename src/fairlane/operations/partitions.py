"""Changing the number of a queue's partitions while it works: beginning it, going on with it, and giving it up.

How a change goes on is in `policy/partitions.py`. Whoever is stopped in between leaves keys standing still, and
nothing wrong: the same call goes on from there, and so does any worker of the queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from fairlane.clock import SECOND
from fairlane.errors import ConfigurationError
from fairlane.operations.requests import in_force, partitions_of
from fairlane.operations.section import ChangeOptions, OnProgress, Section
from fairlane.parameters import checked_methods
from fairlane.policy.keys import By
from fairlane.policy.partitions import (
    Phase,
    abandoned,
    begun,
    checked_width,
    next_phase,
    parse_partition,
    phase_of,
    sibling,
    widths,
)
from fairlane.policy.policy import Policy
from fairlane.scheduler.rebuild import misrouted_lanes, refuse_to_strand
from fairlane.store import policies, repartition
from fairlane.store.audit import Note
from fairlane.store.protocol import Store
from fairlane.store.repartition import PARTITION, advance
from fairlane.store.rows import Declared

MOVED_AT_ONCE = 5_000
"""Jobs that one transaction moves: claims of the partition that they leave wait for it."""

A_MOMENT = SECOND // 5
"""Between two looks while jobs end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionPlan:
    """What a change of the number of partitions would come to."""

    queue: str
    before: int
    after: int
    by: By
    is_resumed: bool = False
    """The change has begun before, and goes on."""
    gives_up: int | None = None
    """The number that a change is on its way to which has begun before and is abandoned."""
    waiting: int = 0
    """Jobs that would move."""
    running: int = 0
    """Jobs of keys that move: they end first."""

    @property
    def is_empty(self) -> bool:
        return self.before == self.after and not self.is_resumed and self.gives_up is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Repartitioned:
    """What a change came to, or would."""

    plan: PartitionPlan
    is_dry_run: bool
    moved: int


@checked_methods
class Partitions(Section):
    """`app.operations.partitions`: into how many parts a queue is divided."""

    async def change(
        self,
        queue: str,
        to: int,
        *,
        by: Sequence[str] | None = None,
        accept_missing_keys: bool = False,
        abandon: bool = False,
        on_progress: OnProgress | None = None,
        **options: Unpack[ChangeOptions],
    ) -> Repartitioned:
        """Change the number of a queue's partitions while it works; by these keys, if it has had only one, else by
        those that this app declares. With `abandon`, a change to another number that is under way is given up first.

        Not one transaction but many. Broken off, it leaves keys standing still that move; called again, it goes on,
        and so does any worker of the queue. What would break order or limits is refused, before anything has begun.
        """
        store, intent = await self._store(), self._intent(**options)
        declared = self._source.declared_policies.get(queue)
        place = None if declared is None else declared.partition
        keys = None if by is None else tuple(by)
        if by is None and place is not None and place.width == to:
            keys = place.by
        # In earnest, what was folded to count it need not be folded again to move it.
        plan, found = await _planned(store, queue, to, keys, accept_missing_keys, abandon, keeps=not intent.dry_run)
        if intent.dry_run or plan.is_empty:
            return Repartitioned(plan=plan, is_dry_run=intent.dry_run, moved=0)
        note = intent.note(PARTITION)
        moved = 0
        if plan.gives_up is not None:
            place = found.policy.partition
            is_abandoned = place is not None and place.is_abandoned
            if phase_of(found.policy) in (Phase.PREPARING, Phase.MOVING) and not is_abandoned:
                await repartition.divide(store, abandoned(found.policy, await store.now()), found.version, (), note)
            # Whoever was faster has ended it, or brought it so far that it can only go on: then it goes on.
            moved += await self._through(store, queue, note, on_progress, moved)
            found = await in_force(store, queue)
        if not plan.is_resumed and _width(found.policy) != to:
            await repartition.divide(store, begun(found.policy, to, plan.by), found.version, (), note)
            found = await in_force(store, queue)
            if to != (_width(found.policy) if phase_of(found.policy) is Phase.RESTING else widths(found.policy)[1]):
                raise ConfigurationError(
                    f"queue {queue!r} was changed by somebody else meanwhile; look what has become of it, and try again"
                )
        moved += await self._through(store, queue, note, on_progress, moved)
        return Repartitioned(plan=plan, is_dry_run=False, moved=moved)

    async def _through(self, store: Store, queue: str, note: Note, on_progress: OnProgress | None, already: int) -> int:
        """Go on with a change until it is over; how many jobs were moved."""
        clock, moved = self._source.clock, 0
        while True:
            advanced = await advance(store, queue, note, MOVED_AT_ONCE)
            moved += advanced.moved
            if on_progress is not None:
                on_progress(already + moved)
            if advanced.is_over:
                return moved
            if not advanced.moved or not advanced.waiting:
                await store.reap()  # perhaps nobody else is there to end the claims of a worker that is gone
                await clock.sleep_until(clock.now() + A_MOMENT)


async def _planned(
    store: Store, queue: str, to: int, by: By | None, accept_missing_keys: bool, abandon: bool, *, keeps: bool
) -> tuple[PartitionPlan, Declared]:
    """The plan, and partition 0 as it was seen."""
    checked_width(to)
    found = await in_force(store, queue)
    first, place = found.policy, found.policy.partition
    if place is not None and place.index:
        raise ConfigurationError(f"{queue!r} is a partition; give the queue: {place.of!r}")
    is_begun = phase_of(first) is not Phase.RESTING
    is_resumed = is_begun and widths(first)[1] == to and not (abandon and widths(first)[0] != to)
    if is_begun and not is_resumed and not abandon:
        raise ConfigurationError(_under_way(first))
    before = widths(first)[0] if is_begun else _width(first)
    keys = _keys(first, to, by)
    if not is_begun and before == to:
        return PartitionPlan(queue=queue, before=before, after=to, by=keys), found
    moving = first if is_resumed else _moving(first, to, keys)
    names = await partitions_of(store, queue)
    lanes = {name: await store.run(policies.lanes(name, keeps=keeps)) for name in names}
    if not is_begun and before != to and not accept_missing_keys:
        refuse_to_strand(moving, [lane for name in names for lane in lanes[name]])
    misrouted = [
        lane
        for name, found_there in lanes.items()
        for lane in misrouted_lanes(sibling(moving, (parse_partition(name) or (name, 0))[1]), found_there)
    ]
    plan = PartitionPlan(
        queue=queue,
        before=before,
        after=to,
        by=keys,
        is_resumed=is_resumed,
        gives_up=widths(first)[1] if is_begun and not is_resumed else None,
        waiting=sum(lane.was.ready for lane in misrouted),
        running=sum(lane.was.in_flight for lane in misrouted),
    )
    return plan, found


def _moving(first: Policy, to: int, by: By) -> Policy:
    """Partition 0 while keys move, if such a change began now."""
    if phase_of(first) is not Phase.RESTING:
        going_back = next_phase(abandoned(first, 0), 0)
        first = next_phase(going_back, 0)
    return next_phase(begun(first, to, by), 0)


def _width(policy: Policy) -> int:
    return 1 if policy.partition is None else policy.partition.width


def _under_way(first: Policy) -> str:
    place, (before, to), command = first.partition, widths(first), f"fairlane partition {first.queue} --to"
    is_abandoned = place is not None and place.is_abandoned
    words = (
        f"queue {first.queue!r} is on its way {'back ' if is_abandoned else ''}from {before} to {to} partitions; "
        f"workers go on with that by themselves. Let it end first: `{command} {to}`"
    )
    return words if is_abandoned else f"{words}; or give it up: `{command} {before} --abandon`"


def _keys(first: Policy, to: int, by: By | None) -> By:
    place = first.partition
    if place is not None and (place.width > 1 or place.is_changing):
        if by is not None and by != place.by:
            raise ConfigurationError(
                f"queue {place.of!r} is partitioned by {', '.join(place.by) or 'no key'}; to change that, let it be "
                f"one queue in between: `fairlane partition {place.of} --to 1`"
            )
        return place.by
    if by is None and to > 1:
        raise ConfigurationError(
            f"queue {first.queue!r} is not partitioned yet; say by which key: "
            f"`fairlane partition {first.queue} --to {to} --by account`, or give the --app that declares it"
        )
    return by or ()
