"""`openapi.json`: the table of operations and the shapes of what is sent and answered, as OpenAPI 3.1 has them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version
from textwrap import dedent
from typing import Any

import msgspec

from fairlane.dashboard.access import ACTOR_HEADER, COOKIE, LONGEST_NAME, Role
from fairlane.dashboard.api import OPERATIONS, Operation
from fairlane.dashboard.api_shapes import ErrorAnswer
from fairlane.dashboard.refusals import CODES
from fairlane.policy.keys import NAME

Schema = dict[str, Any]

REF = "#/components/schemas/{name}"
QUEUE = {"type": "string", "pattern": f"^{NAME}$"}
PLACES: dict[str, Schema] = {"queue": QUEUE, "job": {"type": "string", "format": "uuid"}}
LOOKING_FAILS = (400, 401, 414, 422, 429, 503)
ACTING_FAILS = (400, 401, 403, 408, 409, 413, 414, 415, 422, 429, 503)
SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "The token that the dashboard was started with."},
    "session": {"type": "apiKey", "in": "cookie", "name": COOKIE, "description": "What the login form sets."},
    "csrf": {
        "type": "apiKey",
        "in": "header",
        "name": "X-CSRF-Token",
        "description": "With a session, for everything but looking: the token that each page carries.",
    },
}
ACTOR = {
    "name": ACTOR_HEADER.title(),
    "in": "header",
    "required": False,
    "description": f"Who a program acts for, up to {LONGEST_NAME} characters. The audit has it behind `api:`, without "
    "what cannot be printed; nothing else depends on it.",
    "schema": {"type": "string"},
}


@lru_cache(maxsize=16)
def describe_api(root: str = "/api") -> Schema:
    """The whole description, for an API that is mounted at `root`."""
    sent = _components([each.body for each in OPERATIONS if each.body is not None], is_sent=True)
    asked = _components([each.query for each in OPERATIONS], is_sent=True)
    answered = _components([*(each.answer for each in OPERATIONS), ErrorAnswer], is_sent=False)
    queries = {each.query.__name__: asked.pop(each.query.__name__, {}) for each in OPERATIONS}
    paths: dict[str, Schema] = {}
    for each in OPERATIONS:
        paths.setdefault(each.path, {})[each.method.lower()] = _operation(each, queries[each.query.__name__])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Fairlane",
            "version": version("fairlane"),
            "description": "What the dashboard shows and does. Times are in ISO 8601 (UTC), durations in seconds.",
        },
        "servers": [{"url": root}],
        "security": [{"bearer": []}, {"session": []}],
        "tags": [{"name": "looking"}, {"name": "acting"}],
        "paths": paths,
        "components": {"schemas": {**sent, **asked, **answered}, "securitySchemes": SECURITY},
    }


def _operation(each: Operation, query: Schema) -> Schema:
    usual = LOOKING_FAILS if each.method == "GET" else ACTING_FAILS
    fails = sorted({*usual, *each.fails, *([404] if each.is_for_one else [])})
    places = [name for name in PLACES if f"{{{name}}}" in each.path]
    described: Schema = {
        "operationId": each.name,
        "summary": each.summary,
        "tags": ["acting" if each.role is Role.OPERATOR else "looking"],
        "description": f"For {each.role}s.",
        "parameters": [
            *({"name": name, "in": "path", "required": True, "schema": PLACES[name]} for name in places),
            *_parameters(query),
        ],
        "responses": {
            "200": _response("What was asked for.", _ref(each.answer)),
            **{str(status): _response(f"`{CODES[status]}`", _ref(ErrorAnswer)) for status in fails},
        },
    }
    if each.body is not None:
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(each.body)}}}
        described["security"] = [{"bearer": []}, {"session": [], "csrf": []}]
    if each.role is Role.OPERATOR:
        described["parameters"].append(ACTOR)
    return described


def _parameters(query: Schema) -> Iterator[Schema]:
    for name, schema in query.get("properties", {}).items():
        shown = _without_null(schema)
        description = shown.pop("description", None)
        yield {
            "name": name,
            "in": "query",
            "required": name in query["required"],
            **({"description": description} if description else {}),
            "schema": shown,
        }


def _without_null(schema: Schema) -> Schema:
    """A parameter that is not given is left out: there is no null in a query."""
    kinds = [each for each in schema.get("anyOf", []) if each != {"type": "null"}]
    rest = {name: value for name, value in schema.items() if name != "anyOf" and (name, value) != ("default", None)}
    return {**kinds[0], **rest} if len(kinds) == 1 else {**rest, "anyOf": kinds} if kinds else rest


def _response(words: str, schema: Schema) -> Schema:
    return {"description": words, "content": {"application/json": {"schema": schema}}}


def _ref(wanted: type) -> Schema:
    (found,), _ = msgspec.json.schema_components([wanted], ref_template=REF)
    return found


def _components(types: Iterable[type], *, is_sent: bool) -> dict[str, Schema]:
    _, found = msgspec.json.schema_components(list(types), ref_template=REF)
    classes = _classes(types)
    for name, schema in found.items():
        properties = schema.get("properties", {})
        for member, words in _members(classes.get(name)).items():
            if member in properties:
                properties[member].setdefault("description", words)
        if not is_sent and properties:
            # What may be left out by those who send is always there in what we say, unless it is declared otherwise.
            shape = classes.get(name)
            fields = msgspec.structs.fields(shape) if shape and issubclass(shape, msgspec.Struct) else ()
            optional = {each.encode_name for each in fields if each.default is msgspec.UNSET}
            schema["required"] = [each for each in properties if each not in optional]
            for each in properties.values():
                each.pop("default", None)
    return dict(found)


def _classes(types: Iterable[Any]) -> dict[str, type]:
    """Every class that these are made of, by name."""
    found: dict[str, type] = {}
    waiting: list[Any] = [msgspec.inspect.type_info(each) for each in types]
    while waiting:
        match waiting.pop():
            case tuple() as several:
                waiting += several
            case msgspec.inspect.Type() | msgspec.inspect.Field() as info:
                declared = getattr(info, "cls", None)
                if declared is None or declared.__name__ not in found:
                    waiting += msgspec.structs.asdict(info).values()
                if declared is not None:
                    found[declared.__name__] = declared
    return found


@lru_cache(maxsize=256)
def _members(wanted: type | None) -> Mapping[str, str]:
    """What the docstring below each member says."""
    words: dict[str, str] = {}
    bases = reversed(wanted.__mro__ if wanted is not None else ())
    for each in (part for base in bases for part in (*base.__dict__.get("sources", ()), base)):
        if not each.__module__.startswith("fairlane."):
            continue
        try:
            body = ast.parse(dedent(inspect.getsource(each))).body[0]
        except (OSError, TypeError, SyntaxError):
            continue  # installed without its source: the names must do
        assert isinstance(body, ast.ClassDef)
        for member, after in zip(body.body, body.body[1:], strict=False):
            match member, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    words[name] = " ".join(text.split()).replace("`None`", "`null`")
    return words
