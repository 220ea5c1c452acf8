"""A shop with a dashboard, and people who use it."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.routing import Mount

from fairlane import App, Concurrency, Fair
from fairlane.clock import ManualClock
from fairlane.dashboard import create_dashboard
from fairlane.dashboard.site import Dashboard

__all__ = ["ROOT", "TOKEN", "VIEWER_TOKEN", "Site", "a_shop", "csrf_of"]

TOKEN = "operators-only-0001"
VIEWER_TOKEN = "viewers-too-0002"
ROOT = "/ops"
HOST = "https://shop.test"


def a_shop(url: str, clock: ManualClock | None = None) -> App:
    """An app whose jobs have keys, and a limit that holds some of them."""
    app = App(url, clock=clock)
    app.queue("webhooks", fair=Fair(by="account"), limits=[Concurrency(2, by="account"), Concurrency(50)])

    @app.task(queue="webhooks", name="shop.deliver", max_attempts=2)
    async def deliver(event: object, account: str) -> object:
        return event

    return app


def csrf_of(html: str) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]+)"', html)
    assert found is not None, "the page has no form"
    return found[1]


class Client(httpx.AsyncClient):
    """Somebody who says why, as every change asks for, unless a test says it for them."""

    async def post(self, url: Any, **sent: Any) -> httpx.Response:
        if "/do/" in str(url) or ("/api/" in str(url) and "simulate" not in str(url)):
            for kind in ("json", "data"):
                if isinstance(sent.get(kind), dict):
                    sent[kind] = {"reason": "a test", **sent[kind]}
        return await super().post(url, **sent)


@dataclass
class Site:
    """A host app with a dashboard at /ops."""

    dashboard: Dashboard
    host: Starlette
    clients: list[httpx.AsyncClient]

    @classmethod
    @asynccontextmanager
    async def of(cls, app: App, clock: ManualClock, **options: Any) -> AsyncIterator[Site]:
        built = create_dashboard(app, **options)
        site = cls(built.state.dashboard, Starlette(routes=[Mount(ROOT, built)]), [])
        yield site
        for client in site.clients:
            await client.aclose()

    def stranger(self, address: str = "10.0.0.1", **options: Any) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.host, client=(address, 1234), raise_app_exceptions=False)
        client = Client(transport=transport, base_url=HOST, **options)
        self.clients.append(client)
        return client

    async def visitor(self, name: str = "ann", token: str = TOKEN) -> httpx.AsyncClient:
        """Somebody who has logged in."""
        client = self.stranger()
        answer = await client.post(f"{ROOT}/login", data={"name": name, "token": token})
        assert answer.status_code == 303, answer.text
        return client

    def program(self, token: str = TOKEN) -> httpx.AsyncClient:
        """A program with the token."""
        return self.stranger(headers={"Authorization": f"Bearer {token}"})
