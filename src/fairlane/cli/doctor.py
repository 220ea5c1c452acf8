"""`fairlane doctor`: what is wrong, as far as it can be seen from outside."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import click
from rich.text import Text

from fairlane.cli.options import app_or_url_options, json_option, with_app
from fairlane.cli.output import Cell, look, show
from fairlane.errors import SchemaError, StoreUnavailable
from fairlane.operations import Finding, Operations, about_no_database, document_of

STYLES = {"fault": "red", "warning": "yellow", "note": "cyan"}


@click.command()
@app_or_url_options
@click.option("--strict", is_flag=True, help="Exit with status 1 on warnings too.")
@json_option("a JSON array")
def doctor(strict: bool, **given: Any) -> None:
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
    try:
        found = look(Operations.diagnose, given)
    except (SchemaError, StoreUnavailable) as error:
        found = [about_no_database(error)]
    found = [replace(each, remedy=with_app(each.remedy)) for each in found]
    is_ill = any(each.level == "fault" or (strict and each.level == "warning") for each in found)

    def draw(findings: list[Finding], width: int) -> Iterator[Cell]:
        for each in findings:
            where = "" if each.queue is None else f"{each.queue}: "
            yield Text.assemble((f"{each.level:<7}", STYLES[each.level]), f" {where}{each.check}: {each.message}")
            yield f"        {each.remedy}"
        if not is_ill:
            yield "no fault was found" if findings else "nothing is wrong"

    show(found, draw, given, document_of)
    if is_ill:
        sys.exit(1)
