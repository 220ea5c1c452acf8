"""What operators do with a queue: overrides, policies, the audit, the doctor. On every store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from fairlane.clock import ManualClock, as_datetime
from fairlane.errors import ConfigurationError, InvalidPolicy, UnknownQueue
from fairlane.job import State
from fairlane.operations import Change, Finding, document_of
from fairlane.operations import diagnosis as diagnosis_queues
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.scheduler.settlement import Died
from fairlane.store import operators, records
from fairlane.store.protocol import Store
from tests.store.harness import (
    SECOND,
    WORKER,
    by_key,
    claim,
    diagnosed,
    finish,
    given_jobs,
    ids,
    new_jobs,
    operations_on,
    serving,
    state_of,
)

POLICY = Policy(
    "webhooks",
    fair=Fair(by="account", charge="count"),
    limits=(Concurrency(5, by="account"), Rate(100, per="1m", by="endpoint"), Concurrency(50)),
)
ADA: dict[str, Any] = {"actor": "ada", "reason": "an incident"}
DRY: dict[str, Any] = {"actor": "ada", "dry_run": True}
ACME = {"account": "acme", "endpoint": "api.acme.com"}

OF_ACME: dict[str, Any] = {"keys": {"account": "acme"}}

Act = Callable[[Store, dict[str, Any]], Awaitable[Change]]
CHANGES: dict[str, Act] = {
    "pause": lambda store, who: operations_on(store).queues.pause("webhooks", **who),
    "pause a key": lambda store, who: operations_on(store).queues.pause("webhooks", **OF_ACME, **who),
    "pause a task": lambda store, who: operations_on(store).queues.pause("webhooks", task="deliver", **who),
    "limit set": lambda store, who: operations_on(store).limits.set("webhooks", "concurrency", 2, **OF_ACME, **who),
    "weight set": lambda store, who: operations_on(store).weights.set("webhooks", 3, **OF_ACME, **who),
    "boost": lambda store, who: operations_on(store).weights.boost("webhooks", 4, **OF_ACME, **who),
    "suspend": lambda store, who: operations_on(store).queues.suspend("webhooks", **who),
}
UNDO: dict[str, Act] = {
    "pause": lambda store, who: operations_on(store).queues.resume("webhooks", **who),
    "pause a key": lambda store, who: operations_on(store).queues.resume("webhooks", **OF_ACME, **who),
    "pause a task": lambda store, who: operations_on(store).queues.resume("webhooks", task="deliver", **who),
    "limit set": lambda store, who: operations_on(store).limits.clear("webhooks", "account", **OF_ACME, **who),
    "weight set": lambda store, who: operations_on(store).weights.clear("webhooks", **OF_ACME, **who),
    "boost": lambda store, who: operations_on(store).weights.clear("webhooks", **OF_ACME, **who),
    "suspend": lambda store, who: operations_on(store).queues.unsuspend("webhooks", **who),
}


@pytest.fixture(autouse=True)
async def declared(store: Store) -> None:
    await store.declare(POLICY)


async def state_of_queue(store: Store) -> tuple[Any, ...]:
    """All that a look can see of a queue and that an operation could change."""
    found = await store.policy("webhooks")
    assert found is not None
    return (
        found.policy.overrides.all,
        found.version,
        found.policy.digest,
        await store.run(records.audit()),
        await store.counts("webhooks"),
    )


@pytest.mark.parametrize("name", CHANGES)
async def test_o02_a_change_and_its_undoing_are_recorded_with_who_when_what_and_why(
    store: Store, clock: ManualClock, name: str
) -> None:
    done = await CHANGES[name](store, ADA)
    (override,) = done.after
    assert (done.before, done.remaining) == ((), (override,))
    assert (override.set_by, override.reason, override.set_at) == ("ada", "an incident", clock.now())
    clock.advance("1m")
    undone = await UNDO[name](store, {"actor": "bob"})
    assert (undone.before, undone.after, undone.remaining) == ((override,), (), ())
    newest, first = (await operations_on(store).audit.list("webhooks")).entries
    assert (first.actor, first.action, first.reason) == ("ada", done.action, "an incident")
    assert (newest.actor, newest.action, newest.at) == ("bob", undone.action, clock.now())
    assert document_of(first)["after"] == document_of(newest)["before"]
    assert document_of(done)["after"][0]["set_by"] == "ada"


@pytest.mark.parametrize("name", CHANGES)
async def test_o13_a_dry_run_says_what_would_change_and_changes_nothing(store: Store, name: str) -> None:
    await given_jobs(store, POLICY, ACME, 2)
    before = await state_of_queue(store)
    would = await CHANGES[name](store, DRY)
    assert (would.is_dry_run, len(would.after), would.before) == (True, 1, ())
    assert await state_of_queue(store) == before
    await CHANGES[name](store, ADA)
    before = await state_of_queue(store)
    would = await UNDO[name](store, DRY)
    assert (len(would.before), would.after, would.remaining) == (1, (), ())
    assert await state_of_queue(store) == before


@pytest.mark.parametrize("name", UNDO)
async def test_ending_what_is_not_set_changes_nothing_and_leaves_no_entry(store: Store, name: str) -> None:
    before = await state_of_queue(store)
    assert (await UNDO[name](store, ADA)).is_empty
    assert await state_of_queue(store) == before


async def test_setting_again_replaces_and_says_what_it_was(store: Store) -> None:
    await operations_on(store).limits.set("webhooks", "concurrency:account", 2, keys={"account": "acme"}, **ADA)
    again = await operations_on(store).limits.set("webhooks", "concurrency:account", 8, keys={"account": "acme"}, **ADA)
    assert [(each.value, other.value) for each, other in zip(again.before, again.after, strict=True)] == [(2, 8)]
    await given_jobs(store, POLICY, ACME, 20)
    assert len(await claim(store, "webhooks", 20)) == 8


async def test_what_has_a_time_ends_by_itself(store: Store, clock: ManualClock) -> None:
    await operations_on(store).queues.pause("webhooks", actor="ada", expires_in="1m")
    until = datetime(2030, 1, 1, 0, 2, tzinfo=UTC)
    await operations_on(store).queues.pause("webhooks", keys={"account": "acme"}, actor="ada", expires_at=until)
    await given_jobs(store, POLICY, ACME, 2)
    await given_jobs(store, POLICY, {"account": "bolt", "endpoint": "x"}, 2)
    assert await claim(store, "webhooks", 9) == []
    clock.advance("1m")
    (_, stale) = sorted(await operations_on(store).overrides.list("webhooks"), key=lambda each: each.no_effect or "")
    assert "its time has come" in (stale.no_effect or "")
    assert by_key(await claim(store, "webhooks", 9)) == {"bolt": 2}
    clock.advance("1m")
    assert by_key(await claim(store, "webhooks", 9)) == {"acme": 2}
    assert await operations_on(store).overrides.list() == []


async def test_a_time_that_has_passed_is_refused_and_nothing_is_set(store: Store, clock: ManualClock) -> None:
    with pytest.raises(ConfigurationError, match="ended already"):
        await operations_on(store).queues.pause("webhooks", actor="ada", expires_at=as_datetime(clock.now()))
    assert await operations_on(store).overrides.list() == []


async def test_an_unknown_queue_is_named_with_the_one_that_was_meant(store: Store) -> None:
    with pytest.raises(UnknownQueue, match="did you mean 'webhooks'"):
        await operations_on(store).queues.pause("webhook", **ADA)


async def test_limits_are_listed_with_what_is_declared_what_is_in_force_and_who_set_it(store: Store) -> None:
    await operations_on(store).limits.set("webhooks", "account", 7, keys={"account": 42}, **ADA)
    await operations_on(store).limits.set("webhooks", "concurrency", 40, **ADA)
    rows = {(each.name, each.scope): each for each in await operations_on(store).limits.list("webhooks")}
    assert {key: (repr(each.declared), repr(each.in_force)) for key, each in rows.items()} == {
        ("concurrency:account", ()): ("Concurrency(5, by='account')", "Concurrency(5, by='account')"),
        ("concurrency:account", (("account", "42"),)): (
            "Concurrency(5, by='account')",
            "Concurrency(7, by='account')",
        ),
        ("rate/60s:endpoint", ()): (repr(POLICY.limits[1]), repr(POLICY.limits[1])),
        ("concurrency:", ()): ("Concurrency(50)", "Concurrency(40)"),
    }
    described = document_of(rows["concurrency:account", (("account", "42"),)])
    assert (described["in_force"]["max"], described["override"]["set_by"]) == (7, "ada")
    await operations_on(store).queues.suspend("webhooks", **ADA)
    assert all(each.is_suspended for each in await operations_on(store).limits.list("webhooks"))
    found = {each.override.kind: each.no_effect for each in await operations_on(store).overrides.list("webhooks")}
    assert found == {"limit": "every limit of the queue is suspended", "suspend": None}


async def test_an_override_whose_limit_is_gone_says_so_and_can_still_be_cleared(store: Store) -> None:
    await operations_on(store).limits.set("webhooks", "account", 7, keys={"account": "acme"}, **ADA)
    bare = Policy("webhooks", fair=POLICY.fair, keys=("account", "endpoint"))
    (change,) = await operations_on(store, {"webhooks": bare}).policies.apply(**DRY)
    assert [each.override.describe() for each in change.without_place] == ["concurrency:account is 7 for account=acme"]
    (change,) = await operations_on(store, {"webhooks": bare}).policies.apply(**ADA)
    assert [each.override.limit for each in change.without_place] == ["concurrency:account"]
    (listed,) = await operations_on(store).overrides.list("webhooks")
    assert "has no limit named 'concurrency:account'" in (listed.no_effect or "")
    cleared = await operations_on(store).limits.clear(
        "webhooks", "concurrency:account", keys={"account": "acme"}, **ADA
    )
    assert len(cleared.before) == 1


async def test_policies_are_shown_compared_and_applied(store: Store) -> None:
    other = Policy(
        "webhooks", fair=POLICY.fair, limits=(Concurrency(9, by="account"), Concurrency(50), Rate(1, per="1s"))
    )
    declared = {"webhooks": other, "email": Policy("email")}
    email, webhooks = await operations_on(store, declared).policies.show()
    assert (email.policy, email.is_drift, document_of(email)["version"]) == (None, True, 0)
    assert [each.describe() for each in webhooks.drift] == [
        "concurrency:account: Concurrency(5, by='account') becomes Concurrency(9, by='account')",
        "rate/60s:endpoint: Rate(100, per='60s', burst=100, by='endpoint') is removed",
        "rate/1s:: Rate(1, per='1s', burst=1) is added",
    ]
    before = await state_of_queue(store)
    would = await operations_on(store, declared).policies.apply(**DRY)
    assert [(each.queue, each.is_changed, each.version) for each in would] == [
        ("webhooks", True, 1),
        ("email", True, 0),
    ]
    assert await state_of_queue(store) == before
    assert await store.run(records.queues()) == ["webhooks"]
    done = await operations_on(store, declared).policies.apply(["webhooks"], **ADA)
    assert [(each.is_changed, each.version) for each in done] == [(True, 2)]
    assert document_of(done[0])["changes"][0]["part"] == "concurrency:account"
    (entry,) = (await operations_on(store).audit.list()).entries
    assert (entry.actor, entry.action, entry.reason) == ("ada", "policy apply", "an incident")
    await operations_on(store, declared).policies.apply(["email"], **ADA)
    (first,) = (await operations_on(store).audit.list("email")).entries
    assert (first.target, first.before, document_of(first)["after"]["queue"]) == ("version 1", None, "email")
    (same,) = await operations_on(store, {"webhooks": other}).policies.diff()
    assert (same.is_drift, same.drift) == (False, ())
    (again,) = await operations_on(store, {"webhooks": other}).policies.apply(**ADA)
    assert (again.is_changed, again.version) == (False, 2)
    with pytest.raises(UnknownQueue, match="declares no queue 'emial'"):
        await operations_on(store, declared).policies.diff(["emial"])


async def test_a_policy_that_waiting_jobs_lack_a_key_for_says_which_and_needs_consent(store: Store) -> None:
    await given_jobs(store, POLICY, ACME, 3)
    other = {"webhooks": Policy("webhooks", fair=POLICY.fair, limits=(Concurrency(1, by="region"),))}
    (would,) = await operations_on(store, other).policies.apply(**DRY)
    assert would.new_keys == ("region",)
    with pytest.raises(InvalidPolicy, match="3 waiting jobs do not carry the key 'region'"):
        await operations_on(store, other).policies.apply(**ADA)
    (done,) = await operations_on(store, other).policies.apply(accept_missing_keys=True, **ADA)
    assert done.is_changed


async def test_the_audit_is_listed_page_by_page(store: Store) -> None:
    for number in range(5):
        await operations_on(store).limits.set("webhooks", "concurrency", 10 + number, **ADA)
    first = await operations_on(store).audit.list(limit=3)
    rest = await operations_on(store).audit.list(limit=3, before=first.before)
    told = [document_of(each)["after"][0]["value"] for each in (*first.entries, *rest.entries)]
    assert told == [14, 13, 12, 11, 10]
    assert rest.before is None
    assert (await operations_on(store).audit.list("email")).entries == ()
    with pytest.raises(ConfigurationError, match="limit=0"):
        await operations_on(store).audit.list(limit=0)


async def test_o02_every_action_on_jobs_is_recorded_in_its_own_transaction(store: Store) -> None:
    (later,) = await given_jobs(store, POLICY, ACME, delay=SECOND)
    assert (await operations_on(store).jobs.force([later], actor="ada", dry_run=True)).is_dry_run
    assert (await operations_on(store).audit.list()).entries == ()
    await operations_on(store).jobs.retry([later], actor="ada", reason="now")
    await finish(store, await claim(store, "webhooks", 1), Died("over"))
    await operations_on(store).jobs.replay([later], actor="ada")
    await operations_on(store).jobs.force([later], actor="ada")
    await operations_on(store).jobs.cancel([later], actor="ada", reason="no more")
    await operations_on(store).jobs.cancel([later, uuid4()], actor="ada")
    await operations_on(store).jobs.purge([later], actor="ada")
    entries = (await operations_on(store).audit.list()).entries
    assert [each.action for each in entries] == ["purge", "cancel", "force", "replay", "retry"]
    assert [each.reason for each in entries] == ["", "no more", "", "", "now"]
    assert {each.queue for each in entries} == {"webhooks"}
    assert document_of(entries[1])["before"] == {str(later): "ready"}


async def test_a_cancel_of_what_runs_is_recorded_and_one_without_a_note_is_not(store: Store) -> None:
    first, second = await given_jobs(store, POLICY, ACME, 2)
    await claim(store, "webhooks", 2)
    assert await store.cancel(first) is State.RUNNING
    await operations_on(store).jobs.cancel([second], actor="ada")
    (entry,) = (await operations_on(store).audit.list()).entries
    assert document_of(entry)["before"] == {str(second): "running"}


async def test_a_forced_job_starts_although_its_key_is_paused(store: Store) -> None:
    jobs = await given_jobs(store, POLICY, ACME, 3)
    await operations_on(store).queues.pause("webhooks", keys={"account": "acme"}, **ADA)
    report = await operations_on(store).jobs.force([jobs[1], jobs[1]], actor="ada")
    assert [each.job for each in report.done] == [jobs[1]]
    assert ids(await claim(store, "webhooks", 9)) == [jobs[1]]
    assert await state_of(store, jobs[0]) is State.READY


# The doctor.


def checks(findings: list[Finding]) -> list[str]:
    return [each.check for each in findings]


async def test_the_doctor_of_a_healthy_database_finds_nothing_and_changes_nothing(
    store: Store, clock: ManualClock
) -> None:
    await serving(store, clock, "webhooks")
    await given_jobs(store, POLICY, ACME, 3)
    running = await claim(store, "webhooks", 1)
    before = await state_of_queue(store)
    assert await diagnosed(store, {"webhooks": POLICY}) == []
    assert await state_of_queue(store) == before
    # What ended leaves a lane event behind, and nothing that a worker is needed for.
    await finish(store, running + await claim(store, "webhooks", 9))
    assert await diagnosed(store) == []


async def test_the_doctor_tells_drift_and_a_queue_that_the_database_does_not_know(store: Store) -> None:
    other = Policy("webhooks", fair=POLICY.fair, limits=(Concurrency(9, by="account"), *POLICY.limits[1:]))
    findings = await diagnosed(store, {"webhooks": other, "email": Policy("email")})
    assert [(each.queue, each.check) for each in findings] == [("email", "drift"), ("webhooks", "drift")]
    assert "Concurrency(5, by='account') becomes Concurrency(9, by='account')" in findings[1].message
    assert "policy apply" in findings[1].remedy


async def test_a19_the_doctor_reports_a_named_key_that_no_job_carries(store: Store) -> None:
    named = Policy(
        "named",
        fair=Fair(by="account", weight={"acme": 3, "acmee": 2}),
        limits=(Concurrency({"acme": 5, "globx": 1}, by="account"), Rate({"acmé": 1}, per="1m", by="account")),
    )
    await store.declare(named)
    await given_jobs(store, named, {"account": "acme"}, 1)
    await operations_on(store).limits.set("webhooks", "account", 1, keys={"account": "bolt"}, **ADA)
    await operations_on(store).queues.pause("webhooks", keys={"endpoint": "x"}, **ADA)
    await operations_on(store).queues.pause("webhooks", task="deliver", **ADA)
    await given_jobs(store, POLICY, ACME, 1)
    found = [each for each in await diagnosed(store) if each.check == "key that no job carries"]
    assert [each.message.partition(", and")[0] for each in found] == [
        "Fair gives account=acmee a weight",
        "concurrency:account names account=globx",
        "rate/60s:account names account=acmé",
        "an override says that concurrency:account is 1 for account=bolt",
        "an override says that endpoint=x is paused",
    ]


async def test_a_key_is_known_from_its_flow_when_its_jobs_are_gone(store: Store) -> None:
    jobs = await given_jobs(store, POLICY, ACME, 1)
    await finish(store, await claim(store, "webhooks", 1))
    await store.run(operators.purge(jobs))
    await operations_on(store).weights.boost("webhooks", 2, keys={"account": "acme"}, **ADA)
    await operations_on(store).limits.set("webhooks", "rate", 2, keys={"endpoint": "api.acme.com"}, **ADA)
    assert await diagnosed(store) == []


async def test_the_doctor_reports_an_override_without_effect_once(store: Store) -> None:
    await operations_on(store).limits.set("webhooks", "account", 1, keys={"account": "bolt"}, **ADA)
    await operations_on(store, {"webhooks": Policy("webhooks")}).policies.apply(**ADA)
    (finding,) = await diagnosed(store)
    assert finding.check == "override without effect"
    assert "has no limit named" in finding.message


async def test_what_an_operator_has_suspended_or_paused_by_priority_is_nothing_wrong(store: Store) -> None:
    await given_jobs(store, POLICY, ACME, 1)
    await claim(store, "webhooks", 1)
    await operations_on(store).limits.set("webhooks", "account", 1, keys={"account": "acme"}, **ADA)
    await operations_on(store).queues.suspend("webhooks", **ADA)
    await operations_on(store).queues.pause("webhooks", keys={"priority": 50}, **ADA)
    assert await diagnosed(store) == []


async def test_the_doctor_says_that_no_worker_serves_a_queue_where_jobs_wait(store: Store, clock: ManualClock) -> None:
    await given_jobs(store, POLICY, ACME, 1)
    assert checks(await diagnosed(store)) == ["no worker"]
    await operations_on(store).queues.pause("webhooks", **ADA)
    assert await claim(store, "webhooks", 1) == []
    assert await diagnosed(store) == []
    await operations_on(store).queues.resume("webhooks", **ADA)
    await operations_on(store).queues.pause("webhooks", keys={"account": "acme"}, **ADA)
    await serving(store, clock, "webhooks")
    assert await diagnosed(store) == []
    await store.run(records.report(WORKER.id, None))
    assert checks(await diagnosed(store)) == ["no worker"]


async def test_the_doctor_says_that_bells_pile_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis_queues, "MANY_EVENTS", 2)
    for _ in range(3):
        await given_jobs(store, POLICY, ACME, 1)
    assert checks(await diagnosed(store)) == ["lane events pile up", "no worker"]


async def test_a_dry_run_of_a_policy_is_refused_where_applying_it_would_be(store: Store, clock: ManualClock) -> None:
    policy = Policy("orders", limits=(Concurrency(5, by="account"),))
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "acme"}, 3)
    await claim(store, "orders", 1)
    other = Policy("orders", limits=(Concurrency(5, by="region"),))
    with pytest.raises(InvalidPolicy, match="2 waiting jobs do not carry the key 'region'"):
        await operations_on(store, {"orders": other}).policies.apply(**DRY)
    (change,) = await operations_on(store, {"orders": other}).policies.apply(accept_missing_keys=True, **DRY)
    assert change.is_dry_run


async def test_a_task_can_be_paused_by_the_last_part_of_its_name(store: Store, clock: ManualClock) -> None:
    policy = Policy("orders")
    await store.declare(policy)
    await store.enqueue(new_jobs(policy, task="shop.deliver"))
    change = await operations_on(store).queues.pause("orders", task="deliver", actor="ada")
    assert change.after[0].scope == (("task", "shop.deliver"),)
    assert await claim(store, "orders", 5) == []
    await operations_on(store).queues.resume("orders", task="deliver", actor="ada")
    assert len(await claim(store, "orders", 5)) == 1
