"""A dashboard that is served for a browser, and how it is used."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

import pytest
import uvicorn
from playwright.sync_api import Page, Request, expect
from starlette.applications import Starlette
from starlette.routing import Mount

from fairlane import App
from fairlane.dashboard import create_dashboard
from fairlane.dashboard.site import Dashboard
from tests.dashboard.harness import ROOT, TOKEN, VIEWER_TOKEN, a_shop
from tests.waiting import PATIENCE

__all__ = ["Served", "Tab", "go", "log_in", "on_any_store"]

on_any_store = pytest.mark.parametrize("served", ["sqlite"], indirect=True)
"""What is a matter of the page alone, whatever database is behind it. Everything else is looked at on each."""

T = TypeVar("T")


class Served:
    """An app and its dashboard, in a thread and an event loop of their own."""

    app: App
    dashboard: Dashboard

    def __init__(self, url: str, make: Callable[[str], App] = a_shop) -> None:
        self._url = url
        self._make = make
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def run(self, work: Coroutine[Any, Any, T], patience: float = PATIENCE) -> T:
        """Do something with the app, as any program could."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(patience)

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.should_exit = True
        self._loop.call_soon_threadsafe(self.dashboard.live.stopped.set)
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._loop.close()

    async def _main(self) -> None:
        async with self._make(self._url) as self.app:
            built = create_dashboard(self.app, token=TOKEN, viewer_token=VIEWER_TOKEN)
            self.dashboard = built.state.dashboard
            host = Starlette(routes=[Mount(ROOT, built)])
            config = uvicorn.Config(host, log_level="warning", lifespan="off", timeout_graceful_shutdown=1)
            self._server = uvicorn.Server(config)
            self._loop.call_soon(self._ready.set)
            await self._server.serve(sockets=[self._socket])


class Tab:
    """Listens to what goes wrong in a page."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self._wrong: list[str] = []
        page.on("pageerror", lambda error: self._wrong.append(f"script: {error}"))
        page.on("console", lambda said: self._wrong.append(said.text) if said.type == "error" else None)
        page.on("request", self._note)
        page.on("dialog", lambda dialog: self._wrong.append(f"dialog: {dialog.message}"))

    def _note(self, request: Request) -> None:
        if not request.url.startswith(("http://127.0.0.1:", "data:")):
            self._wrong.append(f"asked elsewhere: {request.url}")

    def assert_well(self) -> None:
        # That something was refused or cut off is told by the browser, and is what some tests are about.
        expected = ("Failed to load resource", "Failed to fetch")
        assert [each for each in self._wrong if not any(part in each for part in expected)] == []


def log_in(page: Page, name: str = "ann", token: str = TOKEN, path: str = "/") -> None:
    page.goto(f"{ROOT}/login?next={path}#token={token}")
    page.get_by_label("Your name").fill(name)
    page.get_by_role("button", name="Log in").click()
    expect(page.locator("header .who")).to_contain_text(name)
    page.wait_for_load_state()  # by then the scripts listen


def go(page: Page, path: str) -> None:
    page.goto(f"{ROOT}{path}")
