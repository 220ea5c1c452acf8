"""Operators see a partitioned queue as one, on every store."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from fairlane import App, Concurrency, Fair, State
from fairlane.clock import Instant, ManualClock
from fairlane.errors import StoreUnavailable
from fairlane.operations import JobFilter
from fairlane.policy import Policy
from fairlane.policy.overrides import Kind, Override
from fairlane.policy.partitions import begun, partition_for
from fairlane.scheduler.rebuild import carried_gates
from fairlane.scheduler.snapshot import GateRow
from fairlane.store import policies, repartition
from fairlane.store.audit import Note
from fairlane.store.repartition import advance
from tests.store.by_hand import url_of
from tests.store.harness import Database, diagnosed, operations_on, planned

PARTITIONS = ("email", "email__p1", "email__p2")
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
    change = await mail.app.operations.queues.pause("email")
    assert change.queue == "email"
    assert len(change.after) == 1
    await mail.fill()
    assert await mail.startable() == set()
    await mail.app.operations.queues.resume("email")
    assert await mail.startable() == set(ACCOUNTS)


async def test_a_pause_of_a_key_or_a_task_holds_wherever_it_is(mail: Mail) -> None:
    await mail.fill()
    await mail.app.operations.queues.pause("email", keys={"account": "account-3"})
    assert await mail.startable() == set(ACCOUNTS) - {"account-3"}
    await mail.app.operations.queues.pause("email", task="send")
    assert await mail.startable() == set()
    assert {each.queue for each in await mail.app.operations.overrides.list()} == {"email"}


@pytest.mark.parametrize("action", ["pause", "suspend"])
async def test_an_action_on_all_partitions_is_recorded_once(
    database: Database, clock: ManualClock, stack: AsyncExitStack, action: str
) -> None:
    """O02: also what only one of the partitions had is told by the one entry."""
    mail = Mail(database, clock, 3)
    await stack.enter_async_context(mail.app)
    await mail.fill(1)
    act = getattr(mail.app.operations.queues, action)
    await act("email__p1", actor="bob")
    await act("email", actor="ada", reason="an incident")
    assert await overrides_by_partition(mail) == {name: [(action, "ada")] for name in PARTITIONS}
    whole, single = (await mail.app.operations.audit.list()).entries
    assert (whole.actor, whole.action, whole.queue, whole.reason) == ("ada", action, "email", "an incident")
    assert (single.actor, single.queue) == ("bob", "email__p1")
    assert whole.target == single.target
    assert whole.before == single.after, "what the second partition had"


async def test_an_action_that_fails_in_one_partition_changes_none(
    database: Database, clock: ManualClock, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O02."""
    mail = Mail(database, clock, 3)
    await stack.enter_async_context(mail.app)
    await mail.fill(1)

    def fail_in_the_second(policy: Policy, now: Instant, gates: Sequence[GateRow]) -> list[GateRow]:
        amended.append(policy.queue)
        if policy.queue == "email__p1":
            raise ConnectionResetError
        return carried_gates(policy, now, gates)

    amended: list[str] = []
    monkeypatch.setattr(policies, "carried_gates", fail_in_the_second)
    with pytest.raises((ConnectionResetError, StoreUnavailable)):
        await mail.app.operations.queues.pause("email")
    assert amended == ["email", "email__p1"]
    assert await overrides_by_partition(mail) == {name: [] for name in PARTITIONS}
    assert (await mail.app.operations.audit.list()).entries == ()
    monkeypatch.undo()
    assert await mail.startable() == set(ACCOUNTS)


