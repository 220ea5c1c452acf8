"""C12: after a step back of the database's clock, queue time goes on from its latest instant at the clock's own pace,
also when the step forward before it was the mistake."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from fairlane import App, Breaker, Concurrency, Limit, Outcome, Rate, Unique
from fairlane.clock import SECOND, ManualClock, as_datetime
from fairlane.store import schedules
from fairlane.store.boards import QueueClock, QueueTime
from fairlane.store.postgres.grants import grants
from tests.store.by_hand import url_of
from tests.store.harness import Database

HOUR = 3_600 * SECOND
SET_CLOCK = """
create or replace function fairlane.wall() returns bigint
language sql volatile
as $$ select {now}::bigint $$
"""


@dataclass
class Machine:
    """A database whose clock the test sets. `given` is the clock of its programs; without one, the server's counts."""

    database: Database
    clock: ManualClock
    given: ManualClock | None

    async def set(self) -> None:
        if self.given is None:
            connection = await asyncpg.connect(self.database.url)
            await connection.execute(SET_CLOCK.format(now=self.clock.now()))
            await connection.close()

    async def advance(self, by: str) -> None:
        """Time passes."""
        self.clock.advance(by)
        await self.set()

    async def step(self, by: int) -> None:
        """The clock is set, and no time passes."""
        self.clock.set(self.clock.now() + by)
        await self.set()


