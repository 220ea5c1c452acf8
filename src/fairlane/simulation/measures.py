"""What a recording says: waits, shares, fairness, and how far limits were used."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from heapq import merge
from itertools import accumulate
from math import ceil
from operator import itemgetter
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
    """All figures of a recording; keys are grouped by `by`, or else by what the policy looks at."""
    by = by or report_by(record.policy)
    by = by or tuple(sorted({name for kind in record.kinds for name in kind.keys} - {"task"}))
    span = max(1, record.ended_at - record.began_at)
    labels = [(kind.label,) for kind in record.kinds]
    names = [select(by, kind.keys, kind.priority) for kind in record.kinds]
    classes, keys = _Grouping(record, labels), _Grouping(record, names)
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
        utilisation=sum(classes.service) / (span * record.slots),
        jain=_jain(record, keys, by),
        classes=classes.groups(classes.shares_when_all_wait()),
        keys=keys.groups(),
        limits=tuple(_limit_use(record, bound.name, repr(bound.limit), span) for bound in record.policy.bound),
        without_numbers=record.without_numbers,
    )


def share_when_all_wait(record: Recording, by: By) -> dict[Name, float]:
    """Each key's share of the worker-seconds while all of them had jobs waiting; nothing if that was never so."""
    names = [select(by, kind.keys, kind.priority) for kind in record.kinds]
    return _Grouping(record, names).shares_when_all_wait()


def report_by(policy: Policy) -> By:
    """What a policy's keys are reported by: what takes turns, else all that it looks at."""
    return policy.fair.by if policy.fair else policy.keys_of_job


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
    """The jobs of a recording, grouped by a name for each kind."""

    def __init__(self, record: Recording, names: Sequence[Name]) -> None:
        self.record = record
        self.names = list(dict.fromkeys(names))
        known = {name: nth for nth, name in enumerate(self.names)}
        self.of_kind = [known[name] for name in names]
        """The place of each kind's name."""
        self.runs = [0] * len(self.names)
        self.left = [0] * len(self.names)
        self.service = [0] * len(self.names)
        self.waits: list[array[int]] = [array("q") for _ in self.names]
        end = record.ended_at
        rows = zip(record.kind_of, record.ready_at, record.started_at, record.finished_at, strict=True)
        for kind, ready_at, started_at, finished_at in rows:
            nth = self.of_kind[kind]
            self.runs[nth] += 1
            self.waits[nth].append(started_at - ready_at)
            self.service[nth] += min(finished_at, end) - started_at
        for kind, ready_at in record.left:
            self.left[self.of_kind[kind]] += 1
            self.waits[self.of_kind[kind]].append(max(0, end - ready_at))

    def groups(self, shares_when_busy: Mapping[Name, float] = {}) -> tuple[Group, ...]:
        served = sum(self.service)
        return tuple(
            Group(
                name=named(name),
                runs=self.runs[nth],
                left=self.left[nth],
                waits=Waits.of(self.waits[nth]),
                worker_seconds=self.service[nth] / SECOND,
                share=self.service[nth] / served if served else 0.0,
                share_when_busy=shares_when_busy.get(name),
            )
            for nth, name in enumerate(self.names)
        )

    def accounts(self, weights: Sequence[float]) -> list[_Account]:
        """What each group got and was owed, event by event: a job becomes ready, starts, or ends."""
        accounts = [_Account(weight) for weight in weights]
        at, all_waiting, held, weight, owed_each, waiting = 0, 0, 0, 0.0, 0.0, 0
        for moment, nth, ready, started in self._events():
            passed, at = moment - at, moment
            if waiting:
                owed_each += held * passed / weight
            if waiting == len(accounts):
                all_waiting += passed
            each = accounts[nth]
            each.got_when_all_wait += each.running * (all_waiting - each.all_waiting)
            was_waiting = each.waiting > 0
            if was_waiting:
                each.got += each.running * (moment - each.at)
                each.owed += (owed_each - each.owed_each) * each.weight
                held -= each.running
            each.at, each.all_waiting, each.owed_each = moment, all_waiting, owed_each
            each.waiting += ready
            each.running += started
            if each.waiting:
                held += each.running
            if was_waiting != (each.waiting > 0):
                sign = -1 if was_waiting else 1
                waiting, weight = waiting + sign, weight + sign * each.weight
        return accounts

    def _events(self) -> Iterator[tuple[Instant, int, int, int]]:
        """When jobs of each group became ready (+1) or ceased to wait (-1), and started (+1) or ended (-1)."""
        record, end = self.record, self.record.ended_at
        group_of = [self.of_kind[kind] for kind in record.kind_of]
        left = [(ready_at, self.of_kind[kind]) for kind, ready_at in record.left]
        ready = sorted([*zip(record.ready_at, group_of, strict=True), *left])
        ended = sorted((min(at, end), nth) for at, nth in zip(record.finished_at, group_of, strict=True))
        return merge(
            ((at, nth, 1, 0) for at, nth in ready),
            ((at, nth, -1, 1) for at, nth in zip(record.started_at, group_of, strict=True)),
            ((at, nth, 0, -1) for at, nth in ended),
            ((end, nth, -1, 0) for _, nth in sorted(left, key=itemgetter(1))),
        )

    def shares_when_all_wait(self) -> dict[Name, float]:
        """Each group's share of the worker-seconds while all of them had jobs waiting; nothing if that was never so."""
        got = [each.got_when_all_wait for each in self.accounts([1.0] * len(self.names))]
        return {name: each / sum(got) for name, each in zip(self.names, got, strict=True)} if any(got) else {}


