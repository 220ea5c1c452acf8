"""Whoever means harm: nothing they send is run, believed, leaked or left to break a page. On both stores."""

from __future__ import annotations

import hmac
import itertools
import json
import logging
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from html.parser import HTMLParser
from typing import Any

import httpx
import pytest

from fairlane import StoreUnavailable
from fairlane.clock import ManualClock
from fairlane.dashboard.access import COOKIE
from fairlane.dashboard.api_operations import OPERATIONS
from fairlane.dashboard.contents import DEEDS, PAGES
from fairlane.dashboard.doorkeeper import LARGEST_BODY
from fairlane.dashboard.keys import key_query
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
    for deed in DEEDS:
        fields = {"queue": "webhooks", "job": str(hostile.jobs["ready"]), "back": f"/{XSS}", "key.account": XSS}
        fields["schedule"] = XSS
        for more in (
            {},
            {"limit": "account", "value": "1", "weight": "2"},
            {"limit": XSS, "lasting": XSS, "task": XSS},
        ):
            check_page(await person.get(f"{ROOT}/do/{deed.name}", params={**fields, **more}))
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


CURSORS = [
    "x",
    "0",
    "." * 20,
    "0" * 1_999,
    "9" * 400,
    f"{NOBODY.hex}.1",
    f"{NOBODY.hex}.1.1.1",
    f"{NOBODY.hex}.{1 << 63}.1",
    f"{NOBODY.hex}.-{1 << 70}.1",
    f"{NOBODY.hex}.1.{1 << 63}",
    f"{NOBODY.hex}.nan.1",
    f"{NOBODY.hex}.١.１",
    "'; drop table jobs; --",
    "../../etc/passwd",
    XSS,
    "🙂",
    "WzFd",
    urlsafe_b64encode(b'[1,"a","b"]').decode(),
    urlsafe_b64encode(b'[99999999999999999999999,"a","b"]').decode(),
    urlsafe_b64encode(b'[1,"\\u0000","b"]').decode(),
    urlsafe_b64encode(b"[" * 900).decode(),
    json.dumps([1 << 70, ["a"], "webhooks"]),
    json.dumps([1.5, ["\0"], "webhooks"]),
    json.dumps({"value": 1, "key": "a", "queue": "b"}),
]


async def test_a_cursor_that_was_made_up_is_refused_or_finds_nothing(world: World) -> None:
    lists = [
        "/jobs",
        "/jobs?state=dead",
        "/dead",
        "/audit",
        *(f"/queues/webhooks/keys?sort={by}" for by in ("waiting", "running", "done", "started", "name")),
    ]
    for path, cursor in itertools.product(lists, CURSORS):
        answer = await world.viewer.get(httpx.URL(f"{API}{path}").copy_merge_params({"after": cursor}))
        assert answer.status_code in (200, 422), f"{path} {cursor!r}: {answer.text}"
        if cursor in ("x", XSS, CURSORS[12]):
            assert answer.status_code == 422


async def test_a_cursor_of_another_list_is_refused(world: World) -> None:
    await world.operator.post(f"{API}/jobs/cancel", json={"filter": {}})
    of_jobs = (await world.viewer.get(f"{API}/jobs?limit=1")).json()["after"]
    of_cancelled = (await world.viewer.get(f"{API}/jobs?limit=1&state=cancelled")).json()["after"]
    assert of_jobs
    assert of_cancelled
    for path, cursor in (("/dead", of_jobs), ("/jobs", of_cancelled), ("/queues/webhooks/keys", of_jobs)):
        answer = await world.viewer.get(f"{API}{path}", params={"after": cursor})
        assert answer.status_code == 422, path


async def test_no_path_leads_out_of_where_it_belongs(world: World) -> None:
    person = await world.person()
    climbs = ("../", "..%2f", "%2e%2e/", "%2e%2e%2f", "..%5c", "....//", "%252e%252e%252f", "..;/", "/", "%00/")
    for climb, start in itertools.product(climbs, ("/static/", "/static/js/", "/api/jobs/", "/queues/")):
        for depth, file in ((1, "access.py"), (2, "access.py"), (12, "etc/passwd")):
            raw = f"{ROOT}{start}{climb * depth}{file}".encode()
            answer = await person.get(httpx.URL("https://shop.test").copy_with(raw_path=raw))
            assert answer.status_code in (400, 404, 422), raw
            assert "root:" not in answer.text
            assert "hmac" not in answer.text


