"""What is shown while nobody claims is what the next claim would find: readers fold what it would fold (O14, O15)."""

from __future__ import annotations

from functools import partial
from uuid import UUID

import pytest

from fairlane.clock import ManualClock
from fairlane.policy import Backlog, Concurrency, Fair, Policy, Sequence
from fairlane.policy.keys import By
from fairlane.scheduler.settlement import Failed, Released
from fairlane.stats.gates import gauges
from fairlane.stats.keys import Held
from fairlane.store import operators, upkeep
from fairlane.store.audit import Note
from fairlane.store.protocol import Store
from fairlane.store.stats import Moment
from tests.store.harness import SECOND, claim, finish, given_jobs

QUEUE = "webhooks"
ACCOUNT: By = ("account",)
ACME = {"account": "acme"}
IN_TURN = Policy(QUEUE, limits=(Sequence(by="account"),))


@pytest.fixture(params=["few", "many"], autouse=True)
def unseen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """However many events no claim has seen."""
    if request.param == "many":
        monkeypatch.setattr("fairlane.store.stats.MANY", 0)
    found: str = request.param
    return found


async def held_of(store: Store, by: By = ACCOUNT) -> dict[str, int]:
    """By limit, how many jobs of this scope are held: the same wherever it is asked."""
    listed = partial(Moment.list_keys, queues=[QUEUE], by=by, limit=500)
    (queue,) = await store.ask(lambda moment: moment.survey([QUEUE]))
    page, held = await store.ask(listed), await store.ask(partial(listed, held_only=True))
    found = {each.key: each for _, each in page.keys if each.held_by}
    assert {each.key for _, each in held.keys} == found.keys()
    assert {each.key for _, each in await store.ask(lambda moment: moment.list_held([QUEUE]))} == found.keys()
    assert all(each.waiting for each in found.values())
    limits = {limit for each in found.values() for limit in each.held_by}
    behind = {limit: [each.waiting for each in found.values() if limit in each.held_by] for limit in limits}
    assert queue.held == {limit: Held(len(waiting), sum(waiting)) for limit, waiting in behind.items()}
    return {limit: each.jobs for limit, each in queue.held.items()}


async def used_of(store: Store, policy: Policy) -> list[float]:
    """How much of each limit is used, of `acme` or of the whole queue."""
    wanted = [(bound, tuple("acme" for _ in bound.limit.by)) for bound in policy.bound]
    asked = partial(Moment.boards, wanted={QUEUE: wanted})
    return [gauge.used for gauge in gauges((await store.ask(asked))[QUEUE], wanted)]


async def give_back(store: Store, clock: ManualClock, how: str, *, is_added_up: bool) -> None:
    """The first job of a sequence leaves its place, and nobody claims."""
    (first,) = await claim(store, QUEUE, 5)
    if how == "released":
        await finish(store, [first], Released("shutdown"))
    elif how == "reaped":
        clock.advance("31s")
        await store.reap()
    else:
        await finish(store, [first], Failed("no", 60 * SECOND))
        if is_added_up:
            await store.conclude(QUEUE)
        assert await held_of(store) == {"sequence:account": 1}
        if how == "retried":
            clock.advance("60s")
        elif how == "hurried":
            await store.run(operators.retry_now([first.id]))
        else:
            await store.cancel(first.id)


@pytest.mark.parametrize("is_added_up", [True, False])
@pytest.mark.parametrize("how", ["released", "reaped", "retried", "hurried", "cancelled"])
async def test_a_place_in_a_sequence_that_nobody_holds_any_more_holds_nobody_back(
    store: Store, clock: ManualClock, how: str, is_added_up: bool
) -> None:
    await store.declare(IN_TURN)
    await given_jobs(store, IN_TURN, ACME, 2)
    await give_back(store, clock, how, is_added_up=is_added_up)
    assert await held_of(store) == {}
    assert await used_of(store, IN_TURN) == [0]
    assert len(await claim(store, QUEUE, 5)) == 1
    assert sum((await held_of(store)).values()) == (0 if how == "cancelled" else 1)


async def test_a_backlog_counts_jobs_that_no_claim_has_seen_and_those_that_were_cancelled(store: Store) -> None:
    policy = Policy(QUEUE, limits=(Backlog(3, by="account"), Backlog(4)))
    await store.declare(policy)
    jobs = await given_jobs(store, policy, ACME, 5)
    await given_jobs(store, policy, {"account": "globex"}, 2)
    assert await used_of(store, policy) == [5, 7], "nothing is folded"
    await store.conclude(QUEUE)
    assert await used_of(store, policy) == [5, 7]
    await store.cancel(jobs[0])
    assert await used_of(store, policy) == [4, 6]
    started = await claim(store, QUEUE, 2)
    assert await used_of(store, policy) == [4 - sum(each.keys == ACME for each in started), 4]


