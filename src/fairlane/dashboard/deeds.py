"""Every action goes the same way: a preview of what it would do, a reason, the action, its report.

A deed is one function that does it or, with `dry_run`, says what it would do. The preview is a plain link: it changes
nothing, so it can be shared and reloaded. Only the confirmation is sent as a form, bound to the session.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fairlane.dashboard.access import Role, require
from fairlane.dashboard.html import clock
from fairlane.dashboard.page import filter_from, job_from, key_query, keys_of, limit_from
from fairlane.dashboard.security import form_of
from fairlane.errors import ConfigurationError
from fairlane.job import State
from fairlane.operations import Change, JobFilter, Operations, Report, ScheduleView, Selection
from fairlane.policy.overrides import Kind, Override
from fairlane.policy.unique import checked_on_replay_conflict

if TYPE_CHECKING:
    from fairlane.dashboard.site import Dashboard

SHOWN = 20
"""Skipped jobs that are named one by one."""
OWN_FIELDS = {"csrf", "reason", "back"}
"""Fields of the form that are not the deed's."""
LONGEST_REASON = 500
NO_UNDO = "This cannot be undone in one step: partitions of the queue had settings of their own before."
ENDS = {
    Kind.PAUSE: ("Resume", "resume"),
    Kind.SUSPEND: ("Let limits hold again", "unsuspend"),
    Kind.LIMIT: ("Use the declared limit", "clear-limit"),
    Kind.WEIGHT: ("Use the declared weight", "clear-weight"),
    Kind.BOOST: ("Use the declared weight", "clear-weight"),
}
"""What ends an override that replaced none, in the words of a button."""


@dataclass(frozen=True, slots=True)
class Undo:
    """A deed that takes another one back, to be looked at first like any other."""

    label: str
    deed: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What was done, or would be, in words."""

    headline: str
    lines: Sequence[str] = ()
    """What is touched, one by one, the first of them."""
    skipped: Sequence[tuple[str, str]] = ()
    """What is left alone, and why."""
    more_skipped: int = 0
    note: str = ""
    undo: Undo | None = None
    """What takes it back, where something does."""
    is_nothing: bool = False
    """There is nothing to do: no need to confirm it."""


Fields = Mapping[str, str]
"""Everything of a form that is not ours."""
CarryOut = Callable[[Operations, Fields, "Intent"], Awaitable[Told]]
"""Do it, or say what would be done."""


class Intent(TypedDict):
    """Who acts and why, and whether in earnest."""

    actor: str
    reason: str
    dry_run: bool


@dataclass(frozen=True, slots=True)
class Deed:
    """Something that an operator can do from a page."""

    name: str
    """In the address: `replay-jobs`."""
    title: str
    """A question's beginning: `Replay dead jobs`."""
    carry_out: CarryOut
    button: str = ""
    """What confirms it, where that is not the title."""
    warning: str = ""
    """What cannot be undone about it."""
    lasts: bool = False
    """It can be given an end (`lasting`), and is asked for one."""
    afterwards: str = ""
    """What is said once it is done, where nothing takes it back."""


def told_of_report(report: Report) -> Told:
    """An action on jobs."""
    count = len(report.done)
    jobs = f"{count:,} {'job' if count == 1 else 'jobs'}"
    lines = [f"{each.id}  {each.state}  {each.queue}  {each.task}" for each in report.sample]
    if count > len(report.sample):
        lines.append(f"… and {count - len(report.sample):,} more")
    return Told(
        headline=f"{jobs} would be {report.action}" if report.is_dry_run else f"{jobs} {report.action}",
        lines=lines,
        skipped=[(str(each.job), each.skipped or "") for each in report.skipped[:SHOWN]],
        more_skipped=max(0, len(report.skipped) - SHOWN),
        note=" ".join(_notes(report)),
        is_nothing=not count,
    )


def _notes(report: Report) -> Iterator[str]:
    if replaced := len(report.replaced):
        jobs = "1 waiting job" if replaced == 1 else f"{replaced:,} waiting jobs"
        happens = "would be" if report.is_dry_run else "was" if replaced == 1 else "were"
        yield f"{jobs} with the same unique key {happens} cancelled."
    if report.held:
        yield f"Another job holds the unique key of {report.held:,} that stay as they are."
    if report.more:
        yield "The limit is reached and others fit: do it again for them, or narrow the filter."


