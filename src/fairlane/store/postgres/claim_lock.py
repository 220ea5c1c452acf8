"""One hold of a queue's claim lock: read what has happened, ask the tables what memory lacks, write what is decided.

Where many workers want one queue's lock, whoever holds it claims for all who wait: sixty-four workers with four slots
each would take it one after the other, for four jobs a time, and hold it over four round trips each while the others
keep the processors busy. Asking in public (see `fairlane.enter`) costs whoever is alone one round trip more, so it is
done only once the wait for the lock was longer than the work under it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID, uuid4

import asyncpg
import msgspec
from msgspec.structs import replace

from fairlane.clock import Instant
from fairlane.errors import StoreUnavailable
from fairlane.job import Claim
from fairlane.policy.overrides import Override, Overrides
from fairlane.policy.policy import Policy
from fairlane.scheduler.journal import (
    FORMAT,
    Delta,
    Mark,
    Removed,
    decode_delta,
    encode_delta,
    encode_removed,
    encode_tally,
)
from fairlane.scheduler.rebuild import Rebuilt
from fairlane.scheduler.resident import Ask, Events, Found, ResidentBoard
from fairlane.scheduler.snapshot import (
    Arrival,
    FlowRow,
    Forced,
    GateRow,
    Head,
    KeptPlaces,
    LaneRow,
    Plan,
    QueueRow,
)
from fairlane.store.boards import MOST_WHOLE, UNKNOWN, Boards, Expected, Raced
from fairlane.store.postgres import rows
from fairlane.store.postgres.connections import STATEMENTS, Connection
from fairlane.store.postgres.shared_limits import Sharing
from fairlane.store.protocol import (
    FOLD_AT_MOST,
    LANES_PER_SCANNED_FLOW,
    PROMOTE_AT_MOST,
    RELEASES_AT_MOST,
    WorkerIdentity,
)
from fairlane.store.rows import decode_given, decode_keys, decode_overrides, journal_too_new

if TYPE_CHECKING:
    from fairlane.store.postgres.connections import Connection

T = TypeVar("T")

IS_DUE, HAS_FORCED = 1, 2
"""What a claim has to see to besides: scheduled jobs whose time has come, jobs that an operator wants to start."""
MOST_POLICIES = 1_000
"""Policies that are kept decoded."""
RACED, NEWER = "FL020", "FL021"
"""What `write_claim` and `open_claim` refuse with."""
EVERYTHING = 2**31 - 1

_policies: dict[str, Policy] = {}


class QueueHandle(msgspec.Struct, frozen=True):
    """A queue's number, and how a transaction that holds its claim lock begins."""

    name: str
    id: int
    take_lock: str
    take_lock_unflushed: str
    take_over: str
    take_over_unflushed: str


class Loaded(msgspec.Struct, frozen=True):
    """What a claim starts from."""

    opened: rows.Opened
    board: ResidentBoard
    policy: Policy
    """As it is stored: with overrides whose time has come."""
    arrivals: list[Arrival]
    forced: list[Forced]
    all_folded: bool

    @property
    def now(self) -> Instant:
        return self.opened.now

    @property
    def expired(self) -> list[Override]:
        overrides = self.policy.overrides
        return overrides.expired(self.now) if overrides.expires_at is not None else []

    @property
    def state(self) -> QueueRow:
        return self.opened.state

    def events(self, forced: list[Forced]) -> Events:
        opened = self.opened
        return Events(opened.now, opened.state, self.arrivals, opened.releases, forced, opened.policy_since)

    @property
    def needs_transaction(self) -> bool:
        """More than one statement has to be written together."""
        return bool(self.opened.attention or self.policy.shared_limits)


class Ending(msgspec.Struct, frozen=True):
    """How a claim leaves whoever made it: waiting for work with this ear, or (without one) not; and whom it wakes."""

    waiter: UUID | None = None
    ear: int | None = None
    nudges: int = 0


