"""The pages: what each looks up for its template. A new one is a function, a template, and a line of `PAGES`."""

from __future__ import annotations

from typing import Any

from fairlane.clock import lasting
from fairlane.dashboard import trials
from fairlane.dashboard.actions import CANCEL, FORCE, NOBODY, PURGE, REPLAY, RETRY, Action
from fairlane.dashboard.page import Ask, Page, filter_from, job_from, keys_of, shown_filter, watched_from
from fairlane.job import State
from fairlane.operations.views import WorkerView

ROWS = 50
"""Of lists with more pages."""
MOST_ROWS = 200
"""Of lists without: those that need somebody come first, so what is cut off is well."""
SORTS = {"name": "Key", "waiting": "Waiting", "running": "Running", "ended": "Ended 24 h", "started": "Last start"}
LONGEST_SEARCH = 200
LONGEST_NUMBER = 19
"""Digits that a database can hold."""
SCHEDULE_STATES = ("orphaned", "paused", "active")
WORKER_STATES = ("late", "unwell", "blocked", "troubled", "stopping", "well", "replaced")
WAITING = (State.SCHEDULED, State.READY)
POSSIBLE: tuple[tuple[Action, tuple[State, ...]], ...] = (
    (FORCE, WAITING),
    (RETRY, (State.SCHEDULED,)),
    (CANCEL, (*WAITING, State.RUNNING)),
    (REPLAY, (State.DEAD, State.CANCELLED)),
    (PURGE, (State.DONE, State.DEAD, State.CANCELLED)),
)
"""What can be done with a job in which states."""


async def look_at_overview(ask: Ask) -> dict[str, Any]:
    seen, watched = await ask.operations.overview_beside(watched_from(ask.query.getlist("watch")))
    return {"seen": seen, "watched": watched}


async def look_at_queues(ask: Ask) -> dict[str, Any]:
    return {"queues": await ask.operations.queues.list()}


async def look_at_queue(ask: Ask) -> dict[str, Any]:
    seen = await ask.operations.queues.show(ask.values["queue"])
    overrides = await ask.operations.overrides.list(seen.view.queue)
    return {"title": seen.view.queue, "seen": seen, "overrides": overrides}


async def look_at_keys(ask: Ask) -> dict[str, Any]:
    query = ask.query
    seen = await ask.operations.keys.list(
        ask.values["queue"],
        query.get("by") or None,
        sort=query.get("sort") or "waiting",
        search=query.get("search", "").strip()[:LONGEST_SEARCH],
        held_only=query.get("held") == "1",
        after=query.get("after") or None,
        limit=ROWS,
    )
    return {"title": f"Keys of {seen.queue}", "seen": seen, "is_first": not query.get("after"), "sorts": SORTS}


async def look_at_key(ask: Ask) -> dict[str, Any]:
    queue = ask.values["queue"]
    seen = await ask.operations.keys.show(queue, keys_of(ask.query))
    title = ", ".join(f"{name}={value}" for name, value in seen.view.keys.items())
    return {"title": title, "queue": queue, "seen": seen}


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
        "explanation": None if record.state.is_final else await ask.operations.jobs.explain(record.id),
        "actions": [action for action, states in POSSIBLE if record.state in states],
    }


async def look_at_audit(ask: Ask) -> dict[str, Any]:
    queue = ask.query.get("queue") or None
    text = ask.query.get("before", "")
    before = int(text) if text.isdecimal() and len(text) < LONGEST_NUMBER else None
    page = await ask.operations.audit.list(queue, before=before or None, limit=ROWS)
    return {"entries": page.entries, "before": page.before, "queue": queue}


