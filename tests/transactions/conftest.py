from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from fairlane import App
from fairlane.clock import ManualClock
from tests.transactions.drivers import CALLERS, Caller

CREATE_ORDERS = "create table orders (id integer primary key)"


class Place:
    """A database with a table of the caller's, for one test."""

    def __init__(self, kind: str, address: str) -> None:
        self.kind = kind
        self.address = address
        self.app_url = address if kind == "postgres" else f"sqlite:///{address}"

    async def fetch(self, statement: str) -> list[Any]:
        """What others see: rows of one column."""
        if self.kind == "postgres":
            connection = await asyncpg.connect(self.address)
            try:
                return [row[0] for row in await connection.fetch(statement)]
            finally:
                await connection.close()
        local = sqlite3.connect(self.address)
        try:
            return [row[0] for row in local.execute(statement)]
        finally:
            local.commit()
            local.close()

    async def orders(self) -> list[int]:
        return await self.fetch("select id from orders order by id")


@pytest.fixture(params=CALLERS, ids=lambda each: f"{each[0]}-{each[1].__name__}")
def driver(request: pytest.FixtureRequest) -> tuple[str, type[Caller]]:
    """Every driver on every store that it fits."""
    found: tuple[str, type[Caller]] = request.param
    return found


@pytest.fixture
def place(driver: tuple[str, type[Caller]], request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    kind, _ = driver
    return Place(kind, request.getfixturevalue("postgres_url") if kind == "postgres" else str(tmp_path / "jobs.db"))


@pytest.fixture
async def app(place: Place) -> AsyncIterator[App]:
    """An app whose time stands still: whatever happens in it happens because something was told."""
    app = App(place.app_url, clock=ManualClock())
    yield app
    await app.close()


@pytest.fixture
async def caller(driver: tuple[str, type[Caller]], place: Place, app: App) -> AsyncIterator[Caller]:
    """A producer with a connection of its own, and no transaction yet. The app has been opened before it."""
    await app.opened()
    await place.fetch(CREATE_ORDERS)
    caller = driver[1](place.address)
    await caller.open()
    yield caller
    await caller.close()
