"""What a SQLite store remembers of a queue's rows from one claim to the next, and when it must not."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fairlane.clock import ManualClock
from fairlane.policy import Concurrency, Fair, Policy
from fairlane.scheduler.snapshot import FlowRow, LaneRow, Plan, QueueRow
from fairlane.store.migrate import load_migrations
from fairlane.store.sqlite import SqliteStore, schema
from fairlane.store.sqlite import store as sqlite_store
from fairlane.store.sqlite.database import STATEMENTS, Database
from fairlane.store.sqlite.known import MOST_ROWS, Known
from tests.store.harness import LEASE, WORKER, by_key, claim, claim_once, finish, ids, new_jobs

ONE_EACH = Policy("webhooks", Fair(by="account", charge="count"), (Concurrency(1, by="account"),))


@pytest.fixture
async def stores(tmp_path: Path) -> AsyncIterator[tuple[SqliteStore, SqliteStore]]:
    """Two processes' stores on one file."""
    clock = ManualClock()
    both = SqliteStore(str(tmp_path / "jobs.db"), clock=clock), SqliteStore(str(tmp_path / "jobs.db"), clock=clock)
    for store in both:
        await store.open()
        await store.declare(ONE_EACH)
    yield both
    for store in both:
        await store.close()


async def test_a_claimer_that_is_alone_reads_no_flow_lane_or_gate_twice(
    stores: tuple[SqliteStore, SqliteStore],
) -> None:
    store, _ = stores
    await store.enqueue([job for n in range(20) for job in new_jobs(ONE_EACH, {"account": f"a{n}"}, 3)])
    await finish(store, (await claim_once(store, "webhooks", 20)).claims)
    before = store.rows_read
    assert len((await claim_once(store, "webhooks", 20)).claims) == 20
    # Queue time, the queue, the bells of the settlement, and for each job: its flow in the scan, two heads, the claim.
    assert store.rows_read - before <= 3 + 4 * 20


async def test_a_limit_holds_between_two_stores_that_claim_by_turns(stores: tuple[SqliteStore, SqliteStore]) -> None:
    one, other = stores
    await one.enqueue([job for n in range(5) for job in new_jobs(ONE_EACH, {"account": f"a{n}"}, 4)])
    for turn in range(4):
        mine, theirs = (one, other) if turn % 2 else (other, one)
        first = (await claim_once(mine, "webhooks", 3)).claims
        second = (await claim_once(theirs, "webhooks", 10)).claims
        assert by_key([*first, *second]) == {f"a{n}": 1 for n in range(5)}
        assert (await claim_once(mine, "webhooks", 10)).claims == []
        await finish(theirs, first)
        await finish(mine, second)
    assert (await claim_once(one, "webhooks", 10)).claims == []


