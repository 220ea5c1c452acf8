"""Queues: all of them and what to do about them, one with its policy and its last hour, and its keys."""

from __future__ import annotations

from typing import Any

from fairlane.dashboard.page import Ask, keys_of, watched_from

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
