"""What a worker shows to those who watch it from outside: `/metrics`, `/healthz`, `/readyz`, gauges for exporters."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING
from uuid import UUID

import msgspec

from fairlane.clock import SECOND, Clock
from fairlane.store import records
from fairlane.store.protocol import Store, WorkerIdentity
from fairlane.store.stats import Looking, Moment
from fairlane.store.stats_values import WorkerReport, WorkerSeen, dead_loops, replaced
from fairlane.telemetry.endpoint import Answer, Endpoint
from fairlane.telemetry.metrics import CONTENT_TYPE, LOOKED_UP_EVERY, Fleet, Labels, Metrics, as_text
from fairlane.telemetry.telemetry import Telemetry
from fairlane.waits import Outage, jittered, pause
from fairlane.worker.options import WorkerOptions
from fairlane.worker.supervision import Troubles

if TYPE_CHECKING:
    from fairlane.worker.worker import Worker

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
    fleet = None
    if telemetry.fleet is not None and options.metrics_fleet:
        fleet = Fleet(telemetry.fleet, telemetry.failures, options.metrics_keys)
    removals = [metrics.read(name, reading) for name, reading in _gauges(worker).items()]
    if fleet is not None:
        removals.append(fleet.attach(metrics))
    endpoint = _endpoint(worker, metrics, fleet) if options.metrics_port is not None else None
    tasks = [asyncio.create_task(_measure_lag(metrics), name="fairlane-lag")]
    if fleet is not None and telemetry.is_exported:
        tasks.append(asyncio.create_task(_keep_fresh(fleet), name="fairlane-fleet"))
    try:
        if endpoint is not None and options.metrics_port is not None:
            await endpoint.open(options.metrics_host, options.metrics_port)
            worker.metrics_url = f"{endpoint.url}/metrics"
            log.info("worker %s answers at %s, /healthz and /readyz", worker.identity.name, worker.metrics_url)
        yield
    finally:
        for task in tasks:
            task.cancel()
        for remove in removals:
            remove()
        if endpoint is not None:
            await endpoint.close()


def _gauges(worker: Worker) -> dict[str, Callable[[], Iterable[tuple[Labels, float]]]]:
    def one(value: Callable[[Health], float]) -> Callable[[], Iterable[tuple[Labels, float]]]:
        return lambda: [((), float(value(worker.health())))]

    def alive() -> Iterable[tuple[Labels, float]]:
        loops = worker.health().loops
        return [((name,), float(name not in dead_loops(loops))) for name in loops]

    return {
        "fairlane_jobs_running": worker.running_by_queue,
        "fairlane_jobs_waiting_for_a_slot": one(lambda health: health.waiting),
        "fairlane_jobs_unsettled": one(lambda health: health.unsettled),
        "fairlane_slots": one(lambda health: worker.options.slots),
        "fairlane_store_connected": one(lambda health: health.is_connected),
        "fairlane_worker_stopping": one(lambda health: health.is_stopping),
        "fairlane_loop_alive": alive,
    }


def _endpoint(worker: Worker, metrics: Metrics, fleet: Fleet | None) -> Endpoint:
    async def tell_metrics() -> Answer:
        if fleet is not None:
            await fleet.refresh()
        return Answer(as_text(metrics.samples()), content_type=CONTENT_TYPE)

    async def tell_health() -> Answer:
        health = worker.health()
        return _verdict(health, _dead_loops(health))

    async def tell_readiness() -> Answer:
        health = worker.health()
        reasons = _dead_loops(health)
        if health.is_stopping:
            reasons.append("it is stopping")
        if not health.is_connected:
            reasons.append("the database cannot be reached")
        return _verdict(health, reasons)

    routes = {"/metrics": tell_metrics, "/healthz": tell_health, "/readyz": tell_readiness}
    return Endpoint(routes, metrics.failures)


def _dead_loops(health: Health) -> list[str]:
    return [f"loop {name!r} died: {state}" for name, state in dead_loops(health.loops).items()]


def _verdict(health: Health, reasons: list[str]) -> Answer:
    """The whole of its health, and in words what is wrong."""
    body = msgspec.json.encode({"reasons": reasons, **msgspec.to_builtins(health)}).decode()
    status = HTTPStatus.SERVICE_UNAVAILABLE if reasons else HTTPStatus.OK
    return Answer(f"{body}\n", status, "application/json")


async def _measure_lag(metrics: Metrics) -> None:
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + MEASURED_EVERY
        await asyncio.sleep(MEASURED_EVERY)
        metrics.lag.observe(max(0.0, loop.time() - due))


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
    troubles: Mapping[str, str] = field(default_factory=dict)
    """What fails now without harm to any job, by name: figures that are not kept, reports that do not get through."""


EVERY = 5 * SECOND
ANSWER_WITHIN = 2.0
"""Seconds for which a worker that has stopped waits until its report is taken back."""


async def keep_reporting(
    store: Store,
    outage: Outage,
    clock: Clock,
    worker: WorkerIdentity,
    say: Callable[[], WorkerReport],
    troubles: Troubles,
) -> None:
    """Report at once, again as soon as its slots may be full, and then every few seconds."""
    wait = SECOND
    while True:
        await troubles.endure(
            "reporting", lambda: outage.ride_out(lambda: store.run(records.report(worker.id, say())), "reporting")
        )
        await pause(clock, jittered(wait))
        wait = EVERY


async def take_back(store: Store, worker: WorkerIdentity) -> None:
    """It has stopped, and is not missed; nor is anybody whose place it had taken. Where that cannot be said, they are:
    until their reports are a day old."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN):
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
