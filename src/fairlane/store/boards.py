"""What a process keeps of its store: the boards of its queues, and queue time.

Queue time is what limits, leases and due times are measured by: the store's clock, except that it never goes back.
If the clock is set back (a restored machine, a bad time server), what was computed from later readings would stay in
the future for as long as the step was large: rates closed, leases of dead workers alive. So the database stores the
latest instant, and an offset that is raised when the clock is found behind it: queue time goes on from that instant at
the clock's own pace. It makes no difference whether the step back or a step forward before it was the mistake.

A process that has seen queue time also knows how much has passed since: nothing is lost while nobody looks.
PostgreSQL reads its own clock, in SQL: `fairlane.instant` and `fairlane.keep_instant`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple
from uuid import uuid4

import msgspec

from fairlane.clock import Clock, Instant
from fairlane.errors import SchemaTooNew, StoreLost, StoreUnavailable
from fairlane.policy.overrides import Override
from fairlane.policy.policy import Policy
from fairlane.scheduler.journal import Delta, Mark, Removed, encode_removed, encode_stats
from fairlane.scheduler.rebuild import Rebuilt
from fairlane.scheduler.resident import MOST_RESIDENT, Found, ResidentBoard
from fairlane.scheduler.snapshot import (
    Arrival,
    Ask,
    Events,
    FlowRow,
    Forced,
    GateRow,
    KeptPlaces,
    LaneRow,
    QueueRow,
    Release,
)
from fairlane.store.procedures import Procedure, Some, Whole, query
from fairlane.store.rows import (
    decode_keys,
    flow_of,
    flow_parameters,
    gate_of,
    gate_parameters,
    lane_of,
    lane_parameters,
)

KEPT_EVERY = 100_000
"""Microseconds after which the latest instant is stored again."""


class QueueTime(msgspec.Struct, frozen=True):
    """Queue time, and the clock beside it."""

    now: Instant
    """Queue time."""
    ahead: int = 0
    """How far queue time is ahead of the store's clock, in microseconds."""

    @property
    def wall(self) -> Instant:
        """The store's clock: schedules and other times of day go by it."""
        return self.now - self.ahead


class Expected(NamedTuple):
    """What queue time should be."""

    least: Instant
    """If it is less, the clock was set back. Clocks that nobody sets run apart by far less than one percent."""
    now: Instant


UNKNOWN = Expected(0, 0)


class Witness:
    """What one process has seen of queue time, and how long ago by its monotonic clock, which nobody sets."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: Instant = 0
        self._seen_at = 0

    def saw(self, now: Instant) -> None:
        self._seen, self._seen_at = now, self._clock.monotonic()

    def expected(self) -> Expected:
        """What queue time is by now. To be asked before the clock that it is compared with."""
        if not self._seen:
            return UNKNOWN
        passed = self._clock.monotonic() - self._seen_at
        return Expected(self._seen + passed * 99 // 100, self._seen + passed)


class QueueClock:
    """A clock that never goes back. What it knows is to be stored, and it learns what others have stored."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._witness = Witness(clock)
        self._latest: Instant = 0
        self._ahead = 0
        # The event loop and the store's thread both ask. Half of what one of them has seen, beside half of what the
        # other has, looks like a step back.
        self._mutex = threading.Lock()

    def now(self) -> Instant:
        return self.time().now

    def learn(self, ahead: int, latest: Instant) -> None:
        """Go by what is stored, if that is later."""
        with self._mutex:
            self._ahead = max(self._ahead, ahead)
            self._latest = max(self._latest, latest)

    def time(self) -> QueueTime:
        with self._mutex:
            # The clock is read last: what passes before it is read is no step back.
            least = max(self._latest, (expected := self._witness.expected()).least)
            now = self._clock.now() + self._ahead
            if now < least:
                correct = max(self._latest, expected.now)
                self._ahead += correct - now
                now = correct
            self._latest = now
            self._witness.saw(now)
            return QueueTime(now, self._ahead)

    def monotonic(self) -> Instant:
        return self._clock.monotonic()

    async def sleep_until(self, moment: Instant) -> None:
        await self._clock.sleep_until(self._clock.now() + moment - self.now())


MOST_WHOLE = 2_000
"""Pieces of a kind that are read at once, so that the whole of a small board is in memory from the first claim on."""
CHECKPOINT_AT = 20_000
"""Pieces that differ from the tables, and bytes of the journal, after which the tables are written."""
CHECKPOINT_BYTES = 4 * 2**20


