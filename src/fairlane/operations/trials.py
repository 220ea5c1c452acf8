"""Policies tried on a workload, or on what a queue has just been through: for surfaces that many people share.

A simulation takes a processor for as long as it lasts. So it is bounded in jobs and in time, and runs in a thread that
makes way for others: who looks at other things meanwhile hardly feels it. Whoever asked and goes away ends it.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import tomllib
from bisect import bisect
from collections.abc import Sequence
from typing import Any

import msgspec

from fairlane.clock import SECOND, SystemClock, microseconds
from fairlane.errors import ConfigurationError, FairlaneError
from fairlane.operations.requests import in_force
from fairlane.operations.section import Section
from fairlane.parameters import checked_methods
from fairlane.policy.keys import normalize_by
from fairlane.policy.overrides import NO_OVERRIDES
from fairlane.policy.policy import POLICY_EXAMPLE, Policy, parse_policy
from fairlane.simulation.measures import Simulation, Timeline, measure, report_by, timeline
from fairlane.simulation.replay import read_history, record
from fairlane.simulation.run import SimulatedJob
from fairlane.simulation.workload import Workload
from fairlane.store.protocol import Store

MOST_POLICIES = 4
MOST_SIMULATED = 50_000
"""Jobs of one simulation, attempts included."""
MOST_SLOTS = 10_000
MOST_ATTEMPTS = 100
LONGEST_SPAN = 366 * 86_400 * SECOND
LONGEST_TRY = 20 * SECOND
"""Of all policies together, by the clock on the wall."""
STRETCH = 1_000
"""Microseconds that a simulation goes on for before it makes way."""
WAY = 100
"""And for how long it does."""

Tried = tuple[Simulation, Timeline]
"""What became of the jobs under one policy, and how it went over time."""
PolicyGiven = str | dict[str, Any] | Policy
"""The name of a queue (its policy in force), a document, or the policy itself."""


@checked_methods
class Trials(Section):
    """`app.operations.trials`: the same jobs under other policies, on a virtual clock."""

    async def run(
        self,
        policies: Sequence[PolicyGiven],
        *,
        workload: Workload | None = None,
        history: str | None = None,
        last: str | float = "1h",
        slots: int = 100,
        seed: int | None = None,
        until: str | float | None = None,
        by: Sequence[str] = (),
    ) -> list[Tried]:
        """The same jobs under each policy: those of a workload, or those that ended lately in the queue `history`.

        Bounded in jobs and in time. A policy is named by its queue, or given, also as a document.
        """
        store = await self._store()
        if not 1 <= len(policies) <= MOST_POLICIES:
            raise ConfigurationError(f"{len(policies)} policies: give from 1 to {MOST_POLICIES}")
        if not 1 <= slots <= MOST_SLOTS:
            raise ConfigurationError(f"slots={slots}: give from 1 to {MOST_SLOTS:,}")
        found = [await _policy(store, each) for each in policies]
        span = None if until is None else _span("until", until)
        if history is None:
            jobs = await asyncio.to_thread(_foreseen, workload, seed)
        else:
            jobs = await _remembered(store, history, last, workload)
        names = normalize_by("by", tuple(by)) or next(filter(None, map(report_by, found)), ())
        pace = _Pace()
        try:
            return await asyncio.to_thread(_try, found, jobs, slots, span, names, pace)
        finally:
            pace.stop.set()


async def _policy(store: Store, given: PolicyGiven) -> Policy:
    match given:
        case str():
            # As it is declared: what operators have changed for now says nothing about it.
            return (await in_force(store, given)).policy.overridden(NO_OVERRIDES)
        case Policy():
            return given
        case _:
            return parse_policy(given, "policies")


def _foreseen(workload: Workload | None, seed: int | None) -> list[SimulatedJob]:
    if workload is None:
        raise ConfigurationError("which jobs? Give a workload, or history with the name of a queue")
    for each in workload.classes:
        if each.max_attempts > MOST_ATTEMPTS:
            raise ConfigurationError(f"class {each.name!r}: max_attempts is at most {MOST_ATTEMPTS} here")
        # Other arrivals and run times than these would take longer to reckon than there is time for.
        for name, time in (("at", each.at), ("every", each.every or 0), ("backoff", each.backoff)):
            _span(f"class {each.name!r}: {name}", time)
    _check_number(sum(each.count * max(1, each.jobs) for each in workload.classes))
    jobs = workload.simulated(seed)
    _check_number(sum(1 + len(job.retries) for job in jobs))
    return jobs


def _check_number(count: int) -> None:
    if count > MOST_SIMULATED:
        raise ConfigurationError(
            f"{count:,} runs are more than {MOST_SIMULATED:,}, which is what can be tried here; give fewer jobs, or "
            "use `fairlane simulate`"
        )


async def _remembered(store: Store, queue: str, last: str | float, workload: Workload | None) -> list[SimulatedJob]:
    if workload is not None:
        raise ConfigurationError("give a workload or history, not both")
    await in_force(store, queue)
    jobs = await read_history(store, queue, await store.now(), _span("last", last), limit=MOST_SIMULATED)
    if not jobs:
        raise ConfigurationError(f"no job of queue {queue!r} ended within the last {last}; look further back")
    return jobs


def _span(name: str, given: str | float) -> int:
    span = microseconds(given)
    if not 0 <= span <= LONGEST_SPAN:
        raise ConfigurationError(f"{name}={given!r}: give a time from 0 to {LONGEST_SPAN // SECOND // 86_400} days")
    return span


def _try(
    policies: Sequence[Policy],
    jobs: Sequence[SimulatedJob],
    slots: int,
    until: int | None,
    by: tuple[str, ...],
    pace: _Pace,
) -> list[Tried]:
    try:
        recordings = [
            record(each, jobs, slots=slots, until=None if until is None else until / SECOND, on_progress=pace)
            for each in policies
        ]
        return [(measure(each, by), timeline(each)) for each in recordings]
    except (ArithmeticError, KeyError) as error:
        raise ConfigurationError(
            f"this cannot be reckoned ({error}); give smaller numbers, and jobs their keys"
        ) from error


class _Pace:
    """Ends a simulation that takes too long or whose caller has gone, and lets other threads run meanwhile."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._clock = SystemClock()
        self._since = self._clock.monotonic()
        self._ends_at = self._since + LONGEST_TRY

    def __call__(self, runs: int) -> None:
        now = self._clock.monotonic()
        if now > self._ends_at:
            raise ConfigurationError(
                f"it took longer than {LONGEST_TRY // SECOND} s, of which {runs:,} runs; give fewer jobs, or use "
                "`fairlane simulate`"
            )
        if now - self._since < STRETCH:
            return
        # A thread that only reckons gives the interpreter away every 5 ms at best; one that waits, at once.
        if self.stop.wait(WAY / SECOND):
            raise ConfigurationError("nobody waits for it any more")
        self._since = self._clock.monotonic()


