"""What programs send to the JSON API, each member with its bounds, and what it answers besides the views of operations.

`openapi.json` is made of both. What is sent is converted into these, and members that are not named are refused. What
is answered is not: it is made by `describe_…` of operations, and the tests hold every answer to these shapes.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import UNSET, Meta, UnsetType

from fairlane.operations.diagnosis import Finding
from fairlane.operations.jobs import LIMIT
from fairlane.operations.keys import MOST_KEYS
from fairlane.operations.overrides import Affected
from fairlane.operations.trials import MOST_POLICIES, MOST_SLOTS
from fairlane.operations.views import KeySort, QueueView
from fairlane.policy.gates import Origin
from fairlane.policy.keys import MAX_KEY_BYTES
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
StateName = Literal["scheduled", "ready", "running", "done", "dead", "cancelled"]


# Queries.


class NoQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing can be asked for besides."""


class KeysQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class KeyQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which key."""

    key: Annotated[list[KeyPair], Meta(min_length=1, max_length=20)]
    """`account=acme`; repeated where several keys are a scope together. Without `=` it is the key `null`."""


class ExplainQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be explained: a queue, or some keys of it."""

    key: Annotated[list[KeyPair], Meta(max_length=20)] = []
    """`account=acme`; may be repeated. Without `=` it is the key `null`."""


class DeadQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class JobsQuery(DeadQuery, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which jobs. The newest come first; done, dead and cancelled ones by their end."""

    state: StateName | None = None
    enqueued_since: Moment | None = None
    """From this moment on."""
    enqueued_until: Moment | None = None
    """Before this moment."""


class AuditQuery(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which of the things that operators did. The newest come first."""

    queue: Name | None = None
    after: Annotated[int, Meta(ge=0, le=LARGEST)] | None = None
    """Where the page before has ended: its `after`."""
    limit: Annotated[int, Meta(ge=1, le=MOST_LISTED)] = 50


# Bodies.


class Change(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Why, and whether in earnest."""

    reason: Text = ""
    """Why. It is recorded, with who and when; only a dry run needs none."""
    dry_run: bool = False
    """Only say what would change."""


class ChangeForAWhile(Change, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change that may end by itself: after a time or at a moment, not both."""

    expires_in: Duration | None = None
    """`"30m"`, `"2h"`, or seconds."""
    expires_at: Moment | None = None


class Pause(ChangeForAWhile, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What starts nothing more: the whole queue, or a key or a task of it."""

    keys: Keys = {}
    task: Name | None = None


class Resume(Change, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which pause ends: that of exactly this queue, key or task."""

    keys: Keys = {}
    task: Name | None = None


class SetLimit(ChangeForAWhile, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another bound for one limit and one key."""

    limit: Name
    """Its name, its kind or its keys: `concurrency:account`, `rate`, `account`."""
    value: Annotated[float, Meta(ge=0, le=1e9)]
    keys: Keys = {}


class ClearLimit(Change, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which limit has the bound again that the policy declares."""

    limit: Name
    keys: Keys = {}


class SetWeight(ChangeForAWhile, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Another weight for one flow."""

    keys: SomeKeys
    weight: Annotated[float, Meta(gt=0, le=1e9)]


class Boost(ChangeForAWhile, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A flow, and what its weight is multiplied with."""

    keys: SomeKeys
    factor: Annotated[float, Meta(gt=0, le=1e9)]


class ClearWeight(Change, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which flow has the weight again that the policy declares."""

    keys: SomeKeys


class ChangeSchedule(Change, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which schedule. It is named here and not in the path: a name may hold whatever its program chose."""

    name: Name


class JobChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which jobs; what is left out does not matter. None of it: all that the action is for."""

    queue: Name | None = None
    task: Name | None = None
    state: StateName | None = None
    keys: Keys = {}
    enqueued_since: Moment | None = None
    enqueued_until: Moment | None = None
    finished_since: Moment | None = None
    finished_until: Moment | None = None


class ActOnJobs(Change, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs named one by one, or all that fit: exactly one of `ids` and `filter`."""

    ids: Annotated[list[UUID], Meta(min_length=1, max_length=MOST_NAMED)] | None = None
    filter: JobChoice | None = None
    limit: Annotated[int, Meta(ge=1, le=MOST_TOUCHED)] = LIMIT
    """Jobs that are touched at most."""


class ReplayJobs(ActOnJobs, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs named one by one, or all that fit: exactly one of `ids` and `filter`."""

    delay: Duration | None = None
    """They run after this time; by default at once."""
    on_conflict: Literal["reject", "replace"] = "reject"
    """Where another job holds the unique key: skip the job, or take the place of that one if it waits."""


class ForceJobs(Change, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Jobs named one by one: what goes around limits is never chosen by a filter."""

    ids: Annotated[list[UUID], Meta(min_length=1, max_length=MOST_NAMED)]


class Simulate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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
    """What tells the keys of the answer apart; by default, what takes turns."""


# Answers.

KeysShown = dict[str, str | None]


class ErrorShown(msgspec.Struct, frozen=True, kw_only=True):
    """What went wrong."""

    code: str
    """Stable: for programs."""
    message: str
    """For people."""
    remedy: str | UnsetType = UNSET
    """What to do about it, where the message does not say so."""
    field: str | UnsetType = UNSET
    """The member of the body or of the query that it is about."""


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Every answer that is not 200."""

    error: ErrorShown


class QueueList(msgspec.Struct, frozen=True, kw_only=True):
    """Every queue at a glance."""

    queues: list[QueueView]


class JobShown(msgspec.Struct, frozen=True, kw_only=True):
    """A job, without what it carries."""

    id: str
    queue: str
    task: str
    state: StateName
    priority: int
    keys: KeysShown
    attempt: int
    max_attempts: int
    replays: int
    """How often it was put back after it had ended; `attempt` counts from the last time on."""
    context: dict[str, Any]
    enqueued_at: datetime
    due_at: datetime | None
    claimed_at: datetime | None
    finished_at: datetime | None
    worker: str | None
    error: str | None
    progress: float | None
    progress_message: str | None
    cancel_requested: bool
    has_on_dead: bool
    """It has declared something for its death."""


class AttemptShown(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a job."""

    attempt: int
    claimed_at: datetime
    ended_at: datetime | None
    worker: str | None
    outcome: str
    error: str | None


class OneJob(JobShown, frozen=True, kw_only=True):
    """Everything about one job. What it carries and what it returned may be redacted."""

    call: Any
    """`[arguments, named arguments]`; text where it is no JSON."""
    result: Any
    attempts: list[AttemptShown]


class JobList(msgspec.Struct, frozen=True, kw_only=True):
    """Some jobs."""

    jobs: list[JobShown]
    after: str | None
    """Where the next page begins; `null`: this is the last one. A short page, even an empty one, may have one: what a
    single request looks at is bounded."""


class HolderShown(msgspec.Struct, frozen=True, kw_only=True):
    """A job that takes up a place."""

    job: str
    task: str
    worker: str | None
    since: datetime | None
    due_at: datetime | None


class HoldShown(msgspec.Struct, frozen=True, kw_only=True):
    """One reason to wait."""

    reason: str
    words: str
    limit: str | None
    key: KeysShown
    used: float | None
    bound: float | None
    bound_from: Origin | None
    """Where the bound came from: the policy, the newest job of the key, an override, or the default of 1 that holds
    until a job brings a number."""
    until: datetime | None
    """When it ends by itself; `null`: not by time."""
    count: int | None
    holders: list[HolderShown]
    set_by: str | None
    """The operator who set it, or its bound."""


class ExplanationShown(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that holds a job, a key or a queue."""

    job: str | None
    queue: str
    task: str | None
    state: StateName | None
    priority: int
    keys: KeysShown
    reasons: list[HoldShown]
    earliest: datetime | None
    """No start before this; `null`: no time is known, somebody has to act."""
    estimate: datetime | None
    next_up: list[str]
    """Jobs that would start next, in their order."""
    now: datetime


class OverrideShown(msgspec.Struct, frozen=True, kw_only=True):
    """One change of what a policy says."""

    kind: Literal["pause", "limit", "weight", "boost", "suspend"]
    keys: KeysShown
    limit: str | None
    value: float | None
    expires_at: datetime | None
    set_at: datetime
    set_by: str
    reason: str
    says: str


class OverrideInForceShown(OverrideShown, frozen=True, kw_only=True):
    """An override, its queue, and whether it does something."""

    queue: str
    no_effect: str | None
    """Why it has none under the policy in force; `null`: it has."""


class ChangeMade(msgspec.Struct, frozen=True, kw_only=True):
    """What an action changed about a queue, or would change."""

    queue: str
    action: str
    dry_run: bool
    before: list[OverrideShown]
    """Overrides that were replaced, or ended."""
    after: list[OverrideShown]
    """Overrides that were set. Nothing before and nothing after: there was nothing to change."""
    partitions: list[ChangeMade]
    """What it changed in partitions that had an override of their own."""
    affected: Affected | None
    """The jobs that it would be about; of a dry run only."""


class SkippedShown(msgspec.Struct, frozen=True, kw_only=True):
    """A job that was left alone."""

    id: str
    reason: str
    holder: str | None
    """The job that holds its unique key, if that is why."""


class ReportShown(msgspec.Struct, frozen=True, kw_only=True):
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
    more: bool
    """The limit was reached, and there are others that fit."""


class LimitShown(msgspec.Struct, frozen=True, kw_only=True):
    """A limit for every key, or for one key that an operator has given another bound."""

    limit: str
    keys: KeysShown
    declared: dict[str, Any]
    in_force: dict[str, Any]
    suspended: bool
    per_partition: bool
    override: OverrideShown | None


class LimitList(msgspec.Struct, frozen=True, kw_only=True):
    """Every limit of a queue."""

    limits: list[LimitShown]


class DifferenceShown(msgspec.Struct, frozen=True, kw_only=True):
    """What applying the declared policy would change."""

    part: str
    before: Any
    after: Any
    says: str


class PolicyShown(msgspec.Struct, frozen=True, kw_only=True):
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


class PolicyList(msgspec.Struct, frozen=True, kw_only=True):
    """The policies of all queues."""

    policies: list[PolicyShown]


class EntryShown(msgspec.Struct, frozen=True, kw_only=True):
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


class AuditList(msgspec.Struct, frozen=True, kw_only=True):
    """What operators did, the newest first."""

    entries: list[EntryShown]
    after: int | None
    """Where the next page begins; `null`: this is the last one."""


class FindingList(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, the worst first. Nothing: all is well."""

    findings: list[Finding]


class SimulationList(msgspec.Struct, frozen=True, kw_only=True):
    """What became of the jobs, policy by policy; of the keys, those that waited longest."""

    simulations: list[Simulation]
    timelines: list[Timeline]


class ScheduleShown(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule as it stands."""

    name: str
    state: Literal["active", "paused", "orphaned"]
    """`orphaned`: no worker has it any more, so that nobody fires it."""
    is_paused: bool
    """An orphaned one may be paused besides."""
    recurrence: str
    """A cron line and its timezone, or an interval."""
    words: str
    """The same for people."""
    missed: Literal["skip", "once", "all"]
    task: str
    queue: str
    call: Any
    """`[arguments, named arguments]`. It may be redacted, and is `null` where the app's codec keeps it secret."""
    next_at: datetime | None
    """Its next slot; `null` while it is not to fire."""
    resumes_at: datetime | None
    """The first slot that it would fire if it were resumed now; `null` where it is not paused."""
    last_slot: datetime | None
    """What was fired last: a slot, or the moment of a trigger."""
    last_job: str | None
    """The job that stands for it; `null` where there is none, as its queue's rules refused it."""
    last_fired_at: datetime | None
    declared_at: datetime
    """When a worker last said that it has it."""
    triggers_waiting: int
    """Triggers of operators that no worker has fired yet."""


class ScheduleList(msgspec.Struct, frozen=True, kw_only=True):
    """Every schedule, by name."""

    schedules: list[ScheduleShown]


class ScheduleChange(ScheduleShown, frozen=True, kw_only=True):
    """A schedule as it stands after the change; with `dry_run`, as it stands."""

    dry_run: bool
