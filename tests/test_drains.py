"""N7, O17: how long until what waits has started. Never less than the limits allow, nor than was really seen."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from fairlane import App, Concurrency, Fair, Rate
from fairlane.clock import SECOND, ManualClock, lasting
from fairlane.job import Claim
from fairlane.operations.keys import drained_in
from fairlane.operations.views import KeyView
from fairlane.policy import Policy
from fairlane.scheduler.estimate import Seen
from fairlane.scheduler.settlement import Done, settle
from fairlane.stats.gates import board_now, gauges
from fairlane.stats.keys import MINUTE, Minute, Within
from tests.store.harness import LEASE, WORKER, serving

CYCLE = 45_000
"""Microseconds from one start of a key to the next; its jobs run for 10,000 of them."""


class Shop:
    """Two queues whose keys have one slot each; in one of them all together have a rate besides."""

    def __init__(self, url: str) -> None:
        self.clock = ManualClock()
        self.app = App(url, clock=self.clock)
        own = Concurrency(1, by="account")
        self.app.queue("calls", fair=Fair(by="account"), limits=[own])
        self.app.queue("slow", limits=[own, Rate(60, per="1m", burst=10)])

        @self.app.task(queue="calls")
        async def call(account: str) -> None: ...

        @self.app.task(queue="slow")
        async def send(account: str) -> None: ...

        self.call, self.send = call, send
        self.held: list[Claim] = []

    async def serve(self, queue: str, rounds: int) -> None:
        """A worker that takes a cycle for each job, of which the run is the smaller part."""
        store = await self.app.opened()
        for _ in range(rounds):
            await store.settle([settle(claim, Done(None), 10_000) for claim in self.held])
            self.held = (await store.claim(queue, lambda: 5, worker=WORKER, lease=LEASE)).claims
            self.clock.advance(CYCLE / 1_000_000)
        await store.add_up(queue, 5_000)

    async def drained_in(self, queue: str) -> tuple[int, float]:
        await serving(await self.app.opened(), self.clock, queue)
        view: KeyView = (await self.app.operations.keys.show(queue, {"account": "acme"})).view
        assert view.drained_in is not None, view
        return view.waiting, view.drained_in


@pytest.fixture
async def shop(url: str) -> AsyncIterator[Shop]:
    shop = Shop(url)
    async with shop.app:
        yield shop


async def test_what_was_really_seen_decides_where_it_is_slower_than_the_limit(shop: Shop) -> None:
    await shop.call.enqueue_many([shop.call.call("acme")] * 3_000)
    shop.clock.advance("30s")
    await shop.serve("calls", 20)
    waiting, drained_in = await shop.drained_in("calls")
    assert drained_in >= waiting * 0.018, "a claim and a settlement lie between two runs"
    await shop.serve("calls", 1_000)  # 16 s of it lie in a minute of their own
    waiting, drained_in = await shop.drained_in("calls")
    assert drained_in == pytest.approx(waiting * CYCLE / 1_000_000, rel=0.1)
    await serving(await shop.app.opened(), shop.clock, "calls")
    (hint,) = [each for each in (await shop.app.operations.overview()).hints if each.limit == "concurrency:account"]
    assert hint.words.endswith(f"{lasting(drained_in)} to drain")


async def test_a_queue_that_had_little_to_do_says_nothing_of_how_fast_it_can_go(shop: Shop) -> None:
    for _ in range(3):
        await shop.call.enqueue("globex")
        await shop.serve("calls", 2)
        shop.clock.advance("1m")
    await shop.call.enqueue_many([shop.call.call("acme")] * 1_000)
    await shop.serve("calls", 3)
    _, drained_in = await shop.drained_in("calls")
    assert 17 < drained_in < 20


async def test_a_limit_of_the_whole_queue_counts_for_each_key(shop: Shop) -> None:
    await shop.send.enqueue_many([shop.send.call("acme")] * 610)
    await shop.serve("slow", 2)
    waiting, drained_in = await shop.drained_in("slow")
    assert (waiting, round(drained_in)) == (608, 600)


async def view_of(shop: Shop) -> KeyView:
    return (await shop.app.operations.keys.show("calls", {"account": "acme"})).view


async def test_before_a_run_has_ended_no_time_is_known(shop: Shop) -> None:
    await shop.call.enqueue_many([shop.call.call("acme")] * 20)
    await shop.serve("calls", 1)
    view = await view_of(shop)
    assert (view.waiting, view.held_by, view.drained_in) == (19, ["concurrency:account"], None)
    (hint,) = [each for each in (await shop.app.operations.overview()).hints if each.limit == "concurrency:account"]
    assert hint.words.endswith("19 jobs wait")


async def test_where_no_worker_serves_the_queue_a_hint_gives_no_time(shop: Shop) -> None:
    await shop.call.enqueue_many([shop.call.call("acme")] * 20)
    await shop.serve("calls", 3)
    hints = {each.limit: each.words for each in (await shop.app.operations.overview()).hints}
    assert hints["concurrency:account"].endswith("17 jobs wait")
    await serving(await shop.app.opened(), shop.clock, "calls")
    hints = {each.limit: each.words for each in (await shop.app.operations.overview()).hints}
    assert hints["concurrency:account"].endswith("to drain")


@pytest.mark.parametrize(("run_time", "running_for", "least"), [(0.25, 40 * SECOND, 360), (60.0, SECOND, 540)])
def test_what_still_runs_says_how_long_a_run_takes_at_least(run_time: float, running_for: int, least: int) -> None:
    policy = Policy("calls", limits=(Concurrency(2),))
    (bound,) = policy.bound
    board = board_now(policy, 0, [], [(bound, ())])
    told = gauges(board, [(bound, ())])
    told[0].gate.in_flight = 2
    passed = [(each, 18) for each in told]
    found = drained_in(18, run_time, passed, 0, None, running_for=running_for)
    assert found is not None
    assert least <= found <= least + 1
    assert drained_in(18, 0.0, passed, 0, None, running_for=running_for) is None, "none has ended: it may run for hours"


async def test_a_paused_key_has_no_time_to_drain(shop: Shop) -> None:
    await shop.call.enqueue_many([shop.call.call("acme")] * 30)
    await shop.serve("calls", 3)
    assert (await shop.drained_in("calls"))[1] > 0
    await shop.app.operations.queues.pause("calls", keys={"account": "acme"})
    (key,) = (await shop.app.operations.keys.list("calls")).keys
    assert key.drained_in is None


async def test_a_key_has_no_time_to_drain_where_no_live_worker_serves_its_queue(shop: Shop) -> None:
    await shop.call.enqueue_many([shop.call.call("acme")] * 20)
    await shop.serve("calls", 3)
    (listed,) = (await shop.app.operations.keys.list("calls")).keys
    assert (listed.drained_in, (await view_of(shop)).drained_in) == (None, None)
    await serving(await shop.app.opened(), shop.clock, "calls")
    assert (await shop.drained_in("calls"))[1] > 0
    shop.clock.advance("1m")
    assert (await view_of(shop)).drained_in is None, "that worker has gone silent"


async def test_where_no_run_has_ended_a_rate_beside_a_cap_gives_no_time_either(shop: Shop) -> None:
    await shop.send.enqueue_many([shop.send.call("acme")] * 40)
    await shop.serve("slow", 1)
    await serving(await shop.app.opened(), shop.clock, "slow")
    shop.clock.advance("4s")
    view = (await shop.app.operations.keys.show("slow", {"account": "acme"})).view
    assert (view.running, view.held_by, view.drained_in) == (1, ["concurrency:account"], None)


@pytest.mark.parametrize("is_seen", [True, False])
async def test_a_key_drains_no_earlier_than_the_limits_that_some_of_its_jobs_pass_allow(
    url: str, *, is_seen: bool
) -> None:
    """O17: a cap by account, and a rate by endpoint through which the same jobs go."""
    app = App(url, clock=(clock := ManualClock()))
    app.queue(
        "calls",
        fair=Fair(by="account"),
        limits=[Concurrency(5, by="account"), Rate(6, per="1m", burst=5, by="endpoint")],
    )

    @app.task(queue="calls")
    async def call(account: str, endpoint: str) -> None: ...

    async with app:
        store = await app.opened()
        await call.enqueue("acme", "quick")
        (claim,) = (await store.claim("calls", lambda: 5, worker=WORKER, lease=LEASE)).claims
        await store.settle([settle(claim, Done(None), 100_000)])
        await call.enqueue_many([call.call("acme", "slow")] * 500)
        assert len((await store.claim("calls", lambda: 20, worker=WORKER, lease=LEASE)).claims) == 5
        await call.enqueue_many([call.call("acme", "slow")] * 5)
        await call.enqueue_many([call.call("globex", "slow")] * 5)
        if is_seen:
            await store.claim("calls", lambda: 5, worker=WORKER, lease=LEASE)
            await store.add_up("calls")
        await serving(store, clock, "calls")
        view = (await app.operations.keys.show("calls", {"account": "acme"})).view
        assert (view.waiting, view.held_by) == (500, ["concurrency:account"])
        assert view.drained_in is not None
        assert view.drained_in == pytest.approx(500 * 10, rel=0.01)
        (hint,) = [each for each in (await app.operations.overview()).hints if each.limit == "concurrency:account"]
        assert hint.words.endswith(f"{lasting(view.drained_in)} to drain")
        (listed,) = (await app.operations.keys.list("calls", "endpoint", held_only=True)).keys
        assert (listed.keys, listed.drains_at_least) == ({"endpoint": "slow"}, True), "of several accounts"
        assert listed.drained_in == pytest.approx(505 * 10, rel=0.01)
        assert not view.drains_at_least


def test_the_time_in_which_nothing_was_served_does_not_slow_what_was_seen() -> None:
    """Sixty starts, one a second from the middle of a minute on, by workers that then stopped."""
    minutes = [
        Minute(10, claimed=30, claimed_in=Within(10 * MINUTE + 30 * SECOND, 11 * MINUTE - SECOND)),
        Minute(11, claimed=30, claimed_in=Within(11 * MINUTE, 11 * MINUTE + 29 * SECOND)),
    ]
    for until in (12 * MINUTE, 14 * MINUTE):
        assert Seen(minutes, until).pace(10 * MINUTE) == pytest.approx(1, rel=0.02)


async def drain_hints(app: App, clock: ManualClock, *queues: str) -> list[tuple[str | None, str]]:
    """What hints say of keys that rates hold, once workers serve these queues."""
    await serving(await app.opened(), clock, *queues)
    return [(each.queue, each.words.rpartition(": ")[2]) for each in (await app.operations.overview()).hints]


@pytest.mark.parametrize("by", ["vendor", None])
async def test_a_key_drains_with_the_jobs_of_other_queues_that_share_its_rate(url: str, by: str | None) -> None:
    """O17: together they start two jobs a second, and take turns as long as both have some."""
    app = App(url, clock=(clock := ManualClock()))
    for queue in ("calls", "mails", "idle"):
        shared = Rate(120, per="1m", burst=4, by=by, name="vendor")
        app.queue(queue, limits=[shared, Rate(1_000, per="1s", burst=1, by="vendor")], keys=["vendor"])

    @app.task(queue="calls")
    async def call(vendor: str) -> None: ...

    @app.task(queue="mails")
    async def mail(vendor: str) -> None: ...

    async def drained_in(queue: str) -> float | None:
        return (await app.operations.keys.show(queue, {"vendor": "acme"})).view.drained_in

    async with app:
        await call.enqueue_many([call.call("acme")] * 24)
        await mail.enqueue_many([mail.call("acme")] * 64)
        for _ in range(2):
            clock.advance("1ms")
            assert [len(await app.queues[each].claim(5)) for each in ("calls", "mails") * 2] == [1, 1, 0, 0]
        assert sorted(await drain_hints(app, clock, "calls", "mails", "idle")) == [
            ("calls", "22 jobs wait, 22 s to drain"),
            ("mails", "62 jobs wait, 42 s to drain"),
        ]
        assert await drained_in("calls") == pytest.approx(22, rel=0.02), "22 here, and as many there"
        assert await drained_in("mails") == pytest.approx((62 + 22) / 2, rel=0.02)
        await app.operations.queues.pause("mails")
        assert await drained_in("calls") == pytest.approx(22 / 2, rel=0.02), "nothing of the other one starts"


async def test_a_hint_adds_up_the_partitions_of_a_queue(url: str) -> None:
    """O17: one endpoint, to which jobs in all partitions go, at two a second."""
    app = App(url, clock=(clock := ManualClock()))
    rate = Rate(120, per="1m", burst=5, by="endpoint")
    queue = app.queue("calls", fair=Fair(by="account"), partitions=4, partition_by="account", limits=[rate])

    @app.task(queue="calls")
    async def call(account: str, endpoint: str) -> None: ...

    async with app:
        await app.enqueue_many([call.call(f"account-{n % 12}", "slow") for n in range(84)])
        assert sum([len(await queue.claim(4)) for _ in range(8)]) == 5
        (hint,) = await drain_hints(app, clock, "calls")
        (listed,) = (await app.operations.keys.list("calls", "endpoint")).keys
        assert listed.drained_in is not None
        assert listed.drained_in == pytest.approx(79 / 2, rel=0.02)
        assert hint == ("calls", f"79 jobs wait, {lasting(listed.drained_in)} to drain")
        (alone,) = (await app.operations.keys.list("calls__p1", "endpoint")).keys
        assert alone.drained_in is not None
        assert alone.drained_in > 1.5 * alone.waiting / 2, "those of other partitions start too"
