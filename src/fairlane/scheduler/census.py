"""A census: what gates count, held against the jobs that run.

Whoever starts or ends a claim changes the job and the count, or leaves a bell for it, in one transaction. So in any one
snapshot a gate that counts what is in flight says how many of its jobs run, and how many have ended whose bell nobody
has folded yet. A gate that says anything else is wrong, whoever is at work meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec
from msgspec.structs import replace

from fairlane.policy.keys import key_words, select
from fairlane.policy.policy import KINDS, Policy
from fairlane.scheduler.snapshot import Contender, GateRow, KeptPlaces, LaneRow, SharedGateRow

__all__ = [
    "HeldLane",
    "Miscount",
    "SharedHold",
    "corrected",
    "counts_in_flight",
    "expected_gates",
    "miscounted",
    "recounted",
]


class HeldLane(msgspec.Struct, frozen=True):
    """How many claims of a lane run, or have ended and are not folded."""

    lane: bytes
    priority: int
    keys: dict[str, str | None]
    count: int


class SharedHold(msgspec.Struct, frozen=True):
    """The same for a shared gate and one of the queues that pass it."""

    gate: bytes
    queue: str
    count: int


class Miscount(msgspec.Struct, frozen=True):
    """A gate that does not count what runs."""

    queue: str
    """Where it was found; a shared gate belongs to others as well."""
    limit: str
    key: tuple[str | None, ...]
    counted: int
    running: int

    @property
    def words(self) -> str:
        """As people read it."""
        by = self.limit.partition(":")[2].partition("@")[0].partition("#")[0]
        where = key_words(dict(zip(by.split(","), self.key, strict=False))) if self.key else "the whole queue"
        return f"{self.limit} of {where} counts {self.counted}, and {self.running} run"


def expected_gates(
    policy: Policy, holds: Iterable[HeldLane], kept: Iterable[KeptPlaces] = ()
) -> dict[bytes, tuple[str, tuple[str | None, ...], int]]:
    """What the gates of a queue's own limits must count: name, key and number, for those that hold anything."""
    counts: Counter[bytes] = Counter()
    names: dict[bytes, tuple[str, tuple[str | None, ...]]] = {}
    for hold in holds:
        for gate, bound in (*policy.gates_of(hold.priority, hold.keys), *policy.queue_gates):
            if bound.limit.counts_in_flight and not bound.is_shared:
                counts[gate] += hold.count
                names[gate] = (bound.name, select(bound.limit.by, hold.keys, hold.priority))
    for places in kept:
        if (found := policy.sequence_gate(places.priority, places.keys)) is not None:
            gate, bound = found
            counts[gate] += places.count
            names[gate] = (bound.name, select(bound.limit.by, places.keys, places.priority))
    return {gate: (*names[gate], count) for gate, count in counts.items() if count}


def miscounted(
    policy: Policy, expected: dict[bytes, tuple[str, tuple[str | None, ...], int]], gates: Iterable[GateRow]
) -> list[Miscount]:
    """Of these gates of a queue's own limits, those that are wrong. What is expected and not among them is missing."""
    found, seen = [], set()
    for row in gates:
        seen.add(row.id)
        bound = policy.bound_named(row.limit)
        if bound is None or bound.is_shared or not bound.limit.counts_in_flight:
            continue
        count = expected[row.id][2] if row.id in expected else 0
        if row.in_flight != count and policy.limit_at(bound, tuple(row.key), row.value) is not None:
            found.append(Miscount(policy.queue, row.limit, tuple(row.key), row.in_flight, count))
    missing = [each for gate, each in expected.items() if gate not in seen]
    return found + [Miscount(policy.queue, name, key, 0, count) for name, key, count in missing]


def corrected(lanes: Iterable[LaneRow], holds: Iterable[HeldLane]) -> list[LaneRow]:
    """A queue's lanes with what they hold, as they must be: a board that is made from them is right."""
    held = {each.lane: each for each in holds}
    rows = [replace(row, in_flight=held.pop(row.id).count if row.id in held else 0) for row in lanes]
    return rows + [
        LaneRow(each.lane, b"", each.priority, each.keys, 0, each.count, 0, 0, 0, None, 0.0) for each in held.values()
    ]


def counts_in_flight(row: SharedGateRow) -> bool:
    """Whether a shared gate counts what runs: its name says of what kind its limit is, or was."""
    kind = KINDS.get(row.limit.partition(":")[0])
    return kind is not None and bool(kind.counts_in_flight)


def recounted(
    queue: str, rows: Iterable[SharedGateRow], holds: Iterable[SharedHold]
) -> list[tuple[Miscount, SharedGateRow]]:
    """Of these shared gates, those that are wrong, each as it must be."""
    held: dict[bytes, Counter[str]] = {}
    for each in holds:
        held.setdefault(each.gate, Counter())[each.queue] += each.count
    found = []
    for row in rows:
        if not counts_in_flight(row):
            continue
        by_queue = held.get(row.id, Counter())
        if row.in_flight == by_queue.total() and {each.queue: each.taken for each in row.contenders if each.taken} == {
            name: count for name, count in by_queue.items() if count
        }:
            continue
        known = {each.queue: each for each in row.contenders}
        contenders = [
            replace(known.get(name) or Contender(name, 0), taken=by_queue[name]) for name in sorted({*known, *by_queue})
        ]
        miscount = Miscount(queue, row.limit, tuple(row.key), row.in_flight, by_queue.total())
        staying = [each for each in contenders if each.waits or each.taken > 0]
        found.append((miscount, replace(row, in_flight=by_queue.total(), contenders=staying)))
    return found
