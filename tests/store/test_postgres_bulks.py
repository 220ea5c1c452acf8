"""Bulk and single enqueue on PostgreSQL: what is copied in, or stored together, is what each would be alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
from msgspec.structs import replace

from fairlane.clock import ManualClock
from fairlane.errors import DuplicateJob, InvalidJob
from fairlane.job import BuiltEffects, NewJob, OnDead, Outcome, UniqueKey, Until
from fairlane.policy import Fair, Policy, Sequence
from fairlane.store.postgres import PostgresStore, jobs
from fairlane.store.postgres import jobs as copying
from fairlane.store.postgres import jobs as gathering
from tests.store.harness import SECOND, claim, given_jobs, hear, ids, new_jobs, soon, worker_named

PLAIN = Policy("plain")
FAIR = Policy("fair", fair=Fair(by="account"))
ORDERED = Policy("ordered", limits=(Sequence(by="order"),))


@pytest.fixture
async def store(postgres_url: str) -> AsyncIterator[PostgresStore]:
    store = PostgresStore(postgres_url, clock=ManualClock())
    await store.open()
    for policy in (PLAIN, FAIR, ORDERED):
        await store.declare(policy)
        await store.counts(policy.queue)  # the store knows it now: who enqueues first does not have to ask
    yield store
    await store.close()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bulk is copied in, however small, and in several pieces."""
    monkeypatch.setattr(jobs, "COPIED_FROM", 2)
    monkeypatch.setattr(jobs, "COPIED_PER_LANE", 1)
    monkeypatch.setattr(copying, "ROWS_AT_ONCE", 2)


def a_bit_of_everything(now: int) -> list[NewJob]:
    (follow_up,) = new_jobs(PLAIN, task="follow-up")
    plain = new_jobs(PLAIN, count=9)
    return [
        plain[0],
        replace(plain[1], payload=b"\x00\xff" * 100),
        replace(plain[2], max_attempts=7),
        replace(plain[3], delay=60 * SECOND),
        replace(plain[4], delay=0),
        replace(plain[5], run_at=now + 1),
        replace(plain[6], run_at=now - SECOND),
        replace(plain[7], on_dead=OnDead(BuiltEffects((follow_up,), {"key": b"1"})).encode()),
        replace(plain[8], context='{"plan": "größer"}'),
        *(replace(job, given={"weight": n + 2.5}) for n, job in enumerate(new_jobs(PLAIN, count=2, priority=-5))),
        replace(new_jobs(PLAIN, priority=-6)[0], given={"weight": 1.5}, delay=SECOND),
        *new_jobs(FAIR, {"account": 'a, "b"'}, 3),
        *new_jobs(FAIR, {"account": None, "region": "ü"}, 2),
        *new_jobs(ORDERED, {"order": 1}, 2, task="first"),
        *new_jobs(ORDERED, {"order": 1}, 2, task="second"),
        *new_jobs(FAIR, {"account": "later"}, delay=5),
        *new_jobs(PLAIN, count=2),
    ]


