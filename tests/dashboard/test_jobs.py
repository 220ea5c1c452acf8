"""Jobs in the dashboard: what is shown of them, and what can be done."""

from __future__ import annotations

from contextlib import AsyncExitStack
from datetime import datetime, timedelta
from uuid import UUID

import pytest

from fairlane import App, Rate, Unique
from fairlane.clock import ManualClock, as_datetime
from fairlane.job import State
from fairlane.operations import Disclosure
from tests.dashboard.harness import ROOT, TOKEN, VIEWER_TOKEN, Site, csrf_of
from tests.store.harness import serving

EVIL = "<script>alert(1)</script>"


async def enqueue(shop: App, account: str = "acme", event: object = 1) -> UUID:
    task = shop.registry.find("shop.deliver")
    assert task is not None
    return (await task.enqueue(event, account=account)).id


async def dead(shop: App, account: str = "acme") -> UUID:
    job = await enqueue(shop, account)
    (claim,) = await shop.queues["webhooks"].claim(1)
    await claim.dead(reason="the endpoint is gone")
    return job


async def state_of(shop: App, job: UUID) -> State:
    return await shop.job(job).status()


async def confirm(site: Site, action: str, reason: str = "ticket 7", name: str = "ann", **fields: str) -> str:
    """Look at a deed, then do it; what the last page says."""
    visitor = await site.visitor(name)
    preview = await visitor.get(f"{ROOT}/do/{action}", params=fields)
    assert preview.status_code == 200, preview.text
    sent = {"csrf": csrf_of(preview.text), "reason": reason, **fields}
    done = await visitor.post(f"{ROOT}/do/{action}", data=sent)
    assert done.status_code == 200, done.text
    return done.text


async def test_the_list_shows_what_fits_the_filter(site: Site, shop: App) -> None:
    acme, globex = await enqueue(shop, "acme"), await enqueue(shop, "globex")
    visitor = await site.visitor()
    everything = (await visitor.get(f"{ROOT}/jobs")).text
    assert str(acme) in everything
    assert str(globex) in everything
    for query, shown, hidden in (
        ({"key": "account=acme"}, acme, globex),
        ({"key": "account=globex", "queue": "webhooks", "state": "ready", "task": "shop.deliver"}, globex, acme),
    ):
        text = (await visitor.get(f"{ROOT}/jobs", params=query)).text
        assert str(shown) in text
        assert str(hidden) not in text
    assert "No job fits" in (await visitor.get(f"{ROOT}/jobs?state=dead")).text


async def test_the_list_goes_on_where_a_page_ended(site: Site, shop: App) -> None:
    jobs = [await enqueue(shop) for _ in range(60)]
    visitor = await site.visitor()
    first = await visitor.get(f"{ROOT}/jobs?queue=webhooks")
    link = first.text.partition('rel="next"')[0].rpartition('href="')[2].partition('"')[0]
    second = await visitor.get(link.replace("&amp;", "&"))
    assert sum(str(job) in first.text for job in jobs) == 50
    assert sum(str(job) in second.text for job in jobs) == 10


@pytest.mark.parametrize(
    "path",
    [
        "/jobs?after=nonsense",
        "/jobs?state=tired",
        "/jobs?key=acme",
        "/jobs?after=" + "0" * 32 + ".1.2",
        "/dead?after=x",
    ],
)
async def test_nonsense_in_the_address_is_told_and_not_believed(site: Site, path: str) -> None:
    answer = await (await site.visitor()).get(f"{ROOT}{path}")
    assert answer.status_code == 422
    assert 'role="alert"' in answer.text


@pytest.mark.parametrize("job", ["nonsense", "00000000-0000-4000-8000-000000000000", "..%2f..%2fetc%2fpasswd", EVIL])
async def test_a_job_that_is_not_there_is_a_page_that_says_so(site: Site, job: str) -> None:
    answer = await (await site.visitor()).get(f"{ROOT}/jobs/{job}")
    assert answer.status_code == 404
    assert EVIL not in answer.text


async def test_a_job_is_shown_with_its_call_its_keys_and_why_it_waits(site: Site, shop: App) -> None:
    await shop.operations.queues.pause("webhooks", keys={"account": "acme"}, actor="bob", reason="an outage")
    job = await enqueue(shop, "acme", {"order": 4711})
    text = (await (await site.visitor()).get(f"{ROOT}/jobs/{job}")).text
    for part in ("shop.deliver", "account=<b>acme", "4711", "Why it waits", "paused", "(by bob)", "not been tried"):
        assert part in text, part


