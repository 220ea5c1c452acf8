"""Fixtures for pytest, in a package of their own: pytest loads this at every start, Fairlane only where it is used.

Name the app in pytest's settings (`fairlane_app = "shop:app"`), and each test that asks for `fairlane_app` has it on
an empty database in memory, with a clock (`fairlane_clock`) that stands still until it is moved.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from fairlane import App
    from fairlane.clock import ManualClock

__all__ = ["fairlane_app", "fairlane_clock", "fairlane_immediate", "pytest_addoption"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("fairlane_app", "The app that `fairlane_app` stands for, as module:app.", default="")


@pytest.fixture
def fairlane_clock() -> ManualClock:
    """A clock that stands still until it is moved."""
    from fairlane.clock import ManualClock

    return ManualClock()


@pytest.fixture
def fairlane_app(request: pytest.FixtureRequest, fairlane_clock: ManualClock) -> Iterator[App]:
    """The app of the program under test, on an empty database in memory; `fairlane_clock` is its clock."""
    from fairlane.cli.database import load_app

    place: str = request.config.getini("fairlane_app")
    if not place:
        raise pytest.UsageError('which app? Set fairlane_app = "module:app" in the settings of pytest')
    app = load_app(place)
    url, clock = app.url, app.clock
    app.close_sync()
    app.move_to("sqlite://", fairlane_clock)
    try:
        yield app
    finally:
        app.close_sync()
        app.move_to(url, clock)


@pytest.fixture
def fairlane_immediate(fairlane_app: App) -> Iterator[None]:
    """In this test, `fairlane_app` runs every job where it is enqueued, and raises what its task raises."""
    from fairlane.testing import immediate

    with immediate(fairlane_app):
        yield
