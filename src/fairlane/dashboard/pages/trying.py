"""Try a policy: what it would do to the jobs of a queue, beside another one. Nothing of it touches the queue."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

import msgspec

from fairlane.clock import microseconds
from fairlane.dashboard.comparing import compare
from fairlane.dashboard.examples import workload_examples
from fairlane.dashboard.page import Ask, Page
from fairlane.errors import ConfigurationError, FairlaneError, UnknownQueue
from fairlane.operations import PolicyInForce
from fairlane.operations.trials import MOST_SIMULATED, MOST_SLOTS, Misread, Tried, read_policy_text, read_workload_text
from fairlane.policy.documents import policy_text
from fairlane.policy.policy import Policy

__all__ = ["PAGE"]

DEFAULT_SLOTS = "100"
HISTORY, DECLARED = "history", "declared"
_UNDER_WAY = Lock()
"""Held, never waited for: a processor is shared by all who use this process."""
BUSY = "Another simulation is under way, and there is one at a time. Try again in a moment."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What was typed, as it was typed."""

    queue: str = ""
    a: str = "{}\n"
    b: str = ""
    source: str = HISTORY
    last: str = "1h"
    workload: str = ""
    slots: str = DEFAULT_SLOTS
    until: str = ""
    problems: Mapping[str, Misread] = field(default_factory=dict)
    """By field; of the whole: `form`."""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> _Form:
        # A browser sends every line end as two signs, and a line is counted by one of them.
        typed = {name: value.replace("\r\n", "\n") for name, value in given.items() if name in cls.__slots__}
        typed.pop("problems", None)
        return msgspec.convert(typed, cls)

    def refused(self, problems: Mapping[str, Misread]) -> _Form:
        return replace(self, problems=problems)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What is to be tried, read from a form."""

    policies: list[Policy]
    slots: int
    options: dict[str, Any]


async def look(ask: Ask) -> dict[str, Any]:
    known = await ask.operations.show_policies()
    queue = ask.query.get("queue", "") or (known[0].queue if known else "")
    form = _Form(queue=queue, slots=await _slots_of(ask, queue))
    return _shown(_loaded(form, known), known)


async def submit(ask: Ask, given: Mapping[str, str]) -> dict[str, Any]:
    known = await ask.operations.show_policies()
    form = _Form.of(given)
    if given.get("do") == "load":
        return _shown(_loaded(form, known), known)
    wanted = _read(form)
    if not isinstance(wanted, _Wanted):
        return _shown(form.refused(wanted), known)
    try:
        tried = await _one_at_a_time(ask, wanted)
    except (ConfigurationError, UnknownQueue) as error:
        return _shown(form.refused({"form": Misread(words=str(error))}), known)
    return _shown(form, known) | {"result": compare(tried, wanted.policies, form.queue)}


async def _one_at_a_time(ask: Ask, wanted: _Wanted) -> list[Tried]:
    if not _UNDER_WAY.acquire(blocking=False):
        raise ConfigurationError(BUSY)
    try:
        return await ask.operations.try_policies(wanted.policies, slots=wanted.slots, **wanted.options)
    finally:
        _UNDER_WAY.release()


async def _slots_of(ask: Ask, queue: str) -> str:
    """Those of the workers that serve the queue now."""
    found = await ask.operations.list_workers()
    slots = sum(each.concurrency for each in found.workers if queue in each.queues and each.takes_jobs)
    return str(min(slots, MOST_SLOTS)) if slots else DEFAULT_SLOTS


def _loaded(form: _Form, known: list[PolicyInForce]) -> _Form:
    """The form with the policy in force; what was typed elsewhere stays."""
    found = _in_force(form.queue, known)
    if found is None:
        words = f"no policy of a queue {form.queue!r} is known to this database" if form.queue else ""
        problems = {"queue": Misread(words=words)} if words else {}
        return replace(form, source=DECLARED, workload=_workload(form, found), problems=problems)
    text = policy_text(found)
    is_untouched = not form.b.strip() or form.b.strip() == form.a.strip()
    return replace(form, a=text, b=text if is_untouched else form.b, workload=_workload(form, found))


def _workload(form: _Form, policy: Policy | None) -> str:
    if form.workload.strip():
        return form.workload
    return workload_examples(() if policy is None else policy.stamped_keys)[0].text


def _in_force(queue: str, known: list[PolicyInForce]) -> Policy | None:
    return next((each.policy for each in known if each.queue == queue), None)


def _shown(form: _Form, known: list[PolicyInForce]) -> dict[str, Any]:
    policy = _in_force(form.queue, known)
    return {
        "form": form,
        "problems": form.problems,
        "queues": [each.queue for each in known if each.policy is not None],
        "examples": workload_examples(() if policy is None else policy.stamped_keys),
        "overrides": sum(len(each.overrides) for each in known if each.queue == form.queue),
        "most_jobs": MOST_SIMULATED,
        "most_slots": MOST_SLOTS,
        "result": None,
    }


# Reading what was typed.


def _read(form: _Form) -> _Wanted | dict[str, Misread]:
    """What is to be tried, or every problem at once: whoever mends one must not meet the next one by one."""
    problems: dict[str, Misread] = {}
    policies: list[Policy] = []
    for name, text in (("a", form.a), ("b", form.b)):
        if name == "b" and not text.strip():
            continue
        policy = read_policy_text(text)
        if isinstance(policy, Misread):
            problems[name] = policy
        else:
            policies.append(policy)
    slots = _number(form.slots, problems)
    options = _jobs(form, problems)
    if form.until.strip() and _is_time("until", form.until, problems):
        options["until"] = form.until.strip()
    return problems or _Wanted(policies, slots, options)


def _jobs(form: _Form, problems: dict[str, Misread]) -> dict[str, Any]:
    if form.source == HISTORY:
        _is_time("last", form.last, problems)
        return {"history": form.queue, "last": form.last.strip()}
    workload = read_workload_text(form.workload)
    if isinstance(workload, Misread):
        problems["workload"] = workload
        return {}
    return {"workload": workload}


def _number(text: str, problems: dict[str, Misread]) -> int:
    typed = text.strip().replace(",", "")
    if typed.isascii() and typed.isdigit() and 1 <= int(typed[:9]) <= MOST_SLOTS and len(typed) < 9:
        return int(typed)
    problems["slots"] = Misread(words=f"give a whole number from 1 to {MOST_SLOTS:,}")
    return 0


def _is_time(name: str, text: str, problems: dict[str, Misread]) -> bool:
    try:
        microseconds(text.strip())
    except FairlaneError as error:
        problems[name] = Misread(words=str(error))
        return False
    return True


PAGE = Page(
    path="/try",
    title="Try a policy",
    template="try.html",
    look=look,
    submit=submit,
    nav="Try",
    shortcut="t",
    is_live=False,
)