@pytest.fixture
async def machine(
    request: pytest.FixtureRequest, shared_database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> Machine:
    # Time passes for the server and for the process that asks it alike.
    monkeypatch.setattr("fairlane.store.postgres.connections.SystemClock", lambda: clock)
    machine = Machine(shared_database, clock, clock if request.param == "given" else None)
    await machine.set()
    return machine


STORES = ["sqlite", "postgres"]
on_every_clock = pytest.mark.parametrize(
    ("shared_place", "machine"),
    [("sqlite-file", "given"), ("postgres", "given"), ("postgres", "server's")],
    ids=["sqlite", "postgres, clock given", "postgres"],
    indirect=True,
)


class Program:
    def __init__(self, machine: Machine, *limits: Limit, **options: Any) -> None:
        self.app = App(url_of(machine.database), clock=machine.given)
        self.queue = self.app.queue("email", limits=limits, keys=["account"])

        async def send(account: str, number: int = 0) -> None: ...

        self.send = self.app.task(queue="email", name="send", max_attempts=5, **options)(send)

    async def fill(self, count: int) -> None:
        await self.app.enqueue_many([self.send.call("acme", n) for n in range(count)])


Open = Callable[..., Awaitable[Program]]


@pytest.fixture
async def opened(machine: Machine, stack: AsyncExitStack) -> Open:
    async def opened(*limits: Limit, **options: Any) -> Program:
        program = Program(machine, *limits, **options)
        await stack.enter_async_context(program.app)
        return program

    return opened


STEPS = [-10 * SECOND, -HOUR]


async def now(program: Program) -> int:
    """What a worker asks every few seconds, whether it has jobs or not."""
    return (await (await program.app.opened()).keep_time()).now


def test_a_queue_clock_goes_on_from_its_latest_instant(clock: ManualClock) -> None:
    queue_clock = QueueClock(clock)
    began = queue_clock.now()
    clock.advance("10s")
    assert queue_clock.time() == QueueTime(began + 10 * SECOND)
    clock.set(began)
    assert queue_clock.time() == QueueTime(began + 10 * SECOND, 10 * SECOND)
    clock.advance("3s")
    assert queue_clock.time() == QueueTime(began + 13 * SECOND, 10 * SECOND)
    assert queue_clock.time().wall == clock.now()


def test_a_queue_clock_goes_by_what_others_have_stored_if_that_is_later(clock: ManualClock) -> None:
    queue_clock = QueueClock(clock)
    queue_clock.learn(0, clock.now() + HOUR)
    assert queue_clock.time() == QueueTime(clock.now() + HOUR, HOUR)
    queue_clock.learn(0, clock.now())
    assert queue_clock.time() == QueueTime(clock.now() + HOUR, HOUR)


@on_every_clock
@pytest.mark.parametrize("step", STEPS)
async def test_queue_time_goes_on_from_the_latest_instant_at_the_clocks_pace(
    machine: Machine, opened: Open, step: int
) -> None:
    program = await opened()
    began = await now(program)
    await machine.advance("7s")
    await program.queue.claim()
    await machine.step(step)
    assert await now(program) == began + 7 * SECOND
    await machine.advance("250ms")
    assert await now(program) == began + 7_250_000
    again = await opened()
    assert await now(again) == began + 7_250_000, "whoever comes later goes by it too"


@on_every_clock
@pytest.mark.parametrize("step", STEPS)
async def test_a_fleet_that_is_restarted_meanwhile_goes_on_from_the_latest_instant(
    machine: Machine, opened: Open, step: int
) -> None:
    """What was kept is in the database: no process has seen both sides of the step."""
    program = await opened(Rate(4, per="1m"))
    await program.fill(20)
    (held, *_) = await program.queue.claim(20, lease="1m")
    await machine.advance("30s")
    await now(program)
    await program.app.close()
    await machine.step(step)
    first, second = await opened(Rate(4, per="1m")), await opened(Rate(4, per="1m"))
    assert [len(await each.queue.claim(20)) for each in (first, second)] == [2, 0]
    await machine.advance("15s")
    assert [len(await each.queue.claim(20)) for each in (second, first)] == [1, 0]
    await machine.advance("16s")
    reaped = [await (await each.app.opened()).reap() for each in (second, first)]
    assert held.id in {each.job for each in reaped[0].settled}
    assert reaped[1].settled == []


@on_every_clock
@pytest.mark.parametrize("times", [1, 3])
async def test_every_step_is_made_up_for(machine: Machine, opened: Open, times: int) -> None:
    """Forward by 10 s and back, or a clock that is set back again and again."""
    first, second = await opened(), await opened()
    began = await now(first)
    for _ in range(times):
        await machine.step(10 * SECOND)
        assert await now(second) == await now(first)
        await machine.step(-20 * SECOND)
        assert await now(first) == await now(second)
        await machine.advance("1s")
        assert await now(second) == await now(first)
    assert await now(first) == began + times * 11 * SECOND


@on_every_clock
async def test_a_step_forward_opens_a_rate_by_no_more_than_its_burst(machine: Machine, opened: Open) -> None:
    """What a step forward may cost, as the docs state it."""
    program = await opened(Rate(60, per="1m", burst=5))
    await program.fill(50)
    assert len(await program.queue.claim(50)) == 5
    await machine.step(3 * SECOND)
    assert len(await program.queue.claim(50)) == 3
    await machine.step(HOUR)
    assert len(await program.queue.claim(50)) == 5


@on_every_clock
async def test_a_step_forward_by_mistake_does_not_freeze_the_queue_when_it_is_undone(
    machine: Machine, opened: Open
) -> None:
    program = await opened(Rate(5, per="10s"))
    await program.fill(20)
    await machine.step(HOUR)
    await program.queue.ack(await program.queue.claim(20))
    await machine.step(-HOUR)
    assert await program.queue.claim(20) == []
    await machine.advance("10s")
    assert len(await program.queue.claim(20)) == 5


@on_every_clock
@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("step", STEPS)
async def test_a_rate_is_neither_shut_nor_exceeded_because_the_clock_is_set_back(
    machine: Machine, opened: Open, step: int, rolling: bool
) -> None:
    program = await opened(Rate(4, per="1m", rolling=rolling))
    await program.fill(20)
    assert len(await program.queue.claim(20)) == 4
    await machine.advance("30s")
    await machine.step(step)
    assert len(await program.queue.claim(20)) == (0 if rolling else 2)
    await machine.advance("30s")
    assert len(await program.queue.claim(20)) == (4 if rolling else 2)


@on_every_clock
@pytest.mark.parametrize("step", STEPS)
async def test_the_jobs_of_a_dead_worker_are_taken_over_in_time_though_the_clock_is_set_back(
    machine: Machine, opened: Open, step: int
) -> None:
    program = await opened(Concurrency(1))
    await program.fill(2)
    (held,) = await program.queue.claim(5, lease="30s")
    await machine.advance("10s")
    await machine.step(step)
    store = await program.app.opened()
    await store.keep_time()
    assert (await store.reap()).settled == [], "nor sooner"
    await machine.advance("21s")
    assert [each.job for each in (await store.reap()).settled] == [held.id]


@on_every_clock
@pytest.mark.parametrize("step", STEPS)
async def test_a_lease_that_is_renewed_after_a_step_back_is_held(machine: Machine, opened: Open, step: int) -> None:
    program = await opened()
    await program.fill(1)
    (held,) = await program.queue.claim(lease="30s")
    await machine.advance("20s")
    await machine.step(step)
    await program.queue.renew([held])
    await machine.advance("20s")
    store = await program.app.opened()
    await store.keep_time()
    assert (await store.reap()).settled == []
    await held.ack()


@on_every_clock
@pytest.mark.parametrize("step", STEPS)
async def test_delayed_jobs_and_retries_are_due_in_time_though_the_clock_is_set_back(
    machine: Machine, opened: Open, step: int
) -> None:
    program = await opened()
    await program.send.using(delay="1m").enqueue("acme")
    await program.send.enqueue("globex")
    (held,) = await program.queue.claim(5)
    await held.retry(delay="1m")
    await machine.advance("30s")
    assert await program.queue.claim(5) == []
    await machine.step(step)
    assert await program.queue.claim(5) == []
    await machine.advance("29s")
    assert await program.queue.claim(5) == []
    await machine.advance("1s")
    assert {claim.keys["account"] for claim in await program.queue.claim(5)} == {"acme", "globex"}


@on_every_clock
@pytest.mark.parametrize("step", STEPS)
async def test_a_unique_window_ends_in_time_though_the_clock_is_set_back(
    machine: Machine, opened: Open, step: int
) -> None:
    program = await opened()
    once = program.send.using(unique=Unique("acme", window="1m"))
    await once.enqueue("acme")
    await program.queue.ack(await program.queue.claim())
    await machine.advance("30s")
    await machine.step(step)
    assert (await once.enqueue("acme")).outcome is Outcome.DUPLICATE
    await program.queue.claim()
    await machine.advance("31s")
    assert (await once.enqueue("acme")).outcome is Outcome.ENQUEUED


@on_every_clock
@pytest.mark.parametrize("step", STEPS)
async def test_a_breaker_probes_in_time_though_the_clock_is_set_back(machine: Machine, opened: Open, step: int) -> None:
    program = await opened(Breaker(failures=2, within="1m", cooldown="1m"))
    await program.fill(6)
    for claim in await program.queue.claim(2):
        await claim.dead("it is broken")
    assert await program.queue.claim(5) == []
    await machine.advance("30s")
    await machine.step(step)
    assert await program.queue.claim(5) == []
    await machine.advance("31s")
    assert len(await program.queue.claim(5)) == 1


@on_every_clock
async def test_a_time_of_day_goes_by_the_wall_clock_whatever_queue_time_is(machine: Machine, opened: Open) -> None:
    """`run_at`, and slots of schedules: after a step forward that was undone, queue time is an hour ahead."""
    program = await opened()
    fired = program.app.schedule("0 * * * *", program.send.call("cron"), name="hourly")
    assert fired.name == "hourly"
    await program.app.fire_schedules()
    await program.queue.claim()
    await machine.step(HOUR)
    await program.queue.claim()
    await machine.step(-HOUR)
    await now(program)
    at = as_datetime(machine.clock.now()) + timedelta(minutes=10)
    for calls in ([program.send.using(run_at=at).call("one")], [program.send.using(run_at=at).call("many")] * 400):
        await program.app.enqueue_many(calls)
    await machine.advance("9m59s")
    assert await program.queue.claim(500) == []
    await machine.advance("1s")
    assert len(await program.queue.claim(500)) == 401
    store = await program.app.opened()
    (row,) = await store.run(schedules.schedules())
    assert row.next_at is not None
    assert row.last_slot is None
    due = as_datetime(row.next_at)
    assert due - as_datetime(machine.clock.now()) < timedelta(hours=1)
    await machine.step(row.next_at - machine.clock.now())
    await program.app.fire_schedules()
    assert [each.last_slot for each in await store.run(schedules.schedules())] == [row.next_at]


@pytest.mark.parametrize(
    ("shared_place", "machine"), [("sqlite-file", "given"), ("postgres", "server's")], ids=STORES, indirect=True
)
async def test_what_producers_store_before_a_worker_notices_is_due_in_time(machine: Machine, opened: Open) -> None:
    program = await opened()
    await program.queue.claim()
    await machine.step(-HOUR)
    await program.send.using(delay="10m").enqueue("delay")
    await program.send.using(run_at=as_datetime(machine.clock.now()) + timedelta(minutes=10)).enqueue("run_at")
    await program.send.enqueue("at once")
    assert [claim.keys["account"] for claim in await program.queue.claim(5)] == ["at once"]
    await machine.advance("9m59s")
    assert await program.queue.claim(5) == []
    await machine.advance("1s")
    assert {claim.keys["account"] for claim in await program.queue.claim(5)} == {"delay", "run_at"}


@pytest.mark.parametrize("shared_place", ["postgres"], indirect=True)
@pytest.mark.parametrize("machine", ["server's"], indirect=True)
@pytest.mark.parametrize("is_noticed", [True, False])
async def test_jobs_of_any_language_are_due_in_time_though_the_clock_is_set_back(
    machine: Machine, opened: Open, is_noticed: bool
) -> None:
    program = await opened()
    await program.queue.claim()
    connection = await asyncpg.connect(machine.database.url)

    async def enqueue(account: str, **options: object) -> str:
        named = ", ".join(f"{name} => ${place}" for place, name in enumerate(options, 2))
        row = await connection.fetchrow(
            f"select * from fairlane.enqueue('send', keys => jsonb_build_object('account', $1::text)::json, {named})",
            account,
            *options.values(),
        )
        assert row is not None
        return str(row["outcome"])

    window = {"queue": "email", "unique_key": '"acme"', "unique_window": timedelta(minutes=10)}
    assert await enqueue("acme", **window) == "enqueued"
    await program.queue.ack(await program.queue.claim())
    await machine.step(-HOUR)
    if is_noticed:
        await now(program)
    assert await enqueue("acme", **window) == "duplicate"
    await enqueue("delay", queue="email", delay=timedelta(minutes=10))
    await enqueue("run_at", queue="email", run_at=as_datetime(machine.clock.now()) + timedelta(minutes=10))
    assert await program.queue.claim(5) == []
    await machine.advance("9m59s")
    assert await program.queue.claim(5) == []
    await machine.advance("1s")
    assert {claim.keys["account"] for claim in await program.queue.claim(5)} == {"delay", "run_at"}
    assert await enqueue("acme", **window) == "enqueued"
    await connection.close()


async def test_only_the_role_of_workers_keeps_queue_time(
    postgres_url: str, connection: asyncpg.Connection[Any]
) -> None:
    names = {purpose: f"{purpose}_{uuid4().hex[:8]}" for purpose in ("viewer", "worker")}
    for name in names.values():
        await connection.execute(f"create role {name}")
    await connection.execute(grants(names))
    try:
        for reading, purpose, is_kept in [(10, "viewer", 0), (10, "worker", 10), (9, "viewer", 10), (9, "worker", 10)]:
            await connection.execute("reset role")
            await connection.execute(SET_CLOCK.format(now=reading * HOUR))
            await connection.execute(f"set role {names[purpose]}")
            assert await connection.fetchval("select fairlane.keep_instant(null)") == 10 * HOUR
            assert await connection.fetchval("select fairlane.stored_latest()") == is_kept * HOUR
        assert await connection.fetchval("select fairlane.stored_ahead()") == HOUR
    finally:
        for name in names.values():
            await connection.execute(f"reset role; drop owned by {name}; drop role {name}")
