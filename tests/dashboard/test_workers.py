"""The page of the workers: who is there, and who needs somebody."""

from __future__ import annotations

import re
from typing import Any
from uuid import uuid4

from fairlane import App
from fairlane.clock import SECOND, ManualClock
from fairlane.dashboard import pages as page
from fairlane.store import records
from fairlane.store.stats import Moment
from fairlane.store.stats_values import BlockedLoop, LongRun, WorkerReport
from tests.dashboard.harness import ROOT, VIEWER_TOKEN, Site

LOOPS = {"claims": "running", "leases": "running"}


async def report(shop: App, clock: ManualClock, name: str, **said: Any) -> None:
    """A worker says something of itself."""
    usual: dict[str, Any] = {"host": "app-1", "pid": 4711, "version": "0.1.0", "queues": {"webhooks": 1.0}}
    usual |= {"concurrency": 20, "started_at": clock.now(), "every": 5 * SECOND, "loops": LOOPS}
    await (await shop.opened()).run(records.report(uuid4(), WorkerReport(name=name, **(usual | said))))


async def looked(site: Site, query: str = "") -> str:
    answer = await (await site.visitor("vic", VIEWER_TOKEN)).get(f"{ROOT}/workers{query}")
    assert answer.status_code == 200, answer.text
    return answer.text


def names(html: str) -> list[str]:
    return re.findall(r'data-label="Worker" class="worker"><div><b>([^<]*)</b>', html)


async def test_without_a_worker_the_page_says_how_to_start_one(site: Site) -> None:
    assert "fairlane worker module:app" in await looked(site)


async def test_who_needs_somebody_comes_first_and_is_marked_in_words(site: Site, shop: App, clock: ManualClock) -> None:
    await report(shop, clock, "late-one", host="app-2")
    clock.advance("1m")
    await report(shop, clock, "a-well-one", running=5, waiting=3)
    await report(shop, clock, "b-stopping", is_stopping=True)
    await report(shop, clock, "c-unwell", is_well=False, loops=LOOPS | {"upkeep": "OSError: no <space> left"})
    html = await looked(site)
    assert names(html) == ["late-one", "c-unwell", "b-stopping", "a-well-one"]
    for words in (
        "It died or is frozen.",
        "Its loop upkeep died: OSError: no &lt;space&gt; left. Restart it",
        "It finishes what runs and claims nothing more.",
        "5 of 20",
    ):
        assert words in html, words
    assert re.findall(r"</span> (late|unwell|stopping|well)</span>", html) == ["late", "unwell", "stopping", "well"]


async def test_a_worker_whose_clock_is_off_is_told(site: Site, shop: App, clock: ManualClock) -> None:
    await report(shop, clock, "even", clock_offset=SECOND)
    assert "Its clock differs" not in await looked(site)
    await report(shop, clock, "uneven", clock_offset=-9 * SECOND)
    assert "by -9.0 s" in await looked(site)


async def test_long_runs_and_blocked_loops_are_told_with_their_jobs(site: Site, shop: App, clock: ManualClock) -> None:
    """O18."""
    then = clock.now() - 40 * 60 * SECOND
    run = LongRun(job="job-1", task="export", queue="webhooks", since=then, limit="Concurrency(2)")
    block = BlockedLoop(since=clock.now() - 29 * SECOND, job="job-2", task="parse", where="parse (shop.py:31)")
    await report(shop, clock, "one", long_runs=[run], lost_runs=2, blocks=[block])
    html = await looked(site)
    assert "Its event loop has been blocked for 29 s by job job-2 (parse), at parse (shop.py:31)." in html
    assert "Job job-1 (export) has run for 40 min, and holds Concurrency(2), for which others wait." in html
    assert "2 runs whose claims are lost still take up slots." in html
    overview = (await (await site.visitor("vic", VIEWER_TOKEN)).get(f"{ROOT}/")).text
    assert "job job-1 (export) has run for 40 min" in overview
    assert "blocked for 29 s" in overview


async def test_a_worker_that_was_replaced_comes_last_and_is_calm(site: Site, shop: App, clock: ManualClock) -> None:
    """N9."""
    await report(shop, clock, "a-dead-one")
    clock.advance("1m")
    await report(shop, clock, "b-new-one")
    html = await looked(site)
    assert names(html) == ["b-new-one", "a-dead-one"]
    assert "It died, and others have taken its place." in html
    assert "restart it" not in html


async def test_workers_are_found_by_queue_name_host_and_pid(site: Site, shop: App, clock: ManualClock) -> None:
    await report(shop, clock, "one", host="batch-7", pid=99, queues={"email": 2.0})
    await report(shop, clock, "two")
    for query, found in {
        "?queue=email": ["one"],
        "?search=BATCH": ["one"],
        "?search=99": ["one"],
        "?search=two": ["two"],
        "?queue=email&search=two": [],
    }.items():
        assert names(await looked(site, query)) == found, query
    assert "No worker fits" in await looked(site, "?search=nobody")


async def test_a_large_fleet_is_cut_off_where_it_is_well(
    site: Site, shop: App, clock: ManualClock, monkeypatch: Any
) -> None:
    monkeypatch.setattr(page, "MOST_ROWS", 2)
    for name in ("a", "b", "c"):
        await report(shop, clock, name)
    await report(shop, clock, "z-unwell", is_well=False)
    html = await looked(site)
    assert names(html) == ["z-unwell", "a"]
    assert "and 2 more that are doing no worse" in html


async def test_looking_at_workers_changes_nothing(site: Site, shop: App, clock: ManualClock) -> None:
    await report(shop, clock, "one")
    before = await (await shop.opened()).ask(Moment.workers)
    await looked(site)
    assert await (await shop.opened()).ask(Moment.workers) == before
