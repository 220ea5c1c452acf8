"""A backend of Django's Tasks framework: TASKS = {"default": {"BACKEND": "…django.tasks.FairlaneBackend"}}.

The framework came with Django 6. On Django 5 the same is in the package `django-tasks`, and this is a backend of that.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from uuid import UUID

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.utils import timezone
from django.utils.module_loading import import_string

from fairlane.app import DEFAULT_QUEUE
from fairlane.clock import Instant, as_datetime
from fairlane.errors import Dead, JobNotFound, Retry, Snooze, UnknownQueue
from fairlane.integrations.django.project import DjangoApp, project_app
from fairlane.job import State
from fairlane.policy.partitions import parse_partition
from fairlane.task import Task
from fairlane.worker.runs import context

__all__ = ["FairlaneBackend", "prepare"]


def _framework() -> str:
    for name in ("django.tasks", "django_tasks"):
        if find_spec(name) is not None:
            return name
    raise ImproperlyConfigured(
        "this version of Django has no Tasks framework: upgrade to Django 6, or pip install django-tasks"
    )


FRAMEWORK = _framework()
_base = import_module(f"{FRAMEWORK}.base")
_exceptions = import_module(f"{FRAMEWORK}.exceptions")
_signals = import_module(f"{FRAMEWORK}.signals")
_normalize: Callable[[Any], Any] = import_module(
    "django.utils.json" if FRAMEWORK == "django.tasks" else "django_tasks.utils"
).normalize_json
BaseTaskBackend: Any = import_module(f"{FRAMEWORK}.backends.base").BaseTaskBackend
InvalidTask: Any = getattr(_exceptions, "InvalidTask", None) or _exceptions.InvalidTaskError
Status: Any = _base.TaskResultStatus

STATUSES = {
    State.SCHEDULED: Status.READY,
    State.READY: Status.READY,
    State.RUNNING: Status.RUNNING,
    State.DONE: Status.SUCCESSFUL,
    State.DEAD: Status.FAILED,
    State.CANCELLED: Status.FAILED,
}
OPTIONS = {"max_attempts": 5, "retry_on": ()}
CLASS_PATH = re.compile(r"[^\W\d][\w.]*\Z")

_registering = threading.Lock()


class FairlaneBackend(BaseTaskBackend):
    """Enqueues Django's tasks as jobs: under the policies of their queues, and in the transaction that is open."""

    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: Mapping[str, Any]) -> None:
        super().__init__(alias, params)
        for name in self.options:
            if name not in OPTIONS:
                raise ImproperlyConfigured(
                    f"TASKS[{alias!r}]['OPTIONS'][{name!r}] is unknown; known are {', '.join(OPTIONS)}"
                )
        chosen = {**OPTIONS, **self.options}
        self.max_attempts: int = chosen["max_attempts"]
        self.retry_on = tuple(import_string(each) if isinstance(each, str) else each for each in chosen["retry_on"])

    def enqueue(self, task: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Store a job; in an open transaction, with it."""
        self.validate_task(task)
        given, named = _normalize(list(args)), _normalize(dict(kwargs))
        bound = self._registered(task).using(
            queue=task.queue_name, priority=task.priority, run_at=_aware(task.run_after) if task.run_after else None
        )
        try:
            job = bound.enqueue_sync(*given, **named)
        except UnknownQueue as error:
            raise InvalidTask(str(error)) from error
        result = _base.TaskResult(
            task=task,
            id=str(job.id),
            status=Status.READY,
            enqueued_at=_moment(project_app().clock.now()),
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=given,
            kwargs=named,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        _signals.task_enqueued.send(type(self), task_result=result)
        return result

    def get_result(self, result_id: str) -> Any:
        """What is known of a job, as long as it is kept. One whose transaction is still open is not known yet."""
        return project_app().run_blocking(self.looked_up(result_id))

    async def looked_up(self, result_id: str) -> Any:
        """`get_result`, in the app's own event loop."""
        app = project_app()
        try:
            job = app.job(UUID(str(result_id)))
            record, attempts = await job.record(), await job.attempts()
        except (JobNotFound, ValueError):
            raise _exceptions.TaskResultDoesNotExist(result_id) from None
        task = _imported(record.task)
        if task is None or task.backend != self.alias:
            raise _exceptions.TaskResultDoesNotExist(result_id)
        known = self._registered(task)
        args, kwargs = known.codec.decode_call(record.payload)
        queue, _ = parse_partition(record.queue) or (record.queue, 0)
        result = _base.TaskResult(
            task=task.using(priority=record.priority, queue_name=queue, run_after=_moment(record.due_at)),
            id=str(record.id),
            status=STATUSES[record.state],
            enqueued_at=_moment(record.enqueued_at),
            started_at=_moment(attempts[0].claimed_at) if attempts else None,
            finished_at=_moment(record.finished_at) if record.state.is_final else None,
            last_attempted_at=_moment(attempts[-1].claimed_at) if attempts else None,
            args=list(args),
            kwargs=kwargs,
            backend=self.alias,
            errors=[_error(each.error) for each in attempts if each.error],
            worker_ids=[each.worker or "" for each in attempts],
        )
        if record.state is State.DONE:
            object.__setattr__(result, "_return_value", known.codec.decode_result(record.result))
        return result

    # In the worker.

    def _registered(self, task: Any) -> Task[..., Any]:
        """The task of the app that runs this function."""
        app, name = project_app(), task.module_path
        with _registering:
            known: Task[..., Any] | None = app.registry.known(name)
            if known is not None:
                return known
            added: Task[..., Any] = app.task(
                name=name,
                queue=task.queue_name,
                max_attempts=self.max_attempts,
                # In the framework an exception ends a task. A lost worker is not its fault, and it runs again.
                retry_on=self.retry_on,
                priority=task.priority,
            )(_runner(self, task))
            return added

    def will_go_on(self, error: BaseException) -> bool:
        """Whether a run that raised this is followed by another one."""
        if isinstance(error, Snooze):
            return True
        running = context()
        is_worth_it = isinstance(error, (Retry, *self.retry_on)) and not isinstance(error, Dead)
        return is_worth_it and running.attempt < running.max_attempts


def _runner(backend: FairlaneBackend, task: Any) -> Callable[..., Any]:
    """The function that a worker calls: Django's, with what the framework does around it."""
    function, sender = task.func, type(backend)

    def arguments(result: Any, args: Sequence[Any]) -> Sequence[Any]:
        return (_base.TaskContext(task_result=result), *args) if task.takes_context else args

    def ended(result: Any, error: Exception | None = None, value: Any = None) -> Any:
        """The result as it will be once this run is settled; `None` if the task runs again."""
        if error is not None and backend.will_go_on(error):
            return None
        object.__setattr__(result, "finished_at", _moment(project_app().clock.now()))
        object.__setattr__(result, "status", Status.SUCCESSFUL if error is None else Status.FAILED)
        object.__setattr__(result, "_return_value", value)
        return result

    async def run_async(*args: Any, **kwargs: Any) -> Any:
        result = await backend.looked_up(str(context().id))
        await _signals.task_started.asend(sender, task_result=result)
        try:
            value = _normalize(await function(*arguments(result, args), **kwargs))
        except Exception as error:
            if (end := ended(result, error)) is not None:
                await _signals.task_finished.asend(sender, task_result=end)
            raise
        await _signals.task_finished.asend(sender, task_result=ended(result, value=value))
        return value

    def run(*args: Any, **kwargs: Any) -> Any:
        result = backend.get_result(str(context().id))
        _signals.task_started.send(sender, task_result=result)
        try:
            value = _normalize(function(*arguments(result, args), **kwargs))
        except Exception as error:
            if (end := ended(result, error)) is not None:
                _signals.task_finished.send(sender, task_result=end)
            raise
        _signals.task_finished.send(sender, task_result=ended(result, value=value))
        return value

    runner: Any = run_async if inspect.iscoroutinefunction(function) else run
    runner.__module__, runner.__qualname__, runner.__name__ = function.__module__, function.__qualname__, task.name
    # Arguments arrive as plain JSON, as with every backend: annotations are ignored. Keys come from parameter names.
    parameters = list(inspect.signature(function).parameters.values())[1 if task.takes_context else 0 :]
    runner.__signature__ = inspect.Signature([each.replace(annotation=inspect.Parameter.empty) for each in parameters])
    return runner  # type: ignore[no-any-return]


def _error(text: str) -> Any:
    """What was raised, by the first line of what is kept of it."""
    path = text.partition("\n")[0].partition(":")[0].strip()
    if CLASS_PATH.match(path) is None:
        path = "fairlane.errors.JobFailed"  # nothing was raised: its worker was lost, or it was cancelled
    elif "." not in path:
        path = f"builtins.{path}"
    return _base.TaskError(exception_class_path=path, traceback=text)


def _imported(path: str) -> Any:
    """The task of Django's framework at this path, if there is one."""
    try:
        found = import_string(path)
    except ImportError:
        return None
    return found if isinstance(found, _base.Task) else None


def _aware(moment: datetime) -> datetime:
    return moment if timezone.is_aware(moment) else timezone.make_aware(moment)


def _moment(instant: Instant | None) -> datetime | None:
    if not instant:
        return None
    moment = as_datetime(instant)
    return moment if django_settings.USE_TZ else timezone.make_naive(moment)


def prepare(app: DjangoApp) -> None:
    """Declare the queues of all backends of this kind, and find their tasks by name when a job of one comes."""
    backends: Any = import_module(FRAMEWORK).task_backends
    ours = [each for each in backends.all() if isinstance(each, FairlaneBackend)]
    for backend in ours:
        for queue in sorted(backend.queues or {DEFAULT_QUEUE}):
            if queue not in app.queues:
                app.queue(queue)
    aliases = {backend.alias for backend in ours}

    def adopt(name: str) -> Task[..., Any] | None:
        task = _imported(name)
        if task is None or task.backend not in aliases:
            return None
        return backends[task.backend]._registered(task)  # type: ignore[no-any-return]

    app.registry.adopt = adopt
