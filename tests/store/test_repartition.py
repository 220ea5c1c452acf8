"""A change of the number of partitions that was killed at any step: whoever comes ends it, and nothing goes wrong."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from fairlane import App, Concurrency, Outcome, Rate, State
from fairlane.clock import SECOND, ManualClock
from fairlane.job import Claim
from fairlane.operations.requests import partitions_of
from fairlane.policy.partitions import LEARNED_AFTER, Phase, begun, in_phase, next_phase, partition_for, phase_of
from fairlane.policy.policy import Policy
from fairlane.store import operators, policies, repartition
from fairlane.store.audit import Note
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Store
from fairlane.store.repartition import advance
from fairlane.worker.upkeep import move_misrouted, place_of
from tests.store.by_hand import url_of
from tests.store.harness import LEASE, WORKER, Database, finish, operations_on
from tests.store.repartition_victim import change_and_die

ACCOUNTS = [f"account-{n}" for n in range(12)]
OPERATOR: dict[str, Any] = {"actor": "ops"}
NOTE = Note(actor="ops", action="partition")
BEFORE, AFTER = 3, 5
MOST_WRITES = 500


class Program:
    def __init__(self, database: Database, clock: ManualClock | None, queue: str = "email", **options: Any) -> None:
        self.app = App(url_of(database), clock=clock)
        self.name = queue
        options = {"partitions": BEFORE, "partition_by": "account", **options}
        self.queue = self.app.queue(queue, **options)

        async def send(account: str, number: int = 0) -> None: ...

        self.send = self.app.task(queue=queue, name=f"{queue}.send")(send)

    async def fill(self, each: int) -> list[Any]:
        calls = [self.send.call(account, n) for n in range(each) for account in ACCOUNTS]
        return list(await self.app.enqueue_many(calls))


@asynccontextmanager
async def open_program(database: Database, queue: str, **options: Any) -> AsyncIterator[Program]:
    program = Program(database, None, queue, **options)
    async with program.app:
        yield program


class Ledger:
    """Runs jobs of a queue from all its partitions, and holds what it sees against the limits."""

    def __init__(self, store: Store, queue: str, most: int) -> None:
        self.store, self.queue, self.most = store, queue, most
        self.started: Counter[Any] = Counter()
        self.order: defaultdict[Any, list[int]] = defaultdict(list)
        self.flying: Counter[Any] = Counter()

    async def claim(self, most: int = 100) -> list[Claim]:
        claims: list[Claim] = []
        for name in await partitions_of(self.store, self.queue):
            left = most - len(claims)
            found = await self.store.claim(name, lambda left=left: left, worker=WORKER, lease=LEASE)  # type: ignore[misc]
            claims += found.claims
        for claim in claims:
            account = claim.keys["account"]
            self.started[claim.id] += 1
            self.order[account].append(_number(claim))
            self.flying[account] += 1
            assert self.flying[account] <= self.most, f"{account} runs in two places"
        return claims

    async def finish(self, claims: list[Claim]) -> None:
        for claim in claims:
            self.flying[claim.keys["account"]] -= 1
        await finish(self.store, claims)


def _number(claim: Claim) -> int:
    args = msgspec.json.decode(claim.payload)
    return int(args[0][1] if isinstance(args, list) else args["args"][1])


async def _is_resting(store: Store, queue: str) -> bool:
    found = await store.policy(queue)
    assert found is not None
    return phase_of(found.policy) is Phase.RESTING


async def _width(store: Store, queue: str) -> int:
    found = await store.policy(queue)
    assert found is not None
    return 1 if found.policy.partition is None else found.policy.partition.width


async def _by_upkeep(store: Store, queue: str, rest: Callable[[], Awaitable[None]]) -> None:
    """As every worker does from time to time."""
    while not await _is_resting(store, queue):
        await move_misrouted(store, queue, await place_of(store, queue))
        await rest()


async def _by_the_same_command(store: Store, queue: str, rest: Callable[[], Awaitable[None]]) -> None:
    await operations_on(store, rest=rest).partitions.change(queue, AFTER, **OPERATOR)
    assert await _width(store, queue) == AFTER


async def _by_abandoning_it(store: Store, queue: str, rest: Callable[[], Awaitable[None]]) -> None:
    await operations_on(store, rest=rest).partitions.change(queue, BEFORE, abandon=True, **OPERATOR)
    assert await _width(store, queue) == BEFORE


async def _by_another_change(store: Store, queue: str, rest: Callable[[], Awaitable[None]]) -> None:
    await operations_on(store, rest=rest).partitions.change(queue, 2, abandon=True, **OPERATOR)
    assert await _width(store, queue) == 2


ENDED = [_by_upkeep, _by_the_same_command, _by_abandoning_it, _by_another_change]


@pytest.mark.usefixtures("producers_know_at_once")
@pytest.mark.parametrize("ended", ENDED)
async def test_a_change_that_was_killed_at_any_step_is_ended_by_whoever_comes(
    shared_database: Database, ended: Callable[..., Awaitable[None]]
) -> None:
    """F13: nothing is lost, nothing runs twice, no key runs in two places, and each lane keeps its order."""
    for writes in range(MOST_WRITES):
        limits = [Concurrency(1, by="account")]
        async with open_program(shared_database, f"email-{writes}", limits=limits) as program:
            store = await program.app.opened()
            await program.app.operations.queues.pause(program.name, keys={"account": "nobody"})
            jobs = await program.fill(4)
            ledger = Ledger(store, program.name, 1)
            running = await ledger.claim(6)
            dying = asyncio.ensure_future(change_and_die(shared_database, program.name, AFTER, writes))

            async def rest(ledger: Ledger = ledger, running: list[Claim] = running) -> None:
                await ledger.finish(await ledger.claim(3) + running[:1])
                del running[:1]

            for _ in range(8):
                await rest()
            was_killed = await dying
            await ended(store, program.name, rest)
            assert await _is_resting(store, program.name)
            while claims := await ledger.claim():
                await ledger.finish(claims)
        assert ledger.started == {job.id: 1 for job in jobs}, f"killed before write {writes}"
        assert ledger.order == {account: [0, 1, 2, 3] for account in ACCOUNTS}, f"killed before write {writes}"
        if not was_killed:
            assert writes > 2 * AFTER
            return
    raise AssertionError("the change was never done")


@pytest.mark.usefixtures("producers_know_at_once")
@pytest.mark.parametrize(("before", "after"), [(BEFORE, AFTER), (AFTER, 2), (1, 3), (3, 1)])
async def test_what_a_key_has_spent_outlives_a_kill_at_any_step(
    shared_database: Database, before: int, after: int
) -> None:
    """A05, F13: a rate is not refilled because the process that moved its state was killed in the middle."""
    limits = [Rate(2, per="1d", by="account"), Rate(24, per="1d")]
    for writes in range(MOST_WRITES):
        async with open_program(shared_database, f"email-{writes}", partitions=before, limits=limits) as program:
            store = await program.app.opened()
            await program.fill(4)
            ledger = Ledger(store, program.name, 2)
            await ledger.finish(await ledger.claim(17))
            was_killed = await change_and_die(shared_database, program.name, after, writes)

            async def rest(ledger: Ledger = ledger) -> None:
                await ledger.finish(await ledger.claim())

            await _by_upkeep(store, program.name, rest)
            await rest()
        assert {len(numbers) for numbers in ledger.order.values()} == {2}, f"killed before write {writes}"
        assert ledger.started.total() == 24, f"killed before write {writes}"
        if not was_killed:
            return
    raise AssertionError("the change was never done")


async def test_a_process_that_was_stopped_in_a_step_finds_that_it_is_not_its_own_any_more(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    """Nothing that it has seen before is put in force after others have ended the change, or begun another."""
    program = Program(shared_database, clock)
    await stack.enter_async_context(program.app)
    store = await program.app.opened()
    seen = await store.ask(lambda moment: moment.policies())
    first = begun(seen["email"].policy, AFTER)
    assert await repartition.divide(store, first, seen["email"].version)
    late: list[tuple[Policy, int]] = []
    while not await _is_resting(store, "email"):
        seen = await store.ask(lambda moment: moment.policies())
        first = seen["email"].policy
        late.append((next_phase(first, clock.now()), seen["email"].version))
        for index in range(1, AFTER):
            policy = in_phase(first, index)
            late.append((policy, seen[policy.queue].version if policy.queue in seen else 0))
        await advance(store, "email", NOTE)
        clock.advance(LEARNED_AFTER / SECOND)
    await operations_on(store, rest=_advancing(clock)).partitions.change("email", 2, **OPERATOR)
    before = {name: found.policy.digest for name, found in (await store.ask(lambda moment: moment.policies())).items()}
    assert not any([await repartition.divide(store, *each) for each in late])
    assert {
        name: found.policy.digest for name, found in (await store.ask(lambda moment: moment.policies())).items()
    } == before


def _advancing(clock: ManualClock) -> Callable[[], Awaitable[None]]:
    async def rest() -> None:
        clock.advance("1s")

    return rest


async def test_several_who_go_on_with_a_change_at_once_do_it_once(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    program = Program(shared_database, clock, limits=[Rate(2, per="1d", by="account")])
    await stack.enter_async_context(program.app)
    stores = [await shared_database.open(clock) for _ in range(4)]
    await program.app.enqueue_many([program.send.call(each, n) for n in range(4) for each in ACCOUNTS])
    ledger = Ledger(stores[0], "email", 2)
    await ledger.finish(await ledger.claim(12))
    found = await stores[0].policy("email")
    assert found is not None
    assert await repartition.divide(stores[0], begun(found.policy, AFTER), found.version)
    while not await _is_resting(stores[0], "email"):
        await asyncio.gather(*(advance(store, "email", NOTE) for store in stores))
        clock.advance("1s")
    assert await _width(stores[0], "email") == AFTER
    await ledger.finish(await ledger.claim())
    assert {len(numbers) for numbers in ledger.order.values()} == {2}
    assert not any(
        found.policy.partition.is_changing
        for found in (await stores[0].ask(lambda moment: moment.policies())).values()
        if found.policy.partition is not None
    )


async def test_what_a_producer_sends_through_a_change_runs_in_the_order_in_which_it_was_sent(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    """C07: it learns the new number before keys go on in their new place, so nothing overtakes what it sent before."""
    program = Program(shared_database, clock, limits=[Concurrency(1, by="account")])
    await stack.enter_async_context(program.app)
    store = await shared_database.open(clock)
    ledger = Ledger(store, "email", 1)
    sent = 0

    async def rest() -> None:
        nonlocal sent
        await program.app.enqueue_many([program.send.call(each, sent) for each in ACCOUNTS])
        sent += 1
        await ledger.finish(await ledger.claim(7))
        clock.advance("1s")

    for width in (AFTER, 2, BEFORE):
        await operations_on(store, rest=rest).partitions.change("email", width, **OPERATOR)
        await rest()
    while claims := await ledger.claim():
        await ledger.finish(claims)
        for name in await partitions_of(store, "email"):
            await store.run(policies.move_misrouted(name))
    assert sent > 3 * LEARNED_AFTER // SECOND
    assert ledger.order == {account: list(range(sent)) for account in ACCOUNTS}


@pytest.mark.usefixtures("producers_know_at_once")
async def test_a_unique_key_has_one_live_job_through_a_change_of_partitions(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    """E10: before, in the middle of it, when it is given up, and afterwards."""
    program = Program(shared_database, clock)
    await stack.enter_async_context(program.app)
    store = await program.app.opened()
    held: dict[str, Any] = {}
    for account in ACCOUNTS:
        held[account] = await program.send.using(unique=account).enqueue(account)

    async def nobody_else() -> None:
        for account in ACCOUNTS:
            again = await program.send.using(unique=account).enqueue(account)
            assert (again.outcome, again.id) == (Outcome.DUPLICATE, held[account].id)
        live = (await store.run(operators.find_jobs(JobFilter(), None, 1_000))).jobs
        assert len([job for job in live if job.state is State.READY]) == len(ACCOUNTS)
        clock.advance("10s")  # it has learned how far the change has come

    found = await store.policy("email")
    assert found is not None
    assert await repartition.divide(store, begun(found.policy, AFTER), found.version)
    await nobody_else()
    await operations_on(store).partitions.change("email", BEFORE, abandon=True, **OPERATOR)
    await nobody_else()
    await operations_on(store).partitions.change("email", AFTER, **OPERATOR)
    await nobody_else()
    homes = {f"email__p{n}" if n else "email" for n in (partition_for(each, AFTER) for each in ACCOUNTS)}
    jobs = (await store.run(operators.find_jobs(JobFilter(), None, 1_000))).jobs
    assert {job.queue for job in jobs if job.state is State.READY} == homes
