"""Stats as people read them: written once, as procedures that ask a store for named statements.

Everything that is asked of one `Moment` is of one snapshot of the database. What it says is the stored sums, and over
them what the journal tells that nobody has added up, and what has happened that no claim has seen. Looking changes
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.job import JobRecord
from fairlane.policy.by import By
from fairlane.policy.policy import Policy
from fairlane.scheduler.figures import DAY, MINUTE, KeyFigures, Minute, Pending, Place, Recent, changes_of_held
from fairlane.scheduler.gauge import freed_slots, held_now, touched_gates, without
from fairlane.scheduler.journal import Tail
from fairlane.scheduler.resident import Ask, Found, ResidentBoard
from fairlane.scheduler.snapshot import Arrival, Forced, GateRow, GateTally, LaneRow, LaneTally, SharedGateRow
from fairlane.scheduler.tally import decode_tally
from fairlane.scheduler.upcoming import upcoming
from fairlane.store import key_rows
from fairlane.store.decoding import Declared, decode_policy
from fairlane.store.figures import (
    COUNTED_AT_MOST,
    LANES_AT_MOST,
    Counted,
    FlowWeight,
    KeyPage,
    KeySort,
    LanesCounted,
    QueueFigures,
    WorkerSeen,
    key_scope,
)
from fairlane.store.job_rows import decode_key, decode_keys, no_such_queue
from fairlane.store.key_rows import KeyPlace

__all__ = [
    "Looking",
    "Many",
    "Moment",
    "Peek",
    "Peeked",
    "Query",
    "Question",
    "Records",
    "Rows",
    "Some",
    "Tables",
]

T = TypeVar("T")
S = TypeVar("S")
Named = tuple[str, KeyFigures]
"""A key, and the partition that it is in."""

OLDEST_LANES = 1_000
OLDEST_AT_ONCE = 20
"""Lanes whose heads are looked up together, to find the job that has waited for the longest."""


class Query(NamedTuple):
    """A statement by its name, to be answered with its rows.

    Parameters are alike on every store: numbers, texts, lists of them (lists of ids as well), and `Rows`.
    """

    name: str
    parameters: tuple[Any, ...]


class Some(NamedTuple):
    """The first rows of a statement, without those that have one of these values in front. PostgreSQL takes the
    number and the values as its last parameters."""

    name: str
    parameters: tuple[Any, ...]
    most: int
    but_not: Collection[Any]


class Rows(NamedTuple):
    """Rows that a statement is given together: PostgreSQL takes a list for each column."""

    rows: Sequence[Sequence[Any]]
    width: int


class Many(NamedTuple):
    """A statement that writes many rows of a queue."""

    name: str
    queue: int
    rows: Sequence[Sequence[Any]]


class Tables(NamedTuple):
    """What the tables hold of a queue's board, to be answered with `Found`."""

    queue: str
    ask: Ask


class Peek(NamedTuple):
    """What a claim of this queue would start from, to be answered with `Peeked`."""

    queue: str
    forced: int


class Peeked(NamedTuple):
    policy: Policy
    board: ResidentBoard
    """What the tables do not hold."""
    arrivals: list[Arrival]
    forced: list[Forced]


class Records(NamedTuple):
    """Jobs by their places, to be answered with their records."""

    refs: Sequence[Any]


Question = Query | Some | Many | Tables | Peek | Records
Looking = Generator[Question, Any, T]
"""A procedure that asks a store for what it needs."""


def _query(name: str, *parameters: Any) -> Query:
    return Query(name, parameters)


