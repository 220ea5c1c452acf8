"""Who did what, when and why."""

from __future__ import annotations

from typing import Any

from fairlane.dashboard.page import Ask, Page, number_from

__all__ = ["PAGE"]

ROWS = 50
LARGEST = 2**62


async def look_at_audit(ask: Ask) -> dict[str, Any]:
    queue = ask.query.get("queue") or None
    before = number_from(ask.query, "before", 0, low=0, high=LARGEST) or None
    page = await ask.operations.list_audit(queue, before=before, limit=ROWS)
    return {"entries": page.entries, "before": page.before, "queue": queue}


AUDIT = Page(path="/audit", title="Audit", template="audit.html", look=look_at_audit, nav="Audit", shortcut="a")
