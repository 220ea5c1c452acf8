"""Watching a worker: what it does becomes events, metrics and spans, for those who have asked for them.

Nothing here waits for the database but one look for the traces of the jobs of a claim, and nothing here raises.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from fairlane.clock import SECOND
from fairlane.events import (
    ClaimsLost,
    Event,
    GatesRecounted,
    JobEnded,
    JobsClaimed,
    JobsReaped,
    JobStarted,
    LeasesRenewed,
    LoopDied,
    StoreLost,
)
from fairlane.job import Claim, trace_of
from fairlane.redaction import without_secrets
from fairlane.scheduler.settlement import Settlement, Verdict
from fairlane.store import records
from fairlane.store.protocol import Claimed, Store, WorkerIdentity
from fairlane.store.stats_values import BlockedLoop
from fairlane.telemetry.metrics import NO_TASK, Metrics
from fairlane.telemetry.telemetry import Carried, Telemetry
from fairlane.waits import StoreTime

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext

    from fairlane.worker.runs import RunningJob

REMEMBERED = 10_000
"""Jobs whose enqueue or last run is remembered, to link the next run to it."""
FOUND_WITHIN = 1.0
"""Seconds that a claim waits for the traces of its jobs."""
CLAIM_LOST = "claim lost"


class Watching:
    """What one worker reports of itself."""

    def __init__(
        self,
        telemetry: Telemetry,
        identity: WorkerIdentity,
        store: Store,
        time: StoreTime,
        *,
        nested: bool = False,
        counts: bool = True,
    ) -> None:
        read = telemetry.metrics if counts else None
        self.metrics = read or Metrics(telemetry.failures)
        """A registry that nobody reads, if nobody asked for metrics."""
        self._time = time
        self._failures = telemetry.failures
        self._hooks = telemetry.hooks
        self._tracing = telemetry.spans()
        self._worker = {"worker": identity.name}
        self._store = store
        self._nested = nested
        self._origins: OrderedDict[UUID, Carried] = OrderedDict()
        self._last_runs: OrderedDict[UUID, SpanContext] = OrderedDict()
        self._spans: dict[RunningJob, Span] = {}
        self.is_wanted = read is not None or self._tracing is not None or bool(self._hooks)
        """Whether anybody asked for events, metrics or traces of single jobs."""

    def tell(self, kind: type[Event], **fields: Any) -> None:
        if self._hooks.wants(kind):
            self._hooks.emit(kind(at=self._time.now(), **fields, **self._worker))

    # Claims.

    async def find_origins(self, claims: Sequence[Claim]) -> None:
        """Look up where these jobs were enqueued, for the spans of their runs. They run without it too."""
        if not claims or self._tracing is None:
            return
        try:
            async with asyncio.timeout(FOUND_WITHIN):
                contexts = await self._store.run(records.contexts([claim.id for claim in claims]))
            self.remember_origins({job: trace_of(context) for job, context in contexts.items()})
        except Exception as error:
            self._failures.note("trace", "looking up the traces of claimed jobs failed", error)

    def remember_origins(self, traces: Mapping[UUID, Carried | None]) -> None:
        for job, trace in traces.items():
            if trace is not None:
                _remember(self._origins, job, trace)

    def origin(self, job: UUID) -> Carried | None:
        """Where this job was enqueued, for the process that runs it."""
        return self._origins.pop(job, None) if self._origins else None

    def claimed(self, queue: str, claimed: Claimed, took: float, lock_wait: float | None) -> None:
        """A claim has returned after so many seconds."""
        count, metrics, of_queue = len(claimed.claims), self.metrics, (queue,)
        metrics.claim_time.observe(took, of_queue)
        metrics.claim_size.observe(count, of_queue)
        if lock_wait is not None:
            metrics.lock_wait.observe(lock_wait, of_queue)
        if claimed.folded:
            metrics.folded.add(of_queue, claimed.folded)
        if count:
            metrics.claimed.add(of_queue, count)
        else:
            metrics.empty_claims.add(of_queue)
        if count and self._hooks.wants(JobsClaimed):
            jobs = tuple(claim.id for claim in claimed.claims)
            self.tell(JobsClaimed, queue=queue, jobs=jobs, took=timedelta(seconds=took))

    # Runs.

    def count_start(self, claim: Claim) -> int:
        """A job starts, here or in a child process. Returns the microseconds that it has waited."""
        waited = self._time.now() - claim.enqueued_at
        self.metrics.started.add((claim.queue, claim.task))
        if claim.attempt == 1:
            self.metrics.wait.observe(max(0, waited) / SECOND, (claim.queue,))
        return waited

    def count_end(self, claim: Claim, settlement: Settlement | None, ran: int) -> str:
        """A job has ended, here or in a child process. Returns what became of it."""
        outcome = CLAIM_LOST if settlement is None else settlement.outcome
        is_death = settlement is not None and settlement.is_death
        self.metrics.ended.add((claim.queue, claim.task, "dead" if is_death else outcome))
        if settlement is None or not settlement.unstarted:
            self.metrics.run.observe(ran / SECOND, (claim.queue, claim.task))
        return outcome

    def started(self, run: RunningJob) -> object:
        """A handler is about to be called. Returns what to pass to `left`."""
        claim = run.claim
        waited = self.count_start(claim)
        if self._hooks.wants(JobStarted):
            self.tell(JobStarted, **_attempt(claim), waited=timedelta(microseconds=max(0, waited)))
        if self._tracing is None:
            return None
        span = self._tracing.processing(
            claim, self._origins.pop(claim.id, None), self._last_runs.pop(claim.id, None), nested=self._nested
        )
        if span is None:
            return None
        self._spans[run] = span
        return self._tracing.attach(span)

    def left(self, entered: object) -> None:
        if self._tracing is not None:
            self._tracing.detach(entered)

    def ended(self, run: RunningJob, settlement: Settlement | None, ran: int, error: BaseException | None) -> None:
        """A handler has ended after so many microseconds; without a settlement, its claim is lost."""
        claim = run.claim
        outcome = self.count_end(claim, settlement, ran)
        if self._hooks.wants(JobEnded):
            self.tell(
                JobEnded,
                **_attempt(claim),
                max_attempts=claim.max_attempts,
                outcome=outcome,
                state=None if settlement is None else settlement.to,
                ran=timedelta(microseconds=ran),
                error=None if settlement is None else settlement.error,
            )
        if self._tracing is not None and (span := self._spans.pop(run, None)) is not None:
            is_failed = settlement is None or settlement.verdict is Verdict.FAILED
            said = None if settlement is None else settlement.error
            self._tracing.end(span, error, outcome, is_failed=is_failed, said=said)
            if settlement is None or not settlement.to.is_final:
                _remember(self._last_runs, claim.id, span.get_span_context())

    # Settlements and leases.

    def settled(self, count: int, took: float) -> None:
        self.metrics.settle_time.observe(took)
        self.metrics.settle_size.observe(count)

    def claims_lost(self, jobs: Sequence[UUID], reason: str) -> None:
        self.metrics.claims_lost.add((reason,), len(jobs))
        self.tell(ClaimsLost, jobs=tuple(jobs))

    def renewed(self, leases: int, gone: int) -> None:
        self.metrics.renewals.add((), leases - gone)
        self.tell(LeasesRenewed, leases=leases, gone=gone)

    def recounted(self, queue: str, gates: int) -> None:
        self.metrics.recounted.add((queue,), gates)
        self.tell(GatesRecounted, queue=queue, gates=gates)

    def reaped(self, settlements: Sequence[Settlement]) -> None:
        self.metrics.reaped.add((), len(settlements))
        self.tell(JobsReaped, jobs=tuple(each.job for each in settlements))

    # The worker itself.

    def store_lost(self, doing: str, error: BaseException) -> None:
        self.metrics.outages.add()
        self.tell(StoreLost, doing=doing, error=without_secrets(str(error)))

    def loop_blocked(self, block: BlockedLoop) -> None:
        """A handler blocks the event loop, or has done so."""
        if block.until is not None:
            self.metrics.blocked.add((block.task or NO_TASK,), (block.until - block.since) / SECOND)

    def loop_died(self, loop: str, cause: str) -> None:
        self.tell(LoopDied, loop=loop, cause=cause)


def _attempt(claim: Claim) -> dict[str, Any]:
    return {"queue": claim.queue, "job": claim.id, "task": claim.task, "keys": claim.keys, "attempt": claim.attempt}


def _remember(known: OrderedDict[UUID, Any], job: UUID, value: Any) -> None:
    known[job] = value
    known.move_to_end(job)
    if len(known) > REMEMBERED:
        known.popitem(last=False)
