"""How a command that changes jobs goes about it: look first, ask, act, report."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fairlane.errors import ConfigurationError

if TYPE_CHECKING:
    from fairlane.operations import Report

__all__ = ["act", "action_options", "who_options"]

FINAL = ("cancelled", "purged")
"""What cannot be undone."""
F = TypeVar("F", bound=Callable[..., Any])
Action = Callable[..., Awaitable["Report"]]


def who_options(function: F) -> F:
    """Who acts, and why."""
    default = "[default: FAIRLANE_ACTOR, else user@host]"
    function = click.option("--as", "actor", metavar="ACTOR", help=f"Who acts.  {default}")(function)
    return click.option("--reason", default="", help="The reason; recorded in the audit log.")(function)


def action_options(function: F) -> F:
    """How far an action goes, who takes it, and why."""
    function = who_options(function)
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print a JSON object."),
        click.option("--yes", is_flag=True, help="Do not ask for confirmation."),
        click.option("--dry-run", is_flag=True, help="Show what would be done, and change nothing."),
        click.option(
            "--limit", type=click.IntRange(1), default=1_000, show_default=True, help="Maximum number of jobs."
        ),
        click.option("--all", "all", is_flag=True, help="All matching jobs, up to --limit."),
    ):
        function = option(function)
    return function


def act(action: Action, name: str, ids: tuple[str, ...], options: dict[str, Any], *, by_end: bool) -> None:
    """Carry out one of `fairlane.operations` as the command line asks for it. `name` is its past participle."""
    import asyncio

    from fairlane.cli.telling import tell_report

    report = asyncio.run(_act(action, name, ids, options, by_end))
    if report is None:
        raise click.Abort
    tell_report(report, options["as_json"])
    if ids and report.skipped:
        # Whoever names a job wants to know that nothing came of it, in a script too.
        sys.exit(1)


async def _act(action: Action, name: str, ids: tuple[str, ...], options: dict[str, Any], by_end: bool) -> Report | None:
    from functools import partial

    from fairlane.app import actor_of_process
    from fairlane.cli.choosing import selection_of
    from fairlane.cli.database import app_of, existing_store
    from fairlane.cli.telling import Progress

    action = partial(action, actor=options["actor"] or actor_of_process())

    async with existing_store(app_of(options["app"], options["url"])) as store:
        selection = selection_of(ids, options, await store.now(), by_end=by_end)
        limit = options["limit"]
        if options["dry_run"] or not (ids or options["yes"]):
            with Progress("found") as progress:
                seen = await action(store, selection, limit=limit, dry_run=True, on_progress=progress)
            if options["dry_run"]:
                return seen
            if seen.done and not _confirmed(seen, name):
                return None
        reason = _reason(name, options["reason"])
        with Progress(name) as progress:
            return await action(store, selection, reason=reason, limit=limit, on_progress=progress)


def _reason(name: str, given: str) -> str:
    """Why. What cannot be undone is not done without it."""
    if given.strip() or name not in FINAL:
        return given
    if not _is_asked():
        raise ConfigurationError(f"jobs that are {name} do not come back; say why with --reason, it is recorded")
    told: str = click.prompt("Why (it is recorded)", err=True)
    return told


def _confirmed(seen: Report, name: str) -> bool:
    if not _is_asked():
        raise ConfigurationError(
            f"{_jobs(seen)} would be {name} and there is nobody to ask; give --yes, or --dry-run to see them"
        )
    for record in seen.sample:
        click.echo(f"  {record.id}  {record.state}  {record.queue}  {record.task}", err=True)
    beyond = ", and others stay: the limit is reached" if seen.more else ""
    return click.confirm(f"{_jobs(seen)} will be {name}{beyond}. Go on?", err=True)


def _jobs(report: Report) -> str:
    count = len(report.done)
    return f"{count:,} {'job' if count == 1 else 'jobs'}"


def _is_asked() -> bool:
    return sys.stdin.isatty()
