"""`fairlane doctor`: what is wrong, as far as it can be seen from outside."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from fairlane.operations import Finding

__all__ = ["doctor"]


@click.command()
@click.argument("app", required=False, metavar="[MODULE:APP]")
@click.option("--url", help="The database, instead of an app's.  [default: FAIRLANE_URL]")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def doctor(app: str | None, url: str | None, as_json: bool) -> None:
    """Look for what is wrong, and say what to do. Looking changes nothing.

    Policies that differ between code and database, overrides without effect, keys that are named and that no job
    carries, work that no worker listens for, bells that pile up. Ends with status 1 if something was found.

    \b
    Example:
      fairlane doctor shop:app
      fairlane doctor --url postgresql://shop@localhost/shop --json
    """
    import asyncio

    from fairlane.cli.database import app_of, existing_store
    from fairlane.operations import describe_finding, diagnose

    async def look() -> list[Finding]:
        loaded = app_of(app, url)
        async with existing_store(loaded) as store:
            return await diagnose(store, loaded.declared_policies)

    findings = asyncio.run(look())
    if as_json:
        click.echo(json.dumps([describe_finding(each) for each in findings]))
    for each in () if as_json else findings:
        click.echo(f"{each.queue}: {each.check}: {each.message}\n  {each.remedy}")
    if findings:
        sys.exit(1)
    if not as_json:
        click.echo("nothing is wrong")
