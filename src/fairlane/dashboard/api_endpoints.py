"""Everything that the JSON API can do, each declared once: it serves requests, and `openapi.json` is made of it.

A look is a function: its name, its docstring and the type of `given` are those of the endpoint. An action is a line of
a table: the members of its body are the options of the method of `Operations` that has its name.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, get_type_hints
from uuid import UUID

import msgspec

from fairlane.clock import SECOND, as_instant, microseconds
from fairlane.dashboard import api_shapes as shapes
from fairlane.dashboard.access import Role, Visitor
from fairlane.dashboard.refusals import Refusal
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
    describe_change,
    describe_details,
    describe_entry,
    describe_limit,
    describe_page,
    describe_policy,
    describe_report,
    describe_schedule,
)
from fairlane.operations.explanations import describe_explanation
from fairlane.policy.keys import canonical_keys
from fairlane.redaction import Surface

if TYPE_CHECKING:
    from fairlane.dashboard.site import Dashboard

LOOKS = 3
"""At the database, of ten thousand jobs each, for one page of a list."""
DAY = 86_400 * SECOND
LONGEST_TIME = 3_660 * DAY
SHOWN_KEYS = 100
"""Keys of a simulation that are told one by one."""
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


Answer = Callable[[Asked], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One thing that can be asked for or done."""

    name: str
    method: Literal["GET", "POST"]
    path: str
    summary: str
    answer: type
    """What it says, for `openapi.json`."""
    carry_out: Answer
    act: str = ""
    """Of an action, the method of `operations`: `queues.pause`."""
    query: type[msgspec.Struct] = shapes.NoQuery
    body: type[msgspec.Struct] | None = None
    role: Role = Role.VIEWER
    fails: tuple[int, ...] = ()
    """Besides what any operation answers."""

    @property
    def is_for_one(self) -> bool:
        """It is about a queue or a job, which may not be there."""
        return "{" in self.path


_declared: list[Operation] = []


def _endpoint(place: str, answer: type, *fails: int) -> Callable[[Callable[..., Awaitable[object]]], None]:
    """Declare a look by the function that carries it out; `given` is its query, or the body of a POST."""
    method, _, path = place.partition(" ")

    def declare(function: Callable[..., Awaitable[object]]) -> None:
        given = get_type_hints(function).get("given")

        async def carry_out(asked: Asked) -> object:
            return await (function(asked) if given is None else function(asked, asked.given))

        operation = Operation(
            name=function.__name__.strip("_"),
            method="GET" if method == "GET" else "POST",
            path=path,
            summary=inspect.getdoc(function) or "",
            answer=answer,
            carry_out=carry_out,
            fails=fails,
        )
        if given is not None:
            operation = replace(operation, **{"query" if method == "GET" else "body": given})
        _declared.append(operation)

    return declare


@_endpoint("GET /overview", Overview)
async def _overview(asked: Asked) -> object:
    """Is work flowing, who waits and why, and what can be done about it."""
    return await asked.operations.overview()


@_endpoint("GET /queues", shapes.QueueList)
async def _list_queues(asked: Asked) -> object:
    """Every queue at a glance."""
    return {"queues": await asked.operations.queues.list()}


@_endpoint("GET /queues/{queue}", OneQueue)
async def _show_queue(asked: Asked) -> object:
    """One queue: its policy in words, its limits, its partitions, its last hour."""
    return await asked.operations.queues.show(asked.queue)


@_endpoint("GET /queues/{queue}/keys", KeyList)
async def _list_keys(asked: Asked, given: shapes.KeysQuery) -> object:
    """A page of a queue's keys, by one of its scopes."""
    options = msgspec.structs.asdict(given)
    return await asked.operations.keys.list(asked.queue, held_only=options.pop("held"), **options)


@_endpoint("GET /queues/{queue}/key", OneKey)
async def _show_key(asked: Asked, given: shapes.KeyQuery) -> object:
    """One key: what waits, runs and comes next, its limits and what holds it."""
    return await asked.operations.keys.show(asked.queue, _keys(given.key))


