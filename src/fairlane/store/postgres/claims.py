"""A claim on PostgreSQL: under the queue's claim lock, read what has happened, plan on the board in memory, write.

Two round trips, and one more when the next jobs of a lane have to be looked up: the first takes the lock for the
session and reads, the second writes in a transaction of its own, with which the lock ends. Where several statements
belong together, a transaction is around them. Claims have their own connection: a settlement never queues behind one.

Where many workers want one queue's lock, whoever holds it claims for all who wait: sixty-four workers with four slots
each would take it one after the other, for four jobs a time, and hold it over four round trips each while the others
keep the processors busy. Asking in public (see `fairlane.enter`) costs whoever is alone one round trip more, so it is
done only once the wait for the lock was longer than the work under it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from functools import cached_property
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import msgspec
from msgspec.structs import replace

from fairlane.clock import Instant, microseconds
from fairlane.job import Claim
from fairlane.policy.policy import Policy
from fairlane.scheduler.journal import FORMAT, Mark, decode_delta, encode_delta, encode_stats, moves
from fairlane.scheduler.plan import paces_of
from fairlane.scheduler.resident import Found, ResidentBoard
from fairlane.scheduler.snapshot import Arrival, Ask, FlowRow, Forced, GateRow, Head, LaneRow, Plan, QueueRow, Release
from fairlane.store import boards
from fairlane.store.boards import MOST_WHOLE, PLANS_AT_MOST, UNKNOWN, Boards, Checkpoints, Expected, Raced, as_read
from fairlane.store.postgres.connections import (
    STATEMENTS,
    Connection,
    Connections,
    Session,
    StoreClock,
    driven,
    hang_up,
    perform,
)
from fairlane.store.postgres.settlements import PendingSettlements, Piggyback
from fairlane.store.postgres.shared_limits import Sharing
from fairlane.store.postgres.wakeups import Ending, Watch, observe_producers
from fairlane.store.protocol import (
    FOLD_AT_MOST,
    LANES_PER_SCANNED_FLOW,
    PROMOTE_AT_MOST,
    RELEASES_AT_MOST,
    Asked,
    Choice,
    Claimed,
    Listener,
    Looked,
    WorkerIdentity,
)
from fairlane.store.rows import (
    cancelled_too_fast,
    claim_of,
    decode_given,
    decode_key,
    decode_keys,
    decode_overrides,
    gate_parameters,
    journal_too_new,
    no_such_queue,
)

SLOTS_AT_MOST = 1_000
"""How many jobs one claim starts for all its holders, and the most that a request can name."""
NUMBERS = 1 << 22
"""Requests of one session, each with a number of its own."""
SMOOTHING = 0.2
RISING = 1.1
"""By how much the quickest load is taken to be slower with every claim that was not as quick."""
REQUESTED = 5
"""Columns of `fairlane.request`."""
IS_DUE, HAS_FORCED = 1, 2
"""What a claim has to see to besides: scheduled jobs whose time has come, jobs that an operator wants to start."""
MOST_POLICIES = 1_000
"""Policies that are kept decoded."""
RACED, NEWER = "FL020", "FL021"
"""What `write_claim` and `open_claim` refuse with."""
NO_GATES = (None, None)
"""What is stored with a job that passes no shared gate."""

_policies: dict[str, Policy] = {}


class QueueHandle(msgspec.Struct, frozen=True):
    """A queue's number, and how a transaction that holds its claim lock begins."""

    name: str
    id: int
    take_lock: str
    take_lock_unflushed: str
    take_over: str
    take_over_unflushed: str