@dataclass(slots=True)
class _Account:
    """What a group of jobs got and was owed up to its last event."""

    weight: float
    waiting: int = 0
    running: int = 0
    got: int = 0
    """Worker-microseconds while it had jobs waiting."""
    owed: float = 0.0
    """Its part by weight of what all those that had jobs waiting got."""
    got_when_all_wait: int = 0
    at: Instant = 0
    """When its last event was; as of then, the next two."""
    all_waiting: int = 0
    """For how long all groups had jobs waiting."""
    owed_each: float = 0.0
    """What a group of weight 1 was owed."""


def named(name: Name) -> str:
    """A key's values as people read them."""
    return ", ".join("None" if value is None else value for value in name)


def _jain(record: Recording, keys: _Grouping, by: By) -> float | None:
    """A key with waiting jobs is owed its share, by weight, of what all keys with waiting jobs get at that time."""
    fair = record.policy.fair if record.policy.fair and record.policy.fair.by == by else None
    weights = [record.weights.get(name, fair.weight_of(name)) if fair else 1.0 for name in keys.names]
    # A key that is owed less than one of its runs gets either nothing or too much.
    compared = [
        each.got / each.owed
        for each, runs, service in zip(keys.accounts(weights), keys.runs, keys.service, strict=True)
        if each.owed * max(1, runs) >= max(1, service)
    ]
    return jain_index(compared) if len(compared) > 1 else None


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
    began = record.began_at
    width = max(1, ceil((record.ended_at - began) / columns))
    labels = list(dict.fromkeys(kind.label for kind in record.kinds))
    held = {label: [0] * columns for label in labels}
    change = {label: [0] * (columns + 1) for label in labels}
    rows = zip(record.kind_of, record.ready_at, record.started_at, record.finished_at, strict=True)
    for kind, ready_at, started_at, finished_at in rows:
        label = record.kinds[kind].label
        change[label][min(columns, (ready_at - began) // width)] += 1
        change[label][min(columns, (started_at - began) // width)] -= 1
        begin, end = started_at - began, min(finished_at, record.ended_at) - began
        while begin < end:
            edge = min(end, (begin // width + 1) * width)
            held[label][begin // width] += edge - begin
            begin = edge
    for kind, ready_at in record.left:
        change[record.kinds[kind].label][min(columns, (ready_at - began) // width)] += 1
    return Timeline(
        column_seconds=width / SECOND,
        classes=tuple(labels),
        running=tuple(tuple(each / width for each in held[label]) for label in labels),
        waiting=tuple(tuple(accumulate(change[label][:columns])) for label in labels),
    )
