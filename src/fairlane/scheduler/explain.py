"""Why something waits: every reason that holds it, with who holds it and until when. The plan's own pieces answer.

A store finds the facts without writing anything, `examine` folds them as a claim would, and `explain` puts them into
words. What a gate says here is what it says to a claim: it is asked the same way.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from itertools import zip_longest
from math import inf
from shlex import quote
from typing import Any
from uuid import UUID

import msgspec
from msgspec.structs import replace

from fairlane.clock import SECOND, Instant, lasting
from fairlane.job import SUSPECT_FROM, State
from fairlane.policy.gates import Origin, Reason
from fairlane.policy.keys import key_words, lane_id, select
from fairlane.policy.overrides import Override
from fairlane.policy.partitions import whole_of
from fairlane.policy.policy import Policy
from fairlane.scheduler.board import PARKED, Board, Flow, Gate, Lane, ask_for_shared
from fairlane.scheduler.estimate import (
    Contest,
    Contestant,
    Entrants,
    Passed,
    Seen,
    at_any_run_time,
    rehearse,
    run_time_of,
)
from fairlane.scheduler.plan import Working
from fairlane.scheduler.rebuild import Miscount
from fairlane.scheduler.settlement import DISPATCHER
from fairlane.scheduler.snapshot import Ask, FlowRow, LaneRow, Plan, QueueRow, Snapshot, Supply
from fairlane.stats.gates import origin_at

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
LANES_EACH = 5
"""Lanes of each such flow."""
BLURRED = 4
"""The order of jobs in other lanes is only known roughly: a quarter of the time is added where there are any."""
UNCOUNTED = 1 << 30
LAST = 1 << 62


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
    suspicion: int = 0
    ready_at: Instant = 0
    """When it joined its lane; says nothing of a job that does not wait."""

    @property
    def waits_to_run_alone(self) -> bool:
        """It was given back because another runs alone: had it run, it would be cleared."""
        return self.state is State.SCHEDULED and self.suspicion >= SUSPECT_FROM

    @property
    def is_published(self) -> bool:
        """Whether a dispatcher holds it: no worker of its engine has begun it."""
        return self.state is State.RUNNING and self.worker_id is not None and self.worker_id.version == DISPATCHER


class Service(msgspec.Struct, frozen=True):
    """Who serves a queue, by what workers and dispatchers say of themselves."""

    is_served: bool = False
    stopping: int = 0
    """Workers and dispatchers that stop: they take no new jobs, and serve it no more."""
    is_forwarded: bool = False
    """A dispatcher served it within the last day: an engine runs its jobs, and no worker should."""
    refusal: str | None = None
    """What a broker says, where nobody serves the queue but dispatchers whose broker refuses their messages."""
    unbegun: str | None = None
    """What a dispatcher says of messages that nobody begins."""
    slots: int = 0
    """What the workers that serve it run at the same time at most, for all their queues; for a job, its queue's."""

    @property
    def can_start(self) -> bool:
        """Somebody is there who starts what may start."""
        return self.is_served and self.refusal is None


class Holder(msgspec.Struct, frozen=True):
    """A job that takes up a place: it runs, or keeps its place in a sequence until its next attempt."""

    job: UUID
    task: str
    priority: int
    keys: dict[str, str | None]
    """All that tells its lane apart."""
    worker: str | None
    since: Instant
    """Since when it runs; for one that waits, `due_at`."""
    due_at: Instant | None = None
    """When it runs again."""
    is_lapsed: bool = False
    """Its lease is over: its worker is gone, and nobody has taken it back."""


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