@_endpoint("GET /queues/{queue}/explain", shapes.ExplanationShown)
async def _explain_queue(asked: Asked, given: shapes.ExplainQuery) -> object:
    """Everything that holds a queue, or some keys of it."""
    return describe_explanation(await asked.operations.queues.explain(asked.queue, _keys(given.key)))


@_endpoint("GET /queues/{queue}/limits", shapes.LimitList)
async def _list_limits(asked: Asked) -> object:
    """Every limit of a queue: declared, in force, and who changed it."""
    return {"limits": [describe_limit(each) for each in await asked.operations.limits.list(asked.queue)]}


@_endpoint("GET /jobs", shapes.JobList, 404)
async def _list_jobs(asked: Asked, given: shapes.JobsQuery) -> object:
    """Jobs that fit, the newest first."""
    return await _page(asked, given, given.state)


@_endpoint("GET /dead", shapes.JobList, 404)
async def _list_dead(asked: Asked, given: shapes.DeadQuery) -> object:
    """Dead jobs, the last to die first."""
    return await _page(asked, given, "dead")


async def _page(asked: Asked, given: shapes.DeadQuery, state: str | None) -> object:
    wanted = _filter(given, state, _keys(given.key))
    return describe_page(await asked.operations.jobs.list(wanted, given.limit, given.after, looks=LOOKS))


@_endpoint("GET /jobs/{job}", shapes.OneJob)
async def _show_job(asked: Asked) -> object:
    """Everything about one job."""
    return describe_details(await asked.operations.jobs.show(asked.job))


@_endpoint("GET /jobs/{job}/explain", shapes.ExplanationShown)
async def _explain_job(asked: Asked) -> object:
    """Everything that holds a job."""
    return describe_explanation(await asked.operations.jobs.explain(asked.job))


@_endpoint("GET /workers", WorkerList)
async def _list_workers(asked: Asked) -> object:
    """Every worker, and those that have gone silent."""
    return await asked.operations.workers.list()


@_endpoint("GET /schedules", shapes.ScheduleList)
async def _list_schedules(asked: Asked) -> object:
    """Every schedule: when it is due, what it enqueues, what it enqueued last."""
    return {"schedules": [describe_schedule(each) for each in await asked.operations.schedules.list()]}


@_endpoint("GET /audit", shapes.AuditList)
async def _list_audit(asked: Asked, given: shapes.AuditQuery) -> object:
    """What operators did, the newest first."""
    page = await asked.operations.audit.list(given.queue, before=given.after, limit=given.limit)
    return {"entries": [describe_entry(each) for each in page.entries], "after": page.before}


@_endpoint("GET /policies", shapes.PolicyList)
async def _show_policies(asked: Asked) -> object:
    """The policies in force, and where the program at hand declares another one."""
    return {"policies": [describe_policy(each) for each in await asked.operations.policies.show()]}


@_endpoint("GET /findings", shapes.FindingList)
async def _diagnose(asked: Asked) -> object:
    """What is wrong with the queues of this database."""
    return {"findings": await asked.operations.diagnose()}


@_endpoint("GET /openapi.json", dict[str, Any])
async def _openapi(asked: Asked) -> object:
    """This description."""
    from fairlane.dashboard.api_openapi import describe_api

    return describe_api(asked.root)


# It changes nothing, so viewers may; it is bounded, and one at a time.
@_endpoint("POST /simulate", shapes.SimulationList, 404)
async def _try_policies(asked: Asked, given: shapes.Simulate) -> object:
    """Try policies side by side on a virtual clock. Touches no queue."""
    tried = await asked.operations.trials.run(**msgspec.structs.asdict(given))
    slowest = [
        replace(each, keys=tuple(sorted(each.keys, key=lambda group: -group.waits.p95)[:SHOWN_KEYS]))
        for each, _ in tried
    ]
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


