"""Pages that follow what happens: who is sent what, when, and at what price."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlencode

import pytest
from starlette.exceptions import HTTPException
from starlette.requests import Request

from fairlane import App
from fairlane.clock import ManualClock
from fairlane.dashboard.access import COOKIE, Role, Visitor
from fairlane.dashboard.live import MOST_OF_ONE, MOST_OF_VIEWERS, MOST_STREAMS
from fairlane.operations.policies import Audit
from tests.dashboard.harness import ROOT, VIEWER_TOKEN, Site, csrf_of
from tests.waiting import PATIENCE, until


class Stream:
    """An open page, as its browser sees it."""

    def __init__(self) -> None:
        self.status = 0
        self.parts: asyncio.Queue[bytes] = asyncio.Queue()
        self.gone = asyncio.Event()
        self.over = asyncio.Event()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            self.parts.put_nowait(message["body"])
        else:
            self.over.set()

    async def part(self) -> str:
        return (await asyncio.wait_for(self.parts.get(), PATIENCE)).decode()


@asynccontextmanager
async def opened(
    site: Site, page: str = "/audit", *, role: Role = Role.OPERATOR, cookie: str | None = None, **query: str
) -> AsyncIterator[Stream]:
    cookie = cookie or site.dashboard.access.open_session("ann", role)
    asked = urlencode({"page": page, "every": "2", **query})
    stream = Stream()
    scope = {
        "type": "http",
        "method": "GET",
        "path": f"{ROOT}/live",
        "raw_path": f"{ROOT}/live".encode(),
        "query_string": asked.encode(),
        "headers": [(b"cookie", f"{COOKIE}={cookie}".encode()), (b"hx-request", b"true")],
        "root_path": "",
        "scheme": "https",
        "server": ("shop.test", 443),
        "client": ("10.0.0.1", 1),
        "asgi": {"version": "3.0", "spec_version": "2.3"},
    }
    serving = asyncio.create_task(site.host(scope, stream.receive, stream.send))
    try:
        assert (await stream.part()).startswith(":") or stream.status != 200
        yield stream
    finally:
        stream.gone.set()
        await asyncio.wait_for(serving, PATIENCE)


def sleepers(clock: ManualClock) -> int:
    return len(clock._sleepers)


async def tick(clock: ManualClock, streams: int) -> None:
    """Once every stream waits for the next moment, it comes."""
    await until(lambda: sleepers(clock) == streams)
    clock.advance("2s")


async def test_a_page_is_sent_when_it_has_changed_and_only_then(site: Site, shop: App, clock: ManualClock) -> None:
    async with opened(site) as stream:
        await tick(clock, 1)
        assert "Nothing has been done" in await stream.part()
        await tick(clock, 1)
        await until(lambda: site.dashboard.live.renders == 2 and sleepers(clock) == 1)
        assert stream.parts.empty()
        await shop.operations.queues.pause("webhooks", reason="a ticket", actor="bob")
        await tick(clock, 1)
        event = await stream.part()
        assert event.startswith("id: ")
        assert "a ticket" in event
        assert all(line.startswith(("id: ", "data: ")) for line in event.rstrip("\n").split("\n"))


async def test_a_page_that_has_not_changed_since_it_was_loaded_is_not_sent_at_all(
    site: Site, clock: ManualClock
) -> None:
    import re

    html = (await (await site.visitor()).get(f"{ROOT}/audit")).text
    found = re.search(r'data-live="([0-9a-f]+)"', html)
    assert found is not None
    async with opened(site, seen=found[1]) as stream:
        await tick(clock, 1)
        await until(lambda: site.dashboard.live.renders == 1 and sleepers(clock) == 1)
        assert stream.parts.empty()


async def test_many_who_look_at_the_same_page_cost_one_render_an_interval(site: Site, clock: ManualClock) -> None:
    async with opened(site) as one, opened(site) as two, opened(site) as three:
        for _ in range(3):
            await tick(clock, 3)
        for stream in (one, two, three):
            assert "Audit" in await stream.part()
        await until(lambda: sleepers(clock) == 3)
        assert site.dashboard.live.renders == 3


async def test_what_an_operator_sees_is_never_sent_to_a_viewer(site: Site, clock: ManualClock) -> None:
    page = "/queues/webhooks"
    async with opened(site, page) as operators, opened(site, page, role=Role.VIEWER) as viewers:
        await tick(clock, 2)
        seen, shown = await operators.part(), await viewers.part()
        assert site.dashboard.live.renders == 2
    assert "/do/pause" in seen
    assert "/do/" not in shown
    assert "webhooks" in shown


async def test_nothing_is_rendered_for_those_who_have_gone(site: Site, clock: ManualClock) -> None:
    async with opened(site):
        assert site.dashboard.live.streams == 1
    assert site.dashboard.live.streams == 0
    assert site.dashboard.live._shared == {}


async def test_a_stream_ends_with_its_session(site: Site, clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlane.dashboard.access.SESSION", 4_000_000)
    async with opened(site, seen="x") as stream:
        await tick(clock, 1)
        assert "Audit" in await stream.part()
        await asyncio.wait_for(stream.over.wait(), PATIENCE)


async def test_a_stream_ends_when_its_session_is_logged_out(site: Site, shop: App, clock: ManualClock) -> None:
    """S2, O20: what has happened since the logout is not sent."""
    visitor = await site.visitor()
    csrf = csrf_of((await visitor.get(f"{ROOT}/")).text)
    async with opened(site) as kept, opened(site, cookie=visitor.cookies[COOKIE]) as stream:
        assert (await visitor.post(f"{ROOT}/logout", data={"csrf": csrf})).status_code == 303
        await shop.operations.queues.pause("webhooks", actor="bob")
        await tick(clock, 2)
        assert "webhooks" in await kept.part()
        await asyncio.wait_for(stream.over.wait(), PATIENCE)
        assert stream.parts.empty()


@pytest.mark.parametrize(
    "then",
    [None, Visitor("bob", Role.OPERATOR), Visitor("ann", Role.VIEWER), HTTPException(401)],
    ids=["logged out", "somebody else", "another role", "refused"],
)
async def test_a_stream_ends_when_the_host_no_longer_admits_who_opened_it(
    shop: App, clock: ManualClock, then: Visitor | HTTPException | None
) -> None:
    """S2: what has happened since the host's own logout is not sent."""
    hosts: dict[str, Visitor | HTTPException | None] = {"one": Visitor("ann", Role.OPERATOR)}

    def authorize(request: Request) -> Visitor | None:
        found = hosts[request.cookies[COOKIE]]
        if isinstance(found, HTTPException):
            raise found
        return found

    async with Site.of(shop, clock, authorize=authorize) as site, opened(site, cookie="one") as stream:
        await tick(clock, 1)
        assert "Audit" in await stream.part()
        hosts["one"] = then
        await shop.operations.queues.pause("webhooks", actor="bob")
        await tick(clock, 1)
        await asyncio.wait_for(stream.over.wait(), PATIENCE)
        assert stream.parts.empty()


