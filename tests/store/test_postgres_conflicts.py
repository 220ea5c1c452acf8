"""Conflicts on PostgreSQL: whoever the server picks as the victim tries again, and nobody hears of it."""

from __future__ import annotations

import asyncpg
import pytest

from fairlane.job import BuiltEffects
from fairlane.policy import Policy
from fairlane.scheduler.settlement import Cancelled, Done, Failed, Released, RunOutcome, settle
from fairlane.store import records
from fairlane.store.postgres import PostgresStore
from tests.store.harness import claim, given_jobs, ids, new_jobs

PLAIN = Policy("webhooks")

ENDS: dict[str, list[RunOutcome]] = {
    "done": [Done(b"1"), Done(b"1")],
    "mixed": [Failed("boom", 0), Cancelled("stop"), Released("drain")],
}
# A sequence does not roll back: the first two tries fail, and the third goes through.
FAIL_TWICE = """
    create sequence hiccups;
    create function hiccup() returns trigger language plpgsql as $$
    begin
        if nextval('public.hiccups') <= 2 then
            raise exception 'picked as the victim' using errcode = '{code}';
        end if;
        return new;
    end $$;
    create trigger hiccup before insert or update on {table} for each row execute function hiccup();
"""
CONFLICTS = pytest.mark.parametrize("code", ["40001", "40P01"], ids=["serialization", "deadlock"])


async def open_store(url: str) -> PostgresStore:
    store = PostgresStore(url)
    await store.open()
    await store.declare(PLAIN)
    return store


async def fail_twice(url: str, table: str, code: str) -> None:
    """The next two statements that write to this table are told that they lost against another."""
    connection = await asyncpg.connect(url)
    await connection.execute(FAIL_TWICE.format(table=table, code=code))
    await connection.close()


async def tries(url: str) -> int:
    connection = await asyncpg.connect(url)
    count: int = await connection.fetchval("select last_value from hiccups")
    await connection.close()
    return count


# L08
@CONFLICTS
@pytest.mark.parametrize("ends", ENDS)
async def test_a_settlement_that_meets_a_conflict_is_tried_again(postgres_url: str, code: str, ends: str) -> None:
    store = await open_store(postgres_url)
    await given_jobs(store, PLAIN, count=len(ENDS[ends]))
    claims = await claim(store, "webhooks", 5)
    settlements = [settle(each, end, 5) for each, end in zip(claims, ENDS[ends], strict=True)]
    await fail_twice(postgres_url, "fairlane.jobs", code)
    assert await store.settle(settlements) == []
    assert await tries(postgres_url) >= 3
    for each in settlements:
        assert (await store.job(each.job)).state is each.to
        assert len(await store.run(records.attempts(each.job))) == 1
    await store.close()


# L08, L16
@CONFLICTS
async def test_effects_that_meet_a_conflict_land_with_their_ack_once(postgres_url: str, code: str) -> None:
    store = await open_store(postgres_url)
    (job,) = await given_jobs(store, PLAIN)
    (held,) = await claim(store, "webhooks")
    (follow_up,) = new_jobs(PLAIN)
    # The job is settled and its follow-up stored when the value fails.
    await fail_twice(postgres_url, "fairlane.stored_values", code)
    effects = BuiltEffects((follow_up,), {"landed": b"1"})
    assert await store.settle([settle(held, Done(b"1", effects), 5)]) == []
    assert await tries(postgres_url) == 3
    assert (await store.job(job)).result == b"1"
    assert await store.run(records.get_value("landed")) == b"1"
    assert ids(await claim(store, "webhooks", 5)) == [follow_up.id]
    await store.close()


# L02, L08
@CONFLICTS
async def test_a_reaper_that_meets_a_conflict_tries_again(postgres_url: str, code: str) -> None:
    store = await open_store(postgres_url)
    (job,) = await given_jobs(store, PLAIN)
    (held,) = await claim(store, "webhooks")
    connection = await asyncpg.connect(postgres_url)
    await connection.execute("update fairlane.leases set expires_at = 0")
    await connection.close()
    await fail_twice(postgres_url, "fairlane.jobs", code)
    assert [each.job for each in (await store.reap()).settled] == [job]
    assert await store.settle([settle(held, Done(b"1"), 5)]) == [job]
    await store.close()
