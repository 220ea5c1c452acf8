"""`fairlane keys`: who has jobs in a queue, what holds them, how they fare; or everything about one key."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

import click
from rich.text import Text

from fairlane.cli.options import json_option, key_option, keys_given, place_options, with_app
from fairlane.cli.output import (
    ago,
    as_of,
    chart_lines,
    columns,
    counted,
    gauge_line,
    look,
    number,
    printable,
    run_time,
    show,
    show_rest,
    sparkline,
    titled,
    wait,
    wrapped,
)
from fairlane.errors import ConfigurationError
from fairlane.operations.views import KeyList, KeyView, NextJob, OneKey
from fairlane.policy.keys import key_words
from fairlane.policy.partitions import whole_of

SORTS = ("waiting", "running", "ended", "started", "name")
NARROW = ("KEY", "WAIT", "RUN", "ENDED", "FAIL", "LIMIT", "WAITED", "TIME", "HELD BY")
# fmt: off
WIDE = (
    "KEY", "WAIT", "SCHED", "RUN", "ENDED", "FAIL", "LIMIT", "WAITED", "TIME", "SHARE", "WEIGHT", "ARRIVED", "STARTED",
    "HELD BY",
)
# fmt: on
WIDE_ENOUGH = 110
TEXT = ("KEY", "QUEUE", "HELD BY")


@click.command()
@click.argument("queue")
@click.option("--by", metavar="KEYS", help="List these keys: account, or account,region.  [default: the fair key]")
@click.option("--sort", type=click.Choice(SORTS), default="waiting", help="Most first, or by name.")
@click.option(
    "--search", default="", show_default=False, metavar="TEXT", help="Only keys whose values contain this text."
)
@click.option("--held", "held_only", is_flag=True, help="Only keys that a limit or a pause of their own holds back.")
@click.option("--limit", type=click.IntRange(1, 500), default=50, help="Maximum number to list.")
@click.option("--after", metavar="CURSOR", help="Continue from the end of an earlier page.")
@key_option("named", "Show this key; repeat to combine several.")
@place_options
@json_option()
def keys(queue: str, named: tuple[str, ...], **given: Any) -> None:
    """List the keys of a queue, or show one. Looking changes nothing.

    One key is shown with its lanes, what runs, what starts next and what holds it.

    ENDED and FAIL, which is part of it, are of the last 24 hours, and so is SHARE, of the queue's run time (110 columns
    and more); LIMIT is how much of its fullest limit is used; WAITED is how long those that started in the last hour
    were ready before, on average; TIME is how long its jobs take. ARRIVED and STARTED are when a job of it last became
    ready (enqueued, due, or due again) and last started.

    \b
    Example:
      fairlane keys webhooks
      fairlane keys webhooks --by endpoint --sort running --search acme
      fairlane keys webhooks --key account=acme
    """
    how = {name: given[name] for name in ("by", "sort", "search", "held_only", "limit", "after")}
    if not named:
        page = look(lambda operations: operations.keys.list(queue, **how), given)
        show(page, _draw_list, given)
        show_rest(page.after, given)
    elif how["by"] or how["search"] or how["held_only"] or how["after"]:
        raise ConfigurationError("--key shows one key; leave out --by, --search, --held and --after")
    else:
        show(look(lambda operations: operations.keys.show(queue, keys_given(named)), given), draw_key, given)


def _draw_list(page: KeyList, width: int) -> list[Text]:
    if not page.keys:
        return [Text(_nothing(page))]
    unserved = [] if page.unserved is None else wrapped(page.unserved, width, "")
    return [Text(as_of(page.now), "bold"), *unserved, *draw_keys(page.keys, page.now, width)]


def _nothing(page: KeyList) -> str:
    by = ", ".join(page.by)
    if page.search:
        return "no key fits"
    if not page.held_only:
        return f"{page.queue} has no jobs by {by}"
    others = " or ".join(f"--by {','.join(scope)}" for scope in page.scopes if scope != page.by)
    return f"no limit or pause by {by} holds anybody back; look {others}" if others else "nobody is held back"


def draw_keys(views: Sequence[KeyView], now: datetime, width: int, *, with_queue: bool = False) -> list[Text]:
    """A line for each key, with as much as fits."""
    shown = WIDE if width >= WIDE_ENOUGH else NARROW
    headings = ("QUEUE", *shown) if with_queue else shown
    rows = [tuple(cells[heading] for heading in headings) for cells in (_cells(each, now) for each in views)]
    right = tuple(heading for heading in headings if heading not in TEXT)
    return columns(headings, rows, width, flexible=TEXT, right=right)


def _cells(view: KeyView, now: datetime) -> dict[str, str]:
    fullest = max(view.gauges, key=lambda gauge: gauge.saturation, default=None)
    return {
        "KEY": values_of(view),
        "QUEUE": whole_of(view.queue),
        "WAIT": number(view.waiting),
        "SCHED": counted(view.scheduled),
        "RUN": number(view.running),
        "ENDED": number(view.ended),
        "FAIL": number(view.failed),
        "LIMIT": "" if fullest is None else f"{fullest.used:.4g}/{fullest.bound:.4g}",
        "WAITED": wait(view.mean_wait),
        "TIME": run_time(view.run_time),
        "SHARE": "" if view.share is None else f"{view.share:.0%}",
        "WEIGHT": "" if view.weight is None else f"{view.weight:g}",
        "ARRIVED": ago(view.last_arrived_at, now),
        "STARTED": ago(view.last_started_at, now),
        "HELD BY": "a pause" if view.is_paused else ", ".join(view.held_by),
    }


def values_of(view: KeyView) -> str:
    """`acme`, or `acme, eu` where several keys are one scope."""
    return ", ".join("None" if value is None else value for value in view.keys.values())


def draw_key(one: OneKey, width: int) -> list[Text]:
    view = one.view
    title = f"{printable(key_words(view.keys))} in {view.queue}, {as_of(one.now)}"
    lines = [Text(title, "bold"), *draw_keys([view], one.now, width)]
    if view.drained_in is not None:
        least = "at least " if view.drains_at_least else ""
        drained = f"what waits will have started in {least}{wait(view.drained_in)}, if limits are all that slows it"
        lines += wrapped(drained, width)
    if view.weight_words:
        lines += wrapped(f"weight {view.weight:g}: {view.weight_words}", width)
    for title, words in (("WHY IT WAITS", one.why), ("CHANGED BY OPERATORS", one.overrides)):
        lines += titled(title, (line for each in words for line in wrapped(with_app(each), width)))
    lines += titled("LIMITS", (Text("  ").append_text(gauge_line(gauge, width - 2)) for gauge in view.gauges))
    lines += titled("LAST HOUR, minute by minute, and the most of them", chart_lines(one.minutes, width))
    hours = (("ended", view.hours), ("failed", one.hours_failed))
    lines += titled(
        "LAST 24 HOURS", (Text(f"  {name:<8}{sparkline(each)}  {number(sum(each))}") for name, each in hours)
    )
    if one.lanes:
        rows = [
            (key_words(lane.keys), str(lane.priority), number(lane.waiting), number(lane.running), lane.held_by or "")
            for lane in one.lanes
        ]
        headings = ("LANE", "PRIORITY", "WAIT", "RUN", "HELD BY")
        flexible, right = ("LANE", "HELD BY"), ("PRIORITY", "WAIT", "RUN")
        lines += titled("LANES", columns(headings, rows, width, flexible=flexible, right=right))
    for title, jobs in (("RUNNING", one.running), ("NEXT, in the order in which they would start", one.next_jobs)):
        lines += titled(title, _jobs(jobs, one.now, width) if jobs else [])
    return lines


def _jobs(jobs: Sequence[NextJob], now: datetime, width: int) -> list[Text]:
    rows = [
        (each.id, each.task, str(each.priority), str(each.attempt), ago(each.enqueued_at, now), key_words(each.keys))
        for each in jobs
    ]
    headings = ("ID", "TASK", "PRIO", "TRIES", "AGE", "KEYS")
    return columns(headings, rows, width, flexible=("TASK", "KEYS"), right=("PRIO", "TRIES", "AGE"))
