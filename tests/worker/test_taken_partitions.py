"""Partitions that several workers want at once: who finds one taken goes to the next, and tenants keep their shares."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import pytest

from fairlane import App, Fair
from fairlane.policy import partition_for
from fairlane.store.postgres.claims import Crowding
from fairlane.store.protocol import Choice
from fairlane.worker.claims import QueueSlots, Slots, Turns, Visit
from fairlane.worker.options import QueueShare
from tests.waiting import until, until_found
from tests.worker.harness import working

CLAIMS = 4_000


class Fleet:
    """Workers whose jobs end at once, and partitions of so many equal tenants that are always busy.

    A claim holds the lock of its partition for a while; who finds it taken stands in line, or goes elsewhere.
    """

    def __init__(self, tenants: dict[str, int], workers: int, *, passes: bool = True) -> None:
        self.got: Counter[str] = Counter()
        self.passed = self.claims = 0
        self.now = 0.0
        self._random = random.Random(workers)
        self._passes = passes
        self._tenants = tenants
        self._vtimes = dict.fromkeys(tenants, 0.0)
        self._taken: set[str] = set()
        self._lines: dict[str, deque[tuple[Slots, Visit]]] = {name: deque() for name in tenants}
        self._order = itertools.count()
        self._events: list[tuple[float, int, Slots, Visit | None, int]] = []
        for _ in range(workers):
            self._later(Slots([QueueShare.parse("email")], 10, "weighted", lambda: 0, {"email": list(tenants)}))

    def run(self, claims: int) -> None:
        for _ in range(claims):
            worked = self.claims
            while self.claims == worked:
                self.now, _, worker, visit, count = heapq.heappop(self._events)
                if visit is None:
                    self._ask(worker)
                else:
                    self._claimed(worker, visit, count)

    def error(self) -> float:
        """By how much the share of a tenant differs from that of the others, at most."""
        each = sum(self.got.values()) / sum(self._tenants.values())
        return max(abs(self.got[name] / count / each - 1) for name, count in self._tenants.items())

    def _later(self, worker: Slots, visit: Visit | None = None, count: int = 0) -> None:
        at = self.now + self._random.uniform(0.5, 1.5) * (0.5 if visit is None else 1.0)
        heapq.heappush(self._events, (at, next(self._order), worker, visit, count))

    def _ask(self, worker: Slots) -> None:
        queue = worker.next_to_ask()
        assert queue is not None
        visit = Visit(worker, queue)
        if not self._passes:
            visit.others.clear()
        tried = [queue, *visit.others]
        for place, each in enumerate(tried):
            if each.name not in self._taken:
                self.passed += place > 0
                self._lock(worker, visit, each, tried, tried[:place])
                return
        self._lines[queue.name].append((worker, visit))

    def _lock(
        self, worker: Slots, visit: Visit, chosen: QueueSlots, tried: Sequence[QueueSlots], taken: Sequence[QueueSlots]
    ) -> None:
        self._taken.add(chosen.name)
        vtimes = {each.name: self._vtimes[each.name] for each in (chosen, *tried)}
        visit.chose(Choice(chosen.name, frozenset(each.name for each in taken), vtimes))
        self._later(worker, visit, visit.portion())

    def _claimed(self, worker: Slots, visit: Visit, count: int) -> None:
        queue = visit.queue
        self._vtimes[queue.name] += count / self._tenants[queue.name]
        visit.end(self._vtimes[queue.name])
        queue.wants_more = True
        self.claims += 1
        self.got[queue.name] += count
        worker.note_claimed(queue, count, self._vtimes[queue.name])
        queue.used -= count
        self._taken.remove(queue.name)
        if self._lines[queue.name]:
            following, waiting = self._lines[queue.name].popleft()
            self._lock(following, waiting, waiting.queue, waiting.others, waiting.others)
        self._later(worker)


TENANTS = [(1, 1), (1, 3), (1, 9), (2, 2, 2, 2), (1, 2, 3, 4), (490, 510)]


@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("tenants", TENANTS)
def test_tenants_get_their_shares_however_sought_after_their_partitions_are(
    tenants: tuple[int, ...], workers: int
) -> None:
    fleet = Fleet({f"p{n}": count for n, count in enumerate(tenants)}, workers)
    fleet.run(400)  # those who were first to come have begun somewhere
    fleet.got.clear()
    fleet.run(CLAIMS)
    assert fleet.passed > CLAIMS / 20
    assert fleet.error() < 0.05


def test_without_a_bound_they_would_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Turns, "may_go_before", lambda *_: True)
    fleet = Fleet({"p0": 1, "p1": 3}, 2)
    fleet.run(CLAIMS)
    assert fleet.error() > 1


@pytest.mark.parametrize("count", [2, 4])
def test_as_many_workers_as_partitions_hardly_wait_for_each_other(count: int) -> None:
    tenants = {f"p{n}": 2 for n in range(count)}
    fleets = [Fleet(tenants, count, passes=passes) for passes in (False, True)]
    for fleet in fleets:
        fleet.run(CLAIMS)
    waiting, passing = (fleet.got.total() / fleet.now for fleet in fleets)
    assert passing > 1.4 * waiting


def slots_of(*names: str) -> Slots:
    return Slots([QueueShare.parse("email")], 10, "weighted", lambda: 0, {"email": names})


def test_who_finds_a_partition_taken_has_all_its_room_for_the_next() -> None:
    slots = slots_of("email", "email__p1")
    visit = Visit(slots, slots.queues["email"])
    assert visit.portion() == 5
    visit.chose(Choice("email__p1", frozenset({"email"}), {"email": 0.0, "email__p1": 0.0}))
    assert (visit.queue, visit.portion()) == (slots.queues["email__p1"], 10)


def test_who_sees_that_others_serve_a_partition_has_all_its_room_for_its_own() -> None:
    slots = slots_of("email", "email__p1")
    slots.note_claimed(slots.queues["email__p1"], 0, 5.0)
    visit = Visit(slots, slots.queues["email"])
    visit.chose(Choice("email", frozenset(), {"email": 0.0, "email__p1": 6.0}))
    assert visit.portion() == 10


def test_a_partition_that_was_passed_by_is_asked_next() -> None:
    slots = slots_of("email", "email__p1")
    first, second = slots.queues["email"], slots.queues["email__p1"]
    visit = Visit(slots, first)
    assert not first.wants_more
    visit.chose(Choice("email__p1", frozenset({"email"}), {"email": 0.0, "email__p1": 0.0}))
    visit.end(None)
    assert (first.wants_more, second.wants_more) == (True, False)
    assert slots.next_to_ask() is first


def test_who_was_woken_for_a_partition_does_not_pass_it_by() -> None:
    """C08, C09: nobody else may have been woken."""
    slots = slots_of("email", "email__p1")
    slots.queues["email"].owes_wakeup = True
    assert Visit(slots, slots.queues["email"]).others == []


def test_a_wake_up_that_comes_meanwhile_or_was_owed_elsewhere_is_kept() -> None:
    slots = slots_of("email", "email__p1", "email__p2")
    first, second, third = slots.queues.values()
    third.owes_wakeup = True
    visit = Visit(slots, first)
    second.owes_wakeup = True  # heard while the question is under way
    slots.feed(second)
    visit.chose(Choice("email__p1", frozenset({"email"}), dict.fromkeys(slots.queues, 0.0)))
    visit.end(None)
    assert [each.owes_wakeup for each in (first, second, third)] == [False, True, True]
    assert all(each.wants_more for each in (first, second, third))


# Real workers on PostgreSQL.


def account_in(partition: int, number: int = 0) -> str:
    """The so-manieth account that lives in one of two partitions."""
    found = (name for n in itertools.count() if partition_for(name := f"account-{n}", 2) == partition)
    return next(itertools.islice(found, number, None))


class Mail:
    """Programs on one database that serve a queue of two partitions, and who was sent what."""

    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self.sent: Counter[str] = Counter()
        self.going = asyncio.Event()
        self.going.set()
        self._url = url
        self._stack = stack

    async def app(self) -> App:
        app = App(self._url)
        app.queue("email", fair=Fair(by="account", charge="count"), partitions=2, partition_by="account")

        async def send(account: str) -> None:
            await self.going.wait()
            self.sent[account] += 1

        app.task(queue="email", name="send")(send)
        await self._stack.enter_async_context(app)
        return app

    async def enqueue(self, app: App, account: str, count: int) -> None:
        await app.enqueue_many([app.registry["send"].call(account)] * count)


@pytest.fixture
async def mail(postgres_url: str) -> AsyncIterator[Mail]:
    async with AsyncExitStack() as stack:
        yield Mail(postgres_url, stack)


@pytest.fixture
async def beside(postgres_url: str) -> AsyncIterator[asyncpg.Connection[Any]]:
    connection = await asyncpg.connect(postgres_url)
    yield connection
    await connection.close()


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[Choice]:
    """Where workers of this process went instead of where they wanted to."""
    found: list[Choice] = []
    chose = Visit.chose

    def noting(visit: Visit, choice: Choice) -> None:
        if visit.queue.name != choice.queue:
            found.append(choice)
        chose(visit, choice)

    monkeypatch.setattr(Visit, "chose", noting)
    return found


@pytest.fixture
def in_private(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asks in public, which those do who have waited long: they wait for one partition until they are served."""
    monkeypatch.setattr(Crowding, "alone", lambda *_: None)


