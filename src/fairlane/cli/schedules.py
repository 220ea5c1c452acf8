"""`fairlane schedules`: what is enqueued again and again, and when."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import click

from fairlane.cli.changes import change_options, intent_of
from fairlane.cli.job_selection import LookingGroup, app_or_url_options
from fairlane.cli.output import look
from fairlane.cli.tables import ago, print_table
from fairlane.clock import Instant
from fairlane.operations import ScheduleView, document_of
from fairlane.operations.schedules import Schedules


@click.group(cls=LookingGroup)
def schedules() -> None:
    """List schedules, or pause, resume and trigger them.

    Without a command, lists all schedules.

    \b
    Example:
      fairlane schedules
      fairlane schedules pause nightly-report --reason "the warehouse is down"
      fairlane schedules trigger nightly-report
    """


@schedules.command("list")
@app_or_url_options
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")
def list_(app: str | None, url: str | None, as_json: bool) -> None:
    """List all schedules: when each is due, what it enqueues, and what it enqueued last.

    One that is orphaned is declared by no worker any more, and is not fired.

    \b
    Example:
      fairlane schedules list
      fairlane schedules list --json
    """
    found = look(lambda operations: operations.schedules.list(), app, url)
    if as_json:
        click.echo(json.dumps({"schedules": document_of(found)}))
        return
    if not found:
        click.echo("there are no schedules; workers declare them when they start: app.schedule(…)")
        return
    headings = ("NAME", "STATE", "WHEN", "NEXT", "LAST", "TASK", "QUEUE", "LAST JOB")
    print_table(headings, [_row(each) for each in found], ("NAME", "WHEN", "TASK", "QUEUE"))


def _row(view: ScheduleView) -> tuple[str, ...]:
    last = f"{ago(view.last_fired_at, view.now)} ago" if view.last_fired_at is not None else "never"
    job = "" if view.last_job is None else str(view.last_job)
    state = ", ".join(filter(None, (view.state, view.triggers_in_words)))
    return view.name, state, view.recurrence, _due(view.next_at, view.now), last, view.task, view.queue, job


def _due(at: Instant | None, now: Instant) -> str:
    """When a slot comes: `in 2h`, or `5m late` where it has come and nobody has fired it."""
    return ago(at, now) if at is None or at > now else f"{ago(at, now)} late"


@schedules.command()
@click.argument("name")
@change_options
def pause(name: str, **options: Any) -> None:
    """Fire a schedule no more, until it is resumed. Slots that come meanwhile are not made up for.

    \b
    Example:
      fairlane schedules pause nightly-report --reason "the warehouse is down"
    """
    _change(lambda schedules: schedules.pause, name, "paused", options)


@schedules.command()
@click.argument("name")
@change_options
def resume(name: str, **options: Any) -> None:
    """Let a schedule fire again, from its next slot on.

    \b
    Example:
      fairlane schedules resume nightly-report
    """
    _change(lambda schedules: schedules.resume, name, "resumed", options)


@schedules.command()
@click.argument("name")
@change_options
def trigger(name: str, **options: Any) -> None:
    """Let a worker fire a schedule once, at once and beside its slots. It may be paused.

    \b
    Example:
      fairlane schedules trigger nightly-report --reason "the figures were corrected"
    """
    _change(lambda schedules: schedules.trigger, name, "triggered", options)


def _change(
    action: Callable[[Schedules], Callable[..., Awaitable[ScheduleView]]], name: str, done: str, options: dict[str, Any]
) -> None:
    intent = intent_of(options)
    view = look(lambda operations: action(operations.schedules)(name, **intent), options["app"], options["url"])
    if options["as_json"]:
        click.echo(json.dumps(document_of(view) | {"is_dry_run": options["dry_run"]}))
        return
    would = "would be " if options["dry_run"] else ""
    triggers = view.triggers_in_words and f"; {view.triggers_in_words}"
    due = ""
    if view.next_at is not None:
        due = f"; its next slot {'comes' if view.next_at > view.now else 'is'} {_due(view.next_at, view.now)}"
    orphaned = "; no worker has it, so that nobody fires it" if view.state == "orphaned" else ""
    click.echo(f"{view.name}: {would}{done}{triggers}{due}{orphaned}")
