"""How many jobs wait, for producers on PostgreSQL."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fairlane.policy.policy import Policy
from fairlane.scheduler.backlog import add_bells
from fairlane.store.postgres import rows
from fairlane.store.postgres.connections import STATEMENTS
from fairlane.store.protocol import UNFOLDED_AT_MOST

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

__all__ = ["count_ready"]


async def count_ready(
    connection: Connection, queue: int, policy: Policy, gates: Sequence[bytes]
) -> tuple[dict[bytes, int], bool]:
    """Ready jobs by gate, and whether so many bells wait that they should be folded: not all of them were counted."""
    found = await connection.fetch(STATEMENTS["count_ready"], queue, gates, UNFOLDED_AT_MOST + 1)
    counts = dict.fromkeys(gates, 0) | {row["gate"]: row["count"] for row in found if row["gate"] is not None}
    bells = [(row["priority"], rows.decode_keys(row["keys"]), row["count"]) for row in found if row["gate"] is None]
    return add_bells(policy, counts, bells), len(bells) > UNFOLDED_AT_MOST