class Loaded(boards.Loaded):
    """What a claim starts from: the board, and what `open_claim` has found, whose rows are described with it."""

    def __init__(self, records: Iterable[Any]) -> None:
        self.changes: list[tuple[Mark, bytes]] = []
        self.arrivals = []
        self.releases = []
        self.forced: list[Forced] = []
        self.others: list[tuple[int, float, bool]] = []
        """Queues that could have been opened as well, with their virtual time, and whether their lock was taken."""
        for record in records:
            kind, id_, name, keys, f1, f2, f3, i1, i2, i3, i4, i5, i6, i7, i8, token, place, *released = record
            match kind:
                case b"r":
                    self.releases += _releases(*released)
                case b"a":
                    given = decode_given(name)
                    self.arrivals.append(
                        Arrival(id_, i1, decode_keys(keys), i2, i3, i4, given, i5 or 0, i6 or 0, place)
                    )
                case b"j":
                    self.changes.append((Mark(i1, token), id_))
                case b"o":
                    self.others.append((i1, f1, bool(i2)))
                case _:
                    self.digest = name
                    self.state = QueueRow(f1, f2, i2, i3, f3)
                    self.now = i1
                    self.mark = Mark(i4, token)
                    self.attention: int = i5
                    self.others_wait = bool(i6)
                    self.due: Instant | None = i7
                    self.stored: int = i8
                    oldest, applied_at, xid, floor, release, snapshot, forgets = keys.split()
                    self.policy_since = int(applied_at)
                    self.forgets = forgets == "1"
                    """What was known of the board is not true any more."""
                    self.all_folded = xid == release == "-"
                    """Nothing has happened that was not read."""
                    arrivals_to = (None, None) if xid == "-" else (xid, int(floor))
                    self.bounds = (oldest, snapshot, *arrivals_to, None if release == "-" else release)
                    """Up to where events were read, as `write_claim` takes it."""

    @property
    def needs_transaction(self) -> bool:
        """More than one statement has to be written together."""
        return bool(self.attention or self.policy.shared_limits)


def _releases(lanes: list[bytes], counts: list[int], charges: list[float]) -> Iterable[Release]:
    many = len(lanes)
    ended, ran, unstarted, *rest = (counts[first : first + many] for first in range(0, len(counts), many))
    return map(Release, lanes, ended, ran, charges[:many], unstarted, charges[many:], *rest)


def _found(records: Iterable[Any], heads: Sequence[list[Head]]) -> Found:
    """What `ask_tables` has found, sorted by kind. The shape of its rows is drawn in `board.sql`."""
    flows: list[FlowRow] = []
    lanes: list[LaneRow] = []
    gates: list[GateRow] = []
    scanned = 0
    for kind, place, id_, kin, gate, name, keys, f1, f2, f3, f4, i1, i2, i3, i4, i5, i6, i7, memo in records:
        match kind:
            case "h":
                heads[i1 - 1].append(Head(place, i2, i3))
            case "l":
                lanes.append(LaneRow(id_, kin, i1, decode_keys(keys), i2, i3, i4, i5, i6, gate, f1, i7))
            case "g":
                gates.append(GateRow(id_, name, decode_key(keys), i1, i2, i3, i4, i5, memo, f1, i6))
            case _:
                scanned += kind == "s"
                flows.append(FlowRow(id_, decode_key(keys), f1, f2, i1, f3, f4, i2, i3, i4, gate, i5))
    return Found(flows, lanes, gates, scanned=scanned)


class Holder(msgspec.Struct, frozen=True):
    """Somebody for whom jobs are claimed: its lease, and how many it asked for."""

    lease: UUID
    asked: int
    worker: UUID
    name: str
    duration: int
    """How long its lease lasts, in microseconds."""

    @classmethod
    def of(cls, asked: Asked) -> Holder:
        """Who asks, for as many as there is room for now."""
        return cls(uuid4(), asked.want(), asked.worker.id, asked.worker.name, microseconds(asked.lease))


def deal(starts: int, holders: Sequence[Holder]) -> list[int]:
    """Who gets which start, counted from 1. Each is filled before the next: as few as possible are left short."""
    if len(holders) == 1:
        return [1] * starts  # what waits for its instant needs no slot yet
    dealt: list[int] = []
    for nth, holder in enumerate(holders, 1):
        dealt += [nth] * min(holder.asked, starts - len(dealt))
    return dealt


