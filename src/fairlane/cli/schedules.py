"""`fairlane schedules`: what is enqueued again and again, and when."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import click
from rich.text import Text

from fairlane.cli.options import (
    Decorator,
    LookingGroup,
    app_or_url_options,
    change_options,
    intent_of,
    json_option,
    options,
)
from fairlane.cli.output import ago, columns, look, show
from fairlane.clock import Instant
from fairlane.operations import ScheduleView, document_of


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
@json_option()
def list_(**given: Any) -> None:
    """List all schedules: when each is due, what it enqueues, and what it enqueued last.

    One that is orphaned is declared by no worker any more, and is not fired.

    \b
    Example:
      fairlane schedules list
      fairlane schedules list --json
    """
    found = look(lambda operations: operations.schedules.list(), given)
    show(found, _draw, given, lambda found: {"schedules": document_of(found)})


def _draw(found: list[ScheduleView], width: int) -> list[Text]:
    if not found:
        return [Text("there are no schedules; workers declare them when they start: app.schedule(…)")]
    headings = ("NAME", "STATE", "WHEN", "NEXT", "LAST", "TASK", "QUEUE", "LAST JOB")
    return columns(headings, [*map(_row, found)], width, flexible=("NAME", "WHEN", "TASK", "QUEUE"))


def _row(view: ScheduleView) -> tuple[str, ...]:
    last = f"{ago(view.last_fired_at, view.now)} ago" if view.last_fired_at is not None else "never"
    job = "" if view.last_job is None else str(view.last_job)
    state = ", ".join(filter(None, (view.state, view.triggers_in_words)))
    return view.name, state, view.recurrence, _due(view.next_at, view.now), last, view.task, view.queue, job


def _due(at: Instant | None, now: Instant) -> str:
    """When a slot comes: `in 2h`, or `5m late` where it has come and nobody has fired it."""
    return ago(at, now) if at is None or at > now else f"{ago(at, now)} late"


def _changes(done: str) -> Decorator[Any]:
    """A command that calls the method of `operations.schedules` that has its name. `done` is its past participle."""

    def decorate(function: Callable[[], None]) -> Any:
        @options(click.argument("name"), change_options)
        @wraps(function)
        def command(name: str, **given: Any) -> None:
            intent = intent_of(given)
            view = look(lambda operations: getattr(operations.schedules, function.__name__)(name, **intent), given)
            would = "would be " if given["dry_run"] else ""
            document = document_of(view) | {"is_dry_run": given["dry_run"]}
            show(view, lambda view, width: [_sentence(view, f"{would}{done}")], given, lambda _: document)

        return command

    return decorate


def _sentence(view: ScheduleView, done: str) -> str:
    """What was done to a schedule, and when it fires next."""
    triggers = view.triggers_in_words and f"; {view.triggers_in_words}"
    due = ""
    if view.next_at is not None:
        due = f"; its next slot {'comes' if view.next_at > view.now else 'is'} {_due(view.next_at, view.now)}"
    orphaned = "; no worker has it, so that nobody fires it" if view.state == "orphaned" else ""
    return f"{view.name}: {done}{triggers}{due}{orphaned}"


@schedules.command()
@_changes("paused")
def pause() -> None:
    """Fire a schedule no more, until it is resumed. Slots that come meanwhile are not made up for.

    \b
    Example:
      fairlane schedules pause nightly-report --reason "the warehouse is down"
    """


@schedules.command()
@_changes("resumed")
def resume() -> None:
    """Let a schedule fire again, from its next slot on.

    \b
    Example:
      fairlane schedules resume nightly-report
    """


@schedules.command()
@_changes("triggered")
def trigger() -> None:
    """Let a worker fire a schedule once, at once and beside its slots. It may be paused.

    \b
    Example:
      fairlane schedules trigger nightly-report --reason "the figures were corrected"
    """
