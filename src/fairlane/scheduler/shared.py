"""Gates of limits that several queues share by name.

Such a gate has two halves. What all queues share (how many are in flight, the tokens) is a `SharedGate`; only who holds
the lock of its limit changes it. Where a queue's own lanes wait is a gate of that queue like any other. The plan asks
the second, and the second asks the first how much of the room is open to this queue.

Room is dealt between the queues that wait for it, one slot after the other, to whichever has taken the fewest: holds
the fewest now, or, where the limit counts no slots, has started the fewest. A queue that is not there to take its part
is rung, and its part is kept for it for a moment; then it goes to the others.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec.structs import replace

from fairlane.clock import Instant
from fairlane.policy.gates import Limit
from fairlane.policy.keys import gate_id
from fairlane.scheduler.snapshot import Contender, Need, Ring, SharedGateRow, SharedRelease, Supply

if TYPE_CHECKING:
    from fairlane.scheduler.board import Board

__all__ = ["SharedGate", "ask_for_shared", "deal", "fold_shared", "rings_for_all"]

T = TypeVar("T")

KEEP = 50_000
"""Microseconds for which a queue's part of the room is kept for it once it has been rung."""


def deal(room: int, taken: list[int]) -> list[int]:
    """Divide room so that whoever has taken the fewest catches up first; of equals, the first goes first."""
    order = sorted(range(len(taken)), key=lambda n: (taken[n], n))
    level = taken[order[0]] if order else 0
    rising = 0
    for nth in order:
        # Those below rise together until they reach the next.
        if (taken[nth] - level) * rising > room:
            break
        room -= (taken[nth] - level) * rising
        level = taken[nth]
        rising += 1
    dealt = [0] * len(taken)
    for place, nth in enumerate(sorted(order[:rising])):
        dealt[nth] = level - taken[nth] + room // rising + (place < room % rising)
    return dealt


