"""Back-pressure as producers see it: told or refused, alone and in bulk, and waiting for room."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import pytest

from fairlane import App, Backlog, Foreseen, Outcome, Policy, Queue, Task, Unique
from fairlane.clock import Instant, ManualClock
from fairlane.errors import BacklogFull, ConfigurationError, InvalidKey, InvalidPolicy, UniqueConflict
from fairlane.policy.backlog import WhenFull
from fairlane.policy.overrides import Kind, Override
from fairlane.policy.unique import OnConflict
from fairlane.store.audit import Note

NOTE = Note(actor="ada", action="test")


class BusyClock(ManualClock):
    """While somebody waits, a worker does what it does, and time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self.meanwhile: Callable[[], Awaitable[None]] | None = None

    async def sleep_until(self, moment: Instant) -> None:
        self.waits += 1
        if self.meanwhile is not None:
            await self.meanwhile()
        self.set(max(moment, self.now()))


@pytest.fixture
def clock() -> BusyClock:
    return BusyClock()


def mail(app: App, when_full: WhenFull = "signal", most: int = 2) -> tuple[Queue, Task[[str], None]]:
    queue = app.queue("mail", limits=[Backlog(most, by="account", when_full=when_full)])

    @app.task(queue="mail", name="send")
    async def send(account: str) -> None: ...

    return queue, send


