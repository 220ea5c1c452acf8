from __future__ import annotations

from pathlib import Path

import pytest

from fairlane import App
from tests.worker.harness import WatchedStore
from tests.worker.watched import store, watched

__all__ = ["store", "watched"]


@pytest.fixture
def app(watched: tuple[App, WatchedStore]) -> App:
    """An app without queues and tasks, on a database in memory, whose time moves only when the test says so."""
    return watched[0]


@pytest.fixture(params=["sqlite-file", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that several processes can share."""
    if request.param == "sqlite-file":
        return f"sqlite:///{tmp_path / 'jobs.db'}"
    found: str = request.getfixturevalue("postgres_url")
    return found
