"""Figures of the whole fleet: what scrapers are told of the database, how often it is asked, and what if it is away."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

import pytest

from fairlane import App, Concurrency, Fair
from fairlane.clock import ManualClock
from fairlane.telemetry import metrics as fleet_module
from fairlane.telemetry.metrics import FLEET, Failures, Fleet
from tests.dashboard.harness import ROOT, TOKEN, VIEWER_TOKEN, Site, a_shop
from tests.telemetry.test_metrics import of, parsed, told
from tests.waiting import until
from tests.worker.harness import working


def shop(app: App) -> Any:
    app.queue("email", fair=Fair(by="account"), limits=[Concurrency(1, by="account"), Concurrency(10)])

    @app.task(queue="email", name="send", max_attempts=1)
    async def send(account: str) -> None: ...

    return send


async def test_the_fleet_is_told_in_numbers_with_no_more_keys_than_asked_for(app: App) -> None:
    send = shop(app)
    async with app:
        for account, count in (("acme", 5), ("globex", 3), ("initech", 2), ("hooli", 1)):
            await send.enqueue_many([send.call(account) for _ in range(count)])
        await send.using(delay="1h").enqueue("acme")
        claims = await app.queues["email"].claim(2)
        await (await app.opened()).add_up("email")
        stats = await app.operations.metrics(2)
        nobody = await app.operations.metrics(0)
    assert {claim.keys["account"] for claim in claims} <= {"acme", "globex", "initech", "hooli"}
    assert stats["fairlane_queue_ready_jobs"] == [(("email",), 9)]
    assert stats["fairlane_queue_running_jobs"] == [(("email",), 2)]
    assert stats["fairlane_queue_scheduled_jobs"] == [(("email",), 1)]
    assert stats["fairlane_queue_dead_jobs"] == [(("email",), 0)]
    assert dict(stats["fairlane_limit_saturation_ratio"])["email", "concurrency:"] == pytest.approx(0.2)
    keys = dict(stats["fairlane_key_waiting_jobs"])
    assert len(keys) == 3
    assert ("email", "other") in keys
    assert sum(keys.values()) == 9
    assert max(keys, key=lambda key: keys[key]) == ("email", "account=acme")
    assert dict(nobody["fairlane_key_waiting_jobs"]) == {("email", "other"): 9}


async def test_the_fleet_is_told_what_ended_in_a_day(app: App) -> None:
    send = shop(app)
    async with app:
        await send.enqueue_many([send.call(account) for account in ("acme", "globex")])
        one, other = await app.queues["email"].claim(2)
        await one.ack()
        await other.dead("no")
        stats = await app.operations.metrics(0)
    assert stats["fairlane_queue_day_ended_jobs"] == [(("email",), 2)]
    assert stats["fairlane_queue_day_failed_jobs"] == [(("email",), 1)]


async def test_a_worker_tells_of_the_fleet_unless_it_is_told_not_to(app: App) -> None:
    send = shop(app)
    async with app:
        async with working(app, metrics_port=0) as worker:
            await until(lambda: worker.metrics_url)
            await send.using(delay="1h").enqueue("acme")
            assert "fairlane_queue_scheduled_jobs" in await _scraped(worker)
        async with working(app, metrics_port=0, metrics_fleet=False) as worker:
            await until(lambda: worker.metrics_url)
            assert "fairlane_queue_scheduled_jobs" not in await _scraped(worker)
            assert "fairlane_slots" in told(app)


async def _scraped(worker: Any) -> str:
    import asyncio
    from urllib.request import urlopen

    def get() -> str:
        with urlopen(worker.metrics_url, timeout=20) as answer:
            text: str = answer.read().decode()
        return text

    return await asyncio.to_thread(get)


async def test_the_database_is_asked_at_most_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked = 1_000.0, 0
    monkeypatch.setattr(fleet_module, "monotonic", lambda: now)

    async def source(keys: int) -> dict[str, list[tuple[tuple[str, ...], float]]]:
        nonlocal asked
        asked += 1
        if asked == 3:
            raise RuntimeError("the database is away")
        return {"fairlane_workers_alive": [((), float(asked))]}

    failures = Failures()
    fleet = Fleet(source, failures, 20)
    seen = []
    for seconds in (0, 9, 10, 20, 29):
        now = 1_000.0 + seconds
        seen.append(parsed(await fleet.text())["fairlane_workers_alive"][of()])
    assert (seen, asked) == ([1, 1, 2, 2, 2], 3)
    assert failures.by_reason == {"collector": 1}
    # Figures that could not be looked up again for a minute are not told any more.
    now = 1_071.0
    assert fleet.value_of("fairlane_workers_alive") == []


async def test_every_fleet_metric_is_told_by_somebody(app: App) -> None:
    async with app:
        assert set(await app.operations.metrics()) == set(FLEET)


async def test_a_dashboard_tells_of_the_fleet_to_those_who_have_a_token() -> None:
    async with AsyncExitStack() as stack:
        app = await stack.enter_async_context(a_shop("sqlite://", ManualClock()))
        site = await stack.enter_async_context(Site.of(app, ManualClock(), token=TOKEN, viewer_token=VIEWER_TOKEN))
        answer = await site.program(VIEWER_TOKEN).get(f"{ROOT}/metrics")
        assert answer.status_code == 200
        assert "fairlane_queue_ready_jobs" in parsed(answer.text)
        assert (await site.stranger().get(f"{ROOT}/metrics")).status_code in (303, 401)
