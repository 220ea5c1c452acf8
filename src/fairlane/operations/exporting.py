"""Jobs handed out for files: page after page, so that no more than one of them is ever in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fairlane.errors import ConfigurationError
from fairlane.job import JobRecord
from fairlane.operations.describing import describe_job
from fairlane.operations.jobs import redacted, redacted_error
from fairlane.redaction import Redactor
from fairlane.store.finding import find_jobs
from fairlane.store.operators import JobFilter, JobPage
from fairlane.store.protocol import Store

__all__ = ["describe_exported", "export_jobs", "exported_columns"]

PAGE = 200
"""Jobs of one page: their payloads are in memory together."""
# fmt: off
COLUMNS = (
    "id", "queue", "task", "state", "priority", "keys", "attempt", "max_attempts", "replays", "context", "enqueued_at",
    "due_at", "claimed_at", "finished_at", "worker", "error", "progress", "progress_message", "cancel_requested",
    "has_on_dead",
)
# fmt: on


async def export_jobs(
    store: Store, wanted: JobFilter, *, after: str | None = None, limit: int | None = None
) -> AsyncIterator[JobPage]:
    """Every job that fits, or the first `limit`, the newest first. Each page says where to go on after it; an empty one
    is there to say how far the look has come."""
    if limit is not None and limit < 1:
        raise ConfigurationError(f"limit={limit} leaves nothing to export; give a number above 0, or leave it out")
    left = limit
    while True:
        page = await find_jobs(store, wanted, after, PAGE if left is None else min(PAGE, left))
        yield page
        after = page.after
        if left is not None:
            left -= len(page.jobs)
        if after is None or left == 0:
            return


def describe_exported(
    record: JobRecord, *, with_payload: bool = False, redactor: Redactor | None = None
) -> dict[str, Any]:
    """A job as `describe_job` tells it; its call and its result only if they are asked for."""
    described = describe_job(redacted_error(redactor, record))
    if with_payload:
        call, result = redacted(redactor, record)
        described |= {"call": call, "result": result}
    return described


def exported_columns(*, with_payload: bool = False) -> tuple[str, ...]:
    """What `describe_exported` tells of each job, in that order."""
    return (*COLUMNS, "call", "result") if with_payload else COLUMNS
