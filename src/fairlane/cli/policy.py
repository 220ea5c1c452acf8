"""`fairlane policy`: what is in force, where the code says something else, and putting that in force."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import click

from fairlane.cli.changes import described, override_lines
from fairlane.cli.database import load_app
from fairlane.cli.options import (
    LookingGroup,
    app_options,
    app_or_url_options,
    intent_of,
    json_option,
    who_options,
)
from fairlane.cli.output import look, look_now, show
from fairlane.operations import PolicyChange, PolicyInForce, document_of
from fairlane.operations.policies import require_declared
from fairlane.simulation.measures import describe

QUEUES = click.option("--queue", "names", multiple=True, help="Only this queue; may be given several times.")
ARRAY = json_option("a JSON array")


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


@policy.command("show")
@app_or_url_options
@QUEUES
@ARRAY
def show_policies(names: tuple[str, ...], **given: Any) -> None:
    """Show the policy in force for each queue of a database, its overrides, and where an app declares another one.

    \b
    Example:
      fairlane policy show shop:app
      fairlane policy show --url postgresql://shop@localhost/shop --queue webhooks --json
    """

    def draw(found: list[PolicyInForce], width: int) -> Iterator[str]:
        for each in found:
            in_force = "" if each.policy is None else f"{describe(each.policy)} (version {each.version})"
            yield f"{each.queue}: {in_force or 'not known to this database yet'}"
            if each.declared is not None and each.is_drift:
                yield f"  drift: the app declares {describe(each.declared)}; {each.remedy}"
            yield from override_lines(each.overrides, now, prefix="  override: ")
        if not found:
            yield "no queue is known to this database yet"

    found, now = look_now(lambda operations: operations.policies.show(names), given)
    show(found, draw, given, document_of)


@policy.command()
@app_options
@QUEUES
@ARRAY
def diff(app: str, names: tuple[str, ...], **given: Any) -> None:
    """Compare the policies in force with those that an app declares. Ends with status 1 if they differ.

    \b
    Example:
      fairlane policy diff shop:app
      fairlane policy diff shop:app --queue webhooks --json
    """
    require_declared(load_app(app).declared_policies, names)
    found = look(lambda operations: operations.policies.diff(names), {"app": app})
    differing = [each for each in found if each.is_drift]
    show(found, _draw_differences, given, lambda found: document_of(differing))
    if differing:
        sys.exit(1)


def _draw_differences(found: list[PolicyInForce], width: int) -> Iterator[str]:
    for each in found:
        if not each.is_drift:
            yield f"{each.queue}: no difference (version {each.version})"
        elif each.policy is None:
            yield f"{each.queue}: not known to this database yet"
        else:
            yield f"{each.queue}: the app declares another policy than version {each.version}, which is in force"
        for difference in each.drift:
            yield f"  {difference.describe()}"
        if each.is_divided_otherwise:
            yield f"  partitions: {each.remedy}"


@policy.command()
@app_options
@QUEUES
@click.option(
    "--accept-missing-keys", is_flag=True, help="Proceed even if waiting jobs lack a key; they all count under None."
)
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@who_options
@ARRAY
def apply(app: str, names: tuple[str, ...], accept_missing_keys: bool, **given: Any) -> None:
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
    how = {**intent_of(given), "accept_missing_keys": accept_missing_keys}

    def draw(outcomes: list[PolicyChange], width: int) -> Iterator[str]:
        for each in outcomes:
            done = "would be in force" if each.is_dry_run else "is now in force"
            change = done if each.is_changed else "was in force already"
            yield f"{each.queue}: {describe(each.after)} {change} (version {each.version})"
            for difference in each.changes:
                yield f"  {difference.describe()}"
            if each.new_keys:
                yield f"  jobs that were enqueued before need not carry: {', '.join(each.new_keys)}"
            for override in each.without_place:
                yield f"  no effect any more: {described(override.override, now=now)}"
                yield f"    {override.no_effect}"

    outcomes, now = look_now(lambda operations: operations.policies.apply(names, **how), {"app": app})
    show(outcomes, draw, given, document_of)