async def test_a_dead_job_is_shown_with_every_attempt_and_its_error(site: Site, shop: App) -> None:
    job = await dead(shop)
    text = (await (await site.visitor()).get(f"{ROOT}/jobs/{job}")).text
    assert "Attempt 1: dead" in text
    assert "the endpoint is gone" in text
    assert "Why it waits" not in text


async def test_nothing_that_a_producer_wrote_is_taken_for_markup(site: Site, shop: App) -> None:
    job = await enqueue(shop, EVIL, {EVIL: [EVIL]})
    (claim,) = await shop.queues["webhooks"].claim(1, worker=EVIL)
    await claim.dead(reason=EVIL)
    visitor = await site.visitor(EVIL)
    for path in ("/jobs", f"/jobs/{job}", "/dead", f"/jobs?key=account={EVIL}&queue={EVIL}", f"/audit?queue={EVIL}"):
        answer = await visitor.get(f"{ROOT}{path}")
        assert answer.status_code in (200, 404), path
        assert EVIL not in answer.text
        assert "&lt;script&gt;" in answer.text


async def test_a_payload_is_shown_as_the_host_lets_it_be_seen(shop: App, clock: ManualClock) -> None:
    def redact(payload: object, disclosure: Disclosure) -> object:
        if disclosure.job.keys["account"] == "broken":
            raise ValueError("secret")
        return {"call of": disclosure.job.task}

    hidden, broken = await enqueue(shop, "acme", "secret"), await enqueue(shop, "broken", "secret")
    (claim,) = await shop.queues["webhooks"].claim(1)
    await claim.ack("secret result")
    async with Site.of(shop, clock, token=TOKEN, redact=redact) as site:
        visitor = await site.visitor()
        for job, shown in ((hidden, "call of"), (broken, "redact failed")):
            text = (await visitor.get(f"{ROOT}/jobs/{job}")).text
            assert shown in text
            assert "secret" not in text


async def test_a_deed_is_looked_at_first_and_looking_changes_nothing(site: Site, shop: App) -> None:
    job = await enqueue(shop)
    visitor = await site.visitor()
    text = (await visitor.get(f"{ROOT}/do/cancel-jobs", params={"job": str(job)})).text
    assert "1 job would be cancelled" in text
    assert await state_of(shop, job) is State.READY
    assert (await shop.operations.audit.list()).entries == ()


async def test_what_is_done_is_recorded_with_who_and_why(site: Site, shop: App) -> None:
    job = await enqueue(shop)
    told = await confirm(site, "cancel-jobs", "ticket 7", "ann", job=str(job))
    assert "1 job cancelled" in told
    assert await state_of(shop, job) is State.CANCELLED
    (entry,) = (await shop.operations.audit.list()).entries
    assert (entry.actor, entry.action, entry.reason) == ("ann", "cancel", "ticket 7")


async def test_dead_jobs_are_replayed_and_purged_by_filter(site: Site, shop: App) -> None:
    acme, globex = await dead(shop, "acme"), await dead(shop, "globex")
    assert "1 job replayed" in await confirm(site, "replay-jobs", key="account=acme", state="dead")
    assert await state_of(shop, acme) is State.READY
    assert await state_of(shop, globex) is State.DEAD
    assert "1 job purged" in await confirm(site, "purge-jobs")
    assert (await (await site.visitor()).get(f"{ROOT}/jobs/{globex}")).status_code == 404
    assert await state_of(shop, acme) is State.READY


async def test_a_job_whose_unique_key_is_held_is_replayed_only_in_place_of_the_holder(site: Site, shop: App) -> None:
    """E10."""
    once = shop.registry["shop.deliver"].using(unique=Unique("a"))
    old = await once.enqueue(1, account="acme")
    await old.cancel()
    holder = await once.enqueue(1, account="acme")
    told = await confirm(site, "replay-jobs", job=str(old.id))
    assert f"job {holder.id} holds its unique key" in told
    assert "Another job holds the unique key of 1 that stay as they are." in told
    told = await confirm(site, "replay-jobs", job=str(old.id), on_conflict="replace")
    assert "1 job replayed" in told
    assert "1 waiting job with the same unique key was cancelled." in told
    assert (await old.status(), await holder.status()) == (State.READY, State.CANCELLED)
    visitor = await site.visitor()
    answer = await visitor.get(f"{ROOT}/do/replay-jobs", params={"job": str(old.id), "on_conflict": "return"})
    assert answer.status_code == 422


