"""The JSON API: `/api`. Requests are read strictly, carried out by `fairlane.operations`, and answered as described."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from msgspec import inspect as types
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from fairlane.dashboard.access import require
from fairlane.dashboard.api_endpoints import OPERATIONS, Asked, Operation
from fairlane.dashboard.api_shapes import NoQuery
from fairlane.dashboard.refusals import Refusal, as_json, refusal_of
from fairlane.dashboard.security import path_of, root_of

if TYPE_CHECKING:
    from fairlane.dashboard.site import Dashboard

LONGEST_LOOK = 30.0
"""Seconds for a request that changes nothing. An action goes on until it has ended, and says what it did."""


class Api:
    """Everything below `/api`. Whatever happens, the answer is JSON of the shape that is described."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard
        # Names before variables: /jobs/cancel is not the job "cancel".
        ordered = sorted(OPERATIONS, key=lambda each: each.is_for_one)
        self._places = [(compile_path(each.path)[0], each) for each in ordered]
        self._simulating = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        try:
            response = await self._answer(request)
        except Exception as error:
            response = as_json(refusal_of(error))
        if request.method == "HEAD":  # the same without its body
            response = Response(b"", response.status_code, headers=dict(response.headers))
        await response(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        operation, place = self._place(request)
        allowed = "GET, HEAD, OPTIONS" if operation.method == "GET" else "POST, OPTIONS"
        if request.method == "OPTIONS":
            return Response(status_code=204, headers={"Allow": allowed})
        if request.method not in allowed.split(", "):
            why = f"{request.method} is not possible here; {allowed} is"
            raise Refusal(405, "method_not_allowed", why, headers={"Allow": allowed})
        visitor = require(request, operation.role)
        asked = Asked(
            dashboard=self._dashboard,
            visitor=visitor,
            root=root_of(request),
            place=place,
            given=await _given(request, operation),
        )
        return Response(msgspec.json.encode(await self._carried_out(operation, asked)), media_type="application/json")

    def _place(self, request: Request) -> tuple[Operation, dict[str, str]]:
        path = path_of(request)
        for pattern, operation in self._places:
            if found := pattern.match(path):
                place = found.groupdict()
                check_path(request, place)
                return operation, place
        raise Refusal(404, "not_found", f"there is nothing at {path}", remedy="/api/openapi.json says what there is")

    async def _carried_out(self, operation: Operation, asked: Asked) -> object:
        if operation.name == "try_policies":
            if self._simulating.locked():
                raise Refusal(429, "busy", "a simulation is under way; one at a time", headers={"Retry-After": "5"})
            # Whoever goes away meanwhile leaves a thread behind that still reckons: the next one waits for it.
            return await asyncio.shield(asyncio.create_task(self._simulate(operation, asked)))
        async with asyncio.timeout(LONGEST_LOOK if operation.method == "GET" else None):
            return await operation.carry_out(asked)

    async def _simulate(self, operation: Operation, asked: Asked) -> object:
        async with self._simulating:
            return await operation.carry_out(asked)


async def _given(request: Request, operation: Operation) -> Any:
    if operation.body is None:
        return read_query(request, operation.query)
    read_query(request, NoQuery)
    # Bounded in size and time by the security middleware, which has read it.
    return read_body(request, await request.body(), operation.body)


LONGEST_QUERY = 8_000
MOST_PARAMETERS = 100
_JSON = re.compile(r"application/json\s*(;\s*charset=\"?utf-8\"?\s*)?\Z", re.IGNORECASE)
_WHERE = re.compile(r"(?P<what>.*) - at `(?P<key>key in )?\$(?P<path>[^`]*)`\Z", re.DOTALL)
_NUMBER = re.compile(r"-?[0-9]{1,30}\Z")

S = TypeVar("S", bound=msgspec.Struct)


def read_query(request: Request, wanted: type[S]) -> S:
    """The query, each parameter once unless it is a list."""
    raw: bytes = request.scope.get("query_string", b"")
    if len(raw) > LONGEST_QUERY:
        raise Refusal(414, "too_long", f"the query is longer than {LONGEST_QUERY:,} bytes")
    try:
        pairs = parse_qsl(raw.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MOST_PARAMETERS)
    except UnicodeDecodeError:
        raise Refusal(400, "malformed", "the query is not UTF-8, percent-encoded") from None
    except ValueError:
        raise Refusal(422, "invalid", f"give at most {MOST_PARAMETERS} parameters") from None
    shapes = types.type_info(wanted)
    assert isinstance(shapes, types.StructType)
    kinds = {field.encode_name: field.type for field in shapes.fields}
    found: dict[str, Any] = {}
    for name, value in pairs:
        _check_text(name, "the query")
        _check_text(value, name)
        shape = kinds.get(name)
        if isinstance(shape, types.ListType):
            found.setdefault(name, []).append(value)
        elif name in found:
            raise Refusal(422, "invalid", f"{name} is given twice", field=name)
        else:
            found[name] = _value(value, shape)
    return _converted(found, wanted)


def _value(text: str, shape: types.Type | None) -> Any:
    """A parameter's text as JSON would have it. What does not fit stays text, and is refused as such."""
    kinds = shape.types if isinstance(shape, types.UnionType) else (shape,)
    if any(isinstance(kind, types.BoolType) for kind in kinds):
        return {"true": True, "false": False}.get(text, text)
    if any(isinstance(kind, types.IntType) for kind in kinds) and _NUMBER.match(text):
        return int(text)
    return text


def read_body(request: Request, body: bytes, wanted: type[S]) -> S:
    """The body: one JSON object."""
    if not _JSON.match(request.headers.get("content-type", "").strip()):
        raise Refusal(415, "unsupported_media_type", "send JSON, as Content-Type: application/json")
    try:
        found = msgspec.json.decode(body)
    except RecursionError:
        raise Refusal(400, "malformed", "the body is nested too deeply") from None
    except ValueError as error:
        raise Refusal(400, "malformed", f"the body is not JSON: {error}") from None
    try:
        return _converted(_plain(found), wanted)
    except RecursionError:
        raise Refusal(400, "malformed", "the body is nested too deeply") from None


def _plain(found: Any, where: str = "the body") -> Any:
    """Checks every text in it. 3.0 is 3: JSON knows one kind of number."""
    match found:
        case str():
            return _check_text(found, where)
        case float() if found.is_integer():
            return int(found)
        case dict():
            prefix = "" if where == "the body" else f"{where}."
            return {_check_text(name, where): _plain(value, f"{prefix}{name}") for name, value in found.items()}
        case list():
            return [_plain(value, where) for value in found]
    return found


def _check_text(text: str, field: str) -> str:
    """Refuse what PostgreSQL cannot store, and what is no text: on every store."""
    if "\0" in text:
        raise Refusal(422, "invalid", f"{field}: a NUL character cannot be stored", field=field)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refusal(422, "invalid", f"{field}: this is not valid Unicode text", field=field) from None
    return text


def check_path(request: Request, place: Mapping[str, str]) -> None:
    """Refuse a path that is not UTF-8; servers put a replacement character where it is not."""
    raw = request.scope.get("raw_path")
    if raw is not None:
        try:
            unquote_to_bytes(raw).decode()
        except UnicodeDecodeError:
            raise Refusal(400, "malformed", "the path is not UTF-8, percent-encoded") from None
    for name, value in place.items():
        _check_text(value, name)


def _converted(found: Any, wanted: type[S]) -> S:
    try:
        return msgspec.convert(found, wanted)
    except msgspec.ValidationError as error:
        raise _told(str(error)) from None


def _told(said: str) -> Refusal:
    """The refusal for a message of msgspec; it begins with the member that it is about."""
    found = _WHERE.match(said)
    what, field = (found["what"], found["path"].lstrip(".")) if found else (said, "")
    for kind, words in (("unknown", "{}: there is no such member"), ("missing required", "{} is missing")):
        if member := re.search(rf"{kind} field `([^`]*)`", what):
            field = f"{field}.{member[1]}" if field else member[1]
            return Refusal(422, "invalid", words.format(field), field=field)
    return Refusal(422, "invalid", f"{field}: {what}" if field else what, field=field or None)
