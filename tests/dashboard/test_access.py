"""Who is let in, as what, and what is sent by whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any
from urllib.parse import unquote

import pytest
from httpx import ASGITransport, AsyncClient
from starlette.exceptions import HTTPException
from starlette.requests import Request

from fairlane import App
from fairlane.clock import ManualClock
from fairlane.dashboard import Role, Visitor, create_dashboard
from fairlane.dashboard.access import COOKIE, LARGEST_BODY, weakness_of
from fairlane.dashboard.actions import safe_path
from fairlane.dashboard.pages import PAGES
from fairlane.errors import ConfigurationError, StoreUnavailable
from fairlane.operations import Operations
from tests.dashboard.harness import ROOT, TOKEN, VIEWER_TOKEN, Site, a_shop, csrf_of

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PLAIN = [page.path for page in PAGES if "{" not in page.path]


async def test_a_dashboard_without_a_token_and_without_the_hosts_word_is_not_made(shop: App) -> None:
    with pytest.raises(ConfigurationError, match="closed by default"):
        create_dashboard(shop)
    with pytest.raises(ConfigurationError, match="at least 8"):
        create_dashboard(shop, token="short")
    with pytest.raises(ConfigurationError, match="the same"):
        create_dashboard(shop, token=TOKEN, viewer_token=TOKEN)


@pytest.mark.parametrize("path", [*PLAIN, "/live", "/do/anything", "/nowhere"])
async def test_strangers_see_nothing_but_the_door(site: Site, path: str) -> None:
    answer = await site.stranger().get(f"{ROOT}{path}")
    assert answer.status_code == 303
    assert answer.headers["location"].startswith(f"{ROOT}/login")


@pytest.mark.parametrize("path", ["/api", "/api/queues", "/api/nowhere"])
async def test_a_program_without_a_token_is_told_so_as_json(site: Site, path: str) -> None:
    answer = await site.stranger().get(f"{ROOT}{path}")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"]["code"] == "unauthorized"


async def test_a_page_that_follows_is_told_as_json_that_its_session_is_over(site: Site) -> None:
    answer = await site.stranger().get(f"{ROOT}/live?page=/", headers={"HX-Request": "true"})
    assert answer.status_code == 401


@pytest.mark.parametrize("path", PLAIN)
@pytest.mark.parametrize("token", [TOKEN, VIEWER_TOKEN])
async def test_whoever_logs_in_sees_every_page(site: Site, token: str, path: str) -> None:
    visitor = await site.visitor("ann", token)
    answer = await visitor.get(f"{ROOT}{path}")
    assert answer.status_code == 200
    assert "ann" in answer.text
    assert str(site.dashboard.access.role_of(token)) in answer.text


async def test_after_the_login_a_person_is_where_they_wanted_to_go(site: Site) -> None:
    stranger = site.stranger()
    door = (await stranger.get(f"{ROOT}/audit?queue=webhooks")).headers["location"]
    form = await stranger.get(door)
    assert 'value="/audit?queue=webhooks"' in form.text
    answer = await stranger.post(f"{ROOT}/login", data={"name": "ann", "token": TOKEN, "next": "/audit?queue=webhooks"})
    assert answer.headers["location"] == f"{ROOT}/audit?queue=webhooks"


@pytest.mark.parametrize(
    "elsewhere", ["https://evil.test/", "//evil.test", "/\\evil.test", "javascript:alert(1)", "/\tx", "", "evil"]
)
async def test_a_login_leads_nowhere_else(site: Site, elsewhere: str) -> None:
    assert safe_path(elsewhere) == "/"
    answer = await site.stranger().post(f"{ROOT}/login", data={"name": "ann", "token": TOKEN, "next": elsewhere})
    assert answer.headers["location"] == f"{ROOT}/"


async def test_the_cookie_is_out_of_reach_of_scripts_other_sites_and_other_paths(site: Site) -> None:
    answer = await site.stranger().post(f"{ROOT}/login", data={"name": "ann", "token": TOKEN})
    cookie = answer.headers["set-cookie"].lower()
    for part in ("httponly", "samesite=strict", "secure", f"path={ROOT}", "max-age=43200"):
        assert part in cookie
    assert TOKEN not in cookie


async def test_a_wrong_token_lets_nobody_in(site: Site) -> None:
    stranger = site.stranger()
    for token in ("wrong-token-000", TOKEN[:-1], TOKEN + "x", "", "\ud800".encode("utf-8", "surrogatepass").hex()):
        answer = await site.stranger(f"10.1.0.{len(token)}").post(f"{ROOT}/login", data={"name": "ann", "token": token})
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
    assert (await stranger.get(f"{ROOT}/")).status_code == 303


async def test_a_login_without_a_name_is_refused_for_the_audit_would_not_know_who_acted(site: Site) -> None:
    for name in ("", "   ", "x" * 101, "a\x00b"):
        answer = await site.stranger().post(f"{ROOT}/login", data={"name": name, "token": TOKEN})
        assert answer.status_code == 400


async def test_guessing_is_slowed_down_by_address_and_forgiven_after_a_minute(site: Site, clock: ManualClock) -> None:
    async def guess(address: str, token: str) -> int:
        answer = await site.stranger(address).post(f"{ROOT}/login", data={"name": "ann", "token": token})
        return answer.status_code

    assert [await guess("10.0.0.9", "wrong-token-000") for _ in range(6)] == [401] * 5 + [429]
    assert await guess("10.0.0.9", TOKEN) == 429
    assert await guess("10.0.0.8", TOKEN) == 303
    clock.advance("61s")
    assert await guess("10.0.0.9", TOKEN) == 303


async def test_guessing_from_many_addresses_is_slowed_down_over_all(site: Site, clock: ManualClock) -> None:
    throttle = site.dashboard.access.throttle
    for number in range(60):
        assert throttle.wait(f"10.0.1.{number}") == 0
        throttle.failed(f"10.0.1.{number}")
    assert throttle.wait("10.9.9.9") == 60
    for number in range(5_000):
        throttle.failed(f"10.2.{number // 256}.{number % 256}")
    assert len(throttle._addresses) <= 1_000


async def test_a_session_ends_after_twelve_hours(site: Site, clock: ManualClock) -> None:
    visitor = await site.visitor()
    clock.advance("11h59m")
    assert (await visitor.get(f"{ROOT}/")).status_code == 200
    clock.advance("2m")
    assert (await visitor.get(f"{ROOT}/")).status_code == 303


async def test_a_forged_session_is_none(site: Site) -> None:
    visitor = await site.visitor("ann", VIEWER_TOKEN)
    real = visitor.cookies[COOKIE]
    said, _, signature = real.partition(".")
    other = site.dashboard.access.open_session("eve", Role.OPERATOR).partition(".")[0]
    for forged in (f"{other}.{signature}", f"{said}.{'0' * 64}", said, f".{signature}", "x.y", f"{said}.", "é.é"):
        stranger = site.stranger()
        answer = await stranger.get(f"{ROOT}/", headers={b"Cookie": f"{COOKIE}={forged}".encode()})
        assert answer.status_code == 303, forged


async def test_whoever_changes_the_token_ends_every_session(shop: App, clock: ManualClock, site: Site) -> None:
    cookie = site.dashboard.access.open_session("ann", Role.OPERATOR)
    async with Site.of(shop, clock, token=TOKEN, viewer_token="another-viewer-token") as changed:
        answer = await changed.stranger().get(f"{ROOT}/", headers={"Cookie": f"{COOKIE}={cookie}"})
        assert answer.status_code == 303
    async with Site.of(shop, clock, token=TOKEN, viewer_token=VIEWER_TOKEN) as same:
        answer = await same.stranger().get(f"{ROOT}/", headers={"Cookie": f"{COOKIE}={cookie}"})
        assert answer.status_code == 200


async def test_a_program_shows_its_token_with_every_request(site: Site) -> None:
    assert (await site.program().get(f"{ROOT}/")).status_code == 200
    visitor = await site.visitor()
    wrong = {"Authorization": "Bearer wrong-token-000"}
    assert (await visitor.get(f"{ROOT}/", headers=wrong)).status_code == 303, "the cookie must not help"
    assert (await site.stranger().get(f"{ROOT}/", headers={"Authorization": f"Basic {TOKEN}"})).status_code == 303
    assert (await site.stranger(cookies={COOKIE: TOKEN}).get(f"{ROOT}/")).status_code == 303


async def test_logging_out_takes_the_cookie_away(site: Site) -> None:
    visitor = await site.visitor()
    csrf = csrf_of((await visitor.get(f"{ROOT}/")).text)
    answer = await visitor.post(f"{ROOT}/logout", data={"csrf": csrf})
    assert answer.status_code == 303
    assert COOKIE not in visitor.cookies


async def test_a_form_of_nobody_or_of_another_session_changes_nothing(site: Site) -> None:
    ann, bob = await site.visitor("ann"), await site.visitor("bob")
    csrf = csrf_of((await bob.get(f"{ROOT}/")).text)
    for sent in ({}, {"csrf": ""}, {"csrf": "0" * 64}, {"csrf": csrf}):
        assert (await ann.post(f"{ROOT}/logout", data=sent)).status_code == 403
    own = csrf_of((await ann.get(f"{ROOT}/")).text)
    assert (await ann.post(f"{ROOT}/logout", headers={"X-CSRF-Token": own})).status_code == 303


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://evil.test"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_a_form_that_another_site_sends_is_refused(site: Site, headers: dict[str, str]) -> None:
    visitor = await site.visitor()
    csrf = csrf_of((await visitor.get(f"{ROOT}/")).text)
    answer = await visitor.post(f"{ROOT}/logout", data={"csrf": csrf}, headers=headers)
    assert answer.status_code == 403
    login = await site.stranger().post(f"{ROOT}/login", data={"name": "ann", "token": TOKEN}, headers=headers)
    assert login.status_code == 403


async def test_a_form_of_our_own_pages_is_taken(site: Site) -> None:
    for headers in ({"Origin": "https://shop.test"}, {"Sec-Fetch-Site": "same-origin", "Origin": "https://proxy.test"}):
        visitor = await site.visitor()
        csrf = csrf_of((await visitor.get(f"{ROOT}/")).text)
        assert (await visitor.post(f"{ROOT}/logout", data={"csrf": csrf}, headers=headers)).status_code == 303


async def test_viewers_send_nothing_that_could_change_something(site: Site) -> None:
    viewer = await site.visitor("vic", VIEWER_TOKEN)
    csrf = csrf_of((await viewer.get(f"{ROOT}/")).text)
    for path in ("/do/anything", "/api/anything", "/"):
        assert (await viewer.post(f"{ROOT}{path}", data={"csrf": csrf})).status_code == 403
    assert (await site.program(VIEWER_TOKEN).post(f"{ROOT}/api/anything")).status_code == 403
    assert (await viewer.post(f"{ROOT}/logout", data={"csrf": csrf})).status_code == 303


async def test_the_host_may_say_who_somebody_is_and_then_there_is_no_login(shop: App, clock: ManualClock) -> None:
    async def authorize(request: Request) -> Visitor | None:
        name = request.headers.get("x-user")
        return None if name is None else Visitor(name, Role.OPERATOR if name == "root" else Role.VIEWER)

    async with Site.of(shop, clock, authorize=authorize) as site:
        assert (await site.stranger().get(f"{ROOT}/")).status_code == 401
        assert (await site.stranger().get(f"{ROOT}/login")).status_code == 404
        seen = await site.stranger(headers={"x-user": "root"}).get(f"{ROOT}/")
        assert "operator" in seen.text
        assert "Log out" not in seen.text
        assert (await site.stranger(headers={"x-user": "root"}).post(f"{ROOT}/do/x")).status_code == 403
        assert (await site.program().get(f"{ROOT}/")).status_code == 401


async def test_a_host_that_says_it_at_once_is_understood_too(shop: App, clock: ManualClock) -> None:
    async with Site.of(shop, clock, authorize=lambda request: Visitor("ann")) as site:
        assert (await site.stranger().get(f"{ROOT}/")).status_code == 200


@pytest.mark.parametrize("path", ["/", "/login", "/healthz", "/static/dashboard.css", "/nowhere", "/api/nowhere"])
async def test_every_answer_carries_the_headers_that_keep_a_page_to_itself(site: Site, path: str) -> None:
    for client in (site.stranger(), await site.visitor()):
        answer = await client.get(f"{ROOT}{path}")
        policy = answer.headers["content-security-policy"]
        for part in ("default-src 'self'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'"):
            assert part in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert ("no-store" in answer.headers.get("cache-control", "")) == ("/static/" not in path)


@pytest.mark.parametrize("path", [*PLAIN, "/login"])
async def test_no_page_has_script_or_style_of_its_own(site: Site, path: str) -> None:
    import re

    html = (await (await site.visitor()).get(f"{ROOT}{path}")).text
    assert not re.search(r"<script(?![^>]*\bsrc=)", html)
    assert "<style" not in html
    assert not re.search(r"\s(style|on[a-z]+)=", html)
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "https://" not in html


async def test_more_than_a_megabyte_is_not_read(site: Site) -> None:
    visitor = await site.visitor()
    answer = await visitor.post(f"{ROOT}/logout", content=b"x" * (LARGEST_BODY + 1))
    assert answer.status_code == 413

    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65_536

    assert (await visitor.post(f"{ROOT}/logout", content=endless())).status_code == 413


@pytest.mark.parametrize("path", ["/static/../access.py", "/static/%2e%2e/access.py", "/static/..%2faccess.py"])
async def test_files_outside_of_the_static_folder_are_not_served(site: Site, path: str) -> None:
    answer = await (await site.visitor()).get(f"{ROOT}{path}")
    assert answer.status_code in (303, 404)
    assert "Access" not in answer.text


async def test_health_is_told_to_everybody_and_nothing_else(
    site: Site, shop: App, clock: ManualClock, stack: AsyncExitStack
) -> None:
    for path in ("/healthz", "/readyz"):
        answer = await site.stranger().get(f"{ROOT}{path}")
        assert (answer.status_code, answer.text) == (200, "ok\n")
    away = App("postgresql://nobody@127.0.0.1:1/none", clock=clock)
    broken = await stack.enter_async_context(Site.of(away, clock, token=TOKEN))
    assert (await broken.stranger().get(f"{ROOT}/healthz")).status_code == 200
    answer = await broken.stranger().get(f"{ROOT}/readyz")
    assert (answer.status_code, answer.text) == (503, "not ready\n")
    page = await (await broken.visitor()).get(f"{ROOT}/")
    assert page.status_code == 503
    assert 'role="alert"' in page.text


async def test_whoever_guesses_tokens_for_programs_is_stopped_and_people_are_not(
    site: Site, clock: ManualClock
) -> None:
    guesser = site.stranger("10.0.0.66")
    for guess in range(60):
        answer = await guesser.get(f"{ROOT}/api/queues", headers={"Authorization": f"Bearer guess-{guess}"})
        assert answer.status_code == 401
    for token in ("guess-61", TOKEN):
        answer = await guesser.get(f"{ROOT}/api/queues", headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "60"
    assert (await site.program().get(f"{ROOT}/api/openapi.json")).status_code == 200
    assert (await guesser.post(f"{ROOT}/login", data={"name": "ann", "token": TOKEN})).status_code == 303
    clock.advance("61s")
    answer = await guesser.get(f"{ROOT}/api/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"})
    assert answer.status_code == 200


async def test_nobody_is_listened_to_before_they_are_let_in(site: Site) -> None:
    """A stranger who sends without an end costs nothing: what they send is not read."""

    was_read = False

    async def unread() -> AsyncIterator[bytes]:
        nonlocal was_read
        was_read = True
        yield b""

    assert (await site.stranger().post(f"{ROOT}/api/jobs/cancel", content=unread())).status_code == 401
    viewer = site.program(VIEWER_TOKEN)
    assert (await viewer.post(f"{ROOT}/api/jobs/cancel", content=unread())).status_code == 403
    assert not was_read
    assert (await site.program().post(f"{ROOT}/api/jobs/cancel", content=unread())).status_code == 415
    assert was_read


async def test_a_body_that_does_not_end_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlane.dashboard.access.SLOWEST_BODY", 0.0)

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    answer = await site.program().post(f"{ROOT}/api/jobs/cancel", content=slow())
    assert answer.status_code == 408


@pytest.mark.parametrize("length", ["9" * 5_000, "0" * 5_000 + "99999999", "-1", "1e3", "٣"])
async def test_a_length_that_makes_no_sense_is_refused(site: Site, length: str) -> None:
    headers = [(b"Content-Length", length.encode())]
    answer = await site.program().post(f"{ROOT}/api/jobs/cancel", content=b"{}", headers=headers)
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("path", "following"),
    [
        ("/jobs?state=dead&key=a%26b", "/jobs?state=dead&key=a%26b"),
        ("/jobs/%3Fa", "/jobs/%3Fa"),
        ("//elsewhere.example/", "/elsewhere.example/"),
        ("/%5Celsewhere.example/", "/%5Celsewhere.example/"),
    ],
)
async def test_whom_the_host_does_not_know_is_sent_to_its_own_login(shop: App, path: str, following: str) -> None:
    built = create_dashboard(shop, authorize=lambda request: None, login_url="/login-of-mine?theme=dark")
    async with AsyncClient(transport=ASGITransport(built)) as browser:
        answer = await browser.get(f"http://host.example{path}", headers=BROWSER)
    assert answer.status_code == 303
    login, _, asked = answer.headers["location"].partition("&next=")
    assert (login, unquote(asked)) == ("/login-of-mine?theme=dark", following)


async def test_a_program_whom_the_host_does_not_know_is_told_so(shop: App, clock: ManualClock) -> None:
    async with Site.of(shop, clock, authorize=lambda request: None, login_url="/login-of-mine") as site:
        stranger = site.stranger()
        assert (await stranger.get(f"{ROOT}/jobs", headers=BROWSER)).headers["location"].endswith("?next=%2Fops%2Fjobs")
        for path, accept in (("/api/queues", "text/html"), ("/jobs", "*/*"), ("/jobs", "text/event-stream")):
            assert (await stranger.get(f"{ROOT}{path}", headers={"accept": accept})).status_code == 401
        assert (await stranger.post(f"{ROOT}/do/anything", headers=BROWSER)).status_code == 401


async def test_a_login_elsewhere_needs_somebody_who_says_who_has_logged_in(shop: App) -> None:
    with pytest.raises(ConfigurationError, match="give authorize="):
        create_dashboard(shop, token="a-long-secret", login_url="/login")


CREDENTIALS = {
    "nothing": (),
    "junk bearer": ("junk",),
    "valid bearer": ("bearer",),
    "session": ("session",),
    "session and junk bearer": ("session", "junk"),
    "session and valid bearer": ("session", "bearer"),
}
ORIGINS: dict[str, dict[str, str]] = {
    "good": {"Origin": "https://shop.test"},
    "evil": {"Origin": "https://evil.test"},
    "missing": {},
}
ADMITTED_BY_BEARER = {"own login": ("valid bearer", "session and valid bearer"), "authorize": ("valid bearer",)}


@pytest.mark.parametrize("csrf", ["csrf", "no csrf"])
@pytest.mark.parametrize("origin", ORIGINS)
@pytest.mark.parametrize("credentials", CREDENTIALS)
@pytest.mark.parametrize("mode", ["own login", "authorize"])
async def test_only_a_credential_that_admitted_somebody_changes_what_is_checked(
    shop: App, clock: ManualClock, mode: str, credentials: str, origin: str, csrf: str
) -> None:
    """S1, O20: a bearer token that admitted nobody switches neither the form token nor the Origin check off."""
    options: dict[str, Any] = {"token": TOKEN, "viewer_token": VIEWER_TOKEN}
    if mode == "authorize":
        options["authorize"] = _by_cookie_or_bearer
    async with Site.of(shop, clock, **options) as site:
        session = await site.visitor() if mode == "own login" else site.stranger(cookies={"host": "root"})
        form = csrf_of((await session.get(f"{ROOT}/do/pause?queue=webhooks")).text)
        given = CREDENTIALS[credentials]
        client = session if "session" in given else site.stranger()
        headers = dict(ORIGINS[origin])
        if len(given) > ("session" in given):
            headers["Authorization"] = f"Bearer {TOKEN if 'bearer' in given else 'junk-token-0000'}"
        if csrf == "csrf":
            headers["X-CSRF-Token"] = form
        answer = await client.post(f"{ROOT}/api/queues/webhooks/pause", json={"reason": "a test"}, headers=headers)
        is_by_bearer = credentials in ADMITTED_BY_BEARER[mode]
        # Whoever shows a token to our own login is judged by it alone; a host may judge by whatever it likes.
        is_admitted = "session" in given and (mode == "authorize" or "junk" not in given)
        is_own = csrf == "csrf" and origin != "evil"
        if is_by_bearer or (is_admitted and is_own):
            assert answer.status_code == 200, answer.text
        else:
            assert answer.status_code == (403 if is_admitted else 401), answer.text
        entries = (await shop.operations.audit.list()).entries
        assert len(entries) == (answer.status_code == 200)


def _by_cookie_or_bearer(request: Request) -> Visitor | None:
    is_known = request.cookies.get("host") == "root" or request.headers.get("authorization") == f"Bearer {TOKEN}"
    return Visitor("root", Role.OPERATOR) if is_known else None


@pytest.mark.parametrize(
    "scheme", ["Bearer junk-token-0000", f"Bearer {VIEWER_TOKEN}", f"Bearer {TOKEN}", "Basic eA=="]
)
async def test_a_bearer_token_does_not_let_another_site_log_somebody_in(site: Site, scheme: str) -> None:
    """S1: the login is open to strangers, so no token admits anybody there."""
    headers = {"Origin": "https://evil.test", "Authorization": scheme}
    answer = await site.stranger().post(f"{ROOT}/login", data={"name": "eve", "token": TOKEN}, headers=headers)
    assert answer.status_code == 403
    assert "set-cookie" not in answer.headers


async def test_a_host_can_say_that_a_token_admitted_a_program(shop: App, clock: ManualClock) -> None:
    """A middleware of the host may have read the token before; without it, `authorize` would admit all the same."""

    async def authorize(request: Request) -> Visitor:
        return Visitor("robot", Role.OPERATOR, by_token="x-robot" in request.headers)

    async with Site.of(shop, clock, authorize=authorize) as site:
        sent: dict[str, Any] = {"json": {"reason": "a test"}, "headers": {"Authorization": "Bearer any"}}
        assert (await site.stranger().post(f"{ROOT}/api/queues/webhooks/pause", **sent)).status_code == 403
        robot = site.stranger(headers={"x-robot": "1"})
        assert (await robot.post(f"{ROOT}/api/queues/webhooks/pause", **sent)).status_code == 200


async def test_a_password_for_a_proxy_does_not_end_a_session(site: Site) -> None:
    """Browsers send the Basic credentials of a proxy along with the cookie; they are not ours to judge."""
    visitor = await site.visitor()
    assert (await visitor.get(f"{ROOT}/", headers={"Authorization": "Basic eDp5"})).status_code == 200


@pytest.mark.parametrize("token", [TOKEN, VIEWER_TOKEN])
async def test_a_session_that_logged_out_acts_no_more_in_any_process(
    database_url: str, clock: ManualClock, stack: AsyncExitStack, token: str
) -> None:
    """S2, O20: also a copy of its cookie, and in another process with the same tokens."""
    shop = await stack.enter_async_context(a_shop(database_url, clock))
    here = await stack.enter_async_context(Site.of(shop, clock, token=TOKEN, viewer_token=VIEWER_TOKEN))
    there = await stack.enter_async_context(Site.of(shop, clock, token=TOKEN, viewer_token=VIEWER_TOKEN))
    visitor, other = await here.visitor("ann", token), await here.visitor("bob", token)
    csrf = csrf_of((await visitor.get(f"{ROOT}/")).text)
    copies = [each.stranger(headers={"Cookie": f"{COOKIE}={visitor.cookies[COOKIE]}"}) for each in (here, there)]
    assert [(await each.get(f"{ROOT}/")).status_code for each in copies] == [200, 200]
    assert (await visitor.post(f"{ROOT}/logout", data={"csrf": csrf})).status_code == 303
    for copy in copies:
        assert (await copy.get(f"{ROOT}/")).status_code == 303
        sent: dict[str, Any] = {"json": {"reason": "a test"}, "headers": {"X-CSRF-Token": csrf}}
        assert (await copy.post(f"{ROOT}/api/queues/webhooks/pause", **sent)).status_code == 401
        assert (await copy.post(f"{ROOT}/logout", data={"csrf": csrf})).status_code == 303
    assert (await shop.operations.audit.list()).entries == ()
    assert (await other.get(f"{ROOT}/")).status_code == 200, "the sessions of others go on"


async def test_a_token_that_is_taken_away_ends_the_sessions_that_it_opened(shop: App, clock: ManualClock) -> None:
    """O20: a revoked token admits nobody, and neither does what it once opened."""
    async with Site.of(shop, clock, token=TOKEN, viewer_token=VIEWER_TOKEN) as before:
        cookies = [(await before.visitor("vic", token)).cookies[COOKIE] for token in (TOKEN, VIEWER_TOKEN)]
    async with Site.of(shop, clock, token=TOKEN) as after:
        for cookie in cookies:
            stranger = after.stranger(headers={"Cookie": f"{COOKIE}={cookie}"})
            assert (await stranger.get(f"{ROOT}/")).status_code == 303
        assert (await after.program(VIEWER_TOKEN).get(f"{ROOT}/api/queues")).status_code == 401


async def test_nobody_is_let_in_while_it_cannot_be_known_whether_their_session_has_ended(
    shop: App, clock: ManualClock
) -> None:
    class Away(Operations):
        async def is_session_ended(self, session: str) -> bool:
            raise StoreUnavailable("the database does not answer")

    async with Site.of(shop, clock, token=TOKEN, operations=Away(shop)) as site:
        visitor = await site.visitor()
        answer = await visitor.get(f"{ROOT}/")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        assert (await visitor.get(f"{ROOT}/healthz")).status_code == 200


@pytest.mark.parametrize("refusal", [None, HTTPException(401), HTTPException(303, headers={"Location": "/login"})])
async def test_a_host_may_refuse_strangers_by_raising(
    shop: App, clock: ManualClock, refusal: HTTPException | None
) -> None:
    """A program's valid token was answered with 500: `authorize` is asked again without it, and raised."""

    def authorize(request: Request) -> Visitor | None:
        found = _by_cookie_or_bearer(request)
        if found is None and refusal is not None:
            raise refusal
        return found

    async with Site.of(shop, clock, authorize=authorize) as site:
        stranger = await site.stranger().get(f"{ROOT}/api/queues")
        assert stranger.status_code == (401 if refusal is None else refusal.status_code)
        assert stranger.headers.get("location") == ((refusal and refusal.headers) or {}).get("Location")
        sent: dict[str, Any] = {"json": {"reason": "a test"}, "headers": {"Origin": "https://evil.test"}}
        assert (await site.program().post(f"{ROOT}/api/queues/webhooks/pause", **sent)).status_code == 200
        session = site.stranger(cookies={"host": "root"}, headers={"Authorization": "Bearer junk-token-0000"})
        assert (await session.post(f"{ROOT}/api/queues/webhooks/pause", **sent)).status_code == 403


