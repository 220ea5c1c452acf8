"""Values of operations as JSON: times in ISO 8601; ids, states and kinds as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any
from uuid import UUID

import msgspec

from fairlane.clock import iso_text
from fairlane.job import JobRecord
from fairlane.operations.jobs import JobDetails, Report, redacted, redacted_error
from fairlane.operations.overrides import Change, LimitInForce, OverrideInForce
from fairlane.operations.partitions import Repartitioned
from fairlane.operations.policies import PolicyChange, PolicyInForce
from fairlane.operations.schedules import ScheduleView
from fairlane.policy.limits import Limit
from fairlane.policy.overrides import EVERYONE, Override
from fairlane.policy.policy import Difference, Policy
from fairlane.redaction import Redactor
from fairlane.scheduler.explain import Explanation, Hold, Holder
from fairlane.store.audit import AuditEntry

COLUMNS = tuple(name for name in JobRecord.__struct_fields__ if name not in ("payload", "result"))
MOMENTS = ("at", "since", "until", "now", "earliest", "estimate", "last_slot")
"""Fields that are times, besides those that end in `_at`."""


def document_of(value: Any) -> Any:
    """A value of operations, or several of them."""
    match value:
        case UUID() | Enum():
            return str(value)
        case Policy() | Limit():
            return value.to_document()
        case Mapping():
            return dict(value)
        case list() | tuple():
            return [document_of(each) for each in value]
        case JobRecord():
            return _fields(value, *COLUMNS)
        case JobDetails():
            return document_of(value.record) | _fields(value, "call", "result", "attempts")
        case Report():
            return _fields(value, "action", "held", "replaced", "more") | {
                "dry_run": value.is_dry_run,
                "count": len(value.done),
                "jobs": [str(each.job) for each in value.done],
                "skipped": [
                    {"id": str(each.job), "reason": each.skipped, "holder": document_of(each.holder)}
                    for each in value.skipped
                ],
            }
        case Override():
            return _override(value)
        case OverrideInForce():
            return _fields(value, "queue", "no_effect") | _override(value.override, value.everyone)
        case Change():
            return _fields(value, "queue", "action", "partitions", "affected") | {
                "dry_run": value.is_dry_run,
                "before": [_override(each, value.everyone) for each in value.before],
                "after": [_override(each, value.everyone) for each in value.after],
            }
        case LimitInForce():
            return _fields(value, "declared", "in_force", "override") | {
                "limit": value.name,
                "keys": dict(value.scope),
                "suspended": value.is_suspended,
                "per_partition": value.is_per_partition,
            }
        case PolicyInForce():
            stored = {"queue": value.queue} if value.policy is None else value.policy.to_document()
            declared = value.declared if value.is_drift else None
            return stored | _fields(value, "version", "drift", "overrides") | {"declared": document_of(declared)}
        case PolicyChange():
            made = _fields(value, "version", "changes", "new_keys", "without_place")
            return value.after.to_document() | made | {"changed": value.is_changed, "dry_run": value.is_dry_run}
        case Difference():
            return _fields(value) | {"says": value.describe()}
        case AuditEntry():
            before, after = (each and msgspec.json.decode(each) for each in (value.before, value.after))
            return _fields(value) | {"before": before, "after": after}
        case Repartitioned(plan=plan):
            planned = _fields(plan, "queue", "before", "after", "by", "gives_up", "waiting", "running")
            return planned | {"dry_run": value.is_dry_run, "resumed": plan.is_resumed, "moved": value.moved}
        case ScheduleView():
            return {name: each for name, each in _fields(value).items() if name not in ("now", "job")}
        case Explanation(subject=subject):
            return _fields(subject, "job", "queue", "task", "state", "priority") | {
                "keys": {name: each for name, each in subject.keys.items() if name != "task"},
                "reasons": document_of(value.holds),
                **_fields(value, "earliest", "estimate", "next_up", "now"),
            }
        case Hold():
            return _fields(value, "reason", "words", "limit", "key", "used", "bound", "until", "count", "holders") | {
                "bound_from": value.origin,
                "set_by": None if value.override is None else value.override.set_by,
            }
        case Holder():
            since = None if value.due_at is not None else iso_text(value.since)
            return _fields(value, "job", "task", "worker", "due_at") | {"since": since}
        case _ if isinstance(value, msgspec.Struct) or is_dataclass(value):
            return _fields(value)
    return value


def _fields(value: Any, *names: str) -> dict[str, Any]:
    """The named fields of a value, or all of them."""
    if not names:
        names = tuple(each.name for each in fields(value)) if is_dataclass(value) else value.__struct_fields__
    return {
        name: iso_text(getattr(value, name))
        if name.endswith("_at") or name in MOMENTS
        else document_of(getattr(value, name))
        for name in names
    }


def _override(override: Override, everyone: str = EVERYONE) -> dict[str, Any]:
    names = ("kind", "limit", "value", "expires_at", "set_at", "set_by", "reason")
    return _fields(override, *names) | {"keys": dict(override.scope), "says": override.describe(everyone)}


def describe_exported(
    record: JobRecord, *, with_payload: bool = False, redactor: Redactor | None = None
) -> dict[str, Any]:
    """A job for an export; its call and its result only if they are asked for."""
    described: dict[str, Any] = document_of(redacted_error(redactor, record))
    if with_payload:
        call, result = redacted(redactor, record)
        described |= {"call": call, "result": result}
    return described


def exported_columns(*, with_payload: bool = False) -> tuple[str, ...]:
    """The columns of `describe_exported`, in that order."""
    return (*COLUMNS, "call", "result") if with_payload else COLUMNS