def _action(
    name: str,
    act: str,
    path: str,
    summary: str,
    body: type[msgspec.Struct],
    answer: type,
    describe: Callable[[Any], dict[str, Any]],
    *fails: int,
) -> Operation:
    """A method of `operations` (`queues.pause`) that takes the variable part of the path, and what is sent by name."""

    async def carry_out(asked: Asked) -> object:
        options = asked.options
        if "filter" in options:
            options["selection"] = _selection(options.pop("ids"), options.pop("filter"))
        carried_out: Callable[..., Awaitable[Any]] = attrgetter(act)(asked.operations)
        return describe(await carried_out(*asked.place.values(), **options)) | {"dry_run": asked.given.dry_run}

    return Operation(
        name=name,
        method="POST",
        path=path,
        summary=summary,
        answer=answer,
        carry_out=carry_out,
        act=act,
        body=body,
        role=Role.OPERATOR,
        fails=fails,
    )


# fmt: off
CHANGES: tuple[tuple[str, str, str, str, type[msgspec.Struct]], ...] = (
    ("pause", "queues.pause", "pause", "Start nothing more of a queue, a key or a task. What runs goes on.",
     shapes.Pause),
    ("resume", "queues.resume", "resume", "End a pause: the one of exactly this queue, key or task.", shapes.Resume),
    ("set_limit", "limits.set", "limit/set", "Give a limit another bound for one key.", shapes.SetLimit),
    ("clear_limit", "limits.clear", "limit/clear", "Let a key have the bound again that the policy declares.",
     shapes.ClearLimit),
    ("set_weight", "weights.set", "weight/set", "Give a flow another weight.", shapes.SetWeight),
    ("boost", "weights.boost", "weight/boost", "Multiply a flow's weight.", shapes.Boost),
    ("clear_weight", "weights.clear", "weight/clear",
     "Let a flow have the weight again that the policy declares, and no boost.", shapes.ClearWeight),
    ("suspend", "queues.suspend", "suspend", "Let no limit of a queue hold anything back. All go on counting.",
     shapes.ChangeForAWhile),
    ("unsuspend", "queues.unsuspend", "unsuspend", "Let the limits of a queue hold again.", shapes.Change),
)
OF_JOBS: tuple[tuple[str, str, type[msgspec.Struct]], ...] = (
    ("cancel", "Cancel jobs that wait, ask those that run to stop.", shapes.ActOnJobs),
    ("retry", "Let scheduled jobs be due now.", shapes.ActOnJobs),
    ("replay", "Put dead jobs back, cancelled ones too if they are named or asked for.",
     shapes.ReplayJobs),
    ("purge", "Remove dead jobs for good, done and cancelled ones if they are named or asked for.",
     shapes.ActOnJobs),
    ("force", "Let waiting jobs start next, whatever their limits say; every limit counts them.",
     shapes.ForceJobs),
)
OF_SCHEDULES = (
    ("pause", "Fire a schedule no more. Slots that come meanwhile are not made up for."),
    ("resume", "Let a schedule fire again, from its next slot on."),
    ("trigger", "Let a worker fire a schedule once, beside its slots, also if paused."),
)
OPERATIONS: tuple[Operation, ...] = (
    *_declared,
    *(_action(name, act, f"/queues/{{queue}}/{what}", summary, body, shapes.ChangeMade, describe_change)
      for name, act, what, summary, body in CHANGES),
    *(_action(f"{what}_jobs", f"jobs.{what}", f"/jobs/{what}", summary, body, shapes.ReportShown, describe_report, 404)
      for what, summary, body in OF_JOBS),
    *(_action(f"{what}_schedule", f"schedules.{what}", f"/schedules/{what}", summary, shapes.ChangeSchedule,
              shapes.ScheduleChange, describe_schedule, 404)
      for what, summary in OF_SCHEDULES),
)
# fmt: on
