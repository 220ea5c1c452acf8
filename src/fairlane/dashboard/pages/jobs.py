"""Jobs that fit a filter, one job with all that is known of it, and what can be done with them."""

from __future__ import annotations

from typing import Any

from fairlane.dashboard.deeds import CANCEL, FORCE, PURGE, REPLAY, RETRY, Deed
from fairlane.dashboard.page import Ask, filter_from, job_from, shown_filter
from fairlane.job import State

ROWS = 50
WAITING = (State.SCHEDULED, State.READY)


async def look_at_jobs(ask: Ask, state: State | None = None) -> dict[str, Any]:
    wanted, after = filter_from(ask.query, state), ask.query.get("after") or None
    page = await ask.operations.jobs.list(wanted, ROWS, after, looks=1)
    shown = shown_filter(ask.query) | ({} if state is None else {"state": str(state)})
    return {"jobs": page.jobs, "after": page.after, "filter": shown, "states": list(map(str, State))}


async def look_at_dead(ask: Ask) -> dict[str, Any]:
    return await look_at_jobs(ask, State.DEAD)


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


LONGEST_NUMBER = 19
"""Digits that a database can hold."""


async def look_at_audit(ask: Ask) -> dict[str, Any]:
    queue = ask.query.get("queue") or None
    text = ask.query.get("before", "")
    before = int(text) if text.isdecimal() and len(text) < LONGEST_NUMBER else None
    page = await ask.operations.audit.list(queue, before=before or None, limit=ROWS)
    return {"entries": page.entries, "before": page.before, "queue": queue}
