"""What operators see of queues and keys, on both stores, from jobs that were really enqueued and claimed."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from fairlane import App, Concurrency, Fair, Rate
from fairlane.clock import ManualClock, as_datetime
from fairlane.errors import ConfigurationError, UnknownQueue
from fairlane.job import Claim
from fairlane.operations.views import HintKind, QueueStatus
from fairlane.policy.gates import Reason
from fairlane.scheduler.settlement import Done, Failed, Released, settle
from fairlane.store import policies, records
from fairlane.store.protocol import Store, WorkerIdentity
from fairlane.store.stats_values import WorkerReport
from tests.store.harness import checkpointed, operations_on

WORKER = WorkerIdentity(uuid4(), "host:1")
LEASE = timedelta(seconds=30)


class Shop:
    """An app with two queues, whose jobs are claimed and settled by hand."""

    def __init__(self, url: str) -> None:
        self.clock = ManualClock()
        self.app = App(url, clock=self.clock)
        self.app.queue(
            "webhooks",
            fair=Fair(by="account"),
            limits=[Concurrency(2, by="account"), Rate(100, per="1m", by="endpoint"), Concurrency(50)],
        )
        self.app.queue("email", limits=Concurrency(1))
        self.see = self.app.operations

        @self.app.task(queue="webhooks")
        async def deliver(account: str, endpoint: str) -> None: ...

        @self.app.task(queue="email")
        async def send() -> None: ...

        self.deliver, self.send = deliver, send

    async def store(self) -> Store:
        return await self.app.opened()

    async def enqueue(self, account: str, count: int = 1, endpoint: str = "e", delay: str | None = None) -> None:
        task = self.deliver if delay is None else self.deliver.using(delay=delay)
        for _ in range(count):
            await task.enqueue(account, endpoint)

    async def claim(self, want: int, queue: str = "webhooks") -> list[Claim]:
        store = await self.store()
        claimed = await store.claim(queue, lambda: want, worker=WORKER, lease=LEASE)
        return claimed.claims

    async def settle(self, claims: list[Claim], *, failed: bool = False) -> None:
        store = await self.store()
        outcome = Failed("boom", 3_600_000_000) if failed else Done(None)
        await store.settle([settle(claim, outcome, 2_000_000) for claim in claims])

    async def stats(self) -> None:
        store = await self.store()
        for queue in ("webhooks", "email"):
            await store.add_up(queue)

    async def report(self, **stats: Any) -> None:
        said = WorkerReport(
            name=WORKER.name,
            host="host",
            pid=1,
            version="0",
            concurrency=10,
            started_at=self.clock.now(),
            every=5_000_000,
            **({"queues": {"webhooks": 1.0, "email": 1.0}} | stats),
        )
        await (await self.store()).run(records.report(WORKER.id, said))


@pytest.fixture
async def shop(url: str) -> AsyncIterator[Shop]:
    shop = Shop(url)
    async with shop.app:
        yield shop


async def test_jobs_are_seen_before_any_claim_and_without_any_worker(shop: Shop) -> None:
    await shop.enqueue("acme", 3)
    await shop.enqueue("late", delay="1h")
    overview = await shop.see.overview()
    (email, webhooks) = overview.queues
    assert (email.status, webhooks.status) == (QueueStatus.IDLE, QueueStatus.STOPPED)
    assert (webhooks.ready, webhooks.unseen, webhooks.scheduled.count) == (3, 3, 1)
    assert [(hint.kind, hint.queue) for hint in overview.hints] == [(HintKind.FAULT, "webhooks")]
    keys = (await shop.see.keys.list("webhooks")).keys
    assert [(key.keys, key.waiting, key.scheduled.count) for key in keys] == [
        ({"account": "acme"}, 3, 0),
        ({"account": "late"}, 0, 1),
    ]


async def test_a_limit_that_does_its_work_is_told_with_its_knob_and_what_is_left_to_drain(shop: Shop) -> None:
    await shop.report()
    await shop.enqueue("acme", 6)
    await shop.settle(await shop.claim(10))
    shop.clock.advance("2s")
    await shop.claim(10)
    await shop.stats()
    overview = await shop.see.overview()
    (_, webhooks) = overview.queues
    assert webhooks.status is QueueStatus.LIMITED
    assert (webhooks.ready, webhooks.held_jobs, webhooks.running, webhooks.oldest_wait) == (2, 2, 2, 2.0)
    assert [(held.limit, held.keys, held.jobs) for held in webhooks.held] == [("concurrency:account", 1, 2)]
    (hint,) = overview.hints
    assert hint.words == "account=acme is held by its limit of 2: 2 jobs wait, 2.0 s to drain"
    assert (overview.totals.workers, overview.totals.slots, overview.totals.running) == (1, 10, 2)


async def test_a_full_limit_of_the_whole_queue_holds_all_that_wait(shop: Shop) -> None:
    await shop.report()
    for _ in range(3):
        await shop.send.enqueue()
    await shop.claim(5, "email")
    await shop.stats()
    shown = await shop.see.queues.show("email")
    assert shown.view.status is QueueStatus.LIMITED
    assert [(held.limit, held.jobs) for held in shown.view.held] == [("concurrency:", 2)]
    (limit,) = shown.limits
    assert limit.gauge is not None
    assert (limit.gauge.used, limit.gauge.bound, limit.gauge.saturation, limit.denied) == (1, 1, 1.0, 1)


@pytest.mark.parametrize("is_added_up", [True, False])
async def test_jobs_that_two_limits_of_one_scope_hold_by_different_keys_are_all_held(
    url: str, is_added_up: bool
) -> None:
    """The concurrency holds one account and the rate another: nothing could start."""
    shop = Shop(url)
    shop.app.queue(
        "both", fair=Fair(by="account"), limits=[Concurrency(2, by="account"), Rate(2, per="1h", by="account")]
    )

    @shop.app.task(queue="both")
    async def sync(account: str) -> None: ...

    async with shop.app:
        await shop.report(queues={"both": 1.0})
        await shop.see.limits.set("both", "rate", 100, keys={"account": "slow"})
        for account, count in (("slow", 8), ("fast", 6)):
            for _ in range(count):
                await sync.enqueue(account)
        claims = await shop.claim(10, "both")
        assert len(claims) == 4
        await shop.settle([claim for claim in claims if claim.keys["account"] == "fast"])
        assert await shop.claim(10, "both") == []
        if is_added_up:
            await (await shop.store()).add_up("both")
        overview = await shop.see.overview()
        view = next(view for view in overview.queues if view.queue == "both")
        assert sorted(held.jobs for held in view.held) == [4, 6]
        assert (view.ready, view.held_jobs, overview.totals.held_jobs) == (10, 10, 10)
        assert view.status is QueueStatus.LIMITED
        stats = await shop.see.metrics(0)
        assert dict(stats["fairlane_queue_startable_jobs"])["both",] == 0
        await sync.enqueue("fast")
        await sync.enqueue("new")
        (view,) = [view for view in await shop.see.queues.list() if view.queue == "both"]
        assert (view.ready, view.held_jobs) == (12, 11), "whom no claim has seen as well"


@pytest.mark.parametrize("is_added_up", [True, False])
async def test_a_job_that_a_pause_and_a_limit_hold_is_held_once(shop: Shop, is_added_up: bool) -> None:
    await shop.see.queues.pause("webhooks", keys={"account": "paused"})
    for account, count in (("acme", 5), ("globex", 4), ("paused", 3)):
        await shop.enqueue(account, count)
    assert len(await shop.claim(10)) == 4
    await shop.see.queues.pause("webhooks", keys={"account": "acme"})
    if is_added_up:
        await shop.stats()
    (_, view) = await shop.see.queues.list()
    assert {held.limit: held.jobs for held in view.held} == {"concurrency:account": 5, "pause:account": 6}
    assert (view.ready, view.held_jobs) == (8, 8)


async def test_a_queue_tells_its_policy_its_limits_and_its_last_hour(shop: Shop) -> None:
    await shop.enqueue("acme", 4)
    claims = await shop.claim(10)
    shop.clock.advance("1m")
    await shop.settle(claims[:1])
    await shop.settle(claims[1:], failed=True)
    await shop.claim(1)
    await shop.stats()
    shop.clock.advance("1m")
    shown = await shop.see.queues.show("webhooks")
    assert shown.policy_words[0] == "Every account gets its turn, charged for the time its jobs run."
    assert [limit.limit for limit in shown.limits] == ["concurrency:account", "rate/60s:endpoint", "concurrency:"]
    assert shown.scopes == [["account"], ["endpoint"], ["task"]]
    assert len(shown.chart.minutes) == 60
    first, second, _ = shown.chart.minutes[-3:]
    assert (first.arrived, first.started, first.ended) == (4, 2, 0)
    assert (second.started, second.ended, second.failed, second.mean_run) == (1, 2, 1, 2.0)
    assert shown.chart.denied == {"concurrency:account": 1}
    assert (shown.view.ended_per_minute, shown.view.recently_started) == (0, 3)
    with pytest.raises(UnknownQueue, match="did you mean 'webhooks'"):
        await shop.see.queues.show("webhook")


async def test_runs_of_the_minute_that_has_begun_count_in_rates_and_hints(shop: Shop) -> None:
    """A queue that failed a while ago and does well now is shown as it does now."""
    await shop.report()
    await shop.enqueue("acme", 2)
    await shop.settle(await shop.claim(10), failed=True)
    assert await shop.claim(10) == [], "and so a claim has seen those ends"
    shop.clock.advance("3m")
    for account in range(10):
        await shop.enqueue(str(account))
    await shop.report()
    claims = await shop.claim(10)
    shop.clock.advance("15s")
    await shop.settle(claims)
    await shop.stats()
    overview = await shop.see.overview()
    (_, view) = overview.queues
    assert (view.started_per_minute, view.ended_per_minute, view.failed_per_minute) == (10, 10, 0)
    assert (view.recently_ended, view.recently_failed) == (12, 2)
    assert [hint for hint in overview.hints if "failed" in hint.words] == []
    shop.clock.advance("45s")
    (_, view) = await shop.see.queues.list()
    assert (view.started_per_minute, view.ended_per_minute) == (0, 10), (
        "the starts are 60 seconds old, the ends are not"
    )
    shop.clock.advance("15s")
    (_, view) = await shop.see.queues.list()
    assert (view.started_per_minute, view.ended_per_minute, view.recently_started) == (0, 0, 12)


async def test_a_rate_is_true_while_work_ramps_up_and_nothing_a_minute_after_the_last_start(shop: Shop) -> None:
    """Twenty starts, one a second from the 50th second of a minute on."""
    shop.clock.advance("50s")
    shown = []
    for second in range(90):
        if second < 20:
            await shop.enqueue(f"a{second}")
            await shop.settle(await shop.claim(1))
        (_, view) = await shop.see.queues.list()
        shown.append(view.started_per_minute)
        shop.clock.advance("1s")
    truth = [min(second + 1, 20) - min(max(0, second - 59), 20) for second in range(90)]
    assert shown == pytest.approx(truth, abs=1.2)
    assert [shown[79:], shown[:60]] == [[0] * 11, truth[:60]]


async def test_jobs_that_are_given_back_unstarted_are_no_throughput(shop: Shop) -> None:
    store = await shop.store()
    await shop.enqueue("acme")
    await shop.settle(await shop.claim(1))
    (view,) = (await shop.see.keys.list("webhooks")).keys
    started_at = view.last_started_at
    await shop.enqueue("acme")
    for _ in range(40):
        shop.clock.advance("1s")
        await store.settle([settle(claim, Released("nobody knows its task"), 0) for claim in await shop.claim(1)])
    for is_added_up in (False, True):
        if is_added_up:
            await shop.stats()
        (_, queue) = await shop.see.queues.list()
        key = await shop.see.keys.show("webhooks", {"account": "acme"})
        assert (queue.started_per_minute, queue.recently_started) == (1, 1)
        assert sum(each.started for each in key.minutes) == 1
        assert (key.view.last_started_at, key.view.waiting) == (started_at, 1)


async def test_runs_that_were_lost_are_not_in_the_mean_run_time(shop: Shop) -> None:
    store = await shop.store()
    await shop.enqueue("acme", 2)
    await shop.claim(2)
    shop.clock.advance("75s")
    await store.reap()
    for is_added_up in (False, True):
        if is_added_up:
            await shop.claim(0)
            await shop.stats()
        (view,) = (await shop.see.keys.list("webhooks")).keys
        assert (view.ended, view.failed, view.run_time) == (2, 2, None)
    await shop.settle(await shop.claim(1))
    (view,) = (await shop.see.keys.list("webhooks")).keys
    assert (view.ended, view.failed, view.run_time) == (3, 2, 2.0)


async def test_a_key_says_when_its_newest_job_was_enqueued_whenever_a_claim_sees_it(shop: Shop) -> None:
    async def last_enqueued() -> datetime | None:
        (view,) = (await shop.see.keys.list("webhooks")).keys
        return view.last_arrived_at

    await shop.enqueue("acme")
    shop.clock.advance("10s")
    await shop.enqueue("acme")
    enqueued = as_datetime(shop.clock.now())
    shop.clock.advance("20s")
    assert await last_enqueued() == enqueued, "no claim has seen it"
    await shop.claim(1)
    assert await last_enqueued() == enqueued, "the claim came later"
    shop.clock.advance("20s")
    await shop.stats()
    assert await last_enqueued() == enqueued, "added up"


async def test_a_limit_by_another_key_than_that_of_the_turns_has_its_saturation_told(shop: Shop) -> None:
    await shop.enqueue("acme", 3)
    await shop.claim(2)
    stats = await shop.see.metrics(5)
    assert dict(stats["fairlane_limit_saturation_ratio"]) == {
        ("email", "concurrency:"): 0,
        ("webhooks", "concurrency:"): pytest.approx(2 / 50),
        ("webhooks", "concurrency:account"): 1,
        ("webhooks", "rate/60s:endpoint"): pytest.approx(2 / 100),
    }


async def test_keys_are_paged_sorted_and_searched_by_any_scope(shop: Shop) -> None:
    for account, count in (("ada", 1), ("bob", 5), ("Cyd", 3)):
        await shop.enqueue(account, count, endpoint=f"{account}.example")
    await shop.claim(2)
    await shop.stats()
    names = [key.keys["account"] for key in (await shop.see.keys.list("webhooks")).keys]
    assert names == ["bob", "Cyd", "ada"]
    by_name = await shop.see.keys.list("webhooks", sort="name", limit=2)
    assert [key.keys["account"] for key in by_name.keys] == ["Cyd", "ada"]
    rest = await shop.see.keys.list("webhooks", sort="name", limit=2, after=by_name.after)
    assert [key.keys["account"] for key in rest.keys] == ["bob"]
    assert rest.after is None
    found = await shop.see.keys.list("webhooks", "endpoint", search="CYD")
    assert [key.keys for key in found.keys] == [{"endpoint": "Cyd.example"}]
    assert [gauge.limit for gauge in found.keys[0].gauges] == ["rate/60s:endpoint"]
    for wrong in ({"by": "region"}, {"sort": "size"}, {"after": "forged"}, {"limit": 0}):
        with pytest.raises(ConfigurationError):
            await shop.see.keys.list("webhooks", **wrong)


async def test_a_key_tells_how_long_its_jobs_waited_by_minute(shop: Shop) -> None:
    """N8: the wait beside the run time, on the list and on the key's page."""
    for waited in (30, 90):
        await shop.enqueue("acme")
        shop.clock.advance(f"{waited}s")
        await shop.settle(await shop.claim(1), failed=waited == 90)
    await shop.enqueue("idle")
    shop.clock.advance("1m")
    acme, idle = (await shop.see.keys.list("webhooks", sort="name")).keys
    assert (acme.mean_wait, acme.run_time, idle.mean_wait) == (60.0, 2.0, None)
    assert [each for each in acme.waits if each is not None] == [30.0, 90.0]
    assert (len(acme.waits), set(idle.waits)) == (60, {None})
    one = await shop.see.keys.show("webhooks", {"account": "acme"})
    busy = [each for each in one.minutes if each.started or each.ended]
    assert [each.mean_wait for each in busy if each.started] == [30.0, 90.0]
    assert (sum(each.ended for each in busy), sum(each.failed for each in busy), len(one.minutes)) == (2, 1, 60)
    shop.clock.advance("61m")
    (view,) = await shop.see.keys.show_several("webhooks", [{"account": "acme"}])
    assert (view.mean_wait, view.ended, set(view.waits)) == (None, 2, {None})


