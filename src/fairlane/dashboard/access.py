"""Who is admitted, with which role, and what is checked before every page. Nobody gets in unidentified."""

from __future__ import annotations

import asyncio
import hmac
import inspect
import re
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from hashlib import sha256
from math import inf, log2
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairlane.clock import SECOND, Clock, Instant
from fairlane.dashboard.refusals import Refusal, as_json, refusal_of
from fairlane.errors import ConfigurationError, FairlaneError
from fairlane.operations import Operations

COOKIE = "fairlane_session"
SESSION = 12 * 3_600 * SECOND
LONGEST_NAME = 100
SHORTEST_TOKEN = 8
SHORTEST_PUBLIC_TOKEN = 16
LEAST_BITS = 48
"""The least entropy of a token where strangers can reach the login, by how often each of its characters occurs."""
FEWEST_CHARACTERS = 8
"""Distinct characters of such a token."""
_COMMON_WORDS = re.compile(
    r"(?:access|admin|change|changeme|dashboard|default|demo|dummy|example|fairlane|foobar|hello|hunter|iloveyou|letmein"
    r"|local|login|master|operators?|pass|passwd|passw[o0]rd|please|private|prod|production|replace|root|sample|secret"
    r"|secure|staging|super|temp|test|testing|token|user|viewers?|welcome|world)"
)
_REPEATED = re.compile(r"(.{4,100}?)\1+|(.{1,3}?)\2{2,}")
_FORWARDS = "abcdefghijklmnopqrstuvwxyzabc 1234567890123 0123456789 qwertyuiop asdfghjkl zxcvbnm qwertzuiop"
_ROWS = f"{_FORWARDS} {_FORWARDS[::-1]}"
"""Characters that follow each other in the alphabet or on a keyboard."""
LARGEST_BODY = 1024 * 1024
SLOWEST_BODY = 30.0
"""Seconds that a body may take to arrive."""
MOST_FIELDS = 1_000
SAFE = {"GET", "HEAD", "OPTIONS"}
OPEN = ("/static/", "/login", "/healthz", "/readyz")
"""Open to strangers."""
OPEN_TO_VIEWERS = ("/logout", "/try", "/api/simulate")
"""POST requests that change nothing."""
NO_NUL = "a NUL character can neither be stored nor looked for"
"""PostgreSQL cannot store one, so it is refused on every store."""
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
ACTOR_HEADER = "x-fairlane-actor"
"""On whose behalf a program with a token acts."""


class Role(IntEnum):
    """What a visitor may do. Each may do what those below may."""

    VIEWER = 1
    OPERATOR = 2

    @property
    def may_act(self) -> bool:
        return self >= Role.OPERATOR

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Visitor:
    """Somebody who was admitted. The audit records what they do under `name`."""

    name: str
    role: Role = Role.VIEWER
    session: str = ""
    """The session that forms are bound to."""
    expires_at: Instant | None = None
    by_token: bool = False
    """A token in the Authorization header admitted them. No browser sends one by itself, so the checks against requests
    from other sites do not apply. If this is not set, `authorize` is asked again without the header to find out."""

    @property
    def may_act(self) -> bool:
        return self.role.may_act


Authorize = Callable[[Request], "Visitor | Awaitable[Visitor | None] | None"]


class _Session(msgspec.Struct, frozen=True, array_like=True):
    """What the cookie holds. It is signed and not encrypted: there is nothing secret in it."""

    id: str
    name: str
    role: int
    expires_at: Instant