def as_read(policy: Policy, found: Found, most: int) -> ResidentBoard:
    """Make a board from its tables, of which up to `most + 1` rows of each kind were read.

    A small board is kept whole, so that the tables need not be asked again; of a larger one, nothing is kept.
    """
    is_whole = max(len(found.flows), len(found.lanes), len(found.gates)) <= most
    board = ResidentBoard(policy, is_whole=is_whole)
    if is_whole:
        board.adopt(found, Ask())
    return board


PLANS_AT_MOST = 50
"""How often a claim is planned anew because a job it had planned was cancelled meanwhile."""


class Loaded:
    """A queue as a claim finds it. Each store reads it in its own way."""

    board: ResidentBoard
    policy: Policy
    """As it is stored: with overrides whose time has come."""
    policy_since: Instant
    state: QueueRow
    mark: Mark
    now: Instant
    arrivals: list[Arrival]
    releases: list[Release]

    def events(self, forced: list[Forced]) -> Events:
        return Events(self.now, self.state, self.arrivals, self.releases, forced, self.policy_since)

    @property
    def expired(self) -> list[Override]:
        overrides = self.policy.overrides
        return overrides.expired(self.now) if overrides.expires_at is not None else []


class Raced(Exception):
    """A job that was planned is not ready any more. Its board is forgotten, and the claim is planned anew."""


class Boards:
    """Boards of queues. Together they hold about `MOST_RESIDENT` keys; the least recently used
    boards are dropped first."""

    def __init__(self) -> None:
        self._boards: dict[int, ResidentBoard] = {}
        self._bytes: dict[int, int] = {}

    def get(self, queue: int) -> ResidentBoard | None:
        return self._boards.get(queue)

    def put(self, queue: int, board: ResidentBoard) -> None:
        """Keep a board that is correct as of now."""
        self._boards.pop(queue, None)
        self._boards[queue] = board

    def drop(self, queue: int) -> None:
        """Forget a board that may be wrong."""
        self._boards.pop(queue, None)
        self._bytes.pop(queue, None)

    def noted(self, queue: int, size: int) -> None:
        """A change of so many bytes was appended to the journal."""
        self._bytes[queue] = self._bytes.get(queue, 0) + size

    def is_due(self, queue: int) -> bool:
        """Whether the tables are to be written without waiting for the next moment of rest."""
        board = self._boards.get(queue)
        return board is not None and (board.unwritten >= CHECKPOINT_AT or self._bytes.get(queue, 0) >= CHECKPOINT_BYTES)

    def unwritten(self) -> list[int]:
        """Queues whose tables do not hold everything that we know."""
        return [queue for queue, board in self._boards.items() if board.unwritten]

    def written(self, queue: int) -> None:
        """The tables hold all of it: what is too much to keep can go."""
        self._bytes[queue] = 0
        self._boards[queue].shrink()
        held = sum(len(board.flows) for board in self._boards.values())
        for other, board in list(self._boards.items()):
            if held > 2 * MOST_RESIDENT and other != queue and not board.unwritten:
                held -= len(board.flows)
                self.drop(other)


EVERYTHING = 2**31 - 1


