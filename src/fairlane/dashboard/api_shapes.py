"""What programs send to the JSON API, each member with its bounds, and what it answers besides the views of operations.

`openapi.json` is made of both. What is sent is converted into these, and unknown members are refused. What is answered
is not: `document_of` of operations makes it, and the tests hold every answer to these shapes. Most of their members are
those of the values that operations return.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Literal, TypeVar, cast, get_type_hints
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fairlane.job import AttemptRecord, JobRecord
from fairlane.operations import Change as ChangeValue
from fairlane.operations import Report, ScheduleView, exported_columns
from fairlane.operations.diagnosis import Finding
from fairlane.operations.jobs import LIMIT
from fairlane.operations.keys import MOST_KEYS
from fairlane.operations.trials import MOST_POLICIES, MOST_SLOTS
from fairlane.operations.views import KeySort, QueueView
from fairlane.policy.gates import Origin
from fairlane.policy.keys import MAX_KEY_BYTES
from fairlane.policy.overrides import Override
from fairlane.policy.policy import Difference
from fairlane.scheduler.explain import Explanation, Hold, Holder, Subject
from fairlane.simulation.measures import Simulation, Timeline
from fairlane.simulation.workload import Workload

MOST_LISTED = 200
"""Jobs or entries of one page."""
MOST_NAMED = 1_000
"""Jobs that one action names one by one."""
MOST_TOUCHED = 10_000
"""Jobs of one action."""
LARGEST = (1 << 53) - 1
"""The largest number that every reader of JSON has exactly."""

Name = Annotated[str, Meta(min_length=1, max_length=200)]
Text = Annotated[str, Meta(max_length=1_000)]
Cursor = Annotated[str, Meta(min_length=1, max_length=2_000)]
Seconds = Annotated[float, Meta(ge=0, le=3_660 * 86_400)]
Duration = Annotated[str, Meta(min_length=2, max_length=50, pattern=r"^[0-9a-z. ]+$")] | Seconds
Moment = Annotated[datetime, Meta(tz=True)]
KeyText = Annotated[str, Meta(max_length=MAX_KEY_BYTES)]
KeyNumber = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
Keys = Annotated[dict[Name, KeyText | KeyNumber | None], Meta(max_length=20)]
SomeKeys = Annotated[dict[Name, KeyText | KeyNumber | None], Meta(min_length=1, max_length=20)]
KeyPair = Annotated[str, Meta(min_length=1, max_length=MAX_KEY_BYTES + 201)]
JobIds = Annotated[list[UUID], Meta(min_length=1, max_length=MOST_NAMED)]
StateName = Literal["scheduled", "ready", "running", "done", "dead", "cancelled"]


class Sent(msgspec.Struct, forbid_unknown_fields=True):
    """What a program sends."""


# Queries.


class NoQuery(Sent):
    """Nothing can be asked for besides."""


class KeysQuery(Sent, kw_only=True):
    """Which keys of a queue."""

    by: Name | None = None
    """One of the queue's `scopes`, with commas: `account,region`. By default the first one."""
    sort: KeySort = KeySort.WAITING
    search: Annotated[str, Meta(max_length=200)] = ""
    """Part of a key's value."""
    held: bool = False
    """Only keys that a limit or a pause holds back."""
    after: Cursor | None = None
    """Where the page before has ended: its `after`."""
    limit: Annotated[int, Meta(ge=1, le=MOST_KEYS)] = 50


class KeyQuery(Sent, kw_only=True):
    """Which key."""

    key: Annotated[list[KeyPair], Meta(min_length=1, max_length=20)]
    """`account=acme`; repeated where several keys are a scope together. Without `=` it is the key `null`."""


class ExplainQuery(Sent, kw_only=True):
    """What is to be explained: a queue, or some keys of it."""

    key: Annotated[list[KeyPair], Meta(max_length=20)] = []
    """`account=acme`; may be repeated. Without `=` it is the key `null`."""


class DeadQuery(Sent, kw_only=True):
    """Which dead jobs."""

    queue: Name | None = None
    task: Name | None = None
    key: Annotated[list[KeyPair], Meta(max_length=20)] = []
    """`account=acme`; may be repeated. Without `=` it is the key `null`."""
    finished_since: Moment | None = None
    """From this moment on."""
    finished_until: Moment | None = None
    """Before this moment."""
    after: Cursor | None = None
    """Where the page before has ended: its `after`."""
    limit: Annotated[int, Meta(ge=1, le=MOST_LISTED)] = 50


