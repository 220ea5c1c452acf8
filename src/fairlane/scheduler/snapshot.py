"""What the plan is given and what it gives back. Frozen values: a store fills the first and writes the second.

The plan asks for rows as it goes (`Ask`), so that a claim reads what it serves and not what waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import msgspec

from fairlane.clock import SECOND, Instant
from fairlane.policy.gates import GateState
from fairlane.policy.gates import Release as Release
from fairlane.policy.limits import PLANNED_AHEAD, Rate
from fairlane.policy.policy import Policy

if TYPE_CHECKING:
    from fairlane.scheduler.board import Flow, Gate, Lane


class Standing(IntEnum):
    """Where a lane or a flow stands: nothing to do, taking turns, or waiting on a gate."""

    IDLE = 0
    READY = 1
    PARKED = 2


class QueueRow(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The state of a queue that only the holder of its claim lock writes."""

    vtime: float
    """The start tag of the job served last: where a flow that was empty rejoins if nobody else is ready."""
    cursor: float
    """No ready flow lies before (cursor, cursor_tie): the scan starts here."""
    cursor_tie: int
    tie: int
    """The last tie-breaker given out."""
    cost: float
    """Moving average of run time in seconds: the guess for a flow without history. 0 until the first job has ended."""


class FlowRow(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A flow: the lanes of one fair key."""

    id: bytes
    key: list[str | None]
    weight: float
    vtime: float
    tie: int
    cost: float
    """Moving average of the run time of its jobs, in seconds; 0 until one has ended."""
    debt: float
    """Virtual time still to be added: a correction that waits for the flow's next turn, so that its tag stays put."""
    open: int
    """How many of its lanes are READY."""
    shut: int
    """How many of its lanes are PARKED."""
    standing: int
    gate: bytes | None
    """PARKED: what it waits on. READY: the gate that woke it, until it has been visited."""
    given_by: int = 0
    """The position that the job which gave it its weight had at its enqueue; 0: the policy gives it."""


class LaneRow(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A lane: the ready jobs that no policy can tell apart."""

    id: bytes
    flow: bytes
    priority: int
    keys: dict[str, str | None]
    ready: int
    in_flight: int
    floor: int
    """No ready job of this lane has a position below it."""
    rank: int
    """The rank of its head, or less."""
    standing: int
    gate: bytes | None
    """PARKED: what it waits on. READY: the gate that woke it, until it has been visited."""
    tag: float
    """The virtual time of its flow when it was parked: the order in which a gate wakes its lanes."""
    head: int = 0
    """The position of its head, or less: it orders lanes of equal rank."""


class GateRow(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A gate: the state of one limit for one key."""

    id: bytes
    limit: str
    key: list[str | None]
    in_flight: int
    tat: Instant
    waiting: int
    """How many lanes and flows are parked on it."""
    awake: int
    """How many it has woken that have not been visited yet: room that is spoken for."""
    wake_at: Instant | None
    """When it has to be looked at although nothing was released."""
    memo: str | None = None
    """What its limit keeps besides, as JSON."""
    value: float | None = None
    """The bound that the newest job of its key brought along; `None`: what the policy says."""
    given_by: int = 0
    """The position that this job had at its enqueue: positions rise, so the number with the lower one is older."""


class Head(msgspec.Struct, frozen=True, gc=False):
    """A ready job at the head of its lane; `ref` is whatever its store finds it by."""

    ref: Any
    position: int
    ready_at: Instant
    """When it joined its lane."""


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """A lane event: jobs became ready in a lane (or, with a count below zero, ceased to be)."""

    lane: bytes
    priority: int
    keys: dict[str, str | None]
    count: int
    floor: int
    """The lowest position that became ready."""
    since: Instant
    """When the job at that position joined its lane."""
    given: dict[str, float] | None = None
    """Numbers that the newest of the jobs brought along, by the name of their limit; `weight` is the flow's."""
    resumed: int = 0
    """How many jobs had kept their place in a sequence until now, whether they are ready again or gone for good."""
    given_by: int = 0
    """The position that the job which gave them had at its enqueue."""
    ref: Any = None
    """Whatever its store finds the job by, if it is a single one and the store knows."""


class KeptPlaces(msgspec.Struct, frozen=True, gc=False):
    """Jobs of a lane that have kept their place in a sequence: they will be ready again, and run before all others."""

    priority: int
    keys: dict[str, str | None]
    count: int


class Contender(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A queue whose lanes wait at a gate that it shares, or whose jobs hold slots there."""

    queue: str
    taken: int
    """How many of its jobs are in flight there. Where the limit does not count those: how many it has started, by a
    count of which only the difference between queues means something."""
    waits: bool = False
    is_eager: bool = False
    """Whoever claimed there last had slots left, and waits to be woken."""
    until: Instant | None = None
    """It has been woken for its part of the room, which is kept for it until then; `None`: it has not."""


class SharedGateRow(msgspec.Struct, frozen=True, gc=False):
    """What all queues share of a gate: the state of one shared limit for one key."""

    id: bytes
    limit: str
    key: list[str | None]
    in_flight: int
    tat: Instant
    contenders: list[Contender]
    memo: str | None = None
    value: float | None = None


class SharedRelease(msgspec.Struct, frozen=True, gc=False):
    """A lane event: claims that had passed a shared gate ended. The figures are those of `Release`."""

    gate: bytes
    queue: str
    task: str
    ended: int
    ran: int
    unstarted: int
    since: Instant
    failed: int
    neutral: int
    latest: Instant

    @property
    def ending(self) -> Release:
        """What limits look at. Neither sequences nor adaptive caps are shared."""
        stats = self.ended, self.ran, 0.0, self.unstarted, 0.0, self.since, self.failed, self.neutral, self.latest
        return Release(b"", *stats)


class GateWakeup(msgspec.Struct, frozen=True, gc=False):
    """There is room for another queue's lanes: it is to look at this gate of its own."""

    queue: str
    gate: bytes | None
    """`None`: a gate of the whole queue, at which every claim looks."""


class Forced(msgspec.Struct, frozen=True, gc=False):
    """A ready job that an operator wants to start next, whatever its limits say."""

    lane: bytes
    head: Head


class Scan(msgspec.Struct, frozen=True):
    """Ready flows in the order of their turns, each with its first lanes."""

    flows: list[Flow] = []
    lanes: list[Lane] = []
    """The first ready lanes of those flows."""
    reached: tuple[float, int] | None = None
    """Where the last of them stood, in virtual time and by its tie-breaker; `None`: there was none."""
    ended: bool = True
    """These are all that there are."""


class Events(msgspec.Struct, frozen=True):
    """What a claim starts from, beside the board."""

    now: Instant
    queue: QueueRow
    arrivals: list[Arrival] = []
    releases: list[Release] = []
    forced: list[Forced] = []
    """Their lanes are in the snapshot, if they are known."""
    policy_since: Instant = 0
    """When this policy came into force: what was claimed before was charged by another one."""
    shared: list[SharedGateRow] = []
    """Gates of shared limits: those without a key, and those that lane events name."""
    shared_releases: list[SharedRelease] = []
    woken: list[bytes] = []
    """Gates that another queue has left room at."""


class Snapshot(Events, kw_only=True, frozen=True):
    """What a claim starts from, read under the queue's claim lock."""

    policy: Policy
    lanes: list[Lane] = []
    """The lanes that the lane events name."""
    scan: Scan = Scan()
    """The first ready flows from the cursor on."""
    due_gates: list[Gate] = []
    """Gates whose `wake_at` has come."""
    lag: int = 0
    """Microseconds from this claim until its jobs will have started, as far as whoever claims knows."""
    listens: bool = False
    """Whoever claims waits to be woken if it is left with slots."""
    ahead: int | None = None
    """How many jobs may be started that are to wait for their instants, beside those that are wanted now. `None`:
    whoever claims starts everything at once."""
    spare_heads: int = 0
    """Jobs of a lane that are looked up beyond those that its turns will take: they are kept. A lane with fewer than
    half of them left has more looked up when any other lane has: it would soon be the next to ask."""


class Ask(msgspec.Struct, frozen=True):
    """What the plan asks of the board, and the board of the tables where it does not hold it: pieces by id as far as
    they exist, and what is listed in an order, but for the ids in `but_not`. A lane comes with its flow."""

    flows: Sequence[bytes] = ()
    lanes: Sequence[bytes] = ()
    gates: Sequence[bytes] = ()
    ready: Sequence[tuple[bytes, int]] = ()
    """From each flow, up to so many of its ready lanes: the lowest rank first, of equals the first head."""
    parked: Sequence[tuple[bytes, int]] = ()
    """From each gate, up to so many lanes and as many flows parked on it: the lowest tag first, of equals the first
    head."""
    scan: tuple[float, int, int] | None = None
    """Ready flows from this (virtual time, tie-breaker) on, up to so many; each with its first ready lanes."""
    alarms: tuple[Instant, int] | None = None
    """Gates to be woken after this time, the first of them."""
    heads: tuple[tuple[bytes, int, int], ...] = ()
    """From each lane, the first ready jobs at or above a position: (lane, position, how many)."""
    shared: tuple[bytes, ...] = ()
    """Shared gates by id, where they exist."""
    but_not: tuple[list[bytes], list[bytes], list[bytes]] = ([], [], [])
    """Flows, lanes and gates that memory knows better."""

    @property
    def is_of_board(self) -> bool:
        """It asks for more than jobs and shared gates."""
        return bool(
            self.flows or self.lanes or self.gates or self.ready or self.parked or self.scan or self.alarms is not None
        )


class Supply(msgspec.Struct, frozen=True):
    """What the store found for an `Ask`."""

    flows: list[Flow] = []
    gates: list[Gate] = []
    lanes: list[Lane] = []
    heads: dict[bytes, list[Head]] = {}
    scan: Scan = Scan()
    shared: list[SharedGateRow] = []


class Start(msgspec.Struct, frozen=True, gc=False):
    """One job to start, and what its flow was charged for it."""

    head: Head
    lane: bytes
    charge: float
    shared: tuple[bytes, ...] = ()
    """The shared gates that it has passed: its end is noted there."""
    at: Instant = 0
    """When it counts as started: with the claim, or later."""
    pace: Pace | None = None
    """Within which bounds it must be started, if it passes a smooth rate and whoever claims keeps to them."""


class LaneStats(msgspec.Struct, array_like=True, gc=False):
    """What a claim did with the jobs of one lane. `arrived` falls below zero where jobs ceased to wait."""

    keys: dict[str, str | None]
    priority: int
    arrived: int = 0
    started: int = 0
    ended: int = 0
    failed: int = 0
    unstarted: int = 0
    ran: int = 0
    """Microseconds, of those that ended and were not lost."""
    waited: int = 0
    """Microseconds for which those that started had been ready, added up."""
    newest: Instant = 0
    """When the last of those that arrived joined the lane, as far as their lane events say; 0: none arrived."""
    lost: int = 0
    """Of those that ended."""
    latest: Instant = 0
    """When the last of those that ended was claimed."""


class UnseenLane(LaneStats, array_like=True, gc=False):
    """Jobs of one lane that no claim has seen, of those that brought the same numbers along."""

    given: dict[str, float] | None = None
    given_by: int = 0
    """The latest position at which one of them was given."""


class GateStats(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Whether a limit holds anybody of one key back, once a claim is made, and how often it did so in that claim."""

    limit: str
    key: list[str | None]
    is_held: bool
    denied: int


class ClaimStats(msgspec.Struct, array_like=True, frozen=True):
    """What one claim did."""

    at: Instant
    waited: int
    """Microseconds that those who started had waited since they were ready, added up."""
    waited_longest: int
    lanes: list[LaneStats]
    gates: list[GateStats]


class Plan(msgspec.Struct, frozen=True):
    """What a claim writes: the jobs it starts, in order, and every piece that changed."""

    starts: list[Start]
    queue: QueueRow
    flows: list[Flow]
    lanes: list[Lane]
    gates: list[Gate]
    more: bool
    """Work that could start now was left behind: the next claimer should come at once."""
    shared: list[SharedGateRow] = []
    wakeups: list[GateWakeup] = []
    stats: ClaimStats | None = None
    """What the claim did; `None`: nothing happened."""


AHEAD = PLANNED_AHEAD
"""How far ahead starts are handed out."""
LEAD = AHEAD // 2
"""A gate is looked at again when its next start is so near: one claim for every so much of a rate, not one a job."""
CLOCKS = SECOND // 500
"""By how much the clocks of two processes may disagree about an instant. Where that matters, a claim's first start
keeps so much distance from the last one of the claim before it."""

KEPT = 2 * AHEAD
"""Gates that nothing has passed for so long, beyond what they remember, are forgotten."""


class Pace(msgspec.Struct, frozen=True):
    """When a claimed job may start."""

    at: Instant
    latest: Instant
    """Never after this: the starts of another claim may follow."""
    gates: tuple[tuple[bytes, Rate], ...]
    """The gates that it was planned for."""

    def moved(self, by: int) -> Pace:
        """The same by another clock."""
        return Pace(self.at + by, self.latest + by, self.gates)


def distance(rate: Rate) -> int:
    """What the first start of a claim keeps from the last start of another, beyond what the rate asks for."""
    return 0 if rate.rolling else max(0, CLOCKS - rate.slack)


class Passed:
    """The starts that one process has really made, by gate. However late they were, the next one keeps its distance."""

    def __init__(self) -> None:
        self._gates: dict[bytes, GateState] = {}
        self._forget_at: Instant = 0

    def opens_at(self, pace: Pace) -> Instant:
        """From when on a job may start, given what has started before it. Not before it was planned to."""
        opens = pace.at
        for gate_id, rate in pace.gates:
            gate = self._gates.get(gate_id)
            if gate is not None:
                opens = max(opens, rate.starts_at(gate, pace.at) - (0 if rate.rolling else rate.slack))
        return opens

    def note(self, pace: Pace, now: Instant) -> None:
        """It has started."""
        for gate_id, rate in pace.gates:
            rate.take(self._gates.setdefault(gate_id, GateState()), now, 1)
        if now >= self._forget_at:
            self._forget_at = now + KEPT
            self._gates = {each: gate for each, gate in self._gates.items() if gate.tat + KEPT > now}
