"""Figures: what claims did, added up by upkeep, for people who look. The same on every store."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from fairlane.clock import ManualClock
from fairlane.errors import ConfigurationError
from fairlane.job import JobRecord, State
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.policy.by import By
from fairlane.policy.keys import select
from fairlane.scheduler.figures import KeyFigures
from fairlane.store.figures import KeySort
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Store
from tests.store.harness import SECOND, claim, finish, given_jobs

ACCOUNT: By = ("account",)
POLICY = Policy(
    "webhooks",
    fair=Fair(by="account"),
    limits=(Concurrency(2, by="account"), Rate(100, per="1m", by="endpoint"), Concurrency(50)),
)


def keys(account: object, endpoint: object = "e") -> dict[str, object]:
    return {"account": account, "endpoint": endpoint}


async def tally_all(store: Store, queue: str = "webhooks") -> None:
    while (await store.tally(queue)).more:
        pass


async def all_keys(
    store: Store, by: By = ACCOUNT, queues: Sequence[str] = ("webhooks",), sort: KeySort = KeySort.NAME, limit: int = 50
) -> list[KeyFigures]:
    found: list[KeyFigures] = []
    after: str | None = None
    while True:
        page = await store.list_keys(queues, by, sort=sort, after=after, limit=limit)
        found += [figures for _, figures in page.keys]
        after = page.after
        if after is None:
            return found


async def figures_of(store: Store, key: str, by: By = ACCOUNT, queue: str = "webhooks") -> KeyFigures:
    found = await store.keys_named([queue], [(by, (key,))])
    return found[0][1] if found else KeyFigures(by=by, key=(key,))


async def every_job(store: Store, queue: str = "webhooks") -> list[JobRecord]:
    found: list[JobRecord] = []
    after: str | None = None
    while True:
        page = await store.find_jobs(JobFilter(queue=queue), after, 1_000)
        found += page.jobs
        after = page.after
        if after is None:
            return found


async def truth(store: Store, by: By, queue: str = "webhooks") -> dict[tuple[str | None, ...], tuple[int, int]]:
    """Who waits and who runs by key, counted from the jobs."""
    waiting: Counter[tuple[str | None, ...]] = Counter()
    running: Counter[tuple[str | None, ...]] = Counter()
    for job in await every_job(store, queue):
        key = select(by, {**job.keys, "task": job.task}, job.priority)
        waiting[key] += job.state is State.READY
        running[key] += job.state is State.RUNNING
    return {key: (waiting[key], running[key]) for key in waiting if waiting[key] or running[key]}


async def shown(store: Store, by: By, queue: str = "webhooks") -> dict[tuple[str | None, ...], tuple[int, int]]:
    found = await all_keys(store, by, [queue])
    return {each.key: (each.waiting, each.running) for each in found if each.waiting or each.running}


async def test_figures_say_who_waits_and_runs_once_they_are_added_up(store: Store) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 5)
    await given_jobs(store, POLICY, keys("globex"), 1)
    await claim(store, "webhooks", 10)
    await tally_all(store)
    acme, globex = await figures_of(store, "acme"), await figures_of(store, "globex")
    assert (acme.waiting, acme.running) == (3, 2)
    assert (globex.waiting, globex.running) == (0, 1)


async def test_what_ends_is_counted_for_a_day(store: Store, clock: ManualClock) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 2)
    await finish(store, await claim(store, "webhooks", 10), ran=2 * SECOND)
    await claim(store, "webhooks", 1)
    await tally_all(store)
    acme = await figures_of(store, "acme")
    assert (acme.done, acme.failed, acme.ran) == (2, 0, 4 * SECOND)
    assert acme.run_time == pytest.approx(2.0)
    assert acme.started_at == clock.now()
    clock.advance("25h")
    await tally_all(store)
    assert await all_keys(store) == []


async def test_a_forged_place_is_refused(store: Store) -> None:
    await store.declare(POLICY)
    for forged in ("", "x", "!!!", "bm90aGluZw", "W10", "😀"):
        with pytest.raises(ConfigurationError, match="after="):
            await store.list_keys(["webhooks"], ACCOUNT, after=forged)


async def test_figures_equal_the_truth_after_random_lives(store: Store, clock: ManualClock) -> None:
    dice = random.Random(7)
    await store.declare(POLICY)
    held = []
    for _ in range(60):
        clock.advance("1s")
        await given_jobs(store, POLICY, keys(dice.randrange(4), dice.randrange(3)), dice.randrange(1, 4))
        held += await claim(store, "webhooks", dice.randrange(1, 6))
        dice.shuffle(held)
        await finish(store, held[:2])
        held = held[2:]
        if dice.random() < 0.3:
            await tally_all(store)
    await claim(store, "webhooks", 1)
    await tally_all(store)
    for by in POLICY.scopes:
        assert await shown(store, by) == await truth(store, by)


async def test_the_next_jobs_of_a_flow_are_shown_in_the_order_in_which_they_start(
    store: Store, clock: ManualClock
) -> None:
    """O06"""
    policy = Policy("webhooks", fair=Fair(by="account"), limits=(Concurrency(1, by="endpoint"),))
    await store.declare(policy)
    dice = random.Random(11)
    for n in range(40):
        clock.advance("1s")
        for account in ("acme", "globex"):
            await given_jobs(store, policy, keys(account, dice.randrange(3)), priority=dice.randrange(-2, 3))
        if n % 13 == 5:
            await claim(store, "webhooks", 3)
    shown = [job.id for job in await store.next_jobs("webhooks", {"account": "acme"}, 30)]
    open_policy = Policy("webhooks", fair=Fair(by="account"), keys=("account", "endpoint"))
    await store.apply(open_policy)
    started = [each.id for each in await claim(store, "webhooks", 200) if each.keys["account"] == "acme"]
    assert shown == started[:30]
