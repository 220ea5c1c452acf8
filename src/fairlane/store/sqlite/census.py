"""The census on SQLite: in one snapshot to look, in one write transaction to mend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence, Set

import msgspec

from fairlane.clock import Instant
from fairlane.policy.policy import Policy
from fairlane.scheduler.board import rings_for_all
from fairlane.scheduler.journal import Delta
from fairlane.scheduler.rebuild import (
    HeldLane,
    Miscount,
    SharedHold,
    expected_gates,
    miscounted,
    recounted,
)
from fairlane.scheduler.snapshot import GateRow, KeptPlaces, SharedGateRow
from fairlane.store import auditing
from fairlane.store.auditing import RECOUNT, describe_miscounts
from fairlane.store.protocol import Counted
from fairlane.store.sqlite import claims, rows, sharing
from fairlane.store.sqlite.database import Transaction

ALL = -1


def count(
    tx: Transaction, queue: claims.QueueInForce, reached: tuple[bytes, bytes], limit: int
) -> tuple[Counted, tuple[bytes, bytes]]:
    """Look at a stretch of a queue's gates; where the next one begins."""
    own = tx.all("walk_all_gates", queue.id, reached[0], limit)
    shared = tx.all("walk_all_shared_gates", queue.id, reached[1], limit)
    found = _own(tx, queue, queue.policy, _gates(tx, queue, own))
    found += [each for each, _ in _shared(tx, queue, [rows.shared_gate(row) for row in shared])]
    ends = [stretch[-1][0] if len(stretch) == limit else b"" for stretch in (own, shared)]
    return Counted(found, more=any(ends)), (ends[0], ends[1])


def at_gates(
    tx: Transaction, queue: claims.QueueInForce, policy: Policy, gates: Sequence[bytes], most: int
) -> list[Miscount]:
    """The same for these gates, a queue's own and shared ones; nothing, where more jobs run than may be looked at."""
    if not gates or tx.value("count_held") > most:
        return []
    shared = sharing.select_gates(tx, gates)
    return _own(tx, queue, policy, only=set(gates)) + [each for each, _ in _shared(tx, queue, shared)]


def recount(tx: Transaction, queue: claims.QueueInForce, now: Instant) -> list[Miscount]:
    """Count every gate of a queue again from the jobs that run, and say which were wrong."""
    queue = claims.fold_all(tx, queue, now)
    gates = _gates(tx, queue, tx.all("walk_all_gates", queue.id, b"", ALL))
    found = _own(tx, queue, queue.policy, gates)
    if found:
        claims.remake(tx, queue, queue.policy, now, _holds(tx, queue))
    shared = [rows.shared_gate(row) for row in tx.all("walk_all_shared_gates", queue.id, b"", ALL)]
    wrong = _shared(tx, queue, shared)
    mended = [row for _, row in wrong]
    encoded = [msgspec.json.encode(row.contenders).decode() for row in mended]
    tx.run_many("put_shared_counts", [(row.in_flight, text, row.id) for row, text in zip(mended, encoded, strict=True)])
    sharing.ring(tx, rings_for_all(mended))
    found += [each for each, _ in wrong]
    if found:
        tx.perform(auditing.record(RECOUNT, now, queue.policy.queue, *describe_miscounts(found)))
    return found


def _own(
    tx: Transaction,
    queue: claims.QueueInForce,
    policy: Policy,
    gates: Sequence[GateRow] = (),
    *,
    only: Set[bytes] | None = None,
) -> list[Miscount]:
    """Which of these gates, or of those that a running job holds, count wrong; of no others than `only`."""
    kept = [] if policy.sequence is None else [*claims.kept_places(tx, queue.id), *_unfolded_places(tx, queue)]
    expected = expected_gates(policy, _holds(tx, queue), kept)
    if only is not None:
        expected = {gate: counted for gate, counted in expected.items() if gate in only}
    wanted = expected.keys() if only is None else only
    others = claims.tail_of(tx, queue).find(gates=sorted(wanted - {row.id for row in gates}))
    return miscounted(policy, expected, [*gates, *claims.answer(tx, queue, others).gates])


def _gates(tx: Transaction, queue: claims.QueueInForce, stored: Sequence[rows.Row]) -> list[GateRow]:
    """Gates of the tables as they are now, and others that have changed."""
    return claims.tail_of(tx, queue).over(Delta(gates=[rows.gate(row) for row in stored])).gates


def _holds(tx: Transaction, queue: claims.QueueInForce) -> list[HeldLane]:
    ended: Counter[bytes] = Counter()
    for (text,) in tx.all("select_unfolded", queue.id):
        for bell in rows.releases(text):
            ended[bell.lane] += bell.ended + bell.unstarted
    holds = [
        HeldLane(lane, priority, rows.decode_keys(keys), number + ended.pop(lane, 0))
        for lane, priority, keys, number in tx.all("select_holds", queue.id)
    ]
    lanes = claims.answer(tx, queue, claims.tail_of(tx, queue).find(lanes=ended)).lanes
    return holds + [HeldLane(lane.id, lane.priority, lane.keys, ended[lane.id]) for lane in lanes]


def _unfolded_places(tx: Transaction, queue: claims.QueueInForce) -> list[KeptPlaces]:
    """What bells that nobody has folded will say of places: those given back are still counted, new ones are not."""
    places = [
        KeptPlaces(priority, rows.decode_keys(keys), resumed)
        for priority, keys, resumed in tx.all("select_unfolded_places", queue.id)
    ]
    bells = [bell for (text,) in tx.all("select_unfolded", queue.id) for bell in rows.releases(text) if bell.kept]
    found = claims.answer(tx, queue, claims.tail_of(tx, queue).find(lanes={bell.lane for bell in bells})).lanes
    lanes = {lane.id: lane for lane in found}
    return places + [
        KeptPlaces(lanes[bell.lane].priority, lanes[bell.lane].keys, -bell.kept) for bell in bells if bell.lane in lanes
    ]


def _shared(
    tx: Transaction, queue: claims.QueueInForce, gates: list[SharedGateRow]
) -> list[tuple[Miscount, SharedGateRow]]:
    if not gates:
        return []
    running = [
        SharedHold(gate, name, 1)
        for name, shared in tx.all("select_shared_holders")
        for gate in rows.split_shared(shared)
    ]
    left = [SharedHold(*row) for row in tx.all("select_unfolded_shared", queue.id)]
    return recounted(queue.policy.queue, gates, [*running, *left])