async def hold(connection: asyncpg.Connection[Any], queue: str) -> None:
    await connection.fetch("select pg_advisory_lock(1717660018, id) from fairlane.queues where name = $1", queue)


async def let_go(connection: asyncpg.Connection[Any], queue: str) -> None:
    await connection.fetch("select pg_advisory_unlock(1717660018, id) from fairlane.queues where name = $1", queue)


async def is_waited_for(connection: asyncpg.Connection[Any], queue: str) -> bool:
    found: bool = await connection.fetchval(
        "select exists (select from pg_locks l join fairlane.queues q on q.id = l.objid "
        "where l.locktype = 'advisory' and l.classid = 1717660018 and not l.granted and q.name = $1)",
        queue,
    )
    return found


@pytest.mark.parametrize("is_private", [True, False])
async def test_tenants_of_workers_that_want_the_same_partitions_get_equal_shares(
    mail: Mail, passed: list[Choice], is_private: bool, request: pytest.FixtureRequest
) -> None:
    """One tenant in a partition, three in the other, and workers that want both all the time."""
    if is_private:
        request.getfixturevalue("in_private")
    accounts = [account_in(0), *(account_in(1, n) for n in range(3))]
    apps = [await mail.app() for _ in range(4)]
    for account in accounts:
        await mail.enqueue(apps[0], account, 4_000)
    async with AsyncExitStack() as workers:
        for app in apps:
            await workers.enter_async_context(working(app, queues="email", concurrency=10))
        await until(lambda: mail.sent.total() >= 2_000)  # until then it counts who came first
        before = mail.sent.copy()
        await until(lambda: mail.sent.total() >= 8_000)
        since = mail.sent - before
    shares = [since[account] / since.total() for account in accounts]
    assert len(passed) > 10 or not is_private, "nobody has passed anybody by: this has shown nothing"
    assert max(abs(share - 0.25) for share in shares) < 0.05