async def test_a_queue_tells_what_ended_in_a_day_as_its_keys_do(shop: Shop) -> None:
    """N8: whatever is in the stored stats, and what is not."""
    for account in ("acme", "globex"):
        await shop.enqueue(account, 2)
        await shop.settle(await shop.claim(2), failed=account == "globex")
        await (await shop.store()).run(policies.lanes("webhooks", keeps=True))  # An end counts from when it is folded.
        shop.clock.advance("2h")
        await shop.stats()
    overview = await shop.see.overview()
    email, webhooks = overview.queues
    assert ((webhooks.ended, webhooks.failed), (email.ended, email.failed)) == ((4, 2), (0, 0))
    assert (overview.totals.ended, overview.totals.failed) == (4, 2)
    keys = (await shop.see.keys.list("webhooks")).keys
    assert (sum(each.ended for each in keys), sum(each.failed for each in keys)) == (4, 2)
    shop.clock.advance("21h")
    (webhooks,) = [each for each in await shop.see.queues.list() if each.queue == "webhooks"]
    assert (webhooks.ended, webhooks.failed) == (2, 2)


async def test_the_oldest_wait_is_of_now_whether_anybody_has_added_up_or_not(shop: Shop) -> None:
    """N3."""

    async def oldest_wait() -> float | None:
        return (await shop.see.queues.show("webhooks")).view.oldest_wait

    await shop.enqueue("acme", 1)
    shop.clock.advance("30s")
    await shop.enqueue("acme", 2)
    shop.clock.advance("20s")
    assert await oldest_wait() == 50, "no claim has seen them"
    claims = await shop.claim(1)
    assert await oldest_wait() == 20
    await shop.settle(claims)
    await shop.stats()
    shop.clock.advance("10s")
    assert await oldest_wait() == 30
    await shop.claim(2)
    assert await oldest_wait() is None


