"""What a job has declared for its death lands when it dies, in the same transaction, whoever or whatever kills it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from uuid import UUID

import msgspec
import pytest

from fairlane.clock import ManualClock
from fairlane.job import BuiltEffects, Claim, NewJob, OnDead, State
from fairlane.policy import Policy
from fairlane.policy.unique import Unique, unique_key
from fairlane.scheduler.settlement import (
    SEEN,
    Cancelled,
    Died,
    Done,
    Failed,
    Interrupted,
    Lost,
    Released,
    Retried,
    RunOutcome,
    Snoozed,
    settle,
)
from fairlane.store import operators, records
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Retention, Store
from tests.store.harness import (
    LEASE,
    MINUTE,
    SECOND,
    Database,
    claim,
    finish,
    hear,
    ids,
    new_jobs,
    soon,
    state_of,
    worker_named,
)

PLAIN = Policy("webhooks")
OTHER = Policy("email")


@pytest.fixture
async def store(database: Database, clock: ManualClock) -> Store:
    opened = await database.open(clock)
    await opened.declare(PLAIN)
    await opened.declare(OTHER)
    return opened


def on_dead(
    *jobs: NewJob,
    put: dict[str, bytes] | None = None,
    delete: tuple[str, ...] = (),
    named: Sequence[NewJob] = (),
) -> bytes:
    effects = BuiltEffects((*jobs, *named), put or {}, delete)
    return OnDead(effects, frozenset(job.id for job in named)).encode()


def mortal(declared: bytes | None, *, max_attempts: int = 1) -> NewJob:
    (job,) = new_jobs(PLAIN, max_attempts=max_attempts)
    return msgspec.structs.replace(job, on_dead=declared)


async def given_mortal(
    store: Store, declared: bytes | None, *, max_attempts: int = 1, is_suspect: bool = False
) -> Claim:
    """A claim of a job that has declared this for its death. A suspect dies of its next loss."""
    job = mortal(declared, max_attempts=max_attempts)
    await store.enqueue([job])
    (held,) = await claim(store, "webhooks")
    if is_suspect:
        (held,) = await suspected(store, [held])
    assert held.id == job.id
    return held


async def suspected(store: Store, held: Sequence[Claim]) -> list[Claim]:
    """The same claims, once their jobs have been lost in company."""
    await finish(store, held, Lost("its process died", SEEN))
    return await claim(store, "webhooks", len(held))


async def followed(store: Store) -> list[Claim]:
    """The follow-ups that have become ready; they are done then."""
    found = await claim(store, "email", 50)
    await finish(store, found)
    return found


# L17: every path.

DEATHS: list[RunOutcome] = [
    Failed("boom", 7),
    Retried("again", 7),
    Died("no further attempt makes sense"),
    Interrupted("worker shut down"),
]


@pytest.mark.parametrize("outcome", DEATHS, ids=lambda outcome: type(outcome).__name__)
async def test_effects_for_death_land_with_every_settlement_that_kills(store: Store, outcome: RunOutcome) -> None:
    await store.run(records.put_value("old", b"0"))
    declared = on_dead(*new_jobs(OTHER, payload=b"[1]"), put={"new": b"1"}, delete=("old",))
    held = await given_mortal(store, declared)
    assert (await store.job(held.id)).has_on_dead
    await finish(store, [held], outcome)
    assert await state_of(store, held.id) is State.DEAD
    assert [each.payload for each in await followed(store)] == [b"[1]"]
    assert await store.run(records.get_value("new")) == b"1"
    assert await store.run(records.get_value("old")) is None


# L17
async def test_effects_for_death_land_when_the_reaper_kills(store: Store, clock: ManualClock) -> None:
    held = await given_mortal(store, on_dead(*new_jobs(OTHER), put={"new": b"1"}), is_suspect=True)
    clock.advance(2 * LEASE.total_seconds())
    reaped = await store.reap()
    assert [(each.job, each.to) for each in reaped.settled] == [(held.id, State.DEAD)]
    assert reaped.next_due is None
    assert await state_of(store, held.id) is State.DEAD
    assert len(await followed(store)) == 1
    assert await store.run(records.get_value("new")) == b"1"
    assert (await store.reap()).settled == []
    assert await followed(store) == []


# L17
async def test_a_batch_of_many_deaths_by_the_reaper_applies_each_once(store: Store, clock: ManualClock) -> None:
    jobs = [mortal(on_dead(*new_jobs(OTHER), put={f"{n}": b"1"}) if n % 2 else None) for n in range(10)]
    living = mortal(on_dead(*new_jobs(OTHER), put={"living": b"1"}), max_attempts=4)
    await store.enqueue([*jobs, living])
    await suspected(store, await claim(store, "webhooks", 5))
    await suspected(store, await claim(store, "webhooks", 6))
    clock.advance(2 * LEASE.total_seconds())
    reaped = await store.reap()
    assert {each.job for each in reaped.settled} == {job.id for job in [*jobs, living]}
    assert reaped.next_due is None
    assert len(await followed(store)) == 5
    assert [await store.run(records.get_value(f"{n}")) for n in range(10)] == [None, b"1"] * 5
    assert await state_of(store, living.id) is State.READY
    assert await store.run(records.get_value("living")) is None


ENDS_ALIVE: list[RunOutcome] = [
    Done(b"1"),
    Cancelled("no longer wanted"),
    Failed("boom", 7),
    Retried("again", 7),
    Snoozed("nap", 7),
    Released("drain"),
    Interrupted("worker shut down"),
]


@pytest.mark.parametrize("outcome", ENDS_ALIVE, ids=lambda outcome: type(outcome).__name__)
@pytest.mark.parametrize("is_asked_to_cancel", [False, True])
async def test_whatever_is_not_death_applies_nothing(
    store: Store, outcome: RunOutcome, is_asked_to_cancel: bool
) -> None:
    held = await given_mortal(store, on_dead(*new_jobs(OTHER), put={"new": b"1"}), max_attempts=2)
    if is_asked_to_cancel:
        await store.cancel(held.id)
    await finish(store, [held], outcome)
    ended = await state_of(store, held.id)
    assert ended is not State.DEAD
    assert ended is State.CANCELLED or not is_asked_to_cancel or isinstance(outcome, Done)
    assert await followed(store) == []
    assert await store.run(records.get_value("new")) is None


async def test_a_job_that_is_cancelled_while_it_waits_applies_nothing(store: Store) -> None:
    job = mortal(on_dead(*new_jobs(OTHER), put={"new": b"1"}))
    await store.enqueue([job])
    assert await store.cancel(job.id) is State.CANCELLED
    assert await followed(store) == []
    assert await store.run(records.get_value("new")) is None


async def test_a_lost_claim_that_was_asked_to_cancel_and_ends_cancelled_applies_nothing(
    store: Store, clock: ManualClock
) -> None:
    held = await given_mortal(store, on_dead(*new_jobs(OTHER)), max_attempts=2)
    await store.cancel(held.id)
    clock.advance(2 * LEASE.total_seconds())
    await store.reap()
    assert await state_of(store, held.id) is State.CANCELLED
    assert await followed(store) == []


# L01
async def test_a_late_death_applies_nothing(store: Store, clock: ManualClock) -> None:
    held = await given_mortal(store, on_dead(*new_jobs(OTHER), put={"new": b"1"}), max_attempts=2)
    clock.advance(2 * LEASE.total_seconds())
    await store.reap()
    assert await store.settle([settle(held, Died("too late"), 0)]) == [held.id]
    assert await state_of(store, held.id) is State.READY
    assert await followed(store) == []
    assert await store.run(records.get_value("new")) is None


# L02, L17
async def test_a_death_and_a_reaper_at_the_same_instant_apply_the_effects_once(shared_database: Database) -> None:
    clock = ManualClock()
    dying, reaping = [await shared_database.open(clock) for _ in range(2)]
    await dying.declare(PLAIN)
    await dying.declare(OTHER)
    for turn in range(20):
        held = await given_mortal(dying, on_dead(*new_jobs(OTHER), put={f"{turn}": b"1"}), is_suspect=True)
        clock.advance(2 * LEASE.total_seconds())
        await soon(asyncio.gather(dying.settle([settle(held, Died("x"), 0)]), reaping.reap(), dying.reap()))
        assert await state_of(dying, held.id) is State.DEAD
        assert len(await followed(dying)) == 1
        assert await dying.run(records.get_value(f"{turn}")) == b"1"


async def test_a_lease_that_is_renewed_in_time_keeps_its_job_from_the_reaper(store: Store, clock: ManualClock) -> None:
    held = await given_mortal(store, on_dead(*new_jobs(OTHER)))
    clock.advance(LEASE.total_seconds() - 1)
    assert (await store.renew([held.lease], LEASE)).gone == []
    clock.advance(2)
    assert (await store.reap()).settled == []
    await finish(store, [held])
    assert await followed(store) == []


# What the follow-ups are.


async def test_follow_ups_keep_their_options_and_count_their_delay_from_the_death(
    store: Store, clock: ManualClock
) -> None:
    (later,) = new_jobs(OTHER, delay=MINUTE, priority=5)
    at = clock.now() + 3_600 * SECOND
    (dated,) = new_jobs(OTHER, run_at=at, max_attempts=7)
    held = await given_mortal(store, on_dead(named=[later, dated]))
    clock.advance(600)
    await store.renew([held.lease], LEASE)
    died_at = clock.now()
    await finish(store, [held], Died("x"))
    record = await store.job(later.id)
    assert (record.state, record.priority, record.due_at) == (State.SCHEDULED, 5, died_at + MINUTE)
    record = await store.job(dated.id)
    assert (record.state, record.max_attempts, record.due_at) == (State.SCHEDULED, 7, at)


async def test_a_follow_up_has_effects_for_its_own_death(store: Store) -> None:
    (follow_up,) = new_jobs(OTHER, max_attempts=1)
    follow_up = msgspec.structs.replace(follow_up, on_dead=on_dead(put={"both": b"1"}))
    held = await given_mortal(store, on_dead(follow_up))
    await finish(store, [held], Died("x"))
    (second,) = await claim(store, "email")
    assert await store.run(records.get_value("both")) is None
    await finish(store, [second], Died("y"))
    assert await store.run(records.get_value("both")) == b"1"


async def test_an_id_that_nobody_gave_is_new_at_every_death(store: Store) -> None:
    (unnamed,), (named,) = new_jobs(OTHER), new_jobs(OTHER)
    held = await given_mortal(store, on_dead(unnamed, named=[named]))
    await finish(store, [held], Died("x"))
    first = ids(await followed(store))
    assert named.id in first
    assert unnamed.id not in first
    assert len(first) == 2


async def test_a_replayed_job_that_dies_again_applies_its_effects_again(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    (unnamed,), (named,) = new_jobs(OTHER), new_jobs(OTHER)
    held = await given_mortal(store, on_dead(unnamed, named=[named], put={"died": b"1"}))
    await finish(store, [held], Died("x"))
    first = ids(await followed(store))
    assert await store.run(records.delete_value("died"))
    assert [each.skipped for each in await store.replay([held.id])] == [None]
    (again,) = await claim(store, "webhooks")
    assert again.id == held.id
    with caplog.at_level(logging.WARNING, "fairlane.store"):
        await finish(store, [again], Died("y"))
    # The one whose id was chosen is there already; it is skipped, and the others are not.
    second = ids(await followed(store))
    assert len(second) == 1
    assert not set(second) & set(first)
    assert await store.run(records.get_value("died")) == b"1"
    assert str(named.id) in caplog.text
    assert (await store.job(held.id)).error == "y"


async def test_effects_for_death_go_with_their_job(store: Store, clock: ManualClock) -> None:
    held = await given_mortal(store, on_dead(*new_jobs(OTHER, delay=MINUTE)))
    await finish(store, [held], Died("x"))
    listed = (await store.run(operators.find_jobs(JobFilter(state=State.DEAD)))).jobs
    assert [(each.id, each.has_on_dead) for each in listed] == [(held.id, True)]
    clock.advance(10)
    assert (await store.prune(Retention(dead=SECOND))).jobs == 1


# C09
async def test_a_follow_up_of_the_reaper_wakes_whoever_waits_for_it(shared_database: Database) -> None:
    clock = ManualClock()
    store, waiting = [await shared_database.open(clock) for _ in range(2)]
    await store.declare(PLAIN)
    await store.declare(OTHER)
    worker = worker_named("waiting")
    listener = await waiting.listen(worker)
    await hear(waiting, "email", listener, worker=worker)
    await given_mortal(store, on_dead(*new_jobs(OTHER)), is_suspect=True)
    clock.advance(2 * LEASE.total_seconds())
    await store.reap()
    assert await soon(listener.wait(None)) is True
    assert len(await claim(waiting, "email", worker=worker)) == 1
    await listener.close()


# Nothing that is wrong with them keeps a job alive, or another one from being settled.


Kill = Callable[[Store, ManualClock, Claim], Awaitable[None]]


async def by_settlement(store: Store, _: ManualClock, held: Claim) -> None:
    await finish(store, [held], Died("x"))


async def by_reaper(store: Store, clock: ManualClock, held: Claim) -> None:
    clock.advance(2 * LEASE.total_seconds())
    assert held.id in [each.job for each in (await store.reap()).settled]


@pytest.fixture(params=[by_settlement, by_reaper])
def kill(request: pytest.FixtureRequest) -> Kill:
    chosen: Kill = request.param
    return chosen


async def test_follow_ups_that_are_there_already_are_skipped_and_the_rest_lands(
    store: Store, clock: ManualClock, kill: Kill, caplog: pytest.LogCaptureFixture
) -> None:
    (taken,), (free,) = new_jobs(OTHER, delay=60 * MINUTE), new_jobs(OTHER)
    (holder,) = _unique("a", delay=60 * MINUTE)
    await store.enqueue([taken, holder])
    duplicate, unique, refused = *_unique("a", "b"), *_unique("a", on_conflict="reject")
    declared = on_dead(duplicate, refused, unique, named=[taken, free], put={"new": b"1"})
    held = await given_mortal(store, declared, is_suspect=True)
    with caplog.at_level(logging.INFO, "fairlane.store"):
        await kill(store, clock, held)
    assert await state_of(store, held.id) is State.DEAD
    found = ids(await claim(store, "email", 50))
    assert len(found) == 2
    assert free.id in found
    assert await store.run(records.get_value("new")) == b"1"
    assert f"there is a job {taken.id} already" in caplog.text
    told = [(each.levelname, each.getMessage()) for each in caplog.records if "unique key" in each.getMessage()]
    dead = f"job {held.id} is dead; its follow-up ({refused.task}) was not stored"
    assert told == [
        ("INFO", f"{dead} (duplicate): job {holder.id} holds its unique key"),
        ("WARNING", f"{dead} (refused): job {holder.id} holds its unique key"),
    ]


NONSENSE = {
    "bytes": b"\xc1nonsense",
    "nothing": b"",
    "another value": msgspec.msgpack.encode({"effects": {"jobs": [{"id": "x"}]}}),
    "a queue that nobody has declared": on_dead(*new_jobs(Policy("nowhere")), put={"new": b"1"}),
    "a number that no database takes": on_dead(*new_jobs(OTHER, max_attempts=2**63), put={"new": b"1"}),
    "a value that is too long": on_dead(*new_jobs(OTHER), put={"k" * 600: b"1", "new": b"1"}),
}


@pytest.mark.parametrize("stored", NONSENSE.values(), ids=NONSENSE)
async def test_effects_that_cannot_land_keep_nobody_alive_and_stop_nobody_else(
    store: Store, clock: ManualClock, kill: Kill, stored: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = mortal(stored), mortal(on_dead(*new_jobs(OTHER), put={"good": b"1"}))
    await store.enqueue([bad, good, *new_jobs(PLAIN)])
    held = await suspected(store, await claim(store, "webhooks", 3))
    if kill is by_reaper:
        await kill(store, clock, held[0])
    else:
        assert await store.settle([settle(each, Died("x"), 0) for each in held]) == []
    assert [await state_of(store, each) for each in (bad.id, good.id)] == [State.DEAD, State.DEAD]
    assert "its on_dead effects were refused" in ((await store.job(bad.id)).error or "")
    assert str(bad.id) in caplog.text
    assert await store.run(records.get_value("new")) is None
    assert await store.run(records.get_value("good")) == b"1"
    assert len(await followed(store)) == 1


async def test_deaths_and_other_ends_are_settled_together(store: Store) -> None:
    jobs = [mortal(on_dead(*new_jobs(OTHER))), mortal(None), mortal(on_dead(*new_jobs(OTHER)), max_attempts=2)]
    await store.enqueue([*jobs, *new_jobs(PLAIN)])
    first, second, third, fourth = await claim(store, "webhooks", 4)
    (landed,) = new_jobs(OTHER)
    gone = settle(msgspec.structs.replace(fourth, lease=UUID(int=7)), Done(None), 0)
    settlements = [
        settle(first, Failed("a", 0), 0),
        settle(second, Died("b"), 0),
        settle(third, Done(b"1", BuiltEffects((landed,))), 0),
        gone,
    ]
    assert await store.settle(settlements) == [fourth.id]
    states = [await state_of(store, each.id) for each in (first, second, third, fourth)]
    assert states == [State.DEAD, State.DEAD, State.DONE, State.RUNNING]
    found = ids(await followed(store))
    assert len(found) == 2
    assert landed.id in found


LIVES: list[RunOutcome] = [*ENDS_ALIVE, *DEATHS]


# L17
@pytest.mark.parametrize("seed", range(6))
async def test_over_any_lives_the_effects_land_once_for_each_death(store: Store, clock: ManualClock, seed: int) -> None:
    chance = random.Random(seed)
    jobs = [mortal(on_dead(*new_jobs(OTHER)), max_attempts=chance.randint(1, 3)) for _ in range(8)]
    await store.enqueue(jobs)
    held: list[Claim] = []
    deaths = landed = 0
    for _ in range(60):
        before = [await state_of(store, job.id) for job in jobs]
        match chance.choice(["claim", "settle", "settle", "late", "reap", "cancel", "replay"]):
            case "claim":
                held += await claim(store, "webhooks", chance.randint(1, 4))
            case "settle" if held:
                some = [held.pop(chance.randrange(len(held))) for _ in range(chance.randint(1, len(held)))]
                await store.settle([settle(each, chance.choice(LIVES), 10) for each in some])
            case "late" if held:
                await store.settle([settle(held[0], Died("now"), 10)])
            case "reap":
                clock.advance(2 * LEASE.total_seconds())
                await store.reap()
            case "cancel":
                await store.cancel(chance.choice(jobs).id)
            case "replay":
                await store.replay([chance.choice(jobs).id])
        after = [await state_of(store, job.id) for job in jobs]
        deaths += sum(now is State.DEAD and then is not State.DEAD for then, now in zip(before, after, strict=True))
        landed += len(await followed(store))
        assert landed == deaths
    assert deaths > 0


def _unique(*keys: str, delay: int | None = None, on_conflict: str = "return") -> list[NewJob]:
    return [
        msgspec.structs.replace(
            job,
            unique=unique_key(Unique(key, on_conflict=on_conflict), job.task, (), {}, job.payload),  # type: ignore[arg-type]
        )
        for key in keys
        for job in new_jobs(OTHER, delay=delay)
    ]