class Scheduling:
    """One hold of a queue's claim lock, in a transaction; or (`is_of_session`) in none until it is written."""

    def __init__(
        self,
        connection: Connection,
        queue: QueueHandle,
        now: Instant | None,
        boards: Boards | None = None,
        *,
        is_of_session: bool = False,
        is_durable: bool = True,
    ) -> None:
        self.connection = connection
        self.queue = queue
        self.time = now
        self._is_looking = boards is None
        self._boards = boards or Boards()
        self._is_of_session = is_of_session
        self._is_durable = is_durable
        self.sharing = Sharing(connection, queue.id)
        self.lease_due: Instant | None = None
        """When the next lease ends, as far as a write that started nothing has seen."""

    async def load(
        self,
        want: int,
        expected: Expected = UNKNOWN,
        *,
        locks: bool = False,
        me: UUID | None = None,
        others: Sequence[QueueHandle] = (),
    ) -> Loaded:
        """Take the lock, and read what has happened; scheduled jobs that are due are not promoted yet.

        Where the lock is taken, `queue` is the first of the others whose lock is free from then on.
        """
        queues = [self.queue.id, *(other.id for other in others)]
        boards = [self._boards.get(queue) for queue in queues]
        marks = [None if board is None else board.mark for board in boards]
        seqs, tokens = [-1 if mark is None else mark.seq for mark in marks], [mark and mark.token for mark in marks]
        bounds = (FORMAT, RELEASES_AT_MOST, FOLD_AT_MOST)
        try:
            found = await self.connection.fetch(
                STATEMENTS["open_claim"], queues, locks, self.time, *expected, seqs, tokens, *bounds, me
            )
        except asyncpg.PostgresError as error:
            if error.sqlstate == NEWER:
                raise journal_too_new(self.queue.name, int(str(error))) from error
            raise
        opened = rows.Opened(found)
        if others:
            left = {queue for queue, _, _ in opened.others}
            self.queue = next(queue for queue in (self.queue, *others) if queue.id not in left)
            self.sharing = Sharing(self.connection, self.queue.id)
        policy = await self.policy_of(opened.digest)
        board = await self._board(opened, policy)
        return Loaded(opened, board, policy, opened.arrivals, [], opened.has_all)

    async def _board(self, opened: rows.Opened, policy: Policy) -> ResidentBoard:
        """The board as it is now: what memory knows and what has changed since, or the tables and the journal."""
        board = self._boards.get(self.queue.id)
        # A crash may lose a checkpoint and not the changes before it: then we know too little of what is unwritten.
        is_known = (
            board is not None
            and not opened.forgets
            and opened.stored >= board.stored
            and (board.policy is policy or bool(policy.shared_limits))
        )
        if board is None or not is_known:
            self._boards.drop(self.queue.id)
            # It may be new because a place was wrong: then the jobs are looked up.
            opened.arrivals = [replace(bell, ref=None) if bell.ref else bell for bell in opened.arrivals]
            if not opened.forgets:
                opened = await self._reopened(opened)
            board = await self._read_board(policy)
        for mark, delta in opened.changes:
            board.apply(decode_delta(delta), mark)
        board.mark = opened.mark
        board.wrote(opened.stored)
        self._boards.put(self.queue.id, board)
        return board

    async def _reopened(self, opened: rows.Opened) -> rows.Opened:
        """All changes that the tables may not hold."""
        again = rows.Opened([])
        found = await self.connection.fetch(STATEMENTS["select_journal"], self.queue.id)
        again.changes = [(Mark(seq, token), delta) for seq, token, delta in found]
        again.mark, again.stored = opened.mark, opened.stored
        return again

    async def _read_board(self, policy: Policy) -> ResidentBoard:
        if self._is_looking:
            return ResidentBoard(policy)  # who only looks asks for little
        found = rows.found(
            await self.connection.fetch(STATEMENTS["select_board"], self.queue.id, MOST_WHOLE + 1), Ask()
        )
        is_whole = max(len(found.flows), len(found.lanes), len(found.gates)) <= MOST_WHOLE
        board = ResidentBoard(policy, is_whole=is_whole)
        if is_whole:
            board.adopt(found, Ask())
        return board

    async def begin(self) -> None:
        """From here on, what is written is written together: the session's lock becomes that of a transaction."""
        if self._is_of_session:
            handle = self.queue
            await self.connection.execute(handle.take_over if self._is_durable else handle.take_over_unflushed)
            self._is_of_session = False

    @property
    def is_in_transaction(self) -> bool:
        return not self._is_of_session

    async def see_to(self, loaded: Loaded, want: int) -> Loaded:
        """Promote what is due, and find what is to be forced. In a transaction."""
        attention, arrivals, all_folded = loaded.opened.attention, loaded.arrivals, loaded.all_folded
        if attention & IS_DUE:
            promoted = await self._promote(loaded.now, loaded.policy)
            all_folded = all_folded and sum(bell.count for bell in promoted) < PROMOTE_AT_MOST
            arrivals = arrivals + promoted
        forced: list[Forced] = []
        if attention & HAS_FORCED and want > 0:
            forced = await self.forced(want)
        return replace(loaded, arrivals=arrivals, forced=forced, all_folded=all_folded)

    async def forced(self, want: int) -> list[Forced]:
        """Jobs that an operator wants to start next."""
        found = await self.connection.fetch(STATEMENTS["select_forced"], self.queue.id, want)
        return [Forced(lane, Head(*head)) for lane, *head in found]

    async def plan(
        self, loaded: Loaded, want: int, *, lag: int = 0, listens: bool = False, ahead: int | None = None
    ) -> Plan:
        """Fold what has happened and start up to `want` jobs, on the board in memory: it is written, or forgotten."""
        board, events = loaded.board, loaded.events(loaded.forced)
        # Until it is written, what the plan leaves of the board is nobody's.
        board.mark = None
        try:
            if loaded.policy.shared_limits:
                policy, events = await self.sharing.load(loaded.policy, events, self.time)
                if board.policy is not policy:
                    board.rebind(policy)
            return await self.answer(board.claim(events, want, lag=lag, listens=listens, ahead=ahead))
        except BaseException:
            self._boards.drop(self.queue.id)
            raise

    async def answer(self, asking: Generator[Ask, Found, T]) -> T:
        """Give whoever asks what the tables know, until it has come to a result."""
        try:
            ask = next(asking)
            while True:
                ask = asking.send(await self.ask(ask))
        except StopIteration as stop:
            result: T = stop.value
            return result

    async def ask(self, ask: Ask) -> Found:
        """What the tables hold of it."""
        shared = await self.sharing.select(ask.shared)
        if not ask.is_of_board:
            heads: dict[bytes, list[Head]] = {lane: [] for lane, _, _ in ask.heads}
            asked = list(heads.values())
            for nth, *head in await self.connection.fetch(STATEMENTS["select_heads"], ask.heads) if ask.heads else ():
                asked[nth - 1].append(Head(*head))
            return Found(heads=heads, shared=shared)
        found = await self.connection.fetch(
            STATEMENTS["ask_tables"],
            self.queue.id,
            ask.flows,
            ask.lanes,
            ask.gates,
            [flow for flow, _ in ask.ready],
            [count for _, count in ask.ready],
            [gate for gate, _ in ask.parked],
            [count for _, count in ask.parked],
            *(ask.scan or (0.0, 0, 0)),
            *(ask.alarms or (0, 0)),
            ask.heads,
            *ask.but_not,
            LANES_PER_SCANNED_FLOW,
        )
        return replace(rows.found(found, ask), shared=shared)

    async def write(
        self, loaded: Loaded, plan: Plan, holders: Sequence[Holder] = (), ending: Ending | None = None
    ) -> list[Claim]:
        """Start the jobs of a plan and note what it changed; `Raced` if a job is not ready any more.

        The jobs are dealt to the holders. Returned is what the first of them gets. The lock of a session ends with it.
        """
        try:
            return await self._write(loaded, plan, holders, ending or Ending())
        except BaseException:
            self._boards.drop(self.queue.id)
            raise

    async def _write(self, loaded: Loaded, plan: Plan, holders: Sequence[Holder], ending: Ending) -> list[Claim]:
        opened, now, state = loaded.opened, loaded.now, plan.queue
        self.sharing.learn_gates(plan.shared)
        mark, delta = None, None
        if plan.lanes or plan.flows or plan.gates or loaded.arrivals or opened.releases or state != opened.state:
            mark = Mark(opened.mark.seq + 1, uuid4())
            delta = encode_delta(plan)
            loaded.board.note(plan, mark)
            self._boards.noted(self.queue.id, len(delta))
        else:
            loaded.board.mark = opened.mark
        try:
            started = await self.connection.fetch(
                STATEMENTS["write_claim"],
                self.queue.id,
                self._is_of_session,
                self._is_of_session and not self._is_durable,
                now,
                [state.vtime, state.cursor, state.cost],
                [state.cursor_tie, state.tie],
                list(plan.moves),
                *opened.bounds,
                None if mark is None else mark.seq,
                None if mark is None else mark.token,
                delta,
                [
                    (start.head.ref, start.head.position, start.charge, holder, *self.sharing.passed(start), start.at)
                    for start, holder in zip(plan.starts, deal(len(plan.starts), holders), strict=True)
                ],
                [(holder.lease, holder.worker, holder.name, now + holder.duration) for holder in holders],
                self._backlogs(plan),
                None if plan.tally is None else encode_tally(plan.tally),
                ending.waiter,
                ending.ear,
                ending.nudges,
            )
        except asyncpg.PostgresError as error:
            if error.sqlstate == RACED:
                raise Raced from error
            raise
        self._is_of_session = False
        await self.sharing.write(plan)
        if not plan.starts:
            self.lease_due = started[0]["enqueued_at"]
            return []
        by_position = {row[0]: row[1:] for row in started if row[0] is not None}
        own, name = plan.starts[: len(by_position)], self.queue.name
        return [rows.claim_of(by_position[start.head.position], holders[0].lease, name, start.at) for start in own]

    def _backlogs(self, plan: Plan) -> list[rows.Row]:
        """Gates that producers read: the tables have them as they are."""
        return [
            rows.gate_parameters(gate.row(), self.queue.id) for gate in plan.gates if gate.bound.limit.is_of_producers
        ]

    async def leave(self) -> None:
        """Let the lock go with nothing written."""
        if self._is_of_session:
            await self.connection.fetchrow(STATEMENTS["leave_claim"], self.queue.id)
            self._is_of_session = False

    async def fold_all(self) -> Loaded:
        """Fold everything that has happened, start nothing. In a transaction; what is returned is of the end of it."""
        while True:
            loaded = await self.see_to(await self.load(0), 0)
            await self.write(loaded, await self.plan(loaded, 0))
            if loaded.all_folded:
                return await self.load(0)

    # The tables. In a transaction.

    async def checkpoint(self, loaded: Loaded) -> None:
        """Write what the tables do not hold."""
        await self._put(loaded.board.changed_rows(), loaded.now)
        await self.connection.execute(STATEMENTS["store_journal"], self.queue.id, loaded.opened.mark.seq)
        loaded.board.wrote(loaded.opened.mark.seq)
        self._boards.written(self.queue.id)

    async def to_tables(self, loaded: Loaded) -> None:
        """Write what the tables do not hold, and let everybody forget the rest: they are going to be worked on."""
        await self._put(loaded.board.changed_rows(), loaded.now)
        await self.connection.execute(STATEMENTS["seal_journal"], self.queue.id)
        self._boards.drop(self.queue.id)

    async def select_all(self) -> tuple[list[FlowRow], list[LaneRow], list[GateRow]]:
        """The whole board, once the tables hold it."""
        found = rows.found(await self.connection.fetch(STATEMENTS["select_board"], self.queue.id, EVERYTHING), Ask())
        return found.flows, found.lanes, found.gates

    async def replace(self, rebuilt: Rebuilt, now: Instant) -> None:
        """Put another board in the place of the one that the tables hold."""
        state = rebuilt.queue
        self._boards.drop(self.queue.id)
        await self.connection.execute(STATEMENTS["clear_board"], self.queue.id)
        await self._put(Delta(rebuilt.flows, rebuilt.lanes, rebuilt.gates), now)
        await self.connection.execute(
            STATEMENTS["replace_state"],
            self.queue.id,
            [state.vtime, state.cursor, state.cost],
            [state.cursor_tie, state.tie],
            list(rebuilt.totals),
        )
        if rebuilt.tally is not None:
            await self.connection.execute(STATEMENTS["note_told"], self.queue.id, encode_tally(rebuilt.tally))

    async def put_gates(self, gates: Sequence[GateRow], now: Instant) -> None:
        """Store gates that the tables held otherwise."""
        self._boards.drop(self.queue.id)
        await self._put(Delta(gates=list(gates)), now)

    async def _put(self, delta: Delta, now: Instant) -> None:
        queue = self.queue.id
        if delta.flows or delta.lanes or delta.gates:
            await self.connection.execute(
                STATEMENTS["put_pieces"],
                [rows.flow_parameters(row, queue, now) for row in delta.flows],
                [rows.lane_parameters(row, queue) for row in delta.lanes],
                [rows.gate_parameters(row, queue) for row in delta.gates],
            )

    async def note_removed(self, loaded: Loaded, removed: Removed, ready: int, running: int) -> None:
        """Collection has removed these from the tables: whoever holds them in memory lets them go."""
        mark, delta = Mark(loaded.opened.mark.seq + 1, uuid4()), encode_removed(removed)
        await self.connection.execute(
            STATEMENTS["note_removed"], self.queue.id, mark.seq, mark.token, delta, ready, running
        )
        loaded.board.apply(Delta(removed=removed), mark)
        self._boards.noted(self.queue.id, len(delta))

    async def in_force(self) -> tuple[Policy, Instant]:
        """The queue's policy with what operators have changed, and the time."""
        row = await self.connection.fetchrow(STATEMENTS["select_in_force"], self.queue.id, self.time)
        assert row is not None
        return await self.policy_of(row["digest"]), row["now"]

    async def kept_places(self, policy: Policy) -> list[KeptPlaces]:
        """Where jobs keep their place in a sequence, as far as bells have been folded."""
        if policy.sequence is None:
            return []
        found = await self.connection.fetch(STATEMENTS["count_kept_places"], self.queue.id)
        return [KeptPlaces(priority, decode_keys(keys), count) for priority, keys, count in found]

    async def _promote(self, now: Instant, policy: Policy) -> list[Arrival]:
        in_sequence = policy.sequence is not None
        found = await self.connection.fetch(STATEMENTS["promote"], self.queue.id, now, PROMOTE_AT_MOST, in_sequence)
        return [
            Arrival(lane, priority, decode_keys(keys), count, floor, since, decode_given(given), resumed, given_by)
            for lane, priority, keys, count, floor, since, given, resumed, given_by in found
        ]

    async def policy_of(self, digest: str) -> Policy:
        """A policy in force, by what the queue's row says of it."""
        key = f"{self.queue.name}/{digest}"
        if key not in _policies:
            row = await self.connection.fetchrow(STATEMENTS["select_policy"], self.queue.name)
            assert row is not None
            if len(_policies) >= MOST_POLICIES:
                _policies.clear()
            overrides = await select_overrides(self.connection, self.queue.id)
            _policies[key] = Policy.decode(row["policy"]).overridden(overrides)
        return _policies[key]