async def ready_jobs(store: Store, jobs: list[UUID]) -> list[UUID]:
    return [each for each in jobs if (await store.job(each)).state.name == "READY"]


@pytest.mark.parametrize("fair", [None, Fair(by="account")])
@pytest.mark.parametrize("folds", [True, False])
@pytest.mark.parametrize("is_added_up", [True, False])
async def test_a_key_of_which_nothing_waits_any_more_is_held_by_nothing(
    store: Store, fair: Fair | None, folds: bool, is_added_up: bool
) -> None:
    policy = Policy(QUEUE, fair, limits=(Concurrency(1, by="account"),), keys=("account", "endpoint"))
    await store.declare(policy)
    jobs = [j for n in range(3) for j in await given_jobs(store, policy, {**ACME, "endpoint": n}, 1)]
    (running,) = await claim(store, QUEUE, 5)
    if is_added_up:
        await store.conclude(QUEUE)
    assert await held_of(store) == {"concurrency:account": 2}
    for job in await ready_jobs(store, jobs):
        await store.cancel(job)
    if folds:
        await store.conclude(QUEUE)
    assert await held_of(store) == {}
    await given_jobs(store, policy, {**ACME, "endpoint": 0}, 1)
    assert await held_of(store) == {"concurrency:account": 1}
    assert await claim(store, QUEUE, 5) == []
    assert await held_of(store) == {"concurrency:account": 1}
    await finish(store, [running])
    assert len(await claim(store, QUEUE, 5)) == 1


@pytest.mark.parametrize("fair", [None, Fair(by="account")])
async def test_a_key_whose_last_job_was_forced_to_start_is_held_by_nothing(store: Store, fair: Fair | None) -> None:
    policy = Policy(QUEUE, fair, limits=(Concurrency(1, by="account"),))
    await store.declare(policy)
    jobs = await given_jobs(store, policy, ACME, 2)
    await claim(store, QUEUE, 5)
    await store.run(operators.force(await ready_jobs(store, jobs), Note(actor="ada", action="force")))
    assert len(await claim(store, QUEUE, 5)) == 1
    assert await held_of(store) == {}
    await given_jobs(store, policy, ACME, 1)
    assert await claim(store, QUEUE, 5) == []
    assert await held_of(store) == {"concurrency:account": 1}


@pytest.mark.parametrize("fair", [None, Fair(by="account")])
@pytest.mark.parametrize("is_added_up", [True, False])
async def test_a_free_limit_that_queues_share_holds_nobody_back_though_one_of_two_lanes_is_woken(
    store: Store, fair: Fair | None, is_added_up: bool
) -> None:
    seats = Concurrency(1, by="endpoint", name="seats")
    policy = Policy(QUEUE, fair, limits=(seats,), keys=("account", "endpoint"))
    await store.declare(policy)
    await store.declare(Policy("other", fair, limits=(seats,), keys=("account", "endpoint")))
    for account in "abc":
        await given_jobs(store, policy, {"endpoint": "e", "account": account}, 1)
    started = await claim(store, QUEUE, 5)
    assert await held_of(store, ("endpoint",)) == {"concurrency:endpoint@seats": 2}
    await finish(store, started)
    await store.run(upkeep.fold(QUEUE))
    if is_added_up:
        await store.conclude(QUEUE)
    assert await held_of(store, ("endpoint",)) == {}
    assert len(await claim(store, QUEUE, 5)) == 1
    assert await held_of(store, ("endpoint",)) == {"concurrency:endpoint@seats": 1}


async def test_what_is_due_is_ready_although_no_claim_has_promoted_it(store: Store, clock: ManualClock) -> None:
    policy = Policy(QUEUE, fair=Fair(by="account"))
    await store.declare(policy)
    await given_jobs(store, policy, ACME, 3, delay=5 * SECOND)
    (before,) = await store.ask(lambda moment: moment.survey([QUEUE]))
    assert (before.ready, before.scheduled.count, before.oldest_ready_at) == (0, 3, None)
    due = clock.now() + 5 * SECOND
    clock.advance("1m")
    (after,) = await store.ask(lambda moment: moment.survey([QUEUE]))
    assert (after.ready, after.scheduled.count, after.oldest_ready_at) == (3, 0, due)
    ((_, key),) = (await store.ask(partial(Moment.list_keys, queues=[QUEUE], by=ACCOUNT))).keys
    assert (key.key, key.waiting) == (("acme",), 3)
    assert (await store.ask(lambda moment: moment.scheduled_by_lane([QUEUE]))).lanes == []
