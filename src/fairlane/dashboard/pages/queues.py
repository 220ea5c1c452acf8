"""Queues: all of them and what to do about them, one with its policy and its last hour, and its keys."""

from __future__ import annotations

from typing import Any

from fairlane.dashboard.html import denial_chart, hours_chart, key_wait_chart, throughput_chart, wait_chart
from fairlane.dashboard.page import Ask, Page, key_query, keys_of, watched_from, watched_text
from fairlane.operations.views import HintKind, QueueStatus

LOOKS = {
    QueueStatus.IDLE: ("", "○"),
    QueueStatus.FLOWING: ("calm", "●"),
    QueueStatus.LIMITED: ("calm", "▮"),
    QueueStatus.LAGGING: ("lag", "▲"),
    QueueStatus.PAUSED: ("lag", "‖"),
    QueueStatus.STOPPED: ("fault", "✕"),
    HintKind.LIMIT: ("calm", "▮"),
    HintKind.LAG: ("lag", "▲"),
    HintKind.WARNING: ("lag", "▲"),
    HintKind.FAULT: ("fault", "✕"),
    HintKind.PAUSE: ("lag", "‖"),
}
"""A class and a sign for each: nothing is said by colour alone."""
ROWS = 50
SORTS = {
    "name": "Key",
    "waiting": "Waiting",
    "running": "Running",
    "ended": "Ended 24 h",
    "started": "Last start",
}
LONGEST_SEARCH = 200


async def look_at_overview(ask: Ask) -> dict[str, Any]:
    seen, watched = await ask.operations.overview_beside(watched_from(ask.query.getlist("watch")))
    return {
        "seen": seen,
        "totals": seen.totals,
        "looks": LOOKS,
        "throughput": throughput_chart(seen.chart),
        "waits": wait_chart(seen.chart),
        "key_query": key_query,
        "watched": watched,
    }


async def look_at_queues(ask: Ask) -> dict[str, Any]:
    return {"queues": await ask.operations.queues.list(), "looks": LOOKS}


async def look_at_queue(ask: Ask) -> dict[str, Any]:
    seen = await ask.operations.queues.show(ask.values["queue"])
    overrides = await ask.operations.overrides.list(seen.view.queue)
    return {
        "title": seen.view.queue,
        "seen": seen,
        "view": seen.view,
        "overrides": overrides,
        "is_suspended": any(limit.is_suspended for limit in seen.limits),
        "looks": LOOKS,
        "throughput": throughput_chart(seen.chart),
        "waits": wait_chart(seen.chart),
        "denials": denial_chart(seen.chart),
    }


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
    seen = await ask.operations.keys.show(queue, keys)
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


OVERVIEW = Page(
    path="/", title="Overview", template="overview.html", look=look_at_overview, nav="Overview", shortcut="o"
)
QUEUES = Page(path="/queues", title="Queues", template="queues.html", look=look_at_queues, nav="Queues", shortcut="q")
QUEUE = Page(path="/queues/{queue}", title="Queue", template="queue.html", look=look_at_queue, nav="Queues")
KEYS = Page(path="/queues/{queue}/keys", title="Keys", template="keys.html", look=look_at_keys, nav="Queues")
KEY = Page(path="/queues/{queue}/key", title="Key", template="key.html", look=look_at_key, nav="Queues")
