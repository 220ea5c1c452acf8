"""How a command that changes something goes about it: who, why, for how long, and what it says then."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import click

from fairlane.app import actor_of_process
from fairlane.cli.database import app_of, existing_store
from fairlane.cli.job_selection import place_options, selection_of, time_of, who_options
from fairlane.cli.tables import Progress, ago, tell_report
from fairlane.clock import Instant, as_datetime, microseconds
from fairlane.errors import ConfigurationError
from fairlane.operations import Change, Intent, OverrideInForce, Report, describe_change
from fairlane.policy.overrides import EVERYONE, Override
from fairlane.redaction import one_line
from fairlane.store.protocol import Store

F = TypeVar("F", bound=Callable[..., Any])


def change_options(function: F) -> F:
    """Who changes something, why, and whether in earnest."""
    function = who_options(place_options(function))
    function = click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")(function)
    return click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")(function)


def lasting_options(function: F) -> F:
    """Until when; then it ends by itself."""
    function = click.option("--until", metavar="WHEN", help="End at this time: 2030-01-31T08:00 (UTC).")(function)
    return click.option("--for", "lasting", metavar="DURATION", help="End after this long: 30m, 2h.")(function)


def key_option(function: F) -> F:
    return click.option(
        "--key", "keys", metavar="NAME=VALUE", multiple=True, help="Only this key; repeat to combine several."
    )(function)


def intent_of(options: dict[str, Any]) -> Intent:
    """What the options say about who, why and how long."""
    lasting, until = options.get("lasting"), options.get("until")
    return Intent(
        actor=options["actor"] or actor_of_process(),
        reason=options["reason"],
        expires_in=None if lasting is None else microseconds(lasting),
        expires_at=None if until is None else time_of("--until", until, "a time (2030-01-31T08:00), or --for 2h"),
        dry_run=options["dry_run"],
    )


def change(action: Callable[[Store, Intent], Awaitable[Change]], options: dict[str, Any]) -> None:
    """Carry out one of `fairlane.operations`, and say what changed."""

    async def changed() -> tuple[Change, Instant]:
        intent = intent_of(options)
        async with existing_store(app_of(options["app"], options["url"])) as store:
            return await action(store, intent), await store.now()

    done, now = asyncio.run(changed())
    if options["as_json"]:
        click.echo(json.dumps(describe_change(done)))
        return
    _tell(done, now)


def _tell(done: Change, now: Instant) -> None:
    if done.is_empty:
        click.echo(f"{done.queue}: nothing to change: nothing like that is set; `fairlane overrides` lists what is")
    for each in (done, *done.partitions):
        _tell_one(each, now)
    if done.affected is not None:
        click.echo(f"  {done.affected} there now")


def _tell_one(done: Change, now: Instant) -> None:
    set_, ended = ("would be set", "would end") if done.is_dry_run else ("set", "ended")
    has_ended = not done.is_dry_run
    replaced = {each.id: each for each in done.before}
    for each in done.after:
        click.echo(f"{done.queue}: {set_}: {said_of(each, everyone=done.everyone)}")
        if before := replaced.pop(each.id, None):
            click.echo(f"  instead of: {said_of(before, now, done.everyone)}")
    for each in replaced.values():
        click.echo(f"{done.queue}: {ended}: {said_of(each, now, done.everyone, has_ended=has_ended)}")
    if done.action == "resume":
        for each in done.remaining:
            if each.kind == "pause":
                click.echo(f"{done.queue}: still in force: {said_of(each, now, done.everyone)}")


def said_of(
    override: Override, now: Instant | None = None, everyone: str | None = None, *, has_ended: bool = False
) -> str:
    """An override in one line: what, until when, who and why; how long ago, if the time is given."""
    expires_at = None if has_ended else override.expires_at
    until = f" until {as_datetime(expires_at):%Y-%m-%d %H:%M:%S} UTC" if expires_at else ""
    when = "" if now is None else f", {ago(override.set_at, now)} ago"
    why = f": {override.reason}" if override.reason else ""
    what = override.describe(everyone or EVERYONE, has_ended=has_ended)
    who = "set by " if has_ended else ""
    return one_line(f"{what}{until} ({who}{override.set_by}{when}{why})")


def tell_overrides(overrides: Iterable[OverrideInForce], now: Instant, prefix: str | None = None) -> None:
    """A line each, and a second one where it has no effect. Each has its queue before it, or the prefix."""
    for each in overrides:
        click.echo(f"{f'{each.queue}: ' if prefix is None else prefix}{said_of(each.override, now, each.everyone)}")
        if each.no_effect is not None:
            click.echo(f"    no effect: {each.no_effect}")


FINAL = ("cancelled", "purged")
"""What cannot be undone."""
Action = Callable[..., Awaitable[Report]]


def act(action: Action, name: str, ids: tuple[str, ...], options: dict[str, Any], *, by_end: bool) -> None:
    """Carry out one of `fairlane.operations` as the command line asks for it. `name` is its past participle."""
    report = asyncio.run(_act(action, name, ids, options, by_end))
    if report is None:
        raise click.Abort
    tell_report(report, options["as_json"])
    if ids and report.skipped:
        # Whoever names a job wants to know that nothing came of it, in a script too.
        sys.exit(1)


async def _act(action: Action, name: str, ids: tuple[str, ...], options: dict[str, Any], by_end: bool) -> Report | None:
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