async def select_overrides(connection: Connection, queue: int) -> Overrides:
    """What operators have changed."""
    return decode_overrides(text for (text,) in await connection.fetch(STATEMENTS["select_overrides"], queue))


SLOTS_AT_MOST = 1_000
"""How many jobs one claim starts for all its holders, and the most that a request can name."""


NUMBERS = 1 << 22


SMOOTHING = 0.2


RISING = 1.1
"""By how much the quickest load is taken to be slower with every claim that was not as quick."""


GRANTED = 11
"""Columns of `fairlane.granted`."""


class Holder(msgspec.Struct, frozen=True):
    """Somebody for whom jobs are claimed: its lease, and how many it asked for."""

    lease: UUID
    asked: int
    worker: UUID
    name: str
    duration: int
    """How long its lease lasts, in microseconds."""


class Entry(msgspec.Struct, frozen=True):
    """What came of entering: claims that somebody made for us, or the lock and the requests of those who wait."""

    lease: UUID
    claims: list[Claim]
    requests: list[Holder]


def deal(starts: int, holders: Sequence[Holder]) -> list[int]:
    """Who gets which start, counted from 1. Each is filled before the next: as few as possible are left short."""
    if len(holders) == 1:
        return [1] * starts  # what waits for its instant needs no slot yet
    dealt: list[int] = []
    for nth, holder in enumerate(holders, 1):
        dealt += [nth] * min(holder.asked, starts - len(dealt))
    return dealt


