"""Overview, queues and keys in a browser: what they show, and every action."""

from __future__ import annotations

from playwright.sync_api import Page, expect

from tests.browser.harness import Served, go, log_in, on_any_store
from tests.browser.test_jobs import confirm, enqueue

KEY = "/queues/webhooks/key?key.account=acme"


async def busy(served: Served) -> None:
    """Two of acme run, which is its limit, and three wait behind it."""
    for account in ("globex", *["acme"] * 5):
        await enqueue(served, account)
    for claim in await served.app.queues["webhooks"].claim(10, worker="w1"):
        if claim.keys["account"] == "globex":
            await claim.ack("done")
    await served.app.queues["webhooks"].claim(1)
    await (await served.app.opened()).add_up("webhooks")


def test_the_overview_says_who_waits_and_why_and_leads_to_it(page: Page, served: Served) -> None:
    served.run(busy(served))
    log_in(page)
    hint = page.locator(".hint.calm")
    expect(hint).to_contain_text("account=acme is held by its limit of 2: 3 jobs wait")
    expect(page.locator(".chart canvas")).to_have_count(2)
    page.locator("#queue-webhooks").get_by_role("link").click()
    expect(page.locator("h1")).to_contain_text("webhooks")
    expect(page.locator("main")).to_contain_text("At most 2 at the same time for each account")
    page.get_by_role("button", name="Keys").click()
    row = page.locator("tbody tr", has_text="acme")
    expect(row).to_contain_text("2 of 2")
    row.get_by_role("link").click()
    expect(page.locator("h1")).to_contain_text("account=acme")
    expect(page.locator(".chart canvas")).to_have_count(2)
    expect(page.locator("main")).to_contain_text("Next, in the order in which they would run")


def test_a_queue_is_paused_and_its_page_follows(page: Page, served: Served) -> None:
    served.run(busy(served))
    log_in(page)
    go(page, "/queues/webhooks?every=2")
    expect(page.locator("#follow")).to_have_text("live")
    drawn = page.locator(".chart canvas").first
    drawn.evaluate("(canvas) => { canvas.dataset.mine = 'yes'; }")
    page.locator("#as-python summary").click()
    served.run(served.app.operations.queues.pause("webhooks", actor="bob", reason="an outage"))
    expect(page.locator("h1")).to_contain_text("paused")
    expect(page.locator("main")).to_contain_text("bob")
    expect(page.locator("#as-python")).to_have_attribute("open", "")
    expect(drawn).to_have_attribute("data-mine", "yes")
    page.get_by_role("button", name="Resume").click()
    confirm(page, "Resume")
    page.get_by_role("button", name="Back").click()
    page.get_by_role("button", name="Pause").click()
    confirm(page, "Pause", "again")
    page.get_by_role("button", name="Back").click()
    expect(page.locator("h1")).to_contain_text("paused")
    page.get_by_role("button", name="Suspend limits").click()
    confirm(page, "Suspend")
    page.get_by_role("button", name="Back").click()
    page.get_by_role("button", name="Let limits hold").click()
    confirm(page, "Let them hold")


def test_a_limit_of_the_queue_and_a_limit_of_one_key_are_changed(page: Page, served: Served) -> None:
    served.run(busy(served))
    log_in(page)
    go(page, "/queues/webhooks")
    row = page.locator("tbody tr", has_text="Concurrency(50")
    row.get_by_text("Change", exact=True).click()
    row.get_by_label("Bound").fill("9")
    row.get_by_label("For", exact=True).fill("1h")
    row.get_by_role("button", name="Change").click()
    expect(page.locator(".action")).to_contain_text("would be set")
    confirm(page, "Change it")
    page.get_by_role("button", name="Back").click()
    expect(page.locator("tbody tr", has_text="Concurrency(9")).to_contain_text("2 of 9")
    go(page, KEY)
    page.get_by_text("Change for this key").click()
    page.get_by_label("Bound").fill("3")
    page.locator(".limit").get_by_role("button", name="Change").click()
    confirm(page, "Change it")
    page.get_by_role("button", name="Back").click()
    expect(page.locator(".limit")).to_contain_text("2 of 3")
    page.get_by_text("Change for this key").click()
    page.get_by_role("link", name="As declared").first.click()
    confirm(page, "Clear")


def test_a_key_gets_another_weight_and_a_pause(page: Page, served: Served) -> None:
    served.run(busy(served))
    log_in(page)
    go(page, KEY)
    page.get_by_text("Change its weight").click()
    page.get_by_label("Weight").fill("3")
    page.locator("#change-weight").get_by_role("button", name="Change").click()
    confirm(page, "Change it")
    page.get_by_role("button", name="Back").click()
    expect(page.locator("main")).to_contain_text("Weight 3 in the turns")
    page.get_by_role("button", name="Pause").click()
    confirm(page, "Pause")
    page.get_by_role("button", name="Back").click()
    expect(page.locator("h1")).to_contain_text("paused")
    page.get_by_role("button", name="Resume").click()
    confirm(page, "Resume")
    page.get_by_role("button", name="Back").click()
    expect(page.locator("h1")).not_to_contain_text("paused")


@on_any_store
def test_a_watched_key_stands_on_the_overview_and_in_its_address(page: Page, served: Served) -> None:
    served.run(busy(served))
    log_in(page)
    go(page, KEY)
    page.get_by_role("button", name="watch").click()
    expect(page.get_by_role("button", name="watched")).to_have_attribute("aria-pressed", "true")
    go(page, "/")
    expect(page.get_by_role("heading", name="Watched keys")).to_be_visible()
    assert "watch=webhooks" in page.url
    page.locator("section", has_text="Watched keys").get_by_role("link").click()
    page.get_by_role("button", name="watched").click()
    page.locator("header nav").get_by_role("link", name="Overview").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    expect(page.get_by_role("heading", name="Watched keys")).not_to_be_visible()


@on_any_store
def test_keys_are_watched_from_their_list(page: Page, served: Served) -> None:
    served.run(busy(served))
    log_in(page)
    go(page, "/queues/webhooks/keys")
    star = page.get_by_role("button", name="watch account=acme")
    star.click()
    expect(star).to_have_attribute("aria-pressed", "true")
    expect(star).to_have_text("★")
    go(page, "/")
    expect(page.locator("section", has_text="Watched keys").get_by_role("link")).to_have_count(1)


def test_keys_are_searched_and_sorted(page: Page, served: Served) -> None:
    served.run(busy(served))
    log_in(page)
    go(page, "/queues/webhooks/keys")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_role("link", name="Key", exact=True).click()
    expect(page.locator("tbody tr").first).to_contain_text("acme")
    page.keyboard.press("/")
    page.keyboard.type("glob")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(1)
    page.get_by_label("Search").fill("")
    page.get_by_label("Show").select_option("1")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody tr")).to_contain_text("acme")
