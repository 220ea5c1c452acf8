"""Fairlane in a Starlette or FastAPI app: a lifespan, and answers when backlogs are full."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from math import ceil
from typing import Any

from fairlane.app import App
from fairlane.clock import SECOND, microseconds
from fairlane.errors import BacklogFull, ConfigurationError, StoreUnavailable
from fairlane.integrations.extras import missing
from fairlane.task import Duration
from fairlane.worker import Worker, WorkerOptions

try:
    from starlette.applications import Starlette
    from starlette.requests import HTTPConnection, Request
    from starlette.responses import JSONResponse, Response
except ImportError as error:
    raise missing("starlette", error) from error

__all__ = ["answer_back_pressure", "app_of", "lifespan", "stop_process"]

log = logging.getLogger("fairlane.integrations.starlette")

Lifespan = Callable[[Any], AbstractAsyncContextManager[Any]]
OnDeath = Callable[[BaseException], object]


def stop_process(_: BaseException) -> None:
    """Ask the server to stop (SIGTERM), so that its supervisor restarts it."""
    os.kill(os.getpid(), signal.SIGTERM)


def lifespan(
    app: App,
    *,
    inner: Lifespan | None = None,
    worker: bool | WorkerOptions = False,
    on_worker_death: OnDeath = stop_process,
) -> Lifespan:
    """A lifespan for `Starlette(lifespan=…)` and `FastAPI(lifespan=…)`: the app is open while the site is.

    `inner` is a lifespan of your own, which runs while the app is open. With `worker`, jobs run in this process too:
    they start after `inner` has started, and are drained before it ends. If the worker dies, that is logged, and the
    error is passed to `on_worker_death`, which stops the process by default.
    """
    if not isinstance(app, App):
        raise ConfigurationError(
            f"lifespan takes the App of Fairlane, not a {type(app).__name__}; call it, and give the site what it "
            f"returns: {type(app).__name__ if isinstance(app, Starlette) else 'FastAPI'}(lifespan=lifespan(app))"
        )

    @asynccontextmanager
    async def opened(site: Starlette) -> AsyncIterator[Mapping[str, Any] | None]:
        async with AsyncExitStack() as stack:
            site.state.fairlane = await stack.enter_async_context(app)
            state = None if inner is None else await stack.enter_async_context(inner(site))
            if worker:
                options = worker if isinstance(worker, WorkerOptions) else None
                site.state.fairlane_worker = await stack.enter_async_context(_working(app, options, on_worker_death))
            yield state

    return opened


@asynccontextmanager
async def _working(app: App, options: WorkerOptions | None, on_death: OnDeath) -> AsyncIterator[Worker]:
    worker = await app.worker(options)
    is_stopping = False

    def ended(run: asyncio.Task[None]) -> None:
        error = None if run.cancelled() else run.exception()
        if error is not None and not is_stopping:
            log.critical("the worker in this process died: %s; its jobs run elsewhere, or wait", error)
            on_death(error)

    running = asyncio.create_task(worker.run(), name="fairlane-worker")
    running.add_done_callback(ended)
    try:
        yield worker
    finally:
        is_stopping = True
        worker.stop()
        # Raises the error of a dead worker: the server then stops with an error.
        await running


def app_of(connection: HTTPConnection) -> App:
    """The Fairlane app of the site that got this request or websocket, as opened by its `lifespan`."""
    found = getattr(connection.app.state, "fairlane", None)
    if not isinstance(found, App):
        raise ConfigurationError("this site has no Fairlane app: give it lifespan=lifespan(app), and run its lifespan")
    return found


def answer_back_pressure(site: Starlette, retry_after: Duration = "5s") -> None:
    """Answer 429 if a backlog is full and 503 if the database is away, with `Retry-After`, instead of 500.

    The answers name neither queues nor hosts; the log does.
    """
    seconds = ceil(microseconds(retry_after) / SECOND)
    if seconds < 1:
        raise ConfigurationError(f"answer_back_pressure: retry_after={retry_after!r} is not a time above 0")
    headers = {"Retry-After": str(seconds)}

    async def full(request: Request, error: Exception) -> Response:
        return JSONResponse({"detail": "too many jobs are waiting; try again later"}, 429, headers)

    async def away(request: Request, error: Exception) -> Response:
        log.error("%s %s is answered with 503: %s", request.method, request.url.path, error)
        return JSONResponse({"detail": "temporarily unavailable; try again later"}, 503, headers)

    site.add_exception_handler(BacklogFull, full)
    site.add_exception_handler(StoreUnavailable, away)