class JobsQuery(DeadQuery, kw_only=True):
    """Which jobs. The newest come first; done, dead and cancelled ones by their end."""

    state: StateName | None = None
    enqueued_since: Moment | None = None
    """From this moment on."""
    enqueued_until: Moment | None = None
    """Before this moment."""


class AuditQuery(Sent, kw_only=True):
    """Which of the things that operators did. The newest come first."""

    queue: Name | None = None
    after: Annotated[int, Meta(ge=0, le=LARGEST)] | None = None
    """Where the page before has ended: its `after`."""
    limit: Annotated[int, Meta(ge=1, le=MOST_LISTED)] = 50


# Bodies.


class Change(Sent, kw_only=True):
    """Why, and whether in earnest."""

    reason: Text = ""
    """Why. It is recorded, with who and when; only a dry run needs none."""
    dry_run: bool = False
    """Only say what would change."""


class ChangeForAWhile(Change, kw_only=True):
    """A change that may end by itself: after a time or at a moment, not both."""

    expires_in: Duration | None = None
    """`"30m"`, `"2h"`, or seconds."""
    expires_at: Moment | None = None


class JobChoice(Sent, kw_only=True):
    """Which jobs; what is left out does not matter. None of it: all that the action is for."""

    queue: Name | None = None
    task: Name | None = None
    state: StateName | None = None
    keys: Keys = {}
    enqueued_since: Moment | None = None
    enqueued_until: Moment | None = None
    finished_since: Moment | None = None
    finished_until: Moment | None = None


def _body(name: str, words: str, base: type[Change], *members: Any) -> type[msgspec.Struct]:
    """A body with these members besides those of its base: name, type and, if it may be left out, default."""
    space = {"__doc__": words}
    return msgspec.defstruct(name, members, bases=(base,), module=__name__, namespace=space, kw_only=True)


KEYS: tuple[str, Any, Any] = ("keys", Keys, {})
SOME_KEYS = ("keys", SomeKeys)
TASK = ("task", Name | None, None)
BOUND = ("value", Annotated[float, Meta(ge=0, le=1e9)])
FACTOR = Annotated[float, Meta(gt=0, le=1e9)]
WHICH = Meta(description="Its name, its kind or its keys: `concurrency:account`, `rate`, `account`.")
# fmt: off
Pause = _body("Pause", "What starts nothing more: the whole queue, or a key or a task of it.", ChangeForAWhile,
              KEYS, TASK)
Resume = _body("Resume", "Which pause ends: that of exactly this queue, key or task.", Change, KEYS, TASK)
SetLimit = _body("SetLimit", "Another bound for one limit and one key.", ChangeForAWhile,
                 ("limit", Annotated[Name, WHICH]), BOUND, KEYS)
ClearLimit = _body("ClearLimit", "Which limit has the bound again that the policy declares.", Change,
                   ("limit", Name), KEYS)
SetWeight = _body("SetWeight", "Another weight for one flow.", ChangeForAWhile, SOME_KEYS, ("weight", FACTOR))
Boost = _body("Boost", "A flow, and what its weight is multiplied with.", ChangeForAWhile, SOME_KEYS,
              ("factor", FACTOR))
ClearWeight = _body("ClearWeight", "Which flow has the weight again that the policy declares.", Change, SOME_KEYS)
ChangeSchedule = _body("ChangeSchedule", "Which schedule. It is named here and not in the path: a name may hold "
                       "whatever its program chose.", Change, ("name", Name))
ForceJobs = _body("ForceJobs", "Jobs named one by one: what goes around limits is never chosen by a filter.", Change,
                  ("ids", JobIds))
Restore = _body("Restore", "Overrides to set again, and the ids of those that came instead.", Change,
                ("overrides", list[Override]), ("ending", list[str]))
# fmt: on


class ActOnJobs(Change, kw_only=True):
    """Jobs named one by one, or all that fit: exactly one of `ids` and `filter`."""

    ids: JobIds | None = None
    filter: JobChoice | None = None
    limit: Annotated[int, Meta(ge=1, le=MOST_TOUCHED)] = LIMIT
    """Jobs that are touched at most."""