def told_of_change(change: Change) -> Told:
    """An override that is set or ended."""
    if change.is_empty:
        return Told(headline=f"{change.queue}: there is nothing to change", is_nothing=True)
    lines = [line for each in (change, *change.partitions) for line in _lines(each)]
    if change.affected is not None:
        lines.append(f"{change.affected} there now")
    if change.is_dry_run:
        return Told(headline=lines[0], lines=lines[1:])
    undo = _undo(change)
    return Told(headline=lines[0], lines=lines[1:], undo=undo, note="" if undo else NO_UNDO)


def _undo(change: Change) -> Undo | None:
    """What leaves everything as it was: the same numbers with the same ends, and no override besides."""
    if change.partitions:
        return None
    if not change.before and len(change.after) == 1 and _is_alone(change.after[0], change):
        override = change.after[0]
        fields = {"queue": change.queue, **key_query(dict(override.scope))}
        limit = {} if override.limit is None else {"limit": override.limit}
        return Undo(*ENDS[override.kind], {**fields, **limit})
    known = {each.id for each in change.before}
    # Without who set them and why: whoever restores them does.
    before = [msgspec.structs.replace(each, set_at=0, set_by="", reason="") for each in change.before]
    return Undo(
        "Restore what was there before",
        "restore",
        {
            "queue": change.queue,
            "overrides": msgspec.json.encode(before).decode(),
            "ending": msgspec.json.encode([each.id for each in change.after if each.id not in known]).decode(),
        },
    )


def _is_alone(override: Override, change: Change) -> bool:
    """Whether ending it ends nothing else: a weight and a boost of the same key end together."""
    pair = {Kind.WEIGHT, Kind.BOOST}
    return override.kind not in pair or not any(
        each.kind in pair and each.scope == override.scope and each.id != override.id for each in change.remaining
    )


def _lines(change: Change) -> list[str]:
    set_, ended = ("would be set", "would end") if change.is_dry_run else ("is set", "has ended")
    replaced = {each.id: each for each in change.before}
    lines = []
    for each in change.after:
        lines.append(f"{change.queue}: {set_}: {_said(each, change)}")
        if (before := replaced.pop(each.id, None)) is not None:
            lines.append(f"instead of: {_said(before, change)} (by {before.set_by})")
    lines += [f"{change.queue}: {ended}: {_said(each, change)} (by {each.set_by})" for each in replaced.values()]
    if change.action == "resume":
        still = [each for each in change.remaining if each.kind == "pause"]
        lines += [f"{change.queue}: still in force: {_said(each, change)}" for each in still]
    return lines


def _said(override: Override, change: Change) -> str:
    until = "" if override.expires_at is None else f", until {clock(override.expires_at)} UTC"
    return f"{override.describe(change.everyone)}{until}"


def deed_routes(dashboard: Dashboard) -> list[Route]:
    """The preview and the confirmation of every deed."""
    known = {deed.name: deed for deed in DEEDS}

    async def answer(request: Request, given: Fields, reason: str, *, dry_run: bool) -> Response:
        visitor = require(request, Role.OPERATOR)
        deed = known.get(request.path_params["deed"])
        if deed is None:
            raise HTTPException(404, "there is nothing of that name to do")
        if not dry_run and not reason:
            raise HTTPException(400, "say why: it is recorded in the audit")
        if len(reason) > LONGEST_REASON:
            raise HTTPException(400, f"the reason: at most {LONGEST_REASON} characters")
        fields = {name: value for name, value in given.items() if name not in OWN_FIELDS}
        intent = Intent(actor=visitor.name, reason=reason, dry_run=dry_run)
        told = await deed.carry_out(dashboard.operations, fields, intent)
        back = safe_path(given.get("back"))
        shown = {"deed": deed, "told": told, "fields": fields, "reason": reason, "back": back}
        return dashboard.answer(request, "confirm.html" if dry_run else "done.html", deed.title, shown)

    async def preview(request: Request) -> Response:
        return await answer(request, dict(request.query_params), "", dry_run=True)

    async def confirm(request: Request) -> Response:
        given = form_of(request, await request.body())
        return await answer(request, given, given.get("reason", "").strip(), dry_run=False)

    return [
        Route("/do/{deed}", preview, methods=["GET"], name="preview"),
        Route("/do/{deed}", confirm, methods=["POST"], name="confirm"),
    ]