class HeldBoard:
    """The board of a queue whose claim lock is held: what both stores do with its tables, as procedures."""

    number: int
    """The queue's."""
    boards: Boards

    def select_all(self, most: int = EVERYTHING) -> Procedure[tuple[list[FlowRow], list[LaneRow], list[GateRow]]]:
        """What the tables hold of the board; all of it, once it was written there."""
        flows = yield Some("select_all_flows", (self.number,), most, ())
        lanes = yield Some("select_all_lanes", (self.number,), most, ())
        gates = yield Some("select_all_gates", (self.number,), most, ())
        return list(map(flow_of, flows)), list(map(lane_of, lanes)), list(map(gate_of, gates))

    def checkpoint(self, loaded: Loaded) -> Procedure[None]:
        """Write what the tables do not hold."""
        yield from self.put(loaded.board.changed_rows(), loaded.now)
        yield query("store_journal", self.number, loaded.mark.seq)
        yield query("delete_deltas", self.number)
        loaded.board.wrote(loaded.mark.seq)
        self.boards.written(self.number)

    def to_tables(self, loaded: Loaded) -> Procedure[None]:
        """Write what the tables do not hold, and let everybody forget the rest: they are going to be worked on."""
        yield from self.put(loaded.board.changed_rows(), loaded.now)
        yield query("seal_journal", self.number, uuid4())
        self.boards.drop(self.number)

    def replace(self, rebuilt: Rebuilt, now: Instant) -> Procedure[None]:
        """Put another board in the place of the one that the tables hold."""
        self.boards.drop(self.number)
        for statement in ("delete_flows", "delete_lanes", "delete_gates"):
            yield query(statement, self.number)
        yield from self.put(Delta(rebuilt.flows, rebuilt.lanes, rebuilt.gates), now)
        yield query("replace_state", self.number, *msgspec.structs.astuple(rebuilt.queue), *rebuilt.totals)
        if rebuilt.stats is not None:
            yield query("note_stats", self.number, encode_stats(rebuilt.stats))

    def put_gates(self, gates: Sequence[GateRow], now: Instant) -> Procedure[None]:
        """Store gates that the tables held otherwise."""
        self.boards.drop(self.number)
        yield from self.put(Delta(gates=list(gates)), now)

    def put(self, delta: Delta, now: Instant) -> Procedure[None]:
        """Store flows, lanes and gates as they are now."""
        if delta.flows:
            yield Whole("put_flows", [flow_parameters(row, self.number, now) for row in delta.flows])
        if delta.lanes:
            yield Whole("put_lanes", [lane_parameters(row, self.number) for row in delta.lanes])
        if delta.gates:
            yield Whole("put_gates", [gate_parameters(row, self.number) for row in delta.gates])

    def note_removed(self, loaded: Loaded, removed: Removed, ready: int, running: int) -> Procedure[None]:
        """Collection has removed these from the tables: whoever holds them in memory lets them go."""
        mark, delta = Mark(loaded.mark.seq + 1, uuid4()), encode_removed(removed)
        yield query("note_removed", self.number, mark.seq, mark.token, ready, running)
        yield query("insert_delta", self.number, mark.seq, mark.token, delta, None)
        loaded.board.apply(Delta(removed=removed), mark)
        self.boards.noted(self.number, len(delta))

    def kept_places(self, policy: Policy) -> Procedure[list[KeptPlaces]]:
        """Where jobs keep their place in a sequence: with what lane events that nobody has folded will say of it."""
        if policy.sequence is None:
            return []
        found = yield query("count_kept_places", self.number)
        return [KeptPlaces(priority, decode_keys(keys), count) for priority, keys, count in found]


log = logging.getLogger("fairlane.store")

EVERY = 1.0
"""Seconds from a change until the tables are written."""
LAST_WITHIN = 5.0
"""Seconds for the last time, when the store is closed."""


class Checkpoints:
    """Has the tables written by `write`, which is given the number of a queue. Where somebody has claimed, `add_up` is
    given it after that: there may be no worker to add up the stats of claims."""

    def __init__(
        self, boards: Boards, write: Callable[[int], Awaitable[None]], add_up: Callable[[int], Awaitable[None]]
    ) -> None:
        self._boards = boards
        self._write = write
        self._add_up = add_up
        self._claimed: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._writing: asyncio.Task[None] | None = None

    def soon(self, queue: int) -> None:
        """A claim has changed a queue's board."""
        self._claimed.add(queue)
        loop = asyncio.get_running_loop()
        if self._loop is not loop:  # another thread's, or one that has ended: its timers are gone with it
            self._loop, self._timer, self._writing = loop, None, None
        if self._writing is not None and not self._writing.done():
            return
        is_due = self._boards.is_due(queue)
        if is_due or self._timer is None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_later(0.0 if is_due else EVERY, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._writing = asyncio.get_running_loop().create_task(self._write_all())

    async def _write_all(self) -> None:
        for queue in self._boards.unwritten():
            try:
                await self._write(queue)
                if queue in self._claimed:
                    self._claimed.discard(queue)
                    await self._add_up(queue)
            except (StoreUnavailable, StoreLost) as error:
                log.warning("the board of a queue could not be checkpointed (%s); the next claim tries again", error)
                return
            except SchemaTooNew:  # the process that writes this journal now has all that we have
                self._boards.drop(queue)
            except Exception:
                log.exception("the board of a queue could not be checkpointed; the next claim tries again")
                return

    async def close(self) -> None:
        """Write what is left, unless that takes long."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._writing is None or self._writing.done() or self._loop is not asyncio.get_running_loop():
            self._writing = asyncio.create_task(self._write_all())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WITHIN):
                await self._writing
