"""What a worker shows of itself: events, metrics and spans for those who have asked for them, the endpoint that answers
scrapers and probes, and its report in the database.

Nothing here raises, and nothing waits for the database but the reports and one look for the traces of claimed jobs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from fairlane.clock import SECOND
from fairlane.errors import ConfigurationError
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
from fairlane.store.stats import Looking, Moment
from fairlane.store.stats_values import BlockedLoop, WorkerReport, WorkerSeen, dead_loops, replaced
from fairlane.telemetry.metrics import (
    CONTENT_TYPE,
    FLEET,
    LOOKED_UP_EVERY,
    NO_TASK,
    Failures,
    Fleet,
    Labels,
    Metrics,
    as_text,
)
from fairlane.telemetry.telemetry import Carried, Telemetry
from fairlane.waits import StoreTime, jittered, pause
from fairlane.worker.options import WorkerOptions
from fairlane.worker.runtime import Runtime

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext

    from fairlane.worker.runs import RunningJob
    from fairlane.worker.worker import Worker

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
        """Where this job was enqueued."""
        return self._origins.pop(job, None)

    def claimed(self, queue: str, claimed: Claimed, took: float, lock_wait: float | None) -> None:
        """A claim has returned after so many seconds."""
        count, metrics, of_queue = len(claimed.claims), self.metrics, (queue,)
        metrics.observe("fairlane_claim_seconds", took, of_queue)
        metrics.observe("fairlane_claim_jobs", count, of_queue)
        if lock_wait is not None:
            metrics.observe("fairlane_claim_lock_wait_seconds", lock_wait, of_queue)
        if claimed.folded:
            metrics.add("fairlane_lane_events_folded_total", of_queue, claimed.folded)
        if not count:
            metrics.add("fairlane_claims_empty_total", of_queue)
            return
        metrics.add("fairlane_jobs_claimed_total", of_queue, count)
        if self._hooks.wants(JobsClaimed):
            jobs = tuple(claim.id for claim in claimed.claims)
            self.tell(JobsClaimed, queue=queue, jobs=jobs, took=timedelta(seconds=took))

    # Runs.

    def count_start(self, claim: Claim) -> int:
        """A job starts, here or in a child process. Returns the microseconds that it has waited."""
        waited = self._time.now() - claim.enqueued_at
        self.metrics.add("fairlane_jobs_started_total", (claim.queue, claim.task))
        if claim.attempt == 1:
            self.metrics.observe("fairlane_job_wait_seconds", max(0, waited) / SECOND, (claim.queue,))
        return waited

    def count_end(self, claim: Claim, settlement: Settlement | None, ran: int) -> str:
        """A job has ended, here or in a child process. Returns what became of it."""
        outcome = CLAIM_LOST if settlement is None else settlement.outcome
        is_death = settlement is not None and settlement.is_death
        task = (claim.queue, claim.task)
        self.metrics.add("fairlane_jobs_ended_total", (*task, "dead" if is_death else outcome))
        if settlement is None or not settlement.unstarted:
            self.metrics.observe("fairlane_job_run_seconds", ran / SECOND, task)
        return outcome

    def started(self, run: RunningJob) -> object:
        """A handler is about to be called. Returns what to pass to `left`."""
        claim = run.claim
        waited = self.count_start(claim)
        if self._hooks.wants(JobStarted):
            self.tell(JobStarted, **_attempt(claim), waited=timedelta(microseconds=max(0, waited)))
        if self._tracing is None:
            return None
        before = self._last_runs.pop(claim.id, None)
        span = self._tracing.processing(claim, self.origin(claim.id), before, nested=self._nested)
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
        outcome, said = self.count_end(claim, settlement, ran), None if settlement is None else settlement.error
        if self._hooks.wants(JobEnded):
            self.tell(
                JobEnded,
                **_attempt(claim),
                max_attempts=claim.max_attempts,
                outcome=outcome,
                state=None if settlement is None else settlement.to,
                ran=timedelta(microseconds=ran),
                error=said,
            )
        if self._tracing is not None and (span := self._spans.pop(run, None)) is not None:
            is_failed = settlement is None or settlement.verdict is Verdict.FAILED
            self._tracing.end(span, error, outcome, is_failed=is_failed, said=said)
            if settlement is None or not settlement.to.is_final:
                _remember(self._last_runs, claim.id, span.get_span_context())

    # Settlements and leases.

    def settled(self, count: int, took: float) -> None:
        self.metrics.observe("fairlane_settle_seconds", took)
        self.metrics.observe("fairlane_settle_jobs", count)

    def claims_lost(self, jobs: Sequence[UUID], reason: str) -> None:
        self.metrics.add("fairlane_claims_lost_total", (reason,), len(jobs))
        self.tell(ClaimsLost, jobs=tuple(jobs))

    def renewed(self, leases: int, gone: int) -> None:
        self.metrics.add("fairlane_lease_renewals_total", (), leases - gone)
        self.tell(LeasesRenewed, leases=leases, gone=gone)

    def recounted(self, queue: str, gates: int) -> None:
        self.metrics.add("fairlane_gates_recounted_total", (queue,), gates)
        self.tell(GatesRecounted, queue=queue, gates=gates)

    def reaped(self, settlements: Sequence[Settlement]) -> None:
        self.metrics.add("fairlane_jobs_reaped_total", (), len(settlements))
        self.tell(JobsReaped, jobs=tuple(each.job for each in settlements))

    # The worker itself.

    def store_lost(self, doing: str, error: BaseException) -> None:
        self.metrics.add("fairlane_store_outages_total")
        self.tell(StoreLost, doing=doing, error=without_secrets(str(error)))

    def loop_blocked(self, block: BlockedLoop) -> None:
        """A handler blocks the event loop, or has done so."""
        if block.until is not None:
            seconds = (block.until - block.since) / SECOND
            self.metrics.add("fairlane_event_loop_blocked_seconds_total", (block.task or NO_TASK,), seconds)

    def loop_died(self, loop: str, cause: str) -> None:
        self.tell(LoopDied, loop=loop, cause=cause)


def _attempt(claim: Claim) -> dict[str, Any]:
    return {"queue": claim.queue, "job": claim.id, "task": claim.task, "keys": claim.keys, "attempt": claim.attempt}


def _remember(known: OrderedDict[UUID, Any], job: UUID, value: Any) -> None:
    known[job] = value
    known.move_to_end(job)
    if len(known) > REMEMBERED:
        known.popitem(last=False)


log = logging.getLogger("fairlane.worker")

MEASURED_EVERY = 0.5
"""Seconds between two looks at how late the event loop is."""


@asynccontextmanager
async def showing(worker: Worker, telemetry: Telemetry, options: WorkerOptions) -> AsyncIterator[None]:
    """Show this worker during the block, if anybody wants to see it. What fails here never ends the worker."""
    metrics = telemetry.metrics
    if metrics is None:
        yield
        return
    async with AsyncExitStack() as shown:
        for name, reading in _gauges(worker).items():
            shown.callback(metrics.read(name, reading))
        shown.callback(asyncio.create_task(_measure_lag(metrics), name="fairlane-lag").cancel)
        fleet = None
        if telemetry.fleet is not None and options.metrics_fleet:
            fleet = Fleet(telemetry.fleet, telemetry.failures, options.metrics_keys)
            for name in FLEET:
                shown.callback(metrics.read(name, partial(fleet.value_of, name)))
            if telemetry.is_exported:
                shown.callback(asyncio.create_task(_keep_fresh(fleet), name="fairlane-fleet").cancel)
        if options.metrics_port is not None:
            endpoint = _endpoint(worker, metrics, fleet)
            shown.push_async_callback(endpoint.close)
            await endpoint.open(options.metrics_host, options.metrics_port)
            worker.metrics_url = f"{endpoint.url}/metrics"
            log.info("worker %s answers at %s, /healthz and /readyz", worker.identity.name, worker.metrics_url)
        yield


def _gauges(worker: Worker) -> dict[str, Callable[[], Iterable[tuple[Labels, float]]]]:
    def alive() -> Iterable[tuple[Labels, float]]:
        loops = worker.health().loops
        return [((name,), float(name not in dead_loops(loops))) for name in loops]

    return {
        "fairlane_jobs_running": worker.running_by_queue,
        "fairlane_jobs_waiting_for_a_slot": lambda: [((), worker.health().waiting)],
        "fairlane_jobs_unsettled": lambda: [((), worker.health().unsettled)],
        "fairlane_slots": lambda: [((), worker.options.slots)],
        "fairlane_store_connected": lambda: [((), worker.health().is_connected)],
        "fairlane_worker_stopping": lambda: [((), worker.health().is_stopping)],
        "fairlane_loop_alive": alive,
    }


def _endpoint(worker: Worker, metrics: Metrics, fleet: Fleet | None) -> Endpoint:
    async def tell_metrics() -> Answer:
        if fleet is not None:
            await fleet.refresh()
        return Answer(as_text(metrics.samples()), content_type=CONTENT_TYPE)

    async def tell_health(*, is_ready: bool) -> Answer:
        """The whole of its health, and in words what is wrong: whether it is alive, or also ready for work."""
        health = worker.health()
        reasons = [f"loop {name!r} died: {state}" for name, state in dead_loops(health.loops).items()]
        if is_ready and health.is_stopping:
            reasons.append("it is stopping")
        if is_ready and not health.is_connected:
            reasons.append("the database cannot be reached")
        body = msgspec.json.encode({"reasons": reasons, **msgspec.to_builtins(health)}).decode()
        status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
        return Answer(f"{body}\n", status, "application/json")

    healthz, readyz = partial(tell_health, is_ready=False), partial(tell_health, is_ready=True)
    return Endpoint({"/metrics": tell_metrics, "/healthz": healthz, "/readyz": readyz}, metrics.failures)


async def _measure_lag(metrics: Metrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + MEASURED_EVERY
        await asyncio.sleep(MEASURED_EVERY)
        metrics.observe("fairlane_event_loop_lag_seconds", max(0.0, loop.time() - due))


async def _keep_fresh(fleet: Fleet) -> None:
    """For exporters that ask from a thread of their own, and cannot wait."""
    while True:
        await fleet.refresh()
        await asyncio.sleep(LOOKED_UP_EVERY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """A worker at one moment. `is_well` is False as soon as one of its loops has died."""

    is_well: bool
    is_connected: bool
    is_stopping: bool
    loops: Mapping[str, str]
    """Each loop by name: `running`, `ended`, or what it died of."""
    running: int
    waiting: int
    unsettled: int
    telemetry_failures: int = 0
    """What went wrong with event handlers, metrics and traces. No job is the worse for it."""
    warnings: Mapping[str, str] = field(default_factory=dict)
    """What fails now without harm to any job, by name: figures that are not kept, reports that do not get through."""


EVERY = 5 * SECOND
TAKEN_BACK_WITHIN = 2.0
"""Seconds for which a worker that has stopped waits until its report is taken back."""


async def keep_reporting(runtime: Runtime, say: Callable[[], WorkerReport]) -> None:
    """Report at once, again as soon as its slots may be full, and then every few seconds."""

    async def report() -> None:
        await runtime.outage.ride_out(
            lambda: runtime.store.run(records.report(runtime.identity.id, say())), "reporting"
        )

    wait = SECOND
    while True:
        await runtime.warnings.endure("reporting", report)
        await pause(runtime.clock, jittered(wait))
        wait = EVERY


async def take_back(store: Store, worker: WorkerIdentity) -> None:
    """Remove the report of a worker that has stopped, and those of dead workers that it had replaced. If that fails,
    they count as missing until their reports are a day old."""
    try:
        async with asyncio.timeout(TAKEN_BACK_WITHIN):
            for each in await store.ask(lambda moment: _only_replaced_by(moment, worker.id)):
                await store.run(records.report(UUID(each.id), None))
            await store.run(records.report(worker.id, None))
    except Exception as error:
        log.info("the report of worker %s could not be taken back: %s", worker.name, error)


def _only_replaced_by(moment: Moment, worker: UUID) -> Looking[list[WorkerSeen]]:
    """Workers that died, of whose queues some would be served by nobody once this one has stopped."""
    seen = yield from moment.workers()
    past = replaced(seen, moment.now) - replaced([each for each in seen if UUID(each.id) != worker], moment.now)
    return [each for each in seen if each.id in past]


LONGEST_REQUEST = 8 * 1024
ANSWERED_WITHIN = 10.0
"""Seconds from the first byte of a request to the last of the response."""
AT_ONCE = 32
"""Connections at most; more are turned away."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a path answers."""

    body: str
    status: HTTPStatus = HTTPStatus.OK
    content_type: str = "text/plain; charset=utf-8"


