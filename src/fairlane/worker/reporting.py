"""What a worker says of itself, every few seconds, for people who look."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fairlane.clock import SECOND, Clock
from fairlane.store.figures import WorkerReport
from fairlane.store.protocol import Store, WorkerIdentity
from fairlane.worker.timing import Outage, jittered, pause
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
    """Report at once, and then every few seconds."""
    while True:
        await troubles.endure("reporting", lambda: outage.ride_out(lambda: store.report(worker, say()), "reporting"))
        await pause(clock, jittered(EVERY))


async def take_back(store: Store, worker: WorkerIdentity) -> None:
    """It has stopped, and is not missed. Where that cannot be said, it is: until its report is a day old."""
    try:
        async with asyncio.timeout(ANSWER_WITHIN):
            await store.report(worker, None)
    except Exception as error:
        log.info("the report of worker %s could not be taken back: %s", worker.name, error)
