"""`fairlane policy`: what is in force, where the code says something else, and putting that in force."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from fairlane.cli.changes import intent_of, said_of, tell_overrides
from fairlane.cli.database import app_of, load_app
from fairlane.cli.job_selection import LookingGroup, app_options, app_or_url_options, who_options
from fairlane.cli.output import ask_app, look_now
from fairlane.operations import document_of
from fairlane.operations.policies import require_declared
from fairlane.simulation.measures import describe


@click.group(cls=LookingGroup, by_itself="show")
def policy() -> None:
    """Show the policies in force, or compare and apply an app's own.

    Without a command, shows the policies in force and takes the options of `policy show`.

    \b
    Example:
      fairlane policy shop:app
      fairlane policy diff shop:app
      fairlane policy apply shop:app
    """


@policy.command()
@app_or_url_options
@click.option("--queue", "names", multiple=True, help="Only this queue; may be given several times.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def show(app: str | None, url: str | None, names: tuple[str, ...], as_json: bool) -> None:
    """Show the policy in force for each queue of a database, its overrides, and where an app declares another one.

    \b
    Example:
      fairlane policy show shop:app
      fairlane policy show --url postgresql://shop@localhost/shop --queue webhooks --json
    """
    shown, now = look_now(lambda operations: operations.policies.show(names), app_of(app, url))
    if as_json:
        click.echo(json.dumps(document_of(shown)))
        return
    for each in shown:
        in_force = "" if each.policy is None else f"{describe(each.policy)} (version {each.version})"
        click.echo(f"{each.queue}: {in_force or 'not known to this database yet'}")
        if each.declared is not None and each.is_drift:
            click.echo(f"  drift: the app declares {describe(each.declared)}; {each.remedy}")
        tell_overrides(each.overrides, now, prefix="  override: ")
    if not shown:
        click.echo("no queue is known to this database yet")


@policy.command()
@app_options
@click.option("--queue", "names", multiple=True, help="Only this queue; may be given several times.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def diff(app: str, names: tuple[str, ...], as_json: bool) -> None:
    """Compare the policies in force with those that an app declares. Ends with status 1 if they differ.

    \b
    Example:
      fairlane policy diff shop:app
      fairlane policy diff shop:app --queue webhooks --json
    """
    loaded = load_app(app)
    require_declared(loaded.declared_policies, names)
    shown = ask_app(lambda operations: operations.policies.diff(names), loaded)
    if as_json:
        click.echo(json.dumps([document_of(each) for each in shown if each.is_drift]))
    for each in () if as_json else shown:
        if not each.is_drift:
            click.echo(f"{each.queue}: no difference (version {each.version})")
        elif each.policy is None:
            click.echo(f"{each.queue}: not known to this database yet")
        else:
            click.echo(f"{each.queue}: the app declares another policy than version {each.version}, which is in force")
        for difference in each.drift:
            click.echo(f"  {difference.describe()}")
        if each.is_divided_otherwise:
            click.echo(f"  partitions: {each.remedy}")
    if any(each.is_drift for each in shown):
        sys.exit(1)


@policy.command()
@app_options
@click.option("--queue", "names", multiple=True, help="Only this queue; may be given several times.")
@click.option(
    "--accept-missing-keys", is_flag=True, help="Proceed even if waiting jobs lack a key; they all count under None."
)
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@who_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def apply(app: str, names: tuple[str, ...], accept_missing_keys: bool, as_json: bool, **options: Any) -> None:
    """Put the policies that an app declares in force.

    On PostgreSQL the stored policy wins over a different declaration until this is run, so that a rolling deploy does
    not flap between two of them. Jobs that wait or run stay what they are, and so do overrides.

    \b
    Example:
      fairlane policy apply shop:app
      fairlane policy apply shop:app --queue webhooks --reason "more room for accounts"
    """
    loaded = load_app(app)
    loaded.check()
    require_declared(loaded.declared_policies, names)
    how = {**intent_of(options), "accept_missing_keys": accept_missing_keys}
    outcomes, now = look_now(lambda operations: operations.policies.apply(names, **how), loaded)
    if as_json:
        click.echo(json.dumps(document_of(outcomes)))
        return
    for each in outcomes:
        done = "would be in force" if each.is_dry_run else "is now in force"
        change = done if each.is_changed else "was in force already"
        click.echo(f"{each.queue}: {describe(each.after)} {change} (version {each.version})")
        for difference in each.changes:
            click.echo(f"  {difference.describe()}")
        if each.new_keys:
            click.echo(f"  jobs that were enqueued before need not carry: {', '.join(each.new_keys)}")
        for override in each.without_place:
            click.echo(f"  no effect any more: {said_of(override.override, now)}\n    {override.no_effect}")
