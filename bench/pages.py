"""`python -m bench pages`: the dashboard over 100,000 keys and 1,000,000 jobs.

Told are, for every page, how long it waits for the database and how often it asks; and what twenty open ones cost,
by the processor time of a real `fairlane dashboard` and of the database behind it. A page over its bar is an error.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import asyncpg
import httpx

from bench import views
from fairlane import App
from fairlane.dashboard import create_dashboard
from fairlane.dashboard.pages import PAGES
from fairlane.store.postgres import PostgresStore
from fairlane.store.protocol import Store
from fairlane.store.sqlite import SqliteStore
from fairlane.store.sqlite.database import Database
from fairlane.testing.postgres import ThrowawayPostgres

BAR = 0.100
"""Seconds that a page may wait for the database."""
SHARE = 0.05
"""Of a core, for twenty open dashboards."""
DASHBOARDS = 20
WATCHED_FOR = 60.0
RUNS = 7
TOKEN = "a-token-for-the-bench"
ASKS = ("fetch", "fetchrow", "fetchval", "execute")


class Meter:
    """Adds up what this process waits for its database."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.questions = 0

    def timed(self, ask: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def asked(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return await ask(*arguments, **options)
            finally:
                self.seconds += time.perf_counter() - began
                self.questions += 1

        return asked

    @contextmanager
    def attached(self) -> Iterator[None]:
        kept = [(asyncpg.Connection, name) for name in ASKS] + [(Database, "read")]
        before = [(owner, name, getattr(owner, name)) for owner, name in kept]
        for owner, name, ask in before:
            setattr(owner, name, self.timed(ask))
        try:
            yield
        finally:
            for owner, name, ask in before:
                setattr(owner, name, ask)


def paths(job: str) -> dict[str, str]:
    """Every page, and some of its forms."""
    queue, key = views.QUEUE, "key.account=account-000077"
    found = {page.path: page.path.replace("{queue}", queue).replace("{job}", job) for page in PAGES}
    found["/queues/{queue}/key"] += f"?{key}"
    for sort in ("running", "done", "started", "name"):
        found[f"keys by {sort}"] = f"/queues/{queue}/keys?sort={sort}"
    found["keys, search"] = f"/queues/{queue}/keys?search=nobody"
    found["keys, held"] = f"/queues/{queue}/keys?held=1"
    found["jobs, ready"] = f"/jobs?queue={queue}&state=ready"
    return found


async def measure_pages(url: str) -> dict[str, tuple[float, int]]:
    """By page, the median time that it waits for the database, and how many questions it asks."""
    app, meter = App(url), Meter()
    transport = httpx.ASGITransport(create_dashboard(app, token=TOKEN))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    found: dict[str, tuple[float, int]] = {}
    async with app, httpx.AsyncClient(transport=transport, base_url="http://bench", headers=headers) as client:
        job = (await client.get("/api/jobs", params={"queue": views.QUEUE, "limit": 1})).json()["jobs"][0]["id"]
        with meter.attached():
            for name, path in paths(job).items():
                took = []
                for _ in range(RUNS):
                    meter.seconds, meter.questions = 0.0, 0
                    answer = await client.get(path)
                    assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text[:200]}"
                    took.append(meter.seconds)
                found[name] = (statistics.median(took), meter.questions)
    return found


def processor_time(pid: int) -> float:
    """Seconds of a process and of its children."""
    ticks = 0
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    todo = [pid]
    while todo:
        each = todo.pop()
        try:
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
        todo += children.get(each, [])
    return ticks / os.sysconf("SC_CLK_TCK")


async def watch(port: int, path: str, until: float) -> int:
    """One open dashboard. Returns how many times it was sent something."""
    address = f"http://127.0.0.1:{port}/live?every=5&page={quote(path, safe='')}"
    news = 0
    async with (
        httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=None) as client,
        client.stream("GET", address) as stream,
    ):
        assert stream.status_code == 200
        lines = stream.aiter_lines()
        while (left := until - time.monotonic()) > 0:
            try:
                line = await asyncio.wait_for(anext(lines), left)
            except (TimeoutError, StopAsyncIteration):
                break
            news += line.startswith("data: <h1")
    return news


async def measure_streams(url: str, database: int | None) -> tuple[float, float, int]:
    """Of a core: what the dashboard takes and what the database takes, while twenty look at five pages."""
    command = [sys.executable, "-m", "fairlane.cli", "dashboard", "--url", url, "--port", "0", "--token", TOKEN]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    try:
        assert process.stdout is not None
        port = int((await asyncio.to_thread(process.stdout.readline)).rpartition(":")[2].strip(" /\n"))
        queue = views.QUEUE
        looked_at = ["/", f"/queues/{queue}", f"/queues/{queue}/keys", "/workers", "/jobs"]
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60) as client:
            for path in looked_at:
                await client.get(f"http://127.0.0.1:{port}{path}")
        before = processor_time(process.pid), processor_time(database) if database else 0.0
        until = time.monotonic() + WATCHED_FOR
        news = await asyncio.gather(*(watch(port, looked_at[n % 5], until) for n in range(DASHBOARDS)))
        after = processor_time(process.pid), processor_time(database) if database else 0.0
        return (after[0] - before[0]) / WATCHED_FOR, (after[1] - before[1]) / WATCHED_FOR, sum(news)
    finally:
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 30)


async def prepare(store: Store, keys: int, jobs: int) -> None:
    await store.migrate()
    await store.open()
    try:
        await views.fill(store, keys, jobs)
        await views.claims(store, 100, 200)
        await views.tallied(store)
    finally:
        await store.close()


def run(name: str, store: Store, url: str, keys: int, jobs: int, database: int | None) -> bool:
    """Whether every bar was met."""
    asyncio.run(prepare(store, keys, jobs))
    pages = asyncio.run(measure_pages(url))
    print(f"{name}: {keys:,} keys, {jobs:,} jobs; time for the database, questions")
    for page, (seconds, questions) in pages.items():
        print(f"  {page:24} {seconds * 1_000:8.1f} ms  {questions:3}{'  over the bar' * (seconds > BAR)}")
    dashboard, behind, news = asyncio.run(measure_streams(url, database))
    told = f"  {DASHBOARDS} open dashboards, every 5 s: {dashboard:.2%} of a core"
    print(f"{told}, the database {behind:.2%}; {news} renders were sent")
    return all(seconds <= BAR for seconds, _ in pages.values()) and dashboard <= SHARE


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench pages", description=__doc__)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--store", choices=["postgres", "sqlite", "both"], default="both")
    given = parser.parse_args(arguments)
    met = True
    if given.store != "sqlite":
        with ThrowawayPostgres() as server:
            url = asyncio.run(server.create_database("pages"))
            met &= run("PostgreSQL", PostgresStore(url), url, given.keys, given.jobs, server.pid)
    if given.store != "postgres":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "jobs.db"
            met &= run("SQLite", SqliteStore(str(path)), f"sqlite:///{path}", given.keys, given.jobs, None)
    return 0 if met else 1
