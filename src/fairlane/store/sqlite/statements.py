"""Statements that PostgreSQL carries out at once, and SQLite in several: by the names that procedures know them by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Any
from uuid import UUID

from fairlane.clock import Instant
from fairlane.errors import JobNotFound
from fairlane.job import State
from fairlane.policy.unique import digest_of
from fairlane.store.operators import FORCE, PURGE, REPLAY, RETRY
from fairlane.store.schedules import ORPHANED_AFTER
from fairlane.store.sqlite import claims, jobs, rows
from fairlane.store.sqlite.database import Row, Transaction
from fairlane.store.sqlite.wakeups import is_listening

if TYPE_CHECKING:
    from fairlane.store.sqlite.procedures import Driver


def _nothing(driver: Driver, *given: object) -> list[Row]:
    """There is one writer at a time, so nothing has to be locked; and ended jobs are found by an index."""
    return []


def _true(driver: Driver, *given: object) -> list[Row]:
    return [(True,)]


def _most_tallies(driver: Driver, queue: int) -> list[Row]:
    """Added up in one transaction, whatever was asked for: nobody can claim or settle meanwhile."""
    return [(100,)]


# Wakeups.


def _announce_schedules(driver: Driver) -> list[Row]:
    driver.has_new_schedules = True
    return []


def _tell_holders(driver: Driver, queue: int) -> list[Row]:
    driver.has_new_terms = True
    return []


def _nudge(driver: Driver, queue: int, count: int, but_not: UUID | None) -> list[Row]:
    driver.woken[queue] += count
    return []


def _nudge_sharers(driver: Driver, queue: int, count: int) -> list[Row]:
    limits = driver.tx.all("select_shared_limits", queue)
    driver.woken |= dict.fromkeys(
        (other for limit, _ in limits for other, _ in driver.tx.all("select_sharers", limit)), count
    )
    return []


# Workers and their schedules.


def _keep_schedules(
    driver: Driver, now: Instant, names: Sequence[str], digests: Sequence[bytes], worker: UUID | None
) -> list[Row]:
    driver.tx.run("forget_schedule_holders", now - ORPHANED_AFTER)
    if worker is not None:
        driver.tx.run("put_schedule_holder", worker.bytes, now)
    driver.tx.run_many("keep_schedule", [(now, *each) for each in zip(names, digests, strict=True)])
    return []


def _put_worker(driver: Driver, now: Instant, worker: UUID, said: str, kept_for: Instant) -> list[Row]:
    driver.tx.run("forget_workers", now - kept_for)
    driver.tx.run("put_worker", worker.bytes, now, said)
    return []


# What operators do with jobs.


def _select_unique_jobs(driver: Driver, given: Sequence[UUID]) -> list[Row]:
    asked = ((job, driver.tx.one("select_unique_job", job.bytes)) for job in sorted(given))
    return [(job, row[0], row[1], digest_of(row[2])) for job, row in asked if row is not None]


def _select_holders(driver: Driver, keys: Sequence[bytes], now: Instant) -> list[Row]:
    return [(now, key, *(driver.tx.one("select_holder", key) or [None] * 6)) for key in keys]


def _take_uniques(
    driver: Driver,
    keys: Sequence[bytes],
    owners: Sequence[UUID],
    digests: Sequence[bytes],
    untils: Sequence[int],
    expire: Sequence[Instant | None],
    is_first: bool,
) -> list[Row]:
    taken = zip(keys, owners, digests, untils, expire, strict=True)
    driver.tx.run_many(
        "take_unique", [(key, job.bytes, digest, int(until), at) for key, job, digest, until, at in taken]
    )
    return []


def _lock_idle(driver: Driver, given: Sequence[UUID]) -> list[Row]:
    return [(job,) for job in given]


def _cancel_job(driver: Driver, job: UUID, now: Instant, only_waiting: bool, reason: str | None) -> list[Row]:
    with suppress(JobNotFound):
        cancelled = jobs.cancel(driver.tx, job, now, only_waiting=only_waiting, reason=reason)
        driver.ended.append(job)
        if cancelled.worker is not None:
            driver.stopped.add(cancelled.worker)
        if cancelled.frees is not None:
            driver.woken[cancelled.frees] += 1
        return [(cancelled.was, cancelled.state)]
    return []


def _replay(driver: Driver, now: Instant, given: Sequence[UUID], delay: int | None) -> list[Row]:
    tx, found = driver.tx, _found(driver.tx, given)
    # In the order of their enqueue, which their ids keep.
    back = [(job, row) for job, row in sorted(found.items()) if REPLAY.applies_to(State(row[1]))]
    due_at = now + delay if delay is not None and delay > 0 else None
    state = State.READY if due_at is None else State.SCHEDULED
    place: int = tx.value("take_positions", len(back)) - len(back)
    bells: dict[bytes, list[Any]] = {}
    for job, row in back:
        place += 1
        position, _, queue, lane, priority, lane_keys, numbers, given_by, *attempt = row
        if attempt[1] is not None:
            tx.run("insert_attempt", job.bytes, *attempt)
        tx.run("replay_job", place, int(state), now, due_at, position)
        bell = bells.setdefault(lane, [queue, lane, priority, lane_keys, 0, place, now, None, 0, None])
        if given_by is not None and given_by > (bell[9] or 0):
            bell[7], bell[9] = numbers, given_by
        bell[4] += 1
    if state is State.READY:
        tx.run_many("insert_arrival", list(bells.values()))
    for queue, _, _, _, count, *_ in bells.values():
        # One to hold the timer is enough for those that are due later.
        driver.woken[queue] = driver.woken[queue] + count if state is State.READY else max(1, driver.woken[queue])
    return _states(found)


def _purge(driver: Driver, given: Sequence[UUID]) -> list[Row]:
    found = _found(driver.tx, given)
    gone = [row[0] for row in found.values() if PURGE.applies_to(State(row[1]))]
    driver.tx.run_many("delete_job", [(position,) for position in gone])
    return _states(found)


def _retry_now(driver: Driver, now: Instant, given: Sequence[UUID]) -> list[Row]:
    found = _found(driver.tx, given)
    hurried = [row for row in found.values() if RETRY.applies_to(State(row[1]))]
    driver.tx.run_many("hurry_job", [(now, row[0]) for row in hurried])
    driver.woken.update(row[2] for row in hurried)
    return _states(found)


def _force(driver: Driver, now: Instant, given: Sequence[UUID]) -> list[Row]:
    found = _found(driver.tx, given)
    for job, (position, state, queue, *_) in found.items():
        if FORCE.applies_to(State(state)):
            if state == State.SCHEDULED:
                driver.tx.run("hurry_job", now, position)
            driver.tx.run("force_job", job.bytes, queue)
            driver.woken[queue] += 1
    return _states(found)


def _found(tx: Transaction, given: Sequence[UUID]) -> dict[UUID, Row]:
    looked_up = ((job, tx.one("select_ended", job.bytes)) for job in given)
    return {job: row for job, row in looked_up if row is not None}


def _states(found: dict[UUID, Row]) -> list[Row]:
    """Each job and its state, and that nobody else is at it."""
    return [(job, row[1], False) for job, row in found.items()]


# Upkeep.


def _prune(driver: Driver, is_dead: bool, until: Instant, limit: int) -> list[Row]:
    states = (State.DEAD,) if is_dead else (State.DONE, State.CANCELLED)
    ended = (driver.tx.all("select_finished", int(state), until, limit) for state in states)
    found = list(islice(merge(*ended), limit))
    driver.tx.run_many("delete_job", [(position,) for _, position, _ in found])
    return [([UUID(bytes=job) for _, _, job in found], len(found))]


def _count_beyond(driver: Driver, is_dead: bool, keep: int, limit: int) -> list[Row]:
    states = (State.DEAD, State.DEAD) if is_dead else (State.DONE, State.CANCELLED)
    return driver.tx.all("count_beyond", *map(int, states), keep, limit)


def _forget_jobs(driver: Driver, given: Sequence[UUID]) -> list[Row]:
    driver.tx.run_many("delete_attempts", [(job.bytes,) for job in given])
    jobs.forget(driver.tx, [job.bytes for job in given])
    return []


def _collect_idle(
    driver: Driver,
    queue: int,
    lanes_from: bytes,
    flows_from: bytes,
    gates_from: bytes,
    limit: int,
    now: Instant,
    values_last: int,
) -> list[Row]:
    tx = driver.tx
    idle, ends = [], []
    for table, after, *parameters in (
        ("lane", lanes_from),
        ("flow", flows_from, now, values_last),
        ("gate", gates_from, now, values_last),
    ):
        seen = tx.all(f"walk_idle_{table}s", after, queue, limit, *parameters)
        idle.append([row for row in seen if row[-1]])
        ends.append(seen[-1][0] if len(seen) == limit else b"")
        tx.run_many(f"delete_{table}", [(queue, row[0]) for row in idle[-1]])
    lanes, flows, gates = ([row[0] for row in each] for each in idle)
    return [(flows, lanes, gates, ends, sum(row[1] for row in idle[0]), sum(row[2] for row in idle[0]))]


def _collect_shared_gates(driver: Driver, queue: int, after: bytes, limit: int, now: Instant) -> list[Row]:
    seen = driver.tx.all("walk_idle_shared_gates", after, queue, limit, now)
    idle = [row[:1] for row in seen if row[-1]]
    driver.tx.run_many("delete_shared_gate", idle)
    return [(seen[-1][0] if seen else None, len(seen), len(idle))]


def _select_holds(driver: Driver, queue: int) -> list[Row]:
    ended: Counter[bytes] = Counter()
    for (text,) in driver.tx.all("select_unfolded", queue):
        for bell in rows.releases(text):
            ended[bell.lane] += bell.ended + bell.unstarted
    running = driver.tx.all("select_holds", queue)
    holds = [(lane, priority, keys, count + ended.pop(lane, 0)) for lane, priority, keys, count in running]
    return [*holds, *((lane, None, None, count) for lane, count in ended.items())]


def _select_shared_holds(driver: Driver, queue: int) -> list[Row]:
    running = driver.tx.all("select_shared_holders")
    holds = [(gate, name, 1) for name, shared in running for gate in rows.split_shared(shared)]
    return [*holds, *driver.tx.all("select_unfolded_shared", queue)]


# What is looked at.


def _count_ready(driver: Driver, queue: int, gates: Sequence[bytes], most: int) -> list[Row]:
    tx = driver.tx
    found = [(gate, row[3], None, None) for gate in gates if (row := tx.one("select_gate", queue, gate)) is not None]
    bells = tx.all("select_arrivals", queue, most)
    return [*found, *((None, count, priority, keys) for _, _, priority, keys, count, *_ in bells)]


def _select_traces(driver: Driver, queue: int, flows: Sequence[bytes], gates: Sequence[bytes]) -> list[Row]:
    tx = driver.tx
    listeners = sum(is_listening(UUID(bytes=worker)) for (worker,) in tx.all("select_waiters", queue))
    return [
        (
            [each for each in flows if tx.value("has_flow", queue, each)],
            [each for each in gates if tx.value("has_gate", queue, each)],
            listeners,
        )
    ]


def _select_standstills(
    driver: Driver, names: Sequence[str], before: Instant, most: int, flows: Sequence[bytes], gates: Sequence[bytes]
) -> list[Row]:
    found: list[Row] = []
    for name in names:
        queue = claims.load_queue(driver.tx, name)
        if queue is not None:
            cursor = (queue.state.cursor, queue.state.cursor_tie)
            behind = driver.tx.some("select_flows_behind", most, flows, queue.id, *cursor)
            overdue = driver.tx.some("select_overdue_gates", most, gates, queue.id, before)
            found += [(name, *rest) for _, *rest in (*behind, *overdue)]
    return found


# Partitions, and limits that queues share.


def _move_ready_jobs(
    driver: Driver,
    lanes: Sequence[bytes],
    floors: Sequence[int],
    most: Sequence[int],
    queues: Sequence[int],
    joined: Sequence[bytes],
) -> list[Row]:
    moved: Counter[int] = Counter()
    for lane, floor, count, to, new_lane in zip(lanes, floors, most, queues, joined, strict=True):
        found = driver.tx.all("select_ready_of_lane", lane, floor, count)
        if found:
            *_, queue, priority, keys = found[0]
            since = min(row[2] for row in found)
            given_by, given = max(((row[4], row[3]) for row in found if row[3] is not None), default=(None, None))
            _move(driver.tx, found, to, new_lane)
            bell = (len(found), found[0][0], since, given, 0, given_by)
            driver.tx.run("insert_arrival", queue, lane, priority, keys, -len(found), found[0][0], since, None, 0, None)
            driver.tx.run("insert_arrival", to, new_lane, priority, keys, *bell)
            moved[to] += len(found)
    return list(moved.items())


def _move_scheduled_jobs(
    driver: Driver, queue: int, lanes: Sequence[bytes], queues: Sequence[int], joined: Sequence[bytes], most: int
) -> list[Row]:
    """Whoever keeps a place in a sequence gives it back here and takes it there."""
    moved: Counter[int] = Counter()
    for lane, to, new_lane in zip(lanes, queues, joined, strict=True):
        found = driver.tx.all("select_scheduled_of_lane", queue, lane, most - moved.total())
        _move(driver.tx, found, to, new_lane)
        moved[to] += len(found)
        if kept := sum(row[3] for row in found):
            position, _, since, _, priority, keys = found[0]
            for home, its_lane, resumed in ((queue, lane, kept), (to, new_lane, -kept)):
                bell = (0, position, since, None, resumed, None)
                driver.tx.run("insert_arrival", home, its_lane, priority, keys, *bell)
    return list(moved.items())


def _move(tx: Transaction, found: Sequence[Row], to: int, lane: bytes) -> None:
    """They keep their positions."""
    tx.run_many("move_job", [(to, lane, row[0]) for row in found])
    tx.run_many("move_forced", [(to, row[1]) for row in found])


def _put_sharing(driver: Driver, queue: str, names: Sequence[str]) -> list[Row]:
    number = claims.queue_number(driver.tx, queue)
    driver.tx.run("delete_sharing", number)
    driver.tx.run_many("insert_sharing", [(number, name) for name in names])
    return []


COMPOSED: dict[str, Callable[..., list[Row]]] = {
    "announce_schedules": _announce_schedules,
    "cancel_job": _cancel_job,
    "collect_idle": _collect_idle,
    "collect_shared_gates": _collect_shared_gates,
    "count_beyond": _count_beyond,
    "count_ready": _count_ready,
    "force": _force,
    "forget_jobs": _forget_jobs,
    "keep_schedules": _keep_schedules,
    "lock_declarations": _nothing,
    "lock_entries": _nothing,
    "lock_idle": _lock_idle,
    "lock_shared_limits": _nothing,
    "lock_uniques": _nothing,
    "move_ready_jobs": _move_ready_jobs,
    "move_scheduled_jobs": _move_scheduled_jobs,
    "nudge": _nudge,
    "nudge_sharers": _nudge_sharers,
    "prune": _prune,
    "purge": _purge,
    "put_sharing": _put_sharing,
    "put_worker": _put_worker,
    "replay": _replay,
    "retry_now": _retry_now,
    "select_holders": _select_holders,
    "select_holds": _select_holds,
    "select_shared_holds": _select_shared_holds,
    "select_standstills": _select_standstills,
    "select_traces": _select_traces,
    "select_unique_jobs": _select_unique_jobs,
    "take_turn_at_pruning": _true,
    "take_turn_at_tallying": _most_tallies,
    "take_uniques": _take_uniques,
    "tell_holders": _tell_holders,
    "unfile_jobs": _nothing,
}
