"""A queue of an app: its policy, and claiming from it by hand, for programs that bring their own runtime."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from fairlane.clock import duration_of
from fairlane.errors import ConfigurationError, UnknownQueue
from fairlane.manual_claims import ClaimSource, Ear, HeldClaim, HeldLease, as_lease, renew_together, settle_together
from fairlane.operations import Operations
from fairlane.parameters import check_value, checked, known_options
from fairlane.policy.partitions import parse_partition, partition_for, partition_name, whole_of
from fairlane.policy.policy import Policy
from fairlane.scheduler.explain import Explanation
from fairlane.scheduler.settlement import Released, settle
from fairlane.store.protocol import Claimed, Store, WorkerIdentity
from fairlane.task import Duration
from fairlane.waits import ANSWER_WITHIN
from fairlane.worker.claims import Turns

MOST_CLAIMED = 100_000
"""They are in memory together, and in one transaction."""
ASKED_AT_MOST = 100
"""Claims that bring nothing and promise more, until the answer is that there is nothing."""


@dataclass(frozen=True, slots=True)
class Hand:
    """What claims by hand in one process: one name and one ear for all queues of an app."""

    store: Store
    identity: WorkerIdentity
    ear: Ear


class QueueSource(ClaimSource, Protocol):
    """What a queue asks of its app."""

    async def hand(self, policies: Sequence[Policy]) -> Hand: ...

    def in_force(self, queue: str) -> Policy | None: ...

    @property
    def operations(self) -> Operations: ...

    async def wait_for_room(
        self, policies: Sequence[Policy], keys: Mapping[str, object], timeout: int | None
    ) -> bool: ...


class Queue:
    """A queue as this program declares it."""

    __slots__ = ("_source", "_turns", "partitions", "policy")

    def __init__(self, policy: Policy, partitions: tuple[Policy, ...], source: QueueSource) -> None:
        self.policy = policy
        """As it is declared, for the whole queue."""
        self.partitions = partitions
        """What each partition enforces, as it is declared; a plain queue has one."""
        self._source = source
        self._turns = Turns(())

    def __repr__(self) -> str:
        return f"<queue {self.name!r}>"

    @property
    def name(self) -> str:
        return self.policy.queue

    @property
    def _in_force(self) -> Policy:
        """What this app has last seen in the database; as long as it is not open, what is declared."""
        return self._source.in_force(self.name) or self.partitions[0]

    def partition_for(self, key: object) -> int:
        """The partition, from 0 on, that a value of `partition_by` belongs to; a tuple where it names several keys.

        In an app that is open, by the number of partitions that the database has; else by the one declared.
        """
        place = self._in_force.partition
        count = len(key) if isinstance(key, tuple) else 1
        if place is not None and place.by and count != len(place.by):
            raise ConfigurationError(
                f"queue {self.name!r} is partitioned by {', '.join(place.by)}; give partition_for a value for each of "
                f"these keys, not {key!r}"
            )
        return partition_for(key, 1 if place is None else place.width)

    @checked(unchecked=["lease"])
    async def claim(self, n: int = 1, *, lease: Duration = "30s", worker: str | None = None) -> list[HeldClaim]:
        """Hold up to `n` jobs for the time of one lease, in the order in which they should start.

        No two callers ever get the same job, and no limit is ever exceeded. An empty list: nothing may start now.
        """
        if not 1 <= n <= MOST_CLAIMED:
            raise ConfigurationError(f"claim: n={n}: claim at least 1 job, and at most {MOST_CLAIMED:,} at once")
        duration = as_lease(lease)
        hand = await self._source.hand(self.partitions)
        identity = hand.identity if worker is None else WorkerIdentity(hand.identity.id, worker)
        held: list[HeldClaim] = []
        served = partition_names(self._in_force)
        for name in served:
            self._turns.add(name)
        # Jobs of a partition that is no more do not start there.
        for queue in [name for name in self._turns.in_order() if name in served]:
            if len(held) < n:
                held += await self._claim(hand, queue, n - len(held), identity, duration)
        return held

    async def _claim(
        self, hand: Hand, queue: str, n: int, identity: WorkerIdentity, duration: timedelta
    ) -> list[HeldClaim]:
        async def once() -> Claimed:
            return await hand.store.claim(queue, lambda: n, worker=identity, lease=duration)

        try:
            claimed = await _unbroken(hand.store, once())
            asked = 1
            while claimed.more and not claimed.claims and asked < ASKED_AT_MOST:
                claimed = await _unbroken(hand.store, once())
                asked += 1
        finally:
            hand.ear.claimed(queue)
        self._turns.note(queue, claimed.vtime, is_idle=len(claimed.claims) < n)
        held = HeldLease(claimed.lease, duration)
        return [HeldClaim(each, held, self._source) for each in claimed.claims]

    @known_options
    async def wait(self, timeout: Duration | None = None) -> bool:
        """Return True once a job may start, False after `timeout` or when the app is closed.

        A job wakes one of those who wait. Nothing that came after an empty claim is missed.
        """
        until = None if timeout is None else max(0, duration_of("wait: timeout", timeout))
        hand = await self._source.hand(self.partitions)
        served = partition_names(self._in_force)
        if len(served) == 1:
            return await hand.ear.wait(self.name, until)
        return await _any_of([hand.ear.wait(name, until) for name in served])

    async def explain(self, **keys: object) -> Explanation:
        """Everything that holds all jobs of the queue, or all of these keys in it, and what would start next."""
        await self._source.hand(self.partitions)
        return await self._source.operations.queues.explain(self.name, keys)

    async def pace(self, timeout: Duration | None = None, /, **keys: object) -> bool:
        """Return True once fewer jobs of these keys wait than their backlogs hold, False after `timeout`.

        For producers of many jobs. It looks again after 50 ms, then ever more rarely, at least once a second.
        """
        return await self._source.wait_for_room(
            self.partitions, keys, None if timeout is None else max(0, duration_of("pace: timeout", timeout))
        )

    @known_options
    async def renew(self, claims: Iterable[HeldClaim], lease: Duration | None = None) -> None:
        """Hold these claims for another lease. What was settled meanwhile is left out; `ClaimLost` names the lost."""
        await renew_together(self._source, self._own(claims), lease)

    @known_options
    async def ack(
        self, claims: Iterable[HeldClaim], results: Iterable[Any] | None = None, *, ran: Duration | None = None
    ) -> None:
        """These jobs are done, in one transaction. `ClaimLost` names those whose claim is gone; the others are done."""
        held = self._own(claims)
        check_value("ack", "results", results, Iterable[Any] | None)
        values = [None] * len(held) if results is None else list(results)
        if len(values) != len(held):
            raise ConfigurationError(f"ack of {len(held)} claims was given {len(values)} results; give one for each")
        await settle_together(
            self._source, [(claim, claim._done(value)) for claim, value in zip(held, values, strict=True)], ran
        )

    def _own(self, claims: Iterable[HeldClaim]) -> Sequence[HeldClaim]:
        check_value(repr(self), "claims", claims, Iterable[HeldClaim])
        held = list(claims)
        for claim in held:
            if whole_of(claim.queue) != self.name or claim._source is not self._source:
                raise ConfigurationError(f"{claim!r} is not of {self!r} of this app; give it to its own queue")
        return held


async def partitions_served(store: Store, shares: Sequence[str], known: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The queues that a worker asks, by the names it was given: all partitions, or one of them.

    A partition that is named by itself is left out of the whole.
    """
    served = {}
    for name in shares:
        of, index = parse_partition(name) or (name, None)
        found = await store.policy(of)
        names = () if found is None else partition_names(found.policy)
        if not names or (index is not None and index >= len(names)):
            raise UnknownQueue(f"queues: {name!r} is unknown; this app has {', '.join(known)}")
        alone = {partition_name(*each) for other in shares if (each := parse_partition(other)) is not None}
        served[name] = (
            tuple(each for each in names if each not in alone) if index is None else (partition_name(of, index),)
        )
    return served


def partition_names(policy: Policy) -> tuple[str, ...]:
    """The partitions that a queue has; a plain one is its only one."""
    return (policy.queue,) if policy.partition is None else policy.partition.names


async def _any_of(waits: Sequence[Coroutine[Any, Any, bool]]) -> bool:
    """Whether one of these is so. Those that go on waiting are told not to."""
    waiting = {asyncio.ensure_future(each) for each in waits}
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(each.result() for each in done):
                return True
        return False
    finally:
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _unbroken(store: Store, claim: Coroutine[Any, Any, Claimed]) -> Claimed:
    """Wait for a claim. Whoever is cancelled meanwhile does not leave jobs behind that nobody knows of."""
    claiming = asyncio.ensure_future(claim)
    try:
        return await asyncio.shield(claiming)
    except asyncio.CancelledError:
        await asyncio.wait({asyncio.ensure_future(_give_back(store, claiming))}, timeout=ANSWER_WITHIN)
        raise


async def _give_back(store: Store, claiming: asyncio.Future[Claimed]) -> None:
    with contextlib.suppress(Exception):  # their lease runs out then
        claims = (await claiming).claims
        await store.settle([settle(each, Released("its claimer was cancelled"), 0) for each in claims])