async def test_actions_of_two_operators_at_once_never_stand_in_each_others_way(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    both = [Mail(shared_database, clock, 3), Mail(shared_database, clock, 3)]
    for mail in both:
        await stack.enter_async_context(mail.app)
    await both[0].fill(1)
    names = list(PARTITIONS)
    stores = [await mail.app.opened() for mail in both]
    put = Override(kind=Kind.SUSPEND)
    for _ in range(10):
        await asyncio.gather(
            stores[0].change_overrides(names, [put], [], Note(actor="ada", action="suspend")),
            stores[1].change_overrides(names[::-1], [], [put.id], Note(actor="bob", action="unsuspend")),
            *(mail.startable() for mail in both),
        )
    assert len({str(each) for each in (await overrides_by_partition(both[0])).values()}) == 1


async def overrides_by_partition(mail: Mail) -> dict[str, list[tuple[str, str]]]:
    store = await mail.app.opened()
    found = {name: await store.policy(name) for name in PARTITIONS}
    return {
        name: [(each.kind.value, each.set_by) for each in declared.policy.overrides.all]
        for name, declared in found.items()
        if declared is not None
    }


async def test_a_dry_run_changes_no_partition(mail: Mail) -> None:
    """O13."""
    await mail.fill()
    await mail.app.operations.queues.pause("email", dry_run=True)
    assert await mail.startable() == set(ACCOUNTS)


async def test_a_limit_of_one_key_is_changed_where_it_lives(mail: Mail) -> None:
    await mail.fill()
    for account in ACCOUNTS[:3]:
        await mail.app.operations.limits.set("email", "concurrency:account", 1, keys={"account": account})
    claims = await mail.queue.claim(1_000)
    held = [claim.keys["account"] for claim in claims]
    assert [held.count(account) for account in ACCOUNTS] == [1] * 3 + [2] * 9


async def test_a_limit_that_crosses_partitions_is_changed_for_all_of_them(mail: Mail) -> None:
    await mail.fill(6)
    crossing = "concurrency:@email__concurrency"
    await mail.app.operations.limits.set("email", crossing, 5)
    claims = await mail.queue.claim(1_000)
    assert len(claims) == 5
    assert await mail.queue.claim(1_000) == []
    await mail.app.operations.limits.set("email", crossing, 7)
    assert len(await mail.queue.claim(1_000)) == 2
    await mail.queue.ack(claims)
    assert len(await mail.queue.claim(1_000)) == 5
    await mail.app.operations.limits.clear("email", crossing)
    assert len(await mail.queue.claim(1_000)) == 17, "two of each account run then"


async def test_a_number_of_a_limit_that_crosses_partitions_wakes_whoever_waits_for_it_when_it_is_put_back(
    database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    """A24, where the key of the limit does not determine the partition."""
    app = App(url_of(database), clock=clock)
    limits = [Concurrency(3, by="region")]
    queue = app.queue("email", partitions=2, partition_by="account", keys=["account", "region"], limits=limits)

    @app.task(queue="email")
    async def send(account: str, region: str) -> None: ...

    await stack.enter_async_context(app)
    (limit,) = await app.operations.limits.list("email")
    await app.enqueue_many([send.call(f"account-{n}", "eu") for n in range(6)])
    await app.operations.limits.set("email", limit.name, 0, keys={"region": "eu"})
    assert await queue.claim(9) == []
    await app.operations.limits.clear("email", limit.name, keys={"region": "eu"})
    assert sum([len(await queue.claim(9)) for _ in range(3)]) == 3


async def test_listings_bring_the_jobs_of_all_partitions_in_order(mail: Mail) -> None:
    """O06 and O12: paged, the newest first, none twice and none left out."""
    stored = await mail.fill()
    store = await mail.app.opened()
    found: list[Any] = []
    after = None
    while True:
        page = await operations_on(store).jobs.list(JobFilter(queue="email"), 5, after)
        found += [job.id for job in page.jobs]
        after = page.after
        if after is None:
            break
    assert found == sorted((job.id for job in stored), reverse=True)
    claims = await mail.queue.claim(1_000)
    running = await operations_on(store).jobs.list(JobFilter(queue="email", state=State.RUNNING), 1_000)
    assert {job.id for job in running.jobs} == {claim.id for claim in claims}
    await mail.queue.ack(claims)
    done = await operations_on(store).jobs.list(JobFilter(queue="email", state=State.DONE), 1_000)
    assert {job.id for job in done.jobs} == {claim.id for claim in claims}


async def test_bulk_actions_reach_all_partitions(mail: Mail) -> None:
    await mail.fill()
    report = await mail.app.operations.jobs.cancel(JobFilter(queue="email"))
    assert len(report.done) == 36
    assert await mail.startable() == set()


async def test_a_key_is_explained_in_its_partition_and_the_queue_as_a_whole(mail: Mail) -> None:
    await mail.fill()
    await mail.queue.claim(1_000)
    told = await mail.queue.explain(account="account-5")
    assert told.subject.queue == "email"
    assert "concurrency" in [str(reason) for reason in told.reasons]
    await mail.app.operations.queues.pause("email")
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
    assert [each.queue for each in await mail.app.operations.policies.show()] == ["email"]
    changes = await mail.app.operations.policies.apply(["email"])
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

    plan = await planned(store, "email", 8)
    assert plan.running == len(moving)
    found = await store.policy("email")
    assert found is not None
    await repartition.divide(store, begun(found.policy, 8), found.version)
    assert not (await advance(store, "email", Note(actor="ops", action="partition"))).is_over
    (finding,) = await diagnosed(store, other.app.declared_policies)
    assert finding.check == "partitions"
    assert "on its way from 4 to 8 partitions" in finding.message


async def test_the_doctor_looks_for_a_key_in_all_partitions(mail: Mail) -> None:
    store = await mail.app.opened()
    for account in ACCOUNTS:
        await mail.app.operations.queues.pause("email", keys={"account": account})
    await mail.fill(1)
    unknown = "key that no job carries"
    assert unknown not in [each.check for each in await diagnosed(store)]
    await mail.app.operations.queues.pause("email", keys={"account": "nobody"})
    found = [each.queue for each in await diagnosed(store) if each.check == unknown]
    assert found == ["email"]
