"""Jobs that failed for good: look at them, put them back, or remove them, one by one or all that fit."""

from __future__ import annotations

from typing import Any

from fairlane.dashboard.choosing import filter_from, shown_filter
from fairlane.dashboard.page import Ask, Page
from fairlane.job import State

__all__ = ["PAGE"]

ROWS = 50


async def look_at_dead(ask: Ask) -> dict[str, Any]:
    wanted = filter_from(ask.query, state=State.DEAD)
    page = await ask.operations.list_jobs(wanted, ROWS, ask.query.get("after") or None, looks=1)
    return {"jobs": page.jobs, "after": page.after, "filter": {**shown_filter(ask.query), "state": "dead"}}


DEAD = Page(path="/dead", title="Dead", template="dead.html", look=look_at_dead, nav="Dead", shortcut="d")
