"""An hour in the life of a shop with a hundred tenants, told in a few seconds: queues in every status, dead jobs, a
paused key, overrides, schedules, workers. The same every time, so that pictures of it differ only where pages do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from heapq import heappop, heappush
from typing import Any
from uuid import UUID

from fairlane import App, Concurrency, Fair, Rate
from fairlane.clock import SECOND, ManualClock
from fairlane.job import Claim, State
from fairlane.policy.limits import Limit
from fairlane.scheduler.settlement import Died, Done, Failed, RunOutcome, settle
from fairlane.store import records
from fairlane.store.operators import JobFilter
from fairlane.store.protocol import Store, WorkerIdentity
from fairlane.store.stats_values import WorkerReport
from fairlane.task import Call, Task
from tests.store.harness import claim as claim_jobs

__all__ = ["BUSIEST", "Demo"]

BUSIEST = "acme"
STEP = 10
STEPS = 360
LEASE = timedelta(hours=3)
FIRST = ("acme", "globex", "initech", "umbrella", "hooli", "stark", "wayne", "tyrell", "wonka", "cyberdyne")
PLACES = ("north", "south", "river", "harbor", "summit", "cedar", "maple", "copper", "silver")
TRADES = ("books", "bikes", "coffee", "travel", "clinic", "studio", "foods", "labs", "tools", "garden")
TIMED_OUT = """Traceback (most recent call last):
  File "/srv/shop/webhooks.py", line 41, in deliver
    answer = await client.post(endpoint, json=event)
  File "/srv/shop/client.py", line 88, in post
    raise Timeout(f"{endpoint} did not answer within 10 s")
shop.client.Timeout: https://hooks.hooli.example/in did not answer within 10 s"""
REFUSED = """Traceback (most recent call last):
  File "/srv/shop/webhooks.py", line 46, in deliver
    answer.raise_for_status()
shop.client.Refused: 410 Gone: this endpoint has been removed"""


@dataclass
class Stream:
    """What comes to one queue, and what it is served with."""

    queue: str
    task: Task[..., object]
    slots: int
    worker: WorkerIdentity
    every_step: float
    """Jobs that arrive, on average."""
    run_time: float
    failing: float = 0.0
    running: list[tuple[int, int, Claim]] = field(default_factory=list)
    count: int = 0


