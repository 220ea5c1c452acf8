"""Is work flowing, who waits and why, what is failing, what can be done."""

from __future__ import annotations

from typing import Any

from fairlane.dashboard.charts import throughput_chart, wait_chart
from fairlane.dashboard.keys import key_query, watched_from
from fairlane.dashboard.page import Ask, Page
from fairlane.operations.views import HintKind, KeyView, Overview, QueueStatus

__all__ = ["LOOKS", "PAGE"]

LOOKS = {
    QueueStatus.IDLE: ("", "○"),
    QueueStatus.FLOWING: ("calm", "●"),
    QueueStatus.LIMITED: ("calm", "▮"),
    QueueStatus.LAGGING: ("lag", "▲"),
    QueueStatus.PAUSED: ("lag", "‖"),
    QueueStatus.STOPPED: ("fault", "✕"),
    HintKind.LIMIT: ("calm", "▮"),
    HintKind.LAG: ("lag", "▲"),
    HintKind.FAULT: ("fault", "✕"),
    HintKind.PAUSE: ("lag", "‖"),
}
"""A class and a sign for each: nothing is said by colour alone."""


async def look(ask: Ask) -> dict[str, Any]:
    seen = await ask.operations.overview()
    return {
        "seen": seen,
        "totals": seen.totals,
        "looks": LOOKS,
        "throughput": throughput_chart(seen.chart),
        "waits": wait_chart(seen.chart),
        "key_query": key_query,
        "watched": await _watched(ask, seen),
    }


async def _watched(ask: Ask, seen: Overview) -> list[tuple[str, KeyView]]:
    wanted = watched_from(ask.query.getlist("watch"))
    known = {each.queue for each in seen.queues}
    return [
        (queue, view)
        for queue, keys in wanted.items()
        if queue in known
        for view in await ask.operations.show_keys(queue, keys)
    ]


PAGE = Page(path="/", title="Overview", template="overview.html", look=look, nav="Overview", shortcut="o")
