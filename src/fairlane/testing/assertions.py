"""What a program has enqueued, as a test asks for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from fairlane.app import App
from fairlane.clock import ManualClock
from fairlane.errors import ConfigurationError, UndecodablePayload, UnknownQueue
from fairlane.job import JobRecord, State
from fairlane.operations.requests import find_jobs
from fairlane.parameters import checked, shown
from fairlane.policy.keys import canonical_keys
from fairlane.policy.partitions import parse_partition
from fairlane.store.operators import JobFilter
from fairlane.task import Call, Task

SHOWN = 10
PAGE = 1_000


@dataclass(frozen=True, slots=True)
class EnqueuedJob:
    """A job that is stored, and the call that it stands for."""

    record: JobRecord
    arguments: Mapping[str, Any]
    """What each parameter of the task is given, defaults included; empty for a task that this app does not know."""

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.arguments.items())
        keys = f" {self.record.keys}" if self.record.keys else ""
        return f"{self.record.task}({given}) in {self.record.queue!r}, {self.record.state}{keys}"


@checked(unchecked=["app", "task", "queue"])
async def enqueued_jobs(
    app: App, task: Task[..., Any] | str | None = None, *, queue: str | None = None
) -> list[EnqueuedJob]:
    """The jobs that are stored, whatever has become of them, in the order in which they were enqueued."""
    check_app("enqueued_jobs", app)
    check_queue(app, queue)
    name = None if task is None else task_named(app, "enqueued_jobs", task).name
    store = await app.opened()
    found: list[JobRecord] = []
    after: str | None = None
    while True:
        page = await find_jobs(store, JobFilter(queue=queue, task=name), after, PAGE)
        found += page.jobs
        after = page.after
        if after is None:
            break
    return [EnqueuedJob(record, _arguments(app, record)) for record in reversed(found)]


@checked(unchecked=["app", "expected", "queue", "state"])
async def assert_enqueued(
    app: App,
    expected: Task[..., Any] | Call[Any] | str,
    *,
    count: int | None = None,
    queue: str | None = None,
    priority: int | None = None,
    keys: Mapping[str, object] | None = None,
    state: State | None = None,
) -> list[EnqueuedJob]:
    """Fail unless jobs of a task, or of exactly this call (`task.call(…)`), were enqueued: at least one, or `count`.

    Of what is given besides, all must hold; of `keys`, a job may carry more. Returns the jobs.
    """
    check_app("assert_enqueued", app)
    check_queue(app, queue)
    check_state(state)
    task = task_named(app, "assert_enqueued", expected)
    wanted = _bound(expected.task, expected.args, expected.kwargs) if isinstance(expected, Call) else None
    carried = canonical_keys(keys) if keys is not None else {}
    fitting = [
        job
        for job in await enqueued_jobs(app, task)
        if (wanted is None or job.arguments == wanted)
        and (queue is None or job.record.queue == queue)
        and (priority is None or job.record.priority == priority)
        and (state is None or job.record.state is state)
        and all(name in job.record.keys and job.record.keys[name] == value for name, value in carried.items())
    ]
    if fitting if count is None else len(fitting) == count:
        return fitting
    options = {"queue": queue, "priority": priority, "keys": keys, "state": None if state is None else str(state)}
    beside = "".join(f", {name}={value!r}" for name, value in options.items() if value is not None)
    what = repr(expected) if isinstance(expected, Call) else task.name
    many = "no job" if not fitting else f"{len(fitting)} job{'s' * (len(fitting) > 1)}"
    asked = "" if count is None else f", where {count} should be"
    raise AssertionError(f"{many} of {what}{beside} enqueued{asked}; {_told(await enqueued_jobs(app))}")


def _told(jobs: Sequence[EnqueuedJob]) -> str:
    if not jobs:
        return "nothing was enqueued at all"
    listed = "".join(f"\n  {job!r}" for job in jobs[:SHOWN])
    more = f"\n  and {len(jobs) - SHOWN} more" if len(jobs) > SHOWN else ""
    return f"enqueued were:{listed}{more}"


def _arguments(app: App, record: JobRecord) -> Mapping[str, Any]:
    task = app.registry.find(record.task)
    if task is None:
        return {}
    try:
        args, kwargs = task.codec.decode_call(record.payload)
    except UndecodablePayload:
        return {}
    return _bound_as_is(task, args, kwargs)


def _bound(task: Task[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of a call as a worker would see them: what goes through JSON may come back as something else."""
    payload = task.codec.encode_call(tuple(args), dict(kwargs), 1 << 30)
    return _bound_as_is(task, *task.codec.decode_call(payload))


def _bound_as_is(task: Task[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    bound = task.codec.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


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
