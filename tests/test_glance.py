"""What a glance at the overview shows is what the doctor knows, as far as it is cheap to know; on both stores."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import pytest

from fairlane import App, Concurrency, Fair, Rate, State
from fairlane.cli.views import draw_ranking, draw_workers
from fairlane.clock import SECOND, ManualClock
from fairlane.operations import diagnosis as diagnosis_database
from fairlane.operations.views import HintKind, QueueStatus, QueueView, WorkerList
from fairlane.store import operators, records
from fairlane.store.protocol import WorkerIdentity
from fairlane.store.stats_values import BlockedLoop, LongRun, WorkerReport
from fairlane.worker.reports import take_back
from tests.waiting import until_found
from tests.worker.harness import reaches, working


@pytest.fixture
async def shop(url: str) -> AsyncIterator[App]:
    app = App(url, clock=ManualClock())
    app.queue("shop", keys=["account"], limits=[Rate(1, per="1h")])
    app.queue("plain", keys=["account"])

    async def send(account: str) -> None: ...

    app.task(queue="shop", name="send")(send)
    app.task(queue="plain", name="mail")(send)
    async with app:
        yield app


PROCESSES: defaultdict[str, UUID] = defaultdict(uuid4)


async def report(app: App, name: str, process: str | None = None, **said: Any) -> None:
    usual: dict[str, Any] = {"host": "app-1", "pid": 1, "version": "1", "queues": {"plain": 1.0}, "concurrency": 5}
    usual |= {"started_at": app.clock.now(), "every": 5 * SECOND, "tasks": ["mail"]}
    await (await app.opened()).run(
        records.report(PROCESSES[process or name], WorkerReport(name=name, **(usual | said)))
    )


async def seen(app: App) -> tuple[WorkerList, list[str], list[tuple[str, str]]]:
    """The workers, the hints of the overview, and what the doctor finds of workers that are late."""
    hints = [hint.words for hint in (await app.operations.overview()).hints]
    late = [(str(each.level), each.message) for each in await app.operations.diagnose() if each.check == "late worker"]
    return await app.operations.workers.list(), hints, late


def advance(app: App, time: str) -> None:
    assert isinstance(app.clock, ManualClock)
    app.clock.advance(time)


# N9: workers that died.


@pytest.mark.parametrize("same", [{"name": "new"}, {"name": "old", "process": "b", "host": "c"}], ids=["host", "name"])
async def test_a_worker_that_was_replaced_is_no_fault_and_is_forgotten(shop: App, same: dict[str, Any]) -> None:
    await report(shop, "old")
    advance(shop, "1m")
    await report(shop, **same)
    workers, hints, late = await seen(shop)
    assert sorted(each.state for each in workers.workers) == ["replaced", "well"]
    assert (workers.alive, workers.late) == (1, 0)
    assert hints == []
    [(level, message)] = late
    assert level == "note"
    assert "others have taken its place" in message
    advance(shop, "15m")
    await report(shop, **same)
    workers, hints, late = await seen(shop)
    assert ([each.state for each in workers.workers], hints, late) == (["well"], [], [])


async def test_a_worker_that_was_replaced_is_no_fault_once_its_replacement_has_stopped_in_order(shop: App) -> None:
    await report(shop, "old")
    await report(shop, "elsewhere", host="app-2", queues={"shop": 1.0})
    advance(shop, "1m")
    await report(shop, "new")
    await take_back(await shop.opened(), WorkerIdentity(PROCESSES["new"], "new"))
    workers, _, late = await seen(shop)
    assert [each.name for each in workers.workers] == ["elsewhere"], "nobody has taken the place of that one"
    assert [level for level, _ in late] == ["fault"]


async def test_a_worker_beside_which_another_ran_all_the_time_is_missed_until_it_is_long_gone(shop: App) -> None:
    """That other has not taken its place: there are fewer slots than there were."""
    begun = shop.clock.now()
    await report(shop, "old", started_at=begun)
    advance(shop, "1m")
    beside: dict[str, Any] = {"started_at": begun - SECOND, "host": "app-2"}
    await report(shop, "beside", **beside)
    workers, hints, [(level, _)] = await seen(shop)
    assert (workers.late, level, len(hints)) == (1, "warning", 1)
    advance(shop, "15m")
    await report(shop, "beside", **beside)
    workers, hints, late = await seen(shop)
    assert (workers.late, hints, late) == (0, [], [])


async def test_a_worker_whose_queue_nobody_serves_stays_a_fault(shop: App) -> None:
    await report(shop, "old", queues={"plain": 1.0, "shop": 1.0})
    advance(shop, "20m")
    await report(shop, "new")
    workers, _, [(level, message)] = await seen(shop)
    assert sorted(each.state for each in workers.workers) == ["late", "well"]
    assert level == "fault"
    assert "nobody else serves shop" in message


async def test_a_dispatcher_does_not_take_the_place_of_a_worker(shop: App) -> None:
    await report(shop, "old")
    advance(shop, "1m")
    said = WorkerReport(
        name="new", host="app-1", pid=2, version="1", queues={"plain": 1.0}, concurrency=1,
        started_at=shop.clock.now(), every=5 * SECOND,
    )  # fmt: skip
    await (await shop.opened()).run(records.report(WorkerIdentity.of_dispatcher("new").id, said))
    assert (await seen(shop))[0].late == 1


# What status did not know.


async def test_a_task_that_no_worker_knows_is_not_shown_as_idle(url: str, shop: App) -> None:
    program = App(url)
    program.queue("plain", keys=["account"])

    @program.task(queue="plain", name="other")
    async def other(account: str) -> None: ...

    job = await shop.registry["mail"].enqueue("acme")
    async with program, working(program, name="one"):
        await reaches(job, State.SCHEDULED)  # given back, to be tried again later

        queue = await queue_of(program)

        async def is_told() -> bool:
            nonlocal queue
            queue = await queue_of(program)  # between its time and the next claim the job is ready for a moment
            return queue.unknown_tasks == ["mail"] and not queue.ready and not queue.running

        await until_found(is_told)
        assert (queue.status, queue.ready, queue.running) == (QueueStatus.STOPPED, 0, 0)
        assert "no worker that serves it knows task 'mail'" in queue.words
        [hint] = [each for each in (await program.operations.overview()).hints if each.kind is HintKind.FAULT]
        assert hint.queue == "plain"
        assert "task 'mail'" in hint.words
        found = [each for each in await program.operations.diagnose() if each.check == "unknown task"]
        assert len(found) == 1


async def queue_of(app: App) -> QueueView:
    return next(each for each in (await app.operations.overview()).queues if each.queue == "plain")


async def test_a_task_that_some_workers_do_not_know_is_a_warning(shop: App) -> None:
    await report(shop, "new")
    await report(shop, "old", tasks=[], unknown_tasks={"mail": "plain"})
    overview = await shop.operations.overview()
    [hint] = overview.hints
    assert hint.kind is HintKind.WARNING
    assert "worker old does not know it" in hint.words
    assert next(each for each in overview.queues if each.queue == "plain").status is QueueStatus.IDLE


async def test_what_presses_the_database_is_a_hint(shop: App, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await shop.operations.overview()).hints == []
    if url.startswith("sqlite"):
        monkeypatch.setattr(diagnosis_database, "LITTLE_SPACE", 1 << 60)
        [hint] = (await shop.operations.overview()).hints
        assert "are left on the disk" in hint.words
        return
    monkeypatch.setattr(diagnosis_database, "LONG_OPEN", 0)
    connection = await asyncpg.connect(url, server_settings={"application_name": "a forgotten shell"})
    async with asyncio.timeout(30), connection.transaction(isolation="repeatable_read"):
        await connection.fetchval("select 1")
        hints = (await shop.operations.overview()).hints
    await connection.close()
    assert any("'a forgotten shell'" in hint.words and "has held a snapshot" in hint.words for hint in hints)


async def test_long_runs_and_blocked_loops_of_a_worker_that_is_gone_are_past(shop: App) -> None:
    run = LongRun(job=str(uuid4()), task="mail", queue="plain", since=shop.clock.now())
    block = BlockedLoop(since=shop.clock.now(), job=run.job, task="mail", where="mail")
    await report(shop, "one", long_runs=[run], lost_runs=1, blocks=[block])
    stats = await shop.operations.metrics(0)
    assert stats["fairlane_queue_long_runs"] == [(("plain", "mail"), 1.0)]
    assert stats["fairlane_workers_blocked"] == [(("mail",), 1.0)]
    [found] = [each for each in await shop.operations.diagnose() if each.check == "lost run"]
    assert found.message == "worker one: 1 run whose claim is lost still takes up a slot"
    advance(shop, "1m")
    for state in ("late", "replaced"):
        stats = await shop.operations.metrics(0)
        assert stats["fairlane_queue_long_runs"] == stats["fairlane_workers_blocked"] == []
        workers = await shop.operations.workers.list()
        gone = next(each for each in workers.workers if each.name == "one")
        assert (gone.state, gone.long_runs, gone.lost_runs, gone.blocks) == (state, [], 0, [])
        assert run.job not in "".join(line.plain for line in draw_workers(workers, 200))
        assert not any(run.job in each.message for each in await shop.operations.diagnose())
        assert not any(run.job in hint.words for hint in (await shop.operations.overview()).hints)
        await report(shop, "two")


# Who serves a queue.


async def claimed(app: App, queue: str, want: int, worker: str = "one") -> None:
    identity = WorkerIdentity(PROCESSES[worker], worker)
    batch = await (await app.opened()).claim(queue, lambda: want, worker=identity, lease=timedelta(seconds=30))
    assert len(batch.claims) == want


async def test_a_worker_that_is_stopping_serves_nothing(shop: App) -> None:
    for _ in range(3):
        await shop.registry["mail"].enqueue("acme")
    await report(shop, "one", running=1, is_stopping=True)
    await claimed(shop, "plain", 1)
    queue = await queue_of(shop)
    assert (queue.status, queue.workers, queue.workers_stopping) == (QueueStatus.STOPPED, 0, 1)
    assert (queue.slots, queue.slots_free) == (0, 0)
    words = "its only worker is stopping and takes no new jobs"
    assert queue.words == f"{words}: 2 jobs wait, 1 was running"
    overview, workers = await shop.operations.overview(), await shop.operations.workers.list()
    assert (overview.totals.workers, overview.totals.workers_stopping, overview.totals.slots) == (0, 1, 0)
    assert (workers.alive, workers.stopping, workers.slots, workers.running) == (1, 1, 0, 0)
    assert words in (await shop.operations.queues.explain("plain")).holds[0].words
    [found] = [each for each in await shop.operations.diagnose() if each.check == "no worker"]
    assert words in found.message
    assert (await shop.operations.keys.list("plain")).unserved == words
    assert (await shop.operations.keys.rank()).unserved == {"plain": words}
    await report(shop, "two")
    assert (await queue_of(shop)).workers == 1
    assert (await shop.operations.keys.list("plain")).unserved is None
    assert (await shop.operations.keys.rank()).unserved == {}


async def test_keys_say_that_no_worker_serves_their_queue_where_some_wait(shop: App) -> None:
    assert (await shop.operations.keys.list("plain")).unserved is None
    await shop.registry["mail"].enqueue("acme")
    page = await shop.operations.keys.list("plain")
    assert page.unserved == "no worker serves the queue"
    drawn = [line.plain for line in draw_ranking(await shop.operations.keys.rank(), 80)]
    assert "plain: no worker serves the queue" in drawn


async def test_a_slot_in_which_a_job_has_started_since_the_last_report_is_not_free(shop: App) -> None:
    for _ in range(9):
        await shop.registry["mail"].enqueue("acme")
    await report(shop, "one")
    assert (await queue_of(shop)).slots_free == 5
    await claimed(shop, "plain", 4)
    assert (await queue_of(shop)).slots_free == 1
    await report(shop, "one", running=3, waiting=1)
    assert (await queue_of(shop)).slots_free == 2
    await report(shop, "two", concurrency=7)
    assert (await queue_of(shop)).slots_free == 9


async def test_a_worker_reports_again_as_soon_as_its_slots_may_be_full(url: str) -> None:
    program, is_told_of = App(url), asyncio.Event()
    program.queue("plain")

    @program.task(queue="plain", name="other")
    async def other() -> None:
        await is_told_of.wait()

    async with program:
        await other.enqueue()
        async with working(program, concurrency=1):

            async def is_told() -> bool:
                return (await program.operations.workers.list()).running == 1

            async with asyncio.timeout(3):
                await until_found(is_told)
            is_told_of.set()


async def test_queues_that_nobody_serves_are_one_finding_and_one_hint(shop: App) -> None:
    await shop.registry["mail"].enqueue("acme")
    await shop.registry["send"].enqueue("acme")
    [found] = [each for each in await shop.operations.diagnose() if each.check == "no worker"]
    assert (found.queue, found.remedy) == (None, "fairlane worker module:app")
    assert found.message.startswith("plain, shop: no worker serves these queues: ")
    [hint] = (await shop.operations.overview()).hints
    assert (hint.kind, hint.knob) == (HintKind.FAULT, "fairlane worker module:app")


async def test_a_queue_knows_the_rates_that_have_turned_jobs_away_in_the_last_minutes(shop: App) -> None:
    for _ in range(3):
        await shop.registry["send"].enqueue("acme")
    await report(shop, "one", queues={"shop": 1.0})
    store = await shop.opened()
    for want in (1, 0):
        batch = await store.claim("shop", lambda: 1, worker=WorkerIdentity(uuid4(), "one"), lease=timedelta(hours=2))
        assert len(batch.claims) == want
    [view] = [each for each in await shop.operations.queues.list() if each.queue == "shop"]
    assert list(view.rates) == ["rate/3600s:"]
    assert view.words.endswith(" lets jobs start as it opens, as the policy requires: 2 jobs wait")
    advance(shop, "2m")
    [view] = [each for each in await shop.operations.queues.list() if each.queue == "shop"]
    assert view.rates == {}


# N11: what could start.


async def test_what_a_rate_or_a_pause_holds_cannot_start_and_the_rest_can(shop: App) -> None:
    store = await shop.opened()
    send, mail = shop.registry["send"], shop.registry["mail"]
    for account in ("acme", "acme", "globex"):
        await send.enqueue(account)
        await mail.enqueue(account)
    await mail.enqueue("globex")
    await shop.operations.queues.pause("plain", keys={"account": "acme"})
    worker = WorkerIdentity(uuid4(), "one")
    for queue in ("shop", "plain"):
        claimed = await store.claim(queue, lambda: 1, worker=worker, lease=timedelta(seconds=30))
        assert len(claimed.claims) == 1
        await store.add_up(queue)
    stats = await shop.operations.metrics(0)
    assert dict(stats["fairlane_queue_ready_jobs"]) == {("shop",): 2, ("plain",): 3}
    assert dict(stats["fairlane_queue_startable_jobs"]) == {("shop",): 0, ("plain",): 1}
    await shop.operations.queues.pause("plain")
    assert dict((await shop.operations.metrics(0))["fairlane_queue_startable_jobs"])["plain",] == 0


# What has ended, and nobody is there to notice.


async def test_what_was_set_for_a_time_is_shown_as_in_force_until_it_ends_though_nobody_claims(url: str) -> None:
    app, acme = App(url, clock=ManualClock()), {"account": "acme"}
    app.queue("plain", fair=Fair(by="account"), limits=[Concurrency(2, by="account")])

    @app.task(queue="plain", name="mail")
    async def mail(account: str) -> None: ...

    async with app:
        see = app.operations
        as_declared = await see.limits.list("plain")
        await see.queues.pause("plain", expires_in="5s")
        await see.queues.pause("plain", keys=acme, expires_in="5s")
        await see.queues.suspend("plain", expires_in="5s")
        await see.limits.set("plain", "concurrency:account", 0, keys=acme, expires_in="5s")
        await see.weights.set("plain", 7, keys=acme, expires_in="5s")
        await see.weights.boost("plain", 3, keys=acme, expires_in="5s")
        for _ in range(3):
            await mail.enqueue("acme")
        assert (await queue_of(app)).status is QueueStatus.PAUSED
        assert len(await see.limits.list("plain")) == 2
        assert len((await see.keys.show("plain", acme)).overrides) == 4
        advance(app, "25s")
        queue = await queue_of(app)
        assert (queue.status, queue.is_paused, queue.held_jobs) == (QueueStatus.STOPPED, False, 0)
        assert queue.words == "no worker serves the queue: 3 jobs wait"
        assert "no worker" in [each.check for each in await see.diagnose()]
        assert (await see.metrics())["fairlane_queue_startable_jobs"] == [(("plain",), 3.0)]
        assert await see.limits.list("plain") == as_declared
        assert [each.is_suspended for each in (await see.queues.show("plain")).limits] == [False]
        key = await see.keys.show("plain", acme)
        assert (key.overrides, key.why) == ([], [(await see.queues.explain("plain", acme)).holds[0].words])
        (view,) = (await see.keys.list("plain")).keys
        assert (view.is_paused, view.held_by, view.weight, view.boost) == (False, [], 1.0, 1.0)
        assert [gauge.bound for gauge in view.gauges] == [2.0]
        told = await see.overrides.list("plain")
        assert [each.no_effect for each in told] == ["its time has come; the next claim ends it"] * 6


async def test_what_a_killed_worker_ran_is_a_fault_once_its_lease_is_over(url: str) -> None:
    app = App(url, clock=ManualClock())
    app.queue("plain", limits=[Concurrency(3, by="account")])

    @app.task(queue="plain", name="mail")
    async def mail(account: str) -> None: ...

    async with app:
        see = app.operations
        job, *_ = [await mail.enqueue("acme") for _ in range(3)]
        await report(app, "one")
        await claimed(app, "plain", 3)
        advance(app, "29s")
        assert (await queue_of(app)).status is QueueStatus.FLOWING
        advance(app, "2s")
        queue = await queue_of(app)
        assert (queue.status, queue.ready, queue.running, queue.lapsed) == (QueueStatus.STOPPED, 0, 3, 3)
        assert queue.words == "no worker serves the queue: 3 were running"
        assert "which is gone" in (await see.jobs.explain(job.id)).holds[-1].words
        waiting = await mail.enqueue("acme")
        assert (await queue_of(app)).words == "no worker serves the queue: 1 job waits, 3 were running"
        assert "no worker" in [each.check for each in await see.diagnose()]
        assert {hint.kind for hint in (await see.overview()).hints} == {HintKind.FAULT}
        full = next(each for each in (await see.jobs.explain(waiting.id)).holds if each.limit is not None)
        assert "of these, 3 on a worker that is gone" in full.words
        await report(app, "two")
        assert (await queue_of(app)).status is QueueStatus.LIMITED


async def test_jobs_that_are_due_wait_for_a_worker_like_any_others(shop: App) -> None:
    await shop.registry["mail"].using(delay="5s").enqueue("acme")
    assert (await queue_of(shop)).status is QueueStatus.IDLE
    assert "no worker" not in [each.check for each in await shop.operations.diagnose()]
    advance(shop, "1m")
    queue = await queue_of(shop)
    assert (queue.status, queue.ready, queue.oldest_wait) == (QueueStatus.STOPPED, 1, 55.0)
    assert queue.words == "no worker serves the queue: 1 job waits"
    [hint] = (await shop.operations.overview()).hints
    assert (hint.kind, hint.queue) == (HintKind.FAULT, "plain")
    [found] = [each for each in await shop.operations.diagnose() if each.check == "no worker"]
    assert found.queue == "plain"
    stats = await shop.operations.metrics()
    for name, value in (("ready_jobs", 1.0), ("startable_jobs", 1.0), ("oldest_wait_seconds", 55.0)):
        assert (("plain",), value) in stats[f"fairlane_queue_{name}"]


@pytest.mark.parametrize("delay", [None, "1h"])
async def test_a_key_whose_job_waits_behind_many_newer_ones_is_one_that_jobs_carry(
    shop: App, monkeypatch: pytest.MonkeyPatch, delay: str | None
) -> None:
    async def unknown() -> list[str]:
        found = [each for each in await shop.operations.diagnose() if each.check == "key that no job carries"]
        return [each.message.partition(", and")[0] for each in found]

    monkeypatch.setattr(operators, "LOOK_AT_MOST", 2)
    mail = shop.registry["mail"]
    await (mail if delay is None else mail.using(delay=delay)).enqueue("acme")
    for account in ("acme", "acmee"):
        await shop.operations.queues.pause("plain", keys={"account": account})
    for _ in range(9):
        await mail.enqueue("globex")
    assert await unknown() == ["an override says that account=acmee is paused"]
