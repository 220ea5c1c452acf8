"""Watching a worker: what it does becomes events, metrics and spans, for those who have asked for them.

A worker that nobody watches has none of this. Nothing here waits for the database but one look for the traces of the
jobs of a claim, and nothing here raises.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from uuid import UUID

from fairlane.clock import SECOND, Clock, Instant
from fairlane.events import (
    ClaimsLost,
    Event,
    FollowUpsNotStored,
    GatesRecounted,
    JobEnded,
    JobsClaimed,
    JobsReaped,
    JobStarted,
    LeasesRenewed,
    LoopDied,
    StoreLost,
    StoreReturned,
    WorkerStarted,
    WorkerStopped,
    WorkerStopping,
)
from fairlane.job import Claim, FollowUp, trace_of
from fairlane.redaction import without_secrets
from fairlane.scheduler.settlement import Settlement, Verdict
from fairlane.store import records
from fairlane.store.protocol import Claimed, Store, WorkerIdentity
from fairlane.telemetry.metrics import NO_TASK, Metrics
from fairlane.telemetry.telemetry import Carried, Telemetry
from fairlane.worker.execution import Execution, Run
from fairlane.worker.runs import RunningJob

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext

    from fairlane.worker.worker import Worker

REMEMBERED = 10_000
"""Jobs whose enqueue or last run is remembered, for the links of the next."""
FOUND_WITHIN = 1.0
"""Seconds for which a claim waits for the traces of its jobs."""
CLAIM_LOST = "claim lost"


class Watching:
    """The eyes on one worker."""

    def __init__(
        self, telemetry: Telemetry, identity: WorkerIdentity, store: Store, clock: Clock, *, nested: bool = False
    ) -> None:
        self.telemetry = telemetry
        self.metrics: Metrics | None = telemetry.metrics
        self.store_now: Callable[[], Instant] = clock.now
        self._hooks = telemetry.hooks
        self._tracing = telemetry.tracing
        self._is_traced = telemetry.tracing.tracer() is not None
        self._worker = identity.name
        self._store = store
        self._nested = nested
        self._origins: OrderedDict[UUID, Carried] = OrderedDict()
        self._last_runs: OrderedDict[UUID, SpanContext] = OrderedDict()
        self._spans: dict[RunningJob, Span] = {}

    def _tell(self, kind: type[Event], **fields: Any) -> None:
        if self._hooks.wants(kind):
            self._hooks.emit(kind(at=self.store_now(), **fields))

    # Claims.

    async def find_origins(self, claims: Sequence[Claim]) -> None:
        """Where these jobs were enqueued, for the spans of their runs. Without it they run all the same."""
        if not claims or not self._is_traced:
            return
        try:
            async with asyncio.timeout(FOUND_WITHIN):
                contexts = await self._store.run(records.contexts([claim.id for claim in claims]))
            self.remember_origins({job: trace_of(context) for job, context in contexts.items()})
        except Exception as error:
            self.telemetry.failures.note("trace", "looking up the traces of claimed jobs failed", error)

    def remember_origins(self, traces: Mapping[UUID, Carried | None]) -> None:
        """Where these were enqueued, as far as anybody knows."""
        for job, trace in traces.items():
            if trace is not None:
                _remember(self._origins, job, trace)

    def origin(self, job: UUID) -> Carried | None:
        """Where this one was, for the process that runs it."""
        return self._origins.pop(job, None) if self._origins else None

    def claimed(self, queue: str, claimed: Claimed, took: float, lock_wait: float | None) -> None:
        """A claim is back after so many seconds."""
        count = len(claimed.claims)
        if (metrics := self.metrics) is not None:
            of_queue = (queue,)
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
            self._tell(JobsClaimed, queue=queue, worker=self._worker, jobs=jobs, took=timedelta(seconds=took))

    # Runs.

    def count_start(self, claim: Claim) -> int:
        """A job starts, here or in another process; the microseconds that it has waited."""
        waited = self.store_now() - claim.enqueued_at
        if (metrics := self.metrics) is not None:
            metrics.started.add((claim.queue, claim.task))
            if claim.attempt == 1:
                metrics.wait.observe(max(0, waited) / SECOND, (claim.queue,))
        return waited

    def count_end(self, claim: Claim, settlement: Settlement | None, ran: int) -> str:
        """A job has ended, here or in another process; what became of it."""
        outcome = CLAIM_LOST if settlement is None else settlement.outcome
        if (metrics := self.metrics) is not None:
            is_death = settlement is not None and settlement.is_death
            metrics.ended.add((claim.queue, claim.task, "dead" if is_death else outcome))
            if settlement is None or not settlement.unstarted:
                metrics.run.observe(ran / SECOND, (claim.queue, claim.task))
        return outcome

    def started(self, run: RunningJob) -> object:
        """A handler is about to be called. Returned is what `left` is to be given."""
        claim = run.claim
        waited = self.count_start(claim)
        if self._hooks.wants(JobStarted):
            self._tell(
                JobStarted,
                queue=claim.queue,
                worker=self._worker,
                job=claim.id,
                task=claim.task,
                keys=claim.keys,
                attempt=claim.attempt,
                waited=timedelta(microseconds=max(0, waited)),
            )
        if not self._is_traced:
            return None
        span = self._tracing.processing(
            claim, self._origins.pop(claim.id, None), self._last_runs.pop(claim.id, None), nested=self._nested
        )
        if span is None:
            return None
        self._spans[run] = span
        return self._tracing.attach(span)

    def left(self, entered: object) -> None:
        self._tracing.detach(entered)

    def ended(self, run: RunningJob, settlement: Settlement | None, ran: int, error: BaseException | None) -> None:
        """A handler has ended after so many microseconds; without a settlement, its claim is lost."""
        claim = run.claim
        outcome = self.count_end(claim, settlement, ran)
        if self._hooks.wants(JobEnded):
            self._tell(
                JobEnded,
                queue=claim.queue,
                worker=self._worker,
                job=claim.id,
                task=claim.task,
                keys=claim.keys,
                attempt=claim.attempt,
                max_attempts=claim.max_attempts,
                outcome=outcome,
                state=None if settlement is None else settlement.to,
                ran=timedelta(microseconds=ran),
                error=None if settlement is None else settlement.error,
            )
        if (span := self._spans.pop(run, None)) is not None:
            is_failed = settlement is None or settlement.verdict is Verdict.FAILED
            said = None if settlement is None else settlement.error
            self._tracing.end(span, error, outcome, is_failed=is_failed, said=said)
            if settlement is None or not settlement.to.is_final:
                _remember(self._last_runs, claim.id, span.get_span_context())

    def lagged(self, lag: int) -> None:
        """A process that runs jobs for us has answered so many microseconds late: its event loop was busy."""
        if self.metrics is not None:
            self.metrics.lag.observe(lag / SECOND)

    # Settlements and leases.

    def settled(self, count: int, took: float) -> None:
        """So many outcomes were recorded together."""
        if (metrics := self.metrics) is not None:
            metrics.settle_time.observe(took)
            metrics.settle_size.observe(count)

    def claims_lost(self, jobs: Sequence[UUID], reason: str) -> None:
        """These jobs were taken over from us."""
        if self.metrics is not None:
            self.metrics.claims_lost.add((reason,), len(jobs))
        self._tell(ClaimsLost, worker=self._worker, jobs=tuple(jobs))

    def not_stored(self, job: UUID, follow_ups: Sequence[FollowUp]) -> None:
        """Follow-ups of a job that is done were not stored."""
        self._tell(FollowUpsNotStored, worker=self._worker, job=job, follow_ups=tuple(follow_ups))

    def renewed(self, leases: int, gone: int) -> None:
        if self.metrics is not None:
            self.metrics.renewals.add((), leases - gone)
        self._tell(LeasesRenewed, worker=self._worker, leases=leases, gone=gone)

    def recounted(self, queue: str, gates: int) -> None:
        if self.metrics is not None:
            self.metrics.recounted.add((queue,), gates)
        self._tell(GatesRecounted, worker=self._worker, queue=queue, gates=gates)

    def reaped(self, settlements: Sequence[Settlement]) -> None:
        if self.metrics is not None:
            self.metrics.reaped.add((), len(settlements))
        self._tell(JobsReaped, worker=self._worker, jobs=tuple(each.job for each in settlements))

    # The worker itself.

    def store_lost(self, doing: str, error: BaseException) -> None:
        if self.metrics is not None:
            self.metrics.outages.add()
        self._tell(StoreLost, worker=self._worker, doing=doing, error=without_secrets(str(error)))

    def store_returned(self) -> None:
        self._tell(StoreReturned, worker=self._worker)

    def loop_blocked(self, task: str | None, seconds: float) -> None:
        if self.metrics is not None:
            self.metrics.blocked.add((task or NO_TASK,), seconds)

    def loop_died(self, loop: str, cause: str) -> None:
        self._tell(LoopDied, worker=self._worker, loop=loop, cause=cause)

    def worker_started(self, queues: Iterable[str]) -> None:
        self._tell(WorkerStarted, worker=self._worker, queues=tuple(queues))

    def worker_stopping(self, running: int) -> None:
        self._tell(WorkerStopping, worker=self._worker, running=running)

    def worker_stopped(self, worker: Worker) -> None:
        self._tell(
            WorkerStopped,
            worker=self._worker,
            left_running=worker.left_running,
            left_unsettled=worker.left_unsettled,
        )


def _remember(known: OrderedDict[UUID, Any], job: UUID, value: Any) -> None:
    known[job] = value
    known.move_to_end(job)
    if len(known) > REMEMBERED:
        known.popitem(last=False)


class WatchedExecution(Execution):
    """Runs jobs as an execution does, and tells of each."""

    watching: Watching

    async def _run_async(self, run: Run) -> None:
        if run.is_given_back:
            return
        entered = self.watching.started(run)
        try:
            await super()._run_async(run)
        finally:
            self.watching.left(entered)

    async def _run_in_thread(self, run: Run) -> None:
        if run.is_given_back:
            return
        entered = self.watching.started(run)
        try:
            await super()._run_in_thread(run)
        finally:
            self.watching.left(entered)

    async def _run_alone(self, run: Run) -> None:
        if run.is_given_back:
            return
        entered = self.watching.started(run)
        try:
            await super()._run_alone(run)
        finally:
            self.watching.left(entered)

    def _end(
        self, run: Run, outcome: Any, error: BaseException | None = None, settlement: Settlement | None = None
    ) -> Settlement | None:
        ran = self._now() - run.started_at
        settlement = super()._end(run, outcome, error, settlement)
        self.watching.ended(run, settlement, ran, error)
        return settlement