async def test_a_key_tells_its_lanes_its_jobs_and_what_holds_it(shop: Shop) -> None:
    await shop.enqueue("acme", 2, endpoint="a")
    await shop.enqueue("acme", 2, endpoint="b")
    claims = await shop.claim(10)
    await shop.stats()
    await shop.see.queues.pause("webhooks", keys={"account": "acme"}, reason="testing", actor="ada")
    await shop.claim(10)
    await shop.stats()
    shown = await shop.see.keys.show("webhooks", {"account": "acme"})
    assert (shown.view.waiting, shown.view.running, shown.view.is_paused) == (2, 2, True)
    assert {job.id for job in shown.running} == {str(claim.id) for claim in claims}
    assert len(shown.next_jobs) == 2
    assert sum(lane.waiting for lane in shown.lanes) == 2
    assert "account=acme is paused by ada: testing" in shown.why
    assert any("paused" in each for each in shown.overrides)
    nobody = await shop.see.keys.show("webhooks", {"account": "nobody"})
    assert (nobody.view.waiting, nobody.next_jobs) == (0, [])
    with pytest.raises(ConfigurationError, match="has no key 'region'"):
        await shop.see.keys.show("webhooks", {"region": "eu"})


async def test_o06_the_next_jobs_of_a_key_are_those_that_start_next_in_that_order(shop: Shop) -> None:
    for endpoint, priority in (("a", 0), ("b", 0), ("a", 5), ("c", 1), ("b", 0)):
        await shop.deliver.using(priority=priority).enqueue("acme", endpoint)
        shop.clock.advance("10s")
    await shop.see.queues.pause("webhooks", keys={"account": "acme"})
    await shop.claim(10)
    told = [job.id for job in (await shop.see.keys.show("webhooks", {"account": "acme"})).next_jobs]
    await shop.see.queues.resume("webhooks", keys={"account": "acme"})
    started: list[str] = []
    while claims := await shop.claim(1):
        started += [str(claim.id) for claim in claims]
        await shop.settle(claims)
    assert told == started
    assert len(told) == 5


