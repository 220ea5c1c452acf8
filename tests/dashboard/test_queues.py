"""Queues and keys in the dashboard: what is shown of them, and what operators change."""

from __future__ import annotations

import json
import re
from contextlib import AsyncExitStack
from html import unescape
from urllib.parse import quote

import pytest

from fairlane import App, Concurrency, Fair
from fairlane.clock import ManualClock
from fairlane.dashboard.html import sparkline
from fairlane.dashboard.page import MOST_WATCHED, key_query, keys_of, watched_from, watched_text
from tests.dashboard.harness import ROOT, TOKEN, VIEWER_TOKEN, Site, csrf_of
from tests.dashboard.test_jobs import EVIL, confirm, enqueue

KEY = "/queues/webhooks/key?key.account=acme"
ACME = {"queue": "webhooks", "key.account": "acme"}


async def stats(shop: App) -> None:
    """What workers do by themselves: the figures are added up."""
    await (await shop.opened()).add_up("webhooks")


async def busy(shop: App) -> None:
    """Two of acme run, which is its limit, and three wait behind it; one of globex is done."""
    await enqueue(shop, "globex")
    (claim,) = await shop.queues["webhooks"].claim(1)
    await claim.ack("done")
    for _ in range(5):
        await enqueue(shop, "acme")
    await shop.queues["webhooks"].claim(10)
    await stats(shop)


async def text_of(site: Site, path: str) -> str:
    answer = await (await site.visitor()).get(f"{ROOT}{path}")
    assert answer.status_code == 200, answer.text
    return answer.text


async def test_the_overview_tells_a_limit_that_does_its_work_from_us_lagging_behind(site: Site, shop: App) -> None:
    await busy(shop)
    text = await text_of(site, "/")
    assert "account=acme is held by its limit of 2: 3 jobs wait" in text
    assert 'class="hint calm"' in text
    assert 'class="hint lag"' not in text
    assert "fairlane limit set webhooks" in text, "it names the knob"


async def test_the_charts_carry_the_numbers_of_the_last_hour(site: Site, shop: App) -> None:
    await busy(shop)
    text = await text_of(site, "/queues/webhooks")
    charts = [json.loads(unescape(found)) for found in re.findall(r"data-chart='([^']*)'", text)]
    throughput = next(chart for chart in charts if chart["series"][0]["label"] == "ended")
    assert len(throughput["x"]) == 60
    assert sum(throughput["series"][0]["values"]) == 1


async def test_a_queue_shows_its_policy_in_words_its_limits_and_what_was_changed(site: Site, shop: App) -> None:
    await busy(shop)
    await shop.operations.limits.set("webhooks", "concurrency", 4, keys={"account": "globex"}, actor="bob", reason=EVIL)
    text = await text_of(site, "/queues/webhooks")
    for part in ("Every account gets its turn", "At most 2 at the same time for each account", "globex", "bob"):
        assert part in text
    assert EVIL not in text


async def test_a_queue_that_is_not_there_is_a_page_that_says_so(site: Site) -> None:
    visitor = await site.visitor()
    for path in ("/queues/none", "/queues/none/keys", "/queues/none/key?key.account=acme", f"/queues/{quote(EVIL)}"):
        answer = await visitor.get(f"{ROOT}{path}")
        assert answer.status_code == 404, path
        assert EVIL not in answer.text


async def test_keys_are_listed_searched_sorted_and_paged(site: Site, shop: App) -> None:
    for number in range(60):
        await enqueue(shop, f"tenant-{number:02}")
    await shop.queues["webhooks"].claim(3)
    await stats(shop)
    first = await text_of(site, "/queues/webhooks/keys?sort=name")
    assert "tenant-00" in first
    assert "tenant-59" not in first
    link = unescape(first.partition('rel="next"')[0].rpartition('href="')[2].partition('"')[0])
    assert "tenant-59" in await text_of(site, link.removeprefix(ROOT))
    found = await text_of(site, "/queues/webhooks/keys?search=tenant-42")
    assert found.count("tenant-42") > found.count("tenant-4") - found.count("tenant-42")
    assert "tenant-41" not in found
    assert "No key fits" in await text_of(site, "/queues/webhooks/keys?search=nobody")


@pytest.mark.parametrize(
    "query", ["sort=size", "by=region", "after=nonsense", f"after={'A' * 400}", "by=account,region", "after=%00"]
)
async def test_nonsense_about_keys_is_told_and_not_believed(site: Site, query: str) -> None:
    answer = await (await site.visitor()).get(f"{ROOT}/queues/webhooks/keys?{query}")
    assert answer.status_code == (400 if "%00" in query else 422)


async def test_a_key_shows_what_runs_what_comes_next_and_what_holds_it(site: Site, shop: App) -> None:
    await busy(shop)
    text = await text_of(site, KEY)
    for part in ("2 of 2", "Running", "Next, in the order", "account=acme is at its limit", "Concurrency(2"):
        assert part in text, part


async def test_a_key_is_paused_and_resumed(site: Site, shop: App) -> None:
    told = await confirm(site, "pause", "an outage", **ACME, lasting="2h")
    assert "account=acme is paused" in told
    assert "paused" in await text_of(site, KEY)
    assert "has ended" in await confirm(site, "resume", **ACME)
    actions = [(entry.action, entry.actor, entry.reason) for entry in (await shop.operations.audit.list()).entries]
    assert actions == [("resume", "ann", "ticket 7"), ("pause", "ann", "an outage")]


