"""Boards in memory, the journal and checkpoints: whoever claims plans from what is so (J02 to J05).

J01, that a board in memory equals the tables and the journal and what jobs say, holds at every rest of `tests/model`.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg
import pytest

from fairlane.clock import ManualClock
from fairlane.errors import FairlaneError, SchemaTooNew
from fairlane.job import State
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.scheduler.settlement import Released
from fairlane.store import boards as checkpoints
from fairlane.store.boards import Boards
from fairlane.store.postgres.connections import STATEMENTS, Session
from fairlane.store.protocol import FOLD_AT_MOST, Store
from fairlane.store.sqlite.database import Transaction
from tests.model import boards
from tests.store.harness import SECOND, Database, claim, claim_once, finish, given_jobs, ids, new_jobs, state_of
from tests.store.lost_tail import Copy

QUEUE = "webhooks"
POLICY = Policy(QUEUE, Fair(by="account", charge="count"), (Concurrency(2, by="account"), Concurrency(7)))
PLAIN = Policy(QUEUE)


@pytest.fixture(autouse=True)
def no_checkpoint_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks at a board and then at the tables looks at one moment."""
    monkeypatch.setattr(checkpoints, "EVERY", 3_600.0)


async def opened(database: Database, clock: ManualClock, policy: Policy = POLICY, count: int = 2) -> list[Store]:
    stores = [await database.open(clock) for _ in range(count)]
    await stores[0].declare(policy)
    return stores


async def given_accounts(store: Store, accounts: int, each: int) -> None:
    await store.enqueue([job for n in range(accounts) for job in new_jobs(POLICY, {"account": n}, each)])


async def run(database: Database, statement: str) -> None:
    async with database.transaction() as mine:
        if database.kind == "postgres":
            await mine.tx.execute("set local search_path to fairlane")
            await mine.tx.execute(statement)
        else:
            mine.tx.execute(statement)
        await mine.commit()


async def agree(stores: list[Store], queue: str = QUEUE) -> None:
    """Everybody remembers what the database says."""
    for store in stores:
        board = await boards.catch_up(store, queue)
        assert boards.differences(board, await boards.said(store, queue)) == []


async def counts_what_runs(store: Store, database: Database, queue: str = QUEUE) -> None:
    """The board is what the jobs themselves say, once every lane event is folded."""
    await boards.fold(store, queue)
    async with database.transaction(begin=False) as mine:
        schema = "fairlane." if database.kind == "postgres" else ""
        query = f"select lane, state, count(*) from {schema}jobs where state in (1, 2) group by lane, state"
        found: Any = await mine.tx.fetch(query) if schema else mine.tx.execute(query).fetchall()
    jobs = {(lane, state): count for lane, state, count in found}
    now = (await boards.said(store, queue)).now
    counted = {(row.id, int(State.READY)): row.ready for row in now.lanes if row.ready}
    counted |= {(row.id, int(State.RUNNING)): row.in_flight for row in now.lanes if row.in_flight}
    assert counted == jobs
    running = sum(count for (_, state), count in jobs.items() if state == State.RUNNING)
    assert {row.in_flight for row in now.gates if not row.key and row.in_flight} == ({running} if running else set())


