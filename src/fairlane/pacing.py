"""Back-pressure: what producers are told of full backlogs, and waiting until there is room."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from uuid import UUID

from fairlane.clock import SECOND, Clock, Instant
from fairlane.errors import InvalidKey
from fairlane.job import NewJob
from fairlane.policy.backlog import FullBacklog
from fairlane.policy.keys import canonical_keys
from fairlane.policy.policy import Policy
from fairlane.scheduler.backlog import Joined, Verdicts, backlogs_of, joined_by, judge
from fairlane.store.protocol import Store

__all__ = ["Pacing"]

log = logging.getLogger("fairlane.app")

FIRST_LOOK, LAST_LOOK = SECOND // 20, SECOND
"""How long whoever waits for room waits between two looks: twice as long each time, up to a second."""
REMEMBERED = 10_000
"""Full backlogs that are remembered, so that each is logged once."""


class Pacing:
    """Asks how many jobs wait, for the queues that bound it."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._full: set[tuple[str, str, tuple[str | None, ...]]] = set()

    async def judge(self, policies: Mapping[str, Policy], jobs: Sequence[NewJob], tx: Any = None) -> Verdicts:
        """What full backlogs mean for these jobs. Queues without backlogs are not asked about."""
        told: dict[UUID, FullBacklog] = {}
        refused: dict[UUID, FullBacklog] = {}
        for policy in _bounded(policies, jobs):
            joined = joined_by(policy, jobs)
            if joined:
                ready = await self._store.count_ready(policy, _gates(joined.values()), tx)
                verdicts = judge(policy, joined, ready)
                told.update(verdicts.told)
                refused.update(verdicts.refused)
                self._tell(policy, joined.values(), verdicts)
        return Verdicts(told, refused)

    async def wait_for_jobs(self, policies: Mapping[str, Policy], jobs: Sequence[NewJob]) -> None:
        """Return once no backlog that these jobs join is full."""
        for policy in _bounded(policies, jobs):
            joined: Joined = {}
            for each in joined_by(policy, jobs).values():
                joined.update(each)
            await self._wait(policy, joined, None)

    async def wait_for_keys(self, policy: Policy, keys: Mapping[str, object], until: Instant | None) -> bool:
        """Return True once no backlog of these keys is full, False once `until` has come."""
        canonical = canonical_keys(keys)
        for name in sorted({name for bound in policy.backlogs for name in bound.limit.by}):
            if name not in keys:
                raise InvalidKey(f"queue {policy.queue!r} has a backlog by {name!r}; say whose: pace({name}=…)")
        priority = int(canonical.get("priority") or 0)
        return await self._wait(policy, backlogs_of(policy, priority, canonical), until)

    async def _wait(self, policy: Policy, joined: Joined, until: Instant | None) -> bool:
        pause = FIRST_LOOK
        while joined:
            ready = await self._store.count_ready(policy, list(joined))
            if all(ready[gate] < limit.max for gate, (_, limit, _) in joined.items()):
                return True
            now = self._clock.now()
            if until is not None and now >= until:
                return False
            await self._clock.sleep_until(now + pause if until is None else min(until, now + pause))
            pause = min(2 * pause, LAST_LOOK)
        return True

    def _tell(self, policy: Policy, joined: Iterable[Joined], verdicts: Verdicts) -> None:
        """Log a backlog when it turns out to be full, not every job that meets it."""
        asked = {(policy.queue, name, values) for each in joined for name, _, values in each.values()}
        met = (*verdicts.told.values(), *verdicts.refused.values())
        full = {(each.queue, each.limit, tuple(each.key.values())): each for each in met}
        for which, each in full.items():
            if which not in self._full:
                log.warning("%s; its producers should slow down", each.describe())
        known = self._full - asked if len(self._full) < REMEMBERED else set()
        self._full = known | full.keys()


def _bounded(policies: Mapping[str, Policy], jobs: Iterable[NewJob]) -> list[Policy]:
    named = dict.fromkeys(job.queue for job in jobs)
    return [policy for name in named if (policy := policies.get(name)) is not None and policy.backlogs]


def _gates(joined: Iterable[Joined]) -> list[bytes]:
    return list(dict.fromkeys(gate for each in joined for gate in each))
