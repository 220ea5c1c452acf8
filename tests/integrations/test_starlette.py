"""In a Starlette app: open while the site is, a worker beside it, and an answer for those who come too fast."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from fairlane import App, Backlog
from fairlane.dashboard import create_dashboard
from fairlane.errors import ConfigurationError, StoreUnavailable, WorkerDied
from fairlane.integrations.starlette import answer_back_pressure, app_of, lifespan, stop_process
from fairlane.worker import WorkerOptions
from tests.waiting import PATIENCE


def client_of(site: Starlette) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(site, raise_app_exceptions=False), base_url="http://site")


@pytest.fixture
def app(tmp_path: Path) -> App:
    app = App(f"sqlite:///{tmp_path}/jobs.db")

    @app.task(name="double")
    async def double(number: int) -> int:
        return 2 * number

    return app


async def enqueue(request: Request) -> Response:
    job = await app_of(request).registry["double"].enqueue(int(request.query_params.get("number", "1")))
    return JSONResponse({"id": str(job.id)})


async def test_the_app_is_open_while_the_site_is(app: App) -> None:
    site = Starlette(routes=[Route("/", enqueue)], lifespan=lifespan(app))
    for _ in range(2):  # a site that is started again, as tests do
        async with site.router.lifespan_context(site), client_of(site) as client:
            assert (await client.get("/")).status_code == 200
            assert app._connection is not None
        assert app._connection is None


async def test_a_request_to_a_site_without_our_lifespan_says_what_to_do(app: App) -> None:
    site = Starlette(routes=[Route("/", enqueue)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(site), base_url="http://site") as client:
        with pytest.raises(ConfigurationError, match=r"lifespan=lifespan\(app\)"):
            await client.get("/")


async def test_a_lifespan_of_one_s_own_lies_within_and_the_worker_within_that(app: App) -> None:
    told: list[str] = []
    started, release = asyncio.Event(), asyncio.Event()

    @app.task(name="slow")
    async def slow() -> None:
        told.append("runs")
        started.set()
        await release.wait()
        told.append("ends")

    @asynccontextmanager
    async def inner(site: Any) -> AsyncIterator[Mapping[str, Any]]:
        await slow.enqueue()
        told.append("inner begins")
        yield {"pool": 7}
        assert app._connection is not None
        told.append("inner ends")

    site = Starlette(lifespan=lifespan(app, inner=inner, worker=WorkerOptions(concurrency=2)))
    async with site.router.lifespan_context(site) as state:
        assert state == {"pool": 7}
        await asyncio.wait_for(started.wait(), PATIENCE)
        asyncio.get_running_loop().call_soon(release.set)
    assert told == ["inner begins", "runs", "ends", "inner ends"]


async def test_a_worker_in_the_web_process_runs_what_it_enqueues(app: App) -> None:
    site = Starlette(routes=[Route("/", enqueue)], lifespan=lifespan(app, worker=True))
    async with site.router.lifespan_context(site), client_of(site) as client:
        answer = (await client.get("/", params={"number": "21"})).json()
        assert await app.job(answer["id"]).result(timeout=PATIENCE) == 42
        assert site.state.fairlane_worker.health().is_well


async def test_a_worker_that_dies_is_not_silent(
    app: App, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def die(*_: object) -> None:
        raise RuntimeError("out of paper")

    monkeypatch.setattr("fairlane.worker.worker.keep_reporting", die)
    deaths: asyncio.Queue[BaseException] = asyncio.Queue()
    site = Starlette(lifespan=lifespan(app, worker=True, on_worker_death=deaths.put_nowait))
    with caplog.at_level(logging.CRITICAL), pytest.raises(WorkerDied, match="out of paper"):
        async with site.router.lifespan_context(site):
            assert isinstance(await asyncio.wait_for(deaths.get(), PATIENCE), WorkerDied)
    assert "the worker in this process died" in caplog.text
    assert app._connection is None


def test_the_process_of_a_dead_worker_is_asked_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    stop_process(WorkerDied("a loop died"))
    assert sent == [(os.getpid(), signal.SIGTERM)]


async def test_a_dashboard_is_mounted_like_any_other_app(app: App) -> None:
    dashboard = create_dashboard(app, token="let-me-in")
    site = Starlette(routes=[Mount("/ops", dashboard)], lifespan=lifespan(app))
    async with site.router.lifespan_context(site), client_of(site) as client:
        assert (await client.get("/ops/readyz")).text == "ok\n"
        assert (await client.get("/ops/api/queues")).status_code == 401
        entered = await client.get("/ops/api/queues", headers={"Authorization": "Bearer let-me-in"})
        assert entered.status_code == 200


# Back-pressure.


async def test_a_full_backlog_is_answered_with_429_and_when_to_come_again(app: App) -> None:
    app.queue("default", limits=[Backlog(1, when_full="reject")])
    site = Starlette(routes=[Route("/", enqueue)], lifespan=lifespan(app))
    answer_back_pressure(site, retry_after="90s")
    async with site.router.lifespan_context(site), client_of(site) as client:
        assert (await client.get("/")).status_code == 200
        refused = await client.get("/")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "90")
    assert refused.json() == {"detail": "too many jobs are waiting; try again later"}


async def test_a_database_that_is_away_is_answered_with_503_and_told_to_the_log_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def away(request: Request) -> Response:
        raise StoreUnavailable("PostgreSQL at db.internal cannot be reached")

    site = Starlette(routes=[Route("/", away)])
    answer_back_pressure(site)
    async with client_of(site) as client:
        with caplog.at_level(logging.ERROR):
            answer = await client.get("/")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "db.internal" not in answer.text
    assert "db.internal" in caplog.text


def test_a_time_to_come_again_lies_ahead() -> None:
    with pytest.raises(ConfigurationError, match="retry_after='0s'"):
        answer_back_pressure(Starlette(), retry_after="0s")


# In a server.

DYING = """
import fairlane.worker.worker
from starlette.applications import Starlette
from fairlane import App
from fairlane.integrations.starlette import lifespan


async def die(*_):
    raise RuntimeError("out of paper")


fairlane.worker.worker.keep_reporting = die
app = App("sqlite:///jobs.db")
app.task(name="nothing")(print)
site = Starlette(lifespan=lifespan(app, worker=True))
"""


@pytest.mark.slow
def test_a_server_whose_worker_dies_ends_by_itself_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    command = [sys.executable, "-m", "uvicorn", "dying:site", "--port", "0"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=3 * PATIENCE, check=False)
    assert ended.returncode != 0
    assert "the worker in this process died" in ended.stderr
    assert "out of paper" in ended.stderr