LONGEST_TEXT = 100_000
_Path = tuple[str | int, ...]
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')
_LINE = re.compile(r"(?:: | ?\(at )line (\d+),? column \d+(?: \(char \d+\)|\))| ?\(at end of document\)")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_UNKNOWN = re.compile(r"unknown field `(\w+)`")
_TOML_HEADER = re.compile(r"\s*\[(\[\s*classes\s*\]\])?")
_JSON_HINT = "names and words stand in double quotes, and no comma stands before a closing bracket"
_WORKLOAD_HINT = 'write [[classes]], then name = "small", jobs = 100, run_time = "50ms"'


class Misread(msgspec.Struct, frozen=True, kw_only=True):
    """Why a text could not be read."""

    words: str
    line: int | None = None
    """Counted from 1; `None`: it is about the whole."""


def read_policy_text(text: str) -> Policy | Misread:
    """The policy that a text describes: what `fairlane policy show --json` prints, or less."""
    document = _parsed(text, f"a policy looks like {POLICY_EXAMPLE}", is_json=True)
    if isinstance(document, Misread):
        return document
    if isinstance(document, list) and len(document) == 1:
        document = document[0]
    if not isinstance(document, dict):
        return Misread(words=f"this is not one policy; a policy looks like {POLICY_EXAMPLE}", line=1)
    try:
        return parse_policy(document, "policy")
    except ConfigurationError as error:
        words = str(error).removeprefix("policy: ")
        return Misread(words=words, line=_lines(text).get(_wrong_part(document, words)))


