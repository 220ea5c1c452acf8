"""What FastAPI adds to Starlette: dependencies. The lifespan and the answers are those of `integrations.starlette`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar, get_args

from fairlane.app import App
from fairlane.errors import ConfigurationError
from fairlane.integrations.extras import missing
from fairlane.integrations.starlette import answer_back_pressure, app_of, lifespan, stop_process
from fairlane.task import Call, Enqueued, Job, not_a_call

try:
    from fastapi import Depends, params
except ImportError as error:
    raise missing("fastapi", error) from error

__all__ = ["Enqueuer", "FairlaneApp", "answer_back_pressure", "app_of", "enqueuer_in", "lifespan", "stop_process"]

R = TypeVar("R")

FairlaneApp = Annotated[App, Depends(app_of)]
"""A parameter of an endpoint: the app of its site."""


class Enqueuer:
    """Enqueues in the transaction of a request: its jobs exist once that commits."""

    def __init__(self, tx: Any) -> None:
        self._tx = tx

    async def enqueue(self, call: Call[R]) -> Job[R]:
        """Store one call; `UniqueConflict` or `BacklogFull` if it is refused."""
        return await _checked(call).task.producer.enqueue_one(call.using(tx=self._tx))

    def enqueue_sync(self, call: Call[R]) -> Job[R]:
        """`enqueue` for endpoints that are not async."""
        return _checked(call).task.producer.run_blocking(self.enqueue(call))

    async def enqueue_many(self, calls: Iterable[Call[R]]) -> Enqueued[R]:
        """Store these calls of one app, all or none."""
        listed = list(calls)
        if not listed:
            return Enqueued()
        return await _checked(listed[0]).task.producer.enqueue_many(listed, self._tx)

    def enqueue_many_sync(self, calls: Iterable[Call[R]]) -> Enqueued[R]:
        """`enqueue_many` for endpoints that are not async."""
        listed = list(calls)
        if not listed:
            return Enqueued()
        return _checked(listed[0]).task.producer.run_blocking(self.enqueue_many(listed))


def _checked(call: Call[R]) -> Call[R]:
    if not isinstance(call, Call):
        raise not_a_call(call, "an Enqueuer")
    return call


def enqueuer_in(session: object) -> Callable[..., Enqueuer]:
    """A dependency that enqueues in the session of the request: `Annotated[Enqueuer, Depends(enqueuer_in(Session))]`.

    `session` is the annotation that endpoints get their session by, `Annotated[AsyncSession, Depends(…)]`, so that both
    get the same one.
    """
    # The value of an alias: `type Session = Annotated[…]`.
    meant = getattr(session, "__value__", session)
    if not any(isinstance(each, params.Depends) for each in get_args(meant)[1:]):
        # FastAPI would take it for a parameter of the request, and answer every one with 422.
        shown = getattr(session, "__name__", None) or repr(session)
        raise ConfigurationError(
            f"enqueuer_in({shown}): give the annotation by which endpoints get their session, such as "
            f"Session = Annotated[AsyncSession, Depends({shown if callable(session) else 'transaction'}, "
            "scope='function')], then enqueuer_in(Session)"
        )

    def enqueuer(tx: Any) -> Enqueuer:
        return Enqueuer(tx)

    # FastAPI reads it there. A written annotation would be a string, and looked up in this module.
    enqueuer.__annotations__["tx"] = session
    return enqueuer
