"""What a recording says: waits, shares, fairness, and how far limits were used."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain
from math import ceil
from typing import Any

from fairlane.clock import SECOND, Instant
from fairlane.policy.keys import By, select
from fairlane.policy.policy import Policy
from fairlane.simulation.run import Recording

Name = tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class Waits:
    """From ready to started, in seconds. Of jobs that never started, as long as they have waited."""

    p50: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, waits: Iterable[int]) -> Waits:
        ordered = sorted(waits)
        nth = (max(0, ceil(share * len(ordered)) - 1) for share in (0.5, 0.95, 0.99, 1.0))
        return cls(*(ordered[each] / SECOND for each in nth)) if ordered else cls()


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A class of jobs, or the jobs of one key."""

    name: str
    runs: int
    left: int
    """Jobs that had not started at the end."""
    waits: Waits
    worker_seconds: float
    share: float
    """Of all worker-seconds."""
    share_when_busy: float | None = None
    """Of the worker-seconds while every class had jobs waiting; `None`: that was never so. Classes only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitUse:
    """How far one limit of the policy was used."""

    limit: str
    keys: int
    """How many keys it has counted."""
    fullest: str
    """The key that had no room for the longest time."""
    full: float
    """The share of time for which that key had no room."""
    held_up: float
    """The share of time for which it had none while jobs waited for it."""
    waited: float
    """Lane-seconds spent waiting on it, of all keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What became of a workload under a policy. Times are in seconds."""

    policy: str
    slots: int
    by: By
    """The keys that `keys` are grouped by."""
    seconds: float
    jobs: int
    runs: int
    retried: int
    dead: int
    left: int
    claims: int
    utilisation: float
    """The share of the slots' time in which a job ran."""
    jain: float | None
    """Jain's index over keys of what each got while it had jobs waiting, as a multiple of what was its share by weight
    then; `None`: never two of them waited for long enough to be owed a run."""
    classes: tuple[Group, ...]
    keys: tuple[Group, ...]
    limits: tuple[LimitUse, ...]
    without_numbers: int = 0
    """Jobs that lack a number which the policy takes from its jobs: 1 held until one of their key brought it."""

    def to_document(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    def slowest(self, count: int) -> tuple[Group, ...]:
        """The keys that waited longest, by the 95th percentile of their waits."""
        return tuple(sorted(self.keys, key=lambda group: -group.waits.p95)[:count])


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Classes over time: for each column, slots held on average and jobs waiting at its end."""

    column_seconds: float
    classes: tuple[str, ...]
    running: tuple[tuple[float, ...], ...]
    waiting: tuple[tuple[int, ...], ...]


def measure(record: Recording, by: By = ()) -> Simulation:
    """All figures of a recording; keys are told apart by `by`, or else by what the policy looks at."""
    by = by or report_by(record.policy)
    by = by or tuple(sorted({name for kind in record.kinds for name in kind.keys} - {"task"}))
    span = max(1, record.ended_at - record.began_at)
    labels = [(kind.label,) for kind in record.kinds]
    names = [select(by, kind.keys, kind.priority) for kind in record.kinds]
    classes, keys = _Grouping(record, labels), _Grouping(record, names)
    served = sum(classes.service.values())
    busy = _shares_when_busy(record, classes)
    return Simulation(
        policy=describe(record.policy),
        slots=record.slots,
        by=by,
        seconds=span / SECOND,
        jobs=record.jobs,
        runs=len(record.kind_of),
        retried=record.retried,
        dead=record.dead,
        left=len(record.left),
        claims=record.claims,
        utilisation=served / (span * record.slots),
        jain=_jain(record, keys, by),
        classes=tuple(classes.group(name, served, busy.get(name)) for name in classes.names),
        keys=tuple(keys.group(name, served, None) for name in keys.names),
        limits=tuple(_limit_use(record, bound.name, repr(bound.limit), span) for bound in record.policy.bound),
        without_numbers=record.without_numbers,
    )


def share_when_all_wait(record: Recording, by: By) -> dict[Name, float]:
    """Each key's share of the worker-seconds while all of them had jobs waiting; nothing if that was never so."""
    return _shares_when_busy(record, _Grouping(record, [select(by, kind.keys, kind.priority) for kind in record.kinds]))


def report_by(policy: Policy) -> By:
    """What a policy's keys are reported by: what takes turns, else all that it looks at."""
    return policy.fair.by if policy.fair else policy.stamped_keys


def describe(policy: Policy) -> str:
    """A policy as one would write it in Python."""
    parts = [repr(policy.fair)] if policy.fair else []
    parts += map(repr, policy.limits)
    if policy.keys:
        parts.append(f"keys={policy.keys!r}")
    if policy.partition is not None and policy.partition.width > 1:
        by = f", partition_by={policy.partition.by!r}" if policy.partition.by else ""
        parts.append(f"partitions={policy.partition.width}{by}")
    return ", ".join(parts) or "no policy (first come, first served)"


def jain_index(values: Iterable[float]) -> float:
    """1.0 when all have the same, 1/n when one of n has everything (Jain, Chiu and Hawe 1984)."""
    listed = list(values)
    most = max(listed, default=0)
    if not most:
        return 1.0
    # Compared with the largest: squares of what is very small have no digits left.
    shares = [value / most for value in listed]
    return sum(shares) ** 2 / (len(listed) * sum(share * share for share in shares))


def most_at_once(spans: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """The most of these spans that overlap, and since when; 0 of none."""
    changes = [change for begin, end in spans for change in ((begin, 1), (end, -1))]
    most = since = running = 0
    # At one instant ends come before starts: a slot that is handed over is not counted twice.
    for at, change in sorted(changes):
        running += change
        if running > most:
            most, since = running, at
    return most, since


def most_within(moments: Iterable[int], length: int) -> tuple[int, int]:
    """The most of these moments in any stretch of this length, its end left out, and where it begins; 0 of none."""
    ordered = sorted(moments)
    counts = ((bisect_left(ordered, at + length) - nth, at) for nth, at in enumerate(ordered))
    return max(counts, key=lambda each: each[0], default=(0, 0))


class _Grouping:
    """The runs of a recording, told apart by a name for each kind."""

    def __init__(self, record: Recording, names: Sequence[Name]) -> None:
        self.record = record
        self.of_kind = names
        self.names = list(dict.fromkeys(names))
        self.runs: dict[Name, array[int]] = {name: array("q") for name in self.names}
        self.waits: dict[Name, array[int]] = {name: array("q") for name in self.names}
        self.service: dict[Name, int] = dict.fromkeys(self.names, 0)
        self.left: dict[Name, list[Instant]] = {name: [] for name in self.names}
        end = record.ended_at
        # By place and not by name: a million look-ups of tuples are felt.
        runs = [self.runs[name] for name in names]
        waits = [self.waits[name] for name in names]
        service = [0] * len(names)
        rows = zip(record.kind_of, record.ready_at, record.started_at, record.finished_at, strict=True)
        for nth, (place, ready_at, started_at, finished_at) in enumerate(rows):
            runs[place].append(nth)
            waits[place].append(started_at - ready_at)
            service[place] += min(finished_at, end) - started_at
        for name, served in zip(names, service, strict=True):
            self.service[name] += served
        for place, ready_at in record.left:
            self.left[names[place]].append(ready_at)
            waits[place].append(max(0, end - ready_at))

    def group(self, name: Name, served: int, share_when_busy: float | None) -> Group:
        return Group(
            name=named(name),
            runs=len(self.runs[name]),
            left=len(self.left[name]),
            waits=Waits.of(self.waits[name]),
            worker_seconds=self.service[name] / SECOND,
            share=self.service[name] / served if served else 0.0,
            share_when_busy=share_when_busy,
        )

    def backlog(self, name: Name) -> list[tuple[Instant, Instant]]:
        """When jobs of this name were waiting: stretches that do not touch, in their order."""
        ready_at, started_at = self.record.ready_at, self.record.started_at
        spans = [(ready_at[nth], started_at[nth]) for nth in self.runs[name]]
        spans += [(at, self.record.ended_at) for at in self.left[name]]
        merged: list[tuple[Instant, Instant]] = []
        for begin, end in sorted(spans):
            if begin == end:
                continue
            if merged and begin <= merged[-1][1]:
                if end > merged[-1][1]:
                    merged[-1] = (merged[-1][0], end)
            else:
                merged.append((begin, end))
        return merged


def named(name: Name) -> str:
    """A key's values as people read them."""
    return ", ".join("None" if value is None else value for value in name)


def _shares_when_busy(record: Recording, classes: _Grouping) -> dict[Name, float]:
    """Each class's share of the worker-seconds while all of them had jobs waiting."""
    together = classes.backlog(classes.names[0]) if classes.names else []
    for name in classes.names[1:]:
        together = _overlap(together, classes.backlog(name))
    service = {
        name: sum(end - begin for begin, end in _clipped(record, classes.runs[name], together))
        for name in classes.names
    }
    served = sum(service.values())
    return {name: each / served for name, each in service.items()} if served else {}


def _overlap(one: list[tuple[Instant, Instant]], other: list[tuple[Instant, Instant]]) -> list[tuple[Instant, Instant]]:
    found, left, right = [], 0, 0
    while left < len(one) and right < len(other):
        begin, end = max(one[left][0], other[right][0]), min(one[left][1], other[right][1])
        if begin < end:
            found.append((begin, end))
        if one[left][1] < other[right][1]:
            left += 1
        else:
            right += 1
    return found


def _clipped(
    record: Recording, runs: Iterable[int], spans: list[tuple[Instant, Instant]]
) -> Iterator[tuple[Instant, Instant]]:
    """These runs, as far as they lie within stretches of time that do not overlap."""
    for nth in runs:
        begin, end = record.started_at[nth], min(record.finished_at[nth], record.ended_at)
        first = max(0, bisect_right(spans, (begin,)) - 1)
        yield from _overlap([(begin, end)], spans[first : bisect_right(spans, (record.finished_at[nth],))])


def _jain(record: Recording, keys: _Grouping, by: By) -> float | None:
    """Whoever has jobs waiting is owed, by weight, an equal part of what all those who have some are getting."""
    fair = record.policy.fair if record.policy.fair and record.policy.fair.by == by else None
    backlogs = [keys.backlog(name) for name in keys.names]
    weights = [record.weights.get(name, fair.weight_of(name)) if fair else 1.0 for name in keys.names]
    served = [
        list(_clipped(record, keys.runs[name], backlog)) for name, backlog in zip(keys.names, backlogs, strict=True)
    ]
    got = [sum(end - begin for begin, end in spans) for spans in served]
    owed = _owed(backlogs, weights, _Service(list(chain.from_iterable(served))))
    # Whoever is owed less than a run of its own can get none of it, or too much.
    compared = [
        mine / fair_share
        for name, mine, fair_share in zip(keys.names, got, owed, strict=True)
        if fair_share * max(1, len(keys.runs[name])) >= max(1, keys.service[name])
    ]
    return jain_index(compared) if len(compared) > 1 else None


class _Service:
    """Worker-time that many runs together have had, up to any instant."""

    def __init__(self, runs: Sequence[tuple[Instant, Instant]]) -> None:
        self._begins, self._ends = sorted(begin for begin, _ in runs), sorted(end for _, end in runs)
        self._begun = [0, *accumulate(self._begins)]
        self._ended = [0, *accumulate(self._ends)]

    def until(self, moment: Instant) -> int:
        begun, ended = bisect_right(self._begins, moment), bisect_right(self._ends, moment)
        return (begun - ended) * moment - self._begun[begun] + self._ended[ended]


def _owed(backlogs: list[list[tuple[Instant, Instant]]], weights: list[float], service: _Service) -> list[float]:
    """What each key was owed: over its own backlog, its part by weight of all that those with a backlog got."""
    changes = sorted(
        [(begin, 1, nth) for nth, each in enumerate(backlogs) for begin, _ in each]
        + [(end, 0, nth) for nth, each in enumerate(backlogs) for _, end in each]
    )
    owed = [0.0] * len(backlogs)
    since = [0.0] * len(backlogs)
    waiting: dict[int, None] = {}
    weight = part = 0.0
    served = 0
    for moment, begins, nth in changes:
        now = service.until(moment)
        if waiting:
            part += (now - served) / weight
        served = now
        if begins:
            waiting[nth] = None
            since[nth] = part
        else:
            del waiting[nth]
            owed[nth] += (part - since[nth]) * weights[nth]
        weight = weight + weights[nth] if begins else weight - weights[nth]
    return owed


def _service_by_window(record: Recording, runs: Iterable[int], width: int) -> dict[int, int]:
    held: dict[int, int] = defaultdict(int)
    for nth in runs:
        begin = record.started_at[nth] - record.began_at
        end = min(record.finished_at[nth], record.ended_at) - record.began_at
        while begin < end:
            edge = min(end, (begin // width + 1) * width)
            held[begin // width] += edge - begin
            begin = edge
    return held


def _limit_use(record: Recording, name: str, limit: str, span: int) -> LimitUse:
    gates = [gate for gate in record.gates if gate.limit == name]
    fullest = max(gates, key=lambda gate: (gate.held_up, gate.full), default=None)
    return LimitUse(
        limit=limit,
        keys=len(gates),
        fullest=named(fullest.key) if fullest else "",
        full=fullest.full / span if fullest else 0.0,
        held_up=fullest.held_up / span if fullest else 0.0,
        waited=sum(gate.waited for gate in gates) / SECOND,
    )


def timeline(record: Recording, columns: int = 120) -> Timeline:
    """The classes of a recording over time."""
    width = max(1, ceil((record.ended_at - record.began_at) / columns))
    classes = _Grouping(record, [(kind.label,) for kind in record.kinds])
    running, waiting = [], []
    for name in classes.names:
        held = _service_by_window(record, classes.runs[name], width)
        running.append(tuple(held[column] / width for column in range(columns)))
        change = [0] * (columns + 1)
        for nth in classes.runs[name]:
            change[min(columns, (record.ready_at[nth] - record.began_at) // width)] += 1
            change[min(columns, (record.started_at[nth] - record.began_at) // width)] -= 1
        for at in classes.left[name]:
            change[min(columns, (at - record.began_at) // width)] += 1
        waiting.append(tuple(accumulate(change[:columns])))
    return Timeline(
        column_seconds=width / SECOND,
        classes=tuple(named(name) for name in classes.names),
        running=tuple(running),
        waiting=tuple(waiting),
    )