async def test_workers_that_fall_silent_are_late(shop: Shop) -> None:
    await shop.report(running=3)
    listed = await shop.see.workers.list()
    assert [(each.name, each.running, each.is_late) for each in listed.workers] == [("host:1", 3, False)]
    shop.clock.advance("1m")
    listed = await shop.see.workers.list()
    assert (listed.alive, listed.late, listed.slots) == (0, 1, 0)
    assert "was last heard from" in (await shop.see.overview()).hints[0].words


async def test_o13_looking_changes_nothing(shop: Shop) -> None:
    await shop.report()
    await shop.enqueue("acme", 5)
    await shop.enqueue("late", delay="1h")
    claims = await shop.claim(3)
    await shop.settle(claims[:1])
    await shop.settle(claims[1:], failed=True)
    await shop.stats()
    await shop.enqueue("new", 2)
    await checkpointed(await shop.store())
    before = await everything(shop.app.url)
    await shop.see.overview()
    await shop.see.queues.list()
    await shop.see.queues.show("webhooks")
    for scope in ("account", "endpoint", "task"):
        await shop.see.keys.list("webhooks", scope)
    for account in ("acme", "late", "new", "nobody"):
        await shop.see.keys.show("webhooks", {"account": account})
    await shop.see.workers.list()
    await shop.see.diagnose()
    assert await everything(shop.app.url) == before


