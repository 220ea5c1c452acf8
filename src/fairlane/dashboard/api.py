"""The JSON API: `/api`. Everything that it can do is declared once: that serves requests, and describes itself.

Requests are read strictly, carried out by `fairlane.operations`, and answered as described. The members of an action's
body are the options of its method.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import parse_qsl, unquote_to_bytes
from uuid import UUID

import msgspec
from msgspec import inspect as types
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from fairlane.clock import SECOND, as_instant, microseconds
from fairlane.dashboard import api_shapes as shapes
from fairlane.dashboard.access import Role, Visitor, path_of, require, root_of
from fairlane.dashboard.actions import ACTIONS, Action
from fairlane.dashboard.refusals import Refusal, as_json, refusal_of
from fairlane.errors import ConfigurationError
from fairlane.job import State
from fairlane.operations import (
    JobFilter,
    KeyList,
    OneKey,
    OneQueue,
    Operations,
    Overview,
    Selection,
    WorkerList,
    document_of,
)
from fairlane.policy.keys import canonical_keys
from fairlane.redaction import Surface

if TYPE_CHECKING:
    from fairlane.dashboard.site import Dashboard

LOOKS = 3
"""At the database, of ten thousand jobs each, for one page of a list."""
DAY = 86_400 * SECOND
LONGEST_TIME = 3_660 * DAY
SHOWN_KEYS = 100
"""Keys of a simulation that are listed one by one."""
SPANS = ("enqueued_since", "enqueued_until", "finished_since", "finished_until")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request that was read: who asks, and for what."""

    dashboard: Dashboard
    visitor: Visitor
    root: str
    """Where the API is mounted."""
    place: Mapping[str, str]
    """The variable parts of the path."""
    given: Any
    """The query of a GET, the body of a POST."""

    @property
    def operations(self) -> Operations:
        return self.dashboard.operations_for(self.visitor, Surface.API)

    @property
    def queue(self) -> str:
        return self.place["queue"]

    @property
    def job(self) -> UUID:
        try:
            return UUID(self.place["job"])
        except ValueError:
            raise ConfigurationError(f"{self.place['job']!r} is not the id of a job; /jobs lists them") from None

    @property
    def options(self) -> dict[str, Any]:
        """What an action is given: who acts, and the members of the body by their names."""
        if not self.given.dry_run and not self.given.reason.strip():
            raise Refusal(422, "invalid", "say why: it is recorded in the audit", field="reason")
        given = msgspec.structs.asdict(self.given)
        for name in given.keys() & {"expires_in", "delay"}:
            if given[name] is not None and microseconds(given[name]) > LONGEST_TIME:
                raise ConfigurationError(f"{name}={given[name]!r} is longer than {LONGEST_TIME // DAY:,} days")
        return given | {"actor": self.visitor.name}


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that can be asked for or done."""

    name: str
    path: str
    summary: str
    answer: type
    """What it says, for `openapi.json`."""
    ask: Callable[[Asked], Awaitable[Any]]
    """What it asks of `operations`."""
    describe: Callable[[Any], object] | None = None
    """How JSON has that, if not as it is."""
    _: KW_ONLY
    act: str = ""
    """Of an action, the method of `operations`: `queues.pause`."""
    query: type[msgspec.Struct] = shapes.NoQuery
    body: type[msgspec.Struct] | None = None
    role: Role = Role.VIEWER
    fails: tuple[int, ...] = ()
    """Besides what any operation answers."""

    @property
    def method(self) -> Literal["GET", "POST"]:
        return "GET" if self.body is None else "POST"

    async def carry_out(self, asked: Asked) -> object:
        found = await self.ask(asked)
        return found if self.describe is None else self.describe(found)

    @property
    def is_for_one(self) -> bool:
        """It is about a queue or a job, which may not be there."""
        return "{" in self.path


DESCRIBED: Mapping[str, tuple[type, Callable[[Any], dict[str, Any]]]] = {
    "jobs": (shapes.ReportShown, document_of),
    "schedules": (shapes.ScheduleChange, document_of),
}
"""What an action answers; of a queue, what it changed."""


def _of_action(action: Action) -> Operation:
    """A method of `operations` that takes the variable part of the path, and what is sent by name."""
    answer, describe = DESCRIBED.get(action.noun, (shapes.ChangeMade, document_of))

    async def ask(asked: Asked) -> object:
        options = asked.options
        if "filter" in options:
            options["selection"] = _selection(options.pop("ids"), options.pop("filter"))
        done = await attrgetter(action.method)(asked.operations)(*asked.place.values(), **options)
        return describe(done) | {"dry_run": asked.given.dry_run}

    return Operation(
        action.name,
        action.path,
        action.summary,
        answer,
        ask,
        act=action.method,
        body=action.body,
        role=Role.OPERATOR,
        fails=() if "{" in action.path else (404,),
    )


def _keys_of_queue(asked: Asked) -> Awaitable[object]:
    options = msgspec.structs.asdict(asked.given)
    return asked.operations.keys.list(asked.queue, held_only=options.pop("held"), **options)


def _jobs_in(asked: Asked, state: str | None) -> Awaitable[object]:
    wanted = _filter(asked.given, state, _keys(asked.given.key))
    return asked.operations.jobs.list(wanted, asked.given.limit, asked.given.after, looks=LOOKS)


async def _openapi(asked: Asked) -> object:
    from fairlane.dashboard.api_openapi import describe_api  # which describes this module

    return describe_api(asked.root)


async def _simulate(asked: Asked) -> object:
    tried = await asked.operations.trials.run(**msgspec.structs.asdict(asked.given))
    slowest = [replace(each, keys=each.slowest(SHOWN_KEYS)) for each, _ in tried]
    return {"simulations": slowest, "timelines": [each for _, each in tried]}


def _filter(given: shapes.DeadQuery | shapes.JobChoice, state: str | None, keys: Mapping[str, object]) -> JobFilter:
    moments = {name: at for name in SPANS if (at := getattr(given, name, None)) is not None}
    return JobFilter(
        queue=given.queue,
        task=given.task,
        state=None if state is None else State[state.upper()],
        keys=canonical_keys(keys),
        **{name: as_instant(at) for name, at in moments.items()},
    )


def _keys(pairs: Sequence[str]) -> dict[str, str | int | None]:
    """`account=acme` as keys by name; `account` alone is the key that jobs without a value share."""
    keys: dict[str, str | int | None] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not name or name in keys:
            raise ConfigurationError(f"key={pair!r}: write name=value, such as account=acme, each name once")
        keys[name] = value if separator else None
    return keys


def _selection(ids: list[UUID] | None, wanted: shapes.JobChoice | None) -> Selection:
    if ids is not None and wanted is None:
        return ids
    if wanted is None or ids is not None:
        raise ConfigurationError("which jobs? Give ids or filter, one of them; an empty filter stands for all")
    return _filter(wanted, wanted.state, wanted.keys)


# fmt: off
OPERATIONS: tuple[Operation, ...] = (
    Operation("overview", "/overview", "Is work flowing, who waits and why, and what can be done about it.", Overview,
              lambda asked: asked.operations.overview()),
    Operation("list_queues", "/queues", "Every queue at a glance.", shapes.QueueList,
              lambda asked: asked.operations.queues.list(), lambda found: {"queues": found}),
    Operation("show_queue", "/queues/{queue}", "One queue: its policy in words, its limits, its partitions, its last "
              "hour.", OneQueue, lambda asked: asked.operations.queues.show(asked.queue)),
    Operation("list_keys", "/queues/{queue}/keys", "A page of a queue's keys, by one of its scopes.", KeyList,
              _keys_of_queue, query=shapes.KeysQuery),
    Operation("show_key", "/queues/{queue}/key", "One key: what waits, runs and comes next, its limits and what holds "
              "it.", OneKey, lambda asked: asked.operations.keys.show(asked.queue, _keys(asked.given.key)),
              query=shapes.KeyQuery),
    Operation("explain_queue", "/queues/{queue}/explain", "Everything that holds a queue, or some keys of it.",
              shapes.ExplanationShown,
              lambda asked: asked.operations.queues.explain(asked.queue, _keys(asked.given.key)), document_of,
              query=shapes.ExplainQuery),
    Operation("list_limits", "/queues/{queue}/limits", "Every limit of a queue: declared, in force, and who changed "
              "it.", shapes.LimitList, lambda asked: asked.operations.limits.list(asked.queue),
              lambda found: {"limits": document_of(found)}),
    Operation("list_jobs", "/jobs", "Jobs that fit, the newest first.", shapes.JobList,
              lambda asked: _jobs_in(asked, asked.given.state), document_of, query=shapes.JobsQuery, fails=(404,)),
    Operation("list_dead", "/dead", "Dead jobs, the last to die first.", shapes.JobList,
              lambda asked: _jobs_in(asked, "dead"), document_of, query=shapes.DeadQuery, fails=(404,)),
    Operation("show_job", "/jobs/{job}", "Everything about one job.", shapes.OneJob,
              lambda asked: asked.operations.jobs.show(asked.job), document_of),
    Operation("explain_job", "/jobs/{job}/explain", "Everything that holds a job.", shapes.ExplanationShown,
              lambda asked: asked.operations.jobs.explain(asked.job), document_of),
    Operation("list_workers", "/workers", "Every worker, and those that have gone silent.", WorkerList,
              lambda asked: asked.operations.workers.list()),
    Operation("list_schedules", "/schedules", "Every schedule: when it is due, what it enqueues, what it enqueued "
              "last.", shapes.ScheduleList, lambda asked: asked.operations.schedules.list(),
              lambda found: {"schedules": document_of(found)}),
    Operation("list_audit", "/audit", "What operators did, the newest first.", shapes.AuditList,
              lambda asked: asked.operations.audit.list(asked.given.queue, before=asked.given.after,
                                                        limit=asked.given.limit),
              lambda page: {"entries": document_of(page.entries), "after": page.before},
              query=shapes.AuditQuery),
    Operation("show_policies", "/policies", "The policies in force, and where the program at hand declares another "
              "one.", shapes.PolicyList, lambda asked: asked.operations.policies.show(),
              lambda found: {"policies": document_of(found)}),
    Operation("diagnose", "/findings", "What is wrong with the queues of this database.", shapes.FindingList,
              lambda asked: asked.operations.diagnose(), lambda found: {"findings": found}),
    Operation("openapi", "/openapi.json", "This description.", dict[str, Any], _openapi),
    # It changes nothing, so viewers may; it is bounded, and one at a time.
    Operation("try_policies", "/simulate", "Try policies side by side on a virtual clock. Touches no queue.",
              shapes.SimulationList, _simulate, body=shapes.Simulate, fails=(404,)),
    *(_of_action(each) for each in ACTIONS if each.path),
)
# fmt: on


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
        if operation.name != "try_policies":
            async with asyncio.timeout(LONGEST_LOOK if operation.method == "GET" else None):
                return await operation.carry_out(asked)
        if self._simulating.locked():
            raise Refusal(429, "busy", "a simulation is under way; one at a time", headers={"Retry-After": "5"})

        async def simulate() -> object:
            async with self._simulating:
                return await operation.carry_out(asked)

        # Whoever goes away meanwhile leaves a thread behind that still reckons: the next one waits for it.
        return await asyncio.shield(asyncio.create_task(simulate()))


async def _given(request: Request, operation: Operation) -> Any:
    query = read_query(request, operation.query)
    # Bounded in size and time by the security middleware, which has read it.
    return query if operation.body is None else read_body(request, await request.body(), operation.body)


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
        raise _refusal_for(str(error)) from None


def _refusal_for(said: str) -> Refusal:
    """The refusal for a message of msgspec; it begins with the member that it is about."""
    found = _WHERE.match(said)
    what, field = (found["what"], found["path"].lstrip(".")) if found else (said, "")
    for kind, words in (("unknown", "{}: there is no such member"), ("missing required", "{} is missing")):
        if member := re.search(rf"{kind} field `([^`]*)`", what):
            field = f"{field}.{member[1]}" if field else member[1]
            return Refusal(422, "invalid", words.format(field), field=field)
    return Refusal(422, "invalid", f"{field}: {what}" if field else what, field=field or None)
