"""A board that is too large for memory: the contract holds with a few keys of it held, and no claim reads much.

J01, with residency so small that every claim asks the tables.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from fairlane.clock import ManualClock
from fairlane.job import Claim
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.scheduler.resident import ResidentBoard
from fairlane.scheduler.settlement import Released
from fairlane.store import boards as checkpoints
from fairlane.store.postgres import claims as on_postgres
from fairlane.store.postgres.claims import Scheduling
from fairlane.store.protocol import Store
from fairlane.store.sqlite import claims as on_sqlite
from fairlane.store.sqlite.database import Transaction
from tests.model import boards
from tests.store.harness import SECOND, Database, claim, claim_once, finish, ids, new_jobs

MOST = 24
ACCOUNTS = 240
BATCH = 8
ROWS_PER_JOB = 30
QUEUE = "webhooks"


class Meter:
    """Rows of the board and heads that were read."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rows = 0
        ask, all_, some = Scheduling.ask, Transaction.all, Transaction.some

        async def asking(scheduling: Scheduling, asked: Any) -> Any:
            found = await ask(scheduling, asked)
            heads = sum(map(len, found.heads.values()))
            self.rows += len(found.flows) + len(found.lanes) + len(found.gates) + heads
            return found

        def reading(read: Any) -> Any:
            def metered(tx: Transaction, *given: Any) -> Any:
                before = tx.rows_read
                found = read(tx, *given)
                self.rows += tx.rows_read - before
                return found

            return metered

        patch.setattr(Scheduling, "ask", asking)
        patch.setattr(Transaction, "all", reading(all_))
        patch.setattr(Transaction, "some", reading(some))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink = ResidentBoard.shrink
    monkeypatch.setattr(ResidentBoard, "shrink", lambda board, most=MOST: shrink(board, MOST))
    monkeypatch.setattr(on_postgres, "MOST_WHOLE", MOST)
    monkeypatch.setattr(on_sqlite, "MOST_WHOLE", MOST)
    monkeypatch.setattr(checkpoints, "EVERY", 3_600.0)


async def given_stores(database: Database, clock: ManualClock, policy: Policy, each: int) -> Sequence[Store]:
    stores = [await database.open(clock) for _ in range(2)]
    await stores[0].declare(policy)
    await stores[0].enqueue([job for n in range(ACCOUNTS) for job in new_jobs(policy, {"account": n}, each)])
    return stores


async def check(store: Store) -> None:
    board, found = await boards.remembered(store, QUEUE), await boards.said(store, QUEUE)
    assert board is not None
    if board.mark == found.mark:
        assert boards.differences(board, found) == []


