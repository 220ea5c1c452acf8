"""What a program writes: apps, queues, tasks, jobs."""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fairlane import App, Call, Fair, Foreseen, Outcome, State, Unique
from fairlane.clock import ManualClock, as_instant
from fairlane.errors import (
    ConfigurationError,
    DuplicateJob,
    InvalidJob,
    InvalidKey,
    JobCancelled,
    JobNotFound,
    PayloadDiffers,
    ReplayRefused,
    ResultTimeout,
    UniqueConflict,
)
from tests.worker.harness import working

if TYPE_CHECKING:
    pass


# Enqueueing and the handle.


async def test_a_handle_follows_its_job(app: App) -> None:
    @app.task
    async def double(number: int) -> int:
        return 2 * number

    job = await double.enqueue(21)
    assert await job.status() is State.READY
    with pytest.raises(
        ResultTimeout, match=f"job {job.id} .* is still ready after 0.*`fairlane explain {job.id}` .*--url"
    ):
        await job.result(timeout=0)
    async with working(app):
        assert await job.result() == 42
    assert await job.status() is State.DONE
    assert await app.job(str(job.id)).result() == 42


async def test_a_waiting_job_is_cancelled_at_once(app: App) -> None:
    @app.task
    async def work() -> None: ...

    job = await work.enqueue()
    assert await job.cancel() is State.CANCELLED
    with pytest.raises(JobCancelled):
        await job.result()


async def test_a_job_that_cannot_be_replayed_says_why(app: App) -> None:
    """P6."""

    @app.task
    async def work() -> None: ...

    job = await work.enqueue()
    with pytest.raises(ReplayRefused, match="it is ready; only dead and cancelled jobs can be replayed"):
        await job.replay()
    async with working(app):
        await job.result()
    with pytest.raises(ReplayRefused, match=f"job {job.id} was not replayed: it is done;") as caught:
        await job.replay()
    assert (caught.value.job, caught.value.holder) == (job.id, None)
    assert await job.status() is State.DONE
    with pytest.raises(JobNotFound):
        await app.job(uuid.uuid4()).replay()
    with pytest.raises(ConfigurationError, match="on_conflict='return' is not 'reject' or 'replace'"):
        await job.replay(on_conflict="return")  # type: ignore[arg-type]


async def test_a_job_whose_unique_key_is_held_is_not_replayed(app: App) -> None:
    """E10."""

    @app.task
    async def work() -> None: ...

    once = work.using(unique=Unique("a"))
    old = await once.enqueue()
    await old.cancel()
    holder = await once.enqueue()
    with pytest.raises(ReplayRefused, match=f"job {holder.id} holds its unique key; .*on_conflict='replace'") as caught:
        await old.replay()
    assert caught.value.holder == holder.id
    assert await old.replay(on_conflict="replace") is State.READY
    assert await holder.status() is State.CANCELLED


async def test_a_replay_that_was_refused_says_what_helps(app: App) -> None:
    app.queue("default")

    @app.task
    async def work() -> None: ...

    once = work.using(unique=Unique("a"))
    old = await once.enqueue()
    await old.cancel()
    holder = await once.enqueue()
    (claim,) = await app.queues["default"].claim(1)
    for on_conflict in ("reject", "replace"):
        with pytest.raises(ReplayRefused, match=f"that job runs.*`fairlane jobs cancel {holder.id}`") as caught:
            await old.replay(on_conflict=on_conflict)
        assert "replace" not in str(caught.value)
    await claim.ack()
    assert await old.replay() is State.READY

    windowed = work.using(unique=Unique("b", window="1h"))
    old = await work.using(unique=Unique("b")).enqueue()
    await old.cancel()
    await (await windowed.enqueue()).cancel()
    with pytest.raises(ReplayRefused, match="that job has ended, and the window of its key lasts"):
        await old.replay(on_conflict="replace")


async def test_every_handle_of_a_bulk_can_be_used(app: App) -> None:
    """F14."""

    @app.task
    async def work(number: int) -> None: ...

    newest = work.using(unique=Unique("a", on_conflict="replace"))
    jobs = await app.enqueue_many([newest.call(n) for n in range(3)])
    assert [job.outcome for job in jobs] == [Outcome.DUPLICATE, Outcome.DUPLICATE, Outcome.REPLACED]
    assert [await job.status() for job in jobs] == [State.READY] * 3
    assert len({job.id for job in jobs}) == 1