class Moment:
    """One snapshot of a database, at queue time `now`."""

    def __init__(self, now: Instant) -> None:
        self.now = now
        self._policies: dict[str, Declared] | None = None
        self._recents: dict[str, Recent] = {}
        self._tails: dict[str, Tail] = {}
        self._freed: dict[str, Counter[bytes]] = {}

    def policies(self) -> Looking[dict[str, Declared]]:
        """Every queue's policy, with what operators have changed."""
        if self._policies is None:
            self._policies = {
                name: Declared(decode_policy(text, _texts(overrides), _texts(shared)), version, is_drift=False)
                for name, text, version, overrides, shared in (yield _query("select_policies"))
            }
        return self._policies

    def policy(self, queue: str) -> Looking[Policy]:
        """The policy of one queue, or `UnknownQueue`."""
        declared = (yield from self.policies()).get(queue)
        if declared is None:
            raise no_such_queue(queue)
        return declared.policy

    def survey(self, queues: Sequence[str]) -> Looking[list[QueueFigures]]:
        """These queues at a glance, in a fixed number of statements however many they are."""
        recents = yield from self._recents_of(queues)
        stored = yield from self._stored_of(recents)
        dead: dict[str | None, int] = dict(map(tuple, (yield _query("count_newest_dead", COUNTED_AT_MOST))))
        has_all_dead = dead.pop(None, sum(dead.values())) < COUNTED_AT_MOST
        figures = []
        found = yield _query("survey", list(recents), COUNTED_AT_MOST)
        oldest = yield from self._oldest_in([row[0] for row in found if row[1] > 0])
        for name, ready, running, parked, scheduled, due_at, counted_at, held, hours in found:
            recent, before = recents[name], stored[name]
            unseen, ended, bells = recent.pending.ready, recent.pending.ended, recent.pending.bells
            waiting = max(0, ready + unseen)
            since = [each for each in (oldest.get(name), recent.pending.oldest) if each is not None and waiting]
            figures.append(
                QueueFigures(
                    queue=name,
                    ready=waiting,
                    running=max(0, running - ended),
                    parked_lanes=parked,
                    unseen=max(0, unseen),
                    bells=bells,
                    scheduled=Counted(scheduled, scheduled < COUNTED_AT_MOST),
                    dead=Counted(dead.get(name, 0), has_all_dead),
                    held=key_rows.add_held(key_rows.decode_held(held), changes_of_held(before, recent.over(before))),
                    oldest_ready_at=min(since, default=None),
                    next_due_at=due_at,
                    counted_at=counted_at,
                    uncounted=recent.claims,
                    hours=recent.over_hours(key_rows.decode_hours(hours)),
                )
            )
        return figures

    def minutes(self, queues: Sequence[str], since: Instant) -> Looking[dict[str, list[Minute]]]:
        """What happened in each queue, minute by minute, the oldest first; minutes without anything are left out."""
        first = since // MINUTE
        stored = _by_name((yield _query("select_minutes", list(queues), first)), key_rows.decode_minute)
        recents = yield from self._recents_of(queues)
        found = {name: recent.over_minutes(stored.get(name, ())) for name, recent in recents.items()}
        return {name: [each for each in found.get(name, ()) if each.minute >= first] for name in queues}

    # Keys.

    def list_keys(
        self,
        queues: Sequence[str],
        by: By,
        *,
        sort: KeySort = KeySort.WAITING,
        search: str = "",
        held_only: bool = False,
        after: str | None = None,
        limit: int = 50,
    ) -> Looking[KeyPage]:
        """A page of the keys of one scope, in these partitions of a queue. `search` is in any of its values, whatever
        the case. `ConfigurationError` where `after` is nothing that a page has given."""
        place = None if after is None else KeyPlace.decode(after, sort, queues)
        sought, scope = key_rows.sought(search), key_scope(by)
        if sought is None:
            return KeyPage([], None)
        changed = yield from self._changed(queues, by)
        known = {key_rows.key_text(figures.key) for _, figures in changed}
        changed = key_rows.matching(changed, sought)
        some = (yield _query("find_keys", list(queues), scope, sought, key_rows.FEW + 1)) if sought else ()
        if sought and len(some) <= key_rows.FEW:
            listed = list(product(queues, [scope], sorted({key for (key,) in some} - known)))
        else:
            listed, statement = [], key_rows.listing(sort, held_only=held_only)
            for queue in queues:
                asked = (queue, scope, sought, held_only, *key_rows.start_of(place))
                listed += [(queue, scope, key) for (key,) in (yield Some(statement, asked, limit + 1, known))]
        found = yield _query("select_keys", Rows(listed, 3))
        return key_rows.page_of([*map(_named, found), *changed], sort, place, limit, held_only=held_only)

    def keys_named(self, queues: Sequence[str], places: Sequence[Place]) -> Looking[list[Named]]:
        """The figures of single keys, wherever they are known."""
        asked = [(queue, key_scope(by), key_rows.key_text(key)) for queue, (by, key) in product(queues, places)]
        stored = _figures((yield _query("select_keys", Rows(asked, 3))))
        return [
            (name, figures)
            for name, recent in (yield from self._recents_of(queues)).items()
            for figures in key_rows.named_now(stored.get(name, ()), recent, places)
        ]

    def list_held(self, queues: Sequence[str], limit: int = 20) -> Looking[list[Named]]:
        """Of all scopes of these queues, the keys behind whose limits and pauses most jobs wait, the most first."""
        changed = yield from self._changed(queues)
        known = {f"{key_scope(figures.by)} {key_rows.key_text(figures.key)}" for _, figures in changed}
        listed = yield _query("list_held_keys", list(queues), limit, list(known))
        found = yield _query("select_keys", Rows(listed, 3))
        return key_rows.most_held([*map(_named, found), *changed], limit)

    def _changed(self, queues: Sequence[str], by: By | None = None) -> Looking[list[Named]]:
        """Keys of which the stored stats do not say everything, as they are now; of one scope, if one is given."""
        recents = yield from self._recents_of(queues)
        stored = yield from self._stored_of(recents, by)
        return [
            (name, figures)
            for name, recent in recents.items()
            for figures in recent.over(stored[name])
            if by is None or figures.by == by
        ]

    def _stored_of(self, recents: Mapping[str, Recent], by: By | None = None) -> Looking[dict[str, list[KeyFigures]]]:
        """What is stored of the keys that they concern, by queue."""
        wanted = [
            (name, key_scope(place[0]), key_rows.key_text(place[1]))
            for name, recent in recents.items()
            for place in recent.places
            if by is None or place[0] == by
        ]
        stored = _figures((yield _query("select_keys", Rows(wanted, 3))) if wanted else ())
        return {name: stored.get(name, []) for name in recents}

    # What the stored stats do not say.

    def _recents_of(self, queues: Sequence[str]) -> Looking[dict[str, Recent]]:
        """What is not in the stored stats, of those of these queues that are known."""
        policies = yield from self.policies()
        known = [name for name in queues if name in policies]
        if fresh := [name for name in known if name not in self._recents]:
            told = _by_name((yield _query("select_told_of", fresh)), decode_tally)
            pending = yield from self._pending_of(fresh)
            self._freed |= {name: freed_slots(policies[name].policy, pending[name]) for name in fresh}
            gates = yield from self._held_now({name: policies[name].policy for name in fresh}, pending)
            for name in fresh:
                policy = policies[name].policy
                self._recents[name] = Recent(policy, told.get(name, ()), pending[name], self.now, gates[name])
        return {name: self._recents[name] for name in known}

    def _pending_of(self, queues: Sequence[str]) -> Looking[dict[str, Pending]]:
        """What no claim has seen."""
        pending = {name: Pending([], []) for name in queues}
        for name, priority, keys, count, since, bells in (yield _query("select_pending_arrivals", list(queues))):
            before = pending[name]
            before.arrivals.append(LaneTally(decode_keys(keys), priority, count))
            oldest = min((each for each in (before.oldest, since) if each is not None), default=None)
            pending[name] = msgspec.structs.replace(before, oldest=oldest, bells=before.bells + bells)
        ended = [
            (name, lane if isinstance(lane, bytes) else bytes.fromhex(lane), counts)
            for name, lane, *counts in (yield _query("select_pending_releases", list(queues)))
        ]
        if ended:
            tails = yield from self._tails_of({name for name, _, _ in ended})
            asked = [name for name, _, _ in ended], [lane for _, lane, _ in ended]
            stored = {
                lane: (decode_keys(keys), priority)
                for lane, priority, keys in (yield _query("select_keys_of_lanes", *asked))
            }
            for name, lane, (*counts, bells) in ended:
                pending[name] = msgspec.structs.replace(pending[name], bells=pending[name].bells + bells)
                changed = tails[name].lanes.get(lane)
                of = stored.get(lane) if changed is None else (changed.keys, changed.priority)
                if of is not None:
                    pending[name].releases.append(key_rows.release_tally(*of, *counts))
        return pending

    def _held_now(
        self, policies: Mapping[str, Policy], pending: Mapping[str, Pending]
    ) -> Looking[dict[str, list[GateTally]]]:
        """By queue, whom limits hold back now, where the last claim has left it otherwise: see `held_now`. Gates that
        queues share are as it has left them."""
        ended = {name: policy.overrides.expired(self.now) for name, policy in policies.items()}
        policies = {name: policy.without(ended[name]) for name, policy in policies.items()}
        limited = [
            name for name, policy in policies.items() if policy.keyed_limits or policy.overrides.pauses or ended[name]
        ]
        tails = yield from self._tails_of(limited)
        touched = {name: touched_gates(policies[name], pending[name], ended[name]) for name in limited}
        due: dict[str, list[GateRow]] = {name: [] for name in policies}
        for name, *row in (yield _query("select_woken_gates", limited, self.now)) if limited else ():
            if (gate := _gate(row)).id not in tails[name].gates:
                due[name].append(gate)
        for name, tail in tails.items():
            rows = [row for row in tail.gates.values() if row is not None and row.waiting > 0]
            due[name] += [row for row in rows if row.wake_at is not None and row.wake_at <= self.now]
        owners = {gate: name for name, each in touched.items() for gate in each}
        for row in (yield from self._gates_left({name: list(each) for name, each in touched.items()})):
            due[owners[row.id]].append(row)
        return {
            name: held_now(policies[name], self.now, touched.get(name, {}), without(self._freed[name], rows))
            for name, rows in due.items()
        }

    def _tails_of(self, queues: Collection[str]) -> Looking[dict[str, Tail]]:
        """What the tables of these queues may not hold."""
        if fresh := [name for name in queues if name not in self._tails]:
            deltas = _by_name((yield _query("select_tails", fresh)), lambda delta: delta)
            self._tails |= {name: Tail(deltas.get(name, ())) for name in fresh}
        return {name: self._tails[name] for name in queues}

    def tail(self, queue: str) -> Looking[Tail]:
        """What the tables of a queue may not hold."""
        return (yield from self._tails_of([queue]))[queue]

    # The board.

    def _oldest_in(self, queues: Sequence[str]) -> Looking[dict[str, Instant]]:
        """Since when the oldest job of each queue waits, of those that claims have seen: exact, unless the heads of a
        thousand lanes were cancelled."""
        policies, tails = (yield from self.policies()), (yield from self._tails_of(queues))
        steps = {name: policies[name].policy.priority_step for name in queues}
        most = OLDEST_LANES + max((len(tail.lanes) for tail in tails.values()), default=0)
        lanes: dict[str, list[tuple[Instant, bytes, int]]] = {
            name: [
                (lane.rank + lane.priority * steps[name], lane.id, lane.floor)
                for lane in tail.lanes.values()
                if lane is not None and lane.ready > 0
            ]
            for name, tail in tails.items()
        }
        for name, lane, floor, since in (yield _query("select_oldest_lanes", Rows(list(steps.items()), 2), most)):
            if lane not in tails[name].lanes:
                lanes[name].append((since, lane, floor))
        lanes = {name: sorted(each) for name, each in lanes.items()}
        oldest: dict[str, Instant] = {}
        # A rank is a lower bound: once a head is older than all that are left can be, it is the oldest.
        while lanes := {n: each for n, each in lanes.items() if each and (n not in oldest or each[0][0] < oldest[n])}:
            asked = [(lane, floor, 1) for each in lanes.values() for _, lane, floor in each[:OLDEST_AT_ONCE]]
            found: Found = yield Tables("", Ask(heads=tuple(asked)))
            for name, each in lanes.items():
                times = [head.ready_at for _, lane, _ in each[:OLDEST_AT_ONCE] for head in found.heads.get(lane, ())]
                oldest |= {name: min(*times, oldest.get(name, times[0]))} if times else {}
            lanes = {name: each[OLDEST_AT_ONCE:] for name, each in lanes.items()}
        return oldest

    def lanes_of(self, queue: str, flow: bytes, limit: int = 50) -> Looking[list[LaneRow]]:
        """The lanes of a flow, those that jobs wait in first."""
        tail = yield from self.tail(queue)
        found = yield Some("select_all_lanes_of_flow", (flow,), LANES_AT_MOST, tail.lanes)
        changed = [lane for lane in tail.lanes.values() if lane is not None and lane.flow == flow]
        return sorted([*map(_lane, found), *changed], key=lambda lane: (-lane.ready, lane.rank))[:limit]

    def scheduled_by_lane(self, queues: Sequence[str]) -> Looking[LanesCounted]:
        """The scheduled jobs that are due first, up to `COUNTED_AT_MOST`, by lane."""
        found = yield _query("select_scheduled_by_lane", list(queues), COUNTED_AT_MOST)
        lanes = [LaneTally(decode_keys(keys), priority, count) for priority, keys, count in found]
        return LanesCounted(lanes, sum(lane.arrived for lane in lanes) < COUNTED_AT_MOST)

    def gates_named(
        self, gates: Mapping[str, Sequence[bytes]], shared: Sequence[bytes]
    ) -> Looking[tuple[list[GateRow], list[SharedGateRow]]]:
        """Gates of queues, and shared ones, by their ids, where they exist: the former as they are now, the latter as
        the last claims have left them."""
        yield from self._recents_of(list(gates))
        freed = {gate: count for name in gates for gate, count in self._freed.get(name, {}).items()}
        left = yield from self._gates_left(gates)
        known: Found = (yield Tables("", Ask(shared=tuple(shared)))) if shared else Found()
        return without(freed, left), known.shared

    def _gates_left(self, gates: Mapping[str, Sequence[bytes]]) -> Looking[list[GateRow]]:
        """The same as the last claims have left them."""
        tails = yield from self._tails_of(gates)
        wanted = [(name, gate) for name, named in gates.items() for gate in named]
        others = [each for each in wanted if each[1] not in tails[each[0]].gates]
        stored = (yield _query("select_gates_named", *_in_step(others))) if others else ()
        changed = [row for name, gate in wanted if (row := tails[name].gates.get(gate)) is not None]
        return [*map(_gate, stored), *changed]

    def weights_named(self, flows: Mapping[str, Sequence[bytes]]) -> Looking[dict[bytes, FlowWeight]]:
        """The weights of flows by their ids, where they exist, as they are stored."""
        tails = yield from self._tails_of(flows)
        wanted = [(name, flow) for name, named in flows.items() for flow in named]
        others = [each for each in wanted if each[1] not in tails[each[0]].flows]
        stored = (yield _query("select_weights_named", *_in_step(others))) if others else ()
        changed = [row for name, flow in wanted if (row := tails[name].flows.get(flow)) is not None]
        numbers = [*stored, *((row.id, row.weight, row.given_by) for row in changed)]
        return {flow: FlowWeight(weight, given_by > 0) for flow, weight, given_by in numbers}

    def next_jobs(self, queue: str, keys: Mapping[str, str | None], limit: int = 20) -> Looking[list[JobRecord]]:
        """Ready jobs of one flow of a queue (or, without `Fair`, of the whole) in the order in which it would start
        them if nothing held it back: its lanes by the rank of their heads, each from its floor on."""
        peeked: Peeked = yield Peek(queue, limit)
        policy, board = peeked.policy, peeked.board
        flow = policy.flow_of(int(keys.get("priority") or 0), keys)
        arrivals = [bell for bell in peeked.arrivals if policy.flow_of(bell.priority, bell.keys) == flow]
        named = {bell.lane for bell in arrivals} | {each.lane for each in peeked.forced}
        known = yield from _asked(queue, board.find(flows=[flow], lanes=sorted(named)))
        lanes = [lane.row() for lane in board.lanes.values() if lane.flow.id == flow]
        its_own = {lane.id for lane in lanes} | {bell.lane for bell in arrivals}
        forced = [each for each in peeked.forced if each.lane in its_own]
        found = known.flows[0] if known.flows else None
        heads = yield from _asked(queue, upcoming(policy, self.now, found, lanes, arrivals, forced, limit))
        records: list[JobRecord] = yield Records([head.ref for head in heads])
        return records

    def workers(self) -> Looking[list[WorkerSeen]]:
        """What workers have said of themselves within a day, the newest first."""
        found = yield _query("select_workers", self.now - DAY)
        return [key_rows.worker_seen(_uuid(worker), seen_at, text) for worker, seen_at, text in found]


