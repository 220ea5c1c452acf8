"""Partitioned queues through the public API, on every store: where jobs go, whose turn it is, and what is refused."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest

from fairlane import App, Backlog, Concurrency, Fair, Outcome, Rate
from fairlane.clock import ManualClock
from fairlane.errors import BacklogFull, ConfigurationError, InvalidJob, InvalidPolicy
from fairlane.policy import partition_for
from fairlane.queue import Queue
from fairlane.store import operators, records
from fairlane.task import Task
from tests.store.by_hand import url_of
from tests.store.harness import Database, soon

WIDTH = 4


class Mail:
    """A program with one partitioned queue and one task."""

    def __init__(self, database: Database, clock: ManualClock, partitions: int = WIDTH, **options: Any) -> None:
        self.app = App(url_of(database), clock=clock)
        options.setdefault("partition_by", "account")
        self.queue = self.app.queue("email", partitions=partitions, **options)

        async def send(account: str, endpoint: str = "api") -> None: ...

        self.send: Task[Any, Any] = self.app.task(queue="email", name="send", keys=["account", "endpoint"])(send)

    async def counts(self) -> list[int]:
        """Ready jobs of each partition, counted without a claim."""
        found = []
        for each in self.queue.partitions:
            jobs = (await (await self.app.opened()).run(operators.find_jobs(_waiting(each.queue), None, 1_000))).jobs
            found.append(len(jobs))
        return found

    async def serve(self, count: int) -> Counter[str | None]:
        """Claim and finish so many jobs, one after the other; by account."""
        got: Counter[str | None] = Counter()
        for _ in range(count):
            (claim,) = await self.queue.claim(1)
            got[claim.keys["account"]] += 1
            await claim.ack(ran="10ms")
        return got


def _waiting(queue: str) -> Any:
    from fairlane.operations import JobFilter

    return JobFilter(queue=queue)


@pytest.fixture
async def mail(database: Database, clock: ManualClock, stack: AsyncExitStack) -> Mail:
    mail = Mail(database, clock, fair=Fair(by="account", charge="count"))
    await stack.enter_async_context(mail.app)
    return mail


ACCOUNTS = [f"account-{n}" for n in range(12)]


async def test_a_job_goes_where_its_key_belongs(mail: Mail) -> None:
    jobs = await mail.app.enqueue_many([mail.send.call(account) for account in ACCOUNTS])
    for account, job in zip(ACCOUNTS, jobs, strict=True):
        home = partition_for(account, WIDTH)
        assert (await job.record()).queue == mail.queue.partitions[home].queue
        assert mail.queue.partition_for(account) == home
    assert sum(await mail.counts()) == len(ACCOUNTS)


async def test_a_bulk_goes_where_single_jobs_go(mail: Mail) -> None:
    """E01."""
    alone = [await mail.send.enqueue(account) for account in ACCOUNTS]
    together = await mail.send.enqueue_many([mail.send.call(account) for account in ACCOUNTS])
    assert [(await job.record()).queue for job in alone] == [(await job.record()).queue for job in together]


async def test_keys_are_stamped_as_they_are(mail: Mail) -> None:
    """A18: routing adds nothing to what limits see."""
    job = await mail.send.enqueue("acme")
    assert (await job.record()).keys == {"account": "acme", "endpoint": "api"}
    (claim,) = await mail.queue.claim(1)
    assert claim.keys == {"account": "acme", "endpoint": "api"}


async def test_a_partition_key_is_absent_none_or_a_value(
    database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    """Absent means the batch's default, None the first partition, and a value overrides."""
    mail = Mail(database, clock, partition_by=())
    await stack.enter_async_context(mail.app)
    send, key = mail.send, "elsewhere"
    default = send.using(partition_key=key)
    calls = [
        send.call("acme"),
        send.using(partition_key=None).call("acme"),
        send.using(partition_key="globex").call("acme"),
        send.using(partition=2).call("acme"),
    ]

    async def places(bound: Any) -> list[str]:
        return [(await job.record()).queue for job in await bound.enqueue_many(calls)]

    names = [each.queue for each in mail.queue.partitions]
    chosen = [names[0], names[partition_for("globex", WIDTH)], names[2]]
    assert partition_for(key, WIDTH) != 0
    assert (await places(send))[1:] == chosen
    assert await places(default) == [names[partition_for(key, WIDTH)], *chosen]