def safe_path(given: str | None) -> str:
    """A path below the dashboard, and nothing that leads elsewhere."""
    if given is None or not given.startswith("/") or given.startswith("//") or "\\" in given:
        return "/"
    return "/" if any(ord(sign) < 0x20 or ord(sign) == 0x7F for sign in given) else given


# Queues.


def _given(fields: Fields, name: str) -> str:
    if not fields.get(name):
        raise ConfigurationError(f"which {name}? The form did not say")
    return fields[name]


def _number_of(fields: Fields) -> float:
    text = fields.get("value", "").strip()
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{text!r} is not a number") from None


OPTIONS: Mapping[str, Callable[[Fields], Any]] = {
    "keys": keys_of,
    "expires_in": lambda fields: fields.get("lasting", "").strip() or None,
    "limit": lambda fields: fields.get("limit", ""),
    "value": _number_of,
    "weight": _number_of,
}
"""How options of the actions on queues are read from a form."""


def _changing(method: str, *options: str) -> CarryOut:
    """An action of `operations` on a queue, with these options."""

    async def carry_out(operations: Operations, fields: Fields, intent: Intent) -> Told:
        given = {name: OPTIONS[name](fields) for name in options}
        return told_of_change(await attrgetter(method)(operations)(_given(fields, "queue"), **given, **intent))

    return carry_out


async def _restore(operations: Operations, fields: Fields, intent: Intent) -> Told:
    """What undoes a change: see `_undo`, which fills in the form."""
    try:
        overrides = msgspec.json.decode(fields.get("overrides", ""), type=list[Override])
        ending = msgspec.json.decode(fields.get("ending", ""), type=list[str])
    except msgspec.DecodeError:
        raise ConfigurationError("what is to be restored? The form did not say") from None
    queue = _given(fields, "queue")
    return told_of_change(await operations.overrides.restore(queue, overrides, ending=ending, **intent))


# Jobs.


def _handling(method: str) -> CarryOut:
    """An action of `operations` on the job that is named, or on all that fit."""

    async def carry_out(operations: Operations, fields: Fields, intent: Intent) -> Told:
        named = fields.get("job", "").strip()
        chosen: Selection = [job_from(named)] if named else filter_from(fields)
        options: dict[str, Any] = {"limit": limit_from(fields)}
        if method == "jobs.replay":
            options["delay"] = fields.get("delay", "").strip() or None
            options["on_conflict"] = checked_on_replay_conflict(fields.get("on_conflict") or "reject")
        if method == "jobs.purge" and isinstance(chosen, JobFilter) and chosen.state is None:
            chosen = filter_from(fields, state=State.DEAD)
        return told_of_report(await attrgetter(method)(operations)(chosen, **options, **intent))

    return carry_out


async def _force(operations: Operations, fields: Fields, intent: Intent) -> Told:
    return told_of_report(await operations.jobs.force([job_from(fields.get("job", ""))], **intent))


# Schedules.


async def _pause_schedule(operations: Operations, fields: Fields, intent: Intent) -> Told:
    view, dry_run = await operations.schedules.pause(_given(fields, "schedule"), **intent), intent["dry_run"]
    if dry_run and view.is_paused:
        return Told(headline=f"{view.name} is paused already", is_nothing=True)
    left_out = [] if view.next_at is None else [f"the first slot that is left out: {clock(view.next_at)} UTC"]
    return Told(
        headline=f"{view.name} {'would be' if dry_run else 'is'} paused",
        undo=Undo("Resume", "resume-schedule", {"schedule": view.name}),
        lines=[*_lines_of(view), *left_out, "slots that come meanwhile are not made up for"],
    )