# J02
@pytest.mark.parametrize("seed", range(3))
async def test_whoever_remembers_what_a_crash_has_lost_does_not_plan_from_it(
    shared_database: Database, clock: ManualClock, seed: int
) -> None:
    stores = await opened(shared_database, clock, count=3)
    await given_accounts(stores[0], 6, 8)
    chance, copy, done = random.Random(seed), Copy(shared_database), 0
    for _ in range(6):
        claims = [each for store in stores for each in await claim(store, QUEUE, chance.randrange(1, 4))]
        await finish(stores[0], claims)
        done += len(claims)
        await copy.take()
        for _ in range(chance.randrange(1, 6)):  # the tail
            store = chance.choice(stores)
            match chance.randrange(4):
                case 0:
                    await boards.checkpoint(store, QUEUE)
                case 1:
                    await store.collect(QUEUE)
                case _:
                    await claim_once(store, QUEUE, chance.randrange(1, 4))
        remembering = chance.choice(stores)
        lost = await boards.remembered(remembering, QUEUE)
        mark = None if lost is None else lost.mark
        await copy.put_back()
        # Others use the lost numbers again; whoever remembers comes later, or at once.
        others = [store for store in stores if store is not remembering]
        again = []
        for store in chance.sample(others, chance.randrange(3)):
            again += await claim(store, QUEUE, 1)
        if mark is not None and again:
            assert (await boards.said(stores[0], QUEUE)).mark != mark
        again += await claim(remembering, QUEUE, 2)
        assert len({each.id for each in again}) == len(again)
        await finish(remembering, again)
        done += len(again)
        await agree(stores)
        await counts_what_runs(chance.choice(stores), shared_database)
    while claims := await claim(stores[done % 3], QUEUE, 5):
        await finish(stores[0], claims)
        done += len(claims)
    assert done == 48


# J02
async def test_a_checkpoint_that_a_crash_has_lost_is_made_again(shared_database: Database, clock: ManualClock) -> None:
    first, second = await opened(shared_database, clock)
    await given_accounts(first, 12, 4)
    held = await claim(first, QUEUE, 7)
    copy = Copy(shared_database)
    await copy.take()
    await boards.checkpoint(first, QUEUE)
    assert (await boards.said(first, QUEUE)).stored == (await boards.said(first, QUEUE)).mark.seq
    await copy.put_back_checkpoint()
    # Other lanes change, and the tables are written twice: after that nobody can catch up from before.
    for _ in range(2):
        await finish(first, held[-1:])
        held = [*held[:-1], *await claim(first, QUEUE, 1)]
        await agree([first])
        await boards.checkpoint(first, QUEUE)
    await boards.forget(second, QUEUE)
    await agree([first, second])
    await counts_what_runs(second, shared_database)
    assert await claim(second, QUEUE, 3) == [], "seven run"


# J03
@pytest.mark.parametrize("other_folds", [False, True], ids=["alone", "another folds"])
async def test_a_job_that_was_given_back_runs_in_its_place_before_heads_that_are_kept(
    shared_database: Database, clock: ManualClock, other_folds: bool
) -> None:
    store, other = await opened(shared_database, clock, PLAIN)
    jobs = await given_jobs(store, PLAIN, count=8)
    claims = await claim(store, QUEUE, 3)
    assert ids(claims) == jobs[:3]
    board = await boards.remembered(store, QUEUE)
    assert board is not None
    assert any(lane.heads[lane.next_head :] for lane in board.lanes.values()), "heads are kept: else this shows nothing"
    await finish(store, claims[1:2], Released("drain"))
    if other_folds:
        await boards.fold(other, QUEUE)
    assert ids(await claim(store, QUEUE, 2)) == [jobs[1], jobs[3]]
    await agree([store, other])


# J03
async def test_a_job_that_was_reaped_runs_in_its_place_before_heads_that_are_kept(
    shared_database: Database, clock: ManualClock
) -> None:
    store, other = await opened(shared_database, clock, PLAIN)
    jobs = await given_jobs(store, PLAIN, count=8)
    lost = await claim(other, QUEUE, 2)
    assert ids(lost) == jobs[:2]
    assert ids(await claim(store, QUEUE, 1)) == jobs[2:3]
    clock.advance(31 * SECOND)
    await store.reap()
    assert ids(await claim(store, QUEUE, 4))[:2] == jobs[:2]
    await agree([store, other])


