"""Is work flowing, who waits and why, what is failing, what can be done."""

from __future__ import annotations

from typing import Any

from fairlane.dashboard.html import throughput_chart, wait_chart
from fairlane.dashboard.job_filters import key_query, watched_from
from fairlane.dashboard.page import Ask, Page
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


async def look(ask: Ask) -> dict[str, Any]:
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


PAGE = Page(path="/", title="Overview", template="overview.html", look=look, nav="Overview", shortcut="o")