class GateFacts(msgspec.Struct, frozen=True):
    """The pieces that a claim would look at, once all lane events that were read are folded."""

    lane: LaneRow | None
    flow: FlowRow | None
    shut: list[Hold]
    """The gates without room, without the jobs that hold them."""
    full: tuple[bytes, ...]
    """Those of them that count what runs; of shared ones the shared half."""
    gates: dict[bytes, Passed]
    """Every gate that the subject passes, by id, and the keyed gates that its rivals pass."""
    arrived: int
    """Jobs of the queue that lane events tell of, and no claim has seen."""
    turn: float = 0.0
    """When it is the flow's turn, in virtual time."""
    own: Contestant | None = None
    """Its flow, as it takes turns."""
    siblings: list[LaneRow] = []
    """Other lanes of its flow, as far as they were looked at."""
    siblings_each: float = 1.0
    """How many lanes its flow has for each of these."""
    rivals: list[Entrants] = []
    """Lanes of other flows, as far as they were looked at."""


class Facts(msgspec.Struct, frozen=True):
    """What a store has found."""

    subject: Subject
    policy: Policy
    now: Instant
    queue: QueueRow
    examined: GateFacts
    ready: int
    """Jobs of the queue that are ready, as far as lane events have been folded."""
    running: list[Holder]
    """Jobs of the queue that run, up to a bound."""
    ahead: int
    """Ready jobs before it in its lane, up to `COUNTED`."""
    flows_ahead: int
    """Flows whose turn comes before its own, up to `COUNTED`."""
    next_up: list[UUID]
    """The jobs that would start next, in their order."""
    kept: list[Holder] = []
    """Jobs of the subject's sequence that keep their place, up to a bound."""
    is_forced: bool = False
    """An operator wants the job to start next."""
    service: Service = Service()
    miscounts: list[Miscount] = []
    """Of the gates without room, those that do not count what runs."""
    parked: int = 0
    """Lanes of the queue that wait at gates of keys, as far as lane events have been folded."""
    ahead_in: dict[bytes, int] = {}
    """Ready jobs before its position in other lanes of its flow, up to `COUNTED_BESIDE` each."""


class Explanation(msgspec.Struct, frozen=True):
    """Everything that holds a job, a key or a queue."""

    subject: Subject
    now: Instant
    holds: list[Hold]
    earliest: Instant | None
    """No start before this, whatever is released meanwhile; `None`: no time is known, somebody has to act."""
    estimate: Instant | None
    """When it will start if things go on as they do; a guess. `None`: they cannot, or nothing is known of how long runs
    take."""
    next_up: list[UUID]

    @property
    def reasons(self) -> list[Reason]:
        return [hold.reason for hold in self.holds]


def examine(snapshot: Snapshot, subject: Subject, next_up: int) -> Generator[Ask, Supply, tuple[GateFacts, Plan]]:
    """Fold the lane events as a claim would, and ask every gate that the subject has to pass. Also returns what a claim
    of `next_up` jobs would do."""
    working = Working(snapshot, next_up)

    def steps() -> Generator[Ask, Supply, tuple[GateFacts, Plan]]:
        yield from working.fold()
        examined = yield from _ask_gates(working, snapshot, subject)
        return examined, (yield from working.go_on())

    return (yield from ask_for_shared(working.board, steps()) if snapshot.policy.shared_limits else steps())


def _ask_gates(working: Working, snapshot: Snapshot, subject: Subject) -> Generator[Ask, Supply, GateFacts]:
    board, policy, now = working.board, snapshot.policy, snapshot.now
    lane = board.lanes.get(subject.lane) if subject.lane is not None else None
    named = _gates(policy, subject)
    if fresh := [gate_id for gate_id, _, _ in named if gate_id not in board.gates]:
        yield from working.ask(Ask(gates=tuple(fresh)))
    gates = [(board.gate(*each), each[2]) for each in named]
    if board.has_unknown_shared():
        yield Ask()
    shut: list[Hold] = []
    full = []
    for gate, values in gates:
        if gate.room(now) <= 0:
            if gate.bound.limit.counts_in_flight:
                full.append((gate.shared or gate).id)
            shut.append(_hold_of(policy, gate, values, now))
    passed = {gate.id: _passed(gate) for gate, _ in gates}
    arrived = sum(event.count for event in snapshot.arrivals)
    examined = GateFacts(None, None, shut, tuple(full), passed, arrived)
    if lane is None:
        return examined
    examined = replace(examined, lane=lane.row(), flow=lane.flow.row(), turn=board.tag(lane.flow))
    return examined if subject.job is None else (yield from _line_up(working, examined, lane))


