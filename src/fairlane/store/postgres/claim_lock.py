"""One hold of a queue's claim lock: read what has happened, ask the tables what memory lacks, write what is decided."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from functools import cached_property
from typing import Any, TypeVar
from uuid import UUID, uuid4

import asyncpg
import msgspec
from msgspec.structs import replace

from fairlane.clock import Instant
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
    moves,
)
from fairlane.scheduler.rebuild import Rebuilt
from fairlane.scheduler.resident import Found, ResidentBoard
from fairlane.scheduler.snapshot import (
    Arrival,
    Ask,
    Events,
    FlowRow,
    Forced,
    GateRow,
    Head,
    KeptPlaces,
    LaneRow,
    Plan,
    QueueRow,
    Release,
)
from fairlane.store import rows
from fairlane.store.boards import MOST_WHOLE, UNKNOWN, Boards, Expected, Raced, as_read
from fairlane.store.postgres.connections import STATEMENTS, Connection
from fairlane.store.postgres.shared_limits import Sharing
from fairlane.store.postgres.wakeups import Ending
from fairlane.store.protocol import FOLD_AT_MOST, LANES_PER_SCANNED_FLOW, PROMOTE_AT_MOST, RELEASES_AT_MOST, Asked
from fairlane.store.rows import decode_given, decode_key, decode_keys, decode_overrides

T = TypeVar("T")

IS_DUE, HAS_FORCED = 1, 2
"""What a claim has to see to besides: scheduled jobs whose time has come, jobs that an operator wants to start."""
MOST_POLICIES = 1_000
"""Policies that are kept decoded."""
RACED, NEWER = "FL020", "FL021"
"""What `write_claim` and `open_claim` refuse with."""
EVERYTHING = 2**31 - 1
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


class Loaded:
    """What a claim starts from: the board, and what `open_claim` has found, whose rows are described with it."""

    board: ResidentBoard
    policy: Policy
    """As it is stored: with overrides whose time has come."""

    def __init__(self, records: Iterable[Any]) -> None:
        self.changes: list[tuple[Mark, bytes]] = []
        self.arrivals: list[Arrival] = []
        self.releases: list[Release] = []
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
                    self.now: Instant = i1
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

    def events(self, forced: list[Forced]) -> Events:
        return Events(self.now, self.state, self.arrivals, self.releases, forced, self.policy_since)

    @property
    def expired(self) -> list[Override]:
        overrides = self.policy.overrides
        return overrides.expired(self.now) if overrides.expires_at is not None else []

    @property
    def needs_transaction(self) -> bool:
        """More than one statement has to be written together."""
        return bool(self.attention or self.policy.shared_limits)


def _releases(lanes: list[bytes], counts: list[int], charges: list[float]) -> Iterable[Release]:
    many = len(lanes)
    ended, ran, unstarted, *rest = (counts[first : first + many] for first in range(0, len(counts), many))
    return map(Release, lanes, ended, ran, charges[:many], unstarted, charges[many:], *rest)


def _found(records: Iterable[Any], heads: Sequence[list[Head]] = ()) -> Found:
    """What `ask_tables` or `select_board` has found, sorted by kind. The shape of its rows is drawn in `board.sql`."""
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
        return cls(uuid4(), asked.want(), asked.worker.id, asked.worker.name, asked.duration)


def deal(starts: int, holders: Sequence[Holder]) -> list[int]:
    """Who gets which start, counted from 1. Each is filled before the next: as few as possible are left short."""
    if len(holders) == 1:
        return [1] * starts  # what waits for its instant needs no slot yet
    dealt: list[int] = []
    for nth, holder in enumerate(holders, 1):
        dealt += [nth] * min(holder.asked, starts - len(dealt))
    return dealt


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
                raise rows.journal_too_new(self.queue.name, int(str(error))) from error
            raise
        loaded = Loaded(found)
        if others:
            left = {queue for queue, _, _ in loaded.others}
            self.queue = next(queue for queue in (self.queue, *others) if queue.id not in left)
        loaded.policy = await self.policy_of(loaded.digest)
        loaded.board = await self._board(loaded)
        return loaded

    async def _board(self, loaded: Loaded) -> ResidentBoard:
        """The board as it is now: what memory knows and what has changed since, or the tables and the journal."""
        board, policy = self._boards.get(self.queue.id), loaded.policy
        # A crash may lose a checkpoint and not the changes before it: then we know too little of what is unwritten.
        is_known = (
            board is not None
            and not loaded.forgets
            and loaded.stored >= board.stored
            and (board.policy is policy or bool(policy.shared_limits))
        )
        if board is None or not is_known:
            self._boards.drop(self.queue.id)
            # It may be new because a place was wrong: then the jobs are looked up.
            loaded.arrivals = [replace(bell, ref=None) if bell.ref else bell for bell in loaded.arrivals]
            if not loaded.forgets:
                changes = await self.connection.fetch(STATEMENTS["select_journal"], self.queue.id)
                loaded.changes = [(Mark(seq, token), delta) for seq, token, delta in changes]
            if self._is_looking:
                board = ResidentBoard(policy)  # who only looks asks for little
            else:
                found = await self.connection.fetch(STATEMENTS["select_board"], self.queue.id, MOST_WHOLE + 1)
                board = as_read(policy, _found(found), MOST_WHOLE)
        for mark, delta in loaded.changes:
            board.apply(decode_delta(delta), mark)
        board.mark = loaded.mark
        board.wrote(loaded.stored)
        self._boards.put(self.queue.id, board)
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
                told = (decode_given(numbers), resumed, given_by)
                loaded.arrivals.append(Arrival(lane, priority, decode_keys(keys), count, floor, since, *told))
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
            self._boards.drop(self.queue.id)
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
            self._boards.noted(self.queue.id, len(delta))
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
                [rows.gate_parameters(g.row(), self.queue.id) for g in plan.gates if g.bound.limit.is_of_producers],
                None if plan.tally is None else encode_tally(plan.tally),
                ending.waiter,
                ending.ear,
                ending.nudges,
            )
        except asyncpg.PostgresError as error:
            if error.sqlstate == RACED:
                raise Raced from error
            raise
        self.is_of_session = False
        if plan.shared or plan.rings or loaded.policy.shared_limits:
            await self.sharing.write(plan)
        if not plan.starts:
            self.lease_due = started[0]["enqueued_at"]
            return []
        by_position = {row[0]: row[1:] for row in started if row[0] is not None}
        own, name = plan.starts[: len(by_position)], self.queue.name
        return [rows.claim_of(by_position[start.head.position], holders[0].lease, name, start.at) for start in own]

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

    # The tables. In a transaction.

    async def checkpoint(self, loaded: Loaded) -> None:
        """Write what the tables do not hold."""
        await self._put(loaded.board.changed_rows(), loaded.now)
        await self.connection.execute(STATEMENTS["store_journal"], self.queue.id, loaded.mark.seq)
        loaded.board.wrote(loaded.mark.seq)
        self._boards.written(self.queue.id)

    async def to_tables(self, loaded: Loaded) -> None:
        """Write what the tables do not hold, and let everybody forget the rest: they are going to be worked on."""
        await self._put(loaded.board.changed_rows(), loaded.now)
        await self.connection.execute(STATEMENTS["seal_journal"], self.queue.id)
        self._boards.drop(self.queue.id)

    async def select_all(self) -> tuple[list[FlowRow], list[LaneRow], list[GateRow]]:
        """The whole board, once the tables hold it."""
        found = _found(await self.connection.fetch(STATEMENTS["select_board"], self.queue.id, EVERYTHING))
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
        mark, delta = Mark(loaded.mark.seq + 1, uuid4()), encode_removed(removed)
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
