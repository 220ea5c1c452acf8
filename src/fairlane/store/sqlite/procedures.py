"""What procedures ask, answered on SQLite within one transaction.

What PostgreSQL does in one statement and SQLite in several is in `Statements`, by the same name.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar
from uuid import UUID

import msgspec

from fairlane.clock import Instant, SystemClock
from fairlane.policy.overrides import Override
from fairlane.policy.policy import Policy
from fairlane.scheduler.journal import Removed
from fairlane.scheduler.rebuild import Rebuilt
from fairlane.scheduler.resident import Found, ResidentBoard
from fairlane.scheduler.snapshot import Arrival, Ask, Events, FlowRow, Forced, GateRow, KeptPlaces, LaneRow
from fairlane.store.boards import QueueClock, QueueTime
from fairlane.store.migrations import single_statements
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
    Told,
)
from fairlane.store.protocol import FOLD_AT_MOST, RELEASES_AT_MOST
from fairlane.store.rows import decode_keys, no_such_queue
from fairlane.store.sqlite import claims, jobs, rows
from fairlane.store.sqlite.database import Transaction
from fairlane.store.sqlite.shared_limits import Sharing
from fairlane.store.sqlite.statements import Statements

T = TypeVar("T")


class Driver(Statements):
    """Answers a procedure within one transaction, as of one moment."""

    def __init__(self, tx: Transaction, clock: QueueClock, memory: dict[Any, Any]) -> None:
        super().__init__(tx)
        self._clock = clock
        self._memory = memory
        self._boards: dict[str, Board] = {}

    @cached_property
    def time(self) -> QueueTime:
        return self._clock.time()

    def perform(self, procedure: Procedure[T]) -> T:
        found: Any = None
        try:
            while True:
                found = self.answer(procedure.send(found))
        except StopIteration as stop:
            result: T = stop.value
            return result

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
            case Script(sql):
                for statement in single_statements(sql):
                    tx.connection.execute(statement)
            case Enqueue(new):
                return jobs.insert(tx, new, self.time.now)
            case OnBoard(name, action, parameters):
                board = self._boards.setdefault(name, Board(tx, name, self.time.now))
                found = attrgetter(action)(board)
                return found(*parameters) if callable(found) else found
            case Told("now"):
                return self.time.now
            case Told("time"):
                return self.time
            case Told():
                return self._memory
        return None


class Loaded:
    """A queue as a claim would find it; its bells stay where they are."""

    def __init__(self, tx: Transaction, queue: claims.QueueInForce, now: Instant) -> None:
        self._tx = tx
        self._queue = queue
        self.now = now
        self.policy = queue.policy
        self.state = queue.state

    @property
    def expired(self) -> list[Override]:
        return self.policy.overrides.expired(self.now)

    @cached_property
    def board(self) -> ResidentBoard:
        return claims.tail_of(self._tx, self._queue)

    @cached_property
    def arrivals(self) -> list[Arrival]:
        return [rows.arrival(row) for row in self._tx.all("select_arrivals", self._queue.id, FOLD_AT_MOST)]

    def events(self, forced: list[Forced]) -> Events:
        texts = self._tx.all("select_releases", self._queue.id, RELEASES_AT_MOST)
        releases = [bell for _, text in texts for bell in rows.releases(text)]
        return Events(self.now, self.state, self.arrivals, releases, forced, self._queue.applied_at)


class Board:
    """What procedures do with the board of a queue: as `Scheduling` does on PostgreSQL."""

    def __init__(self, tx: Transaction, name: str, now: Instant) -> None:
        self._tx = tx
        self._name = name
        self._now = now

    @property
    def queue(self) -> claims.QueueInForce:
        """Its row as it is by now, or `UnknownQueue`."""
        return known_queue(self._tx, self._name)

    @cached_property
    def number(self) -> int:
        return self.queue.id

    @cached_property
    def sharing(self) -> Sharing:
        return Sharing(self._tx, self.number)

    def load(self) -> Loaded:
        return Loaded(self._tx, self.queue, self._now)

    def in_force(self) -> tuple[Policy, Instant]:
        return self.queue.policy, self._now

    def ask(self, ask: Ask) -> Found:
        return claims.found(self._tx, self.number if ask.is_of_board else 0, ask)

    def forced(self, want: int) -> list[Forced]:
        return claims.forced_jobs(self._tx, self.number, want)

    def kept_places(self, policy: Policy) -> list[KeptPlaces]:
        """With what bells that nobody has folded will say: places given back are still counted, new ones are not."""
        if policy.sequence is None:
            return []
        tx, queue = self._tx, self.queue
        told = [*tx.all("count_kept_places", queue.id), *tx.all("select_unfolded_places", queue.id)]
        places = [KeptPlaces(priority, decode_keys(keys), count) for priority, keys, count in told]
        bells = [bell for (text,) in tx.all("select_unfolded", queue.id) for bell in rows.releases(text) if bell.kept]
        if bells:
            named = claims.tail_of(tx, queue).find(lanes={bell.lane for bell in bells})
            lanes = {lane.id: lane for lane in claims.answer(tx, queue, named).lanes}
            found = [(lanes[bell.lane], bell.kept) for bell in bells if bell.lane in lanes]
            places += [KeptPlaces(lane.priority, lane.keys, -kept) for lane, kept in found]
        return places

    def fold_all(self) -> Loaded:
        return Loaded(self._tx, claims.fold_all(self._tx, self.queue, self._now), self._now)

    def checkpoint(self, loaded: Loaded) -> None:
        claims.checkpoint(self._tx, self.queue, self._now)

    def to_tables(self, loaded: Loaded) -> None:
        claims.to_tables(self._tx, self.queue, self._now)

    def select_all(self) -> tuple[list[FlowRow], list[LaneRow], list[GateRow]]:
        tx, queue = self._tx, self.number
        return (
            [rows.flow(row) for row in tx.all("select_all_flows", queue)],
            [rows.lane(row) for row in tx.all("select_all_lanes", queue)],
            [rows.gate(row) for row in tx.all("select_all_gates", queue)],
        )

    def replace(self, rebuilt: Rebuilt, now: Instant) -> None:
        claims.replace_board(self._tx, self.number, rebuilt, now)

    def put_gates(self, gates: Sequence[GateRow], now: Instant) -> None:
        claims.put_gates(self._tx, self.number, gates, now)

    def note_removed(self, loaded: Loaded, removed: Removed, ready: int, running: int) -> None:
        claims.note_removed(self._tx, self.queue, removed, ready, running)


def known_queue(tx: Transaction, name: str) -> claims.QueueInForce:
    """A queue by its name, or `UnknownQueue`."""
    queue = claims.load_queue(tx, name)
    if queue is None:
        raise no_such_queue(name)
    return queue


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


def perform(tx: Transaction, procedure: Procedure[T]) -> T:
    """Carry out a procedure that needs no more than a transaction."""
    return Driver(tx, QueueClock(SystemClock()), {}).perform(procedure)