def read_workload_text(text: str) -> Workload | Misread:
    """The workload that a text declares."""
    is_json = text.lstrip()[:1] == "{"
    document = _parsed(text, _WORKLOAD_HINT, is_json=is_json)
    if isinstance(document, Misread):
        return document
    try:
        return msgspec.convert(document, Workload)
    except (msgspec.ValidationError, FairlaneError) as error:
        words, _, at = str(error).partition(" - at `$")
        path: _Path = tuple(name or int(number) for name, number in _STEP.findall(at))
        if unknown := _UNKNOWN.search(words):
            path = (*path, unknown[1])
        elif len(path) > 2:
            words = f"{path[2]}: {words}"
        lines = _lines(text) if is_json else _toml_lines(text)
        known = (lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines)
        return Misread(words=words.replace("`", ""), line=next(known, None))


def _parsed(text: str, hint: str, *, is_json: bool) -> Any:
    if len(text) > LONGEST_TEXT:
        return Misread(words=f"{len(text):,} characters are more than {LONGEST_TEXT:,}; use `fairlane simulate`")
    if not text.strip():
        return Misread(words="there is nothing here")
    try:
        return json.loads(text, parse_constant=_no_constant) if is_json else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        found = _LINE.search(str(error))
        words = f"this is not {'JSON' if is_json else 'TOML'} ({_LINE.sub('', str(error))})"
        line = int(found[1]) if found and found[1] else None
        return Misread(words=f"{words}: {_JSON_HINT}; {hint}" if is_json else f"{words}; {hint}", line=line)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _wrong_part(document: dict[str, Any], words: str) -> _Path:
    """The part of a policy that cannot be read even by itself, else the one that the words name."""
    limits = document.get("limits")
    for nth, each in enumerate(limits if isinstance(limits, list) else []):
        if problem := _refused({"limits": [each]}):
            named = [name for name in each if name in problem] if isinstance(each, dict) else []
            return ("limits", nth, named[0]) if len(named) == 1 else ("limits", nth)
    if document.get("fair") and _refused({"fair": document["fair"]}):
        return ("fair",)
    return next(((name,) for name in document if f" {name};" in words or f"{name}=" in words), ())


def _refused(document: dict[str, Any]) -> str:
    try:
        parse_policy(document, "")
    except ConfigurationError as error:
        # What a policy looks like is at the end, and names fields that are not meant.
        return str(error).partition("; a policy looks like")[0]
    return ""


def _lines(text: str) -> dict[_Path, int]:
    """The line on which each part of a JSON text begins. The text has been read, so it is well formed."""
    lines: dict[_Path, int] = {}
    path: list[str | int] = []
    breaks = [each.start() for each in re.finditer("\n", text)]
    previous = ""
    for token in _TOKEN.finditer(text):
        sign = token[0]
        if sign in "{[":
            lines.setdefault(tuple(path), bisect(breaks, token.start()) + 1)
            path.append("" if sign == "{" else 0)
        elif sign in "}]":
            path.pop()
        elif sign == "," and isinstance(path[-1], int):
            path[-1] += 1
        elif sign == ":" and previous[:1] == '"':
            path[-1] = json.loads(previous)
            lines.setdefault(tuple(path), bisect(breaks, token.start()) + 1)
        previous = sign
    return lines


def _toml_lines(text: str) -> dict[_Path, int]:
    """The same for a TOML text whose classes are `[[classes]]` tables."""
    lines: dict[_Path, int] = {}
    nth = -1
    for number, line in enumerate(text.splitlines(), 1):
        header = _TOML_HEADER.match(line)
        if header and header[1]:
            nth += 1
            lines["classes", nth] = number
        elif not header and "=" in line:
            name = line.partition("=")[0].strip().strip('"')
            lines.setdefault(("classes", nth, name) if nth >= 0 else (name,), number)
    return lines
