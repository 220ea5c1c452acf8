"""Everything that the JSON API can do, each declared once: it serves requests, and `openapi.json` is made of it.

A look is what it asks of operations and how JSON has that. The members of an action's body are the options of the
method of operations that has its name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

import msgspec

from fairlane.clock import SECOND, as_instant, microseconds
from fairlane.dashboard import api_shapes as shapes
from fairlane.dashboard.access import Role, Visitor
from fairlane.dashboard.refusals import Refusal
from fairlane.errors import ConfigurationError
from fairlane.job import State
from fairlane.operations import (
    AuditPage,
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


@dataclass(frozen=True, slots=True)
class Operation:
    """One thing that can be asked for or done."""

    name: str
    path: str
    summary: str
    answer: type
    """What it says, for `openapi.json`."""
    carry_out: Answer
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

    @property
    def is_for_one(self) -> bool:
        """It is about a queue or a job, which may not be there."""
        return "{" in self.path


def _look(ask: Callable[[Asked], Awaitable[Any]], describe: Callable[[Any], object] | None = None) -> Answer:
    """What is asked of operations, and how JSON has it; without `describe` as it is."""

    async def carry_out(asked: Asked) -> object:
        found = await ask(asked)
        return found if describe is None else describe(found)

    return carry_out


def _list(name: str, describe: Callable[[Any], object]) -> Callable[[Iterable[Any]], object]:
    return lambda found: {name: [describe(each) for each in found]}


def _keys_of_queue(asked: Asked) -> Awaitable[object]:
    options = msgspec.structs.asdict(asked.given)
    return asked.operations.keys.list(asked.queue, held_only=options.pop("held"), **options)


def _page_of_audit(asked: Asked) -> Awaitable[AuditPage]:
    given = asked.given
    return asked.operations.audit.list(given.queue, before=given.after, limit=given.limit)


def _jobs_in(asked: Asked, state: str | None) -> Awaitable[object]:
    wanted = _filter(asked.given, state, _keys(asked.given.key))
    return asked.operations.jobs.list(wanted, asked.given.limit, asked.given.after, looks=LOOKS)


async def _openapi(asked: Asked) -> object:
    from fairlane.dashboard.api_openapi import describe_api

    return describe_api(asked.root)


async def _simulate(asked: Asked) -> object:
    tried = await asked.operations.trials.run(**msgspec.structs.asdict(asked.given))
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


def _action(act: str, describe: Callable[[Any], dict[str, Any]]) -> Answer:
    """A method of `operations` (`queues.pause`) that takes the variable part of the path, and what is sent by name."""

    async def carry_out(asked: Asked) -> object:
        options = asked.options
        if "filter" in options:
            options["selection"] = _selection(options.pop("ids"), options.pop("filter"))
        carried_out: Callable[..., Awaitable[Any]] = attrgetter(act)(asked.operations)
        return describe(await carried_out(*asked.place.values(), **options)) | {"dry_run": asked.given.dry_run}

    return carry_out


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
    Operation("overview", "/overview", "Is work flowing, who waits and why, and what can be done about it.", Overview,
              _look(lambda asked: asked.operations.overview())),
    Operation("list_queues", "/queues", "Every queue at a glance.", shapes.QueueList,
              _look(lambda asked: asked.operations.queues.list(), lambda found: {"queues": found})),
    Operation("show_queue", "/queues/{queue}", "One queue: its policy in words, its limits, its partitions, its last "
              "hour.", OneQueue, _look(lambda asked: asked.operations.queues.show(asked.queue))),
    Operation("list_keys", "/queues/{queue}/keys", "A page of a queue's keys, by one of its scopes.", KeyList,
              _look(_keys_of_queue), query=shapes.KeysQuery),
    Operation("show_key", "/queues/{queue}/key", "One key: what waits, runs and comes next, its limits and what holds "
              "it.", OneKey, _look(lambda asked: asked.operations.keys.show(asked.queue, _keys(asked.given.key))),
              query=shapes.KeyQuery),
    Operation("explain_queue", "/queues/{queue}/explain", "Everything that holds a queue, or some keys of it.",
              shapes.ExplanationShown,
              _look(lambda asked: asked.operations.queues.explain(asked.queue, _keys(asked.given.key)),
                    document_of), query=shapes.ExplainQuery),
    Operation("list_limits", "/queues/{queue}/limits", "Every limit of a queue: declared, in force, and who changed "
              "it.", shapes.LimitList,
              _look(lambda asked: asked.operations.limits.list(asked.queue), _list("limits", document_of))),
    Operation("list_jobs", "/jobs", "Jobs that fit, the newest first.", shapes.JobList,
              _look(lambda asked: _jobs_in(asked, asked.given.state), document_of), query=shapes.JobsQuery,
              fails=(404,)),
    Operation("list_dead", "/dead", "Dead jobs, the last to die first.", shapes.JobList,
              _look(lambda asked: _jobs_in(asked, "dead"), document_of), query=shapes.DeadQuery, fails=(404,)),
    Operation("show_job", "/jobs/{job}", "Everything about one job.", shapes.OneJob,
              _look(lambda asked: asked.operations.jobs.show(asked.job), document_of)),
    Operation("explain_job", "/jobs/{job}/explain", "Everything that holds a job.", shapes.ExplanationShown,
              _look(lambda asked: asked.operations.jobs.explain(asked.job), document_of)),
    Operation("list_workers", "/workers", "Every worker, and those that have gone silent.", WorkerList,
              _look(lambda asked: asked.operations.workers.list())),
    Operation("list_schedules", "/schedules", "Every schedule: when it is due, what it enqueues, what it enqueued "
              "last.", shapes.ScheduleList,
              _look(lambda asked: asked.operations.schedules.list(), _list("schedules", document_of))),
    Operation("list_audit", "/audit", "What operators did, the newest first.", shapes.AuditList,
              _look(_page_of_audit, lambda page: {"entries": document_of(page.entries),
                                                  "after": page.before}), query=shapes.AuditQuery),
    Operation("show_policies", "/policies", "The policies in force, and where the program at hand declares another "
              "one.", shapes.PolicyList,
              _look(lambda asked: asked.operations.policies.show(), _list("policies", document_of))),
    Operation("diagnose", "/findings", "What is wrong with the queues of this database.", shapes.FindingList,
              _look(lambda asked: asked.operations.diagnose(), lambda found: {"findings": found})),
    Operation("openapi", "/openapi.json", "This description.", dict[str, Any], _openapi),
    # It changes nothing, so viewers may; it is bounded, and one at a time.
    Operation("try_policies", "/simulate", "Try policies side by side on a virtual clock. Touches no queue.",
              shapes.SimulationList, _simulate, body=shapes.Simulate, fails=(404,)),
    *(Operation(name, f"/queues/{{queue}}/{what}", summary, shapes.ChangeMade, _action(act, document_of), act=act,
                body=body, role=Role.OPERATOR)
      for name, act, what, summary, body in CHANGES),
    *(Operation(f"{what}_jobs", f"/jobs/{what}", summary, shapes.ReportShown, _action(f"jobs.{what}", document_of),
                act=f"jobs.{what}", body=body, role=Role.OPERATOR, fails=(404,))
      for what, summary, body in OF_JOBS),
    *(Operation(f"{what}_schedule", f"/schedules/{what}", summary, shapes.ScheduleChange,
                _action(f"schedules.{what}", document_of), act=f"schedules.{what}", body=shapes.ChangeSchedule,
                role=Role.OPERATOR, fails=(404,))
      for what, summary in OF_SCHEDULES),
)
# fmt: on
