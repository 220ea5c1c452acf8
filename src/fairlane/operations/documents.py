"""What operators see as JSON has it: times in ISO 8601, states and kinds by their names."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from enum import Enum
from typing import Any
from uuid import UUID

import msgspec

from fairlane.clock import iso_text
from fairlane.job import AttemptRecord, JobRecord
from fairlane.operations.diagnosis import Finding
from fairlane.operations.jobs import JobDetails, Report, redacted, redacted_error
from fairlane.operations.overrides import Change, LimitInForce, OverrideInForce
from fairlane.operations.partitions import Repartitioned
from fairlane.operations.policies import PolicyChange, PolicyInForce
from fairlane.operations.schedules import ScheduleView
from fairlane.policy.overrides import EVERYONE, Override
from fairlane.policy.policy import Difference
from fairlane.redaction import Redactor
from fairlane.store.audit import AuditEntry
from fairlane.store.operators import JobPage

# fmt: off
COLUMNS = (
    "id", "queue", "task", "state", "priority", "keys", "attempt", "max_attempts", "replays", "context", "enqueued_at",
    "due_at", "claimed_at", "finished_at", "worker", "error", "progress", "progress_message", "cancel_requested",
    "has_on_dead",
)
# fmt: on


def described(value: object, *names: str) -> dict[str, Any]:
    """These fields of a value: moments in ISO 8601, ids and states as text."""
    found = {name: getattr(value, name) for name in names}
    for name, field in found.items():
        if name == "at" or name.endswith("_at"):
            found[name] = iso_text(field)
        elif isinstance(field, UUID | Enum):
            found[name] = str(field)
    return found


def describe_job(record: JobRecord) -> dict[str, Any]:
    """A job, without what it carries."""
    return described(record, *COLUMNS)


def describe_page(page: JobPage) -> dict[str, Any]:
    return {"jobs": [describe_job(each) for each in page.jobs], "after": page.after}


def describe_details(details: JobDetails) -> dict[str, Any]:
    """A job with what it carries, and every attempt."""
    return {
        **describe_job(details.record),
        "call": details.call,
        "result": details.result,
        "attempts": [describe_attempt(each) for each in details.attempts],
    }


def describe_report(report: Report) -> dict[str, Any]:
    """What an action did with jobs, or would do."""
    return {
        "action": report.action,
        "dry_run": report.is_dry_run,
        "count": len(report.done),
        "jobs": [str(each.job) for each in report.done],
        "skipped": [
            {"id": str(each.job), "reason": each.skipped, "holder": None if each.holder is None else str(each.holder)}
            for each in report.skipped
        ],
        "held": report.held,
        "replaced": [str(each) for each in report.replaced],
        "more": report.more,
    }


def describe_attempt(attempt: AttemptRecord) -> dict[str, Any]:
    return described(attempt, "attempt", "claimed_at", "ended_at", "worker", "outcome", "error")


def describe_override(override: Override, everyone: str = EVERYONE) -> dict[str, Any]:
    return {
        **described(override, "kind", "limit", "value", "expires_at", "set_at", "set_by", "reason"),
        "keys": dict(override.scope),
        "says": override.describe(everyone),
    }


def describe_overrides(overrides: Iterable[OverrideInForce]) -> list[dict[str, Any]]:
    return [
        {"queue": each.queue, **describe_override(each.override, each.everyone), "no_effect": each.no_effect}
        for each in overrides
    ]


def describe_change(change: Change) -> dict[str, Any]:
    return {
        "queue": change.queue,
        "action": change.action,
        "dry_run": change.is_dry_run,
        "before": [describe_override(each, change.everyone) for each in change.before],
        "after": [describe_override(each, change.everyone) for each in change.after],
        "partitions": [describe_change(each) for each in change.partitions],
        "affected": None if change.affected is None else asdict(change.affected),
    }


def describe_limit(limit: LimitInForce) -> dict[str, Any]:
    return {
        "limit": limit.name,
        "keys": dict(limit.scope),
        "declared": limit.declared.to_document(),
        "in_force": limit.in_force.to_document(),
        "suspended": limit.is_suspended,
        "per_partition": limit.is_per_partition,
        "override": None if limit.override is None else describe_override(limit.override),
    }


def describe_policy(shown: PolicyInForce) -> dict[str, Any]:
    """The policy itself, and beside it what is declared where that differs."""
    stored: dict[str, Any] = {"queue": shown.queue} if shown.policy is None else shown.policy.to_document()
    return {
        **stored,
        "version": shown.version,
        "declared": shown.declared.to_document() if shown.declared is not None and shown.is_drift else None,
        "drift": [_difference(each) for each in shown.drift],
        "overrides": describe_overrides(shown.overrides),
    }


def describe_policy_change(change: PolicyChange) -> dict[str, Any]:
    return {
        **change.after.to_document(),
        "version": change.version,
        "changed": change.is_changed,
        "dry_run": change.is_dry_run,
        "changes": [_difference(each) for each in change.changes],
        "new_keys": list(change.new_keys),
        "without_place": describe_overrides(change.without_place),
    }


def _difference(difference: Difference) -> dict[str, Any]:
    return described(difference, "part", "before", "after") | {"says": difference.describe()}


def describe_entry(entry: AuditEntry) -> dict[str, Any]:
    before, after = (each and msgspec.json.decode(each) for each in (entry.before, entry.after))
    names = ("id", "at", "actor", "action", "queue", "target", "reason")
    return described(entry, *names) | {"before": before, "after": after}


def describe_finding(finding: Finding) -> dict[str, Any]:
    return described(finding, "check", "level", "queue", "message", "remedy")


def describe_partitions(done: Repartitioned) -> dict[str, Any]:
    return {
        **described(done.plan, "queue", "before", "after", "by", "gives_up", "waiting", "running"),
        "dry_run": done.is_dry_run,
        "resumed": done.plan.is_resumed,
        "moved": done.moved,
    }


def describe_exported(
    record: JobRecord, *, with_payload: bool = False, redactor: Redactor | None = None
) -> dict[str, Any]:
    """A job as `describe_job` tells it; its call and its result only if they are asked for."""
    described = describe_job(redacted_error(redactor, record))
    if with_payload:
        call, result = redacted(redactor, record)
        described |= {"call": call, "result": result}
    return described


def exported_columns(*, with_payload: bool = False) -> tuple[str, ...]:
    """What `describe_exported` tells of each job, in that order."""
    return (*COLUMNS, "call", "result") if with_payload else COLUMNS


def describe_schedule(view: ScheduleView) -> dict[str, Any]:
    # fmt: off
    names = (
        "name", "state", "is_paused", "recurrence", "words", "missed", "task", "queue", "call", "next_at", "resumes_at",
        "last_slot", "last_job", "last_fired_at", "declared_at", "triggers_waiting",
    )
    # fmt: on
    return described(view, *names) | {"last_slot": iso_text(view.last_slot)}