async def test_a_partition_that_there_is_not_is_refused(
    database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    mail = Mail(database, clock, partition_by=())
    await stack.enter_async_context(mail.app)
    with pytest.raises(InvalidJob, match="has partitions 0 to 3, not partition=4"):
        await mail.send.using(partition=4).enqueue("acme")
    with pytest.raises(InvalidJob, match="partition=-1 is not a whole number from 0 to 255"):
        mail.send.using(partition=-1)
    with pytest.raises(InvalidJob, match=r"is a partition; .*using\(queue='email', partition=1\)"):
        await mail.send.using(queue="email__p1").enqueue("acme")


async def test_a_job_is_not_sent_past_the_partition_of_its_key(mail: Mail) -> None:
    for chosen in (mail.send.using(partition=1), mail.send.using(partition_key="globex")):
        with pytest.raises(InvalidJob, match="is partitioned by account, whose limits do not count"):
            await chosen.enqueue("acme")
    with pytest.raises(InvalidJob, match=r"is a partition; enqueue to 'email', which finds it by the job's keys\Z"):
        await mail.send.using(queue="email__p1").enqueue("acme")


async def test_a_task_that_is_declared_for_a_partition_is_told_what_to_declare(mail: Mail) -> None:
    @mail.app.task(queue="email__p1")
    async def resend(account: str) -> None: ...

    with pytest.raises(InvalidJob, match=r"is a partition; declare the task with queue='email', which finds it by"):
        await resend.enqueue("acme")


def test_what_is_said_about_partitions_needs_their_number() -> None:
    app = App("sqlite://")
    incomplete: list[dict[str, Any]] = [{"partition_by": "account"}, {"per_partition": Concurrency(5)}]
    for given in incomplete:
        with pytest.raises(ConfigurationError, match=r"is about partitions, and it has none; give partitions=… too"):
            app.queue("email", **given)
    app.queue("email", partitions=1, partition_by="account", per_partition=Concurrency(5))


def test_a_partition_is_found_by_a_value_for_each_key() -> None:
    app = App("sqlite://")
    one = app.queue("email", partitions=4, partition_by="account")
    both = app.queue("calls", partitions=4, partition_by=("account", "region"))
    assert both.partition_for(("acme", "eu")) == partition_for(("acme", "eu"), 4)
    wrong: list[tuple[Queue, object]] = [(one, ("acme", "eu")), (both, "acme"), (both, ("acme",))]
    for queue, key in wrong:
        with pytest.raises(ConfigurationError, match="give partition_for a value for each of these keys"):
            queue.partition_for(key)


async def test_a_queue_that_is_not_divided_has_no_other_partition(
    database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    mail = Mail(database, clock, 1)
    await stack.enter_async_context(mail.app)
    with pytest.raises(InvalidJob, match="has no partition=1, it is not divided; leave partition= out, or divide it"):
        await mail.send.using(partition=1).enqueue("acme")
    await mail.send.using(partition=0).enqueue("acme")


async def test_without_a_key_jobs_spread_over_all_partitions(
    database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    mail = Mail(database, clock, partition_by=())
    await stack.enter_async_context(mail.app)
    await mail.app.enqueue_many([mail.send.call("acme") for _ in range(200)])
    assert min(await mail.counts()) > 20


async def test_claiming_by_hand_reaches_every_partition(mail: Mail) -> None:
    await mail.app.enqueue_many([mail.send.call(account) for account in ACCOUNTS])
    claims = await mail.queue.claim(100)
    assert {claim.keys["account"] for claim in claims} == set(ACCOUNTS)
    await mail.queue.ack(claims)
    assert await mail.queue.claim(1) == []


async def test_whoever_waits_hears_of_a_job_in_any_partition(mail: Mail) -> None:
    import asyncio

    for account in ("account-0", "account-1", "account-4"):
        waiter = asyncio.create_task(mail.queue.wait())
        await mail.send.enqueue(account)
        assert await soon(waiter)
        await mail.serve(1)


async def test_a_flood_in_one_partition_does_not_delay_tenants_of_another(mail: Mail) -> None:
    """F01: whatever partitions they are in, each tenant has its turn."""
    hot = "account-0"
    small = [account for account in ACCOUNTS[1:] if partition_for(account, WIDTH) != partition_for(hot, WIDTH)][:5]
    await mail.app.enqueue_many([mail.send.call(hot) for _ in range(300)])
    await mail.app.enqueue_many([mail.send.call(account) for account in small for _ in range(10)])
    got = await mail.serve(100)
    assert [got[account] for account in small] == [10] * len(small)


async def test_every_tenant_is_served_within_its_turn(mail: Mail) -> None:
    """F02 across partitions: claims of 10 reach each of 24 tenants within a few turns of all of them."""
    accounts = [f"tenant-{n}" for n in range(24)]
    await mail.app.enqueue_many([mail.send.call(account) for account in accounts for _ in range(20)])
    seen: set[str | None] = set()
    for _ in range(12):
        claims = await mail.queue.claim(10)
        seen |= {claim.keys["account"] for claim in claims}
        await mail.queue.ack(claims, ran="10ms")
    assert seen == set(accounts)


async def test_tenants_get_equal_shares_whatever_partition_they_are_in(mail: Mail) -> None:
    """F06 with equal weights: partitions of unequal size do not give unequal shares."""
    by_home = Counter(partition_for(account, WIDTH) for account in ACCOUNTS)
    assert max(by_home.values()) >= 2 * min(by_home.values())
    await mail.app.enqueue_many([mail.send.call(account) for account in ACCOUNTS for _ in range(60)])
    got = await mail.serve(360)
    assert max(got.values()) - min(got.values()) <= 6, got


async def test_a_limit_of_one_key_is_exact_in_its_partition(
    database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    """A05, A06 and A09 for limits that stay in one partition."""
    limits = [Concurrency(2, by="account"), Rate(3, per="1m", by=("account", "endpoint"))]
    mail = Mail(database, clock, limits=limits)
    await stack.enter_async_context(mail.app)
    await mail.app.enqueue_many([mail.send.call(account) for account in ACCOUNTS for _ in range(5)])
    first = await mail.queue.claim(1_000)
    assert Counter(claim.keys["account"] for claim in first) == dict.fromkeys(ACCOUNTS, 2)
    await mail.queue.ack(first)
    second = await mail.queue.claim(1_000)
    assert Counter(claim.keys["account"] for claim in second) == dict.fromkeys(ACCOUNTS, 1)


async def test_a_backlog_of_one_key_is_counted_in_its_partition(
    database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    mail = Mail(database, clock, limits=Backlog(2, by="account", when_full="reject"))
    await stack.enter_async_context(mail.app)
    outcomes = await mail.app.enqueue_many([mail.send.call(account) for account in ACCOUNTS for _ in range(3)])
    assert Counter(job.outcome for job in outcomes) == {Outcome.ENQUEUED: 24, Outcome.FULL: 12}
    with pytest.raises(BacklogFull):
        await mail.send.enqueue(ACCOUNTS[3])
    assert not await mail.queue.pace("0s", account=ACCOUNTS[3])
    assert await mail.queue.pace("0s", account="another")


@pytest.mark.parametrize("declared", [1, 2, 8])
async def test_a_program_with_another_width_starts_and_goes_by_the_stored_one(
    shared_database: Database,
    clock: ManualClock,
    stack: AsyncExitStack,
    caplog: pytest.LogCaptureFixture,
    declared: int,
) -> None:
    """P5: it sends jobs where the keys live, claims from every partition, and says that it declares another number."""
    mail = Mail(shared_database, clock)
    await stack.enter_async_context(mail.app)
    await mail.app.enqueue_many([mail.send.call(account) for account in ACCOUNTS])
    other = Mail(shared_database, clock, declared)
    await stack.enter_async_context(other.app)
    (warned,) = [each.getMessage() for each in caplog.records if each.name == "fairlane.app"]
    assert "it has 4 partitions, and this program declares" in warned
    assert f"fairlane partition email --to {declared}" in warned
    jobs = await other.app.enqueue_many([other.send.call(account) for account in ACCOUNTS])
    homes = {f"email__p{index}" if index else "email" for index in map(mail.queue.partition_for, ACCOUNTS)}
    assert {(await job.record()).queue for job in jobs} == homes
    assert [other.queue.partition_for(each) for each in ACCOUNTS] == [partition_for(each, 4) for each in ACCOUNTS]
    held = await other.queue.claim(1_000)
    assert len(held) == 2 * len(ACCOUNTS)
    await other.queue.ack(held)
    store = await other.app.opened()
    assert sorted(await store.run(records.queues())) == ["email", "email__p1", "email__p2", "email__p3"]
    assert await mail.queue.claim(1_000) == []


async def test_a_program_that_divides_by_another_key_goes_by_the_stored_one(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    await stack.enter_async_context(Mail(shared_database, clock).app)
    other = Mail(shared_database, clock, partition_by="endpoint")
    await stack.enter_async_context(other.app)
    job = await other.send.enqueue(ACCOUNTS[0])
    index = partition_for(ACCOUNTS[0], 4)
    assert (await job.record()).queue == (f"email__p{index}" if index else "email")


@pytest.mark.usefixtures("producers_know_at_once")
async def test_a_program_that_divides_by_another_key_is_told_a_way_that_is_not_refused(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    await stack.enter_async_context(Mail(shared_database, clock).app)
    other = Mail(shared_database, clock, partition_by="endpoint").app
    await stack.enter_async_context(other)
    way = "`fairlane partition email --to 1`, then `fairlane partition email --to 4 --by endpoint`"
    assert any(f"to change that: {way}" in each.getMessage() for each in caplog.records)
    diagnosis = await other.operations.diagnose()
    assert [each.remedy for each in diagnosis if each.check == "partitions"] == [
        f"declare it as it is, or change the queue: {way}"
    ]
    with pytest.raises(ConfigurationError, match="let it be one queue in between"):
        await other.operations.partitions.change("email", 4, reason="as declared")
    await other.operations.partitions.change("email", 1, reason="in between")
    changed = await other.operations.partitions.change("email", 4, by=["endpoint"], reason="as declared")
    assert changed.plan.by == ("endpoint",)


async def test_a_declaration_that_cannot_hold_in_the_stored_partitions_leaves_what_is_stored(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """On SQLite too, where declarations apply otherwise: a program can start before the queue is changed."""
    limits = [Concurrency(1, by="account")]
    await stack.enter_async_context(Mail(shared_database, clock, limits=limits).app)
    other = Mail(shared_database, clock, 1, limits=[Backlog(3)])
    await stack.enter_async_context(other.app)
    store = await other.app.opened()
    found = await store.policy("email")
    assert found is not None
    assert found.policy.limits == tuple(limits)
    assert any("differs from the one declared here" in each.getMessage() for each in caplog.records)
    with pytest.raises(InvalidPolicy, match=r"has 4 partitions by account.*fairlane partition email --to 1"):
        await other.app.operations.policies.apply()


async def test_applying_a_policy_leaves_the_number_of_partitions_as_it_is(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    await stack.enter_async_context(Mail(shared_database, clock, limits=[Concurrency(1, by="account")]).app)
    other = Mail(shared_database, clock, 8, limits=[Concurrency(2, by="account"), Concurrency(9)])
    await stack.enter_async_context(other.app)
    changes = await other.app.operations.policies.apply()
    assert [change.queue for change in changes] == ["email", "email__p1", "email__p2", "email__p3"]
    (shown,) = await other.app.operations.policies.show()
    assert shown.is_drift
    assert shown.drift == ()
    assert shown.remedy == "`fairlane partition email --to 8` divides it so"


def test_a_name_that_a_partition_has_cannot_be_declared() -> None:
    app = App("sqlite://")
    app.queue("email", partitions=2, partition_by="account")
    for name in ("email__p1", "email__p7", "other__p0"):
        with pytest.raises(ConfigurationError, match="belong to partitions"):
            app.queue(name)
    with pytest.raises(ConfigurationError, match="declared twice"):
        app.queue("email")
    app.queue("reports", partitions=2, partition_by="region")
    app.task(queue="reports", name="report")(lambda account: None)
    with pytest.raises(InvalidPolicy, match="none of its tasks can provide"):
        app.check()
