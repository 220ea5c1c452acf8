"""A dashboard whose database cannot be used: 503 with the reason, on every page and in the API, and never a 500."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import httpx
import pytest

from fairlane.clock import ManualClock
from tests.dashboard.harness import ROOT, TOKEN, Site, a_shop

JOB = "0198c0de-0000-7000-8000-000000000000"
PAGES = (
    "/",
    "/queues",
    "/queues/webhooks",
    "/queues/webhooks/keys",
    "/jobs",
    f"/jobs/{JOB}",
    "/dead",
    "/schedules",
    "/workers",
    "/audit",
)
ASKED = ("/overview", "/queues", "/queues/webhooks", "/jobs", f"/jobs/{JOB}", "/schedules", "/workers", "/audit")


@pytest.fixture(
    params=["no rights", "no connections", "unknown database", "unreachable", "unknown option", "no schema"]
)
async def broken(request: pytest.FixtureRequest, postgres_url: str) -> AsyncIterator[tuple[str, str]]:
    """The URL of a database that cannot be used, and what is said of it."""
    parts = urlsplit(postgres_url)
    name, at = parts.path.removeprefix("/"), parts.netloc.partition("@")[2]
    admin = await asyncpg.connect(urlunsplit(parts._replace(path="/postgres")))
    match request.param:
        case "no rights":
            await admin.execute(f"create role poor_{name} login")
            yield urlunsplit(parts._replace(netloc=f"poor_{name}@{at}")), "grant this role its rights"
            await admin.execute(f"drop role poor_{name}")
        case "no connections":
            await admin.execute(f"alter database {name} allow_connections false")
            yield postgres_url, "allow_connections true"
            await admin.execute(f"alter database {name} allow_connections true")
        case "unknown database":
            yield urlunsplit(parts._replace(path="/nowhere")), "create the database"
        case "unreachable":
            with socket.socket() as deaf:
                deaf.bind(("127.0.0.1", 0))
                yield f"postgresql://shop@127.0.0.1:{deaf.getsockname()[1]}/shop", "check the host"
        case "unknown option":
            yield f"{postgres_url}?nonsense=1", "check the database URL"
        case "no schema":
            yield urlunsplit(parts._replace(path="/postgres")), "fairlane migrate"
    await admin.close()


def is_told(answer: httpx.Response, said: str) -> bool:
    return answer.status_code == 503 and said in answer.text and "Traceback" not in answer.text


# P4
async def test_a_database_that_cannot_be_used_is_told_on_every_page(
    broken: tuple[str, str], clock: ManualClock
) -> None:
    url, said = broken
    app = a_shop(url)
    async with Site.of(app, clock, token=TOKEN) as site:
        visitor, program = await site.visitor(), site.program()
        # Nobody knows whether a session has ended, so a page is for anybody, and names no server.
        pages = {path: await visitor.get(f"{ROOT}{path}") for path in PAGES}
        told = {path: answer for path, answer in pages.items() if not is_told(answer, "The database does not answer")}
        asked = {f"/api{path}": await program.get(f"{ROOT}/api{path}") for path in ASKED}
        told |= {path: answer for path, answer in asked.items() if not is_told(answer, said)}
        assert {path: answer.text for path, answer in told.items()} == {}
        assert (await visitor.get(f"{ROOT}/readyz")).status_code == 503
        assert (await program.get(f"{ROOT}/metrics")).status_code < 500
    await app.close()