def _hold_of(policy: Policy, gate: Gate, values: tuple[str | None, ...], now: Instant) -> Hold:
    name, by, why = gate.bound.name, gate.bound.limit.by, gate.limit.why(gate.shared or gate, now)
    if why.reason is Reason.PAUSED:
        return paused(policy.overrides.pauses[by][values], now)
    if why.reason is Reason.MOVING:
        return Hold(why.reason, why.words)
    key = dict(zip(by, values, strict=True))
    override = policy.overrides.limits.get((name, tuple(sorted(key.items()))))
    origin = origin_at(policy, gate.bound, values, gate.value)
    details = f" ({why.words})" if why.words else ""
    source = origin.words if override is None else f"set by {override.set_by or 'an operator'}"
    words = (
        f"{key_words(key) or 'the whole queue'} is at its limit {gate.limit!r}: {why.used:g} of {why.bound:g}{details}"
        f"{', ' if source else ''}{source}"
    )
    until = gate.opens_at(now)
    return Hold(why.reason, words, name, key, why.used, why.bound, until, override=override, origin=origin)


def _passed(gate: Gate) -> Passed:
    return Passed(gate.limit, gate.shared or gate, 1 if gate.shared is None else max(1, gate.shared.waiting))


def _line_up(working: Working, examined: GateFacts, lane: Lane) -> Generator[Ask, Supply, GateFacts]:
    """Who may go before a job of a lane: a bounded number of lanes and flows, and how many more there are. Lanes of
    its own flow are on the board already."""
    board, policy, flow = working.board, working.policy, lane.flow
    queue = working.snapshot.queue
    crowds = {gate: board.gates[gate].waiting for gate in examined.gates}
    supply = yield from working.ask(
        Ask(
            parked=tuple((gate, RIVALS) for gate, waiting in crowds.items() if waiting),
            scan=(queue.cursor, queue.cursor_tie, RIVALS) if policy.fair else None,
        )
    )
    board.add_flows(supply.scan.flows)
    board.add_lanes(supply.scan.lanes)
    # A flow that waits as a whole comes without its lanes.
    hidden = [each.id for each in board.flows.values() if each is not flow and each.known < min(LANES_EACH, each.open)]
    if hidden:
        yield from working.ask(Ask(ready=tuple((each, LANES_EACH) for each in hidden)))
    lanes = [each for each in board.lanes.values() if each is not lane and each.ready > 0]
    passes = {each.id: tuple(gate_id for gate_id, _ in board.passes(each)) for each in lanes}
    if unknown := {gate for ids in passes.values() for gate in ids if gate not in board.gates}:
        yield from working.ask(Ask(gates=tuple(sorted(unknown))))
    contestants = {each.id: _contestant(board, each) for each in board.flows.values()}
    own, rivals = [], []
    for each in lanes:
        if each.flow is flow:
            own.append(each.row())
            continue
        # Where only some of those that wait at a gate were looked at, they stand for all of them.
        crowd = max((crowds.get(gate, RIVALS) / RIVALS for gate in passes[each.id]), default=1.0)
        theirs = contestants[each.flow.id]
        waits = _parked(policy, each.row(), theirs)
        jobs = round(each.ready * max(1.0, crowd))
        rivals.append(Entrants(theirs, jobs, passes[each.id], float(each.head), parked=waits))
    if not supply.scan.ended and supply.scan.flows:
        # Flows that were not looked at, all of them together: one after the other has its turn.
        unseen = _contestant(board, supply.scan.flows[-1])
        unseen.step = 0.0
        rivals.append(Entrants(unseen, UNCOUNTED, (), is_pool=True))
    return replace(
        examined,
        gates={**{gate.id: _passed(gate) for each in lanes for gate in board.gates_of(each)}, **examined.gates},
        own=contestants[flow.id],
        siblings=own,
        siblings_each=max(1.0, (flow.open + flow.shut - 1) / len(own)) if own else 1.0,
        rivals=rivals,
    )


