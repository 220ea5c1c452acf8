"""Try a policy: what is typed is read and never run, what is wrong is told beside it, and nothing is touched."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from html import unescape
from typing import Any

import httpx
import pytest

from fairlane import App
from fairlane.clock import ManualClock
from fairlane.dashboard import trials as page
from fairlane.operations import trials as trying
from fairlane.policy.policy import policy_text
from tests.dashboard.harness import ROOT, VIEWER_TOKEN, Site, csrf_of
from tests.waiting import PATIENCE

WORKLOAD = """
[[classes]]
name = "hot"
keys = { account = "acme" }
jobs = 60

[[classes]]
name = "small"
keys = { account = "small-{n}" }
count = 10
jobs = 3
"""
FAIR = '{"fair": {"by": "account"}}'


async def form(client: httpx.AsyncClient, query: str = "") -> dict[str, str]:
    """What a browser would send of the page as it is."""
    html = (await client.get(f"{ROOT}/try{query}")).text
    return {"csrf": csrf_of(html), "do": "try", **fields(html)}


def fields(html: str) -> dict[str, str]:
    texts = {
        name: unescape(text) for name, text in re.findall(r'<textarea name="(\w+)"[^>]*>\n([^<]*)</textarea>', html)
    }
    inputs = re.findall(r'<input (?:class="short" )?name="(slots|until|last)" value="([^"]*)"', html)
    source = re.search(r'name="source" value="(\w+)" checked', html)
    queue = re.search(r"<option selected>([^<]*)<", html)
    assert source is not None
    return texts | dict(inputs) | {"source": source[1], "queue": queue[1] if queue else ""}


async def tried(site: Site, **typed: str) -> httpx.Response:
    client = await site.visitor("vic", VIEWER_TOKEN)
    given = {"source": "declared", "workload": WORKLOAD, "slots": "10"} | typed
    return await client.post(f"{ROOT}/try", data=await form(client) | given)


async def test_the_policy_in_force_is_there_to_be_changed(site: Site, shop: App) -> None:
    typed = await form(await site.visitor(), "?queue=webhooks")
    assert typed["a"] == typed["b"] == policy_text(shop.queues["webhooks"].policy)
    assert json.loads(typed["a"])["fair"] == {"by": "account"}
    assert (typed["queue"], typed["source"], typed["slots"]) == ("webhooks", "history", "100")
    assert "account" in typed["workload"]


async def test_two_policies_are_shown_side_by_side(site: Site) -> None:
    html = (await tried(site, a="{}", b=FAIR)).text
    assert 'id="result"' in html
    assert "no policy (first come, first served)" in html
    assert "small starts sooner under B" in html
    charts = [json.loads(unescape(each)) for each in re.findall(r'data-chart="([^"]*)"', html)]
    slots_a, slots_b, waiting_a, waiting_b, waits, shares = charts
    assert [each["label"] for each in slots_a["series"]] == ["hot", "small"]
    assert (slots_a["top"], slots_a["right"]) == (slots_b["top"], slots_b["right"])
    assert max(waiting_a["series"][0]["values"]) > 0 < max(waiting_b["series"][0]["values"])
    assert [each["label"] for each in waits["series"]] == ["A", "B"]
    assert len(waits["x"]) == 11
    assert sum(shares["series"][0]["values"]) == pytest.approx(100, abs=0.1)


async def test_one_policy_alone_is_enough(site: Site) -> None:
    html = (await tried(site, a=FAIR, b=" ")).text
    assert 'id="result"' in html
    assert "under B" not in html


async def test_what_ran_in_the_queue_is_tried(site: Site, shop: App, clock: ManualClock) -> None:
    deliver = shop.registry.find("shop.deliver")
    assert deliver is not None
    for nth in range(6):
        await deliver.enqueue(nth, account=f"account-{nth % 2}")
    clock.advance("1s")
    queue = shop.queues["webhooks"]
    for _ in range(3):
        for claim in await queue.claim(4):
            await claim.ack(ran="2s")
    clock.advance("1s")
    html = (await tried(site, source="history", last="10m", b="")).text
    assert 'id="result"' in html, re.findall(r"problem[^<]*<[^<]*", html)
    assert "6 in" in html
    assert "shop.deliver" in html


async def test_a_queue_without_history_says_so_and_keeps_what_was_typed(site: Site) -> None:
    html = (await tried(site, source="history", last="5m", b=FAIR)).text
    assert "no job of queue" in unescape(html)
    assert fields(html) | {"b": FAIR, "last": "5m", "source": "history"} == fields(html)


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a", '{\n  "fair": {"by": "account",}\n}', "Line 2:</b> this is not JSON"),
        ("b", '{"limits": [\n{"kind": "concurrency",\n "max": -1}]}', "Line 3:</b> Concurrency(-1)"),
        ("a", '{"limitz": []}', "Line 1:</b> a policy has no field limitz"),
        ("b", "__import__('os').system('true')", "this is not JSON"),
        ("workload", '[[classes]]\nname = "a"\njobs = "many"', "Line 3:</b> jobs: Expected int, got str"),
        ("workload", "", "there is nothing here"),
        ("slots", "a few", "give a whole number from 1 to 10,000"),
        ("slots", "9" * 5_000, "give a whole number from 1 to 10,000"),
        ("until", "soon", "is not a duration"),
    ],
)
async def test_what_is_wrong_is_told_beside_it_and_nothing_typed_is_lost(
    site: Site, name: str, text: str, told: str
) -> None:
    answer = await tried(site, **{name: text})
    html = unescape(answer.text)
    assert answer.status_code == 200
    assert told in html
    assert f'id="{name}-problem"' in html
    assert 'id="result"' not in html
    kept = fields(answer.text)
    assert kept[name] == text
    assert kept["workload" if name != "workload" else "slots"] == (WORKLOAD if name != "workload" else "10")


async def test_everything_that_is_wrong_is_told_at_once(site: Site) -> None:
    html = (await tried(site, a="{", b="[", slots="0", until="x", workload="=")).text
    assert set(re.findall(r'id="(\w+)-problem"', html)) == {"a", "b", "slots", "until", "workload"}


async def test_lines_are_counted_as_people_do_although_browsers_end_them_with_two_signs(site: Site) -> None:
    html = (await tried(site, a='{\r\n"fair": 5,\r\n"x\r\n}')).text
    assert "Line 3:</b>" in html


async def test_typed_markup_stays_text(site: Site) -> None:
    html = (await tried(site, a='{"<script>alert(1)</script>": 1}', b="</textarea><img src=x>")).text
    assert "<script>alert" not in html
    assert "<img" not in html.replace('<img src="/ops/static', "")


async def test_another_queue_is_loaded_and_the_rest_stays(site: Site) -> None:
    html = (await tried(site, do="load", queue="webhooks", a="{}", b=FAIR, slots="7")).text
    kept = fields(html)
    assert json.loads(kept["a"])["limits"]
    assert (kept["b"], kept["slots"], kept["workload"]) == (FAIR, "7", WORKLOAD)
    assert 'id="result"' not in html


async def test_an_unknown_queue_is_told(site: Site) -> None:
    answer = await (await site.visitor()).get(f"{ROOT}/try?queue=nowhere")
    assert answer.status_code == 200
    assert "no policy of a queue 'nowhere'" in unescape(answer.text)


async def test_more_than_can_be_tried_is_refused(site: Site) -> None:
    html = unescape((await tried(site, workload='[[classes]]\nname = "a"\njobs = 50001')).text)
    assert "more than 50,000" in html
    assert "fairlane simulate" in html


async def test_a_form_of_another_session_is_refused(site: Site) -> None:
    client = await site.visitor()
    answer = await client.post(f"{ROOT}/try", data={"csrf": "0" * 64, "a": "{}"})
    assert answer.status_code == 403


async def test_trying_touches_nothing(site: Site, shop: App) -> None:
    store = await shop.opened()
    before = (
        await store.ask(lambda moment: moment.policies()),
        await store.counts("webhooks"),
        (await shop.operations.audit.list()).entries,
    )
    assert 'id="result"' in (await tried(site, a=FAIR, b='{"limits": [{"kind": "concurrency", "max": 1}]}')).text
    after = (
        await store.ask(lambda moment: moment.policies()),
        await store.counts("webhooks"),
        (await shop.operations.audit.list()).entries,
    )
    assert after == before


class Held:
    """A simulation that goes on until somebody ends it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.ended = threading.Event(), threading.Event()
        monkeypatch.setattr(trying, "_try", self)

    def __call__(self, *arguments: Any) -> list[Any]:
        self.began.set()
        pace = arguments[-1]
        try:
            pace.stop.wait(PATIENCE)
        finally:
            self.ended.set()
        return []