class ReplayJobs(ActOnJobs, kw_only=True):
    """Jobs named one by one, or all that fit: exactly one of `ids` and `filter`."""

    delay: Duration | None = None
    """They run after this time; by default at once."""
    on_conflict: Literal["reject", "replace"] = "reject"
    """Where another job holds the unique key: skip the job, or take the place of that one if it waits."""


class Simulate(Sent, kw_only=True):
    """Policies to try side by side, and the jobs to try them on: a workload, or the history of a queue."""

    policies: Annotated[list[Name | dict[str, Any]], Meta(min_length=1, max_length=MOST_POLICIES)]
    """A name stands for the policy in force for that queue; an object is a policy as `GET /policies` shows it, or less
    where defaults will do."""
    workload: Workload | None = None
    history: Name | None = None
    """The jobs that ended lately in this queue."""
    last: Duration = "1h"
    """How far back the history goes."""
    slots: Annotated[int, Meta(ge=1, le=MOST_SLOTS)] = 100
    """Jobs that the whole fleet runs at once."""
    seed: Annotated[int, Meta(ge=0, le=LARGEST)] | None = None
    """Another seed than the workload's."""
    until: Duration | None = None
    """Stop after this long."""
    by: Annotated[list[Name], Meta(max_length=20)] = []
    """Group the keys of the answer by these; by default, by what takes turns."""


# Answers.

T = TypeVar("T")
KeysShown = dict[str, str | None]
AS_JSON = {"Instant": datetime, "UUID": str, "State": StateName}
"""Types that values have otherwise in JSON, by the names under which they are declared."""


def _of(source: type, *names: str) -> Callable[[type[T]], type[T]]:
    """Give an answer these members of a value that operations return (all, if none are named), besides its own."""

    def declare(answer: type[T]) -> type[T]:
        types = get_type_hints(source, localns=AS_JSON)
        members = {name: types[name] for name in names or types} | answer.__annotations__
        namespace = {"__doc__": answer.__doc__, "sources": (source, *getattr(answer, "sources", ()))}
        made = msgspec.defstruct(answer.__name__, [*members.items()], module=__name__, namespace=namespace)
        return cast("type[T]", made)

    return declare


class ErrorShown(msgspec.Struct, kw_only=True):
    """What went wrong."""

    code: str
    """Stable: for programs."""
    message: str
    """For people."""
    remedy: str | UnsetType = UNSET
    """What to do about it, where the message does not say so."""
    field: str | UnsetType = UNSET
    """The member of the body or of the query that it is about."""


@_of(JobRecord, *exported_columns())
class JobShown:
    """A job, without what it carries."""


@_of(AttemptRecord)
class AttemptShown:
    """One run of a job."""


class OneJob(JobShown):
    """Everything about one job. What it carries and what it returned may be redacted."""

    call: Any
    """`[arguments, named arguments]`; text where it is no JSON."""
    result: Any
    attempts: list[AttemptShown]


class JobList(msgspec.Struct, kw_only=True):
    """Some jobs."""

    jobs: list[JobShown]
    after: str | None
    """Where the next page begins; `null`: this is the last one. A short page, even an empty one, may have one: what a
    single request looks at is bounded."""


@_of(Holder)
class HolderShown:
    """A job that takes up a place."""

    since: datetime | None


@_of(Hold, "reason", "words", "limit", "key", "used", "bound", "until", "count")
class HoldShown:
    """One reason to wait."""

    bound_from: Origin | None
    """Where the bound came from: the policy, the newest job of the key, an override, or the default of 1 that holds
    until a job brings a number."""
    holders: list[HolderShown]
    set_by: str | None
    """The operator who set it, or its bound."""


@_of(Subject, "job", "queue", "task", "state", "priority", "keys")
@_of(Explanation, "earliest", "estimate", "now")
class ExplanationShown:
    """Everything that holds a job, a key or a queue."""

    reasons: list[HoldShown]
    next_up: list[str]
    """Jobs that would start next, in their order."""


@_of(Override, "kind", "limit", "value", "expires_at", "set_at", "set_by", "reason")
class OverrideShown:
    """One change of what a policy says."""

    keys: KeysShown
    says: str


class OverrideInForceShown(OverrideShown):
    """An override, its queue, and whether it does something."""

    queue: str
    no_effect: str | None
    """Why it has none under the policy in force; `null`: it has."""