def _asked(queue: str, asking: Generator[Ask, Found, S]) -> Looking[S]:
    """Let whoever asks the tables come to its result. Lanes of a flow are those that are parked as well."""
    try:
        ask = next(asking)
        while True:
            lanes: list[LaneRow] = []
            for flow, count in ask.ready:
                lanes += map(_lane, (yield Some("select_lanes_of_flow", (flow,), count, ask.but_not[1])))
            found: Found = yield Tables(queue, msgspec.structs.replace(ask, ready=[], but_not=([], [], [])))
            ask = asking.send(msgspec.structs.replace(found, lanes=[*found.lanes, *lanes]))
    except StopIteration as stop:
        result: S = stop.value
        return result


def _by_name(rows: Iterable[tuple[str, Any]], decode: Callable[[Any], T]) -> dict[str, list[T]]:
    found: dict[str, list[T]] = {}
    for name, text in rows:
        found.setdefault(name, []).append(decode(text))
    return found


def _named(row: Sequence[Any]) -> Named:
    return row[0], key_rows.key_figures(row[1:])


def _figures(rows: Iterable[Sequence[Any]]) -> dict[str, list[KeyFigures]]:
    return _by_name(((row[0], row[1:]) for row in rows), key_rows.key_figures)


def _lane(row: Sequence[Any]) -> LaneRow:
    return LaneRow(row[0], row[1], row[2], decode_keys(row[3]), *row[4:])


def _gate(row: Sequence[Any]) -> GateRow:
    return GateRow(row[0], row[1], decode_key(row[2]), *row[3:])


def _in_step(wanted: Sequence[tuple[str, bytes]]) -> tuple[list[str], list[bytes]]:
    return [queue for queue, _ in wanted], [each for _, each in wanted]


def _texts(value: str | Sequence[str]) -> tuple[str, ...]:
    """A list of texts, which one store hands out as JSON."""
    return tuple(msgspec.json.decode(value, type=list[str]) if isinstance(value, str) else value)


def _uuid(value: UUID | bytes) -> UUID:
    return UUID(bytes=value) if isinstance(value, bytes) else value