async def everything(url: str) -> dict[str, list[str]]:
    """All rows of all tables, with what PostgreSQL says of when they were written."""
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///")) as database:
            tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
            return {name: sorted(map(repr, database.execute(f'select * from "{name}"'))) for name in tables}
    connection = await asyncpg.connect(url)
    try:
        tables = [
            name for (name,) in await connection.fetch("select tablename from pg_tables where schemaname = 'fairlane'")
        ]
        return {
            name: sorted(map(repr, await connection.fetch(f'select xmin, ctid, t.* from fairlane."{name}" t')))
            for name in tables
        }
    finally:
        await connection.close()


async def test_a_limit_of_another_scope_than_the_key_is_told_too(shop: Shop) -> None:
    await shop.see.limits.set("webhooks", "rate", 2, keys={"endpoint": "slow"}, actor="ada")
    await shop.enqueue("acme", 5, endpoint="slow")
    while claims := await shop.claim(1):
        await shop.settle(claims)
    await shop.stats()
    shown = await shop.see.keys.show("webhooks", {"account": "acme"})
    assert (shown.view.waiting, shown.view.held_by, shown.view.drained_in) == (3, [], None)
    said = "3 jobs of endpoint=slow are held by Rate(2, per='60s', burst=2, by='endpoint'), set by an operator"
    assert said in shown.why
    whole = await shop.see.queues.explain("webhooks")
    assert said in [hold.words for hold in whole.holds]


