"""Try a policy: what it would do to the jobs of a queue, beside another one. Nothing of it touches the queue."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from string import Template
from threading import Lock
from typing import Any

from fairlane.clock import measured, microseconds
from fairlane.dashboard.page import Ask
from fairlane.errors import ConfigurationError, FairlaneError, UnknownQueue
from fairlane.operations import PolicyInForce
from fairlane.operations.trials import MOST_SIMULATED, MOST_SLOTS, Misread, Tried, read_policy_text, read_workload_text
from fairlane.policy.policy import Policy, policy_text
from fairlane.simulation.measures import Group, Simulation, Timeline

DEFAULT_SLOTS = 100
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
    slots: str = str(DEFAULT_SLOTS)
    until: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> _Form:
        # A browser sends every line end as two signs, and a line is counted by one of them.
        return cls(**{name: value.replace("\r\n", "\n") for name, value in given.items() if name in cls.__slots__})


Problems = dict[str, Misread]
"""By field; of the whole: `form`."""


async def look(ask: Ask) -> dict[str, Any]:
    known = await ask.operations.policies.show()
    queue = ask.query.get("queue", "") or (known[0].queue if known else "")
    workers = (await ask.operations.workers.list()).workers
    slots = sum(each.concurrency for each in workers if queue in each.queues and each.takes_jobs)
    return _loaded(_Form(queue=queue, slots=str(min(slots, MOST_SLOTS) or DEFAULT_SLOTS)), known)


async def submit(ask: Ask, given: Mapping[str, str]) -> dict[str, Any]:
    known = await ask.operations.policies.show()
    form = _Form.of(given)
    if given.get("do") == "load":
        return _loaded(form, known)
    policies, options, problems = _read(form)
    if problems:
        return _shown(form, known, problems)
    if not _UNDER_WAY.acquire(blocking=False):
        return _shown(form, known, {"form": Misread(words=BUSY)})
    try:
        tried = await ask.operations.trials.run(policies, **options)
        return _shown(form, known) | {"result": compare(tried, policies, form.queue)}
    except (ConfigurationError, UnknownQueue) as error:
        return _shown(form, known, {"form": Misread(words=str(error))})
    finally:
        _UNDER_WAY.release()


def _loaded(form: _Form, known: list[PolicyInForce]) -> dict[str, Any]:
    """The form with the policy in force; what was typed elsewhere stays."""
    found = next((each.policy for each in known if each.queue == form.queue), None)
    form = replace(form, workload=form.workload if form.workload.strip() else _examples(found)[0][1])
    if found is None:
        words = f"no policy of a queue {form.queue!r} is known to this database"
        return _shown(replace(form, source=DECLARED), known, {"queue": Misread(words=words)} if form.queue else {})
    text = policy_text(found)
    is_untouched = form.b.strip() in ("", form.a.strip())
    return _shown(replace(form, a=text, b=text if is_untouched else form.b), known)


def _shown(form: _Form, known: list[PolicyInForce], problems: Problems | None = None) -> dict[str, Any]:
    of_queue = next((each for each in known if each.queue == form.queue), None)
    return {
        "form": form,
        "problems": problems or {},
        "queues": [each.queue for each in known if each.policy is not None],
        "examples": _examples(of_queue.policy if of_queue else None),
        "overrides": len(of_queue.overrides) if of_queue else 0,
        "most_jobs": MOST_SIMULATED,
        "result": None,
    }


# Reading what was typed.


def _read(form: _Form) -> tuple[list[Policy], dict[str, Any], Problems]:
    """What is to be tried, and every problem at once: whoever mends one must not meet the next one by one."""
    problems: Problems = {}
    policies: list[Policy] = []
    for name, text in (("a", form.a), ("b", form.b)):
        if name == "a" or text.strip():
            policy = read_policy_text(text)
            if isinstance(policy, Misread):
                problems[name] = policy
            else:
                policies.append(policy)
    options: dict[str, Any] = {"slots": _number(form.slots, problems)}
    if form.source == HISTORY:
        options |= {"history": form.queue, "last": _time("last", form.last, problems)}
    else:
        options["workload"] = workload = read_workload_text(form.workload)
        if isinstance(workload, Misread):
            problems["workload"] = workload
    if form.until.strip():
        options["until"] = _time("until", form.until, problems)
    return policies, options, problems


def _number(text: str, problems: Problems) -> int:
    typed = text.strip().replace(",", "")
    if typed.isascii() and typed.isdigit() and len(typed) < 9 and 1 <= int(typed) <= MOST_SLOTS:
        return int(typed)
    problems["slots"] = Misread(words=f"give a whole number from 1 to {MOST_SLOTS:,}")
    return 0


def _time(name: str, text: str, problems: Problems) -> str:
    try:
        microseconds(text.strip())
    except FairlaneError as error:
        problems[name] = Misread(words=str(error))
    return text.strip()


LETTERS = "ABCD"
SHOWN_KEYS = 5
SHOWN_CLASSES = 8
"""Classes that have a line of their own in a chart; the rest share one."""
COLOURS = 4
MOST_POINTS = 200
ALIKE = 0.1
"""A difference that is not worth a sentence."""
BRIEF = 0.005
"""Seconds: nor is one between waits that nobody notices."""


def compare(tried: Sequence[Tried], policies: Sequence[Policy], queue: str) -> dict[str, Any]:
    """Everything that the page shows of them. Each side has one policy: as it would be declared, what it came to, and
    what a simulation cannot know about it."""
    found = [simulation for simulation, _ in tried]
    marked = list(zip(LETTERS, found, policies, strict=False))
    return {
        "sides": [
            {"letter": letter, "simulation": each, "code": declaration(policy, queue), "notes": list(_notes(policy))}
            for letter, each, policy in marked
        ],
        "words": _in_words(*found) if len(found) == 2 else [],
        "charts": _charts(tried),
        "classes": _rows([each.classes for each in found]),
        "slowest": _rows([each.slowest(SHOWN_KEYS) for each in found]),
        "limits": [(letter, use) for letter, each, _ in marked for use in each.limits],
        "by": ", ".join(found[0].by),
    }


def declaration(policy: Policy, queue: str) -> str:
    """The policy as one would write it in a program."""
    lines = [f"    {json.dumps(queue or policy.queue)},"]
    if policy.fair is not None:
        lines.append(f"    fair={policy.fair!r},")
    if policy.limits:
        lines += ["    limits=[", *(f"        {each!r}," for each in policy.limits), "    ],"]
    if policy.keys:
        lines.append(f"    keys={policy.keys!r},")
    return "\n".join(["app.queue(", *lines, ")"])


# In words.


def _notes(policy: Policy) -> Iterable[str]:
    if any(bound.from_job for bound in policy.bound):
        yield "A number that jobs bring along counts as 1 here: these jobs bring none. Write a number instead."
    if shared := [each.name for each in policy.limits if each.name is not None]:
        yield f"The limit {shared[0]} is shared with other queues; here this queue has it to itself."


def _in_words(a: Simulation, b: Simulation) -> list[str]:
    before = {group.name: group.waits.p95 for group in a.classes}
    words = []
    for group in b.classes:
        was, now = before.get(group.name, group.waits.p95), group.waits.p95
        if abs(now - was) > max(BRIEF, ALIKE * max(was, now)):
            which, within = "sooner" if now < was else "later", f"95 % of its jobs within {measured(now)}"
            words.append(f"{group.name} starts {which} under B: {within}, under A {measured(was)}.")
    if not words:
        words.append("Waits are about the same under both.")
    if abs(b.seconds - a.seconds) > ALIKE * a.seconds:
        words.append(f"All is done after {measured(b.seconds)} under B, {measured(a.seconds)} under A.")
    if a.jain is not None and b.jain is not None and abs(a.jain - b.jain) > ALIKE:
        more = "more" if b.jain > a.jain else "less"
        words.append(f"Turns are {more} even under B (Jain {b.jain:.2f}, {a.jain:.2f}).")
    return words


# Tables.


def _rows(groups: Sequence[Sequence[Group]]) -> list[dict[str, Any]]:
    """Line by line, the first policy above the second. `part` is a wait at p95, as a part of the longest."""
    longest = max((each.waits.p95 for side in groups for each in side), default=0.0)
    places = {name: nth for nth, name in enumerate(dict.fromkeys(each.name for side in groups for each in side))}
    rows = [
        {"letter": letter, "group": each, "part": each.waits.p95 / longest if longest else 0.0}
        for letter, side in zip(LETTERS, groups, strict=False)
        for each in side
    ]
    return sorted(rows, key=lambda row: (places[row["group"].name], row["letter"]))


# Charts.


Chart = dict[str, str | None]
"""A title, the letter of its policy if it is of one, and the data as JSON."""


def _charts(tried: Sequence[Tried]) -> list[Chart]:
    charts: list[Chart] = []
    letters = [letter if len(tried) > 1 else None for letter in LETTERS]
    for title, which in (("Slots in use, by class", "running"), ("Jobs waiting, by class", "waiting")):
        drawn = [_over_time(timeline, getattr(timeline, which)) for _, timeline in tried]
        # The same scales on both sides: otherwise what is half as much looks just as much.
        top = max((value for each in drawn for line in each["series"] for value in line["values"]), default=1)
        right = max((each["x"][-1] for each in drawn if each["x"]), default=1)
        for letter, each in zip(letters, drawn, strict=False):
            scale = {"top": top, "right": right, "time": False, "xLabel": "after", "xUnit": "s"}
            charts.append({"title": title, "letter": letter, "data": json.dumps({**each, **scale})})
    found = [simulation for simulation, _ in tried]
    by = ", ".join(found[0].by)
    if by and max(len(each.keys) for each in found) > 1:
        waits = [sorted((group.waits.p95 for group in each.keys), reverse=True) for each in found]
        shares = [sorted((group.share * 100 for group in each.keys), reverse=True) for each in found]
        charts.append(_ranked(f"Wait at p95 of each {by}, the longest first", "s", waits))
        charts.append(_ranked(f"Share of the slots’ time of each {by}, the largest first", "%", shares))
    return charts


def _over_time(timeline: Timeline, lines: Sequence[Sequence[float]]) -> dict[str, Any]:
    drawn = list(zip(timeline.classes, lines, strict=True))
    largest = sorted(drawn, key=lambda each: -sum(each[1]))[:SHOWN_CLASSES]
    # In their own order, so that a class has the same colour on both sides.
    kept = [each for each in drawn if each in largest]
    if rest := [line for name, line in drawn if (name, line) not in largest]:
        kept.append((f"{len(rest)} others", [sum(column) for column in zip(*rest, strict=True)]))
    series = [
        {"label": name, "values": [round(value, 2) for value in line], **({"dash": [5, 4]} if nth >= COLOURS else {})}
        for nth, (name, line) in enumerate(kept)
    ]
    columns = len(lines[0]) if lines else 0
    return {"x": [round(timeline.column_seconds * nth, 3) for nth in range(columns)], "series": series}


def _ranked(title: str, unit: str, sides: Sequence[Sequence[float]]) -> Chart:
    longest = max(map(len, sides))
    places = range(0, longest, max(1, -(-longest // MOST_POINTS)))
    series = [
        {
            "label": letter if len(sides) > 1 else "all",
            "values": [round(side[place], 4) if place < len(side) else None for place in places],
            "color": color,
        }
        for letter, side, color in zip(LETTERS, sides, ("series-4", "series-1", "series-2", "series-3"), strict=False)
    ]
    ranks = [place + 1 for place in places]
    data = {"x": ranks, "series": series, "time": False, "xLabel": "place", "unit": unit}
    return {"title": title, "letter": None, "data": json.dumps(data)}


# What tends to happen to queues, as texts for the form.

WORKLOADS = {
    "one tenant floods the queue": """\
