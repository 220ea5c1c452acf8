"""Starting jobs on SQLite: what a plan has chosen becomes claims."""

from __future__ import annotations

from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.job import Claim
from fairlane.scheduler.snapshot import Start
from fairlane.store.boards import Raced
from fairlane.store.protocol import WorkerIdentity
from fairlane.store.sqlite import rows
from fairlane.store.sqlite.database import Transaction

MOST_KINDS = 4
"""Kinds of starts, by what they are charged, that are written by a statement each: more are written together."""


def start(tx: Transaction, queue: str, starts: list[Start], lease: UUID, worker: WorkerIdentity) -> list[Claim]:
    """Hand jobs to a worker, in the order of the plan; `Raced` if one of them is not ready any more."""
    if not starts:
        return []
    alike: dict[tuple[float, tuple[bytes, ...], Instant], list[int]] = {}
    for each in starts:
        alike.setdefault((each.charge, each.shared, each.at), []).append(each.head.ref)
    started: list[rows.Row] = []
    if len(alike) <= MOST_KINDS:
        for (charge, shared, at), positions in alike.items():
            listed = msgspec.json.encode(positions).decode()
            started += tx.all("claim_alike", at, lease.bytes, worker.name, listed, charge, rows.join_shared(shared))
    else:
        planned = [(each.head.ref, each.charge, rows.join_shared(each.shared), each.at) for each in starts]
        started = tx.all("claim_jobs", lease.bytes, worker.name, msgspec.json.encode(planned).decode())
    found = {row[0]: row[1:] for row in started}
    if len(found) < len(starts):
        # Cancelled since its lane's next jobs were looked up, and the bell of it is not folded yet.
        raise Raced
    return [rows.claim_of(found[each.head.ref], lease, queue, each.at) for each in starts]
