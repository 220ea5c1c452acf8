"""Growing and shrinking a partitioned queue while it works, on every store: nothing is lost, and no limit breaks."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest

from fairlane import App, Concurrency, Fair, HeldClaim, Rate, Sequence, State
from fairlane.clock import ManualClock
from fairlane.errors import ConfigurationError, InvalidPolicy
from fairlane.operations import JobFilter, Repartitioned
from fairlane.operations.requests import partitions_of
from fairlane.policy import partition_for
from fairlane.policy.partitions import begun
from fairlane.store import operators, policies, records, repartition
from fairlane.store.protocol import Store
from tests.store.by_hand import url_of
from tests.store.harness import Database, diagnosed, operations_on, planned, soon
from tests.store.harness import claim as claim_all
from tests.test_seeing import everything

pytestmark = pytest.mark.usefixtures("producers_know_at_once")

ACCOUNTS = [f"account-{n}" for n in range(24)]
OPERATOR: dict[str, Any] = {"actor": "ops"}


class Program:
    """A program as it is deployed: it knows one width."""

    def __init__(self, database: Database, clock: ManualClock | None, partitions: int, **options: Any) -> None:
        self.app = App(url_of(database), clock=clock)
        self.queue = self.app.queue("email", partitions=partitions, **{"partition_by": "account", **options})

        async def send(account: str, number: int = 0) -> None: ...

        self.send = self.app.task(queue="email", name="send", max_attempts=3)(send)

    async def fill(self, each: int = 1) -> None:
        await self.app.enqueue_many([self.send.call(account, n) for n in range(each) for account in ACCOUNTS])


async def change(
    store: Store, to: int, held: list[HeldClaim] | None = None, by: tuple[str, ...] | None = None
) -> Repartitioned:
    """Change the width; whoever is waited for ends."""

    async def rest() -> None:
        assert held, "the change waits for jobs that nobody runs"
        await held.pop().ack()

    return await operations_on(store, rest=rest).partitions.change("email", to, by=by, **OPERATOR)


class Interrupted(Exception): ...


async def begin(store: Store, to: int, by: tuple[str, ...] | None = None) -> None:
    """Change the width, and be stopped while jobs run that it waits for, or as soon as it has moved some."""

    async def rest() -> None:
        raise Interrupted

    with pytest.raises(Interrupted):
        await operations_on(store, rest=rest).partitions.change("email", to, by=by, **OPERATOR)


async def queues(store: Store) -> Counter[str]:
    found = (await store.run(operators.find_jobs(JobFilter(), None, 10_000))).jobs
    return Counter(job.queue for job in found if job.state in (State.READY, State.SCHEDULED))


def homes(width: int, each: int = 1) -> Counter[str]:
    names = ["email", *(f"email__p{n}" for n in range(1, width))]
    return Counter(names[partition_for(account, width)] for account in ACCOUNTS for _ in range(each))


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 5), (4, 8), (8, 3), (4, 1)])
async def test_waiting_jobs_move_to_where_they_belong(
    database: Database, clock: ManualClock, stack: AsyncExitStack, before: int, after: int
) -> None:
    program = Program(database, clock, before, fair=Fair(by="account"))
    await stack.enter_async_context(program.app)
    store = await program.app.opened()
    await program.fill(3)
    await program.send.using(delay="1h").enqueue("account-0")
    plan = await planned(store, "email", after, ("account",))
    assert await queues(store) == homes(before, 3) + Counter(["email" if before == 1 else _home("account-0", before)])
    done = await change(store, after, by=("account",))
    assert await queues(store) == homes(after, 3) + Counter([_home("account-0", after)])
    assert done.moved >= plan.waiting
    got: Counter[Any] = Counter()
    for name in await partitions_of(store, "email"):
        while True:
            claimed = await store.claim(name, lambda: 100, worker=_worker(), lease=_lease())
            got.update(claim.keys["account"] for claim in claimed.claims)
            if not claimed.claims and not claimed.more:
                break
    assert got == dict.fromkeys(ACCOUNTS, 3)


def _home(account: str, width: int) -> str:
    index = partition_for(account, width)
    return "email" if index == 0 else f"email__p{index}"


def _worker() -> Any:
    from tests.store.harness import WORKER

    return WORKER


def _lease() -> Any:
    from tests.store.harness import LEASE

    return LEASE


async def test_a_key_that_moves_stands_still_until_what_runs_has_ended(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    """A09 while it moves: nothing of it starts in its new place while something of it runs in the old one."""
    before = Program(shared_database, clock, 2, limits=Concurrency(1, by="account"))
    await stack.enter_async_context(before.app)
    store = await before.app.opened()
    await before.fill(2)
    running = await before.queue.claim(100)
    assert len(running) == len(ACCOUNTS)
    moving = {account for account in ACCOUNTS if partition_for(account, 2) != partition_for(account, 4)}
    assert 0 < len(moving) < len(ACCOUNTS)
    seen: list[set[str | None]] = []

    async def rest() -> None:
        # All partitions, old and new: what may start now?
        claims = []
        for name in await partitions_of(store, "email"):
            claims += (await store.claim(name, lambda: 100, worker=_worker(), lease=_lease())).claims
        seen.append({claim.keys["account"] for claim in claims})
        await running.pop().ack()

    await operations_on(store, rest=rest).partitions.change("email", 4, **OPERATOR)
    started = set().union(*seen)
    assert not started & moving
    after = Program(shared_database, clock, 4, limits=Concurrency(1, by="account"))
    await stack.enter_async_context(after.app)
    assert {claim.keys["account"] for claim in await after.queue.claim(100)} >= moving


async def test_what_a_key_has_spent_moves_with_it(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    """A05: a rate is not refilled by moving, and a refill is not lost by it."""
    limits = [Rate(2, per="1m", by="account"), Rate(3, per="1h", by="account", rolling=True)]
    program = Program(shared_database, clock, 2, limits=limits)
    await stack.enter_async_context(program.app)
    store = await program.app.opened()
    await program.fill(6)
    await program.queue.ack(await program.queue.claim(1_000))
    await change(store, 5)
    wider = Program(shared_database, clock, 5, limits=limits)
    await stack.enter_async_context(wider.app)
    assert await wider.queue.claim(1_000) == []
    clock.advance("1m")
    third = await wider.queue.claim(1_000)
    assert Counter(claim.keys["account"] for claim in third) == dict.fromkeys(ACCOUNTS, 1)
    await wider.queue.ack(third)
    clock.advance("2m")
    assert await wider.queue.claim(1_000) == []


async def test_what_the_whole_queue_has_spent_outlives_dividing_it_and_making_it_whole(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    """A limit that crosses partitions has one state with them, and the same one without."""
    limits = [Rate(5, per="1h"), Rate(4, per="2h", rolling=True), Concurrency(3)]
    whole = Program(shared_database, clock, 1, limits=limits)
    await stack.enter_async_context(whole.app)
    store = await whole.app.opened()
    await whole.fill()
    held = await whole.queue.claim(100)
    assert len(held) == 3
    await whole.queue.ack(held[:2])

    async def startable() -> int:
        claims = []
        for name in await partitions_of(store, "email"):
            claims += (await store.claim(name, lambda: 100, worker=_worker(), lease=_lease())).claims
        return len(claims)

    await change(store, 4, [held[2]], by=("account",))
    assert await startable() == 1, "three of four are spent"
    assert await startable() == 0
    clock.advance("31s")
    await store.reap()
    for name in await partitions_of(store, "email"):
        await store.run(policies.move_misrouted(name))
    await change(store, 1)
    assert await startable() == 0, "four of four are spent"
    clock.advance("2h")
    assert await startable() == 3


async def test_a_sequence_keeps_its_order_and_its_place(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    """C07: in strict order across the change, behind a job that waits for another attempt too."""
    limits = [Sequence(by="account")]
    program = Program(shared_database, clock, 1, limits=limits)
    await stack.enter_async_context(program.app)
    store = await program.app.opened()
    await program.fill(4)
    first = await program.queue.claim(100)
    for claim in first:
        await claim.retry(delay="10s")
    await change(store, 4, by=("account",))
    wider = Program(shared_database, clock, 4, limits=limits)
    await stack.enter_async_context(wider.app)
    assert await wider.queue.claim(100) == [], "a job that will be tried again keeps its place"
    clock.advance("10s")
    order: dict[Any, list[int]] = {account: [] for account in ACCOUNTS}
    while claims := await wider.queue.claim(100):
        for claim in claims:
            order[claim.keys["account"]].append((*claim.args, 0)[1])
        await wider.queue.ack(claims)
    assert order == {account: [0, 1, 2, 3] for account in ACCOUNTS}


async def test_a_producer_that_knows_the_old_width_breaks_nothing(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    """Its jobs go where their keys were; they do not start there, and are moved."""
    old = Program(shared_database, clock, 2, limits=Concurrency(1, by="account"))
    await stack.enter_async_context(old.app)
    store = await old.app.opened()
    await change(store, 4)
    new = Program(shared_database, clock, 4, limits=Concurrency(1, by="account"))
    await stack.enter_async_context(new.app)
    await old.fill()
    assert await queues(store) == homes(2)
    await new.fill()
    first = await new.queue.claim(1_000)
    assert Counter(claim.keys["account"] for claim in first) == dict.fromkeys(ACCOUNTS, 1)
    for name in await partitions_of(store, "email"):
        await store.run(policies.move_misrouted(name))
    assert await new.queue.claim(1_000) == [], "each key has one in flight already"
    await new.queue.ack(first)
    second = await new.queue.claim(1_000)
    assert Counter(claim.keys["account"] for claim in second) == dict.fromkeys(ACCOUNTS, 1)
    clock.advance("1m")
    await old.send.enqueue(ACCOUNTS[0])
    assert (await old.queue.explain()).next_up is not None
    assert (await queues(store))[_home(ACCOUNTS[0], 4)] == 1, "it has learned the new width meanwhile"


async def test_a_job_that_waits_for_its_key_to_move_says_so(
    database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    program = Program(database, clock, 2, limits=Concurrency(1, by="account"))
    await stack.enter_async_context(program.app)
    store = await program.app.opened()
    await program.fill()
    (moving, *_) = [account for account in ACCOUNTS if partition_for(account, 2) != partition_for(account, 4)]
    await program.queue.claim(100)
    await begin(store, 4)
    job = await program.send.enqueue(moving)
    await program.queue.claim(100)
    told = await job.explain()
    assert "moving" in [str(hold.reason) for hold in told.holds]


async def test_a_change_that_was_broken_off_goes_on(
    database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    program = Program(database, clock, 4, limits=Concurrency(1, by="account"))
    await stack.enter_async_context(program.app)
    store = await program.app.opened()
    await program.fill(2)
    running = await program.queue.claim(100)
    await begin(store, 8)
    with pytest.raises(ConfigurationError, match=r"on its way from 4 to 8 partitions.*--to 4 --abandon"):
        await change(store, 6)
    await change(store, 8, running)
    assert (await queues(store)) == homes(8)
    assert (await planned(store, "email", 8)).is_empty


async def test_what_operators_have_changed_holds_in_new_partitions(
    database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    """O01."""
    program = Program(database, clock, 1, limits=Concurrency(1, by="account"))
    await stack.enter_async_context(program.app)
    store = await program.app.opened()
    await program.app.operations.queues.pause("email", keys={"account": "account-1"})
    await program.fill()
    await change(store, 4, by=("account",))
    for name in await partitions_of(store, "email"):
        claimed = await store.claim(name, lambda: 100, worker=_worker(), lease=_lease())
        assert "account-1" not in {claim.keys["account"] for claim in claimed.claims}


async def test_a_change_that_would_break_order_or_limits_is_refused(
    database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    program = Program(database, clock, 1, limits=Sequence(by="account"), partition_by=())
    await stack.enter_async_context(program.app)
    store = await program.app.opened()
    with pytest.raises(InvalidPolicy, match="nothing keeps its order"):
        await planned(store, "email", 2, ("number",))
    with pytest.raises(ConfigurationError, match="say by which key"):
        await planned(store, "email", 2)
    await change(store, 2, by=("account",))
    with pytest.raises(ConfigurationError, match="partitioned by account"):
        await planned(store, "email", 3, ("number",))
    with pytest.raises(ConfigurationError, match="is a partition"):
        await planned(store, "email__p1", 3)


async def test_jobs_that_lack_the_key_to_partition_by_are_let_run_first(
    database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    program = Program(database, clock, 1, partition_by=())
    await stack.enter_async_context(program.app)
    store = await program.app.opened()
    await program.fill()
    before = await store.policy("email")
    told = "24 waiting jobs do not carry the key 'account'.* --to 2 --by account --accept-missing-keys"
    for intent in ({**OPERATOR, "dry_run": True}, OPERATOR):
        with pytest.raises(InvalidPolicy, match=told):
            await operations_on(store).partitions.change("email", 2, by=("account",), **intent)
    assert await store.run(records.queues()) == ["email"], "what is refused has not begun"
    assert await store.policy("email") == before
    await program.queue.ack(await program.queue.claim(100))
    await change(store, 2, by=("account",))


async def test_jobs_without_the_key_to_partition_by_go_together_where_that_is_accepted(
    database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    program = Program(database, clock, 1, partition_by=())
    await stack.enter_async_context(program.app)
    store = await program.app.opened()
    await program.fill()
    await program.send.using(delay="1h").enqueue("account-0")
    await operations_on(store).partitions.change("email", 2, by=("account",), accept_missing_keys=True, **OPERATOR)
    assert len(await queues(store)) == 1
    assert (await queues(store)).total() == 25


async def test_a_change_that_has_begun_goes_on_with_jobs_that_come_without_the_key(
    database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    """Producers that do not know of it yet send them."""
    program = Program(database, clock, 1, partition_by=())
    await stack.enter_async_context(program.app)
    store = await program.app.opened()
    await program.send.enqueue("account-0")
    held = await program.queue.claim(1)

    async def rest() -> None:
        await program.send.enqueue("account-1")
        await held.pop().ack()

    found = await store.policy("email")
    assert found is not None
    await repartition.divide(store, begun(found.policy, 2, ("account",)), found.version)
    assert [each.check for each in await diagnosed(store)] == ["partitions"], "also before any other one knows of it"
    await program.send.enqueue("account-1")
    await operations_on(store, rest=rest).partitions.change("email", 2, **OPERATOR)
    assert (await planned(store, "email", 2)).is_empty


async def test_a_plan_counts_jobs_that_no_claim_has_seen_yet(
    database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    program = Program(database, clock, 1, fair=Fair(by="account"))
    await stack.enter_async_context(program.app)
    await program.fill(2)
    plan = await planned(await program.app.opened(), "email", 4, ("account",))
    assert plan.waiting == 48 - homes(4, 2)["email"]


async def test_a_dry_run_writes_nothing(shared_database: Database, clock: ManualClock, stack: AsyncExitStack) -> None:
    """O13: what it counts is what a change then moves, though no claim has seen it before or after."""
    program = Program(shared_database, clock, 2, fair=Fair(by="account"), limits=[Concurrency(2, by="account")])
    await stack.enter_async_context(program.app)
    store = await program.app.opened()
    await program.fill()
    running, ended = (await program.queue.claim(1))[0], (await program.queue.claim(1))[0]
    await ended.ack()
    await program.fill(2)
    await program.send.using(delay="1m").enqueue("account-3")
    clock.advance("2m")
    before = await everything(program.app.url)
    dry = await operations_on(store).partitions.change("email", 3, actor="ops", dry_run=True)
    assert (await planned(store, "email", 3)) == dry.plan
    assert await everything(program.app.url) == before
    await running.ack()
    done = await change(store, 3)
    assert done.moved == dry.plan.waiting > 0


async def test_producers_and_workers_go_on_while_the_width_changes(
    shared_database: Database, stack: AsyncExitStack
) -> None:
    """Nothing is lost, nothing runs twice, and no key ever has more in flight than its limit."""
    limits = [Concurrency(2, by="account"), Concurrency(9)]
    program = Program(shared_database, None, 2, limits=limits, fair=Fair(by="account"))
    await stack.enter_async_context(program.app)
    store = await program.app.opened()
    others = await shared_database.open()
    stop = asyncio.Event()
    flying: Counter[Any] = Counter()
    done: Counter[Any] = Counter()
    stored: list[Any] = []

    async def produce() -> None:
        for n in range(12):
            stored.extend(await program.app.enqueue_many([program.send.call(each, n) for each in ACCOUNTS]))

    async def work(own: Store) -> None:
        while not stop.is_set() or len(done) < len(stored):
            for name in await partitions_of(own, "email"):
                claims = (await own.claim(name, lambda: 5, worker=_worker(), lease=_lease())).claims
                for claim in claims:
                    flying[claim.keys["account"]] += 1
                assert max(flying.values(), default=0) <= 2, flying
                assert flying.total() <= 9, flying
                await asyncio.sleep(0)
                for claim in claims:
                    flying[claim.keys["account"]] -= 1
                    done[claim.id] += 1
                await _settle(own, claims)
                await own.run(policies.move_misrouted(name))

    async def rest() -> None:
        await asyncio.sleep(0)

    async def resize() -> None:
        for width in (5, 3, 8):
            await operations_on(store, rest=rest).partitions.change("email", width, **OPERATOR)
        stop.set()

    async with asyncio.timeout(120):
        await asyncio.gather(produce(), work(store), work(others), resize())
    assert done == {job.id: 1 for job in stored}


async def _settle(store: Store, claims: Any) -> None:
    from tests.store.harness import finish

    await soon(finish(store, claims))


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 8), (8, 3), (4, 1)])
async def test_the_newest_number_of_a_key_moves_with_it(
    database: Database, clock: ManualClock, stack: AsyncExitStack, before: int, after: int
) -> None:
    """U01: older jobs that wait and move bring nothing back."""
    numbers: Any = {"fair": Fair(by="account", weight=lambda c: c["n"], charge="count")}
    numbers["limits"] = [Concurrency(lambda c: 3 * c["n"], by="account")]
    program = Program(database, clock, before, **numbers)
    await stack.enter_async_context(program.app)
    store = await program.app.opened()
    for delay in (None, "1h"):
        old = program.send.using(context={"n": 1}, delay=delay)
        await program.app.enqueue_many([old.call(account, 0) for account in ACCOUNTS for _ in range(9)])
    newest = [program.send.using(context={"n": 1 + n % 2}, priority=9).call(a, 1) for n, a in enumerate(ACCOUNTS)]
    # The jobs that have brought the newest numbers have ended when the key moves.
    for job in await program.app.enqueue_many(newest):
        await job.cancel()
    await change(store, after, by=("account",))
    clock.advance("2h")
    for name in await partitions_of(store, "email"):
        home = [n for n, account in enumerate(ACCOUNTS) if _home(account, after) == name]
        want = 3 * sum(1 + n % 2 for n in home)
        half, rest = [
            Counter(each.keys["account"] for each in await claim_all(store, name, count))
            for count in (want // 3, 1_000)
        ]
        # By weight, as far as it goes; and in all as many as each may have.
        assert half == {ACCOUNTS[n]: 1 + n % 2 for n in home}
        assert half + rest == {ACCOUNTS[n]: 3 * (1 + n % 2) for n in home}