@_of(ChangeValue, "queue", "action", "affected")
class ChangeMade:
    """What an action changed about a queue, or would change."""

    dry_run: bool
    before: list[OverrideShown]
    """Overrides that were replaced, or ended."""
    after: list[OverrideShown]
    """Overrides that were set. Nothing before and nothing after: there was nothing to change."""
    partitions: list[ChangeMade]
    """What it changed in partitions that had an override of their own."""


class SkippedShown(msgspec.Struct, kw_only=True):
    """A job that was left alone."""

    id: str
    reason: str
    holder: str | None
    """The job that holds its unique key, if that is why."""


@_of(Report, "more")
class ReportShown:
    """What an action did with jobs, or would do."""

    action: str
    """What was done, as a past participle."""
    dry_run: bool
    count: int
    jobs: list[str]
    """Those that were touched, or would be."""
    skipped: list[SkippedShown]
    held: int
    """How many of those were skipped because another job holds their unique key."""
    replaced: list[str]
    """Waiting jobs that were cancelled, or would be, because they held the unique keys of those that were replayed."""


class LimitShown(msgspec.Struct, kw_only=True):
    """A limit for every key, or for one key that an operator has given another bound."""

    limit: str
    keys: KeysShown
    declared: dict[str, Any]
    in_force: dict[str, Any]
    suspended: bool
    per_partition: bool
    override: OverrideShown | None


@_of(Difference)
class DifferenceShown:
    """What applying the declared policy would change."""

    says: str


class PolicyShown(msgspec.Struct, kw_only=True):
    """A queue's policy in force, and where the program at hand declares another one."""

    queue: str
    fair: dict[str, Any] | UnsetType | None = UNSET
    """Left out, with the next four, where a queue is declared and this database does not know it yet."""
    limits: list[dict[str, Any]] | UnsetType = UNSET
    keys: list[str] | UnsetType = UNSET
    priority_step: int | UnsetType = UNSET
    """Microseconds."""
    partition: dict[str, Any] | UnsetType = UNSET
    version: int
    declared: dict[str, Any] | None
    drift: list[DifferenceShown]
    overrides: list[OverrideInForceShown]


class EntryShown(msgspec.Struct, kw_only=True):
    """Something that an operator did."""

    id: int
    at: datetime
    actor: str
    action: str
    queue: str | None
    target: str
    before: Any
    after: Any
    reason: str


class AuditList(msgspec.Struct, kw_only=True):
    """What operators did, the newest first."""

    entries: list[EntryShown]
    after: int | None
    """Where the next page begins; `null`: this is the last one."""


@_of(ScheduleView, *(name for name in get_type_hints(ScheduleView) if name not in ("job", "now")))
class ScheduleShown:
    """A schedule as it stands."""

    state: Literal["active", "paused", "orphaned"]
    """`orphaned`: no worker has it any more, so that nobody fires it."""
    recurrence: str
    """A cron line and its timezone, or an interval."""
    words: str
    """The same for people."""
    missed: Literal["skip", "once", "all"]
    call: Any
    """`[arguments, named arguments]`. It may be redacted, and is `null` where the app's codec keeps it secret."""


class ScheduleChange(ScheduleShown):
    """A schedule as it stands after the change; with `dry_run`, as it stands."""

    dry_run: bool


def _object(name: str, words: str, **members: Any) -> type[msgspec.Struct]:
    """An answer of few members."""
    return msgspec.defstruct(name, [*members.items()], module=__name__, namespace={"__doc__": words})


ErrorAnswer = _object("ErrorAnswer", "Every answer that is not 200.", error=ErrorShown)
QueueList = _object("QueueList", "Every queue at a glance.", queues=list[QueueView])
LimitList = _object("LimitList", "Every limit of a queue.", limits=list[LimitShown])
PolicyList = _object("PolicyList", "The policies of all queues.", policies=list[PolicyShown])
ScheduleList = _object("ScheduleList", "Every schedule, by name.", schedules=list[ScheduleShown])
FindingList = _object("FindingList", "What was found, the worst first. Nothing: all is well.", findings=list[Finding])
SimulationList = _object(
    "SimulationList",
    "What became of the jobs, policy by policy; of the keys, those that waited longest.",
    simulations=list[Simulation],
    timelines=list[Timeline],
)
