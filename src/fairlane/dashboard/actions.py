"""Everything that changes something goes the same way: look at what would be done, say why, do it, be told.

A deed is one function that does it or, with `dry_run`, says what it would do. The preview is a plain link: it changes
nothing, so it can be shared and reloaded. Only the confirmation is sent as a form, bound to the session.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fairlane.clock import as_datetime
from fairlane.dashboard.access import Role, require
from fairlane.dashboard.job_filters import key_query
from fairlane.dashboard.security import form_of
from fairlane.operations import Change, Operations, Report
from fairlane.policy.overrides import Kind, Override

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


class CarryOut(Protocol):
    """Do it, or say what would be done. Everything of the form that is not ours comes as `fields`."""

    def __call__(
        self, operations: Operations, fields: Mapping[str, str], *, actor: str, reason: str, dry_run: bool
    ) -> Awaitable[Told]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Deed:
    """Something that an operator can do from a page."""

    name: str
    """In the address: `replay-jobs`."""
    title: str
    """A question's beginning: `Replay dead jobs`."""
    button: str
    carry_out: CarryOut
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
    return Undo(
        "Restore what was there before",
        "restore",
        {
            "queue": change.queue,
            "overrides": msgspec.json.encode([_unsigned(each) for each in change.before]).decode(),
            "ending": msgspec.json.encode([each.id for each in change.after if each.id not in known]).decode(),
        },
    )


def _is_alone(override: Override, change: Change) -> bool:
    """Whether ending it ends nothing else: a weight and a boost of the same key end together."""
    pair = {Kind.WEIGHT, Kind.BOOST}
    return override.kind not in pair or not any(
        each.kind in pair and each.scope == override.scope and each.id != override.id for each in change.remaining
    )


def _unsigned(override: Override) -> Override:
    """Without who set it and why: whoever restores it does."""
    return msgspec.structs.replace(override, set_at=0, set_by="", reason="")


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
    until = "" if override.expires_at is None else f", until {as_datetime(override.expires_at):%Y-%m-%d %H:%M:%S} UTC"
    return f"{override.describe(change.everyone)}{until}"


def deed_routes(dashboard: Dashboard, deeds: Sequence[Deed]) -> list[Route]:
    """The preview and the confirmation of every deed."""
    known = {deed.name: deed for deed in deeds}

    def named(request: Request) -> Deed:
        deed = known.get(request.path_params["deed"])
        if deed is None:
            raise HTTPException(404, "there is nothing of that name to do")
        return deed

    async def preview(request: Request) -> Response:
        visitor = require(request, Role.OPERATOR)
        deed = named(request)
        given = dict(request.query_params)
        fields = _fields(given)
        told = await deed.carry_out(dashboard.operations, fields, actor=visitor.name, reason="", dry_run=True)
        back = safe_path(given.get("back"))
        shown = {"deed": deed, "told": told, "fields": fields, "back": back}
        return dashboard.answer(request, "confirm.html", deed.title, shown)

    async def confirm(request: Request) -> Response:
        visitor = require(request, Role.OPERATOR)
        deed = named(request)
        given = form_of(request, await request.body())
        reason = given.get("reason", "").strip()
        if not reason:
            raise HTTPException(400, "say why: it is recorded in the audit")
        if len(reason) > LONGEST_REASON:
            raise HTTPException(400, f"the reason: at most {LONGEST_REASON} characters")
        fields = _fields(given)
        told = await deed.carry_out(dashboard.operations, fields, actor=visitor.name, reason=reason, dry_run=False)
        back = safe_path(given.get("back"))
        shown = {"deed": deed, "told": told, "reason": reason, "back": back}
        return dashboard.answer(request, "done.html", deed.title, shown)

    return [
        Route("/do/{deed}", preview, methods=["GET"], name="preview"),
        Route("/do/{deed}", confirm, methods=["POST"], name="confirm"),
    ]


def safe_path(given: str | None, default: str = "/") -> str:
    """A path below the dashboard, and nothing that leads elsewhere."""
    if given is None or not given.startswith("/") or given.startswith("//") or "\\" in given:
        return default
    return default if any(ord(sign) < 0x20 or ord(sign) == 0x7F for sign in given) else given


def _fields(given: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in given.items() if name not in OWN_FIELDS}
