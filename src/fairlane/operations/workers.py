"""Workers as operators see them: which are alive, what they do, which have gone silent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from fairlane.clock import SECOND, Instant, as_datetime
from fairlane.operations.section import Section
from fairlane.operations.views import BlockView, LongRunView, WorkerList, WorkerView
from fairlane.parameters import checked_methods
from fairlane.store.stats import Looking, Moment
from fairlane.store.stats_values import AnyBlock, AnyLongRun, AnyWorker, BlockedLoop, LongRun, WorkerSeen, replaced


@checked_methods
class Workers(Section):
    """`app.operations.workers`: live workers, and those that have gone silent."""

    # Last: below it, `list` in an annotation would be this method.
    async def list(self) -> WorkerList:
        """Every worker that has reported within the last day and has not stopped as it should. One that died and was
        replaced is forgotten after a quarter of an hour."""
        return await (await self._store()).ask(workers_at)


def workers_at(moment: Moment) -> Looking[WorkerList]:
    """The same, as of one moment."""
    return worker_list((yield from moment.workers()), moment.now)


def worker_list(seen: Sequence[WorkerSeen], now: Instant) -> WorkerList:
    """The same, made from what was read."""
    past = replaced(seen, now)
    views = [_view(each, now, is_replaced=each.id in past) for each in seen]
    serving = [each for each in views if each.takes_jobs]
    views = [each for each in views if not (each.is_gone and each.is_replaced)]
    return WorkerList(
        now=as_datetime(now),
        workers=views,
        alive=sum(not each.is_late for each in views),
        late=sum(each.state == "late" and not each.is_gone for each in views),
        stopping=sum(each.is_stopping and not each.is_late for each in views),
        slots=sum(each.concurrency for each in serving),
        running=sum(each.running for each in serving),
    )


def _view(seen: WorkerSeen, now: Instant, *, is_replaced: bool) -> WorkerView:
    report = seen.report
    if is_late := seen.is_late(now):
        # What it ran may have ended since, or runs elsewhere.
        report = msgspec.structs.replace(report, long_runs=[], lost_runs=0, blocks=[])
    return WorkerView(
        **_shared(AnyWorker, report),
        id=seen.id,
        is_late=is_late,
        is_gone=seen.is_gone(now),
        is_replaced=is_replaced,
        started_at=as_datetime(report.started_at),
        seen_at=as_datetime(seen.seen_at),
        clock_offset=report.clock_offset / SECOND,
        is_dispatcher=seen.is_dispatcher,
        long_runs=[_long_run(each, report.name, now) for each in report.long_runs],
        blocks=[_block(each, now) for each in report.blocks],
    )


def _long_run(run: LongRun, worker: str, now: Instant) -> LongRunView:
    return LongRunView(
        **_shared(AnyLongRun, run),
        worker=worker,
        since=as_datetime(run.since),
        ran=max(0, now - run.since) / SECOND,
        usual=None if run.usual is None else run.usual / SECOND,
    )


def _block(block: BlockedLoop, now: Instant) -> BlockView:
    until = None if block.until is None else as_datetime(block.until)
    seconds = max(0, (block.until or now) - block.since) / SECOND
    return BlockView(**_shared(AnyBlock, block), since=as_datetime(block.since), until=until, seconds=seconds)


def _shared(kind: type[msgspec.Struct], reported: msgspec.Struct) -> dict[str, Any]:
    """What a view and the report that it is made of have in common."""
    return {name: getattr(reported, name) for name in kind.__struct_fields__}
