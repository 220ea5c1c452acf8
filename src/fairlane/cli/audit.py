"""`fairlane audit`: who did what, when and why."""

from __future__ import annotations

import json

import click

from fairlane.cli.job_selection import app_or_url_options
from fairlane.cli.output import look
from fairlane.cli.tables import print_table
from fairlane.clock import as_datetime
from fairlane.operations import document_of
from fairlane.store.audit import AuditEntry


@click.command()
@click.option("--queue", help="Only of this queue.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="Maximum number to list.")
@click.option("--before", type=int, metavar="ENTRY", help="Continue from the end of an earlier page.")
@app_or_url_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def audit(queue: str | None, limit: int, before: int | None, app: str | None, url: str | None, as_json: bool) -> None:
    """List what operators did, newest first: who, when, what and why.

    \b
    Example:
      fairlane audit --limit 20
      fairlane audit --queue webhooks --json
    """
    page = look(lambda operations: operations.audit.list(queue, before=before, limit=limit), app, url)
    if as_json:
        click.echo(json.dumps({"entries": document_of(page.entries), "before": page.before}))
        return
    if not page.entries:
        click.echo("nothing has been done")
        return
    rows = [_row(each) for each in page.entries]
    print_table(("WHEN (UTC)", "WHO", "ACTION", "QUEUE", "WHAT", "WHY"), rows, ("WHO", "QUEUE", "WHAT", "WHY"))
    if page.before is not None:
        click.echo(f"there are more: --before {page.before}", err=True)


def _row(entry: AuditEntry) -> tuple[str, ...]:
    when = f"{as_datetime(entry.at):%Y-%m-%d %H:%M:%S}"
    return when, entry.actor, entry.action, entry.queue or "", entry.target, entry.reason