# One enqueues 3,000 jobs at once; forty others send bursts of five.
[[classes]]
name = "hot"
keys = $hot
jobs = 3000
run_time = "50ms"

[[classes]]
name = "small"
keys = $small
count = 40      # small-0 to small-39
jobs = 40       # each
burst = 5
every = "2s"
run_time = { exponential = "50ms" }""",
    "long jobs beside short ones": """\
# As many jobs each, but those of one take thirty times as long.
[[classes]]
name = "long"
keys = $hot
jobs = 300
run_time = "3s"

[[classes]]
name = "short"
keys = $small
count = 10
jobs = 300
run_time = "100ms\"""",
    "steady traffic, some of it failing": """\
# Arrivals at random times; one run in ten fails and is tried again.
[[classes]]
name = "steady"
keys = $many
count = 100
jobs = 60
poisson = 0.5   # arrivals a second, of each
run_time = { lognormal = "400ms" }
failures = 0.1
max_attempts = 5
backoff = "2s\"""",
}


def _examples(policy: Policy | None) -> list[tuple[str, str]]:
    """Titles and texts, for jobs that carry the keys of this policy."""
    names = list(policy.keys_of_job if policy is not None else ()) or ["account"]
    keys = {}
    for kind, first, others in (("hot", "acme", "1"), ("small", "small-{n}", "{n}"), ("many", "tenant-{n}", "{n}")):
        values = [first, *(f"{name}-{others}" for name in names[1:])]
        pairs = [f"{name} = {json.dumps(value)}" for name, value in zip(names, values, strict=True)]
        keys[kind] = f"{{ {', '.join(pairs)} }}"
    return [(title, Template(text).substitute(keys)) for title, text in WORKLOADS.items()]