class Scheduling(boards.HeldBoard):
    """One hold of a queue's claim lock, in a transaction; or (`is_of_session`) in none until it is written."""

    def __init__(
        self,
        connection: Connection,
        queue: QueueHandle,
        now: Instant | None,
        known: Boards | None = None,
        *,
        is_of_session: bool = False,
        is_durable: bool = True,
    ) -> None:
        self.connection = connection
        self.queue = queue
        self.number = queue.id
        self.time = now
        self._is_looking = known is None
        self.boards = known or Boards()
        self.is_of_session = is_of_session
        self._is_durable = is_durable
        self.lease_due: Instant | None = None
        """When the next lease ends, as far as a write that started nothing has seen."""

    @cached_property
    def sharing(self) -> Sharing:
        """The limits that the queue shares with others."""
        return Sharing(self.connection, self.queue.id)

    async def load(
        self,
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
        known = [self.boards.get(queue) for queue in queues]
        marks = [None if board is None else board.mark for board in known]
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
        loaded = Loaded(found)
        if others:
            left = {queue for queue, _, _ in loaded.others}
            self.queue = next(queue for queue in (self.queue, *others) if queue.id not in left)
            self.number = self.queue.id
        loaded.policy = await self.policy_of(loaded.digest)
        loaded.board = await self._board(loaded)
        return loaded

    async def _board(self, loaded: Loaded) -> ResidentBoard:
        """The board as it is now: what memory knows and what has changed since, or the tables and the journal."""
        board, policy = self.boards.get(self.queue.id), loaded.policy
        # A crash may lose a checkpoint and not the changes before it: then we know too little of what is unwritten.
        is_known = (
            board is not None
            and not loaded.forgets
            and loaded.stored >= board.stored
            and (board.policy is policy or bool(policy.shared_limits))
        )
        if board is None or not is_known:
            self.boards.drop(self.queue.id)
            # It may be new because a place was wrong: then the jobs are looked up.
            loaded.arrivals = [replace(event, ref=None) if event.ref else event for event in loaded.arrivals]
            if not loaded.forgets:
                changes = await self.connection.fetch(STATEMENTS["select_journal"], self.queue.id)
                loaded.changes = [(Mark(seq, token), delta) for seq, token, delta in changes]
            if self._is_looking:
                board = ResidentBoard(policy)  # who only looks asks for little
            else:
                stored = await perform(self.connection, self.select_all(MOST_WHOLE + 1))
                board = as_read(policy, Found(*stored), MOST_WHOLE)
        for mark, delta in loaded.changes:
            board.apply(decode_delta(delta), mark)
        board.mark = loaded.mark
        board.wrote(loaded.stored)
        self.boards.put(self.queue.id, board)
        return board

    async def begin(self) -> None:
        """From here on, what is written is written together: the session's lock becomes that of a transaction."""
        if self.is_of_session:
            handle = self.queue
            await self.connection.execute(handle.take_over if self._is_durable else handle.take_over_unflushed)
            self.is_of_session = False

    async def see_to(self, loaded: Loaded, want: int) -> None:
        """Promote what is due, and find what is to be forced. In a transaction."""
        if loaded.attention & IS_DUE:
            given = (self.queue.id, loaded.now, PROMOTE_AT_MOST, loaded.policy.sequence is not None)
            promoted = 0
            for row in await self.connection.fetch(STATEMENTS["promote"], *given):
                lane, priority, keys, count, floor, since, numbers, resumed, given_by = row
                brought = (decode_given(numbers), resumed, given_by)
                loaded.arrivals.append(Arrival(lane, priority, decode_keys(keys), count, floor, since, *brought))
                promoted += count
            loaded.all_folded = loaded.all_folded and promoted < PROMOTE_AT_MOST
        if loaded.attention & HAS_FORCED and want > 0:
            loaded.forced = await self.forced(want)

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
            return await driven(board.claim(events, want, lag=lag, listens=listens, ahead=ahead), self.ask)
        except BaseException:
            self.boards.drop(self.queue.id)
            raise

    async def ask(self, ask: Ask) -> Found:
        """What the tables hold of it."""
        shared = await self.sharing.select(ask.shared) if ask.shared else []
        heads: dict[bytes, list[Head]] = {lane: [] for lane, _, _ in ask.heads}
        asked = [heads[lane] for lane, _, _ in ask.heads]
        if not ask.is_of_board:
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
        return replace(_found(found, asked), heads=heads, shared=shared)

    async def write(
        self, loaded: Loaded, plan: Plan, holders: Sequence[Holder] = (), ending: Ending | None = None
    ) -> list[Claim]:
        """Start the jobs of a plan and note what it changed; `Raced` if a job is not ready any more.

        The jobs are dealt to the holders. Returned is what the first of them gets. The lock of a session ends with it.
        """
        try:
            return await self._write(loaded, plan, holders, ending or Ending())
        except BaseException:
            self.boards.drop(self.queue.id)
            raise

    async def _write(self, loaded: Loaded, plan: Plan, holders: Sequence[Holder], ending: Ending) -> list[Claim]:
        now, state = loaded.now, plan.queue
        if plan.shared:
            self.sharing.learn_gates(plan.shared)
        change: tuple[object, ...] = (None, None, None)
        if plan.lanes or plan.flows or plan.gates or loaded.arrivals or loaded.releases or state != loaded.state:
            mark, delta = Mark(loaded.mark.seq + 1, uuid4()), encode_delta(plan)
            change = (mark.seq, mark.token, delta)
            loaded.board.note(plan, mark)
            self.boards.noted(self.queue.id, len(delta))
        else:
            loaded.board.mark = loaded.mark
        try:
            started = await self.connection.fetch(
                STATEMENTS["write_claim"],
                self.queue.id,
                self.is_of_session,
                self.is_of_session and not self._is_durable,
                now,
                [state.vtime, state.cursor, state.cost],
                [state.cursor_tie, state.tie],
                list(moves(plan)),
                *loaded.bounds,
                *change,
                [
                    (
                        s.head.ref,
                        s.head.position,
                        s.charge,
                        n,
                        *(self.sharing.passed(s) if s.shared else NO_GATES),
                        s.at,
                    )
                    for s, n in zip(plan.starts, deal(len(plan.starts), holders), strict=True)
                ],
                [(holder.lease, holder.worker, holder.name, now + holder.duration) for holder in holders],
                # Producers read these: the tables have them as they are.
                [gate_parameters(g.row(), self.queue.id) for g in plan.gates if g.bound.limit.is_of_producers],
                None if plan.stats is None else encode_stats(plan.stats),
                ending.waiter,
                ending.alive_lock,
                ending.nudges,
            )
        except asyncpg.PostgresError as error:
            if error.sqlstate == RACED:
                raise Raced from error
            raise
        self.is_of_session = False
        if plan.shared or plan.wakeups or loaded.policy.shared_limits:
            await self.sharing.write(plan)
        if not plan.starts:
            self.lease_due = started[0]["enqueued_at"]
            return []
        by_position = {row[0]: row[1:] for row in started if row[0] is not None}
        own, name = plan.starts[: len(by_position)], self.queue.name
        return [claim_of(by_position[start.head.position], holders[0].lease, name, start.at) for start in own]

    async def leave(self) -> None:
        """Let the lock go with nothing written."""
        if self.is_of_session:
            await self.connection.fetchrow(STATEMENTS["leave_claim"], self.queue.id)
            self.is_of_session = False

    async def fold_all(self) -> Loaded:
        """Fold everything that has happened, start nothing. In a transaction; what is returned is of the end of it."""
        while True:
            loaded = await self.load()
            await self.see_to(loaded, 0)
            await self.write(loaded, await self.plan(loaded, 0))
            if loaded.all_folded:
                return await self.load()

    async def in_force(self) -> tuple[Policy, Instant]:
        """The queue's policy with what operators have changed, and the time."""
        row = await self.connection.fetchrow(STATEMENTS["select_in_force"], self.queue.id, self.time)
        assert row is not None
        return await self.policy_of(row["digest"]), row["now"]

    async def policy_of(self, digest: str) -> Policy:
        """A policy in force, by what the queue's row says of it."""
        key = f"{self.queue.name}/{digest}"
        if key not in _policies:
            row = await self.connection.fetchrow(STATEMENTS["select_policy"], self.queue.name)
            assert row is not None
            if len(_policies) >= MOST_POLICIES:
                _policies.clear()
            overrides = await self.connection.fetch(STATEMENTS["select_overrides"], self.queue.id)
            _policies[key] = Policy.decode(row["policy"]).overridden(decode_overrides(text for (text,) in overrides))
        return _policies[key]


class _OverridesEnded(Raced):
    """Overrides of a queue are stored whose time has come."""

    def __init__(self, queue: str) -> None:
        super().__init__(queue)
        self.queue = queue


class Claimer:
    """Makes the claims of one process, one at a time."""

    def __init__(
        self,
        connections: Connections,
        clock: StoreClock,
        *,
        durable: bool,
        add_up: Callable[[str], Awaitable[None]],
        end_overrides: Callable[[str], Awaitable[None]],
    ) -> None:
        """`add_up` is called with the name of a queue, now and then, if claims were made; `end_overrides` when the time
        of one of its overrides has come."""
        self._connections = connections
        self._clock = clock
        self._durable = durable
        self._end_overrides = end_overrides
        self._mutex = asyncio.Lock()
        self._connection: Session | None = None
        self._queues: dict[str, QueueHandle] = {}
        self._crowding: defaultdict[int, Crowding] = defaultdict(Crowding)
        self._seat = Seat()
        self.piggyback = Piggyback()
        self.boards = Boards()
        self._checkpoints = Checkpoints(self.boards, self.checkpoint, lambda queue: add_up(self._handle(queue).name))

    async def close(self) -> None:
        """Write what the tables do not hold, and hang up."""
        await self._checkpoints.close()
        await self._hang_up()

    async def _hang_up(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await hang_up(connection)

    async def queue(self, name: str) -> QueueHandle:
        """A queue by its name, or `UnknownQueue`. Numbers never change, so they are asked for once."""
        if name not in self._queues:
            row = await self._connections.again(
                lambda connection, _: connection.fetchrow(STATEMENTS["select_queue_id"], name)
            )
            if row is None:
                raise no_such_queue(name)
            self._queues[name] = QueueHandle(name, *row)
        return self._queues[name]

    async def claim(self, queues: Sequence[QueueHandle], asked: Asked) -> Claimed:
        """Start jobs of the first queue; where its lock is taken, of the next whose lock is free."""
        watches = {queue.id: Watch(queue.id, asked.listener) for queue in queues}
        first = queues[0].id
        # Whoever is registered as a waiter withdraws in the claim that fills its slots: its own.
        crowding = self._crowding[first]
        is_together = self.piggyback.is_in_service = crowding.is_dense and not watches[first].is_registered
        self.piggyback.may_wait = not crowding.is_limited
        self.piggyback.depart()
        try:
            for _ in range(PLANS_AT_MOST):
                try:
                    if is_together:
                        return await self._claim_together(queues[0], asked, watches[first])
                    return await self._claim_alone(queues, asked, watches)
                except Raced as raced:
                    is_together = False
                    if isinstance(raced, _OverridesEnded):
                        await self._end_overrides(raced.queue)
        finally:
            self.piggyback.arrive()
        raise cancelled_too_fast(queues[0].name)

    async def _claim_alone(self, queues: Sequence[QueueHandle], asked: Asked, watches: dict[int, Watch]) -> Claimed:
        clock = asyncio.get_running_loop().time
        async with self._mutex, self._session() as connection:
            asked_at = clock()
            await observe_producers(connection, watches.values())
            first, *others = queues
            scheduling = self._scheduling(connection, first, is_of_session=True)
            loaded = await scheduling.load(self._clock.expected(), locks=True, me=asked.worker.id, others=others)
            # The load itself waits for the lock; most of the time it is free, and reading takes as long as the plan.
            locked_at, queue = clock(), scheduling.queue.id
            if asked.chose is not None:
                asked.chose(_choice(scheduling.queue, queues, loaded))
            claimed = await self._claim(scheduling, loaded, [Holder.of(asked)], asked, watches[queue])
            self._crowding[queue].alone(locked_at - asked_at, clock() - locked_at)
        return claimed

    async def _claim_together(self, queue: QueueHandle, asked: Asked, watch: Watch) -> Claimed:
        """Ask in public, and get what somebody else has claimed for us, or the lock and everybody's requests."""
        async with self._mutex, self._session() as connection:
            want, worker = asked.want(), asked.worker
            if want <= 0:
                # Nobody has a slot. What waits for its instant is held all the same, by terms that may have changed.
                terms, _ = await self._scheduling(connection, queue).in_force()
                return Claimed([], uuid4(), None, more=False, look_again=False, terms=terms)
            with self.piggyback.taken() as pending:
                entered = await self._seat.enter(connection, queue, want, worker, microseconds(asked.lease), pending)
            lease, claims, requests = entered
            crowding = self._crowding[queue.id]
            if claims:
                self._clock.observe(claims[0].claimed_at)
                # Left short, we look for ourselves: only who claims alone can register as a waiter.
                is_short = len(claims) < want
                crowding.is_dense = not is_short
                return Claimed(claims, lease, None, more=is_short, look_again=False)
            crowding.led(len(requests))
            holders = [Holder.of(asked), *requests]
            scheduling = self._scheduling(connection, queue, is_of_session=True)
            loaded = await scheduling.load(self._clock.expected(), me=worker.id)
            return await self._claim(scheduling, loaded, holders, asked, watch)

    def _scheduling(self, connection: Connection, queue: QueueHandle, *, is_of_session: bool = False) -> Scheduling:
        now, is_durable = self._clock.parameter(), self._durable
        return Scheduling(connection, queue, now, self.boards, is_of_session=is_of_session, is_durable=is_durable)

    async def _claim(
        self, scheduling: Scheduling, loaded: Loaded, holders: list[Holder], asked: Asked, watch: Watch
    ) -> Claimed:
        """Claim for everybody; what the first holder gets is returned."""
        me, policy = holders[0], loaded.policy
        self._clock.kept(loaded.now)
        if me.asked <= 0:
            await scheduling.leave()
            return Claimed([], uuid4(), None, more=False, look_again=False, terms=policy)
        if loaded.expired:
            # First there is to be a board without them, for everybody; then the claim is planned anew.
            await scheduling.leave()
            raise _OverridesEnded(scheduling.queue.name)
        if loaded.needs_transaction:
            await scheduling.begin()
        want = max(me.asked, min(SLOTS_AT_MOST, sum(holder.asked for holder in holders)))
        await scheduling.see_to(loaded, want)
        # What waits for its instant is for whoever holds the lock: others keep no pace.
        ahead = asked.ahead if len(holders) == 1 else None
        self._crowding[scheduling.queue.id].is_limited = bool(policy.limits or policy.overrides.all)
        plan = await scheduling.plan(loaded, want, lag=asked.start_lag, listens=watch.listens, ahead=ahead)
        is_paced = any(start.pace is not None for start in plan.starts)
        is_filled = deal(len(plan.starts), holders).count(1) >= me.asked and not is_paced
        more = plan.more or not loaded.all_folded
        alarm = loaded.board.next_alarm() if not is_filled or watch.is_registered else None
        ending = watch.ending(me.worker, is_filled=is_filled)
        leaves_alarms = watch.is_leaving and (alarm is not None or loaded.due is not None)
        if loaded.others_wait and is_filled and (more or leaves_alarms):
            ending = replace(ending, nudges=1)
        is_of_session = scheduling.is_of_session
        claims = await scheduling.write(loaded, plan, holders, ending)
        if loaded.forced:
            await scheduling.connection.execute(STATEMENTS["forget_forced"], scheduling.queue.id)
        if not is_of_session:
            await scheduling.connection.execute("commit")
        watch.committed()
        self._checkpoints.soon(scheduling.queue.id)
        # Who found nothing waits for leases to end as well.
        return Claimed(
            claims,
            me.lease,
            None if is_filled else _earliest(alarm, loaded.due, scheduling.lease_due),
            more,
            watch.looks_again,
            plan.queue.vtime,
            bool(policy.limits),
            len(loaded.arrivals) + len(loaded.releases),
            loaded.now,
            paces_of(claims, plan.starts),
            policy,
            policy.opens_by_ends,
        )

    async def checkpoint(self, queue: int) -> None:
        """Write what the tables of a queue do not hold."""
        async with self.locked(self._handle(queue), durable=False) as (scheduling,):
            await perform(scheduling.connection, scheduling.checkpoint(await scheduling.load()))

    async def look(self, queue: QueueHandle, want: int, worker: WorkerIdentity, listener: Listener) -> Looked:
        """Count the jobs that could start, up to `want`. With 0, the listener withdraws and its wakeup is passed on."""
        watch = Watch(queue.id, listener)
        async with self.locked(queue, durable=False) as (scheduling,):
            if want > 0:
                looked = await _look(scheduling, want, worker, watch)
            else:
                looked = Looked(0, 0, None, look_again=False)
                watch.ending(worker.id, is_filled=True)
                await scheduling.connection.execute(STATEMENTS["withdraw_waiter"], queue.id, worker.id)
                await scheduling.connection.execute(STATEMENTS["nudge"], queue.id, 1, worker.id)
        watch.committed()
        return looked

    def _handle(self, queue: int) -> QueueHandle:
        return next(each for each in self._queues.values() if each.id == queue)

    @contextlib.asynccontextmanager
    async def locked(
        self, *queues: QueueHandle, durable: bool, keeps: bool = True
    ) -> AsyncIterator[Sequence[Scheduling]]:
        """A transaction that holds the claim locks of these queues, ended with the block: committed if it `keeps`
        anything."""
        # The lowest number first, and all before anything else is locked: so that no two ever deadlock.
        first, *others = sorted(queues, key=lambda queue: queue.id)
        async with self._mutex, self._session() as connection:
            await connection.execute(first.take_lock if durable else first.take_lock_unflushed)
            for queue in others:
                await connection.execute(STATEMENTS["take_another_lock"], queue.id)
            if others:
                await connection.execute(STATEMENTS["lock_shared_limits_of"], [queue.id for queue in queues])
            yield [self._scheduling(connection, queue) for queue in queues]
            if not keeps:
                for queue in queues:
                    self.boards.drop(queue.id)
            await connection.execute("commit" if keeps else "rollback")

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[Connection]:
        """The connection that claims, whose transaction and locks are gone if the block is left by an error."""
        connection = await self._connected()
        try:
            with self._connections.in_use(connection):
                try:
                    yield connection
                except Raced:
                    if connection.is_in_transaction():
                        await connection.execute("rollback")
                    raise
        except Raced:
            raise
        except BaseException:
            # Whatever it was doing, the server forgets it with the session; the next claim connects again.
            await self._hang_up()
            raise

    async def _connected(self) -> Session:
        if self._seat.is_used_up:
            await self._hang_up()
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._connections.connect()
            self._seat = Seat()
            with self._connections.in_use(self._connection):
                await self._connection.execute(STATEMENTS["guard_claims"])
                await self._connection.prepare(STATEMENTS["learn_types"])
        return self._connection


def _earliest(*moments: Instant | None) -> Instant | None:
    return min((each for each in moments if each is not None), default=None)


def _choice(chosen: QueueHandle, queues: Sequence[QueueHandle], loaded: Loaded) -> Choice:
    names = {queue.id: queue.name for queue in queues}
    taken = frozenset(names[queue] for queue, _, is_taken in loaded.others if is_taken)
    vtimes = {names[queue]: vtime for queue, vtime, _ in loaded.others}
    return Choice(chosen.name, taken, vtimes | {chosen.name: loaded.state.vtime})


async def _look(scheduling: Scheduling, want: int, worker: WorkerIdentity, watch: Watch) -> Looked:
    connection = scheduling.connection
    await observe_producers(connection, [watch])
    await connection.execute(STATEMENTS["begin_look"])
    loaded = await scheduling.load()
    await scheduling.see_to(loaded, want)
    plan = await scheduling.plan(loaded, want, listens=True)
    is_filled = len(plan.starts) >= want
    alarm = None if is_filled else loaded.board.next_alarm()
    ending = watch.ending(worker.id, is_filled=is_filled)
    if plan.starts:
        # Nothing of it is written: the board in memory is forgotten too.
        await connection.execute(STATEMENTS["undo_look"])
        if ending.alive_lock is not None:
            await connection.execute(STATEMENTS["register_waiter"], scheduling.queue.id, worker.id, ending.alive_lock)
        elif ending.waiter is not None:
            await connection.execute(STATEMENTS["withdraw_waiter"], scheduling.queue.id, worker.id)
    else:
        # As a claim that starts nothing: what is shut is parked, and wakes the waiter when it opens.
        await scheduling.write(loaded, plan, (), ending)
    is_partial = not is_filled and (plan.more or not loaded.all_folded)
    due = None if is_filled else _earliest(alarm, loaded.due, scheduling.lease_due)
    return Looked(len(plan.starts), loaded.now, due, watch.looks_again or is_partial)


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
        queue: QueueHandle,
        want: int,
        worker: WorkerIdentity,
        duration: int,
        pending: PendingSettlements | None = None,
    ) -> tuple[UUID, list[Claim], list[Holder]]:
        """Ask for jobs; come back with them, or with the queue's lock and the requests of those who wait.

        The pending settlements is settled first. Returned with them: the lease of what was claimed for us.
        """
        if self._registered != (worker, duration):  # to whom this session belongs
            await connection.execute(STATEMENTS["register_claimer"], self._base, worker.id, worker.name, duration)
            self._registered = (worker, duration)
        self._number += 1
        lease = UUID(int=self._base.int >> 32 << 32 | self._number)
        request = queue.id << 32 | self._number << 10 | min(want, SLOTS_AT_MOST)
        requests: Sequence[Any]
        grants: Sequence[Any]
        if pending is not None:
            done = pending.done
            given = (done.now, done.settlements, done.emptied, queue.id, request, lease)
            row = await connection.fetchrow(STATEMENTS["settle_and_enter"], *given)
            assert row is not None
            lost, requests, grants = row
            pending.arrived(lost)
        else:
            # Columns of requests, then those of `fairlane.granted`: every row has either.
            found = await connection.fetch(STATEMENTS["enter"], queue.id, request, lease)
            requests = [row[:REQUESTED] for row in found if row["id"] is None]
            grants = [row[REQUESTED:] for row in found if row["id"] is not None]
        claims = [claim_of(row[:-1], lease, queue.name, row[-1]) for row in grants or ()]
        return lease, claims, [Holder(*row) for row in requests or ()]
