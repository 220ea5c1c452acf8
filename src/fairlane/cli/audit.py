"""`fairlane audit`: who did what, when and why."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from fairlane.cli.options import app_or_url_options, json_option
from fairlane.cli.output import columns, look, show, show_rest
from fairlane.clock import as_datetime
from fairlane.operations import document_of
from fairlane.operations.policies import AuditPage


@click.command()
@click.option("--queue", help="Only of this queue.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, help="Maximum number to list.")
@click.option("--before", type=int, metavar="ENTRY", help="Continue from the end of an earlier page.")
@app_or_url_options
@json_option()
def audit(queue: str | None, limit: int, before: int | None, **given: Any) -> None:
    """List what operators did, newest first: who, when, what and why.

    \b
    Example:
      fairlane audit --limit 20
      fairlane audit --queue webhooks --json
    """
    page = look(lambda operations: operations.audit.list(queue, before=before, limit=limit), given)
    show(page, _draw, given, lambda page: {"entries": document_of(page.entries), "before": page.before})
    show_rest(page.before, given, "--before")


def _draw(page: AuditPage, width: int) -> list[Text]:
    if not page.entries:
        return [Text("nothing has been done")]
    rows = [
        (
            f"{as_datetime(each.at):%Y-%m-%d %H:%M:%S}",
            each.actor,
            each.action,
            each.queue or "",
            each.target,
            each.reason,
        )
        for each in page.entries
    ]
    headings = ("WHEN (UTC)", "WHO", "ACTION", "QUEUE", "WHAT", "WHY")
    return columns(headings, rows, width, flexible=("WHO", "QUEUE", "WHAT", "WHY"))
