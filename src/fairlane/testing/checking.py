"""What a test gives these functions by mistake, refused by name: what means nothing would make an assertion true."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from fairlane.app import App
from fairlane.clock import ManualClock
from fairlane.errors import ConfigurationError, UnknownQueue
from fairlane.job import State
from fairlane.parameters import shown
from fairlane.policy.partitions import parse_partition
from fairlane.task import Call, Task

__all__ = ["check_app", "check_clock", "check_queue", "check_state", "schedules_named", "task_named"]


def check_app(what: str, app: object) -> None:
    if not isinstance(app, App):
        raise ConfigurationError(f"{what}: {shown(app)} is not an App; import yours, and give that")


def check_clock(what: str, clock: object) -> None:
    if clock is not None and not isinstance(clock, ManualClock):
        raise ConfigurationError(f"{what}: clock={shown(clock)} is not a ManualClock; leave it out, or make one")


def check_queue(app: App, queue: object) -> None:
    """Refuse a queue that the app does not have; partitions go by their own names, too."""
    if queue is None or (isinstance(queue, str) and queue in app.queue_names):
        return
    partition = parse_partition(queue) if isinstance(queue, str) else None
    if partition is None or partition[0] not in app.queue_names:
        raise UnknownQueue(f"queue={shown(queue)} is unknown; this app has {', '.join(app.queue_names)}")


def check_state(state: object) -> None:
    if state is not None and not isinstance(state, State):
        raise ConfigurationError(f"state={shown(state)} is not a State; give one, such as State.READY")


def schedules_named(app: App, what: str, given: bool | str | Collection[str]) -> tuple[str, ...]:
    """The names of all schedules of the app, of none, or of those that are given."""
    if isinstance(given, bool):
        return tuple(app.schedules) if given else ()
    names = (given,) if isinstance(given, str) else given
    for each in names:
        if each not in app.schedules:
            similar = get_close_matches(each, app.schedules, n=1)
            remedy = (
                f"did you mean {similar[0]!r}?" if similar else f"this app has {', '.join(app.schedules) or 'none'}"
            )
            raise ConfigurationError(f"{what}: schedules: there is no schedule {each!r}; {remedy}")
    return tuple(names)


def task_named(app: App, what: str, given: object) -> Task[..., Any]:
    """A task of the app, by itself or by its name."""
    if isinstance(given, Call):
        return given.task
    if isinstance(given, Task):
        return given
    if isinstance(given, str):
        return app.registry[given]
    raise ConfigurationError(
        f"{what}: {shown(given)} is neither a task nor a call of one; give the task, or task.call(…)"
    )
