"""What programs send to the JSON API: the members of bodies and queries, each with its bounds.

What is read here is what `openapi.json` describes. Members that are not named are refused.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
from msgspec import Meta

from fairlane.operations.jobs import LIMIT
from fairlane.operations.keys import MOST_KEYS
from fairlane.operations.trials import MOST_POLICIES, MOST_SLOTS
from fairlane.operations.views import KeySort
from fairlane.policy.keys import MAX_KEY_BYTES
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