class Access:
    """Tokens and sessions. A session is in its cookie; which sessions were ended is in the database."""

    def __init__(
        self,
        clock: Clock,
        operations: Operations,
        *,
        token: str | None = None,
        viewer_token: str | None = None,
        authorize: Authorize | None = None,
        login_url: str | None = None,
    ) -> None:
        for name, given in (("token", token), ("viewer_token", viewer_token)):
            if given is not None and len(given) < SHORTEST_TOKEN:
                raise ConfigurationError(f"{name}: give at least {SHORTEST_TOKEN} characters; whoever guesses it is in")
        if token is not None and token == viewer_token:
            raise ConfigurationError("token and viewer_token are the same; viewers would be operators")
        if token is None and viewer_token is None and authorize is None:
            raise ConfigurationError(
                "the dashboard is closed by default: give token=…, or authorize=… to let your own app say who may enter"
            )
        if login_url is not None and authorize is None:
            raise ConfigurationError("login_url: people log in here by token; give authorize=… too, or leave it out")
        self.authorize = authorize
        self.login_url = login_url
        self.throttle = Throttle(clock)
        # A program with an old token asks every few seconds and must not lock people out; guessing takes far more.
        self.program_throttle = Throttle(clock, of_one_address=60, of_all=inf)
        self._clock = clock
        self._operations = operations
        tokens = ((token, Role.OPERATOR), (viewer_token, Role.VIEWER))
        self._tokens = [(given.encode(), role) for given, role in tokens if given is not None]
        # Changing a token ends every session. Several processes with the same tokens accept each other's sessions.
        secret = b"\0".join(given for given, _ in self._tokens) or secrets.token_bytes(32)
        self._key = hmac.digest(secret, b"fairlane dashboard session", "sha256")

    # Letting in.

    async def admit(self, request: Request) -> Visitor | None:
        """The visitor who sent this request; `None` for a stranger."""
        if self.authorize is not None:
            found = self.authorize(request)
            visitor = await found if inspect.isawaitable(found) else found
            return None if visitor is None else replace(visitor, session=f"host:{visitor.name}", expires_at=None)
        if is_bearer(request):
            # The token alone decides: a cookie that came along does not make up for a wrong one.
            return self._by_token(request)
        visitor = self._by_session(request.cookies.get(COOKIE))
        return None if visitor is None or await self.has_ended(visitor) else visitor

    async def has_left(self, request: Request, visitor: Visitor) -> bool:
        """Whether the sender of this request would now be refused, or admitted under another name or role."""
        if self.authorize is None:
            return await self.has_ended(visitor)
        # A request of its own: the one that was asked about keeps the cookies that it has read.
        found = await self._admitted_again(Request(request.scope))
        return found is None or (found.name, found.role) != (visitor.name, visitor.role)

    async def _admitted_again(self, request: Request) -> Visitor | None:
        """`admit` again, where no answer can be given: a host may refuse strangers by raising an HTTPException."""
        try:
            return await self.admit(request)
        except HTTPException as error:
            if error.status_code >= 500:
                raise
            return None

    async def is_by_token(self, request: Request, visitor: Visitor) -> bool:
        """Whether a bearer token admitted this visitor, rather than something that a browser sends by itself."""
        if visitor.by_token or self.authorize is None or not is_bearer(request):
            return visitor.by_token
        kept = [(name, value) for name, value in request.scope["headers"] if name.lower() != b"authorization"]
        return await self._admitted_again(Request({**request.scope, "headers": kept})) is None

    def role_of(self, token: str) -> Role | None:
        """The role of a token. It is compared with every known one in constant time."""
        given = token.encode(errors="surrogatepass")
        found = [role for known, role in self._tokens if hmac.compare_digest(given, known)]
        return found[0] if found else None

    def _by_token(self, request: Request) -> Visitor | None:
        token = request.headers["authorization"].partition(" ")[2]
        role = self.role_of(token.strip())
        name = _acting_for(request.headers.get(ACTOR_HEADER, ""))
        return None if role is None else Visitor(name, role, by_token=True)

    # Sessions.

    def open_session(self, name: str, role: Role) -> str:
        """The value of the cookie of a new session."""
        session = _Session(secrets.token_urlsafe(16), name[:LONGEST_NAME], role, self._clock.now() + SESSION)
        said = urlsafe_b64encode(msgspec.json.encode(session)).decode().rstrip("=")
        return f"{said}.{self._signed('session', said)}"

    async def end_session(self, visitor: Visitor) -> None:
        """End the session: no copy of its cookie admits anybody again."""
        if visitor.expires_at is not None:
            await self._operations.end_session(visitor.session, visitor.expires_at)

    async def has_ended(self, visitor: Visitor) -> bool:
        """Whether the session has ended. Visitors who were admitted in another way have no session here."""
        if visitor.expires_at is None:
            return False
        return visitor.expires_at <= self._clock.now() or await self._operations.is_session_ended(visitor.session)

    def _by_session(self, cookie: str | None) -> Visitor | None:
        said, _, signature = (cookie or "").partition(".")
        if not said or not _is_same(signature, self._signed("session", said)):
            return None
        try:
            session = msgspec.json.decode(urlsafe_b64decode(said + "=" * (-len(said) % 4)), type=_Session)
            role = Role(session.role)
        except ValueError:  # of Base64, JSON or the role
            return None
        return Visitor(session.name, role, session.id, session.expires_at)

    def form_token(self, visitor: Visitor) -> str:
        """The token in every form of this visitor, so that no other site can have one sent."""
        return self._signed("form", visitor.session)

    def is_own_form(self, visitor: Visitor, token: str) -> bool:
        return bool(visitor.session) and _is_same(token, self.form_token(visitor))

    def _signed(self, purpose: str, text: str) -> str:
        return hmac.new(self._key, f"{purpose}\0{text}".encode(), sha256).hexdigest()


def weakness_of(token: str) -> str | None:
    """Why a token is too weak for an address that strangers can reach; `None` if it is not."""
    if len(token) < SHORTEST_PUBLIC_TOKEN:
        return f"it has {len(token)} characters, and must have at least {SHORTEST_PUBLIC_TOKEN}"
    if len(set(token.lower())) < FEWEST_CHARACTERS:
        return "it repeats a few characters"
    rest = _unforeseen(token)
    bits = sum(count * log2(len(rest) / count) for count in Counter(rest).values())
    return None if bits >= LEAST_BITS else "it repeats itself, or is made of common words or of characters in a row"


