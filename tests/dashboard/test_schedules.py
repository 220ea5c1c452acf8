"""The page of the schedules: when each is due, what it did last, and what operators do with it."""

from __future__ import annotations

import re
from html import unescape

import pytest

from fairlane import App
from fairlane.clock import ManualClock
from fairlane.dashboard import pages as page
from fairlane.dashboard.actions import ACTIONS
from fairlane.job import JobRecord
from fairlane.redaction import Disclosure
from fairlane.store import records
from tests.dashboard.harness import ROOT, TOKEN, VIEWER_TOKEN, Site, csrf_of
from tests.dashboard.world import API, World


@pytest.fixture
async def scheduled(shop: App) -> App:
    """A shop with two schedules that a worker has made known."""
    task = shop.registry["shop.deliver"]
    shop.schedule("0 9 * * 1-5", task, {"kind": "daily"}, "acme", timezone="Europe/Berlin", name="daily report")
    shop.schedule(task, {"kind": "quick"}, "blue", every="1h", name="hourly/sync")
    await shop.fire_schedules()
    return shop


async def looked(site: Site, query: str = "", token: str = TOKEN) -> str:
    answer = await (await site.visitor("ann", token)).get(f"{ROOT}/schedules{query}")
    assert answer.status_code == 200, answer.text
    return answer.text


def names(html: str) -> list[str]:
    return [unescape(name) for name in re.findall(r'data-label="Schedule"><b>([^<]*)</b>', html)]


async def test_without_a_schedule_the_page_says_how_to_have_one(site: Site) -> None:
    assert "app.schedule(" in await looked(site)


async def test_a_schedule_is_told_in_words_with_its_timezone_and_its_slots(
    site: Site, scheduled: App, clock: ManualClock
) -> None:
    html = await looked(site)
    assert names(html) == ["daily report", "hourly/sync"]
    assert "At 09:00 on Monday through Friday, Europe/Berlin" in html
    assert "<code>0 9 * * 1-5 (Europe/Berlin)</code>" in html
    assert "Every 1h, counted from midnight UTC" in html
    assert 'datetime="2030-01-01T08:00:00+00:00"' in html, "the next slot of the first, in UTC"
    clock.advance("1h")
    await scheduled.fire_schedules()
    (view,) = [each for each in await scheduled.operations.schedules.list() if each.last_job]
    html = await looked(site)
    assert f'href="{ROOT}/jobs/{view.last_job}"' in html
    assert 'datetime="2030-01-01T01:00:00+00:00"' in html


async def test_who_needs_somebody_comes_first_and_is_marked_in_words(
    site: Site, scheduled: App, clock: ManualClock
) -> None:
    await scheduled.operations.schedules.trigger("hourly/sync", actor="ann")
    await scheduled.operations.schedules.pause("hourly/sync", actor="ann")
    assert names(await looked(site)) == ["hourly/sync", "daily report"]
    assert "1 trigger waits for a worker." in await looked(site)
    clock.advance("1h")
    html = await looked(site)
    assert re.findall(r"</span> (orphaned|paused|active)</span>", html) == ["orphaned", "orphaned"]
    assert html.count("No worker has it, so that nobody fires it.") == 2
    assert "It is paused besides." in html


async def test_schedules_are_found_by_name_task_queue_and_state(site: Site, scheduled: App) -> None:
    await scheduled.operations.schedules.pause("daily report", actor="ann")
    for query, found in {
        "?search=HOURLY": ["hourly/sync"],
        "?search=webhooks": ["daily report", "hourly/sync"],
        "?state=paused": ["daily report"],
        "?state=active&search=report": [],
    }.items():
        assert names(await looked(site, query)) == found, query
    assert "No schedule fits" in await looked(site, "?search=nothing")


async def test_a_long_list_is_cut_off_where_it_is_well(
    site: Site, scheduled: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "MOST_ROWS", 1)
    await scheduled.operations.schedules.pause("hourly/sync", actor="ann")
    html = await looked(site)
    assert names(html) == ["hourly/sync"]
    assert "and 1 more that are doing no worse" in html


