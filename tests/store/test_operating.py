"""What operators do with a queue: overrides, policies, the audit, the doctor. On every store."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import pytest

from fairlane.clock import ManualClock, as_instant
from fairlane.errors import ConfigurationError, InvalidPolicy, UnknownQueue
from fairlane.job import State
from fairlane.operations import (
    Change,
    Finding,
    Intent,
    apply_policies,
    boost,
    cancel_jobs,
    clear_limit,
    clear_weight,
    describe_change,
    describe_entry,
    describe_limit,
    describe_policy,
    describe_policy_change,
    diff_policies,
    force_jobs,
    list_audit,
    list_limits,
    list_overrides,
    pause,
    purge_jobs,
    replay_jobs,
    resume,
    retry_jobs,
    set_limit,
    set_weight,
    show_policies,
    suspend,
    unsuspend,
)
from fairlane.operations import diagnosis as diagnosis_queues
from fairlane.policy import Concurrency, Fair, Policy, Rate
from fairlane.scheduler.settlement import Died
from fairlane.store import operators, records
from fairlane.store.protocol import Store
from tests.store.harness import (
    MINUTE,
    SECOND,
    WORKER,
    by_key,
    claim,
    diagnosed,
    finish,
    given_jobs,
    ids,
    new_jobs,
    serving,
    state_of,
)

POLICY = Policy(
    "webhooks",
    fair=Fair(by="account", charge="count"),
    limits=(Concurrency(5, by="account"), Rate(100, per="1m", by="endpoint"), Concurrency(50)),
)
ADA = Intent(actor="ada", reason="an incident")
DRY = Intent(actor="ada", dry_run=True)
ACME = {"account": "acme", "endpoint": "api.acme.com"}

Act = Callable[[Store, Intent], Awaitable[Change]]
CHANGES: dict[str, Act] = {
    "pause": lambda store, intent: pause(store, "webhooks", intent),
    "pause a key": lambda store, intent: pause(store, "webhooks", intent, keys={"account": "acme"}),
    "pause a task": lambda store, intent: pause(store, "webhooks", intent, task="deliver"),
    "limit set": lambda store, intent: set_limit(store, "webhooks", "concurrency", 2, intent, keys={"account": "acme"}),
    "weight set": lambda store, intent: set_weight(store, "webhooks", 3, intent, keys={"account": "acme"}),
    "boost": lambda store, intent: boost(store, "webhooks", 4, intent, keys={"account": "acme"}),
    "suspend": lambda store, intent: suspend(store, "webhooks", intent),
}
UNDO: dict[str, Act] = {
    "pause": lambda store, intent: resume(store, "webhooks", intent),
    "pause a key": lambda store, intent: resume(store, "webhooks", intent, keys={"account": "acme"}),
    "pause a task": lambda store, intent: resume(store, "webhooks", intent, task="deliver"),
    "limit set": lambda store, intent: clear_limit(store, "webhooks", "account", intent, keys={"account": "acme"}),
    "weight set": lambda store, intent: clear_weight(store, "webhooks", intent, keys={"account": "acme"}),
    "boost": lambda store, intent: clear_weight(store, "webhooks", intent, keys={"account": "acme"}),
    "suspend": lambda store, intent: unsuspend(store, "webhooks", intent),
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
    undone = await UNDO[name](store, Intent(actor="bob"))
    assert (undone.before, undone.after, undone.remaining) == ((override,), (), ())
    newest, first = (await list_audit(store, "webhooks")).entries
    assert (first.actor, first.action, first.reason) == ("ada", done.action, "an incident")
    assert (newest.actor, newest.action, newest.at) == ("bob", undone.action, clock.now())
    assert describe_entry(first)["after"] == describe_entry(newest)["before"]
    assert describe_change(done)["after"][0]["set_by"] == "ada"


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
    await set_limit(store, "webhooks", "concurrency:account", 2, ADA, keys={"account": "acme"})
    again = await set_limit(store, "webhooks", "concurrency:account", 8, ADA, keys={"account": "acme"})
    assert [(each.value, other.value) for each, other in zip(again.before, again.after, strict=True)] == [(2, 8)]
    await given_jobs(store, POLICY, ACME, 20)
    assert len(await claim(store, "webhooks", 20)) == 8


async def test_what_has_a_time_ends_by_itself(store: Store, clock: ManualClock) -> None:
    await pause(store, "webhooks", Intent(actor="ada", expires_in=MINUTE))
    until = as_instant(datetime(2030, 1, 1, 0, 2, tzinfo=UTC))
    await pause(store, "webhooks", Intent(actor="ada", expires_at=until), keys={"account": "acme"})
    await given_jobs(store, POLICY, ACME, 2)
    await given_jobs(store, POLICY, {"account": "bolt", "endpoint": "x"}, 2)
    assert await claim(store, "webhooks", 9) == []
    clock.advance("1m")
    (_, stale) = sorted(await list_overrides(store, "webhooks"), key=lambda each: each.no_effect or "")
    assert "its time has come" in (stale.no_effect or "")
    assert by_key(await claim(store, "webhooks", 9)) == {"bolt": 2}
    clock.advance("1m")
    assert by_key(await claim(store, "webhooks", 9)) == {"acme": 2}
    assert await list_overrides(store) == []


async def test_a_time_that_has_passed_is_refused_and_nothing_is_set(store: Store, clock: ManualClock) -> None:
    with pytest.raises(ConfigurationError, match="ended already"):
        await pause(store, "webhooks", Intent(actor="ada", expires_at=clock.now()))
    assert await list_overrides(store) == []


async def test_an_unknown_queue_is_named_with_the_one_that_was_meant(store: Store) -> None:
    with pytest.raises(UnknownQueue, match="did you mean 'webhooks'"):
        await pause(store, "webhook", ADA)


async def test_limits_are_listed_with_what_is_declared_what_is_in_force_and_who_set_it(store: Store) -> None:
    await set_limit(store, "webhooks", "account", 7, ADA, keys={"account": 42})
    await set_limit(store, "webhooks", "concurrency", 40, ADA)
    rows = {(each.name, each.scope): each for each in await list_limits(store, "webhooks")}
    assert {key: (repr(each.declared), repr(each.in_force)) for key, each in rows.items()} == {
        ("concurrency:account", ()): ("Concurrency(5, by='account')", "Concurrency(5, by='account')"),
        ("concurrency:account", (("account", "42"),)): (
            "Concurrency(5, by='account')",
            "Concurrency(7, by='account')",
        ),
        ("rate/60s:endpoint", ()): (repr(POLICY.limits[1]), repr(POLICY.limits[1])),
        ("concurrency:", ()): ("Concurrency(50)", "Concurrency(40)"),
    }
    described = describe_limit(rows["concurrency:account", (("account", "42"),)])
    assert (described["in_force"]["max"], described["override"]["set_by"]) == (7, "ada")
    await suspend(store, "webhooks", ADA)
    assert all(each.is_suspended for each in await list_limits(store, "webhooks"))
    found = {each.override.kind: each.no_effect for each in await list_overrides(store, "webhooks")}
    assert found == {"limit": "every limit of the queue is suspended", "suspend": None}


async def test_an_override_whose_limit_is_gone_says_so_and_can_still_be_cleared(store: Store) -> None:
    await set_limit(store, "webhooks", "account", 7, ADA, keys={"account": "acme"})
    bare = Policy("webhooks", fair=POLICY.fair, keys=("account", "endpoint"))
    (change,) = await apply_policies(store, {"webhooks": bare}, DRY)
    assert [each.override.describe() for each in change.without_place] == ["concurrency:account is 7 for account=acme"]
    (change,) = await apply_policies(store, {"webhooks": bare}, ADA)
    assert [each.override.limit for each in change.without_place] == ["concurrency:account"]
    (listed,) = await list_overrides(store, "webhooks")
    assert "has no limit named 'concurrency:account'" in (listed.no_effect or "")
    cleared = await clear_limit(store, "webhooks", "concurrency:account", ADA, keys={"account": "acme"})
    assert len(cleared.before) == 1


async def test_policies_are_shown_compared_and_applied(store: Store) -> None:
    other = Policy(
        "webhooks", fair=POLICY.fair, limits=(Concurrency(9, by="account"), Concurrency(50), Rate(1, per="1s"))
    )
    declared = {"webhooks": other, "email": Policy("email")}
    email, webhooks = await show_policies(store, declared)
    assert (email.policy, email.is_drift, describe_policy(email)["version"]) == (None, True, 0)
    assert [each.describe() for each in webhooks.drift] == [
        "concurrency:account: Concurrency(5, by='account') becomes Concurrency(9, by='account')",
        "rate/60s:endpoint: Rate(100, per='60s', burst=100, by='endpoint') is removed",
        "rate/1s:: Rate(1, per='1s', burst=1) is added",
    ]
    before = await state_of_queue(store)
    would = await apply_policies(store, declared, DRY)
    assert [(each.queue, each.is_changed, each.version) for each in would] == [
        ("webhooks", True, 1),
        ("email", True, 0),
    ]
    assert await state_of_queue(store) == before
    assert await store.run(records.queues()) == ["webhooks"]
    done = await apply_policies(store, declared, ADA, ["webhooks"])
    assert [(each.is_changed, each.version) for each in done] == [(True, 2)]
    assert describe_policy_change(done[0])["changes"][0]["part"] == "concurrency:account"
    (entry,) = (await list_audit(store)).entries
    assert (entry.actor, entry.action, entry.reason) == ("ada", "policy apply", "an incident")
    await apply_policies(store, declared, ADA, ["email"])
    (first,) = (await list_audit(store, "email")).entries
    assert (first.target, first.before, describe_entry(first)["after"]["queue"]) == ("version 1", None, "email")
    (same,) = await diff_policies(store, {"webhooks": other})
    assert (same.is_drift, same.drift) == (False, ())
    (again,) = await apply_policies(store, {"webhooks": other}, ADA)
    assert (again.is_changed, again.version) == (False, 2)
    with pytest.raises(UnknownQueue, match="declares no queue 'emial'"):
        await diff_policies(store, declared, ["emial"])


async def test_a_policy_that_waiting_jobs_lack_a_key_for_says_which_and_needs_consent(store: Store) -> None:
    await given_jobs(store, POLICY, ACME, 3)
    other = {"webhooks": Policy("webhooks", fair=POLICY.fair, limits=(Concurrency(1, by="region"),))}
    (would,) = await apply_policies(store, other, DRY)
    assert would.new_keys == ("region",)
    with pytest.raises(InvalidPolicy, match="3 waiting jobs do not carry the key 'region'"):
        await apply_policies(store, other, ADA)
    (done,) = await apply_policies(store, other, ADA, accept_missing_keys=True)
    assert done.is_changed


async def test_the_audit_is_listed_page_by_page(store: Store) -> None:
    for number in range(5):
        await set_limit(store, "webhooks", "concurrency", 10 + number, ADA)
    first = await list_audit(store, limit=3)
    rest = await list_audit(store, limit=3, before=first.before)
    told = [describe_entry(each)["after"][0]["value"] for each in (*first.entries, *rest.entries)]
    assert told == [14, 13, 12, 11, 10]
    assert rest.before is None
    assert (await list_audit(store, "email")).entries == ()
    with pytest.raises(ConfigurationError, match="limit=0"):
        await list_audit(store, limit=0)


async def test_o02_every_action_on_jobs_is_recorded_in_its_own_transaction(store: Store) -> None:
    (later,) = await given_jobs(store, POLICY, ACME, delay=SECOND)
    assert (await force_jobs(store, [later], actor="ada", dry_run=True)).is_dry_run
    assert (await list_audit(store)).entries == ()
    await retry_jobs(store, [later], actor="ada", reason="now")
    await finish(store, await claim(store, "webhooks", 1), Died("over"))
    await replay_jobs(store, [later], actor="ada")
    await force_jobs(store, [later], actor="ada")
    await cancel_jobs(store, [later], actor="ada", reason="no more")
    await cancel_jobs(store, [later, uuid4()], actor="ada")
    await purge_jobs(store, [later], actor="ada")
    entries = (await list_audit(store)).entries
    assert [each.action for each in entries] == ["purge", "cancel", "force", "replay", "retry"]
    assert [each.reason for each in entries] == ["", "no more", "", "", "now"]
    assert {each.queue for each in entries} == {"webhooks"}
    assert describe_entry(entries[1])["before"] == {str(later): "ready"}


async def test_a_cancel_of_what_runs_is_recorded_and_one_without_a_note_is_not(store: Store) -> None:
    first, second = await given_jobs(store, POLICY, ACME, 2)
    await claim(store, "webhooks", 2)
    assert await store.cancel(first) is State.RUNNING
    await cancel_jobs(store, [second], actor="ada")
    (entry,) = (await list_audit(store)).entries
    assert describe_entry(entry)["before"] == {str(second): "running"}


async def test_a_forced_job_starts_although_its_key_is_paused(store: Store) -> None:
    jobs = await given_jobs(store, POLICY, ACME, 3)
    await pause(store, "webhooks", ADA, keys={"account": "acme"})
    report = await force_jobs(store, [jobs[1], jobs[1]], actor="ada")
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
    # What ended leaves a bell behind, and nothing that a worker is needed for.
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
    await set_limit(store, "webhooks", "account", 1, ADA, keys={"account": "bolt"})
    await pause(store, "webhooks", ADA, keys={"endpoint": "x"})
    await pause(store, "webhooks", ADA, task="deliver")
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
    await boost(store, "webhooks", 2, ADA, keys={"account": "acme"})
    await set_limit(store, "webhooks", "rate", 2, ADA, keys={"endpoint": "api.acme.com"})
    assert await diagnosed(store) == []


async def test_the_doctor_reports_an_override_without_effect_once(store: Store) -> None:
    await set_limit(store, "webhooks", "account", 1, ADA, keys={"account": "bolt"})
    await apply_policies(store, {"webhooks": Policy("webhooks")}, ADA)
    (finding,) = await diagnosed(store)
    assert finding.check == "override without effect"
    assert "has no limit named" in finding.message


async def test_what_an_operator_has_suspended_or_paused_by_priority_is_nothing_wrong(store: Store) -> None:
    await given_jobs(store, POLICY, ACME, 1)
    await claim(store, "webhooks", 1)
    await set_limit(store, "webhooks", "account", 1, ADA, keys={"account": "acme"})
    await suspend(store, "webhooks", ADA)
    await pause(store, "webhooks", ADA, keys={"priority": 50})
    assert await diagnosed(store) == []


async def test_the_doctor_says_that_no_worker_serves_a_queue_where_jobs_wait(store: Store, clock: ManualClock) -> None:
    await given_jobs(store, POLICY, ACME, 1)
    assert checks(await diagnosed(store)) == ["no worker"]
    await pause(store, "webhooks", ADA)
    assert await claim(store, "webhooks", 1) == []
    assert await diagnosed(store) == []
    await resume(store, "webhooks", ADA)
    await pause(store, "webhooks", ADA, keys={"account": "acme"})
    await serving(store, clock, "webhooks")
    assert await diagnosed(store) == []
    await store.run(records.report(WORKER.id, None))
    assert checks(await diagnosed(store)) == ["no worker"]


async def test_the_doctor_says_that_bells_pile_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis_queues, "MANY_BELLS", 2)
    for _ in range(3):
        await given_jobs(store, POLICY, ACME, 1)
    assert checks(await diagnosed(store)) == ["bells pile up", "no worker"]


async def test_a_dry_run_of_a_policy_is_refused_where_applying_it_would_be(store: Store, clock: ManualClock) -> None:
    policy = Policy("orders", limits=(Concurrency(5, by="account"),))
    await store.declare(policy)
    await given_jobs(store, policy, {"account": "acme"}, 3)
    await claim(store, "orders", 1)
    other = Policy("orders", limits=(Concurrency(5, by="region"),))
    with pytest.raises(InvalidPolicy, match="2 waiting jobs do not carry the key 'region'"):
        await apply_policies(store, {"orders": other}, DRY)
    (change,) = await apply_policies(store, {"orders": other}, DRY, accept_missing_keys=True)
    assert change.is_dry_run


async def test_a_task_can_be_paused_by_the_last_part_of_its_name(store: Store, clock: ManualClock) -> None:
    policy = Policy("orders")
    await store.declare(policy)
    await store.enqueue(new_jobs(policy, task="shop.deliver"))
    change = await pause(store, "orders", Intent(actor="ada"), task="deliver")
    assert change.after[0].scope == (("task", "shop.deliver"),)
    assert await claim(store, "orders", 5) == []
    await resume(store, "orders", Intent(actor="ada"), task="deliver")
    assert len(await claim(store, "orders", 5)) == 1
