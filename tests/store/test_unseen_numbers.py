"""Numbers that unseen jobs bring hold at once: whoever is shown as held, and every gauge, goes by them (O14, O16)."""

from __future__ import annotations

import random
from functools import partial

import pytest
from msgspec.structs import replace

from fairlane.clock import ManualClock
from fairlane.job import Claim
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.policy.keys import By
from fairlane.policy.overrides import Kind, Override
from fairlane.policy.policy import WEIGHT
from fairlane.scheduler.settlement import Died
from fairlane.stats.gates import Gauge, gauges
from fairlane.stats.keys import Held
from fairlane.store.audit import Note
from fairlane.store.protocol import Store
from fairlane.store.stats import Moment
from tests.store.harness import claim, finish, given_jobs, new_jobs

QUEUE = "webhooks"
ACCOUNT: By = ("account",)
NAME = "concurrency:account"
SLOTS = Policy(QUEUE, limits=(Concurrency(lambda context: context["slots"], by="account"),))


@pytest.fixture(params=["few", "many"], autouse=True)
def unseen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """However many events no claim has seen."""
    if request.param == "many":
        monkeypatch.setattr("fairlane.store.stats.MANY", 0)
    found: str = request.param
    return found


async def bring(store: Store, number: float, count: int = 1, *, account: str = "acme", policy: Policy = SLOTS) -> None:
    (name,) = policy.brought
    jobs = new_jobs(policy, {"account": account} if policy.keys_of_job else {}, count)
    await store.enqueue([replace(job, given={name: number}) for job in jobs])


async def held_of(store: Store) -> dict[str, int]:
    """By key, how many jobs are held: the same wherever it is asked."""
    listed = partial(Moment.list_keys, queues=[QUEUE], by=ACCOUNT, limit=500)
    (queue,) = await store.ask(lambda moment: moment.survey([QUEUE]))
    page, held = await store.ask(listed), await store.ask(partial(listed, held_only=True))
    found = {each.key: each.waiting for _, each in page.keys if each.held_by}
    assert {each.key: each.waiting for _, each in held.keys} == found
    assert {each.key: each.waiting for _, each in await store.ask(lambda moment: moment.list_held([QUEUE]))} == found
    assert queue.held.get(NAME, Held()) == Held(len(found), sum(found.values()))
    assert queue.held_jobs == sum(found.values())
    return {str(key[0]): waiting for key, waiting in found.items()}


async def gauge_of(store: Store, key: tuple[str | None, ...], policy: Policy = SLOTS) -> Gauge:
    wanted = [(policy.bound[0], key)]
    asked = partial(Moment.boards, wanted={QUEUE: wanted})
    (gauge,) = gauges((await store.ask(asked))[QUEUE], wanted)
    return gauge


@pytest.mark.parametrize("is_added_up", [True, False])
async def test_a_raised_number_holds_nobody_back_before_any_claim_has_seen_it(store: Store, is_added_up: bool) -> None:
    await store.declare(SLOTS)
    await bring(store, 2, 5)
    assert len(await claim(store, QUEUE, 10)) == 2
    if is_added_up:
        await store.conclude(QUEUE)
    assert await held_of(store) == {"acme": 3}
    await bring(store, 7)
    assert await held_of(store) == {}
    assert ((await gauge_of(store, ("acme",))).used, (await gauge_of(store, ("acme",))).bound) == (2, 7)


@pytest.mark.parametrize("is_added_up", [True, False])
async def test_a_lowered_number_holds_jobs_back_before_any_claim_has_seen_it(store: Store, is_added_up: bool) -> None:
    await store.declare(SLOTS)
    await bring(store, 5, 3)
    assert len(await claim(store, QUEUE, 10)) == 3
    if is_added_up:
        await store.conclude(QUEUE)
    await bring(store, 4)
    await bring(store, 9, account="globex")
    assert await held_of(store) == {}
    await bring(store, 2)
    assert await held_of(store) == {"acme": 2}


async def test_a_number_of_0_stops_a_key_that_no_claim_has_seen(store: Store) -> None:
    await store.declare(SLOTS)
    await bring(store, 0, 4)
    await bring(store, 10, 2, account="globex")
    assert await held_of(store) == {"acme": 4}
    await bring(store, 1)
    assert await held_of(store) == {}


async def test_a_key_stays_stopped_though_an_older_job_comes_again(store: Store) -> None:
    """U01: what was given last holds, and the job that comes last was given before."""
    await store.declare(SLOTS)
    await bring(store, 3)
    (first,) = await claim(store, QUEUE, 1)
    await finish(store, [first], Died("never"))
    (last,) = new_jobs(SLOTS, {"account": "acme"})
    await store.enqueue([replace(last, given={NAME: 0})])
    assert await claim(store, QUEUE, 10) == []
    await store.cancel(last.id)
    assert await claim(store, QUEUE, 10) == []
    assert await held_of(store) == {}
    await store.replay([first.id])
    assert await held_of(store) == {"acme": 1}
    assert await claim(store, QUEUE, 10) == []


