"""What operators change while a policy is in force, on every store."""

from __future__ import annotations

from typing import Any

import pytest

from fairlane.clock import ManualClock
from fairlane.errors import InvalidOverride, InvalidPolicy
from fairlane.job import State
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.policy.gates import Reason
from fairlane.policy.overrides import Kind, Override
from fairlane.scheduler.explain import explain
from fairlane.store import operators, records
from fairlane.store.audit import EXPIRY, Note
from fairlane.store.protocol import Store
from tests.store.harness import (
    MINUTE,
    SECOND,
    Database,
    assert_at_rest,
    by_key,
    claim,
    claim_once,
    finish,
    given_jobs,
    hear,
    ids,
    new_jobs,
    soon,
    state_of,
    worker_named,
)

POLICY = Policy("webhooks", fair=Fair(by="account", charge="count"), limits=(Concurrency(5, by="account"),))
LANES = Policy("lanes", limits=(Concurrency(2, by="endpoint"), Concurrency(9)))


def note(action: str = "test") -> Note:
    return Note(actor="ada", action=action, reason="an incident")


def scope(**keys: str | None) -> tuple[tuple[str, str | None], ...]:
    return tuple(sorted(keys.items()))


def pause(**keys: str | None) -> Override:
    return Override(kind=Kind.PAUSE, scope=scope(**keys))


def limit(name: str, value: float, **keys: str | None) -> Override:
    return Override(kind=Kind.LIMIT, limit=name, value=value, scope=scope(**keys))


async def put(store: Store, queue: str, *overrides: Override) -> None:
    await store.change_overrides([queue], overrides, [], note())


async def remove(store: Store, queue: str, *overrides: Override) -> None:
    await store.change_overrides([queue], [], [each.id for each in overrides], note())


async def test_l19_a_paused_queue_finishes_what_runs_and_starts_nothing_new(store: Store, clock: ManualClock) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, {"account": "acme"}, 3)
    running = await claim(store, "webhooks", 1)
    await put(store, "webhooks", pause())
    assert await claim(store, "webhooks", 10) == []
    await finish(store, running)
    await given_jobs(store, POLICY, {"account": "late"}, 1)
    assert await claim(store, "webhooks", 10) == []
    await remove(store, "webhooks", pause())
    assert len(await claim(store, "webhooks", 10)) == 3


@pytest.mark.parametrize("fair", [True, False], ids=["flows", "lanes"])
async def test_o01_pausing_a_key_covers_it_when_it_is_first_seen_later(
    store: Store, clock: ManualClock, fair: bool
) -> None:
    share = Fair(by="account", charge="count") if fair else None
    policy = Policy("webhooks", fair=share, keys=("account",))
    await store.declare(policy)
    await put(store, "webhooks", pause(account="acme"))
    await given_jobs(store, policy, {"account": "acme"}, 3)
    await given_jobs(store, policy, {"account": "bolt"}, 2)
    started = await claim(store, "webhooks", 10)
    assert by_key(started) == {"bolt": 2}
    await finish(store, started)
    await given_jobs(store, policy, {"account": "acme"}, 1)
    assert await claim(store, "webhooks", 10) == []
    await remove(store, "webhooks", pause(account="acme"))
    again = await claim(store, "webhooks", 10)
    assert by_key(again) == {"acme": 4}
    await finish(store, again)
    await assert_at_rest(store, policy, clock, [{"account": "acme"}, {"account": "bolt"}])


async def test_a_paused_task_holds_back_its_own_jobs_and_no_others(store: Store, clock: ManualClock) -> None:
    await store.declare(POLICY)
    await store.enqueue(new_jobs(POLICY, {"account": "acme"}, 2, task="shop.refund"))
    await store.enqueue(new_jobs(POLICY, {"account": "acme"}, 2, task="shop.deliver"))
    await put(store, "webhooks", pause(task="shop.refund"))
    started = await claim(store, "webhooks", 10)
    assert [each.task for each in started] == ["shop.deliver", "shop.deliver"]
    await remove(store, "webhooks", pause(task="shop.refund"))
    assert [each.task for each in await claim(store, "webhooks", 10)] == ["shop.refund", "shop.refund"]


