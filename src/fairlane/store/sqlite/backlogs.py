"""How many jobs wait, for producers on SQLite."""

from __future__ import annotations

from collections.abc import Sequence

from fairlane.clock import Instant
from fairlane.policy.policy import Policy
from fairlane.scheduler.backlog import add_bells
from fairlane.store.protocol import UNFOLDED_AT_MOST
from fairlane.store.sqlite import claims, rows
from fairlane.store.sqlite.database import Transaction

__all__ = ["count_folded", "count_ready"]

IN_FLIGHT = 3


def count_ready(tx: Transaction, policy: Policy, gates: Sequence[bytes]) -> dict[bytes, int] | None:
    """Ready jobs by gate; `None` where so many bells wait that they are to be folded first."""
    queue = claims.queue_number(tx, policy.queue)
    arrived = tx.all("select_arrivals", queue, UNFOLDED_AT_MOST + 1)
    if len(arrived) > UNFOLDED_AT_MOST:
        return None
    found = {gate: tx.one("select_gate", queue, gate) for gate in gates}
    counts = {gate: 0 if row is None else row[IN_FLIGHT] for gate, row in found.items()}
    bells = [rows.arrival(row) for row in arrived]
    return add_bells(policy, counts, [(bell.priority, bell.keys, bell.count) for bell in bells])


def count_folded(tx: Transaction, policy: Policy, gates: Sequence[bytes], now: Instant) -> dict[bytes, int]:
    """The same, once every bell is folded: nobody claims, and somebody has to."""
    queue = claims.load_queue(tx, policy.queue)
    if queue is not None:
        claims.fold_all(tx, queue, now)
    return count_ready(tx, policy, gates) or {}
