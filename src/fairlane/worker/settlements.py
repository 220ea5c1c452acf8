"""What a worker holds until it ends: leases, renewed together, and outcomes, settled in batches.

One batch is on its way at a time; what piles up meanwhile is the next. Leases are the last thing that a worker lets go
of: a job that is still draining must not look abandoned to another worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from datetime import timedelta
from uuid import UUID

import msgspec

from fairlane.clock import SECOND, Clock, lasting, microseconds
from fairlane.effects import landed_of
from fairlane.errors import InvalidJob, StoreUnavailable
from fairlane.job import Outcome, State
from fairlane.policy.unique import Conflict
from fairlane.redaction import error_text
from fairlane.scheduler.settlement import Settlement
from fairlane.store import records
from fairlane.store.protocol import Landings, Store
from fairlane.waits import Outage, back_off, pause
from fairlane.worker.claims import QueueSlots
from fairlane.worker.execution import Execution
from fairlane.worker.instruments import Watching
from fairlane.worker.runs import Stop

log = logging.getLogger("fairlane.worker")

AT_ONCE = 1_000


class Settling:
    """What has ended here and is not yet recorded there."""

    def __init__(self, store: Store, outage: Outage) -> None:
        self._store = store
        self._outage = outage
        self._pending: list[Settlement] = []
        self._in_flight: Sequence[Settlement] = ()
        self._arrived = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()
        self._queues: set[QueueSlots] = set()
        self._tried: set[UUID] = set()
        self._sent: set[UUID] = set()
        """Sent before, without an answer."""
        self._landed: Landings = {}
        """What follow-ups have met, also in a try whose answer was lost: it may be the one that landed."""
        self._most = AT_ONCE
        self.on_settled: Callable[[Iterable[QueueSlots]], None] = lambda queues: None
        self.is_held_back: Callable[[], bool] = lambda: False
        """More will have ended in the next turns of the event loop: one settlement of many is cheaper than many."""
        self.rest: Callable[[], float] = lambda: 0.0
        """Or in so many seconds."""
        self.watching: Watching | None = None
        self.given_up = 0
        self.refused: Counter[str] = Counter()
        """Attempts that had ended well until their effects were refused, by what became of their jobs."""
        self._loop = asyncio.get_running_loop()

    def count_unsettled(self) -> int:
        return len(self._pending) + len(self._in_flight)

    def add(self, settlement: Settlement, queue: QueueSlots, *, may_be_settled: bool = False) -> None:
        """`may_be_settled`: its handler has settled it in a transaction of its own, which may have committed."""
        self._pending.append(settlement)
        if may_be_settled:
            self._tried.add(settlement.job)
        self._queues.add(queue)
        if len(self._pending) == 1:
            self._arrived.set()
            self._empty.clear()

    def leases(self) -> set[UUID]:
        """Leases that must not run out before their settlement has landed."""
        return {each.lease for each in self._pending} | {each.lease for each in self._in_flight}

    async def all_settled(self) -> None:
        await self._empty.wait()

    def let_go(self, leases: Collection[UUID]) -> None:
        """These leases are gone, and nothing that was refused so far can be recorded under them any more."""
        kept = []
        for each in self._pending:
            if each.lease in leases and each.job in self._sent:
                self._sent.discard(each.job)
                self._landed.pop(each.job, None)
                log.error(
                    "job %s: its outcome (%s) could not be recorded before its lease was gone; unless an answer of the "
                    "database was lost, it runs again",
                    each.job,
                    each.outcome,
                    extra=_about(each.job),
                )
            else:
                kept.append(each)
        self._pending = kept
        if not self._in_flight:
            self._note_if_empty()

    async def run(self) -> None:
        self._put_back()  # what an earlier run of this loop had in hand
        self._most = AT_ONCE
        refusals = 0
        while True:
            await self._arrived.wait()
            while self.is_held_back() and len(self._pending) < AT_ONCE:  # noqa: ASYNC110 - every turn brings more
                await asyncio.sleep(0)
            if (rest := self.rest()) > 0:
                await asyncio.sleep(rest)
            self._in_flight, self._pending = self._pending[: self._most], self._pending[self._most :]
            try:
                await self._record_in_flight()
            except StoreUnavailable:
                self._put_back()
                refusals += 1
                await asyncio.sleep(back_off(refusals))
            else:
                refusals = 0

    async def _record_in_flight(self) -> None:
        queues = set(self._queues)
        if not self._pending:
            self._queues.clear()
        began = self._loop.time()
        jobs = {each.job for each in self._in_flight}
        try:
            await self._record(self._in_flight, was_tried=not jobs.isdisjoint(self._tried | self._sent))
        except StoreUnavailable:
            self._queues |= queues
            raise
        self._most = min(self._most * 2, AT_ONCE)
        self._tried -= jobs
        self._sent -= jobs
        if self.watching is not None:
            self.watching.settled(len(self._in_flight), self._loop.time() - began)
        self._in_flight = ()
        self._note_if_empty()
        self.on_settled(queues)

    def _put_back(self) -> None:
        """Outcomes are kept until they are recorded. Smaller batches, and those that were refused behind the others:
        what the database refuses for one of them does not keep the rest for ever."""
        self._sent.update(each.job for each in self._in_flight)
        self._most = max(1, len(self._in_flight) // 2)
        self._pending = [*self._pending, *self._in_flight]
        self._in_flight = ()

    def _note_if_empty(self) -> None:
        if not self._pending:
            self._arrived.clear()
            self._empty.set()

    async def record(self, settlement: Settlement, *, was_tried: bool = False) -> None:
        """Record one, beside the loop, however long the database is away."""
        refusals = 0
        while True:
            try:
                await self._record([settlement], was_tried=was_tried)
            except StoreUnavailable:
                was_tried = True
                self._sent.add(settlement.job)
                refusals += 1
                await asyncio.sleep(back_off(refusals))
            else:
                self._sent.discard(settlement.job)
                return

    async def _record(self, batch: Sequence[Settlement], *, was_tried: bool = False) -> None:
        """Try to record a batch. What the database refuses for good is told, and does not stop us; `StoreUnavailable`
        if it is to be tried again."""
        try:
            lost = await self._outage.once(
                lambda: self._store.settle(batch, is_repeated=was_tried, landed=self._landed), "settling"
            )
        except StoreUnavailable:
            raise
        except Exception as error:
            if len(batch) == 1:
                self._landed.pop(batch[0].job, None)
            if len(batch) == 1 and isinstance(error, InvalidJob) and (instead := batch[0].fallback) is not None:
                is_dead = instead.to is State.DEAD
                self.refused[str(instead.to) if is_dead else "to be retried"] += 1
                log.error(
                    "job %s: its effects were refused, so this attempt has failed; %s: %s",
                    batch[0].job,
                    "the job is dead" if is_dead else f"next attempt in {lasting((instead.delay or 0) / SECOND)}",
                    error,
                    extra=_about(batch[0].job),
                )
                reason = f"{instead.error}: {error_text(error)}"
                await self._record([msgspec.structs.replace(instead, error=reason)], was_tried=was_tried)
                return
            if len(batch) == 1:
                self.given_up += 1
                log.critical(
                    "job %s: its outcome (%s) could not be recorded; it runs again when its lease has ended",
                    batch[0].job,
                    batch[0].outcome,
                    exc_info=error,
                    extra=_about(batch[0].job),
                )
                return
            # One bad apple: the others must not be lost with it. Some of them may have landed.
            for each in batch:
                await self._record([each], was_tried=True)
            return
        for each in batch:
            conflicts = self._landed.pop(each.job, None)
            if each.job not in lost and (conflicts or each.late_effects):
                self._tell_of_effects(each, conflicts)
        doubtful = self._sent.intersection(lost)
        if self.watching is not None and (late := [job for job in lost if job not in doubtful]):
            self.watching.claims_lost(late, "settled late")
        for job in lost:
            if job in doubtful:
                log.warning(
                    "job %s: recorded just before the connection broke, or its claim is lost", job, extra=_about(job)
                )
            else:
                log.error(
                    "job %s: ClaimLost: taken over before it was settled; its outcome is not recorded",
                    job,
                    extra=_about(job),
                )

    def _tell_of_effects(self, settlement: Settlement, conflicts: dict[UUID, Conflict] | None) -> None:
        """Report effects that were not stored: the handler has returned, and cannot be told."""
        if conflicts is None:
            log.warning(
                "job %s: %d effects were not stored: they were added after the job was settled in a transaction",
                settlement.job,
                settlement.late_effects,
                extra=_about(settlement.job),
            )
            return
        missing = landed_of(settlement.effects, conflicts).not_stored
        for each in missing:
            log.log(
                logging.WARNING if each.outcome is Outcome.REFUSED else logging.INFO,
                "job %s: its follow-up (%s) was not stored (%s): job %s holds its unique key",
                settlement.job,
                each.task,
                each.outcome,
                each.job,
                extra=_about(settlement.job),
            )
        if missing and self.watching is not None:
            self.watching.not_stored(settlement.job, missing)


def _about(job: UUID) -> dict[str, UUID]:
    return {"job": job}


RENEWALS = 3
"""How often a lease is renewed before it would end."""
SHORTEST_LOOK, LIKELY_LOOK = 0.05, 1.0
"""Seconds between two looks for cancellations: after a nudge that brought no work, and after one that did."""


class Leases:
    """Keeps what this worker holds, and stops what it no longer holds."""

    def __init__(
        self, store: Store, execution: Execution, settling: Settling, outage: Outage, clock: Clock, lease: timedelta
    ) -> None:
        self._store = store
        self._execution = execution
        self._settling = settling
        self._outage = outage
        self._clock = clock
        self._lease = lease
        self._every = microseconds(lease) // RENEWALS
        self._look = asyncio.Event()
        self._must_check = False
        self._kept_at = clock.monotonic()
        self._renewing = asyncio.Lock()
        self._loop_time = asyncio.get_running_loop().time
        self._looked_at = 0.0
        self._later: asyncio.TimerHandle | None = None
        self.watching: Watching | None = None

    def held(self) -> set[UUID]:
        """Leases under which anything runs, waits, or has ended and is not recorded."""
        return self._execution.leases() | self._settling.leases()

    def look_now(self) -> None:
        """A running job was probably cancelled: do not wait for the next renewal to find out."""
        if self._execution.is_holding:
            self._look.set()

    def look_soon(self) -> None:
        """A running job may have been cancelled, though it is more likely that there is work to claim."""
        if self._execution.is_holding and self._later is None:
            self._later = asyncio.get_running_loop().call_later(LIKELY_LOOK, self._look.set)

    def check_soon(self) -> None:
        """The database was away: find out what is still ours."""
        self._must_check = True
        self._look.set()

    async def run(self) -> None:
        while True:
            await self._next()
            if self._must_check:
                self._must_check = False
                await self._check()
            await self._renew()

    async def keep_if_late(self) -> None:
        """A process that stood still (a suspended machine, a handler that blocks the loop) must not reap itself."""
        async with self._renewing:
            pass  # one that is under way counts once it has landed
        late = self._clock.monotonic() - self._kept_at - self._every
        if late > self._every // 2 and self._execution.is_holding:
            log.warning(
                "leases were renewed %.1f s late: this process stood still, or an async handler blocks its event loop; "
                "blocking code belongs in a task that is not async",
                late / SECOND,
            )
            await self._renew()

    async def _next(self) -> None:
        """A third of the lease, or less if someone wants a look; but never twice within a moment."""
        looking = asyncio.ensure_future(self._look.wait())
        waiting = asyncio.ensure_future(pause(self._clock, self._every))
        try:
            await asyncio.wait({looking, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            looking.cancel()
            waiting.cancel()
        if self._look.is_set() and (early := self._looked_at + SHORTEST_LOOK - self._loop_time()) > 0:
            await asyncio.sleep(early)
        self._look.clear()
        if self._later is not None:
            self._later.cancel()
            self._later = None
        self._looked_at = self._loop_time()

    async def _renew(self) -> None:
        async with self._renewing:
            # Noted before the call: time that passes during it is not covered by it.
            self._kept_at = self._clock.monotonic()
            await self._renew_all()

    async def _renew_all(self) -> None:
        leases = sorted(self.held())
        if not leases:
            return
        renewed = await self._outage.ride_out(lambda: self._store.renew(leases, self._lease), "renewing leases")
        gone = set(renewed.gone)
        if self.watching is not None:
            self.watching.renewed(len(leases), len(gone))
        if gone:
            self._settling.let_go(gone)
            self._stop({run.claim.id for run in self._execution.held() if run.claim.lease in gone}, gone)
        for run in self._execution.find(renewed.cancelled):
            if run.claim.lease not in gone:
                claim = run.claim
                log.info("job %s (%s) was cancelled; it is asked to stop", claim.id, claim.task, extra={"claim": claim})
                self._execution.interrupt(run, Stop.CANCELLED)

    async def _check(self) -> None:
        """Stop what the database no longer holds for us: another worker may run it already."""
        pairs = [(run.claim.id, run.claim.lease) for run in self._execution.held()]
        if not pairs:
            return
        held = set(await self._outage.ride_out(lambda: self._store.run(records.held(pairs)), "checking claims"))
        self._stop({job for job, _ in pairs if job not in held}, {lease for _, lease in pairs})

    def _stop(self, jobs: set[UUID], leases: set[UUID]) -> None:
        lost = [run for run in self._execution.find(jobs) if run.claim.lease in leases]
        missed = [run.claim.id for run in lost if self._execution.misses(run)]
        if missed and self.watching is not None:
            self.watching.claims_lost(missed, "lease gone")
        for run in lost:
            self._execution.interrupt(run, Stop.GONE)
