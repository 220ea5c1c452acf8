"""Whatever is shown together is of one moment (O14), though others claim, settle and add up between its questions."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from fairlane.policy import Concurrency, Fair, Policy
from fairlane.store.postgres import store as postgres_procedures
from fairlane.store.sqlite import procedures as sqlite_procedures
from tests.store.harness import Database, claim, finish, given_jobs, operations_on

POLICY = Policy("webhooks", fair=Fair(by="account"), limits=(Concurrency(2, by="account"),))
ACCOUNTS = ["a", "b", "c"]


class Others:
    """A process beside ours: whenever we have had an answer, it takes a step."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.waits = True
        self.steps = 0

    def step(self) -> None:
        if not self.waits:
            self.waits = True  # its own questions are nobody's concern
            thread = threading.Thread(target=lambda: asyncio.run(self._step()))
            thread.start()
            thread.join()
            self.waits = False

    async def _step(self) -> None:
        store = self._database.connect()
        await store.open()
        self.steps += 1
        keys = {"account": ACCOUNTS[self.steps % 3]}
        match self.steps % 4:
            case 0:
                await given_jobs(store, POLICY, keys, 3)
            case 1:
                await finish(store, (await claim(store, "webhooks", 3))[:1])
            case 2:
                await store.conclude("webhooks")
            case _:
                await given_jobs(store, POLICY, keys, 1)
                await claim(store, "webhooks", 1)
        await store.close()


@pytest.fixture
def others(shared_database: Database, monkeypatch: pytest.MonkeyPatch) -> Others:
    others = Others(shared_database)
    of_postgres, of_sqlite = postgres_procedures.Driver.answer, sqlite_procedures.Driver.answer

    async def answer(driver: postgres_procedures.Driver, asked: Any) -> Any:
        found = await of_postgres(driver, asked)
        others.step()
        return found

    def answer_at_once(driver: sqlite_procedures.Driver, asked: Any) -> Any:
        found = of_sqlite(driver, asked)
        others.step()
        return found

    monkeypatch.setattr(postgres_procedures.Driver, "answer", answer)
    monkeypatch.setattr(sqlite_procedures.Driver, "answer", answer_at_once)
    return others


async def test_what_a_page_shows_together_is_of_one_moment(shared_database: Database, others: Others) -> None:
    store = await shared_database.open()
    await store.declare(POLICY)
    for account in ACCOUNTS:
        await given_jobs(store, POLICY, {"account": account}, 6)
    watched: dict[str, list[dict[str, object]]] = {"webhooks": [{"account": each} for each in ACCOUNTS]}
    others.waits = False
    for _ in range(2):
        before = others.steps
        seen, beside = await operations_on(store).overview_beside(watched)
        (queue,), keys = seen.queues, [view for _, view in beside]
        assert sum(each.waiting for each in keys) == queue.ready == seen.totals.ready
        assert sum(each.running for each in keys) == queue.running
        assert sum(each.waiting for each in keys if each.held_by) == queue.held_jobs
        assert queue.stats_as_of == seen.now
        one = await operations_on(store).queues.show("webhooks")
        (limit,) = one.limits
        assert limit.held_jobs == one.view.held_jobs
        page = await operations_on(store).keys.list("webhooks")
        assert all(each.running == each.gauges[0].used for each in page.keys if each.queue == "webhooks")
        for account in ACCOUNTS:
            key = await operations_on(store).keys.show("webhooks", {"account": account})
            assert len(key.running) == key.view.running == key.view.gauges[0].used
            assert sum(lane.waiting for lane in key.lanes) == key.view.waiting
            assert sum(lane.running for lane in key.lanes) == key.view.running
            assert [lane.held_by for lane in key.lanes if lane.waiting] == key.view.held_by
            assert any("Concurrency(2, by='account'): 2 of 2" in words for words in key.why) == (key.view.running == 2)
        stats = await operations_on(store).metrics(10)
        waiting = {labels[1]: count for labels, count in stats["fairlane_key_waiting_jobs"]}
        assert set(waiting) <= {f"account={each}" for each in ACCOUNTS}, "none are left for others"
        assert stats["fairlane_queue_ready_jobs"] == [(("webhooks",), sum(waiting.values()))]
        assert others.steps > before + 40
