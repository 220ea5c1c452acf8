"""What is enqueued again and again: when each is due, what it did last, and what can be done with it."""

from __future__ import annotations

from typing import Any

from fairlane.dashboard.deeds import NOBODY
from fairlane.dashboard.page import Ask

ROWS = 200
"""Those that need somebody come first, so what is cut off is well."""
_ORDER = ("orphaned", "paused", "active")


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
        "rows": wanted[:ROWS],
        "nobody": NOBODY,
        "more": max(0, len(wanted) - ROWS),
        "counts": {state: sum(each.state == state for each in found) for state in _ORDER},
        "waiting": sum(each.triggers_waiting for each in found),
        "has_any": bool(found),
        "state": state,
        "states": _ORDER,
        "search": search,
    }
