"""Looking at a queue: what could start now, for those who wait without claiming."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairlane.store.postgres.claims import Claimer, Watch
from fairlane.store.postgres.connections import STATEMENTS
from fairlane.store.postgres.scheduling import QueueHandle, Scheduling
from fairlane.store.protocol import Looked, WorkerIdentity

if TYPE_CHECKING:
    from fairlane.store.postgres.wakeups import PostgresListener

__all__ = ["look", "stop_looking"]


async def look(
    claimer: Claimer, queue: QueueHandle, want: int, worker: WorkerIdentity, listener: PostgresListener
) -> Looked:
    """How many jobs could start now, up to `want`."""
    watch = Watch(queue.id, listener)
    async with claimer.locked(queue, durable=False) as scheduling:
        looked = await _look(scheduling, want, worker, watch)
    watch.committed()
    return looked


async def stop_looking(
    claimer: Claimer, queue: QueueHandle, worker: WorkerIdentity, listener: PostgresListener
) -> Looked:
    """Withdraw the listener, and let another have its wake-up."""
    watch = Watch(queue.id, listener)
    async with claimer.locked(queue, durable=False) as scheduling:
        connection = scheduling.connection
        await watch.update(connection, worker.id, is_filled=True)
        await connection.execute(STATEMENTS["nudge"], queue.id, 1, worker.id)
    watch.committed()
    return Looked(0, 0, None, look_again=False)


async def _look(scheduling: Scheduling, want: int, worker: WorkerIdentity, watch: Watch) -> Looked:
    connection = scheduling.connection
    await watch.look(connection)
    await connection.execute(STATEMENTS["begin_look"])
    loaded = await scheduling.load(want, listens=True)
    now = loaded.snapshot.now
    plan = await scheduling.plan(loaded.snapshot, want)
    if plan.starts:
        await connection.execute(STATEMENTS["undo_look"])
    else:
        # As a claim that starts nothing: what is shut is parked, and rings when it opens.
        await scheduling.write(loaded, plan)
    is_filled = len(plan.starts) >= want
    due = None if is_filled else await scheduling.next_due(loaded, plan)
    look_again = await watch.update(connection, worker.id, is_filled=is_filled)
    is_partial = not is_filled and (plan.more or not loaded.all_folded)
    return Looked(len(plan.starts), now, due, look_again or is_partial)
