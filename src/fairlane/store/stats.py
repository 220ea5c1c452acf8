"""Stats as people read them: written once, as procedures that ask a store for named statements.

Everything that is asked of one `Moment` is of one snapshot of the database. It combines the
stored sums with the journal entries that nobody has added up, and with what has happened that no claim has seen.
Nothing here changes anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from heapq import nsmallest
from itertools import product
from typing import Any, Literal, NamedTuple, TypeVar
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.job import JobRecord
from fairlane.policy.keys import By, select, shared_gate_id
from fairlane.policy.overrides import Override
from fairlane.policy.partitions import whole_of
from fairlane.policy.policy import WEIGHT, BoundLimit, Policy
from fairlane.scheduler.board import Board, Gate
from fairlane.scheduler.explain import OWN_LANES, Facts, Subject, siblings_of
from fairlane.scheduler.journal import Tail, decode_stats
from fairlane.scheduler.resident import Found, upcoming
from fairlane.scheduler.snapshot import (
    Ask,
    FlowRow,
    Forced,
    LaneRow,
    LaneStats,
    Release,
    SharedGateRow,
    SharedRelease,
)
from fairlane.stats.gates import (
    Ends,
    LaneKeys,
    board_now,
    first_shut,
    gates_in_doubt,
    gauges,
    held_now,
    is_in_doubt,
)
from fairlane.stats.keys import (
    DAY,
    MINUTE,
    KeyStats,
    Minute,
    Place,
    Recent,
    Unseen,
    held_by_limit,
    jobs_held,
)
from fairlane.store import stats_rows
from fairlane.store.explain import facts_about, subject_of
from fairlane.store.policies import all_in_force
from fairlane.store.procedures import (
    TIME,
    Procedure,
    Question,
    Rows,
    Some,
    answered,
    ask_board,
    on_board,
    query,
    snapshot,
)
from fairlane.store.rows import (
    Declared,
    decode_given,
    decode_key,
    decode_keys,
    gate_row,
    lane_row,
    not_among,
    record_of,
    uuid_of,
)
from fairlane.store.stats_rows import KeyPlace, KeySums, decode_lanes, decode_sums
from fairlane.store.stats_values import (
    COUNTED_AT_MOST,
    LANES_AT_MOST,
    Counted,
    FlowWeight,
    KeyPage,
    KeySort,
    LanesCounted,
    QueueStats,
    WorkerSeen,
    key_scope,
    service_of,
    slots_for,
)

T = TypeVar("T")
Key = tuple[str | None, ...]
Named = tuple[str, KeyStats]
"""A key, and the partition that it is in."""
Wanted = tuple[BoundLimit, Key]
"""A limit, and the key that it is asked for."""
Pieces = Literal["flows", "lanes", "gates"]
MANY = 2_000
"""Keys of which jobs came that no claim has seen, and that are looked up one by one. Where there are more, a list is
made from what it is sorted by, of all keys."""

LANES_EACH = 200
"""Lanes of one flow that are looked at to find the limits that its jobs pass."""
OLDEST_LANES = 1_000
OLDEST_AT_ONCE = 20
"""Lanes whose heads are looked up together, to find the job that has waited for the longest."""


class LaneNow(NamedTuple):
    """A lane as it is now."""

    row: LaneRow
    gate: Gate | None
    """What holds it back; `None`: nothing does."""


Looking = Generator[Question, Any, T]
"""A procedure that looks at one `Moment`."""


class Moment:
    """One snapshot of a database, at queue time `now`."""

    def __init__(self, now: Instant) -> None:
        self.now = now
        self._policies: dict[str, Declared] | None = None
        self._ended: dict[str, list[Override]] = {}
        self._recents: dict[str, Recent] = {}
        self._tails: dict[str, Tail] = {}

    def policies(self) -> Procedure[dict[str, Declared]]:
        """Every queue's policy as it is now, with what operators have changed: what has ended holds nobody back, though
        no claim has removed it."""
        if self._policies is None:
            found = yield from all_in_force()
            self._ended = {name: each.policy.overrides.expired(self.now) for name, each in found.items()}
            self._policies = {
                name: msgspec.structs.replace(each, policy=each.policy.without(self._ended[name]))
                for name, each in found.items()
            }
        return self._policies

    def policy(self, queue: str) -> Procedure[Policy]:
        """The policy of one queue, or `UnknownQueue`."""
        policies = yield from self.policies()
        if queue not in policies:
            raise not_among(queue, policies)
        return policies[queue].policy

    def survey(self, queues: Sequence[str]) -> Procedure[list[QueueStats]]:
        """These queues at a glance, in a fixed number of statements however many they are."""
        recents = yield from self._recents_of(queues)
        found = yield query("survey", list(recents), COUNTED_AT_MOST, self.now)
        held = yield from self._held_in(recents)
        lapsed = dict(map(tuple, (yield query("count_lapsed", list(recents), self.now, COUNTED_AT_MOST))))
        dead: dict[str | None, int] = dict(map(tuple, (yield query("count_newest_dead", COUNTED_AT_MOST))))
        has_all_dead = dead.pop(None, sum(dead.values())) < COUNTED_AT_MOST
        stats = []
        oldest = yield from self._oldest_in([row[0] for row in found if row[1] > 0])
        for name, ready, running, scheduled, counted_at, hours in found:
            recent = recents[name]
            unseen = recent.unseen
            waiting = max(0, ready + unseen.ready)
            since = [each for each in (oldest.get(name), unseen.oldest) if each is not None and waiting]
            stats.append(
                QueueStats(
                    queue=name,
                    ready=waiting,
                    running=max(0, running - recent.ended),
                    lapsed=lapsed.get(name, 0),
                    unseen=max(0, unseen.ready),
                    events=unseen.events + len(recent.ends.releases),
                    scheduled=Counted(scheduled, scheduled < COUNTED_AT_MOST),
                    dead=Counted(dead.get(name, 0), has_all_dead),
                    held=held_by_limit((each.held_by, each.waiting) for each in held[name]),
                    held_jobs=min(waiting, jobs_held({each.place: each.waiting for each in held[name]})),
                    oldest_ready_at=min(since, default=None),
                    counted_at=counted_at,
                    uncounted=recent.claims,
                    hours=recent.over_hours(stats_rows.decode_hours(hours), self.now),
                )
            )
        return stats

    def _held_in(self, recents: Mapping[str, Recent]) -> Procedure[dict[str, list[KeySums]]]:
        """By queue, the keys that limits and pauses hold back now, as far as those are in force."""
        stored = {name: decode_sums(text) for name, text in (yield from _select("select_held_sums", recents))}
        yield from self._load_lanes(stored)
        held: dict[str, list[KeySums]] = {name: [] for name in recents}
        for name, several in stored.items():
            known = set(recents[name].places)
            for each in (each for each in several if each.place not in known):
                by, key = each.place
                each.waiting += recents[name].arrived(by).get(key, 0)
                held[name].append(each)
        changed = [
            (name, key_scope(by), stats_rows.key_text(key))
            for name, recent in recents.items()
            for by, key in recent.places
        ]
        for name, stats in (yield from self._over(recents, changed)):
            held[name].append(KeySums.of(stats))
        for name, several in held.items():
            policy = recents[name].policy
            limits = {limit for each in several for limit in each.held_by}
            if gone := {limit for limit in limits if policy.bound_named(limit) is None}:
                for each in several:
                    each.held_by = tuple(limit for limit in each.held_by if limit not in gone)
            held[name] = [each for each in several if each.held_by and each.waiting > 0]
        return held

    def minutes(self, queues: Sequence[str], since: Instant) -> Procedure[dict[str, list[Minute]]]:
        """What happened in each queue, minute by minute, the oldest first; minutes without anything are left out."""
        first = since // MINUTE
        stored = _by_name((yield from _select("select_minutes", queues, first)), stats_rows.decode_minute)
        recents = yield from self._recents_of(queues)
        found = {name: recent.over_minutes(stored.get(name, ())) for name, recent in recents.items()}
        return {name: [each for each in found.get(name, ()) if each.number >= first] for name in queues}

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
    ) -> Procedure[KeyPage]:
        """A page of the keys of one scope, in these partitions of a queue. `search` is in any of its values, whatever
        the case. `ConfigurationError` where `after` is nothing that a page has given."""
        place = None if after is None else KeyPlace.decode(after, sort, queues)
        sought, scope = stats_rows.sought(search), key_scope(by)
        if sought is None:
            return KeyPage([], None)
        recents = yield from self._recents_of(queues, with_lanes=True)
        changed: list[Named] = []
        known: set[str] = set()
        sums: dict[str, list[KeySums]] = {}
        if held_only:
            sums = yield from self._held_in(recents)
        else:
            changed = yield from self._changed(recents, by)
            known = {stats_rows.key_text(stats.key) for _, stats in changed}
            changed = stats_rows.matching(changed, sought)
            if any(len(recent.arrived(by)) > MANY for recent in recents.values()):
                stored = {
                    name: decode_sums(text) for name, text in (yield from _select("select_key_sums", recents, scope))
                }
                for name, recent in recents.items():
                    sums[name] = stats_rows.with_arrivals(stored.get(name, ()), by, recent.arrived(by), known)
        listed: list[tuple[str, str, str]] = []
        some = (yield query("find_keys", list(queues), scope, sought, stats_rows.FEW + 1)) if sought else ()
        if sums:
            for name, several in sums.items():
                first = stats_rows.first_of(several, scope, sort, place, name, limit + 1, sought)
                listed += [(name, scope, key) for key in first]
        elif sought and len(some) <= stats_rows.FEW:
            listed = list(product(queues, [scope], sorted({key for (key,) in some} - known)))
        else:
            for queue in queues:
                asked = (queue, scope, sought, *stats_rows.start_of(place))
                listed += [
                    (queue, scope, key) for (key,) in (yield Some(f"list_keys_by_{sort}", asked, limit + 1, known))
                ]
        found = yield from self._over(recents, listed)
        return stats_rows.page_of([*found, *changed], sort, place, limit)

    def keys_named(self, queues: Sequence[str], places: Sequence[Place]) -> Procedure[list[Named]]:
        """The figures of single keys, wherever they are known."""
        recents = yield from self._recents_of(queues, with_lanes=True)
        asked = [(queue, key_scope(by), stats_rows.key_text(key)) for queue, (by, key) in product(recents, places)]
        return [each for each in (yield from self._over(recents, asked)) if not each[1].is_idle]

    def list_held(self, queues: Sequence[str], limit: int = 20) -> Procedure[list[Named]]:
        """Of all scopes of these queues, the keys behind whose limits and pauses most jobs wait, the most first."""
        recents = yield from self._recents_of(queues)
        held = [
            (-each.waiting, name, each.key, each.scope)
            for name, several in (yield from self._held_in(recents)).items()
            for each in several
        ]
        listed = [(name, scope, key) for _, name, key, scope in nsmallest(limit, held)]
        found = {
            (name, key_scope(stats.by), stats_rows.key_text(stats.key)): stats
            for name, stats in (yield from self._over(recents, listed))
        }
        return [(name, found[name, scope, key]) for name, scope, key in listed]

    def _changed(self, recents: Mapping[str, Recent], by: By) -> Procedure[list[Named]]:
        """Keys of a scope of which the stored stats do not say everything, as they are now, in every partition. Those
        that are only unseen are among them where they are few."""
        keys = {key: None for recent in recents.values() for scope, key in recent.places if scope == by}
        for recent in recents.values():
            if len(recent.arrived(by)) <= MANY:
                keys |= dict.fromkeys(recent.arrived(by))
        listed = product(recents, [key_scope(by)], map(stats_rows.key_text, keys))
        return (yield from self._over(recents, list(listed)))

    def _over(self, recents: Mapping[str, Recent], listed: Sequence[Sequence[str]]) -> Procedure[list[Named]]:
        """Keys as they are now, each by its queue, scope and name."""
        if not listed:
            return []
        stored = _by_name((yield query("select_keys", Rows(listed, 3))), stats_rows.key_stats)
        places: dict[str, dict[Place, None]] = {}
        for name, scope, key in listed:
            places.setdefault(name, {})[stats_rows.place_of(scope, key)] = None
        yield from self._load_lanes(places)
        return [
            (name, stats)
            for name, each in places.items()
            for stats in recents[name].over(stored.get(name, ()), self.now, each)
        ]

    # What the stored stats do not say.

    def _recents_of(self, queues: Iterable[str], *, with_lanes: bool = False) -> Procedure[dict[str, Recent]]:
        """What is not in the stored stats, of those of these queues that are known; with the lanes of what is unseen,
        if they are asked for."""
        declared = yield from self.policies()
        policies = {name: declared[name].policy for name in queues if name in declared}
        if fresh := [name for name in policies if name not in self._recents]:
            claims = _by_name((yield query("select_stats_of", fresh)), decode_stats)
            unseen = yield from self._unseen_in({name: policies[name] for name in fresh})
            ends = yield from self._ends_of(fresh)
            for name in fresh:
                self._recents[name] = Recent(policies[name], self.now, claims.get(name, ()), unseen[name], ends[name])
            yield from self._load_lanes([name for name in fresh if unseen[name].events <= MANY])
            yield from self._hold({name: self._recents[name] for name in fresh})
        if with_lanes:
            yield from self._load_lanes(policies)
        return {name: self._recents[name] for name in policies}

    def _unseen_in(self, policies: Mapping[str, Policy]) -> Procedure[dict[str, Unseen]]:
        """How much has come to each queue that no claim has seen; with the numbers that these jobs brought along, and
        the places in its sequence that are free again."""
        counts: dict[str, tuple[int, Instant | None, int]]
        counts = {name: tuple(each) for name, *each in (yield query("select_unseen", list(policies), self.now))}
        brought = [name for name in counts if policies[name].brought]
        given = _by_name(
            (yield from _select("select_unseen_given", brought, self.now)),
            lambda text, given_by: (decode_given(text) or {}, given_by),
        )
        sequences = {name: each.sequence.limit.by for name, each in policies.items() if each.sequence is not None}
        resumed: dict[str, Counter[Key]] = {name: Counter() for name in policies}
        for name, priority, keys, count in (yield from _select("select_resumed", sequences, self.now)):
            resumed[name][select(sequences[name], decode_keys(keys), priority)] += count
        return {name: Unseen(*counts.get(name, (0, None, 0)), given.get(name, ()), resumed[name]) for name in policies}

    def _load_lanes(self, queues: Iterable[str]) -> Procedure[None]:
        if fresh := [name for name in queues if self._recents[name].lanes is None]:
            found = dict(map(tuple, (yield query("select_unseen_lanes", fresh, self.now))))
            for name in fresh:
                self._recents[name].lanes = decode_lanes(found[name]) if name in found else []

    def _ends_of(self, queues: Sequence[str]) -> Procedure[dict[str, Ends]]:
        """Claims that have ended and that no claim has seen."""
        releases: dict[str, list[Release]] = {name: [] for name in queues}
        since = dict.fromkeys(queues, 0)
        for name, applied_at, lane, *counts in (yield query("select_pending_releases", list(queues))):
            since[name] = applied_at
            releases[name].append(Release(lane if isinstance(lane, bytes) else bytes.fromhex(lane), *counts))
        lanes = {name: {release.lane for release in each} for name, each in releases.items() if each}
        found = yield from self._left("lanes", "select_keys_of_lanes", lanes, _lane_of_keys)
        keys: dict[bytes, LaneKeys] = {lane.id: (lane.keys, lane.priority) for lane in found}
        return {
            name: Ends(each, {lane: keys[lane] for lane in lanes.get(name, ()) if lane in keys}, since[name])
            for name, each in releases.items()
        }

    def _hold(self, recents: Mapping[str, Recent]) -> Procedure[None]:
        """Find out whom limits hold back now, where the last claim has left it otherwise: see `held_now`."""
        limited = {
            name: recent
            for name, recent in recents.items()
            if recent.policy.keyed_limits or recent.policy.overrides.pauses or self._ended[name]
        }
        if not limited:
            return
        tails = yield from self.tails(limited)
        wanted: dict[str, list[Wanted]] = {}
        brought: dict[str, set[str]] = {}
        named: list[tuple[str, str, Sequence[str | None]]] = []
        for name, recent in limited.items():
            policy = recent.policy
            wanted[name] = gates_in_doubt(policy, recent.ends, self._ended[name], recent.unseen.resumed)
            is_brought = bool(recent.unseen.given)
            brought[name] = {each.name for each in policy.keyed_limits if is_brought and each.from_job is not None}
            changed = [gate for gate in tails[name].gates.values() if gate is not None]
            doubtful = [g for g in changed if is_in_doubt(g, self.now) or g.limit in brought[name]]
            named += [(name, gate.limit, gate.key) for gate in doubtful]
        named += yield from self._stored_in_doubt(limited, brought)
        yield from self._load_lanes([name for name, recent in limited.items() if recent.stops])
        for name, limit, key in named:
            if (bound := limited[name].policy.bound_named(limit)) is not None:
                wanted[name].append((bound, tuple(key)))
        for name, recent in limited.items():
            wanted[name] += recent.stopped()
            wanted[name] = [each for each in wanted[name] if not each[0].limit.is_of_producers]
        for name, board in (yield from self._boards(wanted)).items():
            limited[name].hold(held_now(board, wanted[name]))

    def _stored_in_doubt(
        self, recents: Mapping[str, Recent], brought: Mapping[str, Collection[str]]
    ) -> Procedure[list[tuple[str, str, Sequence[str | None]]]]:
        """Gates of keys, by queue, limit and key, that may not be as the tables have them: that are in doubt, whose
        numbers unseen jobs may have `brought`, or that other queues use or have left room at.

        Of those that are in use, and at which nobody is known to wait, only those of keys of which jobs are waiting:
        others hold nobody back."""
        limits = {name: recent.policy.keyed_limits for name, recent in recents.items()}
        asked = [
            (name, bound.name, key_scope(bound.limit.by), bound.name in brought[name])
            for name, several in limits.items()
            for bound in several
            if not bound.limit.is_of_producers
        ] or [(name, "", "", False) for name in recents]
        keys: list[str] | None = None
        if all(recent.lanes is not None and len(recent.places) <= MANY for recent in recents.values()):
            scopes = {bound.limit.by for several in limits.values() for bound in several}
            among = [key for recent in recents.values() for _, key in recent.places]
            among += [key for recent in recents.values() for by in scopes for key in recent.arrived(by)]
            keys = sorted(set(map(stats_rows.key_text, among)))
        found = yield query("select_gates_in_doubt", Rows(asked, 4), self.now, keys)
        named: list[tuple[str, str, Sequence[str | None]]]
        named = [(name, limit, decode_key(key)) for name, limit, key in found]
        sharing = [name for name, recent in recents.items() if recent.policy.keyed_shared_limits]
        shared = [(name, bound) for name in sharing for bound in limits[name] if bound.is_shared]
        used = yield from _select("select_shared_in_use", {bound.limit.name or "" for _, bound in shared}, self.now)
        for limit, key in ((limit, decode_key(key)) for limit, key in used):
            named += [(name, limit, key) for name, bound in shared if bound.name == limit and key]
        woken: dict[str, set[bytes]] = {name: set() for name in sharing}
        for name, gate in (yield from _select("select_woken_gates", sharing)):
            woken[name].add(gate)
        owners = {gate: name for name, gates in woken.items() for gate in gates}
        left = yield from self._left("gates", "select_gates_named", woken, gate_row)
        return named + [(owners[gate.id], gate.limit, gate.key) for gate in left]

    def tails(self, queues: Iterable[str]) -> Procedure[dict[str, Tail]]:
        """What the tables of these queues may not hold."""
        if fresh := [name for name in queues if name not in self._tails]:
            deltas = _by_name((yield query("select_tails", fresh)), lambda delta: delta)
            self._tails |= {name: Tail(deltas.get(name, ())) for name in fresh}
        return {name: self._tails[name] for name in queues}

    def _left(
        self, kind: Pieces, statement: str, wanted: Mapping[str, Iterable[bytes]], decode: Callable[..., T]
    ) -> Procedure[list[T]]:
        """Pieces of the boards of queues by their ids, where they are known, as the last claims have left them."""
        tails = {name: getattr(tail, kind) for name, tail in (yield from self.tails(wanted)).items()}
        named = [(name, piece) for name, several in wanted.items() for piece in several]
        others = [(name, piece) for name, piece in named if piece not in tails[name]]
        stored = (yield query(statement, *map(list, zip(*others, strict=True)))) if others else ()
        changed = [row for name, piece in named if (row := tails[name].get(piece)) is not None]
        return [*(decode(*row) for row in stored), *changed]

    # The board.

    def _oldest_in(self, queues: Sequence[str]) -> Procedure[dict[str, Instant]]:
        """Since when the oldest job of each queue waits, of those that claims have seen: exact, unless the heads of a
        thousand lanes were cancelled."""
        policies, tails = (yield from self.policies()), (yield from self.tails(queues))
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
        for name, lane, floor, since in (yield query("select_oldest_lanes", Rows(list(steps.items()), 2), most)):
            if lane not in tails[name].lanes:
                lanes[name].append((since, lane, floor))
        lanes = {name: sorted(each) for name, each in lanes.items()}
        oldest: dict[str, Instant] = {}
        # A rank is a lower bound: once a head is older than all that are left can be, it is the oldest.
        while lanes := {n: each for n, each in lanes.items() if each and (n not in oldest or each[0][0] < oldest[n])}:
            asked = [(lane, floor, 1) for each in lanes.values() for _, lane, floor in each[:OLDEST_AT_ONCE]]
            found: Found = yield on_board("", "ask", Ask(heads=tuple(asked)))
            for name, each in lanes.items():
                times = [head.ready_at for _, lane, _ in each[:OLDEST_AT_ONCE] for head in found.heads.get(lane, ())]
                oldest |= {name: min(*times, oldest.get(name, times[0]))} if times else {}
            lanes = {name: each[OLDEST_AT_ONCE:] for name, each in lanes.items()}
        return oldest

    def lanes_left(self, queue: str, flow: bytes, limit: int) -> Procedure[list[LaneRow]]:
        """The lanes of a flow as the last claim has left them, those that jobs wait in first."""
        tail = (yield from self.tails([queue]))[queue]
        found = yield Some("select_all_lanes_of_flow", (flow,), LANES_AT_MOST, tail.lanes)
        changed = [lane for lane in tail.lanes.values() if lane is not None and lane.flow == flow]
        return sorted([*(lane_row(*row) for row in found), *changed], key=lambda lane: (-lane.ready, lane.rank))[:limit]

    def lanes_of(self, policy: Policy, keys: Mapping[str, str | None], limit: int = 50) -> Procedure[list[LaneNow]]:
        """The lanes of a flow as they are now, those that jobs wait in first, each with the gate that holds it back."""
        queue = policy.queue
        recent = (yield from self._recents_of([queue], with_lanes=True))[queue]
        left = yield from self.lanes_left(queue, policy.flow_of(0, keys), LANES_AT_MOST)
        lanes = sorted(recent.lanes_over(left, policy.flow_key(0, keys)), key=lambda lane: -lane.ready)[:limit]
        gates = {
            gate: (bound, select(bound.limit.by, lane.keys, lane.priority))
            for lane in lanes
            for gate, bound in policy.gates_of(lane.priority, lane.keys)
        }
        board = (yield from self.boards({queue: gates.values()}))[queue]
        return [LaneNow(lane, first_shut(board, lane.priority, lane.keys)) for lane in lanes]

    def lanes_in(self, flows: Mapping[str, Iterable[Key]]) -> Procedure[dict[tuple[str, Key], list[LaneStats] | None]]:
        """The jobs that wait in these flows now, by lane, each flow by its queue and key; `None`: in many lanes."""
        policies, tails = (yield from self.policies()), (yield from self.tails(list(flows)))
        recents = yield from self._recents_of(list(flows), with_lanes=True)
        places = {policies[name].policy.flow_of_key(key): (name, key) for name, keys in flows.items() for key in keys}
        found: dict[tuple[str, Key], list[LaneStats]] = {place: [] for place in places.values()}
        stored = yield query(
            "select_lanes_of_flows", [name for name, _ in places.values()], list(places), LANES_EACH + 1
        )
        many = {places[flow] for flow, count in Counter(row[1] for row in stored).items() if count > LANES_EACH}
        rows = [lane_row(*row) for row in stored if row[0] not in tails[places[row[1]][0]].lanes]
        rows += [row for tail in tails.values() for row in tail.lanes.values() if row is not None]
        for row in rows:
            if row.flow in places:
                found[places[row.flow]].append(LaneStats(row.keys, row.priority, row.ready))
        for name, recent in recents.items():
            policy = policies[name].policy
            for came in recent.lanes or ():
                if (listed := found.get((name, policy.flow_key(came.priority, came.keys)))) is not None:
                    listed.append(came)
        return {place: None if place in many else lanes for place, lanes in found.items()}

    def examine(
        self, queue: str | None = None, job: UUID | None = None, keys: Mapping[str, str | None] | None = None
    ) -> Procedure[Facts]:
        """What holds a job back, or all jobs of a queue, or all of some keys in it."""
        subject: Subject = Subject(queue or "", dict(keys or {})) if job is None else (yield from subject_of(job))
        policy = yield from self.policy(subject.queue)
        lanes = [] if subject.lane is None else [subject.lane]
        if (flow := siblings_of(policy, subject)) is not None:
            lanes += [lane.id for lane in (yield from self.lanes_left(subject.queue, flow, OWN_LANES))]
        facts = yield from facts_about(subject, lanes)
        workers = yield from self.workers()
        service = service_of(workers, [subject.queue], self.now)
        if job is not None and service.slots:
            served = {name for each in workers for name in each.report.queues}
            busy = yield from self._busy_beside(subject.queue, served)
            service = msgspec.structs.replace(service, slots=slots_for(workers, subject.queue, busy, self.now))
        return msgspec.structs.replace(facts, service=service)

    def _busy_beside(self, queue: str, served: set[str]) -> Procedure[dict[str, int]]:
        """How many jobs of each other queue that workers serve run, or could start now."""
        declared = yield from self.policies()
        policies = {n: e.policy for n, e in declared.items() if n != queue and not served.isdisjoint((n, whole_of(n)))}
        if not policies:
            return {}
        wanted = {name: [(bound, ()) for _, bound in each.queue_gates] for name, each in policies.items()}
        boards = yield from self.boards(wanted)
        rooms = {name: [gauge.room for gauge in gauges(boards[name], asked)] for name, asked in wanted.items()}
        return {
            each.queue: each.running + min(each.ready - each.held_jobs, *rooms[each.queue], each.ready)
            for each in (yield from self.survey(list(policies)))
        }

    def scheduled_by_lane(self, queues: Sequence[str]) -> Procedure[LanesCounted]:
        """The jobs that are due next, up to `COUNTED_AT_MOST`, by lane."""
        found = yield query("select_scheduled_by_lane", list(queues), COUNTED_AT_MOST, self.now)
        lanes = [LaneStats(decode_keys(keys), priority, count) for priority, keys, count in found]
        return LanesCounted(lanes, sum(lane.arrived for lane in lanes) < COUNTED_AT_MOST)

    def boards(self, wanted: Mapping[str, Iterable[Wanted]]) -> Procedure[dict[str, Board]]:
        """By queue, its board as it is now, as far as these gates are concerned."""
        asked = {name: list(each) for name, each in wanted.items()}
        yield from self._recents_of(asked)
        return (yield from self._boards(asked))

    def _boards(self, wanted: Mapping[str, Sequence[Wanted]]) -> Procedure[dict[str, Board]]:
        recents = {name: self._recents[name] for name in wanted}
        yield from self._load_lanes(
            [n for n, several in wanted.items() if any(recents[n].needs_lanes(bound) for bound, _ in several)]
        )
        gates = {n: {recents[n].policy.gate_of(*each): each for each in several} for n, several in wanted.items()}
        left = yield from self._left("gates", "select_gates_named", gates, gate_row)
        shared, freed = yield from self._shared_behind([each for several in wanted.values() for each in several])
        boards = {}
        for name, recent in recents.items():
            ends = msgspec.structs.replace(recent.ends, shared=freed)
            known = [gate for gate in left if gate.id in gates[name]]
            came = {gate: recent.came_to(*each) for gate, each in gates[name].items()}
            boards[name] = board_now(recent.policy, self.now, known, gates[name].values(), shared, ends, came)
        return boards

    def _shared_behind(self, wanted: Iterable[Wanted]) -> Procedure[tuple[list[SharedGateRow], list[SharedRelease]]]:
        """The gates that queues share behind these, and what has ended there that no claim has folded."""
        shared = [each for each in wanted if each[0].is_shared]
        if not shared:
            return [], []
        gates = tuple(shared_gate_id(bound.name, key) for bound, key in shared)
        known: Found = yield on_board("", "ask", Ask(shared=gates))
        freed = yield query("select_shared_ends", sorted({bound.limit.name or "" for bound, _ in shared}))
        return known.shared, [SharedRelease(*row) for row in freed]

    def weights_named(self, flows: Mapping[str, Sequence[bytes]]) -> Procedure[dict[bytes, FlowWeight]]:
        """The weights of flows by their ids, where they are known."""
        left = yield from self._left("flows", "select_weights_named", flows, _flow_of_weight)
        weights = {flow.id: (flow.weight, flow.given_by) for flow in left}
        for flow, brought in (yield from self._weights_brought([name for name in flows if flows[name]])).items():
            weights[flow] = max(brought, weights.get(flow, brought), key=lambda each: each[1])
        return {flow: FlowWeight(weight, given_by > 0) for flow, (weight, given_by) in weights.items()}

    def _weights_brought(self, queues: Iterable[str]) -> Procedure[dict[bytes, tuple[float, int]]]:
        """By flow, the weights that unseen jobs have brought."""
        recents = {
            name: recent
            for name, recent in (yield from self._recents_of(queues)).items()
            if recent.unseen.given and WEIGHT in recent.policy.brought and recent.policy.fair
        }
        yield from self._load_lanes(recents)
        return {
            recent.policy.flow_of_key(key): brought
            for recent in recents.values()
            for key, brought in recent.brought(WEIGHT, recent.policy.fair_by).items()
        }

    def next_jobs(self, queue: str, keys: Mapping[str, str | None], limit: int = 20) -> Procedure[list[JobRecord]]:
        """Ready jobs of one flow of a queue (or, without `Fair`, of the whole) in the order in which it would start
        them if nothing held it back: its lanes by the rank of their heads, each from its floor on."""
        loaded = yield on_board(queue, "load")
        policy, board = loaded.policy, loaded.board
        flow = policy.flow_of(int(keys.get("priority") or 0), keys)
        arrivals = [event for event in loaded.arrivals if policy.flow_of(event.priority, event.keys) == flow]
        all_forced: list[Forced] = yield on_board(queue, "forced", limit)
        named = {event.lane for event in arrivals} | {each.lane for each in all_forced}
        known = yield from answered(queue, board.find(flows=[flow], lanes=sorted(named)), _with_parked)
        lanes = [lane.row() for lane in board.lanes.values() if lane.flow.id == flow]
        its_own = {lane.id for lane in lanes} | {event.lane for event in arrivals}
        forced = [each for each in all_forced if each.lane in its_own]
        found = known.flows[0] if known.flows else None
        coming = upcoming(policy, self.now, found, lanes, arrivals, forced, limit)
        heads = yield from answered(queue, coming, _with_parked)
        return [record_of(row) for row in (yield query("select_jobs_at", [head.ref for head in heads]))]

    def workers(self) -> Procedure[list[WorkerSeen]]:
        """What workers have said of themselves within a day, the newest first."""
        found = yield query("select_workers", self.now - DAY)
        return [
            WorkerSeen(uuid_of(worker).hex, seen_at, stats_rows.decode_report(text)) for worker, seen_at, text in found
        ]


@snapshot
def of_one_moment(question: Callable[[Moment], Procedure[T]]) -> Procedure[T]:
    """Answer a question from one snapshot, as of one moment: whatever it asks, and however much."""
    now = (yield TIME).now
    return (yield from question(Moment(now)))


def _with_parked(queue: str, ask: Ask) -> Procedure[Found]:
    """What the tables hold; the lanes of a flow are those that are parked as well."""
    lanes: list[LaneRow] = []
    for flow, count in ask.ready:
        rows = yield Some("select_lanes_of_flow", (flow,), count, ask.but_not[1])
        lanes += [lane_row(*row) for row in rows]
    found = yield from ask_board(queue, msgspec.structs.replace(ask, ready=[], but_not=([], [], [])))
    return msgspec.structs.replace(found, lanes=[*found.lanes, *lanes])


def _select(name: str, of: Collection[str], *parameters: Any) -> Procedure[Sequence[Any]]:
    """The rows of a statement about these, which is left out where there are none."""
    found: Sequence[Any] = (yield query(name, list(of), *parameters)) if of else ()
    return found


def _by_name(rows: Iterable[Sequence[Any]], decode: Callable[..., T]) -> dict[str, list[T]]:
    found: dict[str, list[T]] = {}
    for name, *rest in rows:
        found.setdefault(name, []).append(decode(*rest))
    return found


def _lane_of_keys(lane: bytes, priority: int, keys: str) -> LaneRow:
    return LaneRow(lane, b"", priority, decode_keys(keys), 0, 0, 0, 0, 0, None, 0.0)


def _flow_of_weight(flow: bytes, weight: float, given_by: int) -> FlowRow:
    return FlowRow(flow, [], weight, 0.0, 0, 0.0, 0.0, 0, 0, 0, None, given_by)