async def test_a_token_exempts_nobody_while_the_host_cannot_say_who_is_admitted_without_it(
    shop: App, clock: ManualClock
) -> None:
    def authorize(request: Request) -> Visitor | None:
        if "authorization" not in request.headers:
            raise HTTPException(503)
        return Visitor("root", Role.OPERATOR)

    async with Site.of(shop, clock, authorize=authorize) as site:
        answer = await site.program().post(f"{ROOT}/api/queues/webhooks/pause", json={"reason": "a test"})
        assert answer.status_code == 503
        assert (await shop.operations.audit.list()).entries == ()


@pytest.mark.parametrize(
    "token",
    [
        *("1234567890123456", "0987654321098765", "abcdefghijklmnop", "qwertyuiopasdfgh", "changeme-changeme"),
        *("ChangeMe-ChangeMe-123", "passwordpassword1", "secret-token-2024", "aaaabbbbccccdddd", "x9" * 20),
        *("fairlane-operator-token", "k7Qz" * 8),
    ],
)
def test_a_token_that_is_guessed_first_is_weak(token: str) -> None:
    assert weakness_of(token) is not None


@pytest.mark.parametrize(
    "token",
    [
        "9fQw7ZkP2vLxT4aB",
        "b1f6c0d2-5a57-4e0c-9c7e-0f4f7f1a2f3b",
        "correct horse battery staple",
        "4f9a1c07be62d85390ab6ce1f7d2483e",
    ],
)
def test_a_token_that_is_not_foreseen_is_strong(token: str) -> None:
    assert weakness_of(token) is None
