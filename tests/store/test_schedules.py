"""Schedules on every store: each slot once, however many workers there are."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import msgspec
import pytest

from fairlane import App, Backlog, State, Unique
from fairlane.clock import Instant, ManualClock, as_datetime, as_instant
from fairlane.cron.schedules import job_of_slot
from fairlane.errors import StoreUnavailable, UnknownSchedule
from fairlane.job import JobRecord
from fairlane.store import operators, records, schedules
from fairlane.store.operators import JobFilter
from fairlane.store.procedures import Work
from fairlane.store.protocol import WorkerIdentity
from tests.store.by_hand import url_of
from tests.store.harness import Database, hear
from tests.waiting import PATIENCE, until, until_found
from tests.worker.harness import working


def program(database: Database, clock: ManualClock) -> App:
    """A program with tasks and nothing scheduled yet."""
    app = App(url_of(database), clock=clock)

    @app.task(name="report")
    async def report(kind: str = "daily") -> str:
        return kind

    return app


async def fired(app: App) -> list[JobRecord]:
    """Every job that there is, in the order of the slots."""
    store = await app.opened()
    found: list[JobRecord] = []
    after: str | None = None
    while True:
        page = await store.run(operators.find_jobs(JobFilter(), after, 1_000))
        found += page.jobs
        if (after := page.after) is None:
            return sorted(found, key=lambda job: (job.context["slot"], job.id))


def slot_of(job: JobRecord) -> Instant:
    return as_instant(datetime.fromisoformat(job.context["slot"]))


def shown(jobs: list[JobRecord]) -> list[str]:
    return [as_datetime(slot_of(job)).strftime("%d %H:%M") for job in jobs]


@pytest.fixture
async def app(database: Database, clock: ManualClock, stack: AsyncExitStack) -> App:
    app = program(database, clock)
    stack.push_async_callback(app.close)
    return app


async def test_a_slot_fires_when_it_comes_and_once(app: App, clock: ManualClock) -> None:
    report = app.registry["report"]
    app.schedule("0 9 * * *", report, "early", name="early")
    app.schedule(report.using(priority=5, keys={"kind": "x"}).call(kind="often"), every="6h", name="often")
    first = await app.fire_schedules()
    assert first == as_instant(datetime(2030, 1, 1, 6, tzinfo=UTC))
    assert await fired(app) == []
    for _ in range(25):
        await app.fire_schedules()
        await app.fire_schedules()
        clock.advance("1h")
    jobs = await fired(app)
    assert shown(jobs) == ["01 06:00", "01 09:00", "01 12:00", "01 18:00", "02 00:00"]
    often, early = jobs[0], jobs[1]
    assert (often.priority, often.keys, often.context["schedule"]) == (5, {"kind": "x"}, "often")
    assert msgspec.json.decode(early.payload) == [["early"], {}]
    assert early.id == job_of_slot("early", slot_of(early))


@pytest.mark.parametrize(
    ("missed", "expected"),
    [
        ("skip", []),
        ("once", ["02 10:00"]),
        ("all", ["01 10:00", "01 22:00", "02 10:00"]),
    ],
)
async def test_slots_that_nobody_was_there_for_are_made_up_by_the_rule(
    app: App, clock: ManualClock, missed: Any, expected: list[str]
) -> None:
    app.schedule("0 10,22 * * *", app.registry["report"], missed=missed)
    await app.fire_schedules()
    clock.advance("39h")
    await app.fire_schedules()
    await app.fire_schedules()
    assert shown(await fired(app)) == expected
    clock.advance("7h10s")
    await app.fire_schedules()
    assert shown(await fired(app)) == [*expected, "02 22:00"]


async def test_a_long_absence_is_made_up_in_batches(app: App, clock: ManualClock) -> None:
    app.schedule(app.registry["report"], every="1m", missed="all")
    await app.fire_schedules()
    clock.advance("5h")
    for _ in range(4):
        await app.fire_schedules()
    jobs = await fired(app)
    assert len(jobs) == 300
    assert len({slot_of(job) for job in jobs}) == 300


async def test_a_changed_declaration_takes_effect_and_keeps_its_place_if_its_times_are_the_same(
    app: App, database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    app.schedule("0 10 * * *", app.registry["report"], "old", name="nightly")
    await app.fire_schedules()
    app.schedules.clear()
    clock.advance("11h")
    app.schedule("0 10 * * *", app.registry["report"], "new", name="nightly")
    await app.fire_schedules()
    (job,) = await fired(app)
    assert (msgspec.json.decode(job.payload)[0], shown([job])) == (["new"], ["01 10:00"])
    app.schedules.clear()
    app.schedule("0 8 * * *", app.registry["report"], "new", name="nightly")
    assert await app.fire_schedules() == as_instant(datetime(2030, 1, 2, 8, tzinfo=UTC))


async def test_a_schedule_that_is_declared_no_more_stops_and_is_shown_as_orphaned(app: App, clock: ManualClock) -> None:
    app.schedule(app.registry["report"], every="1m", name="gone")
    app.schedule(app.registry["report"], every="1m", name="here")
    await app.fire_schedules()
    del app.schedules["gone"]
    for _ in range(4):
        clock.advance("1m")
        await app.fire_schedules()
    assert {job.context["schedule"] for job in await fired(app)} == {"here"}
    states = {view.name: (view.state, view.next_at) for view in await app.operations.schedules.list()}
    assert states["gone"] == ("orphaned", None)
    assert states["here"][0] == "active"


async def test_an_older_program_leaves_a_newer_declaration_alone_until_nobody_has_it_any_more(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    from fairlane.cron.schedules import CronRunner

    old, new = program(shared_database, clock), program(shared_database, clock)
    for app, kind in ((old, "old"), (new, "new")):
        stack.push_async_callback(app.close)
        app.schedule(app.registry["report"], kind, every="1m", name="each-minute")
    older = CronRunner(await old.opened(), list(old.schedules.values()), (await old._connected()).producing.admitted)
    await older.declare()
    await new.fire_schedules()
    clock.advance("1m")
    await older.look()
    assert await fired(old) == []
    await new.fire_schedules()
    assert [msgspec.json.decode(job.payload)[0] for job in await fired(old)] == [["new"]]
    clock.advance("4m")
    await older.look()  # nobody has said for minutes to have the newer one: ours is in force again
    await older.look()
    assert [msgspec.json.decode(job.payload)[0] for job in await fired(old)] == [["new"], ["old"]]


async def test_a_paused_schedule_does_not_fire_nor_make_up_for_it_and_can_be_triggered(
    app: App, clock: ManualClock
) -> None:
    app.schedule(app.registry["report"], every="1h", missed="all", name="hourly")
    await app.fire_schedules()
    paused = await app.operations.schedules.pause("hourly", reason="quiet please", actor="ada")
    assert (paused.state, paused.next_at) == ("paused", None)
    clock.advance("5h30m")
    await app.fire_schedules()
    assert await fired(app) == []
    waiting = await app.operations.schedules.trigger("hourly", actor="ada")
    assert waiting.triggers_waiting == 1
    await app.fire_schedules()
    await app.fire_schedules()
    assert len(await fired(app)) == 1
    resumed = await app.operations.schedules.resume("hourly", actor="bob")
    assert (resumed.state, resumed.triggers_waiting) == ("active", 0)
    clock.advance("30m")
    await app.fire_schedules()
    assert shown(await fired(app)) == ["01 05:30", "01 06:00"]
    store = await app.opened()
    told = [(entry.actor, entry.action, entry.target) for entry in await store.run(records.audit(queue="default"))]
    assert told == [
        ("bob", "resume schedule", "schedule hourly"),
        ("ada", "trigger schedule", "schedule hourly"),
        ("ada", "pause schedule", "schedule hourly"),
    ]


async def test_what_is_only_looked_at_changes_nothing(app: App, clock: ManualClock) -> None:
    app.schedule(app.registry["report"], every="1h", name="hourly")
    await app.fire_schedules()
    before = await app.operations.schedules.list()
    for look in (app.operations.schedules.pause, app.operations.schedules.trigger):
        await look("hourly", dry_run=True)
    assert await app.operations.schedules.list() == before
    assert await (await app.opened()).run(records.audit()) == []
    with pytest.raises(UnknownSchedule, match="no schedule 'hurly'; did you mean 'hourly'"):
        await app.operations.schedules.pause("hurly")


async def test_two_workers_at_the_same_instant_fire_a_slot_once(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    apps = [program(shared_database, clock) for _ in range(4)]
    for app in apps:
        stack.push_async_callback(app.close)
        app.schedule(app.registry["report"], every="1m")
        await app.fire_schedules()
    for _ in range(30):
        clock.advance("1m")
        await asyncio.gather(*(app.fire_schedules() for app in apps))
    slots = [slot_of(job) for job in await fired(apps[0])]
    assert len(slots) == len(set(slots)) == 30


async def test_a_slot_whose_transaction_is_lost_is_fired_again_and_whole(app: App, clock: ManualClock) -> None:
    app.schedule(app.registry["report"], every="1h")
    await app.fire_schedules()
    clock.advance("1h")
    store = await app.opened()
    real = store.run
    for lands in (False, True):

        async def broken(work: Work[Any], tx: Any = None, lands: bool = lands) -> Any:
            if not work.terms.writes:
                return await real(work)
            if lands:
                await real(work)
            raise StoreUnavailable("the connection broke")

        store.run = broken  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailable):
            await app.fire_schedules()
        store.run = real  # type: ignore[method-assign]
        await app.fire_schedules()
        clock.advance("1h")
    assert shown(await fired(app)) == ["01 01:00", "01 02:00"]


async def test_a_job_of_a_schedule_follows_the_rules_of_its_queue(app: App, clock: ManualClock) -> None:
    app.queue("full", limits=[Backlog(1, when_full="reject")])

    @app.task(queue="full", name="crowded")
    async def crowded() -> None: ...

    @app.task(name="lonely", unique=Unique("only one", until="done"))
    async def lonely() -> None: ...

    app.schedule(crowded, every="1h")
    app.schedule(lonely, every="1h")
    for _ in range(4):
        await app.fire_schedules()
        clock.advance("1h")
    assert sorted(job.task for job in await fired(app)) == ["crowded", "lonely"]
    assert {job.state for job in await fired(app)} == {State.READY}


async def test_the_last_job_is_the_one_that_stands_for_the_slot_or_none(app: App, clock: ManualClock) -> None:
    app.queue("full", limits=[Backlog(1, when_full="reject")])

    @app.task(queue="full", name="crowded")
    async def crowded() -> None: ...

    for name, rule in (("returned", "return"), ("refused", "reject"), ("replaced", "replace")):

        async def lonely() -> None: ...

        unique = Unique(name, until="done", on_conflict=rule)  # type: ignore[arg-type]  # one of the three
        app.schedule(app.task(name=name, unique=unique)(lonely), every="1h")
    app.schedule(crowded, every="1h")
    app.schedule(app.registry["report"], every="1h", name="plain")
    slots = []
    for _ in range(3):
        await app.fire_schedules()
        slots.append(clock.now())
        clock.advance("1h")
    found = {view.name: (view.last_slot, view.last_job) for view in await app.operations.schedules.list()}
    _, first, last = slots
    assert found == {
        "crowded": (last, None),
        "plain": (last, job_of_slot("plain", last)),
        "refused": (last, None),
        "replaced": (last, job_of_slot("replaced", last)),
        "returned": (last, job_of_slot("returned", first)),
    }
    store = await app.opened()
    for _, job in found.values():
        assert job is None or (await store.job(job)).state is State.READY


async def test_what_is_left_out_was_not_fired_and_a_trigger_is_a_slot_of_its_own(app: App, clock: ManualClock) -> None:
    app.schedule(app.registry["report"], every="1h", missed="skip", name="hourly")
    await app.fire_schedules()
    clock.advance("90m")
    await app.fire_schedules()
    (view,) = await app.operations.schedules.list()
    assert (view.last_slot, view.last_job, view.last_fired_at) == (None, None, None)
    await app.operations.schedules.trigger("hourly", actor="ada")
    await app.fire_schedules()
    (view,) = await app.operations.schedules.list()
    (job,) = await fired(app)
    assert (view.last_slot, view.last_job, view.last_fired_at) == (clock.now(), job.id, clock.now())


async def test_the_job_of_a_slot_that_is_stored_already_stands_for_it(app: App, clock: ManualClock) -> None:
    app.schedule(app.registry["report"], every="1h", name="hourly")
    await app.fire_schedules()
    clock.advance("1h")
    job = job_of_slot("hourly", clock.now())
    await app.registry["report"].using(id=job, context={"slot": as_datetime(clock.now()).isoformat()}).enqueue()
    await app.fire_schedules()
    (view,) = await app.operations.schedules.list()
    assert (view.last_job, len(await fired(app))) == (job, 1)


async def test_whoever_has_schedules_hears_that_one_is_resumed_or_triggered_and_nothing_else(
    app: App, clock: ManualClock
) -> None:
    app.schedule(app.registry["report"], every="1h", name="hourly")
    await app.fire_schedules()
    store, worker = await app.opened(), WorkerIdentity(uuid4(), "a worker")
    listener = await store.listen(worker)
    try:
        await store.run(schedules.keep_schedules({}, worker.id))
        assert not listener.schedules_changed()
        for act in (app.operations.schedules.pause, app.operations.schedules.resume, app.operations.schedules.trigger):
            await act("hourly", actor="ada")
            async with asyncio.timeout(PATIENCE):
                while not listener.schedules_changed():
                    assert await listener.wait(None)
            assert not listener.schedules_changed()
        await hear(store, "default", listener, worker=worker)
        await app.registry["report"].enqueue()
        async with asyncio.timeout(PATIENCE):
            assert await listener.wait(None)
        assert not listener.schedules_changed(), "a job is no news of schedules"
    finally:
        await listener.close()


async def test_a_worker_fires_a_trigger_of_another_process_although_no_time_passes(
    shared_database: Database, clock: ManualClock, stack: AsyncExitStack
) -> None:
    # The clock stands still, so that no look by time can be what saves it.
    ran: list[str] = []
    own, other = program(shared_database, clock), App(url_of(shared_database), clock=clock)
    stack.push_async_callback(own.close)
    stack.push_async_callback(other.close)

    @own.task(name="note")
    async def note() -> None:
        ran.append("note")

    own.schedule(note, every="1h", name="hourly")
    async with working(own):
        await until_found(other.operations.schedules.list)  # of another process, so to speak
        for count in (1, 2, 3):
            await other.operations.schedules.trigger("hourly", actor="ada")
            await until(lambda count=count: len(ran) == count)  # type: ignore[misc]
