"""Somebody tries a policy before they put it in force."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from fairlane.operations import trials as trying
from fairlane.policy.policy import policy_text
from tests.browser.harness import Served, Tab, go, log_in, on_any_store
from tests.dashboard.harness import VIEWER_TOKEN
from tests.waiting import PATIENCE

FAIR = '{"fair": {"by": "account"}}'


def open_form(page: Page) -> None:
    log_in(page, "vic", VIEWER_TOKEN)
    go(page, "/try?queue=webhooks")
    page.wait_for_load_state()


def test_two_policies_are_compared_with_charts_and_tables(page: Page, served: Served) -> None:
    open_form(page)
    expect(page.get_by_label("A · in force")).to_have_value(policy_text(served.app.queues["webhooks"].policy))
    page.get_by_role("button", name="one tenant floods the queue").click()
    expect(page.get_by_label("Declared")).to_be_checked()
    page.get_by_label("Workload").fill('[[classes]]\nname = "hot"\nkeys = {account = "acme"}\njobs = 50\n')
    page.get_by_label("B · to compare with").fill(FAIR)
    page.get_by_label("Slots of the fleet").fill("10")
    page.keyboard.press("Enter")
    result = page.locator("#result")
    expect(result.get_by_text("hot starts sooner under B")).to_be_visible()
    expect(result.locator(".chart canvas")).to_have_count(4)
    expect(result.locator("table").first.locator("tbody tr")).to_have_count(2)
    expect(result.get_by_text("fairlane policy apply module:app --queue webhooks")).to_be_visible()
    expect(page.get_by_label("B · to compare with")).to_have_value(FAIR)


@on_any_store
def test_an_example_is_put_in_and_taken_back_with_undo(page: Page) -> None:
    open_form(page)
    workload = page.get_by_label("Workload")
    workload.fill("# mine")
    page.get_by_role("button", name="long jobs beside short ones").click()
    expect(workload).to_have_value(re.compile("thirty times as long"))
    page.keyboard.press("Control+z")
    expect(workload).to_have_value("# mine")


@on_any_store
def test_a_mistake_is_told_beside_its_field_and_its_line_is_selected(page: Page) -> None:
    open_form(page)
    typed = '{\n  "fair": {"by": "account"},\n  "limits": [{"kind": "rate", "limit": 5}]\n}'
    field = page.get_by_label("B · to compare with")
    field.fill(typed)
    page.get_by_role("button", name="Try them").click()
    expect(page.locator("#b-problem")).to_contain_text("Line 3: 'per' is missing")
    expect(field).to_have_value(typed)
    expect(field).to_be_focused()
    selected = field.evaluate("(field) => field.value.slice(field.selectionStart, field.selectionEnd)")
    assert selected == '  "limits": [{"kind": "rate", "limit": 5}]'


@on_any_store
def test_a_simulation_can_be_stopped(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    began, stopped = threading.Event(), threading.Event()

    def forever(*arguments: Any) -> list[Any]:
        began.set()
        if arguments[-1].stop.wait(PATIENCE):
            stopped.set()
        return []

    monkeypatch.setattr(trying, "_try", forever)
    open_form(page)
    page.get_by_label("Declared").check()
    # By the keyboard alone: all else waits for the next page, and there will be none.
    page.get_by_label("Slots of the fleet").focus()
    page.keyboard.press("Enter")
    assert began.wait(PATIENCE)
    for key in ("Tab", "Tab", "Tab", "Enter"):
        page.keyboard.press(key)
    assert stopped.wait(PATIENCE)
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.get_by_role("button", name="Try them")).to_have_attribute("aria-busy", "false")


@on_any_store
def test_the_result_fits_a_phone(served: Served, browser: Browser) -> None:
    context = browser.new_context(base_url=served.address, viewport={"width": 360, "height": 740})
    tab = Tab(context.new_page())
    open_form(tab.page)
    tab.page.get_by_label("Declared").check()
    tab.page.get_by_label("Workload").fill('[[classes]]\nname = "hot"\nkeys = {account = "acme"}\njobs = 50\n')
    tab.page.get_by_role("button", name="Try them").click()
    expect(tab.page.locator("#result .chart canvas").first).to_be_visible()
    assert tab.page.evaluate("() => document.documentElement.scrollWidth") <= 360
    tab.assert_well()
    context.close()
