"""What simulations came to, side by side: tables, charts, and what is different in words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fairlane.clock import measured
from fairlane.operations.trials import Tried
from fairlane.policy.policy import Policy
from fairlane.simulation.measures import Group, LimitUse, Simulation, Timeline

__all__ = ["Comparison", "Side", "compare"]

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One policy, and what it came to."""

    letter: str
    simulation: Simulation
    code: str
    """The policy as one would declare it."""
    notes: tuple[str, ...]
    """What a simulation cannot know about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    title: str
    letter: str | None
    data: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of a table, and which side it is of; a line of the first side begins a group."""

    letter: str
    group: Group
    part: float
    """Its wait at p95, as a part of the longest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    sides: list[Side]
    words: list[str]
    charts: list[Chart]
    classes: list[Row]
    keys: list[Row]
    limits: list[tuple[str, LimitUse]]
    by: str


def compare(tried: Sequence[Tried], policies: Sequence[Policy], queue: str) -> Comparison:
    """Everything that the page shows of them."""
    found = [simulation for simulation, _ in tried]
    return Comparison(
        sides=[
            Side(letter=letter, simulation=each, code=declaration(policy, queue), notes=tuple(_notes(policy)))
            for letter, each, policy in zip(LETTERS, found, policies, strict=False)
        ],
        words=_in_words(found),
        charts=_charts(tried),
        classes=_rows([each.classes for each in found]),
        keys=_rows([sorted(each.keys, key=lambda group: -group.waits.p95)[:SHOWN_KEYS] for each in found]),
        limits=[(letter, use) for letter, each in zip(LETTERS, found, strict=False) for use in each.limits],
        by=", ".join(found[0].by),
    )


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


def _in_words(found: Sequence[Simulation]) -> list[str]:
    if len(found) < 2:
        return []
    a, b = found[0], found[1]
    before = {group.name: group.waits.p95 for group in a.classes}
    words = [
        _wait_in_words(group.name, before[group.name], group.waits.p95) for group in b.classes if group.name in before
    ]
    told = [each for each in words if each]
    if not told:
        told.append("Waits are about the same under both.")
    if abs(b.seconds - a.seconds) > ALIKE * a.seconds:
        told.append(f"All is done after {measured(b.seconds)} under B, {measured(a.seconds)} under A.")
    if a.jain is not None and b.jain is not None and abs(a.jain - b.jain) > ALIKE:
        told.append(
            f"Turns are {'more' if b.jain > a.jain else 'less'} even under B (Jain {b.jain:.2f}, {a.jain:.2f})."
        )
    return told


def _wait_in_words(name: str, before: float, after: float) -> str:
    if abs(after - before) <= max(BRIEF, ALIKE * max(before, after)):
        return ""
    which = "sooner" if after < before else "later"
    return f"{name} starts {which} under B: 95 % of its jobs within {measured(after)}, under A {measured(before)}."


# Tables.


def _rows(groups: Sequence[Sequence[Group]]) -> list[Row]:
    """Line by line, the first policy above the second."""
    longest = max((each.waits.p95 for side in groups for each in side), default=0.0)
    places = {name: nth for nth, name in enumerate(dict.fromkeys(each.name for side in groups for each in side))}
    rows = [
        Row(letter=letter, group=each, part=each.waits.p95 / longest if longest else 0.0)
        for letter, side in zip(LETTERS, groups, strict=False)
        for each in side
    ]
    return sorted(rows, key=lambda row: (places[row.group.name], row.letter))


# Charts.


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
            charts.append(Chart(title=title, letter=letter, data=json.dumps({**each, **scale})))
    found = [simulation for simulation, _ in tried]
    by = ", ".join(found[0].by)
    if by and max(len(each.keys) for each in found) > 1:
        waits = [sorted((group.waits.p95 for group in each.keys), reverse=True) for each in found]
        shares = [sorted((group.share * 100 for group in each.keys), reverse=True) for each in found]
        charts.append(_ranked(f"Wait at p95 of each {by}, the longest first", "s", waits))
        charts.append(_ranked(f"Share of the slots’ time of each {by}, the largest first", "%", shares))
    return charts


def _over_time(timeline: Timeline, lines: Sequence[Sequence[float]]) -> dict[str, Any]:
    width = timeline.column_seconds
    named = sorted(zip(timeline.classes, lines, strict=True), key=lambda each: -sum(each[1]))
    # In their own order again, so that a class has the same colour on both sides.
    kept = [each for each in zip(timeline.classes, lines, strict=True) if each in named[:SHOWN_CLASSES]]
    rest = named[SHOWN_CLASSES:]
    if rest:
        others = [sum(column) for column in zip(*(line for _, line in rest), strict=True)]
        kept.append((f"{len(rest)} others", others))
    series = [
        {"label": name, "values": [round(value, 2) for value in line], **({"dash": [5, 4]} if nth >= COLOURS else {})}
        for nth, (name, line) in enumerate(kept)
    ]
    columns = len(lines[0]) if lines else 0
    return {"x": [round(width * nth, 3) for nth in range(columns)], "series": series}


def _ranked(title: str, unit: str, sides: Sequence[Sequence[float]]) -> Chart:
    longest = max(map(len, sides))
    step = max(1, -(-longest // MOST_POINTS))
    places = list(range(0, longest, step))
    series = [
        {
            "label": letter if len(sides) > 1 else "all",
            "values": [round(side[place], 4) if place < len(side) else None for place in places],
            "color": color,
        }
        for letter, side, color in zip(LETTERS, sides, ("series-4", "series-1", "series-2", "series-3"), strict=False)
    ]
    data = {"x": [place + 1 for place in places], "series": series, "time": False, "xLabel": "place", "unit": unit}
    return Chart(title=title, letter=None, data=json.dumps(data))