async def test_a_key_that_a_number_of_zero_stops_is_held_before_any_claim_has_met_it(shop: Shop) -> None:
    await shop.enqueue("acme", 3)
    (limit,) = [each.name for each in await shop.see.limits.list("webhooks") if each.name == "concurrency:account"]
    await shop.see.limits.set("webhooks", limit, 0, keys={"account": "acme"})
    (key,) = (await shop.see.keys.list("webhooks")).keys
    assert (key.waiting, key.held_by) == (3, ["concurrency:account"])
    assert (await shop.see.queues.show("webhooks")).view.held_jobs == 3


async def test_what_is_called_ended_counts_failures_too_for_keys_queues_and_their_order(shop: Shop) -> None:
    await shop.enqueue("acme", 2)
    await shop.enqueue("globex")
    claims = await shop.claim(10)
    await shop.settle([each for each in claims if each.keys["account"] == "acme"], failed=True)
    page = await shop.see.keys.list("webhooks", sort="ended")
    assert [(key.keys["account"], key.ended, key.failed) for key in page.keys] == [("acme", 2, 2), ("globex", 0, 0)]
    (_, view) = await shop.see.queues.list()
    assert (view.ended, view.failed) == (2, 2)
    assert not hasattr(view, "done")


async def test_free_slots_are_those_that_jobs_of_a_queue_could_take_whoever_uses_the_others(shop: Shop) -> None:
    await shop.report(running=9)
    (email, webhooks) = await shop.see.queues.list()
    assert [(each.running, each.slots, each.slots_free) for each in (email, webhooks)] == [(0, 10, 1)] * 2


