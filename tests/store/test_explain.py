"""Why a job waits, on every store: every reason, with holders and times, and nothing is changed by asking."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from fairlane.clock import ManualClock
from fairlane.errors import JobNotFound
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.policy.gates import Reason
from fairlane.policy.overrides import Kind, Override
from fairlane.scheduler.explain import Explanation, explain
from fairlane.scheduler.settlement import Failed, Released
from fairlane.store import records
from fairlane.store.audit import Note
from fairlane.store.protocol import Store, WorkerIdentity
from fairlane.store.stats_values import PUBLISHING, WorkerReport
from tests.store.harness import (
    LEASE,
    MINUTE,
    SECOND,
    WORKER,
    Database,
    claim,
    finish,
    given_jobs,
    hear,
    ids,
    new_jobs,
    serving,
)

KEYS = int(os.environ.get("FAIRLANE_EXPLAIN_KEYS", "2000"))
"""The long run has 100,000."""
NOTE = Note(actor="ada", action="test")


async def why(
    store: Store,
    job: UUID | None = None,
    *,
    queue: str | None = None,
    tasks: Collection[str] | None = None,
    **keys: str,
) -> Explanation:
    return explain(await store.ask(lambda moment: moment.examine(queue, job, keys)), tasks)


async def test_a_job_held_by_four_things_at_once_lists_all_four_with_holders_and_times(
    store: Store, clock: ManualClock
) -> None:
    policy = Policy(
        "webhooks",
        fair=Fair(by="account", charge="count"),
        limits=(Concurrency(2, by="account"), Rate(2, per="1m", by="endpoint"), Concurrency(2)),
    )
    keys = {"account": "acme", "endpoint": "api"}
    await store.declare(policy)
    jobs = await given_jobs(store, policy, keys, 4)
    running = await claim(store, "webhooks", 10)
    assert len(running) == 2
    clock.advance("5s")
    pause = Override(
        kind=Kind.PAUSE,
        scope=(("account", "acme"),),
        expires_at=clock.now() + MINUTE,
        set_by="ada",
        reason="they asked",
    )
    await store.change_overrides(["webhooks"], [pause], [], NOTE)
    await serving(store, clock, "webhooks")
    told = await why(store, jobs[3])
    assert {Reason.CONCURRENCY, Reason.RATE, Reason.PAUSED, Reason.LANE} <= set(told.reasons)
    by_limit = {hold.limit: hold for hold in told.holds if hold.limit}
    own, all_of_it = by_limit["concurrency:account"], by_limit["concurrency:"]
    assert (own.used, own.bound) == (2, 2)
    assert [holder.job for holder in own.holders] == ids(running)
    assert {holder.since for holder in own.holders} == {clock.now() - 5 * SECOND}
    assert [holder.job for holder in all_of_it.holders] == ids(running)
    rate = by_limit["rate/60s:endpoint"]
    assert rate.until == clock.now() + 25 * SECOND
    assert rate.key == {"endpoint": "api"}
    (paused,) = [hold for hold in told.holds if hold.reason is Reason.PAUSED]
    assert (paused.until, paused.override) == (clock.now() + MINUTE, pause)
    assert "ada" in paused.words
    assert "they asked" in paused.words
    (lane,) = [hold for hold in told.holds if hold.reason is Reason.LANE]
    assert lane.count == 1
    assert told.earliest == clock.now() + MINUTE
    assert told.estimate is not None
    assert told.estimate >= told.earliest


async def test_a07_a_limit_of_zero_says_so(store: Store, clock: ManualClock) -> None:
    policy = Policy("q", limits=(Concurrency(0, by="account"),))
    await store.declare(policy)
    (job,) = await given_jobs(store, policy, {"account": "acme"})
    told = await why(store, job)
    (hold,) = [hold for hold in told.holds if hold.reason is Reason.CONCURRENCY]
    assert (hold.used, hold.bound, hold.holders, hold.until) == (0, 0, [], None)
    assert (told.earliest, told.estimate) == (None, None)


async def test_a_scheduled_job_says_until_when_and_what_for(store: Store, clock: ManualClock) -> None:
    policy = Policy("q")
    await store.declare(policy)
    (later,) = await given_jobs(store, policy, delay=MINUTE)
    told = await why(store, later)
    assert Reason.SCHEDULED in told.reasons
    (job,) = await given_jobs(store, policy)
    await finish(store, await claim(store, "q", 1), Failed("boom", 30 * SECOND))
    told = await why(store, job)
    (hold,) = [hold for hold in told.holds if hold.reason is Reason.SCHEDULED]
    assert hold.until == clock.now() + 30 * SECOND
    assert "attempt 2" in hold.words


@pytest.mark.parametrize("delay", [0, 30 * SECOND], ids=["at once", "later"])
async def test_a_job_that_was_given_back_says_why(store: Store, clock: ManualClock, delay: int) -> None:
    policy = Policy("q")
    await store.declare(policy)
    (job,) = await given_jobs(store, policy)
    refused = Released("broker refused: OSError: nobody there\nand more", delay)
    await finish(store, await claim(store, "q", 1), refused)
    told = await why(store, job)
    (hold,) = [hold for hold in told.holds if hold.reason is Reason.GIVEN_BACK]
    assert hold.words == "was claimed and given back before it ran: broker refused: OSError: nobody there"
    # What came after it is more to the point.
    clock.advance(30)
    await finish(store, await claim(store, "q", 1), Failed("boom", SECOND))
    assert Reason.GIVEN_BACK not in (await why(store, job)).reasons


async def test_what_runs_and_what_has_ended_says_so(store: Store, clock: ManualClock) -> None:
    policy = Policy("q")
    await store.declare(policy)
    (job,) = await given_jobs(store, policy)
    held = await claim(store, "q", 1)
    assert (await why(store, job)).reasons == [Reason.RUNNING]
    await finish(store, held)
    assert (await why(store, job)).reasons == [Reason.ENDED]
    with pytest.raises(JobNotFound):
        await why(store, UUID(int=7))


async def test_what_a_dispatcher_holds_is_published_and_does_not_run(store: Store, clock: ManualClock) -> None:
    policy = Policy("q")
    await store.declare(policy)
    (job,) = await given_jobs(store, policy)
    dispatcher = WorkerIdentity.of_dispatcher("dispatcher:1")
    (held,) = (await store.claim("q", lambda: 1, worker=dispatcher, lease=LEASE)).claims
    clock.advance("80s")
    told = await why(store, job)
    assert told.reasons == [Reason.PUBLISHED]
    assert "has been at the broker for 80 s, published by dispatcher dispatcher:1" in told.holds[0].words
    await store.adopt(held.id, held.lease, uuid4(), tasks=[held.task], worker=WORKER, lease_for=LEASE)
    assert (await why(store, job)).reasons == [Reason.RUNNING]


async def test_a_dispatcher_whose_broker_refuses_serves_the_queue_and_says_so(store: Store, clock: ManualClock) -> None:
    policy = Policy("q")
    await store.declare(policy)
    (job,) = await given_jobs(store, policy)
    dispatcher = WorkerIdentity.of_dispatcher("dispatcher:1")
    await store.run(
        records.report(dispatcher.id, said_by("dispatcher:1", clock, warnings={PUBLISHING: "OSError: nobody there"}))
    )
    told = await why(store, job)
    assert told.reasons[0] is Reason.BROKER
    assert "OSError: nobody there (dispatcher dispatcher:1)" in told.holds[0].words
    # Another one that gets through is enough.
    await store.run(records.report(WORKER.id, said_by("other", clock)))
    assert not {Reason.BROKER, Reason.NO_WORKER} & set((await why(store, job)).reasons)
    # Once all are silent, it is known what is to be started again.
    clock.advance("1m")
    told = await why(store, job)
    assert told.reasons[0] is Reason.NO_WORKER
    assert "fairlane forward module:forwarder --queues q" in told.holds[0].words


def said_by(name: str, clock: ManualClock, **said: Any) -> WorkerReport:
    return WorkerReport(
        name=name,
        host="vm",
        pid=1,
        version="1",
        queues={"q": 1.0},
        concurrency=1,
        started_at=clock.now(),
        every=5 * SECOND,
        **said,
    )


async def test_a_queue_without_a_worker_and_a_task_that_nobody_knows_are_named(
    store: Store, clock: ManualClock
) -> None:
    policy = Policy("q")
    await store.declare(policy)
    await store.enqueue(jobs := new_jobs(policy, task="shop.gone"))
    told = await why(store, jobs[0].id, tasks=["shop.deliver"])
    assert {Reason.NO_WORKER, Reason.UNKNOWN_TASK} <= set(told.reasons)
    assert told.earliest is None
    (other,) = await given_jobs(store, policy)
    await claim(store, "q", 1)
    await serving(store, clock, "q")
    told = await why(store, other, tasks=["deliver"])
    assert told.reasons == [Reason.SLOT]


async def test_a_worker_that_was_killed_serves_nothing_although_it_left_a_lease_and_a_place_to_wait(
    store: Store, clock: ManualClock
) -> None:
    """The same rule as for the status of a queue: who has reported lately."""
    policy = Policy("q", fair=Fair(by="account"), limits=(Concurrency(1, by="account"),))
    await store.declare(policy)
    first, waiting = await given_jobs(store, policy, {"account": "acme"}, 2)
    await serving(store, clock, "q")
    assert ids(await claim(store, "q", 5)) == [first]
    listener = await store.listen(WORKER)
    await hear(store, "q", listener)
    assert Reason.NO_WORKER not in (await why(store, waiting)).reasons
    clock.advance("66s")
    for told in (await why(store, waiting), await why(store, queue="q", account="bolt"), await why(store, queue="q")):
        assert told.reasons[0] is Reason.NO_WORKER
        assert (told.earliest, told.estimate) == (None, None)
    await listener.close()


async def test_a_job_behind_other_flows_says_how_many_have_their_turn_first(store: Store, clock: ManualClock) -> None:
    policy = Policy("q", fair=Fair(by="account", charge="count"))
    await store.declare(policy)
    mine = await given_jobs(store, policy, {"account": "acme"}, 3)
    others = [(await given_jobs(store, policy, {"account": name}))[0] for name in ("bolt", "coil")]
    assert ids(await claim(store, "q", 1)) == mine[:1]
    await serving(store, clock, "q")
    told = await why(store, mine[2])
    holds = {hold.reason: hold.count for hold in told.holds}
    assert holds == {Reason.TURN: 2, Reason.LANE: 1}
    # O06: what is shown as next is what runs next.
    assert told.next_up == [*others, *mine[1:]] == ids(await claim(store, "q", 5))


async def test_o06_the_order_shown_is_the_order_in_which_they_would_run_bells_not_yet_folded_included(
    store: Store, clock: ManualClock
) -> None:
    policy = Policy("q", fair=Fair(by="account", charge="count"), limits=(Concurrency(2, by="account"),))
    await store.declare(policy)
    for name in ("acme", "bolt", "acme", "coil", "acme"):
        await given_jobs(store, policy, {"account": name}, 2)
        clock.advance("1s")
    told = await why(store, queue="q")
    assert told.next_up == ids(await claim(store, "q", 10))
    assert len(told.next_up) == 6


async def test_a_key_and_a_queue_are_explained_by_what_holds_all_their_jobs(store: Store, clock: ManualClock) -> None:
    policy = Policy(
        "q",
        fair=Fair(by="account", charge="count"),
        limits=(Concurrency(1, by="account"), Concurrency(1, by="endpoint")),
    )
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "acme", "endpoint": "api"}, 3)
    running = await claim(store, "q", 5)
    await serving(store, clock, "q")
    told = await why(store, queue="q", account="acme")
    assert [hold.limit for hold in told.holds] == ["concurrency:account"]
    assert [holder.job for holder in told.holds[0].holders] == ids(running)
    await store.change_overrides(["q"], [Override(kind=Kind.PAUSE, set_by="ada")], [], NOTE)
    assert (await why(store, queue="q")).reasons == [Reason.PAUSED]
    assert Reason.PAUSED in (await why(store, queue="q", account="bolt")).reasons


async def test_o13_asking_why_changes_nothing_and_reads_no_more_with_many_keys(
    shared_database: Database, clock: ManualClock
) -> None:
    """By the database's own statistics: nothing is written, and what is read does not grow."""
    if shared_database.kind != "postgres":
        pytest.skip("SQLite keeps no statistics of rows; its reads run in a transaction that cannot write")
    policy = Policy("q", fair=Fair(by="account", charge="count"), limits=(Concurrency(1, by="account"),))
    read = []
    for count in (100, KEYS):
        store = await shared_database.open(clock)
        await store.declare(policy)
        (job, *_) = await given_jobs(store, policy, {"account": "acme"}, 3)
        for start in range(0, count, 1_000):
            names = [f"a{count}-{n}" for n in range(start, min(start + 1_000, count))]
            await store.enqueue([each for name in names for each in new_jobs(policy, {"account": name}, 2)])
        while await claim(store, "q", 200):
            pass
        (job,) = await given_jobs(store, policy, {"account": "acme"})
        before = await _statistics(shared_database)
        told = await why(await shared_database.open(clock), job)
        assert Reason.CONCURRENCY in told.reasons
        after = await _statistics(shared_database)
        assert {name for name in after if name.startswith("write") and after[name] != before[name]} == set()
        read.append(sum(after[name] - before[name] for name in after if name.startswith("read")))
    print("rows read:", read)
    assert 0 < read[1] <= 1.5 * read[0] + 2_000


async def _statistics(database: Database) -> dict[str, int]:
    """What the server has counted. A session tells all it has done when it ends, so all of ours end first."""
    await database.close()
    connection = await asyncpg.connect(database.url)
    try:
        while await connection.fetchval(
            "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'fairlane'"
        ):
            pass
        rows = await connection.fetch(
            """
            select relname, n_tup_ins + n_tup_upd + n_tup_del as written,
                coalesce(seq_tup_read, 0) + coalesce(idx_tup_fetch, 0) as read
            from pg_stat_user_tables
            where schemaname = 'fairlane'
            """
        )
        found = {f"write {row['relname']}": row["written"] for row in rows}
        return found | {f"read {row['relname']}": row["read"] for row in rows}
    finally:
        await connection.close()