async def test_resuming_wakes_a_waiter_although_nobody_enqueues(store: Store, clock: ManualClock) -> None:
    await store.declare(POLICY)
    await put(store, "webhooks", pause(account="acme"))
    await given_jobs(store, POLICY, {"account": "acme"}, 1)
    assert await claim(store, "webhooks", 1) == []
    worker = worker_named("idle")
    listener = await store.listen(worker)
    await hear(store, "webhooks", listener, worker=worker)
    await remove(store, "webhooks", pause(account="acme"))
    assert await soon(listener.wait(None))
    assert len(await claim(store, "webhooks", 1, worker=worker)) == 1
    await listener.close()


async def test_an_override_of_one_process_is_honoured_by_the_next_claim_of_another(
    shared_database: Database, clock: ManualClock
) -> None:
    one, other = await shared_database.open(clock), await shared_database.open(clock)
    await one.declare(POLICY)
    await given_jobs(one, POLICY, {"account": "acme"}, 20)
    assert len(await claim(other, "webhooks", 20)) == 5
    await put(one, "webhooks", limit("concurrency:account", 7, account="acme"))
    assert len(await claim(other, "webhooks", 20)) == 2
    # Nobody else is concerned.
    await given_jobs(one, POLICY, {"account": "bolt"}, 20)
    assert by_key(await claim(other, "webhooks", 20)) == {"bolt": 5}


async def test_a23_a_limit_lowered_below_what_is_in_flight_drains_and_preempts_nothing(
    store: Store, clock: ManualClock
) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, {"account": "acme"}, 20)
    running = await claim(store, "webhooks", 20)
    await put(store, "webhooks", limit("concurrency:account", 2, account="acme"))
    assert await store.run(records.held([(each.id, each.lease) for each in running])) == ids(running)
    await finish(store, running[:3])
    assert await claim(store, "webhooks", 20) == []
    await finish(store, running[3:4])
    assert len(await claim(store, "webhooks", 20)) == 1


async def test_a24_an_override_that_is_cleared_wakes_what_it_held_back(store: Store, clock: ManualClock) -> None:
    await store.declare(LANES)
    await given_jobs(store, LANES, {"endpoint": "a"}, 5)
    await put(store, "lanes", limit("concurrency:endpoint", 0, endpoint="a"))
    assert await claim(store, "lanes", 9) == []
    await remove(store, "lanes", limit("concurrency:endpoint", 0, endpoint="a"))
    assert len(await claim(store, "lanes", 9)) == 2


async def test_a_limit_of_the_whole_queue_can_be_overridden(store: Store, clock: ManualClock) -> None:
    await store.declare(LANES)
    for name in "abcdef":
        await given_jobs(store, LANES, {"endpoint": name}, 2)
    await put(store, "lanes", limit("concurrency:", 3))
    assert len(await claim(store, "lanes", 20)) == 3
    await put(store, "lanes", limit("concurrency:", 4))
    assert len(await claim(store, "lanes", 20)) == 1
    await remove(store, "lanes", limit("concurrency:", 3))
    assert len(await claim(store, "lanes", 20)) == 5


async def test_a_rate_can_be_overridden_for_one_key(store: Store, clock: ManualClock) -> None:
    policy = Policy("calls", limits=(Rate(2, per="1s", by="vendor"),))
    await store.declare(policy)
    await given_jobs(store, policy, {"vendor": "v"}, 20)
    assert len(await claim(store, "calls", 20)) == 2
    await put(store, "calls", limit("rate/1s:vendor", 4, vendor="v"))
    clock.advance("1s")
    assert len(await claim(store, "calls", 20)) == 4


async def test_an_override_ends_by_itself_and_whoever_it_held_back_starts(store: Store, clock: ManualClock) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, {"account": "acme"}, 2)
    ends_at = await store.now() + MINUTE
    await put(store, "webhooks", Override(kind=Kind.PAUSE, scope=scope(account="acme"), expires_at=ends_at))
    brought = await claim_once(store, "webhooks", 5)
    assert brought.claims == []
    # C10: whoever waits is told when to come back.
    assert brought.next_due == ends_at
    clock.advance("59s")
    assert await claim(store, "webhooks", 5) == []
    clock.advance("1s")
    assert len(await claim(store, "webhooks", 5)) == 2
    declared = await store.policy("webhooks")
    assert declared is not None
    assert declared.policy.overrides.all == ()
    newest, first = await store.run(records.audit("webhooks"))
    assert (newest.actor, newest.action) == (EXPIRY, "expire")
    assert (first.actor, first.action, first.reason) == ("ada", "test", "an incident")


