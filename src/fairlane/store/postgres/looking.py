"""Looking at a queue: what could start now, for those who wait without claiming."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairlane.store.postgres.claims import Claimer, Watch
from fairlane.store.postgres.connections import STATEMENTS
from fairlane.store.postgres.scheduling import QueueHandle, Scheduling
from fairlane.store.protocol import Looked, WorkerIdentity

if TYPE_CHECKING:
    from fairlane.store.postgres.wakeups import PostgresListener


async def look_at(
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
        watch.ending(worker.id, is_filled=True)
        await connection.execute(STATEMENTS["withdraw_waiter"], queue.id, worker.id)
        await connection.execute(STATEMENTS["nudge"], queue.id, 1, worker.id)
    watch.committed()
    return Looked(0, 0, None, look_again=False)


async def _look(scheduling: Scheduling, want: int, worker: WorkerIdentity, watch: Watch) -> Looked:
    connection = scheduling.connection
    await look(connection, [watch])
    await connection.execute(STATEMENTS["begin_look"])
    loaded = await scheduling.see_to(await scheduling.load(want), want)
    plan = await scheduling.plan(loaded, want, listens=True)
    is_filled = len(plan.starts) >= want
    alarm = None if is_filled else loaded.board.next_alarm()
    ending = watch.ending(worker.id, is_filled=is_filled)
    if plan.starts:
        # Nothing of it is written: the board in memory is forgotten too.
        await connection.execute(STATEMENTS["undo_look"])
        if ending.ear is not None:
            await connection.execute(STATEMENTS["register_waiter"], scheduling.queue.id, worker.id, ending.ear)
        elif ending.waiter is not None:
            await connection.execute(STATEMENTS["withdraw_waiter"], scheduling.queue.id, worker.id)
    else:
        # As a claim that starts nothing: what is shut is parked, and rings when it opens.
        await scheduling.write(loaded, plan, (), ending)
    dues = () if is_filled else (alarm, loaded.opened.due, scheduling.lease_due)
    is_partial = not is_filled and (plan.more or not loaded.all_folded)
    due = min((each for each in dues if each is not None), default=None)
    return Looked(len(plan.starts), loaded.now, due, watch.looks_again or is_partial)