class SharedGate:
    """What all queues share of one limit for one key, being worked on."""

    __slots__ = (
        "before",
        "contenders",
        "declared",
        "dirty",
        "id",
        "in_flight",
        "is_known",
        "key",
        "limit",
        "memo",
        "name",
        "queue",
        "taken",
        "tat",
        "value",
        "waiting",
        "was_rung",
    )

    def __init__(self, row: SharedGateRow, declared: Limit, queue: str, limit: Limit | None = None) -> None:
        self.id = row.id
        self.declared = declared
        self.limit = limit or declared
        """What holds for this queue, if an operator has changed it there."""
        self.before: Instant | None = None
        self.queue = queue
        self.is_known = False
        self.dirty = False
        self.take_over(row)

    def take_over(self, row: SharedGateRow) -> None:
        """Be as stored."""
        self.name = row.limit
        self.key = row.key
        self.in_flight = row.in_flight
        self.tat = row.tat
        self.memo: Any = None if row.memo is None else msgspec.json.decode(row.memo)
        self.value = row.value
        self.contenders = {each.queue: each for each in row.contenders}
        self.waiting = self._count_waiting()
        own = self.contenders.get(self.queue)
        self.was_rung = own is not None and own.until is not None
        self.taken = own.taken if own is not None else 0 if self.limit.counts_in_flight else None

    def row(self) -> SharedGateRow:
        return SharedGateRow(
            self.id,
            self.name,
            self.key,
            self.in_flight,
            self.tat,
            [self.contenders[queue] for queue in sorted(self.contenders)],
            None if self.memo is None else msgspec.json.encode(self.memo).decode(),
            self.value,
        )

    def room(self, now: Instant) -> int:
        """How much is open to this queue: all, less what others wait for and have not had their part of."""
        room = self.limit.room_at(self, now)
        rivals = self._rivals(now)
        if room <= 0 or not rivals:
            return room
        taken = [each.taken for each in rivals]
        # Who has not waited until now is owed nothing.
        own = min(taken) if self.taken is None else self.taken
        # Of equals, the one that was rung goes first: two who give way to each other would leave the slot empty.
        return deal(room, [own, *taken])[0] if self.was_rung else deal(room, [*taken, own])[-1]

    def charge(self, now: Instant, count: int) -> None:
        if self.taken is None:
            self.taken = min((each.taken for each in self._rivals(now)), default=0)
        self.taken += count
        if self.before is None:
            self.before = self.tat
        self.limit.take(self, now, count)
        self.dirty = True

    def free(self, release: SharedRelease, now: Instant) -> None:
        """Take note of claims that ended, in whatever queue."""
        if self.limit.free(self, release, now, max(0, now - release.since), release.task):
            self.dirty = True
        if self.limit.counts_in_flight:
            ended = release.ended + release.unstarted
            if release.queue == self.queue:
                self.taken = max(0, (self.taken or 0) - ended)
            elif (other := self.contenders.get(release.queue)) is not None:
                self._keep(replace(other, taken=max(0, other.taken - ended)))

    def opens_at(self, now: Instant) -> Instant | None:
        """For a gate that is shut for this queue: when to look again although nothing is released."""
        if self.limit.room_at(self, now) <= 0:
            return self.limit.opens_again_at(self)
        return min((each.until for each in self._rivals(now) if each.until is not None), default=now + KEEP)

    def leave(self, now: Instant, *, waits: bool, is_eager: bool) -> list[Ring]:
        """End this queue's turn: say whether it waits for more, and ring the others for what is left."""
        before = dict(self.contenders)
        self.contenders.pop(self.queue, None)
        for each in list(self.contenders.values()):
            if each.until is not None and each.until <= now:
                # It did not come. What was rung for it still tells it to look when it does.
                self._keep(Contender(each.queue, each.taken))
        others = [each for each in self.contenders.values() if each.waits]
        parts = deal(max(0, self.declared.room_at(self, now)), [each.taken for each in others])
        rings = []
        for each, part in zip(others, parts, strict=True):
            if part <= 0 or each.until is not None:
                continue
            rings.append(_ring(each.queue, self.name, self.key))
            # Where nobody is to come soon, its lanes are looked at when somebody does.
            self._keep(replace(each, until=now + KEEP) if each.is_eager else Contender(each.queue, each.taken))
        taken = min((each.taken for each in others), default=0) if self.taken is None else self.taken
        self._keep(Contender(self.queue, taken, waits, waits and is_eager))
        self.waiting = self._count_waiting()
        self.dirty = self.dirty or self.contenders != before
        return rings

    def _keep(self, contender: Contender) -> None:
        """Remember a queue for as long as it waits or holds slots."""
        if contender.waits or (self.limit.counts_in_flight and contender.taken > 0):
            self.contenders[contender.queue] = contender
        else:
            self.contenders.pop(contender.queue, None)

    def _count_waiting(self) -> int:
        return sum(each.waits for each in self.contenders.values())

    def _rivals(self, now: Instant) -> list[Contender]:
        """The other queues that wait and are likely to come for their part."""
        return [
            each
            for queue, each in self.contenders.items()
            if queue != self.queue and each.waits and (each.is_eager if each.until is None else each.until > now)
        ]


def rings_for_all(rows: Iterable[SharedGateRow]) -> list[Ring]:
    """Rings for every queue that waits at these gates: their bound has changed."""
    return [_ring(each.queue, row.limit, row.key) for row in rows for each in row.contenders if each.waits]


def _ring(queue: str, limit: str, key: Iterable[str | None]) -> Ring:
    return Ring(queue, gate_id(queue, limit, tuple(key)) if key else None)


def fold_shared(board: Board, releases: Iterable[SharedRelease]) -> None:
    """Free what claims of any queue held that have ended."""
    for release in releases:
        if (gate := board.shared.get(release.gate)) is not None:
            gate.free(release, board.now)
        elif (row := board.retired.get(release.gate)) is not None and row.in_flight > 0:
            board.retired[row.id] = _left(row, release)
            board.freed.add(row.id)


def _left(row: SharedGateRow, release: SharedRelease) -> SharedGateRow:
    """A gate of which only the count is known, once these claims have left it."""
    ended = release.ended + release.unstarted
    contenders = [
        replace(each, taken=max(0, each.taken - ended)) if each.queue == release.queue else each
        for each in row.contenders
    ]
    staying = [each for each in contenders if each.waits or each.taken > 0]
    return replace(row, in_flight=max(0, row.in_flight - ended), contenders=staying)


def ask_for_shared(board: Board, steps: Generator[Need, Supply, T]) -> Generator[Need, Supply, T]:
    """Let the plan ask as ever; whenever it asks for a gate that is shared, ask for the other half as well."""
    supply: Supply | None = None
    while True:
        try:
            need = next(steps) if supply is None else steps.send(supply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        supply = yield replace(need, shared=board.unknown_shared(need.gates))
        board.add_shared(supply.shared)