async def test_weights_are_overridden_and_boosted_while_jobs_wait(store: Store, clock: ManualClock) -> None:
    policy = Policy("q", fair=Fair(by="account", charge="count"))
    await store.declare(policy)
    for name in ("acme", "bolt"):
        await given_jobs(store, policy, {"account": name}, 100)
    await put(store, "q", Override(kind=Kind.WEIGHT, value=3, scope=scope(account="acme")))
    first = await claim(store, "q", 40)
    assert abs(by_key(first)["acme"] - 30) <= 1
    await put(store, "q", Override(kind=Kind.BOOST, value=3, scope=scope(account="acme")))
    second = await claim(store, "q", 40)
    assert abs(by_key(second)["acme"] - 36) <= 2
    await store.change_overrides(["q"], [], [each.id for each in await _overrides(store, "q")], note())
    third = await claim(store, "q", 40)
    assert abs(by_key(third)["acme"] - 20) <= 2


async def _overrides(store: Store, queue: str) -> tuple[Override, ...]:
    declared = await store.policy(queue)
    assert declared is not None
    return declared.policy.overrides.all


async def test_a_suspended_policy_holds_nobody_back_goes_on_counting_and_strands_nothing(
    store: Store, clock: ManualClock
) -> None:
    policy = Policy("q", limits=(Concurrency(1, by="account"), Rate(1, per="1h", by="account")))
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "acme"}, 6)
    running = await claim(store, "q", 10)
    assert len(running) == 1
    suspension = Override(kind=Kind.SUSPEND)
    await put(store, "q", suspension)
    running += await claim(store, "q", 3)
    assert len(running) == 4
    await remove(store, "q", suspension)
    assert await claim(store, "q", 10) == []
    await finish(store, running)
    assert await claim(store, "q", 10) == []
    clock.advance("1h")
    rest = await claim(store, "q", 10)
    assert len(rest) == 1
    await finish(store, rest)
    clock.advance("1h")
    await finish(store, await claim(store, "q", 10))
    await assert_at_rest(store, policy, clock, [{"account": "acme"}])


async def test_a_deploy_does_not_undo_an_override(store: Store, clock: ManualClock) -> None:
    await store.declare(POLICY)
    await put(store, "webhooks", pause(account="acme"), limit("concurrency:account", 1, account="bolt"))
    await store.apply(Policy("webhooks", fair=POLICY.fair, limits=(Concurrency(4, by="account"),)))
    for name in ("acme", "bolt", "coil"):
        await given_jobs(store, POLICY, {"account": name}, 6)
    assert by_key(await claim(store, "webhooks", 20)) == {"bolt": 1, "coil": 4}


async def test_an_override_whose_limit_a_deploy_removes_has_no_effect_and_stays(
    store: Store, clock: ManualClock
) -> None:
    await store.declare(POLICY)
    gone = limit("concurrency:account", 1, account="bolt")
    await put(store, "webhooks", gone)
    bare = Policy("webhooks", fair=POLICY.fair)
    await store.apply(bare)
    await given_jobs(store, bare, {"account": "bolt"}, 6)
    assert len(await claim(store, "webhooks", 20)) == 6
    assert [each.id for each in await _overrides(store, "webhooks")] == [gone.id]


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        (limit("concurrency:region", 1, region="eu"), "has no limit named"),
        (limit("concurrency:account", 1), "is kept by account"),
        (limit("concurrency:account", 1, region="eu"), "is kept by account"),
        (limit("concurrency:account", -1, account="acme"), "from 0 to"),
        (limit("concurrency:account", 1.5, account="acme"), "whole number"),
        (pause(region="eu"), "has no key 'region'"),
        (Override(kind=Kind.WEIGHT, value=0, scope=scope(account="acme")), "between 0.000001"),
        (Override(kind=Kind.WEIGHT, value=2, scope=scope(region="eu")), "weights belong to account"),
        (Override(kind=Kind.SUSPEND, scope=scope(account="acme")), "as a whole"),
    ],
)
async def test_an_override_that_has_no_place_is_refused_and_leaves_nothing(
    store: Store, clock: ManualClock, override: Override, reason: str
) -> None:
    await store.declare(POLICY)
    with pytest.raises((InvalidOverride, InvalidPolicy), match=reason):
        await put(store, "webhooks", override)
    assert await _overrides(store, "webhooks") == ()
    assert await store.run(records.audit()) == []


