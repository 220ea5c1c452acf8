"""`fairlane policy`: what is in force, and putting what the code says in force."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from fairlane.errors import ConfigurationError, UnknownQueue

if TYPE_CHECKING:
    from fairlane.app import App
    from fairlane.policy.policy import Policy
    from fairlane.store.protocol import Declared

__all__ = ["policy"]


@click.group()
def policy() -> None:
    """Show the policies in force, or put an app's own in force.

    \b
    Example:
      fairlane policy show shop:app
      fairlane policy apply shop:app
    """


@policy.command()
@click.argument("app", metavar="MODULE:APP")
@click.option("--queue", "names", multiple=True, help="Only this queue; may be given several times.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def apply(app: str, names: tuple[str, ...], as_json: bool) -> None:
    """Put the policies that an app declares in force.

    On PostgreSQL the stored policy wins over a different declaration until this is run, so that a rolling deploy does
    not flap between two of them. Jobs that wait or run stay what they are.

    \b
    Example:
      fairlane policy apply shop:app
      fairlane policy apply shop:app --queue webhooks
    """
    import asyncio

    from fairlane.cli.loading import load_app

    outcomes = asyncio.run(_apply(load_app(app), names))
    if as_json:
        click.echo(json.dumps(outcomes))
        return
    for outcome in outcomes:
        change = "was in force already" if outcome["changed"] is False else "is now in force"
        click.echo(f"{outcome['queue']}: {_said(outcome)} {change} (version {outcome['version']})")


@policy.command()
@click.argument("app", required=False, metavar="[MODULE:APP]")
@click.option("--url", help="The database, instead of an app's.  [default: FAIRLANE_URL]")
@click.option("--queue", "names", multiple=True, help="Only this queue; may be given several times.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON array.")
def show(app: str | None, url: str | None, names: tuple[str, ...], as_json: bool) -> None:
    """Show the policy in force for each queue of a database, and where an app declares another one.

    \b
    Example:
      fairlane policy show shop:app
      fairlane policy show --url postgresql://shop@localhost/shop --queue webhooks --json
    """
    import asyncio

    from fairlane.cli.database import app_of

    shown = asyncio.run(_show(app_of(app, url), names))
    if as_json:
        click.echo(json.dumps(shown))
        return
    for each in shown:
        click.echo(f"{each['queue']}: {_said(each)} (version {each['version']})")
        if each["declared"] is not None:
            click.echo(
                f"  drift: the app declares {_said(each['declared'])}; `fairlane policy apply` puts that in force"
            )
    if not shown:
        click.echo("no queue is known to this database yet")


async def _apply(app: App, names: tuple[str, ...]) -> list[dict[str, Any]]:
    from fairlane.cli.database import existing_store

    app.check()
    if unknown := sorted(set(names) - set(app.queues)):
        raise UnknownQueue(f"the app declares no queue {unknown[0]!r}; it declares {', '.join(app.queues) or 'none'}")
    if not app.queues:
        raise ConfigurationError(
            "the app declares no queue, so there is no policy to apply; declare one with app.queue(…)"
        )
    outcomes = []
    async with existing_store(app) as store:
        for name in names or tuple(app.queues):
            before = await store.policy(name)
            after = await store.apply(app.queues[name].policy)
            outcomes.append({**_document(after), "changed": before is None or before.version != after.version})
    return outcomes


async def _show(app: App, names: tuple[str, ...]) -> list[dict[str, Any]]:
    from fairlane.cli.database import existing_store

    shown = []
    async with existing_store(app) as store:
        known = sorted(await store.queues())
        if unknown := sorted(set(names) - set(known)):
            raise UnknownQueue(
                f"queue {unknown[0]!r} is not known to this database; known are {', '.join(known) or 'none'}"
            )
        for name in names or known:
            stored = await store.policy(name)
            if stored is not None:
                shown.append({**_document(stored), "declared": _drift(app, stored.policy)})
    return shown


def _document(declared: Declared) -> dict[str, Any]:
    return {**declared.policy.to_document(), "version": declared.version}


def _drift(app: App, stored: Policy) -> dict[str, Any] | None:
    declared = app.queues.get(stored.queue)
    if declared is None or declared.policy.digest == stored.digest:
        return None
    return declared.policy.to_document()


def _said(document: dict[str, Any]) -> str:
    """A policy as one would write it in Python."""
    from fairlane.policy.policy import Policy
    from fairlane.scheduler.measures import describe

    return describe(Policy.from_document(document))