async def test_a_stream_goes_on_without_a_page_while_the_host_cannot_say_who_is_admitted(
    shop: App, clock: ManualClock
) -> None:
    faults: list[Exception] = []

    def authorize(request: Request) -> Visitor:
        if faults:
            raise faults[0]
        return Visitor("ann", Role.OPERATOR)

    async with Site.of(shop, clock, authorize=authorize) as site, opened(site) as stream:
        for fault in (ConnectionError("away"), HTTPException(503)):
            faults[:] = [fault]
            await tick(clock, 1)
            assert (await stream.part()).startswith("event: trouble\n")
        faults.clear()
        await tick(clock, 1)
        assert "Audit" in await stream.part()


async def test_a_stream_ends_after_a_quarter_of_an_hour_so_that_who_comes_again_is_asked_again(
    site: Site, clock: ManualClock
) -> None:
    async with opened(site) as stream:
        await until(lambda: sleepers(clock) == 1)
        clock.advance("15m")
        await asyncio.wait_for(stream.over.wait(), PATIENCE)


async def test_streams_end_when_the_server_stops(site: Site, clock: ManualClock) -> None:
    async with opened(site) as one, opened(site) as two:
        await until(lambda: sleepers(clock) == 2)
        site.dashboard.live.stopped.set()
        for stream in (one, two):
            await asyncio.wait_for(stream.over.wait(), PATIENCE)


async def test_trouble_is_told_without_its_details_and_the_stream_goes_on(
    site: Site, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise RuntimeError("secret")

    async with opened(site) as stream:
        with monkeypatch.context() as patched:
            patched.setattr(Audit, "list", fails)
            await tick(clock, 1)
            told = await stream.part()
        assert told.startswith("event: trouble\n")
        assert "secret" not in told
        await tick(clock, 1)
        assert "Audit" in await stream.part()


@pytest.mark.parametrize(
    "query", [{"every": "1"}, {"every": "0"}, {"every": "x"}, {"page": "/nowhere"}, {"page": "//x"}]
)
async def test_nonsense_is_refused(site: Site, query: dict[str, str]) -> None:
    answer = await (await site.visitor()).get(f"{ROOT}/live", params={"page": "/", "every": "2", **query})
    assert answer.status_code in (400, 404)


async def test_the_number_of_streams_is_bounded(site: Site) -> None:
    site.dashboard.live.open.update({("somebody", True): MOST_STREAMS})
    answer = await (await site.visitor()).get(f"{ROOT}/live", params={"page": "/", "every": "2"})
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"


async def test_one_session_takes_a_few_streams_and_leaves_the_others_to_others(site: Site) -> None:
    """S5: one viewer could take all of them."""
    async with AsyncExitStack() as open_pages:
        vic = await site.visitor("vic", VIEWER_TOKEN)
        for _ in range(MOST_OF_ONE):
            await open_pages.enter_async_context(opened(site, cookie=vic.cookies[COOKIE]))
        refused = await vic.get(f"{ROOT}/live", params={"page": "/", "every": "2"})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")
        async with opened(site, role=Role.VIEWER), opened(site):
            assert site.dashboard.live.streams == MOST_OF_ONE + 2
    async with opened(site, cookie=vic.cookies[COOKIE]):
        pass
    assert site.dashboard.live.streams == 0
    assert not site.dashboard.live.open


async def test_viewers_leave_streams_for_those_who_act(site: Site) -> None:
    """S5: whoever has the viewer token may log in as often as they like."""
    site.dashboard.live.open.update({("another", False): MOST_OF_VIEWERS})
    vic, ann = await site.visitor("vic", VIEWER_TOKEN), await site.visitor("ann")
    asked = {"page": "/", "every": "2"}
    assert (await vic.get(f"{ROOT}/live", params=asked)).status_code == 503
    async with opened(site, cookie=ann.cookies[COOKIE]):
        pass
    program = site.program(VIEWER_TOKEN)
    site.dashboard.live.open["token of a viewer", False] = MOST_OF_ONE
    named = await program.get(f"{ROOT}/live", params=asked, headers={"X-Fairlane-Actor": "another name"})
    assert named.status_code == 429