async def test_a_queue_is_paused_and_resumed_and_its_limits_suspended(site: Site, shop: App) -> None:
    for action in ("pause", "resume", "suspend", "unsuspend"):
        await confirm(site, action, queue="webhooks")
        seen = await shop.operations.queues.show("webhooks")
        assert seen.view.is_paused == (action == "pause")
        assert seen.limits[0].is_suspended == (action == "suspend")


async def test_a_limit_and_a_weight_are_changed_for_a_key_and_given_back(site: Site, shop: App) -> None:
    await confirm(site, "set-limit", **ACME, limit="concurrency:account", value="7")
    await confirm(site, "set-weight", **ACME, value="3")
    (view,) = await shop.operations.keys.show_several("webhooks", [{"account": "acme"}])
    assert (view.gauges[0].bound, view.weight) == (7, 3)
    await confirm(site, "clear-limit", **ACME, limit="concurrency:account")
    await confirm(site, "clear-weight", **ACME)
    (view,) = await shop.operations.keys.show_several("webhooks", [{"account": "acme"}])
    assert (view.gauges[0].bound, view.weight) == (2, 1)


@pytest.mark.parametrize(
    ("action", "fields"),
    [
        ("set-limit", {**ACME, "limit": "concurrency:account", "value": "many"}),
        ("set-limit", {**ACME, "limit": "nonsense", "value": "1"}),
        ("set-limit", {**ACME, "limit": "concurrency:account", "value": "nan"}),
        ("set-weight", {**ACME, "value": "-1"}),
        ("pause", {}),
        ("pause", {**ACME, "lasting": "soon"}),
    ],
)
async def test_a_change_that_makes_no_sense_is_refused_before_it_can_be_confirmed(
    site: Site, action: str, fields: dict[str, str]
) -> None:
    answer = await (await site.visitor()).get(f"{ROOT}/do/{action}", params=fields)
    assert answer.status_code == 422
    assert 'role="alert"' in answer.text


async def test_viewers_change_no_queue(site: Site, shop: App) -> None:
    viewer = await site.visitor("vic", VIEWER_TOKEN)
    for path in ("/", "/queues", "/queues/webhooks", "/queues/webhooks/keys", KEY):
        assert "/do/" not in (await viewer.get(f"{ROOT}{path}")).text
    csrf = csrf_of((await viewer.get(f"{ROOT}/")).text)
    assert (await viewer.post(f"{ROOT}/do/pause", data={**ACME, "csrf": csrf})).status_code == 403
    assert (await shop.operations.overrides.list()) == []


async def test_watched_keys_are_shown_on_the_overview(site: Site, shop: App) -> None:
    await busy(shop)
    watched = watched_text("webhooks", {"account": "acme"})
    text = await text_of(site, f"/?watch={quote(watched)}&watch=none/key.account%3Dx&watch=nonsense")
    assert "Watched keys" in text
    assert text.partition("Watched keys")[2].count("<tr data-row") == 1
    assert "Watched keys" not in await text_of(site, "/")


async def test_every_key_of_a_list_can_be_watched(site: Site, shop: App) -> None:
    await busy(shop)
    text = await text_of(site, "/queues/webhooks/keys")
    for account in ("acme", "globex"):
        assert f'data-watch="{watched_text("webhooks", {"account": account})}"' in text


def test_a_line_holds_on_where_nothing_is_known() -> None:
    assert sparkline([None, 4.0, None, 2.0]) == "33.3,0.0 66.7,0.0 100.0,10.0"
    assert sparkline([None, None]) == ""


def test_keys_in_addresses_are_exact() -> None:
    keys = {"account": "a=b, c/d?e&f", "region": None, "zone": ""}
    assert keys_of(key_query(keys)) == keys
    assert watched_from([watched_text("a/b", keys)]) == {"a/b": [keys]}
    assert len(watched_from([f"q/key.a={n}" for n in range(100)])["q"]) == MOST_WATCHED


async def test_o16_pages_show_numbers_that_jobs_brought_with_where_they_came_from(
    database_url: str, clock: ManualClock, stack: AsyncExitStack
) -> None:
    app = App(database_url, clock=clock)
    app.queue(
        "webhooks",
        fair=Fair(by="account", weight=lambda context: context["weight"]),
        limits=[Concurrency(lambda context: context["slots"], by="account")],
    )

    @app.task(queue="webhooks", name="deliver")
    async def deliver(account: str) -> None: ...

    await stack.enter_async_context(app)
    site = await stack.enter_async_context(Site.of(app, clock, token=TOKEN))
    await deliver.using(context={"weight": 4, "slots": 8}).enqueue_many([deliver.call("acme")] * 9)
    await app.queues["webhooks"].claim(20)
    await app.operations.weights.boost("webhooks", 2, keys={"account": "acme"}, actor="ann", reason="a test")
    await stats(app)
    text = unescape(await text_of(site, KEY))
    assert "Concurrency(8, by='account')" in text
    assert "8 of 8" in text
    assert "from its newest job" in text
    assert "Weight 8 in the turns of the queue (4 from its newest job, boosted 2 times)" in text
    answer = await site.program().get(f"{ROOT}/api/queues/webhooks/keys")
    (view,) = answer.json()["keys"]
    assert (view["weight"], view["weight_from"], view["boost"]) == (8, "job", 2)
    assert (view["gauges"][0]["bound"], view["gauges"][0]["bound_from"]) == (8, "job")
