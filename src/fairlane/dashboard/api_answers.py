"""What the JSON API answers, besides the views of `fairlane.operations`: the shape of what `describing` makes.

Nothing is converted into these: they say in `openapi.json` what is sent, and the tests hold every answer to them.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from fairlane.dashboard.api_requests import StateName
from fairlane.operations.findings import Level
from fairlane.operations.views import QueueView
from fairlane.policy.numbers import Origin
from fairlane.simulation.measures import Simulation, Timeline

Keys = dict[str, str | None]


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
    keys: Keys
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
    key: Keys
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
    keys: Keys
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
    keys: Keys
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
    affected: AffectedShown | None
    """The jobs that it would be about; of a dry run only."""


class AffectedShown(msgspec.Struct, frozen=True, kw_only=True):
    """The jobs that a change would be about."""

    waiting: int
    """Ready or scheduled."""
    running: int
    more: bool
    """At least so many: not all were counted."""


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
    keys: Keys
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


class FindingShown(msgspec.Struct, frozen=True, kw_only=True):
    """Something that was found, and what to do about it."""

    check: str
    level: Level
    queue: str | None
    """`null`: it is about the database, or about a worker."""
    message: str
    remedy: str


class FindingList(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, the worst first. Nothing: all is well."""

    findings: list[FindingShown]


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
