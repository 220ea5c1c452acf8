"""`fairlane status`: is work flowing, who waits and why, and what to do about it, on one screen."""

from __future__ import annotations

import click
from rich.text import Text

from fairlane.cli.job_selection import app_or_url_options
from fairlane.cli.output import look, look_again, tell, watch_option
from fairlane.cli.tables import (
    as_of,
    columns,
    counted,
    hint_lines,
    number,
    per_minute,
    plural,
    status_word,
    wait,
    wrapped,
)
from fairlane.operations import Operations
from fairlane.operations.views import HeldView, Overview, QueueView, Totals

HEADINGS = ("QUEUE", "STATUS", "READY", "HELD", "RUN", "SCHED", "DEAD", "OLDEST", "/MIN", "FAIL")
OF_A_DAY = ("24H", "FAIL 24H")
NUMBERS = (*HEADINGS[2:], *OF_A_DAY)
WIDE_ENOUGH = 100


@click.command()
@watch_option
@app_or_url_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object; with --watch, one a line.")
def status(watch: float | None, app: str | None, url: str | None, as_json: bool) -> None:
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
        tell(look(Operations.overview, app, url), draw_status, as_json)
    else:
        look_again(Operations.overview, draw_status, watch, app=app, url=url, as_json=as_json)


def draw_status(view: Overview, width: int) -> list[Text]:
    lines = [Text(as_of(view.now), "bold"), *_totals(view.totals, width), Text("")]
    if not view.queues:
        return [*lines, Text("no queue is known to this database yet")]
    lines += draw_queues(view.queues, width)
    if view.hints:
        lines += [Text(""), Text("HINTS", "bold"), *hint_lines(view.hints, width)]
    return lines


def _totals(totals: Totals, width: int) -> list[Text]:
    held = f" ({number(totals.held_jobs)} held back)" if totals.held_jobs else ""
    oldest = f"; the oldest waits for {wait(totals.oldest_wait)}" if totals.oldest_wait is not None else ""
    slots = "1 slot" if totals.slots == 1 else f"{number(totals.slots)} slots"
    serving = f"{plural(totals.workers, 'worker')} with {slots}" if totals.workers else "no worker takes jobs"
    others = ((totals.workers_stopping, "stopping"), (totals.workers_late, "gone silent"))
    said = (
        f"{number(totals.ready)} ready{held}, {number(totals.running)} running, {counted(totals.scheduled)} scheduled, "
        f"{counted(totals.dead)} dead",
        f"{per_minute(totals.started_per_minute)} started, {per_minute(totals.ended_per_minute)} ended, "
        f"{per_minute(totals.failed_per_minute)} failed a minute{oldest}",
        f"{number(totals.ended)} ended in 24 h, {number(totals.failed)} of them failed",
        ", ".join([serving, *(f"{count:,} {how}" for count, how in others if count)]),
    )
    return [line for text in said for line in wrapped(text, width, "")]


def draw_queues(queues: list[QueueView], width: int) -> list[Text]:
    """A line for each queue; under it, where something waits, its status in a sentence and who holds what back."""
    is_wide = width >= WIDE_ENOUGH
    headings = (*HEADINGS, *OF_A_DAY) if is_wide else HEADINGS
    told = [_row(each)[: len(headings)] for each in queues]
    head, *rows = columns(headings, told, width, flexible=("QUEUE",), right=NUMBERS)
    lines = [head]
    for row, each in zip(rows, queues, strict=True):
        lines.append(row)
        if each.ready or each.is_paused or each.status == "stopped":
            lines += wrapped(each.words, width)
        if each.ended and not is_wide:
            lines += wrapped(f"{number(each.ended)} ended in 24 h, {number(each.failed)} of them failed", width)
        for held in each.held:
            lines += wrapped(_held(held), width, "  - ", "    ")
    return lines


def _row(view: QueueView) -> tuple[str | Text, ...]:
    return (
        view.queue,
        status_word(view.status),
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


def _held(held: HeldView) -> str:
    whose = f" of {plural(held.keys, 'key')}" if held.by else ""
    return f"{plural(held.jobs, 'job')}{whose} held by {held.words}"