async def test_a10_a_forced_start_is_counted_by_every_limit_and_by_fairness_and_clears_no_back_off(
    store: Store, clock: ManualClock
) -> None:
    policy = Policy(
        "q",
        fair=Fair(by="account", charge="count"),
        limits=(Concurrency(1, by="account"), Rate(2, per="1h", by="account"), Concurrency(3)),
    )
    await store.declare(policy)
    jobs = await given_jobs(store, policy, {"account": "acme"}, 5)
    running = await claim(store, "q", 10)
    assert ids(running) == jobs[:1]
    (handled,) = await store.run(operators.force([jobs[3]], note("force")))
    assert handled.skipped is None
    forced = await claim(store, "q", 10)
    assert ids(forced) == [jobs[3]]
    # Both slots of one are taken: the next waits for both, and for the rate that the forced start has used up.
    await finish(store, running)
    assert await claim(store, "q", 10) == []
    await finish(store, forced)
    assert await claim(store, "q", 10) == []
    clock.advance("30m")
    assert ids(await claim(store, "q", 10)) == jobs[1:2]
    (entry,) = await store.run(records.audit())
    assert (entry.action, entry.actor) == ("force", "ada")


async def test_a_forced_job_says_so_and_is_shown_as_the_next(store: Store, clock: ManualClock) -> None:
    await store.declare(POLICY)
    first, second = await given_jobs(store, POLICY, {"account": "acme"}, 2)
    await put(store, "webhooks", pause())
    await store.run(operators.force([second], note("force")))
    facts = await store.ask(lambda moment: moment.examine(job=second))
    told = explain(facts)
    assert Reason.FORCED in told.reasons
    assert Reason.PAUSED not in told.reasons
    assert told.next_up == [second] == ids(await claim(store, "webhooks", 5))
    assert Reason.PAUSED in explain(await store.ask(lambda moment: moment.examine(job=first))).reasons


async def test_a_scheduled_job_can_be_forced_and_an_ended_one_cannot(store: Store, clock: ManualClock) -> None:
    await store.declare(POLICY)
    (later,) = await given_jobs(store, POLICY, {"account": "acme"}, delay=3_600 * SECOND)
    (done,) = await given_jobs(store, POLICY, {"account": "acme"})
    await finish(store, await claim(store, "webhooks", 1))
    await put(store, "webhooks", pause())
    first, second = await store.run(operators.force([later, done], note("force")))
    assert first.skipped is None
    assert "it is done" in (second.skipped or "")
    assert ids(await claim(store, "webhooks", 5)) == [later]
    assert await state_of(store, later) is State.RUNNING


async def test_a_policy_that_waiting_jobs_lack_a_key_for_is_refused_unless_that_is_accepted(
    store: Store, clock: ManualClock
) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, {"account": "acme"}, 3)
    other = Policy("webhooks", fair=POLICY.fair, limits=(Concurrency(1, by="region"),))
    with pytest.raises(InvalidPolicy, match="3 waiting jobs do not carry the key 'region'"):
        await store.apply(other)
    declared = await store.policy("webhooks")
    assert declared is not None
    assert declared.policy == POLICY
    assert len(await claim(store, "webhooks", 2)) == 2
    await store.apply(other, accept_missing_keys=True)
    assert await claim(store, "webhooks", 2) == [], "what runs without the key counts as one key, and that is full"


