"""Why something waits: every reason that holds it, with who holds it and until when. The plan's own pieces answer.

A store finds the facts without writing anything, `examine` folds them as a claim would, and `explain` puts them into
words. What a gate says here is what it says to a claim: it is asked the same way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from copy import copy, deepcopy
from itertools import zip_longest
from math import inf
from shlex import quote
from typing import Any
from uuid import UUID

import msgspec
from msgspec.structs import replace

from fairlane.clock import SECOND, Instant, lasting
from fairlane.job import State
from fairlane.policy.keys import key_words, lane_id, select
from fairlane.policy.numbers import Origin
from fairlane.policy.overrides import Override, PauseGate
from fairlane.policy.partitions import whole_of
from fairlane.policy.policy import Policy
from fairlane.policy.reasons import Reason, Why
from fairlane.scheduler.board import FIRST_GUESS, IDLE, Gate, Lane
from fairlane.scheduler.census import Miscount
from fairlane.scheduler.estimate import TURNAROUND, Line, Others, OwnLane, Passed, Rival, Seen, starts_by
from fairlane.scheduler.gauge import origin_at
from fairlane.scheduler.plan import Working
from fairlane.scheduler.settlement import DISPATCHER
from fairlane.scheduler.shared import SharedGate, ask_for_shared
from fairlane.scheduler.snapshot import FlowRow, LaneRow, Need, Plan, QueueRow, Snapshot, Supply

__all__ = [
    "Examined",
    "Explanation",
    "Facts",
    "Holder",
    "Kept",
    "Service",
    "Subject",
    "examine",
    "explain",
    "forwarded_to_an_engine",
    "sequence_lane",
    "siblings_of",
    "start_command",
    "together",
]

HOLDERS = 20
"""Jobs that are named as holders of one gate; of the others there is a number."""
COUNTED = 10_000
"""Jobs and flows ahead are counted one by one up to this."""
OWN_LANES = 50
"""Lanes of its flow in which the jobs ahead are counted, those with most jobs; how many more there are is known."""
COUNTED_BESIDE = 1_000
"""Jobs ahead are counted one by one up to this in each of those but its own."""
RIVALS = 200
"""Flows that take turns beside its own, and lanes that wait at its gates, which are looked at one by one."""


class Subject(msgspec.Struct, frozen=True):
    """What is asked about: one job, the jobs of some keys, or (without keys) a whole queue."""

    queue: str
    keys: dict[str, str | None]
    """All that tells its lane apart, for a job; what was asked for, else."""
    priority: int = 0
    job: UUID | None = None
    task: str | None = None
    state: State | None = None
    lane: bytes | None = None
    position: int = 0
    due_at: Instant | None = None
    claimed_at: Instant | None = None
    worker: str | None = None
    ended_at: Instant | None = None
    attempt: int = 0
    outcome: str | None = None
    """How its last claim ended, and why."""
    error: str | None = None
    worker_id: UUID | None = None

    @property
    def is_published(self) -> bool:
        """Whether a dispatcher holds it: no worker of its engine has begun it."""
        return self.state is State.RUNNING and self.worker_id is not None and self.worker_id.version == DISPATCHER


class Service(msgspec.Struct, frozen=True):
    """Who serves a queue, by what workers and dispatchers say of themselves."""

    is_served: bool = False
    is_forwarded: bool = False
    """A dispatcher served it within the last day: an engine runs its jobs, and no worker should."""
    refusal: str | None = None
    """What a broker says, where nobody serves the queue but dispatchers whose broker refuses their messages."""
    unbegun: str | None = None
    """What a dispatcher says of messages that nobody begins."""
    slots: int = 0
    """What the workers that serve it run at the same time at most, for all their queues."""


class Running(msgspec.Struct, frozen=True):
    """A job that runs, with what tells its lane apart."""

    job: UUID
    task: str
    priority: int
    keys: dict[str, str | None]
    worker: str | None
    since: Instant


class Kept(msgspec.Struct, frozen=True):
    """A job that waits for its next attempt and keeps its place in a sequence meanwhile."""

    job: UUID
    task: str
    priority: int
    keys: dict[str, str | None]
    due_at: Instant


class Shut(msgspec.Struct, frozen=True):
    """A gate without room."""

    key: tuple[str | None, ...]
    limit: str
    why: Why
    opens_at: Instant | None
    """When it opens by itself; `None`: not by time."""
    origin: Origin
    """Where its number came from."""


class Examined(msgspec.Struct, frozen=True):
    """The pieces that a claim would look at, once all bells that were read are folded."""

    lane: LaneRow | None
    flow: FlowRow | None
    shut: list[Shut]
    turn: float = 0.0
    """When it is the flow's turn, in virtual time."""
    full: tuple[bytes, ...] = ()
    """Those of them that count what runs; of shared ones the shared half."""
    gates: list[Passed] = []
    """Every gate that the subject passes."""
    others: Others = Others()
    arrived: int = 0
    """Jobs of the queue that bells tell of, and no claim has seen."""