@pytest.fixture(params=["sqlite", "postgres"])
def either_url(request: pytest.FixtureRequest) -> str:
    return "sqlite://" if request.param == "sqlite" else str(request.getfixturevalue("postgres_url"))


async def test_a_progress_function_that_fails_keeps_no_job_from_being_stored(
    either_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[int] = []

    def failing(done: int, total: int) -> None:
        told.append(done)
        raise ZeroDivisionError

    async with App(either_url) as app:

        @app.task
        async def work(number: int) -> None: ...

        jobs = await app.enqueue_many([work.call(n) for n in range(5_000)], progress=failing)
        assert {await jobs[0].status(), await jobs[-1].status()} == {State.READY}
    assert len(told) == 1
    assert [each.exc_info is not None for each in caplog.records if "progress failed" in each.getMessage()] == [True]


async def test_a_handle_of_a_job_that_never_was_says_so(app: App) -> None:
    with pytest.raises(JobNotFound):
        await app.job(uuid.uuid4()).status()


async def test_a_task_stays_directly_callable(app: App) -> None:
    @app.task
    async def later(number: int) -> int:
        return number + 1

    @app.task
    def now(number: int) -> int:
        """Adds one."""
        return number + 1

    assert (await later(1), now(1)) == (2, 2)
    assert (now.__name__, now.__doc__) == ("now", "Adds one.")


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ((), {}, "missing a required argument: 'event'"),
        ((1, "acme", 3), {}, "too many positional arguments"),
        ((1,), {"account": "acme", "color": "red"}, "unexpected keyword argument 'color'"),
        ((1, "acme"), {"account": "acme"}, "multiple values for argument 'account'"),
    ],
)
async def test_a_call_that_the_function_would_refuse_is_refused_at_enqueue(
    app: App, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str
) -> None:
    @app.task(name="deliver")
    async def deliver(event: int, account: str = "acme") -> None: ...

    call: Callable[..., Any] = deliver.enqueue
    with pytest.raises(InvalidJob, match=f"task 'deliver': .*{reason}"):
        await call(*args, **kwargs)


async def test_delay_and_run_at_say_when_a_job_is_due(app: App, clock: ManualClock) -> None:
    @app.task
    async def work() -> None: ...

    moment = datetime(2031, 5, 1, tzinfo=UTC)
    delayed = await work.using(delay="10m").enqueue()
    dated = await work.using(run_at=moment).enqueue()
    assert (await delayed.record()).due_at == clock.now() + 600_000_000
    assert (await dated.record()).due_at == as_instant(moment)
    assert await delayed.status() is State.SCHEDULED


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"priority": 101}, "priority=101 is outside of -100 … 100"),
        ({"priority": -101}, "priority=-101"),
        ({"priority": 1.5}, "priority=1.5 cannot be used; give a whole number"),
        ({"priority": True}, "priority=True"),
        ({"delay": -1}, "delay=-1 lies in the past"),
        ({"delay": "soon"}, "delay: 'soon' is not a duration"),
        ({"delay": "99999999d"}, "a hundred years"),
        ({"run_at": datetime(2031, 1, 1)}, "run_at: .* has no timezone"),  # noqa: DTZ001
        ({"run_at": 5}, "run_at=5 is not a datetime"),
        ({"delay": 1, "run_at": datetime(2031, 1, 1, tzinfo=UTC)}, "delay= or run_at=, not both"),
        ({"max_attempts": 0}, "max_attempts=0"),
    ],
)
async def test_an_option_that_makes_no_sense_is_refused_where_it_is_given(
    app: App, options: dict[str, Any], reason: str
) -> None:
    @app.task(name="work")
    async def work() -> None: ...

    with pytest.raises(InvalidJob, match=f"task 'work': .*{reason}"):
        work.using(**options)


async def test_using_keeps_what_was_chosen_before(app: App, clock: ManualClock) -> None:
    app.queue("slow", keys=["account", "region"])

    @app.task(max_attempts=3)
    async def work() -> None: ...

    bound = work.using(queue="slow", priority=7, delay="1h", keys={"account": "acme"})
    job = await bound.using(keys={"region": "eu"}, max_attempts=9, run_at=datetime(2031, 1, 1, tzinfo=UTC)).enqueue()
    record = await job.record()
    assert (record.queue, record.priority, record.max_attempts) == ("slow", 7, 9)
    assert record.keys == {"account": "acme", "region": "eu"}
    assert record.due_at == as_instant(datetime(2031, 1, 1, tzinfo=UTC))
    assert (await (await work.enqueue()).record()).max_attempts == 3


