"""What is wrong with schedules: a slot has come, and nobody has fired it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from shlex import quote

from fairlane.clock import SECOND, as_datetime
from fairlane.operations.charting import MINUTE
from fairlane.operations.findings import Finding, Level
from fairlane.store.queue_time import QueueTime
from fairlane.store.schedules import ScheduleRow

__all__ = ["about_schedules"]

LATE = MINUTE
"""After which a slot that was not fired is told: workers fire within a second, and look again twice a minute."""


def about_schedules(rows: Iterable[ScheduleRow], time: QueueTime, *, has_worker: bool) -> Iterator[Finding]:
    """Slots that nobody fires. One that no worker has any more, although there are some, may have been removed."""
    for row in rows:
        if row.is_paused or row.next_at is None or time.wall - row.next_at <= LATE:
            continue
        due = f"{as_datetime(row.next_at - row.next_at % SECOND):%Y-%m-%d %H:%M:%S} UTC"
        is_removed = has_worker and row.is_orphaned(time.now)
        nobody = ": no worker has it any more" if row.is_orphaned(time.now) else ""
        pause = f"`fairlane schedules pause {quote(row.name)}`"
        yield Finding(
            check="overdue schedule",
            level=Level.NOTE if is_removed else Level.FAULT,
            queue=row.told()["queue"],
            message=f"schedule {row.name!r} was due at {due} and nobody has fired it{nobody}",
            remedy=f"start a worker whose program declares it, or look at the log of one; if it is to rest: {pause}",
        )