Routes = Mapping[str, Callable[[], Awaitable[Answer]]]


class Endpoint:
    """Serves its routes from the event loop that it was opened in: one that hangs does not answer, as it should."""

    def __init__(self, routes: Routes, failures: Failures) -> None:
        self._routes = routes
        self._failures = failures
        self._server: asyncio.Server | None = None
        self._open = 0
        self.url = ""

    async def open(self, host: str, port: int) -> None:
        """Listen, or raise `ConfigurationError` if that is not possible."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=LONGEST_REQUEST)
        except OSError as error:
            raise ConfigurationError(
                f"metrics_port={port}, metrics_host={host!r}: cannot listen there: {error.strerror or error}; "
                "give another port, or 0 for any that is free"
            ) from error
        bound = self._server.sockets[0].getsockname()
        self.url = f"http://{f'[{bound[0]}]' if ':' in bound[0] else bound[0]}:{bound[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._server.wait_closed(), 1.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            # Whoever asks badly, slowly or not at all is let go of.
            with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(ANSWERED_WITHIN):
                    if self._open <= AT_ONCE:
                        answer, with_body = await self._answer(await reader.readuntil(b"\r\n\r\n"))
                        writer.write(_response(answer, with_body=with_body))
                        await writer.drain()
        finally:
            self._open -= 1
            writer.close()

    async def _answer(self, question: bytes) -> tuple[Answer, bool]:
        method, _, rest = question.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if path not in self._routes:
            return Answer(f"there is {', '.join(self._routes)}\n", HTTPStatus.NOT_FOUND), True
        if method not in ("GET", "HEAD"):
            return Answer("only GET\n", HTTPStatus.METHOD_NOT_ALLOWED), True
        try:
            return await self._routes[path](), method == "GET"
        except Exception as error:
            self._failures.note("endpoint", f"answering {path} failed", error)
            return Answer(f"{type(error).__name__}\n", HTTPStatus.INTERNAL_SERVER_ERROR), True


def _response(answer: Answer, *, with_body: bool) -> bytes:
    body = answer.body.encode()
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.content_type}\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Cache-Control: no-store\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
