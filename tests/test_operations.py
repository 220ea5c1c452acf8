"""How operators name what they mean, how differences are told, and what an app can do."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from socket import gethostname

import pytest

from fairlane import App
from fairlane.clock import SECOND, ManualClock, as_datetime
from fairlane.errors import ConfigurationError, InvalidOverride
from fairlane.operations import JobFilter
from fairlane.operations.requests import find_limit, scope_of
from fairlane.operations.section import Intent
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.policy.policy import differences

POLICY = Policy(
    "webhooks",
    fair=Fair(by="account"),
    limits=(Concurrency(5, by="account"), Rate(100, per="1m", by="endpoint"), Concurrency(50)),
)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: Intent(actor=" "), "set FAIRLANE_ACTOR"),
        (lambda: Intent(actor="ada", expires_in=1, expires_at=datetime(2030, 1, 1, tzinfo=UTC)), "not both"),
        (lambda: Intent(actor="ada", reason="x" * 2_000), "at most 1,000"),
    ],
)
def test_an_intent_that_makes_no_sense_is_refused(given: Callable[[], Intent], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        given()


@pytest.mark.parametrize(
    ("text", "keys", "name"),
    [
        ("concurrency:account", {}, "concurrency:account"),
        ("Concurrency:account", {}, "concurrency:account"),
        ("account", {}, "concurrency:account"),
        ("concurrency", {"account": "acme"}, "concurrency:account"),
        ("concurrency", {}, "concurrency:"),
        ("rate", {}, "rate/60s:endpoint"),
        ("rate/1m", {}, "rate/60s:endpoint"),
        ("rate:endpoint", {}, "rate/60s:endpoint"),
        ("rate/1m:endpoint", {}, "rate/60s:endpoint"),
    ],
)
def test_a_limit_is_found_by_its_name_its_kind_or_its_keys(text: str, keys: dict[str, str], name: str) -> None:
    assert find_limit(POLICY, text, scope_of(keys)).name == name


@pytest.mark.parametrize(
    ("text", "keys", "said"),
    [
        ("concurrency", {"region": "eu"}, "may be any of concurrency:account, concurrency:;"),
        ("breaker", {}, "its limits: concurrency:account, rate/60s:endpoint, concurrency:"),
        ("rate/soon", {}, "has no limit 'rate/soon'"),
    ],
)
def test_a_limit_that_is_not_clear_is_refused_with_the_names_there_are(
    text: str, keys: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidOverride, match=said):
        find_limit(POLICY, text, scope_of(keys))


def test_twins_are_told_apart_by_their_numbers() -> None:
    twins = Policy("q", limits=(Concurrency(5, by="account"), Concurrency(7, by="account")))
    assert find_limit(twins, "concurrency:account#2", ()).limit == Concurrency(7, by="account")


def test_two_policies_that_differ_only_in_order_say_so() -> None:
    one = Policy("q", limits=(Concurrency(5), Concurrency(2, by="a")), keys=("a", "b"))
    assert differences(one, one) == ()
    (found,) = differences(one, Policy("q", limits=(Concurrency(2, by="a"), Concurrency(5)), keys=("a", "b")))
    assert found.part == "the order of limits"
    slower = Policy("q", limits=one.limits, keys=("a",), priority_step=SECOND, fair=Fair(by="a"))
    assert [each.part for each in differences(one, slower)] == ["keys", "priority_step", "fair"]


def test_the_task_is_a_key_that_can_be_given_by_its_own_name() -> None:
    assert scope_of({"account": 42}, "shop.deliver") == (("account", "42"), ("task", "shop.deliver"))
    with pytest.raises(ConfigurationError, match="given twice"):
        scope_of({"task": "shop.refund"}, "shop.deliver")


@pytest.fixture
async def app() -> AsyncIterator[App]:
    app = App("sqlite://", clock=ManualClock())
    app.queue("webhooks", limits=[Concurrency(5, by="account")], fair=Fair(by="account"))
    async with app:
        yield app


async def test_an_app_acts_in_the_name_of_whoever_runs_it(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRLANE_ACTOR", "deploy")
    await app.operations.queues.pause("webhooks", reason="a deploy")
    monkeypatch.delenv("FAIRLANE_ACTOR")
    monkeypatch.setenv("LOGNAME", "ada")
    await app.operations.queues.resume("webhooks")
    await app.operations.queues.suspend("webhooks", actor="bob", expires_in="10m")
    third, second, first = (await app.operations.audit.list()).entries
    assert (first.actor, second.actor, third.actor) == ("deploy", f"ada@{gethostname()}", "bob")


async def test_every_change_of_an_app_can_have_an_end_and_a_dry_run(app: App) -> None:
    operations, acme = app.operations, {"account": "acme"}
    until = datetime(2030, 1, 1, 8, tzinfo=UTC)
    for dry_run in (True, False):
        changes = [
            await operations.queues.pause("webhooks", keys=acme, expires_at=until, dry_run=dry_run),
            await operations.limits.set("webhooks", "account", 2, keys=acme, expires_at=until, dry_run=dry_run),
            await operations.weights.set("webhooks", 2, keys=acme, expires_at=until, dry_run=dry_run),
            await operations.weights.boost("webhooks", 3, keys=acme, expires_at=until, dry_run=dry_run),
            await operations.queues.suspend("webhooks", expires_at=until, dry_run=dry_run),
        ]
        assert [as_datetime(each.after[0].expires_at or 0) for each in changes] == [until] * 5
        assert len(await operations.overrides.list()) == (0 if dry_run else 5)
    for dry_run in (True, False):
        await operations.queues.resume("webhooks", keys=acme, dry_run=dry_run)
        await operations.limits.clear("webhooks", "account", keys=acme, dry_run=dry_run)
        await operations.weights.clear("webhooks", keys=acme, dry_run=dry_run)
        await operations.queues.unsuspend("webhooks", dry_run=dry_run)
        assert len(await operations.overrides.list("webhooks")) == (5 if dry_run else 0)


async def test_an_app_looks_at_its_policies_and_its_jobs(app: App) -> None:
    @app.task(queue="webhooks")
    async def deliver(account: str) -> None: ...

    operations = app.operations
    job = await deliver.using(delay="1h").enqueue("acme")
    assert [each.id for each in (await operations.jobs.list(JobFilter(queue="webhooks"))).jobs] == [job.id]
    assert len((await operations.jobs.retry([job.id])).done) == 1
    assert len((await operations.jobs.force([job.id])).done) == 1
    assert len((await operations.jobs.cancel([job.id])).done) == 1
    assert len((await operations.jobs.replay([job.id], delay="1h")).done) == 1
    assert str((await operations.jobs.show(job.id)).record.state) == "scheduled"
    assert len((await operations.jobs.purge([job.id])).skipped) == 1
    assert [each.is_drift for each in await operations.policies.diff()] == [False]
    assert [each.version for each in await operations.policies.show(["webhooks"])] == [1]
    assert [each.is_changed for each in await operations.policies.apply()] == [False]
    assert await operations.diagnose() == []


def test_operations_are_asked_for_from_code_that_is_not_async() -> None:
    app = App("sqlite://")
    app.queue("webhooks")
    try:
        assert len(app.run_blocking(app.operations.queues.pause("webhooks")).after) == 1
    finally:
        app.close_sync()
