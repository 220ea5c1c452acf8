"""Schedules, as somebody on call sees them, stops them and fires them once."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.browser.harness import Served, go, log_in, on_any_store
from tests.dashboard.harness import VIEWER_TOKEN


def declare(served: Served, *names: str) -> None:
    """What a worker does when it starts."""
    app = served.app
    for name in names:
        app.schedule(
            "0 9 * * 1-5", app.registry["shop.deliver"], {"kind": name}, "acme", timezone="Europe/Berlin", name=name
        )
    served.run(app.fire_schedules())


def test_a_schedule_comes_is_paused_and_triggered_while_somebody_looks(page: Page, served: Served) -> None:
    log_in(page)
    go(page, "/schedules?every=2")
    expect(page.get_by_text("There are no schedules.")).to_be_visible()
    declare(served, "daily report", "nightly <b>sync</b>")
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("At 09:00 on Monday through Friday, Europe/Berlin")
    rows.first.get_by_role("link", name="Pause …").click()
    expect(page.get_by_role("status")).to_have_text("daily report would be paused.")
    page.get_by_label("Why").fill("the warehouse is down")
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("status")).to_contain_text("daily report is paused.")
    page.get_by_role("button", name="Back").click()
    expect(rows.first.locator(".mark")).to_contain_text("paused")
    rows.first.get_by_role("link", name="Trigger …").click()
    page.get_by_label("Why").fill("a missed delivery")
    page.get_by_role("button", name="Trigger").click()
    page.get_by_role("button", name="Back").click()
    expect(rows.first).to_contain_text("1 trigger waits for a worker.")
    served.run(served.app.fire_schedules())
    expect(rows.first).not_to_contain_text("trigger waits")
    page.locator("tbody tr td[data-label='Its job'] a").first.click()
    expect(page.locator("main")).to_contain_text("daily report")
    go(page, "/audit")
    expect(page.locator("tbody tr").last).to_contain_text("the warehouse is down")


@on_any_store
def test_schedules_fit_a_phone_and_are_reached_with_the_keyboard(page: Page, served: Served) -> None:
    declare(served, "daily report", "a-schedule-with-a-name-that-is-far-longer-than-a-telephone-is-wide")
    page.set_viewport_size({"width": 390, "height": 844})
    log_in(page)
    page.keyboard.press("g")
    page.keyboard.press("s")
    expect(page.get_by_role("heading", name="Schedules")).to_be_visible()
    wide = page.evaluate("() => document.documentElement.scrollWidth > document.documentElement.clientWidth")
    assert not wide, "the page scrolls sideways"
    page.keyboard.press("/")
    page.keyboard.type("daily")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(1)


@on_any_store
def test_viewers_are_offered_nothing_to_do(page: Page, served: Served) -> None:
    declare(served, "daily report")
    log_in(page, "vic", VIEWER_TOKEN, "/schedules")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.get_by_role("link", name="Pause …")).to_have_count(0)