async def look_at_schedules(ask: Ask) -> dict[str, Any]:
    found = await ask.operations.schedules.list()
    state, search = ask.query.get("state", ""), ask.query.get("search", "").strip()
    wanted = [
        each
        for each in found
        if (not state or state == each.state) and search.lower() in f"{each.name} {each.task} {each.queue}".lower()
    ]
    wanted.sort(key=lambda each: (SCHEDULE_STATES.index(each.state), each.name))
    return {
        "rows": wanted[:MOST_ROWS],
        "nobody": NOBODY,
        "more": max(0, len(wanted) - MOST_ROWS),
        "counts": {state: sum(each.state == state for each in found) for state in SCHEDULE_STATES},
        "waiting": sum(each.triggers_waiting for each in found),
        "has_any": bool(found),
        "state": state,
        "states": SCHEDULE_STATES,
        "search": search,
    }


async def look_at_workers(ask: Ask) -> dict[str, Any]:
    found = await ask.operations.workers.list()
    queue, search = ask.query.get("queue", ""), ask.query.get("search", "").strip()
    wanted = [
        each
        for each in found.workers
        if (not queue or queue in each.queues) and search.lower() in f"{each.name} {each.host} {each.pid}".lower()
    ]
    wanted.sort(key=lambda each: (WORKER_STATES.index(each.state), each.name, each.id))
    return {
        "found": found,
        "rows": wanted[:MOST_ROWS],
        "remarks_on": remarks_on,
        "more": max(0, len(wanted) - MOST_ROWS),
        "queues": sorted({name for each in found.workers for name in each.queues}),
        "queue": queue,
        "search": search,
        "unwell": sum(each.state == "unwell" for each in found.workers),
    }


def remarks_on(worker: WorkerView) -> list[str]:
    """What is wrong with it, each with what to do about it."""
    state, dead = worker.state, worker.dead_loops
    remarks = [f"Its loop {name} died: {cause}. Restart it, and look at its log." for name, cause in dead.items()]
    if state == "late":
        remarks.append("It died or is frozen. Its jobs run again once their leases end; restart it.")
    elif state == "unwell" and not dead:
        remarks.append("It says of itself that it is not well. Look at its log.")
    elif state == "stopping":
        remarks.append("It finishes what runs and claims nothing more.")
    elif state == "replaced":
        remarks.append("It died, and others have taken its place. Its jobs run again once their leases end.")
    remarks += [f"{name}: {words}" for name, words in worker.warnings.items()]
    remarks += [f"{block.words[0].upper()}{block.words[1:]}." for block in worker.blocks]
    for run in worker.long_runs:
        holds = "" if run.limit is None else f", and holds {run.limit}, for which others wait"
        remarks.append(f"Job {run.job} ({run.task}) has run for {lasting(run.ran)}{holds}.")
    if worker.lost_runs:
        remarks.append(f"{worker.lost_words}.")
    if worker.has_uneven_clock:
        remarks.append(
            f"Its clock differs from the database’s by {worker.clock_offset:+.1f} s. Let its machine keep time (NTP)."
        )
    return remarks


# fmt: off
PAGES: tuple[Page, ...] = (
    Page("/", "Overview", "overview.html", look_at_overview, "Overview", "o"),
    Page("/queues", "Queues", "queues.html", look_at_queues, "Queues", "q"),
    Page("/queues/{queue}", "Queue", "queue.html", look_at_queue, "Queues"),
    Page("/queues/{queue}/keys", "Keys", "keys.html", look_at_keys, "Queues"),
    Page("/queues/{queue}/key", "Key", "key.html", look_at_key, "Queues"),
    Page("/jobs", "Jobs", "jobs.html", look_at_jobs, "Jobs", "j"),
    Page("/jobs/{job}", "Job", "job.html", look_at_job, "Jobs"),
    Page("/dead", "Dead", "dead.html", look_at_dead, "Dead", "d"),
    Page("/schedules", "Schedules", "schedules.html", look_at_schedules, "Schedules", "s"),
    Page("/workers", "Workers", "workers.html", look_at_workers, "Workers", "w"),
    Page("/audit", "Audit", "audit.html", look_at_audit, "Audit", "a"),
    Page("/try", "Try a policy", "try.html", trials.look, "Try", "t", submit=trials.submit, is_live=False),
)
# fmt: on
