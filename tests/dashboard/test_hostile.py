"""Whoever means harm: nothing they send is run, believed, leaked or left to break a page. On both stores."""

from __future__ import annotations

import hmac
import itertools
import json
import logging
from base64 import urlsafe_b64decode, urlsafe_b64encode
from contextlib import AsyncExitStack
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from fairlane.clock import ManualClock
from fairlane.dashboard.access import COOKIE
from fairlane.dashboard.actions import ACTIONS
from fairlane.dashboard.api import OPERATIONS
from fairlane.dashboard.page import key_query
from fairlane.dashboard.pages import PAGES
from fairlane.errors import StoreUnavailable
from fairlane.operations import Operations
from tests.dashboard.harness import ROOT, TOKEN, VIEWER_TOKEN, Site, csrf_of
from tests.dashboard.world import API, NOBODY, World, open_world

SCRIPT = "<script>alert(1)</script>"
TAG = "\"'><img src=x onerror=alert(1)>"
XSS = f"{SCRIPT}{TAG}{{{{7*7}}}}"
LOOKS = [each for each in OPERATIONS if each.method == "GET"]
SENDING = [each for each in OPERATIONS if each.method == "POST"]


class Seen(HTMLParser):
    """Fails at whatever would run something that is not ours."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.in_script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert not [name for name in given if name.startswith("on")], f"{self.where}: <{tag} {attrs}>"
        assert given.get("src") != "x", f"{self.where}: <{tag} {attrs}>"
        for name in ("href", "src", "action", "formaction", "hx-get", "hx-post"):
            assert not (given.get(name) or "").strip().lower().startswith(("javascript:", "data:text", "//")), attrs
        if tag == "script":
            assert (given.get("src") or "").startswith(f"{ROOT}/static/"), f"{self.where}: {attrs}"
            self.in_script = True

    def handle_endtag(self, tag: str) -> None:
        self.in_script = False

    def handle_data(self, data: str) -> None:
        assert not (self.in_script and data.strip()), f"{self.where}: an inline script"


def check_page(answer: httpx.Response) -> None:
    assert answer.status_code < 500, f"{answer.request.url}: {answer.text[:500]}"
    assert "script-src 'self';" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    if answer.headers.get("content-type", "").startswith("text/html"):
        seen = Seen(str(answer.request.url))
        seen.feed(answer.text)
        assert "alert(1)&gt;49" not in answer.text, "a text was taken for a template"


@pytest.fixture
async def hostile(database_url: str, clock: ManualClock, stack: AsyncExitStack) -> World:
    """Everything that producers and operators can write holds a script."""
    world = await open_world(stack, database_url, clock)
    task = world.app.registry["shop.deliver"]
    for outcome in ("ready", "dead", "done"):
        job = await task.using(priority=5, context={"plan": XSS}).enqueue({XSS: XSS}, account=XSS, endpoint=XSS)
        world.jobs[f"hostile {outcome}"] = job.id
        claims = [] if outcome == "ready" else await world.app.queues["webhooks"].claim(10)
        for claim in claims:
            if claim.id != job.id:
                await claim.release()
            elif outcome == "dead":
                await claim.dead(XSS)
            else:
                await claim.ack({"said": XSS})
    world.app.schedule("0 9 * * *", task, {XSS: XSS}, XSS, XSS, name=XSS)
    await world.app.fire_schedules()
    person = await world.person(XSS)
    csrf = csrf_of((await person.get(f"{ROOT}/")).text)
    sent = {"keys": {"account": XSS}, "reason": XSS}
    made = await person.post(f"{API}/queues/webhooks/pause", json=sent, headers={"X-CSRF-Token": csrf})
    assert made.status_code == 200, made.text
    await world.operator.post(f"{API}/queues/webhooks/limit/set", json={**sent, "limit": "account", "value": 1})
    await world.app.upkeep()
    return world


def paths_of(world: World) -> list[str]:
    """Every page, about what is hostile."""
    filled = []
    for page, job in itertools.product(PAGES, [each for name, each in world.jobs.items() if "hostile" in name]):
        path = page.path.replace("{queue}", "webhooks").replace("{job}", str(job))
        query = str(httpx.QueryParams(key_query({"account": XSS}))) if path.endswith("/key") else ""
        filled.append(f"{path}?{query}" if query else path)
    return list(dict.fromkeys(filled))


async def test_what_producers_and_operators_write_is_shown_and_never_run(hostile: World) -> None:
    person = await hostile.person(XSS)
    is_shown = 0
    for path in paths_of(hostile):
        answer = await person.get(f"{ROOT}{path}")
        assert answer.status_code == 200, f"{path}: {answer.text[:500]}"
        check_page(answer)
        is_shown += "&lt;script&gt;" in answer.text
    assert is_shown >= 4


async def test_what_is_asked_for_is_never_run_either(hostile: World) -> None:
    person = await hostile.person()
    for path in (f"/queues/{SCRIPT}", f"/queues/{SCRIPT}/keys", f"/jobs/{SCRIPT}", f"/{SCRIPT}", f"/do/{SCRIPT}"):
        check_page(await person.get(f"{ROOT}{path}"))
    for page, name in itertools.product(
        PAGES, ("search", "queue", "task", "state", "key", "by", "sort", "after", "back")
    ):
        path = page.path.replace("{queue}", "webhooks").replace("{job}", str(hostile.jobs["ready"]))
        check_page(await person.get(f"{ROOT}{path}", params={name: XSS}))
    for action in ACTIONS:
        fields = {"queue": "webhooks", "job": str(hostile.jobs["ready"]), "back": f"/{XSS}", "key.account": XSS}
        fields["schedule"] = XSS
        for more in (
            {},
            {"limit": "account", "value": "1", "weight": "2"},
            {"limit": XSS, "lasting": XSS, "task": XSS},
        ):
            check_page(await person.get(f"{ROOT}/do/{action.slug}", params={**fields, **more}))
    check_page(await hostile.site.stranger().get(f"{ROOT}/login", params={"next": f"/{XSS}"}))
    check_page(await hostile.site.stranger().post(f"{ROOT}/login", data={"name": XSS, "token": XSS, "next": XSS}))


async def test_the_api_tells_it_as_json_that_no_browser_takes_for_a_page(hostile: World) -> None:
    shown = await hostile.viewer.get(f"{API}/jobs/{hostile.jobs['hostile dead']}")
    assert (shown.json()["error"], shown.json()["keys"]["account"]) == (XSS, XSS)
    for path in (f"/queues/{SCRIPT}", f"/{SCRIPT}", f"/queues/webhooks/key?key=account={SCRIPT}", "/audit"):
        answer = await hostile.viewer.get(f"{API}{path}")
        assert answer.headers["content-type"] == "application/json"
        check_page(answer)
    entries = (await hostile.viewer.get(f"{API}/audit")).json()["entries"]
    assert {(each["actor"], each["reason"]) for each in entries} == {(XSS, XSS), ("api", XSS)}


def actions_of(world: World) -> list[tuple[str, dict[str, Any]]]:
    bodies: dict[str, dict[str, Any]] = {"jobs": {"ids": [str(world.jobs["ready"])]}, "schedules": {"name": "nightly"}}
    return [(each.path.replace("{queue}", "webhooks"), bodies.get(each.path.split("/")[1], {})) for each in SENDING]


async def test_a_forged_request_changes_nothing(world: World) -> None:
    ann, ben = await world.person("ann"), await world.person("ben")
    own = csrf_of((await ann.get(f"{ROOT}/")).text)
    other = csrf_of((await ben.get(f"{ROOT}/")).text)
    for path, body in actions_of(world):
        for headers in (
            {},
            {"X-CSRF-Token": ""},
            {"X-CSRF-Token": other},
            {"X-CSRF-Token": own[:-1]},
            {"X-CSRF-Token": own, "Origin": "https://evil.test"},
            {"X-CSRF-Token": own, "Origin": "null"},
            {"X-CSRF-Token": own, "Sec-Fetch-Site": "cross-site"},
            {"X-CSRF-Token": own, "Sec-Fetch-Site": "same-site"},
        ):
            answer = await ann.post(f"{API}{path}", json=body, headers=headers)
            assert answer.status_code == 403, f"{path} {headers}: {answer.text}"
            assert answer.json()["error"]["code"] in ("forged", "cross_site")
        # What a form of another site can send without being asked first: text that looks like JSON.
        sent = {"Content-Type": "text/plain", "Sec-Fetch-Site": "cross-site", "Origin": "https://evil.test"}
        assert (await ann.post(f"{API}{path}", content=json.dumps(body), headers=sent)).status_code == 403
    assert (await world.viewer.get(f"{API}/audit")).json()["entries"] == []


async def test_nobody_makes_a_session_up(world: World, clock: ManualClock) -> None:
    viewer = await world.person("eve", VIEWER_TOKEN)
    cookie = viewer.cookies[COOKIE]
    said, _, signature = cookie.partition(".")
    told = json.loads(urlsafe_b64decode(said + "=" * (-len(said) % 4)))
    raised = urlsafe_b64encode(json.dumps([told[0], "ann", 2, told[3]]).encode()).decode().rstrip("=")
    forged = [
        f"{raised}.{signature}",
        f"{raised}.",
        f"{said}.{'0' * len(signature)}",
        f"{said}.{hmac.new(b'', said.encode(), 'sha256').hexdigest()}",
        f"{said}.{signature[:-1]}",
        said,
        ".",
        "",
        "a.b.c",
        "é.é",
        "\x7f" * 10,
        "." * 5_000,
        f"{'A' * 100_000}.{signature}",
        f"{urlsafe_b64encode(b'[' * 10_000).decode()}.{signature}",
    ]
    for each in forged:
        stranger = world.site.stranger(headers=[(b"Cookie", f"{COOKIE}={each}".encode())])
        assert (await stranger.get(f"{API}/queues")).status_code == 401, each[:50]
    assert (await viewer.get(f"{API}/queues")).status_code == 200
    clock.advance("13h")
    assert (await viewer.get(f"{API}/queues")).status_code == 401


async def test_a_session_of_another_dashboard_is_worth_nothing(world: World, stack: AsyncExitStack) -> None:
    other = await stack.enter_async_context(Site.of(world.app, world.clock, token="another-token-0003"))
    cookie = (await other.visitor("ann", "another-token-0003")).cookies[COOKIE]
    stranger = world.site.stranger(cookies={COOKIE: cookie})
    assert (await stranger.get(f"{API}/queues")).status_code == 401


async def test_every_deed_of_a_page_is_for_operators_and_of_their_own_session(world: World) -> None:
    viewer, ann, ben = await world.person("eve", VIEWER_TOKEN), await world.person("ann"), await world.person("ben")
    theirs = csrf_of((await ben.get(f"{ROOT}/")).text)
    fields = {"queue": "webhooks", "job": str(world.jobs["ready"]), "limit": "1", "reason": "x"}
    for action in ACTIONS:
        address = f"{ROOT}/do/{action.slug}"
        assert (await world.site.stranger().get(address, params=fields)).status_code == 303
        assert (await world.site.stranger().post(address, data=fields)).status_code in (303, 401)
        assert (await viewer.get(address, params=fields)).status_code == 403
        own = csrf_of((await viewer.get(f"{ROOT}/")).text)
        assert (await viewer.post(address, data={**fields, "csrf": own})).status_code == 403
        for csrf in ({}, {"csrf": ""}, {"csrf": theirs}, {"csrf": own}):
            assert (await ann.post(address, data={**fields, **csrf})).status_code == 403
    assert (await world.viewer.get(f"{API}/audit")).json()["entries"] == []


async def test_no_page_and_no_deed_breaks_at_nonsense(world: World) -> None:
    """What PostgreSQL cannot store, what is no number, what is too long: told as a mistake, not as a fault."""
    person = await world.person()
    csrf = csrf_of((await person.get(f"{ROOT}/")).text)
    digits, cursor = "9" * 3_000, f"{NOBODY.hex}.{1 << 70}.1"
    asked = [
        *(("after", value) for value in ("x", "-1", "nan", "٣", cursor, digits)),
        *((name, digits) for name in ("queue", "task", "key", "search", "sort", "by", "watch", "key.account")),
        ("watch", "%00/key.account=a"),
        ("watch", "webhooks/key.account=%00"),
        ("key", "account=\0"),
    ]
    for page, (name, value) in itertools.product(PAGES, asked):
        path = page.path.replace("{queue}", "webhooks").replace("{job}", str(world.jobs["ready"]))
        check_page(await person.get(f"{ROOT}{path}", params={name: value}))
    for action, name in itertools.product(
        ACTIONS, ("queue", "task", "key", "limit", "job", "value", "weight", "lasting", "delay")
    ):
        fields = {"queue": "webhooks", "job": str(world.jobs["ready"]), "key.account": "acme", name: digits}
        check_page(await person.get(f"{ROOT}/do/{action.slug}", params=fields))
    for action, name in itertools.product(ACTIONS, ("reason", "limit")):
        fields = {
            "queue": "webhooks",
            "job": str(NOBODY),
            "csrf": csrf,
            name: "\0" if name == "reason" else "9" * 5_000,
        }
        check_page(await person.post(f"{ROOT}/do/{action.slug}", data=fields))
    for query in ("page=%00", "page=//evil.test/x", "page=/jobs%3Fafter%3Dx&every=0", "every=2&page=/x"):
        check_page(await person.get(f"{ROOT}/live?{query}"))
    for raw in (b"/jobs/%00", b"/queues/%00", b"/queues/%ff/keys", b"/%00", b"/do/%00"):
        check_page(await person.get(httpx.URL("https://shop.test").copy_with(raw_path=ROOT.encode() + raw)))


async def test_no_stranger_listens_in(world: World) -> None:
    for query in ("", "?page=/", "?page=/&every=2"):
        answer = await world.site.stranger().get(f"{ROOT}/live{query}", headers={"Accept": "text/event-stream"})
        assert answer.status_code in (303, 401)
        assert "text/event-stream" not in answer.headers.get("content-type", "")


async def test_a_login_leads_nowhere_else_and_sets_nothing_else(world: World) -> None:
    for then in (
        "https://evil.test",
        "//evil.test",
        "///evil.test",
        "/\\evil.test",
        "\\\\evil.test",
        "/%0d%0aSet-Cookie: a=b",
        "/\r\nSet-Cookie: a=b",
        "javascript:alert(1)",
        " //evil.test",
        "/\t/evil.test",
        "@evil.test",
        ".evil.test",
    ):
        answer = await world.site.stranger().post(f"{ROOT}/login", data={"name": "ann", "token": TOKEN, "next": then})
        assert answer.status_code == 303, then
        assert answer.headers["location"].startswith(f"{ROOT}/"), then
        assert not answer.headers["location"].startswith(f"{ROOT}//"), then
        assert len(answer.headers.get_list("set-cookie")) == 1
        assert not {"\r", "\n", "\0"} & set(answer.headers["location"])


async def test_whoever_guesses_at_the_login_is_stopped(world: World) -> None:
    guesser = world.site.stranger("10.0.0.66")
    for guess in range(5):
        answer = await guesser.post(f"{ROOT}/login", data={"name": "eve", "token": f"guess-{guess}"})
        assert answer.status_code == 401
    answer = await guesser.post(f"{ROOT}/login", data={"name": "eve", "token": TOKEN})
    assert answer.status_code == 429
    assert COOKIE not in answer.headers.get("set-cookie", "")
    await world.person("ann")


async def test_tokens_and_signatures_are_compared_in_constant_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[Any, Any]] = []
    real = hmac.compare_digest

    def compare(given: Any, known: Any) -> bool:
        compared.append((given, known))
        return real(given, known)

    monkeypatch.setattr("fairlane.dashboard.access.hmac.compare_digest", compare)
    for token in (TOKEN, "wrong-token", VIEWER_TOKEN):
        compared.clear()
        await world.site.program(token).get(f"{API}/queues")
        assert compared == [(token.encode(), known.encode()) for known in (TOKEN, VIEWER_TOKEN)]
    compared.clear()
    await world.site.stranger(cookies={COOKIE: "a.b"}).get(f"{API}/queues")
    assert [given for given, _ in compared] == [b"b"]


async def test_a_fault_tells_an_id_and_the_log_the_rest(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(_: Operations) -> None:
        raise RuntimeError("password=hunter2")

    monkeypatch.setattr(Operations, "overview", broken)
    program = world.site.program()
    with caplog.at_level(logging.ERROR, "fairlane.dashboard"):
        answer = await program.get(f"{API}/overview")
    assert answer.status_code == 500
    told = answer.json()["error"]
    assert told["code"] == "fault"
    assert "hunter2" not in answer.text
    assert "Traceback" not in answer.text
    (record,) = caplog.records
    assert record.getMessage().split()[-1] in told["message"]
    assert record.exc_info is not None

    async def away(_: Operations) -> None:
        raise StoreUnavailable("the database cannot be reached")

    monkeypatch.setattr(Operations, "overview", away)
    answer = await program.get(f"{API}/overview")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")


async def test_every_answer_carries_the_headers_that_keep_browsers_in_check(world: World) -> None:
    for program, path in itertools.product(
        (world.viewer, world.stranger), ("/overview", "/nowhere", "/jobs/cancel", "/jobs?x=1", "/openapi.json")
    ):
        answer = await program.get(f"{API}{path}")
        check_page(answer)
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "access-control-allow-origin" not in answer.headers
        assert "server" not in answer.headers


async def test_what_cannot_be_taken_apart_is_refused(world: World) -> None:
    answer = await world.site.stranger().post(f"{ROOT}/login", data={"token": "x"}, headers={"Origin": "http://["})
    assert answer.status_code == 403
    assert (await world.operator.get(f"{ROOT}/live", params={"page": "//[", "every": "2"})).status_code == 400
    deep = b'{"policies": ' + b"[" * 900 + b"]" * 900 + b"}"
    answer = await world.operator.post(f"{API}/simulate", content=deep, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "malformed")


async def test_a_workload_without_jobs_keeps_nobody_busy(world: World) -> None:
    endless = {"classes": [{"name": "c", "keys": {"account": "a"}, "count": 1_000_000_000, "jobs": 0}]}
    answer = await world.operator.post(f"{API}/simulate", json={"policies": [{}], "workload": endless})
    assert answer.status_code == 422
