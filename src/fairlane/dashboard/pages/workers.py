"""Who is there, what each does, and who has gone silent."""

from __future__ import annotations

from typing import Any

from fairlane.clock import lasting
from fairlane.dashboard.page import Ask
from fairlane.operations.views import WorkerView

ROWS = 200
"""Those that need somebody come first, so what is cut off is well."""
_ORDER = ("late", "unwell", "blocked", "troubled", "stopping", "well", "replaced")


async def look(ask: Ask) -> dict[str, Any]:
    found = await ask.operations.workers.list()
    queue, search = ask.query.get("queue", ""), ask.query.get("search", "").strip()
    wanted = [
        each
        for each in found.workers
        if (not queue or queue in each.queues) and search.lower() in f"{each.name} {each.host} {each.pid}".lower()
    ]
    wanted.sort(key=lambda each: (_ORDER.index(each.state), each.name, each.id))
    return {
        "found": found,
        "rows": wanted[:ROWS],
        "remarks_on": remarks_on,
        "more": max(0, len(wanted) - ROWS),
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
    remarks += [f"{name}: {words}" for name, words in worker.troubles.items()]
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
