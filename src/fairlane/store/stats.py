"""Stats as people read them: written once, as procedures that ask a store for named statements.

Everything that is asked of one `Moment` is of one snapshot of the database. What it says is the stored sums, and over
them what the journal tells that nobody has added up, and what has happened that no claim has seen. Looking changes
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from heapq import nsmallest
from itertools import product
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import msgspec

from fairlane.clock import Instant
from fairlane.job import JobRecord
from fairlane.policy.keys import By, select
from fairlane.policy.overrides import Override
from fairlane.policy.partitions import whole_of
from fairlane.policy.policy import WEIGHT, BoundLimit, Policy
from fairlane.scheduler.board import Board, Gate
from fairlane.scheduler.explain import OWN_LANES, Facts, Subject, siblings_of
from fairlane.scheduler.journal import Tail, decode_tally
from fairlane.scheduler.resident import Found, upcoming
from fairlane.scheduler.snapshot import (
    Ask,
    Forced,
    GateRow,
    LaneRow,
    LaneTally,
    Release,
    SharedGateRow,
    SharedRelease,
)
from fairlane.stats.gates import (
    Came,
    Ends,
    LaneKeys,
    board_now,
    first_shut,
    gates_in_doubt,
    gauges,
    hears_arrivals,
    held_now,
    holding,
    is_in_doubt,
    shared_gates_of,
)
from fairlane.stats.keys import (
    DAY,
    MINUTE,
    Held,
    KeyFigures,
    Minute,
    Place,
    Recent,
    Unseen,
    changes_of_held,
    jobs_held,
)
from fairlane.store import stats_rows
from fairlane.store.explain import facts_about, subject_of
from fairlane.store.operators import JobFilter, find_jobs
from fairlane.store.policies import all_in_force
from fairlane.store.procedures import TIME, Procedure, Question, Rows, Some, on_board, query, snapshot
from fairlane.store.rows import (
    Declared,
    decode_given,
    decode_key,
    decode_keys,
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
    QueueFigures,
    WorkerSeen,
    key_scope,
    service_of,
    slots_for,
)

T = TypeVar("T")
S = TypeVar("S")
Key = tuple[str | None, ...]
Named = tuple[str, KeyFigures]
"""A key, and the partition that it is in."""
Wanted = tuple[BoundLimit, Key]
"""A limit, and the key that it is asked for."""
MANY = 2_000
"""Keys of which jobs came that no claim has seen, and that are looked up one by one. Where there are more, a list is
made from what it is sorted by, of all keys."""

LANES_EACH = 200
"""Lanes of one flow that are looked at to tell which limits its jobs pass."""
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
        self._ends: dict[str, Ends] = {}

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

    def survey(self, queues: Sequence[str]) -> Procedure[list[QueueFigures]]:
        """These queues at a glance, in a fixed number of statements however many they are."""
        recents = yield from self._recents_of(queues)
        found = yield query("survey", list(recents), COUNTED_AT_MOST, self.now)
        stored_held = {name: stats_rows.decode_held(held) for name, *_, held, _ in found}
        held = yield from self._held_in(recents, stored_held)
        lapsed = dict(map(tuple, (yield query("count_lapsed", list(recents), self.now, COUNTED_AT_MOST))))
        dead: dict[str | None, int] = dict(map(tuple, (yield query("count_newest_dead", COUNTED_AT_MOST))))
        has_all_dead = dead.pop(None, sum(dead.values())) < COUNTED_AT_MOST
        figures = []
        oldest = yield from self._oldest_in([row[0] for row in found if row[1] > 0])
        for name, ready, running, parked, scheduled, due_at, counted_at, _, hours in found:
            recent = recents[name]
            unseen = recent.unseen
            waiting = max(0, ready + unseen.ready)
            since = [each for each in (oldest.get(name), unseen.oldest) if each is not None and waiting]
            figures.append(
                QueueFigures(
                    queue=name,
                    ready=waiting,
                    running=max(0, running - recent.ended),
                    lapsed=lapsed.get(name, 0),
                    parked_lanes=parked,
                    unseen=max(0, unseen.ready),
                    bells=unseen.events + len(recent.ends.releases),
                    scheduled=Counted(scheduled, scheduled < COUNTED_AT_MOST),
                    dead=Counted(dead.get(name, 0), has_all_dead),
                    held=held[name][0],
                    held_jobs=min(waiting, held[name][1]),
                    oldest_ready_at=min(since, default=None),
                    next_due_at=due_at,
                    counted_at=counted_at,
                    uncounted=recent.claims,
                    hours=recent.over_hours(stats_rows.decode_hours(hours)),
                )
            )
        return figures

    def _held_in(
        self, recents: Mapping[str, Recent], stored: Mapping[str, Mapping[str, Held]]
    ) -> Procedure[dict[str, tuple[dict[str, Held], int]]]:
        """By queue: by limit, whom it holds back now; and how many jobs they hold back together."""
        policies = yield from self.policies()
        before = yield from self._stored_of(recents)
        joined = yield from self._held_sums(
            {n: each for n, each in recents.items() if stored[n] and each.unseen.events}
        )
        after = {n: recent.over(before[n]) if recent.places else [] for n, recent in recents.items()}
        held: dict[str, dict[str, Held]] = {}
        for name in recents:
            changes = changes_of_held(before[name], after[name])
            for each, came in joined.get(name, ()):
                for limit in each.held_by:
                    known = changes.get(limit, Held())
                    changes[limit] = Held(known.keys - (each.waiting <= 0), known.jobs + came)
            found = stats_rows.add_held(stored[name], changes)
            policy = policies[name].policy
            held[name] = {limit: each for limit, each in found.items() if policy.bound_named(limit) is not None}
        # One limit holds every key once. Of several, the keys tell which jobs they hold together.
        several = {name: recents[name] for name, limits in held.items() if len(limits) > 1}
        joined |= yield from self._held_sums({n: each for n, each in several.items() if n not in joined})
        together = {name: sum(each.jobs for each in limits.values()) for name, limits in held.items()}
        for name in several:
            keys = {each.place: each.waiting for each, _ in joined.get(name, ()) if held[name].keys() & each.held_by}
            keys |= {(each.by, each.key): each.waiting for each in after[name] if held[name].keys() & each.held_by}
            together[name] = jobs_held(keys)
        return {name: (held[name], together[name]) for name in recents}

    def _sums_of(
        self, queues: Sequence[str], by: By | None, *, held_only: bool = False
    ) -> Procedure[dict[str, list[KeySums]]]:
        """What lists are sorted by, of every key that is stored, by queue."""
        asked = (list(queues), None if by is None else key_scope(by), held_only)
        return {name: decode_sums(text) for name, text in (yield query("select_key_sums", *asked))} if queues else {}

    def minutes(self, queues: Sequence[str], since: Instant) -> Procedure[dict[str, list[Minute]]]:
        """What happened in each queue, minute by minute, the oldest first; minutes without anything are left out."""
        first = since // MINUTE
        stored = _by_name((yield query("select_minutes", list(queues), first)), stats_rows.decode_minute)
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
        changed = yield from self._changed(recents, by)
        known = {stats_rows.key_text(figures.key) for _, figures in changed}
        changed = stats_rows.matching(changed, sought)
        some = (yield query("find_keys", list(queues), scope, sought, stats_rows.FEW + 1)) if sought else ()
        listed: list[tuple[str, str, str]] = []
        if held_only or any(len(recent.arrived(by)) > MANY for recent in recents.values()):
            sums = yield from self._sums_of(list(recents), by, held_only=held_only)
            for name, recent in recents.items():
                all_sums = stats_rows.with_arrivals(sums.get(name, ()), by, recent.arrived(by), known)
                first = stats_rows.first_of(all_sums, sort, place, name, limit + 1, sought, held_only=held_only)
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
        return stats_rows.page_of([*found, *changed], sort, place, limit, held_only=held_only)

    def keys_named(self, queues: Sequence[str], places: Sequence[Place]) -> Procedure[list[Named]]:
        """The figures of single keys, wherever they are known."""
        recents = yield from self._recents_of(queues, with_lanes=True)
        asked = [(queue, key_scope(by), stats_rows.key_text(key)) for queue, (by, key) in product(recents, places)]
        return [each for each in (yield from self._over(recents, asked)) if not each[1].is_idle]

    def list_held(self, queues: Sequence[str], limit: int = 20) -> Procedure[list[Named]]:
        """Of all scopes of these queues, the keys behind whose limits and pauses most jobs wait, the most first."""
        recents = yield from self._recents_of(queues)
        changed = yield from self._changed(recents)
        held = yield from self._held_sums(recents)
        listed = [
            (name, each.scope, each.key)
            for name, several in held.items()
            for each, _ in nsmallest(limit, several, key=lambda each: (-each[0].waiting, each[0].key))
        ]
        return stats_rows.most_held([*(yield from self._over(recents, listed)), *changed], limit)

    def _held_sums(self, recents: Mapping[str, Recent]) -> Procedure[dict[str, list[tuple[KeySums, int]]]]:
        """By queue, the keys that are stored as held and of which no more has changed than that jobs came; each with
        how many, which are counted."""
        sums = yield from self._sums_of(list(recents), None, held_only=True)
        yield from self._load_lanes(list(sums))
        held: dict[str, list[tuple[KeySums, int]]] = {}
        for name, several in sums.items():
            recent, known = recents[name], set(recents[name].places)
            for each in several:
                by, key = each.place
                if (by, key) not in known:
                    came = recent.arrived(by).get(key, 0)
                    each.waiting += came
                    held.setdefault(name, []).append((each, came))
        return held

    def _changed(self, recents: Mapping[str, Recent], by: By | None = None) -> Procedure[list[Named]]:
        """Keys of which the stored stats do not say everything, as they are now, in every partition; of one scope, if
        one is given. Those that are only unseen are among them where they are few."""
        places = {place: None for recent in recents.values() for place in recent.places if by in (None, place[0])}
        for recent in recents.values():
            if by is not None and len(recent.arrived(by)) <= MANY:
                places |= {(by, key): None for key in recent.arrived(by)}
        named = [(key_scope(by), stats_rows.key_text(key)) for by, key in places]
        return (yield from self._over(recents, [(name, *each) for name in recents for each in named]))

    def _over(self, recents: Mapping[str, Recent], listed: Sequence[Sequence[str]]) -> Procedure[list[Named]]:
        """Keys as they are now, each by its queue, scope and name."""
        stored = _figures((yield query("select_keys", Rows(listed, 3))) if listed else ())
        if listed and any(recent.lanes is None for recent in recents.values()):
            yield from self._recents_of(list(recents), with_lanes=True)
        places: dict[str, dict[Place, None]] = {}
        for name, scope, key in listed:
            places.setdefault(name, {})[stats_rows.place_of(scope, key)] = None
        return [
            (name, figures)
            for name, each in places.items()
            for figures in recents[name].over(stored.get(name, ()), each)
        ]

    def _stored_of(self, recents: Mapping[str, Recent]) -> Procedure[dict[str, list[KeyFigures]]]:
        """What is stored of the keys that they concern, by queue."""
        wanted = [
            (name, key_scope(by), stats_rows.key_text(key))
            for name, recent in recents.items()
            for by, key in recent.places
        ]
        if wanted:
            yield from self._recents_of(list(recents), with_lanes=True)
        stored = _figures((yield query("select_keys", Rows(wanted, 3))) if wanted else ())
        return {name: stored.get(name, []) for name in recents}

    # What the stored stats do not say.

    def _recents_of(self, queues: Sequence[str], *, with_lanes: bool = False) -> Procedure[dict[str, Recent]]:
        """What is not in the stored stats, of those of these queues that are known; with the lanes of what is unseen,
        if they are asked for."""
        policies = yield from self.policies()
        known = [name for name in queues if name in policies]
        if fresh := [name for name in known if name not in self._recents]:
            told = _by_name((yield query("select_told_of", fresh)), decode_tally)
            unseen = {name: Unseen(*counts) for name, *counts in (yield query("select_unseen", fresh, self.now))}
            given = yield from self._given_in([name for name in unseen if policies[name].policy.brought])
            for name, resumed in (yield from self._resumed_in({n: policies[n].policy for n in fresh})).items():
                unseen[name] = msgspec.structs.replace(unseen.get(name, Unseen()), resumed=resumed)
            ends = yield from self._ends_of(fresh)
            for name in fresh:
                of = (told.get(name, ()), unseen.get(name, Unseen()), ends[name], self.now, given.get(name, ()))
                self._recents[name] = Recent(policies[name].policy, *of)
            yield from self._load_lanes([name for name in fresh if self._recents[name].unseen.events <= MANY])
            yield from self._hold({name: policies[name].policy for name in fresh})
        if with_lanes:
            yield from self._load_lanes(known)
        return {name: self._recents[name] for name in known}

    def _given_in(self, queues: Sequence[str]) -> Procedure[dict[str, list[tuple[Mapping[str, float], int]]]]:
        """By queue, the numbers that unseen jobs brought along."""
        found: dict[str, list[tuple[Mapping[str, float], int]]] = {}
        for name, text, given_by in (yield query("select_unseen_given", queues, self.now)) if queues else ():
            found.setdefault(name, []).append((decode_given(text) or {}, given_by))
        return found

    def _resumed_in(self, policies: Mapping[str, Policy]) -> Procedure[dict[str, dict[Key, int]]]:
        """By queue and key of its sequence, how many jobs had kept their place in it until now."""
        sequences = {name: policy.sequence.limit.by for name, policy in policies.items() if policy.sequence}
        found: dict[str, dict[Key, int]] = {name: {} for name in sequences}
        for name, priority, keys, count in (
            (yield query("select_resumed", list(sequences), self.now)) if sequences else ()
        ):
            key = select(sequences[name], decode_keys(keys), priority)
            found[name][key] = found[name].get(key, 0) + count
        return found

    def _load_lanes(self, queues: Sequence[str]) -> Procedure[None]:
        if fresh := [name for name in queues if self._recents[name].lanes is None]:
            found = dict(map(tuple, (yield query("select_unseen_lanes", fresh, self.now))))
            for name in fresh:
                self._recents[name].lanes = decode_lanes(found[name]) if name in found else []

    def _ends_of(self, queues: Sequence[str]) -> Procedure[dict[str, Ends]]:
        """Claims that have ended and that no claim has seen."""
        if fresh := [name for name in queues if name not in self._ends]:
            self._ends |= yield from self._select_ends(fresh)
        return {name: self._ends[name] for name in queues}

    def _select_ends(self, queues: Sequence[str]) -> Procedure[dict[str, Ends]]:
        releases: dict[str, list[Release]] = {}
        since: dict[str, Instant] = {}
        for name, applied_at, lane, *counts in (yield query("select_pending_releases", list(queues))):
            since[name] = applied_at
            lane = lane if isinstance(lane, bytes) else bytes.fromhex(lane)
            releases.setdefault(name, []).append(Release(lane, *counts))
        if not releases:
            return dict.fromkeys(queues, Ends())
        tails = yield from self.tails(releases)
        asked = {(name, release.lane) for name, each in releases.items() for release in each}
        others = [each for each in asked if each[1] not in tails[each[0]].lanes]
        lanes: dict[bytes, LaneKeys] = {
            lane: (decode_keys(keys), priority)
            for lane, priority, keys in (yield query("select_keys_of_lanes", *_in_step(others)))
        }
        changed = [row for name, lane in asked if (row := tails[name].lanes.get(lane)) is not None]
        lanes |= {row.id: (row.keys, row.priority) for row in changed}
        return {
            name: Ends(each, {one.lane: lanes[one.lane] for one in each if one.lane in lanes}, since.get(name, 0))
            for name in queues
            for each in (releases.get(name, []),)
        }

    def _hold(self, policies: Mapping[str, Policy]) -> Procedure[None]:
        """Find out whom limits hold back now, where the last claim has left it otherwise: see `held_now`."""
        limited = {
            name: policy
            for name, policy in policies.items()
            if policy.keyed_limits or policy.overrides.pauses or self._ended[name]
        }
        if not limited:
            return
        tails = yield from self.tails(limited)
        named = {
            n: gates_in_doubt(policy, self._recents[n].ends, self._ended[n], self._recents[n].unseen.resumed)
            for n, policy in limited.items()
        }
        for name, places in (yield from self._shared_in_use(limited)).items():
            named[name] |= {limited[name].gate_of(*each): each for each in places}
        for name, each in (yield from self._rung(limited)).items():
            named[name] |= each
        brought = {name: self._brought_by_key(policy) for name, policy in limited.items()}
        rows: dict[str, dict[bytes, GateRow]] = {name: {} for name in limited}
        for name, *row in (yield from self._stored_in_doubt(limited)):
            if (gate := _gate(row)).id not in tails[name].gates:
                rows[name][gate.id] = gate
        for name, tail in ((name, tails[name]) for name in limited):
            changed = [gate for gate in tail.gates.values() if gate is not None]
            rows[name] |= {g.id: g for g in changed if is_in_doubt(g, self.now) or g.limit in brought[name]}
        may_stop = [name for name, policy in limited.items() if self._recents[name].may_be_stopped(policy)]
        yield from self._load_lanes(may_stop)
        for name in may_stop:
            named[name] |= holding(limited[name], self._recents[name].stopped(limited[name]))
        owners = {gate: name for name, gates in named.items() for gate in gates}
        for gate in (yield from self._gates_left({name: list(gates) for name, gates in named.items()})):
            rows[owners[gate.id]][gate.id] = gate
        for name, policy in limited.items():
            places = [
                (bound, tuple(row.key))
                for row in rows[name].values()
                if (bound := policy.bound_named(row.limit)) is not None
            ]
            named[name] |= holding(policy, places)
        came = yield from self._came_to({name: gates.values() for name, gates in named.items()})
        for name, policy in limited.items():
            recent, wanted = self._recents[name], named[name].values()
            shared, freed = yield from self._shared_behind(wanted)
            ends = msgspec.structs.replace(recent.ends, shared=freed)
            board = board_now(policy, self.now, rows[name].values(), wanted, shared, ends, came[name])
            recent.hold(held_now(board, named[name]))

    def _came_to(self, wanted: Mapping[str, Iterable[Wanted]]) -> Procedure[dict[str, dict[bytes, Came]]]:
        """By queue and gate, what unseen arrivals tell these. The unseen lanes are looked up only where one of these
        hears of them."""
        told = {n: [each for each in several if self._recents[n].tells(each[0])] for n, several in wanted.items()}
        yield from self._load_lanes(
            [n for n, several in told.items() if any(self._recents[n].needs_lanes(bound) for bound, _ in several)]
        )
        policies = yield from self.policies()
        return {
            name: {policies[name].policy.gate_of(*each): self._recents[name].came_to(*each) for each in several}
            for name, several in told.items()
        }

    def _brought_by_key(self, policy: Policy) -> dict[str, BoundLimit]:
        """By name, the limits of keys whose numbers unseen jobs may have brought."""
        is_brought = bool(self._recents[policy.queue].given)
        return {bound.name: bound for bound in policy.keyed_limits if is_brought and bound.from_job is not None}

    def _shared_in_use(self, policies: Mapping[str, Policy]) -> Procedure[dict[str, list[Wanted]]]:
        """By queue, the gates of keys that are behind shared ones in use."""
        bounds = {
            name: {bound.name: bound for bound in policy.keyed_limits if bound.is_shared}
            for name, policy in policies.items()
            if policy.keyed_shared_limits
        }
        if not bounds:
            return {}
        names = sorted({bound.limit.name or "" for each in bounds.values() for bound in each.values()})
        found = [
            (limit, tuple(decode_key(key))) for limit, key in (yield query("select_shared_in_use", names, self.now))
        ]
        return {
            name: [(each[limit], key) for limit, key in found if limit in each and key] for name, each in bounds.items()
        }

    def _rung(self, policies: Mapping[str, Policy]) -> Procedure[dict[str, dict[bytes, Wanted]]]:
        """By queue and id, gates that other queues have left room at since somebody began to wait there."""
        sharing = [name for name, policy in policies.items() if policy.keyed_shared_limits]
        rung: dict[str, list[bytes]] = {}
        for name, gate in (yield query("select_rung", sharing)) if sharing else ():
            rung.setdefault(name, []).append(gate)
        owners = {gate: name for name, gates in rung.items() for gate in gates}
        found: dict[str, dict[bytes, Wanted]] = {}
        for row in (yield from self._gates_left(rung)):
            if (bound := policies[owners[row.id]].bound_named(row.limit)) is not None:
                found.setdefault(owners[row.id], {})[row.id] = (bound, tuple(row.key))
        return found

    def _stored_in_doubt(self, policies: Mapping[str, Policy]) -> Procedure[Sequence[Any]]:
        """Gates of the tables that `is_in_doubt`, or whose numbers unseen jobs may have brought. Of those that are in
        use, and at which nobody is known to wait, only those of keys of which jobs are waiting: others hold nobody
        back. What queues share is in use elsewhere: see `_shared_in_use`."""
        asked = [
            (name, bound.name, key_scope(bound.limit.by), bound.name in self._brought_by_key(policy))
            for name, policy in policies.items()
            for bound in policy.keyed_limits
            if not bound.limit.is_of_producers
        ] or [(name, "", "", False) for name in policies]
        recents = [self._recents[name] for name in policies]
        keys: list[str] | None = None
        if all(recent.lanes is not None and len(recent.places) <= MANY for recent in recents):
            scopes = {bound.limit.by for policy in policies.values() for bound in policy.keyed_limits}
            named = [key for recent in recents for _, key in recent.places]
            named += [key for recent in recents for by in scopes for key in recent.arrived(by)]
            keys = sorted(set(map(stats_rows.key_text, named)))
        found: Sequence[Any] = yield query("select_gates_in_doubt", Rows(asked, 4), self.now, keys)
        return found

    def tails(self, queues: Collection[str]) -> Procedure[dict[str, Tail]]:
        """What the tables of these queues may not hold."""
        if fresh := [name for name in queues if name not in self._tails]:
            deltas = _by_name((yield query("select_tails", fresh)), lambda delta: delta)
            self._tails |= {name: Tail(deltas.get(name, ())) for name in fresh}
        return {name: self._tails[name] for name in queues}

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
        return sorted([*map(_lane, found), *changed], key=lambda lane: (-lane.ready, lane.rank))[:limit]

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
        board = (yield from self.boards({queue: policy}, {queue: gates.values()}))[queue]
        return [LaneNow(lane, first_shut(board, lane.priority, lane.keys)) for lane in lanes]

    def lanes_in(self, flows: Mapping[str, Iterable[Key]]) -> Procedure[dict[tuple[str, Key], list[LaneTally] | None]]:
        """The jobs that wait in these flows now, by lane, each flow by its queue and key; `None`: in many lanes."""
        policies, tails = (yield from self.policies()), (yield from self.tails(list(flows)))
        recents = yield from self._recents_of(list(flows), with_lanes=True)
        places = {policies[name].policy.flow_of_key(key): (name, key) for name, keys in flows.items() for key in keys}
        found: dict[tuple[str, Key], list[LaneTally]] = {place: [] for place in places.values()}
        stored = yield query(
            "select_lanes_of_flows", [name for name, _ in places.values()], list(places), LANES_EACH + 1
        )
        many = {places[flow] for flow, count in Counter(row[1] for row in stored).items() if count > LANES_EACH}
        rows = [row for row in map(_lane, stored) if row.id not in tails[places[row.flow][0]].lanes]
        rows += [row for tail in tails.values() for row in tail.lanes.values() if row is not None]
        for row in rows:
            if row.flow in places:
                found[places[row.flow]].append(LaneTally(row.keys, row.priority, row.ready))
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
        boards = yield from self.boards(policies, wanted)
        rooms = {name: [gauge.room for gauge in gauges(boards[name], asked)] for name, asked in wanted.items()}
        return {
            each.queue: each.running + min(each.ready - each.held_jobs, *rooms[each.queue], each.ready)
            for each in (yield from self.survey(list(policies)))
        }

    def find_jobs(self, wanted: JobFilter, limit: int) -> Procedure[list[JobRecord]]:
        """The newest jobs that fit."""
        page = yield from find_jobs(wanted, None, limit)
        return page.jobs

    def scheduled_by_lane(self, queues: Sequence[str]) -> Procedure[LanesCounted]:
        """The jobs that are due next, up to `COUNTED_AT_MOST`, by lane."""
        found = yield query("select_scheduled_by_lane", list(queues), COUNTED_AT_MOST, self.now)
        lanes = [LaneTally(decode_keys(keys), priority, count) for priority, keys, count in found]
        return LanesCounted(lanes, sum(lane.arrived for lane in lanes) < COUNTED_AT_MOST)

    def boards(
        self, policies: Mapping[str, Policy], wanted: Mapping[str, Iterable[Wanted]]
    ) -> Procedure[dict[str, Board]]:
        """By queue, its board as it is now, as far as these gates are concerned."""
        asked = {name: list(each) for name, each in wanted.items()}
        if not any(asked.values()):
            return {name: board_now(policies[name], self.now, ()) for name in asked}
        ends = yield from self._ends_of(list(asked))
        hearing = {name: each for name, each in asked.items() if any(hears_arrivals(bound) for bound, _ in each)}
        recents = yield from self._recents_of(list(hearing))
        came = yield from self._came_to({name: hearing[name] for name in recents})
        gates = {name: [policies[name].gate_of(*each) for each in several] for name, several in asked.items()}
        left = yield from self._gates_left(gates)
        shared, freed = yield from self._shared_behind(each for several in asked.values() for each in several)
        boards = {}
        for name, several in asked.items():
            of = msgspec.structs.replace(ends[name], shared=freed) if freed else ends[name]
            boards[name] = board_now(policies[name], self.now, left, several, shared, of, came.get(name, {}))
        return boards

    def _shared_behind(self, wanted: Iterable[Wanted]) -> Procedure[tuple[list[SharedGateRow], list[SharedRelease]]]:
        """The gates that queues share behind these, and what has ended there that no claim has folded."""
        shared = [each for each in wanted if each[0].is_shared]
        if not shared:
            return [], []
        known: Found = yield on_board("", "ask", Ask(shared=tuple(shared_gates_of(shared))))
        freed = yield query("select_shared_ends", sorted({bound.limit.name or "" for bound, _ in shared}))
        return known.shared, [SharedRelease(*row) for row in freed]

    def _gates_left(self, gates: Mapping[str, Sequence[bytes]]) -> Procedure[list[GateRow]]:
        """The same as the last claims have left them."""
        tails = yield from self.tails(gates)
        wanted = [(name, gate) for name, named in gates.items() for gate in named]
        others = [each for each in wanted if each[1] not in tails[each[0]].gates]
        stored = (yield query("select_gates_named", *_in_step(others))) if others else ()
        changed = [row for name, gate in wanted if (row := tails[name].gates.get(gate)) is not None]
        return [*map(_gate, stored), *changed]

    def weights_named(self, flows: Mapping[str, Sequence[bytes]]) -> Procedure[dict[bytes, FlowWeight]]:
        """The weights of flows by their ids, where they are known."""
        tails = yield from self.tails(flows)
        wanted = [(name, flow) for name, named in flows.items() for flow in named]
        others = [each for each in wanted if each[1] not in tails[each[0]].flows]
        stored = (yield query("select_weights_named", *_in_step(others))) if others else ()
        changed = [row for name, flow in wanted if (row := tails[name].flows.get(flow)) is not None]
        numbers = [*stored, *((row.id, row.weight, row.given_by) for row in changed)]
        weights: dict[bytes, tuple[float, int]] = {flow: (weight, given_by) for flow, weight, given_by in numbers}
        for flow, brought in (yield from self._weights_brought([name for name in flows if flows[name]])).items():
            weights[flow] = max(brought, weights.get(flow, brought), key=lambda each: each[1])
        return {flow: FlowWeight(weight, given_by > 0) for flow, (weight, given_by) in weights.items()}

    def _weights_brought(self, queues: Collection[str]) -> Procedure[dict[bytes, tuple[float, int]]]:
        """By flow, the weights that unseen jobs have brought."""
        policies = yield from self.policies()
        weighed = {n: p for n in queues if n in policies and WEIGHT in (p := policies[n].policy).brought and p.fair}
        recents = yield from self._recents_of(list(weighed))
        recents = {name: recent for name, recent in recents.items() if recent.given}
        yield from self._load_lanes(list(recents))
        return {
            weighed[name].flow_of_key(key): brought
            for name, recent in recents.items()
            for key, brought in recent.brought(WEIGHT, weighed[name].fair_by).items()
        }

    def next_jobs(self, queue: str, keys: Mapping[str, str | None], limit: int = 20) -> Procedure[list[JobRecord]]:
        """Ready jobs of one flow of a queue (or, without `Fair`, of the whole) in the order in which it would start
        them if nothing held it back: its lanes by the rank of their heads, each from its floor on."""
        loaded = yield on_board(queue, "load")
        policy, board = loaded.policy, loaded.board
        flow = policy.flow_of(int(keys.get("priority") or 0), keys)
        arrivals = [bell for bell in loaded.arrivals if policy.flow_of(bell.priority, bell.keys) == flow]
        all_forced: list[Forced] = yield on_board(queue, "forced", limit)
        named = {bell.lane for bell in arrivals} | {each.lane for each in all_forced}
        known = yield from _asked(queue, board.find(flows=[flow], lanes=sorted(named)))
        lanes = [lane.row() for lane in board.lanes.values() if lane.flow.id == flow]
        its_own = {lane.id for lane in lanes} | {bell.lane for bell in arrivals}
        forced = [each for each in all_forced if each.lane in its_own]
        found = known.flows[0] if known.flows else None
        heads = yield from _asked(queue, upcoming(policy, self.now, found, lanes, arrivals, forced, limit))
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


def _asked(queue: str, asking: Generator[Ask, Found, S]) -> Procedure[S]:
    """Let whoever asks the tables come to its result. Lanes of a flow are those that are parked as well."""
    try:
        ask = next(asking)
        while True:
            lanes: list[LaneRow] = []
            for flow, count in ask.ready:
                lanes += map(_lane, (yield Some("select_lanes_of_flow", (flow,), count, ask.but_not[1])))
            found: Found = yield on_board(queue, "ask", msgspec.structs.replace(ask, ready=[], but_not=([], [], [])))
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
    return row[0], stats_rows.key_figures(row[1:])


def _figures(rows: Iterable[Sequence[Any]]) -> dict[str, list[KeyFigures]]:
    return _by_name(((row[0], row[1:]) for row in rows), stats_rows.key_figures)


def _lane(row: Sequence[Any]) -> LaneRow:
    return LaneRow(row[0], row[1], row[2], decode_keys(row[3]), *row[4:])


def _gate(row: Sequence[Any]) -> GateRow:
    return GateRow(row[0], row[1], decode_key(row[2]), *row[3:])


def _in_step(wanted: Sequence[tuple[str, bytes]]) -> tuple[list[str], list[bytes]]:
    return [queue for queue, _ in wanted], [each for _, each in wanted]
