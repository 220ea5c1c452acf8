"""Jobs, dead jobs and the audit in a browser: every page and every action."""

from __future__ import annotations

from uuid import UUID

from playwright.sync_api import Page, expect

from fairlane.job import State
from tests.browser.harness import Served, go, log_in, on_any_store
from tests.dashboard.harness import ROOT, VIEWER_TOKEN

EVIL = "<img src=x onerror=alert(1)>"


async def enqueue(served: Served, account: str = "acme", event: object = 1, **options: object) -> UUID:
    task = served.app.registry.find("shop.deliver")
    assert task is not None
    return (await task.using(**options).enqueue(event, account=account)).id  # type: ignore[arg-type]


async def die(served: Served, count: int, account: str = "acme") -> list[UUID]:
    jobs = []
    for _ in range(count):
        jobs.append(await enqueue(served, account))
        (claim,) = await served.app.queues["webhooks"].claim(1, worker="w1")
        await claim.dead(reason="the endpoint is gone")
    return jobs


def state(served: Served, job: UUID) -> State:
    return served.run(served.app.job(job).status())


def confirm(page: Page, button: str, reason: str = "ticket 7") -> None:
    page.get_by_label("Why").fill(reason)
    page.locator(".action").get_by_role("button", name=button).click()
    expect(page.locator(".action")).to_contain_text("Recorded in the audit")


def test_jobs_are_found_by_their_keys_and_opened_by_the_keyboard(page: Page, served: Served) -> None:
    for account in ("acme", "globex"):
        served.run(enqueue(served, account))
    log_in(page)
    go(page, "/jobs")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.keyboard.press("/")
    page.keyboard.type("account=globex")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody tr")).to_contain_text("globex")
    page.wait_for_load_state()
    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="shop.deliver")).to_be_visible()


def test_a_waiting_job_says_why_and_is_run_now_retried_and_cancelled(page: Page, served: Served) -> None:
    served.run(served.app.operations.queues.pause("webhooks", keys={"account": "acme"}, actor="bob"))
    held = served.run(enqueue(served, "acme", {"order": 4711}))
    later = served.run(enqueue(served, "globex", 1, delay="1h"))
    log_in(page)
    go(page, f"/jobs/{held}")
    expect(page.locator("main")).to_contain_text("paused")
    expect(page.locator("main")).to_contain_text("4711")
    page.get_by_role("button", name="Run now").click()
    expect(page.locator(".action")).to_contain_text("1 job would be forced to start")
    confirm(page, "Run now", "the customer waits")
    page.get_by_role("button", name="Back").click()
    page.get_by_role("button", name="Cancel").click()
    confirm(page, "Cancel")
    assert state(served, held) is State.CANCELLED
    go(page, f"/jobs/{later}")
    page.get_by_role("button", name="Retry now").click()
    confirm(page, "Retry now")
    (claim,) = served.run(served.app.queues["webhooks"].claim(1))
    assert claim.id == later
    go(page, "/audit")
    expect(page.locator("tbody tr")).to_have_count(4)
    expect(page.locator("main")).to_contain_text("the customer waits")


def test_a_running_job_shows_its_progress_as_it_goes(page: Page, served: Served) -> None:
    job = served.run(enqueue(served))
    (claim,) = served.run(served.app.queues["webhooks"].claim(1, worker="w1"))
    log_in(page)
    go(page, f"/jobs/{job}?every=2")
    expect(page.locator("h1")).to_contain_text("running")
    served.run(claim.ack({"sent": True}))
    expect(page.locator("h1")).to_contain_text("done")
    expect(page.locator("main")).to_contain_text('"sent": true')


def test_dead_jobs_are_replayed_and_purged_in_bulk(page: Page, served: Served) -> None:
    one, *_ = served.run(die(served, 3))
    served.run(die(served, 1, "globex"))
    log_in(page)
    go(page, "/dead?key=account%3Dacme")
    expect(page.locator("tbody tr")).to_have_count(3)
    page.get_by_label("At most").fill("2")
    page.get_by_role("button", name="Replay all that fit").click()
    expect(page.locator(".action")).to_contain_text("2 jobs would be replayed")
    expect(page.locator(".action")).to_contain_text("others fit")
    confirm(page, "Replay")
    page.get_by_role("button", name="Back").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    assert state(served, one) is State.DEAD
    page.get_by_role("button", name="Purge all that fit").click()
    expect(page.locator(".action")).to_contain_text("cannot be undone")
    confirm(page, "Purge for good")
    go(page, "/dead")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody tr")).to_contain_text("globex")
    page.locator("tbody").get_by_role("link", name="Replay").click()
    confirm(page, "Replay")


def test_the_timeline_of_a_dead_job_opens_to_its_error(page: Page, served: Served) -> None:
    (job,) = served.run(die(served, 1))
    log_in(page)
    go(page, f"/jobs/{job}")
    attempt = page.locator(".timeline li")
    expect(attempt).to_have_count(1)
    attempt.locator("summary").click()
    expect(attempt.locator("pre")).to_contain_text("the endpoint is gone")


@on_any_store
def test_what_a_producer_wrote_runs_nowhere(page: Page, served: Served) -> None:
    job = served.run(enqueue(served, EVIL, {EVIL: EVIL}))
    log_in(page, EVIL)
    for path in ("/jobs", f"/jobs/{job}", f"/jobs?key=account%3D{EVIL}"):
        go(page, path)
        expect(page.locator("main")).to_contain_text("<img src=x")
        assert page.locator("main img").count() == 0


@on_any_store
def test_a_viewer_is_offered_nothing_to_do(page: Page, served: Served) -> None:
    (job,) = served.run(die(served, 1))
    log_in(page, "vic", VIEWER_TOKEN)
    for path in ("/dead", f"/jobs/{job}"):
        go(page, path)
        expect(page.locator("main")).to_contain_text("shop.deliver")
        assert page.locator("main [href*='/do/'], main [formaction]").count() == 0
    page.goto(f"{ROOT}/do/replay-jobs?job={job}")
    expect(page.get_by_role("alert")).to_contain_text("operator")
