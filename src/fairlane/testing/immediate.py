"""Immediate mode: whoever enqueues a job has run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fairlane.app import App
from fairlane.handle import Enqueued
from fairlane.task import Call
from fairlane.testing.checking import check_app
from fairlane.testing.running import run_until_idle
from fairlane.worker.context import current_run
from fairlane.worker.middleware import Enqueue, Middleware

__all__ = ["immediate"]


@contextmanager
def immediate(app: App) -> Iterator[None]:
    """Inside the block, enqueueing a job of this app runs it, and what its task raises is raised there.

    The job is stored, claimed, run and settled as ever: what is not due yet, or held by a limit, stays where it is.
    Jobs that a task enqueues have run too by then.
    """
    check_app("immediate", app)
    running = _RunAtOnce(app)
    app.middlewares.insert(0, running)
    try:
        yield
    finally:
        app.middlewares.remove(running)


class _RunAtOnce(Middleware):
    def __init__(self, app: App) -> None:
        self._app = app

    async def around_enqueue(self, calls: Sequence[Call[Any]], enqueue: Enqueue) -> Enqueued[Any]:
        enqueued = await enqueue(calls)
        # Inside a task: whoever runs that one runs this one next. In a caller's transaction: nobody can see it yet.
        if current_run.get(None) is None and all(call.options.tx is None for call in calls):
            for ran in await run_until_idle(self._app):
                if ran.raised is not None and ran.outcome in ("failed", "dead"):
                    raise ran.raised
        return enqueued