async def test_every_account_has_its_turn_and_every_job_runs_once(
    database: Database, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Policy(QUEUE, Fair(by="account", charge="count"), (Concurrency(1, by="account"), Concurrency(20)))
    stores = await given_stores(database, clock, policy, 3)
    chance, started, done = random.Random(1), Counter[str | None](), Counter[Any]()
    held: list[Claim] = []
    meter, most_rows, most_held = Meter(monkeypatch), 0, 0
    for turn in range(2_000):
        store = stores[turn // 3 % len(stores)]
        meter.rows = 0
        brought = await claim_once(store, QUEUE, BATCH)
        if turn > 3:  # by then every arrival is folded
            most_rows = max(most_rows, meter.rows)
        held += brought.claims
        started.update(each.keys["account"] for each in brought.claims)
        running = Counter(each.keys["account"] for each in held)
        assert max(running.values(), default=0) <= 1
        assert len(held) <= 20
        assert len(started) < ACCOUNTS or max(started.values()) - min(started.values()) <= 2
        chance.shuffle(held)
        ending, held = held[:BATCH], held[BATCH:]
        await finish(store, ending)
        done.update(ids(ending))
        if turn % 4 == 0:
            await boards.checkpoint(store, QUEUE)
            board = await boards.remembered(store, QUEUE)
            assert board is not None
            most_held = max(most_held, len(board.flows))
            assert not board.is_whole
        if turn % 10 == 0:
            await check(store)
        if not brought.claims and not held and not brought.more:
            break
    assert set(done.values()) == {1}
    assert sum(done.values()) == 3 * ACCOUNTS
    assert most_held <= MOST
    # Two claimers: whoever comes back reads the changes of the other.
    assert most_rows <= ROWS_PER_JOB * BATCH, most_rows


async def test_limits_hold_and_what_is_shut_opens_again(database: Database, clock: ManualClock) -> None:
    policy = Policy(
        QUEUE,
        Fair(by="account"),
        (Rate(1, per="10s", by="account"), Concurrency(1, by="account"), Concurrency(12)),
    )
    stores = await given_stores(database, clock, policy, 2)
    chance, last, done = random.Random(2), dict[str | None, int](), Counter[Any]()
    held: list[Claim] = []
    for _ in range(3_000):
        store = chance.choice(stores)
        now = await store.now()
        got = await claim(store, QUEUE, chance.randrange(1, 10))
        for each in got:
            account = each.keys["account"]
            assert now - last.get(account, -10 * SECOND) >= 10 * SECOND, account
            last[account] = now
        held += got
        assert len(held) <= 12
        assert len({each.keys["account"] for each in held}) == len(held)
        chance.shuffle(held)
        ending, held = held[:6], held[6:]
        await finish(store, ending)
        done.update(ids(ending))
        match chance.randrange(6):
            case 0 | 1:
                await boards.checkpoint(store, QUEUE)
            case 2:
                await store.collect(QUEUE)
            case 3:
                await check(store)
            case _:
                clock.advance(SECOND // 4 if got else SECOND)
        if sum(done.values()) == 2 * ACCOUNTS:
            break
    assert set(done.values()) == {1}
    assert sum(done.values()) == 2 * ACCOUNTS
    assert await claim(stores[0], QUEUE, 5) == []
    assert (await stores[0].counts(QUEUE)).running == 0


async def test_a_job_that_is_given_back_is_found_though_its_lane_is_not_held(
    shared_database: Database, clock: ManualClock
) -> None:
    policy = Policy(QUEUE, Fair(by="account", charge="count"))
    first, second = await given_stores(shared_database, clock, policy, 2)
    early = await claim(first, QUEUE, 5)
    for _ in range(4):
        await finish(second, await claim(second, QUEUE, 20))
        await boards.checkpoint(second, QUEUE)
    board = await boards.remembered(second, QUEUE)
    assert board is not None
    given_back = next(each for each in early if not any(lane.keys == each.keys for lane in board.lanes.values()))
    await finish(first, [given_back], Released("drain"))
    left = []
    while got := await claim(second, QUEUE, 20):
        left += ids(got)
        await finish(second, got)
    assert left.count(given_back.id) == 1
    assert (await second.counts(QUEUE)).ready == 0


async def test_a_claimer_that_catches_up_passes_over_no_lane_that_it_does_not_hold(
    shared_database: Database, clock: ManualClock
) -> None:
    policy = Policy(QUEUE, Fair(by="account"), (Concurrency(100, by="endpoint"),), keys=("account", "endpoint"))
    first, second = [await shared_database.open(clock) for _ in range(2)]
    await first.declare(policy)
    (oldest,) = new_jobs(policy, {"account": "vip", "endpoint": "x"}, priority=100)
    others = [job for n in range(ACCOUNTS) for job in new_jobs(policy, {"account": n, "endpoint": "o"})]
    await first.enqueue([oldest, *others])
    await boards.fold(first, QUEUE)
    await boards.checkpoint(first, QUEUE)
    for endpoint in ("y", "z"):  # two more claims, each of which folds an arrival
        clock.advance(SECOND)
        await first.enqueue(new_jobs(policy, {"account": "vip", "endpoint": endpoint}))
        await boards.fold(first, QUEUE)
    (started,) = await claim(second, QUEUE, 1)
    assert started.id == oldest.id


@pytest.mark.parametrize("fair", [None, Fair(by="account")])
async def test_lanes_and_gates_are_bounded_too(
    shared_database: Database, clock: ManualClock, fair: Fair | None
) -> None:
    policy = Policy(QUEUE, fair, (Concurrency(1, by="account"),))
    store, _ = await given_stores(shared_database, clock, policy, 1)
    done: Counter[Any] = Counter()
    while claims := await claim(store, QUEUE, 40):
        await finish(store, claims)
        done.update(ids(claims))
        await boards.checkpoint(store, QUEUE)
        board = await boards.remembered(store, QUEUE)
        assert board is not None
        assert len(board.lanes) <= 2 * MOST
        assert len(board.gates) <= 2 * MOST
        await check(store)
    assert set(done.values()) == {1}
    assert sum(done.values()) == ACCOUNTS