async def test_a_limit_of_0_stops_keys_that_no_claim_has_seen(store: Store) -> None:
    policy = Policy(QUEUE, limits=(Concurrency(0, by="account"),))
    await store.declare(policy)
    raised = Override(kind=Kind.LIMIT, limit=NAME, scope=(("account", "globex"),), value=1)
    await store.change_overrides([QUEUE], [raised], [], Note(actor="a test", action="limit set"))
    for account in ("acme", "globex"):
        await given_jobs(store, policy, {"account": account}, 2)
    assert await held_of(store) == {"acme": 2}


async def test_what_an_operator_has_set_goes_before_what_a_job_brings(store: Store) -> None:
    await store.declare(SLOTS)
    await bring(store, 1, 3)
    assert len(await claim(store, QUEUE, 10)) == 1
    kept = Override(kind=Kind.LIMIT, limit=NAME, scope=(("account", "acme"),), value=1)
    await store.change_overrides([QUEUE], [kept], [], Note(actor="a test", action="limit set"))
    await bring(store, 9)
    assert await held_of(store) == {"acme": 3}


async def test_a_rate_that_an_unseen_job_has_raised_opens_by_the_new_number(store: Store, clock: ManualClock) -> None:
    policy = Policy(QUEUE, limits=(Rate(lambda context: context["rpm"], per="1m", by="account"),))
    await store.declare(policy)
    await bring(store, 2, 5, policy=policy)
    assert len(await claim(store, QUEUE, 10)) == 2
    await bring(store, 60, policy=policy)

    async def held() -> dict[str, Held]:
        (queue,) = await store.ask(lambda moment: moment.survey([QUEUE]))
        return queue.held

    assert await held() == {"rate/60s:account": Held(1, 4)}, "its bucket is empty, whatever it may hold"
    clock.advance("2s")
    assert await held() == {}
    gauge = await gauge_of(store, ("acme",), policy)
    assert (gauge.bound, gauge.room) == (60, 2)
    assert len(await claim(store, QUEUE, 10)) == 2


async def test_a_limit_of_the_whole_queue_is_shown_with_the_number_of_an_unseen_job(store: Store) -> None:
    policy = Policy(QUEUE, limits=(Concurrency(lambda context: context["all"]),))
    await store.declare(policy)
    await bring(store, 2, 5, policy=policy)
    assert len(await claim(store, QUEUE, 10)) == 2
    await bring(store, 9, policy=policy)
    gauge = await gauge_of(store, (), policy)
    assert (gauge.used, gauge.bound, gauge.room) == (2, 9, 7)


async def test_a_flow_is_shown_with_the_weight_that_an_unseen_job_brought(store: Store) -> None:
    policy = Policy(QUEUE, fair=Fair(by="account", weight=lambda context: context["weight"]))
    await store.declare(policy)
    flows = [policy.flow_of_key((account,)) for account in ("acme", "globex", "nobody")]

    async def weights() -> list[float | None]:
        found = await store.ask(lambda moment: moment.weights_named({QUEUE: flows}))
        return [found[flow].weight if flow in found else None for flow in flows]

    assert set(policy.brought) == {WEIGHT}
    await bring(store, 4, policy=policy)
    assert len(await claim(store, QUEUE, 1)) == 1
    await bring(store, 8, policy=policy)
    await bring(store, 3, policy=policy, account="globex")
    assert await weights() == [8, 3, None]
    await claim(store, QUEUE, 10)
    assert await weights() == [8, 3, None]


@pytest.mark.parametrize("seed", range(4))
async def test_whoever_is_full_by_the_last_number_of_its_key_is_held_and_nobody_else(store: Store, seed: int) -> None:
    """Random lives: enqueues with any numbers, claims, ends, sums."""
    dice = random.Random(seed)
    await store.declare(SLOTS)
    numbers: dict[str, int] = {}
    waiting: dict[str, int] = dict.fromkeys("abc", 0)
    running: list[Claim] = []
    for _ in range(40):
        match dice.randrange(5):
            case 0 | 1:
                account, count = dice.choice("abc"), dice.randrange(1, 4)
                numbers[account] = dice.randrange(4)
                waiting[account] += count
                await bring(store, numbers[account], count, account=account)
            case 2:
                started = await claim(store, QUEUE, dice.randrange(1, 4))
                for each in started:
                    waiting[str(each.keys["account"])] -= 1
                running += started
            case 3 if running:
                await finish(store, [running.pop(dice.randrange(len(running)))])
            case _:
                await store.conclude(QUEUE)
        in_use = [str(each.keys["account"]) for each in running]
        full = {key: left for key, left in waiting.items() if left and in_use.count(key) >= numbers[key]}
        assert await held_of(store) == full
        for account, number in numbers.items():
            gauge = await gauge_of(store, (account,))
            assert (gauge.used, gauge.bound) == (in_use.count(account), number)
