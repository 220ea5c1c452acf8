"""Checks before every page: who is admitted, which requests are genuine, how much may be sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairlane.dashboard.access import Access, Role, Visitor, is_bearer, require
from fairlane.dashboard.refusals import Refusal, as_json, refusal_of
from fairlane.errors import FairlaneError

LARGEST_BODY = 1024 * 1024
SLOWEST_BODY = 30.0
"""Seconds that a body may take to arrive."""
MOST_FIELDS = 1_000
SAFE = {"GET", "HEAD", "OPTIONS"}
OPEN = ("/static/", "/login", "/healthz", "/readyz")
"""Open to strangers."""
OPEN_TO_VIEWERS = ("/logout", "/try", "/api/simulate")
"""POST requests that change nothing."""
LOGIN = "/login"
NO_NUL = "a NUL character can neither be stored nor looked for"
"""PostgreSQL cannot hold one, so no name and no text anywhere has one."""
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class SecurityMiddleware:
    """The outermost layer of the dashboard: a route that checks nothing itself is still closed."""

    def __init__(self, app: ASGIApp, access: Access, unavailable: Callable[[Request], Response]) -> None:
        self._app = app
        self._access = access
        self._unavailable = unavailable

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        path = path_of(request)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if not path.startswith("/static/"):
                    headers["Cache-Control"] = "no-store"
            await send(message)

        try:
            body = await self._let_in(request, path)
        except _Instead as instead:
            await instead.answer(scope, receive, guarded)
        except (HTTPException, Refusal) as error:  # `authorize` refuses somebody in its own way
            await answer_to(request, refusal_of(error))(scope, receive, guarded)
        else:
            await self._app(scope, receive if body is None else _again(body, receive), guarded)

    async def _let_in(self, request: Request, path: str) -> bytes | None:
        """The body, if it was read; a stranger's never is. Whoever is refused gets the answer that this raises."""
        if "\0" in path or _holds_nul(request.scope["query_string"]):
            raise Refusal(400, "malformed", NO_NUL)
        visitor = None
        if not path.startswith(OPEN):
            visitor = request.state.visitor = await self._admitted(request)
        if request.method in SAFE:
            return None
        # A page of another site can have cookies sent along, but no valid token; and junk anybody can send.
        is_program = visitor is not None and await self._access.is_by_token(request, visitor)
        if not is_program and not _is_same_origin(request.headers):
            raise Refusal(403, "cross_site", "this was sent by another site")
        if visitor is not None and path not in OPEN_TO_VIEWERS:
            require(request, Role.OPERATOR)
        body = await _bounded_body(request)
        if _is_form(request) and _holds_nul(body):
            raise Refusal(400, "malformed", NO_NUL)
        if visitor is not None and not is_program:
            token = request.headers.get("x-csrf-token") or form_of(request, body).get("csrf", "")
            if not self._access.is_own_form(visitor, token):
                raise Refusal(403, "forged", "the form is of another session; reload the page and try again")
        return body

    async def _admitted(self, request: Request) -> Visitor:
        shows_a_token, address, throttle = is_bearer(request), address_of(request), self._access.program_throttle
        if shows_a_token and (wait := throttle.wait(address)):
            why = f"too many wrong tokens; try again in {wait} s"
            raise Refusal(429, "busy", why, headers={"Retry-After": str(wait)})
        try:
            visitor = await self._access.admit(request)
        except HTTPException as error:
            if shows_a_token and error.status_code == 401:
                throttle.failed(address)
            raise
        except FairlaneError:  # its database cannot be used, for whatever reason
            raise _Instead(self._unavailable(request)) from None
        if visitor is None:
            if shows_a_token:
                throttle.failed(address)
            raise self._stranger(request)
        return visitor

    def _stranger(self, request: Request) -> Exception:
        path, login_url = path_of(request), self._access.login_url
        is_program = wants_json(request)
        # A browser shows people whatever page they are sent to.
        looks = request.method in SAFE and not is_program and "text/html" in request.headers.get("accept", "")
        if login_url is not None and looks:
            # A path of this site, however it was written: two slashes at its beginning would name another one.
            asked = _with_query("/" + quote(str(request.scope["path"])).lstrip("/"), request)
            return _Instead(
                RedirectResponse(f"{login_url}{'&' if '?' in login_url else '?'}{urlencode({'next': asked})}", 303)
            )
        if self._access.authorize is not None or is_program:
            why = "log in, or send the token as Authorization: Bearer"
            return Refusal(401, "unauthorized", why, headers={"WWW-Authenticate": "Bearer"})
        asked = _with_query(path, request)
        then = f"?{urlencode({'next': asked})}" if asked not in ("", "/") else ""
        return _Instead(RedirectResponse(f"{root_of(request)}{LOGIN}{then}", 303))