class Crowding:
    """Whether a queue's lock is sought after, by what our own claims have seen."""

    def __init__(self) -> None:
        self.is_dense = False
        self.is_limited = True
        """Its jobs wait for limits, as far as we know."""
        self._held = 0.0
        self._quickest = math.inf

    def alone(self, loading: float, held: float) -> None:
        """A claim took so long to get the lock and to load, then held it for so long; both in seconds."""
        self._quickest = min(loading, self._quickest * RISING)
        self._held += (held - self._held) * SMOOTHING
        self.is_dense = loading - self._quickest > self._held

    def led(self, requests: int) -> None:
        """A claim that asked in public came to lead, and found so many who waited."""
        self.is_dense = requests > 0


class Seat:
    """The place of one session among those who ask in public. It goes with the session: its base never changes."""

    def __init__(self) -> None:
        self._base = uuid4()
        self._number = 0
        self._registered: tuple[WorkerIdentity, int] | None = None

    @property
    def is_used_up(self) -> bool:
        """Every number has been used; a session of its own begins afresh."""
        return self._number + 1 >= NUMBERS

    async def enter(
        self,
        connection: Connection,
        queue: int,
        name: str,
        asked: int,
        worker: WorkerIdentity,
        duration: int,
        passenger: Passenger | None = None,
    ) -> Entry:
        """Ask for jobs; come back with them, or with the queue's lock. The passenger is settled first."""
        await self._register(connection, worker, duration)
        self._number += 1
        lease = _lease(self._base, self._number)
        request = queue << 32 | self._number << 10 | min(asked, SLOTS_AT_MOST)
        if passenger is not None:
            requests, grants = await _settle_and_enter(connection, passenger, queue, request, lease)
            return Entry(lease, [_claim(row, lease, name) for row in grants], [Holder(*row) for row in requests])
        found = await connection.fetch(STATEMENTS["enter"], queue, request, lease)
        if found and found[0]["id"] is not None:
            return Entry(lease, [_claim(row, lease, name) for row in found], [])
        return Entry(lease, [], list(_requests(found)))

    async def _register(self, connection: Connection, worker: WorkerIdentity, duration: int) -> None:
        """Write down to whom this session belongs."""
        if self._registered != (worker, duration):
            await connection.execute(STATEMENTS["register_claimer"], self._base, worker.id, worker.name, duration)
            self._registered = (worker, duration)


