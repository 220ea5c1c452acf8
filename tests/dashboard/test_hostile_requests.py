"""What nobody should send: made-up cursors, paths, queries, bodies and headers. Refused, and nothing breaks."""

from __future__ import annotations

import itertools
import json
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator

import httpx

from fairlane.dashboard.access import LARGEST_BODY
from tests.dashboard.harness import ROOT
from tests.dashboard.test_hostile import XSS
from tests.dashboard.world import API, NOBODY, World

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
    ("/queues/" + "x" * 5_000, 422),
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
    (PAUSE, b'{"reason": "x", "expires_at": "9999-12-31T23:59:59.999999Z"}', 200),
    (PAUSE, b'{"expires_at": "9999-12-31T23:59:59.999999-23:59"}', 422),
    (PAUSE, b'{"keys": {"account": 1e400}}', 400),
    (PAUSE, b'{"keys": {"account": 1.5}}', 422),
    (PAUSE, b'{"keys": {"account": true}}', 422),
    (PAUSE, b'{"keys": {"account": ["a"]}}', 422),
    (PAUSE, b'{"keys": {"account": 123456789012345678901234567890}}', 422),
    (PAUSE, b'{"keys": {"nothing": "a"}}', 422),
    (PAUSE, b'{"keys": {"account": "' + b"x" * 513 + b'"}}', 422),
    (PAUSE, json.dumps({"keys": {f"k{number}": "a" for number in range(21)}}).encode(), 422),
    (PAUSE, b'{"reason": "x", "keys": {"account": 42.0}}', 200),
    (PAUSE, b'{"reason": "x", "keys": {"account": null}}', 200),
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
    ("/jobs/cancel", json.dumps({"reason": "x", "ids": [str(NOBODY)] * 1_000}).encode(), 200),
    ("/jobs/cancel", b'{"filter": {"state": "done"}}', 422),
    ("/jobs/cancel", b'{"filter": {}, "limit": 0}', 422),
    ("/jobs/cancel", b'{"filter": {}, "limit": 10001}', 422),
    ("/jobs/replay", b'{"filter": {}, "delay": "300000000d"}', 422),
    ("/jobs/replay", b'{"filter": {}, "delay": 1e15}', 422),
    ("/jobs/force", b'{"filter": {}}', 422),
    ("/queues/a%00b/pause", b"{}", 400),
    ("/queues/nowhere/pause", b'{"reason": "x"}', 404),
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
        assert (
            await program.post(f"{API}{PAUSE}", content=b'{"reason": "x"}', headers={"Content-Type": kind})
        ).status_code == 200

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
