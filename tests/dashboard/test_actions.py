"""What an operator is asked and told: why, how many jobs it is about, and how to take it back (S6)."""

from __future__ import annotations

import html
import re

import httpx
import pytest

from fairlane.dashboard.actions import ACTIONS
from fairlane.operations import JobFilter
from tests.dashboard.harness import ROOT, csrf_of
from tests.dashboard.world import API, World

ACME = {"queue": "webhooks", "key.account": "acme"}


async def previewed(client: httpx.AsyncClient, action: str, fields: dict[str, str]) -> str:
    answer = await client.get(f"{ROOT}/do/{action}", params=fields)
    assert answer.status_code == 200, answer.text
    return answer.text


async def done(client: httpx.AsyncClient, action: str, fields: dict[str, str], reason: str = "a ticket") -> str:
    form = {**fields, "csrf": csrf_of(await previewed(client, action, fields)), "reason": reason}
    answer = await client.post(f"{ROOT}/do/{action}", data=form)
    assert answer.status_code == 200, answer.text
    return answer.text


def undo_of(page: str) -> str:
    found = re.search(r'href="([^"]+)">Undo: ', page)
    assert found is not None, "the page has no undo"
    return html.unescape(found[1])


@pytest.mark.parametrize("reason", ["", "   "])
async def test_nothing_is_done_without_a_reason(world: World, reason: str) -> None:
    client = await world.site.visitor()
    page = await previewed(client, "pause", ACME)
    assert re.search(r'<input name="reason"[^>]* required', page)
    form = {**ACME, "csrf": csrf_of(page), "reason": reason}
    assert (await client.post(f"{ROOT}/do/pause", data=form)).status_code == 400
    for path, sent in (
        ("/queues/webhooks/pause", {}),
        ("/jobs/cancel", {"filter": {}}),
        ("/schedules/pause", {"name": "nightly"}),
    ):
        refused = await world.operator.post(f"{API}{path}", json={**sent, "reason": reason})
        assert (refused.status_code, refused.json()["error"]["field"]) == (422, "reason")
        looked = await world.operator.post(f"{API}{path}", json={**sent, "reason": reason, "dry_run": True})
        assert looked.status_code == 200, "looking needs none"
    assert (await world.app.operations.audit.list()).entries == ()


async def test_previews_of_pauses_and_limits_count_the_jobs_they_are_about(world: World) -> None:
    """One ready, one scheduled, one running of acme in webhooks; see `world`."""
    client = await world.site.visitor()
    limit = {**ACME, "limit": "concurrency:account", "value": "1"}
    for action, fields in (
        ("pause", {"queue": "webhooks"}),
        ("pause", ACME),
        ("set-limit", limit),
        ("suspend", {"queue": "webhooks"}),
    ):
        assert "2 jobs wait and 1 run there now" in await previewed(client, action, fields), action
    nobody = {"queue": "webhooks", "key.account": "nobody"}
    assert "0 jobs wait and 0 run there now" in await previewed(client, "pause", nobody)
    sent = {"keys": {"account": "acme"}, "dry_run": True}
    counted = (await world.operator.post(f"{API}/queues/webhooks/pause", json=sent)).json()["affected"]
    assert counted == {"waiting": 2, "running": 1, "more": False}
    assert "3 jobs wait" in await previewed(client, "pause", {"queue": "email"}), "over all partitions"


LIMIT = {**ACME, "limit": "concurrency:account"}
WHOLE = {"queue": "webhooks"}
Deeds = list[tuple[str, dict[str, str]]]


async def boosted(world: World) -> None:
    await world.app.operations.weights.boost("webhooks", 3, keys={"account": "acme"}, expires_in="2h")


async def state_of(world: World) -> list[tuple[object, ...]]:
    operations = world.app.operations
    schedules = [(each.name, each.is_paused) for each in await operations.schedules.list()]
    overrides = [each.override for each in await operations.overrides.list()]
    return [*schedules, *sorted((each.id, each.value, each.expires_at) for each in overrides)]