# J03
async def test_a_job_of_a_transaction_that_commits_late_runs_in_its_place_before_heads_that_are_kept(
    postgres_url: str, clock: ManualClock
) -> None:
    database = Database("postgres", postgres_url)
    store, other = await opened(database, clock, PLAIN)
    (first,) = await given_jobs(store, PLAIN)
    async with database.transaction() as mine:
        late = new_jobs(PLAIN)
        await store.enqueue(late, tx=mine.tx)
        later = await given_jobs(store, PLAIN, count=6)
        assert ids(await claim(store, QUEUE, 2)) == [first, later[0]]
        await mine.commit()
    assert ids(await claim(store, QUEUE, 2)) == [late[0].id, later[1]]
    assert ids(await claim(other, QUEUE, 1)) == [later[2]]
    await agree([store, other])
    await database.close()


class Interrupted(Exception):
    pass


def interrupt(patch: pytest.MonkeyPatch, at: str, seen: Callable[[], Awaitable[None]], url: str) -> None:
    """Let a checkpoint on PostgreSQL lose its session there, once somebody has looked."""
    before = {"before its rows": "put_flows", "after its rows": "store_journal"}.get(at)
    after = "delete_deltas" if at == "before its commit" else None

    async def terminate(session: Session) -> None:
        await seen()
        other = await asyncpg.connect(url)
        await other.execute("select pg_terminate_backend($1, 5000)", session.get_server_pid())
        await other.close()

    def interrupted(ask: Any) -> Any:
        async def asking(session: Session, statement: str, *given: Any, **named: Any) -> Any:
            if before is not None and statement == STATEMENTS[before]:
                await terminate(session)
            found = await ask(session, statement, *given, **named)
            if after is not None and statement == STATEMENTS[after]:
                await terminate(session)
            return found

        return asking

    patch.setattr(Session, "fetch", interrupted(Session.fetch))
    patch.setattr(Session, "execute", interrupted(Session.execute))


