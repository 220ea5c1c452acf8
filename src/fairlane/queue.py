"""A queue of an app: its policy, and claiming from it by hand, for programs that bring their own runtime."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fairlane.clock import microseconds
from fairlane.errors import ConfigurationError
from fairlane.explaining import explain_queue
from fairlane.held_claim import ClaimSource, HeldClaim, HeldLease, as_lease, renew_together, settle_together
from fairlane.policy.policy import Policy
from fairlane.scheduler.explain import Explanation
from fairlane.scheduler.settlement import Released, settle
from fairlane.store.protocol import Claimed, Store, WorkerIdentity
from fairlane.task import Duration
from fairlane.waiting import Ear
from fairlane.worker.timing import ANSWER_WITHIN

__all__ = ["Hand", "Queue", "QueueSource"]

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

    async def hand(self, policy: Policy) -> Hand: ...

    async def wait_for_room(self, policy: Policy, keys: Mapping[str, object], timeout: int | None) -> bool: ...


class Queue:
    """A queue as this program declares it."""

    __slots__ = ("_source", "policy")

    def __init__(self, policy: Policy, source: QueueSource) -> None:
        self.policy = policy
        self._source = source

    def __repr__(self) -> str:
        return f"<queue {self.name!r}>"

    @property
    def name(self) -> str:
        return self.policy.queue

    async def claim(self, n: int = 1, *, lease: Duration = "30s", worker: str | None = None) -> list[HeldClaim]:
        """Hold up to `n` jobs for the time of one lease, in the order in which they should start.

        No two callers ever get the same job, and no limit is ever exceeded. An empty list: nothing may start now.
        """
        if n < 1:
            raise ConfigurationError(f"claim({n}): claim at least 1 job")
        duration = as_lease(lease)
        hand = await self._source.hand(self.policy)
        identity = hand.identity if worker is None else WorkerIdentity(hand.identity.id, worker)

        async def once() -> Claimed:
            return await hand.store.claim(self.name, lambda: n, worker=identity, lease=duration)

        try:
            claimed = await _unbroken(hand.store, once())
            asked = 1
            while claimed.more and not claimed.claims and asked < ASKED_AT_MOST:
                claimed = await _unbroken(hand.store, once())
                asked += 1
        finally:
            hand.ear.claimed(self.name)
        held = HeldLease(claimed.lease, duration)
        return [HeldClaim(each, held, self._source) for each in claimed.claims]

    async def wait(self, timeout: Duration | None = None) -> bool:
        """Return True once a job may start, False after `timeout` or when the app is closed.

        A job wakes one of those who wait. Nothing that came after an empty claim is missed.
        """
        hand = await self._source.hand(self.policy)
        return await hand.ear.wait(self.name, None if timeout is None else max(0, microseconds(timeout)))

    async def explain(self, **keys: object) -> Explanation:
        """Everything that holds all jobs of the queue, or all of these keys in it, and what would start next."""
        hand = await self._source.hand(self.policy)
        return await explain_queue(hand.store, self.name, keys)

    async def pace(self, timeout: Duration | None = None, /, **keys: object) -> bool:
        """Return True once fewer jobs of these keys wait than their backlogs hold, False after `timeout`.

        For producers of many jobs. It looks again after 50 ms, then ever more rarely, at least once a second.
        """
        return await self._source.wait_for_room(
            self.policy, keys, None if timeout is None else max(0, microseconds(timeout))
        )

    async def renew(self, claims: Iterable[HeldClaim], lease: Duration | None = None) -> None:
        """Hold these claims for another lease. What was settled meanwhile is left out; `ClaimLost` names the lost."""
        await renew_together(self._source, self._own(claims), lease)

    async def ack(
        self, claims: Iterable[HeldClaim], results: Iterable[Any] | None = None, *, ran: Duration | None = None
    ) -> None:
        """These jobs are done, in one transaction. `ClaimLost` names those whose claim is gone; the others are done."""
        held = self._own(claims)
        values = [None] * len(held) if results is None else list(results)
        if len(values) != len(held):
            raise ConfigurationError(f"ack of {len(held)} claims was given {len(values)} results; give one for each")
        await settle_together(
            self._source, [(claim, claim._done(value)) for claim, value in zip(held, values, strict=True)], ran
        )

    def _own(self, claims: Iterable[HeldClaim]) -> Sequence[HeldClaim]:
        held = list(claims)
        for claim in held:
            if claim.queue != self.name or claim._source is not self._source:
                raise ConfigurationError(f"{claim!r} is not of {self!r} of this app; give it to its own queue")
        return held


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