class Facts(msgspec.Struct, frozen=True):
    """What a store has found."""

    subject: Subject
    policy: Policy
    now: Instant
    queue: QueueRow
    examined: Examined
    ready: int
    """Jobs of the queue that are ready, as far as bells have been folded."""
    running: list[Running]
    """Jobs of the queue that run, up to a bound."""
    ahead: int
    """Ready jobs before it in its lane, up to `COUNTED`."""
    flows_ahead: int
    """Flows whose turn comes before its own, up to `COUNTED`."""
    has_worker: bool
    next_up: list[UUID]
    """The jobs that would start next, in their order."""
    kept: list[Kept] = []
    """Jobs of the subject's sequence that keep their place, up to a bound."""
    is_forced: bool = False
    """An operator wants the job to start next."""
    service: Service = Service()
    miscounts: list[Miscount] = []
    """Of the gates without room, those that do not count what runs."""
    ahead_in: dict[bytes, int] = {}
    """Ready jobs before its position in other lanes of its flow, up to `COUNTED_BESIDE` each."""

    @property
    def is_served(self) -> bool:
        return self.has_worker or self.service.is_served


class Holder(msgspec.Struct, frozen=True):
    """A job that takes up a place: it runs, or keeps it until its next attempt."""

    job: UUID
    task: str
    worker: str | None
    since: Instant
    """Since when it runs; for one that waits, `due_at`."""
    due_at: Instant | None = None
    """When it runs again."""


class Hold(msgspec.Struct, frozen=True):
    """One reason."""

    reason: Reason
    words: str
    limit: str | None = None
    key: dict[str, str | None] = {}
    used: float | None = None
    bound: float | None = None
    until: Instant | None = None
    """When it ends by itself; `None`: not by time."""
    holders: list[Holder] = []
    override: Override | None = None
    """What an operator has changed, if that is what holds it or sets the bound."""
    count: int | None = None
    origin: Origin | None = None
    """Where the bound came from."""


class Explanation(msgspec.Struct, frozen=True):
    """Everything that holds a job, a key or a queue."""

    subject: Subject
    now: Instant
    holds: list[Hold]
    earliest: Instant | None
    """No start before this, whatever is released meanwhile; `None`: no time is known, somebody has to act."""
    estimate: Instant | None
    """When it will start if things go on as they do; a guess. `None`: they cannot."""
    next_up: list[UUID]

    @property
    def reasons(self) -> list[Reason]:
        return [hold.reason for hold in self.holds]


def examine(snapshot: Snapshot, subject: Subject, next_up: int) -> Generator[Need, Supply, tuple[Examined, Plan]]:
    """Fold the bells as a claim would, and ask every gate that the subject has to pass. Also returns what a claim of
    `next_up` jobs would do."""
    working = Working(snapshot, next_up)
    steps = _examine(working, snapshot, subject)
    return (yield from ask_for_shared(working.board, steps) if snapshot.policy.shared_limits else steps)


