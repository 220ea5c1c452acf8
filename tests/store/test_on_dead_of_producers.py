"""What a producer declares for the death of its jobs, through the public API."""

from __future__ import annotations

from contextlib import AsyncExitStack
from uuid import UUID, uuid4

import pytest

from fairlane import App, Effects, HeldClaim
from fairlane.clock import ManualClock
from fairlane.errors import ClaimLost, InvalidJob, InvalidValue, PayloadTooLarge, UnknownQueue
from fairlane.job import State
from fairlane.scheduler.settlement import (
    Died,
)
from fairlane.store import records
from tests.store.by_hand import Shop, open_shop, url_of
from tests.store.harness import (
    Database,
    claim,
    finish,
)
from tests.store.test_on_dead import OTHER, PLAIN, mortal, on_dead


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


async def lost_by_hand(shop: Shop, clock: ManualClock) -> HeldClaim:
    held = await held_by_hand(shop)
    clock.advance(60)
    await shop.app.upkeep()
    return held


async def test_a_claim_that_was_lost_to_the_reaper_cannot_die_again(shop: Shop, clock: ManualClock) -> None:
    await shop.deliver.using(max_attempts=1, on_dead=Effects(put={"died": 1})).enqueue(1)
    await lost_by_hand(shop, clock)
    await lost_by_hand(shop, clock)
    assert await shop.app.values.get("died") is None
    held = await lost_by_hand(shop, clock)  # the third loss is its own: it was alone
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
    with pytest.raises(InvalidJob, match="on_dead=5 cannot be used; give an Effects"):
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
    assert await store.run(records.get_value("new")) == b"1"