QUERIES = [
    ("/jobs?queue=%00", 400),
    ("/jobs?queue=a%00b", 400),
    ("/jobs?key=account=%00", 400),
    ("/jobs?task=%ff", 400),
    ("/jobs?task=%ed%a0%80", 400),
    ("/audit?after=99999999999999999999999999", 422),
    ("/audit?after=-1", 422),
    ("/audit?after=1e3", 422),
    ("/audit?limit=0", 422),
    ("/audit?limit=201", 422),
    ("/audit?limit=١", 422),
    ("/audit?limit=5&limit=6", 422),
    ("/audit?Limit=5", 422),
    ("/jobs?enqueued_since=2030-01-01", 422),
    ("/jobs?enqueued_since=2030-01-01T00:00:00", 422),
    ("/jobs?enqueued_since=99999-01-01T00:00:00Z", 422),
    ("/jobs?enqueued_since=0001-01-01T00:00:00Z", 200),
    ("/jobs?enqueued_until=9999-12-31T23:59:59Z", 200),
    ("/jobs?enqueued_until=0001-01-01T00:00:00%2b23:59", 200),
    ("/dead?finished_since=0001-01-01T00:00:00Z&finished_until=9999-12-31T23:59:59Z", 200),
    ("/jobs?state=DEAD", 422),
    ("/jobs?state=7", 422),
    ("/jobs?key=account", 200),
    ("/jobs?key==x", 422),
    ("/jobs?key=a=1&key=a=2", 422),
    ("/jobs?" + "&".join(f"key=k{number}=1" for number in range(21)), 422),
    ("/jobs?" + "&".join(f"x{number}=1" for number in range(101)), 422),
    ("/jobs?task=" + "x" * 201, 422),
    ("/jobs?task=" + "x" * 8_001, 414),
    ("/queues/webhooks/keys?search=" + "x" * 201, 422),
    ("/queues/webhooks/keys?by=nothing", 422),
    ("/queues/webhooks/keys?sort=1;drop", 422),
    ("/queues/webhooks/keys?held=1", 422),
    ("/queues/webhooks/keys?search=%25_%27%5c", 200),
    ("/queues/webhooks/key?key=account=" + "é" * 500, 422),
    ("/queues/webhooks/key?key=priority=x", 422),
    ("/queues/webhooks/explain?key=nothing=1", 422),
    ("/queues/%00", 400),
    ("/queues/%ff", 400),
    ("/queues/" + "x" * 5_000, 404),
    ("/queues/webhooks%2f..", 404),
    ("/jobs/%00", 400),
    ("/jobs/0", 422),
    ("/jobs/{0}", 422),
    ("/jobs/urn:uuid:00000000-0000-0000-0000-000000000007", 404),
]


async def test_a_query_that_makes_no_sense_is_refused(world: World) -> None:
    for path, status in QUERIES:
        answer = await world.viewer.get(f"{API}{path}")
        assert answer.status_code == status, f"{path}: {answer.text[:300]}"


