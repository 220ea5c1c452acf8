"""What a worker says of itself, every few seconds, for people who look."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from uuid import UUID

from fairlane.clock import SECOND, Clock
from fairlane.store.protocol import Store, WorkerIdentity
from fairlane.store.stats import Looking, Moment
from fairlane.store.stats_values import WorkerReport, WorkerSeen, replaced
from fairlane.waits import Outage, jittered, pause
from fairlane.worker.troubles import Troubles

__all__ = ["EVERY", "keep_reporting", "take_back"]

log = logging.getLogger("fairlane.worker")

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
        await troubles.endure("reporting", lambda: outage.ride_out(lambda: store.report(worker, say()), "reporting"))
        await pause(clock, jittered(wait))
        wait = EVERY


async def take_back(store: Store, worker: WorkerIdentity) -> None:
    """It has stopped, and is not missed; nor is anybody whose place it had taken. Where that cannot be said, they are:
    until their reports are a day old."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN):
            for each in await store.ask(lambda moment: _only_replaced_by(moment, worker.id)):
                await store.report(WorkerIdentity(UUID(each.id), each.report.name), None)
            await store.report(worker, None)
    except Exception as error:
        log.info("the report of worker %s could not be taken back: %s", worker.name, error)


def _only_replaced_by(moment: Moment, worker: UUID) -> Looking[list[WorkerSeen]]:
    """Workers that died, of whose queues some would be served by nobody once this one has stopped."""
    seen = yield from moment.workers()
    past = replaced(seen, moment.now) - replaced([each for each in seen if UUID(each.id) != worker], moment.now)
    return [each for each in seen if each.id in past]
