"""Jobs that fit a filter, one job with all that is known of it, and what can be done with them."""

from __future__ import annotations

from typing import Any

from fairlane.dashboard.deeds import CANCEL, FORCE, PURGE, REPLAY, RETRY, Deed
from fairlane.dashboard.page import Ask, Page, filter_from, job_from, number_from, shown_filter
from fairlane.job import State

ROWS = 50
WAITING = (State.SCHEDULED, State.READY)


async def look_at_jobs(ask: Ask) -> dict[str, Any]:
    page = await ask.operations.jobs.list(filter_from(ask.query), ROWS, ask.query.get("after") or None, looks=1)
    return {"jobs": page.jobs, "after": page.after, "filter": shown_filter(ask.query), "states": list(map(str, State))}


async def look_at_job(ask: Ask) -> dict[str, Any]:
    details = await ask.operations.jobs.show(job_from(ask.values["job"]))
    record = details.record
    return {
        "title": record.task,
        "job": record,
        "attempts": details.attempts,
        "call": details.call,
        "result": details.result,
        "told": None if record.state.is_final else await ask.operations.jobs.explain(record.id),
        "deeds": [deed for deed, states in _POSSIBLE if record.state in states],
    }


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
    page = await ask.operations.jobs.list(wanted, ROWS, ask.query.get("after") or None, looks=1)
    return {"jobs": page.jobs, "after": page.after, "filter": {**shown_filter(ask.query), "state": "dead"}}


DEAD = Page(path="/dead", title="Dead", template="dead.html", look=look_at_dead, nav="Dead", shortcut="d")


LARGEST = 2**62


async def look_at_audit(ask: Ask) -> dict[str, Any]:
    queue = ask.query.get("queue") or None
    before = number_from(ask.query, "before", 0, low=0, high=LARGEST) or None
    page = await ask.operations.audit.list(queue, before=before, limit=ROWS)
    return {"entries": page.entries, "before": page.before, "queue": queue}


AUDIT = Page(path="/audit", title="Audit", template="audit.html", look=look_at_audit, nav="Audit", shortcut="a")
