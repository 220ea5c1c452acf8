"""The table of everything that the JSON API can do. It serves requests, and `openapi.json` is made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID

import msgspec

from fairlane.clock import SECOND, as_instant, microseconds
from fairlane.dashboard import api_answers as answers
from fairlane.dashboard import api_requests as requests
from fairlane.dashboard.access import Role, Visitor
from fairlane.dashboard.api_errors import Refusal
from fairlane.errors import ConfigurationError
from fairlane.job import State
from fairlane.operations import (
    Change,
    JobFilter,
    KeyList,
    OneKey,
    OneQueue,
    Operations,
    Overview,
    Report,
    ScheduleView,
    Selection,
    WorkerList,
    describe_change,
    describe_details,
    describe_entry,
    describe_finding,
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
    def intent(self) -> dict[str, Any]:
        """Who acts and why, for how long, and whether in earnest."""
        if not self.given.dry_run and not self.given.reason.strip():
            raise Refusal(422, "invalid", "say why: it is recorded in the audit", field="reason")
        told: dict[str, Any] = {
            "actor": self.visitor.name,
            "reason": self.given.reason,
            "dry_run": self.given.dry_run,
        }
        if isinstance(self.given, requests.ChangeForAWhile):
            expires_in = _time("expires_in", self.given.expires_in)
            told |= {"expires_in": expires_in, "expires_at": self.given.expires_at}
        return told


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
    query: type[msgspec.Struct] = requests.NoQuery
    body: type[msgspec.Struct] | None = None
    role: Role = Role.VIEWER
    fails: tuple[int, ...] = ()
    """Besides what any operation answers."""

    @property
    def is_for_one(self) -> bool:
        """It is about a queue or a job, which may not be there."""
        return "{" in self.path


# Looking.


async def _overview(asked: Asked) -> object:
    return await asked.operations.overview()


async def _list_queues(asked: Asked) -> object:
    return {"queues": await asked.operations.list_queues()}


async def _show_queue(asked: Asked) -> object:
    return await asked.operations.show_queue(asked.queue)


async def _list_keys(asked: Asked) -> object:
    given: requests.KeysQuery = asked.given
    return await asked.operations.list_keys(
        asked.queue,
        given.by,
        sort=given.sort,
        search=given.search,
        held_only=given.held,
        after=given.after,
        limit=given.limit,
    )


async def _show_key(asked: Asked) -> object:
    return await asked.operations.show_key(asked.queue, _keys(asked.given.key))


async def _explain_queue(asked: Asked) -> object:
    return describe_explanation(await asked.operations.explain_queue(asked.queue, _keys(asked.given.key)))


async def _list_limits(asked: Asked) -> object:
    limits = await asked.operations.list_limits(asked.queue)
    return {"limits": [describe_limit(each) for each in limits]}


async def _list_jobs(asked: Asked) -> object:
    given: requests.JobsQuery = asked.given
    wanted = requests.JobChoice(
        queue=given.queue,
        task=given.task,
        state=given.state,
        keys=_keys(given.key),
        enqueued_since=given.enqueued_since,
        enqueued_until=given.enqueued_until,
        finished_since=given.finished_since,
        finished_until=given.finished_until,
    )
    return await _page(asked, wanted)


async def _list_dead(asked: Asked) -> object:
    given: requests.DeadQuery = asked.given
    wanted = requests.JobChoice(
        queue=given.queue,
        task=given.task,
        state="dead",
        keys=_keys(given.key),
        finished_since=given.finished_since,
        finished_until=given.finished_until,
    )
    return await _page(asked, wanted)


async def _page(asked: Asked, wanted: requests.JobChoice) -> object:
    list_jobs, given = asked.operations.list_jobs, asked.given
    return describe_page(await list_jobs(_filter(wanted), given.limit, given.after, looks=LOOKS))


async def _show_job(asked: Asked) -> object:
    return describe_details(await asked.operations.show_job(asked.job))


async def _explain_job(asked: Asked) -> object:
    return describe_explanation(await asked.operations.explain_job(asked.job))


async def _list_workers(asked: Asked) -> object:
    return await asked.operations.list_workers()


async def _list_schedules(asked: Asked) -> object:
    return {"schedules": [describe_schedule(each) for each in await asked.operations.list_schedules()]}


async def _list_audit(asked: Asked) -> object:
    given: requests.AuditQuery = asked.given
    page = await asked.operations.list_audit(given.queue, before=given.after, limit=given.limit)
    return {"entries": [describe_entry(each) for each in page.entries], "after": page.before}


async def _list_policies(asked: Asked) -> object:
    return {"policies": [describe_policy(each) for each in await asked.operations.show_policies()]}


async def _list_findings(asked: Asked) -> object:
    return {"findings": [describe_finding(each) for each in await asked.operations.diagnose()]}


async def _simulate(asked: Asked) -> object:
    given: requests.Simulate = asked.given
    tried = await asked.operations.try_policies(
        given.policies,
        workload=given.workload,
        history=given.history,
        last=given.last,
        slots=given.slots,
        seed=given.seed,
        until=given.until,
        by=given.by,
    )
    slowest = [
        dataclasses.replace(each, keys=tuple(sorted(each.keys, key=lambda group: -group.waits.p95)[:SHOWN_KEYS]))
        for each, _ in tried
    ]
    return {"simulations": slowest, "timelines": [each for _, each in tried]}


async def _openapi(asked: Asked) -> object:
    from fairlane.dashboard.api_openapi import describe_api

    return describe_api(asked.root)


# Acting.


def _changing(method: str, *members: str) -> Answer:
    """An action of `operations` that takes a queue, then these members of the body."""

    async def carry_out(asked: Asked) -> object:
        act: Callable[..., Awaitable[Change]] = getattr(asked.operations, method)
        given = [getattr(asked.given, name) for name in members]
        named = {name: getattr(asked.given, name) for name in ("keys", "task") if hasattr(asked.given, name)}
        return describe_change(await act(asked.queue, *given, **named, **asked.intent))

    return carry_out


def _handling(method: str) -> Answer:
    """An action of `operations` on jobs that are named, or that fit."""

    async def carry_out(asked: Asked) -> object:
        act: Callable[..., Awaitable[Report]] = getattr(asked.operations, method)
        given: requests.ActOnJobs = asked.given
        options: dict[str, Any] = {}
        if isinstance(given, requests.ReplayJobs):
            options = {"delay": _time("delay", given.delay), "on_conflict": given.on_conflict}
        return describe_report(await act(_selection(given), limit=given.limit, **options, **asked.intent))

    return carry_out


def _scheduling(method: str) -> Answer:
    """An action of `operations` on one schedule."""

    async def carry_out(asked: Asked) -> object:
        act: Callable[..., Awaitable[ScheduleView]] = getattr(asked.operations, method)
        view = await act(asked.given.name, **asked.intent)
        return describe_schedule(view) | {"dry_run": asked.given.dry_run}

    return carry_out


async def _force_jobs(asked: Asked) -> object:
    return describe_report(await asked.operations.force_jobs(asked.given.ids, **asked.intent))


def _selection(given: requests.ActOnJobs) -> Selection:
    if (given.ids is None) == (given.filter is None):
        raise ConfigurationError("which jobs? Give ids or filter, one of them; an empty filter stands for all")
    return given.ids if given.ids is not None else _filter(given.filter or requests.JobChoice())


def _filter(given: requests.JobChoice) -> JobFilter:
    spans = ("enqueued_since", "enqueued_until", "finished_since", "finished_until")
    moments = {name: getattr(given, name) for name in spans}
    return JobFilter(
        queue=given.queue,
        task=given.task,
        state=None if given.state is None else State[given.state.upper()],
        keys=canonical_keys(given.keys),
        **{name: None if at is None else as_instant(at) for name, at in moments.items()},
    )


def _time(name: str, given: str | float | None) -> str | float | None:
    """A time as it was given, if it is not longer than anybody can mean."""
    if given is not None and microseconds(given) > LONGEST_TIME:
        raise ConfigurationError(f"{name}={given!r} is longer than {LONGEST_TIME // DAY:,} days")
    return given


def _keys(pairs: Sequence[str]) -> dict[str, str | int | None]:
    """`account=acme` as keys by name; `account` alone is the key that jobs without a value share."""
    keys: dict[str, str | int | None] = {}
    for pair in pairs:
        name, separator, value = pair.partition("=")
        if not name or name in keys:
            raise ConfigurationError(f"key={pair!r}: write name=value, such as account=acme, each name once")
        keys[name] = value if separator else None
    return keys


def _look(name: str, path: str, summary: str, answer: type, carry_out: Answer, **more: Any) -> Operation:
    return Operation(name=name, method="GET", path=path, summary=summary, answer=answer, carry_out=carry_out, **more)


def _change(name: str, what: str, summary: str, body: type[msgspec.Struct], *members: str) -> Operation:
    return Operation(
        name=name,
        method="POST",
        path=f"/queues/{{queue}}/{what}",
        summary=summary,
        answer=answers.ChangeMade,
        carry_out=_changing(name, *members),
        body=body,
        role=Role.OPERATOR,
    )


def _act(name: str, what: str, summary: str, body: type[msgspec.Struct], carry_out: Answer | None = None) -> Operation:
    return Operation(
        name=name,
        method="POST",
        path=f"/jobs/{what}",
        summary=summary,
        answer=answers.ReportShown,
        carry_out=carry_out or _handling(name),
        body=body,
        role=Role.OPERATOR,
        fails=(404,),
    )


def _reschedule(name: str, what: str, summary: str) -> Operation:
    return Operation(
        name=name,
        method="POST",
        path=f"/schedules/{what}",
        summary=summary,
        answer=answers.ScheduleChange,
        carry_out=_scheduling(name),
        body=requests.ChangeSchedule,
        role=Role.OPERATOR,
        fails=(404,),
    )


# fmt: off
OPERATIONS: tuple[Operation, ...] = (
    _look("overview", "/overview", "Is work flowing, who waits and why, and what can be done about it.",
          Overview, _overview),
    _look("list_queues", "/queues", "Every queue at a glance.", answers.QueueList, _list_queues),
    _look("show_queue", "/queues/{queue}", "One queue: its policy in words, its limits, its partitions, its last hour.",
          OneQueue, _show_queue),
    _look("list_keys", "/queues/{queue}/keys", "A page of a queue's keys, by one of its scopes.",
          KeyList, _list_keys, query=requests.KeysQuery),
    _look("show_key", "/queues/{queue}/key", "One key: what waits, runs and comes next, its limits and what holds it.",
          OneKey, _show_key, query=requests.KeyQuery),
    _look("explain_queue", "/queues/{queue}/explain", "Everything that holds a queue, or some keys of it.",
          answers.ExplanationShown, _explain_queue, query=requests.ExplainQuery),
    _look("list_limits", "/queues/{queue}/limits", "Every limit of a queue: declared, in force, and who changed it.",
          answers.LimitList, _list_limits),
    _look("list_jobs", "/jobs", "Jobs that fit, the newest first.",
          answers.JobList, _list_jobs, query=requests.JobsQuery, fails=(404,)),
    _look("list_dead", "/dead", "Dead jobs, the last to die first.",
          answers.JobList, _list_dead, query=requests.DeadQuery, fails=(404,)),
    _look("show_job", "/jobs/{job}", "Everything about one job.", answers.OneJob, _show_job),
    _look("explain_job", "/jobs/{job}/explain", "Everything that holds a job.",
          answers.ExplanationShown, _explain_job),
    _look("list_workers", "/workers", "Every worker, and those that have gone silent.", WorkerList, _list_workers),
    _look("list_schedules", "/schedules", "Every schedule: when it is due, what it enqueues, what it enqueued last.",
          answers.ScheduleList, _list_schedules),
    _look("list_audit", "/audit", "What operators did, the newest first.",
          answers.AuditList, _list_audit, query=requests.AuditQuery),
    _look("show_policies", "/policies", "The policies in force, and where the program at hand declares another one.",
          answers.PolicyList, _list_policies),
    _look("diagnose", "/findings", "What is wrong with the queues of this database.",
          answers.FindingList, _list_findings),
    _look("openapi", "/openapi.json", "This description.", dict[str, Any], _openapi),
    # It changes nothing, so viewers may; it is bounded, and one at a time.
    Operation(name="try_policies", method="POST", path="/simulate", answer=answers.SimulationList, fails=(404,),
              summary="Try policies side by side on a virtual clock. Touches no queue.",
              carry_out=_simulate, body=requests.Simulate),

    _change("pause", "pause", "Start nothing more of a queue, a key or a task. What runs goes on.", requests.Pause),
    _change("resume", "resume", "End a pause: the one of exactly this queue, key or task.", requests.Resume),
    _change("set_limit", "limit/set", "Give a limit another bound for one key.", requests.SetLimit, "limit", "value"),
    _change("clear_limit", "limit/clear", "Let a key have the bound again that the policy declares.",
            requests.ClearLimit, "limit"),
    _change("set_weight", "weight/set", "Give a flow another weight.", requests.SetWeight, "weight"),
    _change("boost", "weight/boost", "Multiply a flow's weight.", requests.Boost, "factor"),
    _change("clear_weight", "weight/clear", "Let a flow have the weight again that the policy declares, and no boost.",
            requests.ClearWeight),
    _change("suspend", "suspend", "Let no limit of a queue hold anything back. All go on counting.",
            requests.ChangeForAWhile),
    _change("unsuspend", "unsuspend", "Let the limits of a queue hold again.", requests.Change),

    _act("cancel_jobs", "cancel", "Cancel jobs that wait, ask those that run to stop.", requests.ActOnJobs),
    _act("retry_jobs", "retry", "Let scheduled jobs be due now.", requests.ActOnJobs),
    _act("replay_jobs", "replay", "Put dead jobs back, cancelled ones too if they are named or asked for.",
         requests.ReplayJobs),
    _act("purge_jobs", "purge", "Remove dead jobs for good, done and cancelled ones if they are named or asked for.",
         requests.ActOnJobs),
    _act("force_jobs", "force", "Let waiting jobs start next, whatever their limits say; every limit counts them.",
         requests.ForceJobs, _force_jobs),

    _reschedule("pause_schedule", "pause", "Fire a schedule no more. Slots that come meanwhile are not made up for."),
    _reschedule("resume_schedule", "resume", "Let a schedule fire again, from its next slot on."),
    _reschedule("trigger_schedule", "trigger", "Let a worker fire a schedule once, beside its slots, also if paused."),
)
# fmt: on