def _parked(policy: Policy, lane: LaneRow, flow: Contestant) -> tuple[bytes, float] | None:
    if lane.standing != PARKED or lane.gate is None:
        return None
    return lane.gate, lane.tag if policy.fair else flow.tag


def _contestant(board: Board, flow: Flow) -> Contestant:
    step = board.charge(flow) / flow.weight if board.policy.fair else 0.0
    return Contestant(board.tag(flow), step, round((flow.cost or board.cost) * SECOND))


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
    subject, now = facts.subject, facts.now
    at = subject.claimed_at or 0
    if subject.is_published:
        words = (
            f"has been at the broker for {_seconds(now - at)}, published by dispatcher {subject.worker}, and no worker "
            "of the engine has begun it; check that one consumes the engine's queue"
        )
        return _explanation(facts, [Hold(Reason.PUBLISHED, words)], now, None)
    if subject.state is State.RUNNING and at > now:
        words = f"is next at its rate: worker {subject.worker} starts it in {_seconds(at - now)}"
        return _explanation(facts, [Hold(Reason.RATE, words, until=at)], at, at)
    if subject.state is State.RUNNING:
        words = f"has been running for {_seconds(now - at)} on {subject.worker or 'a worker'}"
        if any(each.job == subject.job and each.is_lapsed for each in facts.running):
            words += ", which is gone: once a worker serves the queue, it runs again"
        return _explanation(facts, [Hold(Reason.RUNNING, words)], now, now)
    if subject.state is not None and subject.state.is_final:
        return _explanation(facts, [Hold(Reason.ENDED, f"is {subject.state}; it waits for nothing")], None, None)
    holds = _outside(facts, tasks, forwarded)
    if facts.is_forced:
        holds.append(Hold(Reason.FORCED, "an operator has forced it to start next: it starts once a slot is free"))
        earliest = now if facts.service.can_start else None
        return _explanation(facts, holds, earliest, earliest)
    holds += [*_scheduled(facts), *_shut(facts)]
    # Whatever has holders ends when they do.
    stops = [hold for hold in holds if hold.until is None and not hold.holders]
    earliest = None if stops else max([now, *(hold.until for hold in holds if hold.until is not None)])
    if facts.service.unbegun is not None:
        # What is at the broker takes up the queue's limits, and has not begun.
        holds.append(Hold(Reason.PUBLISHED, facts.service.unbegun))
    if subject.outcome == "released" and subject.error and not subject.waits_to_run_alone:
        words = f"was claimed and given back before it ran: {_first_line(subject.error)}"
        holds.append(Hold(Reason.GIVEN_BACK, words))
    holds += _queued(facts)
    if not holds and subject.job is not None:
        holds.append(Hold(Reason.SLOT, "could start now: it waits for a free slot of a worker"))
    return _explanation(facts, holds, earliest, None if stops else _estimate(facts, earliest, seen))


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


def _explanation(facts: Facts, holds: list[Hold], earliest: Instant | None, estimate: Instant | None) -> Explanation:
    return Explanation(facts.subject, facts.now, holds, earliest, estimate, facts.next_up)


def no_service(stopping: int, *, is_forwarded: bool | None) -> str:
    """That nobody starts a queue's jobs, in words."""
    who = "dispatcher" if is_forwarded else "worker"
    if not stopping:
        return f"no {who} serves the queue"
    those = f"its only {who} is" if stopping == 1 else f"all of its {stopping:,} {who}s are"
    return f"{those} stopping and {'takes' if stopping == 1 else 'take'} no new jobs"


def start_command(*queues: str, is_forwarded: bool | None) -> str:
    """What to type where nobody serves some queues; for several, it serves all that the app has. A worker would run a
    forwarded task in its own process, so where it is not known who runs the tasks (`None`), both are named."""
    only = f" --queues {quote(whole_of(queues[0]))}" if len(queues) == 1 else ""
    worker, dispatcher = (f"fairlane {what}{only}" for what in ("worker module:app", "forward module:forwarder"))
    if is_forwarded is None:
        return f"{worker} if Fairlane's own workers run its tasks; {dispatcher} if Celery, Dramatiq or Taskiq does"
    return dispatcher if is_forwarded else worker