async def test_o02_every_action_on_jobs_is_recorded_with_who_when_and_what(store: Store, clock: ManualClock) -> None:
    await store.declare(POLICY)
    (job,) = await given_jobs(store, POLICY, {"account": "acme"}, delay=SECOND)
    await store.run(operators.retry_now([job], note("retry")))
    await finish(store, await claim(store, "webhooks", 1))
    await store.run(operators.purge([job], note("purge")))
    entries = await store.run(records.audit())
    assert [entry.action for entry in entries] == ["purge", "retry"]
    assert all(str(job) in (entry.before or "") and entry.actor == "ada" for entry in entries)
    assert [entry.action for entry in await store.run(records.audit(before=entries[0].id))] == ["retry"]
    at: Any = entries[0].at
    assert at == clock.now()


@pytest.mark.parametrize("shares", [False, True], ids=["own limits", "a shared limit"])
async def test_an_override_is_honoured_whatever_a_process_has_seen_before(
    shared_database: Database, clock: ManualClock, shares: bool
) -> None:
    limits = (Concurrency(9, name="gpu"),) if shares else (Concurrency(9),)
    policy = Policy("q", limits=limits, keys=("account",))
    operator, worker = await shared_database.open(clock), await shared_database.open(clock)
    await operator.declare(policy)
    await given_jobs(operator, policy, {"account": "acme"}, 6)
    assert len(await claim(worker, "q", 1)) == 1
    for _ in range(2):
        await put(operator, "q", pause(account="acme"))
        assert await claim(worker, "q", 5) == []
        await remove(operator, "q", pause(account="acme"))
        assert len(await claim(worker, "q", 2)) == 2


async def test_a24_a_rate_that_was_lowered_and_is_cleared_opens_by_its_own_bound(
    store: Store, clock: ManualClock
) -> None:
    policy = Policy("calls", limits=(Rate(10, per="1s", by="vendor"),))
    await store.declare(policy)
    await given_jobs(store, policy, {"vendor": "v"}, 30)
    lowered = limit("rate/1s:vendor", 1 / 60, vendor="v")
    await put(store, "calls", lowered)
    assert len(await claim(store, "calls", 30)) == 1
    await remove(store, "calls", lowered)
    clock.advance("1s")
    assert len(await claim(store, "calls", 30)) == 10


async def test_a_suspension_that_ends_by_itself_leaves_no_rate_shut(store: Store, clock: ManualClock) -> None:
    policy = Policy("calls", limits=(Rate(10, per="1s"),))
    await store.declare(policy)
    await given_jobs(store, policy, {}, 500)
    ends_at = await store.now() + SECOND
    await put(store, "calls", Override(kind=Kind.SUSPEND, expires_at=ends_at))
    assert len(await claim(store, "calls", 400)) == 400
    clock.advance("1s")
    await claim(store, "calls", 100)
    clock.advance("1s")
    assert len(await claim(store, "calls", 100)) == 10


async def test_a_shared_limit_holds_for_a_queue_whose_policy_is_suspended_and_has_no_override(
    store: Store, clock: ManualClock
) -> None:
    policy = Policy("train", limits=(Concurrency(2, name="gpu"), Concurrency(1)))
    await store.declare(policy)
    await given_jobs(store, policy, {}, 5)
    await put(store, "train", Override(kind=Kind.SUSPEND))
    assert len(await claim(store, "train", 5)) == 2
    with pytest.raises(InvalidOverride, match="shared by several queues"):
        await put(store, "train", limit("concurrency:@gpu", 3))


async def test_an_override_that_ended_is_not_booked_on_the_next_operator(store: Store, clock: ManualClock) -> None:
    await store.declare(POLICY)
    ends_at = await store.now() + SECOND
    await put(store, "webhooks", Override(kind=Kind.PAUSE, scope=scope(account="acme"), expires_at=ends_at))
    clock.advance("2s")
    (override_change,) = await store.change_overrides(
        ["webhooks"], [pause(account="bolt")], [], Note(actor="carol", action="pause")
    )
    assert override_change.before == ()
    by_actor = {entry.actor: entry.target for entry in await store.run(records.audit("webhooks"))}
    assert by_actor == {
        "ada": "account=acme is paused",
        EXPIRY: "account=acme is no longer paused",
        "carol": "account=bolt is paused",
    }