def _examine(working: Working, snapshot: Snapshot, subject: Subject) -> Generator[Need, Supply, tuple[Examined, Plan]]:
    yield from working.fold()
    examined = yield from _ask_gates(working, snapshot, subject)
    return examined, (yield from working.go_on())


def _ask_gates(working: Working, snapshot: Snapshot, subject: Subject) -> Generator[Need, Supply, Examined]:
    board, policy, now = working.board, snapshot.policy, snapshot.now
    lane = board.lanes.get(subject.lane) if subject.lane is not None else None
    named = _gates(policy, subject)
    if fresh := [gate_id for gate_id, _, _ in named if gate_id not in board.gates]:
        supply = yield Need(gates=tuple(fresh))
        board.add_gates(supply.gates)
    gates: list[tuple[Gate, tuple[str | None, ...]]] = [(board.gate(*each), each[2]) for each in named]
    if board.has_unknown_shared():
        yield Need()
    shut: list[Shut] = []
    full = []
    for gate, values in gates:
        if gate.room(now) <= 0:
            if gate.bound.limit.counts_in_flight:
                full.append((gate.shared or gate).id)
            why = gate.limit.why(gate.shared or gate, now)
            origin = origin_at(policy, gate.bound, values, gate.value)
            shut.append(Shut(values, gate.bound.name, why, gate.opens_at(now), origin))
    passed = [
        Passed(
            gate.id,
            gate.limit,
            _as_it_is(gate.shared or gate),
            not gate.bound.limit.by,
            1 if gate.shared is None else max(1, gate.shared.waiting),
            max(1.0, gate.waiting / RIVALS),
        )
        for gate, _ in gates
    ]
    arrived = sum(bell.count for bell in snapshot.arrivals)
    if lane is None:
        return Examined(None, None, shut, 0.0, tuple(full), passed, arrived=arrived)
    others = Others()
    if subject.job is not None:
        others = yield from _line_up(working, lane, [gate for gate, _ in gates])
    turn = board.tag(lane.flow)
    return Examined(lane.row(), lane.flow.row(), shut, turn, tuple(full), passed, others, arrived)


def _as_it_is(gate: Gate | SharedGate) -> Gate | SharedGate:
    """A gate that stays as it is while the plan goes on."""
    kept = copy(gate)
    kept.memo = deepcopy(gate.memo)
    return kept


def _line_up(working: Working, lane: Lane, gates: Sequence[Gate]) -> Generator[Need, Supply, Others]:
    """Who may go before a job of a lane: a bounded number of lanes and flows, and how many more there are. Lanes of
    its own flow are on the board already."""
    board, policy, flow = working.board, working.policy, lane.flow
    queue = working.snapshot.queue
    supply = yield Need(
        parked=tuple((gate.id, RIVALS) for gate in gates if gate.waiting),
        # Tie-breakers are whole numbers: strictly after the one before is at it or after.
        scan=(queue.cursor, queue.cursor_tie - 1, RIVALS) if policy.fair else None,
    )
    board.add_flows((*supply.flows, *supply.scan.flows))
    board.add_lanes((*supply.lanes, *supply.scan.lanes))
    own: list[OwnLane] = []
    waiting: dict[bytes, Counter[bytes]] = {}
    for each in board.lanes.values():
        if each is lane or each.ready <= 0:
            continue
        passes = [gate_id for gate_id, _ in board.passes(each)]
        if each.flow is flow:
            own.append(OwnLane(each.id, each.priority, each.ready, each.floor, frozenset(passes)))
        else:
            waiting.setdefault(each.flow.id, Counter()).update(dict.fromkeys(passes, each.ready))
    rivals = [
        Rival(board.tag(each), board.charge(each) / each.weight, waiting.get(each.id, {}))
        for each in board.flows.values()
        if each is not flow and (each.standing != IDLE or each.id in waiting)
    ]
    last = supply.scan.flows[-1] if not supply.scan.ended and supply.scan.flows else None
    return Others(
        board.tag(flow),
        board.charge(flow) / flow.weight,
        own,
        max(1.0, (flow.open + flow.shut - 1) / len(own)) if own else 1.0,
        rivals,
        inf if last is None else board.tag(last),
    )


