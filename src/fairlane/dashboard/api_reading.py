"""From what was sent to what was meant. Text that one of the stores cannot hold is refused here, whatever the store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes

import msgspec
from msgspec import inspect as shapes
from starlette.requests import Request

from fairlane.dashboard.api_refusing import Refusal

__all__ = ["check_path", "read_body", "read_query"]

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
    types = {field.encode_name: field.type for field in _shape(wanted).fields}
    found: dict[str, Any] = {}
    for name, value in pairs:
        _check_text(name, "the query")
        _check_text(value, name)
        shape = types.get(name)
        if isinstance(shape, shapes.ListType):
            found.setdefault(name, []).append(value)
        elif name in found:
            raise Refusal(422, "invalid", f"{name} is given twice", field=name)
        else:
            found[name] = _value(value, shape)
    return _converted(found, wanted)


def _shape(wanted: type[msgspec.Struct]) -> shapes.StructType:
    found = shapes.type_info(wanted)
    assert isinstance(found, shapes.StructType)
    return found


def _value(text: str, shape: shapes.Type | None) -> Any:
    """A parameter's text as JSON would have it. What does not fit stays text, and is refused as such."""
    kinds = shape.types if isinstance(shape, shapes.UnionType) else (shape,)
    if any(isinstance(kind, shapes.BoolType) for kind in kinds):
        return {"true": True, "false": False}.get(text, text)
    if any(isinstance(kind, shapes.IntType) for kind in kinds) and _NUMBER.match(text):
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
    return _converted(_plain(found), wanted)


def _plain(found: Any, where: str = "the body") -> Any:
    """Checks every text in it. 3.0 is 3: JSON knows one kind of number."""
    match found:
        case str():
            return _check_text(found, where)
        case float() if found.is_integer():
            return int(found)
        case dict():
            return {_check_text(name, where): _plain(value, _within(where, name)) for name, value in found.items()}
        case list():
            return [_plain(value, where) for value in found]
    return found


def _within(where: str, name: str) -> str:
    return name if where == "the body" else f"{where}.{name}"


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
    """What msgspec says, with the member that it is about before it."""
    found = _WHERE.match(said)
    what, field = (found["what"], found["path"].lstrip(".")) if found else (said, "")
    unknown = re.search(r"unknown field `([^`]*)`", what)
    if unknown:
        field = f"{field}.{unknown[1]}" if field else unknown[1]
        return Refusal(422, "invalid", f"{field}: there is no such member", field=field)
    missing = re.search(r"missing required field `([^`]*)`", what)
    if missing:
        field = f"{field}.{missing[1]}" if field else missing[1]
        return Refusal(422, "invalid", f"{field} is missing", field=field)
    return Refusal(422, "invalid", f"{field}: {what}" if field else what, field=field or None)