# Bulk.


async def test_a_bulk_has_the_options_defaults_and_keys_of_single_jobs(app: App, clock: ManualClock) -> None:
    # E01.
    app.queue("mail", fair=Fair(by="account"))

    @app.task(queue="mail", max_attempts=4, priority=2)
    async def send(account: str, text: str = "") -> str:
        return account + text

    bound = send.using(priority=9, delay="5s", max_attempts=2, keys={"label": "x"})
    single = [await send.enqueue("a", text="1"), await bound.enqueue("b")]
    bulk = await app.enqueue_many([send.call("a", text="1"), bound.call("b")])
    for one, other in zip(single, bulk, strict=True):
        left, right = await one.record(), await other.record()
        for name in ("queue", "task", "state", "priority", "keys", "payload", "max_attempts", "due_at", "enqueued_at"):
            assert getattr(left, name) == getattr(right, name), name
    assert len(await bound.enqueue_many([send.call("c")])) == 1


# E01
async def test_the_options_of_a_bound_task_reach_the_calls_of_its_bulk(app: App) -> None:
    @app.task
    async def work(number: int) -> None: ...

    jobs = await work.using(priority=7, max_attempts=2).enqueue_many([work.call(1), work.using(priority=3).call(2)])
    records = [await job.record() for job in jobs]
    assert [(record.priority, record.max_attempts) for record in records] == [(7, 2), (3, 2)]


async def test_a_key_that_is_no_parameter_is_given_at_enqueue(app: App) -> None:
    app.queue("webhooks", fair=Fair(by="account"))

    @app.task(queue="webhooks", keys=["account"])
    async def deliver(event: int) -> None: ...

    with pytest.raises(InvalidKey, match=r"using\(keys=\{'account'"):
        await deliver.enqueue(1)
    job = await deliver.using(keys={"account": "acme"}).enqueue(1)
    assert (await job.record()).keys == {"account": "acme"}


async def test_one_bad_call_in_a_bulk_stores_none_of_it(app: App) -> None:
    @app.task
    async def work(value: object) -> None: ...

    calls = [work.call(n) for n in range(2_500)]
    with pytest.raises(InvalidJob):
        await app.enqueue_many([*calls, work.call(object())])
    assert (await (await app.opened()).counts("default")).events == 0
    jobs = await app.enqueue_many(calls)
    assert len({job.id for job in jobs}) == 2_500


async def test_a_bulk_of_another_task_is_refused(app: App) -> None:
    @app.task(name="mine")
    async def mine() -> None: ...

    @app.task(name="yours")
    async def yours() -> None: ...

    with pytest.raises(InvalidJob, match=r"Call\(yours\(\)\) is not a call of task 'mine'"):
        await mine.enqueue_many([yours.call()])


async def test_a_bulk_that_is_no_plain_iterable_of_calls_is_refused_on_every_way_in(app: App) -> None:
    @app.task
    async def work() -> None: ...

    async def coming() -> AsyncIterator[Call[None]]:
        yield work.call()

    async def stream(calls: Any) -> None:
        async for _ in app.enqueue_stream(calls):
            pass

    ways: list[tuple[str, Callable[[Any], Awaitable[object]]]] = [
        ("enqueue_many", app.enqueue_many),
        ("enqueue_many", work.enqueue_many),
        ("enqueue_many", work.using(priority=1).enqueue_many),
        ("enqueue_stream", stream),
    ]
    for taker, enqueue in ways:
        with pytest.raises(InvalidJob, match=f"{taker} takes calls from a plain iterable.* async_generator; collect"):
            await enqueue(coming())
        with pytest.raises(InvalidJob, match=f"{taker} takes calls from a plain iterable.* type Call; give a list"):
            await enqueue(work.call())
        with pytest.raises(InvalidJob, match=r"takes calls, not a str; write task\.call"):
            await enqueue(["acme"])
    assert (await (await app.opened()).counts("default")).events == 0


# Transactions.


async def test_a_job_commits_and_rolls_back_with_the_callers_transaction(tmp_path: Path) -> None:
    # E06, on SQLite.
    file = tmp_path / "jobs.db"
    async with App(f"sqlite:///{file}") as app:

        @app.task
        async def work() -> None: ...

        connection = sqlite3.connect(file)
        connection.execute("create table orders (id integer)")
        connection.execute("insert into orders values (1)")
        gone = await work.using(tx=connection).enqueue()
        connection.rollback()
        with pytest.raises(JobNotFound):
            await gone.status()
        connection.execute("insert into orders values (2)")
        kept = await app.enqueue_many([work.call(), work.call()], tx=connection)
        connection.commit()
        assert [await job.status() for job in kept] == [State.READY, State.READY]
        with pytest.raises(InvalidJob, match="names a transaction of its own"):
            await app.enqueue_many([work.using(tx=connection).call()])
        connection.close()