def forwarded_to_an_engine(queue: str, forwarded: Collection[str] | None, *, was_seen: bool) -> bool | None:
    """Whether an engine runs a queue's jobs: a dispatcher was seen, or the app at hand says so. `None`: no app is."""
    if was_seen or forwarded is None:
        return was_seen or None
    return whole_of(queue) in forwarded


def _outside(facts: Facts, tasks: Collection[str] | None, forwarded: Collection[str] | None) -> list[Hold]:
    subject, service, holds = facts.subject, facts.service, []
    if service.refusal is not None:
        words = (
            f"the broker refuses what is published: {service.refusal}; publishing is retried until it accepts messages"
        )
        holds.append(Hold(Reason.BROKER, words))
    elif not facts.service.is_served:
        is_forwarded = forwarded_to_an_engine(subject.queue, forwarded, was_seen=service.is_forwarded)
        command = start_command(subject.queue, is_forwarded=is_forwarded)
        words = no_service(service.stopping, is_forwarded=is_forwarded)
        holds.append(Hold(Reason.NO_WORKER, f"{words}; start one: {command}"))
    if tasks is not None and subject.task is not None and subject.task not in tasks:
        words = f"no task of the app is named {subject.task!r}; deploy it, or cancel the job"
        holds.append(Hold(Reason.UNKNOWN_TASK, words))
    return holds


def _scheduled(facts: Facts) -> list[Hold]:
    subject, due_at = facts.subject, facts.subject.due_at
    if subject.state is not State.SCHEDULED or due_at is None:
        return []
    if subject.waits_to_run_alone:
        # No time is known: it comes back when the one that runs alone has ended.
        because = _first_line(subject.error or "its turn has not come")
        return [Hold(Reason.GIVEN_BACK, f"is to run alone, because its process died while it ran: {because}")]
    if due_at <= facts.now:
        return [Hold(Reason.SCHEDULED, "is due, and joins its lane at the next claim", until=due_at)]
    why = f"for attempt {subject.attempt + 1}" if subject.attempt else "for its time"
    return [Hold(Reason.SCHEDULED, f"waits {why}, due in {_seconds(due_at - facts.now)}", until=due_at)]


def _shut(facts: Facts) -> list[Hold]:
    holds = []
    for hold in facts.examined.shut:
        bound = facts.policy.bound_named(hold.limit or "")
        if bound is None:
            holds.append(hold)
        elif hold.reason is Reason.SEQUENCE:
            holds += _in_sequence(facts, hold)
        else:
            holders = _holders(facts, hold.key) if bound.limit.counts_in_flight else []
            words = hold.words + _holder_words(holders, facts.now)
            if hold.until is not None:
                words += f"; opens in {_seconds(hold.until - facts.now)}"
            words += _miscount_words(facts, hold)
            holds.append(replace(hold, words=words, holders=holders[:HOLDERS], count=len(holders) or None))
    return holds


def _in_sequence(facts: Facts, hold: Hold) -> list[Hold]:
    """Who is before it. A job that keeps its place itself waits for its time alone."""
    found = [*_of_key(facts.kept, hold.key), *_holders(facts, hold.key)]
    holders = [each for each in found if each.job != facts.subject.job]
    if found and not holders:
        return []
    until = max((each.due_at for each in holders if each.due_at is not None), default=None)
    words = f"the jobs of {key_words(hold.key)} run one after the other{_miscount_words(facts, hold)}"
    for first in holders[:1]:
        does = "has been running for" if first.due_at is None else "runs again in"
        words += f"; job {first.job} ({first.task}) {does} {_seconds(abs(facts.now - first.since))}"
    return [replace(hold, words=words, until=until, holders=holders[:HOLDERS], count=len(holders), origin=None)]