async def test_a_claim_that_fails_leaves_nothing_remembered(
    stores: tuple[SqliteStore, SqliteStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, _ = stores
    await store.enqueue([job for n in range(5) for job in new_jobs(ONE_EACH, {"account": f"a{n}"}, 2)])
    await finish(store, (await claim_once(store, "webhooks", 2)).claims)

    def refuse(*_: object) -> list[object]:
        raise RuntimeError("after the plan was written")

    with monkeypatch.context() as patched:
        patched.setattr(sqlite_store, "_take_waiters", refuse)
        with pytest.raises(RuntimeError):
            await claim_once(store, "webhooks", 5)
    assert by_key((await claim_once(store, "webhooks", 10)).claims) == {f"a{n}": 1 for n in range(5)}


async def test_lanes_that_upkeep_removes_are_not_remembered(stores: tuple[SqliteStore, SqliteStore]) -> None:
    store, _ = stores
    await store.enqueue(new_jobs(ONE_EACH, {"account": "a"}))
    await finish(store, await claim(store, "webhooks"))
    await claim_once(store, "webhooks", 0)  # folds the end of the job
    assert (await store.collect("webhooks")).lanes == 1
    jobs = new_jobs(ONE_EACH, {"account": "a"})
    await store.enqueue(jobs)
    assert ids(await claim(store, "webhooks")) == [jobs[0].id]
    assert (await store.counts("webhooks")).running == 1


def _lane(number: int, standing: int, rank: int = 0) -> LaneRow:
    return LaneRow(number.to_bytes(16), b"f" * 16, 0, {}, 1, 0, 0, rank, standing, None, 0.0)


def _flow(lanes: int) -> FlowRow:
    return FlowRow(b"f" * 16, ["a"], 1.0, 0.0, 0, 0.0, 0.0, lanes, 0, 1, None)


def test_the_first_lanes_of_a_flow_are_known_only_if_all_are() -> None:
    known = Known(0)
    known.add_lanes([_lane(1, 1, rank=7), _lane(2, 1, rank=3), _lane(3, 0)])
    assert known.first_lanes(_flow(3), 5) is None
    assert known.first_lanes(_flow(2), 1) is None
    assert [lane.rank for lane in known.first_lanes(_flow(2), 2) or ()] == [3, 7]
    known.add_lanes([_lane(2, 2)])
    assert [lane.rank for lane in known.first_lanes(_flow(1), 2) or ()] == [7]


def test_what_is_remembered_is_bounded() -> None:
    known = Known(0)
    known.note(Plan([], QueueRow(0.0, 0.0, 0, 0, 0.0), [], [_lane(n, 0) for n in range(MOST_ROWS)], [], False))
    assert not known.is_too_much()
    known.add_lanes([_lane(MOST_ROWS, 0)])
    assert known.is_too_much()


@pytest.mark.parametrize("statement", ["update_flow_figures", "update_lane_figures", "update_gate_figures"])
async def test_figures_are_written_without_touching_an_index(statement: str, tmp_path: Path) -> None:
    path = str(tmp_path / "jobs.db")
    store = SqliteStore(path)
    await store.open()
    await store.close()
    connection = sqlite3.connect(path)
    text = STATEMENTS[statement]
    opened = [row[1] for row in connection.execute(f"explain {text}", [None] * text.count("?"))].count("OpenWrite")
    connection.close()
    assert opened == 1


async def test_release_bells_of_an_older_schema_are_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "jobs.db")
    migrations = load_migrations("fairlane.store.sqlite")
    newest = next(n for n, each in enumerate(migrations) if each.name.endswith("hot_path"))
    with monkeypatch.context() as patched:
        patched.setattr(schema, "load_migrations", lambda package: migrations[:newest])
        database = Database(path)
        await database.open()
        await database.write(schema.migrate, durable=True)
        await database.close()
    connection = sqlite3.connect(path)
    job = new_jobs(ONE_EACH, {"account": "a"})[0]
    figures = "ended, ran, charged, unstarted, refund, since, failed, neutral, latest, kept"
    for ran in (1, 2):
        connection.execute(
            f"insert into releases (queue, lane, {figures}) values (1, ?, 1, {ran}, 0.5, 0, 0.0, 3, 0, 0, 4, 0)",
            [job.lane],
        )
    connection.commit()
    connection.close()
    store = SqliteStore(path)
    await store.open()
    await store.declare(ONE_EACH)
    assert (await store.counts("webhooks")).bells == 2
    await store.enqueue([job])
    assert ids((await claim_once(store, "webhooks", 1)).claims) == [job.id]
    assert (await store.counts("webhooks")).bells == 0
    await store.close()


async def test_a_settlement_is_one_row_of_bells(stores: tuple[SqliteStore, SqliteStore]) -> None:
    store, _ = stores
    await store.enqueue([job for n in range(5) for job in new_jobs(ONE_EACH, {"account": f"a{n}"})])
    claimed = await store.claim("webhooks", lambda: 5, worker=WORKER, lease=LEASE)
    await finish(store, claimed.claims)
    rows = await store._database.read(lambda tx: tx.connection.execute("select count from releases").fetchall())
    assert rows == [(5,)]
    assert (await store.counts("webhooks")).bells == 5