def _gates(policy: Policy, subject: Subject) -> list[tuple[bytes, Any, tuple[str | None, ...]]]:
    """The gates that every job of the subject passes."""
    known = {*subject.keys, "priority"} if subject.job is not None else set(subject.keys)
    keyed = policy.gates_of(subject.priority, subject.keys) if subject.keys else []
    gates = [(gate_id, bound) for gate_id, bound in keyed if set(bound.limit.by) <= known]
    return [
        (gate_id, bound, select(bound.limit.by, subject.keys, subject.priority))
        for gate_id, bound in (*gates, *policy.queue_gates)
    ]


def siblings_of(policy: Policy, subject: Subject) -> bytes | None:
    """The flow whose lanes may go before a waiting job by rank; a store puts `OWN_LANES` of them into its snapshot."""
    is_waiting = subject.state in (State.READY, State.SCHEDULED) and subject.lane is not None
    return policy.flow_of(subject.priority, subject.keys) if is_waiting else None


def sequence_lane(policy: Policy, subject: Subject) -> bytes | None:
    """The lane whose jobs run one after the other with the subject: who keeps a place there is to be found."""
    if policy.sequence is None:
        return None
    if subject.lane is not None:
        return subject.lane
    keys = {name: subject.keys[name] for name in policy.lane_keys if name in subject.keys}
    return lane_id(policy.queue, 0, keys) if len(keys) == len(policy.lane_keys) else None


def explain(
    facts: Facts,
    tasks: Collection[str] | None = None,
    forwarded: Collection[str] | None = (),
    seen: Seen | None = None,
) -> Explanation:
    """Every reason that holds the subject, those that take longest first. `tasks` are those that the app knows,
    `forwarded` the queues that it leaves to an engine, `seen` is how the last minutes of its queue went."""
    subject = facts.subject
    if subject.is_published:
        return _told(facts, [_published(facts)], facts.now, None)
    if subject.state is State.RUNNING and (at := subject.claimed_at or 0) > facts.now:
        words = f"is next at its rate: worker {subject.worker} starts it in {_seconds(at - facts.now)}"
        return _told(facts, [Hold(Reason.RATE, words, until=at)], at, at)
    if subject.state is State.RUNNING:
        words = f"runs since {_seconds(facts.now - (subject.claimed_at or 0))} on {subject.worker or 'a worker'}"
        return _told(facts, [Hold(Reason.RUNNING, words)], facts.now, facts.now)
    if subject.state is not None and subject.state.is_final:
        return _told(facts, [Hold(Reason.ENDED, f"is {subject.state}; it waits for nothing")], None, None)
    if facts.is_forced:
        words = "an operator wants it to start next, whatever holds it: it starts with the next free slot"
        holds = [*_outside(facts, tasks, forwarded), Hold(Reason.FORCED, words)]
        earliest = facts.now if facts.is_served and facts.service.refusal is None else None
        return _told(facts, holds, earliest, earliest)
    holds = [*_outside(facts, tasks, forwarded), *_scheduled(facts), *_shut(facts)]
    stops = [hold for hold in holds if hold.until is None and not _is_released(hold)]
    earliest = None if stops else max([facts.now, *(hold.until for hold in holds if hold.until is not None)])
    holds += [*_unbegun(facts), *_given_back(subject), *_queued(facts)]
    if not holds and subject.job is not None:
        holds.append(Hold(Reason.SLOT, "could start now: it waits for a free slot of a worker"))
    return _told(facts, holds, earliest, None if stops else _estimate(facts, earliest, seen))