@pytest.mark.usefixtures("in_private")
async def test_a_worker_serves_what_it_can_while_a_partition_is_taken_and_comes_back(
    mail: Mail, beside: asyncpg.Connection[Any], passed: list[Choice], monkeypatch: pytest.MonkeyPatch
) -> None:
    """C01: what it passed by it asks again, without a wake-up and without the poll."""
    monkeypatch.setattr("fairlane.store.boards.EVERY", 3_600.0)  # a checkpoint waits for the lock as well
    app = await mail.app()
    here, there = account_in(0), account_in(1)
    await mail.enqueue(app, here, 400)
    await mail.enqueue(app, there, 400)
    async with working(app, queues="email", concurrency=2, poll="1h"):
        await until(lambda: min(mail.sent[here], mail.sent[there]) >= 10)
        mail.going.clear()
        await hold(beside, "email")
        assert not passed
        mail.going.set()
        # The other is served before the one whose turn it is, until it is too far ahead.
        await until_found(lambda: is_waited_for(beside, "email"))
        assert 0 < len(passed) < 20
        assert {(choice.queue, choice.taken) for choice in passed} == {("email__p1", frozenset({"email"}))}
        await let_go(beside, "email")
        await until(lambda: mail.sent[here] == mail.sent[there] == 400)


async def test_a_job_that_came_to_a_partition_while_it_was_taken_is_picked_up_without_the_poll(
    mail: Mail, beside: asyncpg.Connection[Any]
) -> None:
    """C09."""
    app, producer = await mail.app(), await mail.app()
    here, there = account_in(0), account_in(1)
    async with working(app, queues="email", concurrency=2, poll="1h") as worker:
        queues = worker._slots.queues.values()
        await until(lambda: all(queue.is_registered and not queue.wants_more and not queue.looks for queue in queues))
        for wanted in range(1, 21):
            await hold(beside, "email")
            await mail.enqueue(producer, there, 3)
            await mail.enqueue(producer, here, 1)
            await until_found(lambda: is_waited_for(beside, "email"))
            await let_go(beside, "email")
            await until(lambda wanted=wanted: mail.sent == {here: wanted, there: 3 * wanted})  # type: ignore[misc]