async def test_every_deed_is_seen_first_then_done_and_recorded_with_who_and_why(
    site: Site, scheduled: App, clock: ManualClock
) -> None:
    ann = await site.visitor("ann")

    async def seen(action: str) -> str:
        answer = await ann.get(f"{ROOT}/do/{action}", params={"schedule": "hourly/sync", "back": "/schedules"})
        assert answer.status_code == 200, answer.text
        return answer.text

    async def done(action: str, reason: str) -> str:
        sent = {"csrf": csrf_of(await seen(action)), "schedule": "hourly/sync", "reason": reason, "back": "/schedules"}
        answer = await ann.post(f"{ROOT}/do/{action}", data=sent)
        assert answer.status_code == 200, answer.text
        return answer.text

    preview = await seen("pause-schedule")
    assert "hourly/sync would be paused." in preview
    assert "the first slot that is left out: 2030-01-01 01:00:00 UTC" in preview
    assert "is not paused" in await seen("resume-schedule")
    assert await (await scheduled.opened()).run(records.audit()) == []
    assert "hourly/sync is paused." in await done("pause-schedule", "the warehouse is down")
    assert "is paused already" in await seen("pause-schedule")
    clock.advance("2m")
    assert "its next slot: 2030-01-01 01:00:00 UTC" in await seen("resume-schedule")
    assert "hourly/sync is triggered." in await done("trigger-schedule", "just once")
    assert "hourly/sync is resumed." in await done("resume-schedule", "it is back")
    told = [(each.actor, each.action, each.reason) for each in await (await scheduled.opened()).run(records.audit())]
    assert told == [
        ("ann", "resume schedule", "it is back"),
        ("ann", "trigger schedule", "just once"),
        ("ann", "pause schedule", "the warehouse is down"),
    ]


async def test_viewers_look_and_are_offered_nothing_to_do(site: Site, scheduled: App) -> None:
    assert "/do/" not in await looked(site, token=VIEWER_TOKEN)
    viewer = await site.visitor("vic", VIEWER_TOKEN)
    for action in (each for each in ACTIONS if each.name.endswith("-schedule")):
        refused = await viewer.get(f"{ROOT}/do/{action.slug}", params={"schedule": "hourly/sync"})
        assert refused.status_code == 403, action.slug


async def test_a_schedule_that_is_not_there_is_not_found_and_none_is_asked_for(site: Site, scheduled: App) -> None:
    ann = await site.visitor()
    missing = await ann.get(f"{ROOT}/do/pause-schedule", params={"schedule": "hourly/sink"})
    assert (missing.status_code, "did you mean &#39;hourly/sync&#39;?" in missing.text) == (404, True)
    assert (await ann.get(f"{ROOT}/do/pause-schedule")).status_code == 422


async def test_what_a_schedule_carries_is_redacted_as_a_job_of_it_would_be(scheduled: App, clock: ManualClock) -> None:
    def by_host(call: object, disclosure: Disclosure) -> object:
        job = disclosure.job
        assert isinstance(job, JobRecord)
        if job.context["schedule"] == "daily report":
            raise LookupError("4111")
        return f"the host hides {job.task}"

    def by_app(call: object, disclosure: Disclosure) -> object:
        assert isinstance(disclosure.job, JobRecord)
        return f"{disclosure.job.queue} of {disclosure.job.context['schedule']}"

    scheduled.redact = by_app
    assert [each.call for each in await scheduled.operations.schedules.list()] == [
        "webhooks of daily report",
        "webhooks of hourly/sync",
    ]
    async with Site.of(scheduled, clock, token=TOKEN, redact=by_host) as site:
        html = await looked(site)
        shown = (await site.program().get(f"{API}/schedules")).json()["schedules"]
    for text in (html, str(shown)):
        assert "the host hides shop.deliver" in text
        assert "redact failed" in text
        assert "acme" not in text


async def test_the_api_names_a_schedule_whatever_its_name_holds(world: World) -> None:
    task = world.app.registry["shop.send"]
    world.app.schedule(task, 1, "acme", every="1h", name="a/b?c=d ‖ e")
    await world.app.fire_schedules()
    made = await world.operator.post(f"{API}/schedules/pause", json={"name": "a/b?c=d ‖ e", "reason": "so"})
    assert (made.status_code, made.json()["state"], made.json()["dry_run"]) == (200, "paused", False)
    shown = {each["name"]: each for each in (await world.viewer.get(f"{API}/schedules")).json()["schedules"]}
    assert shown["a/b?c=d ‖ e"]["next_at"] is None
    assert shown["a/b?c=d ‖ e"]["resumes_at"] == "2030-01-01T01:00:00+00:00"
    assert shown["nightly"]["words"] == "At 09:00 on Monday through Friday, Europe/Berlin"
    missing = await world.operator.post(f"{API}/schedules/trigger", json={"name": "nothing"})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