async def test_the_default_stores_every_job_and_says_when_there_are_too_many(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    _, send = mail(app)
    with caplog.at_level(logging.WARNING, "fairlane.app"):
        jobs = [await send.enqueue("acme") for _ in range(4)]
    assert [job.is_over_backlog for job in jobs] == [False, False, True, True]
    full = jobs[2].backlog
    assert full is not None
    assert (full.queue, full.key, full.ready, full.max) == ("mail", {"account": "acme"}, 2, 2)
    assert not (await send.enqueue("bolt")).is_over_backlog
    assert caplog.messages == [
        "queue 'mail', account=acme: 2 jobs wait, and its backlog holds 2; its producers should slow down"
    ]


async def test_reject_refuses_with_the_key_and_the_numbers(app: App) -> None:
    queue, send = mail(app, "reject")
    for _ in range(2):
        await send.enqueue("acme")
    assert await send.dry_run("acme") == Foreseen(Outcome.FULL)
    with pytest.raises(
        BacklogFull, match=r"queue 'mail', account=acme: 2 jobs wait, and its backlog holds 2"
    ) as caught:
        await send.enqueue("acme")
    assert (caught.value.queue, caught.value.key, caught.value.ready) == ("mail", {"account": "acme"}, 2)
    assert caught.value.max == 2
    await send.enqueue("bolt")
    assert len(await queue.claim(10)) == 3
    await send.enqueue("acme")


async def test_a_bulk_stores_what_there_is_room_for_and_reports_the_rest(app: App) -> None:
    # E01
    _, send = mail(app, "reject")
    report = await app.enqueue_many([send.call("acme") for _ in range(3)] + [send.call("bolt")])
    assert [job.outcome for job in report] == [Outcome.ENQUEUED, Outcome.ENQUEUED, Outcome.FULL, Outcome.ENQUEUED]
    assert report.full == report.over_backlog == [report[2]]
    assert len(report.stored) == 3
    assert repr(report) == "<3 enqueued, 0 duplicates, 1 refused>"


@pytest.mark.parametrize("on_conflict", ["return", "reject"])
async def test_a_held_unique_key_is_decided_before_a_full_backlog(app: App, on_conflict: OnConflict) -> None:
    _, send = mail(app, "reject", most=1)
    once = send.using(unique=Unique("a", on_conflict=on_conflict))
    holder = await once.enqueue("acme")
    if on_conflict == "return":
        assert await once.enqueue("acme") == holder
        assert (await once.dry_run("acme")).outcome is Outcome.DUPLICATE
    else:
        with pytest.raises(UniqueConflict):
            await once.enqueue("acme")
        assert (await once.dry_run("acme")).outcome is Outcome.REFUSED
    with pytest.raises(BacklogFull):
        await send.using(unique=Unique("b", on_conflict=on_conflict)).enqueue("acme")


async def test_a_bulk_decides_unique_keys_before_full_backlogs(app: App) -> None:
    _, send = mail(app, "reject", most=1)
    keys = ["a", "a", "b", "b", None]
    jobs = await app.enqueue_many([send.using(unique=Unique(key)).call("acme") for key in keys])
    assert [job.outcome for job in jobs] == [Outcome.ENQUEUED, Outcome.DUPLICATE, *[Outcome.FULL] * 3]


async def test_jobs_for_later_are_not_counted_before_they_are_due(app: App, clock: BusyClock) -> None:
    queue, send = mail(app, "reject")
    for _ in range(5):
        await send.using(delay="1m").enqueue("acme")
    for _ in range(2):
        await send.enqueue("acme")
    clock.advance("1m")
    assert len(await queue.claim(1)) == 1
    with pytest.raises(BacklogFull, match="6 jobs wait"):
        await send.enqueue("acme")


async def test_pace_waits_until_there_is_room(app: App, clock: BusyClock) -> None:
    queue, send = mail(app)
    await send.enqueue("acme")
    assert await queue.pace(account="acme")
    await send.enqueue("acme")
    assert not await queue.pace("10s", account="acme")
    # Not a storm of looks: ever more rarely, at least once a second.
    assert 10 < clock.waits < 20
    assert await queue.pace(account="bolt")

    async def work() -> None:
        if clock.waits == 25:
            await queue.claim(1)

    clock.meanwhile = work
    assert await queue.pace(account="acme")
    assert clock.waits == 25
    with pytest.raises(InvalidKey, match=r"has a backlog by 'account'; say whose: pace\(account=…\)"):
        await queue.pace()


async def test_a_paced_stream_waits_between_its_batches_and_refuses_nothing(app: App, clock: BusyClock) -> None:
    queue, send = mail(app, "reject", 3)
    store = await app.opened()
    waited: list[int] = []

    async def work() -> None:
        waited.append((await store.counts("mail")).ready)
        await queue.ack(await queue.claim(2))

    clock.meanwhile = work
    calls = (send.call("acme") for _ in range(10))
    report = [job async for batch in app.enqueue_stream(calls, batch=2, pace=True) for job in batch]
    assert [job.outcome for job in report] == [Outcome.ENQUEUED] * 10
    assert waited
    assert max(waited) <= 4, "over by no more than a batch"
    with pytest.raises(ConfigurationError, match="pace=True waits for workers"):
        await anext(app.enqueue_stream([send.call("acme")], tx=object(), pace=True))


async def test_an_operator_can_give_one_key_a_longer_backlog(app: App, clock: BusyClock) -> None:
    _, send = mail(app, "reject")
    store = await app.opened()
    longer = Override(kind=Kind.LIMIT, limit="backlog:account", scope=(("account", "acme"),), value=3)
    await store.change_overrides(["mail"], [longer], [], NOTE)
    clock.advance("1m")  # producers look up policies again
    for _ in range(3):
        await send.enqueue("acme")
    with pytest.raises(BacklogFull, match="3 jobs wait, and its backlog holds 3"):
        await send.enqueue("acme")
    await store.change_overrides(["mail"], [Override(kind=Kind.SUSPEND)], [], NOTE)
    clock.advance("1m")
    await send.enqueue("acme")


@pytest.mark.parametrize(
    ("most", "said"), [(0, "from 1 to"), (-1, "from 1 to"), (True, "from 1 to"), (2.5, "from 1 to")]
)
def test_nonsense_is_refused(most: int, said: str) -> None:
    # A16
    with pytest.raises(InvalidPolicy, match=said):
        Backlog(most)
    with pytest.raises(InvalidPolicy, match="use 'signal' or 'reject'"):
        Backlog(1, when_full="drop")  # type: ignore[arg-type]


def test_a_backlog_is_stored_and_read_back() -> None:
    policy = Policy("mail", limits=(Backlog(3, by=("account", "task"), when_full="reject"), Backlog(9)))
    assert Policy.decode(policy.encoded) == policy
