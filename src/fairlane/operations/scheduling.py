"""Schedules as operators see and handle them."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any
from uuid import UUID

import msgspec

from fairlane.clock import Instant, as_datetime
from fairlane.errors import ConfigurationError
from fairlane.operations.asking import Intent
from fairlane.policy.recurrence import recurrence_of
from fairlane.store.protocol import Store
from fairlane.store.schedules import ScheduleRow

__all__ = [
    "ScheduleView",
    "describe_schedule",
    "list_schedules",
    "pause_schedule",
    "resume_schedule",
    "trigger_schedule",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """A schedule as it stands."""

    name: str
    state: str
    """`active`, `paused`, or `orphaned`: no worker has it any more, so that nobody fires it."""
    recurrence: str
    missed: str
    task: str
    queue: str
    call: Any
    """Its arguments, as JSON has them: `[args, kwargs]`."""
    next_at: Instant | None
    """Its next slot; `None` while it is not to fire."""
    last_slot: Instant | None
    last_job: UUID | None
    last_fired_at: Instant | None
    declared_at: Instant
    """When a worker last said that it has it."""
    triggers_waiting: int
    """Triggers of operators that no worker has fired yet."""


async def list_schedules(store: Store) -> list[ScheduleView]:
    """Every schedule, by name."""
    now = await store.now()
    return [_view(row, now) for row in await store.schedules()]


async def pause_schedule(store: Store, name: str, intent: Intent) -> ScheduleView:
    """Fire a schedule no more, until it is resumed. Slots that come meanwhile are not made up for."""
    return await _amend(store, name, intent, "pause schedule", is_paused=True)


async def resume_schedule(store: Store, name: str, intent: Intent) -> ScheduleView:
    """Let a schedule fire again, from its next slot on."""
    return await _amend(store, name, intent, "resume schedule", is_paused=False)


async def trigger_schedule(store: Store, name: str, intent: Intent) -> ScheduleView:
    """Let a worker fire a schedule once, within a few seconds and beside its slots; also while it is paused."""
    return await _amend(store, name, intent, "trigger schedule", is_paused=None)


async def _amend(store: Store, name: str, intent: Intent, action: str, *, is_paused: bool | None) -> ScheduleView:
    rows = {row.name: row for row in await store.schedules()}
    now = await store.now()
    row = rows.get(name)
    if row is None:
        similar = get_close_matches(name, rows, n=1)
        hint = f"did you mean {similar[0]!r}?" if similar else f"there are: {', '.join(rows) or 'none'}"
        raise ConfigurationError(f"there is no schedule {name!r}; {hint}; workers declare them when they start")
    if intent.dry_run or row.is_paused is is_paused:
        return _view(row, now)
    next_at = recurrence_of(row.told()["recurrence"]).next_after(now)
    note = msgspec.structs.replace(intent.note(action), queue=row.told()["queue"])
    changed = await store.amend_schedule(name, note, is_paused=is_paused, next_at=next_at)
    return _view(row if changed is None else changed, now)


def _view(row: ScheduleRow, now: Instant) -> ScheduleView:
    told = row.told()
    state = "orphaned" if row.is_orphaned(now) else "paused" if row.is_paused else "active"
    return ScheduleView(
        name=row.name,
        state=state,
        recurrence=recurrence_of(told["recurrence"]).describe(),
        missed=told["missed"],
        task=told["task"],
        queue=told["queue"],
        call=told["call"],
        next_at=row.next_at if state == "active" else None,
        last_slot=row.last_slot,
        last_job=row.last_job,
        last_fired_at=row.last_fired_at,
        declared_at=row.declared_at,
        triggers_waiting=row.triggers - row.triggered,
    )


def describe_schedule(view: ScheduleView) -> dict[str, Any]:
    """As JSON has it."""
    return {
        "name": view.name,
        "state": view.state,
        "recurrence": view.recurrence,
        "missed": view.missed,
        "task": view.task,
        "queue": view.queue,
        "call": view.call,
        "next_at": _iso(view.next_at),
        "last_slot": _iso(view.last_slot),
        "last_job": None if view.last_job is None else str(view.last_job),
        "last_fired_at": _iso(view.last_fired_at),
        "declared_at": _iso(view.declared_at),
        "triggers_waiting": view.triggers_waiting,
    }


def _iso(at: Instant | None) -> str | None:
    return None if at is None else as_datetime(at).isoformat()
