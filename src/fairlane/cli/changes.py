"""Commands that change something: what they share, and what they say of it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial, wraps
from operator import attrgetter
from typing import Any

import click

from fairlane.cli.database import app_of, operations_on
from fairlane.cli.options import (
    STATES,
    Decorator,
    action_options,
    change_options,
    filter_options,
    intent_of,
    keys_given,
    lasting_options,
    options,
    selection_of,
)
from fairlane.cli.output import Given, Progress, ago, look_now, plural, show
from fairlane.clock import Instant, as_datetime
from fairlane.errors import ConfigurationError
from fairlane.operations import Change, OverrideInForce, Report, document_of
from fairlane.policy.overrides import EVERYONE, Override

SHARED = {"app", "url", "as_json", "actor", "reason", "dry_run", "lasting", "until"}
"""Options of a change that are not its own."""
FINAL = ("cancelled", "purged")
"""What cannot be undone."""
SHOWN = 5
"""Skipped jobs that are named; of the others there is a number."""


def changes(method: str, *own: Decorator[Any], lasts: bool = False) -> Decorator[Any]:
    """A command that calls this method of operations on a queue, with the values of its own options by their names."""

    def decorate(function: Callable[[], None]) -> Any:
        @options(click.argument("queue"), *own, *([lasting_options] if lasts else []), change_options)
        @wraps(function)
        def command(queue: str, **given: Any) -> None:
            values = intent_of(given) | {name: value for name, value in given.items() if name not in SHARED}
            if "keys" in values:
                values["keys"] = keys_given(values["keys"])
            done, now = look_now(lambda operations: attrgetter(method)(operations)(queue, **values), given)
            show(done, lambda done, width: _change_lines(done, now), given, document_of)

        return command

    return decorate


def _change_lines(done: Change, now: Instant) -> Iterator[str]:
    if done.is_empty:
        yield f"{done.queue}: nothing to change: nothing like that is set; `fairlane overrides` lists what is"
    set_, ended = ("would be set", "would end") if done.is_dry_run else ("set", "ended")
    for each in (done, *done.partitions):
        replaced = {override.id: override for override in each.before}
        for override in each.after:
            yield f"{each.queue}: {set_}: {described(override, each.everyone)}"
            if before := replaced.pop(override.id, None):
                yield f"  instead of: {described(before, each.everyone, now)}"
        for override in replaced.values():
            yield f"{each.queue}: {ended}: {described(override, each.everyone, now, has_ended=not done.is_dry_run)}"
        for override in each.remaining if each.action == "resume" else ():
            if override.kind == "pause":
                yield f"{each.queue}: still in force: {described(override, each.everyone, now)}"
    if done.affected is not None:
        yield f"  {done.affected} there now"


def described(
    override: Override, everyone: str = EVERYONE, now: Instant | None = None, *, has_ended: bool = False
) -> str:
    """An override in one line: what, until when, who and why; how long ago, if the time is given."""
    expires_at = None if has_ended else override.expires_at
    until = f" until {as_datetime(expires_at):%Y-%m-%d %H:%M:%S} UTC" if expires_at else ""
    when = "" if now is None else f", {ago(override.set_at, now)} ago"
    why = f": {override.reason}" if override.reason else ""
    who = "set by " if has_ended else ""
    return f"{override.describe(everyone, has_ended=has_ended)}{until} ({who}{override.set_by}{when}{why})"


def override_lines(overrides: Iterable[OverrideInForce], now: Instant, prefix: str | None = None) -> Iterator[str]:
    """A line each, and a second one where it has no effect. Each has its queue before it, or the prefix."""
    for each in overrides:
        yield f"{f'{each.queue}: ' if prefix is None else prefix}{described(each.override, each.everyone, now)}"
        if each.no_effect is not None:
            yield f"    no effect: {each.no_effect}"


def acts(
    method: str, done: str, *own: Decorator[Any], states: tuple[str, ...] = STATES, by_end: bool = False
) -> Decorator[Any]:
    """A command that calls this method of `operations.jobs` on jobs that are named, or on all that fit."""

    def decorate(function: Callable[[], None]) -> Any:
        named = click.argument("ids", metavar="[ID]...", nargs=-1)

        @options(named, filter_options(states), *own, action_options)
        @wraps(function)
        def command(ids: tuple[str, ...], **given: Any) -> None:
            extra = {name: given[name] for name in ("delay", "on_conflict") if name in given}
            act(method, done, ids, given, by_end=by_end, **extra)

        return command

    return decorate


def act(method: str, done: str, ids: tuple[str, ...], given: Given, *, by_end: bool = False, **extra: Any) -> None:
    """Carry out an action on jobs as the command line asks for it. `done` is its past participle."""

    async def acted() -> Report:
        async with operations_on(app) as operations:
            selection = selection_of(ids, given, await operations.now(), by_end=by_end)
            actor = given["actor"] or None
            do: Callable[..., Awaitable[Report]] = partial(
                getattr(operations.jobs, method), selection, limit=given["limit"], actor=actor, **extra
            )
            if given["dry_run"] or not (ids or given["yes"]):
                with Progress("found") as progress:
                    found = await do(dry_run=True, on_progress=progress)
                if given["dry_run"]:
                    return found
                if found.done and not _is_confirmed(found, done):
                    raise click.Abort
            reason = _reason(done, given["reason"])
            with Progress(done) as progress:
                return await do(reason=reason, on_progress=progress)

    app = app_of(given["app"], given["url"])
    report = asyncio.run(acted())
    show(report, _report_lines, given, document_of)
    if not given["as_json"]:
        _print_exceptions(report)
    if ids and report.skipped:
        # Whoever names a job wants to know that nothing came of it, in a script too.
        sys.exit(1)


def _reason(done: str, given: str) -> str:
    """Why. What cannot be undone is not done without it."""
    if given.strip() or done not in FINAL:
        return given
    if not is_interactive():
        raise ConfigurationError(f"jobs that are {done} do not come back; say why with --reason, it is recorded")
    reason: str = click.prompt("Why (it is recorded)", err=True)
    return reason


def _is_confirmed(found: Report, done: str) -> bool:
    jobs = plural(len(found.done), "job")
    if not is_interactive():
        raise ConfigurationError(
            f"{jobs} would be {done} and there is nobody to ask; give --yes, or --dry-run to see them"
        )
    for record in found.sample:
        click.echo(f"  {record.id}  {record.state}  {record.queue}  {record.task}", err=True)
    beyond = ", and others stay: the limit is reached" if found.more else ""
    return click.confirm(f"{jobs} will be {done}{beyond}. Go on?", err=True)


def is_interactive() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty()


def _report_lines(report: Report, width: int) -> Iterator[str]:
    """What was done, or would be."""
    would = "would be " if report.is_dry_run else ""
    yield f"{plural(len(report.done), 'job')} {would}{report.action}"
    if report.is_dry_run:
        for record in report.sample:
            yield f"  {record.id}  {record.state}  {record.queue}  {record.task}"
        if len(report.done) > len(report.sample):
            yield f"  … and {len(report.done) - len(report.sample):,} more"
    if report.replaced:
        happens = would or ("was " if len(report.replaced) == 1 else "were ")
        shown = ", ".join(map(str, report.replaced[:SHOWN])) + (", …" if len(report.replaced) > SHOWN else "")
        yield f"{plural(len(report.replaced), 'waiting job')} with the same unique key {happens}cancelled: {shown}"


def _print_exceptions(report: Report) -> None:
    """What was not done, and why."""
    for handled in report.skipped[:SHOWN]:
        click.echo(f"skipped {handled.job}: {handled.skipped}", err=True)
    if len(report.skipped) > SHOWN:
        click.echo(f"skipped {len(report.skipped) - SHOWN:,} more", err=True)
    if report.held:
        held = "1 was" if report.held == 1 else f"{report.held:,} were"
        instead = "; --on-conflict replace cancels a holder that waits" if report.action == "replayed" else ""
        click.echo(f"{held} not {report.action}: another job holds the unique key{instead}", err=True)
    if report.more:
        click.echo("the limit was reached and there are more: run it again, or raise --limit", err=True)
