"""Limits that queues share, on SQLite. There is one writer at a time, so that no lock is needed beside the queue's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from fairlane.policy.policy import Policy
from fairlane.scheduler.rebuild import Claimed
from fairlane.scheduler.snapshot import Events, Plan, Ring, SharedGateRow, SharedRelease
from fairlane.store.protocol import RELEASES_AT_MOST
from fairlane.store.rows import decode_keys
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


def select_gates(tx: Transaction, gates: Iterable[bytes]) -> list[SharedGateRow]:
    """Shared gates by id, where they exist."""
    return [rows.shared_gate(row) for gate in sorted(gates) if (row := tx.one("select_shared_gate", gate)) is not None]


def write(tx: Transaction, policy: Policy, plan: Plan) -> None:
    """Store what a plan has changed, and ring."""
    _write_gates(tx, {bound.name: bound.limit.name for bound in policy.shared_limits}, plan.shared)
    ring(tx, plan.rings)


def ring(tx: Transaction, rings: Collection[Ring]) -> None:
    """Let other queues look at their gates: one waiter each, who passes on what is left."""
    tx.run_many("insert_ring", [(ring.gate, ring.queue) for ring in rings if ring.gate is not None])
    tx.woken.update({tx.value("select_queue_id", queue): 1 for queue in sorted({ring.queue for ring in rings})})


def _write_gates(tx: Transaction, names: Mapping[str, str | None], gates: Sequence[SharedGateRow]) -> None:
    """Store gates; `names` are those of their limits, as far as the queue names these."""
    known = [row for row in gates if row.limit in names]
    tx.run_many("upsert_shared_gate", [(*rows.shared_gate_parameters(row), names[row.limit]) for row in known])
    # Those whose limit has another scope now are there, or nobody could have left them.
    retired = [row for row in gates if row.limit not in names]
    contenders = [msgspec.json.encode(row.contenders).decode() for row in retired]
    tx.run_many(
        "put_shared_counts",
        [(row.in_flight, waiting, row.id) for row, waiting in zip(retired, contenders, strict=True)],
    )


class Sharing:
    """What procedures do with the shared limits of a queue."""

    def __init__(self, tx: Transaction, queue: int) -> None:
        self._tx = tx
        self._queue = queue
        self._names: dict[str, str | None] = {}

    def look(self, policy: Policy, events: Events) -> tuple[Policy, Events]:
        """What the plan would know of them; the bells stay where they are."""
        releases = [
            SharedRelease(*row[1:])
            for limit, _ in self._tx.all("select_shared_limits", self._queue)
            for row in self._tx.all("select_shared_releases", limit, RELEASES_AT_MOST)
        ]
        shared = self.select({release.gate for release in releases})
        return policy, msgspec.structs.replace(events, shared=shared, shared_releases=releases)

    def select(self, gates: Iterable[bytes]) -> list[SharedGateRow]:
        return select_gates(self._tx, gates)

    def walk(self, after: bytes, limit: int) -> list[SharedGateRow]:
        """A stretch of the gates of these limits."""
        return [rows.shared_gate(row) for row in self._tx.all("walk_shared_gates", self._queue, after, limit)]

    def gates_of(self, limit: str) -> list[SharedGateRow]:
        """All gates of a shared limit, by its name."""
        return [rows.shared_gate(row) for row in self._tx.all("select_shared_gates_of_limit", limit)]

    def learn_numbers(self, policy: Policy) -> None:
        self._names = {bound.name: bound.limit.name for bound in policy.shared_limits}

    def put(self, gates: Sequence[SharedGateRow], rings: Collection[Ring]) -> None:
        """Store these gates, and ring."""
        _write_gates(self._tx, self._names, gates)
        ring(self._tx, rings)

    def running(self) -> list[Claimed]:
        """The jobs of the queue that run, and the gates that count them."""
        return [
            Claimed(position, priority, decode_keys(keys), rows.split_shared(shared))
            for position, priority, keys, shared in self._tx.all("select_claimed_of_queue", self._queue)
        ]

    def mark(self, found: Sequence[tuple[Claimed, Sequence[SharedGateRow]]]) -> None:
        """These jobs hold these gates too."""
        marks = [(rows.join_shared((*job.shared, *(gate.id for gate in gates))), job.ref) for job, gates in found]
        self._tx.run_many("mark_shared", marks)
