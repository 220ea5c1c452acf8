"""Tallies that pile up are shed, and what figures then say. The same on every store."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from fairlane.clock import Instant, ManualClock
from fairlane.job import Claim
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.policy.by import By
from fairlane.policy.keys import gate_id, select
from fairlane.scheduler.figures import Held
from fairlane.store import adding_up
from fairlane.store.figures import Tallied
from fairlane.store.postgres import tallying as postgres_tallying
from fairlane.store.protocol import Store
from fairlane.store.sqlite.figures import Figures as SqliteFigures
from tests.store.harness import SECOND, Database, claim, finish, given_jobs
from tests.store.test_figures import POLICY, all_keys, assert_true, every_job, figures_of, keys, live, tally_all


@pytest.fixture
def shedding(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether any tally that waits is one too many."""

    def shed(on: bool) -> None:
        monkeypatch.setattr(adding_up, "MOST_TALLIES", 0 if on else 20_000)

    return shed


async def held_by_gates(store: Store, policy: Policy) -> dict[tuple[By, tuple[str | None, ...]], tuple[str, ...]]:
    """Whom limits hold back, asked of every gate that there can be."""
    found: dict[tuple[By, tuple[str | None, ...]], tuple[str, ...]] = {}
    for bound in sorted(policy.bound, key=lambda bound: bound.name):
        by = bound.limit.by
        for key in {select(by, job.keys, job.priority) for job in await every_job(store, policy.queue)} if by else ():
            gates, _ = await store.gates_named([gate_id(policy.queue, bound.name, key)], [])
            if gates and gates[0].waiting:
                found[by, key] = (*found.get((by, key), ()), bound.name)
    return found


@pytest.mark.parametrize("seed", range(3))
async def test_figures_equal_the_truth_where_tallies_are_shed(
    store: Store, clock: ManualClock, shedding: Callable[[bool], None], seed: int
) -> None:
    dice = random.Random(seed)
    policy = Policy(
        "webhooks", fair=Fair(by="account"), limits=(Concurrency(2, by="account"), Concurrency(3, by="endpoint"))
    )
    await store.declare(policy)
    held: list[Claim] = []
    for nth in range(6):
        shedding(nth % 2 == 0)
        for _ in range(25):
            await live(store, clock, policy, dice, held)
        await given_jobs(store, policy, keys(nth % 4, nth % 3), 4)
        held += await claim(store, "webhooks", 20)
        await assert_true(store, policy)
        shown = {
            (by, each.key): each.held_by for by in policy.scopes for each in await all_keys(store, by) if each.held_by
        }
        assert shown == await held_by_gates(store, policy)
        assert shown != {}


async def test_what_is_shed_is_missing_from_keys_and_not_from_minutes(
    store: Store, clock: ManualClock, shedding: Callable[[bool], None]
) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 6)
    await finish(store, await claim(store, "webhooks", 10), ran=SECOND)
    await claim(store, "webhooks", 1)
    await tally_all(store)
    clock.advance("1m")
    shedding(True)
    await finish(store, await claim(store, "webhooks", 10), ran=SECOND)
    await claim(store, "webhooks", 10)
    tallied = await store.tally("webhooks")
    assert (tallied.shed, tallied.more) == (2, False)
    acme = await figures_of(store, "acme")
    assert (acme.waiting, acme.running, acme.held_by, acme.done) == (1, 2, ("concurrency:account",), 2)
    first, second = (await store.minutes(["webhooks"], 0))["webhooks"]
    assert (first.arrived, first.started, first.ended) == (6, 3, 2)
    assert (second.started, second.ended, second.ran) == (2, 1, SECOND)
    (queue,) = await store.survey(["webhooks"])
    assert (queue.untallied, queue.held) == (0, {"concurrency:account": Held(1, 1)})
    assert (await store.tally("webhooks")).shed == 0


async def test_a_claim_while_tallies_are_shed_is_counted_once(
    shared_database: Database, shedding: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, other = await shared_database.open(), await shared_database.open()
    await store.declare(POLICY)
    for account in range(20):
        await given_jobs(store, POLICY, keys(account), 3)
    await claim(store, "webhooks", 20)
    between: list[Claim] = []
    count_on_postgres, count_on_sqlite = postgres_tallying._Pass._count_anew, SqliteFigures._tally

    async def count_after_a_claim_on_postgres(self: postgres_tallying._Pass, adding: adding_up.AddingUp) -> None:
        between.extend(await claim(other, "webhooks", 7))
        await count_on_postgres(self, adding)

    async def count_after_a_claim_on_sqlite(self: SqliteFigures, queue: str, now: Instant, limit: int) -> Tallied:
        between.extend(await claim(other, "webhooks", 7))
        return await count_on_sqlite(self, queue, now, limit)

    monkeypatch.setattr(postgres_tallying._Pass, "_count_anew", count_after_a_claim_on_postgres)
    monkeypatch.setattr(SqliteFigures, "_tally", count_after_a_claim_on_sqlite)
    shedding(True)
    assert (await store.tally("webhooks")).shed > 0
    assert between
    shedding(False)
    monkeypatch.undo()
    await assert_true(store, POLICY)


async def test_a_crash_while_tallies_are_shed_leaves_keys_to_be_counted(
    store: Store, shedding: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 5)
    await claim(store, "webhooks", 1)
    await tally_all(store)
    await claim(store, "webhooks", 10)

    def crash(self: adding_up.AddingUp) -> adding_up.Counting:
        raise RuntimeError("the plug was pulled")

    shedding(True)
    with monkeypatch.context() as patched:
        patched.setattr(adding_up.AddingUp, "counting", crash)
        with pytest.raises(RuntimeError, match="plug"):
            await store.tally("webhooks")
    shedding(False)
    await assert_true(store, POLICY)


async def test_tallies_of_many_bytes_are_shed_though_they_are_few(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adding_up, "MOST_BYTES", 100)
    await store.declare(POLICY)
    await given_jobs(store, POLICY, keys("acme"), 1)
    await claim(store, "webhooks", 1)
    assert (await store.tally("webhooks")).shed == 0
    await given_jobs(store, POLICY, keys("a" * 100), 1)
    await claim(store, "webhooks", 1)
    assert (await store.tally("webhooks")).shed == 1
    await assert_true(store, POLICY)