# Identity and uniqueness.


async def test_a_job_can_have_the_id_that_its_producer_gives(app: App) -> None:
    @app.task
    async def deliver(number: int) -> None: ...

    chosen = uuid.uuid4()
    job = await deliver.using(id=chosen).enqueue(1)
    assert job.id == chosen
    assert job.outcome is Outcome.ENQUEUED
    with pytest.raises(DuplicateJob, match=str(chosen)):
        await deliver.using(id=str(chosen)).enqueue(2)
    with pytest.raises(InvalidJob, match="id='42' is not a UUID"):
        deliver.using(id="42")


async def test_a_unique_job_is_stored_once_and_its_handle_is_returned(app: App) -> None:
    @app.task(unique=lambda order, note="": order)
    async def charge(order: int, note: str = "") -> None: ...

    first = await charge.enqueue(42, note="first")
    again = await charge.enqueue(42, note="second")
    assert again == first
    assert (first.outcome, again.outcome) == (Outcome.ENQUEUED, Outcome.DUPLICATE)
    assert (await charge.enqueue(43)).outcome is Outcome.ENQUEUED
    # What a call asks for comes before what the task asks for; None inside Unique is off.
    assert (await charge.using(unique=Unique(None)).enqueue(42)).outcome is Outcome.ENQUEUED


async def test_a_refused_job_raises_and_names_the_one_that_holds_the_key(app: App) -> None:
    @app.task
    async def charge(order: int) -> None: ...

    once = charge.using(unique=Unique("a", on_conflict="reject"))
    first = await once.enqueue(1)
    with pytest.raises(UniqueConflict, match=str(first.id)) as refused:
        await once.enqueue(1)
    assert refused.value.job == first.id
    with pytest.raises(PayloadDiffers, match="other arguments"):
        await charge.using(unique=Unique("a", same_payload=True)).enqueue(2)


async def test_a_dry_run_checks_everything_and_stores_nothing(app: App) -> None:
    @app.task
    async def charge(order: int) -> None: ...

    once = charge.using(unique="a")
    assert await once.dry_run(1) == Foreseen(Outcome.ENQUEUED)
    first = await once.enqueue(1)
    assert await once.dry_run(1) == Foreseen(Outcome.DUPLICATE, first.id)
    with pytest.raises(InvalidJob):
        await charge.dry_run()  # type: ignore[call-arg]
    assert (await (await app.opened()).counts("default")).events == 1


async def test_a_bulk_reports_what_became_of_every_call(app: App) -> None:
    @app.task
    async def charge(order: int) -> None: ...

    once = charge.using(unique=Unique(lambda order: order))
    held = await once.enqueue(1)
    refusing = charge.using(unique=Unique(lambda order: order, on_conflict="reject"))
    told: list[tuple[int, int]] = []
    report = await app.enqueue_many(
        [once.call(1), once.call(2), refusing.call(1), once.call(3)], progress=lambda *seen: told.append(seen)
    )
    assert [job.outcome for job in report] == [
        Outcome.DUPLICATE,
        Outcome.ENQUEUED,
        Outcome.REFUSED,
        Outcome.ENQUEUED,
    ]
    assert report.duplicates == [held]
    assert report.refused == [held]
    assert report.stored == [report[1], report[3]]
    assert repr(report) == "<2 enqueued, 1 duplicates, 1 refused>"
    assert told == [(4, 4)]


async def test_a_stream_is_stored_a_batch_at_a_time(app: App) -> None:
    @app.task
    async def charge(order: int) -> None: ...

    drawn = 0

    def calls() -> Iterator[Call[None]]:
        nonlocal drawn
        for drawn in range(1, 26):
            yield charge.call(drawn)

    seen = []
    async for batch in app.enqueue_stream(calls(), batch=10):
        seen.append((drawn, len(batch.stored)))
        for job in batch:
            assert await job.status() is State.READY
    assert seen == [(10, 10), (20, 10), (25, 5)]
    with pytest.raises(ConfigurationError, match="batch=0"):
        await anext(app.enqueue_stream([], batch=0))
