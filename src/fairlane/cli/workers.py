"""`fairlane workers`: who is there, what each does, and who has gone silent."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import Any

import click
from rich.text import Text

from fairlane.cli.options import app_or_url_options, json_option
from fairlane.cli.output import ago, columns, look, show, wait, wrapped
from fairlane.operations.views import WorkerList, WorkerView

HEADINGS = ("WORKER", "STATE", "SLOTS", "WAIT", "UP", "SEEN", "CLOCK", "QUEUES")
STYLES = {
    "well": "green",
    "replaced": "dim",
    "stopping": "magenta",
    "troubled": "yellow",
    "blocked": "bold red",
    "unwell": "bold red",
    "late": "bold red",
}


@click.command()
@click.option("--check", is_flag=True, help="Exit with status 1 if a worker is late, unhealthy or blocked.")
@app_or_url_options
@json_option()
def workers(check: bool, **given: Any) -> None:
    """List the workers: slots in use, what they serve, when last seen. Looking changes nothing.

    A worker is well, stopping, troubled (something fails around it: a dispatcher's broker refuses), blocked (a handler
    blocks its event loop, or that of one of its processes), unwell (a loop of it died), late (it has missed several
    reports in a row, so it died or stands still), or replaced: it died, and others on its host or under its name serve
    its queues. One that stops as it should is listed no more; one that died for a day, or for 15 minutes if live
    workers serve all its queues. WAIT are jobs that are claimed and have not started; CLOCK is how far the database's
    clock is ahead of the worker's.

    \b
    Example:
      fairlane workers
      fairlane workers --check
      fairlane workers --json | jq '.workers[] | select(.is_late)'
    """
    found = look(lambda operations: operations.workers.list(), given)
    show(found, draw_workers, given)
    if check and any(each.state in ("late", "unwell", "blocked") for each in found.workers):
        sys.exit(1)


def draw_workers(found: WorkerList, width: int) -> list[Text]:
    if not found.workers:
        return [Text("no worker is running")]
    right = ("SLOTS", "WAIT", "UP", "SEEN", "CLOCK")
    rows = [_row(each, found.now) for each in found.workers]
    head, *cells = columns(HEADINGS, rows, width, flexible=("WORKER", "QUEUES"), right=right)
    lines = [head]
    for line, each in zip(cells, found.workers, strict=True):
        lines.append(line)
        for loop, cause in each.dead_loops.items():
            lines += wrapped(f"its loop {loop} died: {cause}", width, "  ", "    ")
        for block in each.blocks:
            if block.until is None:
                lines += wrapped(block.words, width, "  ", "    ")
        for run in each.long_runs:
            holds = "" if run.limit is None else f", and holds {run.limit}, for which others wait"
            lines += wrapped(f"job {run.job} ({run.task}) has run for {wait(run.ran)}{holds}", width, "  ", "    ")
        if each.lost_runs:
            lines += wrapped(each.lost_words, width, "  ", "    ")
        for name, words in each.troubles.items():
            lines += wrapped(f"{name}: {words}", width, "  ", "    ")
    late = f"; {found.late:,} gone silent" if found.late else ""
    stopping = f", {found.stopping:,} of them stopping" if found.stopping else ""
    lines.append(Text(f"{found.alive:,} alive{stopping}, {found.running:,} of {found.slots:,} slots in use{late}"))
    return lines


def _row(worker: WorkerView, now: datetime) -> tuple[str | Text, ...]:
    served = (f"{name}={weight:g}" if weight != 1 else name for name, weight in worker.queues.items())
    return (
        worker.name,
        Text(worker.state, STYLES[worker.state]),
        f"{worker.running}/{worker.concurrency}",
        str(worker.waiting),
        ago(worker.started_at, now),
        ago(worker.seen_at, now),
        f"{worker.clock_offset:+.1f}s",
        ", ".join(served),
    )
