"""Logging in with a token and a name, and out again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from fairlane.clock import SECOND
from fairlane.dashboard.access import COOKIE, LONGEST_NAME, SESSION, visitor_of
from fairlane.dashboard.acting import safe_path
from fairlane.dashboard.doorkeeper import address_of, form_of, root_of

if TYPE_CHECKING:
    from fairlane.dashboard.building import Dashboard

__all__ = ["login_routes"]


def login_routes(dashboard: Dashboard) -> list[Route]:
    """None where the host's own app says who may enter."""
    access = dashboard.access

    def form(request: Request, status: int = 200, problem: str = "", name: str = "", then: str = "/") -> HTMLResponse:
        shown = {"root": root_of(request), "problem": problem, "name": name, "next": then}
        return HTMLResponse(dashboard.rendering.part("login.html", shown), status)

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
