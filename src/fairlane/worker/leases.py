"""Leases: renewed together while anything runs under them, and the last thing that a worker lets go of."""

from __future__ import annotations

import asyncio
import logging
from datetime import timedelta
from uuid import UUID

from fairlane.clock import SECOND, Clock, microseconds
from fairlane.store.protocol import Store
from fairlane.waits import Outage, pause
from fairlane.worker.execution import Execution
from fairlane.worker.instruments import Watching
from fairlane.worker.runs import Stop
from fairlane.worker.settlements import Settling

log = logging.getLogger("fairlane.worker")

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
        held = set(await self._outage.ride_out(lambda: self._store.held(pairs), "checking claims"))
        self._stop({job for job, _ in pairs if job not in held}, {lease for _, lease in pairs})

    def _stop(self, jobs: set[UUID], leases: set[UUID]) -> None:
        lost = [run for run in self._execution.find(jobs) if run.claim.lease in leases]
        missed = [run.claim.id for run in lost if self._execution.misses(run)]
        if missed and self.watching is not None:
            self.watching.claims_lost(missed, "lease gone")
        for run in lost:
            self._execution.interrupt(run, Stop.GONE)
