"""Limits that queues share, on SQLite. There is one writer at a time, so that no lock is needed beside the queue's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from fairlane.clock import Instant
from fairlane.policy.policy import BoundLimit, Policy, check_alike, shared_identity
from fairlane.scheduler.board import rings_for_all
from fairlane.scheduler.rebuild import Claimed, carried_over, counted_in, uncounted
from fairlane.scheduler.snapshot import Events, Plan, Ring, SharedGateRow, SharedRelease
from fairlane.store.protocol import RELEASES_AT_MOST
from fairlane.store.rows import decode_keys, decode_limit, encode_limit
from fairlane.store.sqlite import rows
from fairlane.store.sqlite.database import Transaction


def limits_in_force(tx: Transaction, queue: int) -> dict[str, str]:
    """The shared limits of a queue as they are stored, by name."""
    documents = [document for _, document in tx.all("select_shared_limits", queue)]
    return {msgspec.json.decode(document)["name"]: document for document in documents}


def fold_into(tx: Transaction, queue: int, events: Events) -> Events:
    """What the plan is to know of shared limits: what was released there, and where others have left room."""
    releases = []
    for limit, _ in tx.all("select_shared_limits", queue):
        found = tx.all("select_shared_releases", limit, RELEASES_AT_MOST)
        if found:
            tx.run("delete_shared_releases", limit, found[-1][0])
        releases += [SharedRelease(*row[1:]) for row in found]
    return msgspec.structs.replace(
        events,
        shared=select_gates(tx, {release.gate for release in releases}),
        shared_releases=releases,
        rung=[gate for (gate,) in tx.all("take_rings", queue)],
    )


def look_into(tx: Transaction, queue: int, events: Events) -> Events:
    """The same for those who only look: the bells stay where they are."""
    found = [
        tx.all("select_shared_releases", limit, RELEASES_AT_MOST) for limit, _ in tx.all("select_shared_limits", queue)
    ]
    releases = [SharedRelease(*row[1:]) for rows_of_limit in found for row in rows_of_limit]
    shared = select_gates(tx, {release.gate for release in releases})
    return msgspec.structs.replace(events, shared=shared, shared_releases=releases)


def select_gates(tx: Transaction, gates: Iterable[bytes]) -> list[SharedGateRow]:
    """Shared gates by id, where they exist."""
    return [rows.shared_gate(row) for gate in sorted(gates) if (row := tx.one("select_shared_gate", gate)) is not None]


def write(tx: Transaction, policy: Policy, plan: Plan) -> None:
    """Store what a plan has changed, and ring."""
    _write_gates(tx, policy, plan.shared)
    ring(tx, plan.rings)


def ring(tx: Transaction, rings: Iterable[Ring]) -> None:
    """Let other queues look at their gates."""
    tx.run_many("insert_ring", [(ring.gate, ring.queue) for ring in rings if ring.gate is not None])


def rung(tx: Transaction, plan: Plan) -> dict[int, int]:
    """In which queues a plan has rung: one waiter each, who passes on what is left."""
    return {tx.value("select_queue_id", queue): 1 for queue in sorted({ring.queue for ring in plan.rings})}


def _write_gates(tx: Transaction, policy: Policy, gates: Sequence[SharedGateRow]) -> None:
    names = {bound.name: bound.limit.name for bound in policy.shared_limits}
    known = [row for row in gates if row.limit in names]
    tx.run_many("upsert_shared_gate", [(*rows.shared_gate_parameters(row), names[row.limit]) for row in known])
    # Those whose limit has another scope now are there, or nobody could have left them.
    retired = [row for row in gates if row.limit not in names]
    contenders = [msgspec.json.encode(row.contenders).decode() for row in retired]
    tx.run_many(
        "put_shared_counts",
        [(row.in_flight, waiting, row.id) for row, waiting in zip(retired, contenders, strict=True)],
    )


def sharers(tx: Transaction, queue: int) -> set[int]:
    """This queue, and those that share a limit with it."""
    shared = (tx.all("select_sharers", limit) for limit, _ in tx.all("select_shared_limits", queue))
    return {queue, *(other for found in shared for other, _ in found)}


def check(tx: Transaction, policy: Policy) -> None:
    """Refuse a policy whose shared limits are of another kind or scope in another queue."""
    for bound in policy.shared_limits:
        row = tx.one("select_shared_limit", bound.limit.name)
        if row is not None:
            others = [name for _, name in tx.all("select_sharers", row[0]) if name != policy.queue]
            for other in others[:1]:
                check_alike(policy.queue, bound.limit, other, decode_limit(row[1]))


def put_in_force(tx: Transaction, queue: int, policy: Policy, now: Instant) -> None:
    """Store the shared limits of a policy. Where a bound has changed, every queue's lanes are looked at again."""
    tx.run("delete_sharing", queue)
    for bound in policy.shared_limits:
        limit = bound.limit
        before = tx.one("select_shared_limit", limit.name)
        document = encode_limit(limit)
        number = tx.value("put_shared_limit", limit.name, document)
        tx.run("insert_sharing", number, queue)
        if before is not None and before[1] != document and shared_identity(decode_limit(before[1])) == bound.name:
            gates = [rows.shared_gate(row) for row in tx.all("select_shared_gates_of_limit", number)]
            gates = carried_over((row for row in gates if row.limit == bound.name), limit, now)
            _write_gates(tx, policy, gates)
            ring(tx, rings_for_all(gates))


def put_tokens(tx: Transaction, policy: Policy, gates: Sequence[SharedGateRow]) -> None:
    """Store what was spent before a limit was shared."""
    _write_gates(tx, policy, gates)


def gates_of(tx: Transaction, bound: BoundLimit) -> list[SharedGateRow]:
    """All gates of a shared limit."""
    limit = tx.one("select_shared_limit", bound.limit.name)
    return [] if limit is None else [rows.shared_gate(row) for row in tx.all("select_shared_gates_of_limit", limit[0])]


def count_running(tx: Transaction, queue: int, policy: Policy) -> None:
    """Count what already runs by the shared limits that are new to its queue."""
    running = [
        Claimed(position, priority, decode_keys(keys), rows.split_shared(shared))
        for position, priority, keys, shared in tx.all("select_claimed_of_queue", queue)
    ]
    found = uncounted(policy, running)
    if found:
        known = select_gates(tx, {gate.id for _, gates in found for gate in gates})
        _write_gates(tx, policy, counted_in(policy.queue, found, known))
        marks = [(rows.join_shared((*job.shared, *(gate.id for gate in gates))), job.ref) for job, gates in found]
        tx.run_many("mark_shared", marks)