def paused(override: Override, now: Instant) -> Hold:
    """What a pause does, who has set it, and until when."""
    key = dict(override.scope)
    who = f" by {override.set_by}" if override.set_by else ""
    because = f": {override.reason}" if override.reason else ""
    end = "" if override.expires_at is None else f", for another {_seconds(override.expires_at - now)}"
    words = f"{key_words(key) or 'the queue'} is paused{who}{end}{because}"
    return Hold(Reason.PAUSED, words, key=key, until=override.expires_at, override=override)


def _holder_words(holders: Sequence[Holder], now: Instant) -> str:
    if not holders:
        return ""
    oldest = now - min(holder.since for holder in holders)
    text = f"; held by {len(holders)} running job{'s' * (len(holders) > 1)}, the longest for {_seconds(oldest)}"
    if gone := sum(holder.is_lapsed for holder in holders):
        text += f"; of these, {gone} on a worker that is gone: once a worker serves the queue, the place is free again"
    return text


def _miscount_words(facts: Facts, hold: Hold) -> str:
    """A count that is wrong is no reason to wait for anybody."""
    for each in facts.miscounts:
        if each.limit == hold.limit and each.key == tuple(hold.key.values()):
            some = "only 1 running job holds it" if each.running == 1 else f"only {each.running} running jobs hold it"
            running = some if each.running else "no running job holds it"
            return f"; {running}, so the count is wrong: a worker of the queue corrects it within two minutes"
    return ""


def _of_key(holders: Iterable[Holder], key: Mapping[str, str | None]) -> list[Holder]:
    by, values = tuple(key), tuple(key.values())
    return [each for each in holders if select(by, each.keys, each.priority) == values]


def _holders(facts: Facts, key: Mapping[str, str | None]) -> list[Holder]:
    return sorted(_of_key(facts.running, key), key=lambda each: each.since)


def _first_line(text: str) -> str:
    return text.splitlines()[0]


def _queued(facts: Facts) -> list[Hold]:
    subject = facts.subject
    holds: list[Hold] = []
    if subject.job is None or subject.state is not State.READY:
        return holds
    if facts.examined.lane is None:
        holds.append(Hold(Reason.NEW, "no claim has seen it yet"))
    if facts.ahead:
        ahead = _ahead(facts)
        many = f"{ahead:,}" if facts.ahead < COUNTED else f"{COUNTED:,} or more (up to {ahead:,})"
        holds.append(Hold(Reason.LANE, f"jobs ahead of it in its lane: {many}", count=ahead))
    if facts.flows_ahead:
        many = f"{COUNTED:,} or more" if facts.flows_ahead >= COUNTED else f"{facts.flows_ahead:,}"
        holds.append(Hold(Reason.TURN, f"flows with an earlier turn: {many}", count=facts.flows_ahead))
    return holds


def _ahead(facts: Facts) -> int:
    """Jobs of its lane before it: as counted, or, where there are more, as many as the lane can have."""
    lane, subject = facts.examined.lane, facts.subject
    if subject.state is not State.READY:
        return 0 if lane is None else max(0, lane.ready)  # it joins at the end when it is due
    return facts.ahead if facts.ahead < COUNTED or lane is None else max(COUNTED, lane.ready - 1)