def together(queue: str, parts: Sequence[Explanation]) -> Explanation:
    """What holds a queue, from what holds its partitions. What is said of several of them is said once."""
    holds = {(hold.reason, hold.limit, hold.words): hold for part in parts for hold in part.holds}
    turns = zip_longest(*(part.next_up for part in parts))
    return Explanation(
        replace(parts[0].subject, queue=queue),
        parts[0].now,
        list(holds.values()),
        min((part.earliest for part in parts if part.earliest is not None), default=None),
        min((part.estimate for part in parts if part.estimate is not None), default=None),
        [job for turn in turns for job in turn if job is not None][: max(len(part.next_up) for part in parts)],
    )


def _told(facts: Facts, holds: list[Hold], earliest: Instant | None, estimate: Instant | None) -> Explanation:
    return Explanation(facts.subject, facts.now, holds, earliest, estimate, facts.next_up)


def start_command(queue: str, *, is_forwarded: bool | None) -> str:
    """What to type where nobody serves a queue. A worker would run a forwarded task in its own process, so where it is
    not known who runs the tasks (`None`), both are named."""
    worker, dispatcher = (
        f"fairlane {what} --queues {quote(whole_of(queue))}"
        for what in ("worker module:app", "forward module:forwarder")
    )
    if is_forwarded is None:
        return f"{worker} if Fairlane's own workers run its tasks; {dispatcher} if Celery, Dramatiq or Taskiq does"
    return dispatcher if is_forwarded else worker


def forwarded_to_an_engine(queue: str, forwarded: Collection[str] | None, *, was_seen: bool) -> bool | None:
    """Whether an engine runs a queue's jobs: a dispatcher was seen, or the app at hand says so. `None`: no app is."""
    if was_seen or forwarded is None:
        return was_seen or None
    return whole_of(queue) in forwarded


def _published(facts: Facts) -> Hold:
    subject = facts.subject
    since = _seconds(facts.now - (subject.claimed_at or 0))
    words = (
        f"is at the broker since {since}, published by dispatcher {subject.worker}, and no worker of the engine has "
        f"begun it; look whether one consumes the engine's queue"
    )
    return Hold(Reason.PUBLISHED, words)


def _unbegun(facts: Facts) -> list[Hold]:
    """What is at the broker takes up the queue's limits, and has not begun."""
    told = facts.service.unbegun
    return [] if told is None else [Hold(Reason.PUBLISHED, told)]


def _outside(facts: Facts, tasks: Collection[str] | None, forwarded: Collection[str] | None) -> list[Hold]:
    subject, service, holds = facts.subject, facts.service, []
    if service.refusal is not None:
        words = f"the broker refuses what is published: {service.refusal}; it is tried again until it takes messages"
        holds.append(Hold(Reason.BROKER, words))
    elif not facts.is_served:
        is_forwarded = forwarded_to_an_engine(subject.queue, forwarded, was_seen=service.is_forwarded)
        who = "dispatcher" if is_forwarded else "worker"
        command = start_command(subject.queue, is_forwarded=is_forwarded)
        holds.append(Hold(Reason.NO_WORKER, f"no {who} serves the queue; start one: {command}"))
    if tasks is not None and subject.task is not None and subject.task not in tasks:
        words = f"no task of the app is named {subject.task!r}; deploy it, or cancel the job"
        holds.append(Hold(Reason.UNKNOWN_TASK, words))
    return holds


def _scheduled(facts: Facts) -> list[Hold]:
    due_at = facts.subject.due_at
    if facts.subject.state is not State.SCHEDULED or due_at is None:
        return []
    why = f"for attempt {facts.subject.attempt + 1}" if facts.subject.attempt else "for its time"
    return [Hold(Reason.SCHEDULED, f"waits {why}, due in {_seconds(due_at - facts.now)}", until=due_at)]


