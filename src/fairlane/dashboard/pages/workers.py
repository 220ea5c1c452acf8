"""Who is there, what each does, and who has gone silent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fairlane.dashboard.page import Ask, Page
from fairlane.operations.hinting import UNEVEN_CLOCK
from fairlane.operations.views import WorkerView

__all__ = ["PAGE"]

ROWS = 200
"""Those that need somebody come first, so what is cut off is well."""
_ORDER = ("late", "unwell", "stopping", "well")


@dataclass(frozen=True, slots=True)
class _Row:
    """A worker, and what to think of it."""

    worker: WorkerView
    state: str
    remarks: tuple[str, ...]
    """What is wrong, each with what to do about it."""
    dead_loops: tuple[str, ...]

    @property
    def used(self) -> float:
        """The part of its slots in which a job runs."""
        return min(1.0, self.worker.running / self.worker.concurrency) if self.worker.concurrency else 0.0


async def look(ask: Ask) -> dict[str, Any]:
    found = await ask.operations.list_workers()
    queue, search = ask.query.get("queue", ""), ask.query.get("search", "").strip()
    wanted = [
        _row(each)
        for each in found.workers
        if (not queue or queue in each.queues) and search.lower() in f"{each.name} {each.host} {each.pid}".lower()
    ]
    rows = sorted(wanted, key=lambda row: (_ORDER.index(row.state), row.worker.name, row.worker.id))
    return {
        "found": found,
        "rows": rows[:ROWS],
        "more": max(0, len(rows) - ROWS),
        "queues": sorted({name for each in found.workers for name in each.queues}),
        "queue": queue,
        "search": search,
        "unwell": sum(row.state == "unwell" for row in map(_row, found.workers)),
    }


def _row(worker: WorkerView) -> _Row:
    dead = tuple(sorted(name for name, state in worker.loops.items() if state not in ("running", "ended")))
    state = _state(worker)
    return _Row(
        worker=worker,
        state=state,
        remarks=_remarks(worker, state, dead),
        dead_loops=dead,
    )


def _state(worker: WorkerView) -> str:
    if worker.is_late:
        return "late"
    if not worker.is_well:
        return "unwell"
    return "stopping" if worker.is_stopping else "well"


def _remarks(worker: WorkerView, state: str, dead: tuple[str, ...]) -> tuple[str, ...]:
    remarks = [f"Its loop {name} died: {worker.loops[name]}. Restart it, and look at its log." for name in dead]
    if state == "late":
        remarks.append("It died, or stands still. Its jobs run again once their leases end; restart it.")
    elif state == "unwell" and not dead:
        remarks.append("It says of itself that it is not well. Look at its log.")
    elif state == "stopping":
        remarks.append("It finishes what runs and claims nothing more.")
    if abs(worker.clock_offset) > UNEVEN_CLOCK:
        remarks.append(
            f"Its clock differs from the database’s by {worker.clock_offset:+.1f} s. Let its machine keep time (NTP)."
        )
    return tuple(remarks)


PAGE = Page(path="/workers", title="Workers", template="workers.html", look=look, nav="Workers", shortcut="w")