PAUSE = "/queues/webhooks/pause"
BODIES: list[tuple[str, bytes, int]] = [
    (PAUSE, b"", 400),
    (PAUSE, b"{", 400),
    (PAUSE, b"nonsense", 400),
    (PAUSE, b"{} {}", 400),
    (PAUSE, b"{'reason': 1}", 400),
    (PAUSE, b'{"reason": NaN}', 400),
    (PAUSE, b'{"reason": "\\ud800"}', 400),
    (PAUSE, b'{"reason": "\xff"}', 400),
    (PAUSE, b"\xef\xbb\xbf{}", 400),
    (PAUSE, '{"reason": "x"}'.encode("utf-16"), 400),
    (PAUSE, b'{"keys": ' + b'{"a":' * 5_000 + b"1" + b"}" * 5_001, 400),
    (PAUSE, b"[" * 100_000, 400),
    (PAUSE, b"[]", 422),
    (PAUSE, b"null", 422),
    (PAUSE, b'"pause"', 422),
    (PAUSE, b'{"reason": "a\\u0000b"}', 422),
    (PAUSE, b'{"keys": {"account": "\\u0000"}}', 422),
    (PAUSE, b'{"keys": {"\\u0000": "a"}}', 422),
    (PAUSE, b'{"reason": 5}', 422),
    (PAUSE, b'{"reason": null}', 422),
    (PAUSE, b'{"reason": "' + b"x" * 1_001 + b'"}', 422),
    (PAUSE, b'{"resaon": "typo"}', 422),
    (PAUSE, b'{"actor": "somebody"}', 422),
    (PAUSE, b'{"__proto__": {}}', 422),
    (PAUSE, b'{"dry_run": "true"}', 422),
    (PAUSE, b'{"dry_run": 1}', 422),
    (PAUSE, b'{"expires_in": 1e308}', 422),
    (PAUSE, b'{"expires_in": -1}', 422),
    (PAUSE, b'{"expires_in": 0}', 422),
    (PAUSE, b'{"expires_in": "9000000000000s"}', 422),
    (PAUSE, b'{"expires_in": "' + b"9" * 49 + b'd"}', 422),
    (PAUSE, b'{"expires_in": "1h", "expires_at": "2031-01-01T00:00:00Z"}', 422),
    (PAUSE, b'{"expires_at": "2031-01-01T00:00:00"}', 422),
    (PAUSE, b'{"expires_at": "1031-01-01T00:00:00Z"}', 422),
    (PAUSE, b'{"expires_at": "9999-12-31T23:59:59.999999Z"}', 200),
    (PAUSE, b'{"expires_at": "9999-12-31T23:59:59.999999-23:59"}', 422),
    (PAUSE, b'{"keys": {"account": 1e400}}', 400),
    (PAUSE, b'{"keys": {"account": 1.5}}', 422),
    (PAUSE, b'{"keys": {"account": true}}', 422),
    (PAUSE, b'{"keys": {"account": ["a"]}}', 422),
    (PAUSE, b'{"keys": {"account": 123456789012345678901234567890}}', 422),
    (PAUSE, b'{"keys": {"nothing": "a"}}', 422),
    (PAUSE, b'{"keys": {"account": "' + b"x" * 513 + b'"}}', 422),
    (PAUSE, json.dumps({"keys": {f"k{number}": "a" for number in range(21)}}).encode(), 422),
    (PAUSE, b'{"keys": {"account": 42.0}}', 200),
    (PAUSE, b'{"keys": {"account": null}}', 200),
    ("/queues/webhooks/limit/set", b'{"limit": "account", "value": 1e300}', 422),
    ("/queues/webhooks/limit/set", b'{"limit": "account", "value": -1, "keys": {"account": "a"}}', 422),
    ("/queues/webhooks/limit/set", b'{"limit": "nothing", "value": 1, "keys": {"account": "a"}}', 422),
    ("/queues/webhooks/limit/set", b'{"value": 1}', 422),
    ("/queues/webhooks/weight/set", b'{"weight": 0, "keys": {"account": "a"}}', 422),
    ("/queues/webhooks/weight/set", b'{"weight": 1e-320, "keys": {"account": "a"}}', 422),
    ("/queues/webhooks/weight/set", b'{"weight": 1, "keys": {}}', 422),
    ("/jobs/cancel", b"{}", 422),
    ("/jobs/cancel", b'{"ids": []}', 422),
    ("/jobs/cancel", b'{"ids": ["1"]}', 422),
    ("/jobs/cancel", b'{"ids": ["00000000-0000-0000-0000-000000000007"], "filter": {}}', 422),
    ("/jobs/cancel", json.dumps({"ids": [str(NOBODY)] * 1_001}).encode(), 422),
    ("/jobs/cancel", json.dumps({"ids": [str(NOBODY)] * 1_000}).encode(), 200),
    ("/jobs/cancel", b'{"filter": {"state": "done"}}', 422),
    ("/jobs/cancel", b'{"filter": {}, "limit": 0}', 422),
    ("/jobs/cancel", b'{"filter": {}, "limit": 10001}', 422),
    ("/jobs/replay", b'{"filter": {}, "delay": "300000000d"}', 422),
    ("/jobs/replay", b'{"filter": {}, "delay": 1e15}', 422),
    ("/jobs/force", b'{"filter": {}}', 422),
    ("/queues/a%00b/pause", b"{}", 400),
    ("/queues/nowhere/pause", b"{}", 404),
    ("/simulate", b'{"policies": []}', 422),
    ("/simulate", b'{"policies": ["webhooks"]}', 422),
    ("/simulate", b'{"policies": ["nowhere"], "history": "webhooks"}', 404),
    ("/simulate", b'{"policies": [{"fair": 5}], "history": "webhooks"}', 422),
    ("/simulate", b'{"policies": [{"limits": [{}]}], "history": "webhooks"}', 422),
    ("/simulate", b'{"policies": [{"limits": {"kind": "rate"}}], "history": "webhooks"}', 422),
    ("/simulate", b'{"policies": [{"limits": [{"kind": ["rate"]}]}], "history": "webhooks"}', 422),
    ("/simulate", b'{"policies": [{"limits": [{"kind": "rate", "limit": 1e308, "per": 1}]}], "history": "email"}', 422),
    ("/simulate", b'{"policies": [{"keys": 5}], "history": "webhooks"}', 422),
    ("/simulate", b'{"policies": [{"partition": {}}], "history": "webhooks"}', 422),
    ("/simulate", b'{"policies": ["webhooks"], "history": "webhooks", "by": ["a b"]}', 422),
    ("/simulate", b'{"policies": ["webhooks"], "history": "webhooks", "until": "1e9"}', 422),
]


