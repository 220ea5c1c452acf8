"""What an operator is asked and told: why, how many jobs it is about, and how to take it back (S6)."""

from __future__ import annotations

import html
import re

import httpx
import pytest

from fairlane.dashboard.contents import DEEDS
from fairlane.operations import JobFilter
from tests.dashboard.harness import ROOT, csrf_of
from tests.dashboard.world import API, World

ACME = {"queue": "webhooks", "key.account": "acme"}


async def previewed(client: httpx.AsyncClient, deed: str, fields: dict[str, str]) -> str:
    answer = await client.get(f"{ROOT}/do/{deed}", params=fields)
    assert answer.status_code == 200, answer.text
    return answer.text


async def done(client: httpx.AsyncClient, deed: str, fields: dict[str, str], reason: str = "a ticket") -> str:
    form = {**fields, "csrf": csrf_of(await previewed(client, deed, fields)), "reason": reason}
    answer = await client.post(f"{ROOT}/do/{deed}", data=form)
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
    assert (await world.app.operations.list_audit()).entries == ()


async def test_previews_of_pauses_and_limits_count_the_jobs_they_are_about(world: World) -> None:
    """One ready, one scheduled, one running of acme in webhooks; see `world`."""
    client = await world.site.visitor()
    limit = {**ACME, "limit": "concurrency:account", "value": "1"}
    for deed, fields in (
        ("pause", {"queue": "webhooks"}),
        ("pause", ACME),
        ("set-limit", limit),
        ("suspend", {"queue": "webhooks"}),
    ):
        assert "2 jobs wait and 1 run there now" in await previewed(client, deed, fields), deed
    nobody = {"queue": "webhooks", "key.account": "nobody"}
    assert "0 jobs wait and 0 run there now" in await previewed(client, "pause", nobody)
    sent = {"keys": {"account": "acme"}, "dry_run": True}
    counted = (await world.operator.post(f"{API}/queues/webhooks/pause", json=sent)).json()["affected"]
    assert counted == {"waiting": 2, "running": 1, "more": False}
    assert "3 jobs wait" in await previewed(client, "pause", {"queue": "email"}), "over all partitions"


@pytest.mark.parametrize(
    ("first", "then", "back"),
    [
        (None, ("pause", ACME), "resume"),
        (("pause", ACME), ("resume", ACME), "pause"),
        (None, ("suspend", {"queue": "webhooks"}), "unsuspend"),
        (None, ("set-limit", {**ACME, "limit": "concurrency:account", "value": "1"}), "clear-limit"),
        (
            ("set-limit", {**ACME, "limit": "concurrency:account", "value": "3"}),
            ("set-limit", {**ACME, "limit": "concurrency:account", "value": "1"}),
            "set-limit",
        ),
        (
            ("set-limit", {**ACME, "limit": "concurrency:account", "value": "3"}),
            ("clear-limit", {**ACME, "limit": "concurrency:account"}),
            "set-limit",
        ),
        (("set-weight", {**ACME, "value": "4"}), ("set-weight", {**ACME, "value": "2"}), "set-weight"),
        (None, ("set-weight", {**ACME, "value": "2"}), "clear-weight"),
        (None, ("pause-schedule", {"schedule": "nightly"}), "resume-schedule"),
    ],
)
async def test_the_page_that_says_done_takes_it_back(
    world: World,
    first: tuple[str, dict[str, str]] | None,
    then: tuple[str, dict[str, str]],
    back: str,
) -> None:
    client = await world.site.visitor()
    operations = world.app.operations
    if first is not None:
        await done(client, *first)

    async def state() -> list[tuple[object, ...]]:
        schedules = [(each.name, each.is_paused) for each in await operations.list_schedules()]
        overrides = [(each.override.id, each.override.value) for each in await operations.list_overrides()]
        return [*schedules, *overrides]

    before = await state()
    page = await done(client, *then)
    assert await state() != before
    address = undo_of(page)
    assert f"/do/{back}?" in address
    form = (await client.get(address)).text
    fields = dict(re.findall(r'<input type="hidden" name="([^"]+)" value="([^"]*)"', form))
    answer = await client.post(
        f"{ROOT}/do/{back}", data={**{n: html.unescape(v) for n, v in fields.items()}, "reason": "back"}
    )
    assert answer.status_code == 200
    assert await state() == before


async def test_what_cannot_be_undone_says_so(world: World) -> None:
    client = await world.site.visitor()
    for deed, fields in (
        ("cancel-jobs", {"queue": "webhooks"}),
        ("purge-jobs", {"job": str(world.jobs["dead"])}),
        ("trigger-schedule", {"schedule": "nightly"}),
    ):
        page = await done(client, deed, fields)
        assert "cannot be undone" in page
        assert "Undo:" not in page
    told = {deed.name for deed in DEEDS if deed.afterwards}
    assert told == {"cancel-jobs", "retry-jobs", "force-jobs", "replay-jobs", "purge-jobs", "trigger-schedule"}


async def test_an_action_that_fails_leaves_no_entry_and_one_that_succeeds_leaves_it_with_the_change(
    world: World,
) -> None:
    """O02: the entry and what it says are one transaction."""
    operations = world.app.operations
    with pytest.raises(Exception, match="no limit"):
        await operations.set_limit("webhooks", "nothing", 1, keys={"account": "acme"}, actor="ann")
    assert (await operations.list_audit()).entries == ()
    report = await operations.cancel_jobs(JobFilter(queue="webhooks"), actor="ann", reason="they left")
    [entry] = (await operations.list_audit()).entries
    assert entry.target == f"{len(report.done)} jobs: queue=webhooks"
