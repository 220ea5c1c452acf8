"""What operators can do: one table, for the pages and for the JSON API.

On a page every action goes the same way: a preview of what it would do, a reason, the action, its report. The preview
is a plain link: it changes nothing, so it can be shared and reloaded. Only the confirmation is sent as a form, bound to
the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fairlane.dashboard import api_shapes as shapes
from fairlane.dashboard.access import Role, form_of, require
from fairlane.dashboard.html import clock
from fairlane.dashboard.page import filter_from, job_from, key_query, keys_of, limit_from
from fairlane.errors import ConfigurationError
from fairlane.operations import Change, Operations, Report, ScheduleView
from fairlane.policy.overrides import Kind, Override
from fairlane.policy.unique import checked_on_replay_conflict

if TYPE_CHECKING:
    from fairlane.dashboard.site import Dashboard

SHOWN = 20
"""Skipped jobs that are named one by one."""
OWN_FIELDS = {"csrf", "reason", "back"}
"""Fields of the form that are not the action's."""
LONGEST_REASON = 500
NO_UNDO = "This cannot be undone in one step: partitions of the queue had settings of their own before."
NOBODY = "No worker has it, so that nobody fires it. Start one that declares it."
ENDS = {
    Kind.PAUSE: ("Resume", "resume"),
    Kind.SUSPEND: ("Let limits hold again", "unsuspend"),
    Kind.LIMIT: ("Use the declared limit", "clear-limit"),
    Kind.WEIGHT: ("Use the declared weight", "clear-weight"),
    Kind.BOOST: ("Use the declared weight", "clear-weight"),
}
"""What ends an override that replaced none, in the words of a button."""

Fields = Mapping[str, str]
"""Everything of a form that is not ours."""


@dataclass(frozen=True, slots=True)
class Action:
    """Something that an operator can do."""

    method: str
    """Of `operations`: `queues.pause`."""
    path: str
    """In the JSON API; empty: only pages have it."""
    summary: str
    body: type[msgspec.Struct]
    """What is sent to the JSON API. Its members are options of the method."""
    title: str
    """The beginning of a question: `Replay dead jobs`."""
    button: str = ""
    """What confirms it, where that is not the title."""
    _: KW_ONLY
    name: str
    """In the JSON API: `replay_jobs`. In addresses of pages it has hyphens."""
    warning: str = ""
    """What cannot be undone about it."""
    afterwards: str = ""
    """What is said once it is done, where nothing takes it back."""

    @property
    def slug(self) -> str:
        return self.name.replace("_", "-")

    @property
    def noun(self) -> str:
        """What it is about: `jobs`, `schedules`, or something of a queue."""
        return self.method.partition(".")[0]

    @property
    def lasts(self) -> bool:
        """It can be given an end, and is asked for one."""
        return "expires_in" in self.body.__struct_fields__

    async def carry_out(self, operations: Operations, fields: Fields, **intent: Any) -> Outcome:
        """Do it as a form says, or with `dry_run` say what would be done."""
        given = {name: OPTIONS[name](fields) for name in self.body.__struct_fields__ if name in OPTIONS}
        method = attrgetter(self.method)(operations)
        match self.noun:
            case "jobs":
                named = fields.get("job", "").strip()
                chosen = [job_from(named)] if named or self.name == "force_jobs" else filter_from(fields)
                return _outcome_of_report(await method(chosen, **given | {"limit": limit_from(fields)}, **intent))
            case "schedules":
                view = await method(_given(fields, "schedule"), **intent)
                return _outcome_of_schedule(self.name, view, is_dry_run=intent["dry_run"])
        return _outcome_of_change(await method(_given(fields, "queue"), **given, **intent))


@dataclass(frozen=True, slots=True)
class Undo:
    """An action that takes another one back, to be looked at first like any other."""

    label: str
    action: str
    fields: Fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
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