def _estimate(facts: Facts, earliest: Instant | None, seen: Seen | None) -> Instant | None:
    """When it starts if things go on as they do: as a rehearsal shows it with all that are before it, the limits and
    the slots that there are, or as fast as jobs were really started while it waited. The slower one decides. `None`:
    it depends on how long runs take, and nothing is known of that."""
    if earliest is None or facts.subject.job is None:
        return None
    contest = _contest(facts)
    _set_run_times(contest, facts)
    shortest = min(lane.flow.run_time for lane in contest.lanes)
    rehearsed = at_any_run_time(shortest, lambda assumed: rehearse(contest, facts.now, assumed))
    if rehearsed is None:
        return None
    at, before = rehearsed
    times = [earliest, at]
    if len(contest.lanes) > 1:
        times.append(at + (at - facts.now) // BLURRED)
    lane = facts.examined.lane
    if seen is not None and lane is not None and facts.subject.state is State.READY:
        since = lane.rank + lane.priority * facts.policy.priority_step
        if pace := seen.pace(since):
            times.append(facts.now + round(before / pace * SECOND))
    return max(times)


def _contest(facts: Facts) -> Contest:
    """Who may go before the subject, from what a store has found of them."""
    examined, subject, policy = facts.examined, facts.subject, facts.policy
    of_queue = tuple(gate_id for gate_id, _ in policy.queue_gates)
    position = subject.position if subject.state is State.READY else LAST
    flow = examined.own or Contestant(0.0, 1.0, round(facts.queue.cost * SECOND))
    waits, head = None, position
    if (lane := examined.lane) is not None:
        waits, head = _parked(policy, lane, flow), min(lane.head, position)
    gates = tuple(gate for gate, _, _ in _gates(policy, subject) if gate not in of_queue)
    own = Entrants(flow, _ahead(facts), gates, head, parked=waits, is_subject=True)
    lanes = [own, *(_sibling(facts, flow, each, position) for each in examined.siblings), *examined.rivals]
    mine = own.jobs + 1 if lane is None else max(own.jobs + 1, lane.ready)
    pool = max(0, facts.ready + examined.arrived - mine - sum(each.jobs for each in lanes[1:] if not each.is_pool))
    if pool and policy.fair is not None:
        # Who waits at gates that are not the subject's was not looked at, and has its turn when such a gate opens.
        unseen = max(1, facts.parked - sum(each.parked is not None for each in lanes))
        lanes.append(Entrants(Contestant(flow.tag, flow.step / unseen, flow.run_time), UNCOUNTED, (), is_pool=True))
    slots = max(1, len(facts.running), facts.service.slots)
    return Contest(lanes, position, examined.gates, of_queue, pool, slots, len(facts.running))


def _sibling(facts: Facts, flow: Contestant, lane: LaneRow, position: float) -> Entrants:
    """Another lane of the subject's flow: all of it goes first if its jobs have a head start, and none of it if its
    head has to wait for the head start of the subject."""
    subject, policy, each = facts.subject, facts.policy, facts.examined.siblings_each
    has_head_start = lane.priority > subject.priority
    counted = facts.ahead_in.get(lane.id, COUNTED_BESIDE)
    order = (policy.rank(subject.ready_at, subject.priority), subject.position)
    ahead = lane.ready
    if subject.state is State.READY and (lane.rank, lane.head) > order:
        ahead = 0
    elif not has_head_start and counted < COUNTED_BESIDE:
        ahead = counted
    first = -inf if has_head_start else min(lane.head, position)
    gates = tuple(gate for gate, _ in policy.gates_of(lane.priority, lane.keys))
    jobs = round(each * lane.ready)
    return Entrants(flow, jobs, gates, first, round(each * ahead), _parked(policy, lane, flow))


def _set_run_times(contest: Contest, facts: Facts) -> None:
    """Runs take as long as those that ended, and no less than those that hold the places others wait for."""
    everybody = [facts.now - each.since for each in facts.running]
    of_queue: list[int] = [] if len(everybody) < facts.service.slots else everybody
    own = of_queue
    for hold in facts.examined.shut:
        bound = facts.policy.bound_named(hold.limit or "")
        if bound is None or not bound.limit.counts_in_flight:
            continue
        holding = [facts.now - each.since for each in _holders(facts, hold.key)]
        own = max(own, holding, key=lambda ages: sum(ages) / len(ages) if ages else 0.0)
        of_queue = of_queue if hold.key else holding
    subject = contest.lanes[0].flow
    for flow in {id(lane.flow): lane.flow for lane in contest.lanes}.values():
        flow.run_time = run_time_of(flow.run_time, own if flow is subject else of_queue)


def _seconds(amount: int) -> str:
    return lasting(max(0, amount) / SECOND)