async def undone(client: httpx.AsyncClient, page: str, back: str) -> None:
    address = undo_of(page)
    assert f"/do/{back}?" in address
    form = (await client.get(address)).text
    fields = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', form))
    answer = await client.post(
        f"{ROOT}/do/{back}", data={**{n: html.unescape(v) for n, v in fields.items()}, "reason": "back"}
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("first", "then", "back"),
    [
        ([], ("pause", ACME), "resume"),
        ([("pause", ACME)], ("resume", ACME), "restore"),
        ([("pause", {**ACME, "lasting": "1h"})], ("resume", ACME), "restore"),
        ([("pause", ACME)], ("pause", {**ACME, "lasting": "1h"}), "restore"),
        ([("pause", {**ACME, "lasting": "5m"})], ("pause", ACME), "restore"),
        ([], ("suspend", WHOLE), "unsuspend"),
        ([("suspend", {**WHOLE, "lasting": "1h"})], ("unsuspend", WHOLE), "restore"),
        ([("suspend", WHOLE)], ("suspend", {**WHOLE, "lasting": "1h"}), "restore"),
        ([("suspend", {**WHOLE, "lasting": "5m"})], ("suspend", WHOLE), "restore"),
        ([], ("set-limit", {**LIMIT, "value": "1"}), "clear-limit"),
        ([("set-limit", {**LIMIT, "value": "3"})], ("set-limit", {**LIMIT, "value": "1"}), "restore"),
        ([("set-limit", {**LIMIT, "value": "3", "lasting": "1h"})], ("set-limit", {**LIMIT, "value": "1"}), "restore"),
        ([("set-limit", {**LIMIT, "value": "1234567"})], ("clear-limit", LIMIT), "restore"),
        ([("set-weight", {**ACME, "value": "4"})], ("set-weight", {**ACME, "value": "2"}), "restore"),
        ([("set-weight", {**ACME, "value": "0.123456789"})], ("clear-weight", ACME), "restore"),
        ([], ("set-weight", {**ACME, "value": "2"}), "clear-weight"),
        ([], ("pause-schedule", {"schedule": "nightly"}), "resume-schedule"),
    ],
)
async def test_the_page_that_says_done_takes_it_back(
    world: World, first: Deeds, then: tuple[str, dict[str, str]], back: str
) -> None:
    """All of it: the same number, with the same end."""
    client = await world.site.visitor()
    for action in first:
        await done(client, *action)
    before = await state_of(world)
    world.clock.advance("1m")
    page = await done(client, *then)
    assert await state_of(world) != before
    await undone(client, page, back)
    assert await state_of(world) == before


@pytest.mark.parametrize(
    ("weight", "then"),
    [("4", ("clear-weight", ACME)), (None, ("clear-weight", ACME)), (None, ("set-weight", {**ACME, "value": "2"}))],
)
async def test_a_weight_and_a_boost_come_back_together(
    world: World, weight: str | None, then: tuple[str, dict[str, str]]
) -> None:
    client = await world.site.visitor()
    await boosted(world)
    if weight is not None:
        await done(client, "set-weight", {**ACME, "value": weight, "lasting": "1h"})
    before = await state_of(world)
    page = await done(client, *then)
    await undone(client, page, "restore")
    assert await state_of(world) == before


async def test_an_undo_is_undone_as_exactly(world: World) -> None:
    client = await world.site.visitor()
    await boosted(world)
    await done(client, "set-weight", {**ACME, "value": "4"})
    address = undo_of(await done(client, "clear-weight", ACME))
    cleared = await state_of(world)
    fields = dict(httpx.URL(address).params)
    page = await done(client, "restore", {name: fields[name] for name in ("queue", "overrides", "ending")})
    assert await state_of(world) != cleared
    await undone(client, page, "restore")
    assert await state_of(world) == cleared


async def test_what_has_ended_meanwhile_is_not_restored(world: World) -> None:
    client = await world.site.visitor()
    await done(client, "pause", {**ACME, "lasting": "5m"})
    address = undo_of(await done(client, "pause", ACME))
    world.clock.advance("6m")
    answer = await client.get(address)
    assert (answer.status_code, "ended meanwhile" in answer.text) == (422, True)


async def test_there_is_no_undo_where_partitions_had_settings_of_their_own(world: World) -> None:
    client = await world.site.visitor()
    await world.app.operations.queues.pause("email__p1", keys={"account": "acme"}, expires_in="1h")
    page = await done(client, "pause", {"queue": "email", "key.account": "acme"})
    assert "cannot be undone in one step" in page
    assert "Undo:" not in page


@pytest.mark.parametrize("overrides", ["", "{}", "[1]", '[{"kind": "nonsense"}]'])
async def test_a_form_that_does_not_say_what_to_restore_is_refused(world: World, overrides: str) -> None:
    client = await world.site.visitor()
    answer = await client.get(f"{ROOT}/do/restore", params={**WHOLE, "overrides": overrides, "ending": "[]"})
    assert answer.status_code == 422


async def test_what_cannot_be_undone_says_so(world: World) -> None:
    client = await world.site.visitor()
    for action, fields in (
        ("cancel-jobs", {"queue": "webhooks"}),
        ("purge-jobs", {"job": str(world.jobs["dead"])}),
        ("trigger-schedule", {"schedule": "nightly"}),
    ):
        page = await done(client, action, fields)
        assert "cannot be undone" in page
        assert "Undo:" not in page
    told = {action.slug for action in ACTIONS if action.afterwards}
    assert told == {"cancel-jobs", "retry-jobs", "force-jobs", "replay-jobs", "purge-jobs", "trigger-schedule"}


async def test_an_action_that_fails_leaves_no_entry_and_one_that_succeeds_leaves_it_with_the_change(
    world: World,
) -> None:
    """O02: the entry and what it says are one transaction."""
    operations = world.app.operations
    with pytest.raises(Exception, match="no limit"):
        await operations.limits.set("webhooks", "nothing", 1, keys={"account": "acme"}, actor="ann")
    assert (await operations.audit.list()).entries == ()
    report = await operations.jobs.cancel(JobFilter(queue="webhooks"), actor="ann", reason="they left")
    [entry] = (await operations.audit.list()).entries
    assert entry.target == f"{len(report.done)} jobs: queue=webhooks"