def _shut(facts: Facts) -> list[Hold]:
    holds = []
    for each in facts.examined.shut:
        values, name, why, opens_at = each.key, each.limit, each.why, each.opens_at
        bound = facts.policy.bound_named(name)
        assert bound is not None
        key = dict(zip(bound.limit.by, values, strict=True))
        if isinstance(bound.limit, PauseGate):
            holds.append(_paused(facts, bound.limit.by, tuple(values)))
            continue
        if why.reason is Reason.MOVING:
            holds.append(Hold(why.reason, "its key moves to another partition of the queue, and starts there"))
            continue
        if why.reason is Reason.SEQUENCE:
            holds += _in_sequence(facts, name, key, why)
            continue
        scope = tuple(sorted(key.items()))
        override = facts.policy.overrides.limits.get((name, scope))
        holders = _holders(facts, key) if bound.limit.counts_in_flight else []
        holds.append(
            Hold(
                why.reason,
                _limit_words(facts, each, key, holders, override),
                name,
                key,
                why.used,
                why.bound,
                opens_at,
                holders[:HOLDERS],
                override,
                len(holders) or None,
                each.origin,
            )
        )
    return holds


def _in_sequence(facts: Facts, name: str, key: Mapping[str, str | None], why: Why) -> list[Hold]:
    """Who is before it. A job that keeps its place itself waits for its time alone."""
    by, values = tuple(key), tuple(key.values())
    kept = [each for each in facts.kept if select(by, each.keys, each.priority) == values]
    holders = [Holder(each.job, each.task, None, each.due_at, each.due_at) for each in kept] + _holders(facts, key)
    if any(each.job == facts.subject.job for each in holders):
        holders = [each for each in holders if each.job != facts.subject.job]
        if not holders:
            return []
    until = max((each.due_at for each in kept if each.job != facts.subject.job), default=None)
    words = f"the jobs of {key_words(key)} run one after the other{_miscount_words(facts, name, key)}"
    for first in holders[:1]:
        does = "runs since" if first.due_at is None else "runs again in"
        words += f"; job {first.job} ({first.task}) {does} {_seconds(abs(facts.now - first.since))}"
    return [Hold(why.reason, words, name, dict(key), why.used, why.bound, until, holders[:HOLDERS], count=len(holders))]


def _paused(facts: Facts, by: tuple[str, ...], values: tuple[str | None, ...]) -> Hold:
    override = facts.policy.overrides.pauses[by][values]
    key = dict(zip(by, values, strict=True))
    who = f" by {override.set_by}" if override.set_by else ""
    because = f": {override.reason}" if override.reason else ""
    end = "" if override.expires_at is None else f", for another {_seconds(override.expires_at - facts.now)}"
    words = f"{key_words(key) or 'the queue'} is paused{who}{end}{because}"
    return Hold(Reason.PAUSED, words, key=key, until=override.expires_at, override=override)


def _limit_words(
    facts: Facts,
    shut: Shut,
    key: Mapping[str, str | None],
    holders: list[Holder],
    override: Override | None,
) -> str:
    name, why, opens_at = shut.limit, shut.why, shut.opens_at
    where = key_words(key) or "the whole queue"
    text = f"{where} is at its limit {name}: {why.used:g} of {why.bound:g}"
    if why.words:
        text += f" ({why.words})"
    if override is not None:
        text += f", set by {override.set_by or 'an operator'}"
    elif shut.origin.words:
        text += f", {shut.origin.words}"
    if holders:
        oldest = facts.now - min(holder.since for holder in holders)
        text += f"; held by {len(holders)} running job{'s' * (len(holders) > 1)}, the longest for {_seconds(oldest)}"
    if opens_at is not None:
        text += f"; opens in {_seconds(opens_at - facts.now)}"
    return text + _miscount_words(facts, name, key)


def _miscount_words(facts: Facts, name: str, key: Mapping[str, str | None]) -> str:
    """A count that is wrong is no reason to wait for anybody."""
    for each in facts.miscounts:
        if each.limit == name and each.key == tuple(key.values()):
            running = "no running job holds it" if not each.running else f"only {each.running} running jobs hold it"
            return f"; {running}, so the count is wrong: a worker of the queue corrects it within two minutes"
    return ""