def _unforeseen(token: str) -> str:
    """A token without what attackers try first: common words, repetitions, and four or more characters in a row."""
    rest = _REPEATED.sub(r"\1\2", _COMMON_WORDS.sub("", token.lower()))
    in_a_row = {
        place + offset for place in range(len(rest) - 3) if rest[place : place + 4] in _ROWS for offset in range(4)
    }
    return "".join(sign for place, sign in enumerate(rest) if place not in in_a_row)


def is_bearer(request: Request) -> bool:
    """Whether a bearer token came along; by itself that proves nothing."""
    return request.headers.get("authorization", "").partition(" ")[0].lower() == "bearer"


def _acting_for(said: str) -> str:
    """The name of a program. The actor that it names follows `api:`, so that nobody takes it for a person."""
    with suppress(UnicodeError):
        said = said.encode("latin-1").decode()  # a header is bytes, and programs mean UTF-8
    name = "".join(sign for sign in said if sign.isprintable()).strip()
    return f"api:{name}"[:LONGEST_NAME] if name else "api"


def visitor_of(request: Request) -> Visitor:
    """Who sent the request. Every request that reaches a page has a visitor; see `SecurityMiddleware`."""
    visitor: Visitor | None = getattr(request.state, "visitor", None)
    if visitor is None:
        raise HTTPException(401, "log in first")
    return visitor


def require(request: Request, role: Role) -> Visitor:
    """Who sent the request, if their role allows this much."""
    visitor = visitor_of(request)
    if visitor.role < role:
        raise HTTPException(403, f"this takes the role {role}; you are {visitor.name}, a {visitor.role}")
    return visitor


def _is_same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogatepass"), wanted.encode())


WINDOW = 60 * SECOND
OF_ONE_ADDRESS = 5
OF_ALL = 60
MOST_ADDRESSES = 1_000


@dataclass(slots=True)
class _Failures:
    since: Instant
    count: int = 0


class Throttle:
    """Counts wrong tokens by address and over all, a minute at a time. It remembers a bounded number of addresses."""

    def __init__(self, clock: Clock, *, of_one_address: int = OF_ONE_ADDRESS, of_all: float = OF_ALL) -> None:
        self._clock = clock
        self._of_one_address = of_one_address
        self._of_all = of_all
        self._all = _Failures(clock.monotonic())
        self._addresses: OrderedDict[str, _Failures] = OrderedDict()

    def wait(self, address: str) -> int:
        """Seconds until this address may try again; 0 if it may now."""
        now = self._clock.monotonic()
        counted = (self._all, self._of_all), (self._addresses.get(address), self._of_one_address)
        ends = [each.since + WINDOW for each, most in counted if each is not None and each.count >= most]
        return max(0, -(-(max(ends, default=now) - now) // SECOND))

    def failed(self, address: str) -> None:
        now = self._clock.monotonic()
        known = self._addresses.pop(address, None) or _Failures(now)
        for failures in (self._all, known):
            if failures.since + WINDOW <= now:
                failures.since, failures.count = now, 0
            failures.count += 1
        self._addresses[address] = known
        while len(self._addresses) > MOST_ADDRESSES:
            self._addresses.popitem(last=False)


# Before every page.


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
        """The body, if it was read, which a stranger's never is. A refusal is raised, and becomes the answer."""
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
        query = f"?{request.url.query}" if request.url.query else ""
        is_program = wants_json(request)
        # A browser shows people whatever page they are sent to.
        looks = request.method in SAFE and not is_program and "text/html" in request.headers.get("accept", "")
        if login_url is not None and looks:
            # A path of this site, however it was written: two slashes at its beginning would name another one.
            asked = f"/{quote(str(request.scope['path'])).lstrip('/')}{query}"
            separator = "&" if "?" in login_url else "?"
            return _Instead(RedirectResponse(f"{login_url}{separator}{urlencode({'next': asked})}", 303))
        if self._access.authorize is not None or is_program:
            why = "log in, or send the token as Authorization: Bearer"
            return Refusal(401, "unauthorized", why, headers={"WWW-Authenticate": "Bearer"})
        asked = f"{path}{query}"
        then = f"?{urlencode({'next': asked})}" if asked not in ("", "/") else ""
        return _Instead(RedirectResponse(f"{root_of(request)}/login{then}", 303))


class _Instead(Exception):
    """An answer other than the one asked for that is not a refusal, such as a redirect."""

    def __init__(self, answer: Response) -> None:
        super().__init__()
        self.answer = answer


def address_of(request: Request) -> str:
    """The address by which wrong tokens are counted."""
    return request.client.host if request.client is not None else ""


def root_of(request: Request) -> str:
    """The path that the dashboard is mounted at, without a trailing slash."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def path_of(request: Request) -> str:
    """The path below `root_of`."""
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
    """Whether the browser says that the request comes from here. Programs send no such header, and no cookie."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    origin = headers.get("origin")
    try:
        return origin is None or urlsplit(origin).netloc == headers.get("host", "")
    except ValueError:
        return False


def _again(body: bytes, receive: Receive) -> Receive:
    """A `receive` for the app behind this middleware, which has read the body."""
    read: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return read.pop() if read else await receive()

    return replayed
