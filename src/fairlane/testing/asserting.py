"""What a program has enqueued, as a test asks for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fairlane.app import App
from fairlane.errors import UndecodablePayload
from fairlane.job import JobRecord, State
from fairlane.operations.requests import find_jobs
from fairlane.parameters import checked
from fairlane.policy.keys import canonical_keys
from fairlane.store.operators import JobFilter
from fairlane.task import Call, Task
from fairlane.testing.checking import check_app, check_queue, check_state, task_named

__all__ = ["EnqueuedJob", "assert_enqueued", "enqueued_jobs"]

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
