"""For tests of a Django project: capture what is enqueued, and run it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from django.db import connections

from fairlane.errors import ConfigurationError
from fairlane.integrations.django.project import DjangoApp, project_app
from fairlane.task import Call
from fairlane.testing import Ran, run_until_idle

__all__ = ["captured_calls", "run_jobs"]


@contextmanager
def captured_calls() -> Iterator[list[Call[Any]]]:
    """The calls that are enqueued inside the block, in order, whether their transaction commits or not.

    A `TestCase` never commits, so nobody else could see its jobs.
    """
    calls: list[Call[Any]] = []
    app = project_app()
    app.captures.append(calls.extend)
    try:
        yield calls
    finally:
        app.captures.remove(calls.extend)


def run_jobs(*, concurrency: int = 1, **options: Any) -> list[Ran]:
    """Run every job that can run now, and what those enqueue, for a `TransactionTestCase`; as `run_until_idle` does.

    One at a time: connections to a SQLite database in memory lock each other out. Tasks that have processes of their
    own run in threads, for a process would use the database of the settings, and not that of the test.
    """
    app = project_app()
    if connections[app.settings.database].in_atomic_block:
        raise ConfigurationError(
            "run_jobs: this test is inside a transaction, and no job of it can run before that commits; use a "
            "TransactionTestCase, or captured_calls() to see what was enqueued"
        )
    with _in_threads(app):
        return app.run_blocking(run_until_idle(app, concurrency=concurrency, **options))


@contextmanager
def _in_threads(app: DjangoApp) -> Iterator[None]:
    before = {task: task.options for task in app.registry}
    for task, chosen in before.items():
        task.options = replace(chosen, executor="thread")
    try:
        yield
    finally:
        for task, chosen in before.items():
            task.options = chosen
