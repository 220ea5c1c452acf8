"""What is enqueued again and again: when each is due, what it did last, and what can be done with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fairlane.dashboard.deeds import NOBODY
from fairlane.dashboard.page import Ask, Page
from fairlane.operations import ScheduleView

ROWS = 200
"""Those that need somebody come first, so what is cut off is well."""
_ORDER = ("orphaned", "paused", "active")


@dataclass(frozen=True, slots=True)
class _Row:
    """A schedule, and what may be seen of its call."""

    schedule: ScheduleView
    call: Any

    @property
    def remark(self) -> str:
        """What is to be known about it besides."""
        triggers = self.schedule.triggers_in_words
        nobody = NOBODY if self.schedule.state == "orphaned" else ""
        return " ".join(filter(None, (nobody, triggers and f"{triggers}.")))


async def look(ask: Ask) -> dict[str, Any]:
    found = await ask.operations.schedules.list()
    state, search = ask.query.get("state", ""), ask.query.get("search", "").strip()
    fitting = [
        each
        for each in found
        if (not state or state == each.state) and search.lower() in f"{each.name} {each.task} {each.queue}".lower()
    ]
    wanted = sorted(fitting, key=lambda each: (_ORDER.index(each.state), each.name))
    return {
        "rows": [_Row(each, each.call) for each in wanted[:ROWS]],
        "more": max(0, len(wanted) - ROWS),
        "counts": {state: sum(each.state == state for each in found) for state in _ORDER},
        "waiting": sum(each.triggers_waiting for each in found),
        "has_any": bool(found),
        "state": state,
        "states": _ORDER,
        "search": search,
    }


PAGE = Page(path="/schedules", title="Schedules", template="schedules.html", look=look, nav="Schedules", shortcut="s")
