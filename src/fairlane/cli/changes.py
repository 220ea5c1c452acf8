"""How a command that changes something goes about it: who, why, for how long, and what it says then."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import click

from fairlane.cli.database import app_of, operations_on
from fairlane.cli.job_selection import place_options, selection_of, time_of, who_options
from fairlane.cli.tables import Progress, ago, plural, tell_report
from fairlane.clock import Instant, as_datetime, microseconds
from fairlane.errors import ConfigurationError
from fairlane.operations import Change, Operations, OverrideInForce, Report, document_of
from fairlane.operations.jobs import Jobs
from fairlane.policy.overrides import EVERYONE, Override
from fairlane.redaction import one_line

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


def intent_of(options: dict[str, Any]) -> dict[str, Any]:
    """What the options say about who, why and how long, as operations take it."""
    intent = {"actor": options["actor"] or None, "reason": options["reason"], "dry_run": options["dry_run"]}
    if (lasting := options.get("lasting")) is not None:
        microseconds(lasting)  # refuses what is no duration, in the words of this option
        intent["expires_in"] = lasting
    if (until := options.get("until")) is not None:
        intent["expires_at"] = as_datetime(time_of("--until", until, "a time (2030-01-31T08:00), or --for 2h"))
    return intent


def change(action: Callable[[Operations, dict[str, Any]], Awaitable[Change]], options: dict[str, Any]) -> None:
    """Carry out one of `fairlane.operations`, and say what changed."""

    async def changed() -> tuple[Change, Instant]:
        intent = intent_of(options)
        async with operations_on(app_of(options["app"], options["url"])) as operations:
            return await action(operations, intent), await operations.now()

    done, now = asyncio.run(changed())
    if options["as_json"]:
        click.echo(json.dumps(document_of(done)))
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


def act(
    action: Callable[[Jobs], Callable[..., Awaitable[Report]]],
    name: str,
    ids: tuple[str, ...],
    options: dict[str, Any],
    *,
    by_end: bool,
    **given: Any,
) -> None:
    """Carry out an action on jobs as the command line asks for it. `name` is its past participle."""

    async def acted() -> Report:
        async with operations_on(app_of(options["app"], options["url"])) as operations:
            selection = selection_of(ids, options, await operations.now(), by_end=by_end)
            limit, actor = options["limit"], options["actor"] or None
            do = partial(action(operations.jobs), selection, limit=limit, actor=actor, **given)
            if options["dry_run"] or not (ids or options["yes"]):
                with Progress("found") as progress:
                    seen = await do(dry_run=True, on_progress=progress)
                if options["dry_run"]:
                    return seen
                if seen.done and not _confirmed(seen, name):
                    raise click.Abort
            reason = _reason(name, options["reason"])
            with Progress(name) as progress:
                return await do(reason=reason, on_progress=progress)

    report = asyncio.run(acted())
    tell_report(report, options["as_json"])
    if ids and report.skipped:
        # Whoever names a job wants to know that nothing came of it, in a script too.
        sys.exit(1)


def _reason(name: str, given: str) -> str:
    """Why. What cannot be undone is not done without it."""
    if given.strip() or name not in FINAL:
        return given
    if not _is_asked():
        raise ConfigurationError(f"jobs that are {name} do not come back; say why with --reason, it is recorded")
    told: str = click.prompt("Why (it is recorded)", err=True)
    return told


def _confirmed(seen: Report, name: str) -> bool:
    jobs = plural(len(seen.done), "job")
    if not _is_asked():
        raise ConfigurationError(
            f"{jobs} would be {name} and there is nobody to ask; give --yes, or --dry-run to see them"
        )
    for record in seen.sample:
        click.echo(f"  {record.id}  {record.state}  {record.queue}  {record.task}", err=True)
    beyond = ", and others stay: the limit is reached" if seen.more else ""
    return click.confirm(f"{jobs} will be {name}{beyond}. Go on?", err=True)


def _is_asked() -> bool:
    return sys.stdin.isatty()
