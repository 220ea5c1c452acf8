"""An action on many jobs is one entry of the audit, with who, why, which and how many (S6, O02)."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from fairlane import App, State
from fairlane.operations import JobFilter
from fairlane.operations import jobs as operations_on_jobs
from fairlane.store import operators
from fairlane.store.audit import Note
from fairlane.store.operators import BUSY

COUNT = 130


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest) -> str:
    return "sqlite://" if request.param == "sqlite" else request.getfixturevalue("postgres_url")


@pytest.fixture
async def app(url: str, stack: AsyncExitStack) -> App:
    return await opened(url, stack)


async def opened(url: str, stack: AsyncExitStack) -> App:
    app = App(url)
    app.queue("webhooks")

    @app.task(name="deliver", queue="webhooks", keys=("account",), max_attempts=1)
    async def deliver(account: str) -> None: ...

    return await stack.enter_async_context(app)


async def enqueued(app: App, count: int = COUNT) -> list[UUID]:
    task = app.registry["deliver"]
    return [each.id for each in await task.producer.enqueue_many([task.call("acme") for _ in range(count)])]


@pytest.mark.parametrize("action", ["cancel", "retry", "replay", "purge"])
async def test_a_bulk_action_is_one_entry_with_its_filter_its_count_and_its_reason(
    app: App, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations_on_jobs, "BATCH", 40)
    operations, task = app.operations, app.registry["deliver"]
    if action == "retry":
        await task.producer.enqueue_many([task.using(delay="1h").call("acme") for _ in range(COUNT)])
    else:
        await enqueued(app)
    if action in ("replay", "purge"):
        await operations.cancel_jobs(JobFilter(queue="webhooks"), actor="before")
    chosen = JobFilter(queue="webhooks", task="deliver", keys={"account": "acme"})
    if action in ("replay", "purge"):
        chosen = JobFilter(queue="webhooks", state=State.CANCELLED, keys={"account": "acme"})
    act = {
        "cancel": operations.cancel_jobs,
        "retry": operations.retry_jobs,
        "replay": operations.replay_jobs,
        "purge": operations.purge_jobs,
    }[action]
    report = await act(chosen, actor="ann", reason="a ticket")
    assert len(report.done) == COUNT
    entries = [each for each in (await operations.list_audit()).entries if each.actor == "ann"]
    [entry] = entries
    assert (entry.action, entry.queue, entry.reason) == (action, "webhooks", "a ticket")
    assert entry.target.startswith(f"{COUNT} jobs: queue=webhooks ")
    assert entry.target.endswith("account=acme")
    assert [each.id for each in (await operations.list_audit("webhooks")).entries if each.actor == "ann"] == [entry.id]


async def test_an_action_on_named_jobs_is_one_entry_too(app: App) -> None:
    first, *others = await enqueued(app, 120)
    await app.operations.cancel_jobs([first], actor="ann")
    await app.operations.cancel_jobs(others, actor="bob")
    two, one = (await app.operations.list_audit()).entries
    assert (one.target, two.target) == (f"1 job: {first}", "119 jobs")


async def test_pages_of_the_audit_count_actions_and_not_transactions(app: App) -> None:
    for number in range(3):
        await enqueued(app, 60)
        await app.operations.cancel_jobs(JobFilter(queue="webhooks"), actor=f"ann {number}")
    page = await app.operations.list_audit(limit=2)
    rest = await app.operations.list_audit(before=page.before, limit=2)
    assert [each.actor for each in (*page.entries, *rest.entries)] == ["ann 2", "ann 1", "ann 0"]
    assert rest.before is None


async def test_a_job_that_somebody_is_busy_with_is_waited_for_alone(
    postgres_url: str, connection: asyncpg.Connection[Any], stack: AsyncExitStack
) -> None:
    """Whoever holds one of many jobs must not be waited for by somebody who holds others: they might wait for us."""
    app = await opened(postgres_url, stack)
    jobs = await enqueued(app, 3)
    store = await app.opened()
    note = Note(actor="ann", action="cancel")
    async with connection.transaction():
        await connection.execute("select 1 from fairlane.jobs where id = $1 for update", jobs[1])
        handled = await store.run(operators.cancel_jobs(jobs, note))
        assert [each.skipped for each in handled] == [None, BUSY, None]
    report = await app.operations.cancel_jobs(jobs, actor="ann")
    assert [each.job for each in report.done] == [jobs[1]]
