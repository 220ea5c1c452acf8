"""What FastAPI adds to Starlette: dependencies. The lifespan and the answers are those of `integrations.starlette`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

from fairlane.app import App
from fairlane.handle import Enqueued, Job
from fairlane.integrations.extras import missing
from fairlane.integrations.starlette import answer_back_pressure, app_of, lifespan, stop_process
from fairlane.task import Call

try:
    from fastapi import Depends
except ImportError as error:
    raise missing("fastapi", error) from error

__all__ = ["Enqueuer", "FairlaneApp", "answer_back_pressure", "app_of", "enqueuer_in", "lifespan", "stop_process"]

R = TypeVar("R")

FairlaneApp = Annotated[App, Depends(app_of)]
"""A parameter of an endpoint: the app of its site."""


class Enqueuer:
    """Enqueues in the transaction of a request: what is stored through it exists once that commits."""

    def __init__(self, tx: Any) -> None:
        self._tx = tx

    async def enqueue(self, call: Call[R]) -> Job[R]:
        """Store one call; `UniqueConflict` or `BacklogFull` if it is refused."""
        return await call.task.producer.enqueue_one(call.using(tx=self._tx))

    def enqueue_sync(self, call: Call[R]) -> Job[R]:
        """`enqueue` for endpoints that are not async."""
        return call.task.producer.run_blocking(self.enqueue(call))

    async def enqueue_many(self, calls: Iterable[Call[R]]) -> Enqueued[R]:
        """Store these calls of one app, all or none."""
        listed = list(calls)
        if not listed:
            return Enqueued()
        return await listed[0].task.producer.enqueue_many(listed, self._tx)

    def enqueue_many_sync(self, calls: Iterable[Call[R]]) -> Enqueued[R]:
        """`enqueue_many` for endpoints that are not async."""
        listed = list(calls)
        if not listed:
            return Enqueued()
        return listed[0].task.producer.run_blocking(self.enqueue_many(listed))


def enqueuer_in(session: object) -> Callable[..., Enqueuer]:
    """A dependency that enqueues in the session of the request: `Annotated[Enqueuer, Depends(enqueuer_in(Session))]`.

    `session` is the annotation by which endpoints get theirs, `Annotated[AsyncSession, Depends(…)]`; so it is the same.
    """

    def enqueuer(tx: Any) -> Enqueuer:
        return Enqueuer(tx)

    # FastAPI reads it there. Written as an annotation it would be a text, and looked up in this module.
    enqueuer.__annotations__["tx"] = session
    return enqueuer
