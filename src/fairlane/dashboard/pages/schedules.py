"""What is enqueued again and again: when each is due, what it did last, and what can be done with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairlane.clock import Instant
from fairlane.dashboard.actions import Deed, Told, Undo
from fairlane.dashboard.html import clock
from fairlane.dashboard.page import Ask, Page
from fairlane.errors import ConfigurationError
from fairlane.operations import Operations, ScheduleView

ROWS = 200
"""Those that need somebody come first, so what is cut off is well."""
_ORDER = ("orphaned", "paused", "active")
NOBODY = "No worker has it, so that nobody fires it. Start one that declares it."


@dataclass(frozen=True, slots=True)
class _Row:
    """A schedule, and what may be seen of its call."""

    schedule: ScheduleView
    call: Any

    @property
    def remark(self) -> str:
        """What is to be known about it besides."""
        triggers = self.schedule.triggers_in_words
        nobody = NOBODY if self.schedule.state == "orphaned" else ""
        return " ".join(filter(None, (nobody, triggers and f"{triggers}.")))


async def look(ask: Ask) -> dict[str, Any]:
    found = await ask.operations.list_schedules()
    state, search = ask.query.get("state", ""), ask.query.get("search", "").strip()
    fitting = [
        each
        for each in found
        if (not state or state == each.state) and search.lower() in f"{each.name} {each.task} {each.queue}".lower()
    ]
    wanted = sorted(fitting, key=lambda each: (_ORDER.index(each.state), each.name))
    return {
        "rows": [_Row(each, each.call) for each in wanted[:ROWS]],
        "more": max(0, len(wanted) - ROWS),
        "counts": {state: sum(each.state == state for each in found) for state in _ORDER},
        "waiting": sum(each.triggers_waiting for each in found),
        "has_any": bool(found),
        "state": state,
        "states": _ORDER,
        "search": search,
    }


async def pause(operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool) -> Told:
    view = await operations.pause_schedule(_name(fields), actor=actor, reason=reason, dry_run=dry_run)
    if dry_run and view.is_paused:
        return Told(headline=f"{view.name} is paused already", is_nothing=True)
    left_out = [] if view.next_at is None else [f"the first slot that is left out: {_when(view.next_at)}"]
    return Told(
        headline=f"{view.name} would be paused" if dry_run else f"{view.name} is paused",
        undo=Undo("Resume", "resume-schedule", {"schedule": view.name}),
        lines=[*_lines(view), *left_out, "slots that come meanwhile are not made up for"],
    )


async def resume(operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool) -> Told:
    view = await operations.resume_schedule(_name(fields), actor=actor, reason=reason, dry_run=dry_run)
    if dry_run and not view.is_paused:
        return Told(headline=f"{view.name} is not paused", is_nothing=True)
    first = view.resumes_at if dry_run else view.next_at
    return Told(
        headline=f"{view.name} would be resumed" if dry_run else f"{view.name} is resumed",
        undo=Undo("Pause again", "pause-schedule", {"schedule": view.name}),
        lines=[*_lines(view), *([] if first is None else [f"its next slot: {_when(first)}"])],
        note=NOBODY if view.state == "orphaned" else "",
    )


async def trigger(operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool) -> Told:
    view = await operations.trigger_schedule(_name(fields), actor=actor, reason=reason, dry_run=dry_run)
    return Told(
        headline=f"{view.name} would be fired once, beside its slots" if dry_run else f"{view.name} is triggered",
        lines=[*_lines(view), *filter(None, [view.triggers_in_words])],
        note=NOBODY if view.state == "orphaned" else "",
    )


def _lines(view: ScheduleView) -> list[str]:
    return [f"task {view.task}, queue {view.queue}", f"{view.words} ({view.recurrence})"]


def _when(at: Instant) -> str:
    return f"{clock(at)} UTC"


def _name(fields: Mapping[str, str]) -> str:
    name = fields.get("schedule", "")
    if not name:
        raise ConfigurationError("which schedule? The form did not say")
    return name


FIRED = "This cannot be undone. Its job can be cancelled as long as it has not ended."
DEEDS = (
    Deed(name="pause-schedule", title="Pause a schedule", button="Pause", carry_out=pause),
    Deed(name="resume-schedule", title="Resume a schedule", button="Resume", carry_out=resume),
    Deed(name="trigger-schedule", title="Trigger a schedule", button="Trigger", carry_out=trigger, afterwards=FIRED),
)

PAGE = Page(path="/schedules", title="Schedules", template="schedules.html", look=look, nav="Schedules", shortcut="s")