@pytest.mark.parametrize("is_told", [True, False])
async def test_who_goes_away_ends_the_simulation(site: Site, monkeypatch: pytest.MonkeyPatch, is_told: bool) -> None:
    held = Held(monkeypatch)
    client = await site.visitor()
    body = httpx.QueryParams(await form(client) | {"source": "declared", "workload": WORKLOAD, "b": ""})
    parts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    parts.put_nowait({"type": "http.request", "body": str(body).encode(), "more_body": False})
    headers = [(b"content-type", b"application/x-www-form-urlencoded"), (b"host", b"shop.test")]
    headers.append((b"cookie", "; ".join(f"{name}={value}" for name, value in client.cookies.items()).encode()))
    scope = {
        "type": "http",
        "method": "POST",
        "path": f"{ROOT}/try",
        "raw_path": f"{ROOT}/try".encode(),
        "query_string": b"",
        "headers": headers,
        "root_path": "",
        "scheme": "https",
        "server": ("shop.test", 443),
        "client": ("10.0.0.1", 1),
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    serving = asyncio.create_task(site.host(scope, parts.get, send))
    assert await asyncio.to_thread(held.began.wait, PATIENCE)
    # The server either says so or ends the request by itself.
    if is_told:
        parts.put_nowait({"type": "http.disconnect"})
        await asyncio.wait_for(serving, PATIENCE)
        assert sent[0]["status"] == 499
    else:
        serving.cancel()
        await asyncio.wait([serving], timeout=PATIENCE)
    assert await asyncio.to_thread(held.ended.wait, PATIENCE)
    assert page._UNDER_WAY.acquire(blocking=False), "nobody else could try anything"
    page._UNDER_WAY.release()


async def test_one_is_under_way_at_a_time(site: Site) -> None:
    with page._UNDER_WAY:
        html = (await tried(site, b=FAIR)).text
    assert page.BUSY in html
    assert fields(html)["b"] == FAIR