async def test_a_bulk_is_bounded_and_says_that_there_are_more(site: Site, shop: App) -> None:
    for _ in range(3):
        await dead(shop)
    told = await confirm(site, "replay-jobs", state="dead", limit="2")
    assert "2 jobs replayed" in told
    assert "others fit" in told
    visitor = await site.visitor()
    for limit in ("0", "-1", "10001", "many"):
        answer = await visitor.get(f"{ROOT}/do/replay-jobs", params={"limit": limit})
        assert answer.status_code == 422


async def test_what_was_left_alone_is_told_with_the_reason(site: Site, shop: App) -> None:
    job = await enqueue(shop)
    visitor = await site.visitor()
    preview = (await visitor.get(f"{ROOT}/do/replay-jobs", params={"job": str(job)})).text
    assert "only dead and cancelled jobs can be replayed" in preview
    assert "csrf" not in preview.partition("<main")[2], "there is nothing to confirm"


async def test_a_scheduled_job_is_made_due_and_a_held_one_is_run_now(site: Site, shop: App) -> None:
    task = shop.registry.find("shop.deliver")
    assert task is not None
    later = (await task.using(delay="1h").enqueue(1, account="acme")).id
    assert "1 job made due" in await confirm(site, "retry-jobs", job=str(later))
    await shop.operations.queues.pause("webhooks", actor="bob")
    held = await enqueue(shop, "globex")
    assert "1 job forced to start" in await confirm(site, "force-jobs", job=str(held))
    (claim,) = await shop.queues["webhooks"].claim(5)
    assert claim.id == held


async def test_viewers_see_no_buttons_and_get_nowhere_without_them(site: Site, shop: App) -> None:
    job = await dead(shop)
    viewer = await site.visitor("vic", VIEWER_TOKEN)
    for path in ("/jobs", f"/jobs/{job}", "/dead"):
        text = (await viewer.get(f"{ROOT}{path}")).text
        assert "/do/" not in text
    assert (await viewer.get(f"{ROOT}/do/replay-jobs", params={"job": str(job)})).status_code == 403
    csrf = csrf_of((await viewer.get(f"{ROOT}/dead")).text)
    sent = {"csrf": csrf, "job": str(job)}
    assert (await viewer.post(f"{ROOT}/do/replay-jobs", data=sent)).status_code == 403
    assert await state_of(shop, job) is State.DEAD


async def test_a_deed_that_nobody_knows_is_not_done(site: Site) -> None:
    visitor = await site.visitor()
    assert (await visitor.get(f"{ROOT}/do/everything")).status_code == 404


async def test_the_way_back_stays_within_the_dashboard(site: Site, shop: App) -> None:
    job = await enqueue(shop)
    visitor = await site.visitor()
    text = (await visitor.get(f"{ROOT}/do/cancel-jobs", params={"job": str(job), "back": "//evil.test"})).text
    assert "evil" not in text


async def test_o17_a_job_behind_many_is_told_when_it_will_start_and_not_that_it_may_at_once(
    database_url: str, clock: ManualClock, stack: AsyncExitStack
) -> None:
    app = App(database_url, clock=clock)
    app.queue("calls", limits=[Rate(60, per="1m", burst=1)])

    @app.task(queue="calls")
    async def call() -> None: ...

    await stack.enter_async_context(app)
    site = await stack.enter_async_context(Site.of(app, clock, token=TOKEN))
    *_, last = await call.enqueue_many([call.call()] * 7_300)
    await app.queues["calls"].claim(1)
    await serving(await app.opened(), clock, "calls", slots=100)
    text = (await (await site.visitor()).get(f"{ROOT}/jobs/{last.id}")).text
    assert "as soon as a worker asks" not in text
    answer = await site.program().get(f"{ROOT}/api/jobs/{last.id}/explain")
    starts = datetime.fromisoformat(answer.json()["estimate"])
    # Many that are ahead go in bundles: up to a hundredth later, and never earlier.
    earliest = as_datetime(clock.now() + 7_299_000_000)
    assert earliest <= starts <= earliest + timedelta(seconds=73)
    assert f'It will probably start <time class="ago" datetime="{starts.isoformat()}"' in text
