"""The dashboard as a whole: its routes, and what they share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from fairlane.app import App
from fairlane.clock import SECOND
from fairlane.dashboard.access import (
    COOKIE,
    HEADERS,
    LONGEST_NAME,
    SESSION,
    Access,
    Authorize,
    SecurityMiddleware,
    Visitor,
    address_of,
    answer_to,
    form_of,
    path_of,
    root_of,
    visitor_of,
    wants_json,
)
from fairlane.dashboard.actions import action_routes, safe_path
from fairlane.dashboard.api import Api
from fairlane.dashboard.html import address, fingerprint, rendered, whole_page
from fairlane.dashboard.live import INTERVALS, EventStream, Live, until_gone
from fairlane.dashboard.page import Ask, Page
from fairlane.dashboard.pages import PAGES
from fairlane.dashboard.refusals import Refusal, as_json, refusal_of
from fairlane.errors import FairlaneError
from fairlane.operations import Operations
from fairlane.redaction import Audience, Redact, Surface
from fairlane.telemetry.metrics import CONTENT_TYPE, Fleet

log = logging.getLogger("fairlane.dashboard")

LONGEST_QUERY = 4_000
RETRY_AFTER = 5
NAMED_KEYS = 20
CLIENT_GONE = 499


def create_dashboard(
    app: App,
    *,
    token: str | None = None,
    viewer_token: str | None = None,
    authorize: Authorize | None = None,
    login_url: str | None = None,
    redact: Redact | None = None,
    operations: Operations | None = None,
) -> Starlette:
    """The dashboard of an app's database: an ASGI app to be served by itself or mounted at any path.

    It is closed by default. People log in with `token` (role operator) or `viewer_token`; or `authorize(request)`,
    async or not, says who somebody is (a `Visitor`), and `None` keeps them out: a person is sent to `login_url` of your
    own, a program gets a 401. `redact(value, disclosure)` returns what may be seen of a call, a result or an error;
    it is asked after the app's own.
    """
    operations = operations or app.operations
    access = Access(
        app.clock, operations, token=token, viewer_token=viewer_token, authorize=authorize, login_url=login_url
    )
    fleet = Fleet(app.operations.metrics, app.telemetry.failures, NAMED_KEYS)
    dashboard = Dashboard(app, operations, access, Live(app.clock), fleet, redact)
    built = Starlette(
        routes=[
            Mount("/static", StaticFiles(packages=[("fairlane.dashboard", "static")]), name="static"),
            Route("/healthz", PlainTextResponse("ok\n"), methods=["GET"]),
            Route("/readyz", dashboard.readyz, methods=["GET"]),
            Route("/live", dashboard.follow, methods=["GET"]),
            Route("/metrics", dashboard.metrics, methods=["GET"]),
            *login_routes(dashboard),
            *action_routes(dashboard),
            Mount("/api", app=Api(dashboard), name="api"),
            *(
                Route(page.path, partial(dashboard.show, page), methods=["GET", "POST"] if page.submit else ["GET"])
                for page in PAGES
            ),
        ],
        middleware=[Middleware(SecurityMiddleware, access=access, unavailable=dashboard.unavailable)],
        exception_handlers=dict.fromkeys((HTTPException, FairlaneError, Refusal, 500), dashboard.refuse),
    )
    built.state.dashboard = dashboard
    return built


@dataclass(frozen=True, slots=True)
class Dashboard:
    """What all routes share."""

    app: App
    operations: Operations
    access: Access
    live: Live
    fleet: Fleet
    """What scrapers get. However many scrape, the database is asked at most every ten seconds."""
    redact: Redact | None = None

    def frame(self, request: Request) -> dict[str, Any]:
        """What the layout of every page needs."""
        visitor = visitor_of(request)
        root = root_of(request)
        return {
            "root": root,
            "url": partial(address, root),
            "visitor": visitor,
            "may_act": visitor.may_act,
            "csrf": self.access.form_token(visitor),
            "has_login": self.access.authorize is None,
            "navigation": [page for page in PAGES if page.shortcut],
            "nav": None,
            "live": None,
            "intervals": INTERVALS,
            "now": self.app.clock.now(),
        }

    def answer(self, request: Request, template: str, title: str, shown: dict[str, Any], status: int = 200) -> Response:
        """A page for this visitor only, which is not live."""
        frame = {**self.frame(request), "title": title}
        main = rendered(template, {**frame, **shown})
        return HTMLResponse(whole_page(main, frame), status)

    def unavailable(self, request: Request) -> Response:
        """The answer while the database cannot say whether a session has ended: the visitor may be anybody."""
        again = {"Retry-After": str(RETRY_AFTER)}
        if wants_json(request):
            why = "the database does not answer; try again shortly"
            return as_json(Refusal(503, "unavailable", why, headers=again))
        shown = {"root": root_of(request)}
        return HTMLResponse(rendered("unavailable.html", shown), 503, headers=again)

    def operations_for(self, visitor: Visitor, surface: Surface) -> Operations:
        """Operations as this visitor sees them: of jobs, what the `redact` of the app and of the dashboard leave."""
        return self.operations.seen_by(Audience(surface, visitor.name, str(visitor.role)), self.redact)

    async def _ask(self, request: Request, path: str, values: dict[str, str], query: QueryParams) -> Ask:
        visitor = visitor_of(request)
        return Ask(
            operations=self.operations_for(visitor, Surface.DASHBOARD),
            role=visitor.role,
            root=root_of(request),
            path=path,
            values=values,
            query=query,
            now=await self.operations.now(),
        )

    def _main(self, page: Page, ask: Ask, shown: dict[str, Any]) -> str:
        """The main part of a page: the same for everybody with the same role."""
        around = {"root": ask.root, "url": partial(address, ask.root), "may_act": ask.role.may_act}
        return rendered(page.template, {**around, "now": ask.now, "here": ask.here, **shown})

    async def show(self, page: Page, request: Request) -> Response:
        """A page, or what its form leads to."""
        if len(request.url.query) > LONGEST_QUERY:
            raise HTTPException(414, "the address is too long")
        values = {name: str(value) for name, value in request.path_params.items()}
        ask = await self._ask(request, path_of(request), values, request.query_params)
        frame = {**self.frame(request), "nav": page.nav, "now": ask.now}
        if request.method == "POST" and page.submit is not None:
            shown = await _unless_gone(request, page.submit(ask, form_of(request, await request.body())))
        else:
            shown = await page.look(ask)
        # What is of this visitor alone; `look` shows everybody the same.
        own = {} if page.submit is None else {"csrf": frame["csrf"]}
        main = self._main(page, ask, shown | own)
        frame |= {"title": shown.get("title", page.title), "live": fingerprint(main) if page.is_live else None}
        return HTMLResponse(whole_page(main, frame))

    async def follow(self, request: Request) -> Any:
        """The main part of a page, whenever it has changed."""
        visitor = visitor_of(request)
        try:
            wanted = urlsplit(request.query_params.get("page", "/"))
        except ValueError:
            raise HTTPException(400, "page: the path of a page, such as /queues") from None
        every = request.query_params.get("every", "5")
        if every not in map(str, INTERVALS) or len(request.url.query) > LONGEST_QUERY:
            raise HTTPException(400, f"every: one of {', '.join(map(str, INTERVALS))}")
        page = next((page for page in PAGES if page.is_live and page.values_of(wanted.path) is not None), None)
        if page is None:
            raise HTTPException(404, "there is no such page")
        if (refusal := self.live.refusal(visitor)) is not None:
            raise HTTPException(*refusal, headers={"Retry-After": str(RETRY_AFTER)})
        query = QueryParams(wanted.query)

        # A page is rendered once for all with the same role, unless what they may see depends on who they are.
        shown_to = None if self.operations_for(visitor, Surface.DASHBOARD).redactor is None else visitor.name

        async def render() -> str:
            ask = await self._ask(request, wanted.path, page.values_of(wanted.path) or {}, query)
            return self._main(page, ask, await page.look(ask))

        return EventStream(
            live=self.live,
            key=(root_of(request), wanted.path, str(query), visitor.role, shown_to),
            render=render,
            every=int(every),
            seen=request.headers.get("last-event-id") or request.query_params.get("seen", ""),
            visitor=visitor,
            is_over=lambda: self.access.has_left(request, visitor),
        )

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(await self.fleet.text(), headers={"Content-Type": CONTENT_TYPE})

    async def readyz(self, request: Request) -> Response:
        """Whether the database answers. The log says why it does not."""
        try:
            await self.operations.now()
        except Exception as error:
            log.warning("not ready: %s", error)
            return PlainTextResponse("not ready\n", 503)
        return PlainTextResponse("ok\n")

    async def refuse(self, request: Request, error: Exception) -> Response:
        """The answer to an error behind the security middleware: a page for those who look at one."""
        refusal = refusal_of(error)
        if wants_json(request) or getattr(request.state, "visitor", None) is None:
            answer = answer_to(request, refusal)
        else:
            back = safe_path(request.query_params.get("back"))
            shown = {"status": refusal.status, "message": refusal.message, "back": back}
            answer = self.answer(request, "error.html", f"{refusal.status}", shown, refusal.status)
        # A fault is answered outside of what stands before every other answer.
        answer.headers.update({**(refusal.headers or {}), **HEADERS})
        return answer


T = TypeVar("T")


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled if the visitor goes away. The request's body was read before."""
    working = asyncio.create_task(work)
    gone = asyncio.create_task(until_gone(request.receive))
    try:
        await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HTTPException(CLIENT_GONE, "nobody waits for this any more")
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