async def _settle_and_enter(
    connection: Connection, passenger: Passenger, queue: int, request: int, lease: UUID
) -> tuple[Sequence[Any], Sequence[Any]]:
    done = passenger.done
    row = await connection.fetchrow(
        STATEMENTS["settle_and_enter"], done.now, done.settlements, done.emptied, queue, request, lease
    )
    assert row is not None
    lost, requests, grants = row
    passenger.arrived(lost)
    return requests or (), grants or ()


def _lease(base: UUID, number: int) -> UUID:
    return UUID(int=base.int >> 32 << 32 | number)


def _requests(found: Iterable[Any]) -> Iterable[Holder]:
    for lease, asked, worker, name, duration, *_ in found:
        yield Holder(lease, asked, worker, name, duration)


def _claim(row: Any, lease: UUID, queue: str) -> Claim:
    # A row of `fairlane.enter` has columns of requests before those of `fairlane.granted`.
    *columns, claimed_at = row[-GRANTED:]
    return rows.claim_of(columns, lease, queue, claimed_at)


class Done(msgspec.Struct, frozen=True):
    """Claims whose jobs are done, as `fairlane.settle_done` takes them."""

    now: int | None
    settlements: Sequence[tuple[UUID, UUID, int, bytes | None]]
    emptied: list[UUID]