def _holders(facts: Facts, key: Mapping[str, str | None]) -> list[Holder]:
    by = tuple(key)
    values = tuple(key.values())
    holding = [each for each in facts.running if select(by, each.keys, each.priority) == values]
    holding.sort(key=lambda each: each.since)
    return [Holder(each.job, each.task, each.worker, each.since) for each in holding]


def _given_back(subject: Subject) -> list[Hold]:
    if subject.outcome != "released" or not subject.error:
        return []
    first_line, *_ = subject.error.splitlines()
    return [Hold(Reason.GIVEN_BACK, f"was claimed and given back before it ran: {first_line}")]


def _queued(facts: Facts) -> list[Hold]:
    subject = facts.subject
    holds: list[Hold] = []
    if subject.job is None or subject.state is not State.READY:
        return holds
    if facts.examined.lane is None:
        holds.append(Hold(Reason.NEW, "no claim has seen it yet"))
    if facts.ahead:
        noun = "jobs of its lane are" if facts.ahead != 1 else "job of its lane is"
        ahead = _ahead(facts)
        many = f"{ahead:,}" if facts.ahead < COUNTED else f"{COUNTED:,} or more (up to {ahead:,})"
        holds.append(Hold(Reason.LANE, f"{many} {noun} ahead of it", count=ahead))
    if facts.flows_ahead:
        noun = "flows have their" if facts.flows_ahead != 1 else "flow has its"
        words = f"{_many(facts.flows_ahead)} {noun} turn before its own"
        holds.append(Hold(Reason.TURN, words, count=facts.flows_ahead))
    return holds


def _is_released(hold: Hold) -> bool:
    """Whether it ends when running jobs do."""
    return bool(hold.holders)


def _ahead(facts: Facts) -> int:
    """Jobs of its lane before it: as counted, or, where there are more, as many as the lane can have."""
    lane, subject = facts.examined.lane, facts.subject
    if subject.state is not State.READY:
        return 0 if lane is None else max(0, lane.ready)  # it joins at the end when it is due
    return facts.ahead if facts.ahead < COUNTED or lane is None else max(COUNTED, lane.ready - 1)


def _ahead_in(facts: Facts) -> dict[bytes, int]:
    """The same for other lanes of its flow; all of a lane whose jobs have a head start."""
    counted = facts.ahead_in
    return {
        each.id: counted[each.id]
        for each in facts.examined.others.lanes
        if each.priority <= facts.subject.priority and counted.get(each.id, COUNTED_BESIDE) < COUNTED_BESIDE
    }


def _estimate(facts: Facts, earliest: Instant | None, seen: Seen | None) -> Instant | None:
    """When it starts if things go on as they do: as the limits allow with all that are before it, with the slots
    that there are, and as fast as jobs were really started while it waited. The slowest of these decides."""
    if earliest is None or facts.subject.job is None:
        return None
    examined = facts.examined
    cost = (examined.flow.cost if examined.flow else 0.0) or facts.queue.cost or FIRST_GUESS
    run_time = round(cost * SECOND)
    line = Line(_ahead(facts), _ahead_in(facts), facts.ready + examined.arrived, examined.others)
    opens_at = max([facts.now, *(each.opens_at for each in examined.shut if each.opens_at is not None)])
    before = line.before()
    slots = max(1, len(facts.running), facts.service.slots)
    times = [earliest, starts_by(examined.gates, line, opens_at, run_time)]
    times.append(facts.now + before // slots * (run_time + TURNAROUND))
    lane = examined.lane
    if seen is not None and lane is not None and facts.subject.state is State.READY:
        since = lane.rank + lane.priority * facts.policy.priority_step
        if pace := seen.pace(since):
            times.append(facts.now + round(before / pace * SECOND))
    return max(times)


def _many(count: int) -> str:
    return f"{COUNTED:,} or more" if count >= COUNTED else f"{count:,}"


def _seconds(amount: int) -> str:
    return lasting(max(0, amount) / SECOND)
