"""Operators see a partitioned queue as one, on every store."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from fairlane import App, Concurrency, Fair, ManualClock, State, partition_for
from fairlane.operations import JobFilter, list_jobs
from tests.store.by_hand import url_of
from tests.store.harness import Database, diagnosed

ACCOUNTS = [f"account-{n}" for n in range(12)]


class Mail:
    def __init__(self, database: Database, clock: ManualClock, partitions: int = 4) -> None:
        self.app = App(url_of(database), clock=clock)
        self.queue = self.app.queue(
            "email",
            partitions=partitions,
            partition_by="account",
            fair=Fair(by="account"),
            limits=[Concurrency(2, by="account"), Concurrency(100)],
        )

        async def send(account: str) -> None: ...

        self.send = self.app.task(queue="email", name="shop.send")(send)

    async def fill(self, each: int = 3) -> list[Any]:
        return list(await self.app.enqueue_many([self.send.call(name) for _ in range(each) for name in ACCOUNTS]))

    async def startable(self) -> set[str | None]:
        """Who could start now; everything is given back."""
        claims = await self.queue.claim(1_000)
        for claim in claims:
            await claim.release()
        return {claim.keys["account"] for claim in claims}


@pytest.fixture
async def mail(database: Database, clock: ManualClock, stack: AsyncExitStack) -> Mail:
    mail = Mail(database, clock)
    await stack.enter_async_context(mail.app)
    return mail


async def test_a_pause_of_the_queue_holds_in_every_partition(mail: Mail) -> None:
    """O01."""
    change = await mail.app.operations.pause("email")
    assert change.queue == "email"
    assert len(change.after) == 1
    await mail.fill()
    assert await mail.startable() == set()
    await mail.app.operations.resume("email")
    assert await mail.startable() == set(ACCOUNTS)


async def test_a_pause_of_a_key_or_a_task_holds_wherever_it_is(mail: Mail) -> None:
    await mail.fill()
    await mail.app.operations.pause("email", keys={"account": "account-3"})
    assert await mail.startable() == set(ACCOUNTS) - {"account-3"}
    await mail.app.operations.pause("email", task="send")
    assert await mail.startable() == set()
    assert {each.queue for each in await mail.app.operations.list_overrides()} == {"email"}


async def test_a_dry_run_changes_no_partition(mail: Mail) -> None:
    """O13."""
    await mail.fill()
    await mail.app.operations.pause("email", dry_run=True)
    assert await mail.startable() == set(ACCOUNTS)


async def test_a_limit_of_one_key_is_changed_where_it_lives(mail: Mail) -> None:
    await mail.fill()
    for account in ACCOUNTS[:3]:
        await mail.app.operations.set_limit("email", "concurrency:account", 1, keys={"account": account})
    claims = await mail.queue.claim(1_000)
    held = [claim.keys["account"] for claim in claims]
    assert [held.count(account) for account in ACCOUNTS] == [1] * 3 + [2] * 9


async def test_a_limit_that_crosses_partitions_is_changed_for_all_of_them(mail: Mail) -> None:
    await mail.fill(6)
    crossing = "concurrency:@email__concurrency"
    await mail.app.operations.set_limit("email", crossing, 5)
    claims = await mail.queue.claim(1_000)
    assert len(claims) == 5
    assert await mail.queue.claim(1_000) == []
    await mail.app.operations.set_limit("email", crossing, 7)
    assert len(await mail.queue.claim(1_000)) == 2
    await mail.queue.ack(claims)
    assert len(await mail.queue.claim(1_000)) == 5
    await mail.app.operations.clear_limit("email", crossing)
    assert len(await mail.queue.claim(1_000)) == 17, "two of each account run then"


async def test_listings_bring_the_jobs_of_all_partitions_in_order(mail: Mail) -> None:
    """O06 and O12: paged, the newest first, none twice and none left out."""
    stored = await mail.fill()
    store = await mail.app.opened()
    found: list[Any] = []
    after = None
    while True:
        page = await list_jobs(store, JobFilter(queue="email"), 5, after)
        found += [job.id for job in page.jobs]
        after = page.after
        if after is None:
            break
    assert found == sorted((job.id for job in stored), reverse=True)
    claims = await mail.queue.claim(1_000)
    running = await list_jobs(store, JobFilter(queue="email", state=State.RUNNING), 1_000)
    assert {job.id for job in running.jobs} == {claim.id for claim in claims}
    await mail.queue.ack(claims)
    done = await list_jobs(store, JobFilter(queue="email", state=State.DONE), 1_000)
    assert {job.id for job in done.jobs} == {claim.id for claim in claims}


async def test_bulk_actions_reach_all_partitions(mail: Mail) -> None:
    await mail.fill()
    report = await mail.app.operations.cancel_jobs(JobFilter(queue="email"))
    assert len(report.done) == 36
    assert await mail.startable() == set()


async def test_a_key_is_explained_in_its_partition_and_the_queue_as_a_whole(mail: Mail) -> None:
    await mail.fill()
    await mail.queue.claim(1_000)
    told = await mail.queue.explain(account="account-5")
    assert told.subject.queue == "email"
    assert "concurrency" in [str(reason) for reason in told.reasons]
    await mail.app.operations.pause("email")
    told = await mail.queue.explain()
    assert told.subject.queue == "email"
    assert [str(reason) for reason in told.reasons].count("paused") == 1


async def test_what_would_start_next_comes_from_all_partitions(mail: Mail) -> None:
    await mail.fill(1)
    told = await mail.queue.explain()
    keys = [(await mail.app.job(job).record()).keys["account"] for job in told.next_up]
    homes = {partition_for(account, 4) for account in ACCOUNTS}
    assert {partition_for(account, 4) for account in keys[: len(homes)]} == homes


async def test_policies_are_shown_once_and_applied_everywhere(mail: Mail) -> None:
    assert [each.queue for each in await mail.app.operations.show_policies()] == ["email"]
    changes = await mail.app.operations.apply_policies(["email"])
    assert [change.queue for change in changes] == ["email", "email__p1", "email__p2", "email__p3"]


async def test_the_doctor_reports_a_wrong_width_and_an_unfinished_change(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    mail = Mail(shared_database, clock)
    await stack.enter_async_context(mail.app)
    store = await mail.app.opened()
    other = Mail(shared_database, clock, 8)
    assert await diagnosed(store, mail.app.declared_policies) == []
    (finding,) = await diagnosed(store, other.app.declared_policies)
    assert (finding.check, finding.queue) == ("partitions", "email")
    assert "it has 4 (by account), and the code declares 8 (by account)" in finding.message
    assert "fairlane partition email --to 8" in finding.remedy
    await mail.fill(1)
    claims = await mail.queue.claim(1_000)
    accounts = [claim.keys["account"] for claim in claims]
    moving = [account for account in accounts if partition_for(account, 4) != partition_for(account, 8)]
    assert moving

    from fairlane.operations import Intent, plan_partitions

    plan = await plan_partitions(store, "email", 8)
    assert plan.running == len(moving)
    for policy in plan.during:
        await store.divide(policy, (), Intent(actor="ops").note("partition"))
    (finding,) = await diagnosed(store, other.app.declared_policies)
    assert finding.check == "partitions"
    assert "on its way from 4 to 8 partitions" in finding.message


async def test_the_doctor_looks_for_a_key_in_all_partitions(mail: Mail) -> None:
    store = await mail.app.opened()
    for account in ACCOUNTS:
        await mail.app.operations.pause("email", keys={"account": account})
    await mail.fill(1)
    unknown = "key that no job carries"
    assert unknown not in [each.check for each in await diagnosed(store)]
    await mail.app.operations.pause("email", keys={"account": "nobody"})
    found = [each.queue for each in await diagnosed(store) if each.check == unknown]
    assert found == ["email"]