async def test_explaining_a_queue_names_its_paused_keys_with_how_many_jobs_wait(shop: Shop) -> None:
    await shop.enqueue("acme", 3)
    await shop.see.queues.pause("webhooks", keys={"account": "acme"}, actor="ann", reason="a flood")
    for keys in ({}, {"account": "acme"}):
        told = await shop.see.queues.explain("webhooks", keys)
        (hold,) = [each for each in told.holds if each.reason is Reason.PAUSED]
        assert hold.key == {"account": "acme"}
        assert hold.words.startswith("account=acme is paused by ann: a flood")
        assert keys or (hold.count, hold.words[-13:]) == (3, "; 3 jobs wait")


async def test_a_chart_has_the_minute_that_has_begun_as_rates_do(shop: Shop) -> None:
    await shop.enqueue("acme", 2)
    await shop.settle(await shop.claim(10))
    shop.clock.advance("3m")
    await shop.enqueue("acme")
    await shop.settle(await shop.claim(10))
    seen = await shop.see.queues.show("webhooks")
    key = await shop.see.keys.show("webhooks", {"account": "acme"})
    for minutes in (seen.chart.minutes, key.minutes):
        assert [each.started for each in minutes] == [*[0] * 56, 2, 0, 0, 1]
    assert seen.view.started_per_minute == 1


async def test_the_doctor_and_a_queues_status_agree_on_who_serves_it(shop: Shop) -> None:
    """A worker died while a job ran: until its lease ends, the job counts as running, and nobody serves the queue."""
    await shop.send.enqueue()
    await shop.send.enqueue()
    assert len(await shop.claim(10, "email")) == 1
    store = await shop.store()
    for is_served in (False, True):
        if is_served:
            await shop.report()
        (email, _) = await shop.see.queues.list()
        found = {each.check for each in await operations_on(store).diagnose() if each.queue == "email"}
        assert (email.status is not QueueStatus.STOPPED, "no worker" not in found) == (is_served, is_served)


async def test_a_preview_counts_exactly_whom_it_is_about_however_many(shop: Shop) -> None:
    await shop.deliver.enqueue_many([shop.deliver.call("acme", "e")] * 1_690)
    await shop.deliver.using(delay="1h").enqueue_many([shop.deliver.call("acme", "f")] * 5)
    await shop.claim(10)
    who: dict[str, Any] = {"actor": "ann", "reason": "a test", "dry_run": True}
    for keys in ({"account": "acme"}, None):
        change = await shop.see.queues.pause("webhooks", keys=keys, **who)
        assert str(change.affected) == "1,693 jobs wait and 2 run"
    both = await shop.see.queues.pause("webhooks", keys={"account": "acme", "endpoint": "e"}, **who)
    assert str(both.affected) == "at least 1,000 jobs wait and at least 2 run"