def _outcome_of_report(report: Report) -> Outcome:
    """An action on jobs."""
    count = len(report.done)
    jobs = f"{count:,} {'job' if count == 1 else 'jobs'}"
    lines = [f"{each.id}  {each.state}  {each.queue}  {each.task}" for each in report.sample]
    if count > len(report.sample):
        lines.append(f"… and {count - len(report.sample):,} more")
    return Outcome(
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


def _outcome_of_change(change: Change) -> Outcome:
    """An override that is set or ended."""
    if change.is_empty:
        return Outcome(headline=f"{change.queue}: there is nothing to change", is_nothing=True)
    lines = [line for each in (change, *change.partitions) for line in _lines(each)]
    if change.affected is not None:
        lines.append(f"{change.affected} there now")
    if change.is_dry_run:
        return Outcome(headline=lines[0], lines=lines[1:])
    undo = _undo(change)
    return Outcome(headline=lines[0], lines=lines[1:], undo=undo, note="" if undo else NO_UNDO)


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


def _outcome_of_schedule(name: str, view: ScheduleView, *, is_dry_run: bool) -> Outcome:
    """A schedule that is paused, resumed or triggered."""
    is_orphaned = NOBODY if view.state == "orphaned" else ""
    lines = [f"task {view.task}, queue {view.queue}", f"{view.words} ({view.recurrence})"]
    if name == "trigger_schedule":
        happens = "would be fired once, beside its slots" if is_dry_run else "is triggered"
        lines += filter(None, [view.triggers_in_words])
        return Outcome(headline=f"{view.name} {happens}", lines=lines, note=is_orphaned)
    is_pause, happens = name == "pause_schedule", "would be" if is_dry_run else "is"
    if is_dry_run and view.is_paused == is_pause:
        return Outcome(headline=f"{view.name} is {'paused already' if is_pause else 'not paused'}", is_nothing=True)
    at = view.resumes_at if is_dry_run and not is_pause else view.next_at
    if at is not None:
        lines.append(f"{'the first slot that is left out' if is_pause else 'its next slot'}: {clock(at)} UTC")
    if is_pause:
        undo = Undo("Resume", "resume-schedule", {"schedule": view.name})
        lines.append("slots that come meanwhile are not made up for")
        return Outcome(headline=f"{view.name} {happens} paused", lines=lines, undo=undo)
    undo = Undo("Pause again", "pause-schedule", {"schedule": view.name})
    return Outcome(headline=f"{view.name} {happens} resumed", lines=lines, undo=undo, note=is_orphaned)


def action_routes(dashboard: Dashboard) -> list[Route]:
    """The preview and the confirmation of every action."""
    known = {action.slug: action for action in ACTIONS}

    async def answer(request: Request, given: Fields, reason: str, *, dry_run: bool) -> Response:
        visitor = require(request, Role.OPERATOR)
        action = known.get(request.path_params["action"])
        if action is None:
            raise HTTPException(404, "there is nothing of that name to do")
        if not dry_run and not reason:
            raise HTTPException(400, "say why: it is recorded in the audit")
        if len(reason) > LONGEST_REASON:
            raise HTTPException(400, f"the reason: at most {LONGEST_REASON} characters")
        fields = {name: value for name, value in given.items() if name not in OWN_FIELDS}
        intent = {"actor": visitor.name, "reason": reason, "dry_run": dry_run}
        outcome = await action.carry_out(dashboard.operations, fields, **intent)
        back = safe_path(given.get("back"))
        shown = {"action": action, "outcome": outcome, "fields": fields, "reason": reason, "back": back}
        return dashboard.answer(request, "confirm.html" if dry_run else "done.html", action.title, shown)

    async def preview(request: Request) -> Response:
        return await answer(request, dict(request.query_params), "", dry_run=True)

    async def confirm(request: Request) -> Response:
        given = form_of(request, await request.body())
        return await answer(request, given, given.get("reason", "").strip(), dry_run=False)

    return [
        Route("/do/{action}", preview, methods=["GET"], name="preview"),
        Route("/do/{action}", confirm, methods=["POST"], name="confirm"),
    ]


def safe_path(given: str | None) -> str:
    """A path below the dashboard, and nothing that leads elsewhere."""
    if given is None or not given.startswith("/") or given.startswith("//") or "\\" in given:
        return "/"
    return "/" if any(ord(sign) < 0x20 or ord(sign) == 0x7F for sign in given) else given


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


def _decoded(name: str, wanted: type) -> Callable[[Fields], Any]:
    """A member that the form of an undo has as JSON; see `_undo`."""

    def decode(fields: Fields) -> Any:
        try:
            return msgspec.json.decode(fields.get(name, ""), type=wanted)
        except msgspec.DecodeError:
            raise ConfigurationError("what is to be restored? The form did not say") from None

    return decode


OPTIONS: Mapping[str, Callable[[Fields], Any]] = {
    "keys": keys_of,
    "expires_in": lambda fields: fields.get("lasting", "").strip() or None,
    "limit": lambda fields: fields.get("limit", ""),
    "value": _number_of,
    "weight": _number_of,
    "factor": _number_of,
    "delay": lambda fields: fields.get("delay", "").strip() or None,
    "on_conflict": lambda fields: checked_on_replay_conflict(fields.get("on_conflict") or "reject"),
    "overrides": _decoded("overrides", list[Override]),
    "ending": _decoded("ending", list[str]),
}
"""How members of a body are read from a form."""


# fmt: off
CANCEL = Action("jobs.cancel", "/jobs/cancel", "Cancel jobs that wait, ask those that run to stop.", shapes.ActOnJobs,
                "Cancel", name="cancel_jobs",
                afterwards="This cannot be undone. A cancelled job can be replayed: it starts anew, at the end of its "
                           "lane.")
RETRY = Action("jobs.retry", "/jobs/retry", "Let scheduled jobs be due now.", shapes.ActOnJobs,
               "Retry now", name="retry_jobs",
               afterwards="This cannot be undone: the times that they waited for are gone. What has not started can be "
                          "cancelled.")
REPLAY = Action("jobs.replay", "/jobs/replay",
                "Put dead jobs back, cancelled ones too if they are named or asked for.", shapes.ReplayJobs,
                "Replay", name="replay_jobs",
                afterwards="This cannot be undone. What has not started can be cancelled.")
PURGE = Action("jobs.purge", "/jobs/purge",
               "Remove dead jobs for good, done and cancelled ones if they are named or asked for.", shapes.ActOnJobs,
               "Purge", "Purge for good", name="purge_jobs",
               warning="They are removed with their history. This cannot be undone.",
               afterwards="They are gone with their history. This cannot be undone.")
FORCE = Action("jobs.force", "/jobs/force",
               "Let waiting jobs start next, whatever their limits say; every limit counts them.", shapes.ForceJobs,
               "Run now", name="force_jobs",
               warning="It starts in the next free slot, whatever pauses and limits say. Every limit counts it.",
               afterwards="This cannot be undone. As long as it has not started, it can be cancelled.")
ACTIONS: tuple[Action, ...] = (
    Action("queues.pause", "/queues/{queue}/pause",
           "Start nothing more of a queue, a key or a task. What runs goes on.", shapes.Pause, "Pause", name="pause"),
    Action("queues.resume", "/queues/{queue}/resume",
           "End a pause: the one of exactly this queue, key or task.", shapes.Resume, "Resume", name="resume"),
    Action("limits.set", "/queues/{queue}/limit/set", "Give a limit another bound for one key.", shapes.SetLimit,
           "Change a limit", "Change it", name="set_limit"),
    Action("limits.clear", "/queues/{queue}/limit/clear", "Let a key have the bound again that the policy declares.",
           shapes.ClearLimit, "Back to the declared limit", "Clear", name="clear_limit"),
    Action("weights.set", "/queues/{queue}/weight/set", "Give a flow another weight.", shapes.SetWeight,
           "Change a weight", "Change it", name="set_weight"),
    Action("weights.boost", "/queues/{queue}/weight/boost", "Multiply a flow's weight.", shapes.Boost,
           "Boost a weight", "Boost", name="boost"),
    Action("weights.clear", "/queues/{queue}/weight/clear",
           "Let a flow have the weight again that the policy declares, and no boost.", shapes.ClearWeight,
           "Back to the declared weight", "Clear", name="clear_weight"),
    Action("queues.suspend", "/queues/{queue}/suspend",
           "Let no limit of a queue hold anything back. All go on counting.", shapes.ChangeForAWhile,
           "Suspend all limits", "Suspend", name="suspend",
           warning="No limit of the queue holds anything back meanwhile. All go on counting."),
    Action("queues.unsuspend", "/queues/{queue}/unsuspend", "Let the limits of a queue hold again.", shapes.Change,
           "Let limits hold again", "Let them hold", name="unsuspend"),
    Action("overrides.restore", "", "", shapes.Restore, "Restore what was there before", "Restore", name="restore"),
    CANCEL, RETRY, REPLAY, PURGE, FORCE,
    Action("schedules.pause", "/schedules/pause",
           "Fire a schedule no more. Slots that come meanwhile are not made up for.", shapes.ChangeSchedule,
           "Pause a schedule", "Pause", name="pause_schedule"),
    Action("schedules.resume", "/schedules/resume", "Let a schedule fire again, from its next slot on.",
           shapes.ChangeSchedule, "Resume a schedule", "Resume", name="resume_schedule"),
    Action("schedules.trigger", "/schedules/trigger",
           "Let a worker fire a schedule once, beside its slots, also if paused.", shapes.ChangeSchedule,
           "Trigger a schedule", "Trigger", name="trigger_schedule",
           afterwards="This cannot be undone. Its job can be cancelled as long as it has not ended."),
)
# fmt: on