async def test_a_body_that_makes_no_sense_is_refused(world: World) -> None:
    json_header = {"Content-Type": "application/json"}
    for path, sent, status in BODIES:
        answer = await world.operator.post(f"{API}{path}", content=sent, headers=json_header)
        assert answer.status_code == status, f"{path} {sent[:80]!r}: {answer.status_code} {answer.text[:300]}"


async def test_only_json_is_read_and_not_too_much_of_it(world: World) -> None:
    program = world.operator
    for kind in (
        "",
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/json; charset=latin-1",
        "x" * 9_000,
    ):
        answer = await program.post(f"{API}{PAUSE}", content=b"{}", headers={"Content-Type": kind})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type"), kind
    for kind in ("application/json", "application/json; charset=utf-8", "Application/JSON;charset=UTF-8"):
        assert (await program.post(f"{API}{PAUSE}", content=b"{}", headers={"Content-Type": kind})).status_code == 200

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 65_536

    for content in (b" " * (LARGEST_BODY + 1), endless()):
        answer = await program.post(f"{API}{PAUSE}", content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    assert (await program.get(f"{API}/queues", headers={"X-Fairlane-Actor": "x" * 60_000})).status_code == 200


async def test_who_a_program_acts_for_is_recorded_and_nothing_more(world: World) -> None:
    names = {
        b"ben": "api:ben",
        b"ann\tann": "api:annann",
        b"": "api",
        b"   ": "api",
        "Zoë".encode(): "api:Zoë",
        "Zoë".encode("latin-1"): "api:Zoë",
        b"x" * 5_000: "api:" + "x" * 96,
        XSS.encode(): f"api:{XSS}",
        "a\u202eb\u200bc".encode(): "api:abc",
    }
    for sent, recorded in names.items():
        headers = [(b"X-Fairlane-Actor", sent)]
        assert (await world.operator.post(f"{API}{PAUSE}", json={}, headers=headers)).status_code == 200
        newest = (await world.viewer.get(f"{API}/audit?limit=1")).json()["entries"][0]
        assert newest["actor"] == recorded
        for role in ("operator", "ann"):
            viewer = await world.viewer.post(f"{API}{PAUSE}", json={}, headers={"X-Fairlane-Actor": role})
            assert viewer.status_code == 403


async def test_no_header_makes_one_method_another(world: World) -> None:
    for name in ("X-HTTP-Method-Override", "X-HTTP-Method", "X-Method-Override"):
        assert (await world.operator.get(f"{API}{PAUSE}", headers={name: "POST"})).status_code == 405
        assert (await world.viewer.get(f"{API}/queues", headers={name: "DELETE"})).status_code == 200
    assert (await world.operator.get(f"{API}{PAUSE}?_method=POST")).status_code == 405
    assert (await world.viewer.get(f"{API}/audit")).json()["entries"] == []


async def test_every_deed_of_a_page_is_for_operators_and_of_their_own_session(world: World) -> None:
    viewer, ann, ben = await world.person("eve", VIEWER_TOKEN), await world.person("ann"), await world.person("ben")
    theirs = csrf_of((await ben.get(f"{ROOT}/")).text)
    fields = {"queue": "webhooks", "job": str(world.jobs["ready"]), "limit": "1", "reason": "x"}
    for deed in DEEDS:
        address = f"{ROOT}/do/{deed.name}"
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
    for deed, name in itertools.product(
        DEEDS, ("queue", "task", "key", "limit", "job", "value", "weight", "lasting", "delay")
    ):
        fields = {"queue": "webhooks", "job": str(world.jobs["ready"]), "key.account": "acme", name: digits}
        check_page(await person.get(f"{ROOT}/do/{deed.name}", params=fields))
    for deed, name in itertools.product(DEEDS, ("reason", "limit")):
        fields = {
            "queue": "webhooks",
            "job": str(NOBODY),
            "csrf": csrf,
            name: "\0" if name == "reason" else "9" * 5_000,
        }
        check_page(await person.post(f"{ROOT}/do/{deed.name}", data=fields))
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
    async def broken() -> None:
        raise RuntimeError("password=hunter2")

    monkeypatch.setattr(world.site.dashboard.operations, "overview", broken)
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

    async def away() -> None:
        raise StoreUnavailable("the database cannot be reached")

    monkeypatch.setattr(world.site.dashboard.operations, "overview", away)
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