class Passenger:
    """Settlements on their way with a claim."""

    __slots__ = ("_answer", "done")

    def __init__(self, done: Done) -> None:
        self.done = done
        self._answer: asyncio.Future[list[UUID] | None] = asyncio.get_running_loop().create_future()

    def arrived(self, lost: list[UUID] | None) -> None:
        """They are settled, but for those whose claim was lost; `None`: nobody knows. Only the first word counts."""
        if not self._answer.done():
            self._answer.set_result(lost)

    async def answer(self) -> list[UUID]:
        lost = await self._answer
        if lost is None:
            raise StoreUnavailable("the claim that was to settle these jobs as well was broken off")
        return lost


class Carriage:
    """Brings the settlements of a process to its next claim."""

    def __init__(self) -> None:
        self.is_in_service = False
        """The last claim asked in public, so that the next one can take settlements along."""
        self.may_wait = False
        """No limit waits for what is settled: it may stay until the claim that is under way has ended."""
        self._waiting: Passenger | None = None
        self._is_under_way = False
        self._ended = asyncio.Event()

    def depart(self) -> None:
        """A claim begins."""
        self._is_under_way = True

    @contextlib.contextmanager
    def boarded(self) -> Iterator[Passenger | None]:
        """What this claim takes along. If the block is left by an error, nobody knows what became of it."""
        passenger, self._waiting = self._waiting, None
        try:
            yield passenger
        finally:
            if passenger is not None:
                passenger.arrived(None)

    def arrive(self) -> None:
        """A claim has ended, and the next may follow in the same turn of the loop."""
        self._is_under_way = False
        self._ended.set()
        self._ended.clear()

    async def settle(self, done: Done) -> list[UUID] | None:
        """Have these settled by the next claim: what was lost. `None`: there is no such claim, and nothing was done.

        `StoreUnavailable`: a claim took them along, and it is not known whether they are settled.
        """
        if not self.is_in_service or self._waiting is not None or (self._is_under_way and not self.may_wait):
            return None
        passenger = self._waiting = Passenger(done)
        try:
            # Whoever has freed slots asks for jobs in the same turn as it settles.
            await (self._ended.wait() if self._is_under_way else asyncio.sleep(0))
        finally:
            is_left = self._waiting is passenger
            if is_left:
                self._waiting = None
        return None if is_left else await passenger.answer()