def login_routes(dashboard: Dashboard) -> list[Route]:
    """The login form; none if the host's own app authenticates visitors."""
    access = dashboard.access

    def form(request: Request, status: int = 200, problem: str = "", name: str = "", then: str = "/") -> HTMLResponse:
        shown = {"root": root_of(request), "problem": problem, "name": name, "next": then}
        return HTMLResponse(rendered("login.html", shown), status)

    async def ask(request: Request) -> Response:
        return form(request, then=safe_path(request.query_params.get("next")))

    async def login(request: Request) -> Response:
        given = form_of(request, await request.body())
        name, then = given.get("name", "").strip(), safe_path(given.get("next"))
        address = address_of(request)
        if wait := access.throttle.wait(address):
            answer = form(request, 429, f"Too many wrong tokens. Try again in {wait} s.", name, then)
            answer.headers["Retry-After"] = str(wait)
            return answer
        role = access.role_of(given.get("token", "").strip())
        if role is None:
            access.throttle.failed(address)
            return form(request, 401, "That is not the token. It was printed when the dashboard started.", name, then)
        if not name or len(name) > LONGEST_NAME or not name.isprintable():
            return form(request, 400, "Say who you are: what you do is recorded under this name.", "", then)
        root = root_of(request)
        welcome = RedirectResponse(f"{root}{then}", 303)
        welcome.set_cookie(
            COOKIE,
            access.open_session(name, role),
            max_age=SESSION // SECOND,
            path=root or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="strict",
        )
        return welcome

    async def logout(request: Request) -> Response:
        await access.end_session(visitor_of(request))
        root = root_of(request)
        answer = RedirectResponse(f"{root}/login", 303)
        answer.delete_cookie(COOKIE, path=root or "/", httponly=True, samesite="strict")
        return answer

    if access.authorize is not None:
        return []
    return [
        Route("/login", ask, methods=["GET"], name="login"),
        Route("/login", login, methods=["POST"]),
        Route("/logout", logout, methods=["POST"], name="logout"),
    ]
