"""The workers, as somebody on call sees them."""

from __future__ import annotations

from uuid import uuid4

from playwright.sync_api import Page, expect

from fairlane.clock import SECOND
from fairlane.store import records
from fairlane.store.protocol import WorkerIdentity
from fairlane.store.stats_values import WorkerReport
from tests.browser.harness import Served, go, log_in, on_any_store


async def report(served: Served, worker: WorkerIdentity, *, running: int = 0, is_well: bool = True) -> None:
    store = await served.app.opened()
    loops = {"claims": "running", "upkeep": "running" if is_well else "OSError: the disk is full"}
    said = WorkerReport(
        name=worker.name,
        host="app-1.shop.internal",
        pid=4711,
        version="0.1.0",
        queues={"webhooks": 2.0},
        concurrency=20,
        started_at=await store.now(),
        every=3_600 * SECOND,
        running=running,
        is_well=is_well,
        loops=loops,
    )
    await store.run(records.report(worker.id, said))


def test_workers_come_fall_ill_and_go_while_somebody_looks(page: Page, served: Served) -> None:
    one, two = WorkerIdentity(uuid4(), "app-1:4711"), WorkerIdentity(uuid4(), "app-2:12")
    log_in(page)
    go(page, "/workers?every=2")
    expect(page.get_by_text("No worker has reported")).to_be_visible()
    served.run(report(served, one, running=5))
    served.run(report(served, two))
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("5 of 20")
    expect(rows.first).to_contain_text("webhooks × 2")
    rows.first.locator("summary").click()
    served.run(report(served, two, is_well=False))
    expect(rows.first).to_contain_text("app-2:12")
    expect(rows.first).to_contain_text("Its loop upkeep died: OSError: the disk is full. Restart it")
    expect(rows.last.locator("details")).to_have_attribute("open", "")

    async def leave() -> None:
        await (await served.app.opened()).run(records.report(two.id, None))

    served.run(leave())
    expect(rows).to_have_count(1)


@on_any_store
def test_a_worker_is_found_with_the_keyboard(page: Page, served: Served) -> None:
    for name in ("app-1:4711", "batch-2:99"):
        served.run(report(served, WorkerIdentity(uuid4(), name)))
    log_in(page, path="/workers")
    page.keyboard.press("/")
    page.keyboard.type("batch")
    page.keyboard.press("Enter")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody tr")).to_contain_text("batch-2:99")
