"""Middleware: what a program puts around every run and every enqueue, such as a trace, a session or a check."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fairlane.handle import Enqueued
from fairlane.task import Call
from fairlane.worker.context import JobContext

Next = Callable[[], Awaitable[Any]]
"""Runs what is inside, and returns what the task returned."""
Enqueue = Callable[[Sequence[Call[Any]]], Awaitable[Enqueued[Any]]]
"""Stores calls, and returns a handle for each."""


class Middleware:
    """Goes around runs and enqueues. Override what you need; what was added to the app first is the outermost."""

    async def around_run(self, job: JobContext, run: Next) -> Any:
        """Around one attempt, in the event loop, wherever the task itself runs. What this raises ends the attempt as if
        the task had raised it; what it returns is the job's result."""
        return await run()

    async def around_enqueue(self, calls: Sequence[Call[Any]], enqueue: Enqueue) -> Enqueued[Any]:
        """Around one enqueue: of one call, or of a bulk. The calls handed on may be others (`call.using(…)`), as many
        as were given."""
        return await enqueue(calls)


def wrapping_runs(middlewares: Sequence[Middleware]) -> list[Middleware]:
    """Those that have something to do with a run."""
    return [each for each in middlewares if type(each).around_run is not Middleware.around_run]


def wrapping_enqueues(middlewares: Sequence[Middleware]) -> list[Middleware]:
    """Those that have something to do with an enqueue."""
    return [each for each in middlewares if type(each).around_enqueue is not Middleware.around_enqueue]


async def around_run(middlewares: Sequence[Middleware], job: JobContext, run: Next) -> Any:
    """Run through all of these, the first of them outermost."""

    async def step(nth: int) -> Any:
        if nth == len(middlewares):
            return await run()
        return await middlewares[nth].around_run(job, lambda: step(nth + 1))

    return await step(0)


async def around_enqueue(
    middlewares: Sequence[Middleware], calls: Sequence[Call[Any]], enqueue: Enqueue
) -> Enqueued[Any]:
    """Enqueue through all of these, the first of them outermost."""

    async def step(nth: int, given: Sequence[Call[Any]]) -> Enqueued[Any]:
        if nth == len(middlewares):
            return await enqueue(given)
        return await middlewares[nth].around_enqueue(given, lambda passed: step(nth + 1, passed))

    return await step(0, calls)
