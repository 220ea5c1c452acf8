"""What every page has: the door, the header, the keyboard, both themes, and the stream that keeps it up to date."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect

from fairlane.dashboard.pages import PAGES
from tests.browser.harness import Served, Tab, go, log_in, on_any_store
from tests.dashboard.harness import ROOT, VIEWER_TOKEN

PLAIN = [page for page in PAGES if "{" not in page.path]


@on_any_store
def test_a_person_logs_in_with_the_printed_address_and_out_again(page: Page) -> None:
    page.goto(f"{ROOT}/")
    expect(page).to_have_title("Log in · Fairlane")
    log_in(page)
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    assert "token" not in page.url
    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_title("Log in · Fairlane")


@on_any_store
def test_a_wrong_token_is_told(page: Page) -> None:
    page.goto(f"{ROOT}/login")
    page.get_by_label("Your name").fill("eve")
    page.get_by_label("Token").fill("wrong-token-000")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("not the token")


@on_any_store
def test_the_keyboard_leads_everywhere(page: Page) -> None:
    log_in(page)
    for each in PLAIN:
        if each.shortcut:
            with page.expect_navigation():
                page.keyboard.type("g" + each.shortcut)
            expect(page.locator("nav [aria-current=page]")).to_have_text(each.nav or "")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).not_to_be_visible()
    go(page, "/audit")
    page.keyboard.press("/")
    expect(page.get_by_label("Queue")).to_be_focused()
    page.keyboard.type("g")
    expect(page.get_by_label("Queue")).to_have_value("g")


@on_any_store
def test_the_first_tab_stop_leads_past_the_header(page: Page) -> None:
    log_in(page)
    go(page, "/audit")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the page")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()


@on_any_store
def test_the_theme_follows_the_system_until_somebody_chooses(page: Page) -> None:
    log_in(page)
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.emulate_media(color_scheme="light")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    button = page.locator("#theme")
    button.click()
    button.click()
    expect(button).to_have_text("dark")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


def test_a_page_follows_what_happens_and_focus_and_open_rows_survive(page: Page, served: Served) -> None:
    operations = served.app.operations
    served.run(operations.queues.pause("webhooks", keys={"account": "acme"}, reason="first", actor="bob"))
    log_in(page)
    go(page, "/audit?every=2")
    expect(page.locator("#follow")).to_have_text("live")
    page.locator("tbody details summary").click()
    page.get_by_label("Queue").fill("webh")
    served.run(operations.queues.resume("webhooks", keys={"account": "acme"}, reason="second", actor="bob"))
    expect(page.locator("tbody tr").first).to_contain_text("second")
    expect(page.locator("tbody tr").last.locator("details")).to_have_attribute("open", "")
    expect(page.get_by_label("Queue")).to_be_focused()
    expect(page.get_by_label("Queue")).to_have_value("webh")


@on_any_store
def test_the_interval_is_kept_in_the_address_and_in_the_browser(page: Page) -> None:
    log_in(page)
    go(page, "/audit")
    page.locator("#every").select_option("15")
    assert page.url.endswith("every=15")
    go(page, "/")
    expect(page.locator("#every")).to_have_value("15")
    page.locator("#every").select_option("0")
    expect(page.locator("#follow")).to_have_text("paused")


@on_any_store
def test_an_open_page_whose_session_is_over_leads_to_the_door(page: Page, context: BrowserContext) -> None:
    log_in(page)
    go(page, "/audit?every=2")
    expect(page.locator("#follow")).to_have_text("live")
    context.clear_cookies()
    page.evaluate("() => document.querySelector('#every').dispatchEvent(new Event('change'))")
    expect(page).to_have_title("Log in · Fairlane")


@on_any_store
def test_a_page_whose_stream_is_cut_off_comes_back_by_itself(page: Page) -> None:
    log_in(page)
    page.route("**/live*", lambda route: route.abort())
    go(page, "/audit?every=2")
    expect(page.locator("#follow")).to_have_text("connecting")
    page.unroute("**/live*")
    expect(page.locator("#follow")).to_have_text("live")


@on_any_store
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_no_page_is_wider_than_the_screen(served: Served, browser: Browser, width: int) -> None:
    context = browser.new_context(base_url=served.address, viewport={"width": width, "height": 740})
    tab = Tab(context.new_page())
    log_in(tab.page)
    for each in PLAIN:
        go(tab.page, each.path)
        assert tab.page.evaluate("() => document.documentElement.scrollWidth") <= width, each.path
    tab.assert_well()
    context.close()


@on_any_store
def test_a_viewer_is_shown_as_one(page: Page) -> None:
    log_in(page, "vic", VIEWER_TOKEN)
    expect(page.locator("header .who")).to_contain_text("viewer")
