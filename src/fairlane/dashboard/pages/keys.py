"""The keys of a queue, and one of them."""

from __future__ import annotations

from typing import Any

from fairlane.dashboard.html import hours_chart, key_wait_chart
from fairlane.dashboard.job_filters import key_query, keys_of, watched_text
from fairlane.dashboard.page import Ask, Page

ROWS = 50
SORTS = {
    "name": "Key",
    "waiting": "Waiting",
    "running": "Running",
    "ended": "Ended 24 h",
    "started": "Last start",
}
LONGEST_SEARCH = 200


async def look_at_keys(ask: Ask) -> dict[str, Any]:
    query = ask.query
    seen = await ask.operations.list_keys(
        ask.values["queue"],
        query.get("by") or None,
        sort=query.get("sort") or "waiting",
        search=query.get("search", "").strip()[:LONGEST_SEARCH],
        held_only=query.get("held") == "1",
        after=query.get("after") or None,
        limit=ROWS,
    )
    return {
        "title": f"Keys of {seen.queue}",
        "seen": seen,
        "by": ",".join(seen.by),
        "held": query.get("held") == "1",
        "is_first": not query.get("after"),
        "sorts": SORTS,
        "key_query": key_query,
        "watched_text": watched_text,
    }


async def look_at_key(ask: Ask) -> dict[str, Any]:
    queue, keys = ask.values["queue"], keys_of(ask.query)
    seen = await ask.operations.show_key(queue, keys)
    return {
        "title": ", ".join(f"{name}={value}" for name, value in seen.view.keys.items()),
        "queue": queue,
        "seen": seen,
        "view": seen.view,
        "query": key_query(seen.view.keys),
        "watched_text": watched_text(queue, seen.view.keys),
        "hours": hours_chart(seen.now, seen.view.hours, seen.hours_failed),
        "waits": key_wait_chart(seen.minutes),
    }


KEYS = Page(path="/queues/{queue}/keys", title="Keys", template="keys.html", look=look_at_keys, nav="Queues")
KEY = Page(path="/queues/{queue}/key", title="Key", template="key.html", look=look_at_key, nav="Queues")
