"""What procedures ask, answered on SQLite within one transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import suppress
from functools import cached_property
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.errors import JobNotFound, UnknownQueue
from fairlane.job import State
from fairlane.policy.unique import digest_of
from fairlane.store.boards import QueueClock, QueueTime
from fairlane.store.migrations import single_statements
from fairlane.store.operators import FORCE, PURGE, REPLAY, RETRY
from fairlane.store.procedures import (
    Each,
    Enqueue,
    Many,
    OnBoard,
    Procedure,
    Query,
    Question,
    Rows,
    Script,
    Some,
    StoreValue,
    Whole,
    driven,
)
from fairlane.store.schedules import ORPHANED_AFTER
from fairlane.store.sqlite import claims, jobs, rows
from fairlane.store.sqlite.claims import Scheduling
from fairlane.store.sqlite.database import Row, Transaction
from fairlane.store.sqlite.wakeups import SCHEDULES, WORK, is_listening

T = TypeVar("T")


class Statements:
    """Statements that PostgreSQL carries out at once, and SQLite in several: each is called by its name."""

    def __init__(self, tx: Transaction) -> None:
        self.tx = tx

    def lock_entries(self, *given: object) -> list[Row]:
        """There is one writer at a time, so nothing has to be locked; and ended jobs are found by an index."""
        return []

    lock_declarations = lock_shared_limits = lock_uniques = unfile_jobs = lock_entries

    def take_turn_at_pruning(self, *given: object) -> list[Row]:
        return [(True,)]

    def take_turn_at_adding_up(self, queue: int) -> list[Row]:
        """Added up in one transaction, whatever was asked for: nobody can claim or settle meanwhile."""
        return [(100,)]

    # Wakeups.

    def announce_schedules(self) -> list[Row]:
        self._nudge(self.tx.all("select_schedule_holders"), SCHEDULES)
        return []

    def tell_holders(self, queue: int) -> list[Row]:
        self._nudge(self.tx.all("select_holders"), WORK)
        return []

    def _nudge(self, workers: Sequence[Row], what: bytes) -> None:
        self.tx.nudged |= {UUID(bytes=worker): what for (worker,) in workers}

    def nudge(self, queue: int, count: int, but_not: UUID | None) -> list[Row]:
        self.tx.woken[queue] += count
        return []

    def nudge_sharers(self, queue: int, count: int) -> list[Row]:
        limits = self.tx.all("select_shared_limits", queue)
        self.tx.woken |= dict.fromkeys(
            (other for limit, _ in limits for other, _ in self.tx.all("select_sharers", limit)), count
        )
        return []

    # Claims.

    def adopt(
        self,
        now: Instant,
        job: UUID,
        lease: UUID,
        own: UUID,
        worker: UUID,
        name: str,
        duration: int,
        tasks: Sequence[str],
    ) -> list[Row]:
        tx = self.tx
        found = tx.one("select_adoptable", job.bytes, lease.bytes, own.bytes)
        if found is None or found[1] not in tasks:
            return []
        *columns, position, under = found
        if under == own.bytes:
            tx.run("renew_lease", now + duration, now, own.bytes)
        else:
            tx.run("insert_lease", own.bytes, worker.bytes, now + duration, now, 1, rows.encode([position]))
            tx.run("adopt_job", own.bytes, name, position)
            if tx.value("drop_claims", 1, lease.bytes) == 0:
                tx.run("delete_lease", lease.bytes)
                tx.run("delete_cancellations", lease.bytes)
        return [(*columns, now, tx.value("select_time"))]

    # Workers and their schedules.

    def keep_schedules(
        self, now: Instant, names: Sequence[str], digests: Sequence[bytes], worker: UUID | None
    ) -> list[Row]:
        self.tx.run("forget_schedule_holders", now - ORPHANED_AFTER)
        if worker is not None:
            self.tx.run("put_schedule_holder", worker.bytes, now)
        self.tx.run_many("keep_schedule", [(now, *each) for each in zip(names, digests, strict=True)])
        return []

    def put_worker(self, now: Instant, worker: UUID, said: str, kept_for: Instant) -> list[Row]:
        self.tx.run("forget_workers", now - kept_for)
        self.tx.run("put_worker", worker.bytes, now, said)
        return []

    # What operators do with jobs.

    def select_unique_jobs(self, given: Sequence[UUID]) -> list[Row]:
        asked = ((job, self.tx.one("select_unique_job", job.bytes)) for job in sorted(given))
        return [(job, row[0], row[1], digest_of(row[2])) for job, row in asked if row is not None]

    def select_holders(self, keys: Sequence[bytes], now: Instant) -> list[Row]:
        return [(now, key, *(self.tx.one("select_holder", key) or [None] * 6)) for key in keys]

    def take_uniques(
        self,
        keys: Sequence[bytes],
        owners: Sequence[UUID],
        digests: Sequence[bytes],
        untils: Sequence[int],
        expire: Sequence[Instant | None],
        is_first: bool,
    ) -> list[Row]:
        taken = zip(keys, owners, digests, untils, expire, strict=True)
        self.tx.run_many(
            "take_unique", [(key, job.bytes, digest, int(until), at) for key, job, digest, until, at in taken]
        )
        return []

    def lock_idle(self, given: Sequence[UUID]) -> list[Row]:
        return [(job,) for job in given]

    def cancel_job(self, job: UUID, now: Instant, only_waiting: bool, reason: str | None) -> list[Row]:
        with suppress(JobNotFound):
            return [jobs.cancel(self.tx, job, now, only_waiting=only_waiting, reason=reason)]
        return []

    def replay(self, now: Instant, given: Sequence[UUID], delay: int | None) -> list[Row]:
        tx, found = self.tx, _found(self.tx, given)
        # In the order of their enqueue, which their ids keep.
        back = [(job, row) for job, row in sorted(found.items()) if REPLAY.applies_to(State(row[1]))]
        due_at = now + delay if delay is not None and delay > 0 else None
        state = State.READY if due_at is None else State.SCHEDULED
        place: int = tx.value("take_positions", len(back)) - len(back)
        events: dict[bytes, list[Any]] = {}
        for job, row in back:
            place += 1
            position, _, queue, lane, priority, lane_keys, numbers, given_by, *attempt = row
            if attempt[1] is not None:
                tx.run("insert_attempt", job.bytes, *attempt)
            tx.run("replay_job", place, int(state), now, due_at, position)
            event = events.setdefault(lane, [queue, lane, priority, lane_keys, 0, place, now, None, 0, None])
            if given_by is not None and given_by > (event[9] or 0):
                event[7], event[9] = numbers, given_by
            event[4] += 1
        if state is State.READY:
            tx.run_many("insert_arrival", list(events.values()))
        for queue, _, _, _, count, *_ in events.values():
            # One to hold the timer is enough for those that are due later.
            tx.woken[queue] = tx.woken[queue] + count if state is State.READY else max(1, tx.woken[queue])
        return _states(found)

    def purge(self, given: Sequence[UUID]) -> list[Row]:
        found = _found(self.tx, given)
        gone = [row[0] for row in found.values() if PURGE.applies_to(State(row[1]))]
        self.tx.run_many("delete_job", [(position,) for position in gone])
        return _states(found)

    def retry_now(self, now: Instant, given: Sequence[UUID]) -> list[Row]:
        found = _found(self.tx, given)
        hurried = [row for row in found.values() if RETRY.applies_to(State(row[1]))]
        self.tx.run_many("hurry_job", [(now, row[0]) for row in hurried])
        self.tx.woken.update(row[2] for row in hurried)
        return _states(found)

    def force(self, now: Instant, given: Sequence[UUID]) -> list[Row]:
        found = _found(self.tx, given)
        for job, (position, state, queue, *_) in found.items():
            if FORCE.applies_to(State(state)):
                if state == State.SCHEDULED:
                    self.tx.run("hurry_job", now, position)
                self.tx.run("force_job", job.bytes, queue)
                self.tx.woken[queue] += 1
        return _states(found)

    # Upkeep.

    def prune(self, is_dead: bool, until: Instant, limit: int) -> list[Row]:
        states = (State.DEAD,) if is_dead else (State.DONE, State.CANCELLED)
        ended = (self.tx.all("select_finished", int(state), until, limit) for state in states)
        found = list(islice(merge(*ended), limit))
        self.tx.run_many("delete_job", [(position,) for _, position, _ in found])
        return [([UUID(bytes=job) for _, _, job in found], len(found))]

    def count_beyond(self, is_dead: bool, keep: int, limit: int) -> list[Row]:
        states = (State.DEAD, State.DEAD) if is_dead else (State.DONE, State.CANCELLED)
        return self.tx.all("count_beyond", *map(int, states), keep, limit)

    def forget_jobs(self, given: Sequence[UUID]) -> list[Row]:
        self.tx.run_many("delete_attempts", [(job.bytes,) for job in given])
        jobs.forget(self.tx, [job.bytes for job in given])
        return []

    def collect_idle(
        self,
        queue: int,
        lanes_from: bytes,
        flows_from: bytes,
        gates_from: bytes,
        limit: int,
        now: Instant,
        values_last: int,
    ) -> list[Row]:
        tx = self.tx
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

    def collect_shared_gates(self, queue: int, after: bytes, limit: int, now: Instant) -> list[Row]:
        seen = self.tx.all("walk_idle_shared_gates", after, queue, limit, now)
        idle = [row[:1] for row in seen if row[-1]]
        self.tx.run_many("delete_shared_gate", idle)
        return [(seen[-1][0] if seen else None, len(seen), len(idle))]

    def select_holds(self, queue: int) -> list[Row]:
        ended: Counter[bytes] = Counter()
        for (text,) in self.tx.all("select_unfolded", queue):
            for event in rows.releases(text):
                ended[event.lane] += event.ended + event.unstarted
        running = self.tx.all("select_holds", queue)
        holds = [(lane, priority, keys, count + ended.pop(lane, 0)) for lane, priority, keys, count in running]
        return [*holds, *((lane, None, None, count) for lane, count in ended.items())]

    def select_shared_holds(self, queue: int) -> list[Row]:
        running = self.tx.all("select_shared_holders")
        holds = [(gate, name, 1) for name, shared in running for gate in rows.split_shared(shared)]
        return [*holds, *self.tx.all("select_unfolded_shared", queue)]

    # What is looked at.

    def count_ready(self, queue: int, gates: Sequence[bytes], most: int) -> list[Row]:
        tx = self.tx
        found = [
            (gate, row[3], None, None) for gate in gates if (row := tx.one("select_gate", queue, gate)) is not None
        ]
        events = tx.all("select_arrivals", queue, most)
        return [*found, *((None, count, priority, keys) for _, _, priority, keys, count, *_ in events)]

    def select_traces(self, queue: int, flows: Sequence[bytes], gates: Sequence[bytes]) -> list[Row]:
        tx = self.tx
        listeners = sum(is_listening(UUID(bytes=worker)) for (worker,) in tx.all("select_waiters", queue))
        return [
            (
                [each for each in flows if tx.value("has_flow", queue, each)],
                [each for each in gates if tx.value("has_gate", queue, each)],
                listeners,
            )
        ]

    def select_standstills(
        self, names: Sequence[str], before: Instant, most: int, flows: Sequence[bytes], gates: Sequence[bytes]
    ) -> list[Row]:
        found: list[Row] = []
        for name in names:
            with suppress(UnknownQueue):
                queue = claims.load_queue(self.tx, name)
                cursor = (queue.state.cursor, queue.state.cursor_tie)
                behind = self.tx.some("select_flows_behind", most, flows, queue.id, *cursor)
                overdue = self.tx.some("select_overdue_gates", most, gates, queue.id, before)
                found += [(name, *rest) for _, *rest in (*behind, *overdue)]
        return found

    def count_kept_places(self, queue: int) -> list[Row]:
        """With what events that nobody has folded will say: places given back are still counted, new ones are not."""
        tx = self.tx
        found = [*tx.all("select_places_kept", queue), *tx.all("select_unfolded_places", queue)]
        given_back = [event for (text,) in tx.all("select_unfolded", queue) for event in rows.releases(text)]
        if any(event.kept for event in given_back):
            tail = claims.Scheduling(tx, tx.value("select_queue_name", queue), 0, is_looking=True)
            named = tail.load().board.find(lanes={event.lane for event in given_back if event.kept})
            lanes = {lane.id: lane for lane in driven(named, tail.ask).lanes}
            known = [(lanes[event.lane], event.kept) for event in given_back if event.kept and event.lane in lanes]
            found += [(lane.priority, rows.encode(lane.keys), -kept) for lane, kept in known]
        return found

    # Partitions, and limits that queues share.

    def move_ready_jobs(
        self,
        lanes: Sequence[bytes],
        floors: Sequence[int],
        most: Sequence[int],
        queues: Sequence[int],
        joined: Sequence[bytes],
    ) -> list[Row]:
        moved: Counter[int] = Counter()
        for lane, floor, limit, to, new_lane in zip(lanes, floors, most, queues, joined, strict=True):
            found = self.tx.all("select_ready_of_lane", lane, floor, limit)
            if found:
                *_, queue, priority, keys = found[0]
                since = min(row[2] for row in found)
                given_by, given = max(((row[4], row[3]) for row in found if row[3] is not None), default=(None, None))
                _move(self.tx, found, to, new_lane)
                event = (len(found), found[0][0], since, given, 0, given_by)
                self.tx.run(
                    "insert_arrival", queue, lane, priority, keys, -len(found), found[0][0], since, None, 0, None
                )
                self.tx.run("insert_arrival", to, new_lane, priority, keys, *event)
                moved[to] += len(found)
        return list(moved.items())

    def move_scheduled_jobs(
        self, queue: int, lanes: Sequence[bytes], queues: Sequence[int], joined: Sequence[bytes], most: int
    ) -> list[Row]:
        """Whoever keeps a place in a sequence gives it back here and takes it there."""
        moved: Counter[int] = Counter()
        for lane, to, new_lane in zip(lanes, queues, joined, strict=True):
            found = self.tx.all("select_scheduled_of_lane", queue, lane, most - moved.total())
            _move(self.tx, found, to, new_lane)
            moved[to] += len(found)
            if kept := sum(row[3] for row in found):
                position, _, since, _, priority, keys = found[0]
                for home, its_lane, resumed in ((queue, lane, kept), (to, new_lane, -kept)):
                    event = (0, position, since, None, resumed, None)
                    self.tx.run("insert_arrival", home, its_lane, priority, keys, *event)
        return list(moved.items())

    def put_sharing(self, queue: str, names: Sequence[str]) -> list[Row]:
        number = self.tx.value("select_queue_id", queue)
        self.tx.run("delete_sharing", number)
        self.tx.run_many("insert_sharing", [(number, name) for name in names])
        return []


class Driver(Statements):
    """Answers a procedure within one transaction, as of one moment."""

    def __init__(self, tx: Transaction, clock: QueueClock, memory: dict[Any, Any], *, is_locked: bool = False) -> None:
        super().__init__(tx)
        self._clock = clock
        self._memory = memory
        self._is_looking = not is_locked
        self._boards: dict[str, Scheduling] = {}

    @cached_property
    def time(self) -> QueueTime:
        return self._clock.time()

    def perform(self, procedure: Procedure[T]) -> T:
        return driven(procedure, self.answer)

    def answer(self, asked: Question) -> Any:
        tx = self.tx
        match asked:
            case Query(name, parameters) if (composed := getattr(Statements, name, None)) is not None:
                return composed(self, *parameters)
            case Query(name, parameters):
                return tx.answer(name, map(_bound, parameters))
            case Each(name, rows_given, _):
                return [row for each in rows_given for row in tx.answer(name, map(_bound, each))]
            case Some(name, parameters, most, but_not):
                return tx.some(name, most, but_not, *map(_bound, parameters))
            case Many(name, queue, written):
                return tx.run_many(name, [(queue, *row) for row in written])
            case Whole(name, written):
                return tx.run_many(name, written)
            case Script(sql):
                for statement in single_statements(sql):
                    tx.connection.execute(statement)
            case Enqueue(new):
                return jobs.insert(tx, new, self.time.now)
            case OnBoard(name, action, parameters):
                if name not in self._boards:
                    self._boards[name] = Scheduling(tx, name, self.time.now, is_looking=self._is_looking)
                found = attrgetter(action)(self._boards[name])
                found = found(*parameters) if callable(found) else found
                return self.perform(found) if isinstance(found, Generator) else found
            case StoreValue("now"):
                return self.time.now
            case StoreValue("time"):
                return self.time
            case StoreValue():
                return self._memory
        return None


def _bound(value: Any) -> Any:
    """A parameter as this database takes it: ids are bytes, several one after the other; other lists are JSON."""
    if isinstance(value, UUID):
        return value.bytes
    if isinstance(value, Rows):
        return msgspec.json.encode(value.rows).decode()
    if not isinstance(value, list):
        return value
    if value and isinstance(value[0], UUID):
        return b"".join([each.bytes for each in value])
    if value and isinstance(value[0], bytes):
        return b"".join(value)
    return msgspec.json.encode(value).decode()


def _found(tx: Transaction, given: Sequence[UUID]) -> dict[UUID, Row]:
    looked_up = ((job, tx.one("select_ended", job.bytes)) for job in given)
    return {job: row for job, row in looked_up if row is not None}


def _states(found: dict[UUID, Row]) -> list[Row]:
    """Each job and its state, and that nobody else is at it."""
    return [(job, row[1], False) for job, row in found.items()]


def _move(tx: Transaction, found: Sequence[Row], to: int, lane: bytes) -> None:
    """They keep their positions."""
    tx.run_many("move_job", [(to, lane, row[0]) for row in found])
    tx.run_many("move_forced", [(to, row[1]) for row in found])
