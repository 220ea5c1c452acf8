"""What a job has declared for its death lands when it dies, in the same transaction, whoever or whatever kills it."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest

from fairlane import (
    App,
    ClaimLost,
    Effects,
    HeldClaim,
    InvalidJob,
    InvalidValue,
    PayloadTooLarge,
    StoreUnavailable,
    UnknownQueue,
)
from fairlane.clock import ManualClock
from fairlane.job import Claim, NewJob, OnDead, StampedEffects, State
from fairlane.policy import Policy
from fairlane.policy.unique import Unique, unique_key
from fairlane.scheduler.settlement import (
    Cancelled,
    Died,
    Done,
    Failed,
    Lost,
    Outcome,
    Released,
    Retried,
    Settlement,
    Snoozed,
    settle,
)
from fairlane.store.operators import JobFilter
from fairlane.store.postgres import PostgresStore
from fairlane.store.postgres.connections import POOL_SIZE
from fairlane.store.protocol import Retention, Store
from tests.store.by_hand import Shop, open_shop, url_of
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
    effects = StampedEffects((*jobs, *named), put or {}, delete)
    return OnDead(effects, frozenset(job.id for job in named)).encode()


def mortal(declared: bytes | None, *, max_attempts: int = 1) -> NewJob:
    (job,) = new_jobs(PLAIN, max_attempts=max_attempts)
    return msgspec.structs.replace(job, on_dead=declared)


async def given_mortal(store: Store, declared: bytes | None, *, max_attempts: int = 1) -> Claim:
    """A claim of a job that has declared this for its death."""
    job = mortal(declared, max_attempts=max_attempts)
    await store.enqueue([job])
    (held,) = await claim(store, "webhooks")
    assert held.id == job.id
    return held


async def followed(store: Store) -> list[Claim]:
    """The follow-ups that have become ready; they are done then."""
    found = await claim(store, "email", 50)
    await finish(store, found)
    return found


# L17: every path.

DEATHS: list[Outcome] = [
    Failed("boom", 7),
    Retried("again", 7),
    Died("no further attempt makes sense"),
    Lost("worker shut down"),
]


@pytest.mark.parametrize("outcome", DEATHS, ids=lambda outcome: type(outcome).__name__)
async def test_effects_for_death_land_with_every_settlement_that_kills(store: Store, outcome: Outcome) -> None:
    await store.put_value("old", b"0")
    declared = on_dead(*new_jobs(OTHER, payload=b"[1]"), put={"new": b"1"}, delete=("old",))
    held = await given_mortal(store, declared)
    assert (await store.job(held.id)).has_on_dead
    await finish(store, [held], outcome)
    assert await state_of(store, held.id) is State.DEAD
    assert [each.payload for each in await followed(store)] == [b"[1]"]
    assert await store.get_value("new") == b"1"
    assert await store.get_value("old") is None


# L17
async def test_effects_for_death_land_when_the_reaper_kills(store: Store, clock: ManualClock) -> None:
    held = await given_mortal(store, on_dead(*new_jobs(OTHER), put={"new": b"1"}))
    clock.advance(2 * LEASE.total_seconds())
    reaped = await store.reap()
    assert [(each.job, each.to) for each in reaped.settled] == [(held.id, State.DEAD)]
    assert reaped.next_due is None
    assert await state_of(store, held.id) is State.DEAD
    assert len(await followed(store)) == 1
    assert await store.get_value("new") == b"1"
    assert (await store.reap()).settled == []
    assert await followed(store) == []


# L17
async def test_a_batch_of_many_deaths_by_the_reaper_applies_each_once(store: Store, clock: ManualClock) -> None:
    jobs = [mortal(on_dead(*new_jobs(OTHER), put={f"{n}": b"1"}) if n % 2 else None) for n in range(10)]
    living = mortal(on_dead(*new_jobs(OTHER), put={"living": b"1"}), max_attempts=2)
    await store.enqueue([*jobs, living])
    assert len(await claim(store, "webhooks", 5)) == 5
    assert len(await claim(store, "webhooks", 6)) == 6
    clock.advance(2 * LEASE.total_seconds())
    reaped = await store.reap()
    assert {each.job for each in reaped.settled} == {job.id for job in [*jobs, living]}
    assert reaped.next_due is None
    assert len(await followed(store)) == 5
    assert [await store.get_value(f"{n}") for n in range(10)] == [None, b"1"] * 5
    assert await state_of(store, living.id) is State.READY
    assert await store.get_value("living") is None


ENDS_ALIVE: list[Outcome] = [
    Done(b"1"),
    Cancelled("no longer wanted"),
    Failed("boom", 7),
    Retried("again", 7),
    Snoozed("nap", 7),
    Released("drain"),
    Lost("worker shut down"),
]


@pytest.mark.parametrize("outcome", ENDS_ALIVE, ids=lambda outcome: type(outcome).__name__)
@pytest.mark.parametrize("is_asked_to_cancel", [False, True])
async def test_whatever_is_not_death_applies_nothing(store: Store, outcome: Outcome, is_asked_to_cancel: bool) -> None:
    held = await given_mortal(store, on_dead(*new_jobs(OTHER), put={"new": b"1"}), max_attempts=2)
    if is_asked_to_cancel:
        await store.cancel(held.id)
    await finish(store, [held], outcome)
    ended = await state_of(store, held.id)
    assert ended is not State.DEAD
    assert ended is State.CANCELLED or not is_asked_to_cancel or isinstance(outcome, Done)
    assert await followed(store) == []
    assert await store.get_value("new") is None


async def test_a_job_that_is_cancelled_while_it_waits_applies_nothing(store: Store) -> None:
    job = mortal(on_dead(*new_jobs(OTHER), put={"new": b"1"}))
    await store.enqueue([job])
    assert await store.cancel(job.id) is State.CANCELLED
    assert await followed(store) == []
    assert await store.get_value("new") is None


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
    assert await store.get_value("new") is None


# L02, L17
async def test_a_death_and_a_reaper_at_the_same_instant_apply_the_effects_once(shared_database: Database) -> None:
    clock = ManualClock()
    dying, reaping = [await shared_database.open(clock) for _ in range(2)]
    await dying.declare(PLAIN)
    await dying.declare(OTHER)
    for turn in range(20):
        held = await given_mortal(dying, on_dead(*new_jobs(OTHER), put={f"{turn}": b"1"}))
        clock.advance(2 * LEASE.total_seconds())
        await soon(asyncio.gather(dying.settle([settle(held, Died("x"), 0)]), reaping.reap(), dying.reap()))
        assert await state_of(dying, held.id) is State.DEAD
        assert len(await followed(dying)) == 1
        assert await dying.get_value(f"{turn}") == b"1"


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
    assert await store.get_value("both") is None
    await finish(store, [second], Died("y"))
    assert await store.get_value("both") == b"1"


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
    assert await store.delete_value("died")
    assert [each.skipped for each in await store.replay([held.id])] == [None]
    (again,) = await claim(store, "webhooks")
    assert again.id == held.id
    with caplog.at_level(logging.WARNING, "fairlane.store"):
        await finish(store, [again], Died("y"))
    # The one whose id was chosen is there already; it is skipped, and the others are not.
    second = ids(await followed(store))
    assert len(second) == 1
    assert not set(second) & set(first)
    assert await store.get_value("died") == b"1"
    assert str(named.id) in caplog.text
    assert (await store.job(held.id)).error == "y"


async def test_effects_for_death_go_with_their_job(store: Store, clock: ManualClock) -> None:
    held = await given_mortal(store, on_dead(*new_jobs(OTHER, delay=MINUTE)))
    await finish(store, [held], Died("x"))
    listed = (await store.find_jobs(JobFilter(state=State.DEAD))).jobs
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
    await given_mortal(store, on_dead(*new_jobs(OTHER)))
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
    held = await given_mortal(store, on_dead(duplicate, refused, unique, named=[taken, free], put={"new": b"1"}))
    with caplog.at_level(logging.WARNING, "fairlane.store"):
        await kill(store, clock, held)
    assert await state_of(store, held.id) is State.DEAD
    found = ids(await claim(store, "email", 50))
    assert len(found) == 2
    assert free.id in found
    assert await store.get_value("new") == b"1"
    assert f"there is a job {taken.id} already" in caplog.text
    assert f"job {holder.id} holds the unique key" in caplog.text


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
    held = await claim(store, "webhooks", 3)
    if kill is by_reaper:
        await kill(store, clock, held[0])
    else:
        assert await store.settle([settle(each, Died("x"), 0) for each in held]) == []
    assert [await state_of(store, each) for each in (bad.id, good.id)] == [State.DEAD, State.DEAD]
    assert "its on_dead effects were refused" in ((await store.job(bad.id)).error or "")
    assert str(bad.id) in caplog.text
    assert await store.get_value("new") is None
    assert await store.get_value("good") == b"1"
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
        settle(third, Done(b"1", StampedEffects((landed,))), 0),
        gone,
    ]
    assert await store.settle(settlements) == [fourth.id]
    states = [await state_of(store, each.id) for each in (first, second, third, fourth)]
    assert states == [State.DEAD, State.DEAD, State.DONE, State.RUNNING]
    found = ids(await followed(store))
    assert len(found) == 2
    assert landed.id in found


LIVES: list[Outcome] = [*ENDS_ALIVE, *DEATHS]


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


# The reaper of PostgreSQL kills in transactions of their own, after the one that ends the other claims.


@pytest.fixture
async def reaper(postgres_url: str, clock: ManualClock) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_url, clock=clock)
    await store.open()
    await store.declare(PLAIN)
    await store.declare(OTHER)
    yield store
    await store.close()


def before_each_death(
    monkeypatch: pytest.MonkeyPatch, reaper: PostgresStore, happens: Callable[[Settlement], Awaitable[object]]
) -> None:
    settler = reaper._settler
    real = settler._settle_with_effects

    async def watched(settlement: Settlement, *args: Any, **options: Any) -> list[UUID]:
        await happens(settlement)
        return await real(settlement, *args, **options)

    monkeypatch.setattr(settler, "_settle_with_effects", watched)


async def given_two_who_are_lost(reaper: PostgresStore, clock: ManualClock) -> list[Claim]:
    """Two jobs with effects and one without, under one lease that has run out."""
    await reaper.enqueue([mortal(on_dead(*new_jobs(OTHER))), mortal(None), mortal(on_dead(*new_jobs(OTHER)))])
    held = await claim(reaper, "webhooks", 3)
    clock.advance(2 * LEASE.total_seconds())
    return held


async def test_a_worker_that_renews_while_it_is_reaped_has_lost_all_that_its_lease_held(
    reaper: PostgresStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await given_two_who_are_lost(reaper, clock)
    lease = held[0].lease

    async def come_back(settlement: Settlement) -> None:
        assert (await reaper.renew([lease], LEASE)).gone == [lease]
        late = next(each for each in held if each.id == settlement.job)
        assert await reaper.settle([settle(late, Done(None), 0)]) == [late.id]

    before_each_death(monkeypatch, reaper, come_back)
    reaped = await reaper.reap()
    assert sorted(each.job for each in reaped.settled) == sorted(each.id for each in held)
    assert reaped.next_due is None
    assert {await state_of(reaper, each.id) for each in held} == {State.DEAD}
    assert len(await followed(reaper)) == 2


async def test_a_reaper_that_is_lost_in_the_middle_is_followed_by_one_that_ends_its_work(
    reaper: PostgresStore, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = await given_two_who_are_lost(reaper, clock)
    seen: list[UUID] = []

    async def fail_at_the_second(settlement: Settlement) -> None:
        seen.append(settlement.job)
        if len(seen) == 2:
            raise StoreUnavailable("the test has cut the line")

    before_each_death(monkeypatch, reaper, fail_at_the_second)
    with pytest.raises(StoreUnavailable):
        await reaper.reap()
    assert len(await followed(reaper)) == 1
    reaped = await reaper.reap()
    assert [each.job for each in reaped.settled] == [seen[1]]
    assert reaped.next_due is None
    assert len(await followed(reaper)) == 1
    assert {await state_of(reaper, each.id) for each in held} == {State.DEAD}


async def test_two_reapers_at_once_kill_each_job_once(
    reaper: PostgresStore, postgres_url: str, clock: ManualClock
) -> None:
    other = PostgresStore(postgres_url, clock=clock)
    await other.open()
    for _ in range(10):
        held = await given_two_who_are_lost(reaper, clock)
        both = await soon(asyncio.gather(reaper.reap(), other.reap()))
        settled = [each.job for reaped in both for each in reaped.settled]
        assert sorted(settled) == sorted(set(settled))
        settled += [each.job for each in (await other.reap()).settled]  # what both have left to each other
        assert sorted(settled) == sorted(each.id for each in held)
        assert len(await followed(reaper)) == 2
    assert (await reaper.reap()).next_due is None
    await other.close()


async def test_many_who_settle_at_once_with_effects_for_a_queue_they_have_not_met(
    reaper: PostgresStore, postgres_url: str, clock: ManualClock
) -> None:
    count = 3 * POOL_SIZE
    await reaper.enqueue([mortal(on_dead(*new_jobs(OTHER))) for _ in range(count)])
    other = PostgresStore(postgres_url, clock=clock)
    await other.open()
    held = await claim(other, "webhooks", count)
    await soon(asyncio.gather(*(other.settle([settle(each, Died("x"), 0)]) for each in held)))
    assert len(await followed(reaper)) == count
    await other.close()


# The producer's side, through the public API.


@pytest.fixture
async def shop(database: Database, clock: ManualClock, stack: AsyncExitStack) -> Shop:
    return await open_shop(stack, database, clock)


async def held_by_hand(shop: Shop) -> HeldClaim:
    (held,) = await shop.queue.claim(1)
    return held


async def test_a_claim_that_is_set_aside_by_hand_applies_what_was_declared(shop: Shop) -> None:
    chosen = uuid4()
    follow_up = shop.deliver.using(id=chosen, delay="1h", priority=3, keys={"account": "bob"}).call(2)
    declared = Effects(enqueue=[follow_up], put={"died": {"number": 1}})
    job = await shop.deliver.using(on_dead=declared).enqueue(1)
    await (await held_by_hand(shop)).dead("no use")
    assert await job.status() is State.DEAD
    record = await shop.app.job(chosen).record()
    assert (record.state, record.priority, record.keys) == (State.SCHEDULED, 3, {"account": "bob"})
    assert await shop.app.values.get("died") == {"number": 1}


async def test_a_claim_whose_last_attempt_is_retried_by_hand_applies_what_was_declared(shop: Shop) -> None:
    job = await shop.deliver.using(max_attempts=1, on_dead=Effects(put={"died": 1})).enqueue(1)
    await (await held_by_hand(shop)).retry("1s")
    assert await job.status() is State.DEAD
    assert await shop.app.values.get("died") == 1


async def test_a_claim_that_was_lost_to_the_reaper_cannot_die_again(shop: Shop, clock: ManualClock) -> None:
    await shop.deliver.using(max_attempts=1, on_dead=Effects(put={"died": 1})).enqueue(1)
    held = await held_by_hand(shop)
    clock.advance(60)
    await shop.app.upkeep()
    assert await shop.app.values.get("died") == 1
    await shop.app.values.delete("died")
    with pytest.raises(ClaimLost):
        await held.dead("too late")
    assert await shop.app.values.get("died") is None


async def test_every_way_to_enqueue_takes_effects_for_death(shop: Shop) -> None:
    def declared(name: str) -> Effects:
        return Effects(put={name: 1})

    deliver, app = shop.deliver, shop.app
    await deliver.using(on_dead=declared("one")).enqueue(1)
    await app.enqueue_many([deliver.using(on_dead=declared("many")).call(1)])
    chosen = deliver.using(on_dead=declared("own")).call(1)
    await deliver.using(on_dead=declared("all")).enqueue_many([deliver.call(1), chosen])
    async for _ in app.enqueue_stream(deliver.using(on_dead=declared(f"stream {n}")).call(1) for n in range(2)):
        pass
    await deliver.enqueue(1)
    for held in await shop.queue.claim(6):
        await held.dead("x")
    found = [item[0] for item in (await app.values.scan()).items]
    assert found == ["all", "many", "one", "own", "stream 0", "stream 1"]
    await (await held_by_hand(shop)).ack(
        1, effects=Effects(enqueue=[deliver.using(on_dead=declared("follow-up")).call(1)])
    )
    await (await held_by_hand(shop)).dead("x")
    assert await app.values.get("follow-up") == 1


async def test_what_is_declared_is_what_it_was_when_it_was_chosen(shop: Shop) -> None:
    declared = Effects(put={"a": 1})
    bound = shop.deliver.using(on_dead=declared)
    declared.put["b"] = 2
    declared.enqueue.append(bound.call(2))
    await bound.enqueue(1)
    await (await held_by_hand(shop)).dead("x")
    assert [key for key, _ in (await shop.app.values.scan()).items] == ["a"]
    assert await shop.queue.claim(1) == []


async def test_effects_that_say_nothing_are_none(shop: Shop) -> None:
    job = await shop.deliver.using(on_dead=Effects()).enqueue(1)
    assert not (await job.record()).has_on_dead


async def test_what_cannot_be_stored_is_refused_at_enqueue_and_nothing_is_stored(shop: Shop) -> None:
    deliver = shop.deliver
    chosen = uuid4()
    bad: list[tuple[type[Exception], Effects]] = [
        (InvalidJob, Effects(enqueue=[deliver])),  # type: ignore[list-item]
        (InvalidJob, Effects(enqueue=[deliver.using(tx=object()).call(1)])),
        (InvalidJob, Effects(enqueue=[deliver.call("a", "b", "c")])),  # type: ignore[arg-type, call-arg]
        (InvalidJob, Effects(enqueue=[deliver.using(id=chosen).call(1), deliver.using(id=chosen).call(2)])),
        (InvalidJob, Effects(enqueue=[deliver.using(id=UUID(int=5)).call(1)])),
        (UnknownQueue, Effects(enqueue=[deliver.using(queue="nowhere").call(1)])),
        (InvalidValue, Effects(put={"x" * 600: 1})),
        (InvalidValue, Effects(delete=[""])),
        (PayloadTooLarge, Effects(put={f"{n}": "x" * 300 for n in range(5)})),
        (
            UnknownQueue,
            Effects(
                enqueue=[
                    deliver.using(on_dead=Effects(enqueue=[deliver.using(queue="nowhere").call(1)])).call(1),
                ]
            ),
        ),
    ]
    for kind, effects in bad:
        with pytest.raises(kind):
            await deliver.using(on_dead=effects, id=UUID(int=5)).enqueue(1)
        with pytest.raises(kind):
            await shop.app.enqueue_many([deliver.call(1), deliver.using(on_dead=effects, id=UUID(int=5)).call(1)])
    with pytest.raises(InvalidJob, match="on_dead=5 is not an Effects"):
        deliver.using(on_dead=5)  # type: ignore[arg-type]
    assert await shop.queue.claim(1) == []


async def test_a_follow_up_may_go_to_a_queue_that_only_the_database_knows(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    shop = await open_shop(stack, shared_database, clock)
    other = await stack.enter_async_context(App(url_of(shared_database), clock=clock))
    await (await other.opened()).declare(OTHER)
    await shop.deliver.using(on_dead=Effects(enqueue=[shop.deliver.using(queue="email").call(2)])).enqueue(1)
    await (await held_by_hand(shop)).dead("x")
    assert len(await claim(await other.opened(), "email")) == 1


# Enqueue in the caller's own transaction.


async def test_what_a_rolled_back_job_has_declared_is_gone_with_it(
    shared_database: Database, clock: ManualClock
) -> None:
    store = await shared_database.open(clock)
    await store.declare(PLAIN)
    async with shared_database.transaction() as somebody:
        await store.enqueue([mortal(on_dead(put={"new": b"1"}))], somebody.tx)
        await somebody.rollback()
    kept = mortal(on_dead(put={"new": b"1"}))
    async with shared_database.transaction() as somebody:
        await store.enqueue([kept], somebody.tx)
        await somebody.commit()
    (held,) = await claim(store, "webhooks", 5)
    await finish(store, [held], Died("x"))
    assert await store.get_value("new") == b"1"