# J04
@pytest.mark.parametrize("at", ["before its rows", "after its rows", "before its commit"])
async def test_a_checkpoint_that_is_interrupted_on_postgres_changes_nothing(
    postgres_url: str, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    database = Database("postgres", postgres_url)
    first, second = await opened(database, clock)
    await given_accounts(first, 6, 4)
    held = await claim(first, QUEUE, 4)
    before = await boards.said(second, QUEUE)
    looks = 0

    async def seen() -> None:
        nonlocal looks
        looks += 1
        assert await boards.said(second, QUEUE) == before

    with monkeypatch.context() as patch:
        interrupt(patch, at, seen, postgres_url)
        with pytest.raises(FairlaneError):
            await boards.checkpoint(first, QUEUE)
    assert looks == 1
    assert await boards.said(second, QUEUE) == before
    await goes_on([first, second], database, held)


# J04
@pytest.mark.parametrize("statement", ["put_flows", "put_lanes", "put_gates", "store_journal", "delete_deltas", ""])
async def test_a_checkpoint_that_is_interrupted_on_sqlite_changes_nothing(
    tmp_path: Any, clock: ManualClock, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    database = Database("sqlite-file", str(tmp_path / "jobs.db"))
    first, second = await opened(database, clock)
    await given_accounts(first, 6, 4)
    held = await claim(first, QUEUE, 4)
    before = await boards.said(second, QUEUE)
    answer, run_many, written = Transaction.answer, Transaction.run_many, Boards.written

    def answering(tx: Transaction, name: str, *given: Any) -> Any:
        found = answer(tx, name, *given)
        if name == statement:
            raise Interrupted
        return found

    def running_many(tx: Transaction, name: str, *given: Any) -> None:
        run_many(tx, name, *given)
        if name == statement:
            raise Interrupted

    def writing(known: Boards, queue: int) -> None:
        written(known, queue)
        if not statement:
            raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(Transaction, "answer", answering)
        patch.setattr(Transaction, "run_many", running_many)
        patch.setattr(Boards, "written", writing)
        with pytest.raises(Interrupted):
            await boards.checkpoint(first, QUEUE)
    assert await boards.said(second, QUEUE) == before
    await goes_on([first, second], database, held)


async def goes_on(stores: list[Store], database: Database, held: list[Any]) -> None:
    """Everybody claims as if nothing had happened, and checkpoints succeed again."""
    first, second = stores
    await agree(stores)
    held += [*await claim(first, QUEUE, 1), *await claim(second, QUEUE, 10)]
    assert len(held) == 7
    await counts_what_runs(second, database)
    for store in (first, second, first):
        await boards.checkpoint(store, QUEUE)
    await finish(first, held)
    while held := await claim(second, QUEUE, 7):
        await finish(first, held)
    await agree(stores)
    await counts_what_runs(first, database)
    await database.close()


# J05
async def test_a_program_that_writes_another_journal_does_not_claim(
    shared_database: Database, clock: ManualClock
) -> None:
    store, other = await opened(shared_database, clock)
    await given_accounts(store, 3, 2)
    held = await claim(store, QUEUE, 2)
    states = "queue_states" if shared_database.kind == "postgres" else "queues"
    await run(shared_database, f"update {states} set format = 2")
    message = "queue 'webhooks' is claimed by workers of another version of Fairlane .* upgrade Fairlane"
    for each in (store, other):
        with pytest.raises(SchemaTooNew, match=message):
            await claim(each, QUEUE, 1)
    with pytest.raises(SchemaTooNew, match=message):
        await boards.checkpoint(store, QUEUE)
    with pytest.raises(SchemaTooNew, match=message):
        await store.apply(Policy(QUEUE, limits=(Concurrency(1),)))
    # What runs can end, producers go on, and the program can be ended.
    await finish(store, held)
    await given_accounts(other, 3, 1)
    assert await state_of(store, held[0].id) is State.DONE
    await shared_database.close()
    await run(shared_database, f"update {states} set format = 1")
    (store,) = await opened(shared_database, clock, count=1)
    left = []
    while claims := await claim(store, QUEUE, 10):
        left += ids(claims)
        await finish(store, claims)
    assert len(set(left)) == len(left) == 7


async def test_a_key_that_was_collected_and_came_back_is_served_by_whoever_reads_the_board_anew(
    shared_database: Database, clock: ManualClock
) -> None:
    """The journal still has the removal, and the tables what has come since: laid over them, it strands the lanes."""
    policy = Policy(QUEUE, Fair(by="account", charge="count"), keys=("account", "region"))
    first, second = await opened(shared_database, clock, policy)
    eu, us = ({"account": "x", "region": region} for region in ("eu", "us"))
    await given_jobs(first, policy, eu, 1)
    await given_jobs(first, policy, {"account": "y", "region": "eu"}, 4)
    await finish(first, await claim(first, QUEUE, 9))
    assert await claim(first, QUEUE) == []
    await boards.checkpoint(first, QUEUE)
    clock.advance(3_600)
    while (await first.collect(QUEUE)).more:
        pass
    for keys in (eu, us):
        await given_jobs(first, policy, keys, 1)
    await finish(first, await claim(first, QUEUE, 9))
    assert await claim(first, QUEUE) == []
    await boards.checkpoint(first, QUEUE)
    assert await claim(second, QUEUE) == []
    await agree([first, second])
    for keys in (eu, us, eu, us):
        await given_jobs(first, policy, keys, 1)
    served = [each for _ in range(4) for each in await claim(second, QUEUE, 1)]
    assert len(served) == 4
    await agree([first, second])


async def test_a_job_that_was_cancelled_behind_many_arrivals_does_not_stop_a_claim(
    store: Store, clock: ManualClock
) -> None:
    """Its lane's next jobs are remembered, and a claim folds only so many arrivals."""
    policy = Policy(QUEUE, Fair(by="account", charge="count"))
    await store.declare(policy)
    jobs = await given_jobs(store, policy, {"account": "a"}, 12)
    assert ids(await claim(store, QUEUE, 2)) == jobs[:2]
    await store.enqueue([job for n in range(FOLD_AT_MOST + 100) for job in new_jobs(policy, {"account": n}, 1)])
    for job in jobs[2:6]:
        await store.cancel(job)
    started = ids(await claim(store, QUEUE, 20))
    assert len(started) == 20
    assert not {*started} & {*jobs[2:6]}
