"""Queues: all of them, and one with its policy, its limits and its last hour."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from fairlane.dashboard.actions import Deed, Told, told_of_change
from fairlane.dashboard.html import denial_chart, throughput_chart, wait_chart
from fairlane.dashboard.job_filters import keys_of
from fairlane.dashboard.page import Ask, Page
from fairlane.dashboard.pages.overview import LOOKS
from fairlane.errors import ConfigurationError
from fairlane.operations import Operations
from fairlane.policy.overrides import Override


async def look_at_queues(ask: Ask) -> dict[str, Any]:
    return {"queues": await ask.operations.list_queues(), "looks": LOOKS}


async def look_at_queue(ask: Ask) -> dict[str, Any]:
    seen = await ask.operations.show_queue(ask.values["queue"])
    overrides = await ask.operations.list_overrides(seen.view.queue)
    return {
        "title": seen.view.queue,
        "seen": seen,
        "view": seen.view,
        "overrides": overrides,
        "is_suspended": any(limit.is_suspended for limit in seen.limits),
        "looks": LOOKS,
        "throughput": throughput_chart(seen.chart),
        "waits": wait_chart(seen.chart),
        "denials": denial_chart(seen.chart),
    }


async def pause(operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool) -> Told:
    change = await operations.pause(
        _queue(fields), keys=keys_of(fields), expires_in=_lasting(fields), actor=actor, reason=reason, dry_run=dry_run
    )
    return told_of_change(change)


async def resume(operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool) -> Told:
    change = await operations.resume(_queue(fields), keys=keys_of(fields), actor=actor, reason=reason, dry_run=dry_run)
    return told_of_change(change)


async def suspend(operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool) -> Told:
    change = await operations.suspend(
        _queue(fields), expires_in=_lasting(fields), actor=actor, reason=reason, dry_run=dry_run
    )
    return told_of_change(change)


async def unsuspend(
    operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool
) -> Told:
    return told_of_change(await operations.unsuspend(_queue(fields), actor=actor, reason=reason, dry_run=dry_run))


async def set_limit(
    operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool
) -> Told:
    change = await operations.set_limit(
        _queue(fields),
        fields.get("limit", ""),
        _number(fields, "value"),
        keys=keys_of(fields),
        expires_in=_lasting(fields),
        actor=actor,
        reason=reason,
        dry_run=dry_run,
    )
    return told_of_change(change)


async def clear_limit(
    operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool
) -> Told:
    change = await operations.clear_limit(
        _queue(fields), fields.get("limit", ""), keys=keys_of(fields), actor=actor, reason=reason, dry_run=dry_run
    )
    return told_of_change(change)


async def set_weight(
    operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool
) -> Told:
    change = await operations.set_weight(
        _queue(fields),
        _number(fields, "value"),
        keys=keys_of(fields),
        expires_in=_lasting(fields),
        actor=actor,
        reason=reason,
        dry_run=dry_run,
    )
    return told_of_change(change)


async def clear_weight(
    operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool
) -> Told:
    change = await operations.clear_weight(
        _queue(fields), keys=keys_of(fields), actor=actor, reason=reason, dry_run=dry_run
    )
    return told_of_change(change)


async def restore(operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool) -> Told:
    """What undoes a change: see `acting`, which fills in the form."""
    try:
        overrides = msgspec.json.decode(fields.get("overrides", ""), type=list[Override])
        ending = msgspec.json.decode(fields.get("ending", ""), type=list[str])
    except msgspec.DecodeError:
        raise ConfigurationError("what is to be restored? The form did not say") from None
    change = await operations.restore_overrides(
        _queue(fields), overrides, ending=ending, actor=actor, reason=reason, dry_run=dry_run
    )
    return told_of_change(change)


def _queue(fields: Mapping[str, str]) -> str:
    queue = fields.get("queue", "")
    if not queue:
        raise ConfigurationError("which queue? The form did not say")
    return queue


def _lasting(fields: Mapping[str, str]) -> str | None:
    return fields.get("lasting", "").strip() or None


def _number(fields: Mapping[str, str], name: str) -> float:
    text = fields.get(name, "").strip()
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{text!r} is not a number") from None


DEEDS = (
    Deed(name="pause", title="Pause", button="Pause", carry_out=pause, lasts=True),
    Deed(name="resume", title="Resume", button="Resume", carry_out=resume),
    Deed(
        name="suspend",
        title="Suspend all limits",
        button="Suspend",
        carry_out=suspend,
        lasts=True,
        warning="No limit of the queue holds anything back meanwhile. All go on counting.",
    ),
    Deed(name="unsuspend", title="Let limits hold again", button="Let them hold", carry_out=unsuspend),
    Deed(name="set-limit", title="Change a limit", button="Change it", carry_out=set_limit),
    Deed(name="clear-limit", title="Back to the declared limit", button="Clear", carry_out=clear_limit),
    Deed(name="set-weight", title="Change a weight", button="Change it", carry_out=set_weight),
    Deed(name="clear-weight", title="Back to the declared weight", button="Clear", carry_out=clear_weight),
    Deed(name="restore", title="Restore what was there before", button="Restore", carry_out=restore),
)

QUEUES = Page(path="/queues", title="Queues", template="queues.html", look=look_at_queues, nav="Queues", shortcut="q")
QUEUE = Page(path="/queues/{queue}", title="Queue", template="queue.html", look=look_at_queue, nav="Queues")
