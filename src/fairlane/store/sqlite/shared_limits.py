"""Limits that queues share, on SQLite. There is one writer at a time, so that no lock is needed beside the queue's."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import msgspec

from fairlane.policy.policy import Policy
from fairlane.scheduler.rebuild import Claimed
from fairlane.scheduler.snapshot import Events, Ring, SharedGateRow, SharedRelease
from fairlane.store.protocol import RELEASES_AT_MOST
from fairlane.store.rows import decode_keys
from fairlane.store.sqlite import rows
from fairlane.store.sqlite.database import Transaction


class Sharing:
    """What procedures do with the shared limits of a queue."""

    def __init__(self, tx: Transaction, queue: int) -> None:
        self._tx = tx
        self._queue = queue
        self._names: dict[str, str | None] = {}

    def fold_into(self, events: Events) -> Events:
        """What a plan is to know of them: what was released there, and where others have left room."""
        rung = [gate for (gate,) in self._tx.all("take_rings", self._queue)]
        return msgspec.structs.replace(self._released(events, takes=True), rung=rung)

    def look(self, policy: Policy, events: Events) -> tuple[Policy, Events]:
        """The same for those who only look: what has happened stays where it is."""
        return policy, self._released(events, takes=False)

    def _released(self, events: Events, *, takes: bool) -> Events:
        releases = []
        for limit, _ in self._tx.all("select_shared_limits", self._queue):
            found = self._tx.all("select_shared_releases", limit, RELEASES_AT_MOST)
            if found and takes:
                self._tx.run("delete_shared_releases", limit, found[-1][0])
            releases += [SharedRelease(*row[1:]) for row in found]
        shared = self.select({release.gate for release in releases})
        return msgspec.structs.replace(events, shared=shared, shared_releases=releases)

    def select(self, gates: Iterable[bytes]) -> list[SharedGateRow]:
        """Shared gates by id, where they exist."""
        found = (self._tx.one("select_shared_gate", gate) for gate in sorted(gates))
        return [rows.shared_gate(row) for row in found if row is not None]

    def walk(self, after: bytes, limit: int) -> list[SharedGateRow]:
        """A stretch of the gates of these limits."""
        return [rows.shared_gate(row) for row in self._tx.all("walk_shared_gates", self._queue, after, limit)]

    def gates_of(self, limit: str) -> list[SharedGateRow]:
        """All gates of a shared limit, by its name."""
        return [rows.shared_gate(row) for row in self._tx.all("select_shared_gates_of_limit", limit)]

    def learn_numbers(self, policy: Policy) -> None:
        self._names = {bound.name: bound.limit.name for bound in policy.shared_limits}

    def put(self, gates: Sequence[SharedGateRow], rings: Collection[Ring]) -> None:
        """Store these gates, and let other queues look at theirs: one waiter each, who passes on what is left."""
        tx, names = self._tx, self._names
        known = [row for row in gates if row.limit in names]
        tx.run_many("upsert_shared_gate", [(*rows.shared_gate_parameters(row), names[row.limit]) for row in known])
        # Those whose limit has another scope now are there, or nobody could have left them.
        retired = [row for row in gates if row.limit not in names]
        tx.run_many("put_shared_counts", [(row.in_flight, rows.encode(row.contenders), row.id) for row in retired])
        tx.run_many("insert_ring", [(ring.gate, ring.queue) for ring in rings if ring.gate is not None])
        tx.woken.update({tx.value("select_queue_id", queue): 1 for queue in sorted({ring.queue for ring in rings})})

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
