"""What operators see as JSON has it: times in ISO 8601, states and kinds by their names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import asdict
from typing import Any

import msgspec

from fairlane.clock import iso_text
from fairlane.errors import ConfigurationError
from fairlane.job import AttemptRecord, JobRecord
from fairlane.operations.findings import Finding
from fairlane.operations.jobs import JobDetails, Report, redacted, redacted_error
from fairlane.operations.overrides import Change, LimitInForce, OverrideInForce
from fairlane.operations.partitions import Repartitioned
from fairlane.operations.policies import PolicyChange, PolicyInForce
from fairlane.operations.requests import find_jobs
from fairlane.policy.overrides import EVERYONE, Override
from fairlane.policy.policy import Difference
from fairlane.redaction import Redactor
from fairlane.store.audit import AuditEntry
from fairlane.store.operators import JobFilter, JobPage
from fairlane.store.protocol import Store


def describe_job(record: JobRecord) -> dict[str, Any]:
    """A job, without what it carries."""
    return {
        "id": str(record.id),
        "queue": record.queue,
        "task": record.task,
        "state": str(record.state),
        "priority": record.priority,
        "keys": record.keys,
        "attempt": record.attempt,
        "max_attempts": record.max_attempts,
        "replays": record.replays,
        "context": record.context,
        "enqueued_at": iso_text(record.enqueued_at),
        "due_at": iso_text(record.due_at),
        "claimed_at": iso_text(record.claimed_at),
        "finished_at": iso_text(record.finished_at),
        "worker": record.worker,
        "error": record.error,
        "progress": record.progress,
        "progress_message": record.progress_message,
        "cancel_requested": record.cancel_requested,
        "has_on_dead": record.has_on_dead,
    }


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
    return {
        "attempt": attempt.attempt,
        "claimed_at": iso_text(attempt.claimed_at),
        "ended_at": iso_text(attempt.ended_at),
        "worker": attempt.worker,
        "outcome": attempt.outcome,
        "error": attempt.error,
    }


def describe_override(override: Override, everyone: str = EVERYONE) -> dict[str, Any]:
    return {
        "kind": str(override.kind),
        "keys": dict(override.scope),
        "limit": override.limit,
        "value": override.value,
        "expires_at": iso_text(override.expires_at),
        "set_at": iso_text(override.set_at),
        "set_by": override.set_by,
        "reason": override.reason,
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
    return {
        "part": difference.part,
        "before": difference.before,
        "after": difference.after,
        "says": difference.describe(),
    }


def describe_entry(entry: AuditEntry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "at": iso_text(entry.at),
        "actor": entry.actor,
        "action": entry.action,
        "queue": entry.queue,
        "target": entry.target,
        "before": _decoded(entry.before),
        "after": _decoded(entry.after),
        "reason": entry.reason,
    }


def _decoded(document: str | None) -> Any:
    return None if document is None else msgspec.json.decode(document)


def describe_finding(finding: Finding) -> dict[str, Any]:
    return {
        "check": finding.check,
        "level": str(finding.level),
        "queue": finding.queue,
        "message": finding.message,
        "remedy": finding.remedy,
    }


def describe_partitions(done: Repartitioned) -> dict[str, Any]:
    plan = done.plan
    return {
        "queue": plan.queue,
        "before": plan.before,
        "after": plan.after,
        "by": list(plan.by),
        "dry_run": done.is_dry_run,
        "resumed": plan.is_resumed,
        "gives_up": plan.gives_up,
        "waiting": plan.waiting,
        "running": plan.running,
        "moved": done.moved,
    }


PAGE = 200
"""Jobs of one page: their payloads are in memory together."""
# fmt: off
COLUMNS = (
    "id", "queue", "task", "state", "priority", "keys", "attempt", "max_attempts", "replays", "context", "enqueued_at",
    "due_at", "claimed_at", "finished_at", "worker", "error", "progress", "progress_message", "cancel_requested",
    "has_on_dead",
)
# fmt: on


async def export_jobs(
    store: Store, wanted: JobFilter, *, after: str | None = None, limit: int | None = None
) -> AsyncIterator[JobPage]:
    """Every job that fits, or the first `limit`, the newest first. Each page says where to go on after it; an empty one
    is there to say how far the look has come."""
    if limit is not None and limit < 1:
        raise ConfigurationError(f"limit={limit} leaves nothing to export; give a number above 0, or leave it out")
    left = limit
    while True:
        page = await find_jobs(store, wanted, after, PAGE if left is None else min(PAGE, left))
        yield page
        after = page.after
        if left is not None:
            left -= len(page.jobs)
        if after is None or left == 0:
            return


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