class Demo:
    """The shop's app, and how it came to where it is."""

    dead_job: UUID
    waiting_job: UUID

    def __init__(self, url: str) -> None:
        self.clock = ManualClock(datetime(2026, 3, 9, 7, 30, tzinfo=UTC))
        self.app = App(url, clock=self.clock)
        self.accounts = [*FIRST, *(f"{place}-{trade}" for place in PLACES for trade in TRADES)]
        self._chance = random.Random(20_260_309)
        self._order = 0
        self._declare()

    def _declare(self) -> None:
        app = self.app
        limits: list[Limit] = [Rate(600, per="1m", by="endpoint"), Concurrency(5, by="account"), Concurrency(200)]
        app.queue("webhooks", fair=Fair(by="account"), limits=limits)
        app.queue("email", fair=Fair(by="account"), limits=[Concurrency(20, by="account")])
        app.queue("reports", fair=Fair(by="account"))
        app.queue("exports", fair=Fair(by="account"), limits=[Concurrency(1, by="account")])
        app.queue("imports", limits=[Concurrency(4)], keys=["account"])
        app.queue("thumbnails", fair=Fair(by="account", charge="count"))

        @app.task(queue="webhooks", name="shop.deliver", max_attempts=3)
        async def deliver(event: dict[str, object], account: str, endpoint: str) -> object: ...

        @app.task(queue="email", name="shop.send_email", max_attempts=5)
        async def send_email(template: str, to: str, account: str) -> object: ...

        @app.task(queue="reports", name="shop.render_report")
        async def render_report(month: str, account: str) -> object: ...

        @app.task(queue="exports", name="shop.export_orders")
        async def export_orders(since: str, account: str) -> object: ...

        @app.task(queue="imports", name="shop.import_products")
        async def import_products(file: str, account: str) -> object: ...

        @app.task(queue="thumbnails", name="shop.make_thumbnail")
        async def make_thumbnail(picture: int, account: str) -> object: ...

        berlin = "Europe/Berlin"
        app.schedule("0 9 * * 1-5", render_report, "2026-02", "globex", timezone=berlin, name="daily-report")
        app.schedule("*/15 * * * *", import_products, "stock.csv", "acme", name="stock-levels")
        app.schedule("30 2 1 * *", export_orders, "2026-02-01", "umbrella", timezone="America/New_York", name="books")
        app.schedule(send_email, "digest", "ops@shop.example", "acme", every="30m", name="digest")
        app.schedule("@hourly", export_orders, "2026-03-08", "initech", name="old-export")

        one, two, three, four = (
            WorkerIdentity(UUID(int=place, version=4), name)
            for place, name in enumerate(("app-1:4711", "app-2:4688", "batch-1:901", "batch-2:877"), 1)
        )
        self.workers = (one, two, three, four)
        self.streams = [
            Stream("webhooks", deliver, 48, one, 42.0, 3.0, 0.02),
            Stream("email", send_email, 32, two, 30.0, 2.0, 0.004),
            Stream("reports", render_report, 6, three, 1.3, 40.0),
            Stream("exports", export_orders, 4, three, 0.3, 60.0),
            Stream("thumbnails", make_thumbnail, 16, two, 4.0, 1.5),
            Stream("imports", import_products, 0, four, 0.0, 30.0),
        ]

    async def live(self) -> None:
        """Let the hour pass, then leave everything in the middle of it."""
        store = await self.app.opened()
        await self.app.fire_schedules()
        del self.app.schedules["old-export"]
        for step in range(STEPS):
            for stream in self.streams:
                await self._serve(store, stream, step)
            if step == STEPS - 40:
                await self._operate()
                await self._report(store, is_late=True)
            if step % 6 == 5:
                await self.app.fire_schedules()
                await self._add_up(store)
            self.clock.advance(f"{STEP}s")
        await self._report(store, is_late=False)
        await self._add_up(store)
        self.dead_job, self.waiting_job = await self._one("hooli", State.DEAD), await self._one(BUSIEST, State.READY)

    async def _serve(self, store: Store, stream: Stream, step: int) -> None:
        if calls := list(self._arrivals(stream, step)):
            await stream.task.enqueue_many(calls)
        now = self.clock.now()
        ended = []
        while stream.running and stream.running[0][0] <= now:
            ends_at, _, claim = heappop(stream.running)
            ended.append(settle(claim, self._outcome(stream, claim), ends_at - claim.claimed_at))
        if ended:
            assert await store.settle(ended) == []
        if stream.slots:
            for claim in await claim_jobs(
                store, stream.queue, stream.slots - len(stream.running), worker=stream.worker, lease=LEASE
            ):
                self._order += 1
                runs = int(self._chance.lognormvariate(0, 0.5) * stream.run_time * SECOND)
                heappush(stream.running, (now + runs, self._order, claim))

    def _arrivals(self, stream: Stream, step: int) -> Iterator[Call[object]]:
        """The busier ones send more; thumbnails stopped a while ago, and one tenant floods the webhooks."""
        count = max(0, round(self._chance.gauss(stream.every_step, stream.every_step**0.5)))
        if stream.queue == "thumbnails" and step > STEPS - 30:
            count = 0
        for _ in range(count):
            yield self._call(stream, self.accounts[int(100 * self._chance.random() ** 2.2)])
        if stream.queue == "webhooks" and step == STEPS - 30:
            yield from (self._call(stream, BUSIEST) for _ in range(4_600))
        if stream.queue == "imports" and step == STEPS - 20:
            yield from (self._call(stream, account) for account in self.accounts[:12])

    def _call(self, stream: Stream, account: str) -> Call[object]:
        stream.count += 1
        task = stream.task
        match stream.queue:
            case "webhooks":
                endpoint = f"hooks.{account}.example"
                event = {"type": "order.paid", "order": 70_000 + stream.count, "total": "49.90"}
                return task.call(event, account=account, endpoint=endpoint)
            case "email":
                return task.call("receipt", f"customer-{stream.count}@{account}.example", account=account)
            case "reports":
                return task.call("2026-02", account=account)
            case "exports":
                return task.call("2026-03-01", account=account)
            case "imports":
                return task.call(f"products-{stream.count}.csv", account=account)
            case _:
                return task.call(stream.count, account=account)

    def _outcome(self, stream: Stream, claim: Claim) -> RunOutcome:
        account, roll = claim.keys["account"], self._chance.random()
        if stream.queue == "webhooks" and account == "hooli" and roll < 0.5:
            return Failed(TIMED_OUT, 20 * SECOND)
        if stream.queue == "webhooks" and account == "wonka" and roll < 0.2:
            return Died(REFUSED)
        if roll < stream.failing:
            return Failed(TIMED_OUT.replace("hooli", str(account)), 15 * SECOND)
        return Done(b'{"status":200}')

    async def _add_up(self, store: Store) -> None:
        for stream in self.streams:
            while (await store.add_up(stream.queue)).more:
                pass

    async def _one(self, account: str, state: State) -> UUID:
        wanted = JobFilter(queue="webhooks", state=state, keys={"account": account})
        return (await self.app.operations.jobs.list(wanted, limit=1)).jobs[0].id

    async def _operate(self) -> None:
        """What two people on call did meanwhile."""
        operations = self.app.operations
        await operations.limits.set(
            "webhooks", "concurrency:account", 8, keys={"account": "globex"}, reason="larger plan", actor="ann"
        )
        await operations.weights.set("email", 3, keys={"account": "globex"}, reason="larger plan", actor="ann")
        await operations.queues.pause(
            "webhooks",
            keys={"account": "hooli"},
            reason="their endpoint times out, OPS-311",
            actor="bob",
            expires_in="2h",
        )
        await operations.queues.pause("exports", reason="the disk of the file server is full", actor="bob")
        await operations.schedules.pause("digest", reason="nobody reads it on holidays", actor="ann")

    async def _report(self, store: Store, *, is_late: bool) -> None:
        """What the workers say of themselves; one said it a while ago, and nothing since."""
        now = self.clock.now()
        loops = dict.fromkeys(("claims", "leases", "reaping", "settling", "adding up", "upkeep"), "running")
        one, two, three, four = self.workers
        webhooks, email, reports = (len(stream.running) for stream in self.streams[:3])
        died = {**loops, "upkeep": "StoreUnavailable: the connection was closed"}
        tasks = ["shop.deliver", "shop.export_orders", "shop.make_thumbnail", "shop.render_report", "shop.send_email"]
        given: tuple[tuple[WorkerIdentity, dict[str, float], int, int, dict[str, Any]], ...] = (
            (one, {"webhooks": 1.0}, 48, webhooks, {"loops": loops, "waiting": 4, "unsettled": 2}),
            (two, {"email": 2.0, "thumbnails": 1.0}, 48, email, {"loops": loops, "is_stopping": True}),
            (three, {"reports": 1.0, "exports": 1.0}, 6, reports, {"loops": died, "is_well": False}),
            (four, {"reports": 1.0}, 4, 0, {"loops": loops, "clock_offset": 7 * SECOND}),
        )
        for worker, queues, slots, running, others in given[3:] if is_late else given[:3]:
            host, _, pid = worker.name.partition(":")
            report = WorkerReport(
                name=worker.name,
                host=f"{host}.shop.internal",
                pid=int(pid),
                version="0.1.0",
                queues=queues,
                concurrency=slots,
                started_at=now - 3_720 * SECOND,
                every=5 * SECOND,
                running=min(running, slots),
                tasks=tasks,
                **others,
            )
            await store.run(records.report(worker.id, report))
