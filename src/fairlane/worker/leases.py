"""The leases of a worker, renewed together.

They are the last thing that it lets go of: a job that is still draining must not look abandoned to another worker.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING
from uuid import UUID

from fairlane.clock import SECOND, microseconds
from fairlane.store import records
from fairlane.waits import first_of, pause
from fairlane.worker.runs import Settling, Stop, log_job

if TYPE_CHECKING:
    from fairlane.worker.execution import Execution
    from fairlane.worker.runtime import Runtime

log = logging.getLogger("fairlane.worker")

RENEWALS = 3
"""How often a lease is renewed before it ends."""
SHORTEST_LOOK, LIKELY_LOOK = 0.05, 1.0
"""Seconds between two checks for cancellations: after a wakeup that brought no work, and after one that may have."""


class Leases:
    """Renews the leases of this worker, and stops runs whose leases are gone."""

    def __init__(self, runtime: Runtime, execution: Execution, settling: Settling) -> None:
        self._runtime = runtime
        self._execution = execution
        self._settling = settling
        self._clock = runtime.clock
        self._lease = runtime.options.time("lease")
        self._every = microseconds(self._lease) // RENEWALS
        self._look = asyncio.Event()
        self._must_check = False
        self._kept_at = self._clock.monotonic()
        self._renewing = asyncio.Lock()
        self._loop_time = asyncio.get_running_loop().time
        self._looked_at = 0.0
        self._later: asyncio.TimerHandle | None = None

    def held(self) -> set[UUID]:
        """Leases under which anything runs, waits, or has ended without being recorded."""
        return self._execution.leases() | self._settling.leases()

    def look_now(self) -> None:
        """Check for cancellations now: a running job was probably cancelled."""
        if self._execution.is_holding:
            self._look.set()

    def look_soon(self) -> None:
        """Check for cancellations soon: one is possible, but work to claim is more likely."""
        if self._execution.is_holding and self._later is None:
            self._later = asyncio.get_running_loop().call_later(LIKELY_LOOK, self._look.set)

    def check_soon(self) -> None:
        """The database was away: check which claims are still ours."""
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
        """Renew leases that are late: a process that was suspended, or whose loop was blocked, must not reap itself."""
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
        """Wait for a third of the lease, or until a check is wanted, but never check twice within a moment."""
        await first_of(self._look.wait(), pause(self._clock, self._every))
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
            leases = sorted(self.held())
            if not leases:
                return
            store = self._runtime.store
            renewed = await self._runtime.outage.ride_out(lambda: store.renew(leases, self._lease), "renewing leases")
        gone = set(renewed.gone)
        self._runtime.watching.renewed(len(leases), len(gone))
        if gone:
            self._settling.let_go(gone)
            self._stop({run.claim.id for run in self._execution.held() if run.claim.lease in gone}, gone)
        for run in self._execution.find(renewed.cancelled):
            if run.claim.lease not in gone:
                log_job(log, logging.INFO, run.claim, " was cancelled; it is asked to stop")
                self._execution.interrupt(run, Stop.CANCELLED)

    async def _check(self) -> None:
        """Stop runs whose claims are no longer ours: another worker may already run them."""
        pairs = [(run.claim.id, run.claim.lease) for run in self._execution.held()]
        if not pairs:
            return
        store = self._runtime.store
        held = set(await self._runtime.outage.ride_out(lambda: store.run(records.held(pairs)), "checking claims"))
        self._stop({job for job, _ in pairs if job not in held}, {lease for _, lease in pairs})

    def _stop(self, jobs: set[UUID], leases: set[UUID]) -> None:
        lost = [run for run in self._execution.find(jobs) if run.claim.lease in leases]
        missed = [run.claim.id for run in lost if self._execution.misses(run)]
        if missed:
            self._runtime.watching.claims_lost(missed, "lease gone")
        for run in lost:
            self._execution.interrupt(run, Stop.GONE)
