"""Policies with sequences: applied, changed, explained. The same on every store."""

from __future__ import annotations

import pytest

from fairlane.clock import ManualClock
from fairlane.errors import InvalidOverride, InvalidPolicy
from fairlane.policy import Concurrency, Policy, Rate, Sequence
from fairlane.policy.gates import Reason
from fairlane.policy.overrides import Kind, Override
from fairlane.scheduler.explain import explain
from fairlane.scheduler.settlement import Failed
from fairlane.store.protocol import Store
from tests.store.harness import (
    SECOND,
    claim,
    finish,
    given_jobs,
    ids,
    new_jobs,
    serving,
)
from tests.store.test_sequences import NOTE, PLAIN, QUEUE, A, B, assert_free, next_job, nothing_starts


@pytest.mark.parametrize("forgotten", [False, True], ids=["", "its lane was forgotten"])
async def test_another_policy_counts_the_places_that_are_kept(
    store: Store, clock: ManualClock, forgotten: bool
) -> None:
    await store.declare(PLAIN)
    (job,) = await given_jobs(store, PLAIN, A, 1)
    await given_jobs(store, PLAIN, B, 1)
    held = await claim(store, QUEUE, 2)
    await finish(store, [each for each in held if each.id == job], Failed("no", 60 * SECOND))
    running = [each for each in held if each.id != job]
    await nothing_starts(store)
    if forgotten:
        for _ in range(3):
            await store.collect(QUEUE)
    capped = Policy(QUEUE, limits=(Sequence(by="document"), Concurrency(50)))
    await store.apply(capped)
    await store.change_overrides([QUEUE], [Override(kind=Kind.SUSPEND)], [], NOTE)
    await store.change_overrides([QUEUE], [], [Override(kind=Kind.SUSPEND).id], NOTE)
    (behind,) = await given_jobs(store, capped, A, 1)
    await given_jobs(store, capped, B, 1)
    await nothing_starts(store)
    await finish(store, running)
    await finish(store, [await next_job(store)])
    clock.advance("60s")
    for each in (job, behind):
        head = await next_job(store)
        assert head.id == each
        await finish(store, [head])
    await assert_free(store, capped, clock)


async def test_a_sequence_that_is_added_counts_who_waits_for_a_retry(store: Store, clock: ManualClock) -> None:
    plain = Policy(QUEUE, keys=("document",))
    await store.declare(plain)
    (job,) = await given_jobs(store, plain, A, 1)
    await finish(store, [await next_job(store)], Failed("no", 60 * SECOND))
    await store.apply(PLAIN)
    clock.advance("1s")
    (behind,) = await given_jobs(store, PLAIN, A, 1)
    await nothing_starts(store)
    clock.advance("60s")
    for each in (job, behind):
        head = await next_job(store)
        assert head.id == each
        await finish(store, [head])
    await assert_free(store, PLAIN, clock)


async def test_a_sequence_is_not_put_over_jobs_that_wait_without_order_unless_that_is_accepted(
    store: Store, clock: ManualClock
) -> None:
    plain = Policy(QUEUE, keys=("document",))
    await store.declare(plain)
    jobs = [new_jobs(plain, A, task=f"task{n}", priority=n)[0] for n in range(3)]
    await store.enqueue(jobs)
    with pytest.raises(InvalidPolicy, match=r"3 waiting jobs were enqueued without Sequence\(by='document'\)"):
        await store.apply(PLAIN)
    await store.apply(PLAIN, accept_missing_keys=True)
    new = await given_jobs(store, PLAIN, A, 1)
    seen = set()
    for _ in range(4):
        only = await next_job(store)
        seen.add(only.id)
        await finish(store, [only])
    assert seen == {*(each.id for each in jobs), *new}
    await assert_free(store, PLAIN, clock)


async def test_without_its_sequence_a_queue_lets_everything_start(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    jobs = await given_jobs(store, PLAIN, A, 3)
    await finish(store, [await next_job(store)], Failed("no", 60 * SECOND))
    with pytest.raises(InvalidPolicy, match="2 waiting jobs do not carry the key 'task'"):
        await store.apply(Policy(QUEUE, limits=(Concurrency(1, by=("task", "document")),)))
    await store.apply(Policy(QUEUE, keys=("document",)))
    assert set(ids(await claim(store, QUEUE, 10))) == set(jobs[1:])
    clock.advance("60s")
    assert ids(await claim(store, QUEUE, 10)) == [jobs[0]]


async def test_a_task_cannot_be_paused_where_lanes_do_not_know_it(store: Store) -> None:
    await store.declare(PLAIN)
    await given_jobs(store, PLAIN, A, 1)
    for name in ("task", "priority"):
        with pytest.raises(InvalidOverride, match=f"in sequence, by document, whatever their {name}"):
            await store.change_overrides([QUEUE], [Override(kind=Kind.PAUSE, scope=((name, "deliver"),))], [], NOTE)
    limit = Override(kind=Kind.LIMIT, limit="sequence:document", scope=(("document", "a"),), value=2)
    with pytest.raises(InvalidOverride, match="has no number to change"):
        await store.change_overrides([QUEUE], [limit], [], NOTE)
    await store.change_overrides([QUEUE], [Override(kind=Kind.PAUSE, scope=(("document", "a"),))], [], NOTE)
    await nothing_starts(store)


async def test_explain_names_the_job_before(store: Store, clock: ManualClock) -> None:
    await store.declare(PLAIN)
    jobs = await given_jobs(store, PLAIN, A, 2)
    head = await next_job(store)
    clock.advance("3s")
    await serving(store, clock, QUEUE)
    told = explain(await store.ask(lambda moment: moment.examine(job=jobs[1])))
    (hold,) = [each for each in told.holds if each.reason is Reason.SEQUENCE]
    assert (hold.limit, hold.key, hold.until) == ("sequence:document", {"document": "a"}, None)
    assert [(each.job, each.due_at) for each in hold.holders] == [(jobs[0], None)]
    assert told.earliest == clock.now()
    await finish(store, [head], Failed("no", 60 * SECOND))
    due_at = clock.now() + 60 * SECOND
    told = explain(await store.ask(lambda moment: moment.examine(job=jobs[1])))
    (hold,) = [each for each in told.holds if each.reason is Reason.SEQUENCE]
    assert [(each.job, each.due_at) for each in hold.holders] == [(jobs[0], due_at)]
    assert hold.until == due_at
    assert f"job {jobs[0]} (deliver) runs again in 60 s" in hold.words
    told = explain(await store.ask(lambda moment: moment.examine(QUEUE, keys={"document": "a"})))
    assert Reason.SEQUENCE in told.reasons
    told = explain(await store.ask(lambda moment: moment.examine(job=jobs[0])))
    assert Reason.SCHEDULED in told.reasons
    assert Reason.SEQUENCE not in told.reasons, "it waits for its own time, not for itself"


async def test_a_rate_in_a_sequence_holds_its_key_only(store: Store, clock: ManualClock) -> None:
    policy = Policy(QUEUE, limits=(Sequence(by="document"), Rate(1, per="1m", by="document")))
    await store.declare(policy)
    await given_jobs(store, policy, A, 2)
    await given_jobs(store, policy, B, 1)
    await finish(store, await claim(store, QUEUE, 10))
    await nothing_starts(store)
    clock.advance("60s")
    assert (await next_job(store)).keys["document"] == "a"