def _with_query(path: str, request: Request) -> str:
    return f"{path}?{request.url.query}" if request.url.query else path


class _Instead(Exception):
    """An answer other than the one asked for, and no refusal."""

    def __init__(self, answer: Response) -> None:
        super().__init__()
        self.answer = answer


def address_of(request: Request) -> str:
    """Whose wrong tokens are counted together."""
    return request.client.host if request.client is not None else ""


def root_of(request: Request) -> str:
    """The path that the dashboard is mounted at, without a trailing slash."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def path_of(request: Request) -> str:
    """The path below that."""
    path, root = str(request.scope["path"]), root_of(request)
    return path.removeprefix(root) if path == root or path.startswith(f"{root}/") else path


def wants_json(request: Request) -> bool:
    """Whether the client is a program rather than a person."""
    path = path_of(request)
    return path == "/api" or path.startswith("/api/") or "hx-request" in request.headers


def answer_to(request: Request, refusal: Refusal) -> Response:
    """A refusal for any client: nothing of a page, which strangers must not see."""
    if wants_json(request):
        return as_json(refusal)
    return PlainTextResponse(f"{refusal.message}\n", refusal.status, headers=refusal.headers)


def form_of(request: Request, body: bytes) -> dict[str, str]:
    """The fields of a form, each once."""
    if not _is_form(request):
        return {}
    try:
        return dict(parse_qsl(body.decode(errors="replace"), keep_blank_values=True, max_num_fields=MOST_FIELDS))
    except ValueError:
        return {}


def _is_form(request: Request) -> bool:
    return request.headers.get("content-type", "").startswith("application/x-www-form-urlencoded")


def _holds_nul(encoded: bytes) -> bool:
    return b"\0" in encoded or b"%00" in encoded


async def _bounded_body(request: Request) -> bytes:
    """The whole body. If it is too large, no more of it is read."""
    too_large = Refusal(413, "too_large", f"send at most {LARGEST_BODY:,} bytes")
    length = request.headers.get("content-length", "0")
    # Digits beyond these are not looked at: Python refuses to read numbers of some thousand of them.
    if not length.isascii() or not length.isdigit() or int(length.lstrip("0")[:12] or 0) > LARGEST_BODY:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(SLOWEST_BODY):
            async for chunk in request.stream():
                body += chunk
                if len(body) > LARGEST_BODY:
                    raise too_large
    except TimeoutError:
        raise Refusal(408, "too_slow", f"send all of it within {SLOWEST_BODY:.0f} s") from None
    except ClientDisconnect:
        raise Refusal(400, "malformed", "the body ended too early") from None
    return bytes(body)


def _is_same_origin(headers: Headers) -> bool:
    """Whether the browser says that the request comes from here. A program says nothing, and has no cookie either."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc == headers.get("host", "")
    except ValueError:
        return False


def _again(body: bytes, receive: Receive) -> Receive:
    """A `receive` for the app behind: the body has been read already."""
    read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return read.pop() if read else await receive()

    return replayed