# E01
async def test_a_job_that_is_copied_in_is_the_one_that_would_be_inserted(
    store: PostgresStore, connection: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = a_bit_of_everything(await store.now())
    found: list[Any] = []
    monkeypatch.setattr(jobs, "COPIED_PER_LANE", 1)
    for least in (len(given) + 1, len(given)):
        monkeypatch.setattr(jobs, "COPIED_FROM", least)
        await store.enqueue(given)
        rows = await connection.fetch(
            "select id, to_jsonb(j) - '{position,given_by}'::text[] || jsonb_build_object('by', given_by = position) "
            "as row from fairlane.jobs j order by position"
        )
        events = await connection.fetch(
            "select to_jsonb(a) - '{xid,floor,given_by}'::text[] as event, j.id as first, g.id as giver "
            "from fairlane.arrivals a join fairlane.jobs j on j.position = a.floor "
            "left join fairlane.jobs g on g.position = a.given_by order by a.floor"
        )
        assert [row["id"] for row in rows] == [job.id for job in given]
        found.append(([row["row"] for row in rows], [tuple(each) for each in events]))
        await connection.execute("truncate fairlane.jobs, fairlane.arrivals")
    inserted, copied = found
    assert copied == inserted
    assert len(copied[1]) == 6


@pytest.mark.parametrize(("count", "lanes", "is_copied"), [(12, 4, True), (12, 5, False), (11, 1, False)])
async def test_a_bulk_is_copied_in_if_it_is_large_and_its_lanes_are_few(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, count: int, lanes: int, is_copied: bool
) -> None:
    copied: list[int] = []
    copy_in = copying.copy_in

    async def watched(connection: Any, batch: Any, *rest: Any, **named: Any) -> None:
        copied.append(len(batch))
        await copy_in(connection, batch, *rest, **named)

    monkeypatch.setattr(copying, "copy_in", watched)
    monkeypatch.setattr(jobs, "COPIED_FROM", 12)
    monkeypatch.setattr(jobs, "COPIED_PER_LANE", 3)
    await store.enqueue([job for n in range(count) for job in new_jobs(FAIR, {"account": n % lanes})])
    assert copied == ([count] if is_copied else [])
    assert len(await claim(store, "fair", 20)) == count


# C07
async def test_copied_jobs_stand_in_their_lane_as_they_were_handed_in(store: PostgresStore, copies: None) -> None:
    enqueued = []
    for count in (3, 1, 5, 1, 2):
        enqueued += await given_jobs(store, PLAIN, count=count)
    assert ids(await claim(store, "plain", 20)) == enqueued


# C01
async def test_a_lane_that_was_served_already_starts_what_is_copied_in_later(
    store: PostgresStore, copies: None
) -> None:
    for _ in range(3):
        enqueued = await given_jobs(store, PLAIN, count=4)
        assert ids(await claim(store, "plain", 10)) == enqueued


# E05
async def test_an_id_that_is_taken_refuses_all_that_is_copied_with_it(store: PostgresStore, copies: None) -> None:
    held = new_jobs(PLAIN, count=2)
    await store.enqueue(held)
    batch = [*new_jobs(PLAIN, count=5), held[1], *new_jobs(FAIR, {"account": 1}, 3)]
    with pytest.raises(DuplicateJob, match=str(held[1].id)):
        await store.enqueue(batch)
    assert ids(await claim(store, "plain", 20)) == [job.id for job in held]
    assert await claim(store, "fair", 20) == []


# E01, E05
async def test_copied_jobs_meet_unique_keys_as_single_ones_do(store: PostgresStore, copies: None) -> None:
    key = UniqueKey(b"k" * 16, Until.DONE, None, "return", b"d" * 16, same_payload=False)
    first, second, third, fourth = new_jobs(PLAIN, count=4)
    assert await store.enqueue([replace(first, unique=key), second]) == {}
    conflicts = await store.enqueue([replace(third, unique=key), fourth, *new_jobs(PLAIN, count=2)])
    assert [(each.outcome, each.holder) for each in conflicts.values()] == [(Outcome.DUPLICATE, first.id)]
    assert third.id not in ids(await claim(store, "plain", 20))


# C11, E06
@pytest.mark.parametrize("ending", ["commit", "rollback"])
async def test_jobs_copied_in_the_callers_transaction_share_its_fate(
    store: PostgresStore, connection: asyncpg.Connection[Any], copies: None, ending: str
) -> None:
    transaction = connection.transaction()
    await transaction.start()
    enqueued = new_jobs(PLAIN, count=5)
    await store.enqueue(enqueued, tx=connection)
    assert await claim(store, "plain", 20) == []
    await (transaction.commit() if ending == "commit" else transaction.rollback())
    stored = [job.id for job in enqueued] if ending == "commit" else []
    assert ids(await claim(store, "plain", 20)) == stored
    assert await connection.fetchval("select count(*) from fairlane.jobs") == len(stored)
    assert await connection.fetchval("select count(*) from fairlane.arrivals") == 0


# C08
async def test_whoever_waits_is_woken_by_jobs_that_are_copied_in(store: PostgresStore, copies: None) -> None:
    worker = worker_named("idle")
    listener = await store.listen(worker)
    await hear(store, "plain", listener, worker=worker)
    await store.enqueue([*new_jobs(FAIR, {"account": 1}, 2), *new_jobs(PLAIN, count=2)])
    assert await soon(listener.wait(None)) is True
    await listener.close()


@pytest.mark.parametrize("copied", [True, False])
async def test_a_text_that_the_server_cannot_keep_is_refused_whichever_way_it_goes(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    monkeypatch.setattr(jobs, "COPIED_FROM", 2 if copied else 10)
    for task in ("nul \x00", "lone \ud800"):
        (bad,) = new_jobs(PLAIN)
        with pytest.raises(InvalidJob):
            await store.enqueue([*new_jobs(PLAIN, count=3), replace(bad, task=task)])
    assert await claim(store, "plain", 20) == []


async def test_large_payloads_are_sent_piece_by_piece(
    store: PostgresStore, monkeypatch: pytest.MonkeyPatch, copies: None
) -> None:
    sent: list[int] = []
    stream = copying._stream

    async def watched(*given: Any) -> Any:
        async for piece in stream(*given):
            sent.append(len(piece))
            yield piece

    monkeypatch.setattr(copying, "_stream", watched)
    monkeypatch.setattr(copying, "ROWS_AT_ONCE", 1_000)
    monkeypatch.setattr(copying, "BYTES_AT_ONCE", 1_000)
    await store.enqueue(new_jobs(PLAIN, count=12, payload=b"x" * 600))
    assert len(sent) == 7  # the last of them is the end of the stream
    assert max(sent) < 2_000


async def commits_of(connection: asyncpg.Connection[Any]) -> int:
    found: int = await connection.fetchval("select count(distinct xmin::text) from fairlane.jobs")
    return found


async def test_producers_that_come_together_are_stored_together(
    store: PostgresStore, connection: asyncpg.Connection[Any]
) -> None:
    enqueued = new_jobs(PLAIN, count=50)
    assert await asyncio.gather(*(store.enqueue([job]) for job in enqueued)) == [{}] * 50
    assert await commits_of(connection) == 1
    assert ids(await claim(store, "plain", 100)) == [job.id for job in enqueued]


async def test_producers_that_come_again_and_again_are_never_forgotten(
    store: PostgresStore, connection: asyncpg.Connection[Any]
) -> None:
    async def produce() -> None:
        for job in new_jobs(PLAIN, count=20):
            await store.enqueue([job])

    await soon(asyncio.gather(*(produce() for _ in range(5))))
    assert await commits_of(connection) <= 60  # before the claim, which writes every row anew
    assert len(await claim(store, "plain", 200)) == 100


async def test_a_producer_that_comes_alone_is_stored_at_once(store: PostgresStore) -> None:
    for _ in range(3):
        (enqueued,) = await soon(given_jobs(store, PLAIN))
        assert ids(await claim(store, "plain", 5)) == [enqueued]


async def test_no_statement_holds_more_than_its_share(
    store: PostgresStore, connection: asyncpg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "JOBS_AT_ONCE", 4)
    monkeypatch.setattr(gathering, "GATHERED_BYTES", 1_000)
    sizes = [1] * 5 + [600] * 6
    enqueued = [replace(job, payload=b"x" * size) for job, size in zip(new_jobs(PLAIN, count=11), sizes, strict=True)]
    await asyncio.gather(*(store.enqueue([job]) for job in enqueued))
    assert await commits_of(connection) == 4
    assert len(await claim(store, "plain", 100)) == 11


async def test_the_fault_of_one_producer_is_not_that_of_those_who_came_with_it(
    store: PostgresStore, connection: asyncpg.Connection[Any]
) -> None:
    (held,) = new_jobs(PLAIN)
    await store.enqueue([held])
    good, bad = new_jobs(PLAIN, count=4), replace(new_jobs(PLAIN)[0], task="nul \x00")
    together = [good[0], held, good[1], bad, *good[2:]]
    outcomes = await asyncio.gather(*(store.enqueue([job]) for job in together), return_exceptions=True)
    assert [type(each) for each in outcomes] == [dict, DuplicateJob, dict, InvalidJob, dict, dict]
    assert str(held.id) in str(outcomes[1])
    assert set(ids(await claim(store, "plain", 100))) == {job.id for job in (held, *good)}


async def test_a_producer_that_gives_up_before_its_turn_takes_nobody_with_it(
    store: PostgresStore, connection: asyncpg.Connection[Any]
) -> None:
    enqueued = new_jobs(PLAIN, count=3)
    waiting = [asyncio.ensure_future(store.enqueue([job])) for job in enqueued]
    await asyncio.sleep(0)
    waiting[1].cancel()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(outcomes[1], asyncio.CancelledError)
    assert ids(await claim(store, "plain", 100)) == [enqueued[0].id, enqueued[2].id]


async def test_whoever_waits_for_an_id_of_another_transaction_holds_nobody_else_up(
    store: PostgresStore, connection: asyncpg.Connection[Any]
) -> None:
    named = [replace(job, is_named=True) for job in new_jobs(PLAIN, count=gathering.STATEMENTS_AT_ONCE)]
    transaction = connection.transaction()
    await transaction.start()
    await store.enqueue(named, tx=connection)
    stuck = [asyncio.ensure_future(store.enqueue([job])) for job in named]
    others = await soon(asyncio.gather(*(given_jobs(store, PLAIN) for _ in range(10))))
    assert not any(each.done() for each in stuck)
    await transaction.rollback()
    await soon(asyncio.gather(*stuck))
    assert set(ids(await claim(store, "plain", 100))) == {job.id for job in named} | {job for (job,) in others}


async def test_a_store_that_is_closed_tells_all_who_come_to_it(postgres_url: str) -> None:
    store = PostgresStore(postgres_url)
    await store.open()
    await store.declare(PLAIN)
    enqueued = new_jobs(PLAIN, count=3)
    await store.enqueue(enqueued[:1])
    await store.close()
    outcomes = await asyncio.gather(*(store.enqueue([job]) for job in enqueued[1:]), return_exceptions=True)
    assert [str(each) for each in outcomes] == ["the store is closed; open it first"] * 2