async def _resume_schedule(operations: Operations, fields: Fields, intent: Intent) -> Told:
    view, dry_run = await operations.schedules.resume(_given(fields, "schedule"), **intent), intent["dry_run"]
    if dry_run and not view.is_paused:
        return Told(headline=f"{view.name} is not paused", is_nothing=True)
    first = view.resumes_at if dry_run else view.next_at
    return Told(
        headline=f"{view.name} {'would be' if dry_run else 'is'} resumed",
        undo=Undo("Pause again", "pause-schedule", {"schedule": view.name}),
        lines=[*_lines_of(view), *([] if first is None else [f"its next slot: {clock(first)} UTC"])],
        note=NOBODY if view.state == "orphaned" else "",
    )


async def _trigger_schedule(operations: Operations, fields: Fields, intent: Intent) -> Told:
    view = await operations.schedules.trigger(_given(fields, "schedule"), **intent)
    happens = "would be fired once, beside its slots" if intent["dry_run"] else "is triggered"
    return Told(
        headline=f"{view.name} {happens}",
        lines=[*_lines_of(view), *filter(None, [view.triggers_in_words])],
        note=NOBODY if view.state == "orphaned" else "",
    )


def _lines_of(view: ScheduleView) -> list[str]:
    return [f"task {view.task}, queue {view.queue}", f"{view.words} ({view.recurrence})"]


NOBODY = "No worker has it, so that nobody fires it. Start one that declares it."

# fmt: off
CANCEL = Deed("cancel-jobs", "Cancel", _handling("jobs.cancel"),
              afterwards="This cannot be undone. A cancelled job can be replayed: it starts anew, at the end of its "
                         "lane.")
RETRY = Deed("retry-jobs", "Retry now", _handling("jobs.retry"),
             afterwards="This cannot be undone: the times that they waited for are gone. What has not started can be "
                        "cancelled.")
FORCE = Deed("force-jobs", "Run now", _force,
             warning="It starts in the next free slot, whatever pauses and limits say. Every limit counts it.",
             afterwards="This cannot be undone. As long as it has not started, it can be cancelled.")
REPLAY = Deed("replay-jobs", "Replay", _handling("jobs.replay"),
              afterwards="This cannot be undone. What has not started can be cancelled.")
PURGE = Deed("purge-jobs", "Purge", _handling("jobs.purge"), button="Purge for good",
             warning="They are removed with their history. This cannot be undone.",
             afterwards="They are gone with their history. This cannot be undone.")
DEEDS: tuple[Deed, ...] = (
    CANCEL, RETRY, FORCE, REPLAY, PURGE,
    Deed("pause", "Pause", _changing("queues.pause", "keys", "expires_in"), lasts=True),
    Deed("resume", "Resume", _changing("queues.resume", "keys")),
    Deed("suspend", "Suspend all limits", _changing("queues.suspend", "expires_in"), lasts=True, button="Suspend",
         warning="No limit of the queue holds anything back meanwhile. All go on counting."),
    Deed("unsuspend", "Let limits hold again", _changing("queues.unsuspend"), button="Let them hold"),
    Deed("set-limit", "Change a limit", _changing("limits.set", "limit", "value", "keys", "expires_in"),
         button="Change it"),
    Deed("clear-limit", "Back to the declared limit", _changing("limits.clear", "limit", "keys"), button="Clear"),
    Deed("set-weight", "Change a weight", _changing("weights.set", "weight", "keys", "expires_in"), button="Change it"),
    Deed("clear-weight", "Back to the declared weight", _changing("weights.clear", "keys"), button="Clear"),
    Deed("restore", "Restore what was there before", _restore, button="Restore"),
    Deed("pause-schedule", "Pause a schedule", _pause_schedule, button="Pause"),
    Deed("resume-schedule", "Resume a schedule", _resume_schedule, button="Resume"),
    Deed("trigger-schedule", "Trigger a schedule", _trigger_schedule, button="Trigger",
         afterwards="This cannot be undone. Its job can be cancelled as long as it has not ended."),
)
# fmt: on
