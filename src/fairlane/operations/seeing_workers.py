"""Workers as operators see them: who is there, what it does, who has gone silent."""

from __future__ import annotations

from collections.abc import Sequence

from fairlane.clock import SECOND, Instant, as_datetime
from fairlane.operations.views import WorkerList, WorkerView
from fairlane.store.figures import WorkerSeen
from fairlane.store.protocol import Store

__all__ = ["list_workers", "worker_list"]

GONE_AFTER = 15 * 60 * SECOND


async def list_workers(store: Store) -> WorkerList:
    """Every worker that has reported within the last day and has not stopped as it should."""
    return worker_list(await store.workers(), await store.now())


def worker_list(seen: Sequence[WorkerSeen], now: Instant) -> WorkerList:
    """The same, of those that were seen."""
    views = [_view(each, now) for each in seen]
    alive = [each for each in views if not each.is_late]
    return WorkerList(
        now=as_datetime(now),
        workers=views,
        alive=len(alive),
        late=sum(each.is_late and not each.is_gone for each in views),
        slots=sum(each.concurrency for each in alive),
        running=sum(each.running for each in alive),
    )


def _view(seen: WorkerSeen, now: Instant) -> WorkerView:
    report = seen.report
    return WorkerView(
        id=seen.id,
        name=report.name,
        host=report.host,
        pid=report.pid,
        version=report.version,
        queues=report.queues,
        concurrency=report.concurrency,
        running=report.running,
        waiting=report.waiting,
        unsettled=report.unsettled,
        is_well=report.is_well,
        is_stopping=report.is_stopping,
        is_late=seen.is_late(now),
        is_gone=now - seen.seen_at > GONE_AFTER,
        started_at=as_datetime(report.started_at),
        seen_at=as_datetime(seen.seen_at),
        clock_offset=report.clock_offset / SECOND,
        loops=report.loops,
        troubles=report.troubles,
        is_dispatcher=seen.is_dispatcher,
        tasks=report.tasks,
        figures=report.figures,
    )
