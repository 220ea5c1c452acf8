"""Jobs that fit a filter, one job with all that is known of it, and what can be done with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fairlane.dashboard.actions import Deed, Told, told_of_report
from fairlane.dashboard.job_filters import filter_from, job_from, limit_from, selection_from, shown_filter
from fairlane.dashboard.page import Ask, Page, number_from
from fairlane.job import State
from fairlane.operations import JobFilter, Operations
from fairlane.policy.unique import checked_on_replay_conflict

ROWS = 50
WAITING = (State.SCHEDULED, State.READY)


async def look_at_jobs(ask: Ask) -> dict[str, Any]:
    page = await ask.operations.list_jobs(filter_from(ask.query), ROWS, ask.query.get("after") or None, looks=1)
    return {"jobs": page.jobs, "after": page.after, "filter": shown_filter(ask.query), "states": list(map(str, State))}


async def look_at_job(ask: Ask) -> dict[str, Any]:
    details = await ask.operations.show_job(job_from(ask.values["job"]))
    record = details.record
    return {
        "title": record.task,
        "job": record,
        "attempts": details.attempts,
        "call": details.call,
        "result": details.result,
        "told": None if record.state.is_final else await ask.operations.explain_job(record.id),
        "deeds": [deed for deed, states in _POSSIBLE if record.state in states],
    }


async def cancel(operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool) -> Told:
    chosen, limit = selection_from(fields), limit_from(fields)
    return told_of_report(
        await operations.cancel_jobs(chosen, limit=limit, actor=actor, reason=reason, dry_run=dry_run)
    )


async def retry(operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool) -> Told:
    chosen, limit = selection_from(fields), limit_from(fields)
    return told_of_report(await operations.retry_jobs(chosen, limit=limit, actor=actor, reason=reason, dry_run=dry_run))


async def force(operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool) -> Told:
    job = job_from(fields.get("job", ""))
    return told_of_report(await operations.force_jobs([job], actor=actor, reason=reason, dry_run=dry_run))


async def replay(operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool) -> Told:
    chosen, limit = selection_from(fields), limit_from(fields)
    delay = fields.get("delay", "").strip() or None
    on_conflict = checked_on_replay_conflict(fields.get("on_conflict") or "reject")
    report = await operations.replay_jobs(
        chosen, delay=delay, on_conflict=on_conflict, limit=limit, actor=actor, reason=reason, dry_run=dry_run
    )
    return told_of_report(report)


async def purge(operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool) -> Told:
    chosen, limit = selection_from(fields), limit_from(fields)
    if isinstance(chosen, JobFilter) and chosen.state is None:
        chosen = filter_from(fields, state=State.DEAD)
    return told_of_report(await operations.purge_jobs(chosen, limit=limit, actor=actor, reason=reason, dry_run=dry_run))


CANCEL = Deed(
    name="cancel-jobs",
    title="Cancel",
    button="Cancel",
    carry_out=cancel,
    afterwards="This cannot be undone. A cancelled job can be replayed: it starts anew, at the end of its lane.",
)
RETRY = Deed(
    name="retry-jobs",
    title="Retry now",
    button="Retry now",
    carry_out=retry,
    afterwards="This cannot be undone: the times that they waited for are gone. What has not started can be cancelled.",
)
FORCE = Deed(
    name="force-jobs",
    title="Run now",
    button="Run now",
    carry_out=force,
    warning="It starts in the next free slot, whatever pauses and limits say. Every limit counts it.",
    afterwards="This cannot be undone. As long as it has not started, it can be cancelled.",
)
REPLAY = Deed(
    name="replay-jobs",
    title="Replay",
    button="Replay",
    carry_out=replay,
    afterwards="This cannot be undone. What has not started can be cancelled.",
)
PURGE = Deed(
    name="purge-jobs",
    title="Purge",
    button="Purge for good",
    carry_out=purge,
    warning="They are removed with their history. This cannot be undone.",
    afterwards="They are gone with their history. This cannot be undone.",
)
DEEDS = (CANCEL, RETRY, FORCE, REPLAY, PURGE)

_POSSIBLE: tuple[tuple[Deed, tuple[State, ...]], ...] = (
    (FORCE, WAITING),
    (RETRY, (State.SCHEDULED,)),
    (CANCEL, (*WAITING, State.RUNNING)),
    (REPLAY, (State.DEAD, State.CANCELLED)),
    (PURGE, (State.DONE, State.DEAD, State.CANCELLED)),
)

JOBS = Page(path="/jobs", title="Jobs", template="jobs.html", look=look_at_jobs, nav="Jobs", shortcut="j")
JOB = Page(path="/jobs/{job}", title="Job", template="job.html", look=look_at_job, nav="Jobs")


async def look_at_dead(ask: Ask) -> dict[str, Any]:
    wanted = filter_from(ask.query, state=State.DEAD)
    page = await ask.operations.list_jobs(wanted, ROWS, ask.query.get("after") or None, looks=1)
    return {"jobs": page.jobs, "after": page.after, "filter": {**shown_filter(ask.query), "state": "dead"}}


DEAD = Page(path="/dead", title="Dead", template="dead.html", look=look_at_dead, nav="Dead", shortcut="d")


LARGEST = 2**62


async def look_at_audit(ask: Ask) -> dict[str, Any]:
    queue = ask.query.get("queue") or None
    before = number_from(ask.query, "before", 0, low=0, high=LARGEST) or None
    page = await ask.operations.list_audit(queue, before=before, limit=ROWS)
    return {"entries": page.entries, "before": page.before, "queue": queue}


AUDIT = Page(path="/audit", title="Audit", template="audit.html", look=look_at_audit, nav="Audit", shortcut="a")
