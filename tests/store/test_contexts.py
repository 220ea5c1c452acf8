"""What a job carries besides its arguments: kept as it was, told to people without what is ours, counted in claims."""

from __future__ import annotations

from uuid import uuid4

import msgspec
import pytest

from fairlane.job import BuiltEffects, NewJob, OnDead, with_trace
from fairlane.policy import Policy
from fairlane.scheduler.settlement import Died, Done, Failed, Interrupted, Retried
from fairlane.store import records
from fairlane.store.protocol import Store
from tests.store.harness import claim, claim_once, finish, given_jobs, new_jobs

PLAIN = Policy("webhooks")
TRACE = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}


@pytest.fixture(autouse=True)
async def queue(store: Store) -> None:
    await store.declare(PLAIN)


def traced(context: str | None = None) -> NewJob:
    (job,) = new_jobs(PLAIN)
    return msgspec.structs.replace(job, context=with_trace(context, TRACE))


async def test_contexts_are_given_back_as_they_were_and_only_of_jobs_that_have_one(store: Store) -> None:
    plain, mine, both = *new_jobs(PLAIN), traced(), traced('{"plan":"gold"}')
    await store.enqueue([plain, mine])
    await store.enqueue([both])
    found = await store.run(records.contexts([plain.id, mine.id, both.id, uuid4()]))
    assert found == {mine.id: mine.context, both.id: both.context}
    assert await store.run(records.contexts([])) == {}


async def test_a_trace_outlives_an_attempt_and_is_not_shown(store: Store) -> None:
    job = traced('{"plan":"gold"}')
    await store.enqueue([job])
    await finish(store, await claim(store, "webhooks", 1), Failed("once", 0))
    assert (await claim_once(store, "webhooks", 1)).claims[0].attempt == 2
    assert await store.run(records.contexts([job.id])) == {job.id: job.context}
    assert (await store.job(job.id)).context == {"plan": "gold"}


async def test_effects_and_what_lands_with_a_death_keep_their_contexts(store: Store) -> None:
    done, dead = new_jobs(PLAIN, count=2)
    follow_up, mourner = traced(), traced()
    declared = OnDead(BuiltEffects((mourner,)), frozenset([mourner.id])).encode()
    await store.enqueue([done, msgspec.structs.replace(dead, on_dead=declared)])
    first, second = await claim(store, "webhooks", 2)
    await finish(store, [first], Done(None, BuiltEffects((follow_up,))))
    await finish(store, [second], Died("for good"))
    found = await store.run(records.contexts([follow_up.id, mourner.id]))
    assert found == {follow_up.id: follow_up.context, mourner.id: mourner.context}


async def test_retries_are_counted_since_the_job_was_enqueued_or_replayed(store: Store) -> None:
    """E2: an engine is told how often it has retried a job; what was lost or failed is no retry of its own."""
    busy, quiet = new_jobs(PLAIN, count=2)
    await store.enqueue([busy, quiet])
    for outcome in (Retried("busy", 0, is_bounded=False), Interrupted("gone"), Retried("busy", 0, is_bounded=False)):
        for each in await claim(store, "webhooks", 2):
            await finish(store, [each], outcome if each.id == busy.id else Interrupted("gone"))
    assert await store.run(records.retries([busy.id, quiet.id, uuid4()])) == {busy.id: 2}
    await finish(store, await claim(store, "webhooks", 2), Died("for good"))
    await store.replay([busy.id])
    assert await store.run(records.retries([busy.id])) == {}
    assert await store.run(records.retries([])) == {}


async def test_a_claim_says_how_many_bells_it_has_folded(store: Store) -> None:
    await given_jobs(store, PLAIN, {}, 3)
    first = await claim_once(store, "webhooks", 2)
    assert first.folded >= 1
    await finish(store, first.claims)
    assert (await claim_once(store, "webhooks", 5)).folded >= 1
    assert (await claim_once(store, "webhooks", 5)).folded == 0
