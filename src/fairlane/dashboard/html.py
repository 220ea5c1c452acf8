"""From what a page shows to HTML: the templates, and the words and numbers in them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from typing import Any
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fairlane.clock import SECOND, Instant, as_datetime, measured
from fairlane.dashboard.page import key_query, watched_text
from fairlane.operations.views import Chart, Counted, HintKind, KeyMinute, MinuteView, OneKey, QueueStatus

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


@cache
def _environment() -> Environment:
    """The templates of the dashboard, compiled once."""
    made = Environment(
        loader=PackageLoader("fairlane.dashboard"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    made.filters |= {filter.__name__: filter for filter in FILTERS}
    made.globals |= {
        "version": version("fairlane"),
        "looks": LOOKS,
        "key_query": key_query,
        "watched_text": watched_text,
    }
    return made


def rendered(template: str, shown: Mapping[str, Any]) -> str:
    """A template as HTML: of a page its main part, which changes while somebody looks."""
    return _environment().get_template(template).render(shown)


def whole_page(main: str, frame: Mapping[str, Any]) -> str:
    """A page from its first line to its last, around a main part that is rendered already."""
    return rendered("layout.html", {**frame, "main": Markup(main)})


def address(root: str, path: str, **query: Any) -> str:
    """A path of the dashboard as the browser must ask for it; what is `None` or empty is left out."""
    given = [(name, value) for name, value in query.items() if value not in (None, "", [])]
    return f"{root}{path}{'?' if given else ''}{urlencode(given, doseq=True)}"


def fingerprint(html: str) -> str:
    """Tells whether two renders are the same."""
    return sha256(html.encode()).hexdigest()[:16]


def pathpart(text: object) -> str:
    """A name as one part of a path, slashes and all."""
    return quote(str(text), safe="")


def number(value: float | None, digits: int = 0) -> str:
    """1,234 or 0.25; a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def per(value: float | None) -> str:
    """A share as a percentage."""
    return "–" if value is None else f"{value * 100:.0f} %"


def lasting(microseconds: float | None) -> str:
    """A duration in at most two units: 250 ms, 12 s, 3 min 20 s, 2 h, 5 d 3 h."""
    if microseconds is None:
        return "–"
    if microseconds < SECOND:
        return f"{microseconds / 1_000:.0f} ms"
    seconds = round(microseconds / SECOND)
    parts: list[str] = []
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s")):
        if seconds >= size and len(parts) < 2:
            parts.append(f"{seconds // size} {unit}")
            seconds %= size
        elif parts:
            break
    return " ".join(parts)


def ago(at: Instant | datetime | None) -> Markup:
    """A moment that the browser shows as "5 s ago" and keeps up to date: what was sent is still true by then."""
    if at is None:
        return Markup("–")
    return Markup('<time class="ago" datetime="{}" title="{} UTC">{}</time>').format(iso(at), clock(at), clock(at))


def clock(at: Instant | datetime | None) -> str:
    return "–" if at is None else f"{_moment(at):%Y-%m-%d %H:%M:%S}"


def iso(at: Instant | datetime | None) -> str:
    return "" if at is None else _moment(at).isoformat()


def _moment(at: Instant | datetime) -> datetime:
    return at if isinstance(at, datetime) else as_datetime(at)


def seconds(duration: float | None) -> str:
    """A duration that is given in seconds."""
    return lasting(None if duration is None else duration * SECOND)


def counted(value: Counted) -> str:
    """A number that was counted up to a bound."""
    return f"{value.count:,}" if value.is_all else f"{value.count:,}+"


def pretty(value: Any) -> str:
    """JSON as a person reads it; text as it is."""
    return value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False, default=str)


def short(job: object) -> str:
    """The end of an id: its beginning is the time, and many share that."""
    return f"…{str(job)[-12:]}"


def first_line(text: str | None) -> str:
    """What an error says: it is stored with its message first, and where it was raised after that."""
    return (text or "").strip().partition("\n")[0][:300]


def key_text(keys: Mapping[str, str | None]) -> str:
    """Keys as the filter of jobs takes them."""
    return ", ".join(f"{name}={value}" for name, value in keys.items() if value is not None and name != "task")


CALM = ("series-1", "series-4", "series-3", "soft")
"""Of series that are no faults: none is red."""
HOUR = 3_600


def _series(label: str, values: Sequence[float], **look: Any) -> dict[str, Any]:
    return {"label": label, "values": [round(value, 3) for value in values], **look}


def _times(minutes: Sequence[KeyMinute]) -> list[float]:
    return [each.at.timestamp() for each in minutes]


def throughput_chart(chart: Chart) -> dict[str, Any]:
    """Arrivals, ends and failures, by minute."""
    minutes = chart.minutes
    ended = _series("ended", [each.ended for each in minutes], color="series-1", fill=True)
    arrived = _series("arrived", [each.arrived for each in minutes], color="series-4", dash=[4, 3])
    failed = _series("failed", [each.failed for each in minutes], color="series-2")
    return {"x": _times(minutes), "series": [ended, arrived, failed]}


def wait_chart(minutes: Sequence[KeyMinute]) -> dict[str, Any]:
    """How long jobs that started had waited: of queues, the longest too."""
    waits = [each.longest_wait for each in minutes if isinstance(each, MinuteView)]
    longest = [_series("longest wait", waits, color="series-3", dash=[4, 3])] if waits else []
    mean = _series("mean wait", [each.mean_wait for each in minutes], color="series-1", fill=True)
    return {"x": _times(minutes), "unit": "s", "series": [*longest, mean]}


def denial_chart(chart: Chart) -> dict[str, Any]:
    """How often the limits that did so most turned somebody away."""
    return {
        "x": _times(chart.minutes),
        "series": [
            _series(limit, [each.denied.get(limit, 0) for each in chart.minutes], color=color)
            for limit, color in zip(chart.denied, CALM, strict=False)
        ],
    }


def hours_chart(key: OneKey) -> dict[str, Any]:
    """What ended of a key, by hour."""
    ended, last = key.view.hours, int(key.now.timestamp()) // HOUR * HOUR
    return {
        "x": [last - HOUR * (len(ended) - 1 - number) for number in range(len(ended))],
        "series": [
            _series("ended", ended, color="series-1", fill=True),
            _series("failed", key.hours_failed, color="series-2"),
        ],
    }


def sparkline(values: Sequence[float | None], width: float = 100.0, height: float = 20.0) -> str:
    """The points of a line through these values, the highest at the top. Where there is none, the last one holds on."""
    top = max((value for value in values if value is not None), default=0.0) or 1.0
    step = width / max(1, len(values) - 1)
    points, last = [], None
    for number, value in enumerate(values):
        last = last if value is None else value
        if last is not None:
            points.append(f"{number * step:.1f},{height - last / top * height:.1f}")
    return " ".join(points)


# fmt: off
FILTERS = (
    ago, clock, counted, denial_chart, first_line, hours_chart, iso, key_text, lasting, measured, number, pathpart, per,
    pretty, seconds, short, sparkline, throughput_chart, wait_chart,
)
# fmt: on
