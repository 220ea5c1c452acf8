"""`fairlane doctor`: what is wrong, as far as it can be seen from outside."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import click

from fairlane.cli.job_selection import app_or_url_options, with_app
from fairlane.cli.output import look
from fairlane.errors import SchemaError, StoreUnavailable
from fairlane.operations import Finding, Operations, about_no_database, document_of

STYLES = {"fault": "red", "warning": "yellow", "note": "cyan"}


@click.command()
@app_or_url_options
@click.option("--strict", is_flag=True, help="Exit with status 1 on warnings too.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def doctor(app: str | None, url: str | None, strict: bool, as_json: bool) -> None:
    """Look for what is wrong, and say what to do. Looking changes nothing.

    The schema; policies that differ between code and database; keys and tasks that nobody knows; work that no worker
    runs, or that stands still; schedules that nobody fires; workers that are silent, unwell or blocked, and their
    clocks; runs that take too long; figures that nobody keeps up; and the database itself: vacuum, old transactions,
    connections, durability, space.

    A finding is a fault, a warning, or a note. Ends with status 1 if there is a fault.

    \b
    Example:
      fairlane doctor shop:app
      fairlane doctor --url postgresql://shop@localhost/shop --json
      fairlane doctor shop:app --strict
    """
    findings = [replace(each, remedy=with_app(each.remedy)) for each in _look(app, url)]
    if as_json:
        click.echo(json.dumps(document_of(findings)))
    for each in () if as_json else findings:
        level = click.style(f"{each.level:<7}", STYLES[each.level])
        where = "" if each.queue is None else f"{each.queue}: "
        click.echo(f"{level} {where}{each.check}: {each.message}\n        {each.remedy}")
    if any(each.level == "fault" or (strict and each.level == "warning") for each in findings):
        sys.exit(1)
    if not as_json:
        click.echo("no fault was found" if findings else "nothing is wrong")


def _look(app: str | None, url: str | None) -> list[Finding]:
    try:
        return look(Operations.diagnose, app, url)
    except (SchemaError, StoreUnavailable) as error:
        return [about_no_database(error)]
