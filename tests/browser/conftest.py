"""A real browser for the dashboard's pages.

Chromium is found, or installed where we may (Debian, as root); if that goes wrong, the tests fail. Where there is none
and none can be had, they are skipped, and loudly: no page was looked at. FAIRLANE_BROWSER=skip says that you know.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.browser.harness import Served, Tab
from tests.installing import apt_install, may_install, one_at_a_time

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
]
PACKAGES = ["chromium", "fonts-dejavu-core", "libatomic1"]
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE = 60_000
expect.set_options(timeout=PATIENCE)  # its own is 5 s, whatever the context says


def find_chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@pytest.fixture(scope="session")
def chromium() -> str:
    if os.environ.get("FAIRLANE_BROWSER") == "skip":
        pytest.skip("FAIRLANE_BROWSER=skip: NO PAGE OF THE DASHBOARD IS LOOKED AT IN A BROWSER")
    found = find_chromium() or _installed()
    if found is None:
        pytest.skip(
            "THERE IS NO BROWSER, AND NO PAGE OF THE DASHBOARD IS LOOKED AT IN ONE: as root, apt-get install "
            f"{' '.join(PACKAGES)}"
        )
    return found


def _installed() -> str | None:
    """Where we may install one: the one that is there then."""
    if not may_install():
        return None
    with one_at_a_time():
        if find_chromium() is None:
            apt_install(*PACKAGES)
    return find_chromium()


@pytest.fixture(params=["sqlite", "postgres"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    """A shop on each store, and its dashboard below /ops."""
    url = f"sqlite:///{tmp_path}/shop.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    with Served(url) as served:
        yield served


# For each test, and after the database: while it is open, its event loop is the one of this thread, and no other
# fixture could start one.
@pytest.fixture
def browser(chromium: str, served: Served) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS, timeout=PATIENCE)
        yield browser
        browser.close()


@pytest.fixture
def context(served: Served, browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(base_url=served.address, viewport={"width": 1280, "height": 860})
    context.set_default_timeout(PATIENCE)
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A tab in which nothing may go wrong: no script fails, nothing is blocked, nothing comes from elsewhere."""
    tab = Tab(context.new_page())
    yield tab.page
    tab.assert_well()
