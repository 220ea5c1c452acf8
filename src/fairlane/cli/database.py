"""Which database a command is about: the one of an app, or of a URL."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from fairlane.cli.loading import load_app
from fairlane.errors import ConfigurationError

if TYPE_CHECKING:
    from fairlane.app import App
    from fairlane.policy.policy import Policy
    from fairlane.redaction import Redact, Redactor
    from fairlane.store.protocol import Store

__all__ = ["Looking", "app_of", "existing_store", "redactor_of"]


def app_of(place: str | None, url: str | None) -> App:
    """The app named on the command line, or an app without queues on the URL given there or in FAIRLANE_URL."""
    from fairlane.app import App

    if place and url:
        raise ConfigurationError("give an app (module:app) or --url, not both")
    if place:
        return load_app(place)
    url = url or os.environ.get("FAIRLANE_URL")
    if not url:
        raise ConfigurationError("which database? Give --app module:app or --url, or set FAIRLANE_URL")
    return App(url)


@asynccontextmanager
async def existing_store(app: App) -> AsyncIterator[Store]:
    """The app's store, open, with nothing declared: looking changes nothing, and creates no SQLite file either."""
    _require_file(app.url)
    store = app.make_store()
    await store.open()
    try:
        yield store
    finally:
        await store.close()


class Looking:
    """What `Operations` ask of, on an app's open store: nothing is declared by those who look."""

    def __init__(self, app: App, store: Store) -> None:
        self._app = app
        self._store = store
        self.forwarded = app.forwarded
        self.clock = app.clock

    async def opened(self) -> Store:
        return self._store

    @property
    def declared_policies(self) -> dict[str, Policy]:
        return self._app.declared_policies

    @property
    def actor(self) -> str:
        return self._app.actor

    @property
    def redact(self) -> Redact | None:
        return self._app.redact

    def known_tasks(self) -> list[str]:
        return self._app.known_tasks()


def redactor_of(app: App, *, exports: bool = False) -> Redactor | None:
    """What decides how much of a job is printed, for whoever runs this command."""
    from fairlane.operations import Operations
    from fairlane.redaction import Audience, Surface

    return Operations(app).seen_by(Audience(Surface.EXPORT if exports else Surface.CLI, app.actor)).redactor


def _require_file(url: str) -> None:
    path = Path(url.removeprefix("sqlite:///"))
    if url.startswith("sqlite:") and path.is_dir():
        raise ConfigurationError(f"{url} is a directory; give the file in it, such as {url.rstrip('/')}/fairlane.db")
    if url.startswith("sqlite:") and not path.is_file():
        raise ConfigurationError(f"{url} does not exist yet; it is made when the app or a worker first uses it")
