"""What a request costs the database does not depend on how many queues, keys and jobs there are (O12)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import asyncpg
import pytest

from fairlane import App, Concurrency, Fair
from fairlane.clock import ManualClock
from fairlane.dashboard.api import OPERATIONS
from fairlane.store.sqlite.database import Transaction
from tests.dashboard.harness import TOKEN, Site
from tests.dashboard.world import API

RUN_ON_SQLITE = ("all", "run", "run_many")
RUN_ON_POSTGRES = ("execute", "executemany", "fetch", "fetchrow", "fetchval")
LOOKS = {each.name: each for each in OPERATIONS if each.method == "GET" and each.name != "openapi"}


class Statements:
    """Counts what both stores are asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for owner, methods in ((Transaction, RUN_ON_SQLITE), (asyncpg.Connection, RUN_ON_POSTGRES)):
            for method in methods:
                monkeypatch.setattr(owner, method, self._counting(getattr(owner, method)))

    def _counting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def counted(*args: Any, **options: Any) -> Any:
            self.count += 1
            return real(*args, **options)

        return counted


async def a_site(stack: AsyncExitStack, url: str, clock: ManualClock, *, queues: int, keys: int) -> Site:
    """So many queues with so many keys each, some waiting, some running, some paused; and a schedule for each key."""
    app = App(url, clock=clock)
    tasks = []
    for number in range(queues):
        name = f"queue-{number}"
        app.queue(name, fair=Fair(by="account"), limits=[Concurrency(1, by="account"), Concurrency(100)])

        @app.task(queue=name, name=f"shop.deliver-{number}")
        async def deliver(event: int, account: str) -> int:
            return event

        tasks.append(deliver)
    for key in range(keys):
        app.schedule(tasks[0], 1, f"account-{key}", every="1h", name=f"schedule-{key}")
    await stack.enter_async_context(app)
    await app.fire_schedules()
    for number, task in enumerate(tasks):
        calls = [task.call(event, f"account-{key}") for key in range(keys) for event in range(3)]
        await app.enqueue_many(calls)
        for _ in range(2):  # the second time every account is found at its limit
            await app.queues[f"queue-{number}"].claim(keys)
        await app.operations.queues.pause(f"queue-{number}", keys={"account": "account-0"}, actor="ann")
    await app.upkeep()
    return await stack.enter_async_context(Site.of(app, clock, token=TOKEN))


async def cost_of_looking(site: Site, statements: Statements) -> dict[str, int]:
    """Statements of each request, once whatever is found out only once is known."""
    program = site.program()
    job = (await program.get(f"{API}/jobs")).json()["jobs"][0]["id"]
    costs = {}
    for name, operation in LOOKS.items():
        path = operation.path.replace("{queue}", "queue-0").replace("{job}", job)
        query = {"show_key": "?key=account=account-0", "list_jobs": "?limit=5"}.get(name, "")
        for _ in range(2):
            statements.count = 0
            answer = await program.get(f"{API}{path}{query}")
            assert answer.status_code == 200, answer.text
            costs[name] = statements.count
    return costs


async def test_a_request_asks_the_database_as_often_for_twenty_queues_and_keys_as_for_two(
    database_url: str, stack: AsyncExitStack, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    statements = Statements(monkeypatch)
    few = await cost_of_looking(await a_site(stack, database_url, clock, queues=2, keys=2), statements)
    twenty = await cost_of_looking(await a_site(stack, database_url, clock, queues=20, keys=20), statements)
    # The doctor takes every queue by itself; how many keys they have does not matter to it either.
    assert few.pop("diagnose") > 0
    assert twenty.pop("diagnose") < 32 * 20  # a board is three statements; on SQLite each transaction asks the time
    # An explanation runs the plan, which asks for what it needs in rounds: a few, however much there is.
    for explaining in ("explain_job", "explain_queue", "show_key"):
        assert abs(few.pop(explaining) - twenty.pop(explaining)) <= 3, explaining
    assert few == twenty
    assert min(few.values()) > 0
