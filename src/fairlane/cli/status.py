"""`fairlane status`: is work flowing, who waits and why, and what to do about it, on one screen."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from fairlane.cli.options import app_or_url_options, json_option
from fairlane.cli.output import (
    as_of,
    columns,
    counted,
    hint_lines,
    look,
    look_again,
    number,
    per_minute,
    plural,
    show,
    titled,
    wait,
    watch_option,
    wrapped,
)
from fairlane.operations import Operations
from fairlane.operations.views import Overview, QueueView, Totals

HEADINGS = ("QUEUE", "STATUS", "READY", "HELD", "RUN", "SCHED", "DEAD", "OLDEST", "/MIN", "FAIL")
OF_A_DAY = ("24H", "FAIL 24H")
NUMBERS = (*HEADINGS[2:], *OF_A_DAY)
WIDE_ENOUGH = 100
STATUS_STYLES = {
    "idle": "dim",
    "flowing": "green",
    "limited": "cyan",
    "lagging": "bold yellow",
    "paused": "magenta",
    "stopped": "bold red",
}


@click.command()
@watch_option
@app_or_url_options
@json_option("a JSON object; with --watch, one a line")
def status(watch: float | None, **given: Any) -> None:
    """Say whether work flows, who waits and why, and what to do. Looking changes nothing.

    A queue is idle, flowing, limited (limits and pauses hold back everything that waits, as the policy requires),
    lagging (jobs could start and have no slot), paused, or stopped (no worker serves it, or all that do are
    stopping; none knows its tasks, or the broker of its engine refuses). HELD are those of the READY ones that are
    held back; /MIN and FAIL are starts and failures of the last 60 seconds; 24H and FAIL 24H are what has ended in
    the last 24 hours, and how much of it failed.

    \b
    Example:
      fairlane status
      fairlane status --watch 5
      fairlane status --json | jq .totals
    """
    if watch is None:
        show(look(Operations.overview, given), draw_status, given)
    else:
        look_again(Operations.overview, draw_status, watch, given)


def draw_status(view: Overview, width: int) -> list[Text]:
    lines = [Text(as_of(view.now), "bold"), *_totals(view.totals, width), Text("")]
    if not view.queues:
        return [*lines, Text("no queue is known to this database yet")]
    return [*lines, *draw_queues(view.queues, width), *titled("HINTS", hint_lines(view.hints, width))]


def _totals(totals: Totals, width: int) -> list[Text]:
    held = f" ({number(totals.held_jobs)} held back)" if totals.held_jobs else ""
    oldest = f"; the oldest waits for {wait(totals.oldest_wait)}" if totals.oldest_wait is not None else ""
    serving = f"{plural(totals.workers, 'worker')} with {plural(totals.slots, 'slot')}"
    others = ((totals.workers_stopping, "stopping"), (totals.workers_late, "gone silent"))
    said = (
        f"{number(totals.ready)} ready{held}, {number(totals.running)} running, {counted(totals.scheduled)} scheduled, "
        f"{counted(totals.dead)} dead",
        f"{per_minute(totals.started_per_minute)} started, {per_minute(totals.ended_per_minute)} ended, "
        f"{per_minute(totals.failed_per_minute)} failed a minute{oldest}",
        f"{number(totals.ended)} ended in 24 h, {number(totals.failed)} of them failed",
        ", ".join(
            [
                serving if totals.workers else "no worker takes jobs",
                *(f"{count:,} {how}" for count, how in others if count),
            ]
        ),
    )
    return [line for text in said for line in wrapped(text, width, "")]


def draw_queues(queues: list[QueueView], width: int) -> list[Text]:
    """A line for each queue; under it, where something waits, its status in a sentence and who holds what back."""
    is_wide = width >= WIDE_ENOUGH
    headings = (*HEADINGS, *OF_A_DAY) if is_wide else HEADINGS
    cells = [_row(each)[: len(headings)] for each in queues]
    head, *rows = columns(headings, cells, width, flexible=("QUEUE",), right=NUMBERS)
    lines = [head]
    for row, each in zip(rows, queues, strict=True):
        lines.append(row)
        if each.ready or each.is_paused or each.status == "stopped":
            lines += wrapped(each.words, width)
        if each.ended and not is_wide:
            lines += wrapped(f"{number(each.ended)} ended in 24 h, {number(each.failed)} of them failed", width)
        for held in each.held:
            whose = f" of {plural(held.keys, 'key')}" if held.by else ""
            lines += wrapped(f"{plural(held.jobs, 'job')}{whose} held by {held.words}", width, "  - ", "    ")
    return lines


def _row(view: QueueView) -> tuple[str | Text, ...]:
    return (
        view.queue,
        Text(str(view.status), STATUS_STYLES[str(view.status)]),
        number(view.ready),
        number(view.held_jobs),
        number(view.running),
        counted(view.scheduled),
        counted(view.dead),
        wait(view.oldest_wait),
        per_minute(view.started_per_minute),
        per_minute(view.failed_per_minute),
        number(view.ended),
        number(view.failed),
    )
